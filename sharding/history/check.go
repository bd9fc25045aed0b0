package history

import (
	"fmt"
	"time"

	"github.com/drover-sh/drover/sharding"
)

// An Invariant is the name of one of I1 to I7.
type Invariant string

// The invariants; the package comment says what each demands.
const (
	I1 Invariant = "I1"
	I2 Invariant = "I2"
	I3 Invariant = "I3"
	I4 Invariant = "I4"
	I5 Invariant = "I5"
	I6 Invariant = "I6"
	I7 Invariant = "I7"
)

// A Violation is where a history breaks an invariant.
type Violation struct {
	Invariant Invariant
	// Index is the place in the history of the record that shows it; its length if the end does.
	Index int
	// Message tells what was expected and what happened.
	Message string
}

// String returns the violation as one line.
func (v Violation) String() string {
	return fmt.Sprintf("%s at record %d: %s", v.Invariant, v.Index, v.Message)
}

// Options are what the checker has to know beside the history.
type Options struct {
	// Compare compares versions of one resource.
	Compare sharding.CompareFunc
	// Roots are the resources whose objects are reconciled.
	Roots []sharding.Resource
	// Bound is the longest that I4 allows, from when an object needs a reconcile, or from the last change of the members
	// if that is later, to its start. Zero leaves I4 out.
	Bound time.Duration
}

// Check returns all violations in the history, in its order. Each record is looked at once; the time it takes grows
// with the length of the history.
func Check(records []Record, opts Options) []Violation {
	c := &checker{
		opts:     opts,
		roots:    make(map[sharding.Resource]bool),
		owners:   make(map[sharding.VirtualNode]ownership),
		ended:    make(map[string]bool),
		objects:  make(map[object]*state),
		inVN:     make(map[sharding.VirtualNode]map[object]bool),
		running:  make(map[object]reconcile),
		due:      make(map[object]time.Duration),
		sessions: make(map[string]*session),
	}
	for _, r := range opts.Roots {
		c.roots[r] = true
	}
	for i := range records {
		c.index = i
		c.check(&records[i])
	}
	c.index = len(records)
	if len(records) > 0 {
		c.overdue(records[len(records)-1].At)
	}
	return c.found
}

type object struct {
	resource sharding.Resource
	name     string
}

func (o object) String() string { return string(o.resource) + "/" + o.name }

// An ownership is which session has a Virtual Node, since when.
type ownership struct {
	session string
	since   time.Duration
}

// A state is what the API server has of an object.
type state struct {
	vn      sharding.VirtualNode
	exists  bool
	version sharding.Version
	digest  string
	created time.Duration
	// writes is each member session's last write; deletions count.
	writes map[string]written
}

type written struct {
	at      time.Duration
	version sharding.Version
	deleted bool
}

type reconcile struct {
	session string
	start   time.Duration
}

// A session is what a member's session has in its caches.
type session struct {
	// kept is what has been settled, and excused, per resource, the part of it that may be listed once more.
	kept      sharding.Set
	excused   map[sharding.Resource]sharding.Set
	delivered map[object]delivery
	// listedAt is when the last list began, and filledTo when the last one began that is in the cache.
	listedAt, filledTo map[place]time.Duration
}

type place struct {
	resource sharding.Resource
	vn       sharding.VirtualNode
}

type delivery struct {
	vn      sharding.VirtualNode
	version sharding.Version
}

type checker struct {
	opts  Options
	roots map[sharding.Resource]bool
	index int
	found []Violation

	owners   map[sharding.VirtualNode]ownership
	ended    map[string]bool
	objects  map[object]*state
	inVN     map[sharding.VirtualNode]map[object]bool
	running  map[object]reconcile
	due      map[object]time.Duration
	changed  time.Duration
	sessions map[string]*session
}

func (c *checker) violated(i Invariant, format string, args ...any) {
	c.found = append(c.found, Violation{i, c.index, fmt.Sprintf(format, args...)})
}

func (c *checker) check(r *Record) {
	switch r.Kind {
	case Granted:
		c.granted(r)
	case Released:
		c.released(r)
	case Settled:
		s := c.sessionOf(r.Session)
		s.kept = s.kept.Union(r.VNs)
	case SessionEnded:
		c.sessionEnded(r)
	case Started:
		c.started(r)
	case Finished:
		if o := (object{r.Resource, r.Object}); c.running[o].session == r.Session {
			delete(c.running, o)
		}
	case Read:
		c.read(r)
	case Wrote:
		c.wrote(r)
	case Changed:
		c.overdue(r.At)
		c.changed = r.At
	case Listed:
		c.listed(r)
	case Filled:
		s := c.sessionOf(r.Session)
		for vn := range r.VNs.All() {
			s.filledTo[place{r.Resource, vn}] = s.listedAt[place{r.Resource, vn}]
		}
	case Lost:
		s := c.sessionOf(r.Session)
		s.excused[r.Resource] = s.excused[r.Resource].Union(r.VNs)
		c.forget(r.Session, r.Resource, r.VNs)
	case Dropped:
		c.forget(r.Session, r.Resource, r.VNs)
	case Delivered:
		c.delivered(r)
	case Snapshot:
		c.snapshot(r)
	default:
		c.violated("", "unknown kind of record %q", r.Kind)
	}
}

func (c *checker) granted(r *Record) {
	if c.ended[r.Session] {
		return // given to a session that is over: nobody acts on it
	}
	for vn := range r.VNs.All() {
		if o, ok := c.owners[vn]; ok && o.session != r.Session {
			c.violated(I1, "Virtual Node %d is given to %s while %s has it", vn, r.Session, o.session)
		}
		c.owners[vn] = ownership{r.Session, r.At}
		for o := range c.inVN[vn] {
			if c.roots[o.resource] && c.objects[o].exists {
				c.due[o] = r.At
			}
		}
	}
	s := c.sessionOf(r.Session)
	s.kept = s.kept.Minus(r.VNs)
	for o, d := range s.delivered {
		if r.VNs.Has(d.vn) {
			delete(s.delivered, o)
		}
	}
}

func (c *checker) released(r *Record) {
	for vn := range r.VNs.All() {
		if c.owners[vn].session == r.Session {
			delete(c.owners, vn)
		}
	}
	s := c.sessionOf(r.Session)
	s.kept = s.kept.Minus(r.VNs)
	for o, run := range c.running {
		if run.session == r.Session && r.VNs.Has(c.vnOf(o)) {
			c.violated(I1, "%s has released Virtual Node %d while it reconciles %s", r.Session, c.vnOf(o), o)
		}
	}
}

func (c *checker) vnOf(o object) sharding.VirtualNode {
	if s := c.objects[o]; s != nil {
		return s.vn
	}
	return -1
}

func (c *checker) sessionEnded(r *Record) {
	c.ended[r.Session] = true
	for vn, o := range c.owners {
		if o.session == r.Session {
			delete(c.owners, vn)
		}
	}
	for o, run := range c.running {
		if run.session == r.Session {
			delete(c.running, o)
		}
	}
	delete(c.sessions, r.Session)
}

func (c *checker) started(r *Record) {
	o := object{r.Resource, r.Object}
	if run, ok := c.running[o]; ok && run.session != r.Session {
		c.violated(I1, "%s starts to reconcile %s, which %s has been reconciling since %v", r.Session, o, run.session,
			run.start)
	}
	c.mustOwn(r, "starts to reconcile "+o.String())
	c.running[o] = reconcile{r.Session, r.At}
	if due, ok := c.due[o]; ok {
		c.overdueOne(o, due, r.At)
		delete(c.due, o)
	}
}

func (c *checker) mustOwn(r *Record, what string) {
	switch owner := c.owners[r.VN].session; {
	case c.ended[r.Session]:
		c.violated(I1, "%s %s after its session has ended", r.Session, what)
	case owner != r.Session && owner == "":
		c.violated(I1, "%s %s in Virtual Node %d, which nobody owns", r.Session, what, r.VN)
	case owner != r.Session:
		c.violated(I1, "%s %s in Virtual Node %d, which %s owns", r.Session, what, r.VN, owner)
	}
}

func (c *checker) read(r *Record) {
	o := object{r.Resource, r.Object}
	s := c.objects[o]
	if s == nil || c.ended[r.Session] {
		return // a session that is over may think what it likes; what it starts and writes is I1's
	}
	for other, w := range s.writes {
		if other == r.Session {
			continue
		}
		switch {
		case r.Version == "" && !w.deleted && s.exists && s.created <= w.at:
			c.violated(I2, "%s does not find %s, which %s wrote at version %s", r.Session, o, other, w.version)
		case r.Version != "" && c.less(r.Version, w.version):
			c.violated(I2, "%s sees %s at version %s, before %s wrote version %s",
				r.Session, o, r.Version, other, w.version)
		}
	}
	if r.Version != "" || !s.exists {
		return
	}
	start := c.startOf(r)
	owner := c.owners[s.vn]
	switch {
	case r.FromServer && s.created < start:
		c.violated(I3, "%s is told by the server that %s does not exist", r.Session, o)
	case !r.FromServer && owner.session == r.Session && s.created <= c.knownSince(r, s.vn, owner.since):
		c.violated(I3, "%s does not find %s, which was there before it listed Virtual Node %d", r.Session, o, s.vn)
	case !r.FromServer && owner.session != r.Session && s.created < start:
		c.violated(I3, "%s does not find %s in a cache of Virtual Node %d, which it does not own", r.Session, o, s.vn)
	}
}

// knownSince returns the time up to which a cache must hold everything: when its last list began. What was created
// after that comes by the watch, as late as in any controller. A member that has not listed at all must know
// everything.
func (c *checker) knownSince(r *Record, vn sharding.VirtualNode, granted time.Duration) time.Duration {
	if at, ok := c.sessionOf(r.Session).filledTo[place{r.Resource, vn}]; ok {
		return at
	}
	return granted
}

// startOf returns when the reconcile began that the read belongs to.
func (c *checker) startOf(r *Record) time.Duration {
	for _, root := range c.opts.Roots {
		if run, ok := c.running[object{root, r.Root}]; ok && run.session == r.Session {
			return run.start
		}
	}
	return r.At
}

func (c *checker) less(a, b sharding.Version) bool {
	n, err := c.opts.Compare(a, b)
	if err != nil {
		c.violated("", "versions %q and %q do not compare: %v", a, b, err)
	}
	return n < 0
}

func (c *checker) sessionOf(name string) *session {
	s := c.sessions[name]
	if s == nil {
		s = &session{
			excused:   make(map[sharding.Resource]sharding.Set),
			delivered: make(map[object]delivery),
			listedAt:  make(map[place]time.Duration),
			filledTo:  make(map[place]time.Duration),
		}
		c.sessions[name] = s
	}
	return s
}
