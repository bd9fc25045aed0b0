package sharding

import "slices"

// handOver takes each Virtual Node one step nearer to its target by the exclusive handoff.
func (p *pass) handOver() {
	incoming := make([]setBuilder, len(p.seats)) // what each seat should be prefetching
	drain := make([]setBuilder, len(p.seats))    // what each seat has to start giving up
	grants := newGrants(p)
	warm := make([]Set, len(p.seats))
	draining := make([]Set, len(p.seats))
	for i, s := range p.seats {
		if s.old != nil {
			draining[i] = orders(s.old.Draining)
			if !s.over {
				warm[i] = s.old.warm()
			}
		}
	}
	for i := range p.cells {
		c := &p.cells[i]
		h, t := c.holder, c.target
		if t == nobody {
			// Whoever comes later is granted it with what its last owner tells.
			if h != nobody && !p.seats[h].over && p.seats[h].state.Phase == PhaseQuitting && c.free == nobody {
				drain[h].add(c.Range)
			}
			continue
		}
		switch {
		case h == nobody:
			// Nobody works on it: the target may start.
			if p.seats[t].takes() && !p.seats[t].over {
				grants.add(c)
			} else if c.promised == t {
				incoming[t].add(c.Range)
			}
		case p.seats[h].over:
			// vacate takes it from its slice, or renews it there; the target gets it when that has been seen.
			if c.promised == t {
				incoming[t].add(c.Range)
			}
		case h == t:
			// It is where it belongs. If it is being drained all the same, it is granted again once released.
		default:
			if p.seats[t].takes() && !p.seats[t].over {
				incoming[t].add(c.Range)
			}
			// What a former owner released is cleaned up first, or its versions could be taken for those of h.
			if warm[t].Has(c.First) && !draining[h].Has(c.First) && c.free == nobody {
				drain[h].add(c.Range)
			}
		}
	}
	for i, s := range p.seats {
		if s.old == nil {
			continue
		}
		if s.over {
			p.vacate(i)
			continue
		}
		p.clean(i, grants.to(i))
		s.drain(drain[i].set.Union(p.surplus[i].Minus(draining[i])), p.epoch)
		s.prefetch(incoming[i].set, p.epoch)
		s.grant(grants.of[i])
	}
}

// vacate ends what the slice said to a session that is over. What the member's next session should have, it is granted
// at once, in the same write; what waits for a member that is away stays; the rest is nobody's, and given away when a
// later step sees it gone from here.
func (p *pass) vacate(i int) {
	s := p.seats[i]
	next := &Slice{
		Member: s.old.Member, Session: s.old.Session, Claim: p.c.Claim, Epoch: s.old.Epoch,
		Status: s.old.Status, Version: s.old.Version,
	}
	s.next = next
	if !s.state.running() && s.state.Phase != PhaseAway {
		return
	}
	var again setBuilder
	p.each(s.old.Held().Minus(p.contested), func(c *cell) {
		if c.target == i {
			again.add(c.Range)
		}
	})
	next.Owned = again.set
	if !s.state.running() {
		return
	}
	next.Session = s.state.Session
	if !next.Owned.Empty() {
		next.Grants = []Grant{{Epoch: p.epoch, VNs: next.Owned}}
	}
}

// clean drops what has been dealt with: Virtual Nodes that were released here and have an owner since, and grants that
// are served.
func (p *pass) clean(i int, granted Set) {
	s := p.seats[i]
	var done setBuilder
	p.each(s.old.released(), func(c *cell) {
		if c.holder != nobody || granted.Has(c.First) {
			done.add(c.Range)
		}
	})
	s.next.Draining = without(s.next.Draining, done.set)
	if s.old.Status.Session == s.old.Session {
		s.next.Grants = slices.DeleteFunc(s.next.Grants, func(g Grant) bool { return g.Epoch <= s.old.Status.Settled })
	}
}

// drain moves vns from Owned to Draining.
func (s *seat) drain(vns Set, epoch Epoch) {
	if vns = vns.Intersect(s.next.Owned); vns.Empty() {
		return
	}
	s.next.Owned = s.next.Owned.Minus(vns)
	s.next.Draining = append(s.next.Draining, Order{epoch, vns})
	for i := range s.next.Grants {
		s.next.Grants[i].VNs = s.next.Grants[i].VNs.Minus(vns)
	}
	s.next.Grants = slices.DeleteFunc(s.next.Grants, func(g Grant) bool { return g.VNs.Empty() })
}

// prefetch makes vns what is incoming: what is announced already stays under its epoch, what is missing is announced,
// the rest is withdrawn.
func (s *seat) prefetch(vns Set, epoch Epoch) {
	announced := orders(s.next.Incoming)
	s.next.Incoming = without(s.next.Incoming, announced.Minus(vns))
	if gained := vns.Minus(announced); !gained.Empty() {
		s.next.Incoming = append(s.next.Incoming, Order{epoch, gained})
	}
}

func (s *seat) grant(list []Grant) {
	for _, g := range list {
		s.next.Owned = s.next.Owned.Union(g.VNs)
		s.next.Grants = append(s.next.Grants, g)
	}
}

// grants collects what each seat is given, together where the same is known about it.
type grants struct {
	*pass
	of [][]Grant // by seat
	at map[grantKey]int
}

// A grantKey names one Release: its seat and its place in the status; place -1 where nobody has released anything.
type grantKey struct {
	to, from, place int
}

func newGrants(p *pass) *grants {
	return &grants{pass: p, of: make([][]Grant, len(p.seats)), at: make(map[grantKey]int)}
}

// add gives a cell to its target. Cells are added in ascending order.
func (g *grants) add(c *cell) {
	key := grantKey{c.target, c.free, -1}
	var known *Versions
	if key.from != nobody {
		s := g.seats[key.from].old
		for i, r := range s.Status.Released {
			if r.VNs.Has(c.First) && slices.ContainsFunc(s.Draining, func(o Order) bool {
				return o.Epoch == r.Epoch && o.VNs.Has(c.First)
			}) {
				key.place, known = i, r.Known
			}
		}
	}
	i, ok := g.at[key]
	if !ok {
		i = len(g.of[key.to])
		g.at[key] = i
		g.of[key.to] = append(g.of[key.to], Grant{Epoch: g.epoch, Known: known})
	}
	b := setBuilder{g.of[key.to][i].VNs}
	b.add(c.Range)
	g.of[key.to][i].VNs = b.set
}

// to returns all that seat i is given.
func (g *grants) to(i int) Set {
	var vns Set
	for _, grant := range g.of[i] {
		vns = vns.Union(grant.VNs)
	}
	return vns
}

// giveAtOnce makes every slice what the Assignment wants, in one epoch (section 5.4.1).
func (p *pass) giveAtOnce() {
	shares := make([]setBuilder, len(p.seats))
	for i := range p.cells {
		if c := &p.cells[i]; c.target != nobody {
			shares[c.target].add(c.Range)
		}
	}
	for i, s := range p.seats {
		if s.old == nil {
			continue
		}
		had := s.old.Owned
		if s.over {
			p.vacate(i)
			had = s.next.Owned
		}
		s.next.Incoming, s.next.Draining = nil, nil
		if !s.state.running() {
			continue
		}
		p.clean(i, nil)
		share := shares[i].set
		s.next.Owned = share
		for k := range s.next.Grants {
			s.next.Grants[k].VNs = s.next.Grants[k].VNs.Intersect(share)
		}
		s.next.Grants = slices.DeleteFunc(s.next.Grants, func(g Grant) bool { return g.VNs.Empty() })
		if gained := share.Minus(had); !gained.Empty() {
			s.next.Grants = append(s.next.Grants, Grant{Epoch: p.epoch, VNs: gained})
		}
	}
}
