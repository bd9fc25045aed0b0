package vnaffinity

import (
	"cmp"
	"math"
	"slices"

	"github.com/cespare/xxhash/v2"

	"github.com/drover-sh/drover/sharding"
)

// order returns the domains in the order in which a Virtual Node prefers them, by rendezvous hashing (highest random weight):
// the second level of the hash where domains are the members. When a domain comes, each Virtual Node either prefers it to all
// others or goes on as before, so that of n+1 domains the new one takes 1/(n+1); when one goes, only what it had moves.
//
// It is not the ring of sharding.ConsistentHash, because of what a full domain hands on: on the ring all of it goes to the
// next domain, which is then full, too. Here each Virtual Node has a second choice of its own. It is not sharding.Balanced
// either, which has to know what was assigned before; this depends on nothing but its arguments.
func order(vn sharding.VirtualNode, domains []string) []string {
	type weighted struct {
		domain string
		weight uint64
	}
	list := make([]weighted, len(domains))
	for i, d := range domains {
		list[i] = weighted{d, xxhash.Sum64String(d + "\x00" + vn.LabelValue())}
	}
	slices.SortFunc(list, func(a, b weighted) int {
		return cmp.Or(cmp.Compare(b.weight, a.weight), cmp.Compare(a.domain, b.domain))
	})
	out := make([]string, len(list))
	for i, w := range list {
		out[i] = w.domain
	}
	return out
}

// A bound limits how many pods a domain gets, as in consistent hashing with bounded loads.
type bound struct {
	// factor is the multiple of a domain's fair part that it may hold; at least 1.
	factor float64
	// least is up to how many pods a domain is never full.
	least int
}

// capacity is how many of total pods a domain may hold whose fair part of them is part of whole. It is never below the fair
// part, rounded up, so that not all domains can be full, and otherwise rounded down, so that it is never above factor times
// the fair part.
func (b bound) capacity(total int, part, whole int64) int {
	if part <= 0 || whole <= 0 {
		return b.least
	}
	fair := float64(total) * float64(part) / float64(whole)
	const tiny = 1e-9 // what floating point loses
	return max(int(math.Ceil(fair-tiny)), int(math.Floor(b.factor*fair+tiny)), b.least)
}

// allot says how many of a Virtual Node's pods each domain is to hold, if pods tells how many there are of each Virtual Node,
// on a node or without one. What does not fit under the bound is decided by Virtual Node and in an order that never changes,
// not by who came first: the Virtual Nodes are taken one after the other, each goes as a whole to the first of its choices
// that has room for it, and only one that finds none is divided. So two rounds of the same pods hand on the same keys, in
// whatever order the pods come; and when a domain comes, those that overflowed go on doing so.
//
// vns are by rank, those that have pods among them. choices returns a Virtual Node's domains in its order, capacity what a
// domain may hold.
func allot(
	vn sharding.VirtualNode, vns []sharding.VirtualNode, pods map[sharding.VirtualNode]int,
	choices func(sharding.VirtualNode) []string, capacity func(domain string) int,
) map[string]int {
	room := map[string]int{}
	left := func(domain string) int {
		n, ok := room[domain]
		if !ok {
			n = capacity(domain)
			room[domain] = n
		}
		return n
	}
	got := map[string]int{}
	for _, other := range vns {
		n, list := pods[other], choices(other)
		if i := slices.IndexFunc(list, func(d string) bool { return left(d) >= n }); i >= 0 {
			list = list[i:]
		}
		for _, d := range list {
			if n == 0 {
				break
			}
			if part := min(n, left(d)); part > 0 {
				room[d] -= part
				n -= part
				if other == vn {
					got[d] = part
				}
			}
		}
		if other == vn {
			break
		}
	}
	return got
}

// byRank sorts Virtual Nodes into the order in which allot takes them: that of a hash, because neighbours by number may have
// something in common.
func byRank(vns []sharding.VirtualNode) {
	rank := make(map[sharding.VirtualNode]uint64, len(vns))
	for _, vn := range vns {
		rank[vn] = xxhash.Sum64String(vn.LabelValue())
	}
	slices.SortFunc(vns, func(a, b sharding.VirtualNode) int {
		return cmp.Or(cmp.Compare(rank[a], rank[b]), cmp.Compare(a, b))
	})
}

// full marks the standing of a domain that holds as many pods as it may.
const full = 1 << 40

// standings says how far down each domain stands for a pod: 0 is the first choice. Those that are to hold more pods of its
// Virtual Node come first, then others that have room, and domains without room after all.
func standings(choices []string, planned, hasRoom func(domain string) bool) map[string]int64 {
	out := make(map[string]int64, len(choices))
	for i, d := range choices {
		out[d] = int64(i)
		switch {
		case !hasRoom(d):
			out[d] += full
		case !planned(d):
			out[d] += int64(len(choices))
		}
	}
	return out
}

// nearness returns a score from 0 to 100 for each standing: 100 for the best one that has room, at most half of it for the
// others with room, in their order, and 0 for those without.
func nearness(standings []int64) []int64 {
	best, worst := int64(full), int64(-1)
	for _, s := range standings {
		if s < full {
			best, worst = min(best, s), max(worst, s)
		}
	}
	scores := make([]int64, len(standings))
	for i, s := range standings {
		switch {
		case s >= full:
		case s == best:
			scores[i] = maxScore
		default:
			scores[i] = 1 + (maxScore/2-1)*(worst-s)/(worst-best)
		}
	}
	return scores
}
