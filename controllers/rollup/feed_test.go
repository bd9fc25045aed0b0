package rollup

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	clocktesting "k8s.io/utils/clock/testing"

	fleetpb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
)

func TestOnlyAHigherSequenceOfASessionIsTaken(t *testing.T) {
	type message struct {
		session     string
		sequence    uint64
		fresh, late bool
	}
	f := &feed{}
	for i, m := range []message{
		{"a", 1, true, false},
		{"a", 3, false, false},
		{"a", 2, false, true},
		{"a", 3, false, true},
		{"b", 1, true, false}, // another process
		{"a", 3, false, true}, // a late word of the former
		{"a", 4, true, false}, // the former one is back in charge
		{"b", 1, false, true},
		{"b", 2, true, false},
	} {
		if fresh, late := f.register(m.session, m.sequence); fresh != m.fresh || late != m.late {
			t.Errorf("message %d (%s %d): fresh %v, late %v; want %v, %v", i, m.session, m.sequence, fresh, late, m.fresh, m.late)
		}
	}
	for i := range 1000 {
		f.register(fmt.Sprint("s", i), 1)
	}
	if len(f.sequences) > maxSessions {
		t.Errorf("%d sessions are remembered, want %d at most", len(f.sequences), maxSessions)
	}
}

func TestAnInvalidEntryLosesNothingElse(t *testing.T) {
	good := &fleetpb.FeedState{Shapes: shapes(), Machines: []*fleetpb.UpcomingMachine{machineAt("m-1", "Launched")},
		Offerings: []*fleetpb.Offering{{Name: "a", Availability: "High"}}}
	before, problems := newFeedState(good, nil, time.Now())
	if len(problems) != 0 {
		t.Fatal(problems)
	}
	badShape := &fleetpb.NodeShape{Resources: map[string]string{"cpu": "much"}}
	msg := &fleetpb.FeedState{
		Shapes: append(shapes(), badShape),
		Machines: []*fleetpb.UpcomingMachine{
			{Id: "m-1", Phase: "Launched", Shape: 9},
			{Id: "M_2", Phase: "Launched"},
			{Id: "m-3", Phase: "Sleeping"},
			{Id: "m-4", Phase: "Launched", Shape: 1},
			machineAt("m-5", "Launched"),
		},
		Offerings: []*fleetpb.Offering{
			{Name: "a", Availability: "Perhaps"}, {Name: "b", Availability: "Low", Cost: -1},
			{Name: "c", Availability: "Low", Requirements: []*fleetpb.NodeSelectorRequirement{{Key: "k", Operator: "Near"}}},
			{Name: "d", Availability: "None"},
		},
		Reclaims: []*fleetpb.Reclaim{{Id: ""}, {Id: "not a label"}, {Id: "r-1", Count: -4, Candidates: []string{"m-9"}}},
	}
	s, problems := newFeedState(msg, before, time.Now())
	for _, want := range []string{
		`machines[0] ("m-1"): shape: index 9`, `machines[1] ("M_2"): id:`, `machines[2] ("m-3"): phase: "Sleeping"`,
		`machines[3] ("m-4"): shape: resources["cpu"]: "much"`, `offerings[0] ("a"): availability: "Perhaps"`,
		`offerings[1] ("b"): cost: -1`, `offerings[2] ("c"): requirements:`, `reclaims[0] (""): id:`,
		`reclaims[1] ("not a label"): id:`,
	} {
		if !slices.ContainsFunc(problems, func(err error) bool { return strings.HasPrefix(err.Error(), want) }) {
			t.Errorf("no problem begins with %q among %v", want, problems)
		}
	}
	if s.machines["m-1"] == nil || s.machines["m-5"] == nil || len(s.machines) != 2 {
		t.Errorf("machines are %v, want m-1 as it was before and m-5", s.machines)
	}
	if s.offerings["a"] == nil || s.offerings["d"] == nil || len(s.offerings) != 2 {
		t.Errorf("offerings are %v, want a as it was before and d", s.offerings)
	}
	if r := s.reclaims["r-1"]; r == nil || r.count != 0 || len(s.reclaims) != 1 {
		t.Errorf("reclaims are %v, want r-1 with count 0", s.reclaims)
	}
}

// reports is the autoscaler's side of a reporter.
type reports struct {
	fleetpb.CapacityFeedClient
	answer func([]*fleetpb.MachineObservation) error
	calls  chan []*fleetpb.MachineObservation
}

func (r *reports) ReportMachines(_ context.Context, m *fleetpb.MachineReport, _ ...grpc.CallOption) (*fleetpb.MachineReportAck, error) {
	err := r.answer(m.Machines)
	r.calls <- m.Machines
	return &fleetpb.MachineReportAck{Acknowledged: err == nil}, err
}

func newReporterTest(t *testing.T, answer func([]*fleetpb.MachineObservation) error) (*reporter, *reports, *clocktesting.FakeClock) {
	t.Helper()
	metrics, err := NewMetrics(prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	peer := &reports{answer: answer, calls: make(chan []*fleetpb.MachineObservation, 100)}
	clk := clocktesting.NewFakeClock(time.Unix(1_000_000, 0))
	r := newReporter()
	r.clusterID, r.client, r.clock, r.timeout = testCluster, peer, clk, time.Hour
	r.backoff = backoff{base: 2 * time.Second, max: 8 * time.Second, random: func() float64 { return 0 }}
	r.metrics, r.log, r.onAcknowledged = metrics, logr.Discard(), func([]string) {}
	return r, peer, clk
}

func run(t *testing.T, start func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); _ = start(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
}

func states(batch []*fleetpb.MachineObservation) string {
	var parts []string
	for _, o := range batch {
		parts = append(parts, o.Id+"="+o.State)
	}
	return strings.Join(parts, " ")
}

// Observations are repeated until they are acknowledged, the latest of each machine only.
func TestReportsAreRepeatedAndCoalesced(t *testing.T) {
	fail := errors.New("away")
	r, peer, clk := newReporterTest(t, func([]*fleetpb.MachineObservation) error { return fail })
	say := func(id, state string) { r.report(&fleetpb.MachineObservation{Id: id, State: state}) }
	say("m-2", stateRegistered)
	say("m-1", stateRegistered)
	say("m-1", stateReady)
	say("m-1", stateKept)
	run(t, r.Start)
	for range 3 {
		if got, want := states(<-peer.calls), "m-1=Ready m-1=Kept m-2=Registered"; got != want {
			t.Errorf("reported %q, want %q", got, want)
		}
		eventually(t, func() error { return is(clk.HasWaiters(), "no back-off") })
		say("m-2", stateRegistered)
		clk.Step(8 * time.Second)
	}
	<-peer.calls
	eventually(t, func() error { return is(clk.HasWaiters(), "no back-off") })
	if _, ok := r.acknowledged("m-1", stateReady); ok {
		t.Error("acknowledged by an error")
	}
	fail = nil
	say("m-2", stateGone)
	clk.Step(8 * time.Second)
	if got, want := states(<-peer.calls), "m-1=Ready m-1=Kept m-2=Gone"; got != want {
		t.Errorf("reported %q, want %q", got, want)
	}
	eventually(t, func() error {
		_, ok := r.acknowledged("m-1", stateReady)
		return is(ok, "not acknowledged")
	})
	if r.latest("m-2") != nil {
		t.Error("a machine that is gone is remembered")
	}
	say("m-1", stateReady) // said already
	say("m-3", stateReady)
	if got, want := states(<-peer.calls), "m-3=Ready"; got != want {
		t.Errorf("reported %q, want %q", got, want)
	}
	r.forgetKept(func(string) bool { return false })
	r.repeatAll()
	if got, want := states(<-peer.calls), "m-1=Ready m-3=Ready"; got != want {
		t.Errorf("reported %q, want %q", got, want)
	}
}

// One observation that the autoscaler refuses does not hold up the others.
func TestARefusedReportIsDropped(t *testing.T) {
	r, peer, _ := newReporterTest(t, func(batch []*fleetpb.MachineObservation) error {
		for _, o := range batch {
			if o.Id == "bad" {
				return status.Error(codes.InvalidArgument, "machines[0].id")
			}
		}
		return nil
	})
	for _, id := range []string{"a", "bad", "c"} {
		r.report(&fleetpb.MachineObservation{Id: id, State: stateReady})
	}
	run(t, r.Start)
	for _, want := range []string{"a=Ready bad=Ready c=Ready", "a=Ready", "bad=Ready", "c=Ready"} {
		if got := states(<-peer.calls); got != want {
			t.Errorf("reported %q, want %q", got, want)
		}
	}
	eventually(t, func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		return is(len(r.waiting) == 0, "%d still wait", len(r.waiting))
	})
}

// A stream that has gone quiet is given up and made anew.
func TestASilentFeedIsReplaced(t *testing.T) {
	metrics, err := NewMetrics(prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	autoscaler, conn := newScripted(t)
	clk := clocktesting.NewFakeClock(time.Unix(1_000_000, 0))
	applied := make(chan *feedState, 10)
	f := &feed{clusterID: testCluster, client: fleetpb.NewCapacityFeedClient(conn), clock: clk, metrics: metrics,
		log: logr.Discard(), silence: time.Minute, backoff: backoff{base: time.Second, max: time.Second, random: func() float64 { return 0 }},
		onState: func(s, _ *feedState, _ changes, _ bool) { applied <- s }}
	autoscaler.say(&fleetpb.FeedState{})
	run(t, f.Start)
	<-applied
	autoscaler.set(func(s *scripted) { s.sequence = 10; s.state.Sequence = 10 })
	clk.Step(time.Minute)
	eventually(t, func() error {
		clk.Step(200 * time.Millisecond) // slow enough that the new stream is heard before it seems silent too
		select {
		case <-applied:
			return nil
		default:
			return errors.New("the silent stream was not replaced")
		}
	})
	// Another cluster's state is nobody's business here.
	wrong := autoscaler.say(&fleetpb.FeedState{})
	<-applied
	wrong.ClusterId, wrong.Sequence = "cluster-2", 99
	if f.apply(wrong) {
		t.Error("another cluster's state was taken")
	}
}
