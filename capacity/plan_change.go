package capacity

import "slices"

// change is one step of a plan in the making. Steps are journalled, so that what was only tried can be taken back: a gang
// that does not fit as a whole, a domain that turns out too small.
type change struct {
	site   *site
	host   *host
	demand *demand
	n      int32
	kind   changeKind
}

type changeKind int8

const (
	changePlace changeKind = iota
	changeAdd
	changePromise
)

func (p *planner) mark() int { return len(p.journal) }

// undo takes back everything since the mark, last first.
func (p *planner) undo(mark int) {
	for i := len(p.journal) - 1; i >= mark; i-- {
		switch c := p.journal[i]; c.kind {
		case changePlace:
			c.site.apply(c.host, c.demand, -c.n)
		case changeAdd:
			c.site.hosts = c.site.hosts[:len(c.site.hosts)-1]
			p.slots[c.host.slot].stock++
		case changePromise:
			c.demand.promised -= c.n
		}
	}
	p.journal = p.journal[:mark]
}

// place puts n pods of d on a host; a negative n takes them off.
func (p *planner) place(s *site, h *host, d *demand, n int32) {
	if n == 0 {
		return
	}
	s.apply(h, d, n)
	p.journal = append(p.journal, change{site: s, host: h, demand: d, n: n, kind: changePlace})
}

func (s *site) apply(h *host, d *demand, n int32) {
	take(h.free, d, n)
	h.pods += int64(n)
	d.placed += n
	i := slices.IndexFunc(h.loads, func(l load) bool { return l.demand == d })
	if i < 0 {
		h.loads = append(h.loads, load{d, 0})
		i = len(h.loads) - 1
	}
	if h.loads[i].pods += n; h.loads[i].pods == 0 {
		h.loads = slices.Delete(h.loads, i, i+1)
	}
	for key, values := range d.counts {
		values[h.shape.labels[key]] += n
	}
	for _, a := range d.domainAnti {
		s.anti[antiDomain{a.TopologyKey, a.Set, h.shape.labels[a.TopologyKey]}] += n
	}
	if len(d.unit.same) > 0 {
		d.unit.at[h.shape.together(d.unit)] += n
	}
}

// add brings a node of the slot into the plan.
func (p *planner) add(s *site, i int) *host {
	sh := p.shapeOfSlot(s, i)
	h := &host{slot: i, shape: sh, cost: p.slots[i].cost, free: slices.Clone(sh.room)}
	p.slots[i].stock--
	s.hosts = append(s.hosts, h)
	p.journal = append(p.journal, change{site: s, host: h, kind: changeAdd})
	return h
}

// promise sets pods of d aside that are expected to share nodes added for others; they are not placed yet.
func (p *planner) promise(d *demand, n int32) {
	if n != 0 {
		d.promised += n
		p.journal = append(p.journal, change{demand: d, n: n, kind: changePromise})
	}
}

// room is how many more pods of d the host takes.
func (s *site) room(h *host, d *demand) int32 {
	if !h.shape.acceptsPods(d) || h.fullFor(d) {
		return 0
	}
	n := fitCount(h.free, d)
	if n == 0 {
		return 0
	}
	for _, set := range d.hostAnti {
		for _, l := range h.loads {
			if slices.Contains(l.demand.hostAnti, set) {
				return 0
			}
		}
		n = 1
	}
	for _, a := range d.domainAnti {
		value, ok := h.shape.labels[a.TopologyKey]
		if !ok {
			continue // outside every domain nobody is in the way
		}
		if s.anti[antiDomain{a.TopologyKey, a.Set, value}] > 0 {
			return 0
		}
		n = 1
	}
	return n
}
