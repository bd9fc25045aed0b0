package vnaffinity

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"
)

func TestMembersWithoutVirtualNodesWeighWhatTheyAreAboutToGet(t *testing.T) {
	for _, c := range []struct {
		name    string
		members []member
		want    []int64 // in Virtual Nodes
	}{
		{"nobody has any: by weight", []member{{weight: 1}, {weight: 3}}, []int64{1, 3}},
		{"as many as they own", []member{{weight: 1, owned: 700}, {weight: 1, owned: 300}}, []int64{700, 300}},
		{"a newcomer weighs the mean", []member{{weight: 1, owned: 700}, {weight: 1, owned: 300}, {weight: 1}}, []int64{700, 300, 500}},
		{"the mean is one by weight", []member{{weight: 1, owned: 200}, {weight: 3, owned: 600}, {weight: 2}}, []int64{200, 600, 400}},
	} {
		t.Run(c.name, func(t *testing.T) {
			for i := range c.members {
				c.members[i].id = types.UID(fmt.Sprint(i))
			}
			weights, total := weigh(c.members)
			var sum int64
			for i, m := range c.members {
				if weights[m.id] != c.want[i]*unit {
					t.Errorf("member %d weighs %d thousandths, want %d Virtual Nodes", i, weights[m.id], c.want[i])
				}
				sum += weights[m.id]
			}
			if total != sum {
				t.Errorf("the total is %d, the sum %d", total, sum)
			}
		})
	}
}

// A world places members one after the other, as the plugin does.
type world struct {
	zoneOf map[string]string // by node
	nodes  []string
}

func newWorld(nodesIn ...int) world {
	w := world{zoneOf: map[string]string{}}
	for z, n := range nodesIn {
		for i := range n {
			node := fmt.Sprintf("zone-%d-node-%d", z, i)
			w.nodes = append(w.nodes, node)
			w.zoneOf[node] = fmt.Sprint("zone-", z)
		}
	}
	return w
}

// placeAll returns the node of each member. Which of the best nodes it is is drawn.
func (w world) placeAll(members []member, draw func(n int) int) []string {
	placed := make([]string, len(members))
	for i, m := range members {
		s := newSpread(m, members)
		for j := range i {
			s.count("zone", w.zoneOf[placed[j]], members[j], 1)
			s.count("node", placed[j], members[j], 1)
		}
		places := make([]place, len(w.nodes))
		for n, node := range w.nodes {
			places[n] = place{
				domains: []string{w.zoneOf[node], node},
				costs:   []int64{s.cost("zone", w.zoneOf[node]), s.cost("node", node)},
			}
		}
		scores := preferences(places)
		best := slices.Max(scores)
		var candidates []string
		for n, score := range scores {
			if score == best {
				candidates = append(candidates, w.nodes[n])
			}
		}
		placed[i] = candidates[draw(len(candidates))]
	}
	return placed
}

// worst is the largest load of any domain.
func worst(members []member, domainOf func(i int) string) int64 {
	loads, most := map[string]int64{}, int64(0)
	weights, _ := weigh(members)
	for i, m := range members {
		loads[domainOf(i)] += weights[m.id]
		most = max(most, loads[domainOf(i)])
	}
	return most
}

// optimum tries every way to put the members into n domains.
func optimum(members []member, n int) int64 {
	weights, _ := weigh(members)
	loads := make([]int64, n)
	best := int64(math.MaxInt64)
	var try func(i int, most int64)
	try = func(i int, most int64) {
		if most >= best {
			return
		}
		if i == len(members) {
			best = most
			return
		}
		for d := range loads {
			loads[d] += weights[members[i].id]
			try(i+1, max(most, loads[d]))
			loads[d] -= weights[members[i].id]
			if loads[d] == 0 {
				break // the empty domains are all alike
			}
		}
	}
	try(0, 0)
	return best
}

func drawMembers(t *rapid.T) []member {
	members := make([]member, rapid.IntRange(1, 9).Draw(t, "members"))
	for i := range members {
		members[i] = member{
			id: types.UID(fmt.Sprint(i)), weight: rapid.Int64Range(1, 4).Draw(t, "weight"),
			owned: rapid.SampledFrom([]int64{0, 0, 1, 10, 50, 100, 101, 333, 1000}).Draw(t, "owned"),
		}
	}
	return members
}

// The worst zone is within one member of the best that can be, whatever order the members come in and however many nodes the
// zones have; and in no zone is a node above another by more than a member.
func TestSpreadIsWithinOneMemberOfTheOptimum(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		members := drawMembers(t)
		zones := rapid.SliceOfN(rapid.IntRange(1, 5), 2, 4).Draw(t, "nodes in zones")
		w := newWorld(zones...)
		placed := w.placeAll(members, func(n int) int { return rapid.IntRange(0, n-1).Draw(t, "which") })
		weights, total := weigh(members)
		var heaviest int64
		for _, weight := range weights {
			heaviest = max(heaviest, weight)
		}
		got := worst(members, func(i int) string { return w.zoneOf[placed[i]] })
		best := optimum(members, len(zones))
		rounding := total/million + 1 // shares are compared in millionths
		if got > best+heaviest+rounding*int64(len(members)) {
			t.Errorf("the worst zone holds %d of %d, the optimum is %d and the heaviest member %d", got, total, best, heaviest)
		}
		onNode := map[string]int64{}
		for i, m := range members {
			onNode[placed[i]] += weights[m.id]
		}
		for _, a := range w.nodes {
			for _, b := range w.nodes {
				if w.zoneOf[a] == w.zoneOf[b] && onNode[a] > onNode[b]+heaviest+rounding*int64(len(members)) {
					t.Errorf("%s holds %d, %s in the same zone %d", a, onNode[a], b, onNode[b])
				}
			}
		}
	})
}

// A place in the best domain of the first key is far above any other, and the best of the second key among those gets all.
func TestPreferencesFollowTheOrderOfKeys(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		keys := rapid.IntRange(1, 4).Draw(t, "keys")
		places := make([]place, rapid.IntRange(1, 12).Draw(t, "places"))
		costs := map[string]int64{}
		for i := range places {
			domain := ""
			for range keys {
				domain += "/" + fmt.Sprint(rapid.IntRange(0, 2).Draw(t, "domain"))
				if _, ok := costs[domain]; !ok {
					costs[domain] = rapid.Int64Range(0, 5).Draw(t, "cost")
				}
				places[i].domains = append(places[i].domains, domain)
				places[i].costs = append(places[i].costs, costs[domain])
			}
		}
		best := slices.MinFunc(places, func(a, b place) int { return slices.Compare(a.costs, b.costs) })
		scores := preferences(places)
		for i, p := range places {
			switch {
			case scores[i] < 0 || scores[i] > maxScore:
				t.Errorf("the score is %d", scores[i])
			case slices.Equal(p.costs, best.costs) && scores[i] != maxScore:
				t.Errorf("the best place %v scores %d", p, scores[i])
			case p.costs[0] != best.costs[0] && keys > 1 && scores[i] > 63:
				t.Errorf("%v scores %d, and %v is in a better domain of the first key", p, scores[i], best)
			case p.costs[0] != best.costs[0] && keys == 1 && scores[i] > 50:
				t.Errorf("%v scores %d, and %v is better", p, scores[i], best)
			}
		}
	})
}

// A pod of the old revision keeps its successor from nothing, except where all else is equal.
func TestOldRevisionsGiveWay(t *testing.T) {
	pod := func(id, revision string) member {
		return member{id: types.UID(id), family: "ReplicaSet/web", revision: revision, weight: 1}
	}
	next := pod("next", "new")
	old1, old2, new1, other := pod("old-1", "old"), pod("old-2", "old"), pod("new-1", "new"), member{id: "other", weight: 1}
	for _, c := range []struct {
		name        string
		a, b        []member
		prefersA    bool
		indifferent bool
	}{
		{"two old ones against a new one", []member{old1, old2}, []member{new1}, true, false},
		{"old ones decide where all else is equal", []member{}, []member{old1}, true, false},
		{"pods of another workload stay", []member{old1, old2}, []member{other}, true, false},
		{"the same on both sides", []member{old1}, []member{old2}, false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newSpread(next, append(append([]member{next}, c.a...), c.b...))
			for _, m := range c.a {
				s.count("zone", "a", m, 1)
			}
			for _, m := range c.b {
				s.count("zone", "b", m, 1)
			}
			a, b := s.cost("zone", "a"), s.cost("zone", "b")
			if (a < b) != c.prefersA || (a == b) != c.indifferent {
				t.Errorf("a costs %d, b costs %d", a, b)
			}
		})
	}
}

func TestLimit(t *testing.T) {
	pods := func(n int) []member {
		out := make([]member, n)
		for i := range out {
			out[i] = member{id: types.UID(fmt.Sprint(i)), weight: 1}
		}
		return out
	}
	for _, c := range []struct {
		name    string
		members int // the first of them is being placed
		there   int
		limit   float64
		refused bool
	}{
		{"the first member is let in anywhere", 1, 0, 0.1, false},
		{"the second goes elsewhere", 2, 1, 0.4, true},
		{"two of five are two fifths", 5, 1, 0.4, false},
		{"three of five are more", 5, 2, 0.4, true},
		{"members without a node count in the whole", 10, 3, 0.4, false},
		{"everything may be lost", 3, 2, 1, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			members := pods(c.members)
			s := newSpread(members[0], members)
			for _, m := range members[1 : 1+c.there] {
				s.count("zone", "a", m, 1)
			}
			if got := s.refused("zone", "a", c.limit); got != c.refused {
				t.Errorf("refused: %t, want %t", got, c.refused)
			}
			if s.refused("zone", "b", c.limit) {
				t.Error("an empty domain refuses")
			}
		})
	}
}

// A rolling update never stops at the limit: with a surge of one, each new pod finds a place while the old ones are there.
func TestRollingUpdatesPassTheLimit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		replicas := rapid.IntRange(1, 9).Draw(t, "replicas")
		// What a spread over three zones can keep.
		limit := float64((replicas+2)/3) / float64(replicas)
		zones := []string{"a", "b", "c"}
		at := map[types.UID]string{}
		var alive []member
		place := func(m member) {
			s := newSpread(m, alive)
			for _, o := range alive {
				if zone, ok := at[o.id]; ok {
					s.count("zone", zone, o, 1)
				}
			}
			free := slices.DeleteFunc(slices.Clone(zones), func(z string) bool { return s.refused("zone", z, limit) })
			if len(free) == 0 {
				t.Fatalf("%s fits in no zone: %v", m.id, at)
			}
			at[m.id] = slices.MinFunc(free, func(x, y string) int { return cmp.Compare(s.cost("zone", x), s.cost("zone", y)) })
		}
		pod := func(revision string, i int) member {
			return member{id: types.UID(fmt.Sprint(revision, i)), family: "ReplicaSet/web", revision: revision, weight: 1}
		}
		for i := range replicas {
			alive = append(alive, pod("v1-", i))
		}
		for _, m := range alive {
			place(m)
		}
		for i := range replicas {
			next := pod("v2-", i)
			alive = append(alive, next)
			place(next)
			gone := rapid.IntRange(0, replicas-i-1).Draw(t, "which old one goes")
			for j, m := range alive {
				if m.revision == "v1-" {
					if gone == 0 {
						alive = slices.Delete(alive, j, j+1)
						delete(at, m.id)
						break
					}
					gone--
				}
			}
		}
		in := map[string]int{}
		for _, m := range alive {
			in[at[m.id]]++
		}
		for zone, n := range in {
			if n > (replicas+2)/3 {
				t.Errorf("zone %s has %d of %d members after the update", zone, n, replicas)
			}
		}
	})
}
