package vnaffinity

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/internal/builders"
)

const limited = `,"members":{"maxShareLostPerDomain":{"topology.kubernetes.io/zone":0.4}}`

// nodesIn makes nodes "a-0", "a-1", and so on, in zones a, b, c.
func nodesIn(perZone ...int) []*corev1.Node {
	var nodes []*corev1.Node
	for z, n := range perZone {
		zone := string(rune('a' + z))
		for i := range n {
			nodes = append(nodes, builders.Node(fmt.Sprintf("%s-%d", zone, i)).Label(corev1.LabelTopologyZone, zone).Obj())
		}
	}
	return nodes
}

func memberPod(name string) *builders.PodBuilder {
	return builders.Pod("ns", name).Label(lbv1alpha1.LabelWatchGroup, "g")
}

func zoneOf(node string) string { z, _, _ := strings.Cut(node, "-"); return z }

// Two members own nearly everything: the zones with the four others are the better ones, though more pods are there.
func TestMembersSpreadByWhatTheyOwn(t *testing.T) {
	r := newRig(t, `,"members":{}`, nodesIn(2, 2, 2))
	for i, node := range []string{"a-0", "b-0", "c-0", "c-0", "c-1", "c-1"} {
		pod := memberPod(fmt.Sprint("m", i)).Obj()
		r.put(pod, node)
		r.sees(pod)
	}
	r.owns("ns", "g", "m0", "0-399")
	r.owns("ns", "g", "m1", "400-799")
	for i := range 4 {
		r.owns("ns", "g", fmt.Sprint("m", i+2), fmt.Sprintf("%d-%d", 800+50*i, 849+50*i))
	}
	scores, _ := r.cycle(memberPod("next").Obj())
	if got := best(scores); !slices.Equal(got, []string{"c-0", "c-1"}) {
		t.Errorf("the best are %v: %v", got, scores)
	}
	// Within the zone the other node is better once one of the two is heavier.
	r.owns("ns", "g", "m2", "800-849,1000")
	scores, _ = r.cycle(memberPod("next").Obj())
	if got := best(scores); !slices.Equal(got, []string{"c-1"}) {
		t.Errorf("the best are %v: %v", got, scores)
	}
	if scores["c-0"] <= scores["a-1"] {
		t.Errorf("the zone does not count before the node: %v", scores)
	}
}

// What moves belongs to the member that it moves to, while it moves.
func TestMembersWeighWhatIsIncoming(t *testing.T) {
	r := newRig(t, `,"members":{}`, nodesIn(1, 1))
	for i, node := range []string{"a-0", "b-0"} {
		r.put(memberPod(fmt.Sprint("m", i)).Obj(), node)
	}
	r.owns("ns", "g", "m0", "0-799")
	r.owns("ns", "g", "m1", "800-999")
	if scores, _ := r.cycle(memberPod("next").Obj()); !slices.Equal(best(scores), []string{"b-0"}) {
		t.Errorf("before the handoff: %v", scores)
	}
	giving, taking := sliceOf("ns", "g", "m0", "0-399"), sliceOf("ns", "g", "m1", "800-999")
	giving.Spec.Draining = []lbv1alpha1.Order{{Epoch: 2, VirtualNodes: "400-799"}}
	taking.Spec.Incoming = []lbv1alpha1.Order{{Epoch: 2, VirtualNodes: "400-799"}}
	r.groups.setSlice(giving)
	r.groups.setSlice(taking)
	if scores, _ := r.cycle(memberPod("next").Obj()); !slices.Equal(best(scores), []string{"a-0"}) {
		t.Errorf("during the handoff: %v", scores)
	}
}

// A member that ends, or asks to be relieved, keeps nobody away.
func TestMembersThatLeaveDoNotCount(t *testing.T) {
	now := metav1.Now()
	terminating := memberPod("m1").Obj()
	terminating.DeletionTimestamp = &now
	finished := memberPod("m1").Obj()
	finished.Status.Phase = corev1.PodFailed
	leaving := sliceOf("ns", "g", "m1", "0-899")
	leaving.Status.Leaving = true
	for name, c := range map[string]struct {
		pod   *corev1.Pod
		slice *lbv1alpha1.VirtualNodeSlice
	}{
		"terminating": {terminating, sliceOf("ns", "g", "m1", "0-899")},
		"finished":    {finished, sliceOf("ns", "g", "m1", "0-899")},
		"leaving":     {memberPod("m1").Obj(), leaving},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, limited, nodesIn(1, 1))
			stays := memberPod("m0").Obj()
			r.put(stays, "a-0")
			r.put(c.pod, "b-0")
			r.sees(stays, c.pod)
			r.owns("ns", "g", "m0", "900-999")
			r.groups.setSlice(c.slice)
			scores, refused := r.cycle(memberPod("next").Obj())
			if !slices.Equal(best(scores), []string{"b-0"}) || refused["b-0"] != "" {
				t.Errorf("scores %v, refused %v", scores, refused)
			}
		})
	}
}

// During a rolling update the new pods spread among themselves.
func TestMembersOfANewRevisionSpreadAmongThemselves(t *testing.T) {
	pod := func(name, hash string) *corev1.Pod {
		return memberPod(name).Owner("ReplicaSet", "web-"+hash).Label("pod-template-hash", hash).Obj()
	}
	r := newRig(t, `,"members":{}`, nodesIn(2, 2))
	for i, node := range []string{"a-0", "a-0", "a-1", "b-0"} {
		r.put(pod(fmt.Sprint("old", i), "old"), node)
	}
	r.put(pod("new0", "new"), "b-1")
	scores, _ := r.cycle(pod("new1", "new"))
	if got := best(scores); !slices.Equal(got, []string{"a-1"}) {
		t.Errorf("the best are %v: %v", got, scores)
	}
	if scores, _ := r.cycle(pod("more", "old")); zoneOf(best(scores)[0]) != "b" {
		t.Errorf("a pod of the old revision: %v", scores)
	}
}

func TestMembersOfOtherGroupsAndOtherPodsDoNotCount(t *testing.T) {
	r := newRig(t, limited, nodesIn(1, 1))
	r.put(builders.Pod("ns", "plain").Obj(), "a-0")
	r.put(builders.Pod("other", "m").Label(lbv1alpha1.LabelWatchGroup, "g").Obj(), "a-0")
	r.put(builders.Pod("ns", "m").Label(lbv1alpha1.LabelWatchGroup, "h").Obj(), "a-0")
	scores, refused := r.cycle(memberPod("next").Obj())
	if len(best(scores)) != 2 || len(refused) != 0 {
		t.Errorf("scores %v, refused %v", scores, refused)
	}
	if scores, _ = r.cycle(builders.Pod("ns", "plain2").Obj()); scores["a-0"] != 0 || scores["b-0"] != 0 {
		t.Errorf("a pod of no group has scores: %v", scores)
	}
}

func TestLimitRefusesDomains(t *testing.T) {
	r := newRig(t, limited, nodesIn(1, 1, 1))
	pods := make([]*corev1.Pod, 5)
	for i := range pods {
		pods[i] = memberPod(fmt.Sprint("m", i)).Obj()
	}
	r.sees(pods...) // all wait, as a ReplicaSet has just made them
	for _, p := range pods[:4] {
		if r.schedule(p) == "" {
			t.Fatalf("%s fits nowhere", p.Name)
		}
	}
	_, refused := r.cycle(pods[4])
	want := "node(s) would put more than 40% of the Virtual Nodes of WatchGroup ns/g into one topology.kubernetes.io/zone " +
		"(maxShareLostPerDomain)"
	if len(refused) != 1 {
		t.Errorf("refused: %v", refused)
	}
	for node, reason := range refused {
		if reason != want {
			t.Errorf("node %s: %q, want %q", node, reason, want)
		}
	}
}

// Preemption asks what would be without a member, and with one that is nominated.
func TestLimitUnderPreemption(t *testing.T) {
	r := newRig(t, limited, nodesIn(1, 1))
	victim, pod := memberPod("victim").Obj(), memberPod("next").Obj()
	r.put(victim, "a-0")
	r.sees(victim, pod)
	if err := r.cache.UpdateSnapshot(r.logger, r.snapshot); err != nil {
		t.Fatal(err)
	}
	state := framework.NewCycleState()
	if _, status, _ := r.framework.RunPreFilterPlugins(t.Context(), state, pod); !status.IsSuccess() {
		t.Fatal(status)
	}
	node, err := r.snapshot.NodeInfos().Get("a-0")
	if err != nil {
		t.Fatal(err)
	}
	allowed := func(state fwk.CycleState) bool {
		return r.framework.RunFilterPlugins(t.Context(), state, pod, node).IsSuccess()
	}
	if allowed(state) {
		t.Fatal("two members in one zone are let in")
	}
	dry := state.Clone()
	info, err := framework.NewPodInfo(victim)
	if err != nil {
		t.Fatal(err)
	}
	extensions := r.plugin.PreFilterExtensions()
	if status := extensions.RemovePod(t.Context(), dry, pod, info, node); !status.IsSuccess() || !allowed(dry) {
		t.Errorf("without the victim: %v", status)
	}
	if allowed(state) {
		t.Error("the dry run has changed the cycle itself")
	}
	if status := extensions.AddPod(t.Context(), dry, pod, info, node); !status.IsSuccess() || allowed(dry) {
		t.Errorf("with the victim again: %v", status)
	}
}

// Nodes without the label are one domain: nothing tells them apart.
func TestNodesWithoutTheLabelAreOneDomain(t *testing.T) {
	nodes := append(nodesIn(1), builders.Node("x-0").Obj(), builders.Node("x-1").Obj())
	r := newRig(t, limited, nodes)
	first := memberPod("m0").Obj()
	r.put(first, "x-0")
	r.sees(first)
	scores, refused := r.cycle(memberPod("next").Obj())
	if refused["x-0"] == "" || refused["x-1"] == "" || !slices.Equal(best(scores), []string{"a-0"}) {
		t.Errorf("scores %v, refused %v", scores, refused)
	}
}

func TestMembersAreQueuedByWhatMakesRoom(t *testing.T) {
	r := newRig(t, limited, nodesIn(1))
	m := r.plugin.members
	pod := memberPod("waits").Obj()
	labelled, other := memberPod("m").Obj(), builders.Pod("ns", "plain").Obj()
	node, moved := builders.Node("n").Label(corev1.LabelTopologyZone, "a").Obj(), builders.Node("n").Label(corev1.LabelTopologyZone, "b").Obj()
	for _, c := range []struct {
		name          string
		hint          fwk.QueueingHintFn
		before, after any
		want          fwk.QueueingHint
	}{
		{"a member goes", m.afterPod, labelled, nil, fwk.Queue},
		{"a member comes", m.afterPod, nil, labelled, fwk.Queue},
		{"a pod stops being a member", m.afterPod, labelled, other, fwk.Queue},
		{"another pod goes", m.afterPod, other, nil, fwk.QueueSkip},
		{"a node comes", m.afterNode, nil, node, fwk.Queue},
		{"a node gets another zone", m.afterNode, node, moved, fwk.Queue},
		{"a node gets another label", m.afterNode, node, node.DeepCopy(), fwk.QueueSkip},
	} {
		if got, err := c.hint(r.logger, pod, c.before, c.after); err != nil || got != c.want {
			t.Errorf("%s: %v, %v", c.name, got, err)
		}
	}
	if events, err := r.plugin.EventsToRegister(t.Context()); err != nil || len(events) != 2 {
		t.Errorf("%d events, %v", len(events), err)
	}
	if events, _ := newRig(t, `,"members":{}`, nil).plugin.EventsToRegister(t.Context()); len(events) != 0 {
		t.Errorf("a plugin that refuses nothing registers %d events", len(events))
	}
}

// A slice that cannot be read loses nothing but itself.
func TestUnreadableSlices(t *testing.T) {
	r := newRig(t, `,"members":{}`, nodesIn(1, 1))
	r.put(memberPod("m0").Obj(), "a-0")
	r.put(memberPod("m1").Obj(), "b-0")
	r.owns("ns", "g", "m0", "0-99")
	r.owns("ns", "g", "m1", "200-399")
	r.owns("ns", "g", "m1", "9-3")
	if s, ok := r.groups.slice(groupKey("ns", "g"), "m1"); ok {
		t.Errorf("m1 owns %v", s.owned)
	}
	if s, _ := r.groups.slice(groupKey("ns", "g"), "m0"); s.weight != 100 {
		t.Errorf("m0 weighs %d", s.weight)
	}
	if scores, _ := r.cycle(memberPod("next").Obj()); len(best(scores)) != 2 {
		t.Errorf("m1 should weigh the mean, which is what m0 owns: %v", scores)
	}
}

// What the members own changes what each may have: those that wait are tried again, and nobody else is.
func TestMembersAreTriedAgainWhenOwnershipChanges(t *testing.T) {
	r := newRig(t, limited, nodesIn(1))
	running := memberPod("runs").Obj()
	running.Spec.NodeName = "a-0"
	r.sees(memberPod("waits").Obj(), running, builders.Pod("ns", "plain").Obj(),
		builders.Pod("other", "m").Label(lbv1alpha1.LabelWatchGroup, "g").Obj())
	expect := func(what string, want ...string) {
		t.Helper()
		if !slices.Equal(r.activated, want) {
			t.Errorf("%s: tried again: %v, want %v", what, r.activated, want)
		}
		r.activated = nil
	}
	r.owns("ns", "g", "runs", "0-99")
	expect("a slice comes", "ns/waits")
	r.owns("ns", "g", "runs", "100-199")
	expect("another hundred")
	r.owns("ns", "g", "runs", "0-49")
	expect("fewer", "ns/waits")
	r.groups.deleteSlice(sliceOf("ns", "g", "runs", ""))
	expect("the slice goes", "ns/waits")
	r.owns("ns", "h", "x", "0-49")
	expect("another group")
}
