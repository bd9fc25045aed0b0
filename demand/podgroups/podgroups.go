// Package podgroups knows the PodGroup objects of a cluster: Coscheduling's (scheduling.x-k8s.io/v1alpha1) and, where the
// API server serves it, the in-tree one (scheduling.k8s.io/v1alpha2). Neither API has to exist: each is watched once
// discovery shows it, and until then its groups are unknown.
//
// It reads only, and never waits for the API server when it is asked. Start reading at Cache.
package podgroups

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/demand"
)

// +kubebuilder:rbac:groups=scheduling.x-k8s.io,resources=podgroups,verbs=list;watch
// +kubebuilder:rbac:groups=scheduling.k8s.io,resources=podgroups,verbs=list;watch

var (
	// Coscheduling is the PodGroup of sigs.k8s.io/scheduler-plugins, which a pod names by a label.
	Coscheduling = schema.GroupVersionResource{Group: "scheduling.x-k8s.io", Version: "v1alpha1", Resource: "podgroups"}
	// InTree is the PodGroup that pod.spec.schedulingGroup names. Its API is off by default in Kubernetes 1.36.
	InTree = schema.GroupVersionResource{Group: "scheduling.k8s.io", Version: "v1alpha2", Resource: "podgroups"}
)

// discoveryPeriod is how often an API that is not there yet is looked for.
const discoveryPeriod = 30 * time.Second

// KeyOf is the pod's group as <API>/<namespace>/<name>; "" for a pod that names none. Pods of one key are one gang.
func KeyOf(pod *corev1.Pod) string {
	if name := pod.Labels[capacity.LabelPodGroup]; name != "" {
		return Coscheduling.Group + "/" + pod.Namespace + "/" + name
	}
	if g := pod.Spec.SchedulingGroup; g != nil && g.PodGroupName != nil && *g.PodGroupName != "" {
		return InTree.Group + "/" + pod.Namespace + "/" + *g.PodGroupName
	}
	return ""
}

// Cache holds what the cluster's PodGroups say. Make one with New; it fills while Run runs.
type Cache struct {
	client    dynamic.Interface
	discovery discovery.ServerResourcesInterface
	logger    klog.Logger
	stores    map[string]*atomic.Pointer[cache.Store] // by API group
	changed   func(key string)                        // nil: nobody wants to know
}

var _ demand.Groups = &Cache{}

// New returns an empty Cache that reads through a copy of cfg, in JSON, whatever cfg's own content type.
func New(cfg *rest.Config, logger klog.Logger) (*Cache, error) {
	own := rest.CopyConfig(cfg)
	own.ContentType, own.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	own.QPS, own.Burst, own.RateLimiter = 5, 10, nil
	client, err := dynamic.NewForConfig(own)
	if err != nil {
		return nil, fmt.Errorf("building a client of PodGroups: %w", err)
	}
	disco, err := discovery.NewDiscoveryClientForConfig(own)
	if err != nil {
		return nil, fmt.Errorf("building a discovery client: %w", err)
	}
	return NewForClients(client, disco, logger), nil
}

// NewForClients is New for clients that exist already.
func NewForClients(
	client dynamic.Interface, disco discovery.ServerResourcesInterface, logger klog.Logger,
) *Cache {
	return &Cache{client: client, discovery: disco, logger: logger, stores: map[string]*atomic.Pointer[cache.Store]{
		Coscheduling.Group: {}, InTree.Group: {},
	}}
}

// OnChange sets what is called, with the key of KeyOf, when a group appears that was not known, or says something else of its
// members. GroupOf gives the news by then. It is called in the goroutine that fills the Cache, and has to be set before Run.
func (c *Cache) OnChange(changed func(key string)) { c.changed = changed }

// Run watches both APIs, as soon as they exist, until ctx ends.
func (c *Cache) Run(ctx context.Context) {
	var watchers wait.Group
	for _, gvr := range []schema.GroupVersionResource{Coscheduling, InTree} {
		watchers.StartWithContext(ctx, func(ctx context.Context) { c.watch(ctx, gvr) })
	}
	watchers.Wait()
}

func (c *Cache) watch(ctx context.Context, gvr schema.GroupVersionResource) {
	err := wait.PollUntilContextCancel(ctx, discoveryPeriod, true, func(context.Context) (bool, error) {
		return c.served(gvr), nil
	})
	if err != nil {
		return // ctx ended
	}
	list := cache.ToListWatcherWithWatchListSemantics(listWatch(c.client.Resource(gvr)), c.client)
	store, controller := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: list,
		ObjectType:    &unstructured.Unstructured{},
		Handler:       c.handler(gvr.Group),
		Transform:     strip,
	})
	c.stores[gvr.Group].Store(&store)
	c.logger.Info("Watching PodGroups", "resource", gvr)
	controller.RunWithContext(ctx)
}

// handler tells of groups that came or changed. Most updates are about a group's status, which is nobody's business here. A
// group that goes away takes nothing back: what is known of its members stays true.
func (c *Cache) handler(group string) cache.ResourceEventHandler {
	tell := func(u *unstructured.Unstructured) {
		if c.changed != nil {
			c.changed(group + "/" + u.GetNamespace() + "/" + u.GetName())
		}
	}
	return cache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) {
			if u, ok := obj.(*unstructured.Unstructured); ok {
				tell(u)
			}
		},
		UpdateFunc: func(before, after any) {
			a, okA := before.(*unstructured.Unstructured)
			b, okB := after.(*unstructured.Unstructured)
			if okA && okB && FactsOf(a) != FactsOf(b) {
				tell(b)
			}
		},
	}
}

// served reports whether the API server has the resource. Any doubt means not yet.
func (c *Cache) served(gvr schema.GroupVersionResource) bool {
	resources, err := c.discovery.ServerResourcesForGroupVersion(gvr.GroupVersion().String())
	if err != nil {
		if !apierrors.IsNotFound(err) && !errors.Is(err, context.Canceled) {
			c.logger.V(2).Info("Could not look for PodGroups; trying again", "resource", gvr, "err", err)
		}
		return false
	}
	for i := range resources.APIResources {
		if resources.APIResources[i].Name == gvr.Resource {
			return true
		}
	}
	return false
}

// GroupOf implements demand.Groups.
func (c *Cache) GroupOf(pod *corev1.Pod) (demand.GroupFacts, bool) {
	if name := pod.Labels[capacity.LabelPodGroup]; name != "" {
		if u := c.get(Coscheduling.Group, pod.Namespace, name); u != nil {
			return FactsOf(u), true
		}
		return demand.GroupFacts{}, false
	}
	if g := pod.Spec.SchedulingGroup; g != nil && g.PodGroupName != nil {
		if u := c.get(InTree.Group, pod.Namespace, *g.PodGroupName); u != nil {
			return FactsOf(u), true
		}
	}
	return demand.GroupFacts{}, false
}

func (c *Cache) get(group, namespace, name string) *unstructured.Unstructured {
	store := c.stores[group].Load()
	if store == nil {
		return nil
	}
	obj, found, err := (*store).GetByKey(namespace + "/" + name)
	if err != nil || !found {
		return nil
	}
	u, _ := obj.(*unstructured.Unstructured)
	return u
}

// FactsOf reads a PodGroup of either API. A field that is missing or of the wrong type says nothing.
func FactsOf(u *unstructured.Unstructured) demand.GroupFacts {
	var facts demand.GroupFacts
	switch u.GroupVersionKind().Group {
	case Coscheduling.Group:
		facts.MinCount = int32Field(u, "spec", "minMember")
	case InTree.Group:
		facts.MinCount = int32Field(u, "spec", "schedulingPolicy", "gang", "minCount")
		topology, _, _ := unstructured.NestedSlice(u.Object, "spec", "schedulingConstraints", "topology")
		for _, t := range topology {
			if m, ok := t.(map[string]any); ok && facts.TopologyKey == "" {
				facts.TopologyKey, _ = m["key"].(string)
			}
		}
	}
	for _, name := range []string{capacity.AnnotationRequiredTopology, demand.AnnotationSameTopology} {
		if key := u.GetAnnotations()[name]; key != "" {
			facts.TopologyKey = key
		}
	}
	return facts
}

func int32Field(u *unstructured.Unstructured, path ...string) int32 {
	v, _, _ := unstructured.NestedInt64(u.Object, path...)
	if v < 0 || v > 1<<31-1 {
		return 0
	}
	return int32(v)
}

// strip keeps of a PodGroup what FactsOf reads.
func strip(obj any) (any, error) {
	u, ok := obj.(*unstructured.Unstructured)
	if !ok {
		return obj, nil
	}
	u.SetManagedFields(nil)
	delete(u.Object, "status")
	return u, nil
}
