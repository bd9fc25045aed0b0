package watchgroup

import (
	"context"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	k8slabels "k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
)

// CacheOptions returns the options of the coordinator's cache: of Leases and Pods only those of members, which carry the
// group's label, of a Pod only what tells whether its container runs and is ready, and the one webhook configuration and
// policy.
func CacheOptions() cache.Options {
	exists, err := k8slabels.NewRequirement(lbv1alpha1.LabelWatchGroup, selection.Exists, nil)
	utilruntime.Must(err)
	members := k8slabels.NewSelector().Add(*exists)
	return cache.Options{
		DefaultTransform: cache.TransformStripManagedFields(),
		ByObject: map[client.Object]cache.ByObject{
			&coordinationv1.Lease{}: {Label: members},
			&corev1.Pod{}:           {Label: members, Transform: stripPod},
			// Of these, one each is ours, and the right to read no other.
			&admissionregistrationv1.MutatingWebhookConfiguration{}: {
				Field: fields.OneTermEqualSelector(metav1.ObjectNameField, WebhookConfigurationName),
			},
			&admissionregistrationv1.ValidatingAdmissionPolicy{}: {
				Field: fields.OneTermEqualSelector(metav1.ObjectNameField, PolicyName),
			},
		},
	}
}

func stripPod(obj any) (any, error) {
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		return obj, nil
	}
	kept := &corev1.Pod{TypeMeta: pod.TypeMeta, ObjectMeta: metav1.ObjectMeta{
		Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, ResourceVersion: pod.ResourceVersion,
		DeletionTimestamp: pod.DeletionTimestamp,
		Labels:            map[string]string{lbv1alpha1.LabelWatchGroup: pod.Labels[lbv1alpha1.LabelWatchGroup]},
	}}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			kept.Status.Conditions = []corev1.PodCondition{c}
		}
	}
	for _, c := range pod.Status.ContainerStatuses {
		kept.Status.ContainerStatuses = append(kept.Status.ContainerStatuses, corev1.ContainerStatus{
			Name:                 c.Name,
			State:                corev1.ContainerState{Terminated: c.State.Terminated},
			LastTerminationState: corev1.ContainerState{Terminated: c.LastTerminationState.Terminated},
		})
	}
	return kept, nil
}

type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]

func request(namespace, group string) reconcile.Request {
	return reconcile.Request{NamespacedName: types.NamespacedName{Namespace: namespace, Name: group}}
}

// onGroups has every group looked at when one changes: which of them are refused depends on all.
func (r *Reconciler) onGroups() handler.EventHandler {
	return handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, _ client.Object) []reconcile.Request {
		var list lbv1alpha1.WatchGroupList
		if err := r.Client.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
			return nil
		}
		requests := make([]reconcile.Request, 0, len(list.Items))
		for i := range list.Items {
			requests = append(requests, request(list.Items[i].Namespace, list.Items[i].Name))
		}
		return requests
	})
}

// onSlices has the group of a slice looked at, not as it was before.
func (r *Reconciler) onSlices() handler.EventHandler {
	return handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
		req := request(o.GetNamespace(), groupOf(o.GetName()))
		if t := r.known(req.NamespacedName); t != nil {
			t.sawSlice(o.GetResourceVersion())
		}
		return []reconcile.Request{req}
	})
}

// onLeases notes every renewal, and has the group looked at when somebody else holds the Lease.
func (r *Reconciler) onLeases() handler.EventHandler {
	see := func(o client.Object) *coordinationv1.Lease {
		lease, ok := o.(*coordinationv1.Lease)
		if !ok || groupOf(lease.Name) == "" {
			return nil
		}
		return lease
	}
	note := func(lease *coordinationv1.Lease) {
		key := types.NamespacedName{Namespace: lease.Namespace, Name: groupOf(lease.Name)}
		member, _ := memberOf(key.Name, lease.Name)
		if t := r.known(key); t != nil {
			t.saw(recordOf(member, lease, lbv1alpha1.DefaultLeaseDuration), r.Now())
		}
	}
	return handler.Funcs{
		CreateFunc: func(_ context.Context, e event.CreateEvent, q queue) {
			if lease := see(e.Object); lease != nil {
				note(lease)
				q.Add(request(lease.Namespace, groupOf(lease.Name)))
			}
		},
		UpdateFunc: func(_ context.Context, e event.UpdateEvent, q queue) {
			before, lease := see(e.ObjectOld), see(e.ObjectNew)
			if lease == nil || before == nil {
				return
			}
			note(lease)
			if holder(lease) != holder(before) || !equality.Semantic.DeepEqual(lease.Annotations, before.Annotations) {
				q.Add(request(lease.Namespace, groupOf(lease.Name)))
			}
		},
		DeleteFunc: func(_ context.Context, e event.DeleteEvent, q queue) {
			if lease := see(e.Object); lease != nil {
				q.Add(request(lease.Namespace, groupOf(lease.Name)))
			}
		},
	}
}

// known returns what is remembered of a group, nil if nothing is.
func (r *Reconciler) known(key types.NamespacedName) *tracker {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.trackers[key]
}

// onPods has the group looked at when a member's Pod ends, goes away or changes its readiness. Stripped as they are, Pods
// differ in nothing else.
func (r *Reconciler) onPods() handler.EventHandler {
	add := func(q queue, pod client.Object) {
		q.Add(request(pod.GetNamespace(), pod.GetLabels()[lbv1alpha1.LabelWatchGroup]))
	}
	return handler.Funcs{
		CreateFunc: func(_ context.Context, e event.CreateEvent, q queue) { add(q, e.Object) },
		UpdateFunc: func(_ context.Context, e event.UpdateEvent, q queue) {
			before, ok := e.ObjectOld.(*corev1.Pod)
			pod, ok2 := e.ObjectNew.(*corev1.Pod)
			if ok && ok2 && equality.Semantic.DeepEqual(before.Status, pod.Status) &&
				(before.DeletionTimestamp == nil) == (pod.DeletionTimestamp == nil) {
				return
			}
			add(q, e.ObjectNew)
		},
		DeleteFunc: func(_ context.Context, e event.DeleteEvent, q queue) {
			if pod, ok := e.Object.(*corev1.Pod); ok {
				key := types.NamespacedName{Namespace: pod.Namespace, Name: pod.Labels[lbv1alpha1.LabelWatchGroup]}
				if t := r.known(key); t != nil {
					t.sawEnd(pod)
				}
				add(q, pod)
			}
		},
	}
}
