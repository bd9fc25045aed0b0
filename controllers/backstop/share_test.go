package backstop

import (
	"context"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/drover-sh/drover/controllers/sharded"
	"github.com/drover-sh/drover/internal/builders"
)

func request(name string) reconcile.Request {
	return reconcile.Request{NamespacedName: client.ObjectKey{Namespace: "ns", Name: name}}
}

// In mode Total pods are divided. In mode RequestsOnly the room of nodes on their way is one account: all pods are one
// member's.
func TestPodsAreDividedWhereTheyShareNoAccount(t *testing.T) {
	for whole, want := range map[bool]int{false: 3, true: 1} {
		keys := (&share{whole: whole}).keys(&Reconciler{})
		seen := map[string]bool{}
		for _, name := range []string{"a", "b", "c", "a"} {
			seen[keys.Of(request(name))] = true
		}
		if len(seen) != want {
			t.Errorf("RequestsOnly %t: three pods have %d keys, expected %d", whole, len(seen), want)
		}
	}
}

func TestWhatComesIsLookedAtAndWhatGoesIsForgotten(t *testing.T) {
	waits := func(name string) *corev1.Pod {
		pod := builders.Pod("ns", name).UID(name).Obj()
		pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse,
			Reason: corev1.PodReasonUnschedulable}}
		return pod
	}
	bound := builders.Pod("ns", "bound").UID("bound").Node("n").Phase(corev1.PodRunning).Obj()
	gated := builders.Pod("ns", "gated").UID("gated").Obj()
	gated.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "g"}}
	others := waits("others")
	others.Spec.SchedulerName = "others"
	pods := []client.Object{waits("a"), waits("b"), bound, gated, named("gone", time.Now()), others}
	var forgotten []types.UID
	s := &share{
		reader: fake.NewClientBuilder().WithScheme(scheme(t)).WithObjects(pods...).Build(), group: sharded.New(sharded.Options{}),
		forget: func(uid types.UID) { forgotten = append(forgotten, uid) },
	}
	keys := s.keys(&Reconciler{Serves: func(pod *corev1.Pod) bool { return pod.Spec.SchedulerName != "others" }})
	list, err := keys.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if want := []reconcile.Request{request("a"), request("b"), request("p")}; !slices.Equal(list, want) {
		t.Errorf("pods to look at: %v, expected %v", list, want)
	}
	keys.Lost(context.Background(), 1, func(req reconcile.Request) bool { return req.Name != "a" })
	slices.Sort(forgotten)
	if want := []types.UID{"b", "gated", "others", "uid"}; !slices.Equal(forgotten, want) {
		t.Errorf("forgotten: %v, expected %v", forgotten, want)
	}
}

// The writer works on its own: what it was told of a pod counts for nothing once the pod is another member's.
func TestNothingIsWrittenForOthersPods(t *testing.T) {
	pending := func(*corev1.Pod) bool { return true }
	pod := builders.Pod("ns", "p").Obj()
	if !(&share{}).pending(pending)(pod) {
		t.Error("the leader's back-stop writes for no pod")
	}
	s := &share{group: sharded.New(sharded.Options{})} // a member that owns nothing
	if s.pending(pending)(pod) {
		t.Error("a member writes for a pod that is not its own")
	}
}
