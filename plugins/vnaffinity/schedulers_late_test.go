package vnaffinity

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	fwk "k8s.io/kube-scheduler/framework"
	st "k8s.io/kubernetes/pkg/scheduler/testing"

	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/sharding"
)

// A version of a pod that is older than the one at hand does not take a hop back.
func TestOldNewsIsNoNews(t *testing.T) {
	r := newReplica(t)
	s := r.plugin.schedulers
	pod := at("n0", "p", "1")
	pod.ResourceVersion = "10"
	s.podSeen(pod)
	moved := pod.DeepCopy()
	moved.ResourceVersion = "20"
	moved.Annotations[AnnotationReplica] = hop{To: "b"}.String()
	s.podSeen(moved)
	s.podSeen(pod)
	if status := r.plugin.PreEnqueue(t.Context(), pod); status.IsSuccess() {
		t.Error("the hop was forgotten")
	}
	if got := len(s.pods); got != 1 || s.pods[types.UID("p")].hop.To != "b" {
		t.Errorf("%d pods", got)
	}
}

// A pod's key may change while it waits. A replica that starts afterwards knows the new one only, and two that went by
// different keys would each leave the pod to the other.
func TestAPodIsAtHomeWhereItsKeyIsNow(t *testing.T) {
	yes := true
	key := func(node string) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Annotations = map[string]string{sharding.AnnotationHashKey: nodeKey(node)} }
	}
	adopted := func(p *corev1.Pod) {
		p.Annotations = nil
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "web", Controller: &yes}}
	}
	pinned := func(node string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Annotations = nil
			p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
				RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
					MatchFields: []corev1.NodeSelectorRequirement{
						{Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{node}},
					},
				}}},
			}}
		}
	}
	for _, test := range []struct {
		name        string
		first, then func(*corev1.Pod)
	}{
		{"its annotation comes here", key("n2"), key("n0")},
		{"its annotation goes", key("n0"), key("n2")},
		{"a controller adopts it", key("n0"), adopted},
		{"what gates it pins it to a node here", key("n2"), pinned("n1")},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newReplica(t)
			s := r.plugin.schedulers
			pod := at("n0", "p", "1")
			test.first(pod)
			pod.ResourceVersion = "10"
			s.podSeen(pod)
			before := s.holds(s.waiting(pod))
			now := pod.DeepCopy()
			now.ResourceVersion = "20"
			test.then(now)
			held := s.serving.VNs.Has(sharding.VirtualNodeOf(podKey(now), testV)) // to one that starts now
			s.podSeen(now)
			if got := r.plugin.PreEnqueue(t.Context(), now).IsSuccess(); got != held {
				t.Errorf("held: %v, to a replica that starts now: %v", got, held)
			}
			if got := r.wasActivated("p"); got != (held && !before) {
				t.Errorf("let in: %v, was held: %v, is held: %v", got, before, held)
			}
		})
	}
}

// The replica that a pod is handed on to goes while the hop is being written: the pod is at home again, and nobody else will
// say so.
func TestAHopToOneThatHasGoneComesBack(t *testing.T) {
	pod := at("n0", "p", "1")
	r := newReplica(t, pod)
	r.fill("n0", "n1")
	r.cycle(pod)
	s := r.plugin.schedulers
	_, h, _ := s.moving(pod.UID)
	if h == nil {
		t.Fatal("it stays")
	}
	delete(r.seat.peers, h.To)
	s.look()
	moved := pod.DeepCopy()
	moved.Annotations[AnnotationReplica] = h.String()
	if !s.hasMoved(pod.UID, moved) {
		t.Error("it is forgotten")
	}
	if status := r.plugin.PreEnqueue(t.Context(), moved); !status.IsSuccess() {
		t.Errorf("it is not admitted: %v", status)
	}
}

// The API server has written a hop, and the answer was lost. The pod may be anywhere by the time of the next try.
func TestAHopThatWasWrittenIsNotWrittenAgain(t *testing.T) {
	for _, test := range []struct{ name, to string }{
		{"it is still there", "b"},
		{"it has gone on", "c"},
		{"it is here again", "a"},
	} {
		t.Run(test.name, func(t *testing.T) {
			pod := at("n0", "p", "1")
			pod.ResourceVersion = "10"
			r := newReplica(t, pod)
			r.fill("n0", "n1", "n4")
			r.cycle(pod)
			s := r.plugin.schedulers
			if _, h, _ := s.moving(pod.UID); h == nil || h.To != "b" {
				t.Fatalf("it goes to %v", h)
			}
			now := pod.DeepCopy()
			now.ResourceVersion = "20"
			now.Annotations[AnnotationReplica] = hop{To: test.to, Refused: []string{"a"}, Epoch: 1}.String()
			s.podSeen(now)
			if _, h, _ := s.moving(pod.UID); h != nil {
				t.Errorf("it is handed on to %s once more", h.To)
			}
			if got := r.plugin.PreEnqueue(t.Context(), now).IsSuccess(); got != (test.to == "a") || got != r.wasActivated("p") {
				t.Errorf("admitted: %v", got)
			}
		})
	}
}

// Somebody writes the annotation of a pod that was to move on. What was decided is over, and it is tried anew.
func TestAPodWhoseAnnotationIsWrittenIsTriedAnew(t *testing.T) {
	pod := at("n0", "p", "1")
	pod.ResourceVersion = "10"
	pod.Annotations[AnnotationReplica] = hop{To: "a", Refused: []string{"b", "c"}, Epoch: 1}.String()
	r := newReplica(t, pod)
	r.fill("n0", "n1", "n4", "n5")
	if _, _, status := r.cycle(pod); !strings.Contains(status.Message(), "seems to fit on a node of scheduler b") {
		t.Fatalf("PostFilter: %v", status)
	}
	for i, text := range []string{hop{To: "a"}.String(), "nonsense"} {
		now := pod.DeepCopy()
		now.ResourceVersion = fmt.Sprint(20 + i)
		now.Annotations[AnnotationReplica] = text
		r.wasActivated("p")
		r.plugin.schedulers.podSeen(now)
		if !r.wasActivated("p") {
			t.Errorf("%s: it is forgotten", text)
		}
	}
}

// The queue hears of a pod before this plugin's own handler does. If the pod's Virtual Node comes to be served in between,
// nobody else would let it in.
func TestAPodThatIsTurnedAwayBeforeItIsKnownIsLetIn(t *testing.T) {
	r := newReplica(t)
	pod := at("n5", "p", "1")
	if err := r.known.Add(pod); err != nil {
		t.Fatal(err)
	}
	if s := r.plugin.PreEnqueue(t.Context(), pod); s.IsSuccess() {
		t.Fatal("its home is not here yet")
	}
	r.seat.gain("n5")
	r.plugin.schedulers.look()
	r.plugin.schedulers.podSeen(pod)
	if !r.wasActivated("p") {
		t.Error("it was forgotten")
	}
	// One that the informer does not have any more will never be told to be over.
	gone := at("n2", "gone", "1")
	r.plugin.PreEnqueue(t.Context(), gone)
	if r.plugin.schedulers.pods[gone.UID] != nil {
		t.Error("a pod that is gone is kept for ever")
	}
}

// A pod may have been tried before this plugin's own handler hears of it. It moves on all the same.
func TestAPodThatIsTriedBeforeItIsKnownMovesOn(t *testing.T) {
	pod := at("n0", "p", "1")
	r := newReplica(t, pod)
	r.fill("n0", "n1")
	if err := r.known.Add(pod); err != nil {
		t.Fatal(err)
	}
	if _, _, status := r.attempt(pod); !strings.Contains(status.Message(), "moves on to b") {
		t.Errorf("PostFilter: %v %q", status, status.Message())
	}
	r.plugin.schedulers.podSeen(pod)
	if _, h, _ := r.plugin.schedulers.moving(pod.UID); h == nil {
		t.Error("it is forgotten")
	}
}

// An informer that was cut off shows a pod that was deleted, and made again under its name, as one that has changed.
func TestAPodThatIsMadeAgainEndsTheOneBefore(t *testing.T) {
	old := at("n0", "p", "1")
	old.ResourceVersion = "7"
	r := newReplica(t, old)
	state, w := reserved(t, r, old)
	if s := r.plugin.Bind(t.Context(), state, old, "n0"); !s.IsSuccess() {
		t.Fatalf("%v", s)
	}
	again := at("n0", "p", "1")
	again.UID = "again"
	podHandler(r.plugin.schedulers).OnUpdate(old, again)
	if !w.ended {
		t.Error("the right of the first is kept: its Virtual Node can never be given up")
	}
	if pods := r.plugin.schedulers.pods; len(pods) != 1 || pods[again.UID] == nil {
		t.Errorf("%d pods are kept", len(pods))
	}
}

// The scheduler's cache hears of nodes and of pods by different handlers. A node that it does not show yet may come before its
// pods do.
func TestANodeThatTheSnapshotDoesNotShowIsNotTakenUp(t *testing.T) {
	r := newReplica(t)
	late := st.MakeNode().Name("late").Capacity(map[corev1.ResourceName]string{"cpu": "4", "pods": "110"}).Obj()
	s := r.plugin.schedulers
	if err := r.nodes.Add(late); err != nil {
		t.Fatal(err)
	}
	s.nodes["late"] = sharding.VirtualNodeOf(nodeKey("late"), testV)
	bound := at("n0", "bound", "4")
	bound.Spec.NodeName = "late"
	if err := r.known.Add(bound); err != nil {
		t.Fatal(err)
	}
	r.seat.gain("late")
	s.look()
	if _, fits, _ := r.cycle(at("n0", "p", "1")); !slices.Equal(fits, []string{"n0", "n1"}) {
		t.Errorf("fits on %v", fits)
	}
	r.cache.AddNode(r.logger, late)
	if _, fits, _ := r.cycle(at("n0", "p", "1")); slices.Contains(fits, "late") {
		t.Error("the node is taken for empty")
	}
	if err := r.cache.AddPod(r.logger, bound); err != nil {
		t.Fatal(err)
	}
	r.cycle(at("n0", "p", "1"))
	if !s.ownNodes().Has("late") {
		t.Error("it is never taken up")
	}
}

// A Virtual Node that was lost and has come back is looked at anew: others may have bound to its nodes meanwhile.
func TestANodeThatComesBackIsLookedAtAnew(t *testing.T) {
	r := newReplica(t)
	if _, fits, _ := r.cycle(at("n0", "p", "1")); !slices.Equal(fits, []string{"n0", "n1"}) {
		t.Fatalf("fits on %v", fits)
	}
	bound := at("n1", "bound", "4")
	bound.Spec.NodeName = "n1"
	if err := r.known.Add(bound); err != nil {
		t.Fatal(err)
	}
	r.seat.lose()
	r.seat.gain("n0", "n1") // before anybody looked
	r.plugin.schedulers.look()
	if _, fits, _ := r.cycle(at("n0", "p", "1")); !slices.Equal(fits, []string{"n0"}) {
		t.Errorf("fits on %v: the scheduler's cache does not show what was bound to n1", fits)
	}
}

// A pod that fits nowhere is tried again when nodes have gone from one replica to another.
func TestAPodThatFitsNowhereIsTriedAgainWhenNodesMove(t *testing.T) {
	r := newReplica(t)
	r.fill("n0", "n1", "n2", "n3", "n4", "n5")
	r.cycle(at("n0", "p", "1"))
	s := r.plugin.schedulers
	s.look()
	if r.wasActivated("p") {
		t.Error("it is tried again, and nothing has changed")
	}
	r.seat.give("c", "n5")
	r.seat.give("c")
	s.look()
	if !r.wasActivated("p") {
		t.Error("it is not tried again")
	}
}

// All have refused the pod, and it seems to fit all the same: another round begins by itself.
func TestAnotherRoundBeginsByItself(t *testing.T) {
	pod := at("n0", "p", "1")
	pod.Annotations[AnnotationReplica] = hop{To: "a", Refused: []string{"b", "c"}, Epoch: 1}.String()
	r := newReplica(t, pod)
	r.fill("n0", "n1", "n4", "n5")
	if _, _, status := r.cycle(pod); !strings.Contains(status.Message(), "seems to fit on a node of scheduler b") || capacity.RefusedByAll(status.Message()) {
		t.Errorf("PostFilter: %v", status)
	}
	done := make(chan bool)
	go func() { done <- r.plugin.schedulers.moveNext(t.Context()) }()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Fatal("it rests")
	}
	moved, err := r.client.CoreV1().Pods("ns").Get(t.Context(), "p", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if h := hopOf(moved); h == nil || h.To != "b" || h.Again != 1 || !slices.Equal(h.Refused, []string{"a"}) {
		t.Errorf("the pod carries %v", h)
	}
}

// A pod that waits at Permit, as members of gangs do, does not keep its node's Virtual Node from going.
func TestAPodThatWaitsAtPermitLetsItsNodeGo(t *testing.T) {
	r := newReplica(t)
	for _, node := range []string{"n0", "n1"} {
		pod := at("n0", "on-"+node, "1")
		pod.Spec.NodeName = node
		r.framework.AddWaitingPod(pod, map[string]time.Duration{"Gang": 20 * time.Second})
	}
	r.seat.draining = vnsOf("n0")
	r.plugin.schedulers.look()
	gone := at("n0", "on-n0", "1")
	if status := r.framework.WaitOnPermit(t.Context(), gone); status.IsSuccess() || capacity.RefusedByAll(status.Message()) {
		t.Errorf("%v", status)
	}
	left := 0
	r.framework.IterateOverWaitingPods(func(fwk.WaitingPod) { left++ })
	if left != 1 {
		t.Errorf("%d pods wait on, want the one whose node stays", left)
	}
}
