package demand

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
)

func upcomingNode(name, cpu string, change ...func(*fleetv1alpha1.UpcomingNode)) *fleetv1alpha1.UpcomingNode {
	n := &fleetv1alpha1.UpcomingNode{}
	n.Name = name
	n.Spec.Labels = map[string]string{"kind": "small"}
	n.Spec.Resources = fleetv1alpha1.ResourceList{"cpu": resource.MustParse(cpu)}
	for _, c := range change {
		c(n)
	}
	return n
}

func TestRoomOfAnUpcomingNodeIsPromisedOnce(t *testing.T) {
	one := capacity.ProfileOfPod(pod("x"))
	type step struct {
		do   func(s *Suppressor)
		pod  types.UID
		with func(p capacity.Profile) capacity.Profile
		held bool
	}
	add := func(name, cpu string, change ...func(*fleetv1alpha1.UpcomingNode)) step {
		return step{do: func(s *Suppressor) { s.SetNode(upcomingNode(name, cpu, change...)) }}
	}
	ask := func(uid types.UID, held bool) step { return step{pod: uid, held: held} }
	release := func(uid types.UID) step { return step{do: func(s *Suppressor) { s.Release(uid) }} }
	gone := func(name string) step { return step{do: func(s *Suppressor) { s.DeleteNode(name) }} }

	for _, c := range []struct {
		name  string
		steps []step
	}{
		{"without nodes nothing is held", []step{ask("a", false)}},
		{"what fits is held, what does not asks", []step{add("n", "2"), ask("a", true), ask("b", true), ask("c", false)}},
		{"asking again repeats the answer", []step{add("n", "1"), ask("a", true), ask("a", true), ask("b", false), ask("b", false)}},
		{"the pods for which a node was launched come first", []step{ask("a", false), add("n", "2"), ask("b", true), ask("c", false)}},
		{"a pod that is gone gives its room back", []step{add("n", "1"), ask("a", true), release("a"), ask("b", true)}},
		{"a held pod asks once its node is no longer upcoming", []step{add("n", "1"), ask("a", true), gone("n"), ask("a", false)}},
		{"a pod with a request keeps it", []step{ask("a", false), add("n", "5"), ask("a", false)}},
		{
			"a failed node's pod is served by the next",
			[]step{ask("a", false), add("n", "1"), gone("n"), add("m", "1"), ask("b", false)},
		},
		{
			"a node that is Ready is not upcoming",
			[]step{add("n", "1", func(n *fleetv1alpha1.UpcomingNode) { n.Status.Phase = "Ready" }), ask("a", false)},
		},
		{
			"a taint that is not tolerated keeps the pod away",
			[]step{add("n", "1", func(n *fleetv1alpha1.UpcomingNode) {
				n.Spec.Taints = []corev1.Taint{{Key: "gpu", Effect: corev1.TaintEffectNoSchedule}}
			}), ask("a", false)},
		},
		{
			"another label keeps the pod away",
			[]step{add("n", "1"), {pod: "a", with: func(p capacity.Profile) capacity.Profile {
				return p.WithRequirements(capacity.Requirement{Key: "kind", Operator: capacity.OperatorIn, Values: []string{"big"}})
			}}},
		},
		{
			"a limit of pods counts",
			[]step{add("n", "9", func(n *fleetv1alpha1.UpcomingNode) {
				n.Spec.Resources["pods"] = resource.MustParse("1")
			}), ask("a", true), ask("b", false)},
		},
		{
			"a member of a group always asks",
			[]step{add("n", "9"), {pod: "a", with: func(p capacity.Profile) capacity.Profile {
				p.Group = &capacity.Group{Name: "g"}
				return p
			}}},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := NewSuppressor()
			for i, step := range c.steps {
				if step.do != nil {
					step.do(s)
					continue
				}
				p := one
				if step.with != nil {
					p = step.with(p)
				}
				if node, held := s.Hold(step.pod, p); held != step.held {
					t.Fatalf("step %d: pod %s held: %v (node %q), want %v", i, step.pod, held, node, step.held)
				}
			}
		})
	}
}

func TestSuppressorForgetsEverything(t *testing.T) {
	s := NewSuppressor()
	p := capacity.ProfileOfPod(pod("x"))
	s.Hold("a", p)
	s.SetNode(upcomingNode("n", "2"))
	s.Hold("b", p)
	s.Hold("c", p)
	for _, uid := range []types.UID{"a", "b", "c", "d"} {
		s.Release(uid)
	}
	if free := s.nodes["n"].free; free["cpu"] != 2000 {
		t.Errorf("the node has %v free after all pods left, want 2 CPUs", free)
	}
	s.DeleteNode("n")
	if len(s.pods)+len(s.nodes)+len(s.nodeOrder)+len(s.unplaced) != 0 {
		t.Errorf("something is left: %+v", s)
	}
}

func TestPodThatIsForgottenDuringItsWriteHoldsNoRoom(t *testing.T) {
	room := NewSuppressor()
	var w *Writer
	w = newTestWriter(t, newFakeAPI(), func(o *Options) {
		o.Suppressor = room
		o.Describe = func(pod *corev1.Pod) capacity.Profile {
			w.Forget(pod.UID)
			return capacity.ProfileOfPod(pod)
		}
	})
	w.Enqueue(pod("web-0"), nil)
	work(t, w)
	if len(room.pods) != 0 || len(room.unplaced) != 0 {
		t.Errorf("%d pods and %d places in line are left of a pod that is gone", len(room.pods), len(room.unplaced))
	}
}
