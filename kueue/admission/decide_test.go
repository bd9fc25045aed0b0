package admission

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/kueue/provisioning"
)

var now = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// gpuHint is nodes of eight GPUs and 96 cores of the instance type, confirmed just now.
func gpuHint(name string, count int32, change ...func(*Hint)) Hint {
	h := Hint{
		Name: name, Count: count, Availability: fleetv1alpha1.AvailabilityHigh, Observed: now.Add(-time.Second), Atomic: true,
		Template: capacity.Template{
			Name: name, Labels: map[string]string{"type": "h100"},
			Allocatable: capacity.Resources{"cpu": 96000, "nvidia.com/gpu": 8},
		},
	}
	for _, c := range change {
		c(&h)
	}
	return h
}

// gpuNode is a Ready node of eight GPUs.
func gpuNode(name string) provisioning.Node {
	return provisioning.Node{Name: name, Labels: map[string]string{"type": "h100"},
		Free: capacity.Resources{"cpu": 96000, "nvidia.com/gpu": 8, "pods": 110}}
}

func only(a fleetv1alpha1.Availability) func(*Hint) { return func(h *Hint) { h.Availability = a } }
func cost(c float64) func(*Hint)                    { return func(h *Hint) { h.Cost = c } }
func oneByOne(h *Hint)                              { h.Atomic = false }
func stale(h *Hint)                                 { h.Observed = now.Add(-time.Hour) }
func ofType(t string) func(*Hint) {
	return func(h *Hint) { h.Template.Labels = map[string]string{"type": t} }
}

func pods(name string, count int32, gpus int64, change ...func(*PodSet)) PodSet {
	s := PodSet{
		Name: name, Count: count, Flavor: "gpu-h100", Selected: true, Concerned: true, Pinned: map[string]string{"type": "h100"},
		Profile: capacity.Profile{
			Requirements: []capacity.Requirement{{Key: "type", Operator: capacity.OperatorIn, Values: []string{"h100"}}},
			Resources:    capacity.Resources{"nvidia.com/gpu": gpus},
		},
		Own: capacity.Resources{"nvidia.com/gpu": gpus},
	}
	for _, c := range change {
		c(&s)
	}
	return s
}

func gang(s *PodSet) { s.Profile.Group = &capacity.Group{Name: "ns/g"} }

func workload(sets ...PodSet) *Workload {
	return &Workload{
		Key: "check/uid", Name: "ns/w", Reserved: now.Add(-time.Minute), PodSets: sets,
		Config: fleetv1alpha1.CapacityCheckConfigSpec{}.WithDefaults(),
	}
}

func TestDecide(t *testing.T) {
	config := func(change func(*fleetv1alpha1.CapacityCheckConfigSpec), sets ...PodSet) *Workload {
		w := workload(sets...)
		change(&w.Config)
		return w
	}
	promised := func(nodes int32) []Promise {
		return []Promise{{Key: "check/other", Nodes: map[string]int32{"a": nodes}, Until: now.Add(time.Hour)}}
	}
	for name, c := range map[string]struct {
		w        *Workload
		hints    []Hint
		nodes    []NodeShape
		room     []provisioning.Node
		promises []Promise

		state   kueue.CheckState
		reason  string
		message []string // parts
		take    map[string]int32
	}{
		"enough": {
			w: workload(pods("main", 64, 8)), hints: []Hint{gpuHint("a", 64)},
			state: kueue.CheckStateReady, reason: ReasonCapacityPromised, take: map[string]int32{"a": 64},
			message: []string{"64 × a (High)"},
		},
		"one node short": {
			w: workload(pods("main", 64, 8)), hints: []Hint{gpuHint("a", 32, only("Medium"))},
			state: kueue.CheckStatePending, reason: ReasonCapacityShort,
			message: []string{"needs 64 × 8 nvidia.com/gpu in flavor gpu-h100; 32 available, Medium; next check in 40 s"},
		},
		"pods share nodes": {
			w: workload(pods("main", 5, 2)), hints: []Hint{gpuHint("a", 9)},
			state: kueue.CheckStateReady, take: map[string]int32{"a": 2},
		},
		"a pod set uses the room that another leaves": {
			w: workload(pods("launcher", 2, 1), pods("workers", 2, 6)), hints: []Hint{gpuHint("a", 2)},
			state: kueue.CheckStateReady, take: map[string]int32{"a": 2},
		},
		"two pod sets do not count on the same node": {
			w: workload(pods("one", 2, 8), pods("two", 2, 8)), hints: []Hint{gpuHint("a", 3)},
			state: kueue.CheckStatePending, reason: ReasonCapacityShort,
		},
		"pods that exclude each other take a node each": {
			w: workload(pods("main", 3, 1, func(s *PodSet) {
				s.Profile.AntiAffinity = []capacity.AntiAffinity{{TopologyKey: corev1.LabelHostname}}
			})), hints: []Hint{gpuHint("a", 9)},
			state: kueue.CheckStateReady, take: map[string]int32{"a": 3},
		},
		"the surest offering first, then the cheapest, then the next": {
			w:     workload(pods("main", 5, 8)),
			hints: []Hint{gpuHint("a", 9, only("Medium")), gpuHint("b", 2, cost(2)), gpuHint("c", 2, cost(1))},
			state: kueue.CheckStateReady, take: map[string]int32{"c": 2, "b": 2, "a": 1},
		},
		"what is promised to others is gone": {
			w: workload(pods("main", 2, 8)), hints: []Hint{gpuHint("a", 5)}, promises: promised(4),
			state: kueue.CheckStatePending, message: []string{"1 available", "4 nodes are promised to others"},
		},
		"its own promise is not in its way": {
			w: workload(pods("main", 2, 8)), hints: []Hint{gpuHint("a", 2)},
			promises: []Promise{{Key: "check/uid", Nodes: map[string]int32{"a": 2}}},
			state:    kueue.CheckStateReady, take: map[string]int32{"a": 2},
		},
		"below the confidence threshold": {
			w: workload(pods("main", 2, 8)), hints: []Hint{gpuHint("a", 9, only("Low"))},
			state: kueue.CheckStatePending, message: []string{"9 available, Low, which is below Medium"},
		},
		"a lower threshold": {
			w:     config(func(c *fleetv1alpha1.CapacityCheckConfigSpec) { c.MinAvailability = "Low" }, pods("main", 2, 8)),
			hints: []Hint{gpuHint("a", 9, only("Low"))}, state: kueue.CheckStateReady, take: map[string]int32{"a": 2},
		},
		"None is never enough": {
			w:     config(func(c *fleetv1alpha1.CapacityCheckConfigSpec) { c.MinAvailability = "Low" }, pods("main", 2, 8)),
			hints: []Hint{gpuHint("a", 9, only("None"))}, state: kueue.CheckStatePending,
		},
		"no offering has the flavor's labels": {
			w: workload(pods("main", 2, 8)), hints: []Hint{gpuHint("a", 9, ofType("a100"))},
			state: kueue.CheckStatePending, reason: ReasonNoOffering, message: []string{"no AvailableCapacity matches", "type In [h100]"},
		},
		"a taint keeps pods of a flavor away that chose no nodes": {
			w: workload(pods("main", 1, 8, func(s *PodSet) { s.Selected = false })),
			hints: []Hint{gpuHint("a", 9, func(h *Hint) {
				h.Template.Taints = []corev1.Taint{{Key: "team", Value: "x", Effect: corev1.TaintEffectNoSchedule}}
			})},
			state: kueue.CheckStatePending, reason: ReasonNoOffering,
		},
		"a gang takes one atomic offering": {
			w: workload(pods("main", 3, 8, gang)), hints: []Hint{gpuHint("a", 2), gpuHint("b", 3, cost(9))},
			state: kueue.CheckStateReady, take: map[string]int32{"b": 3},
		},
		"a gang is not split": {
			w: workload(pods("main", 4, 8, gang)), hints: []Hint{gpuHint("a", 2), gpuHint("b", 2)},
			state: kueue.CheckStatePending, reason: ReasonCapacityShort, message: []string{"2 available"},
		},
		"a gang waits for atomic provisioning": {
			w: workload(pods("main", 3, 8, gang)), hints: []Hint{gpuHint("a", 9, oneByOne)},
			state: kueue.CheckStatePending, reason: ReasonNotAtomic, message: []string{"no offering that matches supports atomic provisioning"},
		},
		"a gang is refused by configuration": {
			w: config(func(c *fleetv1alpha1.CapacityCheckConfigSpec) { c.AtomicProvisioning = fleetv1alpha1.AtomicReject },
				pods("main", 3, 8, gang)), hints: []Hint{gpuHint("a", 9, oneByOne)},
			state: kueue.CheckStateRejected, reason: ReasonNotAtomic,
		},
		"atomic provisioning is waived": {
			w: config(func(c *fleetv1alpha1.CapacityCheckConfigSpec) { c.AtomicProvisioning = fleetv1alpha1.AtomicWaive },
				pods("main", 3, 8, gang)), hints: []Hint{gpuHint("a", 9, oneByOne)},
			state: kueue.CheckStateReady, take: map[string]int32{"a": 3},
		},
		"one node is atomic by itself": {
			w: workload(pods("main", 4, 2, gang)), hints: []Hint{gpuHint("a", 9, oneByOne)},
			state: kueue.CheckStateReady, take: map[string]int32{"a": 1},
		},
		"a pod that no node can carry": {
			w: workload(pods("main", 1, 16)), hints: []Hint{gpuHint("a", 9), gpuHint("b", 0)},
			state: kueue.CheckStateRejected, reason: ReasonPodTooLarge,
			message: []string{"can never run in flavor gpu-h100", "16 nvidia.com/gpu", "has 8 nvidia.com/gpu"},
		},
		"no proof while a larger node exists": {
			w: workload(pods("main", 1, 16)), hints: []Hint{gpuHint("a", 9)},
			nodes: []NodeShape{{Labels: map[string]string{"type": "h100"}, Allocatable: capacity.Resources{"nvidia.com/gpu": 16}}},
			state: kueue.CheckStatePending,
		},
		"no proof from a stale hint": {
			w: workload(pods("main", 1, 16)), hints: []Hint{gpuHint("a", 9), gpuHint("b", 9, stale)},
			state: kueue.CheckStatePending,
		},
		"stale hints fail closed": {
			w: workload(pods("main", 1, 8)), hints: []Hint{gpuHint("a", 9, stale)},
			state: kueue.CheckStatePending, reason: ReasonHintsStale, message: []string{"last confirmed at 2026-03-01T11:00:00Z"},
		},
		"stale hints fail open": {
			w: config(func(c *fleetv1alpha1.CapacityCheckConfigSpec) { c.OnStale = fleetv1alpha1.StaleFailOpen },
				pods("main", 1, 8)), hints: []Hint{gpuHint("a", 9, stale)},
			state: kueue.CheckStateReady, reason: ReasonHintsStaleOpen,
		},
		"no hints at all are stale hints": {
			w: workload(pods("main", 1, 8)), state: kueue.CheckStatePending, reason: ReasonHintsStale,
		},
		"a pod set of another flavor is not our business": {
			w: workload(pods("main", 1, 8, func(s *PodSet) { s.Concerned = false })), hints: []Hint{gpuHint("a", 0)},
			state: kueue.CheckStateReady, reason: ReasonNotConcerned,
		},
		"room on Ready nodes is enough": {
			w: workload(pods("main", 2, 8)), hints: []Hint{gpuHint("a", 0)}, room: []provisioning.Node{gpuNode("n1"), gpuNode("n2")},
			state: kueue.CheckStateReady, reason: ReasonNodesReady, take: map[string]int32{},
			message: []string{"Ready nodes have room for 2 pods"},
		},
		"room on Ready nodes, and the rest from a hint": {
			w: workload(pods("main", 3, 8)), hints: []Hint{gpuHint("a", 2)}, room: []provisioning.Node{gpuNode("n1")},
			state: kueue.CheckStateReady, take: map[string]int32{"a": 2}, message: []string{"2 × a", "Ready nodes have room for 1 pods"},
		},
		"room on Ready nodes, and not enough beside it": {
			w: workload(pods("main", 4, 8)), hints: []Hint{gpuHint("a", 2)}, room: []provisioning.Node{gpuNode("n1")},
			state: kueue.CheckStatePending, message: []string{"needs 4 × 8", "2 available, High, and room for 1 on Ready nodes"},
		},
		"room on Ready nodes needs no fresh hint": {
			w: workload(pods("main", 1, 8)), room: []provisioning.Node{gpuNode("n1")}, state: kueue.CheckStateReady,
		},
		"a gang is not split between nodes that are there and others": {
			w: workload(pods("main", 3, 8, gang)), hints: []Hint{gpuHint("a", 2)}, room: []provisioning.Node{gpuNode("n1")},
			state: kueue.CheckStatePending, reason: ReasonCapacityShort,
		},
		"no proof from what quota alone charges": {
			w: workload(pods("main", 1, 8, func(s *PodSet) { s.Profile.Resources["cpu"] = 97000 })), hints: []Hint{gpuHint("a", 9)},
			state: kueue.CheckStatePending, reason: ReasonCapacityShort,
		},
		"what runs already is not stopped": {
			w:     func() *Workload { w := workload(pods("main", 1, 8)); w.Running = true; return w }(),
			state: kueue.CheckStateReady, reason: ReasonAlreadyRunning,
		},
		"quota is given back at the time-out": {
			w: func() *Workload {
				w := workload(pods("main", 2, 8))
				w.Reserved, w.Retries = now.Add(-10*time.Minute), 2
				return w
			}(), hints: []Hint{gpuHint("a", 1)},
			state: kueue.CheckStateRetry, reason: ReasonCapacityShort,
			message: []string{"in flavor gpu-h100", "gave its quota back after 10m0s", "queued again in 264 s"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			world := World{Hints: c.hints, Nodes: c.nodes, Ledger: NewLedger(), Now: now, Random: func() float64 { return 0.5 },
				Room: provisioning.NewRoom(c.room)}
			for _, p := range c.promises {
				world.Ledger.Promise(p)
			}
			d := Decide(c.w, world)
			if d.State != c.state || (c.reason != "" && d.Reason != c.reason) {
				t.Fatalf("decided %s (%s): %s; expected %s (%s)", d.State, d.Reason, d.Message, c.state, c.reason)
			}
			for _, part := range c.message {
				if !strings.Contains(d.Message, part) {
					t.Errorf("the message %q does not say %q", d.Message, part)
				}
			}
			if c.take != nil {
				if diff := cmp.Diff(c.take, d.Nodes); diff != "" {
					t.Errorf("promised nodes differ (-expected +promised):\n%s", diff)
				}
			}
		})
	}
}

// Ready carries what the node template has beyond the flavor: labels, and tolerations of its taints. Nothing that is set
// already is set again, as Kueue refuses a clash.
func TestUpdatesAreAdditive(t *testing.T) {
	h := gpuHint("a", 9, func(h *Hint) {
		h.Labels = map[string]string{"pool": "x", "type": "other", corev1.LabelHostname: "n"}
		h.Template.Taints = []corev1.Taint{
			{Key: "gpu", Effect: corev1.TaintEffectNoSchedule}, {Key: "known", Value: "v", Effect: corev1.TaintEffectNoSchedule},
		}
	})
	w := workload(pods("main", 1, 8, func(s *PodSet) {
		s.Profile.Tolerations = []corev1.Toleration{{Key: "known", Operator: corev1.TolerationOpExists}}
	}))
	d := Decide(w, World{Hints: []Hint{h}, Ledger: NewLedger(), Now: now, Random: func() float64 { return 0 }})
	want := []kueue.PodSetUpdate{{
		Name: "main", NodeSelector: map[string]string{"pool": "x"},
		Tolerations: []corev1.Toleration{{Key: "gpu", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}},
	}}
	if diff := cmp.Diff(want, d.Updates); diff != "" {
		t.Errorf("updates differ (-expected +made):\n%s", diff)
	}
	for _, check := range []string{"fleet-capacity", strings.Repeat("long.", 40)} {
		us := writePromise(d.Updates, check, w, d.Nodes)
		got, made := readPromise(us, check)
		if diff := cmp.Diff(d.Nodes, got); diff != "" || !made {
			t.Errorf("the promise of check %q is not what was written (-expected +read):\n%s", check, diff)
		}
	}
	if got, made := readPromise(d.Updates, "another"); made {
		t.Errorf("a promise %v of a check that made none", got)
	}
	// A job that was made from a running one's manifest has the annotation already: Kueue would refuse another value for good.
	w.PodSets[0].Annotated = map[string]string{promiseAnnotation("fleet-capacity"): "old"}
	for _, u := range writePromise(nil, "fleet-capacity", w, d.Nodes) {
		t.Errorf("update %+v writes over an annotation of the template", u)
	}
}

func TestBackoffDoublesUpToTheMost(t *testing.T) {
	config := fleetv1alpha1.CapacityCheckConfigSpec{
		BackoffBase: &metav1.Duration{Duration: 10 * time.Second}, BackoffMax: &metav1.Duration{Duration: 60 * time.Second},
	}.WithDefaults()
	for retries, want := range []time.Duration{10, 20, 40, 60, 60} {
		if got := Backoff(config, int32(retries), func() float64 { return 0 }); got != want*time.Second {
			t.Errorf("back-off after %d retries is %s, expected %s", retries, got, want*time.Second)
		}
	}
	if got := Backoff(config, 1, func() float64 { return 0.999 }); got != 24*time.Second {
		t.Errorf("the most jitter gives %s, expected a fifth on top of 20s", got)
	}
	if got := Backoff(config, 1<<30, func() float64 { return 0 }); got != 60*time.Second {
		t.Errorf("after very many retries the back-off is %s", got)
	}
}
