package capacity

import (
	"cmp"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// hostnameKey is the topology key under which every node is a domain of its own.
const hostnameKey = corev1.LabelHostname

// newHostname stands for the host name of a node that does not exist yet: it is there, and it is nobody's.
const newHostname = "~new"

// planner is one run of MakePlan.
type planner struct {
	space   *resourceSpace
	slots   []*slot
	largest vector
	sites   []*site
	units   []*unit
	journal []change
}

// slot is an offering in one of its domains: the place where a new node can come from.
type slot struct {
	offering *Offering
	domain   *Domain
	labels   map[string]string
	capacity vector
	cost     float64
	stock    int32
}

// site is one cluster.
type site struct {
	in      *ClusterInput
	demands []*demand // in the order in which they are served
	units   []*unit
	byID    map[string]*demand
	// hosts are the cluster's machines, followed by the nodes that this plan adds.
	hosts []*host
	// keys are the label keys that decide anything here. Labels beyond them do not tell machines apart.
	keys      []string
	shapes    map[string]*shape
	slotShape []*shape
	searches  []*demand // in which room was added for pods that stayed pending
	scratch   []byte
	// anti counts the pods of a set by key, set and domain.
	anti map[antiDomain]int32
	// version counts what can give a need that came short another chance.
	version int
}

type antiDomain struct{ key, set, value string }

// host is a machine, or a node that this plan adds.
type host struct {
	machine *Machine // nil for an added one
	slot    int      // of an added one
	shape   *shape
	cost    float64
	free    vector
	loads   []load
	full    []*demand
	pods    int64
	// shrunk: pods left this machine in this pass, so that what the scheduler found here before says nothing any more.
	shrunk bool
}

type load struct {
	demand *demand
	pods   int32
}

// demand is a Need while a plan is made.
type demand struct {
	*Need
	index   int
	site    *site
	unit    *unit
	request vector
	dims    []int
	size    float64
	// price is what one pod costs at least.
	price float64
	// hard and soft are spread constraints by domain, hostSkew by node (0: none).
	hard, soft []Spread
	hostSkew   int32
	hostMin    int32
	hostAnti   []string       // sets
	domainAnti []AntiAffinity // other keys
	counts     map[string]map[string]int32
	placed     int32
	promised   int32
	// settled is what settled machines carry of it, round the latest round of the search for room.
	settled, round int32
	avoidsSettled  bool
	stuck          int32
	why, nearest   string
}

func (d *demand) missing() int32 { return d.Count - d.placed }

// prospect is what may still come to share a node with others.
func (d *demand) prospect() int32 { return max(0, d.Count-d.placed-d.promised) }

// unit is what is placed together: the needs of one group, or a single need.
type unit struct {
	site     *site
	id       string
	demands  []*demand
	same     []Requirement
	sameHost bool
	minCount int32
	priority int32
	size     float64
	at       map[string]int32
}

func (u *unit) gang() bool { return u.minCount > 0 || len(u.same) > 0 || u.sameHost }

func (u *unit) total() int32 {
	n := int64(0)
	for _, d := range u.demands {
		n += int64(d.Count)
	}
	return saturate(n)
}

func (u *unit) placed() int32 {
	n := int64(0)
	for _, d := range u.demands {
		n += int64(d.placed)
	}
	return saturate(n)
}

// required is how many members have to have a place before any of them gets one. Members that found a place elsewhere are
// not part of the demand, so a gang can be smaller here than its minimum.
func (u *unit) required() int32 { return min(u.minCount, u.total()) }

// bound is how many members run for certain: bound by the scheduler's word, and on machines that are up.
func (u *unit) bound() int32 {
	var said, up int64
	for _, d := range u.demands {
		said += int64(max(0, d.Count-d.Pending))
	}
	for _, h := range u.site.hosts {
		if h.state() == MachineActive {
			for _, l := range h.loads {
				if l.demand.unit == u {
					up += int64(l.pods)
				}
			}
		}
	}
	return saturate(min(said, up))
}

func (h *host) state() MachineState {
	if h.machine == nil {
		return MachineInFlight
	}
	return h.machine.State
}

func (h *host) settled() bool {
	return h.machine != nil && h.machine.State == MachineActive && h.machine.Settled
}

func (h *host) reclaiming() bool { return h.machine != nil && h.machine.State == MachineReclaiming }

func (h *host) podsOf(d *demand) int32 {
	for _, l := range h.loads {
		if l.demand == d {
			return l.pods
		}
	}
	return 0
}

func (h *host) fullFor(d *demand) bool {
	return slices.Contains(h.full, d)
}

func newPlanner(in Input) *planner {
	p := &planner{space: newResourceSpace(in.Clusters)}
	p.addSlots(in.Offerings)
	clusters := slices.Clone(in.Clusters)
	slices.SortStableFunc(clusters, func(a, b ClusterInput) int { return cmp.Compare(a.ID, b.ID) })
	for i := range clusters {
		p.addSite(&clusters[i])
	}
	slices.SortStableFunc(p.units, compareUnits)
	return p
}

// compareUnits orders by priority over the whole fleet; then gangs, which have the fewest ways to stand, then large pods.
func compareUnits(a, b *unit) int {
	gang := func(u *unit) int {
		if u.gang() {
			return 0
		}
		return 1
	}
	return cmp.Or(
		cmp.Compare(b.priority, a.priority),
		cmp.Compare(gang(a), gang(b)),
		cmp.Compare(b.size, a.size),
		cmp.Compare(a.site.in.ID, b.site.in.ID),
		cmp.Compare(a.id, b.id),
	)
}

func (p *planner) addSlots(offerings []Offering) {
	p.largest = make(vector, len(p.space.names))
	for i := range offerings {
		o := &offerings[i]
		capacity := p.space.capacity(o.Allocatable)
		for j, v := range capacity {
			p.largest[j] = max(p.largest[j], v)
		}
		for j := range o.Domains {
			d := &o.Domains[j]
			labels := merge(o.Labels, d.Labels)
			if _, named := labels[hostnameKey]; !named {
				labels[hostnameKey] = newHostname
			}
			p.slots = append(p.slots, &slot{
				offering: o, domain: d, labels: labels, capacity: capacity,
				cost: price(o.Cost), stock: max(0, d.Available),
			})
		}
	}
	slices.SortStableFunc(p.slots, func(a, b *slot) int {
		return cmp.Or(cmp.Compare(a.offering.Name, b.offering.Name), cmp.Compare(a.domain.Name, b.domain.Name))
	})
}

func (p *planner) addSite(in *ClusterInput) {
	s := &site{
		in: in, byID: map[string]*demand{}, shapes: map[string]*shape{}, anti: map[antiDomain]int32{},
		slotShape: make([]*shape, len(p.slots)),
	}
	for i := range in.Needs {
		if n := &in.Needs[i]; s.byID[n.ID] == nil {
			s.byID[n.ID] = p.newDemand(s, n)
		}
	}
	s.addUnits()
	slices.SortStableFunc(s.units, compareUnits)
	for _, u := range s.units {
		for _, d := range u.demands {
			d.index = len(s.demands)
			s.demands = append(s.demands, d)
		}
	}
	s.keys = s.decisiveKeys()
	p.sites = append(p.sites, s)
	p.units = append(p.units, s.units...)
	for _, d := range s.demands {
		d.price = p.lowestPrice(d)
	}
	p.addHosts(s)
}

func (p *planner) newDemand(s *site, n *Need) *demand {
	clean := *n
	clean.Count = max(0, n.Count)
	clean.Pending = min(max(0, n.Pending), clean.Count)
	d := &demand{
		Need: &clean, site: s, request: p.space.request(n.Profile.Resources), counts: map[string]map[string]int32{},
	}
	for i, v := range d.request {
		if v > 0 {
			d.dims = append(d.dims, i)
		}
	}
	d.size = size(d.request, p.largest)
	for _, spread := range n.Profile.Spread {
		spread.MaxSkew = max(1, spread.MaxSkew)
		hard := spread.WhenUnsatisfiable != corev1.ScheduleAnyway
		switch {
		case spread.TopologyKey == hostnameKey && hard:
			if d.hostSkew == 0 || spread.MaxSkew < d.hostSkew {
				d.hostSkew = spread.MaxSkew
			}
			d.hostMin = max(d.hostMin, spread.MinDomains)
			continue
		case spread.TopologyKey == hostnameKey:
			continue // packing decides
		case hard:
			d.hard = append(d.hard, spread)
		default:
			d.soft = append(d.soft, spread)
		}
		d.counts[spread.TopologyKey] = map[string]int32{}
	}
	for _, a := range n.Profile.AntiAffinity {
		if a.TopologyKey == hostnameKey {
			d.hostAnti = append(d.hostAnti, a.Set)
		} else {
			d.domainAnti = append(d.domainAnti, a)
		}
	}
	return d
}

// addUnits joins the needs of a group.
func (s *site) addUnits() {
	groups := map[string]*unit{}
	for _, id := range sortedKeys(s.byID) {
		d := s.byID[id]
		g := d.Profile.Group
		var u *unit
		if g != nil {
			u = groups[g.Name]
		}
		if u == nil {
			u = &unit{site: s, id: id, priority: d.Profile.Priority, at: map[string]int32{}}
			s.units = append(s.units, u)
		}
		if g != nil {
			groups[g.Name] = u
			u.minCount = max(u.minCount, g.MinCount)
			if g.TopologyKey != "" {
				u.addSame(Requirement{Key: g.TopologyKey, Operator: OperatorSame})
			}
		}
		for _, r := range d.Profile.Requirements {
			if r.Operator == OperatorSame {
				u.addSame(r)
			}
		}
		u.priority = max(u.priority, d.Profile.Priority)
		u.size = max(u.size, d.size)
		u.demands = append(u.demands, d)
		d.unit = u
	}
	for _, u := range s.units {
		slices.SortStableFunc(u.demands, func(a, b *demand) int {
			return cmp.Or(cmp.Compare(b.size, a.size), cmp.Compare(a.ID, b.ID))
		})
	}
}

func (u *unit) addSame(r Requirement) {
	if r.Key == hostnameKey {
		u.sameHost = true
		return
	}
	for i := range u.same {
		if u.same[i].Key != r.Key {
			continue
		}
		switch {
		case len(u.same[i].Values) == 0:
			u.same[i].Values = r.Values
		case len(r.Values) > 0:
			u.same[i].Values = intersect(u.same[i].Values, r.Values)
			if len(u.same[i].Values) == 0 {
				u.same[i].Values = []string{""} // no node's value: two needs of the group contradict each other
			}
		}
		return
	}
	u.same = append(u.same, r)
}

// decisiveKeys lists the label keys that any need or DaemonSet of the cluster asks about.
func (s *site) decisiveKeys() []string {
	keys := map[string]bool{}
	sets := func(sets ...[]Requirement) {
		for _, set := range sets {
			for i := range set {
				if set[i].Key != hostnameKey || set[i].Operator != OperatorSame {
					keys[set[i].Key] = true
				}
			}
		}
	}
	for _, d := range s.demands {
		sets(d.Profile.Requirements)
		sets(d.Profile.Alternatives...)
		for key := range d.counts {
			keys[key] = true
		}
		for _, a := range d.domainAnti {
			keys[a.TopologyKey] = true
		}
	}
	for _, u := range s.units {
		sets(u.same)
	}
	for i := range s.in.Daemons {
		sets(s.in.Daemons[i].NodeAffinity...)
	}
	return sortedKeys(keys)
}

// lowestPrice is the least that one pod can cost: a whole node's cost shared by as many as fit.
func (p *planner) lowestPrice(d *demand) float64 {
	price := 0.0
	for i, sl := range p.slots {
		sh := p.shapeOfSlot(d.site, i)
		if !sh.acceptsPods(d) {
			continue
		}
		if n := d.perNode(sh.room); n > 0 {
			if c := sl.cost / float64(n); price == 0 || c < price {
				price = c
			}
		}
	}
	return price
}

// perNode is how many pods of d an empty node with this room carries.
func (d *demand) perNode(room vector) int32 {
	n := fitCount(room, d)
	if len(d.hostAnti)+len(d.domainAnti) > 0 {
		n = min(n, 1)
	}
	return n
}
