package recording

import (
	"cmp"
	"slices"
	"strconv"
	"time"

	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/history"
)

// A Landing is one change of one object at the API server's store. One of Object, Slice and Lease is set.
type Landing struct {
	// Revision orders all landings: the store's, which is the object's resourceVersion.
	Revision int64
	// Seen is when it was known to have landed, by the clock of Now.
	Seen time.Duration
	// Name is "namespace/name", or "name", of the object, which is of Resource.
	Name     string
	Resource sharding.Resource
	Created  bool
	Deleted  bool

	Object *Object
	Slice  *sharding.Slice
	Lease  *Lease
}

// An Object is one of the group's resources: how it is, or how it was before it was deleted.
type Object struct {
	// VN follows from the hash key. Labelled tells that the object carries it.
	VN       sharding.VirtualNode
	Labelled bool
	// Digest identifies the content without metadata.
	Digest string
}

// A Lease is a member's.
type Lease struct {
	// Holder is the session that holds it, "" for none.
	Holder string
}

// Merge makes one history of the files of all processes and of what landed, in any order. Landings without a request are
// Machinery's, but for three kinds, which are taken for the User's, because none of them comes of a change of members: a
// creation, which no machinery makes; a deletion, which is the garbage collector's; and the first label of an object that
// was created without.
func Merge(files [][]Line, landings []Landing) []history.Record {
	m := &merger{
		byVersion: make(map[landed]*request),
		unknown:   make(map[place][]*request),
		slices:    make(map[string]sharding.Slice),
		holders:   make(map[string]string),
		objects:   make(map[place]seen),
	}
	var records []history.Record
	for _, lines := range files {
		records = append(records, m.read(lines)...)
	}
	landings = slices.Clone(landings)
	slices.SortStableFunc(landings, func(a, b Landing) int { return cmp.Compare(a.Revision, b.Revision) })
	for i := range landings {
		m.land(&landings[i])
	}
	records = append(m.landed, records...)
	slices.SortStableFunc(records, func(a, b history.Record) int { return cmp.Compare(a.At, b.At) })
	return records
}

type place struct {
	resource sharding.Resource
	name     string
}

type landed struct {
	place
	version sharding.Version
}

type request struct {
	Request
	answer *Answer
	used   bool
}

// seen is what is known of an object that exists.
type seen struct {
	labelled bool
	told     bool // the history knows of it
}

type merger struct {
	byVersion map[landed]*request
	unknown   map[place][]*request // whose landing no version tells
	slices    map[string]sharding.Slice
	holders   map[string]string
	objects   map[place]seen // those that exist
	now       time.Duration  // no landing is earlier than those before it
	landed    []history.Record
}

// read returns a file's records and takes in its requests.
func (m *merger) read(lines []Line) []history.Record {
	var records []history.Record
	requests := make(map[uint64]*request)
	var order []*request
	for _, l := range lines {
		switch {
		case l.Record != nil:
			records = append(records, *l.Record)
		case l.Sent != nil:
			r := &request{Request: *l.Sent}
			requests[r.ID] = r
			order = append(order, r)
		case l.Answered != nil && requests[l.Answered.ID] != nil:
			requests[l.Answered.ID].answer = l.Answered
		}
	}
	for _, r := range order {
		at := place{r.Resource, r.Object}
		switch {
		case r.answer != nil && r.answer.Code >= 400 && r.answer.Code < 500 && r.answer.Code != 408:
			// refused
		case r.answer != nil && r.answer.Version != "" && r.answer.Code < 300 && r.Verb != "DELETE":
			m.answered(landed{at, r.answer.Version}, r)
		default:
			m.unknown[at] = append(m.unknown[at], r)
			if r.answer != nil && r.answer.Version != "" {
				// A deletion that waits for something: its answer is the object with the mark.
				m.answered(landed{at, r.answer.Version}, r)
			}
		}
	}
	return records
}

// answered notes the request that a landing's version was the answer to. A later one with the same answer has changed nothing,
// as a member's does that patches what its cache does not show yet: to take it for the one that landed would put the
// landing, and all after it, too late.
func (m *merger) answered(l landed, r *request) {
	if first := m.byVersion[l]; first == nil || r.At < first.At {
		m.byVersion[l] = r
	}
}

// request returns the one that made a landing, nil if there is none. What was sent after the landing had been seen is not it,
// whatever its answer: it has changed nothing.
func (m *merger) request(l *Landing) *request {
	at := place{l.Resource, l.Name}
	if r := m.byVersion[landed{at, versionOf(l.Revision)}]; r != nil && !l.Deleted && r.At <= l.Seen {
		r.used = true
		return r
	}
	var found *request
	for _, r := range m.unknown[at] {
		fits := r.Verb == "PUT" || r.Verb == "PATCH"
		switch {
		case l.Deleted:
			fits = r.Verb == "DELETE"
		case l.Created:
			fits = r.Verb == "POST" || r.Verb == "PATCH"
		}
		if fits && !r.used && r.At <= l.Seen && (found == nil || r.At > found.At) {
			found = r
		}
	}
	if found != nil {
		found.used = true
	}
	return found
}

func (m *merger) land(l *Landing) {
	r := m.request(l)
	if r != nil {
		m.now = max(m.now, r.At)
	}
	switch {
	case l.Slice != nil:
		m.landSlice(l)
	case l.Lease != nil:
		m.landLease(l)
	case l.Object != nil:
		m.landObject(l, r)
	}
}

func (m *merger) add(r history.Record) {
	r.At = m.now
	m.landed = append(m.landed, r)
}

func (m *merger) landSlice(l *Landing) {
	before, now := m.slices[l.Name], *l.Slice
	if l.Deleted {
		now = sharding.Slice{Member: before.Member, Session: before.Session}
	}
	m.slices[l.Name] = now
	released, granted := before.Held().Minus(now.Held()), now.Owned.Minus(before.Owned)
	if before.Session != now.Session {
		released, granted = before.Held(), now.Owned
	}
	if !released.Empty() {
		m.add(history.Record{Kind: history.Released, Member: before.Member, Session: before.Session, VNs: released})
	}
	if !granted.Empty() {
		m.add(history.Record{Kind: history.Granted, Member: now.Member, Session: now.Session, VNs: granted})
	}
}

func (m *merger) landLease(l *Landing) {
	before, now := m.holders[l.Name], l.Lease.Holder
	if l.Deleted {
		now = ""
	}
	m.holders[l.Name] = now
	if before != "" && before != now {
		m.add(history.Record{Kind: history.SessionEnded, Session: before})
	}
}

func (m *merger) landObject(l *Landing, r *request) {
	at := place{l.Resource, l.Name}
	before, existed := m.objects[at]
	rec := history.Record{
		Kind: history.Wrote, Actor: history.Machinery, VN: l.Object.VN, Resource: l.Resource, Object: l.Name,
		Version: versionOf(l.Revision), Deleted: l.Deleted, Digest: l.Object.Digest,
	}
	switch {
	case r != nil:
		rec.Actor, rec.Member, rec.Session = r.Actor, r.Member, r.Session
	case l.Created, l.Deleted, existed && !before.labelled && l.Object.Labelled:
		rec.Actor = history.User
	}
	// Members see what carries a label, and what they have written themselves.
	told := before.told || l.Object.Labelled || rec.Actor == history.Reconciler
	if l.Deleted {
		rec.Digest = ""
		delete(m.objects, at)
	} else {
		m.objects[at] = seen{labelled: l.Object.Labelled, told: told}
	}
	if told {
		m.add(rec)
	}
}

func versionOf(revision int64) sharding.Version {
	return sharding.Version(strconv.FormatInt(revision, 10))
}
