package sharded

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/util/wait"
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
	external   Cache            // set if the process fills its cache itself; nothing is listed and watched then
	confirmed  sharding.Version // up to which external is known to show all
	transform  func(client.Object) (client.Object, error)

	member   *member
	store    *store
	informer *informer
	filter   atomic.Int32 // filterUnknown and so on
	asks     atomic.Int64 // numbers the requests that may tell
	told     int64        // the number of the one that told filter last; guarded by the member's lock

	// The member's lock guards what follows.
	streams   []*stream
	narrowing bool         // some are going to be
	backoff   wait.Backoff // of lists that fail
}

// A member drives a sharding.Member: it carries out the lists and purges that the machine asks for, tells it what came of
// them, tells handlers of what is served, and stands between reconciles and the cache. One lock guards all of it; no
// request is made and no handler is called under it.
type member struct {
	id      string
	v       int // Virtual Nodes, of keys too
	mapping mapping
	byUID   bool // what keyedByUID says of mapping
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

	mu          sync.RWMutex
	m           *sharding.Member // nil until started
	fence       *sharding.Fence  // the machine's
	life        context.Context  // of the session
	endLife     context.CancelCauseFunc
	slice       sharding.Slice // the newest of this session that was seen
	ready       sharding.Set   // what is served: owned, and no read waits
	gains       []Gain         // by which ready has come to be what it is
	gained      uint64         // the number of the last one
	arrivals    []arrival
	turns       []turnOf // of what is owned, ascending
	turned      Turn     // the latest
	counted     sharding.Set
	patient     map[sharding.Resource]bool
	patience    time.Duration // behindPatience, but for tests
	narrowAfter time.Duration // narrowPatience, but for tests
	doomed      map[place][]*deletion
	sending     int           // writes under way
	settled     bool          // the first slice of the session has been dealt with
	leaving     bool          // for good
	orphaned    bool          // the slice of this session has been deleted
	changed     chan struct{} // closed, and replaced, when something changes that a read may wait for
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
	mapping mapping
	policy  sharding.LeasePolicy
	clock   func() sharding.Instant
	record  func(history.Record)
	metrics *memberMetrics
	log     logr.Logger
}

func newMember(c memberConfig, kinds []*kind) *member {
	e := &member{
		id: c.id, v: c.v, mapping: c.mapping, byUID: keyedByUID(c.mapping), policy: c.policy, clock: c.clock, record: c.record,
		metrics: c.metrics, log: c.log,
		kinds:       make(map[sharding.Resource]*kind),
		byKind:      make(map[schema.GroupKind]*kind),
		started:     make(chan struct{}),
		publish:     make(chan struct{}, 1),
		acted:       make(chan struct{}, 1),
		changed:     make(chan struct{}),
		patient:     make(map[sharding.Resource]bool),
		patience:    behindPatience,
		narrowAfter: narrowPatience,
		doomed:      make(map[place][]*deletion),
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
		k.store = newStore(e.mapping, scope)
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
	e.ready, e.gains, e.arrivals, e.slice = nil, nil, nil, sharding.Slice{}
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
		// What the rest of it says holds, and what could not be read is listed.
		e.log.Error(err, "slice not understood", "epoch", s.Epoch)
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
	e.countTurns()
	e.settle()
	for _, k := range e.order {
		e.join(k)
		e.waitForEvents(k.resource)
	}
	if status := e.status(); e.slice.Session == e.m.Session() && e.slice.Session != "" &&
		!equality.Semantic.DeepEqual(status, e.slice.Status) {
		wake(e.publish)
	}
	e.metrics.observe(e)
	close(e.changed)
	e.changed = make(chan struct{})
}

// retries tells of a request that has failed and is going to be made again: in passing, unless it takes somebody to mend
// what is wrong, a right that is missing or an object that is not valid.
func (e *member) retries(err error, what string, more ...any) {
	if apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) || apierrors.IsInvalid(err) {
		e.log.Error(err, what, more...)
		return
	}
	e.log.V(1).Info(what, append(more, "error", err.Error())...)
}

func wake(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// after calls f under the lock, in a while.
func (e *member) after(d time.Duration, f func()) {
	time.AfterFunc(d, func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		f()
	})
}
