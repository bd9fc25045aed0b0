package capacity

import (
	"cmp"
	"fmt"
	"slices"
)

// movableShare bounds how full a machine may be to be emptied into others. Moving more than half a machine's pods to free
// half a machine's cost is not worth the disturbance.
const movableShare = 0.5

// tidy improves the nodes that the plan adds, before anybody has paid for them: nodes that nothing stands on go, what fits
// beside others moves there, and a node that a cheaper offering could replace is replaced. It reports whether stock became
// free by that.
func (p *planner) tidy() bool {
	p.journal = p.journal[:0]
	freed := false
	for _, s := range p.sites {
		if !slices.ContainsFunc(s.hosts, func(h *host) bool { return h.machine == nil }) {
			continue
		}
		p.empty(s, func(h *host) bool { return h.machine == nil }, func(h *host) bool { return !h.reclaiming() })
		p.journal = p.journal[:0]
		s.hosts = slices.DeleteFunc(s.hosts, func(h *host) bool {
			if h.machine != nil || h.pods > 0 {
				return false
			}
			p.slots[h.slot].stock++
			freed = true
			return true
		})
		for i, h := range s.hosts {
			if h.machine == nil {
				if smaller := p.replace(s, h); smaller != nil {
					s.hosts[i] = smaller
					freed = true
				}
			}
		}
	}
	return freed
}

// empty moves everything off as many hosts as possible, the emptiest first, onto others that carry something already. Room
// only shrinks on the way, so one sweep is enough.
func (p *planner) empty(s *site, from, to func(*host) bool) {
	var sources []*host
	for _, h := range s.hosts {
		if from(h) && h.pods > 0 && share(h.shape.room, h.free) <= movableShare {
			sources = append(sources, h)
		}
	}
	slices.SortStableFunc(sources, func(a, b *host) int {
		return cmp.Or(
			cmp.Compare(share(a.shape.room, a.free), share(b.shape.room, b.free)),
			cmp.Compare(b.cost, a.cost),
			cmp.Compare(a.shape.key, b.shape.key),
		)
	})
	for _, h := range sources {
		if share(h.shape.room, h.free) <= movableShare {
			p.moveAll(s, h, to)
		}
	}
}

func (p *planner) moveAll(s *site, from *host, to func(*host) bool) {
	mark := p.mark()
	loads := slices.Clone(from.loads)
	slices.SortFunc(loads, func(a, b load) int { return cmp.Compare(a.demand.index, b.demand.index) })
	for _, l := range loads {
		p.place(s, from, l.demand, -l.pods)
	}
	for _, l := range loads {
		if !p.moveLoad(s, from, l, to) {
			p.undo(mark)
			return
		}
	}
}

func (p *planner) moveLoad(s *site, from *host, l load, to func(*host) bool) bool {
	type candidate struct {
		host *host
		used float64
	}
	var hosts []candidate
	for _, h := range s.hosts {
		if h != from && h.pods > 0 && to(h) && l.demand.mayMove(from, h) && s.room(h, l.demand) > 0 {
			hosts = append(hosts, candidate{h, share(h.shape.room, h.free)})
		}
	}
	slices.SortStableFunc(hosts, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(b.used, a.used), cmp.Compare(a.host.shape.key, b.host.shape.key))
	})
	rest := l.pods
	for _, c := range hosts {
		n := min(rest, s.room(c.host, l.demand))
		p.place(s, c.host, l.demand, n)
		if rest -= n; rest == 0 {
			return true
		}
	}
	return false
}

// mayMove reports whether moving pods of d changes nothing about the rules that relate them to others of their kind.
func (d *demand) mayMove(from, to *host) bool {
	if d.hostSkew > 0 || d.unit.sameHost || d.avoidsSettled && to.settled() {
		return false
	}
	for _, spread := range d.hard {
		if from.shape.labels[spread.TopologyKey] != to.shape.labels[spread.TopologyKey] {
			return false
		}
	}
	return from.shape.together(d.unit) == to.shape.together(d.unit)
}

// replace returns a cheaper node that carries the same pods in the same domains; nil when there is none.
func (p *planner) replace(s *site, h *host) *host {
	best := -1
	for i, sl := range p.slots {
		if sl.stock > 0 && sl.cost < h.cost && (best < 0 || sl.cost < p.slots[best].cost) && p.carries(s, i, h) {
			best = i
		}
	}
	if best < 0 {
		return nil
	}
	p.slots[h.slot].stock++
	p.slots[best].stock--
	sh := p.shapeOfSlot(s, best)
	smaller := &host{slot: best, shape: sh, cost: p.slots[best].cost, free: slices.Clone(sh.room)}
	for _, l := range slices.Clone(h.loads) {
		s.apply(h, l.demand, -l.pods)
		s.apply(smaller, l.demand, l.pods)
	}
	return smaller
}

func (p *planner) carries(s *site, slot int, h *host) bool {
	sh := p.shapeOfSlot(s, slot)
	free := slices.Clone(sh.room)
	for _, l := range h.loads {
		d := l.demand
		if !sh.acceptsPods(d) || fitCount(free, d) < l.pods || sh.together(d.unit) != h.shape.together(d.unit) {
			return false
		}
		take(free, d, l.pods)
		for key := range d.counts {
			if sh.labels[key] != h.shape.labels[key] {
				return false
			}
		}
		for _, a := range d.domainAnti {
			if sh.labels[a.TopologyKey] != h.shape.labels[a.TopologyKey] {
				return false
			}
		}
	}
	return true
}

// consolidate plans pods of little used machines onto others, so that whole machines become free. It waits for calm: nothing
// on its way, nothing being drained, and no pod pending that the plan has a place for.
func (p *planner) consolidate(s *site) {
	if s.in.Held {
		return
	}
	for _, d := range s.demands {
		if d.Pending > d.missing() {
			return
		}
	}
	for _, h := range s.hosts {
		if h.state() != MachineActive {
			return
		}
	}
	// A machine with a mark is there because the scheduler packs differently from the plan: emptying it would undo that.
	p.empty(s, func(h *host) bool { return h.settled() && len(h.full) == 0 }, (*host).settled)
}

// release turns machines that carry nothing into reclaims, and those that are still on their way into cancellations. An
// offering that the plan launches is not reclaimed in the same pass, nor is one from which pods are looking for room: the
// cluster would give back the very nodes that were added for them, as nothing stands there yet.
func (s *site) release(p *planner, plan *Plan) {
	launched := map[string]bool{}
	for _, h := range s.hosts {
		if h.machine == nil {
			launched[p.slots[h.slot].offering.Name] = true
		}
	}
	searching := slices.DeleteFunc(slices.Clone(s.searches), func(d *demand) bool { return d.stuck > 0 })
	type pool struct{ offering, domain string }
	surplus := map[pool][]string{}
	candidates := map[pool][]string{}
	for _, h := range s.hosts {
		m := h.machine
		if m == nil || launched[m.Offering] || h.reclaiming() {
			continue
		}
		free := h.pods == 0
		if m.State == MachineInFlight {
			if free && !s.in.Held {
				plan.Cancel = append(plan.Cancel, m.ID)
			}
			continue
		}
		at := pool{m.Offering, m.Domain}
		candidates[at] = append(candidates[at], m.ID)
		if free && !slices.ContainsFunc(searching, h.shape.acceptsPods) {
			surplus[at] = append(surplus[at], m.ID)
		}
	}
	pools := make([]pool, 0, len(surplus))
	for at := range surplus {
		pools = append(pools, at)
	}
	slices.SortFunc(pools, func(a, b pool) int {
		return cmp.Or(cmp.Compare(a.offering, b.offering), cmp.Compare(a.domain, b.domain))
	})
	for _, at := range pools {
		slices.Sort(candidates[at])
		slices.Sort(surplus[at])
		set := ReclaimSet{
			Cluster: s.in.ID, Offering: at.offering, Domain: at.domain,
			Candidates: candidates[at], Surplus: surplus[at], Count: int32(len(surplus[at])),
			Reason: fmt.Sprintf("no pod needs %d of %d machines", len(surplus[at]), len(candidates[at])),
		}
		if !s.in.Held {
			plan.Reclaims = append(plan.Reclaims, set)
			continue
		}
		set.Reason += "; held"
		if s.in.HeldReason != "" {
			set.Reason += ": " + s.in.HeldReason
		}
		plan.Withheld = append(plan.Withheld, set)
	}
}
