package sharding_test

import (
	"slices"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/history"
)

// A process is one member of the group: the Member machine, with the caches, streams, queue and workers that a real one
// has around it.
type process struct {
	w  *world
	id string

	life     int  // a new one for every start
	up       bool // runs; it may be paused
	paused   bool
	cut      bool // no request arrives and no answer returns
	unready  bool
	returns  bool   // is expected back after a stop
	seenDead string // the session that kubelet saw end
	deferred []func()

	m        *sharding.Member
	slice    sharding.Slice
	caches   map[sharding.Resource]map[string]item
	streams  []*stream
	queue    map[string]bool
	busy     map[string]bool
	ready    sharding.Set // owned and unblocked when last looked
	writing  bool         // a status write is under way
	patient  bool         // waits for caches that are behind
	flights  []*flight
	acquired bool
}

// A flight is a write that has been sent and has not landed yet.
type flight struct {
	land   func()
	landed bool
}

// A stream is a watch of one resource for some Virtual Nodes, at a place in the server's log.
type stream struct {
	resource sharding.Resource
	vns      sharding.Set
	at       int
	moving   bool
}

func newProcess(w *world, id string) *process { return &process{w: w, id: id} }

func (p *process) start() {
	p.life++
	p.up, p.paused, p.cut, p.unready, p.writing, p.patient = true, false, false, false, false, false
	p.deferred = nil
	policy := simPolicy
	if p.w.mutation == noFence {
		policy.RenewDeadline = time.Hour
	}
	p.m = sharding.NewMember(p.id, dependencies, compareVersions, sharding.NewFence(policy))
	p.newSession()
	p.renew()
	p.work()
	p.work()
	p.sliceChanged()
	p.w.changed(p.id, "join")
}

func (p *process) newSession() {
	p.w.over[p.m.Session()] = true
	p.m.StartSession(p.w.name(p.id))
	p.acquired = false
	p.caches = map[sharding.Resource]map[string]item{parents: {}, children: {}}
	p.streams, p.ready = nil, nil
	p.queue, p.busy = make(map[string]bool), make(map[string]bool)
	p.slice = sharding.Slice{}
}

// after schedules something that this life of the process does. While it is paused it does nothing; what was due
// happens when it is resumed.
func (p *process) after(d time.Duration, do func()) {
	life := p.life
	p.w.after(d, func() {
		switch {
		case p.life != life:
		case p.paused:
			p.deferred = append(p.deferred, do)
		default:
			do()
		}
	})
}

// request sends something to the server and hands the answer back; without one it calls failed after the timeout.
// land runs at the server, unless the request is lost.
func (p *process) request(land func() func(), failed func()) {
	done := false
	p.after(simPolicy.RequestTimeout, func() {
		if !done {
			done = true
			failed()
		}
	})
	if p.cut || p.w.chance(0.005) {
		return
	}
	f := &flight{}
	f.land = func() {
		if f.landed {
			return
		}
		f.landed = true
		p.flights = slices.DeleteFunc(p.flights, func(g *flight) bool { return g == f })
		answer := land()
		if p.cut || p.w.chance(0.005) {
			return
		}
		p.after(p.w.delay(), func() {
			if !done {
				done = true
				answer()
			}
		})
	}
	p.flights = append(p.flights, f)
	arrival := p.w.delay()
	if p.w.chance(p.w.resets) {
		// The connection breaks: the client is told at once, and the request may arrive long after.
		arrival = time.Duration(p.w.rng.Int64N(int64(simPolicy.RequestTimeout)))
		p.after(p.w.delay(), func() {
			if !done {
				done = true
				failed()
			}
		})
	}
	p.w.after(arrival, f.land)
}

// kill ends the process at once. What it has sent lands now or never: the kernel closes its connections.
func (p *process) kill(seen bool) {
	for _, f := range slices.Clone(p.flights) {
		if p.w.chance(0.5) {
			f.land()
		}
		f.landed = true
	}
	p.flights = nil
	p.life++
	p.up = false
	p.w.endSession(p.id, p.m.Session())
	if seen {
		p.seenDead = p.m.Session()
	}
	p.w.changed(p.id, "crash")
}

func (p *process) resume() {
	p.paused = false
	todo := p.deferred
	p.deferred = nil
	for _, do := range todo {
		life := p.life
		p.w.after(0, func() {
			if p.life == life {
				do()
			}
		})
	}
}

// renew keeps the lease, or takes it for a new session.
func (p *process) renew() {
	if p.m.Expired(p.w.now) && p.w.mutation != sameSession {
		p.newSession()
	}
	session, sent := p.m.Session(), p.w.now
	first := !p.acquired
	if first && !p.m.Acquire(sent) && p.w.mutation != sameAttempt {
		p.after(simPolicy.RetryPeriod, p.renew)
		return
	}
	p.request(func() func() {
		l := p.w.leases[p.id]
		predecessorEnded := l != nil && (l.session == "" || p.w.over[l.session]) // the process before it in the same place
		ok := l == nil || l.session == session || (first && predecessorEnded) || p.w.mutation == sameSession
		if ok {
			if l != nil && l.session != session {
				p.w.endSession(p.id, l.session)
			}
			p.w.counter++
			p.w.leases[p.id] = &lease{session, p.w.counter}
		}
		return func() {
			switch {
			case session != p.m.Session():
			case ok:
				p.acquired = true
				p.m.Renewed(session, sent, p.w.now)
				p.pump()
			case p.w.mutation != noFence:
				p.newSession() // revoked, or never acquired
			}
		}
	}, func() {
		if !p.acquired && session == p.m.Session() && p.w.mutation != sameAttempt {
			p.newSession()
		}
	})
	p.after(simPolicy.RetryPeriod, p.renew)
}

// sliceChanged brings the member news of its slice, sooner or later.
func (p *process) sliceChanged() {
	if !p.up || p.cut {
		return
	}
	s := p.w.slices[p.id]
	if s == nil {
		return
	}
	seen := *s
	p.after(p.w.delay(), func() {
		if seen.Session == p.m.Session() {
			p.slice = seen
		}
		p.must(p.m.Observe(seen))
		p.pump()
	})
}

func (p *process) must(err error) {
	if err != nil {
		panic(err)
	}
}

// pump does what the machine asks for.
func (p *process) pump() {
	for _, purge := range p.m.NextPurges() {
		p.purge(purge)
	}
	for _, f := range p.m.NextFetches() {
		p.fetch(f)
	}
	if p.w.mutation == relistAll && len(p.m.NextFetches()) == 0 && p.w.chance(0.001) && !p.ready.Empty() {
		p.rec(history.Record{Kind: history.Listed, Resource: parents, VNs: p.ready})
	}
	ready := p.m.Owned().Minus(p.m.Awaiting(parents)).Minus(p.m.Awaiting(children))
	gained := ready.Minus(p.ready)
	if !gained.Empty() {
		p.rec(history.Record{Kind: history.Settled, VNs: gained})
	}
	if p.w.mutation != noTakeover {
		for _, res := range []sharding.Resource{parents, children} {
			for name, it := range p.caches[res] {
				if gained.Has(it.vn) {
					p.queue[name] = true
				}
			}
		}
	}
	p.ready = ready
	p.publish()
	for _, res := range []sharding.Resource{parents, children} {
		if behind := p.m.Behind(res); !behind.Empty() && !p.patient {
			p.patient = true
			session := p.m.Session()
			p.after(300*time.Millisecond, func() {
				p.patient = false
				if session == p.m.Session() {
					p.lose(res, behind.Intersect(p.m.Behind(res)))
				}
			})
		}
	}
}

// lose ends the watch of some Virtual Nodes; the machine asks for a list.
func (p *process) lose(res sharding.Resource, vns sharding.Set) {
	p.rec(history.Record{Kind: history.Lost, Resource: res, VNs: vns})
	p.m.Lost(res, vns)
	p.stopStreams(res, vns)
	p.pump()
}

func (p *process) rec(r history.Record) {
	r.Member, r.Session = p.id, p.m.Session()
	p.w.record(r)
}

// purge drops Virtual Nodes from a cache and from its streams.
func (p *process) purge(purge sharding.Purge) {
	for name, it := range p.caches[purge.Resource] {
		if purge.VNs.Has(it.vn) {
			delete(p.caches[purge.Resource], name)
			if p.w.mutation == purgeDeletes {
				p.orphaned(it)
			}
		}
	}
	p.rec(history.Record{Kind: history.Dropped, Resource: purge.Resource, VNs: purge.VNs})
	p.stopStreams(purge.Resource, purge.VNs)
}

func (p *process) stopStreams(res sharding.Resource, vns sharding.Set) {
	for _, s := range p.streams {
		if s.resource == res {
			s.vns = s.vns.Minus(vns)
		}
	}
	p.streams = slices.DeleteFunc(p.streams, func(s *stream) bool { return s.vns.Empty() })
}

// orphaned is what a controller does when a parent is deleted: it deletes the child.
func (p *process) orphaned(parent item) {
	if child, ok := p.w.tables[children].items[parent.name]; ok {
		child.deleted = true
		p.w.write(children, child, child.version, history.Record{Actor: history.Reconciler, Member: p.id,
			Session: p.m.Session()})
	}
}

// publish writes the status if it says something new, into a slice of this session only.
func (p *process) publish() {
	if p.writing || p.slice.Session != p.m.Session() {
		return
	}
	status := p.m.Status(p.w.now)
	switch p.w.mutation {
	case releaseEarly:
		status.Released = nil
		for _, o := range p.slice.Draining {
			status.Released = append(status.Released, sharding.Release{Epoch: o.Epoch, VNs: o.VNs, Known: &sharding.Versions{}})
		}
	case forgetVersions:
		for i := range status.Released {
			status.Released[i].Known = &sharding.Versions{parents: "1", children: "1"} // older than anything
		}
	}
	if cmp.Equal(status, p.slice.Status) {
		return
	}
	p.writing = true
	base := p.slice.Version
	retry := func() {
		p.writing = false
		p.sliceChanged()
		p.after(20*time.Millisecond, p.pump)
	}
	p.request(func() func() {
		if s := p.w.slices[p.id]; s != nil && s.Version == base {
			next := *s
			next.Status = status
			p.w.putSlice(next)
		}
		return retry
	}, retry)
}
