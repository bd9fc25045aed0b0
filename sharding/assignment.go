package sharding

import (
	"cmp"
	"container/heap"
	"hash/crc32"
	"slices"
	"strconv"
)

// A Placement tells for each Virtual Node, by its number, the ID of the member that has it, "" for nobody.
type Placement []string

// A Candidate is a member in the eyes of an Assignment.
type Candidate struct {
	// ID is the member's name, stable over its restarts.
	ID string
	// Weight is the member's share relative to the others'. Zero means 1.
	Weight int
	// Keeps is whether the member may keep what it has.
	Keeps bool
	// Receives is whether the member may be given what is to move.
	Receives bool
	// Pulls is whether others give up something so that the member gets its share. A member that receives but does
	// not pull takes over what has to move in any case: during a rolling update, that of the member it replaces.
	Pulls bool
}

func (c Candidate) weight() int { return max(c.Weight, 1) }

// An Assignment is the second level of the two-level hash: it maps Virtual Nodes to members.
type Assignment interface {
	// Assign returns who should have each of the len(current) Virtual Nodes. current is who has it, or has been
	// promised it, now. A member that neither keeps nor receives gets nothing. If nobody receives, a Virtual Node
	// stays where it may be kept and is nobody's otherwise.
	//
	// The result depends on the arguments alone, not on the order of members, and is a fixed point: assigning again
	// with the result as current changes nothing. Members' IDs are distinct; current may name members that are gone.
	Assign(current Placement, members []Candidate) Placement
}

// Balanced gives each member its exact share, rounded down or up, and moves as few Virtual Nodes as that allows. With
// at least ten Units per member the busiest member has at most 1.1 times the mean.
type Balanced struct {
	// Unit is how many neighbouring Virtual Nodes always move together; zero means 1. Set to Buckets.Size it keeps
	// selectors exact.
	Unit int
}

// Assign implements Assignment.
func (b Balanced) Assign(current Placement, members []Candidate) Placement {
	return placementOf(len(current), b.assign(len(current), runsOf(current), members))
}

// assign is Assign by runs, of which there are a few however large v is.
func (b Balanced) assign(v int, current []run, members []Candidate) []run {
	unit := max(b.Unit, 1)
	t := newTable(v, current, members, unit)
	t.evict()
	t.fill()
	var next []run
	for u, owner := range t.owner {
		r := run{Range: Range{VirtualNode(u * unit), VirtualNode(min((u+1)*unit, v) - 1)}}
		if owner != nobody {
			r.id = t.members[owner].ID
		}
		next = appendRun(next, r)
	}
	return next
}

// A run is Virtual Nodes that one member has, "" for nobody.
type run struct {
	Range
	id string
}

// appendRun adds neighbours to the last run if they are the same member's.
func appendRun(runs []run, r run) []run {
	if n := len(runs); n > 0 && runs[n-1].id == r.id && runs[n-1].Last+1 == r.First {
		runs[n-1].Last = r.Last
		return runs
	}
	return append(runs, r)
}

func runsOf(p Placement) []run {
	var runs []run
	for vn, id := range p {
		runs = appendRun(runs, run{Range{VirtualNode(vn), VirtualNode(vn)}, id})
	}
	return runs
}

func placementOf(v int, runs []run) Placement {
	p := make(Placement, v)
	for _, r := range runs {
		for vn := r.First; vn <= r.Last; vn++ {
			p[vn] = r.id
		}
	}
	return p
}

const nobody = -1

// A table is Balanced's view of one assignment: units by number, members by their place in the order of IDs.
type table struct {
	members []Candidate
	owner   []int // by unit
	load    []int // by member, in units
	quota   []int // by member, in units
}

func newTable(v int, current []run, members []Candidate, unit int) *table {
	t := &table{members: sortedByID(members)}
	index := make(map[string]int, len(members))
	for i, m := range t.members {
		index[m.ID] = i
	}
	t.load = make([]int, len(members))
	t.owner = make([]int, (v+unit-1)/unit)
	for u := range t.owner {
		t.owner[u] = nobody
	}
	// A unit that was cut up, because Unit has changed, is put together at the first member that may keep it.
	for _, r := range current {
		i, ok := index[r.id]
		if !ok || !t.members[i].Keeps {
			continue
		}
		for u := int(r.First) / unit; u <= int(r.Last)/unit; u++ {
			if t.owner[u] == nobody {
				t.owner[u] = i
				t.load[i]++
			}
		}
	}
	t.setQuotas()
	return t
}

// setQuotas divides the units by weight. What members keep that may not receive is theirs and is divided no more. As
// long as somebody receives that does not pull, only what has to move is divided.
func (t *table) setQuotas() {
	t.quota = slices.Clone(t.load)
	var sharing []int
	units, waits := 0, false
	for _, owner := range t.owner {
		if owner == nobody {
			units++
		}
	}
	for i, m := range t.members {
		if m.Receives {
			sharing = append(sharing, i)
			units += t.load[i]
			waits = waits || !m.Pulls
		}
	}
	switch {
	case len(sharing) == 0:
	case waits:
		t.level(sharing)
	default:
		t.share(sharing, units)
	}
}

// share gives every member units*weight/total, and the units left over by rounding to the largest remainders: among
// equals to members that have more than the rest leaves them, so that they need not give one up.
func (t *table) share(sharing []int, units int) {
	total := 0
	for _, i := range sharing {
		total += t.members[i].weight()
	}
	rest := units
	remainder := make(map[int]int, len(sharing))
	for _, i := range sharing {
		w := units * t.members[i].weight()
		t.quota[i] = w / total
		remainder[i] = w % total
		rest -= t.quota[i]
	}
	keeps := func(i int) int { return min(t.load[i]-t.quota[i], 1) }
	order := slices.Clone(sharing)
	slices.SortFunc(order, func(a, b int) int {
		return cmp.Or(cmp.Compare(remainder[b], remainder[a]), cmp.Compare(keeps(b), keeps(a)), cmp.Compare(a, b))
	})
	for _, i := range order[:rest] {
		t.quota[i]++
	}
}

// level takes nothing from anybody and hands every free unit to the member that has least for its weight; among equals to
// the one that had least before: in a rolling update the others may be about to be replaced, too.
func (t *table) level(sharing []int) {
	h := &leastFirst{table: t, members: slices.Clone(sharing)}
	heap.Init(h)
	for _, owner := range t.owner {
		if owner == nobody {
			t.quota[h.members[0]]++
			heap.Fix(h, 0)
		}
	}
}

// leastFirst is a heap of members by quota per weight.
type leastFirst struct {
	*table
	members []int
}

func (h *leastFirst) Len() int      { return len(h.members) }
func (h *leastFirst) Swap(i, j int) { h.members[i], h.members[j] = h.members[j], h.members[i] }
func (h *leastFirst) Push(any)      {}
func (h *leastFirst) Pop() any      { return nil }
func (h *leastFirst) Less(i, j int) bool {
	a, b := h.members[i], h.members[j]
	return cmp.Or(cmp.Compare(h.quota[a]*h.table.members[b].weight(), h.quota[b]*h.table.members[a].weight()),
		cmp.Compare(h.load[a], h.load[b]),
		cmp.Compare(a, b)) < 0
}

// evict frees what members have beyond their quota, from the end of their ranges, so that runs move as runs.
func (t *table) evict() {
	for u := len(t.owner) - 1; u >= 0; u-- {
		if i := t.owner[u]; i != nobody && t.load[i] > t.quota[i] {
			t.owner[u] = nobody
			t.load[i]--
		}
	}
}

// fill gives the free units to those below their quota, one member after the other.
func (t *table) fill() {
	next := 0
	for u, owner := range t.owner {
		if owner != nobody {
			continue
		}
		for next < len(t.members) && t.load[next] >= t.quota[next] {
			next++
		}
		if next == len(t.members) {
			return
		}
		t.owner[u] = next
		t.load[next]++
	}
}

// ConsistentHash is the paper's second level (sections 5.3.1 and 6.3.1): members stand on a ring of CRC32 values, each
// at Replicas points, and a Virtual Node belongs to the first point at or after its own. It is here for comparison:
// the ring moves no more than the members that come and go require, but leaves their shares uneven.
type ConsistentHash struct {
	// Replicas is at how many points a member of weight 1 stands; zero means DefaultReplicas.
	Replicas int
}

// DefaultReplicas is the number of points on the ring for a member of weight 1.
const DefaultReplicas = 100

// Assign implements Assignment. The ring knows no grace: a member that receives also pulls.
func (c ConsistentHash) Assign(current Placement, members []Candidate) Placement {
	next := make(Placement, len(current))
	keeps := make(map[string]bool)
	for _, m := range members {
		keeps[m.ID] = m.Keeps
	}
	ring := c.ring(members)
	for vn := range next {
		if len(ring) > 0 {
			next[vn] = owner(ring, crc32.ChecksumIEEE([]byte(strconv.Itoa(vn))))
		} else if keeps[current[vn]] {
			next[vn] = current[vn]
		}
	}
	return next
}

// A point is one of a member's places on the ring.
type point struct {
	hash uint32
	id   string
}

func (c ConsistentHash) ring(members []Candidate) []point {
	replicas := cmp.Or(c.Replicas, DefaultReplicas)
	var ring []point
	for _, m := range members {
		if !m.Receives {
			continue
		}
		for i := range replicas * m.weight() {
			ring = append(ring, point{crc32.ChecksumIEEE([]byte(m.ID + "-" + strconv.Itoa(i))), m.ID})
		}
	}
	slices.SortFunc(ring, func(a, b point) int {
		return cmp.Or(cmp.Compare(a.hash, b.hash), cmp.Compare(a.id, b.id))
	})
	return ring
}

func owner(ring []point, hash uint32) string {
	i, _ := slices.BinarySearchFunc(ring, hash, func(p point, h uint32) int { return cmp.Compare(p.hash, h) })
	return ring[i%len(ring)].id
}

func sortedByID(members []Candidate) []Candidate {
	sorted := slices.Clone(members)
	slices.SortFunc(sorted, func(a, b Candidate) int { return cmp.Compare(a.ID, b.ID) })
	return sorted
}
