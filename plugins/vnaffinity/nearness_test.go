package vnaffinity

import (
	"fmt"
	"math"
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
