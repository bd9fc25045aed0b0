package sharded

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/wire"
)

// A Group makes a manager a member of a WatchGroup: NewCache and NewClient go into its options, ControllerManagedBy builds
// its controllers. A Group serves one manager.
type Group struct {
	options Options
	key     client.ObjectKey
	log     logr.Logger

	// What NewCache makes.
	member     *member
	membership *Membership   // set if the process has caches of its own
	api        client.Client // of Leases and slices; no limiter stands before it
	slices     cache.Cache   // of the member's slice
	limiter    flowcontrol.RateLimiter
	handoff    lbv1alpha1.HandoffMode

	mu     sync.Mutex
	deps   map[sharding.Resource]map[sharding.Resource]bool
	fixed  bool // deps have been used
	leave  chan struct{}
	left   chan struct{}
	asking sync.Once
}

// New returns the group of a process. Faults in the options, and a WatchGroup that does not exist, are reported by
// NewCache, and so by ctrl.NewManager.
func New(o Options) *Group {
	o = o.withDefaults()
	return &Group{
		options: o,
		key:     client.ObjectKey{Namespace: o.Namespace, Name: o.WatchGroup},
		log:     ctrl.Log.WithName("sharded").WithValues("watchGroup", o.WatchGroup, "member", o.Member),
		deps:    make(map[sharding.Resource]map[sharding.Resource]bool),
		leave:   make(chan struct{}),
		left:    make(chan struct{}),
	}
}

// groupScheme holds the kinds that a member itself reads and writes.
func groupScheme() (*runtime.Scheme, error) {
	s := runtime.NewScheme()
	return s, errors.Join(lbv1alpha1.AddToScheme(s), coordinationv1.AddToScheme(s))
}

// NewCache is for ctrl.Options. It reads the WatchGroup, once.
func (g *Group) NewCache(config *rest.Config, opts cache.Options) (cache.Cache, error) {
	if err := g.options.validate(); err != nil {
		return nil, err
	}
	if g.member != nil {
		return nil, fmt.Errorf("WatchGroup %s: a sharded.Group serves one manager only", g.key)
	}
	if opts.HTTPClient == nil {
		var err error
		if opts.HTTPClient, err = rest.HTTPClientFor(config); err != nil {
			return nil, err
		}
	}
	if opts.Mapper == nil {
		var err error
		if opts.Mapper, err = apiutil.NewDynamicRESTMapper(config, opts.HTTPClient); err != nil {
			return nil, err
		}
	}
	if opts.Scheme == nil {
		return nil, errors.New("sharded cache: Options.Scheme is nil")
	}
	free := rest.CopyConfig(config) // Leases, handoffs and watches do not wait for the budget of reconciles
	free.RateLimiter, free.QPS = nil, -1
	group, err := g.connect(free, opts)
	if err != nil {
		return nil, err
	}
	by, err := mappingOf(group.Spec)
	if err != nil {
		return nil, fmt.Errorf("WatchGroup %s: %w", g.key, err)
	}
	kinds, err := g.kindsOf(free, group.Spec, by, opts)
	if err != nil {
		return nil, err
	}
	g.limiter = limiterOf(config)
	limited := rest.CopyConfig(config)
	limited.RateLimiter = g.limiter
	live, err := client.New(limited, client.Options{HTTPClient: opts.HTTPClient, Scheme: opts.Scheme, Mapper: opts.Mapper})
	if err != nil {
		return nil, fmt.Errorf("client for live reads: %w", err)
	}
	stock, err := cache.New(config, opts)
	if err != nil {
		return nil, err
	}
	spec := group.Spec.WithDefaults()
	g.handoff = spec.Handoff
	policy := wire.LeasePolicy(spec)
	if err := policy.Validate("spec.lease."); err != nil {
		return nil, fmt.Errorf("WatchGroup %s: %w", g.key, err)
	}
	g.member = newMember(memberConfig{
		id: g.options.Member, v: int(spec.VirtualNodes), mapping: by, policy: policy, clock: bootTime,
		record: g.options.Record, metrics: newMemberMetrics(g.key.Name, g.options.Member), log: g.log,
	}, kinds)
	g.member.resyncs = &resyncs{member: g.member, when: g.options.Resync, clock: clock.RealClock{}}
	return &groupCache{Cache: stock, group: g, scheme: opts.Scheme, reader: &reader{
		member: g.member, live: live, slots: make(chan struct{}, g.options.MaxLiveReads),
		refuse: g.options.UnownedReads == RefuseRead,
	}}, nil
}

// limiterOf returns the limiter of a configuration, as one for all clients made from it.
func limiterOf(config *rest.Config) flowcontrol.RateLimiter {
	switch {
	case config.RateLimiter != nil:
		return config.RateLimiter
	case config.QPS < 0:
		return flowcontrol.NewFakeAlwaysRateLimiter()
	default:
		return flowcontrol.NewTokenBucketRateLimiter(cmp.Or(config.QPS, rest.DefaultQPS), cmp.Or(config.Burst, rest.DefaultBurst))
	}
}

// connect reads the WatchGroup and prepares to watch the member's slice.
func (g *Group) connect(config *rest.Config, opts cache.Options) (*lbv1alpha1.WatchGroup, error) {
	scheme, err := groupScheme()
	if err != nil {
		return nil, err
	}
	g.api, err = client.New(config, client.Options{HTTPClient: opts.HTTPClient, Scheme: scheme, Mapper: opts.Mapper})
	if err != nil {
		return nil, fmt.Errorf("client of the group: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	group := &lbv1alpha1.WatchGroup{}
	if err := g.api.Get(ctx, g.key, group); err != nil {
		return nil, fmt.Errorf("read WatchGroup %s: %w", g.key, err)
	}
	g.slices, err = cache.New(config, g.sliceCacheOptions(scheme, opts))
	return group, err
}

// memberKey names the member's slice and its Lease.
func (g *Group) memberKey() client.ObjectKey {
	return client.ObjectKey{Namespace: g.key.Namespace, Name: lbv1alpha1.MemberName(g.key.Name, g.options.Member)}
}

// kindsOf returns the kinds of the group's resources.
func (g *Group) kindsOf(config *rest.Config, spec lbv1alpha1.WatchGroupSpec, by mapping, opts cache.Options) ([]*kind, error) {
	if len(opts.DefaultNamespaces) > 0 || opts.DefaultLabelSelector != nil || opts.DefaultFieldSelector != nil {
		return nil, errors.New("sharded cache: DefaultNamespaces, DefaultLabelSelector and DefaultFieldSelector would hide " +
			"objects of the WatchGroup from its members: set them by kind, for other kinds")
	}
	c, err := client.NewWithWatch(config, client.Options{HTTPClient: opts.HTTPClient, Scheme: opts.Scheme, Mapper: opts.Mapper})
	if err != nil {
		return nil, fmt.Errorf("client for lists and watches: %w", err)
	}
	var kinds []*kind
	for i, r := range spec.Resources {
		gr := schema.GroupResource{Group: r.Group, Resource: r.Resource}
		k, err := kindOfResource(gr, opts)
		if err != nil {
			return nil, fmt.Errorf("WatchGroup %s: spec.resources[%d]: %q: %w", g.key, i, gr, err)
		}
		if hash, ok := by.(byHash); ok && hash.ranges.Key == sharding.ShardByNamespace && !k.namespaced {
			return nil, fmt.Errorf("WatchGroup %s: spec.resources[%d]: %q is cluster-scoped: its objects have no namespace, as "+
				"spec.shardKey %q needs", g.key, i, gr, hash.ranges.Key)
		}
		k.source = clientSource{client: c, newList: listOf(opts.Scheme, k.gvk)}
		kinds = append(kinds, k)
	}
	return kinds, nil
}

// kindOfResource finds the version of a resource that the scheme knows, else the one that the API server prefers.
func kindOfResource(gr schema.GroupResource, opts cache.Options) (*kind, error) {
	served, err := opts.Mapper.KindsFor(gr.WithVersion(""))
	if err != nil {
		return nil, err
	}
	gvk := served[0]
	if i := slices.IndexFunc(served, opts.Scheme.Recognizes); i >= 0 {
		gvk = served[i]
	}
	mapping, err := opts.Mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
	if err != nil {
		return nil, err
	}
	k := &kind{resource: wire.Resource(gr), gvk: gvk, namespaced: mapping.Scope.Name() == meta.RESTScopeNameNamespace}
	transform := opts.DefaultTransform
	for obj, by := range opts.ByObject {
		own, err := apiutil.GVKForObject(obj, opts.Scheme)
		if err != nil || own.GroupKind() != gvk.GroupKind() {
			continue
		}
		if len(by.Namespaces) > 0 || by.Label != nil || by.Field != nil {
			return nil, fmt.Errorf("cache.Options.ByObject[%T]: namespaces and selectors would hide objects from the members", obj)
		}
		if by.Transform != nil {
			transform = by.Transform
		}
	}
	if transform != nil {
		k.transform = func(obj client.Object) (client.Object, error) {
			out, err := transform(obj)
			if err != nil {
				return nil, err
			}
			transformed, ok := out.(client.Object)
			if !ok {
				return nil, fmt.Errorf("transform returned a %T", out)
			}
			return transformed, nil
		}
	}
	return k, nil
}

func listOf(scheme *runtime.Scheme, gvk schema.GroupVersionKind) func() client.ObjectList {
	gvk.Kind += "List"
	if typed, err := scheme.New(gvk); err == nil {
		if _, ok := typed.(client.ObjectList); ok {
			return func() client.ObjectList {
				// New has succeeded for this kind before.
				list, _ := scheme.New(gvk)
				return list.(client.ObjectList)
			}
		}
	}
	return func() client.ObjectList {
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(gvk)
		return list
	}
}

// NewClient is for ctrl.Options, together with NewCache.
func (g *Group) NewClient(config *rest.Config, opts client.Options) (client.Client, error) {
	if g.member == nil {
		return nil, fmt.Errorf("WatchGroup %s: ctrl.Options.NewClient without its NewCache", g.key)
	}
	limited, unlimited := rest.CopyConfig(config), rest.CopyConfig(config)
	limited.RateLimiter = g.limiter
	unlimited.RateLimiter = flowcontrol.NewFakeAlwaysRateLimiter()
	if opts.HTTPClient == nil {
		var err error
		if opts.HTTPClient, err = rest.HTTPClientFor(config); err != nil {
			return nil, err
		}
	}
	reads, err := client.New(limited, opts)
	if err != nil {
		return nil, err
	}
	// The timeout goes with each request, so that the API server gives it up as well. A member that is stopped, or cut off,
	// tells nobody that it has, and a slow admission webhook would let the write land when another member is at work.
	bounded := *opts.HTTPClient
	bounded.Timeout = g.member.policy.RequestTimeout
	opts.HTTPClient = &bounded
	writer, err := client.New(unlimited, opts)
	if err != nil {
		return nil, err
	}
	return &guardedClient{Client: reads, writer: writer, group: g, limiter: g.limiter}, nil
}

// depend notes that reconciling root reads the others.
func (g *Group) depend(root *kind, reads []*kind) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.fixed {
		return fmt.Errorf("controller of %s: sharded controllers are built before the manager starts", root.resource)
	}
	if g.deps[root.resource] == nil {
		g.deps[root.resource] = make(map[sharding.Resource]bool)
	}
	for _, k := range reads {
		g.deps[root.resource][k.resource] = true
	}
	return nil
}

// dependencies returns what was noted, with every kind of the group as a key.
func (g *Group) dependencies() sharding.Dependencies {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.fixed = true
	deps := make(sharding.Dependencies)
	for _, k := range g.member.order {
		deps[k.resource] = nil
		for r := range g.deps[k.resource] {
			deps[k.resource] = append(deps[k.resource], r)
		}
		slices.Sort(deps[k.resource])
	}
	return deps
}

// Ready is a healthz.Checker: it fails until the member holds its lease and has done what its first slice asked for, again
// whenever it has lost the lease, and while it leaves.
func (g *Group) Ready(*http.Request) error {
	if g.member == nil {
		return fmt.Errorf("WatchGroup %s: %w", g.key, errNotStarted)
	}
	return g.member.serving()
}

// LeaveOn returns a context for Manager.Start that ends once the member has left the group after ctx has ended. Without
// it the member leaves too, but its controllers stop first, so that what it has stands still until others have taken over.
func (g *Group) LeaveOn(ctx context.Context) context.Context {
	out, cancel := context.WithCancel(context.WithoutCancel(ctx))
	go func() {
		<-ctx.Done()
		g.askToLeave()
		timeout := time.NewTimer(max(g.options.LeaveTimeout, 0))
		defer timeout.Stop()
		select {
		case <-g.left:
		case <-timeout.C:
		}
		cancel()
	}()
	return out
}

func (g *Group) askToLeave() { g.asking.Do(func() { close(g.leave) }) }

// RecordSnapshots records what the caches hold of what the member owns, for history.Check to compare when it is quiet.
func (g *Group) RecordSnapshots() {
	if g.member != nil {
		g.member.recordSnapshots()
	}
}
