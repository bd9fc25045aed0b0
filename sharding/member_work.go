package sharding

import (
	"fmt"
	"slices"
)

// Begin asks whether an object of r in vn may be reconciled now (Algorithm 2, and the barrier). Whoever gets a Ticket
// gives it back by End.
func (m *Member) Begin(r Resource, vn VirtualNode, now Instant) (Ticket, error) {
	switch {
	case !m.fence.Holds(now):
		return Ticket{}, ErrFenced
	case !m.owned.Has(vn):
		return Ticket{}, ErrNotOwned
	case m.barrier.BlocksReconcile(r, vn):
		return Ticket{}, ErrBlocked
	}
	m.at(vn).reconciles++
	return Ticket{vn, m.session}, nil
}

// MayWrite asks whether a write may be sent now, on behalf of the reconcile that holds the ticket. The answer is good
// for a write that is sent at once, and that is given up after LeasePolicy.RequestTimeout.
func (m *Member) MayWrite(t Ticket, now Instant) error {
	switch {
	case t.session != m.session || !m.fence.Holds(now):
		return ErrFenced
	case !m.held().Has(t.VN):
		return ErrNotOwned
	}
	m.quietAt = now + m.fence.policy.RequestTimeout
	return nil
}

// Wrote tells that a write of an object of r has been answered with version. A deletion has one too.
func (m *Member) Wrote(t Ticket, r Resource, version Version) error {
	if t.session != m.session {
		return nil
	}
	w := m.at(t.VN)
	if w.written == nil {
		w.written = make(Versions)
	}
	return m.raise(w.written, r, version)
}

// WroteBlindly tells that it is not known whether a write has landed. It will have by until at the latest, or never
// will; the Virtual Node is not released before, and the next owner is told to look for itself.
func (m *Member) WroteBlindly(t Ticket, until Instant) {
	if t.session == m.session {
		w := m.at(t.VN)
		w.uncertain, w.until = true, max(w.until, until)
	}
}

// End gives a ticket back.
func (m *Member) End(t Ticket) {
	if t.session == m.session {
		m.at(t.VN).reconciles--
	}
}

func (m *Member) at(vn VirtualNode) *work {
	w := m.work[vn]
	if w == nil {
		w = &work{}
		m.work[vn] = w
	}
	return w
}

func (m *Member) raise(versions Versions, r Resource, version Version) error {
	if old := versions[r]; old != "" {
		c, err := m.compare(version, old)
		if err != nil {
			return fmt.Errorf("member %s: compare version %q of %s with %q: %w", m.id, version, r, old, err)
		}
		if c <= 0 {
			return nil
		}
	}
	versions[r] = version
	return nil
}

// A Source says where a read is answered from.
type Source int

const (
	// FromServer: the Virtual Node is not the member's; its cache knows nothing about it, not even that an object does
	// not exist.
	FromServer Source = iota
	// FromCache: the cache is complete.
	FromCache
	// AfterBarrier: the cache will be complete; the read waits.
	AfterBarrier
)

// Read says where a read of an object of r in vn is answered from.
func (m *Member) Read(r Resource, vn VirtualNode) Source {
	switch {
	case !m.held().Has(vn):
		return FromServer
	case m.barrier.Blocks(r, vn):
		return AfterBarrier
	default:
		return FromCache
	}
}

// Owned returns the Virtual Nodes that the member may start reconciles in, were it not for the barrier.
func (m *Member) Owned() Set { return m.owned }

// Cached returns the Virtual Nodes of which the cache of r is complete.
func (m *Member) Cached(r Resource) Set { return m.barrier.Cached(r) }

// Awaiting returns the Virtual Nodes for which reads of r wait.
func (m *Member) Awaiting(r Resource) Set { return m.barrier.Awaiting(r) }

// Status releases what can be released at now, and returns what the slice's status has to say. The caller writes it
// whenever it differs from what the slice says, but only into a slice of this session: what an earlier session has
// released must stay readable until the coordinator has dealt with it.
func (m *Member) Status(now Instant) SliceStatus {
	m.release(now)
	s := SliceStatus{Session: m.session, Epoch: m.epoch, Settled: m.settled(), Leaving: m.leaving}
	for _, o := range m.incoming {
		if !slices.ContainsFunc(m.deps.Resources(), func(r Resource) bool {
			return !m.barrier.Cached(r).Contains(o.VNs)
		}) {
			s.Warm = append(s.Warm, o)
		}
	}
	for _, d := range m.draining {
		for _, r := range d.released {
			if !r.VNs.Empty() {
				s.Released = append(s.Released, r)
			}
		}
	}
	return s
}

// settled returns the epoch before the first one that still blocks something.
func (m *Member) settled() Epoch {
	first := m.epoch + 1
	for _, r := range m.deps.Resources() {
		if pending := m.barrier.Pending(r); len(pending) > 0 {
			first = min(first, pending[0])
		}
	}
	return first - 1
}

// release lets go of draining Virtual Nodes in which nothing is going on. Each is let go on its own, so that one slow
// reconcile holds back its own Virtual Node only.
func (m *Member) release(now Instant) {
	for _, d := range m.draining {
		left := d.left()
		if left.Empty() {
			continue
		}
		known := make(Versions)
		var worked, ended []VirtualNode
		for vn, w := range m.work {
			if left.Has(vn) {
				worked = append(worked, vn)
				if w.reconciles == 0 && (!w.uncertain || now >= w.until) {
					ended = append(ended, vn)
				}
			}
		}
		free := left.Minus(SetOf(worked...)).Union(SetOf(ended...))
		told := m.tell(known, free)
		if !told.Empty() {
			d.released = append(d.released, Release{d.Epoch, told, &known})
		}
		if untold := free.Minus(told); !untold.Empty() {
			d.released = append(d.released, Release{d.Epoch, untold, nil})
		}
		m.barrier.Withdrawn(free)
	}
}

// tell raises known to what the next owner of vns must have seen: what this member wrote, and what it had to see
// itself. It returns the part of vns for which that is all. The member cannot tell it where it never saw a grant,
// where its own lists are not complete, and where it does not know what became of a write.
func (m *Member) tell(known Versions, vns Set) Set {
	var told Set
	for _, o := range m.origins {
		part := o.vns.Intersect(vns)
		if part.Empty() {
			continue
		}
		var inherited Versions
		if o.known != nil {
			inherited = *o.known
		}
		for _, r := range m.deps.Resources() {
			if inherited[r] == "" {
				part = part.Minus(m.unseen(r))
			}
		}
		if !part.Empty() && m.raiseAll(known, inherited) && m.raiseAll(known, o.listed) {
			told = told.Union(part)
		}
	}
	for vn, w := range m.work {
		if told.Has(vn) && (w.uncertain || !m.raiseAll(known, w.written)) {
			told = told.Minus(SetOf(vn))
		}
	}
	return told
}

// unseen returns the Virtual Nodes of which the member has not listed r since they were granted to it.
func (m *Member) unseen(r Resource) Set {
	var vns Set
	for _, pending := range m.barrier.unlisted(r) {
		vns = vns.Union(pending)
	}
	return vns
}

func (m *Member) raiseAll(versions, by Versions) bool {
	for r, v := range by {
		if m.raise(versions, r, v) != nil {
			return false
		}
	}
	return true
}
