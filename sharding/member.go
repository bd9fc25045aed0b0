package sharding

import (
	"errors"
	"fmt"
	"maps"
	"slices"
)

// Why a member may not do something now.
var (
	// ErrNotOwned means that the Virtual Node is not the member's to work on: its key is dropped from the queue.
	ErrNotOwned = errors.New("virtual node is not owned by this member")
	// ErrBlocked means that the Virtual Node is the member's, but its cache is not complete: the caller waits.
	ErrBlocked = errors.New("virtual node is behind the barrier")
	// ErrFenced means that the member does not hold its lease. If its session has ended, nothing it had is its own any
	// more; if the session has just begun, the answer to the first renewal is under way: the key stays in the queue.
	ErrFenced = errors.New("member does not hold its lease")
)

// A Member is the member's side of the handoff. It is told what happens, and tells what to list, what to drop from the
// caches, what to write into its slice's status, and whether a reconcile may start and a write be sent.
type Member struct {
	id        string
	deps      Dependencies
	compare   CompareFunc
	barrier   *Barrier
	fence     *Fence
	session   string
	attempted bool
	quietAt   Instant
	leaving   bool
	epoch     Epoch
	owned     Set
	incoming  []Order
	draining  []*drain
	origins   []origin
	work      map[VirtualNode]*work
	fetches   []*fetching
	filled    map[Resource]Set // what the caches may hold something of, complete or not
}

// A drain is an order to give up some Virtual Nodes, and how far the member has come with it.
type drain struct {
	Order
	released []Release
}

func (d *drain) left() Set {
	vns := d.VNs
	for _, r := range d.released {
		vns = vns.Minus(r.VNs)
	}
	return vns
}

// An origin is what came with the ownership of some Virtual Nodes.
type origin struct {
	vns Set
	// known is what the previous owner told. Of resources that it told nothing of, listed is as of when the member has
	// listed them since.
	known  *Versions
	listed Versions
}

// work is what the member has done and is doing in one Virtual Node.
type work struct {
	reconciles int
	written    Versions
	// uncertain is set once a write was made whose version the member never learned, and until is when it has
	// landed, or never will.
	uncertain bool
	until     Instant
}

// A Fetch is a consistent list (resourceVersion "") of a resource for some Virtual Nodes, with a watch from there on.
type Fetch struct {
	Resource Resource
	Epoch    Epoch
	VNs      Set
}

// fetching is a fetch that is running. left is what it still counts for: a later fetch takes over what both list,
// since an answer that is older than what the cache holds would set it back.
type fetching struct {
	Fetch
	left Set
}

// A Purge removes Virtual Nodes from a cache. It is no news about objects: nothing was deleted.
type Purge struct {
	Resource Resource
	VNs      Set
}

// A Ticket is the right to reconcile in one Virtual Node, from Begin to End.
type Ticket struct {
	VN      VirtualNode
	session string
}

// NewMember returns a member that owns nothing. deps must be valid.
func NewMember(id string, deps Dependencies, compare CompareFunc, fence *Fence) *Member {
	m := &Member{id: id, deps: deps, compare: compare, barrier: NewBarrier(deps, compare), fence: fence}
	m.StartSession("")
	return m
}

// StartSession begins a new life under a name that was never used before: at the start of the process, after Expired,
// and after an attempt to acquire the Lease that did not succeed or whose outcome is not known. The member owns nothing
// until the coordinator has granted it something under this name, and its caches are empty.
func (m *Member) StartSession(session string) {
	m.session, m.attempted, m.epoch, m.leaving = session, false, 0, false
	m.owned, m.incoming, m.draining, m.origins, m.fetches = nil, nil, nil, nil, nil
	m.work = make(map[VirtualNode]*work)
	m.filled = make(map[Resource]Set)
	m.barrier.Reset()
	m.fence.Drop()
}

// Session returns the name of the present session.
func (m *Member) Session() string { return m.session }

// Renewed records that the member's Lease was acquired or renewed under the given session, by a request sent at sentAt.
// An answer to an earlier session counts for nothing.
func (m *Member) Renewed(session string, sentAt, now Instant) {
	if session == m.session {
		m.fence.Renewed(sentAt, now)
	}
}

// QuietAt returns when the last write of this process has landed, or never will. A new session acquires the Lease no
// earlier: what the old one sent would land as a write of nobody's.
func (m *Member) QuietAt() Instant { return m.quietAt }

// Acquire reports whether the one attempt of this session to acquire the Lease may be sent now. There is no second one
// under the same name: the first may have landed without an answer, and have been revoked since, so that for the
// coordinator the session is over.
func (m *Member) Acquire(now Instant) bool {
	if m.attempted || now < m.quietAt {
		return false
	}
	m.attempted = true
	return true
}

// Expired reports whether the member must end its session: it has held a lease and may not act on it any more.
func (m *Member) Expired(now Instant) bool { return m.fence.held && !m.fence.Holds(now) }

// Leave asks the coordinator to relieve the member of everything. The member goes on working until that is done.
func (m *Member) Leave() { m.leaving = true }

// Relieved reports whether a member that leaves may stop: there is nothing left that it might be working on.
func (m *Member) Relieved() bool {
	return m.leaving && m.owned.Empty() && !slices.ContainsFunc(m.draining, func(d *drain) bool {
		return !d.left().Empty()
	})
}

// Observe takes in the member's slice as it is now. Slices of another session, and older ones, change nothing. An error
// names what a grant tells that cannot be understood; the slice is taken in all the same, and that is listed instead.
func (m *Member) Observe(s Slice) error {
	if s.Member != m.id || s.Session != m.session || s.Epoch <= m.epoch {
		return nil
	}
	before := m.epoch
	m.epoch = s.Epoch
	m.barrier.Withdrawn(m.held().Minus(s.Owned).Minus(orders(s.Draining)))
	m.owned = s.Owned
	m.incoming = slices.Clone(s.Incoming)
	m.observeDrains(s.Draining)
	m.keepOrigins(s.Owned.Union(orders(s.Draining)))
	grants := slices.DeleteFunc(slices.Clone(s.Grants), func(g Grant) bool { return g.Epoch <= before })
	if strange := s.Owned.Minus(m.explained(grants)); !strange.Empty() {
		grants = append(grants, Grant{Epoch: s.Epoch, VNs: strange})
	}
	var errs []error
	for _, g := range grants {
		var err error
		if g.Known, err = m.legible(g.Known); err != nil {
			errs = append(errs, fmt.Errorf("member %s: grant of epoch %d: %w", m.id, g.Epoch, err))
		}
		m.originate(g)
		for _, r := range m.deps.Resources() {
			if err := m.barrier.Announce(r, g.Epoch, g.VNs, g.Known); err != nil {
				errs = append(errs, fmt.Errorf("member %s: grant of epoch %d: %w", m.id, g.Epoch, err))
			}
		}
	}
	return errors.Join(errs...)
}

// legible returns the part of known that can be compared: of the rest nothing is known. An error names it.
func (m *Member) legible(known *Versions) (*Versions, error) {
	if known == nil {
		return nil, nil
	}
	var errs []error
	rest := make(Versions, len(*known))
	for _, r := range slices.Sorted(maps.Keys(*known)) {
		if _, err := m.compare((*known)[r], (*known)[r]); err != nil {
			errs = append(errs, fmt.Errorf("version %q of %s: %w", (*known)[r], r, err))
			continue
		}
		rest[r] = (*known)[r]
	}
	return &rest, errors.Join(errs...)
}

// explained returns the Virtual Nodes of which the member knows how they became its own. Of any other, which a slice
// that was edited by hand may hold, it believes nothing that is cached.
func (m *Member) explained(grants []Grant) Set {
	var vns Set
	for _, o := range m.origins {
		vns = vns.Union(o.vns)
	}
	for _, g := range grants {
		vns = vns.Union(g.VNs)
	}
	return vns
}

// observeDrains keeps what has been released under orders that still stand.
func (m *Member) observeDrains(list []Order) {
	known := m.draining
	m.draining = nil
	for _, o := range list {
		d := &drain{Order: o}
		if i := slices.IndexFunc(known, func(k *drain) bool { return k.Epoch == o.Epoch }); i >= 0 {
			d.released = known[i].released
			for k := range d.released {
				d.released[k].VNs = d.released[k].VNs.Intersect(o.VNs)
			}
		}
		m.draining = append(m.draining, d)
	}
}

// keepOrigins forgets where Virtual Nodes came from that are not the member's any more, and what it wrote there.
func (m *Member) keepOrigins(vns Set) {
	for i := range m.origins {
		m.origins[i].vns = m.origins[i].vns.Intersect(vns)
	}
	m.origins = slices.DeleteFunc(m.origins, func(o origin) bool { return o.vns.Empty() })
	for vn, w := range m.work {
		if w.reconciles == 0 && !vns.Has(vn) {
			delete(m.work, vn)
		}
	}
}

func (m *Member) originate(g Grant) {
	for i := range m.origins {
		m.origins[i].vns = m.origins[i].vns.Minus(g.VNs)
	}
	m.origins = append(m.origins, origin{vns: g.VNs, known: g.Known, listed: make(Versions)})
}

// held returns the Virtual Nodes that the member may be working on.
func (m *Member) held() Set {
	vns := m.owned
	for _, d := range m.draining {
		vns = vns.Union(d.left())
	}
	return vns
}

// wanted returns the Virtual Nodes that the caches should hold.
func (m *Member) wanted() Set { return m.held().Union(orders(m.incoming)) }

// NextFetches returns the lists that have to be started now. Each is returned once, and then has to be answered by
// Listed or by ListFailed, after which it is returned again if it is still needed. Lists for a later epoch are started
// while those for an earlier one are still running.
//
// A watch that is running for any of them ends now: it could run ahead of the list, whose answer would set the cache
// back.
func (m *Member) NextFetches() []Fetch {
	wanted := m.wanted()
	var started []Fetch
	for _, r := range m.deps.Resources() {
		running := func(since Epoch) Set {
			var vns Set
			for _, f := range m.fetches {
				if f.Resource == r && f.Epoch >= since {
					vns = vns.Union(f.left)
				}
			}
			return vns
		}
		need := wanted.Minus(m.barrier.Cached(r)).Minus(running(0))
		for epoch, vns := range m.barrier.unlisted(r) {
			need = need.Union(vns.Intersect(wanted).Minus(running(epoch)))
		}
		if need.Empty() {
			continue
		}
		for _, f := range m.fetches {
			if f.Resource == r {
				f.left = f.left.Minus(need)
			}
		}
		m.barrier.Dropped(r, need)
		started = append(started, Fetch{r, m.epoch, need})
		m.fetches = append(m.fetches, &fetching{started[len(started)-1], need})
	}
	return started
}

// ended takes a fetch from those that are running, and returns what it counts for.
func (m *Member) ended(f Fetch) Set {
	i := slices.IndexFunc(m.fetches, func(g *fetching) bool {
		return g.Resource == f.Resource && g.Epoch == f.Epoch && g.VNs.Equal(f.VNs)
	})
	if i < 0 {
		return nil
	}
	left := m.fetches[i].left
	m.fetches = slices.Delete(m.fetches, i, i+1)
	return left
}

// Listed tells that a fetch is complete as of version. The caller puts what it returns, wanted, into the cache in
// place of what the cache holds of these Virtual Nodes, starts their watch, and drops the rest of the answer: it is
// not the member's any more, or a later fetch has it, or is about to. A fetch from an earlier session counts for
// nothing, and so does one whose version cannot be compared, which is an error.
func (m *Member) Listed(f Fetch, version Version) (wanted Set, err error) {
	vns := m.ended(f).Intersect(m.wanted())
	if vns.Empty() {
		return nil, nil
	}
	if _, err := m.compare(version, version); err != nil {
		return nil, fmt.Errorf("member %s: list of %s: version %q: %w", m.id, f.Resource, version, err)
	}
	m.filled[f.Resource] = m.filled[f.Resource].Union(vns)
	// The first list since the grant tells what its owner has to have seen; the next one after that may be later than
	// any event, and the owner to come would wait for a version that its watch never names.
	first := m.unseen(f.Resource).Intersect(vns)
	for i := range m.origins {
		if o := &m.origins[i]; o.vns.Intersects(first) {
			if err := m.raise(o.listed, f.Resource, version); err != nil {
				return nil, err
			}
		}
	}
	return vns, m.barrier.Listed(f.Resource, f.Epoch, vns, version)
}

// ListFailed tells that a fetch has ended without a result: by an error, or by a 410 Gone in the middle of a list,
// which leaves pages of it that belong to no version. Nothing of it counts.
func (m *Member) ListFailed(f Fetch) { m.ended(f) }

// Progressed tells that a watch has delivered all changes of r in vns up to version.
func (m *Member) Progressed(r Resource, vns Set, version Version) error {
	return m.barrier.Progressed(r, vns.Intersect(m.barrier.Cached(r)), version)
}

// Lost tells that the watch of r for vns has ended and cannot go on where it was (410 Gone). Owned Virtual Nodes go on
// being reconciled from what is cached, as in any controller, while they are listed again.
func (m *Member) Lost(r Resource, vns Set) { m.barrier.Dropped(r, vns) }

// Behind returns the Virtual Nodes of which the cache of r has been filled but has not reached what the previous owner
// told. Mostly the missing events are under way. But a version that was told for many Virtual Nodes together may be one
// that none of this member's watches names before its next bookmark: if a Virtual Node stays behind for longer than
// events take, the caller ends its watch and reports it as Lost, and a list settles it.
func (m *Member) Behind(r Resource) Set {
	return m.barrier.Awaiting(r).Minus(m.unseen(r)).Intersect(m.barrier.Cached(r))
}

// NextPurges returns what has to be dropped from the caches now, and counts it as dropped.
func (m *Member) NextPurges() []Purge {
	wanted := m.wanted()
	var list []Purge
	for _, r := range m.deps.Resources() {
		if vns := m.filled[r].Minus(wanted); !vns.Empty() {
			m.filled[r] = m.filled[r].Minus(vns)
			m.barrier.Dropped(r, vns)
			list = append(list, Purge{r, vns})
		}
	}
	return list
}
