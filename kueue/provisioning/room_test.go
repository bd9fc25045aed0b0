package provisioning

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/internal/builders"
)

const rackKey = "topology.kubernetes.io/rack"

// set is a pod set of pods that look like pod; group and topology key may be empty.
func set(count int32, group, key string, pod *builders.PodBuilder) PodSet {
	p := capacity.ProfileOfPod(pod.Obj())
	if group != "" {
		p.Group = &capacity.Group{Name: group, TopologyKey: key}
	}
	return PodSet{Profile: p.Canonical(), Count: count}
}

func gpus(n string) *builders.PodBuilder {
	return builders.Pod("ns", "p").Requests("nvidia.com/gpu", n)
}

func node(name, rack, gpus string, pods ...*builders.PodBuilder) Node {
	var bound []corev1.Pod
	for _, p := range pods {
		bound = append(bound, *p.Obj())
	}
	return NodeOf(builders.Node(name).Machine(name).Rack(rack).Allocatable("nvidia.com/gpu", gpus).Obj(), bound, nil)
}

func TestPlace(t *testing.T) {
	tainted := builders.Node("t").Taint("gpu", "yes", corev1.TaintEffectNoSchedule).Allocatable("nvidia.com/gpu", "8").Obj()
	small := builders.Node("s").Allocatable("nvidia.com/gpu", "8", "pods", "2").Obj()
	for _, c := range []struct {
		name  string
		nodes []Node
		sets  []PodSet
		want  Placement
	}{
		{
			name:  "pods of one set share nodes",
			nodes: []Node{node("a", "r1", "8"), node("b", "r1", "8"), node("c", "r1", "8")},
			sets:  []PodSet{set(4, "g", "", gpus("4"))},
			want:  Placement{Wanted: 4, Placed: 4, Nodes: []string{"a", "b"}},
		},
		{
			name: "bound pods take their room, ended ones do not",
			nodes: []Node{
				node("a", "r1", "8", gpus("4").Node("a")),
				node("b", "r1", "8", gpus("8").Node("b").Phase(corev1.PodSucceeded)),
			},
			sets: []PodSet{set(3, "g", "", gpus("4"))},
			want: Placement{Wanted: 3, Placed: 3, Nodes: []string{"a", "b"}},
		},
		{
			name:  "what does not fit says how far it got and books nothing",
			nodes: []Node{node("a", "r1", "8")},
			sets:  []PodSet{set(3, "g", "", gpus("4"))},
			want:  Placement{Wanted: 3, Placed: 2},
		},
		{
			name:  "pods that have to share a rack are not spread over two",
			nodes: []Node{node("a", "r1", "8"), node("b", "r2", "8")},
			sets:  []PodSet{set(2, "g", rackKey, gpus("8"))},
			want:  Placement{Wanted: 2, Placed: 1},
		},
		{
			name:  "the rack that carries all of them is found",
			nodes: []Node{node("a", "r1", "8"), node("b", "r2", "8"), node("c", "r2", "8")},
			sets:  []PodSet{set(2, "g", rackKey, gpus("8"))},
			want:  Placement{Wanted: 2, Placed: 2, Nodes: []string{"b", "c"}, Domain: "r2"},
		},
		{
			name:  "two groups may stand in two racks",
			nodes: []Node{node("a", "r1", "8"), node("b", "r2", "8")},
			sets:  []PodSet{set(1, "g", rackKey, gpus("8")), set(1, "h", rackKey, gpus("8"))},
			want:  Placement{Wanted: 2, Placed: 2, Nodes: []string{"a", "b"}, Domain: "r2"},
		},
		{
			name:  "two sets of one group share the rack",
			nodes: []Node{node("a", "r1", "8"), node("b", "r2", "8")},
			sets:  []PodSet{set(1, "g", rackKey, gpus("8")), set(1, "g", rackKey, gpus("7"))},
			want:  Placement{Wanted: 2, Placed: 1},
		},
		{
			name:  "a node without the label is in no rack",
			nodes: []Node{NodeOf(builders.Node("a").Allocatable("nvidia.com/gpu", "8").Obj(), nil, nil)},
			sets:  []PodSet{set(1, "g", rackKey, gpus("8"))},
			want:  Placement{Wanted: 1},
		},
		{
			name:  "a taint keeps away who does not tolerate it",
			nodes: []Node{NodeOf(tainted, nil, nil)},
			sets:  []PodSet{set(1, "g", "", gpus("1"))},
			want:  Placement{Wanted: 1},
		},
		{
			name:  "and lets in who does",
			nodes: []Node{NodeOf(tainted, nil, nil)},
			sets:  []PodSet{set(1, "g", "", gpus("1").Tolerates("gpu", corev1.TaintEffectNoSchedule))},
			want:  Placement{Wanted: 1, Placed: 1, Nodes: []string{"t"}},
		},
		{
			name:  "a node selector chooses",
			nodes: []Node{node("a", "r1", "8"), node("b", "r2", "8")},
			sets:  []PodSet{set(1, "g", "", gpus("1").NodeSelector(rackKey, "r2"))},
			want:  Placement{Wanted: 1, Placed: 1, Nodes: []string{"b"}},
		},
		{
			name:  "a node takes no more pods than it says",
			nodes: []Node{NodeOf(small, []corev1.Pod{*builders.Pod("ns", "x").Node("s").Obj()}, nil)},
			sets:  []PodSet{set(2, "g", "", gpus("1"))},
			want:  Placement{Wanted: 2, Placed: 1},
		},
		{
			name:  "pods that exclude each other stand apart",
			nodes: []Node{node("a", "r1", "8"), node("b", "r1", "8")},
			sets: []PodSet{set(2, "g", "",
				gpus("1").Label("app", "x").PodAntiAffinity(corev1.LabelHostname, "app", "x"))},
			want: Placement{Wanted: 2, Placed: 2, Nodes: []string{"a", "b"}},
		},
		{
			name:  "and need as many nodes",
			nodes: []Node{node("a", "r1", "8")},
			sets: []PodSet{set(2, "g", "",
				gpus("1").Label("app", "x").PodAntiAffinity(corev1.LabelHostname, "app", "x"))},
			want: Placement{Wanted: 2, Placed: 1},
		},
		{
			name:  "the choosy set goes first",
			nodes: []Node{node("a", "r1", "8"), node("b", "r2", "8")},
			sets:  []PodSet{set(1, "g", "", gpus("8")), set(1, "g", "", gpus("8").NodeSelector(rackKey, "r1"))},
			want:  Placement{Wanted: 2, Placed: 2, Nodes: []string{"a", "b"}},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, NewRoom(c.nodes).Place(c.sets), cmpopts.IgnoreUnexported(Placement{})); diff != "" {
				t.Errorf("placement (-want +got):\n%s", diff)
			}
		})
	}
}

func TestRoomIsGivenOnce(t *testing.T) {
	room := NewRoom([]Node{node("a", "r1", "8"), node("b", "r1", "8")})
	two := []PodSet{set(2, "g", "", gpus("8"))}
	if p := room.Place([]PodSet{set(3, "g", "", gpus("8"))}); p.Complete() {
		t.Fatalf("three pods on two nodes: %+v", p)
	}
	if p := room.Place(two); !p.Complete() {
		t.Fatalf("what did not fit took room all the same: %+v", p)
	}
	if p := room.Place(two); p.Placed != 0 {
		t.Errorf("placed %d pods on room that is taken", p.Placed)
	}
}

func TestPromisedRoomIsNotGivenAway(t *testing.T) {
	nodes := []Node{node("a", "r1", "8"), node("b", "r1", "8")}
	room := NewRoom(nodes)
	room.Promise([]PodSet{set(1, "g", "", gpus("8"))}, []string{"b", "gone"})
	if got := room.Place([]PodSet{set(1, "h", "", gpus("8"))}); !cmp.Equal(got.Nodes, []string{"a"}) {
		t.Errorf("placed on %v, want a", got.Nodes)
	}
	if got := room.Place([]PodSet{set(1, "i", "", gpus("1"))}); got.Complete() {
		t.Errorf("placed on %v, which is promised", got.Nodes)
	}
	if got := NewRoom(nodes).Place([]PodSet{set(2, "j", "", gpus("8"))}); !got.Complete() {
		t.Error("room changed the nodes that it was made of")
	}
}

// What a DaemonSet will take of a new node is not free, and what its pod takes already is not taken twice.
func TestDaemonSetPodsThatAreNotThereYetTakeRoom(t *testing.T) {
	ds := appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{UID: "agent"}}
	ds.Spec.Template.Spec = builders.Pod("ns", "agent").Requests("cpu", "2").Obj().Spec
	daemons := DaemonsOf([]appsv1.DaemonSet{ds})
	n := builders.Node("n").Allocatable("cpu", "8", "pods", "10").Obj()
	if free := NodeOf(n, nil, daemons).Free; free["cpu"] != 6000 || free["pods"] != 9 {
		t.Errorf("a new node has %v free, want 6 cores and 9 pods", free)
	}
	yes := true
	agent := builders.Pod("ns", "agent-x").Requests("cpu", "2").Node("n").Obj()
	agent.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "agent", UID: "agent", Controller: &yes}}
	if free := NodeOf(n, []corev1.Pod{*agent}, daemons).Free; free["cpu"] != 6000 || free["pods"] != 9 {
		t.Errorf("with its DaemonSet's pod the node has %v free, want 6 cores and 9 pods", free)
	}
	tainted := builders.Node("t").Taint("gpu", "yes", corev1.TaintEffectNoSchedule).Allocatable("cpu", "8").Obj()
	if free := NodeOf(tainted, nil, daemons).Free; free["cpu"] != 8000 {
		t.Errorf("a node that the DaemonSet does not tolerate has %v free", free)
	}
}

// A node carries one pod of a host port, also where the other pod is somebody else's.
func TestHostPortsAreTakenOnce(t *testing.T) {
	port := gpus("1").Obj()
	port.Spec.Containers[0].Ports = []corev1.ContainerPort{{HostPort: 80}}
	a := NodeOf(builders.Node("a").Allocatable("nvidia.com/gpu", "8").Obj(), []corev1.Pod{*port}, nil)
	b := node("b", "r1", "8")
	want := PodSet{Profile: capacity.ProfileOfPod(port), Count: 2}
	if got := NewRoom([]Node{a, b}).Fit(want); got.Placed != 1 {
		t.Errorf("%d pods of one host port on two nodes, of which one has the port taken", got.Placed)
	}
	if got := NewRoom([]Node{a}).Fit(set(1, "g", "", gpus("1"))); got.Placed != 1 {
		t.Error("a pod without host ports was kept off")
	}
}

// What does not fit as a whole any more keeps what there is: the rest of its pods will come for it.
func TestHoldKeepsWhatIsLeft(t *testing.T) {
	room := NewRoom([]Node{node("a", "r1", "8"), node("b", "r1", "8")})
	room.Hold(Holding{PodSets: []PodSet{set(3, "g", "", gpus("8"))}})
	if p := room.Fit(set(1, "h", "", gpus("8"))); p.Placed != 0 {
		t.Error("room of a workload that has lost one of three nodes was given away")
	}
}

func TestFitGivesBack(t *testing.T) {
	room := NewRoom([]Node{node("a", "r1", "8"), node("b", "r2", "8")})
	if p := room.Fit(set(2, "g", rackKey, gpus("8"))); p.Placed != 0 {
		t.Errorf("%d of two pods that have to share a rack were placed", p.Placed)
	}
	p := room.Fit(set(3, "g", "", gpus("8")))
	if p.Placed != 2 {
		t.Errorf("%d pods found room on two nodes", p.Placed)
	}
	p.GiveBack()
	if p := room.Fit(set(2, "g", "", gpus("8"))); !p.Complete() {
		t.Error("room that was given back is gone")
	}
}

func TestIsReady(t *testing.T) {
	for name, c := range map[string]struct {
		node *corev1.Node
		want bool
	}{
		"ready":    {builders.Node("n").Ready().Obj(), true},
		"silent":   {builders.Node("n").Obj(), false},
		"cordoned": {builders.Node("n").Ready().Unschedulable().Obj(), false},
	} {
		if got := IsReady(c.node); got != c.want {
			t.Errorf("%s: got %v", name, got)
		}
	}
}
