package sharding_test

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/history"
)

// The simulation plays an API server, members, coordinators, users and faults on the machines of this package, in
// simulated time, from one seed. Everything that happens is an event in one queue; what matters to the invariants is
// recorded, and package history judges it.

const (
	parents  = sharding.Resource("example.org/parents")
	children = sharding.Resource("example.org/children")
)

var dependencies = sharding.Dependencies{parents: {children}, children: nil}

// simPolicy is the default policy, faster.
var simPolicy = sharding.LeasePolicy{
	LeaseDuration:  1500 * time.Millisecond,
	RenewDeadline:  900 * time.Millisecond,
	RetryPeriod:    200 * time.Millisecond,
	RequestTimeout: 500 * time.Millisecond,
}

// compareVersions does what apimachinery's CompareResourceVersion does.
func compareVersions(a, b sharding.Version) (int, error) {
	x, err := strconv.ParseUint(string(a), 10, 64)
	if err != nil || x == 0 {
		return 0, fmt.Errorf("version %q is malformed", a)
	}
	y, err := strconv.ParseUint(string(b), 10, 64)
	if err != nil || y == 0 {
		return 0, fmt.Errorf("version %q is malformed", b)
	}
	switch {
	case x < y:
		return -1, nil
	case x > y:
		return 1, nil
	}
	return 0, nil
}

func versionOf(n int64) sharding.Version { return sharding.Version(strconv.FormatInt(n, 10)) }

// An event happens at a time; events of one time happen in the order in which they were scheduled.
type event struct {
	at  time.Duration
	seq int
	do  func()
}

type events []*event

func (e events) Len() int      { return len(e) }
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || (e[i].at == e[j].at && e[i].seq < e[j].seq)
}
func (e *events) Push(x any) { *e = append(*e, x.(*event)) }
func (e *events) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

// An item is one object of the simulated API server. Parents have a generation that users raise, and a status that
// follows it; children have only the generation that their parent had when they were written.
type item struct {
	name       string
	vn         sharding.VirtualNode
	version    int64
	generation int
	status     int
	deleted    bool
}

func (i item) digest() string { return fmt.Sprintf("%d/%d", i.generation, i.status) }

// A table is the server's storage of one resource, with its own revision: resources may live in different stores.
type table struct {
	revision int64
	items    map[string]item
	log      []item
}

type lease struct {
	session string
	version int64
}

// mutation switches a deliberate fault in. The zero mutation is none.
type mutation string

const (
	skipAck        mutation = "the coordinator does not wait for Released"
	epochEarly     mutation = "the coordinator grants in the epoch in which it drains"
	watchCache     mutation = "a member lists from the watch cache"
	twoOwners      mutation = "two coordinators act on what they saw, without claims and conditions"
	keepClaim      mutation = "a coordinator keeps its claim after a write without an answer"
	noFence        mutation = "a member does not fence itself"
	sameAttempt    mutation = "a member tries to acquire its lease again under the same session"
	sameSession    mutation = "a member goes on under its old session after it was fenced"
	noBarrier      mutation = "a member reads behind the barrier"
	releaseEarly   mutation = "a member releases while a reconcile is running"
	forgetVersions mutation = "a member does not tell the versions it wrote"
	blindRelease   mutation = "a member takes a write without an answer for one that did not land"
	trustedExpiry  mutation = "the coordinator takes an expiry for granted that it saw in a late watch"
	relistAll      mutation = "a member lists all it owns when something is gained"
	purgeDeletes   mutation = "a member lets a purge run the logic of deleted objects"
	noTakeover     mutation = "a member does not enqueue what it gained"
	touchObjects   mutation = "the coordinator writes the objects that move"
)

type config struct {
	seed     uint64
	v        int
	objects  int
	members  int
	mode     sharding.Mode
	assign   sharding.Assignment
	mutation mutation
	faults   bool
	resets   float64 // how often a connection breaks under a request
}

type world struct {
	config
	rng     *rand.Rand
	now     time.Duration
	queue   events
	seq     int
	steps   int
	quiet   bool // no new faults and no users
	records []history.Record

	tables  map[sharding.Resource]*table
	slices  map[string]*sharding.Slice
	leases  map[string]*lease
	counter int64 // versions of slices and leases
	members []*process
	leaders []*leader
	names   int             // sessions and claims
	over    map[string]bool // sessions that their own process has ended, or that have ended
	ended   map[string]bool // sessions that have ended for everybody
}

func newWorld(c config) *world {
	w := &world{
		config: c,
		rng:    rand.New(rand.NewPCG(c.seed, 1)),
		tables: map[sharding.Resource]*table{
			parents:  {revision: 7, items: make(map[string]item)},
			children: {revision: 70_000, items: make(map[string]item)},
		},
		slices: make(map[string]*sharding.Slice),
		leases: make(map[string]*lease),
		over:   make(map[string]bool),
		ended:  make(map[string]bool),
	}
	for i := range c.members {
		w.members = append(w.members, newProcess(w, fmt.Sprintf("m%d", i)))
	}
	for i := range 2 {
		w.leaders = append(w.leaders, &leader{w: w, name: fmt.Sprintf("c%d", i)})
	}
	return w
}

func (w *world) after(d time.Duration, do func()) {
	w.seq++
	heap.Push(&w.queue, &event{w.now + d, w.seq, do})
}

// run plays events until the given time.
func (w *world) run(until time.Duration) {
	for len(w.queue) > 0 && w.queue[0].at <= until {
		e := heap.Pop(&w.queue).(*event)
		w.now = e.at
		w.steps++
		e.do()
	}
	w.now = until
}

func (w *world) chance(p float64) bool { return w.rng.Float64() < p }

// delay is that of one way through the network: mostly short, sometimes long, never longer than half a request.
func (w *world) delay() time.Duration {
	if w.chance(0.05) {
		return time.Duration(w.rng.IntN(240)+1) * time.Millisecond
	}
	return time.Duration(w.rng.IntN(8)+1) * time.Millisecond
}

func (w *world) name(prefix string) string {
	w.names++
	return fmt.Sprintf("%s/%d", prefix, w.names)
}

func (w *world) record(r history.Record) {
	r.At = w.now
	w.records = append(w.records, r)
}

func (w *world) changed(member, what string) {
	w.record(history.Record{Kind: history.Changed, Member: member, What: what})
}

// write lands a write of one object at the server. It returns the new version, 0 if the condition fails: base is the
// version that the object must have, 0 if it must not exist.
func (w *world) write(res sharding.Resource, next item, base int64, by history.Record) int64 {
	t := w.tables[res]
	old, exists := t.items[next.name]
	if (base == 0) == exists || (exists && old.version != base) {
		return 0
	}
	t.revision += int64(1 + w.rng.IntN(3))
	next.version = t.revision
	if next.deleted {
		delete(t.items, next.name)
	} else {
		t.items[next.name] = next
	}
	t.log = append(t.log, next)
	by.Kind, by.Resource, by.Object, by.VN = history.Wrote, res, next.name, next.vn
	by.Version, by.Deleted, by.Digest = versionOf(next.version), next.deleted, next.digest()
	w.record(by)
	for _, p := range w.members {
		p.notify(res)
	}
	return next.version
}

// user does something to a random parent.
func (w *world) user() {
	if w.quiet {
		return
	}
	name := fmt.Sprintf("p%d", w.rng.IntN(w.objects))
	vn := sharding.VirtualNodeOf(name, w.v)
	old, exists := w.tables[parents].items[name]
	by := history.Record{Actor: history.User}
	switch {
	case !exists:
		w.write(parents, item{name: name, vn: vn, generation: w.rng.IntN(1000) + 1}, 0, by)
	case w.chance(0.1):
		gone := old
		gone.deleted = true
		w.write(parents, gone, old.version, by)
	default:
		old.generation++
		w.write(parents, old, old.version, by)
	}
	w.after(time.Duration(w.rng.IntN(40))*time.Millisecond, w.user)
}

// putSlice lands a write of a slice and records what it changes about ownership.
func (w *world) putSlice(next sharding.Slice) {
	old := w.slices[next.Member]
	w.counter++
	next.Version = strconv.FormatInt(w.counter, 10)
	w.slices[next.Member] = &next
	if old != nil && old.Session == next.Session {
		w.record(history.Record{Kind: history.Released, Member: next.Member, Session: next.Session,
			VNs: held(old).Minus(held(&next))})
		w.record(history.Record{Kind: history.Granted, Member: next.Member, Session: next.Session,
			VNs: held(&next).Minus(held(old))})
	} else {
		w.record(history.Record{Kind: history.Granted, Member: next.Member, Session: next.Session, VNs: held(&next)})
	}
	for _, p := range w.members {
		if p.id == next.Member {
			p.sliceChanged()
		}
	}
}

// held is what a slice says that its member may still be working on.
func held(s *sharding.Slice) sharding.Set {
	vns := s.Owned
	for _, o := range s.Draining {
		left := o.VNs
		for _, r := range s.Status.Released {
			if s.Status.Session == s.Session && r.Epoch == o.Epoch {
				left = left.Minus(r.VNs)
			}
		}
		vns = vns.Union(left)
	}
	return vns
}

func (w *world) endSession(member, session string) {
	w.over[session] = true
	if session != "" && !w.ended[session] {
		w.ended[session] = true
		w.record(history.Record{Kind: history.SessionEnded, Member: member, Session: session})
	}
}

func sortedNames[V any](m map[string]V) []string {
	names := make([]string, 0, len(m))
	for name := range m {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}
