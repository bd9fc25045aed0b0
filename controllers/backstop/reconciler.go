package backstop

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/demand"
)

// +kubebuilder:rbac:groups="",resources=pods;nodes;persistentvolumeclaims;persistentvolumes,verbs=list;watch
// +kubebuilder:rbac:groups=storage.k8s.io,resources=storageclasses,verbs=list;watch
// +kubebuilder:rbac:groups=resource.k8s.io,resources=resourceclaims,verbs=list;watch
// +kubebuilder:rbac:groups=fleet.lucy.sh,namespace=fleet-system,resources=availablecapacities;upcomingnodes,verbs=list;watch

// Reconciler asks for capacity for one pod, or has it told why there is nothing to ask for. It keeps nothing itself: the writer remembers what is written.
type Reconciler struct {
	Reader client.Reader
	Writer *demand.Writer
	// Serves says which pods are the back-stop's at all.
	Serves func(*corev1.Pod) bool
	// Delay is how long a pod has to be unschedulable, so that the plugin writes first, or without the node that it names.
	Delay time.Duration
	Clock clock.PassiveClock
}

var _ reconcile.Reconciler = &Reconciler{}

// Reconcile hands a pod to the writer once it has been unschedulable, or without the node that it names, for Delay. It comes
// back to a pod that stays unschedulable, because what can be had, and what is on its way, changes.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	pod := &corev1.Pod{}
	if err := r.Reader.Get(ctx, req.NamespacedName, pod); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	since, waits := waitsSince(pod)
	if !r.Serves(pod) || !waits {
		return ctrl.Result{}, nil
	}
	if left := r.Delay - r.Clock.Since(since); left > 0 {
		return ctrl.Result{RequeueAfter: max(left, minDelay)}, nil
	}
	if pod.Spec.NodeName != "" {
		return ctrl.Result{}, r.warnWithoutNode(ctx, pod)
	}
	r.Writer.Enqueue(pod, capacity.RejectionsOfMessage(scheduled(pod).Message))
	return ctrl.Result{RequeueAfter: r.again()}, nil
}

// warnWithoutNode has the writer say what is wrong with a pod whose node does not exist. A node that exists is the kubelet's
// to answer for.
func (r *Reconciler) warnWithoutNode(ctx context.Context, pod *corev1.Pod) error {
	err := r.Reader.Get(ctx, client.ObjectKey{Name: pod.Spec.NodeName}, &corev1.Node{})
	if apierrors.IsNotFound(err) {
		r.Writer.Enqueue(pod, nil)
		return nil
	}
	return err
}

// recheck is how often a pod that stays unschedulable is looked at again. The scheduler's own attempts do not change the
// pod, so nothing else would.
const recheck = time.Minute

func (r *Reconciler) again() time.Duration { return max(recheck, r.Delay) }

// waitsSince says since when the pod waits for what the back-stop could ask or tell; false where it does not. A pod that is
// gated or goes away does not, nor does one that a scheduler gave its node, nor one that another active scheduler is still to try:
// that one may wait for the Lease of a scheduler that has died, whose nodes have room. The last one to refuse it says so in the
// condition, and the change brings the pod back here. With no scheduler left nobody would use the capacity.
func waitsSince(pod *corev1.Pod) (time.Time, bool) {
	if pod.DeletionTimestamp != nil || len(pod.Spec.SchedulingGates) > 0 || capacity.IsTerminal(pod) {
		return time.Time{}, false
	}
	if pod.Spec.NodeName != "" {
		return pod.CreationTimestamp.Time, unstarted(pod)
	}
	c := scheduled(pod)
	if c == nil || c.Status != corev1.ConditionFalse || c.Reason != corev1.PodReasonUnschedulable || !capacity.RefusedByAll(c.Message) {
		return time.Time{}, false
	}
	return c.LastTransitionTime.Time, true
}

// unstarted reports whether neither a scheduler nor a kubelet has seen the pod, which has a node: it was created with
// spec.nodeName. Binding a pod sets its condition PodScheduled, and so does a kubelet that takes it.
func unstarted(pod *corev1.Pod) bool {
	c := scheduled(pod)
	return pod.Status.Phase != corev1.PodRunning && (c == nil || c.Status != corev1.ConditionTrue)
}

func scheduled(pod *corev1.Pod) *corev1.PodCondition {
	for i := range pod.Status.Conditions {
		if c := &pod.Status.Conditions[i]; c.Type == corev1.PodScheduled {
			return c
		}
	}
	return nil
}

// predicate lets pods through that wait, and tells the writer of those that need nothing any more: deletion comes as a
// name only to Reconcile, and the writer knows pods by UID.
func (r *Reconciler) predicate() predicate.Predicate {
	pending := func(obj client.Object) bool {
		pod, ok := obj.(*corev1.Pod)
		if !ok {
			return false
		}
		_, waits := waitsSince(pod)
		if pod.Spec.NodeName != "" && !waits {
			r.Writer.Forget(pod.UID)
		}
		return waits && r.Serves(pod)
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
