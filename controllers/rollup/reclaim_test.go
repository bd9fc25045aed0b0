package rollup

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	fleetpb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
	"github.com/drover-sh/drover/internal/builders"
)

func managed(i int) *corev1.Node {
	return builders.Node(fmt.Sprintf("node-%02d", i)).Machine(fmt.Sprintf("m-%02d", i)).
		Allocatable("cpu", "4", "memory", "8Gi", "pods", "110").Ready().Obj()
}

func candidates(n int) (ids []string) {
	for i := range n {
		ids = append(ids, fmt.Sprintf("m-%02d", i))
	}
	return ids
}

func replica(name, onNode string) *builders.PodBuilder {
	return builders.Pod("default", name).Requests("cpu", "1").Owner("ReplicaSet", "web").Node(onNode)
}

// marked lists the nodes under reclaim.
func marked(t *testing.T, c client.Client) (names []string) {
	t.Helper()
	var list corev1.NodeList
	if err := c.List(t.Context(), &list); err != nil {
		t.Fatal(err)
	}
	for i := range list.Items {
		if reclaimOf(&list.Items[i]) != "" {
			if !list.Items[i].Spec.Unschedulable {
				t.Errorf("node %s is tainted and not cordoned", list.Items[i].Name)
			}
			names = append(names, list.Items[i].Name)
		}
	}
	return names
}

// kubelet ends terminating pods, as nothing else does here.
func kubelet(t *testing.T, c client.Client) {
	t.Helper()
	stop := make(chan struct{})
	var done sync.WaitGroup
	done.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(20 * time.Millisecond):
			}
			var pods corev1.PodList
			if err := c.List(t.Context(), &pods); err != nil {
				return
			}
			for i := range pods.Items {
				if pods.Items[i].DeletionTimestamp != nil {
					_ = c.Delete(t.Context(), &pods.Items[i], client.GracePeriodSeconds(0))
				}
			}
		}
	})
	t.Cleanup(func() { close(stop); done.Wait() })
}

func podNames(t *testing.T, c client.Client) string {
	t.Helper()
	var pods corev1.PodList
	if err := c.List(t.Context(), &pods); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, p := range pods.Items {
		names = append(names, p.Name)
	}
	slices.Sort(names)
	return strings.Join(names, " ")
}

// Case 12: 64 GPU nodes and 10 batch nodes; the training has ended. Exactly the GPU nodes go and no other pod moves.
func TestWithdrawalTakesTheEmptyNodesOnly(t *testing.T) {
	c := api(t)
	var ids []string
	for i := range 74 {
		create(t, c, managed(i))
		if i < 64 {
			create(t, c, builders.Pod("default", fmt.Sprintf("agent-%02d", i)).Daemon("agent").Node(managed(i).Name).Obj())
			continue
		}
		create(t, c, replica(fmt.Sprintf("batch-%02d", i), managed(i).Name).Obj())
	}
	ids = candidates(74)
	autoscaler, conn := newScripted(t)
	op := operate(t, conn, testConfig())
	autoscaler.say(&fleetpb.FeedState{Reclaims: []*fleetpb.Reclaim{{Id: "r-1", Candidates: ids, Count: 64}}})
	eventually(t, func() error {
		n := 0
		for _, id := range ids[:64] {
			if autoscaler.hasReported(id, stateDrained) {
				n++
			}
		}
		return is(n == 64, "%d machines are reported drained", n)
	})
	if got := marked(t, c); len(got) != 64 || got[63] != "node-63" {
		t.Errorf("the nodes under reclaim are %v, want the 64 empty ones", got)
	}
	if got := op.writes.of("/eviction"); got != 0 {
		t.Errorf("%d pods were evicted, want none", got)
	}
	for _, id := range ids[64:] {
		if autoscaler.hasReported(id, stateDraining) || autoscaler.hasReported(id, stateKept) {
			t.Errorf("machine %s was reported %v; it was never needed", id, autoscaler.reported(id))
		}
	}
}

// Of nodes with pods the one goes whose loss disturbs least; its pods leave by eviction, DaemonSet and mirror pods do not,
// and a PodDisruptionBudget is waited for. A restart in the middle goes on.
func TestDrainRespectsBudgets(t *testing.T) {
	c := api(t)
	for i := range 3 {
		create(t, c, managed(i))
	}
	create(t, c,
		replica("a-0", "node-00").Obj(), replica("a-1", "node-00").Obj(),
		replica("b-0", "node-01").Label("app", "b").
			Condition(corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionTrue}).Obj(),
		builders.Pod("default", "agent").Daemon("agent").Node("node-01").Obj(),
		builders.Pod("default", "static").Mirror().Node("node-01").Obj(),
		builders.Pod("default", "done").Owner("Job", "j").Node("node-01").Phase(corev1.PodSucceeded).Obj(),
		replica("c-0", "node-02").Priority(0).Obj(), replica("c-1", "node-02").Obj(), replica("c-2", "node-02").Obj(),
	)
	one := intstr.FromInt32(1)
	budget := &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "b"},
		Spec: policyv1.PodDisruptionBudgetSpec{MinAvailable: &one,
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "b"}}},
	}
	create(t, c, budget)
	allow := func(n int32) {
		t.Helper()
		before := budget.DeepCopy()
		budget.Status = policyv1.PodDisruptionBudgetStatus{ObservedGeneration: budget.Generation, DisruptionsAllowed: n,
			CurrentHealthy: 1, DesiredHealthy: 1 - n, ExpectedPods: 1}
		if err := c.Status().Patch(t.Context(), budget, client.MergeFrom(before)); err != nil {
			t.Fatal(err)
		}
	}
	allow(0)
	kubelet(t, c)
	autoscaler, conn := newScripted(t)
	op := operate(t, conn, testConfig())
	autoscaler.say(&fleetpb.FeedState{Reclaims: []*fleetpb.Reclaim{{Id: "r-1", Candidates: candidates(3), Count: 1}}})
	wantReported(t, autoscaler, "m-01", stateDraining)
	eventually(t, func() error {
		return is(op.metric("drover_rollup_evictions_total") >= 3, "the eviction was hardly tried again")
	})
	if got, want := podNames(t, c), "a-0 a-1 agent b-0 c-0 c-1 c-2 done static"; got != want {
		t.Errorf("pods are %q, want %q: the budget allows no disruption", got, want)
	}
	op.stop()
	op = operate(t, conn, testConfig())
	eventually(t, func() error {
		return is(op.metric("drover_rollup_evictions_total") >= 1, "the next process does not go on")
	})
	if autoscaler.hasReported("m-01", stateDrained) {
		t.Error("a node with a pod was reported drained")
	}
	allow(1)
	wantReported(t, autoscaler, "m-01", stateDrained)
	if got, want := podNames(t, c), "a-0 a-1 agent c-0 c-1 c-2 done static"; got != want {
		t.Errorf("pods are %q, want %q", got, want)
	}
	if got := marked(t, c); !slices.Equal(got, []string{"node-01"}) {
		t.Errorf("nodes under reclaim are %v, want node-01 only", got)
	}

	// The autoscaler ends the machine: as long as it says so the node stays closed, and then it is gone.
	autoscaler.say(&fleetpb.FeedState{Terminating: []string{"m-01"}})
	if err := c.Delete(t.Context(), node(t, c, "node-01")); err != nil {
		t.Fatal(err)
	}
	wantReported(t, autoscaler, "m-01", stateGone)
	if slices.Contains(autoscaler.reported("m-01"), stateReady) && slices.Index(autoscaler.reported("m-01"), stateReady) >
		slices.Index(autoscaler.reported("m-01"), stateDrained) {
		t.Errorf("reports are %v: Ready after Drained", autoscaler.reported("m-01"))
	}
}

// An instruction that is no longer listed is withdrawn: the nodes go back to service and are reported Ready. A cordon that
// was there before stays. It makes no difference whether the operator was there when it was withdrawn.
func TestWithdrawnReclaim(t *testing.T) {
	for _, restart := range []bool{false, true} {
		t.Run(fmt.Sprintf("restart=%v", restart), func(t *testing.T) {
			c := api(t)
			create(t, c, managed(0), managed(1))
			cordoned := managed(1)
			if err := c.Get(t.Context(), client.ObjectKeyFromObject(cordoned), cordoned); err != nil {
				t.Fatal(err)
			}
			before := cordoned.DeepCopy()
			cordoned.Spec.Unschedulable = true
			if err := c.Patch(t.Context(), cordoned, client.MergeFrom(before)); err != nil {
				t.Fatal(err)
			}
			autoscaler, conn := newScripted(t)
			config := testConfig()
			config.Reclaim.SettleTime.Duration = time.Hour // no drain ends by itself
			op := operate(t, conn, config)
			autoscaler.say(&fleetpb.FeedState{Reclaims: []*fleetpb.Reclaim{{Id: "r-1", Candidates: candidates(2), Count: 2}}})
			wantReported(t, autoscaler, "m-00", stateDraining)
			wantReported(t, autoscaler, "m-01", stateDraining)
			if got := marked(t, c); len(got) != 2 {
				t.Fatalf("nodes under reclaim are %v, want both", got)
			}
			if restart {
				op.stop()
				autoscaler.say(&fleetpb.FeedState{})
				operate(t, conn, config)
			} else {
				autoscaler.say(&fleetpb.FeedState{})
			}
			eventually(t, func() error { got := marked(t, c); return is(len(got) == 0, "still under reclaim: %v", got) })
			eventually(t, func() error {
				got := autoscaler.reported("m-00")
				return is(len(got) > 0 && got[len(got)-1] == stateReady, "machine m-00 was reported %v, want Ready last", got)
			})
			if node(t, c, "node-00").Spec.Unschedulable {
				t.Error("the operator's own cordon is still there")
			}
			if len(node(t, c, "node-00").Annotations) != 0 {
				t.Errorf("annotations are left: %v", node(t, c, "node-00").Annotations)
			}
			if !node(t, c, "node-01").Spec.Unschedulable {
				t.Error("somebody else's cordon was taken off")
			}
		})
	}
}

// Fewer are asked for than before: as many go back to service, those with the most left to move first.
func TestReclaimShrinks(t *testing.T) {
	c := api(t)
	for i := range 4 {
		create(t, c, managed(i))
	}
	autoscaler, conn := newScripted(t)
	config := testConfig()
	config.Reclaim.SettleTime.Duration = time.Hour
	operate(t, conn, config)
	say := func(count int32) {
		autoscaler.say(&fleetpb.FeedState{Reclaims: []*fleetpb.Reclaim{{Id: "r-1", Candidates: candidates(4), Count: count}}})
	}
	for _, count := range []int32{3, 1, 2} {
		say(count)
		eventually(t, func() error {
			got := marked(t, c)
			return is(len(got) == int(count), "under reclaim are %v, want %d", got, count)
		})
	}
}

// A node whose pods fit nowhere else is kept, with the reason, and nothing is written while nothing changes. When room
// appears it goes.
func TestNodeIsKeptWhileItsPodsFitNowhere(t *testing.T) {
	c := api(t)
	create(t, c, managed(0), builders.Node("full").Allocatable("cpu", "1", "pods", "110").Ready().Obj())
	create(t, c, replica("a", "node-00").Obj(), replica("b", "node-00").Obj())
	kubelet(t, c)
	autoscaler, conn := newScripted(t)
	op := operate(t, conn, testConfig())
	autoscaler.say(&fleetpb.FeedState{Reclaims: []*fleetpb.Reclaim{{Id: "r-1", Candidates: candidates(1), Count: 1}}})
	wantReported(t, autoscaler, "m-00", stateKept)
	if kept := autoscaler.report("m-00", stateKept); kept.ReclaimId != "r-1" || !strings.Contains(kept.Message, "default/b fits on no other node: 1 have too little free") {
		t.Errorf("the report is %v, want the instruction and the pod that cannot move", kept)
	}
	if got := op.writes.of("PATCH /api/v1/nodes"); got != 0 {
		t.Errorf("%d writes to nodes", got)
	}
	create(t, c, builders.Node("room").Allocatable("cpu", "8", "pods", "110").Ready().Obj())
	wantReported(t, autoscaler, "m-00", stateDrained)
}

// A drain that does not end is given up: the node is back in service and reported as kept.
func TestDrainDeadline(t *testing.T) {
	c := api(t)
	create(t, c, managed(0), managed(1))
	stuck := replica("stuck", "node-00").Obj()
	stuck.Finalizers = []string{"drover.test/hold"}
	create(t, c, stuck)
	defer func() {
		stuck.Finalizers = nil
		patch := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))
		if err := c.Patch(t.Context(), stuck, patch); err != nil && !apierrors.IsNotFound(err) {
			t.Error(err)
		}
	}()
	autoscaler, conn := newScripted(t)
	config := testConfig()
	config.Reclaim.DrainDeadline.Duration = 4 * time.Second // on a slow machine, too, the drain begins before it is given up
	operate(t, conn, config)
	autoscaler.say(&fleetpb.FeedState{Reclaims: []*fleetpb.Reclaim{{Id: "r-1", Candidates: []string{"m-00"}, Count: 1}}})
	wantReported(t, autoscaler, "m-00", stateDraining)
	wantReported(t, autoscaler, "m-00", stateKept)
	eventually(t, func() error { got := marked(t, c); return is(len(got) == 0, "still under reclaim: %v", got) })
}

func terminating(t *testing.T, c client.Client) (names []string) {
	t.Helper()
	var pods corev1.PodList
	if err := c.List(t.Context(), &pods); err != nil {
		t.Fatal(err)
	}
	for _, pod := range pods.Items {
		if pod.DeletionTimestamp != nil {
			names = append(names, pod.Name)
		}
	}
	return names
}

// The number of nodes with pods that are drained at a time is bounded.
func TestDrainsAreBounded(t *testing.T) {
	c := api(t)
	for i := range 6 {
		create(t, c, managed(i))
		create(t, c, replica(fmt.Sprintf("p-%d", i), managed(i).Name).Obj())
	}
	create(t, c, builders.Node("room").Allocatable("cpu", "64", "pods", "110").Ready().Obj())
	autoscaler, conn := newScripted(t)
	config := testConfig()
	config.Reclaim.MaxConcurrentDrains = 2
	operate(t, conn, config)
	autoscaler.say(&fleetpb.FeedState{Reclaims: []*fleetpb.Reclaim{{Id: "r-1", Candidates: candidates(6), Count: 6}}})
	eventually(t, func() error { // a pod may be evicted again before the operator sees that it ends, so that requests say nothing
		n := len(terminating(t, c))
		return is(n == 2, "%d pods are on their way out", n)
	})
	if got := marked(t, c); len(got) != 2 {
		t.Errorf("under reclaim are %v, want 2 at a time", got)
	}
	kubelet(t, c)
	eventually(t, func() error {
		n := 0
		for _, id := range candidates(6) {
			if autoscaler.hasReported(id, stateDrained) {
				n++
			}
		}
		return is(n == 6, "%d are drained", n)
	})
}
