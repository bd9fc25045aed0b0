package rollup

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	fleetpb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
	"github.com/drover-sh/drover/internal/builders"
)

func request20(i int) *fleetv1alpha1.CapacityRequest {
	return builders.CapacityRequest("default", fmt.Sprintf("cr-%03d", i)).Requests("cpu", fmt.Sprint(1+i%20)).Obj()
}

func total(m *fleetpb.ClusterCapacityNeeds) (n int32) {
	for _, need := range m.GetNeeds() {
		n += need.Count
	}
	return n
}

func phases(t *testing.T, c client.Client) map[fleetv1alpha1.CapacityRequestPhase]int {
	t.Helper()
	var list fleetv1alpha1.CapacityRequestList
	if err := c.List(t.Context(), &list); err != nil {
		t.Fatal(err)
	}
	out := map[fleetv1alpha1.CapacityRequestPhase]int{}
	for _, cr := range list.Items {
		out[cr.Status.Phase]++
	}
	return out
}

// Section 7: the first roll-up after a start is complete, each request it carries is acknowledged by one write, and none
// is ever written again, by this process or the next.
func TestFirstRollUpIsCompleteAndAcknowledgedOnce(t *testing.T) {
	c := api(t)
	const n = 100
	for i := range n {
		create(t, c, request20(i))
	}
	autoscaler, conn := newScripted(t)
	op := operate(t, conn, testConfig())
	eventually(t, func() error {
		got := phases(t, c)
		return is(got[fleetv1alpha1.CapacityRequestAcknowledged] == n, "phases are %v", got)
	})
	autoscaler.mu.Lock()
	first := autoscaler.rollups[0]
	autoscaler.mu.Unlock()
	if got := total(first); got != n || len(first.Needs) != 20 {
		t.Errorf("the first roll-up has %d rows and counts %d, want 20 and %d: a partial one looks like a collapse",
			len(first.Needs), got, n)
	}
	sends := autoscaler.rollupCount()
	eventually(t, func() error { return is(autoscaler.rollupCount() >= sends+2, "no periodic roll-up yet") })
	if got := op.writes.of("/status"); got != n {
		t.Errorf("%d writes of status, want one for each of %d requests", got, n)
	}
	op.stop()

	next := operate(t, conn, testConfig())
	sends = autoscaler.rollupCount()
	eventually(t, func() error { return is(autoscaler.rollupCount() >= sends+3, "the next process has not sent yet") })
	if got := next.writes.of("/status"); got != 0 {
		t.Errorf("the next process wrote %d statuses that were acknowledged already", got)
	}
	if a, b := first.Session, autoscaler.lastRollup().Session; a == b {
		t.Errorf("both processes call their session %q", a)
	}
}

// A request that a roll-up did not count stays Pending: its pod stands on a static node and is nobody's demand.
func TestOnlyWhatCountsIsAcknowledged(t *testing.T) {
	c := api(t)
	create(t, c, builders.Node("static").Ready().Obj())
	placed := builders.Pod("default", "placed").Requests("cpu", "1").Node("static").Obj()
	waiting := builders.Pod("default", "waiting").Requests("cpu", "1").Obj()
	create(t, c, placed, waiting)
	create(t, c, builders.CapacityRequest("default", "placed").Requests("cpu", "1").For(placed).Obj(),
		builders.CapacityRequest("default", "waiting").Requests("cpu", "1").For(waiting).Obj())
	autoscaler, conn := newScripted(t)
	operate(t, conn, testConfig())
	eventually(t, func() error {
		got := phases(t, c)
		return is(got[fleetv1alpha1.CapacityRequestAcknowledged] == 1, "phases are %v", got)
	})
	sends := autoscaler.rollupCount()
	eventually(t, func() error { return is(autoscaler.rollupCount() >= sends+2, "no later roll-up yet") })
	var cr fleetv1alpha1.CapacityRequest
	if err := c.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "placed"}, &cr); err != nil {
		t.Fatal(err)
	}
	if cr.Status.Phase == fleetv1alpha1.CapacityRequestAcknowledged {
		t.Error("a request was acknowledged that no roll-up carried")
	}
	if need := autoscaler.lastRollup().Needs; len(need) != 1 || need[0].Count != 1 || need[0].Pending != 1 {
		t.Errorf("the roll-up is %v, want one pod, pending", need)
	}
}

// Acknowledging goes on after errors of the API server, without writing anything twice.
func TestAcknowledgingIsRetried(t *testing.T) {
	c := api(t)
	for i := range 10 {
		create(t, c, request20(i))
	}
	_, conn := newScripted(t)
	op := operate(t, conn, testConfig())
	eventually(t, func() error {
		got := phases(t, c)
		return is(got[fleetv1alpha1.CapacityRequestAcknowledged] == 10, "phases are %v", got)
	})
	// From here on every request's first write is lost.
	seen := map[string]bool{}
	op.writes.mu.Lock()
	op.writes.fail = func(r *http.Request) bool {
		first := !seen[r.URL.Path]
		seen[r.URL.Path] = true
		return first && strings.HasSuffix(r.URL.Path, "/status")
	}
	op.writes.mu.Unlock()
	for i := 10; i < 20; i++ {
		create(t, c, request20(i))
	}
	eventually(t, func() error {
		got := phases(t, c)
		return is(got[fleetv1alpha1.CapacityRequestAcknowledged] == 20, "phases are %v", got)
	})
	if got := op.writes.of("/status"); got != 20 {
		t.Errorf("%d writes reached the API server, want 20", got)
	}
}

// While the autoscaler is away requests come and go; when it is back it hears what is true then, and nothing else.
func TestAutoscalerAwayForLong(t *testing.T) {
	c := api(t)
	autoscaler, conn := newScripted(t)
	autoscaler.leave()
	op := operate(t, conn, testConfig())
	for i := range 60 {
		create(t, c, request20(i))
	}
	for i := range 30 {
		if err := c.Delete(t.Context(), request20(i)); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, func() error {
		return is(op.metric("drover_rollup_sends_total") >= 5, "the operator has hardly tried yet")
	})
	if got := phases(t, c); got[fleetv1alpha1.CapacityRequestAcknowledged] != 0 {
		t.Errorf("phases are %v, but nobody was told", got)
	}
	autoscaler.start()
	eventually(t, func() error {
		got := phases(t, c)
		return is(got[fleetv1alpha1.CapacityRequestAcknowledged] == 30, "phases are %v", got)
	})
	eventually(t, func() error {
		got := total(autoscaler.lastRollup())
		return is(got == 30, "the roll-up counts %d", got)
	})
	eventually(t, func() error { return is(autoscaler.subscribers() == 1, "the feed is not back") })

	// And once more in the middle of its life, with an error instead of an absence.
	autoscaler.set(func(s *scripted) {
		s.onRollup = func(*fleetpb.ClusterCapacityNeeds) error { return errors.New("full") }
	})
	create(t, c, request20(60))
	failures := op.metric("drover_rollup_sends_total")
	eventually(t, func() error {
		return is(op.metric("drover_rollup_sends_total") > failures+3, "no failed send yet")
	})
	autoscaler.set(func(s *scripted) { s.onRollup = nil })
	eventually(t, func() error {
		got := total(autoscaler.lastRollup())
		return is(got == 31, "the roll-up counts %d", got)
	})
}

func shapes() []*fleetpb.NodeShape {
	return []*fleetpb.NodeShape{{
		Labels:    map[string]string{corev1.LabelInstanceTypeStable: "m16"},
		Resources: map[string]string{"cpu": "16", "memory": "64Gi", "pods": "110"},
		Taints:    []*fleetpb.Taint{{Key: "team", Value: "a", Effect: "NoSchedule"}},
	}}
}

func machineAt(id, phase string) *fleetpb.UpcomingMachine {
	return &fleetpb.UpcomingMachine{Id: id, Phase: phase, ProviderId: "fake://" + id,
		Labels: map[string]string{corev1.LabelTopologyZone: "z1"}}
}

func upcoming(t *testing.T, c client.Client) map[string]fleetv1alpha1.UpcomingNode {
	t.Helper()
	var list fleetv1alpha1.UpcomingNodeList
	if err := c.List(t.Context(), &list, client.InNamespace(fleetv1alpha1.SystemNamespace)); err != nil {
		t.Fatal(err)
	}
	out := map[string]fleetv1alpha1.UpcomingNode{}
	for _, un := range list.Items {
		out[un.Name] = un
	}
	return out
}

// summary is "name=phase" of every UpcomingNode, in order of name.
func summary(t *testing.T, c client.Client) string {
	t.Helper()
	var list fleetv1alpha1.UpcomingNodeList
	if err := c.List(t.Context(), &list, client.InNamespace(fleetv1alpha1.SystemNamespace)); err != nil {
		t.Fatal(err)
	}
	var parts []string
	for _, un := range list.Items {
		parts = append(parts, un.Name+"="+string(un.Status.Phase))
	}
	return strings.Join(parts, " ")
}

func wantUpcoming(t *testing.T, c client.Client, want string) {
	t.Helper()
	eventually(t, func() error {
		got := summary(t, c)
		return is(got == want, "UpcomingNodes are %q, want %q", got, want)
	})
}

// Case 8: states doubled, reordered and lost, the stream cut, either side restarted: UpcomingNodes converge to what the
// last state says, and a state that says nothing new writes nothing.
func TestFeedFaults(t *testing.T) {
	c := api(t)
	foreign := builders.UpcomingNode("foreign").Obj()
	create(t, c, foreign)
	autoscaler, conn := newScripted(t)
	op := operate(t, conn, testConfig())
	eventually(t, func() error { return is(autoscaler.subscribers() == 1, "not subscribed") })

	one := autoscaler.say(&fleetpb.FeedState{Shapes: shapes(), Machines: []*fleetpb.UpcomingMachine{
		machineAt("m-1", "Provisioning"), machineAt("m-2", "Provisioning"),
	}})
	wantUpcoming(t, c, "foreign= m-1=Provisioning m-2=Provisioning")
	un := upcoming(t, c)["m-1"]
	if un.Spec.Labels[corev1.LabelTopologyZone] != "z1" || un.Spec.Labels[corev1.LabelInstanceTypeStable] != "m16" ||
		len(un.Spec.Taints) != 1 || un.Status.ProviderID != "fake://m-1" {
		t.Errorf("the UpcomingNode is %+v, want shape, zone and provider's id", un)
	}
	two := autoscaler.say(&fleetpb.FeedState{Shapes: shapes(), Machines: []*fleetpb.UpcomingMachine{
		machineAt("m-1", "Launched"), machineAt("m-2", "Launched"), machineAt("m-3", "Provisioning"),
	}})
	wantUpcoming(t, c, "foreign= m-1=Launched m-2=Launched m-3=Provisioning")

	// Late and doubled messages of the same session.
	before := op.writes.all()
	for range 5 {
		autoscaler.send(one)
		autoscaler.send(two)
	}
	autoscaler.say(two) // the same again under a new number
	eventually(t, func() error {
		n := op.metric("drover_rollup_feed_states_total")
		return is(n >= 13, "%v of 13 states were seen", n)
	})
	wantUpcoming(t, c, "foreign= m-1=Launched m-2=Launched m-3=Provisioning")
	if got := op.writes.all(); got != before {
		t.Errorf("states that say nothing new caused %d writes", got-before)
	}

	// One state is lost with the stream, one is invalid in part, and phases never go back.
	autoscaler.cutStreams()
	broken := machineAt("m-2", "Exploded")
	autoscaler.say(&fleetpb.FeedState{Shapes: shapes(), Machines: []*fleetpb.UpcomingMachine{
		machineAt("m-1", "Provisioning"), broken, machineAt("m-4", "Provisioning"), {Id: "m-5", Phase: "Launched", Shape: 7},
	}})
	wantUpcoming(t, c, "foreign= m-1=Launched m-2=Launched m-4=Provisioning")

	// The autoscaler is another process, which counts from one again.
	failed := machineAt("m-4", "Failed")
	failed.Message = "no capacity in zone z1"
	autoscaler.restart("b")
	autoscaler.say(&fleetpb.FeedState{Shapes: shapes(), Machines: []*fleetpb.UpcomingMachine{machineAt("m-1", "Launched"), failed}})
	wantUpcoming(t, c, "foreign= m-1=Launched m-4=Failed")
	if got := upcoming(t, c)["m-4"].Status.Message; got != failed.Message {
		t.Errorf("the failure's message is %q, want %q", got, failed.Message)
	}

	// The operator is another process, which has missed a state.
	op.stop()
	autoscaler.say(&fleetpb.FeedState{Shapes: shapes(), Machines: []*fleetpb.UpcomingMachine{machineAt("m-6", "Launched")}})
	if got := summary(t, c); got != "foreign= m-1=Launched m-4=Failed" {
		t.Errorf("UpcomingNodes are %q with no operator", got)
	}
	operate(t, conn, testConfig())
	wantUpcoming(t, c, "foreign= m-6=Launched")
	autoscaler.say(&fleetpb.FeedState{})
	wantUpcoming(t, c, "foreign=")
}

// AvailableCapacity follows the offerings; what somebody else wrote stays.
func TestHints(t *testing.T) {
	c := api(t)
	foreign := builders.AvailableCapacity("foreign", 3).Resources("cpu", "4").Obj()
	create(t, c, foreign)
	autoscaler, conn := newScripted(t)
	op := operate(t, conn, testConfig())
	offering := func(name string, count int32) *fleetpb.Offering {
		return &fleetpb.Offering{Name: name, AvailableCount: count, Availability: "High", Cost: 2.5,
			Requirements: []*fleetpb.NodeSelectorRequirement{{Key: corev1.LabelInstanceTypeStable, Operator: "In", Values: []string{"m16"}}}}
	}
	counts := func() string {
		var list fleetv1alpha1.AvailableCapacityList
		if err := c.List(t.Context(), &list); err != nil {
			t.Fatal(err)
		}
		var parts []string
		for _, h := range list.Items {
			fresh := ""
			if h.Status.ObservedTime != nil {
				fresh = "*"
			}
			parts = append(parts, fmt.Sprintf("%s=%d%s", h.Name, h.Spec.AvailableCount, fresh))
		}
		return strings.Join(parts, " ")
	}
	want := func(want string) {
		t.Helper()
		eventually(t, func() error { got := counts(); return is(got == want, "hints are %q, want %q", got, want) })
	}
	autoscaler.say(&fleetpb.FeedState{Shapes: shapes(), Offerings: []*fleetpb.Offering{offering("a", 5), offering("b", 7), offering("foreign", 9)}})
	want("a=5* b=7* foreign=3")
	before := op.writes.all()
	autoscaler.say(&fleetpb.FeedState{Shapes: shapes(), Offerings: []*fleetpb.Offering{offering("b", 7), offering("a", 5)}})
	autoscaler.say(&fleetpb.FeedState{Shapes: shapes(), Offerings: []*fleetpb.Offering{offering("a", 5), offering("b", 6)}})
	want("a=5* b=6* foreign=3")
	if got := op.writes.all() - before; got != 1 {
		t.Errorf("one count changed and %d writes were made", got)
	}
	autoscaler.say(&fleetpb.FeedState{Shapes: shapes(), Offerings: []*fleetpb.Offering{offering("b", 6)}})
	want("b=6* foreign=3")
}
