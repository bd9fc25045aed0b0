package sharding

import (
	"cmp"
	"fmt"
	"slices"
)

// A Mode is how Virtual Nodes change hands.
type Mode string

const (
	// Exclusive is the warm handoff in three epochs: the new owner prefetches, the old one drains, the new one owns.
	// At no time do two members work on one Virtual Node.
	Exclusive Mode = "Exclusive"
	// Eventual is the paper's handoff in one epoch: every slice gets its new share at once. For as long as the old
	// owner has not heard of it, two members may work on one Virtual Node (section 8).
	Eventual Mode = "Eventual"
)

// A Coordinator computes, from the slices and members as they are, the next writes that bring the slices nearer to what
// the Assignment wants. It keeps nothing from one Step to the next: it may die between any two writes, and another
// may go on from what it finds.
//
// Two coordinators at work at once, or one whose write arrives late, do no harm either. A Step decides nothing until
// every slice that it was shown carries the coordinator's own Claim, and every write is made on the condition that its
// slice is still the one shown. So between the moment a coordinator looks and the moment its last write lands, no other
// has decided anything: it would first have had to claim, and thereby change, every slice.
//
// What the caller owes for that: the observation's slices come from one consistent list, made after its own last write
// has been answered; the Leases are read after the slices, so that no session is taken for over because the news of it
// is late; and after a write whose outcome it does not know, the caller goes on under a Claim never used before.
type Coordinator struct {
	// Claim is this coordinator's name for itself. No other process and no earlier life of this one has used it.
	Claim string
	// VirtualNodes is V.
	VirtualNodes int
	// Mode is how Virtual Nodes change hands.
	Mode Mode
	// Assignment says who should have what.
	Assignment Assignment
}

// An Observation is everything that a Step looks at.
type Observation struct {
	// Slices are all slices of the group.
	Slices []Slice
	// Members are all members that have a Lease or are expected back. A member that is missing has stopped.
	Members []MemberState
}

// An Op is what a Write does to its slice.
type Op string

// The three things that can be done to a slice.
const (
	Create Op = "Create"
	Update Op = "Update"
	Delete Op = "Delete"
)

// A Write is one conditional request of the coordinator. Slice.Version is the condition of Update and Delete; Create is
// refused if the slice exists. Slice.Status is as it was read and is not written. The writes of one Step may be made in
// any order or at the same time, and any of them may fail.
type Write struct {
	Op    Op
	Slice Slice
}

// Validate checks the configuration; prefix is put before the names of the fields.
func (c Coordinator) Validate(prefix string) error {
	if c.Claim == "" {
		return fmt.Errorf("%sclaim: must not be empty", prefix)
	}
	if c.Mode != Exclusive && c.Mode != Eventual {
		return fmt.Errorf("%shandoff: %q is neither %q nor %q", prefix, c.Mode, Exclusive, Eventual)
	}
	if c.Assignment == nil {
		return fmt.Errorf("%sassignment: must be set", prefix)
	}
	return ValidateVirtualNodes(prefix+"virtualNodes", c.VirtualNodes)
}

// Step returns the next writes, none if there is nothing to do before a member acts or the members change. The
// caller makes the writes, observes again and calls Step again, until it returns none; then it waits for a change.
func (c Coordinator) Step(obs Observation) []Write {
	if claims := c.claims(obs.Slices); len(claims) > 0 {
		return claims
	}
	p := newPass(c, obs)
	p.survey()
	p.decide()
	if c.Mode == Eventual {
		p.giveAtOnce()
	} else {
		p.handOver()
	}
	return p.writes()
}

// claims puts the coordinator's name on every slice that does not carry it.
func (c Coordinator) claims(observed []Slice) []Write {
	var writes []Write
	for i := range observed {
		if observed[i].Claim != c.Claim {
			s := observed[i].clone()
			s.Claim = c.Claim
			writes = append(writes, Write{Update, *s})
		}
	}
	slices.SortFunc(writes, func(a, b Write) int { return cmp.Compare(a.Slice.Member, b.Slice.Member) })
	return writes
}

// A seat is a member, a slice, or both.
type seat struct {
	state MemberState
	old   *Slice // as observed; nil if there is none
	next  *Slice // as it should be; nil if old is
	// over is set if the session that the slice speaks to has ended: nobody acts on the slice.
	over bool
}

// takes reports whether the member may be given something in this step.
func (s *seat) takes() bool { return s.old != nil && s.state.running() }

// A pass is one Step. Seats stand in the order of their IDs, and are named by their place.
type pass struct {
	c     Coordinator
	epoch Epoch
	seats []*seat
	index map[string]int

	cells   []cell // ascending, all of the Virtual Nodes
	surplus []Set  // by seat: what it holds although another seat does

	contested Set  // what two seats hold, as Eventual leaves it when it is changed to Exclusive
	touched   bool // whether a slice has been written only to carry the epoch on
}

func newPass(c Coordinator, obs Observation) *pass {
	p := &pass{c: c, index: make(map[string]int), cells: divide(c.VirtualNodes, obs.Slices)}
	byID := make(map[string]*seat)
	for _, m := range obs.Members {
		byID[m.ID] = &seat{state: m}
	}
	for i := range obs.Slices {
		old := &obs.Slices[i]
		s := byID[old.Member]
		if s == nil {
			s = &seat{state: MemberState{ID: old.Member, Phase: PhaseStopped}}
			byID[old.Member] = s
		}
		s.old, s.next = old, old.clone()
		s.over = !s.state.running() || s.state.Session != old.Session
		p.epoch = max(p.epoch, old.Epoch)
	}
	p.epoch++
	for _, s := range byID {
		p.seats = append(p.seats, s)
	}
	slices.SortFunc(p.seats, func(a, b *seat) int { return cmp.Compare(a.state.ID, b.state.ID) })
	for i, s := range p.seats {
		p.index[s.state.ID] = i
	}
	p.surplus = make([]Set, len(p.seats))
	return p
}

// survey finds out who has what.
func (p *pass) survey() {
	for i, s := range p.seats {
		if s.old == nil {
			continue
		}
		var second setBuilder
		p.each(s.old.Held(), func(c *cell) {
			if c.holder == nobody {
				c.holder = i
			} else {
				second.add(c.Range)
			}
		})
		p.surplus[i] = second.set
		p.contested = p.contested.Union(second.set)
		p.each(s.old.released(), func(c *cell) { c.free = i })
		if !s.over {
			p.each(orders(s.old.Incoming), func(c *cell) {
				if c.promised == nobody {
					c.promised = i
				}
			})
		}
	}
}

// decide asks the Assignment. A promise counts as having: it was decided on by an earlier step, and the same must come
// out of this one, or an announced change would be announced anew for ever.
func (p *pass) decide() {
	members := make([]MemberState, len(p.seats))
	for i, s := range p.seats {
		members[i] = s.state
	}
	list := candidates(members)
	receives := make([]bool, len(p.seats))
	for _, c := range list {
		receives[p.index[c.ID]] = c.Receives
	}
	current := make([]run, 0, len(p.cells))
	for _, c := range p.cells {
		has := c.holder
		if c.promised != nobody && receives[c.promised] {
			has = c.promised
		}
		r := run{Range: c.Range}
		if has != nobody {
			r.id = p.seats[has].state.ID
		}
		current = append(current, r)
	}
	if b, ok := p.c.Assignment.(Balanced); ok {
		p.aim(b.assign(p.c.VirtualNodes, current, list))
		return
	}
	p.aim(runsOf(p.c.Assignment.Assign(placementOf(p.c.VirtualNodes, current), list)))
}

// writes returns what has changed, under the new epoch.
func (p *pass) writes() []Write {
	var writes []Write
	for _, s := range p.seats {
		switch {
		case s.old == nil:
			if s.state.running() {
				// A slice starts empty, so that it does no harm if it is created late.
				writes = append(writes, Write{Create, Slice{
					Member: s.state.ID, Session: s.state.Session, Claim: p.c.Claim, Epoch: p.epoch,
				}})
			}
		case !s.changed():
			if w, ok := p.remove(s); ok {
				writes = append(writes, w)
			}
		default:
			s.next.Epoch = p.epoch
			writes = append(writes, Write{Update, *s.next})
		}
	}
	return writes
}

// remove deletes the slice of a member that has stopped, once it is empty. The group's last epoch is that of its
// slices, so the slice that carries it waits until another carries one as high: epochs never go back.
func (p *pass) remove(s *seat) (Write, bool) {
	if s.state.running() || s.state.Phase == PhaseAway || !s.old.Held().Empty() || len(s.old.Draining) > 0 {
		return Write{}, false
	}
	for _, o := range p.seats {
		if o == s || o.old == nil {
			continue
		}
		// Of two that carry the same one, and have both stopped, one stays: the first by name.
		if o.old.Epoch > s.old.Epoch || o.old.Epoch == s.old.Epoch && (o.state.running() || o.old.Member < s.old.Member) {
			return Write{Delete, *s.old.clone()}, true
		}
	}
	for _, o := range p.seats {
		if o.takes() && !o.changed() && !p.touched {
			p.touched = true
			o.next.Epoch = p.epoch
			return Write{Update, *o.next}, true
		}
	}
	return Write{}, false
}

// changed reports whether the step has changed what the slice says.
func (s *seat) changed() bool {
	return s.old.Session != s.next.Session || !s.old.Owned.Equal(s.next.Owned) ||
		!sameOrders(s.old.Incoming, s.next.Incoming) || !sameOrders(s.old.Draining, s.next.Draining) ||
		len(s.old.Grants) < len(s.next.Grants)
}

func sameOrders(a, b []Order) bool {
	return slices.EqualFunc(a, b, func(x, y Order) bool { return x.Epoch == y.Epoch && x.VNs.Equal(y.VNs) })
}
