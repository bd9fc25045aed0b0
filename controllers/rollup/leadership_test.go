package rollup

import (
	"net/http"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	fleetpb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
	"github.com/drover-sh/drover/internal/builders"
)

// competes makes an operator one that has to lead before it acts, and ends when it could not renew its lease for that long.
func competes(renewDeadline time.Duration) func(*ctrl.Options) {
	return func(o *ctrl.Options) {
		o.LeaderElection, o.LeaderElectionID, o.LeaderElectionNamespace = true, "rollup-test", fleetv1alpha1.SystemNamespace
		o.LeaseDuration, o.RenewDeadline, o.RetryPeriod = ptr.To(2*renewDeadline), &renewDeadline, ptr.To(100*time.Millisecond)
	}
}

// nobodyLeads takes the lease away, as if it had run out.
func nobodyLeads(t *testing.T, c client.Client) {
	t.Helper()
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: fleetv1alpha1.SystemNamespace, Name: "rollup-test"}}
	if err := c.Delete(t.Context(), lease); client.IgnoreNotFound(err) != nil {
		t.Fatal(err)
	}
}

// An operator that can no longer renew its lease, in the midst of a burst and of a drain, stops: no roll-up, no feed, no
// eviction comes from it any more. Its successor sends what has changed meanwhile, and ends the drain.
func TestAnOperatorThatLosesItsLeaseStops(t *testing.T) {
	c := api(t)
	budget := &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "all"}, Spec: policyv1.PodDisruptionBudgetSpec{
		MinAvailable: ptr.To(intstr.FromString("100%")), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "held"}}}}
	pod := replica("held", "node-00").Label("app", "held").
		Condition(corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionTrue}).Obj()
	create(t, c, managed(0), managed(1), budget, pod)
	before := budget.DeepCopy()
	budget.Status = policyv1.PodDisruptionBudgetStatus{ObservedGeneration: budget.Generation, CurrentHealthy: 1, DesiredHealthy: 1, ExpectedPods: 1}
	if err := c.Status().Patch(t.Context(), budget, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	autoscaler, conn := newScripted(t)
	autoscaler.say(&fleetpb.FeedState{Reclaims: []*fleetpb.Reclaim{{Id: "r-1", Candidates: []string{"m-00"}, Count: 1}}})
	nobodyLeads(t, c)
	first := operateAs(t, conn, testConfig(), competes(5*time.Second))
	eventually(t, func() error {
		return is(autoscaler.rollupCount() > 0 && autoscaler.subscribers() == 1 && autoscaler.hasReported("m-00", stateDraining) &&
			first.metric("drover_rollup_evictions_total") > 0, "not in the midst of everything yet: %d roll-ups, %d subscribers, %v, %v evictions",
			autoscaler.rollupCount(), autoscaler.subscribers(), autoscaler.reported("m-00"), first.metric("drover_rollup_evictions_total"))
	})
	first.writes.mu.Lock()
	first.writes.fail = func(r *http.Request) bool { return strings.Contains(r.URL.Path, "/leases/") }
	first.writes.mu.Unlock()
	if err := <-first.done; err == nil || !strings.Contains(err.Error(), "leader election lost") {
		t.Fatalf("the operator ended with %v", err)
	}
	first.done = nil
	eventually(t, func() error { return is(autoscaler.subscribers() == 0, "it is still subscribed") })
	sent, evictions := autoscaler.rollupCount(), first.metric("drover_rollup_evictions_total")
	create(t, c, builders.CapacityRequest("default", "late").Requests("cpu", "7").Obj())
	if err := c.Delete(t.Context(), budget); err != nil {
		t.Fatal(err)
	}
	kubelet(t, c)
	if got := autoscaler.rollupCount(); got != sent {
		t.Errorf("%d roll-ups after the end", got-sent)
	}

	nobodyLeads(t, c)
	operateAs(t, conn, testConfig(), competes(time.Minute))
	wantReported(t, autoscaler, "m-00", stateDrained)
	eventually(t, func() error {
		last := autoscaler.lastRollup()
		for _, n := range last.GetNeeds() {
			if n.Resources["cpu"] == "7" {
				return nil
			}
		}
		return is(false, "the last roll-up is %v", last)
	})
	var cr fleetv1alpha1.CapacityRequest
	eventually(t, func() error {
		if err := c.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "late"}, &cr); err != nil {
			return err
		}
		return is(cr.Status.Phase == fleetv1alpha1.CapacityRequestAcknowledged, "the phase is %q", cr.Status.Phase)
	})
	if got := first.metric("drover_rollup_evictions_total"); got != evictions {
		t.Errorf("the first operator made %v evictions after its end", got-evictions)
	}
}
