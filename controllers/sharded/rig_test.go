package sharded

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/runtime/schema"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/history"
)

// A rig is a member on a script, with a coordinator's pen in the test's hand.
type rig struct {
	t interface {
		Helper()
		Fatalf(string, ...any)
	}
	script *script
	tape   *tape
	m      *member
	now    sharding.Instant
	clock  sync.Mutex
	told   map[sharding.Resource]*told

	session int
	slice   sharding.Slice
}

// told is what a handler has been told of each object: its version, or "gone".
type told struct {
	mu     sync.Mutex
	state  map[string]string
	events []string
}

func (h *told) OnAdd(obj any, initial bool) {
	h.note("add", obj.(client.Object), fmt.Sprintf(" initial=%t", initial))
}
func (h *told) OnUpdate(_, obj any) { h.note("update", obj.(client.Object), "") }
func (h *told) OnDelete(obj any) {
	if d, ok := obj.(toolscache.DeletedFinalStateUnknown); ok {
		obj = d.Obj
	}
	o := obj.(client.Object)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.state[o.GetName()] = "gone"
	h.events = append(h.events, "delete "+o.GetName())
}

func (h *told) note(what string, o client.Object, more string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.state[o.GetName()] = o.GetResourceVersion()
	h.events = append(h.events, what+" "+o.GetName()+more)
}

func (h *told) all() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.events)
}

func newRig(t interface {
	Helper()
	Fatalf(string, ...any)
}, v, bucketSize int) *rig {
	tape := newTape()
	buckets := sharding.Buckets{V: v, Size: bucketSize}
	return rigOn(t, newScript(tape, buckets, parents, children), byLabel{buckets})
}

// newHashRig is a member of a group with selector ShardRange, on a server that filters or does not.
func newHashRig(t interface {
	Helper()
	Fatalf(string, ...any)
}, v int, filters bool) *rig {
	s := newScript(newTape(), sharding.Buckets{V: v, Size: 1}, parents, children)
	s.hashes, s.filters, s.echoes = sharding.HashRanges{V: v, Key: sharding.ShardByUID}, filters, true
	return rigOn(t, s, byHash{s.hashes})
}

func rigOn(t interface {
	Helper()
	Fatalf(string, ...any)
}, s *script, by mapping) *rig {
	r := &rig{t: t, tape: s.tape, script: s, told: make(map[sharding.Resource]*told)}
	kinds := []*kind{
		{resource: parents, gvk: schema.GroupVersionKind{Group: "test", Version: "v1", Kind: "Parent"}, namespaced: true,
			source: scripted{r.script, parents}},
		{resource: children, gvk: schema.GroupVersionKind{Group: "test", Version: "v1", Kind: "Child"}, namespaced: true,
			source: scripted{r.script, children}},
	}
	r.m = newMember(memberConfig{
		id: "a", mapping: by, policy: sharding.DefaultLeasePolicy(), clock: r.time, record: s.tape.add,
		metrics: newMemberMetrics("test", "a"), log: logr.Discard(),
	}, kinds)
	r.m.narrowAfter = time.Millisecond
	r.m.start(testDependencies, r.name())
	r.begin()
	for _, k := range r.m.order {
		h := &told{state: make(map[string]string)}
		r.told[k.resource] = h
		if _, err := k.informer.AddEventHandler(h); err != nil {
			t.Fatalf("%v", err)
		}
	}
	return r
}

// patient lets no event be listed for being late, however slow the machine is.
func (r *rig) patient() {
	r.m.mu.Lock()
	defer r.m.mu.Unlock()
	r.m.patience = time.Hour
}

func (r *rig) time() sharding.Instant {
	r.clock.Lock()
	defer r.clock.Unlock()
	return r.now
}

func (r *rig) advance(d time.Duration) {
	r.clock.Lock()
	defer r.clock.Unlock()
	r.now += d
}

func (r *rig) name() string {
	r.session++
	return fmt.Sprintf("a_%d", r.session)
}

func (r *rig) begin() {
	r.slice = sharding.Slice{Member: "a", Session: r.m.session(), Epoch: r.slice.Epoch, Version: r.slice.Version}
	r.m.mu.Lock()
	r.m.m.Acquire(r.time())
	r.m.mu.Unlock()
	r.m.renewed(r.m.session(), r.time())
}

// write makes the coordinator's next change of the slice.
func (r *rig) write(change func(s *sharding.Slice)) {
	r.slice.Epoch++
	r.slice.Grants, r.slice.Incoming = slices.Clone(r.slice.Grants), slices.Clone(r.slice.Incoming)
	r.slice.Draining = slices.Clone(r.slice.Draining)
	change(&r.slice)
	r.script.mu.Lock()
	r.script.revision++
	r.slice.Version = fmt.Sprint(r.script.revision)
	r.script.mu.Unlock()
	r.slice.Status = r.status()
	r.m.observeSlice(r.slice)
}

func (r *rig) status() sharding.SliceStatus {
	r.m.mu.Lock()
	defer r.m.mu.Unlock()
	return r.m.m.Status(r.time())
}

func (r *rig) prefetch(vns sharding.Set) {
	r.write(func(s *sharding.Slice) { s.Incoming = append(s.Incoming, sharding.Order{Epoch: s.Epoch, VNs: vns}) })
}

// grant gives vns; known is what the previous owner has told, nil if it has died.
func (r *rig) grant(vns sharding.Set, known *sharding.Versions) {
	r.tape.add(history.Record{Kind: history.Granted, Member: "a", Session: r.slice.Session, VNs: vns})
	r.write(func(s *sharding.Slice) {
		s.Owned = s.Owned.Union(vns)
		s.Grants = append(s.Grants, sharding.Grant{Epoch: s.Epoch, VNs: vns, Known: known})
		for i := range s.Incoming {
			s.Incoming[i].VNs = s.Incoming[i].VNs.Minus(vns)
		}
		s.Incoming = slices.DeleteFunc(s.Incoming, func(o sharding.Order) bool { return o.VNs.Empty() })
	})
}

// warm waits until the lists of what is incoming are in, of kinds without objects too.
func (r *rig) warm(vns sharding.Set) {
	r.t.Helper()
	eventually(r.t, "warm", func() error {
		var warm sharding.Set
		for _, o := range r.status().Warm {
			warm = warm.Union(o.VNs)
		}
		if !warm.Contains(vns) {
			return fmt.Errorf("has %s of %s", warm, vns)
		}
		return nil
	})
}

func (r *rig) withdraw(vns sharding.Set) {
	r.write(func(s *sharding.Slice) {
		for i := range s.Incoming {
			s.Incoming[i].VNs = s.Incoming[i].VNs.Minus(vns)
		}
		s.Incoming = slices.DeleteFunc(s.Incoming, func(o sharding.Order) bool { return o.VNs.Empty() })
	})
}

func (r *rig) drain(vns sharding.Set) {
	r.write(func(s *sharding.Slice) {
		s.Owned = s.Owned.Minus(vns)
		s.Draining = append(s.Draining, sharding.Order{Epoch: s.Epoch, VNs: vns})
		for i := range s.Grants {
			s.Grants[i].VNs = s.Grants[i].VNs.Minus(vns)
		}
	})
}

// take finishes every drain, once the member has released it.
func (r *rig) take() {
	r.t.Helper()
	if len(r.slice.Draining) == 0 {
		return
	}
	var asked, given sharding.Set
	for _, o := range r.slice.Draining {
		asked = asked.Union(o.VNs)
	}
	eventually(r.t, "release", func() error {
		for _, rel := range r.status().Released {
			given = given.Union(rel.VNs)
		}
		if !given.Contains(asked) {
			return fmt.Errorf("released %s of %s", given, asked)
		}
		return nil
	})
	r.tape.add(history.Record{Kind: history.Released, Member: "a", Session: r.slice.Session, VNs: asked})
	r.write(func(s *sharding.Slice) { s.Draining = nil })
}

func (r *rig) restart() {
	r.tape.add(history.Record{Kind: history.SessionEnded, Member: "a", Session: r.slice.Session})
	r.m.newSession(r.name())
	r.begin()
}

// known is what an owner of vns that stops now would tell.
func (r *rig) known(vns sharding.Set) *sharding.Versions {
	known := make(sharding.Versions)
	for _, res := range []sharding.Resource{parents, children} {
		known[res] = "1" // a previous owner has listed at least
		if v := r.script.last(res, vns); v != "" {
			known[res] = v
		}
	}
	return &known
}

func (r *rig) incoming() sharding.Set {
	var vns sharding.Set
	for _, o := range r.slice.Incoming {
		vns = vns.Union(o.VNs)
	}
	return vns
}

// settled waits until each cache holds exactly what is owned or incoming, and handlers know all of what is owned.
func (r *rig) settled() {
	r.t.Helper()
	eventually(r.t, "settled", func() error {
		for _, res := range []sharding.Resource{parents, children} {
			if err := r.complete(res); err != nil {
				return err
			}
		}
		return nil
	})
}

func (r *rig) complete(res sharding.Resource) error {
	k := r.m.kinds[res]
	want := r.script.content(res, r.slice.Owned.Union(r.incoming()))
	var have []string
	r.m.mu.RLock()
	for _, obj := range k.store.indexer.List() {
		o := obj.(client.Object)
		have = append(have, keyOf(client.ObjectKeyFromObject(o))+"@"+o.GetResourceVersion())
	}
	ready := r.m.ready
	r.m.mu.RUnlock()
	slices.Sort(have)
	if diff := cmp.Diff(want, have); diff != "" {
		return fmt.Errorf("cache of %s (-want +have):\n%s", res, diff)
	}
	if !ready.Equal(r.slice.Owned) {
		return fmt.Errorf("serves %s of %s", ready, r.slice.Owned)
	}
	h := r.told[res]
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, entry := range r.script.content(res, r.slice.Owned) {
		name := entry[len("default/"):]
		for i := range name {
			if name[i] == '@' {
				if got := h.state[name[:i]]; got != name[i+1:] {
					return fmt.Errorf("handler of %s was last told of %s at %q, which is at %s", res, name[:i], got, name[i+1:])
				}
			}
		}
	}
	return nil
}

func (r *rig) check() {
	r.t.Helper()
	// What is incoming is cached as well, and not meant by I7: it has been withdrawn by now.
	r.m.recordSnapshots()
	opts := history.Options{Compare: compareVersions, Roots: []sharding.Resource{parents}}
	for _, v := range history.Check(r.tape.all(), opts) {
		text := ""
		for i, rec := range r.tape.all() {
			text += fmt.Sprintf("\n%d %s", i, rec)
		}
		r.t.Fatalf("%s%s", v, text)
	}
}
