package backstop

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/demand"
)

// +kubebuilder:rbac:groups="",resources=pods;persistentvolumeclaims;persistentvolumes,verbs=list;watch
// +kubebuilder:rbac:groups=storage.k8s.io,resources=storageclasses,verbs=list;watch
// +kubebuilder:rbac:groups=resource.k8s.io,resources=resourceclaims,verbs=list;watch
// +kubebuilder:rbac:groups=fleet.lucy.sh,namespace=fleet-system,resources=availablecapacities;upcomingnodes,verbs=list;watch

// Reconciler asks for capacity for one pod. It keeps nothing itself: the writer remembers what is written.
type Reconciler struct {
	Reader client.Reader
	Writer *demand.Writer
	// Serves says which pods are the back-stop's at all.
	Serves func(*corev1.Pod) bool
	// Delay is how long a pod has to be unschedulable, so that the plugin writes first.
	Delay time.Duration
	Clock clock.PassiveClock
}

var _ reconcile.Reconciler = &Reconciler{}

// Reconcile hands an unschedulable pod to the writer once it has been unschedulable for Delay. It comes back to a pod that
// stays unschedulable, because what can be had, and what is on its way, changes.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	pod := &corev1.Pod{}
	if err := r.Reader.Get(ctx, req.NamespacedName, pod); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	since, unschedulable := unschedulableSince(pod)
	if !r.Serves(pod) || !unschedulable {
		return ctrl.Result{}, nil
	}
	if left := r.Delay - r.Clock.Since(since); left > 0 {
		return ctrl.Result{RequeueAfter: max(left, minDelay)}, nil
	}
	r.Writer.Enqueue(pod, nil)
	return ctrl.Result{RequeueAfter: r.again()}, nil
}

// recheck is how often a pod that stays unschedulable is looked at again. The scheduler's own attempts do not change the
// pod, so nothing else would.
const recheck = time.Minute

func (r *Reconciler) again() time.Duration { return max(recheck, r.Delay) }

// unschedulableSince reads the scheduler's word. A pod that is gated, has a node or goes away is not unschedulable.
func unschedulableSince(pod *corev1.Pod) (time.Time, bool) {
	if pod.Spec.NodeName != "" || pod.DeletionTimestamp != nil || len(pod.Spec.SchedulingGates) > 0 ||
		capacity.IsTerminal(pod) {
		return time.Time{}, false
	}
	for i := range pod.Status.Conditions {
		c := &pod.Status.Conditions[i]
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable {
			return c.LastTransitionTime.Time, true
		}
	}
	return time.Time{}, false
}

// predicate lets unschedulable pods through, and tells the writer of those that need nothing any more: deletion comes as a
// name only to Reconcile, and the writer knows pods by UID.
func (r *Reconciler) predicate() predicate.Predicate {
	pending := func(obj client.Object) bool {
		pod, ok := obj.(*corev1.Pod)
		if !ok {
			return false
		}
		if pod.Spec.NodeName != "" {
			r.Writer.Forget(pod.UID)
			return false
		}
		_, unschedulable := unschedulableSince(pod)
		return unschedulable && r.Serves(pod)
	}
	return predicate.Funcs{
		CreateFunc: func(e event.CreateEvent) bool { return pending(e.Object) },
		UpdateFunc: func(e event.UpdateEvent) bool { return pending(e.ObjectNew) },
		DeleteFunc: func(e event.DeleteEvent) bool {
			r.Writer.Forget(e.Object.GetUID())
			return false
		},
		GenericFunc: func(e event.GenericEvent) bool { return pending(e.Object) },
	}
}
