package sharding_test

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/history"
)

// checkOptions: the bound is a lease and two seconds, and what the faults in between may take to heal.
var checkOptions = history.Options{Compare: compareVersions, Roots: []sharding.Resource{parents},
	Bound: 8 * time.Second}

// fault does something to a member or a coordinator and, a while later, undoes it.
func (w *world) fault() {
	if w.quiet {
		return
	}
	w.after(time.Duration(w.rng.IntN(700))*time.Millisecond, w.fault)
	lasting := time.Duration(w.rng.IntN(2500)) * time.Millisecond
	p := w.members[w.rng.IntN(len(w.members))]
	switch w.rng.IntN(10) {
	case 0, 1:
		if p.up {
			p.returns = w.chance(0.5)
			p.kill(w.chance(0.5))
			w.after(lasting, func() { w.heal(p) })
		}
	case 2, 3:
		if p.up && !p.paused {
			p.paused = true
			w.changed(p.id, "pause")
			w.after(lasting, func() { w.heal(p) })
		}
	case 4:
		if p.up && !p.cut {
			p.cut = true
			w.changed(p.id, "partition")
			w.after(lasting, func() { w.heal(p) })
		}
	case 5:
		if p.up {
			p.m.Leave()
			w.changed(p.id, "leave")
			p.pump()
			p.leaveWhenRelieved()
		}
	case 6:
		p.unready = !p.unready
		w.changed(p.id, "readiness")
	case 7:
		l := w.leaders[w.rng.IntN(len(w.leaders))]
		l.stop()
		w.changed(l.name, "coordinator stops")
		w.after(lasting/2, func() { w.lead(l) })
	case 8:
		w.lead(w.leaders[w.rng.IntN(len(w.leaders))]) // the second at work, if the first is
	case 9:
		for _, l := range w.leaders[1:] {
			l.stop()
		}
		w.lead(w.leaders[0])
	}
}

func (w *world) lead(l *leader) {
	if !l.active {
		l.start()
		w.changed(l.name, "coordinator starts")
	}
}

// heal ends whatever ails a member.
func (w *world) heal(p *process) {
	switch {
	case !p.up:
		p.start()
	case p.paused:
		p.resume()
		w.changed(p.id, "resume")
	}
	if p.cut {
		p.cut = false
		w.changed(p.id, "heal")
	}
	p.unready = false
	p.notify(parents)
	p.notify(children)
	p.sliceChanged()
}

// leaveWhenRelieved releases the lease and ends the process once nothing is left to it; it comes back later.
func (p *process) leaveWhenRelieved() {
	p.after(10*time.Millisecond, func() {
		if !p.m.Relieved() {
			if p.w.quiet { // the leave was called off by a restart
				p.kill(true)
				p.start()
				return
			}
			p.leaveWhenRelieved()
			return
		}
		if l := p.w.leases[p.id]; l != nil && l.session == p.m.Session() {
			p.w.counter++
			p.w.leases[p.id] = &lease{"", p.w.counter}
		}
		p.kill(true)
		p.w.after(time.Duration(p.w.rng.IntN(1500))*time.Millisecond, func() {
			if !p.up {
				p.start()
			}
		})
	})
}

// simulate plays rounds of faults, each followed by a time in which everything heals and settles.
func simulate(c config, rounds int, each time.Duration) *world {
	w := newWorld(c)
	w.leaders[0].start()
	for _, p := range w.members {
		w.after(time.Duration(w.rng.IntN(300))*time.Millisecond, p.start)
	}
	for range rounds {
		w.quiet = false
		w.after(0, w.user)
		if c.faults {
			w.after(time.Second, w.fault)
		}
		w.run(w.now + each)
		w.quiet = true
		w.run(w.now + 4*time.Second)
		for _, l := range w.leaders[1:] {
			l.stop()
		}
		w.lead(w.leaders[0])
		for _, p := range w.members {
			w.heal(p)
		}
		w.run(w.now + 12*time.Second)
		w.snapshot()
	}
	return w
}

// snapshot records what every cache holds.
func (w *world) snapshot() {
	for _, p := range w.members {
		for _, res := range []sharding.Resource{parents, children} {
			r := history.Record{Kind: history.Snapshot, Resource: res}
			for _, name := range sortedNames(p.caches[res]) {
				r.Objects = append(r.Objects, fmt.Sprintf("%s@%d", name, p.caches[res][name].version))
			}
			p.rec(r)
		}
	}
}

// unsettled tells what is not as it should be when everything has come to rest, "" if nothing.
func (w *world) unsettled() string {
	var all sharding.Set
	for _, name := range sortedNames(w.slices) {
		s := w.slices[name]
		if s.Moving() > 0 {
			return fmt.Sprintf("%s is still moving: %+v", name, *s)
		}
		if all.Intersects(s.Owned) {
			return fmt.Sprintf("%s owns %v, which others own as well", name, s.Owned)
		}
		if n := s.Owned.Len(); n < w.v/w.config.members || n > w.v/w.config.members+1 {
			if _, balanced := w.assign.(sharding.Balanced); balanced {
				return fmt.Sprintf("%s owns %d of %d", name, n, w.v)
			}
		}
		all = all.Union(s.Owned)
	}
	if want := sharding.Span(0, w.v); !all.Equal(want) {
		return fmt.Sprintf("nobody owns %v", want.Minus(all))
	}
	for _, name := range sortedNames(w.tables[parents].items) {
		it := w.tables[parents].items[name]
		if child, ok := w.tables[children].items[name]; !ok || child.generation != it.generation ||
			it.status != it.generation {
			return fmt.Sprintf("parent %+v has child %+v (%v)", it, child, ok)
		}
	}
	if n, m := len(w.tables[children].items), len(w.tables[parents].items); n != m {
		return fmt.Sprintf("%d children of %d parents", n, m)
	}
	return ""
}

func long() bool { return os.Getenv("DROVER_LONG") != "" }

// seeds returns which seeds to play: DROVER_SEED names one that failed.
func seeds(t *testing.T, short, full int) []uint64 {
	if s := os.Getenv("DROVER_SEED"); s != "" {
		seed, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			t.Fatalf("DROVER_SEED=%q: %v", s, err)
		}
		return []uint64{seed}
	}
	n := short
	if long() {
		n = full
	}
	var list []uint64
	for i := range n {
		list = append(list, uint64(i+1))
	}
	return list
}

func configFor(seed uint64) config {
	c := config{seed: seed, v: 12, objects: 20, members: 2 + int(seed%4), mode: sharding.Exclusive, faults: true,
		resets: 0.01}
	c.assign = sharding.Balanced{}
	if seed%3 == 0 {
		c.resets = 0.1
	}
	if seed%5 == 0 {
		c.assign = sharding.ConsistentHash{Replicas: 20}
	}
	return c
}

func report(t *testing.T, w *world, found []history.Violation) {
	t.Helper()
	for i, v := range found {
		if i == 5 {
			t.Errorf("... and %d more", len(found)-i)
			break
		}
		t.Errorf("%v", v)
		from := max(0, v.Index-900)
		for k := from; k < min(v.Index+1, len(w.records)) && testing.Verbose(); k++ {
			t.Logf("  %d %v", k, w.records[k])
		}
	}
	t.Errorf("reproduce by: DROVER_SEED=%d go test -run '^%s$' ./sharding", w.seed, t.Name())
}

// TestSimulation plays faults of every kind, with none of the invariants broken and everything settled in the end.
// DROVER_LONG=1 plays many millions of steps.
func TestSimulation(t *testing.T) {
	steps := 0
	kinds := make(map[string]int)
	for _, seed := range seeds(t, 5, 400) {
		w := simulate(configFor(seed), 2, 25*time.Second)
		steps += w.steps
		for _, r := range w.records {
			kinds[string(r.Kind)+r.What]++
		}
		if found := history.Check(w.records, checkOptions); len(found) > 0 {
			report(t, w, found)
			return
		}
		if s := w.unsettled(); s != "" {
			t.Errorf("not settled: %s", s)
			report(t, w, nil)
			return
		}
	}
	t.Logf("%d steps; %v", steps, kinds)
}

// The paper's handoff has a window with two owners (section 8): the same faults show it to the checker.
func TestEventualOverlapsAsThePaperAdmits(t *testing.T) {
	for _, seed := range seeds(t, 20, 20) {
		c := configFor(seed)
		c.mode = sharding.Eventual
		w := simulate(c, 1, 15*time.Second)
		if s := w.unsettled(); s != "" {
			t.Fatalf("seed %d: not settled: %s", seed, s)
		}
		if slices.ContainsFunc(history.Check(w.records, checkOptions), func(v history.Violation) bool {
			return v.Invariant == history.I1
		}) {
			return
		}
	}
	t.Error("the checker saw no overlap")
}

// Each fault that is built into the machines or around them breaks an invariant, and the checker sees it.
func TestCheckerCatchesMutations(t *testing.T) {
	for _, tc := range []struct {
		mutation mutation
		by       []history.Invariant
	}{
		{skipAck, []history.Invariant{history.I1}},
		{epochEarly, []history.Invariant{history.I1}},
		{releaseEarly, []history.Invariant{history.I1}},
		{twoOwners, []history.Invariant{history.I1}},
		{keepClaim, []history.Invariant{history.I1}},
		{noFence, []history.Invariant{history.I1}},
		{sameAttempt, []history.Invariant{history.I1}},
		{sameSession, []history.Invariant{history.I1}},
		{trustedExpiry, []history.Invariant{history.I1}},
		{watchCache, []history.Invariant{history.I2}},
		{noBarrier, []history.Invariant{history.I2, history.I3}},
		{forgetVersions, []history.Invariant{history.I2}},
		{blindRelease, []history.Invariant{history.I1, history.I2}},
		{noTakeover, []history.Invariant{history.I4}},
		{touchObjects, []history.Invariant{history.I5}},
		{relistAll, []history.Invariant{history.I6}},
		{purgeDeletes, []history.Invariant{history.I1, history.I5, history.I7}},
	} {
		t.Run(string(tc.mutation), func(t *testing.T) {
			count := make(map[history.Invariant]int)
			for _, seed := range seeds(t, 40, 40) {
				c := configFor(seed)
				c.mutation = tc.mutation
				if slices.Contains([]mutation{blindRelease, keepClaim, sameAttempt}, c.mutation) {
					c.resets = 0.3
				}
				w := simulate(c, 1, 20*time.Second)
				for _, v := range history.Check(w.records, checkOptions) {
					count[v.Invariant]++
				}
				if slices.ContainsFunc(tc.by, func(i history.Invariant) bool { return count[i] > 0 }) {
					t.Logf("caught by seed %d: %v", seed, count)
					return
				}
			}
			t.Errorf("not caught: %v", count)
		})
	}
}

// The same seed gives the same history, or a failure could not be reproduced.
func TestSimulationIsDeterministic(t *testing.T) {
	var first, second bytes.Buffer
	for _, buffer := range []*bytes.Buffer{&first, &second} {
		if err := history.Write(buffer, simulate(configFor(3), 1, 8*time.Second).records); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(first.Bytes(), second.Bytes()) {
		t.Error("two runs of one seed differ")
	}
}
