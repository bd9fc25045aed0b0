package backstop

import (
	"context"
	"reflect"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/demand"
	"github.com/drover-sh/drover/demand/podgroups"
)

// judgeOf reads through the manager's cache, which starts to watch a kind when it is first asked for.
func judgeOf(reader client.Reader, namespace string) *demand.Judge {
	get := func(namespace, name string, obj client.Object) error {
		ctx, cancel := context.WithTimeout(context.Background(), readTimeout)
		defer cancel()
		// What is read here is only looked at.
		return reader.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, obj,
			&client.GetOptions{UnsafeDisableDeepCopy: ptr.To(true)})
	}
	return &demand.Judge{
		Volumes: demand.Volumes{
			Claim: func(namespace, name string) (*corev1.PersistentVolumeClaim, error) {
				obj := &corev1.PersistentVolumeClaim{}
				return obj, get(namespace, name, obj)
			},
			Volume: func(name string) (*corev1.PersistentVolume, error) {
				obj := &corev1.PersistentVolume{}
				return obj, get("", name, obj)
			},
			Class: func(name string) (*storagev1.StorageClass, error) {
				obj := &storagev1.StorageClass{}
				return obj, get("", name, obj)
			},
		},
		Templates: templatesOf(reader, namespace),
		Freshness: configv1alpha1.DefaultTemplateFreshness,
		Pods: func(namespace string) ([]*corev1.Pod, error) {
			return podsOf(reader, client.InNamespace(namespace))
		},
		Node: func(name string) (*corev1.Node, error) {
			obj := &corev1.Node{}
			return obj, get("", name, obj)
		},
		ResourceClaim: func(namespace, name string) error {
			return get(namespace, name, &resourcev1.ResourceClaim{})
		},
	}
}

// readTimeout bounds a read of the cache, which waits for the first list of a kind. Without a right to that kind the wait
// would have no end, and neither would the manager.
const readTimeout = 5 * time.Second

func podsOf(reader client.Reader, which client.ListOption) ([]*corev1.Pod, error) {
	ctx, cancel := context.WithTimeout(context.Background(), readTimeout)
	defer cancel()
	var list corev1.PodList
	if err := reader.List(ctx, &list, which, client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	return pointers(list.Items), nil
}

// gangIndex finds the pods of one PodGroup in the manager's cache.
const gangIndex = "backstop.drover.sh/gang"

func gangOf(obj client.Object) []string {
	if pod, ok := obj.(*corev1.Pod); ok {
		if key := podgroups.KeyOf(pod); key != "" {
			return []string{key}
		}
	}
	return nil
}

// verifierOf has the requests of a group's members compared with what the group says now. Members are often seen before it.
func verifierOf(reader client.Reader, writer *demand.Writer) func(key string) {
	return func(key string) {
		pods, err := podsOf(reader, client.MatchingFields{gangIndex: key})
		if err != nil {
			return // the writer verifies each request from time to time anyway
		}
		for _, pod := range pods {
			if pod.Spec.NodeName == "" && pod.DeletionTimestamp == nil {
				writer.Verify(pod)
			}
		}
	}
}

func pointers[T any](items []T) []*T {
	out := make([]*T, len(items))
	for i := range items {
		out[i] = &items[i]
	}
	return out
}

// templatesOf lists what could be had; nothing where it cannot be read, which proves nothing about a pod.
func templatesOf(reader client.Reader, namespace string) func() []*fleetv1alpha1.AvailableCapacity {
	return func() []*fleetv1alpha1.AvailableCapacity {
		ctx, cancel := context.WithTimeout(context.Background(), readTimeout)
		defer cancel()
		var list fleetv1alpha1.AvailableCapacityList
		if err := reader.List(ctx, &list, client.InNamespace(namespace), client.UnsafeDisableDeepCopy); err != nil {
			return nil
		}
		return pointers(list.Items)
	}
}

func sameTemplate(before, after client.Object) bool {
	a, okA := before.(*fleetv1alpha1.AvailableCapacity)
	b, okB := after.(*fleetv1alpha1.AvailableCapacity)
	return okA && okB && reflect.DeepEqual(capacity.TemplateOf(a), capacity.TemplateOf(b))
}

func feed(s *demand.Suppressor, before, after client.Object) {
	if node, ok := after.(*fleetv1alpha1.UpcomingNode); ok {
		s.SetNode(node)
		return
	}
	s.DeleteNode(before.GetName())
}

// observer tells of changes and starts no reconcile. Before is nil for a new object, after for one that is gone.
type observer struct {
	changed func(before, after client.Object)
}

var _ handler.EventHandler = observer{}

type requestQueue = workqueue.TypedRateLimitingInterface[reconcile.Request]

// Create implements handler.EventHandler.
func (o observer) Create(_ context.Context, e event.CreateEvent, _ requestQueue) {
	o.changed(nil, e.Object)
}

// Update implements handler.EventHandler.
func (o observer) Update(_ context.Context, e event.UpdateEvent, _ requestQueue) {
	o.changed(e.ObjectOld, e.ObjectNew)
}

// Delete implements handler.EventHandler.
func (o observer) Delete(_ context.Context, e event.DeleteEvent, _ requestQueue) {
	o.changed(e.Object, nil)
}

// Generic implements handler.EventHandler.
func (o observer) Generic(_ context.Context, e event.GenericEvent, _ requestQueue) {
	o.changed(nil, e.Object)
}
