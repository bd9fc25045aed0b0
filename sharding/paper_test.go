package sharding

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// These tests go through sections 5.3 to 5.5 of "Cache-Consistent Dynamic Load Balancing for Kubernetes Controllers"
// and Algorithms 1 to 3, one statement each, in the paper's order. A test is named by the section; its comment gives
// the statement in our words. Where this package departs from the paper, the test shows what it does instead, and why.

// numeric compares versions as apimachinery does, for well-formed ones.
func numeric(a, b Version) (int, error) {
	x, errA := strconv.Atoi(string(a))
	y, errB := strconv.Atoi(string(b))
	return x - y, errors.Join(errA, errB)
}

var paperGraph = Dependencies{"parents": {"children"}, "children": nil, "gates": nil}

// group is a coordinator with members, all of whom have seen and acted on everything.
type group struct {
	t *testing.T
	Coordinator
	slices  []Slice
	members map[string]*Member
	states  []MemberState
	version int
}

func newGroup(t *testing.T, mode Mode, v int) *group {
	return &group{t: t, members: make(map[string]*Member),
		Coordinator: Coordinator{Claim: "c", VirtualNodes: v, Mode: mode, Assignment: Balanced{}}}
}

func (g *group) join(ids ...string) {
	for _, id := range ids {
		m := NewMember(id, paperGraph, numeric, NewFence(DefaultLeasePolicy()))
		m.StartSession(id + "-1")
		m.Renewed(id+"-1", 0, 0)
		g.members[id] = m
		g.states = append(g.states, MemberState{ID: id, Session: id + "-1", Phase: PhaseServing})
	}
}

// step lets one step of the coordinator land.
func (g *group) step() int {
	writes := g.Step(Observation{Slices: g.slices, Members: g.states})
	for _, w := range writes {
		g.version++
		w.Slice.Version = strconv.Itoa(g.version)
		i := slices.IndexFunc(g.slices, func(s Slice) bool { return s.Member == w.Slice.Member })
		switch w.Op {
		case Create:
			g.slices = append(g.slices, w.Slice)
		case Update:
			g.slices[i] = w.Slice
		case Delete:
			g.slices = slices.Delete(g.slices, i, i+1)
		}
	}
	return len(writes)
}

// act lets a member see its slice, list what it wants, and answer.
func (g *group) act(id string) {
	g.t.Helper()
	i := slices.IndexFunc(g.slices, func(s Slice) bool { return s.Member == id })
	if i < 0 {
		return
	}
	m := g.members[id]
	if err := m.Observe(g.slices[i]); err != nil {
		g.t.Fatal(err)
	}
	m.NextPurges()
	for _, f := range m.NextFetches() {
		g.version++
		if _, err := m.Listed(f, Version(strconv.Itoa(g.version))); err != nil {
			g.t.Fatal(err)
		}
	}
	g.slices[i].Status = m.Status(0)
}

// settle goes on until nobody has anything to do.
func (g *group) settle() {
	g.t.Helper()
	for range 50 {
		n := g.step()
		for _, s := range g.states {
			g.act(s.ID)
		}
		if n == 0 && g.step() == 0 {
			return
		}
	}
	g.t.Fatal("the group does not settle")
}

func (g *group) owned() map[string]Set {
	owned := make(map[string]Set)
	for _, s := range g.slices {
		owned[s.Member] = s.Owned
	}
	return owned
}

// 5.3: consistent hashing minimizes the number of objects affected when instances come or go: a ring moves only to the
// instance that came, and only from the one that went.
func TestPaper_5_3_ConsistentHashingMovesOnlyWhatItMust(t *testing.T) {
	three := ConsistentHash{}.Assign(make(Placement, 1000), serving(3))
	four := ConsistentHash{}.Assign(three, serving(4))
	for vn := range three {
		if three[vn] != four[vn] && four[vn] != "m003" {
			t.Errorf("Virtual Node %d went from %s to %s, neither of which has come or gone", vn, three[vn], four[vn])
		}
	}
	if n := moves(three, four); n < 100 || n > 500 {
		t.Errorf("%d of 1000 Virtual Nodes moved to the fourth member, want about 250", n)
	}
}

// 5.3.1, first stage: an object's Virtual Node is the remainder of the hash of its key, and does not change as
// instances come and go: the function does not know them.
func TestPaper_5_3_1_FirstStageIsConstant(t *testing.T) {
	for i := range 100 {
		key := fmt.Sprintf("key-%d", i)
		if a, b := VirtualNodeOf(key, 200), VirtualNodeOf(key, 200); a != b || a < 0 || a >= 200 {
			t.Errorf("%s is in %d and in %d of 200", key, a, b)
		}
	}
}

// 5.3.1, Owner(object) = ConsistentHash(hash(objectKey) mod V): the owner follows from key, V and members alone, and is
// recomputed for V Virtual Nodes, not for objects.
func TestPaper_5_3_1_OwnerFollowsFromKeyAndMembers(t *testing.T) {
	owners := ConsistentHash{}.Assign(make(Placement, 200), serving(5))
	again := ConsistentHash{}.Assign(Balanced{}.Assign(make(Placement, 200), serving(2)), serving(5))
	if diff := cmp.Diff(owners, again); diff != "" {
		t.Errorf("the ring depends on who had what: %s", diff)
	}
}

// 5.3.1: no label is rewritten when instances come and go. That nothing writes an object is I5 of the simulation; what
// makes it possible is that neither a Step's writes nor what a Member asks for can name an object: only slices, and
// Virtual Nodes of a resource.

// 5.4.1: the membership is in one place that all replicas read; the hash of the ring is deterministic. Two coordinators
// that look at the same objects decide the same.
func TestPaper_5_4_1_EveryReplicaDecidesTheSame(t *testing.T) {
	for name, a := range map[string]Assignment{"ring": ConsistentHash{}, "balanced": Balanced{}} {
		g := newGroup(t, Exclusive, 50)
		g.Assignment = a
		g.join("a", "b", "c")
		g.step()
		obs := Observation{Slices: g.slices, Members: g.states}
		turned := Observation{Slices: slices.Clone(g.slices), Members: slices.Clone(g.states)}
		slices.Reverse(turned.Slices)
		slices.Reverse(turned.Members)
		if diff := cmp.Diff(g.Step(obs), g.Step(turned)); diff != "" {
			t.Errorf("%s: the order in which objects are read matters: %s", name, diff)
		}
	}
}

// 5.4.1: every instance whose assignment has changed is notified, and no other. A slice that is not written is the
// notification that nothing changed.
func TestPaper_5_4_1_OnlyThoseAreNotifiedWhoseAssignmentChanged(t *testing.T) {
	g := newGroup(t, Eventual, 12)
	g.Assignment = ConsistentHash{Replicas: 1}
	g.join("a", "b", "c", "d")
	g.settle()
	before := g.owned()
	epochs := make(map[string]Epoch)
	for _, s := range g.slices {
		epochs[s.Member] = s.Epoch
	}
	g.join("e")
	g.settle()
	for _, s := range g.slices {
		if changed := !before[s.Member].Equal(s.Owned); s.Member != "e" && changed != (s.Epoch != epochs[s.Member]) {
			t.Errorf("%s: changed %v, but epoch %d became %d", s.Member, changed, epochs[s.Member], s.Epoch)
		}
	}
}

// Algorithm 1: compare the new assignment with the previous one, list what is new, and only that; then watch all.
func TestPaper_Algorithm1_ListsOnlyWhatIsNew(t *testing.T) {
	m := NewMember("m", paperGraph, numeric, NewFence(DefaultLeasePolicy()))
	m.StartSession("s")
	observe := func(epoch Epoch, owned Set, grants ...Grant) []Fetch {
		t.Helper()
		if err := m.Observe(Slice{Member: "m", Session: "s", Epoch: epoch, Owned: owned, Grants: grants}); err != nil {
			t.Fatal(err)
		}
		return m.NextFetches()
	}
	first := observe(1, Span(0, 4), Grant{1, Span(0, 4), nil})
	if len(first) != 3 || !first[0].VNs.Equal(Span(0, 4)) {
		t.Fatalf("first assignment: lists %v, want 0-3 of all three resources", first)
	}
	for _, f := range first {
		if _, err := m.Listed(f, "10"); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range observe(2, Span(2, 4), Grant{2, Span(4, 2), nil}) {
		if !f.VNs.Equal(Span(4, 2)) {
			t.Errorf("lists %v of %s, want only 4-5, which is new", f.VNs, f.Resource)
		}
	}
	// What is not assigned any more leaves the caches (section 6.4.2), as no deletion.
	for _, p := range m.NextPurges() {
		if !p.VNs.Equal(Span(0, 2)) {
			t.Errorf("drops %v of %s, want 0-1", p.VNs, p.Resource)
		}
	}
}

// 5.4.1: a change that arrives before the list is complete is not lost. The paper lists one after the other; here the
// second list starts at once, for what the first does not cover, and what both cover counts for the second.
func TestPaper_5_4_1_ChangeDuringAList(t *testing.T) {
	m := NewMember("m", Dependencies{"r": nil}, numeric, NewFence(DefaultLeasePolicy()))
	m.StartSession("s")
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(m.Observe(Slice{Member: "m", Session: "s", Epoch: 1, Owned: Span(0, 2), Grants: []Grant{{1, Span(0, 2), nil}}}))
	first := m.NextFetches()
	must(m.Observe(Slice{Member: "m", Session: "s", Epoch: 2, Owned: Span(0, 3),
		Grants: []Grant{{1, Span(0, 2), nil}, {2, Span(2, 1), nil}}}))
	second := m.NextFetches()
	if len(second) != 1 || !second[0].VNs.Equal(Span(2, 1)) {
		t.Fatalf("second list: %v, want 2 only: 0-1 is being listed", second)
	}
	if _, err := m.Listed(second[0], "12"); err != nil || m.Read("r", 2) != FromCache || m.Read("r", 0) != AfterBarrier {
		t.Errorf("after the second list: %v; 2 should be served and 0 not", err)
	}
	if _, err := m.Listed(first[0], "11"); err != nil || m.Read("r", 0) != FromCache {
		t.Errorf("after the first list: %v; 0 should be served", err)
	}
}

// Algorithm 2: before Reconcile, what is in the queue but is not the instance's any more is skipped. Here the same
// check stands before every write as well.
func TestPaper_Algorithm2_CheckBeforeReconcile(t *testing.T) {
	g := newGroup(t, Eventual, 10)
	g.join("a")
	g.settle()
	a := g.members["a"]
	ticket, err := a.Begin("parents", 9, 0)
	if err != nil {
		t.Fatal(err)
	}
	g.join("b")
	g.settle()
	if _, err := a.Begin("parents", 9, 0); !errors.Is(err, ErrNotOwned) {
		t.Errorf("Begin of what is b's: %v", err)
	}
	if err := a.MayWrite(ticket, 0); !errors.Is(err, ErrNotOwned) {
		t.Errorf("MayWrite of a reconcile that began before: %v", err)
	}
	if _, err := a.Begin("parents", 0, 0); err != nil {
		t.Errorf("Begin of what a has kept: %v", err)
	}
}

// 5.4.2: the hash key can be given on the object; parent and child with the same key are in the same Virtual Node,
// and so with the same instance. Here a child has its controller owner's key without being annotated.
func TestPaper_5_4_2_ParentAndChildTogether(t *testing.T) {
	parent := ObjectRef{"example.org", "Parent", "ns", "p"}
	child := ObjectRef{"example.org", "Child", "ns", "c"}
	key := HashKey("", "", parent)
	if VirtualNodeOf(HashKey("", key, child), 200) != VirtualNodeOf(key, 200) {
		t.Error("a child with a controller owner is elsewhere")
	}
	if VirtualNodeOf(HashKey("k", "", parent), 200) != VirtualNodeOf(HashKey("k", "", child), 200) {
		t.Error("objects with the same annotation are apart")
	}
}
