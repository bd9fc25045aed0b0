package rollup

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	fleetpb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
	"github.com/drover-sh/drover/internal/builders"
)

func node(t *testing.T, c client.Client, name string) *corev1.Node {
	t.Helper()
	var n corev1.Node
	if err := c.Get(t.Context(), client.ObjectKey{Name: name}, &n); err != nil {
		t.Fatal(err)
	}
	return &n
}

func setReady(t *testing.T, c client.Client, name string) {
	t.Helper()
	n := node(t, c, name)
	before := n.DeepCopy()
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue,
		LastHeartbeatTime: metav1.Now(), LastTransitionTime: metav1.Now()}}
	n.Status.Allocatable = builders.Resources("cpu", "15", "memory", "60Gi", "pods", "110")
	n.Status.Capacity = n.Status.Allocatable
	if err := c.Status().Patch(t.Context(), n, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
}

func wantReported(t *testing.T, s *scripted, machine, state string) {
	t.Helper()
	eventually(t, func() error {
		return is(s.hasReported(machine, state), "machine %s was reported %v, want %s", machine, s.reported(machine), state)
	})
}

// Section 6.3: Provisioning, Launched, Registered, Ready, and gone once the autoscaler knows, across a restart at every
// step.
func TestNodeLife(t *testing.T) {
	c := api(t)
	autoscaler, conn := newScripted(t)
	op := operate(t, conn, testConfig())
	restart := func() {
		op.stop()
		op = operate(t, conn, testConfig())
	}
	listed := func(phase string) *fleetpb.FeedState {
		return &fleetpb.FeedState{Shapes: shapes(), Machines: []*fleetpb.UpcomingMachine{machineAt("m-1", phase)}}
	}
	autoscaler.say(listed("Provisioning"))
	wantUpcoming(t, c, "m-1=Provisioning")
	restart()

	// A node that nobody announced, and one of another machine with the same name as ours would have, are left alone.
	create(t, c, builders.Node("static").ProviderID("fake://other").Ready().Obj())
	create(t, c, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}, Spec: corev1.NodeSpec{ProviderID: "fake://m-1"}})
	wantUpcoming(t, c, "m-1=Registered")
	wantReported(t, autoscaler, "m-1", stateRegistered)
	if got := node(t, c, "node-1").Labels[fleetv1alpha1.LabelMachine]; got != "m-1" {
		t.Errorf("the node's machine label is %q, want m-1", got)
	}
	if got := node(t, c, "static").Labels[fleetv1alpha1.LabelMachine]; got != "" {
		t.Errorf("a static node was labelled %q", got)
	}
	if got := upcoming(t, c)["m-1"].Status.NodeRef; got == nil || got.Name != "node-1" {
		t.Errorf("nodeRef is %v, want node-1", got)
	}
	restart()

	// Ready is shown, and the object stays, until the report is acknowledged.
	autoscaler.set(func(s *scripted) { s.onReport = func(*fleetpb.MachineReport) error { return errors.New("not now") } })
	setReady(t, c, "node-1")
	wantUpcoming(t, c, "m-1=Ready")
	restart()
	wantUpcoming(t, c, "m-1=Ready")
	autoscaler.set(func(s *scripted) { s.onReport = nil })
	wantReported(t, autoscaler, "m-1", stateReady)
	wantUpcoming(t, c, "")
	autoscaler.mu.Lock()
	last := autoscaler.reports[len(autoscaler.reports)-1]
	autoscaler.mu.Unlock()
	if last.NodeName != "node-1" || last.Allocatable["cpu"] != "15" {
		t.Errorf("the report is %v, want the node's name and what is allocatable", last)
	}

	// While the autoscaler still lists the machine it is not announced again, and a new process says it again.
	autoscaler.say(listed("Launched"))
	restart()
	reports := len(autoscaler.reported("m-1"))
	eventually(t, func() error {
		return is(len(autoscaler.reported("m-1")) > reports, "not reported again after a restart")
	})
	wantUpcoming(t, c, "")

	autoscaler.say(&fleetpb.FeedState{})
	// Another process of the autoscaler, which may have lost the report, hears it again.
	reports = len(autoscaler.reported("m-1"))
	autoscaler.restart("b")
	autoscaler.say(&fleetpb.FeedState{})
	eventually(t, func() error { return is(len(autoscaler.reported("m-1")) > reports, "not reported to the new process") })

	// Somebody takes the label off: it comes back, and the machine is not gone.
	n := node(t, c, "node-1")
	before := n.DeepCopy()
	delete(n.Labels, fleetv1alpha1.LabelMachine)
	if err := c.Patch(t.Context(), n, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		return is(node(t, c, "node-1").Labels[fleetv1alpha1.LabelMachine] == "m-1", "the label is not back")
	})
	if slices.Contains(autoscaler.reported("m-1"), stateGone) {
		t.Error("a machine whose node exists was reported gone")
	}
	if err := c.Delete(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	wantReported(t, autoscaler, "m-1", stateGone)
}

// A node is recognised by its name where its provider's id is not known, and never against its provider's id.
func TestNodeIsRecognisedByName(t *testing.T) {
	c := api(t)
	autoscaler, conn := newScripted(t)
	operate(t, conn, testConfig())
	byName := machineAt("m-1", "Launched")
	byName.ProviderId, byName.NodeName = "", "node-1"
	mismatch := machineAt("m-2", "Launched")
	mismatch.NodeName = "node-2"
	create(t, c, builders.Node("node-1").Ready().Obj(), builders.Node("node-2").ProviderID("fake://somebody").Ready().Obj())
	autoscaler.say(&fleetpb.FeedState{Shapes: shapes(), Machines: []*fleetpb.UpcomingMachine{byName, mismatch}})
	wantReported(t, autoscaler, "m-1", stateReady)
	wantUpcoming(t, c, "m-2=Launched")
	if got := node(t, c, "node-2").Labels[fleetv1alpha1.LabelMachine]; got != "" {
		t.Errorf("a node with another provider's id was labelled %q", got)
	}
}

// Many machines at once: every one ends, with one label, and the writes are a small multiple of the machines.
func TestManyMachines(t *testing.T) {
	c := api(t)
	autoscaler, conn := newScripted(t)
	op := operate(t, conn, testConfig())
	const n = 100
	state := &fleetpb.FeedState{Shapes: shapes()}
	for i := range n {
		state.Machines = append(state.Machines, machineAt(fmt.Sprintf("m-%03d", i), "Launched"))
	}
	autoscaler.say(state)
	eventually(t, func() error { got := len(upcoming(t, c)); return is(got == n, "%d UpcomingNodes", got) })
	for i := range n {
		create(t, c, builders.Node(fmt.Sprintf("node-%03d", i)).ProviderID(fmt.Sprintf("fake://m-%03d", i)).
			Allocatable("cpu", "16", "pods", "110").Ready().Obj())
	}
	eventually(t, func() error { got := len(upcoming(t, c)); return is(got == 0, "%d UpcomingNodes are left", got) })
	// Create, status, label, a status or two on the way, delete.
	if got := op.writes.all(); got > 7*n {
		t.Errorf("%d writes for %d machines", got, n)
	}
}
