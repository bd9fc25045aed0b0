package capacity

import (
	"cmp"
	"slices"
	"strings"
)

// Entries of Machine.Allotment that are no counts of pods but the planner's memory of a packing that was too tight.
const (
	// fullSuffix after a need's id says that the scheduler, left to itself for long enough, did not put pods of the need on
	// this machine although the plan had room for them. It ends when pods leave the machine.
	fullSuffix = "/full"
	// roundSuffix after a need's id counts how many times in a row room was added for pods that stayed pending. Every machine
	// of the cluster that could carry the need has it, so that it outlives any of them. It ends when the pods run.
	roundSuffix = "/round"
)

// lastRound ends the search for room: what three additions did not help, a fourth will not.
const lastRound = 3

// addHosts takes the cluster's machines in, each with what the last plan put there and still may stand there. What does not
// fit any more, because the node turned out smaller or the rules changed, is placed anew.
func (p *planner) addHosts(s *site) {
	type place struct{ offering, domain string }
	offerings := map[place]*slot{}
	for _, sl := range p.slots {
		offerings[place{sl.offering.Name, sl.domain.Name}] = sl
	}
	own := map[string]string{}
	layers := make([]map[string]string, 0, 4)
	machines := make([]*Machine, 0, len(s.in.Machines))
	for i := range s.in.Machines {
		machines = append(machines, &s.in.Machines[i])
	}
	slices.SortStableFunc(machines, func(a, b *Machine) int {
		return cmp.Or(cmp.Compare(stateOrder(a.State), stateOrder(b.State)), cmp.Compare(a.ID, b.ID))
	})
	for _, m := range machines {
		h := &host{machine: m, slot: -1, cost: price(m.Cost)}
		layers, capacity := layers[:0], vector(nil)
		if sl := offerings[place{m.Offering, m.Domain}]; sl != nil {
			layers = append(layers, sl.labels)
			h.cost = max(h.cost, sl.cost)
			capacity = sl.capacity
		}
		layers = append(layers, m.Labels)
		if own[hostnameKey] = m.ID; m.Labels[hostnameKey] == "" {
			layers = append(layers, own)
		}
		if len(m.Allocatable) > 0 || capacity == nil {
			capacity = p.space.capacity(m.Allocatable)
		}
		h.shape = p.shapeOf(s, m.Taints, capacity, layers...)
		h.free = slices.Clone(h.shape.room)
		s.hosts = append(s.hosts, h)
		if m.State != MachineReclaiming {
			p.recall(s, h)
		}
	}
}

func stateOrder(state MachineState) int {
	return slices.Index([]MachineState{MachineActive, MachineInFlight, MachineReclaiming}, state)
}

func (p *planner) recall(s *site, h *host) {
	if len(h.machine.Allotment) == 0 {
		return
	}
	entries := make([]load, 0, len(h.machine.Allotment))
	for id, n := range h.machine.Allotment {
		if need, isMark := strings.CutSuffix(id, fullSuffix); isMark {
			if d := s.byID[need]; d != nil {
				h.full = append(h.full, d)
			}
		} else if need, isRound := strings.CutSuffix(id, roundSuffix); isRound {
			if d := s.byID[need]; d != nil {
				d.round = max(d.round, n)
			}
		} else if d := s.byID[id]; d != nil && n > 0 {
			entries = append(entries, load{d, n})
		} else {
			h.shrunk = true
		}
	}
	slices.SortFunc(entries, func(a, b load) int { return cmp.Compare(a.demand.index, b.demand.index) })
	marks := h.full
	h.full = nil // what stands there stands there
	for _, e := range entries {
		p.place(s, h, e.demand, min(e.pods, s.room(h, e.demand)))
	}
	h.full = marks
}

// keep brings what the machines carry in line with the demand, before anything new is placed.
func (p *planner) keep(s *site) {
	for _, u := range s.units {
		p.keepTogether(u)
	}
	for _, d := range s.demands {
		p.shrink(d)
	}
	for _, h := range s.hosts {
		if h.settled() {
			for _, l := range h.loads {
				l.demand.settled += l.pods
			}
		}
	}
	for _, d := range s.demands {
		p.escalate(d)
	}
	for _, h := range s.hosts {
		// A machine without pods is as good as any other of its kind. Were its marks kept, it could not take over from one
		// that the cluster chose to give back in its stead.
		if h.shrunk || h.pods == 0 {
			h.full = nil
		}
	}
}

// keepTogether leaves a unit that has to share a domain in the one where most of it stands.
func (p *planner) keepTogether(u *unit) {
	switch {
	case u.sameHost:
		var best *host
		for _, h := range u.site.hosts {
			if n := u.on(h); n > 0 && (best == nil || n > u.on(best)) {
				best = h
			}
		}
		p.withdraw(u, func(h *host) bool { return h != best })
	case len(u.same) > 0:
		if at := u.standing(); at != nil {
			p.withdraw(u, func(h *host) bool { return h.shape.together(u) != *at })
		}
	}
}

func (u *unit) on(h *host) (n int32) {
	for _, l := range h.loads {
		if l.demand.unit == u {
			n += l.pods
		}
	}
	return n
}

// standing is the domain with most members of the unit; nil when none has a place.
func (u *unit) standing() *string {
	var best *string
	for _, value := range sortedKeys(u.at) {
		if n := u.at[value]; n > 0 && (best == nil || n > u.at[*best]) {
			best = &value
		}
	}
	return best
}

// withdraw takes the unit's members off the hosts for which off is true.
func (p *planner) withdraw(u *unit, off func(*host) bool) {
	for _, h := range u.site.hosts {
		for _, d := range u.demands {
			if n := h.podsOf(d); n > 0 && off(h) {
				p.place(u.site, h, d, -n)
				h.shrunk = true
			}
		}
	}
}

// shrink drops what the demand no longer covers, from the machines of least use first, so that whole machines become free:
// those on their way before those that are up, the emptiest first. Under a hard spread the fullest domain gives first.
func (p *planner) shrink(d *demand) {
	excess := d.placed - d.Count
	if excess <= 0 {
		return
	}
	var hosts []*host
	use := map[*host]usefulness{}
	for _, h := range d.site.hosts {
		if h.podsOf(d) > 0 {
			hosts = append(hosts, h)
			use[h] = h.usefulness()
		}
	}
	slices.SortFunc(hosts, func(a, b *host) int { return use[a].compare(use[b]) })
	queues := map[string][]*host{}
	for _, h := range hosts {
		domain := d.hardDomain(h)
		queues[domain] = append(queues[domain], h)
	}
	for excess > 0 {
		domain, limit := d.fullestDomain(excess)
		h := queues[domain][0]
		n := min(limit, h.podsOf(d))
		p.place(d.site, h, d, -n)
		h.shrunk = true
		if excess -= n; h.podsOf(d) == 0 {
			queues[domain] = queues[domain][1:]
		}
	}
}

// hardDomain is the host's domain of the first hard spread of d.
func (d *demand) hardDomain(h *host) string {
	if len(d.hard) == 0 {
		return ""
	}
	return h.shape.labels[d.hard[0].TopologyKey]
}

// fullestDomain is the domain of the first hard spread with most pods, and how many it may give before another is fuller.
func (d *demand) fullestDomain(excess int32) (domain string, limit int32) {
	if len(d.hard) == 0 {
		return "", excess
	}
	counts := d.counts[d.hard[0].TopologyKey]
	first, second := int32(-1), int32(0)
	for _, v := range sortedKeys(counts) {
		if n := counts[v]; n > first {
			domain, first, second = v, n, max(first, 0)
		} else {
			second = max(second, n)
		}
	}
	return domain, min(excess, max(1, first-second))
}

type usefulness struct {
	up   bool
	used float64
	cost float64
	id   string
}

func (h *host) usefulness() usefulness {
	id := ""
	if h.machine != nil {
		id = h.machine.ID
	}
	return usefulness{h.state() == MachineActive, share(h.shape.room, h.free), h.cost, id}
}

func (u usefulness) compare(o usefulness) int {
	up := func(u usefulness) int {
		if u.up {
			return 1
		}
		return 0
	}
	return cmp.Or(
		cmp.Compare(up(u), up(o)), cmp.Compare(u.used, o.used), cmp.Compare(o.cost, u.cost), cmp.Compare(o.id, u.id),
	)
}

// escalate answers a plan that was too tight. The scheduler says that no more than Count-Pending pods stand somewhere; what
// the plan put on settled machines beyond that does not stand there, because nodes fill up in another order than the plan's
// or because of a rule that the plan does not know. That part is withdrawn and placed on other nodes, and the machines
// remember it.
func (p *planner) escalate(d *demand) {
	unsettled := d.placed - d.settled
	excess := min(d.Pending, d.settled-(d.Count-d.Pending))
	if excess <= 0 {
		if d.Pending == 0 || unsettled == 0 && d.missing() == 0 {
			d.round = 0
		}
		d.avoidsSettled = d.round > 0 && d.round < lastRound
		return
	}
	if d.unit.required() > 0 {
		// A gang waits as a whole, so that all of it is pending when room for one is missing: look for room bit by bit.
		excess = min(excess, max(1, d.Count/8))
		if unsettled > 0 {
			d.avoidsSettled = true
			return
		}
	}
	if d.round >= lastRound {
		d.stuck = excess
		return
	}
	d.round++
	d.avoidsSettled = true
	p.loosen(d, excess)
}

// loosen withdraws pods of d from settled machines: from those that carry other pods too, where room is most likely to have
// gone to those, and from those with fewest pods of d.
func (p *planner) loosen(d *demand, excess int32) {
	var hosts []*host
	for _, h := range d.site.hosts {
		if h.settled() && h.podsOf(d) > 0 {
			hosts = append(hosts, h)
		}
	}
	pure := func(h *host) int {
		if len(h.loads) == 1 {
			return 1
		}
		return 0
	}
	slices.SortFunc(hosts, func(a, b *host) int {
		return cmp.Or(
			cmp.Compare(pure(a), pure(b)),
			cmp.Compare(a.podsOf(d), b.podsOf(d)),
			cmp.Compare(a.machine.ID, b.machine.ID),
		)
	})
	for _, h := range hosts {
		if excess == 0 {
			return
		}
		n := min(excess, h.podsOf(d))
		p.place(d.site, h, d, -n)
		if !h.fullFor(d) {
			h.full = append(h.full, d)
		}
		excess -= n
	}
}
