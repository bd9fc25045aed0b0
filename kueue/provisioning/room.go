package provisioning

import (
	"cmp"
	"math"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	resourcehelper "k8s.io/component-helpers/resource"

	"github.com/drover-sh/drover/capacity"
)

// Node is what a node still has to give.
type Node struct {
	Name   string
	Labels map[string]string
	Taints []corev1.Taint
	Free   capacity.Resources
	// Ports are the host ports that are taken, as the anti-affinity that a profile makes of them.
	Ports map[capacity.AntiAffinity]bool
}

// Daemon is a DaemonSet as room depends on it.
type Daemon struct {
	UID types.UID
	capacity.Daemon
}

// DaemonsOf reads DaemonSets.
func DaemonsOf(sets []appsv1.DaemonSet) []Daemon {
	out := make([]Daemon, 0, len(sets))
	for i := range sets {
		if sets[i].DeletionTimestamp == nil {
			out = append(out, Daemon{sets[i].UID, capacity.DaemonOf(&sets[i])})
		}
	}
	return out
}

// NodeOf subtracts from a node's allocatable resources what the pods on it request, and what the DaemonSets will whose pods
// are not there yet. pods are those bound to the node; ended ones take nothing.
func NodeOf(n *corev1.Node, pods []corev1.Pod, daemons []Daemon) Node {
	free := capacity.ResourcesOf(n.Status.Allocatable)
	if _, limited := n.Status.Allocatable[corev1.ResourcePods]; !limited {
		free[corev1.ResourcePods] = math.MaxInt32
	}
	there := map[types.UID]bool{}
	ports := map[capacity.AntiAffinity]bool{}
	for i := range pods {
		pod := &pods[i]
		if capacity.IsTerminal(pod) {
			continue
		}
		requests := resourcehelper.PodRequests(pod, resourcehelper.PodResourcesOptions{})
		free = free.Sub(onePod(capacity.ResourcesOf(requests)))
		if owner := metav1.GetControllerOfNoCopy(pod); owner != nil {
			there[owner.UID] = true
		}
		for _, port := range capacity.HostPortsOf(&pod.Spec) {
			ports[port] = true
		}
	}
	for _, d := range daemons {
		if !there[d.UID] && d.RunsOn(n.Labels, n.Spec.Taints) {
			free = free.Sub(onePod(d.Resources))
		}
	}
	return Node{Name: n.Name, Labels: n.Labels, Taints: n.Spec.Taints, Free: free, Ports: ports}
}

// IsReady reports whether new pods can start on the node: it is Ready and not cordoned.
func IsReady(n *corev1.Node) bool {
	if n.Spec.Unschedulable || n.DeletionTimestamp != nil {
		return false
	}
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// onePod adds the pod itself, which a node's resource "pods" limits.
func onePod(r capacity.Resources) capacity.Resources {
	return r.Add(capacity.Resources{corev1.ResourcePods: 1})
}

// Room is the free room of a set of nodes. What is placed or promised is taken from it. It is a plain sum of
// resources, labels, taints, host ports, shared domains and anti-affinity within one booking; volumes, spreading and
// anti-affinity to the pods of others are the scheduler's.
type Room struct {
	nodes []*Node
}

// NewRoom makes room of nodes. Their order does not matter.
func NewRoom(nodes []Node) *Room {
	r := &Room{}
	for _, n := range nodes {
		n.Free = n.Free.Clone()
		r.nodes = append(r.nodes, &n)
	}
	slices.SortFunc(r.nodes, func(a, b *Node) int { return cmp.Compare(a.Name, b.Name) })
	return r
}

// Placement says where pod sets would stand.
type Placement struct {
	// Wanted is how many pods were to be placed; Placed how many found room.
	Wanted, Placed int32
	// Nodes on which they would stand, sorted. Empty unless all found room.
	Nodes []string
	// Domain is the value of the topology key that a group was placed in; that of the last group where there are
	// several.
	Domain string

	taken []share
}

// Complete reports whether every pod found room.
func (p Placement) Complete() bool { return p.Placed >= p.Wanted }

// Place looks for room for all the pods, groups with a topology key in one domain each. When all find room, the room
// is taken; otherwise nothing is, and Placed is the best that could be found.
func (r *Room) Place(sets []PodSet) Placement {
	p := r.place(sets)
	if !p.Complete() {
		p.GiveBack()
		return p
	}
	for _, s := range p.taken {
		p.Nodes = append(p.Nodes, s.node.Name)
	}
	slices.Sort(p.Nodes)
	p.Nodes = slices.Compact(p.Nodes)
	return p
}

// Fit takes room for as many of the pods as find it: of a group with a topology key all or none.
func (r *Room) Fit(set PodSet) Placement {
	p := r.place([]PodSet{set})
	if g := set.Profile.Group; g != nil && g.TopologyKey != "" && !p.Complete() {
		p.GiveBack()
		p.Placed = 0
	}
	return p
}

// GiveBack returns the room that the placement took.
func (p *Placement) GiveBack() {
	giveBack(p.taken)
	p.taken, p.Nodes = nil, nil
}

// place takes room for whatever finds it.
func (r *Room) place(sets []PodSet) Placement {
	p := Placement{}
	// Who has to share a domain has the fewest places to go.
	for _, g := range groupsOf(sets) {
		p.Wanted += g.wanted
		if g.key == "" {
			shares, placed := fill(r.nodes, g.sets)
			p.taken, p.Placed = append(p.taken, shares...), p.Placed+placed
			continue
		}
		var best int32
		for _, d := range r.domains(g.key) {
			shares, placed := fill(d.nodes, g.sets)
			best = max(best, placed)
			if placed == g.wanted {
				p.taken, p.Domain = append(p.taken, shares...), d.value
				break
			}
			giveBack(shares)
		}
		p.Placed += best
	}
	return p
}

// Promise takes room for pods that were promised these nodes, as much as there is: what the pods' own arrival has used
// up needs no promise.
func (r *Room) Promise(sets []PodSet, nodes []string) {
	named := make(map[string]bool, len(nodes))
	for _, name := range nodes {
		named[name] = true
	}
	var own []*Node
	for _, n := range r.nodes {
		if named[n.Name] {
			own = append(own, n)
		}
	}
	for _, g := range groupsOf(sets) {
		fill(own, g.sets)
	}
}

// Hold takes out of the room what somebody was promised on it. Where no nodes are named the pods may go to any: together if
// they find room together, else as many as do.
func (r *Room) Hold(h Holding) {
	if len(h.Nodes) > 0 {
		r.Promise(h.PodSets, h.Nodes)
		return
	}
	if p := r.Place(h.PodSets); p.Complete() {
		return
	}
	for _, g := range groupsOf(h.PodSets) {
		fill(r.nodes, g.sets)
	}
}

// share is what some pods of one set take of a node.
type share struct {
	node  *Node
	needs capacity.Resources
	pods  int32
}

func giveBack(shares []share) {
	for _, s := range shares {
		s.node.Free = s.node.Free.Add(times(s.needs, s.pods))
	}
}

// fill puts as many pods as possible on the nodes and says what it took.
func fill(nodes []*Node, sets []PodSet) (shares []share, placed int32) {
	sets = slices.Clone(sets)
	scarce := make(map[string]int64, len(sets))
	for i := range sets {
		id := sets[i].Profile.ID()
		for _, n := range nodes {
			scarce[id] += int64(fits(n, &sets[i].Profile, math.MaxInt32))
		}
	}
	// The set with the fewest places chooses first.
	slices.SortStableFunc(sets, func(a, b PodSet) int {
		return cmp.Compare(scarce[a.Profile.ID()], scarce[b.Profile.ID()])
	})
	apart := map[[3]string]bool{}
	for i := range sets {
		p, left := &sets[i].Profile, sets[i].Count
		type place struct {
			node *Node
			room int32
		}
		var places []place
		for _, n := range nodes {
			if n.portTaken(p) {
				continue
			}
			if room := fits(n, p, sets[i].Count); room > 0 {
				places = append(places, place{n, room})
			}
		}
		// The tightest first, so that large holes stay large.
		slices.SortStableFunc(places, func(a, b place) int { return cmp.Compare(a.room, b.room) })
		for _, pl := range places {
			if left == 0 {
				break
			}
			pods := min(pl.room, left)
			if len(p.AntiAffinity) > 0 {
				if !standsApart(apart, p, pl.node) {
					continue
				}
				pods = 1
			}
			needs := onePod(p.Resources)
			pl.node.Free = pl.node.Free.Sub(times(needs, pods))
			shares = append(shares, share{node: pl.node, needs: needs, pods: pods})
			left, placed = left-pods, placed+pods
		}
	}
	return shares, placed
}

// standsApart reports whether a pod may stand on the node beside those already placed, and remembers that it does.
func standsApart(taken map[[3]string]bool, p *capacity.Profile, n *Node) bool {
	for _, a := range p.AntiAffinity {
		if value, labelled := n.Labels[a.TopologyKey]; labelled && taken[[3]string{a.TopologyKey, a.Set, value}] {
			return false
		}
	}
	for _, a := range p.AntiAffinity {
		if value, labelled := n.Labels[a.TopologyKey]; labelled {
			taken[[3]string{a.TopologyKey, a.Set, value}] = true
		}
	}
	return true
}

// portTaken reports whether a pod that is on the node has one of the host ports.
func (n *Node) portTaken(p *capacity.Profile) bool {
	return len(n.Ports) > 0 && slices.ContainsFunc(p.AntiAffinity, func(a capacity.AntiAffinity) bool { return n.Ports[a] })
}

// fits is how many pods of the profile the node carries, at most limit.
func fits(n *Node, p *capacity.Profile, limit int32) int32 {
	if !p.MatchesLabels(n.Labels) || !capacity.Tolerates(p.Tolerations, n.Taints) {
		return 0
	}
	count := int64(limit)
	for name, v := range onePod(p.Resources) {
		if v > 0 {
			count = min(count, max(0, n.Free[name]/v))
		}
	}
	return int32(count)
}

func times(r capacity.Resources, n int32) capacity.Resources {
	out := make(capacity.Resources, len(r))
	for name, v := range r {
		if v > math.MaxInt64/int64(max(n, 1)) {
			out[name] = math.MaxInt64
			continue
		}
		out[name] = v * int64(n)
	}
	return out
}

type group struct {
	key    string
	sets   []PodSet
	wanted int32
}

// groupsOf joins the sets by group; those with a topology key come first.
func groupsOf(sets []PodSet) []group {
	var groups []group
	at := map[string]int{}
	for _, s := range sets {
		if s.Count <= 0 {
			continue
		}
		var name, key string
		if g := s.Profile.Group; g != nil {
			name, key = g.Name, g.TopologyKey
		}
		i, known := at[name]
		if !known {
			i = len(groups)
			at[name] = i
			groups = append(groups, group{key: key})
		}
		groups[i].key = cmp.Or(groups[i].key, key)
		groups[i].sets = append(groups[i].sets, s)
		groups[i].wanted += s.Count
	}
	slices.SortStableFunc(groups, func(a, b group) int {
		if (a.key == "") == (b.key == "") {
			return 0
		}
		if a.key == "" {
			return 1
		}
		return -1
	})
	return groups
}

type domain struct {
	value string
	nodes []*Node
}

// domains splits the nodes by the value of a label. Nodes without it are in none.
func (r *Room) domains(key string) []domain {
	at := map[string]int{}
	var out []domain
	for _, n := range r.nodes {
		value, labelled := n.Labels[key]
		if !labelled {
			continue
		}
		i, known := at[value]
		if !known {
			i = len(out)
			at[value] = i
			out = append(out, domain{value: value})
		}
		out[i].nodes = append(out[i].nodes, n)
	}
	slices.SortFunc(out, func(a, b domain) int { return cmp.Compare(a.value, b.value) })
	return out
}
