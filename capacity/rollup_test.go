package capacity

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/internal/builders"
)

func key(name string) types.NamespacedName { return types.NamespacedName{Namespace: "ns", Name: name} }

// web is a pod of one CPU; its request asks for two, so that one can see which of the two counts.
func web(name string) *builders.PodBuilder { return builders.Pod("ns", name).Requests("cpu", "1") }

func requestFor(pod *corev1.Pod) *fleetv1alpha1.CapacityRequest {
	return builders.CapacityRequest("ns", "cr-"+pod.Name).For(pod).Requests("cpu", "2").Obj()
}

// tally is the roll-up as counts by CPU, with what of them is pending.
func tally(r *Rollup) map[string]string {
	out := map[string]string{}
	for _, n := range r.Snapshot().Needs {
		out[n.Profile.Resources.Strings()["cpu"]+" CPU"] = fmt.Sprintf("%d, %d pending", n.Count, n.Pending)
	}
	return out
}

func expectTally(t *testing.T, r *Rollup, want map[string]string) {
	t.Helper()
	if diff := cmp.Diff(want, tally(r)); diff != "" {
		t.Errorf("roll-up (-want +got):\n%s", diff)
	}
}

func TestWhatCounts(t *testing.T) {
	deleted := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	type counts map[string]string
	none, own := counts{}, counts{"1 CPU": "1, 0 pending"}
	waits, asked := counts{"2 CPU": "1, 1 pending"}, counts{"2 CPU": "1, 0 pending"}
	for name, tc := range map[string]struct {
		pod     *corev1.Pod
		request bool
		total   counts
		only    counts // mode RequestsOnly
	}{
		"unbound, no request":             {web("p").Obj(), false, none, none},
		"unbound, request":                {web("p").Obj(), true, waits, waits},
		"on a managed node, no request":   {web("p").Node("managed").Obj(), false, own, none},
		"on a managed node, request":      {web("p").Node("managed").Obj(), true, asked, asked},
		"on a static node, no request":    {web("p").Node("static").Obj(), false, none, none},
		"on a static node, request":       {web("p").Node("static").Obj(), true, none, asked},
		"on an unknown node, no request":  {web("p").Node("unknown").Obj(), false, none, none},
		"on an unknown node, request":     {web("p").Node("unknown").Obj(), true, none, asked},
		"terminating, no request":         {web("p").Node("managed").Terminating(deleted).Obj(), false, none, none},
		"terminating, request":            {web("p").Node("managed").Terminating(deleted).Obj(), true, none, asked},
		"terminating unbound, request":    {web("p").Terminating(deleted).Obj(), true, none, asked},
		"succeeded, no request":           {web("p").Node("managed").Phase(corev1.PodSucceeded).Obj(), false, none, none},
		"failed, request":                 {web("p").Node("managed").Phase(corev1.PodFailed).Obj(), true, none, asked},
		"of a DaemonSet, managed node":    {web("p").Daemon("agent").Node("managed").Obj(), false, none, none},
		"mirror pod, managed node":        {web("p").Mirror().Node("managed").Obj(), false, none, none},
		"no pod, request owned by one":    {nil, true, none, asked},
		"no pod, request owned by nobody": {nil, false, counts{"4 CPU": "1, 0 pending"}, counts{"4 CPU": "1, 0 pending"}},
	} {
		t.Run(name, func(t *testing.T) {
			for mode, want := range map[DemandMode]counts{DemandTotal: tc.total, DemandRequestsOnly: tc.only} {
				r := NewRollup(mode)
				r.UpsertNode(builders.Node("managed").Machine("m-1").Obj())
				r.UpsertNode(builders.Node("static").Obj())
				switch {
				case tc.pod != nil && tc.request:
					r.UpsertRequest(requestFor(tc.pod))
				case tc.pod == nil && tc.request:
					r.UpsertRequest(requestFor(web("absent").Obj()))
				case tc.pod == nil:
					r.UpsertRequest(builders.CapacityRequest("ns", "by-hand").Requests("cpu", "4").Obj())
				}
				if tc.pod != nil {
					r.UpsertPod(tc.pod)
				}
				t.Run(string(mode), func(t *testing.T) { expectTally(t, r, want) })
			}
		})
	}
}

func TestPodAndRequestFindEachOtherInAnyOrder(t *testing.T) {
	pod := web("p").Node("n").Obj()
	steps := map[string]func(*Rollup){
		"pod":     func(r *Rollup) { r.UpsertPod(pod) },
		"request": func(r *Rollup) { r.UpsertRequest(requestFor(pod)) },
		"node":    func(r *Rollup) { r.UpsertNode(builders.Node("n").Machine("m").Obj()) },
	}
	for _, order := range [][]string{
		{"pod", "request", "node"}, {"pod", "node", "request"}, {"request", "pod", "node"},
		{"request", "node", "pod"}, {"node", "pod", "request"}, {"node", "request", "pod"},
	} {
		r := NewRollup(DemandTotal)
		for _, step := range order {
			steps[step](r)
		}
		t.Run(fmt.Sprint(order), func(t *testing.T) { expectTally(t, r, map[string]string{"2 CPU": "1, 0 pending"}) })
	}
}

func TestTheRequestOfADeletedPodStopsCounting(t *testing.T) {
	r := NewRollup(DemandTotal)
	pod := web("p").Obj()
	r.UpsertPod(pod)
	r.UpsertRequest(requestFor(pod))
	r.DeletePod(key("p"))
	expectTally(t, r, map[string]string{})
	r.DeleteRequest(key("cr-p"))
	expectEmpty(t, r)
}

func TestAnotherPodUnderTheSameNameIsAnotherPod(t *testing.T) {
	r := NewRollup(DemandTotal)
	first := web("p").UID("first").Obj()
	r.UpsertPod(first)
	r.UpsertRequest(requestFor(first))
	// The informer may merge a deletion and a creation into one update.
	r.UpsertPod(web("p").UID("second").Obj())
	expectTally(t, r, map[string]string{})

	// The request too may be replaced under its name.
	again := requestFor(web("p").UID("second").Obj())
	r.UpsertRequest(again)
	expectTally(t, r, map[string]string{"2 CPU": "1, 1 pending"})
	r.DeletePod(key("p"))
	r.DeleteRequest(key("cr-p"))
	expectEmpty(t, r)
}

func TestADoubledRequestCountsOnce(t *testing.T) {
	r := NewRollup(DemandTotal)
	pod := web("p").Obj()
	r.UpsertPod(pod)
	r.UpsertRequest(builders.CapacityRequest("ns", "b").For(pod).Requests("cpu", "3").Obj())
	r.UpsertRequest(builders.CapacityRequest("ns", "a").For(pod).Requests("cpu", "2").Obj())
	expectTally(t, r, map[string]string{"2 CPU": "1, 1 pending"})
	if !r.Counted(key("a")) || r.Counted(key("b")) {
		t.Errorf("counted: a %v, b %v; want a alone", r.Counted(key("a")), r.Counted(key("b")))
	}
	r.DeleteRequest(key("a"))
	expectTally(t, r, map[string]string{"3 CPU": "1, 1 pending"})
}

func TestANodeThatBecomesManagedBringsItsPods(t *testing.T) {
	r := NewRollup(DemandTotal)
	r.UpsertNode(builders.Node("n").Obj())
	r.UpsertPod(web("own").Node("n").Obj())
	asked := web("asked").Node("n").Obj()
	r.UpsertPod(asked)
	r.UpsertRequest(requestFor(asked))
	r.UpsertPod(web("elsewhere").Node("other").Obj())
	expectTally(t, r, map[string]string{})

	r.UpsertNode(builders.Node("n").Machine("m").Obj())
	expectTally(t, r, map[string]string{"1 CPU": "1, 0 pending", "2 CPU": "1, 0 pending"})
	r.UpsertNode(builders.Node("n").Obj())
	expectTally(t, r, map[string]string{})
	r.UpsertNode(builders.Node("n").Machine("m").Obj())
	r.DeleteNode("n")
	expectTally(t, r, map[string]string{})
}

func TestAPodThatIsResizedCountsAtItsNewSize(t *testing.T) {
	r := NewRollup(DemandTotal)
	r.UpsertNode(builders.Node("n").Machine("m").Obj())
	r.UpsertPod(web("p").Node("n").Obj())
	r.UpsertPod(web("p").Requests("cpu", "3").Node("n").Obj())
	expectTally(t, r, map[string]string{"3 CPU": "1, 0 pending"})
}

func TestGangMembersShareARowWhetherTheyAskedOrNot(t *testing.T) {
	r := NewRollup(DemandTotal)
	r.UpsertNode(builders.Node("n").Machine("m").Obj())
	member := func(name string) *builders.PodBuilder { return web(name).PodGroup("gang") }
	bound, waiting := member("bound").Node("n").Obj(), member("waiting").Obj()
	r.UpsertPod(bound)
	r.UpsertPod(waiting)
	spec := ProfileOfPod(waiting).WithMinCount(2).RequestSpec()
	r.UpsertRequest(builders.CapacityRequest("ns", "cr").For(waiting).Spec(spec).Obj())

	needs := r.Snapshot().Needs
	if len(needs) != 1 || needs[0].Count != 2 || needs[0].Pending != 1 || needs[0].Profile.Group.MinCount != 2 {
		t.Fatalf("needs %+v: want one row of 2 with 1 pending, and the minimum that the request knows", needs)
	}
	r.DeleteRequest(key("cr"))
	if needs := r.Snapshot().Needs; needs[0].Profile.Group.MinCount != 0 {
		t.Errorf("minimum %d, though nobody who knows it is left", needs[0].Profile.Group.MinCount)
	}
}

func TestPodProfileOptionKeepsBoundPodsInTheRowOfTheirRequests(t *testing.T) {
	inZone := func(pod *corev1.Pod) Profile {
		return ProfileOfPod(pod).WithRequirements(Requirement{Key: zone, Operator: OperatorIn, Values: []string{"a"}})
	}
	r := NewRollup(DemandTotal, WithPodProfile(inZone))
	r.UpsertNode(builders.Node("n").Machine("m").Obj())
	waiting := web("waiting").Obj()
	r.UpsertPod(web("bound").Node("n").Obj())
	r.UpsertPod(waiting)
	r.UpsertRequest(builders.CapacityRequest("ns", "cr").For(waiting).Spec(inZone(waiting).RequestSpec()).Obj())
	expectTally(t, r, map[string]string{"1 CPU": "2, 1 pending"})
}

func TestSnapshotIsSortedAndIndependentOfArrival(t *testing.T) {
	requests := []*fleetv1alpha1.CapacityRequest{
		builders.CapacityRequest("ns", "a").Requests("cpu", "1").Priority(1).Obj(),
		builders.CapacityRequest("ns", "b").Requests("cpu", "2").Priority(100).Obj(),
		builders.CapacityRequest("ns", "c").Requests("cpu", "3").Priority(1).Obj(),
	}
	ds := func(name, cpu string) func(*Rollup) {
		return func(r *Rollup) { r.UpsertDaemonSet(builders.DaemonSet("kube-system", name).Requests("cpu", cpu).Obj()) }
	}
	forward, backward := NewRollup(DemandTotal), NewRollup(DemandTotal)
	for i := range requests {
		forward.UpsertRequest(requests[i])
		backward.UpsertRequest(requests[len(requests)-1-i])
	}
	for _, f := range []func(*Rollup){ds("a", "1"), ds("b", "2")} {
		f(forward)
	}
	for _, f := range []func(*Rollup){ds("b", "2"), ds("a", "1")} {
		f(backward)
	}
	if diff := cmp.Diff(forward.Snapshot(), backward.Snapshot()); diff != "" {
		t.Errorf("the order of arrival shows (-forward +backward):\n%s", diff)
	}
	if first := forward.Snapshot().Needs[0].Profile.Priority; first != 100 {
		t.Errorf("the first row has priority %d, want the highest", first)
	}
	if got := len(forward.Snapshot().Daemons); got != 2 {
		t.Errorf("%d daemon rows, want 2", got)
	}
}

func TestVersionChangesWithTheSnapshotOnly(t *testing.T) {
	r := NewRollup(DemandTotal)
	node, ds := builders.Node("n").Machine("m").Obj(), builders.DaemonSet("kube-system", "a").Requests("cpu", "1").Obj()
	for _, step := range []struct {
		name    string
		do      func()
		changes bool
	}{
		{"node", func() { r.UpsertNode(node) }, false},
		{"unbound pod", func() { r.UpsertPod(web("p").Obj()) }, false},
		{"its request", func() { r.UpsertRequest(requestFor(web("p").Obj())) }, true},
		{"the same request", func() { r.UpsertRequest(requestFor(web("p").Obj())) }, false},
		{"the pod is bound", func() { r.UpsertPod(web("p").Node("n").Obj()) }, true},
		{"its status changes", func() { r.UpsertPod(web("p").Node("n").Unschedulable("").Obj()) }, false},
		{"the node's status changes", func() { r.UpsertNode(builders.Node("n").Machine("m").Ready().Obj()) }, false},
		{"DaemonSet", func() { r.UpsertDaemonSet(ds) }, true},
		{"the same DaemonSet", func() { r.UpsertDaemonSet(ds) }, false},
		{"an unknown request goes", func() { r.DeleteRequest(key("nobody")) }, false},
		{"an unknown pod goes", func() { r.DeletePod(key("nobody")) }, false},
		{"an unknown node goes", func() { r.DeleteNode("nobody") }, false},
		{"an unknown DaemonSet goes", func() { r.DeleteDaemonSet(key("nobody")) }, false},
		{"the DaemonSet goes", func() { r.DeleteDaemonSet(types.NamespacedName{Namespace: "kube-system", Name: "a"}) }, true},
		{"the node becomes static", func() { r.UpsertNode(builders.Node("n").Obj()) }, true},
	} {
		before := r.Version()
		step.do()
		if got := r.Version() != before; got != step.changes {
			t.Errorf("%s: version changed %v, want %v", step.name, got, step.changes)
		}
	}
}

func TestPodsOnANode(t *testing.T) {
	deleted := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	r := NewRollup(DemandTotal)
	r.UpsertPod(web("c").Node("n").Obj())
	r.UpsertPod(web("b").Node("n").Daemon("agent").Obj())
	r.UpsertPod(web("a").Node("n").Terminating(deleted).Obj())
	r.UpsertPod(web("ended").Node("n").Phase(corev1.PodSucceeded).Obj())
	r.UpsertPod(web("elsewhere").Node("m").Obj())
	var got []string
	for _, p := range r.PodsOn("n") {
		got = append(got, fmt.Sprintf("%s daemon=%v terminating=%v cpu=%d",
			p.Key.Name, p.Daemon, p.Terminating, p.Profile.Resources["cpu"]))
	}
	want := []string{
		"a daemon=false terminating=true cpu=1000",
		"b daemon=true terminating=false cpu=1000",
		"c daemon=false terminating=false cpu=1000",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("pods (-want +got):\n%s", diff)
	}
	if pods := r.PodsOn("nowhere"); pods != nil {
		t.Errorf("pods on a node that nobody named: %v", pods)
	}
}

// expectEmpty checks that nothing is left in memory.
func expectEmpty(t interface {
	Helper()
	Errorf(string, ...any)
}, r *Rollup) {
	t.Helper()
	if n := len(r.rows) + len(r.requests) + len(r.pods) + len(r.byUID) + len(r.nodes) + len(r.daemons); n > 0 {
		t.Errorf("left over: %d rows, %d requests, %d pods, %d owners, %d nodes, %d DaemonSets",
			len(r.rows), len(r.requests), len(r.pods), len(r.byUID), len(r.nodes), len(r.daemons))
	}
}
