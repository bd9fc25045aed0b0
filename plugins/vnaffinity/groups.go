package vnaffinity

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/wire"
)

// +kubebuilder:rbac:groups=loadbalance.k8s.io,resources=virtualnodeslices;watchgroups,verbs=list;watch

// A slice is what the plugin keeps of a member's VirtualNodeSlice.
type slice struct {
	owned, incoming, draining sharding.Set
	// weight is how many Virtual Nodes the member owns or is being given. What it is giving up is not its any more.
	weight  int64
	leaving bool
}

// groups knows the WatchGroups and what their members own, as far as the API server has told. An API server without these
// kinds has no groups.
type groups struct {
	logger logr.Logger

	mu           sync.RWMutex
	slices       map[types.NamespacedName]map[string]slice // by group and member
	virtualNodes map[types.NamespacedName]int              // V by group
	// changed is called after a change of what members of the group weigh.
	changed []func(group types.NamespacedName)
}

func newGroups(logger logr.Logger) *groups {
	return &groups{
		logger:       logger,
		slices:       map[types.NamespacedName]map[string]slice{},
		virtualNodes: map[types.NamespacedName]int{},
	}
}

// onChange registers f. It is called without a lock, and before watch only.
func (g *groups) onChange(f func(group types.NamespacedName)) { g.changed = append(g.changed, f) }

// slice returns what is known of a member.
func (g *groups) slice(group types.NamespacedName, member string) (slice, bool) {
	g.mu.RLock()
	defer g.mu.RUnlock()
	s, ok := g.slices[group][member]
	return s, ok
}

// sharesOf returns how many Virtual Nodes each member of the group owns or is being given.
func (g *groups) sharesOf(group types.NamespacedName) map[string]int64 {
	g.mu.RLock()
	defer g.mu.RUnlock()
	shares := make(map[string]int64, len(g.slices[group]))
	for member, s := range g.slices[group] {
		shares[member] = s.weight
	}
	return shares
}

// ownersOf returns the members that Virtual Nodes belong to. One that is on its way belongs to the member it goes to: a pod
// outlives a handoff. What nobody owns is missing.
func (g *groups) ownersOf(group types.NamespacedName) map[sharding.VirtualNode]string {
	g.mu.RLock()
	defer g.mu.RUnlock()
	members := slices.Sorted(maps.Keys(g.slices[group]))
	owners := map[sharding.VirtualNode]string{}
	for _, part := range []func(slice) sharding.Set{
		func(s slice) sharding.Set { return s.incoming },
		func(s slice) sharding.Set { return s.owned },
		func(s slice) sharding.Set { return s.draining },
	} {
		for _, member := range members {
			for vn := range part(g.slices[group][member]).All() {
				if _, ok := owners[vn]; !ok {
					owners[vn] = member
				}
			}
		}
	}
	return owners
}

// virtualNodesOf returns V; 0 while the group is not known.
func (g *groups) virtualNodesOf(group types.NamespacedName) int {
	g.mu.RLock()
	defer g.mu.RUnlock()
	return g.virtualNodes[group]
}

// setSlice takes a slice over. One that cannot be read is as if it were not there, and nothing else is lost.
func (g *groups) setSlice(o *lbv1alpha1.VirtualNodeSlice) {
	read, err := wire.Slice(o)
	if err != nil {
		g.logger.Error(err, "Cannot read what a member owns; it counts as one that has nothing yet")
		g.deleteSlice(o)
		return
	}
	s := slice{
		owned: read.Owned, incoming: joined(read.Incoming), draining: joined(read.Draining), leaving: read.Status.Leaving,
	}
	s.weight = int64(s.owned.Union(s.incoming).Len())
	group := types.NamespacedName{Namespace: o.Namespace, Name: o.Spec.WatchGroup}
	g.mu.Lock()
	if g.slices[group] == nil {
		g.slices[group] = map[string]slice{}
	}
	before := g.slices[group][o.Spec.Member]
	g.slices[group][o.Spec.Member] = s
	g.mu.Unlock()
	if before.weight != s.weight || before.leaving != s.leaving {
		g.tell(group)
	}
}

func (g *groups) deleteSlice(o *lbv1alpha1.VirtualNodeSlice) {
	group := types.NamespacedName{Namespace: o.Namespace, Name: o.Spec.WatchGroup}
	g.mu.Lock()
	_, known := g.slices[group][o.Spec.Member]
	delete(g.slices[group], o.Spec.Member)
	if len(g.slices[group]) == 0 {
		delete(g.slices, group)
	}
	g.mu.Unlock()
	if known {
		g.tell(group)
	}
}

func (g *groups) tell(group types.NamespacedName) {
	for _, f := range g.changed {
		f(group)
	}
}

func joined(orders []sharding.Order) sharding.Set {
	var set sharding.Set
	for _, o := range orders {
		set = set.Union(o.VNs)
	}
	return set
}

func (g *groups) setGroup(o *lbv1alpha1.WatchGroup, exists bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	key := types.NamespacedName{Namespace: o.Namespace, Name: o.Name}
	if !exists {
		delete(g.virtualNodes, key)
		return
	}
	g.virtualNodes[key] = int(o.Spec.WithDefaults().VirtualNodes)
}

// informerQPS is the rate limit of the informers' client. They list and watch, which is few and long requests.
const informerQPS = 10

// watch returns the informers to run that the args need.
func (g *groups) watch(cfg *rest.Config, args *configv1alpha1.VNAffinityArgs) ([]func(context.Context), error) {
	client, err := restClient(cfg)
	if err != nil {
		return nil, err
	}
	// Members may be pods of any namespace; Objects has one group.
	namespace := ""
	if args.Members == nil {
		namespace = args.Objects.Namespace
	}
	var run []func(context.Context)
	near := args.Objects != nil && args.Objects.Mode == configv1alpha1.ObjectsNearOwners
	if args.Members != nil || near {
		run = append(run, informer(client, "virtualnodeslices", namespace, g.setSlice, g.deleteSlice))
	}
	if near {
		run = append(run, informer(client, "watchgroups", args.Objects.Namespace,
			func(o *lbv1alpha1.WatchGroup) { g.setGroup(o, true) },
			func(o *lbv1alpha1.WatchGroup) { g.setGroup(o, false) }))
	}
	return run, nil
}

// informer returns what runs an informer that tells which objects are there.
func informer[T any, P interface {
	*T
	runtime.Object
}](client rest.Interface, resource, namespace string, set, remove func(P)) func(context.Context) {
	_, controller := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.NewListWatchFromClient(client, resource, namespace, fields.Everything()),
		ObjectType:    P(new(T)),
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc:    func(obj any) { set(obj.(P)) },
			UpdateFunc: func(_, obj any) { set(obj.(P)) },
			DeleteFunc: func(obj any) {
				if tombstone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
					obj = tombstone.Obj
				}
				if o, ok := obj.(P); ok {
					remove(o)
				}
			},
		},
	})
	return controller.RunWithContext
}

// restClient returns a client of group loadbalance.k8s.io for cfg, which is not changed. It speaks JSON whatever cfg says,
// because custom resources know no protobuf.
func restClient(cfg *rest.Config) (rest.Interface, error) {
	scheme := runtime.NewScheme()
	if err := lbv1alpha1.AddToScheme(scheme); err != nil {
		return nil, fmt.Errorf("building the scheme of %s: %w", lbv1alpha1.GroupVersion, err)
	}
	own := rest.CopyConfig(cfg)
	gv := lbv1alpha1.GroupVersion
	own.GroupVersion = &gv
	own.APIPath = "/apis"
	own.ContentType = runtime.ContentTypeJSON
	own.AcceptContentTypes = runtime.ContentTypeJSON
	own.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	own.QPS, own.Burst, own.RateLimiter = informerQPS, informerQPS, nil
	if own.UserAgent == "" {
		own.UserAgent = rest.DefaultKubernetesUserAgent()
	}
	client, err := rest.RESTClientFor(own)
	if err != nil {
		return nil, fmt.Errorf("building a client of %s: %w", lbv1alpha1.GroupVersion, err)
	}
	return client, nil
}
