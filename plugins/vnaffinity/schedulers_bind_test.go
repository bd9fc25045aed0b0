package vnaffinity

import (
	"context"
	"errors"
	"maps"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clienttesting "k8s.io/client-go/testing"
	fwk "k8s.io/kube-scheduler/framework"

	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/controllers/sharded"
)

// reserved runs a pod up to Bind.
func reserved(t *testing.T, r *replica, pod *corev1.Pod) (fwk.CycleState, *fakeWork) {
	t.Helper()
	state, _, _ := r.cycle(pod)
	if s := r.plugin.Reserve(t.Context(), state, pod, "n0"); !s.IsSuccess() {
		t.Fatalf("%v", s)
	}
	return state, r.seat.began[len(r.seat.began)-1]
}

func TestReserveRefusesANodeThatHasGone(t *testing.T) {
	r := newReplica(t)
	pod := at("n0", "p", "1")
	state, _, _ := r.cycle(pod)
	if s := r.plugin.Reserve(t.Context(), state, pod, "n0"); !s.IsSuccess() {
		t.Fatalf("%v", s)
	}
	r.plugin.Unreserve(t.Context(), state, pod, "n0")
	if !r.seat.began[0].ended {
		t.Error("Unreserve keeps the right")
	}
	r.seat.lose()
	if s := r.plugin.Reserve(t.Context(), state, pod, "n0"); s.Code() != fwk.Unschedulable || capacity.RefusedByAll(s.Message()) {
		t.Errorf("gone: %v", s)
	}
	// What was bound to it meanwhile, the cycle's snapshot does not show.
	r.seat.gain("n0", "n1")
	if s := r.plugin.Reserve(t.Context(), state, pod, "n0"); s.Code() != fwk.Unschedulable {
		t.Errorf("gone and come back: %v", s)
	}
	if last := r.seat.began[len(r.seat.began)-1]; !last.ended {
		t.Error("a refused placement keeps the right")
	}
}

// While a cycle goes on the pod may be handed on to another replica, as was decided on the last time: then two would bind it.
func TestReserveRefusesAPodThatHasMovedOn(t *testing.T) {
	r := newReplica(t)
	pod := at("n0", "p", "1")
	state, _, _ := r.cycle(pod)
	s := r.plugin.schedulers
	s.pods[pod.UID].next = &hop{To: "b", Epoch: s.roster.epoch}
	if status := r.plugin.Reserve(t.Context(), state, pod, "n0"); status.Code() != fwk.Unschedulable || capacity.RefusedByAll(status.Message()) {
		t.Errorf("%v", status)
	}
	for _, w := range r.seat.began {
		if !w.ended {
			t.Error("a refused placement keeps the right")
		}
	}
}

// A pod that was to move on after a while, and has found a node here meanwhile, stays.
func TestAPodWithAPlaceDoesNotMoveOn(t *testing.T) {
	r := newReplica(t)
	pod := at("n0", "p", "1")
	state, _, _ := r.cycle(pod)
	s := r.plugin.schedulers
	s.pods[pod.UID].later = &hop{To: "b", Epoch: s.roster.epoch}
	if status := r.plugin.Reserve(t.Context(), state, pod, "n0"); !status.IsSuccess() {
		t.Fatalf("%v", status)
	}
	if _, h, _ := s.moving(pod.UID); h != nil {
		t.Errorf("it is bound here, and goes to %v", h)
	}
}

func TestTheRightIsKeptUntilTheInformerShowsTheBind(t *testing.T) {
	pod := at("n0", "p", "1")
	r := newReplica(t, pod)
	state, w := reserved(t, r, pod)
	if s := r.plugin.Bind(t.Context(), state, pod, "n0"); !s.IsSuccess() {
		t.Fatalf("%v", s)
	}
	if w.ended {
		t.Fatal("the Virtual Node may be given up before this replica has seen what it wrote")
	}
	bound := pod.DeepCopy()
	bound.Spec.NodeName, bound.ResourceVersion = "n0", "42"
	r.plugin.schedulers.podSeen(bound)
	if !w.ended || !slices.Equal(w.wrote, []string{"42"}) {
		t.Errorf("ended %v, told versions %v", w.ended, w.wrote)
	}
}

func TestWhatTheInformerShowsFirstIsKept(t *testing.T) {
	pod := at("n0", "p", "1")
	r := newReplica(t, pod)
	state, w := reserved(t, r, pod)
	bound := pod.DeepCopy()
	bound.Spec.NodeName, bound.ResourceVersion = "n0", "42"
	r.client.PrependReactor("create", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		r.plugin.schedulers.podSeen(bound)
		if w.ended {
			t.Error("the right is given back while the request is on its way")
		}
		return true, nil, nil
	})
	if s := r.plugin.Bind(t.Context(), state, pod, "n0"); !s.IsSuccess() || !w.ended {
		t.Errorf("%v, ended %v", s, w.ended)
	}
}

func TestNothingIsBoundWithoutTheLease(t *testing.T) {
	pod := at("n0", "p", "1")
	r := newReplica(t, pod)
	state, w := reserved(t, r, pod)
	w.fenced = true
	if s := r.plugin.Bind(t.Context(), state, pod, "n0"); s.IsSuccess() || !errors.Is(s.AsError(), sharded.ErrFenced) {
		t.Errorf("%v", s)
	}
	if n := r.binds(); n != 0 {
		t.Errorf("%d requests were sent", n)
	}
}

// To free a node's room because a bind was not answered would let it be filled twice.
func TestABindThatIsNotAnsweredIsFoundOutAbout(t *testing.T) {
	pod := at("n0", "p", "1")
	r := newReplica(t, pod)
	state, w := reserved(t, r, pod)
	lost := true
	r.client.PrependReactor("create", "pods", func(a clienttesting.Action) (bool, runtime.Object, error) {
		binding := a.(clienttesting.CreateAction).GetObject().(*corev1.Binding)
		if !lost {
			return true, nil, apierrors.NewConflict(schema.GroupResource{Resource: "pods/binding"}, pod.Name, errors.New("already assigned"))
		}
		lost = false
		bound := pod.DeepCopy()
		bound.Spec.NodeName = binding.Target.Name
		maps.Copy(bound.Annotations, binding.Annotations)
		if err := r.client.Tracker().Update(schema.GroupVersionResource{Version: "v1", Resource: "pods"}, bound, "ns"); err != nil {
			t.Error(err)
		}
		return true, nil, context.DeadlineExceeded
	})
	if s := r.plugin.Bind(t.Context(), state, pod, "n0"); !s.IsSuccess() {
		t.Errorf("%v", s)
	}
	if n := r.binds(); n != 2 || w.ended {
		t.Errorf("%d requests, ended %v", n, w.ended)
	}
	// The same answer for a pod that somebody else has bound is a conflict.
	other := pod.DeepCopy()
	other.Annotations[AnnotationBoundBy] = "b-1"
	other.Spec.NodeName = "n2"
	if err := r.client.Tracker().Update(schema.GroupVersionResource{Version: "v1", Resource: "pods"}, other, "ns"); err != nil {
		t.Fatal(err)
	}
	if s := r.plugin.Bind(t.Context(), state, pod, "n0"); s.IsSuccess() {
		t.Error("a pod of another node counts as bound")
	}
}

// A refusal speaks of its own request: one before it, whose answer was lost, may have bound the pod all the same.
func TestARefusalAfterALostAnswerProvesNothing(t *testing.T) {
	for _, landed := range []bool{true, false} {
		pod := at("n0", "p", "1")
		r := newReplica(t, pod)
		state, _ := reserved(t, r, pod)
		lost := true
		r.client.PrependReactor("create", "pods", func(a clienttesting.Action) (bool, runtime.Object, error) {
			binding := a.(clienttesting.CreateAction).GetObject().(*corev1.Binding)
			if !lost {
				return true, nil, apierrors.NewTooManyRequests("busy", 0)
			}
			lost = false
			if landed {
				bound := pod.DeepCopy()
				bound.Spec.NodeName = binding.Target.Name
				maps.Copy(bound.Annotations, binding.Annotations)
				if err := r.client.Tracker().Update(schema.GroupVersionResource{Version: "v1", Resource: "pods"}, bound, "ns"); err != nil {
					t.Error(err)
				}
			}
			return true, nil, context.DeadlineExceeded
		})
		if s := r.plugin.Bind(t.Context(), state, pod, "n0"); s.IsSuccess() != landed {
			t.Errorf("the first request landed: %v; %v", landed, s)
		}
	}
}

func TestAReplicaThatStopsDoesNotWaitForItsInformer(t *testing.T) {
	pod := at("n0", "p", "1")
	r := newReplica(t, pod)
	state, w := reserved(t, r, pod)
	if s := r.plugin.Bind(t.Context(), state, pod, "n0"); !s.IsSuccess() {
		t.Fatalf("%v", s)
	}
	r.plugin.schedulers.letGo()
	if !w.ended || !w.unseen {
		t.Errorf("ended %v, next owner told to look for itself %v", w.ended, w.unseen)
	}
}
