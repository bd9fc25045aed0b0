package sharding_test

import (
	"errors"
	"time"

	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/history"
)

// work is one worker: it takes a key and reconciles it.
func (p *process) work() {
	name, ok := p.next()
	if !ok {
		p.after(time.Duration(1+p.w.rng.IntN(10))*time.Millisecond, p.work)
		return
	}
	vn := sharding.VirtualNodeOf(name, p.w.v)
	ticket, err := p.m.Begin(parents, vn, p.w.now)
	if p.w.mutation == noBarrier && errors.Is(err, sharding.ErrBlocked) {
		ticket, err = p.m.Begin("", vn, p.w.now)
	}
	switch {
	case err == nil:
		delete(p.queue, name)
		p.busy[name] = true
		r := &reconcile{process: p, ticket: ticket, session: p.m.Session(), name: name}
		r.record(history.Record{Kind: history.Started, Resource: parents, Object: name})
		p.after(p.think(), r.readParent)
	case errors.Is(err, sharding.ErrBlocked), errors.Is(err, sharding.ErrFenced):
		p.after(5*time.Millisecond, p.work)
	default: // not owned: if it is gained later it is enqueued then
		delete(p.queue, name)
		p.after(time.Millisecond, p.work)
	}
}

func (p *process) next() (string, bool) {
	var free []string
	for _, name := range sortedNames(p.queue) {
		if !p.busy[name] {
			free = append(free, name)
		}
	}
	if len(free) == 0 {
		return "", false
	}
	return free[p.w.rng.IntN(len(free))], true
}

// think is how long a step of a reconcile takes; now and then very long.
func (p *process) think() time.Duration {
	if p.w.chance(0.01) {
		return time.Duration(p.w.rng.IntN(400)) * time.Millisecond
	}
	return time.Duration(p.w.rng.IntN(4)) * time.Millisecond
}

// A reconcile makes the child what the parent asks for, and then the parent's status.
type reconcile struct {
	*process
	ticket  sharding.Ticket
	session string
	name    string
	parent  item
	found   bool
}

func (r *reconcile) record(rec history.Record) {
	rec.Member, rec.Session, rec.VN, rec.Root = r.id, r.session, r.ticket.VN, r.name
	r.w.record(rec)
}

// read answers from the cache, behind the barrier, or from the server, as the machine says.
func (r *reconcile) read(res sharding.Resource, answer func(it item, found bool)) {
	if r.session != r.m.Session() {
		r.end(false)
		return
	}
	source := r.m.Read(res, r.ticket.VN)
	if r.w.mutation == noBarrier && source == sharding.AfterBarrier {
		source = sharding.FromCache
	}
	tell := func(it item, found, fromServer bool) {
		rec := history.Record{Kind: history.Read, Resource: res, Object: r.name, FromServer: fromServer}
		if found {
			rec.Version = versionOf(it.version)
		}
		r.record(rec)
		answer(it, found)
	}
	switch source {
	case sharding.FromCache:
		it, found := r.caches[res][r.name]
		tell(it, found, false)
	case sharding.AfterBarrier:
		r.after(2*time.Millisecond, func() { r.read(res, answer) })
	default:
		r.request(func() func() {
			it, found := r.w.tables[res].items[r.name]
			rec := history.Record{Kind: history.Read, Resource: res, Object: r.name, FromServer: true}
			if found {
				rec.Version = versionOf(it.version)
			}
			r.record(rec)
			return func() { answer(it, found) }
		}, func() { r.end(true) })
	}
}

func (r *reconcile) readParent() {
	r.read(parents, func(it item, found bool) {
		r.parent, r.found = it, found
		r.after(r.think(), r.readChild)
	})
}

func (r *reconcile) readChild() {
	r.read(children, func(child item, found bool) {
		next := item{name: r.name, vn: r.ticket.VN, generation: r.parent.generation}
		switch {
		case !r.found && !found:
			r.end(false)
		case !r.found:
			child.deleted = true
			r.send(children, child, child.version, func() { r.end(false) })
		case !found:
			r.send(children, next, 0, r.writeStatus)
		case child.generation != r.parent.generation:
			r.send(children, next, child.version, r.writeStatus)
		default:
			r.writeStatus()
		}
	})
}

func (r *reconcile) writeStatus() {
	if r.parent.status == r.parent.generation {
		r.end(false)
		return
	}
	next := r.parent
	next.status = next.generation
	r.send(parents, next, r.parent.version, func() { r.end(false) })
}

// send writes, if the machine allows it. A refused condition ends the reconcile; the key comes back with the event that
// told of the other's write, or is tried again.
func (r *reconcile) send(res sharding.Resource, next item, base int64, then func()) {
	if r.m.MayWrite(r.ticket, r.w.now) != nil {
		r.end(false)
		return
	}
	sent := r.w.now
	r.request(func() func() {
		version := r.w.write(res, next, base, history.Record{Actor: history.Reconciler, Member: r.id, Session: r.session})
		return func() {
			if version == 0 {
				r.end(true)
				return
			}
			r.must(r.m.Wrote(r.ticket, res, versionOf(version)))
			r.after(r.think(), then)
		}
	}, func() {
		if r.w.mutation != blindRelease {
			r.m.WroteBlindly(r.ticket, sent+simPolicy.RequestTimeout)
		}
		r.end(true)
	})
}

func (r *reconcile) end(again bool) {
	r.m.End(r.ticket)
	if r.session == r.m.Session() {
		r.record(history.Record{Kind: history.Finished, Resource: parents, Object: r.name})
		delete(r.busy, r.name)
		if again {
			r.after(30*time.Millisecond, func() {
				if r.session == r.m.Session() {
					r.queue[r.name] = true
				}
			})
		}
		r.pump()
	}
	r.after(time.Millisecond, r.work)
}
