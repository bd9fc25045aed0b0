package sharding

import (
	"errors"
	"testing"
)

// The tests in this file each hold one guard whose loss shows only when several rare things meet.

func coordinatorOf(v int) Coordinator {
	return Coordinator{Claim: "c", VirtualNodes: v, Mode: Exclusive, Assignment: Balanced{}}
}

func servingMembers(ids ...string) []MemberState {
	var list []MemberState
	for _, id := range ids {
		list = append(list, MemberState{ID: id, Session: id, Phase: PhaseServing})
	}
	return list
}

func sliceOf(id string, change func(*Slice)) Slice {
	s := Slice{Member: id, Session: id, Claim: "c", Epoch: 5, Version: "1"}
	s.Status.Session = id
	change(&s)
	return s
}

// What a former owner has released is cleaned up before the present one drains, or the next owner could be told the
// former one's versions.
func TestNothingDrainsBeforeAnOldReleaseIsCleanedUp(t *testing.T) {
	writes := coordinatorOf(2).Step(Observation{Members: servingMembers("a", "b", "c"), Slices: []Slice{
		sliceOf("a", func(s *Slice) {
			s.Draining = []Order{{3, SetOf(0)}}
			s.Status.Released = []Release{{3, SetOf(0), &Versions{}}}
		}),
		sliceOf("b", func(s *Slice) { s.Owned = Span(0, 2) }),
		sliceOf("c", func(s *Slice) {
			s.Incoming = []Order{{5, SetOf(0)}}
			s.Status.Warm = s.Incoming
		}),
	}})
	for _, w := range writes {
		if w.Slice.Member == "b" && orders(w.Slice.Draining).Has(0) {
			t.Errorf("b drains 0, which a still lists as released: %+v", w.Slice)
		}
		if w.Slice.Member == "a" && len(w.Slice.Draining) > 0 {
			t.Errorf("a's old release stays: %+v", w.Slice)
		}
	}
}

// An announced change is not decided anew: a step that finds promises which balance leaves them, even where it would
// have chosen other Virtual Nodes itself.
func TestPromisesAreKept(t *testing.T) {
	if writes := coordinatorOf(4).Step(Observation{Members: servingMembers("a", "b"), Slices: []Slice{
		sliceOf("a", func(s *Slice) { s.Owned = Span(0, 4) }),
		sliceOf("b", func(s *Slice) { s.Incoming = []Order{{5, SetOf(0, 2)}} }),
	}}); len(writes) > 0 {
		t.Errorf("0 and 2 are on their way to b, and yet: %+v", writes)
	}
}

// A word that belongs to another order, or to another session, releases nothing and warms nothing.
func TestOnlyAnswersToThisOrderCount(t *testing.T) {
	order := []Order{{4, SetOf(0)}}
	for name, status := range map[string]SliceStatus{
		"an earlier order":   {Session: "a", Warm: []Order{{3, SetOf(0)}}, Released: []Release{{Epoch: 3, VNs: SetOf(0)}}},
		"an earlier session": {Session: "x", Warm: order, Released: []Release{{Epoch: 4, VNs: SetOf(0)}}},
	} {
		s := Slice{Member: "a", Session: "a", Draining: order, Incoming: order, Status: status}
		if !s.released().Empty() || !s.warm().Empty() || !s.Held().Has(0) {
			t.Errorf("%s: released %v, warm %v, held %v", name, s.released(), s.warm(), s.Held())
		}
	}
}

func memberWith(t *testing.T, s Slice) *Member {
	t.Helper()
	m := NewMember("m", Dependencies{"r": nil}, numeric, NewFence(DefaultLeasePolicy()))
	m.StartSession("s")
	m.Renewed("s", 0, 0)
	s.Member, s.Session = "m", "s"
	if err := m.Observe(s); err != nil {
		t.Fatal(err)
	}
	for _, f := range m.NextFetches() {
		if _, err := m.Listed(f, "10"); err != nil {
			t.Fatal(err)
		}
	}
	return m
}

func observe(t *testing.T, m *Member, s Slice) {
	t.Helper()
	s.Member, s.Session = "m", "s"
	if err := m.Observe(s); err != nil {
		t.Fatal(err)
	}
}

// A Virtual Node that is listed again counts as not cached meanwhile: its watch has ended, and if the list fails and
// the reason for it goes away, it has to be listed all the same.
func TestWhatIsListedAgainIsNotCached(t *testing.T) {
	m := memberWith(t, Slice{Epoch: 1, Incoming: []Order{{1, SetOf(0)}}})
	observe(t, m, Slice{Epoch: 2, Owned: SetOf(0), Grants: []Grant{{Epoch: 2, VNs: SetOf(0)}}})
	fetches := m.NextFetches()
	if len(fetches) != 1 || !m.Cached("r").Empty() {
		t.Fatalf("fetches %v, cached %v", fetches, m.Cached("r"))
	}
	m.ListFailed(fetches[0])
	if again := m.NextFetches(); len(again) != 1 {
		t.Errorf("after a failed list: %v, want it again", again)
	}
}

// What a cache holds is dropped when it is not wanted any more, also if its watch had been lost before.
func TestLostVirtualNodesAreDroppedToo(t *testing.T) {
	m := memberWith(t, Slice{Epoch: 1, Incoming: []Order{{1, SetOf(0)}}})
	m.Lost("r", SetOf(0))
	observe(t, m, Slice{Epoch: 2})
	if got := m.NextPurges(); len(got) != 1 || !got[0].VNs.Has(0) {
		t.Errorf("purges %v, want 0", got)
	}
}

// A new session waits until nothing that the old one sent can land.
func TestQuietAtFollowsTheLastWrite(t *testing.T) {
	m := memberWith(t, Slice{Epoch: 1, Owned: SetOf(0)})
	ticket, err := m.Begin("r", 0, 3)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.MayWrite(ticket, 4); err != nil {
		t.Fatal(err)
	}
	m.StartSession("t")
	quiet := 4 + DefaultLeasePolicy().RequestTimeout
	if m.QuietAt() != quiet || m.Acquire(quiet-1) || !m.Acquire(quiet) {
		t.Errorf("QuietAt = %v, want %v, and Acquire no earlier", m.QuietAt(), quiet)
	}
	if m.Acquire(quiet + 1) {
		t.Error("a session may try a second time to acquire its lease")
	}
}

// An answer that comes later than the deadline it would set is none: a session that has just begun has not expired
// because of it, and goes on asking.
func TestLateFirstAnswerIsNoAnswer(t *testing.T) {
	m := NewMember("m", Dependencies{"r": nil}, numeric, NewFence(DefaultLeasePolicy()))
	m.StartSession("s")
	late := DefaultLeasePolicy().RenewDeadline
	m.Renewed("s", 0, late)
	if m.Expired(late) {
		t.Error("a session that never held its lease has expired")
	}
	m.Renewed("other", late, late)
	if _, err := m.Begin("r", 0, late); !errors.Is(err, ErrFenced) {
		t.Errorf("an answer to another session counts: %v", err)
	}
}

// A slice that was edited by hand, or of which the member has missed something: it believes nothing that it has cached.
func TestUnexplainedOwnershipIsListed(t *testing.T) {
	m := memberWith(t, Slice{Epoch: 1, Incoming: []Order{{1, SetOf(0)}}})
	observe(t, m, Slice{Epoch: 2, Owned: SetOf(0)})
	if _, err := m.Begin("r", 0, 0); !errors.Is(err, ErrBlocked) {
		t.Errorf("Begin: %v, want %v", err, ErrBlocked)
	}
	if got := m.NextFetches(); len(got) != 1 {
		t.Errorf("fetches %v, want a list of 0", got)
	}
}
