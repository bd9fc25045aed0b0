package autoscaler

import (
	"math"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/drover-sh/drover/autoscaler/provider"
	"github.com/drover-sh/drover/capacity"
)

// reportsCores lets a cluster report of all its nodes that they have so many cores.
func (w *world) reportsCores(cluster string, cores int64) {
	w.t.Helper()
	o := w.operator(cluster)
	for id := range o.nodes {
		w.report(o, Observation{ID: id, State: ObservedReady, NodeName: id,
			Allocatable: capacity.Resources{corev1.ResourceCPU: cores * 1000, corev1.ResourcePods: 110}})
	}
	w.turn()
}

// expectedCores is what the planner counts on of a new node.
func (w *world) expectedCores(offering int) int64 {
	w.runner.mu.Lock()
	defer w.runner.mu.Unlock()
	return w.runner.engine.stock(w.clock.Now())[offering].Allocatable[corev1.ResourceCPU] / 1000
}

// What real nodes report corrects what an offering promises, but no cluster can make the nodes of others what they are not.
func TestNewNodesAreExpectedToBeLikeRealOnes(t *testing.T) {
	w := newWorld(t, testPolicy(), small(100))
	w.active("east", 2)
	w.active("west", 2)
	for _, step := range []struct {
		what       string
		east, west int64
		want       int64
	}{
		{"a little less than promised", 15, 15, 15},
		{"two clusters disagree", 9, 15, 15},
		{"more than promised", 15, math.MaxInt64 / 1000, 16},
		{"next to nothing: the nodes are unwell", 1, 1, 16},
	} {
		w.reportsCores("east", step.east)
		w.reportsCores("west", step.west)
		if got := w.expectedCores(0); got != step.want {
			t.Errorf("%s: a new node is expected to have %d cores, want %d", step.what, got, step.want)
		}
	}
}

// An offering whose nodes change in size says so from then on; the machines that run keep the size that they have.
func TestAnOfferingThatChangesInSize(t *testing.T) {
	w := newWorld(t, testPolicy(), small(100))
	w.active("east", 2)
	w.reportsCores("east", 15)
	larger := offering("small", 24, 1.3, map[string]int32{"a": 100})
	w.cloud.SetOfferings(larger)
	w.turn()
	if got := w.expectedCores(0); got != 24 {
		t.Fatalf("after the change a new node is expected to have %d cores, want 24", got)
	}
	// Two pods fit on a new node, one on each that runs: four more pods are two machines more.
	w.demand("east", cpuNeed(10, 6))
	w.advance(65 * time.Second)
	w.want("east", states{Active: 4})
	// And an offering that is no longer sold takes nothing from those that run on it.
	w.cloud.SetOfferings()
	w.advance(10 * time.Minute)
	w.want("east", states{Active: 4})
}

// A price that is no number compares as the lowest of all, and could not be stored.
func TestAnOfferingThatMakesNoSenseIsLeftOut(t *testing.T) {
	nan := offering("nan", 16, math.NaN(), map[string]int32{"a": 100})
	twin := offering("small", 64, 0.1, map[string]int32{"b": 100})
	w := newWorld(t, testPolicy(), nan, small(100), twin)
	w.active("east", 2)
	for _, m := range w.cloud.Machines() {
		if m.Offering != "small" || m.Domain != "a" {
			t.Errorf("launched %s in %s", m.Offering, m.Domain)
		}
	}
	notes := strings.Join(w.notes, "\n")
	for _, part := range []string{"nan: offering left out: cost: NaN", "small: offering left out: another has its name"} {
		if strings.Count(notes, part) != 1 {
			t.Errorf("%q is noted %d times, want once", part, strings.Count(notes, part))
		}
	}
}

// A machine is known by its id, and an event of another cluster's under the same id is not about it.
func TestAnEventOfAnotherClusterIsNotAboutThisMachine(t *testing.T) {
	w := newWorld(t, testPolicy(), small(100))
	w.active("east", 1)
	id := w.cloud.Machines()[0].ID
	for _, kind := range []provider.EventType{provider.Terminated, provider.LaunchFailed, provider.Launched} {
		w.runner.Event(provider.Event{Type: kind, Ref: provider.Ref{ID: id, Cluster: "west"}, ProviderID: "stolen"})
	}
	w.want("east", states{Active: 1})
	if got := w.runner.engine.clusters["east"].machines[id].ProviderID; got == "stolen" {
		t.Error("the event changed the machine")
	}
}

// The clock of an earlier process was ahead by a day: what it stored ends no later than if it had been right.
func TestAClockThatWasAheadHoldsNothingUp(t *testing.T) {
	w := newWorld(t, testPolicy(), small(100))
	w.clock.Step(24 * time.Hour)
	w.active("east", 3)
	w.operator("east").joins = func(string) bool { return false }
	w.demand("east", cpuNeed(10, 4))
	w.turn()
	w.clock.Step(time.Second)
	w.turn()
	w.want("east", states{Active: 3, Requested: 1})
	w.clock.SetTime(epoch)
	w.start()
	w.send("east")
	w.advance(11 * time.Minute)
	if got := w.states("east"); got[Failed] == 0 {
		t.Errorf("the machine that never joined is waited for still: %v", got)
	}
	w.operator("east").joins = nil
	w.advance(time.Minute)
	w.want("east", states{Active: 4, Failed: 1})
	w.runner.engine.clusters["east"].Grants = []grant{{At: w.clock.Now().Add(24 * time.Hour), Count: 100}}
	if err := w.store.SaveRecord(t.Context(), w.runner.engine.clusters["east"].record()); err != nil {
		t.Fatal(err)
	}
	w.start()
	w.demand("east", cpuNeed(10, 3))
	w.advance(5 * time.Minute)
	w.want("east", states{Active: 3})
}
