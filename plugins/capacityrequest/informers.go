package capacityrequest

import (
	"context"
	"reflect"

	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/demand"
)

// +kubebuilder:rbac:groups=fleet.lucy.sh,namespace=fleet-system,resources=availablecapacities;upcomingnodes,verbs=list;watch

// templates is an informer of AvailableCapacity. The API server may not have the CRD, or nobody may write any: then there
// are none, and nothing is concluded from that.
type templates struct {
	store      cache.Store
	controller cache.Controller
}

// newTemplates calls changed after every change of what could be had; how many nodes there are plays no part.
func newTemplates(client rest.Interface, namespace string, changed func()) *templates {
	store, controller := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.NewListWatchFromClient(client, "availablecapacities", namespace, fields.Everything()),
		ObjectType:    &fleetv1alpha1.AvailableCapacity{},
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc:    func(any) { changed() },
			DeleteFunc: func(any) { changed() },
			UpdateFunc: func(before, after any) {
				if !sameTemplate(before, after) {
					changed()
				}
			},
		},
	})
	return &templates{store: store, controller: controller}
}

func sameTemplate(before, after any) bool {
	a, okA := before.(*fleetv1alpha1.AvailableCapacity)
	b, okB := after.(*fleetv1alpha1.AvailableCapacity)
	return okA && okB && reflect.DeepEqual(capacity.TemplateOf(a), capacity.TemplateOf(b))
}

func (t *templates) run(ctx context.Context) { t.controller.RunWithContext(ctx) }

// List returns what is cached; nil until the first list arrived.
func (t *templates) List() []*fleetv1alpha1.AvailableCapacity {
	if !t.controller.HasSynced() {
		return nil
	}
	objs := t.store.List()
	out := make([]*fleetv1alpha1.AvailableCapacity, 0, len(objs))
	for _, obj := range objs {
		if ac, ok := obj.(*fleetv1alpha1.AvailableCapacity); ok {
			out = append(out, ac)
		}
	}
	return out
}

// watchUpcomingNodes feeds the Suppressor until ctx ends.
func watchUpcomingNodes(ctx context.Context, client rest.Interface, namespace string, s *demand.Suppressor) {
	set := func(obj any) {
		if n, ok := obj.(*fleetv1alpha1.UpcomingNode); ok {
			s.SetNode(n)
		}
	}
	_, controller := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.NewListWatchFromClient(client, "upcomingnodes", namespace, fields.Everything()),
		ObjectType:    &fleetv1alpha1.UpcomingNode{},
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc:    set,
			UpdateFunc: func(_, obj any) { set(obj) },
			DeleteFunc: func(obj any) {
				if tombstone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
					obj = tombstone.Obj
				}
				if n, ok := obj.(*fleetv1alpha1.UpcomingNode); ok {
					s.DeleteNode(n.Name)
				}
			},
		},
	})
	controller.RunWithContext(ctx)
}
