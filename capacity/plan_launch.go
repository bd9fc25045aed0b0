package capacity

import (
	"cmp"
	"slices"
)

// fill places pods of d into free room: machines that are up before those on their way, the fullest first, so that what is
// empty stays empty. With reclaiming set it looks at machines that are being given back instead.
func (p *planner) fill(d *demand, want int32, w where, reclaiming bool) int32 {
	if want <= 0 {
		return 0
	}
	type candidate struct {
		host *host
		used float64
	}
	var hosts []candidate
	for _, h := range d.site.hosts {
		switch {
		case h.reclaiming() != reclaiming, w.host != nil && w.host != h, !w.allows(h.shape),
			d.avoidsSettled && h.settled(), d.site.room(h, d) == 0:
			continue
		}
		hosts = append(hosts, candidate{h, share(h.shape.room, h.free)})
	}
	slices.SortStableFunc(hosts, func(a, b candidate) int {
		return cmp.Or(
			cmp.Compare(a.host.preference(), b.host.preference()),
			cmp.Compare(b.used, a.used),
			cmp.Compare(a.host.shape.key, b.host.shape.key),
		)
	})
	placed := int32(0)
	for _, c := range hosts {
		if placed == want {
			break
		}
		n := min(want-placed, d.site.room(c.host, d))
		p.place(d.site, c.host, d, n)
		placed += n
	}
	return placed
}

// preference orders hosts for filling.
func (h *host) preference() int {
	switch {
	case h.machine == nil:
		return 2
	case h.machine.State == MachineInFlight:
		return 1
	default:
		return 0
	}
}

// option is a way to carry pods on new nodes.
type option struct {
	slot  int
	nodes int32 // how many nodes of it to add before looking again
	per   int32
	cost  float64 // for all the pods asked for, less what others would otherwise pay for the room beside them
	odd   int32   // how many pods of a soft spread are in the domain already
}

// launch adds nodes for up to want pods of d and returns how many pods it placed on them.
func (p *planner) launch(d *demand, want int32, w where) int32 {
	placed := int32(0)
	for placed < want {
		o, ok := p.choose(d, want-placed, w, -1)
		if !ok {
			break
		}
		n := min(o.per, want-placed)
		p.fillers(d.site, d, p.shapeOfSlot(d.site, o.slot), n, o.nodes, func(f *demand, pods int32) { p.promise(f, pods) })
		for range o.nodes {
			n = min(o.per, want-placed)
			p.place(d.site, p.add(d.site, o.slot), d, n)
			placed += n
		}
	}
	return placed
}

// choose picks the offering and domain for want pods of d by what all of them would cost there: as many full nodes as they
// fill, the cheapest node for the rest, less the value of the room that other pending pods can share. Between equals it
// takes the domain with fewest pods where d asks for a spread, then fewer nodes, then the name. A node gets at most limit
// pods unless limit is negative.
func (p *planner) choose(d *demand, want int32, w where, limit int32) (option, bool) {
	type rest struct {
		per  int32
		cost float64
	}
	var options []option
	var rests []rest
	for i, sl := range p.slots {
		if sl.stock == 0 {
			continue
		}
		sh := p.shapeOfSlot(d.site, i)
		if !w.allows(sh) || !sh.acceptsPods(d) || d.site.taken(d, sh) {
			continue
		}
		per := d.perNode(sh.room)
		if limit >= 0 {
			per = min(per, limit)
		}
		if per == 0 {
			continue
		}
		options = append(options, option{slot: i, per: per})
		if r := (rest{per, sl.cost}); !slices.Contains(rests, r) {
			rests = append(rests, r)
		}
	}
	if len(options) == 0 {
		return option{}, false
	}
	cheapest := func(n int32) float64 {
		least := 0.0
		for i, r := range rests {
			if c := r.cost * float64(ceilDiv(n, r.per)); i == 0 || c < least {
				least = c
			}
		}
		return least
	}
	best := -1
	for i := range options {
		o := &options[i]
		sl, sh := p.slots[o.slot], p.shapeOfSlot(d.site, o.slot)
		o.nodes = max(1, min(want/o.per, sl.stock))
		if len(d.domainAnti) > 0 {
			o.nodes = 1
		}
		n := min(o.per, want)
		o.cost = float64(o.nodes)*sl.cost - p.fillers(d.site, d, sh, n, o.nodes, nil)
		if left := want - n*o.nodes; left > 0 {
			o.cost += cheapest(left)
		}
		for _, spread := range d.soft {
			o.odd += d.counts[spread.TopologyKey][sh.labels[spread.TopologyKey]]
		}
		if best < 0 || p.better(o, &options[best]) {
			best = i
		}
	}
	o := options[best]
	if len(d.soft) > 0 && o.nodes > 1 {
		alike := int32(0)
		for i := range options {
			if options[i].per == o.per && about(options[i].cost, o.cost) == 0 {
				alike++
			}
		}
		o.nodes = ceilDiv(o.nodes, alike)
	}
	return o, true
}

func (p *planner) better(a, b *option) bool {
	return cmp.Or(
		about(a.cost, b.cost),
		cmp.Compare(a.odd, b.odd),
		cmp.Compare(b.per, a.per),
		cmp.Compare(p.slots[a.slot].cost, p.slots[b.slot].cost),
	) < 0
}

// about compares costs and takes for equal what differs by rounding only.
func about(a, b float64) int {
	if diff, scale := a-b, max(a, b, -a, -b); diff < scale*1e-9 && -diff < scale*1e-9 {
		return 0
	}
	return cmp.Compare(a, b)
}

// taken reports whether an anti-affinity beyond the host keeps d out of the shape's domain.
func (s *site) taken(d *demand, sh *shape) bool {
	for _, a := range d.domainAnti {
		if value, ok := sh.labels[a.TopologyKey]; ok && s.anti[antiDomain{a.TopologyKey, a.Set, value}] > 0 {
			return true
		}
	}
	return false
}

// fillers finds what else of the cluster's pending demand could share nodes that carry n pods of d each, and returns what
// that is worth: what those pods would cost at least elsewhere.
func (p *planner) fillers(s *site, d *demand, sh *shape, n, nodes int32, each func(*demand, int32)) float64 {
	worth := 0.0
	var free vector
	for _, f := range s.demands {
		if f == d || f.prospect() == 0 || f.price == 0 || !sh.acceptsPods(f) {
			continue
		}
		if free == nil {
			free = slices.Clone(sh.room)
			take(free, d, n)
		}
		per := f.perNode(free)
		if per == 0 {
			continue
		}
		pods := saturate(min(int64(per)*int64(nodes), int64(f.prospect())))
		take(free, f, ceilDiv(pods, nodes))
		worth += float64(pods) * f.price
		if each != nil {
			each(f, pods)
		}
	}
	return worth
}
