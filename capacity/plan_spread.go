package capacity

import (
	"cmp"
	"fmt"
	"slices"
)

// label is a node label that a placement is confined to.
type label struct{ key, value string }

// where confines a placement: to nodes with all the labels, or to one host.
type where struct {
	labels []label
	host   *host
}

func (w where) with(key, value string) where {
	return where{labels: append(slices.Clone(w.labels), label{key, value}), host: w.host}
}

func (w where) fixes(key string) bool {
	return slices.ContainsFunc(w.labels, func(l label) bool { return l.key == key })
}

func (w where) allows(sh *shape) bool {
	for _, l := range w.labels {
		if sh.labels[l.key] != l.value {
			return false
		}
	}
	return true
}

// put places up to want pods of d within w and returns how many it placed. Free room comes first, then machines that are
// being given back, then new nodes.
func (p *planner) put(d *demand, want int32, w where) int32 {
	if want <= 0 {
		return 0
	}
	for _, spread := range d.hard {
		if !w.fixes(spread.TopologyKey) {
			return p.putSpread(d, want, w, spread)
		}
	}
	if d.hostSkew > 0 {
		return p.putEven(d, want, w)
	}
	n := p.fill(d, want, w, false)
	n += p.fill(d, want-n, w, true)
	if w.host == nil {
		n += p.launch(d, want-n, w)
	}
	return n
}

// putSpread distributes pods over the domains of a DoNotSchedule constraint. Every domain in which a node for d could stand
// counts, whether or not it has a node or stock now: the scheduler would refuse to go beyond the skew as soon as one
// appears there, and with a single domain the constraint would be met only in name.
func (p *planner) putSpread(d *demand, want int32, w where, spread Spread) int32 {
	key := spread.TopologyKey
	values := p.domains(d, w, key)
	if len(values) == 0 {
		return 0
	}
	lo, hi := make([]int64, len(values)), make([]int64, len(values))
	owned := map[string]int32{}
	for i, v := range values {
		mark := p.mark()
		lo[i] = int64(d.counts[key][v])
		hi[i] = lo[i] + int64(p.put(d, want, w.with(key, v)))
		for _, c := range p.journal[mark:] {
			if c.kind == changePlace && c.host.machine != nil {
				owned[v] += c.n
			}
		}
		p.undo(mark)
	}
	order := make([]int, len(values))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(owned[values[b]], owned[values[a]]) })
	few := int(spread.MinDomains) > len(values)
	mark := p.mark()
	for range values {
		target := levels(lo, hi, order, int64(want), int64(spread.MaxSkew), few)
		placed, exact := int32(0), true
		for i, v := range values {
			n := int32(target[i] - lo[i])
			got := p.put(d, n, w.with(key, v))
			if placed += got; got < n {
				hi[i], exact = lo[i]+int64(got), false
			}
		}
		if exact {
			if placed < want {
				d.explainSpread(spread, values, hi, few)
			}
			return placed
		}
		p.undo(mark)
	}
	return 0
}

func (d *demand) explainSpread(spread Spread, values []string, hi []int64, few bool) {
	if few {
		d.why = fmt.Sprintf("spread over %s wants %d domains and there are %d",
			spread.TopologyKey, spread.MinDomains, len(values))
		return
	}
	least := 0
	for i := range hi {
		if hi[i] < hi[least] {
			least = i
		}
	}
	d.why = fmt.Sprintf("spread over %s with a skew of at most %d: %s has room for %d in total",
		spread.TopologyKey, spread.MaxSkew, values[least], hi[least])
}

// domains lists the values of key on nodes that could carry d within w.
func (p *planner) domains(d *demand, w where, key string) []string {
	values := map[string]bool{}
	add := func(sh *shape) {
		if v, ok := sh.labels[key]; ok && w.allows(sh) && sh.acceptsPods(d) && fitCount(sh.room, d) > 0 {
			values[v] = true
		}
	}
	for _, h := range d.site.hosts {
		if !h.reclaiming() {
			add(h.shape)
		}
	}
	for i := range p.slots {
		add(p.shapeOfSlot(d.site, i))
	}
	return sortedKeys(values)
}

// levels says how many pods each domain should have, given that it has lo and can take hi: as even as can be, in total at
// most want more, and nowhere more than skew above the emptiest. order decides who gets the odd ones.
func levels(lo, hi []int64, order []int, want, skew int64, few bool) []int64 {
	floor, top := int64(0), int64(0)
	for i := range hi {
		if i == 0 || hi[i] < floor {
			floor = hi[i]
		}
		top = max(top, hi[i])
	}
	if few {
		floor = 0
	}
	at := func(i int, level int64) int64 { return max(lo[i], min(level, hi[i], floor+skew)) }
	need := func(level int64) (sum int64) {
		for i := range lo {
			sum += at(i, level) - lo[i]
		}
		return sum
	}
	low, high := int64(0), min(top, floor+skew)
	for low < high {
		if mid := (low + high + 1) / 2; need(mid) <= want {
			low = mid
		} else {
			high = mid - 1
		}
	}
	target := make([]int64, len(lo))
	for i := range target {
		target[i] = at(i, low)
	}
	for rest, k := want-need(low), 0; rest > 0 && k < len(order); k++ {
		if i := order[k]; at(i, low+1) > target[i] {
			target[i]++
			rest--
		}
	}
	return target
}

// putEven distributes pods over nodes under a DoNotSchedule constraint by host name. Nodes that are full of other pods are
// domains too and keep the level down.
func (p *planner) putEven(d *demand, want int32, w where) int32 {
	var lo, hi []int64
	var hosts, spare []*host
	for _, h := range d.site.hosts {
		if h.reclaiming() && d.site.room(h, d) > 0 && w.allows(h.shape) && (w.host == nil || w.host == h) {
			spare = append(spare, h)
		}
	}
	kept := 0
	total := func() (sum int64, few bool) {
		floor := int64(-1)
		hosts, lo, hi = hosts[:0], lo[:0], hi[:0]
		for _, h := range d.site.hosts {
			if h.reclaiming() && !slices.Contains(spare[:kept], h) && h.podsOf(d) == 0 || !w.allows(h.shape) || w.host != nil && w.host != h || !h.shape.acceptsPods(d) {
				continue
			}
			has, room := int64(h.podsOf(d)), int64(d.site.room(h, d))
			if d.avoidsSettled && h.settled() {
				room = 0
			}
			hosts, lo, hi = append(hosts, h), append(lo, has), append(hi, has+room)
			if floor < 0 || has+room < floor {
				floor = has + room
			}
		}
		few = int(d.hostMin) > len(hosts)
		if few {
			floor = 0
		}
		for i := range hosts {
			sum += max(0, min(hi[i], floor+int64(d.hostSkew))-lo[i])
		}
		return sum, few
	}
	sum, few := total()
	for ; kept < len(spare) && sum < int64(want); sum, few = total() {
		kept++
	}
	for w.host == nil && (sum < int64(want) || few) {
		per := int32(-1)
		if !few {
			per = int32(min(int64(manyPods), slices.Min(append(slices.Clone(hi), int64(manyPods)))+int64(d.hostSkew)))
		}
		o, ok := p.choose(d, max(1, want-saturate(sum)), w, per)
		if !ok {
			break
		}
		n := o.nodes
		if few {
			n = 1
		}
		for range n {
			p.add(d.site, o.slot)
		}
		sum, few = total()
	}
	order := make([]int, len(hosts))
	for i := range order {
		order[i] = i
	}
	target := levels(lo, hi, order, int64(want), int64(d.hostSkew), few)
	placed := int32(0)
	for i, h := range hosts {
		n := int32(target[i] - lo[i])
		if n > 0 {
			n = min(n, d.site.room(h, d))
			p.place(d.site, h, d, n)
			placed += n
		}
	}
	return placed
}
