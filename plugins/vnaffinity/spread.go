package vnaffinity

import (
	"cmp"
	"math"
	"slices"

	"k8s.io/apimachinery/pkg/types"
)

// A member is a pod of a WatchGroup that will stay: it is neither terminating nor leaving its group.
type member struct {
	id types.UID
	// family is the workload that the pod is a replica of, and revision the version of its template; "" where there is none.
	family, revision string
	// weight is the member's share relative to the others', as its WatchGroup sees it; at least 1.
	weight int64
	// owned is how many Virtual Nodes it owns or is being given. 0: none yet.
	owned int64
}

// replaces says whether m is of a newer or older version of the same workload: then one of the two is about to go.
func (m member) replaces(o member) bool {
	return m.family != "" && m.family == o.family && m.revision != o.revision
}

// unit is the weight of a Virtual Node: members that have none yet are weighed in parts of one.
const unit = 1000

// weigh returns what each member owns or is about to get, in thousandths of a Virtual Node, and the sum. A member without
// Virtual Nodes weighs what those that have some own on average, by weight: once it has joined, an assignment makes that so,
// and takes from all of them alike. Where nobody has any, members weigh by weight alone.
func weigh(members []member) (map[types.UID]int64, int64) {
	var owned, weight int64
	for _, m := range members {
		if m.owned > 0 {
			owned += m.owned
			weight += m.weight
		}
	}
	weights := make(map[types.UID]int64, len(members))
	var total int64
	for _, m := range members {
		w := m.weight * unit
		switch {
		case m.owned > 0:
			w = m.owned * unit
		case owned > 0:
			w = max(m.weight*unit*owned/weight, 1)
		}
		weights[m.id] = w
		total += w
	}
	return weights, total
}

// A load is what a failure domain holds of a group.
type load struct {
	// staying is the weight of the members that stay there, as the pod that is being placed sees it: without those that it
	// replaces, or that replace it.
	staying int64
	// all is the weight of all members there.
	all int64
	// members counts those that stay.
	members int
}

// A spread is how the members of a group stand in failure domains, as seen by one of them that is being placed.
//
// During a rolling update the pods of two revisions overlap. Those of the other revision are about to go (or, if the update
// is rolled back, this one is), so that they must not keep the pod from a place for ever: they decide only between domains
// that are otherwise equally good. Two revisions that both stay, as of a canary, are so spread each by itself.
type spread struct {
	self    member
	weights map[types.UID]int64
	own     int64 // weight of self
	total   int64 // of all members, placed or not
	loads   map[string]map[string]load
}

// newSpread starts a spread with nobody placed. self has to be among the members.
func newSpread(self member, members []member) *spread {
	s := &spread{self: self, loads: map[string]map[string]load{}}
	s.weights, s.total = weigh(members)
	s.own = s.weights[self.id]
	return s
}

// count adds (by 1) or removes (by -1) a member from a domain of a key.
func (s *spread) count(key, domain string, m member, by int) {
	domains := s.loads[key]
	if domains == nil {
		domains = map[string]load{}
		s.loads[key] = domains
	}
	w, ok := s.weights[m.id]
	if !ok {
		w = s.own // one that came up after the weights were taken
	}
	l := domains[domain]
	l.all += int64(by) * w
	if !s.self.replaces(m) {
		l.staying += int64(by) * w
		l.members += by
	}
	domains[domain] = l
}

// clone returns a copy whose counts can be changed without changing s.
func (s *spread) clone() *spread {
	c := *s
	c.loads = make(map[string]map[string]load, len(s.loads))
	for key, domains := range s.loads {
		c.loads[key] = make(map[string]load, len(domains))
		for domain, l := range domains {
			c.loads[key][domain] = l
		}
	}
	return &c
}

// million is the scale of shares.
const million = 1_000_000

func (s *spread) share(weight int64) int64 { return weight * million / max(s.total, 1) }

// lost is the share of the group's Virtual Nodes, in millionths, that would be lost with the domain if the pod were there.
func (s *spread) lost(key, domain string) int64 {
	return s.share(s.loads[key][domain].staying + s.own)
}

// cost orders domains: by what would be lost with them, then by what would be lost while those that are about to go are
// there.
func (s *spread) cost(key, domain string) int64 {
	l := s.loads[key][domain]
	return s.share(l.staying+s.own)<<21 + s.share(l.all+s.own)
}

// refused says whether the pod would break the limit by its place. A member that is alone in its domain never does: what it
// owns is lost with any domain that it is in, and no other place would change that.
func (s *spread) refused(key, domain string, limit float64) bool {
	l := s.loads[key][domain]
	return l.members > 0 && float64(l.staying+s.own) > limit*float64(s.total)*(1+1e-9)
}

// A place is a node in the eyes of a spread.
type place struct {
	// domains are the node's, by key, the most important key first.
	domains []string
	// costs are those of the domains.
	costs []int64
}

// maxScore is the framework's best score.
const maxScore = 100

// preferences returns a score from 0 to 100 for each place. The costs of the first key count most: a place in its best domain
// is always above any other, and so on with the next key among the places of one domain. Of what a key has to give, the best
// domains get all and the others at most half, by their cost.
func preferences(places []place) []int64 {
	scores := make([]float64, len(places))
	all := make([]int, len(places))
	for i := range places {
		all[i] = i
	}
	prefer(places, all, 0, maxScore, scores)
	out := make([]int64, len(places))
	for i, score := range scores {
		out[i] = int64(math.Round(score))
	}
	return out
}

// prefer divides points among the places with those indexes, which share their domains of all keys before the given one.
func prefer(places []place, indexes []int, key int, points float64, scores []float64) {
	if len(indexes) == 0 || key == len(places[indexes[0]].costs) {
		return
	}
	own := points
	if key+1 < len(places[indexes[0]].costs) {
		own = points * 3 / 4
	}
	cost := func(i int) int64 { return places[i].costs[key] }
	byCost := func(a, b int) int { return cmp.Compare(cost(a), cost(b)) }
	least := cost(slices.MinFunc(indexes, byCost))
	most := cost(slices.MaxFunc(indexes, byCost))
	inDomain := map[string][]int{}
	for _, i := range indexes {
		if cost(i) == least {
			scores[i] += own
		} else {
			scores[i] += own / 2 * float64(most-cost(i)) / float64(most-least)
		}
		domain := places[i].domains[key]
		inDomain[domain] = append(inDomain[domain], i)
	}
	for _, same := range inDomain {
		prefer(places, same, key+1, points-own, scores)
	}
}
