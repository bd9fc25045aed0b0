package sharded

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/history"
)

// behindPatience is how long events that a previous owner told of may be under way before they are listed instead.
const behindPatience = 50 * time.Millisecond

// compareVersions is apimachinery's comparison, typed.
func compareVersions(a, b sharding.Version) (int, error) {
	return resourceversion.CompareResourceVersion(string(a), string(b))
}

// A kind is one resource of the group, as this process caches it.
type kind struct {
	resource   sharding.Resource
	gvk        schema.GroupVersionKind
	namespaced bool
	source     listWatcher
	transform  func(client.Object) (client.Object, error)

	member   *member
	store    *store
	informer *informer
	streams  []*stream    // guarded by the member's lock
	backoff  wait.Backoff // of lists that fail; guarded by the member's lock
}

// A member drives a sharding.Member: it carries out the lists and purges that the machine asks for, tells it what came of
// them, tells handlers of what is served, and stands between reconciles and the cache. One lock guards all of it; no
// request is made and no handler is called under it.
type member struct {
	id      string
	v       int
	buckets sharding.Buckets
	policy  sharding.LeasePolicy
	clock   func() sharding.Instant
	record  func(history.Record) // nil if nobody asks
	metrics *memberMetrics
	log     logr.Logger

	resyncs *resyncs

	kinds   map[sharding.Resource]*kind
	byKind  map[schema.GroupKind]*kind
	order   []*kind       // ascending by resource
	started chan struct{} // closed by start
	publish chan struct{} // wakes who writes the status
	acted   chan struct{} // wakes who keeps the lease

	mu       sync.RWMutex
	m        *sharding.Member // nil until started
	fence    *sharding.Fence  // the machine's
	life     context.Context  // of the session
	endLife  context.CancelCauseFunc
	slice    sharding.Slice // the newest of this session that was seen
	ready    sharding.Set   // what is served: owned, and no read waits
	arrivals []arrival
	patient  map[sharding.Resource]bool
	doomed   map[place][]*deletion
	sending  int           // writes under way
	settled  bool          // the first slice of the session has been dealt with
	leaving  bool          // for good
	orphaned bool          // the slice of this session has been deleted
	changed  chan struct{} // closed, and replaced, when something changes that a read may wait for
}

// An arrival is a grant that has not been served in full.
type arrival struct {
	vns sharding.Set
	at  sharding.Instant
}

// A place is where an object is cached.
type place struct {
	resource sharding.Resource
	key      string
}

type memberConfig struct {
	id      string
	v       int
	buckets sharding.Buckets
	policy  sharding.LeasePolicy
	clock   func() sharding.Instant
	record  func(history.Record)
	metrics *memberMetrics
	log     logr.Logger
}

func newMember(c memberConfig, kinds []*kind) *member {
	e := &member{
		id: c.id, v: c.v, buckets: c.buckets, policy: c.policy, clock: c.clock, record: c.record, metrics: c.metrics, log: c.log,
		kinds:   make(map[sharding.Resource]*kind),
		byKind:  make(map[schema.GroupKind]*kind),
		started: make(chan struct{}),
		publish: make(chan struct{}, 1),
		acted:   make(chan struct{}, 1),
		changed: make(chan struct{}),
		patient: make(map[sharding.Resource]bool),
		doomed:  make(map[place][]*deletion),
	}
	for _, k := range kinds {
		e.kinds[k.resource] = k
		e.byKind[k.gvk.GroupKind()] = k
		e.order = append(e.order, k)
	}
	slices.SortFunc(e.order, func(a, b *kind) int {
		if a.resource < b.resource {
			return -1
		}
		return 1
	})
	scope := func(gk schema.GroupKind) (namespaced, known bool) {
		k, ok := e.byKind[gk]
		return ok && k.namespaced, ok
	}
	for _, k := range e.order {
		k.member = e
		k.store = newStore(e.v, scope)
		k.informer = newInformer(k, e.started)
		k.backoff = newBackoff()
	}
	return e
}

// start makes the machine. From here on the kinds and their dependencies are fixed.
func (e *member) start(deps sharding.Dependencies, session string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.fence = sharding.NewFence(e.policy)
	e.m = sharding.NewMember(e.id, deps, compareVersions, e.fence)
	e.beginLife(session)
	close(e.started)
}

// newSession ends the session: nothing that the member had is its own any more, and nobody is told that it is gone.
func (e *member) newSession(session string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.beginLife(session)
	e.pump()
}

func (e *member) beginLife(session string) {
	if e.endLife != nil {
		e.endLife(ErrFenced)
	}
	e.life, e.endLife = context.WithCancelCause(context.Background())
	for _, k := range e.order {
		for _, s := range slices.Clone(k.streams) {
			s.stop()
		}
		k.store.forgetAll()
		k.backoff = newBackoff()
	}
	e.ready, e.arrivals, e.slice = nil, nil, sharding.Slice{}
	e.settled, e.orphaned = false, false
	e.doomed = make(map[place][]*deletion)
	e.m.StartSession(session)
}

// stop ends everything, without a word to anybody.
func (e *member) stop() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.m == nil {
		return
	}
	e.beginLife("")
	e.endLife(ErrFenced)
	for _, k := range e.order {
		k.informer.stop()
	}
	e.pump()
}

func (e *member) rec(r history.Record) {
	if e.record == nil {
		return
	}
	r.Member, r.Session = e.id, e.m.Session()
	e.record(r)
}

// observeSlice takes in the member's slice.
func (e *member) observeSlice(s sharding.Slice) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if s.Session != e.m.Session() || s.Member != e.id {
		return
	}
	if c, err := resourceversion.CompareResourceVersion(s.Version, e.slice.Version); err == nil && c < 0 {
		return
	}
	before := e.slice.Epoch
	e.slice = s
	e.flush()
	if err := e.m.Observe(s); err != nil {
		e.log.Error(err, "slice refused", "epoch", s.Epoch)
		return
	}
	now := e.clock()
	for _, g := range s.Grants {
		if g.Epoch > before {
			e.arrivals = append(e.arrivals, arrival{g.VNs, now})
		}
	}
	e.pump()
}

// pump does what the machine asks for.
func (e *member) pump() {
	for _, p := range e.m.NextPurges() {
		e.purge(p)
	}
	for _, f := range e.m.NextFetches() {
		e.fetch(f)
	}
	e.settle()
	for _, k := range e.order {
		e.join(k)
		e.waitForEvents(k.resource)
	}
	if status := e.m.Status(e.clock()); e.slice.Session == e.m.Session() && e.slice.Session != "" &&
		!equality.Semantic.DeepEqual(status, e.slice.Status) {
		wake(e.publish)
	}
	e.metrics.observe(e)
	close(e.changed)
	e.changed = make(chan struct{})
}

func wake(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

func (e *member) purge(p sharding.Purge) {
	k := e.kinds[p.Resource]
	k.store.forget(p.VNs, e.v)
	e.rec(history.Record{Kind: history.Dropped, Resource: p.Resource, VNs: p.VNs})
	for _, s := range slices.Clone(k.streams) {
		s.drop(p.VNs)
	}
}

func (e *member) fetch(f sharding.Fetch) {
	k := e.kinds[f.Resource]
	for _, s := range slices.Clone(k.streams) {
		s.yield(f.VNs)
	}
	s := newStream(e, k)
	s.fetch, s.left = f, f.VNs
	go s.begin(e.delay(k))
}

// delay is how long the next list of a kind waits: not at all, unless the last one failed.
func (e *member) delay(k *kind) time.Duration {
	if k.backoff.Steps == newBackoff().Steps {
		return 0
	}
	return k.backoff.Duration
}

func (e *member) listFailed(s *stream, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if s.life.Err() != nil {
		return
	}
	stopped := s.ctx.Err() != nil // a later list has taken over
	e.m.ListFailed(s.fetch)
	if !stopped {
		e.log.V(1).Info("list failed", "resource", s.kind.resource, "error", err.Error())
		e.rec(history.Record{Kind: history.Lost, Resource: s.kind.resource, VNs: s.left})
		s.stop()
		s.kind.backoff.Step()
	}
	e.pump()
}

// listed puts the answer of a list in the place of what the store has of its Virtual Nodes.
func (e *member) listed(s *stream, objs []client.Object, version sharding.Version) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if s.life.Err() != nil {
		return
	}
	k := s.kind
	vns, err := e.m.Listed(s.fetch, version)
	if err != nil {
		e.log.Error(err, "list refused", "resource", k.resource)
	}
	vns = vns.Intersect(s.left)
	s.left = nil
	if err != nil || vns.Empty() {
		s.stop()
		e.pump()
		return
	}
	k.backoff = newBackoff()
	found := make(map[string]bool, len(objs))
	for _, obj := range objs {
		if vn, err := virtualNodeOf(obj, e.v); err == nil && vns.Has(vn) {
			found[keyOf(client.ObjectKeyFromObject(obj))] = true
			e.put(k, vn, obj)
		}
	}
	for _, old := range k.store.within(vns, e.v) {
		if !found[keyOf(client.ObjectKeyFromObject(old))] {
			e.gone(k, old, version, true)
		}
	}
	s.parts = []part{{vns: vns, version: version}}
	e.rec(history.Record{Kind: history.Filled, Resource: k.resource, VNs: vns})
	e.pump()
}

// observe takes in one event of a watch. An error means that the watch is of no use.
func (e *member) observe(s *stream, event watch.EventType, obj client.Object) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if s.ctx.Err() != nil {
		return nil
	}
	k, version := s.kind, sharding.Version(obj.GetResourceVersion())
	if event != watch.Bookmark {
		vn, err := virtualNodeOf(obj, e.v)
		if p := s.partOf(vn); err == nil && p != nil {
			c, err := compareVersions(p.version, version)
			switch {
			case err != nil:
				return err
			case c >= 0: // seen already
			case event == watch.Deleted:
				e.gone(k, obj, version, false)
			default:
				e.put(k, vn, obj)
			}
		}
	}
	if err := s.progress(version); err != nil {
		return err
	}
	if !e.m.Awaiting(k.resource).Empty() {
		e.flush()
		e.pump()
	}
	return nil
}

// flush tells the machine how far the watches have come. It need not know before it has to compare.
func (e *member) flush() {
	for _, k := range e.order {
		for _, s := range k.streams {
			for i := range s.parts {
				p := &s.parts[i]
				if !p.dirty {
					continue
				}
				p.dirty = false
				if err := e.m.Progressed(k.resource, p.vns, p.version); err != nil {
					e.log.Error(err, "progress refused", "resource", k.resource, "version", p.version)
				}
			}
		}
	}
}

// put stores an object, if it is newer than what is there, and tells who has to know.
func (e *member) put(k *kind, vn sharding.VirtualNode, obj client.Object) {
	key := keyOf(client.ObjectKeyFromObject(obj))
	version := sharding.Version(obj.GetResourceVersion())
	old, had := k.store.get(key)
	if had && !older(old, version) {
		return
	}
	if k.transform != nil {
		transformed, err := k.transform(obj)
		if err != nil {
			e.log.Error(err, "object not transformed", "resource", k.resource, "object", key)
		} else {
			obj = transformed
		}
	}
	k.store.put(obj)
	if obj.GetDeletionTimestamp() != nil {
		e.deletionSeen(k, key, version)
	}
	if e.ready.Has(vn) {
		e.tell(k, key, vn, version, notice{old: old, object: obj})
	}
}

// gone takes an object out of the store; obj is how it was last seen, and version that of its end, or one after it.
func (e *member) gone(k *kind, obj client.Object, version sharding.Version, unseen bool) {
	key := keyOf(client.ObjectKeyFromObject(obj))
	old, had := k.store.get(key)
	if !had || !older(old, version) {
		return
	}
	vn, err := virtualNodeOf(old, e.v)
	if err != nil {
		return
	}
	k.store.bury(old, vn, time.Now())
	e.deletionSeen(k, key, version)
	if e.ready.Has(vn) {
		e.tell(k, key, vn, version, notice{old: obj, unseen: unseen})
	}
}

func older(obj client.Object, version sharding.Version) bool {
	c, err := compareVersions(sharding.Version(obj.GetResourceVersion()), version)
	return err != nil || c < 0
}

func (e *member) tell(k *kind, key string, vn sharding.VirtualNode, version sharding.Version, n notice) {
	k.informer.tell(n)
	e.rec(history.Record{Kind: history.Delivered, Resource: k.resource, Object: key, VN: vn, Version: version})
}

// lost ends a stream that cannot go on where it was. What it cached stays and is served until it has been listed again.
func (e *member) lost(s *stream) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if s.ctx.Err() == nil {
		e.lose(s.kind.resource, s.vns())
	}
}

func (e *member) lose(r sharding.Resource, vns sharding.Set) {
	e.rec(history.Record{Kind: history.Lost, Resource: r, VNs: vns})
	e.m.Lost(r, vns)
	for _, s := range slices.Clone(e.kinds[r].streams) {
		s.drop(vns)
	}
	e.pump()
}

// waitForEvents gives what the previous owner told of some time to arrive by the watch.
func (e *member) waitForEvents(r sharding.Resource) {
	behind := e.m.Behind(r)
	if behind.Empty() || e.patient[r] {
		return
	}
	e.patient[r] = true
	life := e.life
	e.after(behindPatience, func() {
		e.patient[r] = false
		if still := behind.Intersect(e.m.Behind(r)); life.Err() == nil && !still.Empty() {
			e.lose(r, still)
			return
		}
		e.pump() // others may be behind by now
	})
}

// after calls f under the lock, in a while.
func (e *member) after(d time.Duration, f func()) {
	time.AfterFunc(d, func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		f()
	})
}

// settle finds out what has come to be served, and tells handlers of every object there as of an initial list, which
// makes them enqueue it at low priority. What is served no more is not mentioned.
func (e *member) settle() {
	ready := e.m.Owned()
	for _, k := range e.order {
		ready = ready.Minus(e.m.Awaiting(k.resource))
	}
	gained := ready.Minus(e.ready)
	e.ready = ready
	e.settled = e.settled || (e.slice.Session != "" && ready.Equal(e.m.Owned()))
	now := e.clock()
	for i := range e.arrivals {
		if part := e.arrivals[i].vns.Intersect(ready); !part.Empty() {
			e.metrics.barrier.Observe((now - e.arrivals[i].at).Seconds())
			e.arrivals[i].vns = e.arrivals[i].vns.Minus(part)
		}
		e.arrivals[i].vns = e.arrivals[i].vns.Intersect(e.m.Owned())
	}
	e.arrivals = slices.DeleteFunc(e.arrivals, func(a arrival) bool { return a.vns.Empty() })
	if gained.Empty() {
		return
	}
	e.rec(history.Record{Kind: history.Settled, VNs: gained})
	for _, k := range e.order {
		for _, obj := range k.store.within(gained, e.v) {
			vn, err := virtualNodeOf(obj, e.v)
			if err != nil {
				continue
			}
			e.tell(k, keyOf(client.ObjectKeyFromObject(obj)), vn, sharding.Version(obj.GetResourceVersion()),
				notice{object: obj, initial: true})
		}
	}
}

// introduce registers a listener and tells it, and no other, of everything that is served.
func (e *member) introduce(i *informer, l *listener) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := i.register(l); err != nil {
		return err
	}
	for _, obj := range i.kind.store.within(e.ready, e.v) {
		l.add(notice{object: obj, initial: true})
	}
	return nil
}

// locate returns the Virtual Node of an object: from the object, from where it was before it was deleted, or from what
// it owns, as children follow their parent. Nothing of the kind is known about an object of another member.
func (e *member) locate(k *kind, key client.ObjectKey) (client.Object, sharding.VirtualNode, bool) {
	name := keyOf(key)
	if obj, ok := k.store.get(name); ok {
		vn, err := virtualNodeOf(obj, e.v)
		return obj, vn, err == nil
	}
	if t, ok := k.store.tombstones[name]; ok {
		return nil, t.vn, true
	}
	owner := ownerKey(k.gvk.GroupKind(), key)
	for _, child := range e.order {
		objs, err := child.store.indexer.ByIndex(ownerIndex, owner)
		if err != nil {
			continue
		}
		for _, obj := range objs {
			if vn, err := virtualNodeOf(obj.(client.Object), e.v); err == nil {
				return nil, vn, true
			}
		}
	}
	return nil, 0, false
}
