package rollup

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/drover-sh/drover/capacity"
)

// Resident is a pod on a node, as far as moving it is concerned.
type Resident struct {
	// Name is namespace/name, for explanations.
	Name     string
	Priority int32
	Profile  capacity.Profile
	// ProfileID is Profile.ID().
	ProfileID string
	// Ports are the host ports it takes, as "TCP/80".
	Ports []string
	// Zonal pods hold volumes, and are taken to be bound to their node's zone.
	Zonal bool
	// Stays says why the pod must not be moved; empty when it may be.
	Stays string
}

// Host is a node as reclaim sees it.
type Host struct {
	Name    string
	Machine string // value of the machine label; empty for a static node
	Labels  map[string]string
	Taints  []corev1.Taint
	// Free is what is allocatable and not requested by any pod, DaemonSet and mirror pods included.
	Free capacity.Resources
	// Ports are the host ports that pods which stay with the node take.
	Ports []string
	// Residents are the pods that an eviction would have to move.
	Residents []Resident
	// Closed hosts take no pods: cordoned, not ready, or being drained.
	Closed bool
}

// Kept is a candidate that cannot go, and why.
type Kept struct {
	Host   *Host
	Reason string
}

// Choose picks up to count of the candidates, those whose loss disturbs least: empty ones first, then by the highest
// priority among their pods, then by the number of pods. A candidate with pods is picked only if all of them fit on the
// hosts that remain, each next to what was moved before it. At most loaded candidates with pods are picked; when that is
// what ends the choice, limited is true. Candidates looked at and found wanting are returned as kept.
//
// The fit is plain arithmetic on resources, host ports, taints, node selectors and affinity. Where a rule depends on where
// other pods stand (spread, anti-affinity, co-location, volumes) it errs on the side of keeping the node. hosts gives every
// node of the cluster, candidates included; it is asked only when a candidate has pods. Choose changes no Host.
func Choose(count, loaded int, candidates []*Host, hosts func() []*Host) (chosen []*Host, kept []Kept, limited bool) {
	ordered := slices.Clone(candidates)
	slices.SortStableFunc(ordered, func(a, b *Host) int {
		return cmp.Or(
			cmp.Compare(topPriority(a), topPriority(b)),
			cmp.Compare(len(a.Residents), len(b.Residents)),
			cmp.Compare(a.Name, b.Name),
		)
	})
	var room *rooms // built for the first candidate that has pods
	for _, host := range ordered {
		if len(chosen) >= count {
			break
		}
		if len(host.Residents) == 0 && (room == nil || !room.received(host)) {
			chosen = append(chosen, host)
			if room != nil {
				room.close(host)
			}
			continue
		}
		if loaded <= 0 {
			limited = true
			break
		}
		if room == nil {
			room = newRooms(hosts(), ordered, chosen)
		}
		if reason := room.move(host); reason != "" {
			kept = append(kept, Kept{Host: host, Reason: reason})
			continue
		}
		chosen = append(chosen, host)
		loaded--
	}
	return chosen, kept, limited
}

// noPods sorts before every priority.
const noPods = int64(-1) << 40

func topPriority(h *Host) int64 {
	top := noPods
	for _, p := range h.Residents {
		top = max(top, int64(p.Priority))
	}
	return top
}

// room is a host with what a choice has moved onto it.
type room struct {
	*Host
	free   capacity.Resources
	pods   []Resident
	ports  map[string]bool
	closed bool
	moved  bool // took in a pod of a chosen host
}

// rooms is the cluster during one choice.
type rooms struct {
	order  []*room // where displaced pods are tried: hosts that are no candidates first, likeliest candidates last
	byName map[string]*room
	// sets counts the pods of an anti-affinity set per domain, as {topology key, domain, set}.
	sets map[[3]string]int
}

func newRooms(hosts, candidates, chosen []*Host) *rooms {
	rs := &rooms{byName: make(map[string]*room, len(hosts)), sets: map[[3]string]int{}}
	rank := make(map[string]int, len(candidates))
	for i, c := range candidates {
		rank[c.Name] = len(candidates) - i
	}
	for _, h := range hosts {
		r := &room{Host: h, free: maps.Clone(h.Free), pods: slices.Clone(h.Residents), ports: map[string]bool{}, closed: h.Closed}
		r.take(h.Ports)
		for _, p := range h.Residents {
			r.take(p.Ports)
			rs.count(h, p, 1)
		}
		rs.byName[h.Name] = r
		rs.order = append(rs.order, r)
	}
	slices.SortStableFunc(rs.order, func(a, b *room) int {
		return cmp.Or(cmp.Compare(rank[a.Name], rank[b.Name]), cmp.Compare(a.Name, b.Name))
	})
	for _, c := range chosen {
		rs.close(c)
	}
	return rs
}

func (rs *rooms) close(h *Host) {
	if r := rs.byName[h.Name]; r != nil {
		r.closed = true
	}
}

func (rs *rooms) received(h *Host) bool {
	r := rs.byName[h.Name]
	return r != nil && r.moved
}

func (r *room) take(ports []string) {
	for _, p := range ports {
		r.ports[p] = true
	}
}

func (rs *rooms) count(h *Host, p Resident, n int) {
	for _, a := range p.Profile.AntiAffinity {
		if domain, ok := h.Labels[a.TopologyKey]; ok {
			rs.sets[[3]string{a.TopologyKey, domain, a.Set}] += n
		}
	}
}

// placement is one pod's new place, so that a failed move can be undone.
type placement struct {
	to  *room
	pod Resident
}

// move finds a place for every pod of host and closes it. On failure it returns why, and nothing has changed.
func (rs *rooms) move(host *Host) (reason string) {
	from := rs.byName[host.Name]
	if from == nil {
		return "the node is not known"
	}
	for _, p := range from.pods {
		if p.Stays != "" {
			return fmt.Sprintf("pod %s %s", p.Name, p.Stays)
		}
	}
	wasClosed := from.closed
	from.closed = true
	// Large pods first: they have the fewest places.
	pods := slices.Clone(from.pods)
	slices.SortStableFunc(pods, func(a, b Resident) int {
		return cmp.Or(
			cmp.Compare(b.Profile.Resources[corev1.ResourceCPU], a.Profile.Resources[corev1.ResourceCPU]),
			cmp.Compare(b.Profile.Resources[corev1.ResourceMemory], a.Profile.Resources[corev1.ResourceMemory]),
			cmp.Compare(a.Name, b.Name),
		)
	})
	var done []placement
	for _, p := range pods {
		rs.count(host, p, -1)
		to, why := rs.place(from, p)
		if to == nil {
			rs.count(host, p, 1)
			for _, d := range slices.Backward(done) {
				rs.unplace(from, d)
			}
			from.closed = wasClosed
			return fmt.Sprintf("pod %s fits on no other node: %s", p.Name, why)
		}
		done = append(done, placement{to, p})
	}
	for _, d := range done {
		d.to.moved = true
	}
	from.pods = nil
	return ""
}

// place puts p on the first room that can take it. Without one it says how many hosts refused for which reason.
func (rs *rooms) place(from *room, p Resident) (to *room, why string) {
	refusals := map[string]int{}
	for _, r := range rs.order {
		if r == from {
			continue
		}
		if refusal := rs.refuses(r, from, p); refusal != "" {
			refusals[refusal]++
			continue
		}
		r.free = r.free.Sub(oneMore(p))
		r.pods = append(r.pods, p)
		r.take(p.Ports)
		rs.count(r.Host, p, 1)
		return r, ""
	}
	if len(refusals) == 0 {
		return nil, "there is none"
	}
	for _, refusal := range slices.Sorted(maps.Keys(refusals)) {
		if why != "" {
			why += ", "
		}
		why += fmt.Sprintf("%d %s", refusals[refusal], refusal)
	}
	return nil, why
}

func (rs *rooms) unplace(from *room, d placement) {
	d.to.free = d.to.free.Add(oneMore(d.pod))
	d.to.pods = d.to.pods[:len(d.to.pods)-1]
	for _, p := range d.pod.Ports {
		delete(d.to.ports, p)
	}
	rs.count(d.to.Host, d.pod, -1)
	rs.count(from.Host, d.pod, 1)
}

// refuses says why r cannot take p, which now stands on from; empty when it can.
func (rs *rooms) refuses(r, from *room, p Resident) string {
	switch {
	case r.closed:
		return "are closed to pods"
	case !oneMore(p).Fits(r.free):
		return "have too little free"
	case !capacity.Tolerates(p.Profile.Tolerations, r.Taints):
		return "have taints that it does not tolerate"
	case !p.Profile.MatchesLabels(r.Labels):
		return "do not match its node selector or affinity"
	case slices.ContainsFunc(p.Ports, func(port string) bool { return r.ports[port] }):
		return "have its host port taken"
	case p.Zonal && r.Labels[corev1.LabelTopologyZone] != from.Labels[corev1.LabelTopologyZone]:
		return "are in another zone than its volumes"
	}
	if g := p.Profile.Group; g != nil && g.TopologyKey != "" && r.Labels[g.TopologyKey] != from.Labels[g.TopologyKey] {
		return "are in another " + g.TopologyKey + " than its group"
	}
	for _, a := range p.Profile.AntiAffinity {
		domain, ok := r.Labels[a.TopologyKey]
		if ok && rs.sets[[3]string{a.TopologyKey, domain, a.Set}] > 0 {
			return "already carry a pod that it must not share a domain with"
		}
	}
	for _, s := range p.Profile.Spread {
		if s.WhenUnsatisfiable != corev1.DoNotSchedule {
			continue
		}
		if s.TopologyKey != corev1.LabelHostname {
			// Staying in its domain leaves the skew as it is.
			if r.Labels[s.TopologyKey] != from.Labels[s.TopologyKey] {
				return "are in another " + s.TopologyKey + ", which could break its spread"
			}
			continue
		}
		// No domain may become fuller than the one that the pod leaves.
		if twins(r, p)+1 > twins(from, p) {
			return "would carry too many pods of its spread"
		}
	}
	return ""
}

func twins(r *room, p Resident) (n int) {
	for _, other := range r.pods {
		if other.ProfileID == p.ProfileID {
			n++
		}
	}
	return n
}

// oneMore is what p takes of a node, its place among the node's pods included.
func oneMore(p Resident) capacity.Resources {
	r := p.Profile.Resources.Clone()
	if r == nil {
		r = capacity.Resources{}
	}
	r[corev1.ResourcePods] = 1
	return r
}
