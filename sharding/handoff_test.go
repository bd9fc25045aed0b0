package sharding

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestCoordinatorValidate(t *testing.T) {
	good := Coordinator{Claim: "c", VirtualNodes: 200, Mode: Exclusive, Assignment: Balanced{}}
	if err := good.Validate("spec."); err != nil {
		t.Error(err)
	}
	for _, tc := range []struct {
		set  func(*Coordinator)
		want string
	}{
		{func(c *Coordinator) { c.VirtualNodes = 0 }, "spec.virtualNodes: 0 is not between 1 and 100000"},
		{func(c *Coordinator) { c.VirtualNodes = 100_001 }, "spec.virtualNodes: 100001"},
		{func(c *Coordinator) { c.Mode = "Both" }, `spec.handoff: "Both"`},
		{func(c *Coordinator) { c.Claim = "" }, "spec.claim"},
		{func(c *Coordinator) { c.Assignment = nil }, "spec.assignment"},
	} {
		c := good
		tc.set(&c)
		if err := c.Validate("spec."); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("Validate = %v, want %q", err, tc.want)
		}
	}
}

// Whatever slices a coordinator finds, left by any predecessor, by hand, or by the other mode: it never gives a Virtual
// Node to a member while another slice says that somebody may still be working on it, and never forgets an epoch.
func TestStepNeverGivesWhatIsHeld(t *testing.T) {
	const v = 8
	drawSet := func(t *rapid.T, label string) Set {
		mask := rapid.Uint8().Draw(t, label)
		var b setBuilder
		for vn := range VirtualNode(v) {
			if mask&(1<<vn) != 0 {
				b.add(Range{vn, vn})
			}
		}
		return b.set
	}
	rapid.Check(t, func(t *rapid.T) {
		var obs Observation
		for i := range rapid.IntRange(1, 4).Draw(t, "members") {
			id := fmt.Sprintf("m%d", i)
			session := rapid.SampledFrom([]string{id + "/1", id + "/2", ""}).Draw(t, "session")
			if rapid.Bool().Draw(t, "known") {
				facts := MemberFacts{Session: session, Unready: rapid.Bool().Draw(t, "unready"),
					LeaveAsked:    rapid.Bool().Draw(t, "asks"),
					NewcomerGrace: rapid.Bool().Draw(t, "newcomer"), ReturnGrace: rapid.Bool().Draw(t, "return")}
				obs.Members = append(obs.Members, MemberState{ID: id, Session: session, Phase: facts.Phase()})
			}
			s := Slice{Member: id, Session: id + "/1", Claim: "c", Version: strconv.Itoa(i),
				Epoch: Epoch(rapid.IntRange(1, 9).Draw(t, "epoch")), Owned: drawSet(t, "owned")}
			if draining := drawSet(t, "draining").Minus(s.Owned); !draining.Empty() {
				s.Draining = []Order{{s.Epoch, draining}}
			}
			if incoming := drawSet(t, "incoming").Minus(s.Held()); !incoming.Empty() {
				s.Incoming = []Order{{s.Epoch, incoming}}
			}
			s.Status = SliceStatus{Session: s.Session, Warm: s.Incoming,
				Released: []Release{{Epoch: s.Epoch, VNs: drawSet(t, "released"), Known: &Versions{}}}}
			obs.Slices = append(obs.Slices, s)
		}
		c := Coordinator{Claim: "c", VirtualNodes: v, Mode: Exclusive, Assignment: Balanced{}}
		writes := c.Step(obs)
		var top Epoch
		for _, s := range obs.Slices {
			top = max(top, s.Epoch)
		}
		given := make(map[VirtualNode]string)
		for _, w := range writes {
			if w.Op == Delete {
				continue
			}
			if w.Slice.Epoch != top+1 {
				t.Fatalf("%s is written under epoch %d, want %d", w.Slice.Member, w.Slice.Epoch, top+1)
			}
			var old Slice
			if i := slices.IndexFunc(obs.Slices, func(s Slice) bool { return s.Member == w.Slice.Member }); i >= 0 {
				old = obs.Slices[i]
			}
			gained := w.Slice.Owned
			if w.Slice.Session == old.Session {
				gained = gained.Minus(old.Owned)
			}
			for vn := range gained.All() {
				if other := given[vn]; other != "" {
					t.Fatalf("%d is given to %s and to %s", vn, other, w.Slice.Member)
				}
				given[vn] = w.Slice.Member
				for _, s := range obs.Slices {
					if s.Member != w.Slice.Member && s.Held().Has(vn) {
						t.Fatalf("%d is given to %s although %s may be working on it", vn, w.Slice.Member, s.Member)
					}
				}
			}
		}
	})
}

// Where all members have stopped, one slice is left, which carries the last epoch: whoever has it, in whatever order they
// stopped.
func TestTheSliceWithTheLastEpochIsLeft(t *testing.T) {
	for _, epochs := range [][]Epoch{{5, 7}, {7, 5}, {7, 7}, {5, 7, 6}, {7, 5, 7}} {
		g := newGroup(t, Exclusive, 8)
		for i, epoch := range epochs {
			id := fmt.Sprint("m", i)
			g.slices = append(g.slices, Slice{Member: id, Session: id + "/1", Claim: "c", Epoch: epoch})
		}
		for g.step() > 0 {
		}
		if len(g.slices) != 1 || g.slices[0].Epoch != 7 {
			t.Errorf("of epochs %v are left %+v", epochs, g.slices)
		}
	}
}

// From wherever a group starts, with members that do what they are told, it comes to rest: everything owned by exactly
// one member that may, nothing moving.
func TestGroupsSettle(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		g := newGroup(t, rapid.SampledFrom([]Mode{Exclusive, Eventual}).Draw(rt, "mode"), rapid.IntRange(1, 40).Draw(rt, "v"))
		g.join("a", "b", "c", "d")
		for range rapid.IntRange(1, 6).Draw(rt, "changes") {
			i := rapid.IntRange(0, 3).Draw(rt, "who")
			s := &g.states[i]
			switch phase := rapid.SampledFrom([]Phase{PhaseServing, PhaseStopped, PhaseLeaving, PhaseQuitting, PhaseJoining}).
				Draw(rt, "phase"); {
			case phase == PhaseStopped:
				s.Session, s.Phase = "", phase
			case s.Session == "":
				s.Session, s.Phase = fmt.Sprintf("%s-%d", s.ID, g.version+2), phase
				g.members[s.ID].StartSession(s.Session)
				g.members[s.ID].Renewed(s.Session, 0, 0)
			default:
				s.Phase = phase
			}
			for range rapid.IntRange(0, 3).Draw(rt, "steps") {
				g.step()
				g.act(g.states[rapid.IntRange(0, 3).Draw(rt, "actor")].ID)
			}
			g.Mode = rapid.SampledFrom([]Mode{g.Mode, g.Mode, Exclusive, Eventual}).Draw(rt, "mode")
		}
		g.settle()
		// Members that quit do not count: they are relieved whether others follow or not.
		running := slices.ContainsFunc(g.states, func(s MemberState) bool { return s.running() && s.Phase != PhaseQuitting })
		var all Set
		for id, vns := range g.owned() {
			if all.Intersects(vns) {
				rt.Fatalf("%s owns %v, which others own", id, vns)
			}
			all = all.Union(vns)
		}
		if running && !all.Equal(Span(0, g.VirtualNodes)) {
			rt.Fatalf("owned %v of %d, members %+v, slices %+v", all, g.VirtualNodes, g.states, g.slices)
		}
		for _, s := range g.slices {
			if s.Moving() > 0 && (running || !orders(s.Incoming).Empty() || !s.Held().Empty()) {
				rt.Fatalf("still moving: %+v", s)
			}
		}
	})
}

// A write that was never answered may still land: the Virtual Node is held until it cannot any more, and the next owner
// is told nothing, so that it looks for itself.
func TestBlindWriteDelaysTheRelease(t *testing.T) {
	g := newGroup(t, Exclusive, 4)
	g.join("a")
	g.settle()
	a := g.members["a"]
	ticket, err := a.Begin("parents", 3, 0)
	if err != nil {
		t.Fatal(err)
	}
	a.WroteBlindly(ticket, 5)
	a.End(ticket)
	slice := g.slices[0]
	slice.Epoch++
	slice.Owned, slice.Draining = Span(0, 2), []Order{{slice.Epoch, Span(2, 2)}}
	if err := a.Observe(slice); err != nil {
		t.Fatal(err)
	}
	if got := a.Status(4).Released; len(got) != 1 || !got[0].VNs.Equal(SetOf(2)) || got[0].Known == nil {
		t.Errorf("at 4: released %+v, want 2 alone, with versions", got)
	}
	if got := a.Status(5).Released; len(got) != 2 || !got[1].VNs.Equal(SetOf(3)) || got[1].Known != nil {
		t.Errorf("at 5: released %+v, want 3 as well, with nothing known", got)
	}
}

// A member that was asked to drain what it never started on must not claim to know what came before it.
func TestReleaseBeforeTheListKnowsNothing(t *testing.T) {
	m := NewMember("m", paperGraph, numeric, NewFence(DefaultLeasePolicy()))
	m.StartSession("s")
	for _, s := range []Slice{
		{Member: "m", Session: "s", Epoch: 1, Owned: Span(0, 2), Grants: []Grant{{1, Span(0, 2), nil}}},
		{Member: "m", Session: "s", Epoch: 2, Owned: Span(0, 1), Draining: []Order{{2, Span(1, 1)}}, Grants: []Grant{{1,
			Span(0, 1), nil}}},
	} {
		if err := m.Observe(s); err != nil {
			t.Fatal(err)
		}
		m.NextFetches()
	}
	if got := m.Status(0).Released; len(got) != 1 || got[0].Known != nil {
		t.Errorf("released %+v, want nothing known: the list has not come back", got)
	}
}

// What a member had to see and did not write itself it hands on: the next owner may have prefetched before that.
func TestInheritedVersionsAreHandedOn(t *testing.T) {
	m := NewMember("m", paperGraph, numeric, NewFence(DefaultLeasePolicy()))
	m.StartSession("s")
	m.Renewed("s", 0, 0)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(m.Observe(Slice{Member: "m", Session: "s", Epoch: 1, Owned: Span(0, 1),
		Grants: []Grant{{1, Span(0, 1), &Versions{"parents": "40", "children": "7", "gates": "3"}}}}))
	for _, f := range m.NextFetches() {
		_, err := m.Listed(f, "50")
		must(err)
	}
	ticket, err := m.Begin("parents", 0, 0)
	must(err)
	must(m.Wrote(ticket, "children", "60"))
	m.End(ticket)
	must(m.Observe(Slice{Member: "m", Session: "s", Epoch: 2, Draining: []Order{{2, Span(0, 1)}}}))
	got := m.Status(0).Released
	if len(got) != 1 || got[0].Known == nil || !maps.Equal(*got[0].Known, Versions{"parents": "40", "children": "60", "gates": "3"}) {
		t.Errorf("released %+v, want parents 40 as inherited and children 60 as written", got)
	}
}

func BenchmarkStep(b *testing.B) {
	for _, v := range []int{1_000, 10_000, 100_000} {
		b.Run(fmt.Sprintf("join/v=%d/members=9", v), func(b *testing.B) {
			obs := Observation{}
			shares := setsOf(Balanced{}.Assign(make(Placement, v), serving(9)))
			for i := range 10 {
				id := fmt.Sprintf("m%03d", i)
				obs.Members = append(obs.Members, MemberState{ID: id, Session: id, Phase: PhaseServing})
				obs.Slices = append(obs.Slices, Slice{Member: id, Session: id, Claim: "c", Epoch: 1, Owned: shares[id]})
			}
			c := Coordinator{Claim: "c", VirtualNodes: v, Mode: Exclusive, Assignment: Balanced{}}
			for b.Loop() {
				if len(c.Step(obs)) == 0 {
					b.Fatal("nothing moves")
				}
			}
		})
	}
}

// BenchmarkDrain is what stands, on the member's side, between an order to drain a ninth of V and its answer.
func BenchmarkDrain(b *testing.B) {
	for _, v := range []int{1_000, 10_000, 100_000} {
		b.Run(fmt.Sprintf("v=%d", v), func(b *testing.B) {
			all, moving := Span(0, v/8), Span(0, v/9)
			for b.Loop() {
				b.StopTimer()
				m := NewMember("m", paperGraph, numeric, NewFence(DefaultLeasePolicy()))
				m.StartSession("s")
				m.Renewed("s", 0, 0)
				observe := func(s Slice) {
					s.Member, s.Session = "m", "s"
					if err := m.Observe(s); err != nil {
						b.Fatal(err)
					}
				}
				observe(Slice{Epoch: 1, Owned: all, Grants: []Grant{{1, all, nil}}})
				for _, f := range m.NextFetches() {
					if _, err := m.Listed(f, "10"); err != nil {
						b.Fatal(err)
					}
				}
				b.StartTimer()
				observe(Slice{Epoch: 2, Owned: all.Minus(moving), Draining: []Order{{2, moving}}})
				if got := m.Status(0).Released; len(got) != 1 || !got[0].VNs.Equal(moving) {
					b.Fatalf("released %v", got)
				}
			}
		})
	}
}

// A grant may tell less than the member has to know: of a resource that the owner before did not know of, because it ran an
// older program, or a version that cannot be read. Such a resource is listed, and handed on as listed, and the rest of the
// slice is taken in as ever.
func TestWhatAGrantDoesNotTellIsListed(t *testing.T) {
	for name, tc := range map[string]struct {
		known Versions
		fault string
	}{
		"a resource that is missing":       {Versions{"parents": "7", "gates": "7"}, ""},
		"a version that cannot be read":    {Versions{"parents": "7", "children": "seven", "gates": "7"}, `grant of epoch 3: version "seven" of children`},
		"nothing of any resource":          {Versions{}, ""},
		"a resource that nobody here has":  {Versions{"parents": "7", "strangers": "1"}, ""},
		"a stranger's that cannot be read": {Versions{"parents": "7", "strangers": "one"}, `version "one" of strangers`},
	} {
		t.Run(name, func(t *testing.T) {
			fence := NewFence(DefaultLeasePolicy())
			m := NewMember("a", paperGraph, numeric, fence)
			m.StartSession("a1")
			m.Renewed("a1", 0, 0)
			observe := func(s Slice) error {
				s.Member, s.Session = "a", "a1"
				return m.Observe(s)
			}
			if err := observe(Slice{Epoch: 1, Incoming: []Order{{1, Span(0, 3)}}}); err != nil {
				t.Fatal(err)
			}
			for _, f := range m.NextFetches() {
				if _, err := m.Listed(f, "10"); err != nil {
					t.Fatal(err)
				}
			}
			err := observe(Slice{Epoch: 3, Owned: Span(0, 3), Grants: []Grant{
				{3, Span(0, 2), &tc.known}, {3, Span(2, 1), &Versions{"parents": "7", "children": "7", "gates": "7"}}}})
			if (err == nil) != (tc.fault == "") || (err != nil && !strings.Contains(err.Error(), tc.fault)) {
				t.Errorf("error %v, want %q", err, tc.fault)
			}
			if got := m.Read("children", 0); got != AfterBarrier {
				t.Errorf("a read of what nothing is known of: %v, want AfterBarrier", got)
			}
			if got := m.Read("children", 2); got != FromCache {
				t.Errorf("a read of what all is known of: %v, want FromCache", got)
			}
			for _, f := range m.NextFetches() {
				if !f.VNs.Equal(Span(0, 2)) {
					t.Errorf("fetch %+v, want 0-1", f)
				}
				if _, err := m.Listed(f, "20"); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := m.Begin("parents", 0, 0); err != nil {
				t.Errorf("after the list: %v", err)
			}
			if err := observe(Slice{Epoch: 4, Owned: Span(0, 1), Draining: []Order{{4, Span(1, 2)}}}); err != nil {
				t.Fatal(err)
			}
			for _, r := range m.Status(0).Released {
				if r.Known == nil || (*r.Known)["children"] != "20" {
					t.Errorf("released %v with %v, want children at 20", r.VNs, r.Known)
				}
			}
		})
	}
}
