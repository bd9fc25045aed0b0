package sharding

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func announce(t *testing.T, b *Barrier, r Resource, epoch Epoch, vns Set) {
	t.Helper()
	if err := b.Announce(r, epoch, vns, nil); err != nil {
		t.Fatal(err)
	}
}

func list(t *testing.T, b *Barrier, r Resource, epoch Epoch, vns Set, version Version) {
	t.Helper()
	if err := b.Listed(r, epoch, vns, version); err != nil {
		t.Fatal(err)
	}
}

// 5.5.1: reads block the moment a change is detected, and until the list is in the cache.
func TestPaper_5_5_1_ReadsBlockFromTheAnnouncementToTheList(t *testing.T) {
	b := NewBarrier(paperGraph, numeric)
	if b.Blocks("parents", 1) {
		t.Error("blocks before anything was announced")
	}
	announce(t, b, "parents", 1, Span(0, 4))
	if !b.Blocks("parents", 1) {
		t.Error("does not block after the announcement")
	}
	list(t, b, "parents", 1, Span(0, 2), "10")
	if b.Blocks("parents", 1) || !b.Blocks("parents", 2) {
		t.Error("a list of a part lifts the block of that part, and of no more")
	}
}

// 5.5.1: only the objects of the new Virtual Nodes are listed; departing from the paper, only reads of those block.
// What the instance keeps is read as ever.
func TestPaper_5_5_1_WhatIsKeptNeverBlocks(t *testing.T) {
	g := newGroup(t, Exclusive, 10)
	g.join("a", "b")
	g.settle()
	kept := g.owned()["a"]
	g.states[1].Session, g.states[1].Phase = "", PhaseStopped
	g.step()
	g.step()
	a := g.members["a"]
	if err := a.Observe(g.slices[0]); err != nil {
		t.Fatal(err)
	}
	for vn := range VirtualNode(10) {
		want := AfterBarrier
		if kept.Has(vn) {
			want = FromCache
		}
		if got := a.Read("parents", vn); got != want {
			t.Errorf("read in %d, kept %v: %v, want %v", vn, kept, got, want)
		}
	}
}

// 5.5.2: the moment a change is announced to a resource, the resources it depends on block as well, before the
// announcement for them has arrived; what does not depend on it does not.
func TestPaper_5_5_2_DependenciesBlockWithTheResource(t *testing.T) {
	b := NewBarrier(paperGraph, numeric)
	announce(t, b, "parents", 1, Span(0, 1))
	if !b.Blocks("children", 0) {
		t.Error("children are read while the parents' assignment changes")
	}
	if b.Blocks("gates", 0) {
		t.Error("gates block, on which parents do not depend")
	}
	b = NewBarrier(paperGraph, numeric)
	announce(t, b, "children", 1, Span(0, 1))
	if b.Blocks("parents", 0) {
		t.Error("parents block because of what depends on them")
	}
	if !b.BlocksReconcile("parents", 0) {
		t.Error("a parent is reconciled although a read of its child would block")
	}
}

// 5.5.2: dependencies are followed to their end.
func TestPaper_5_5_2_ClosureIsTransitive(t *testing.T) {
	deps := Dependencies{"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
	if diff := cmp.Diff([]Resource{"a", "b", "c"}, deps.Closure("a")); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]Resource{"a", "b", "c", "d"}, deps.Closure("d")); diff != "" {
		t.Error(diff)
	}
	if err := (Dependencies{"a": {"x"}}).Validate(); err == nil {
		t.Error("a dependency outside the group is accepted")
	}
}

// 5.5.2: the block of each resource is released by its own list.
func TestPaper_5_5_2_EachResourceIsReleasedByItsOwnList(t *testing.T) {
	b := NewBarrier(paperGraph, numeric)
	announce(t, b, "parents", 1, Span(0, 1))
	list(t, b, "parents", 1, Span(0, 1), "10")
	if b.Blocks("parents", 0) || !b.Blocks("children", 0) {
		t.Error("the list of parents released children, or not parents")
	}
	list(t, b, "children", 1, Span(0, 1), "20")
	if b.Blocks("children", 0) {
		t.Error("the list of children did not release them")
	}
	// The paper leaves open what happens when the dependency was listed before the parents hear of the same change. If
	// that blocked it anew, nothing would ever release it.
	announce(t, b, "parents", 1, Span(0, 1))
	if b.Blocks("children", 0) {
		t.Error("children, listed at this epoch, block again when parents hear of it")
	}
}

// 5.5.3: each change carries an id that only grows. Here it is the epoch; the slices' highest is the group's.
func TestPaper_5_5_3_EpochsOnlyGrow(t *testing.T) {
	g := newGroup(t, Exclusive, 12)
	last := Epoch(0)
	for _, change := range []func(){
		func() { g.join("a") },
		func() { g.join("b") },
		func() { g.states[0].Phase = PhaseLeaving },
		func() { g.states[0].Session, g.states[0].Phase = "", PhaseStopped },
		func() { g.join("c") },
	} {
		change()
		g.settle()
		top := Epoch(0)
		for _, s := range g.slices {
			top = max(top, s.Epoch)
		}
		if top <= last {
			t.Errorf("epoch %d after %d", top, last)
		}
		last = top
	}
}

// 5.5.3 and Algorithm 3, the paper's example: R1 arrives, then R2 while the list of R1 runs. Its completion removes R1
// and leaves the block; that of R2 ends it.
func TestPaper_Algorithm3_TwoChangesInARow(t *testing.T) {
	b := NewBarrier(Dependencies{"r": nil}, numeric)
	for _, step := range []struct {
		name string
		do   func()
		want []Epoch
	}{
		{"R1 arrives", func() { announce(t, b, "r", 1, Span(0, 2)) }, []Epoch{1}},
		{"R2 arrives", func() { announce(t, b, "r", 2, Span(0, 2)) }, []Epoch{1, 2}},
		{"the list of R1 completes", func() { list(t, b, "r", 1, Span(0, 2), "10") }, []Epoch{2}},
		{"the list of R2 completes", func() { list(t, b, "r", 2, Span(0, 2), "11") }, nil},
	} {
		step.do()
		if diff := cmp.Diff(step.want, b.Pending("r")); diff != "" {
			t.Errorf("%s: pendingRVs %s", step.name, diff)
		}
		if got, want := b.Blocks("r", 0), step.want != nil; got != want {
			t.Errorf("%s: blocks %v", step.name, got)
		}
	}
}

// Algorithm 3: a completed list removes smaller ids too, so that one whose list failed does not block for ever.
func TestPaper_Algorithm3_SmallerIdsEndToo(t *testing.T) {
	b := NewBarrier(Dependencies{"r": nil}, numeric)
	announce(t, b, "r", 1, Span(0, 2))
	announce(t, b, "r", 2, Span(0, 2))
	list(t, b, "r", 2, Span(0, 2), "10") // the list of 1 has failed
	if b.Blocks("r", 0) {
		t.Errorf("blocks by %v, which no list will ever complete", b.Pending("r"))
	}
}

// 6.3.4: one id serves all resources, since membership changes once for all of them. The versions that a previous owner
// tells are per resource, since resourceVersions compare within one resource only.
func TestPaper_6_3_4_VersionsAreOfOneResource(t *testing.T) {
	b := NewBarrier(paperGraph, numeric)
	list(t, b, "parents", 1, Span(0, 1), "100")
	list(t, b, "children", 1, Span(0, 1), "7")
	if err := b.Announce("parents", 2, Span(0, 1), &Versions{"parents": "90", "children": "8"}); err != nil {
		t.Fatal(err)
	}
	if b.Blocks("parents", 0) || !b.Blocks("children", 0) {
		t.Error("parents at 100 have reached 90, children at 7 have not reached 8")
	}
	if err := b.Progressed("children", Span(0, 1), "8"); err != nil || b.Blocks("children", 0) {
		t.Errorf("children at 8 still block (%v)", err)
	}
}

// 8, first problem: an object may be with two instances for a moment. In Exclusive no step, however many may die on the
// way, ever lets two slices hold one Virtual Node.
func TestPaper_8_NeverTwoOwners(t *testing.T) {
	g := newGroup(t, Exclusive, 9)
	g.join("a", "b")
	g.settle()
	g.join("c")
	for range 12 {
		g.step()
		for i := range g.slices {
			for k := range g.slices[:i] {
				if both := g.slices[i].Held().Intersect(g.slices[k].Held()); !both.Empty() {
					t.Fatalf("%s and %s both hold %v", g.slices[i].Member, g.slices[k].Member, both)
				}
			}
		}
		for _, id := range []string{"c", "a", "b"} {
			g.act(id)
		}
	}
	if got := g.owned()["c"].Len(); got != 3 {
		t.Errorf("c ended with %d of 9", got)
	}
}

// 8, second problem: a Get of an object that is not the instance's finds nothing. Here the cache is not asked.
func TestPaper_8_ReadsOfOthersObjectsGoToTheServer(t *testing.T) {
	g := newGroup(t, Exclusive, 4)
	g.join("a", "b")
	g.settle()
	for vn := range g.owned()["b"].All() {
		if got := g.members["a"].Read("children", vn); got != FromServer {
			t.Errorf("a reads in %d, which is b's, %v", vn, got)
		}
	}
}

// What does not compare is named, and what it was to lift stays blocked until a list with a version that does.
func TestBarrierNamesWhatDoesNotCompare(t *testing.T) {
	b := NewBarrier(paperGraph, numeric)
	list(t, b, "children", 1, Span(0, 1), "7")
	if err := b.Announce("children", 2, Span(0, 1), &Versions{"children": "x"}); err == nil || !b.Blocks("children", 0) {
		t.Errorf("a malformed version of a grant: %v, blocks %v", err, b.Blocks("children", 0))
	}
	if err := b.Listed("children", 2, Span(0, 1), "y"); err == nil || !b.Blocks("children", 0) {
		t.Errorf("a malformed version of a list: %v, blocks %v", err, b.Blocks("children", 0))
	}
	if err := b.Progressed("children", Span(0, 1), "z"); err == nil || !b.Blocks("children", 0) {
		t.Errorf("a malformed version of an event: %v, blocks %v", err, b.Blocks("children", 0))
	}
	if list(t, b, "children", 2, Span(0, 1), "9"); b.Blocks("children", 0) {
		t.Error("a list does not lift the block")
	}
}
