package vnaffinity

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/drover-sh/drover/sharding"
)

func drawDomains(t *rapid.T) []string {
	return rapid.SliceOfNDistinct(rapid.StringMatching(`[a-z]{1,6}`), 1, 12, rapid.ID[string]).Draw(t, "domains")
}

// Without one domain, everything that is not its stays where it is, in all choices, not only the first.
func TestADomainTakesOnlyWhatItPreferred(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		domains := drawDomains(t)
		vn := sharding.VirtualNode(rapid.IntRange(0, 99_999).Draw(t, "vn"))
		all := order(vn, domains)
		without := rapid.IntRange(0, len(domains)-1).Draw(t, "without")
		rest := slices.Delete(slices.Clone(domains), without, without+1)
		want := slices.DeleteFunc(slices.Clone(all), func(d string) bool { return d == domains[without] })
		if got := order(vn, rest); !slices.Equal(got, want) {
			t.Errorf("with %s: %v; without: %v", domains[without], all, got)
		}
		slices.Reverse(domains)
		if got := order(vn, domains); !slices.Equal(got, all) {
			t.Errorf("the order of the arguments matters: %v, %v", all, got)
		}
	})
}

func TestANewDomainTakesItsShare(t *testing.T) {
	const v = 10_000
	for n := 1; n <= 20; n++ {
		domains := make([]string, n+1)
		for i := range domains {
			domains[i] = fmt.Sprintf("rack-%02d", i)
		}
		moved := 0
		for vn := range sharding.VirtualNode(v) {
			if order(vn, domains)[0] != order(vn, domains[:n])[0] {
				moved++
			}
		}
		want := float64(v) / float64(n+1)
		if sigma := math.Sqrt(want); math.Abs(float64(moved)-want) > 4*sigma {
			t.Errorf("from %d to %d domains: %d of %d move, want about %.0f", n, n+1, moved, v, want)
		}
	}
}

// There is always room somewhere, and no domain is above the bound unless a fair part, rounded up, or the least asks for it.
func TestCapacity(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := bound{
			factor: rapid.Float64Range(1, 3).Draw(t, "factor"),
			least:  rapid.IntRange(0, 20).Draw(t, "least"),
		}
		total := rapid.IntRange(1, 10_000).Draw(t, "total")
		parts := rapid.SliceOfN(rapid.Int64Range(1, 1000), 1, 20).Draw(t, "parts")
		var whole int64
		for _, p := range parts {
			whole += p
		}
		room := 0
		for _, p := range parts {
			c := b.capacity(total, p, whole)
			fair := float64(total) * float64(p) / float64(whole)
			if float64(c) > max(b.factor*fair+1e-6, math.Ceil(fair), float64(b.least)) {
				t.Errorf("a part of %d of %d of %d pods may hold %d", p, whole, total, c)
			}
			room += c
		}
		if room < total {
			t.Errorf("there is room for %d of %d", room, total)
		}
	})
	for _, c := range []struct{ total, domains, want int }{
		{480, 12, 50}, {5000, 12, 520}, {5000, 13, 480}, {12, 12, 1}, {13, 12, 2}, {1, 3, 1},
	} {
		if got := (bound{factor: 1.25}).capacity(c.total, 1, int64(c.domains)); got != c.want {
			t.Errorf("%d pods in %d domains: %d in each, want %d", c.total, c.domains, got, c.want)
		}
	}
}

func TestNearness(t *testing.T) {
	for _, c := range []struct {
		name      string
		standings []int64
		want      []int64
	}{
		{"first, second, third", []int64{0, 1, 2}, []int64{100, 25, 1}},
		{"the first choice has no node here", []int64{3, 5}, []int64{100, 1}},
		{"full ones get nothing", []int64{full, 4, full + 7}, []int64{0, 100, 0}},
		{"all alike", []int64{2, 2}, []int64{100, 100}},
		{"all full", []int64{full, full + 1}, []int64{0, 0}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := nearness(c.standings); !slices.Equal(got, c.want) {
				t.Errorf("%v, want %v", got, c.want)
			}
		})
	}
}

// Every pod is allotted a domain, no domain more than it may hold, and a Virtual Node is divided only where no domain has room
// for all of it. The order of the arguments does not matter.
func TestAllot(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		domains := drawDomains(t)
		pods := map[sharding.VirtualNode]int{}
		for i, n := range rapid.MapOfN(rapid.IntRange(0, 999), rapid.IntRange(1, 40), 1, 30).Draw(t, "pods") {
			pods[sharding.VirtualNode(i)] = n
		}
		total := 0
		for _, n := range pods {
			total += n
		}
		capacity := bound{factor: rapid.Float64Range(1, 2).Draw(t, "factor")}.capacity(total, 1, int64(len(domains)))
		choices := func(vn sharding.VirtualNode) []string { return order(vn, domains) }
		vns := slices.Collect(maps.Keys(pods))
		byRank(vns)
		again := slices.Clone(vns)
		slices.Reverse(again)
		if byRank(again); !slices.Equal(vns, again) {
			t.Errorf("the rank is %v or %v", vns, again)
		}
		held := map[string]int{}
		for _, vn := range vns {
			sum, before := 0, maps.Clone(held)
			got := allot(vn, vns, pods, choices, func(string) int { return capacity })
			for d, n := range got {
				sum += n
				if held[d] += n; held[d] > capacity {
					t.Errorf("%s is to hold %d, and may hold %d", d, held[d], capacity)
				}
			}
			if sum != pods[vn] {
				t.Errorf("%d of the %d pods of %d are allotted", sum, pods[vn], vn)
			}
			first := slices.IndexFunc(choices(vn), func(d string) bool { return before[d]+pods[vn] <= capacity })
			if first >= 0 && got[choices(vn)[first]] != pods[vn] {
				t.Errorf("%d is allotted %v; %s has room for all of it", vn, got, choices(vn)[first])
			}
		}
	})
}

func TestStandings(t *testing.T) {
	in := func(domains ...string) func(string) bool {
		return func(d string) bool { return slices.Contains(domains, d) }
	}
	got := standings([]string{"a", "b", "c", "d"}, in("a", "c"), in("b", "c", "d"))
	if want := map[string]int64{"a": full, "b": 5, "c": 2, "d": 7}; !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// arrive places pods with keys in n domains as the role Objects does, in this order of arrival. Where they trickle, a pod is
// not known before it comes.
func arrive(pods, keys, n int, arrivals []int, trickle bool) []string {
	domains, b := make([]string, n), bound{factor: 1.25, least: 10}
	for i := range domains {
		domains[i] = fmt.Sprintf("rack-%02d", i)
	}
	vnOf, orders := make([]sharding.VirtualNode, keys), map[sharding.VirtualNode][]string{}
	for i := range vnOf {
		vnOf[i] = sharding.VirtualNodeOf(fmt.Sprintf("key-%03d", i), 1000)
		orders[vnOf[i]] = order(vnOf[i], domains)
	}
	ranked := slices.Collect(maps.Keys(orders))
	byRank(ranked)
	known, load, of := map[sharding.VirtualNode]int{}, map[string]int{}, map[sharding.VirtualNode]map[string]int{}
	if !trickle {
		for i := range pods {
			known[vnOf[i%keys]]++
		}
	}
	placed := make([]string, pods)
	for m, i := range arrivals {
		vn, total := vnOf[i%keys], pods
		if trickle {
			known[vn]++
			total = m + 1
		}
		if of[vn] == nil {
			of[vn] = map[string]int{}
		}
		capacity := b.capacity(total, 1, int64(n))
		allotted := allot(vn, ranked, known,
			func(vn sharding.VirtualNode) []string { return orders[vn] }, func(string) int { return capacity })
		stand := standings(orders[vn],
			func(d string) bool { return of[vn][d] < allotted[d] }, func(d string) bool { return load[d] < capacity })
		domain := slices.MinFunc(domains, func(a, b string) int { return int(stand[a] - stand[b]) })
		load[domain]++
		of[vn][domain]++
		placed[i] = domain
	}
	return placed
}

// In whatever order pods come, and whether they are all there before the first is placed or trickle in: they stay together
// under the bound. How many go elsewhere after a domain has come depends on the order, too: a thirteenth is 7.7%, and the hash
// of these keys makes it 9.6%. The rest is what could not go to its domain while that held more than its part of the few pods
// that were known then. Where all are known the order is of no consequence.
func TestEveryOrderOfArrival(t *testing.T) {
	const pods, keys = 5000, 500
	inTurn := func(*rand.Rand) []int {
		list := make([]int, pods)
		for i := range list {
			list[i] = i
		}
		return list
	}
	jittered := func(r *rand.Rand) []int {
		at := make([]float64, pods)
		for i := range at {
			at[i] = float64(i) + 30*r.Float64()
		}
		list := inTurn(r)
		slices.SortFunc(list, func(a, b int) int { return cmp.Compare(at[a], at[b]) })
		return list
	}
	shuffled := func(r *rand.Rand) []int { return r.Perm(pods) }
	byKey := func(r *rand.Rand) []int {
		var list []int
		for _, key := range r.Perm(keys) {
			for i := key; i < pods; i += keys {
				list = append(list, i)
			}
		}
		return list
	}
	for _, c := range []struct {
		name     string
		arrivals func(*rand.Rand) []int
		trickle  bool
		another  bool // the second round has another order
		most     float64
	}{
		{"all known, in turn", inTurn, false, false, 0.11},
		{"all known, shuffled, then in another order", shuffled, false, true, 0.11},
		{"all known, key by key, then in another order", byKey, false, true, 0.11},
		{"trickle in turn", inTurn, true, false, 0.12},
		{"trickle about in turn, then again", jittered, true, true, 0.12},
		{"trickle shuffled, then in the same order", shuffled, true, false, 0.12},
		{"trickle shuffled, then in another order", shuffled, true, true, 0.15},
		{"trickle key by key, then in the same order", byKey, true, false, 0.17},
		{"trickle key by key, then in another order", byKey, true, true, 0.28},
	} {
		t.Run(c.name, func(t *testing.T) {
			for seed := range uint64(2) {
				first := rand.New(rand.NewPCG(seed, 0))
				second := rand.New(rand.NewPCG(seed, 0))
				if c.another {
					second = rand.New(rand.NewPCG(seed, 1))
				}
				before := arrive(pods, keys, 12, c.arrivals(first), c.trickle)
				after := arrive(pods, keys, 13, c.arrivals(second), c.trickle)
				differ(t, before, after, localityOf(before, keys, 12), localityOf(after, keys, 13), c.most)
			}
		})
	}
}
