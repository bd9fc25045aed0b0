package rollup

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	fleetpb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
)

// drainReconciler empties one node that carries the reclaim taint, or puts it back to service when the instruction in the
// taint is not listed any more. Its key is the node's name. The taint is all it has to know, so a restart goes on where
// the last process stopped.
type drainReconciler struct {
	client client.Client
	// live reads from the API server itself, for the one check that a stale cache must not decide.
	live    client.Reader
	feed    *feed
	reports *reporter
	refused *refusals
	config  reclaimSettings
	clock   clock.PassiveClock
	metrics *Metrics
	log     logr.Logger
	// onEnd is called when a drain has ended either way: another may begin.
	onEnd func()

	mu       sync.Mutex
	draining map[string]bool      // names of the nodes under reclaim, so that pod events of other nodes cost nothing
	held     map[string]time.Time // drained nodes whose instruction is gone, and since when
}

// reclaimSettings are the durations of ReclaimConfig, and what follows from none of them.
type reclaimSettings struct {
	settle, evictionRetry, deadline, hold, evictionTimeout time.Duration
}

// Reconcile implements reconcile.Reconciler.
func (r *drainReconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var node corev1.Node
	err := r.client.Get(ctx, client.ObjectKey{Name: req.Name}, &node)
	if client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, fmt.Errorf("reading node %s: %w", req.Name, err)
	}
	taint := reclaimTaint(&node)
	if err != nil || taint == nil || node.DeletionTimestamp != nil {
		r.forget(req.Name)
		return ctrl.Result{}, nil
	}
	r.mu.Lock()
	r.draining[node.Name] = true
	r.mu.Unlock()

	state := r.feed.current()
	if state == nil {
		return ctrl.Result{}, nil // whether the instruction stands is not known yet
	}
	id := node.Labels[fleetv1alpha1.LabelMachine]
	if state.terminating[id] {
		return ctrl.Result{}, nil // the node is on its way out
	}
	pods, err := podsOn(ctx, r.client, node.Name)
	if err != nil {
		return ctrl.Result{}, err
	}
	left := evictables(pods)
	instruction := state.reclaims[taint.Value]
	if instruction == nil || !instruction.lists(id) {
		return r.withdraw(ctx, &node, id, taint.Value, len(left))
	}
	r.mu.Lock()
	delete(r.held, node.Name)
	r.mu.Unlock()
	if len(left) == 0 {
		return r.settle(ctx, &node, id, taint)
	}
	if reason := unmovable(left); reason != "" {
		return r.giveUp(ctx, &node, id, taint.Value, reason)
	}
	if since := taint.TimeAdded; since != nil && r.clock.Since(since.Time) > r.config.deadline {
		return r.giveUp(ctx, &node, id, taint.Value, fmt.Sprintf(
			"%d pods did not leave within %s, among them %s/%s: a PodDisruptionBudget or a finalizer holds them",
			len(left), r.config.deadline, left[0].Namespace, left[0].Name))
	}
	r.say(id, node.Name, stateDraining, taint.Value)
	return r.evict(ctx, &node, left)
}

func evictables(pods []*corev1.Pod) (left []*corev1.Pod) {
	for _, pod := range pods {
		if evictable(pod) {
			left = append(left, pod)
		}
	}
	return left
}

// unmovable says why a node cannot be emptied after all: a pod that must not be moved came to it while it was chosen.
func unmovable(left []*corev1.Pod) string {
	for _, pod := range left {
		if why := stays(pod); why != "" && pod.DeletionTimestamp == nil {
			return fmt.Sprintf("pod %s/%s %s", pod.Namespace, pod.Name, why)
		}
	}
	return ""
}

func (r *drainReconciler) say(id, node, state, reclaimID string) bool {
	return r.reports.report(&fleetpb.MachineObservation{Id: id, State: state, NodeName: node, ReclaimId: reclaimID})
}

// forget drops what is remembered of a node that is no longer under reclaim.
func (r *drainReconciler) forget(node string) {
	r.mu.Lock()
	was := r.draining[node]
	delete(r.draining, node)
	delete(r.held, node)
	r.mu.Unlock()
	if was {
		r.onEnd()
	}
}

// watches says whether a pod's event can matter to a drain.
func (r *drainReconciler) watches(node string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.draining[node]
}

// settle reports a node drained once it has been closed and empty for long enough that no pod can be on its way to it, and
// the API server itself says that it is empty.
func (r *drainReconciler) settle(ctx context.Context, node *corev1.Node, id string, taint *corev1.Taint) (ctrl.Result, error) {
	if last := r.reports.latest(id); last.GetState() == stateDrained && last.GetReclaimId() == taint.Value {
		return ctrl.Result{}, nil
	}
	r.say(id, node.Name, stateDraining, taint.Value)
	if since := taint.TimeAdded; since != nil {
		if wait := r.config.settle - r.clock.Since(since.Time); wait > 0 {
			return ctrl.Result{RequeueAfter: wait}, nil
		}
	}
	var list corev1.PodList
	err := r.live.List(ctx, &list, &client.ListOptions{FieldSelector: fields.OneTermEqualSelector("spec.nodeName", node.Name)})
	if err != nil {
		return ctrl.Result{}, fmt.Errorf("checking that node %s is empty: %w", node.Name, err)
	}
	for i := range list.Items {
		if evictable(&list.Items[i]) {
			// The informer will show it; until then this is a look a moment later.
			return ctrl.Result{RequeueAfter: time.Second}, nil
		}
	}
	if r.say(id, node.Name, stateDrained, taint.Value) {
		r.metrics.Reclaims.WithLabelValues("drained").Inc()
		r.log.Info("A node is drained", "node", node.Name, "machine", id, "reclaim", taint.Value)
		r.onEnd()
	}
	return ctrl.Result{}, nil
}

// evict asks for every pod's eviction. A budget that refuses is asked again later; pods that are on their way out are
// waited for, by their own events, for as long as their grace period says.
func (r *drainReconciler) evict(ctx context.Context, node *corev1.Node, left []*corev1.Pod) (ctrl.Result, error) {
	again := false
	var errs []error
	for _, pod := range left {
		if pod.DeletionTimestamp != nil {
			continue
		}
		err := r.evictOne(ctx, pod)
		result := "evicted"
		switch {
		case err == nil:
			r.log.Info("A pod is evicted", "pod", client.ObjectKeyFromObject(pod), "node", node.Name)
		case apierrors.IsNotFound(err), apierrors.IsConflict(err):
			result = "gone"
		case apierrors.IsTooManyRequests(err), errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil:
			result, again = "refused", true
			r.log.V(1).Info("An eviction is refused; it is tried again", "pod", client.ObjectKeyFromObject(pod),
				"node", node.Name, "reason", err.Error())
		default:
			result = resultError
			errs = append(errs, fmt.Errorf("evicting pod %s/%s from node %s: %w", pod.Namespace, pod.Name, node.Name, err))
		}
		r.metrics.Evictions.WithLabelValues(result).Inc()
	}
	if err := errors.Join(errs...); err != nil {
		return ctrl.Result{}, err
	}
	if again {
		return ctrl.Result{RequeueAfter: r.config.evictionRetry}, nil
	}
	// Pod events come when the pods end. This look is for the deadline.
	if t := reclaimTaint(node); t.TimeAdded != nil {
		return ctrl.Result{RequeueAfter: max(r.config.deadline-r.clock.Since(t.TimeAdded.Time), 0) + time.Second}, nil
	}
	return ctrl.Result{}, nil
}

// evictOne asks for one pod's eviction. Where the API server says when to come again, as it does for a budget that has not
// been looked at yet, the client waits and repeats by itself for minutes; a worker has better things to do.
func (r *drainReconciler) evictOne(ctx context.Context, pod *corev1.Pod) error {
	ctx, cancel := context.WithTimeout(ctx, r.config.evictionTimeout)
	defer cancel()
	return r.client.SubResource("eviction").Create(ctx, pod.DeepCopy(), &policyv1.Eviction{
		ObjectMeta:    metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name},
		DeleteOptions: &metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(pod.UID))},
	})
}

// withdraw puts a node back to service whose instruction is not listed any more. A node that may have been reported
// drained is held for a while first: its machine may be on the way out, with the instruction done.
func (r *drainReconciler) withdraw(ctx context.Context, node *corev1.Node, id, reclaimID string, left int) (ctrl.Result, error) {
	last := r.reports.latest(id).GetState()
	if left == 0 && (last == stateDrained || last == "") {
		r.mu.Lock()
		since, found := r.held[node.Name]
		if !found {
			since = r.clock.Now()
			r.held[node.Name] = since
		}
		r.mu.Unlock()
		if wait := r.config.hold - r.clock.Since(since); wait > 0 {
			return ctrl.Result{RequeueAfter: wait}, nil
		}
	}
	if err := release(ctx, r.client, node); err != nil {
		return ctrl.Result{}, err
	}
	r.metrics.Reclaims.WithLabelValues("withdrawn").Inc()
	r.log.Info("A node is back in service: its reclaim is withdrawn", "node", node.Name, "machine", id, "reclaim", reclaimID)
	return ctrl.Result{}, nil
}

// giveUp ends a drain that cannot be completed. The node goes back to service, and the autoscaler hears why.
func (r *drainReconciler) giveUp(ctx context.Context, node *corev1.Node, id, reclaimID, reason string) (ctrl.Result, error) {
	r.refused.add(node.Name, r.clock.Now().Add(r.config.deadline))
	if err := release(ctx, r.client, node); err != nil {
		return ctrl.Result{}, err
	}
	r.reports.report(&fleetpb.MachineObservation{
		Id: id, State: stateKept, NodeName: node.Name, ReclaimId: reclaimID, Message: truncate(reason, maxMessage),
	})
	r.metrics.Reclaims.WithLabelValues("kept").Inc()
	r.log.Info("A drain is given up", "node", node.Name, "machine", id, "reclaim", reclaimID, "reason", reason)
	return ctrl.Result{}, nil
}
