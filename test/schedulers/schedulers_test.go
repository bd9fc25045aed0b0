package schedulers

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/drover-sh/drover/plugins/capacityrequest"
	"github.com/drover-sh/drover/plugins/vnaffinity"
)

func sizes(t *testing.T) (nodes, pods int) {
	return size(t, "DROVER_SCHEDULERS_NODES", 100), size(t, "DROVER_SCHEDULERS_PODS", 1000)
}

// owner makes every ten pods one workload's.
func owner(i int) func(*corev1.Pod) {
	yes := true
	return func(pod *corev1.Pod) {
		pod.OwnerReferences = []metav1.OwnerReference{{
			APIVersion: "example.com/v1", Kind: "Job", Name: fmt.Sprintf("job-%d", i/10), UID: "x", Controller: &yes,
		}}
	}
}

// Three replicas share the nodes and the pods: each binds its part, no node has more on it than fits, and no pod is bound
// twice or forgotten.
func TestThreeSchedulersAreActiveAtOnce(t *testing.T) {
	nodes, pods := sizes(t)
	w := newWorld(t, "a", "b", "c")
	w.nodes(nodes, func(int) int64 { return int64(pods/nodes) * 150 }, nil)
	w.parallel(pods, func(i int) error { return w.client.Create(t.Context(), w.pod(fmt.Sprintf("p-%05d", i), 100, nil)) })
	w.bindings(pods)
	w.report()
	binders := w.check(pods)
	t.Logf("bound by %v", binders)
	for _, m := range []string{"a", "b", "c"} {
		if binders[m] < pods/10 {
			t.Errorf("%s bound %d of %d pods: it was not active", m, binders[m], pods)
		}
	}
}

// One of them is killed with pods in every state. What it had comes to the others once its Lease has run out.
func TestAKilledSchedulerLosesNothing(t *testing.T) {
	nodes, pods := sizes(t)
	w := newWorld(t, "a", "b", "c")
	w.nodes(nodes, func(int) int64 { return int64(pods/nodes) * 110 }, nil)
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.bindings(pods / 4)
		if err := w.schedulers["b"].Kill(); err != nil {
			t.Error(err)
		}
	}()
	w.parallel(pods, func(i int) error { return w.client.Create(t.Context(), w.pod(fmt.Sprintf("p-%05d", i), 100, nil)) })
	<-done
	if w.bindings(pods); t.Failed() {
		return
	}
	t.Logf("bound by %v", w.check(pods))
	w.report()
	delete(w.schedulers, "b")
	w.settled("a", "c")
}

// Nodes have room for a few pods of one shape only, and just as many of that shape come, so that most pods have to move on
// to the replica that owns their nodes, and the last of each shape finds just one place in the cluster. Meanwhile a replica
// joins, and one leaves, so that nodes change hands under all that.
func TestFullNodesTakeNoPodTooMany(t *testing.T) {
	nodes, _ := sizes(t)
	w := newWorld(t, "a", "b", "c")
	const perNode, shapesOf = 4, 2
	shape := func(node int) string { return fmt.Sprint("shape-", node/shapesOf) }
	w.nodes(nodes, func(int) int64 { return 20000 }, func(i int) map[string]string { return map[string]string{"shape": shape(i)} })
	w.parallel(nodes, func(i int) error {
		filler := w.pod(fmt.Sprintf("filler-%04d", i), 20000-100*perNode, nil)
		filler.Spec.NodeName = fmt.Sprintf("node-%04d", i)
		return w.client.Create(t.Context(), filler)
	})
	w.bindings(nodes)
	pods := nodes * perNode
	w.parallel(pods, func(i int) error {
		if i == pods/3 {
			w.start("d")
		}
		if i == pods/2 {
			if err := w.stop("a"); err != nil {
				return err
			}
		}
		return w.client.Create(t.Context(), w.pod(fmt.Sprintf("p-%05d", i), 100, func(pod *corev1.Pod) {
			pod.Spec.NodeSelector = map[string]string{"shape": shape(i / perNode)}
			if i%2 == 0 {
				owner(i)(pod)
			}
		}))
	})
	w.bindings(nodes + pods)
	w.report()
	t.Logf("bound by %v", w.check(nodes+pods))
	moves := 0.0
	for name, s := range w.schedulers {
		eventually(t, name+" shows its metrics", func(context.Context) (bool, string) {
			n, err := s.Metric("drover_vnaffinity_moves_total", "")
			if err == nil {
				moves += n
			}
			return err == nil, fmt.Sprint(err)
		})
	}
	if moves == 0 {
		t.Error("no pod moved on: the test shows nothing")
	}
}

// A pod that fits on no node of any replica gets one CapacityRequest, whichever replicas have refused it, and a node when one
// comes. Two of the replicas have no node at all.
func TestAPodThatFitsNowhereGetsOneCapacityRequest(t *testing.T) {
	w := newWorldWith(t, []string{capacityrequest.Name}, "a", "b", "c")
	requests := w.watchRequests()
	const big = 6
	w.nodes(1, func(int) int64 { return 100 }, nil)
	w.parallel(big, func(i int) error { return w.client.Create(t.Context(), w.pod(fmt.Sprintf("big-%d", i), 1000, nil)) })
	eventually(t, "every pod has a request", func(context.Context) (bool, string) {
		made := requests()
		return len(made) == big, fmt.Sprintf("%v\n%s", made, w.waiting())
	})
	at := make(map[string]bool)
	for _, pod := range w.list() {
		for _, c := range pod.Status.Conditions {
			if c.Type == corev1.PodScheduled {
				at[c.Message] = true
			}
		}
	}
	t.Logf("refused as %v", slices.Sorted(maps.Keys(at)))
	// One node for all of them: it belongs to one replica, and those who wait elsewhere have to move on to it.
	w.nodesFrom(1, 1, big*1000)
	w.bindings(big)
	w.report()
	w.check(big)
	for pod, n := range requests() {
		if n != 1 {
			t.Errorf("pod %s got %d CapacityRequests", pod, n)
		}
	}
}

// A pod that has to preempt gets its node although the pods of lower priority are on nodes of another replica than its own, and
// nobody asks for capacity for it.
func TestTheLastOnePreempts(t *testing.T) {
	w := newWorldWith(t, []string{capacityrequest.Name}, "a", "b", "c")
	requests := w.watchRequests()
	const nodes = 6
	w.nodes(nodes, func(int) int64 { return 1000 }, func(i int) map[string]string { return map[string]string{"n": fmt.Sprint(i)} })
	w.parallel(nodes, func(i int) error {
		return w.client.Create(t.Context(), w.pod(fmt.Sprintf("low-%d", i), 1000, func(pod *corev1.Pod) {
			pod.Spec.NodeSelector = map[string]string{"n": fmt.Sprint(i)}
		}))
	})
	w.bindings(nodes)
	high := w.priority("high", 1000)
	for i := range nodes {
		if err := w.client.Create(t.Context(), w.pod(fmt.Sprintf("high-%d", i), 1000, func(pod *corev1.Pod) {
			pod.Spec.PriorityClassName = high
			pod.Spec.NodeSelector = map[string]string{"n": fmt.Sprint(i)}
		})); err != nil {
			t.Fatal(err)
		}
	}
	w.bindings(2 * nodes)
	w.report()
	w.check(nodes)
	for _, pod := range w.list() {
		if pod.Spec.PriorityClassName != high {
			t.Errorf("%s is still there", pod.Name)
		}
	}
	if made := requests(); len(made) > 0 {
		t.Errorf("CapacityRequests were made for pods that preempt: %v", made)
	}
}

// A pod that fits nowhere stays with one replica, which says so; it is placed when room comes up, whoever's node that is.
func TestAPodThatFitsNowhereIsPlacedWhenThereIsRoom(t *testing.T) {
	w := newWorld(t, "a", "b", "c")
	const big = 12
	w.nodes(1, func(int) int64 { return 100 }, nil)
	w.parallel(big, func(i int) error { return w.client.Create(t.Context(), w.pod(fmt.Sprintf("big-%d", i), 1000, nil)) })
	eventually(t, "every pod was refused by all", func(context.Context) (bool, string) {
		refused := 0
		for _, pod := range w.list() {
			for _, c := range pod.Status.Conditions {
				if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
					refused++
				}
			}
		}
		return refused == big, fmt.Sprintf("%d of %d\n%s", refused, big, w.waiting())
	})
	if err := w.client.Delete(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-0000"}}); err != nil {
		t.Fatal(err)
	}
	w.nodes(big, func(int) int64 { return 1500 }, nil)
	w.bindings(big)
	w.report()
	w.check(big)
	for _, pod := range w.list() {
		if _, ok := pod.Annotations[vnaffinity.AnnotationBoundBy]; !ok {
			t.Errorf("%s does not say who bound it", pod.Name)
		}
	}
}

// A hop to a replica that is not there, as one leaves behind that is killed, holds no pod up.
func TestALostHopIsRepaired(t *testing.T) {
	w := newWorld(t, "a", "b")
	pod := w.pod("lost", 100, func(pod *corev1.Pod) {
		pod.Annotations = map[string]string{vnaffinity.AnnotationReplica: `{"to":"gone","refused":["a","b"],"epoch":1}`}
	})
	if err := w.client.Create(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	w.nodes(2, func(int) int64 { return 1000 }, nil)
	w.bindings(1)
	w.check(1)
	// A hop that somebody takes back by hand is as good: the pod is at home.
	second := w.pod("second", 5000, nil)
	if err := w.client.Create(t.Context(), second); err != nil {
		t.Fatal(err)
	}
	patch := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"annotations":{"`+vnaffinity.AnnotationReplica+`":"nonsense"}}}`))
	if err := w.client.Patch(t.Context(), second, patch); err != nil {
		t.Fatal(err)
	}
	w.nodesFrom(2, 3, 6000)
	w.bindings(2)
	w.check(2)
}

// A bind that a replica sends long after it was stopped is refused: the node's Virtual Node is another one's by then.
func TestALateBindIsRefused(t *testing.T) {
	w := newWorld(t, "a", "b")
	w.nodes(1, func(int) int64 { return 1000 }, nil)
	if err := w.client.Create(t.Context(), w.pod("first", 600, nil)); err != nil {
		t.Fatal(err)
	}
	w.bindings(1)
	bound := w.list()[0].Annotations
	sessions, err := w.sessions()
	if err != nil {
		t.Fatal(err)
	}
	owner := sessions[bound[vnaffinity.AnnotationBoundBy]]
	late := w.pod("late", 600, func(pod *corev1.Pod) { pod.Spec.SchedulerName = "nobody" })
	if err := w.client.Create(t.Context(), late); err != nil {
		t.Fatal(err)
	}
	stopped, err := cluster.AsScheduler()
	if err != nil {
		t.Fatal(err)
	}
	bind := func(opts ...client.SubResourceCreateOption) error {
		return stopped.SubResource("binding").Create(t.Context(), late, &corev1.Binding{
			ObjectMeta: metav1.ObjectMeta{Name: "late", Namespace: w.ns, Annotations: bound},
			Target:     corev1.ObjectReference{Kind: "Node", Name: "node-0000"},
		}, opts...)
	}
	// As long as it is the owner its binds are let through.
	if err := bind(&client.SubResourceCreateOptions{CreateOptions: client.CreateOptions{DryRun: []string{metav1.DryRunAll}}}); err != nil {
		t.Fatalf("the owner's bind: %v", err)
	}
	if err := w.schedulers[owner].Kill(); err != nil {
		t.Fatal(err)
	}
	delete(w.schedulers, owner)
	for other := range w.schedulers {
		w.settled(other)
	}
	eventually(t, "its bind is refused", func(context.Context) (bool, string) {
		err := bind(&client.SubResourceCreateOptions{CreateOptions: client.CreateOptions{DryRun: []string{metav1.DryRunAll}}})
		return apierrors.IsForbidden(err), fmt.Sprint(err)
	})
	if err := bind(); !apierrors.IsForbidden(err) {
		t.Errorf("a late bind: %v", err)
	}
}
