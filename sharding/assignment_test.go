package sharding

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func serving(n int) []Candidate {
	var list []Candidate
	for i := range n {
		list = append(list, Candidate{ID: fmt.Sprintf("m%03d", i), Keeps: true, Receives: true, Pulls: true})
	}
	return list
}

func loads(p Placement) map[string]int {
	load := make(map[string]int)
	for _, id := range p {
		load[id]++
	}
	return load
}

func setsOf(p Placement) map[string]Set {
	builders := make(map[string]*setBuilder)
	for vn, id := range p {
		if builders[id] == nil {
			builders[id] = &setBuilder{}
		}
		builders[id].add(Range{VirtualNode(vn), VirtualNode(vn)})
	}
	sets := make(map[string]Set)
	for id, b := range builders {
		sets[id] = b.set
	}
	return sets
}

func moves(from, to Placement) int {
	n := 0
	for vn := range from {
		if from[vn] != to[vn] {
			n++
		}
	}
	return n
}

func drawCandidates(t *rapid.T) []Candidate {
	var list []Candidate
	for i := range rapid.IntRange(0, 12).Draw(t, "members") {
		m := Candidate{ID: fmt.Sprintf("m%03d", i), Weight: rapid.IntRange(0, 4).Draw(t, "weight")}
		switch rapid.SampledFrom([]string{"serving", "serving", "serving", "joining", "leaving", "away"}).Draw(t, "phase") {
		case "serving":
			m.Keeps, m.Receives, m.Pulls = true, true, true
		case "joining":
			m.Keeps, m.Receives = true, true
		case "away":
			m.Keeps = true
		}
		list = append(list, m)
	}
	return list
}

// Every Assignment: only those get something that may, everybody's Virtual Nodes are placed, the order of the members
// does not matter, and the result is a fixed point.
func TestAssignmentContract(t *testing.T) {
	for name, a := range map[string]Assignment{
		"Balanced": Balanced{}, "Balanced in units": Balanced{Unit: 7}, "ConsistentHash": ConsistentHash{Replicas: 10},
	} {
		t.Run(name, rapid.MakeCheck(func(t *rapid.T) {
			members := drawCandidates(t)
			current := make(Placement, rapid.IntRange(1, 120).Draw(t, "v"))
			for vn := range current {
				current[vn] = rapid.SampledFrom([]string{"", "m000", "m001", "m002", "m005", "gone"}).Draw(t, "current")
			}
			before := slices.Clone(current)
			next := a.Assign(current, members)
			if diff := cmp.Diff(before, current); diff != "" {
				t.Fatalf("Assign changed its argument: %s", diff)
			}
			may := make(map[string]Candidate)
			receivers := false
			for _, m := range members {
				may[m.ID] = m
				receivers = receivers || m.Receives
			}
			for vn, id := range next {
				switch {
				case id == "" && receivers:
					t.Fatalf("Virtual Node %d is nobody's although somebody receives", vn)
				case id != "" && !may[id].Receives && !may[id].Keeps:
					t.Fatalf("Virtual Node %d is with %q, which may have nothing", vn, id)
				}
			}
			if diff := cmp.Diff(next, a.Assign(next, members)); diff != "" {
				t.Fatalf("not a fixed point: %s", diff)
			}
			shuffled := slices.Clone(members)
			rand.New(rand.NewPCG(1, 2)).Shuffle(len(shuffled), func(i, j int) {
				shuffled[i], shuffled[j] = shuffled[j], shuffled[i]
			})
			if diff := cmp.Diff(next, a.Assign(current, shuffled)); diff != "" {
				t.Fatalf("depends on the order of members: %s", diff)
			}
		}))
	}
}

// Over any history of members that come and go, Balanced gives everybody its share to within one, and moves exactly
// what had no owner any more plus what the others have beyond their new share.
func TestBalancedIsBalancedAndSticky(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := rapid.IntRange(1, 500).Draw(t, "v")
		all := serving(30)
		current := make(Placement, v)
		for range rapid.IntRange(1, 8).Draw(t, "changes") {
			members := slices.Clone(all[rapid.IntRange(0, 10).Draw(t, "from"):rapid.IntRange(11, 30).Draw(t, "to")])
			next := Balanced{}.Assign(current, members)
			had, has := loads(current), loads(next)
			low, high := v/len(members), (v+len(members)-1)/len(members)
			must := v
			for _, m := range members {
				if has[m.ID] < low || has[m.ID] > high {
					t.Fatalf("%s has %d of %d, want its share of %d to %d", m.ID, has[m.ID], v, low, high)
				}
				must -= min(had[m.ID], has[m.ID])
			}
			if got := moves(current, next); got != must {
				t.Fatalf("moved %d, want %d: nothing that may stay may move", got, must)
			}
			// No other division into shares of low and high would have moved less.
			ceilings, kept := v-low*len(members), 0
			var owned []int
			for _, m := range members {
				owned = append(owned, had[m.ID])
			}
			slices.SortFunc(owned, func(a, b int) int { return b - a })
			for i, n := range owned {
				if i < ceilings {
					kept += min(n, low+1)
				} else {
					kept += min(n, low)
				}
			}
			if must != v-kept {
				t.Fatalf("moved %d although %d would have done", must, v-kept)
			}
			current = next
		}
	})
}

func TestPeakIsAtMostElevenTenthsOfTheMean(t *testing.T) {
	for _, tc := range []struct{ v, unit, members int }{
		{1000, 1, 1}, {1000, 1, 9}, {1000, 1, 100}, {10_000, 10, 9}, {100_000, 98, 9}, {100_000, 98, 100},
		{100_000, 1, 1000},
	} {
		var current = make(Placement, tc.v)
		for n := 1; n <= tc.members; n = min(2*n, tc.members) {
			current = Balanced{Unit: tc.unit}.Assign(current, serving(n))
			if n == tc.members {
				break
			}
		}
		peak := 0
		for _, n := range loads(current) {
			peak = max(peak, n)
		}
		mean := float64(tc.v) / float64(tc.members)
		if float64(peak) > 1.1*mean {
			t.Errorf("%+v: peak %d, mean %.1f", tc, peak, mean)
		}
	}
}

// A member that joins in a rolling update takes exactly what the one that leaves has, so that each Virtual Node moves
// once; without a leaver it takes nothing until its grace is over.
func TestNewcomerReplacesLeaver(t *testing.T) {
	current := Balanced{}.Assign(make(Placement, 300), serving(3))
	members := serving(4)
	members[3].Pulls = false
	if n := moves(current, Balanced{}.Assign(current, members)); n != 0 {
		t.Errorf("a newcomer in its grace period moved %d Virtual Nodes", n)
	}
	members[1].Keeps, members[1].Receives, members[1].Pulls = false, false, false
	next := Balanced{}.Assign(current, members)
	want := setsOf(current)
	want["m003"] = want["m001"]
	delete(want, "m001")
	if diff := cmp.Diff(want, setsOf(next)); diff != "" {
		t.Errorf("the newcomer did not simply replace the leaver: %s", diff)
	}
}

// All members are replaced, one after the other, and each Virtual Node moves once, also where shares are not all equal: what
// is left over by rounding goes to the newcomer, and not to one that will be replaced itself.
func TestRollingUpdateMovesEachVirtualNodeOnce(t *testing.T) {
	for _, tc := range []struct {
		v, members, unit int
		pulls            bool // or all are new themselves
	}{{1000, 3, 1, true}, {1000, 3, 1, false}, {1000, 7, 1, true}, {1000, 3, 4, false}, {10_000, 9, 7, true}, {11, 4, 1, true}} {
		a := Balanced{Unit: tc.unit}
		members := serving(tc.members)
		current := a.Assign(make(Placement, tc.v), members)
		moved := make([]int, tc.v)
		for i := range members {
			members[i].Pulls = tc.pulls
		}
		for i := range tc.members {
			// The newcomer's name may stand before or after the others'.
			newcomer := Candidate{ID: fmt.Sprintf("%c-%d", 'a'+rune(25*(i%2)), i), Keeps: true, Receives: true}
			members[i].Keeps, members[i].Receives, members[i].Pulls = false, false, false
			next := a.Assign(current, append(slices.Clone(members), newcomer))
			for vn := range next {
				if next[vn] != current[vn] {
					moved[vn]++
				}
			}
			current = next
			newcomer.Pulls = tc.pulls
			members[i] = newcomer
		}
		for vn, n := range moved {
			if n != 1 {
				t.Errorf("%+v: Virtual Node %d moved %d times, want once", tc, vn, n)
			}
		}
	}
}

func TestWeightsDivide(t *testing.T) {
	members := serving(3)
	members[0].Weight = 2
	got := loads(Balanced{}.Assign(make(Placement, 400), members))
	if diff := cmp.Diff(map[string]int{"m000": 200, "m001": 100, "m002": 100}, got); diff != "" {
		t.Error(diff)
	}
}

// Where weights leave equal remainders, the units left over stay with those that have them.
func TestEqualRemaindersStayWhereTheyAre(t *testing.T) {
	members := serving(3)
	members[2].Weight = 4
	first := Balanced{}.Assign(make(Placement, 4), members)
	if n := moves(first, Balanced{}.Assign(first, members)); n != 0 {
		t.Errorf("assigning again moves %d of %v", n, first)
	}
}

// Runs stay runs: after many changes a member's share is still a few ranges, so that slices and selectors stay short.
func TestSharesStayFewRanges(t *testing.T) {
	current := make(Placement, 10_000)
	for i := range 100 {
		current = Balanced{}.Assign(current, serving(3+i%7))
	}
	for id, set := range setsOf(current) {
		if len(set) > 300 {
			t.Errorf("%s has %d Virtual Nodes in %d ranges", id, set.Len(), len(set))
		}
	}
}

func BenchmarkAssign(b *testing.B) {
	for name, a := range map[string]Assignment{"Balanced": Balanced{}, "ConsistentHash": ConsistentHash{}} {
		for _, v := range []int{1_000, 10_000, 100_000} {
			for _, n := range []int{1, 9, 1000} {
				b.Run(fmt.Sprintf("%s/v=%d/members=%d", name, v, n), func(b *testing.B) {
					current := a.Assign(make(Placement, v), serving(n))
					for b.Loop() {
						a.Assign(current, serving(n+1))
					}
				})
			}
		}
	}
}
