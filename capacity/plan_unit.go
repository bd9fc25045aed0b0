package capacity

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
)

// attempts bounds how often needs that came short are tried again because others left room behind.
const attempts = 8

// serve gives every unit its turn, highest priority first, until nothing more can be placed.
func (p *planner) serve() {
	freed := 0
	seen := make([]int, len(p.units))
	for i := range seen {
		seen[i] = -1
	}
	for range attempts {
		progress := false
		for i, u := range p.units {
			if u.placed() >= u.total() || seen[i] == u.site.version+freed {
				continue
			}
			before := len(p.journal)
			p.serveUnit(u)
			if p.movedPods(before) {
				u.site.version++
				progress = true
			}
			seen[i] = u.site.version + freed
		}
		if p.tidy() {
			freed++
			progress = true
		}
		if !progress {
			return
		}
	}
}

func (p *planner) movedPods(since int) bool {
	return slices.ContainsFunc(p.journal[min(since, len(p.journal)):], func(c change) bool { return c.kind != changePromise })
}

func (p *planner) serveUnit(u *unit) {
	for _, d := range u.demands {
		p.promise(d, -d.promised)
		d.why, d.nearest = "", ""
	}
	switch {
	case u.sameHost:
		p.placeOnOneHost(u)
	case len(u.same) > 0:
		p.placeTogether(u)
	default:
		mark := p.mark()
		p.placeAll(u, where{})
		if placed := u.placed(); placed < u.required() {
			p.undo(mark)
			p.giveUp(u)
			u.explain(fmt.Sprintf("group needs %d members at once and there is room for %d", u.required(), placed))
		}
	}
}

// explain gives the reason of a unit that came short to those of its needs that are short; the need's own reason follows
// where there is one.
func (u *unit) explain(reason string) {
	for _, d := range u.demands {
		if d.missing() > 0 {
			if d.why != "" {
				d.why = reason + "; " + d.why
			} else {
				d.why = reason
			}
		}
	}
}

// placeAll places as much of the unit as there is room for within w.
func (p *planner) placeAll(u *unit, w where) {
	for _, d := range u.demands {
		p.put(d, d.missing(), w)
	}
}

// giveUp takes back what the last plans reserved for a gang that cannot be completed. A gang of which any member runs is
// left alone: its machines are in use.
func (p *planner) giveUp(u *unit) bool {
	if u.placed() == 0 || u.bound() > 0 {
		return false
	}
	p.withdraw(u, func(*host) bool { return true })
	return true
}

// placeTogether places a unit whose members have to share the value of one or more topology keys (section 8). It stays where
// members stand already. A gang moves, as a whole, when it can be completed elsewhere only and none of it runs.
func (p *planner) placeTogether(u *unit) {
	domains := p.sharedDomains(u)
	if at := u.standing(); at != nil {
		mark := p.mark()
		if w, ok := domains[*at]; ok {
			p.placeAll(u, w)
		}
		placed := u.placed()
		if placed >= u.required() {
			if placed < u.total() && !p.moveOpenSet(u, domains, placed) {
				u.explain(fmt.Sprintf("%s has no more room and the members have to share one %s", u.place(domains[*at]), u.keys()))
			}
			return
		}
		p.undo(mark)
		if !p.giveUp(u) {
			u.explain(fmt.Sprintf("needs %d members in one %s; some run in %s, which has room for %d",
				u.required(), u.keys(), u.place(domains[*at]), placed))
			return
		}
	}
	best := p.bestDomain(u, domains)
	if best.placed > 0 && best.placed >= u.required() {
		p.placeAll(u, domains[best.value])
	}
	if best.placed >= u.total() {
		return
	}
	switch {
	case best.value == "":
	case best.perNode == 1:
		u.explain(fmt.Sprintf("needs %d nodes in one %s; the largest has %d (offering %s, %s)",
			u.total(), u.keys(), best.placed, best.offering, u.place(domains[best.value])))
	default:
		u.explain(fmt.Sprintf("needs room for %d pods in one %s; the largest has room for %d (offering %s, %s)",
			u.total(), u.keys(), best.placed, best.offering, u.place(domains[best.value])))
	}
	for _, d := range u.demands {
		if d.missing() > 0 {
			d.nearest = best.offering
		}
	}
}

// moveOpenSet moves a set that does not say how large it will be, and of which nothing runs yet, to a domain that carries
// more of it than the placed ones: its first roll-up may have been a part, and another offering may have come since.
func (p *planner) moveOpenSet(u *unit, domains map[string]where, placed int32) bool {
	if u.minCount > 0 || u.bound() > 0 {
		return false
	}
	mark := p.mark()
	shrunk := map[*host]bool{}
	for _, h := range u.site.hosts {
		shrunk[h] = h.shrunk
	}
	p.withdraw(u, func(*host) bool { return true })
	best := p.bestDomain(u, domains)
	if best.placed <= placed {
		p.undo(mark)
		for h, was := range shrunk {
			h.shrunk = was
		}
		return false
	}
	p.placeAll(u, domains[best.value])
	return true
}

// sharedDomains maps each combination of values that the unit could share to the placement it confines the unit to.
func (p *planner) sharedDomains(u *unit) map[string]where {
	domains := map[string]where{}
	add := func(sh *shape) {
		value := sh.together(u)
		if _, known := domains[value]; known || value == "" ||
			!slices.ContainsFunc(u.demands, func(d *demand) bool { return d.Count > 0 && sh.acceptsPods(d) }) {
			return
		}
		w := where{}
		for _, r := range u.same {
			w = w.with(r.Key, sh.labels[r.Key])
		}
		domains[value] = w
	}
	for _, h := range u.site.hosts {
		add(h.shape)
	}
	for i := range p.slots {
		add(p.shapeOfSlot(u.site, i))
	}
	return domains
}

type trial struct {
	value    string
	placed   int32
	cost     float64
	offering string
	perNode  int32
	left     int64 // nodes that could still be launched there
}

// bestDomain tries every domain and returns the one that carries most of the unit, at the least cost of new nodes. A unit that
// does not say how large it will be may be on its way still, and cannot move once it runs: among equals it gets the domain
// where most is left to grow into.
func (p *planner) bestDomain(u *unit, domains map[string]where) trial {
	var best trial
	for _, value := range slices.Sorted(maps.Keys(domains)) {
		mark := p.mark()
		p.placeAll(u, domains[value])
		t := trial{value: value, placed: u.placed()}
		for _, c := range p.journal[mark:] {
			switch {
			case c.kind == changeAdd:
				t.cost += c.host.cost
				t.offering = p.slots[c.host.slot].offering.Name
			case c.kind == changePlace && c.host.machine != nil && t.offering == "":
				t.offering = c.host.machine.Offering
			}
			if c.kind == changePlace {
				t.perNode = max(t.perNode, c.demand.perNode(c.host.shape.room))
			}
		}
		if u.minCount == 0 {
			t.left = p.stockLeft(u, value)
		}
		p.undo(mark)
		if best.value == "" || t.placed > best.placed || t.placed == best.placed &&
			cmp.Or(about(t.cost, best.cost), cmp.Compare(best.left, t.left)) < 0 {
			best = t
		}
		if t.placed >= u.total() && t.cost == 0 {
			break
		}
	}
	for _, d := range u.demands {
		d.why = ""
	}
	if best.placed == 0 {
		best.value = ""
	}
	return best
}

// stockLeft counts the nodes that could still be launched for the unit in the domain that value names.
func (p *planner) stockLeft(u *unit, value string) (left int64) {
	for i, sl := range p.slots {
		if sh := p.shapeOfSlot(u.site, i); sh.together(u) == value && slices.ContainsFunc(u.demands, sh.acceptsPods) {
			left += int64(sl.stock)
		}
	}
	return left
}

// keys names the topology keys that the unit shares.
func (u *unit) keys() string {
	text := ""
	for i, r := range u.same {
		if i > 0 {
			text += " and "
		}
		text += r.Key
	}
	return text
}

func (u *unit) place(w where) string {
	text := ""
	for i, l := range w.labels {
		if i > 0 {
			text += "/"
		}
		text += l.value
	}
	return text
}

// placeOnOneHost places a unit whose members have to share a node.
func (p *planner) placeOnOneHost(u *unit) {
	var best *host
	most := int32(0)
	for _, h := range u.site.hosts {
		if n := u.on(h); n > most {
			best, most = h, n
		}
	}
	if best != nil {
		mark := p.mark()
		p.placeAll(u, where{host: best})
		if u.placed() >= u.required() && (u.placed() == u.total() || u.minCount == 0 || u.bound() > 0) {
			u.explain("the members have to share one node and it is full")
			return
		}
		p.undo(mark)
		if !p.giveUp(u) {
			u.explain("the members have to share one node and it is full")
			return
		}
	}
	for _, complete := range []bool{true, false} {
		if p.tryHosts(u, complete) {
			break
		}
	}
	u.explain(fmt.Sprintf("needs room for %d pods on one node; no node is large enough", u.total()))
}

// tryHosts puts the whole unit, or as much of it as is useful, on one host: one that is there, else a new one.
func (p *planner) tryHosts(u *unit, complete bool) bool {
	enough := func() bool {
		return u.placed() > 0 && u.placed() >= u.required() && (u.placed() == u.total() || !complete)
	}
	for _, h := range u.site.hosts {
		mark := p.mark()
		if p.placeAll(u, where{host: h}); enough() {
			return true
		}
		p.undo(mark)
	}
	best, cost, placed := -1, 0.0, int32(0)
	for i, sl := range p.slots {
		if sl.stock == 0 {
			continue
		}
		mark := p.mark()
		h := p.add(u.site, i)
		if p.placeAll(u, where{host: h}); enough() {
			n := u.placed()
			if best < 0 || n > placed || n == placed && about(sl.cost, cost) < 0 {
				best, cost, placed = i, sl.cost, n
			}
		}
		p.undo(mark)
	}
	if best < 0 {
		return false
	}
	p.placeAll(u, where{host: p.add(u.site, best)})
	return true
}
