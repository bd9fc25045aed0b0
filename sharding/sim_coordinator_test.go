package sharding_test

import (
	"strconv"
	"time"

	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/history"
)

// A leader is one process that believes, rightly or not, to be the elected coordinator.
type leader struct {
	w      *world
	name   string
	life   int // a new one for every start; events of earlier ones do nothing
	active bool
	claim  string
	leases *sharding.LeaseWatch
	seen   map[string]lease         // leases as this process saw them last
	since  map[string]time.Duration // when a session was first seen
	gone   map[string]time.Duration // when a member was first seen to have stopped
}

func (l *leader) start() {
	l.life++
	l.active = true
	l.claim = l.w.name(l.name)
	l.leases = &sharding.LeaseWatch{}
	l.seen = make(map[string]lease)
	l.since, l.gone = make(map[string]time.Duration), make(map[string]time.Duration)
	l.loop()
}

func (l *leader) stop() {
	l.life++
	l.active = false
}

// after schedules something that this life of the process does; when it has died meanwhile nothing happens.
func (l *leader) after(d time.Duration, do func()) {
	life := l.life
	l.w.after(d, func() {
		if l.life == life {
			do()
		}
	})
}

func (l *leader) loop() {
	l.after(l.w.delay()*2, func() {
		slices := l.listSlices()
		l.after(l.w.delay()*2, func() {
			l.watchLeases()
			members := l.memberStates(slices)
			l.after(l.w.delay(), func() { l.act(sharding.Observation{Slices: slices, Members: members}) })
		})
	})
}

func (l *leader) listSlices() []sharding.Slice {
	var list []sharding.Slice
	for _, name := range sortedNames(l.w.slices) {
		s := *l.w.slices[name]
		if l.w.mutation == skipAck {
			s.Status.Released = nil
			for _, o := range s.Draining {
				s.Status.Released = append(s.Status.Released, sharding.Release{Epoch: o.Epoch, VNs: o.VNs,
					Known: &sharding.Versions{}})
			}
		}
		list = append(list, s)
	}
	return list
}

// watchLeases reads the leases and revokes those that have expired.
func (l *leader) watchLeases() {
	for _, member := range sortedNames(l.w.leases) {
		le := *l.w.leases[member]
		if l.w.mutation == trustedExpiry && l.w.chance(0.995) {
			if old, ok := l.seen[member]; ok {
				le = old // the watch is late
			}
		}
		l.seen[member] = le
		l.leases.Observe(sharding.LeaseRecord{
			Member: member, Session: le.session, Renewal: strconv.FormatInt(le.version, 10), Duration: simPolicy.LeaseDuration,
		}, l.w.now)
		if le.session == "" || l.leases.Session(member, l.w.now) != "" {
			continue
		}
		now := l.w.leases[member]
		if now.version == le.version || l.w.mutation == trustedExpiry {
			l.w.endSession(member, now.session)
			l.w.counter++
			l.w.leases[member] = &lease{"", l.w.counter}
		}
	}
}

func (l *leader) memberStates(slices []sharding.Slice) []sharding.MemberState {
	asked := make(map[string]bool)
	for _, s := range slices {
		asked[s.Member] = s.Status.Leaving && s.Status.Session == s.Session
	}
	var members []sharding.MemberState
	for _, p := range l.w.members {
		le := l.w.leases[p.id]
		if le == nil {
			continue
		}
		if _, ok := l.since[le.session]; !ok {
			l.since[le.session] = l.w.now
		}
		terminated := p.seenDead == le.session && le.session != ""
		if _, ok := l.gone[p.id]; !ok && (terminated || le.session == "") {
			l.gone[p.id] = l.w.now
		} else if !terminated && le.session != "" {
			delete(l.gone, p.id)
		}
		facts := sharding.MemberFacts{
			Session:       le.session,
			Terminated:    terminated,
			Unready:       p.unready,
			LeaveAsked:    asked[p.id],
			NewcomerGrace: l.w.now-l.since[le.session] < 300*time.Millisecond,
			ReturnGrace:   p.returns && l.w.now-l.gone[p.id] < 400*time.Millisecond,
		}
		members = append(members, sharding.MemberState{ID: p.id, Session: le.session, Phase: facts.Phase()})
	}
	return members
}

// act makes the writes of one step, each on its own way through the network. The process may die while they are under
// way; they land or not regardless.
func (l *leader) act(obs sharding.Observation) {
	c := sharding.Coordinator{Claim: l.claim, VirtualNodes: l.w.v, Mode: l.w.mode, Assignment: l.w.assign}
	if l.w.mutation == twoOwners {
		for i := range obs.Slices {
			obs.Slices[i].Claim = c.Claim
		}
	}
	writes := c.Step(obs)
	if l.w.mutation == epochEarly {
		writes = grantEarly(obs.Slices, writes)
	}
	waiting := len(writes)
	unsure := false
	answered := func(ok bool) {
		waiting--
		unsure = unsure || !ok
		if waiting == 0 {
			if unsure && l.w.mutation != keepClaim {
				l.claim = l.w.name(l.name)
			}
			l.loop()
		}
	}
	for _, write := range writes {
		lost := l.w.chance(0.01)
		arrival := l.w.delay()
		if l.w.chance(2 * l.w.resets) {
			// The connection breaks: the coordinator is told at once, and the write may arrive long after.
			lost, arrival = true, time.Duration(l.w.rng.IntN(2000))*time.Millisecond
			l.after(l.w.delay(), func() { answered(false) })
		} else if lost {
			l.after(simPolicy.RequestTimeout, func() { answered(false) })
		}
		if lost && l.w.chance(0.3) {
			continue // it never arrives
		}
		l.w.after(arrival, func() {
			l.w.land(write)
			if !lost {
				l.after(l.w.delay(), func() { answered(true) })
			}
		})
	}
	if len(writes) == 0 {
		l.after(time.Duration(20+l.w.rng.IntN(80))*time.Millisecond, l.loop)
	}
}

// grantEarly gives what is drained to where it is incoming, in the same step.
func grantEarly(slices []sharding.Slice, writes []sharding.Write) []sharding.Write {
	var drained sharding.Set
	var epoch sharding.Epoch
	written := make(map[string]bool)
	for _, write := range writes {
		written[write.Slice.Member] = true
		for _, o := range write.Slice.Draining {
			if o.Epoch == write.Slice.Epoch {
				drained, epoch = drained.Union(o.VNs), o.Epoch
			}
		}
	}
	for _, s := range slices {
		for _, o := range s.Incoming {
			if vns := o.VNs.Intersect(drained); !vns.Empty() && !written[s.Member] {
				s.Epoch = epoch
				s.Owned = s.Owned.Union(vns)
				s.Grants = append(s.Grants[:len(s.Grants):len(s.Grants)], sharding.Grant{Epoch: epoch, VNs: vns,
					Known: &sharding.Versions{}})
				writes = append(writes, sharding.Write{Op: sharding.Update, Slice: s})
				written[s.Member] = true
			}
		}
	}
	return writes
}

// land makes a write of the coordinator at the server, if its condition holds.
func (w *world) land(write sharding.Write) {
	name := write.Slice.Member
	old := w.slices[name]
	unconditional := w.mutation == twoOwners && old != nil && write.Op == sharding.Update
	switch {
	case write.Op == sharding.Create && old == nil:
		w.putSlice(write.Slice)
	case write.Op == sharding.Update && old != nil && (old.Version == write.Slice.Version || unconditional):
		next := write.Slice
		next.Status = old.Status
		if w.mutation == touchObjects {
			w.touch(next.Owned.Minus(old.Owned))
		}
		w.putSlice(next)
	case write.Op == sharding.Delete && old != nil && old.Version == write.Slice.Version:
		if !held(old).Empty() {
			panic("a slice is deleted that holds " + held(old).String())
		}
		delete(w.slices, name)
	}
}

func (w *world) touch(vns sharding.Set) {
	for _, name := range sortedNames(w.tables[parents].items) {
		if it := w.tables[parents].items[name]; vns.Has(it.vn) {
			w.write(parents, it, it.version, history.Record{Actor: history.Machinery})
		}
	}
}
