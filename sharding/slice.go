package sharding

// An Epoch numbers the changes of a group. It only ever grows, and takes the place of the paper's etcd Revision: the id
// by which members tell one change from the next (section 5.5.3).
type Epoch int64

// A Slice is what one member of a group has to do with which Virtual Nodes: the object through which coordinator and
// member speak. The coordinator writes the upper part, the member its Status; every write is made on the condition
// that the object is still the one that was read.
type Slice struct {
	// Member is the member's ID, and the slice's name.
	Member string
	// Session is the life of the member that the slice speaks to. A member acts on no slice of another session: what
	// it held before a restart, or before it missed its lease's deadline, is not its own any more.
	Session string
	// Claim names the coordinator whose view this slice is part of; see Coordinator.
	Claim string
	// Epoch is that of the last change of this slice.
	Epoch Epoch
	// Owned is what the member reconciles.
	Owned Set
	// Grants tell what must be in the member's cache before it starts on the newest parts of Owned.
	Grants []Grant
	// Incoming is what the member is to own soon: it lists and watches it, and says in Status.Warm when it has it.
	Incoming []Order
	// Draining is what the member is to give up: it starts nothing new, finishes what it is at, and says in
	// Status.Released when nothing of it is left.
	Draining []Order
	// Status is the member's part.
	Status SliceStatus
	// Version is the object's resourceVersion, the condition of the next write. The core hands it through.
	Version string
}

// SliceStatus is what a member says about its slice. It counts only if Session is that of the slice, and an entry
// only if the epoch and the Virtual Nodes are those of an order that the slice still gives.
type SliceStatus struct {
	// Session is the session of the member that speaks.
	Session string
	// Epoch is the last epoch of the slice that the member has acted on.
	Epoch Epoch
	// Settled is the epoch up to which every grant is served: no read waits because of them.
	Settled Epoch
	// Warm answers Incoming.
	Warm []Order
	// Released answers Draining.
	Released []Release
	// Leaving is the member's wish to be relieved of everything before it stops.
	Leaving bool
	// Unfiltered are the resources of which the API server sends the member what it did not select. It is for people:
	// nothing is decided by it.
	Unfiltered []Resource
}

// An Order tells a member to do something about some Virtual Nodes; the epoch identifies it.
type Order struct {
	Epoch Epoch
	VNs   Set
}

// A Grant makes a member the owner of some Virtual Nodes.
type Grant struct {
	Epoch Epoch
	VNs   Set
	// Known is, per resource, how far the member's cache must have come before it may start: the last versions that
	// the previous owner wrote or had to see itself. Nil if nobody has told, because the previous owner died or there
	// was none: then the member lists, consistently, after it has seen this grant.
	Known *Versions
}

// A Release is a member's word that it has ended all work on some Virtual Nodes and will start none.
type Release struct {
	// Epoch is that of the order to drain.
	Epoch Epoch
	VNs   Set
	// Known becomes the next owner's Grant.Known; nil if the member had not yet seen for itself what came before it.
	Known *Versions
}

// Moving returns how many Virtual Nodes the slice has that are incoming or draining.
func (s *Slice) Moving() int { return orders(s.Incoming).Len() + orders(s.Draining).Len() }

// orders returns the Virtual Nodes of all orders together.
func orders(list []Order) Set {
	var vns Set
	for _, o := range list {
		vns = vns.Union(o.VNs)
	}
	return vns
}

// without removes vns from every order, and the orders that nothing is left of.
func without(list []Order, vns Set) []Order {
	var kept []Order
	for _, o := range list {
		if o.VNs = o.VNs.Minus(vns); !o.VNs.Empty() {
			kept = append(kept, o)
		}
	}
	return kept
}

// answered returns the part of the orders that answers of the same epoch cover.
func answered(given, answers []Order) Set {
	var vns Set
	for _, g := range given {
		for _, a := range answers {
			if a.Epoch == g.Epoch {
				vns = vns.Union(g.VNs.Intersect(a.VNs))
			}
		}
	}
	return vns
}

// warm returns the incoming Virtual Nodes that the member has in its cache.
func (s *Slice) warm() Set {
	if s.Status.Session != s.Session {
		return nil
	}
	return answered(s.Incoming, s.Status.Warm)
}

// released returns the draining Virtual Nodes that the member has let go.
func (s *Slice) released() Set {
	if s.Status.Session != s.Session {
		return nil
	}
	answers := make([]Order, 0, len(s.Status.Released))
	for _, r := range s.Status.Released {
		answers = append(answers, Order{r.Epoch, r.VNs})
	}
	return answered(s.Draining, answers)
}

// Held returns the Virtual Nodes that the member may still be working on.
func (s *Slice) Held() Set {
	return s.Owned.Union(orders(s.Draining).Minus(s.released()))
}

// clone returns a copy whose fields can be set without changing s. Sets and Versions are values that nobody changes.
func (s *Slice) clone() *Slice {
	c := *s
	c.Grants = append([]Grant(nil), s.Grants...)
	c.Incoming = append([]Order(nil), s.Incoming...)
	c.Draining = append([]Order(nil), s.Draining...)
	c.Status.Warm = append([]Order(nil), s.Status.Warm...)
	c.Status.Released = append([]Release(nil), s.Status.Released...)
	return &c
}
