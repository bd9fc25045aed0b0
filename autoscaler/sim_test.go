package autoscaler

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"gocloud.dev/blob/memblob"
	corev1 "k8s.io/api/core/v1"
	clocktesting "k8s.io/utils/clock/testing"

	fleetpb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
	"github.com/drover-sh/drover/autoscaler/provider"
	"github.com/drover-sh/drover/autoscaler/provider/fake"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/capacity/wire"
)

// world is a deterministic simulation: a runner driven turn by turn, a fake cloud, and one operator per cluster that
// does what the feed says. Nothing runs by itself; advance moves the clock.
type world struct {
	t      testing.TB
	clock  *clocktesting.FakeClock
	cloud  *fake.Cloud
	store  Store
	policy Policy
	runner *Runner
	// wrap lets a test put something between runner and provider.
	wrap func(provider.Interface) provider.Interface
	// plan is the planner; nil: the real one.
	plan      func(capacity.Input) capacity.Plan
	operators map[string]*operator
	ids       int
	// onTurn is called after each turn.
	onTurn func()
	notes  []string
}

// operator is a cluster: what it demands, and the nodes that it has seen.
type operator struct {
	id       string
	sequence uint64
	needs    []capacity.Need
	silent   bool
	// nodes are the Ready ones, and ending those that it drains, by machine.
	nodes map[string]bool
	drain map[string]string
	// refuse says why a machine cannot be given back.
	refuse func(machine string) string
	// joins says whether a launched machine's Node appears.
	joins func(machine string) bool
	// slow: it does not finish drains.
	slow bool
	// drainedAt records when it gave each machine back.
	drainedAt []time.Time
}

var epoch = time.Date(2026, 4, 14, 10, 30, 0, 0, time.UTC)

func testPolicy() Policy {
	return Policy{ConsolidationDelay: 30 * time.Second, MaxReclaimsPerMinute: 100, CollapseHold: time.Minute,
		CollapseFraction: 0.5, RegistrationDeadline: 10 * time.Minute, SettleTime: 30 * time.Second,
		SilentAfter: 5 * time.Minute, PassDebounce: 100 * time.Millisecond, BackoffBase: 5 * time.Second,
		BackoffMax: 5 * time.Minute, FailedRetention: 5 * time.Minute, KeptBackoff: time.Minute,
		SurveyPeriod: 30 * time.Second}
}

// offering has nodes of cpu cores, in domains "zone" or "zone/rack", each with a stock.
func offering(name string, cpu int64, cost float64, stock map[string]int32) provider.Offering {
	o := provider.Offering{Offering: capacity.Offering{Name: name, Cost: cost,
		Labels:           map[string]string{corev1.LabelInstanceTypeStable: name},
		Allocatable:      capacity.Resources{corev1.ResourceCPU: cpu * 1000, corev1.ResourcePods: 110},
		ProvisioningTime: time.Minute}, InstanceType: name, Availability: "High"}
	var names []string
	for domain := range stock {
		names = append(names, domain)
	}
	slices.Sort(names)
	for _, domain := range names {
		zone, rack, hasRack := strings.Cut(domain, "/")
		labels := map[string]string{corev1.LabelTopologyZone: zone}
		if hasRack {
			labels["topology.kubernetes.io/rack"] = rack
		}
		o.Domains = append(o.Domains, capacity.Domain{Name: domain, Labels: labels, Available: stock[domain]})
	}
	return o
}

func newWorld(t testing.TB, policy Policy, offerings ...provider.Offering) *world {
	bucket := memblob.OpenBucket(nil)
	t.Cleanup(func() { _ = bucket.Close() })
	clk := clocktesting.NewFakeClock(epoch)
	w := &world{t: t, clock: clk, cloud: fake.NewCloud(clk, offerings...), store: NewStore(bucket), policy: policy,
		operators: map[string]*operator{}}
	w.start()
	return w
}

// start begins a new autoscaler process on the store.
func (w *world) start() {
	w.t.Helper()
	w.runner = nil
	p := w.cloud.Provider()
	var through provider.Interface = p
	if w.wrap != nil {
		through = w.wrap(p)
	}
	plan := capacity.MakePlan
	if w.plan != nil {
		plan = w.plan
	}
	engine := NewEngine(w.policy, plan, func() string { w.ids++; return fmt.Sprintf("%010d", w.ids) })
	r := NewRunner(engine, w.store, through, w.clock, logr.Discard(), prometheus.NewRegistry())
	if err := r.Restore(context.Background()); err != nil {
		w.t.Fatal(err)
	}
	r.note = func(n Note) { w.notes = append(w.notes, fmt.Sprintf("%s %s", w.clock.Now().Sub(epoch), n)) }
	w.runner = r
	p.Connect(r.Event)
}

// operator returns the operator of a cluster.
func (w *world) operator(id string) *operator {
	o := w.operators[id]
	if o == nil {
		o = &operator{id: id, nodes: map[string]bool{}, drain: map[string]string{}}
		w.operators[id] = o
	}
	return o
}

func cpuNeed(cores int64, count int32) capacity.Need {
	p := capacity.Profile{Resources: capacity.Resources{corev1.ResourceCPU: cores * 1000, corev1.ResourcePods: 1}}.Canonical()
	return capacity.Need{ID: p.ID(), Profile: p, Count: count}
}

// demand changes what a cluster needs, and sends it; what is pending is the simulated scheduler's word.
func (w *world) demand(cluster string, needs ...capacity.Need) {
	w.t.Helper()
	o := w.operator(cluster)
	o.needs = slices.Clone(needs)
	w.bind(o)
	w.send(cluster)
}

// bind is the scheduler: the largest pods first, each to the first Ready node with room. What is left is pending. It
// returns whether that has changed.
func (w *world) bind(o *operator) (changed bool) {
	free := map[string]int64{}
	for _, m := range w.cloud.Machines() {
		if o.nodes[m.ID] {
			free[m.ID] = m.Allocatable[corev1.ResourceCPU]
		}
	}
	nodes := slices.Sorted(maps.Keys(free))
	order := slices.Clone(o.needs)
	slices.SortStableFunc(order, func(a, b capacity.Need) int {
		return int(b.Profile.Resources[corev1.ResourceCPU] - a.Profile.Resources[corev1.ResourceCPU])
	})
	for _, need := range order {
		size, left := need.Profile.Resources[corev1.ResourceCPU], need.Count
		for _, node := range nodes {
			for left > 0 && free[node] >= size {
				free[node] -= size
				left--
			}
		}
		for i := range o.needs {
			if o.needs[i].ID == need.ID && o.needs[i].Pending != left {
				o.needs[i].Pending, changed = left, true
			}
		}
	}
	return changed
}

// message is the cluster's next roll-up.
func (o *operator) message() *fleetpb.ClusterCapacityNeeds {
	o.sequence++
	m := wire.SnapshotToProto(capacity.Snapshot{Needs: o.needs})
	m.ClusterId, m.Session, m.Sequence = o.id, "operator-of-"+o.id, o.sequence
	return m
}

func (w *world) send(cluster string) {
	w.t.Helper()
	rollUp, err := RollUpFromProto(w.operator(cluster).message())
	if err != nil {
		w.t.Fatal(err)
	}
	w.runner.mu.Lock()
	w.runner.engine.RollUp(w.clock.Now(), rollUp)
	w.runner.mu.Unlock()
}

// turn runs one turn and keeps its notes.
func (w *world) turn() {
	w.runner.Turn(context.Background())
	if w.onTurn != nil {
		w.onTurn()
	}
}

// advance moves the clock in steps of a second at most; in each, cloud, operators and autoscaler do what is due.
// Roll-ups are repeated every ten seconds, and the provider is surveyed every thirty.
func (w *world) advance(d time.Duration) {
	w.t.Helper()
	for end := w.clock.Now().Add(d); ; {
		w.settle()
		left := end.Sub(w.clock.Now())
		if left <= 0 {
			return
		}
		w.clock.Step(min(left, time.Second))
		seconds := int(w.clock.Now().Sub(epoch) / time.Second)
		for _, o := range w.operators {
			if seconds%10 == 0 && !o.silent && o.sequence > 0 {
				w.send(o.id)
			}
		}
		if seconds%30 == 0 {
			w.runner.Survey(context.Background())
		}
	}
}

// settle lets everybody act on what they see now.
func (w *world) settle() {
	for range 4 {
		w.turn()
		w.cloud.Tick()
		w.turn()
		for _, o := range w.sortedOperators() {
			if w.act(o); w.bind(o) && !o.silent {
				w.send(o.id)
			}
		}
		w.turn()
	}
}

func (w *world) sortedOperators() []*operator {
	var out []*operator
	for _, o := range w.operators {
		out = append(out, o)
	}
	slices.SortFunc(out, func(a, b *operator) int { return strings.Compare(a.id, b.id) })
	return out
}

func (w *world) feed(cluster string) *fleetpb.FeedState {
	w.runner.mu.Lock()
	defer w.runner.mu.Unlock()
	return w.runner.engine.Feed(w.clock.Now(), cluster)
}

func (w *world) report(o *operator, observations ...Observation) {
	w.runner.mu.Lock()
	defer w.runner.mu.Unlock()
	w.runner.engine.Report(w.clock.Now(), o.id, observations)
}

// act is what an operator does with its feed: report nodes, and drain what it is asked for.
func (w *world) act(o *operator) {
	feed := w.feed(o.id)
	exists := map[string]bool{}
	for _, m := range w.cloud.Machines() {
		exists[m.ID] = m.Cluster == o.id
	}
	for id := range o.nodes {
		if !exists[id] {
			delete(o.nodes, id)
			delete(o.drain, id)
		}
	}
	for _, m := range feed.Machines {
		if exists[m.Id] && (m.Phase == "Launched" || m.Phase == "Registered") && (o.joins == nil || o.joins(m.Id)) {
			o.nodes[m.Id] = true
			w.report(o, Observation{ID: m.Id, State: ObservedRegistered, NodeName: m.Id},
				Observation{ID: m.Id, State: ObservedReady, NodeName: m.Id})
		}
	}
	listed := map[string]bool{}
	for _, r := range feed.Reclaims {
		w.answer(o, r)
		for _, id := range r.Candidates {
			listed[id+r.Id] = true
		}
	}
	for id, instruction := range o.drain {
		if !listed[id+instruction] && !slices.Contains(feed.Terminating, id) {
			delete(o.drain, id)
		}
	}
}

func (w *world) answer(o *operator, r *fleetpb.Reclaim) {
	under := int32(0)
	for _, id := range r.Candidates {
		if o.drain[id] == r.Id {
			under++
			if !o.slow {
				w.report(o, Observation{ID: id, State: ObservedDrained, ReclaimID: r.Id})
			}
		}
	}
	for _, id := range r.Candidates {
		if under >= r.Count {
			return
		}
		if !o.nodes[id] || o.drain[id] != "" {
			continue
		}
		if o.refuse != nil {
			if why := o.refuse(id); why != "" {
				w.report(o, Observation{ID: id, State: ObservedKept, ReclaimID: r.Id, Message: why})
				continue
			}
		}
		o.drain[id] = r.Id
		o.drainedAt = append(o.drainedAt, w.clock.Now())
		under++
		w.report(o, Observation{ID: id, State: ObservedDraining, ReclaimID: r.Id})
	}
}

// states counts a cluster's machines by state.
func (w *world) states(cluster string) map[MachineState]int {
	out := map[MachineState]int{}
	if c := w.runner.engine.clusters[cluster]; c != nil {
		for _, m := range c.machines {
			out[m.State]++
		}
	}
	return out
}

// want fails unless a cluster's machines are in exactly these states.
func (w *world) want(cluster string, want map[MachineState]int) {
	w.t.Helper()
	got := w.states(cluster)
	if fmt.Sprint(got) != fmt.Sprint(want) {
		w.t.Fatalf("at %s cluster %s has %v, want %v\nlast notes:\n%s", w.clock.Now().Sub(epoch), cluster, got, want,
			strings.Join(w.notes[max(0, len(w.notes)-25):], "\n"))
	}
}

var errCrash = errors.New("killed")
