package capacity

import (
	"cmp"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
)

// settle brings what a pod and its requests count in line with what is known of them.
func (r *Rollup) settle(o *owner) {
	for _, req := range o.requests {
		r.settleOne(req)
	}
	if o.pod != nil {
		r.settlePod(o.pod)
	}
}

// settleRequest is settle for a change of one request.
func (r *Rollup) settleRequest(req *request) {
	if req.owner == nil {
		r.count(&req.counted, req.row, false, req.minCount)
		return
	}
	r.settle(req.owner)
}

func (r *Rollup) settleOne(req *request) {
	p := req.owner.pod
	pending := p != nil && p.node == nil && !p.ended
	counts := r.mode == DemandRequestsOnly || req == req.owner.requests[0] && p != nil && !p.ended &&
		(p.node == nil || p.node.managed)
	if !counts {
		r.count(&req.counted, nil, false, 0)
		return
	}
	r.count(&req.counted, req.row, pending, req.minCount)
}

func (r *Rollup) settlePod(p *pod) {
	counts := r.mode != DemandRequestsOnly && len(p.owner.requests) == 0 && !p.ended && !p.exempt &&
		p.node != nil && p.node.managed
	if !counts {
		r.count(&p.counted, nil, false, 0)
		return
	}
	// A pod does not know how many members its gang needs.
	r.count(&p.counted, p.row, false, 0)
}

// count replaces what an object contributes; to nil takes it back.
func (r *Rollup) count(c *contribution, to *row, pending bool, minCount int32) {
	next := contribution{row: to, pending: pending, minCount: minCount}
	if *c == next {
		return
	}
	if c.row != nil {
		c.row.add(*c, -1)
	}
	if to != nil {
		to.add(next, 1)
	}
	*c = next
	r.version++
}

func (w *row) add(c contribution, n int32) {
	w.count += n
	if c.pending {
		w.pending += n
	}
	if c.minCount == 0 {
		return
	}
	if w.minCounts == nil {
		w.minCounts = map[int32]int32{}
	}
	if w.minCounts[c.minCount] += n; w.minCounts[c.minCount] == 0 {
		delete(w.minCounts, c.minCount)
	}
}

// acquire finds or makes the row of a canonical profile; release gives it back.
func (r *Rollup) acquire(p Profile) *row {
	id := p.id()
	w := r.rows[id]
	if w == nil {
		w = &row{id: id, profile: p.WithMinCount(0)}
		r.rows[id] = w
	}
	w.refs++
	return w
}

func (r *Rollup) release(w *row) {
	if w == nil {
		return
	}
	if w.refs--; w.refs == 0 {
		delete(r.rows, w.id)
	}
}

func (r *Rollup) ownerOf(uid types.UID) *owner {
	o := r.byUID[uid]
	if o == nil {
		o = &owner{uid: uid}
		r.byUID[uid] = o
	}
	return o
}

func (r *Rollup) forget(o *owner) {
	if o.pod == nil && len(o.requests) == 0 {
		delete(r.byUID, o.uid)
	}
}

func (r *Rollup) node(name string) *node {
	n := r.nodes[name]
	if n == nil {
		n = &node{name: name, pods: map[types.NamespacedName]*pod{}}
		r.nodes[name] = n
	}
	return n
}

func (r *Rollup) dropNode(n *node) {
	if !n.known && len(n.pods) == 0 {
		delete(r.nodes, n.name)
	}
}

func (r *Rollup) setManaged(n *node, managed bool) {
	if n.managed == managed {
		return
	}
	n.managed = managed
	for _, p := range n.pods {
		r.settle(p.owner)
	}
}

// bind moves a pod to a node; no name unbinds it.
func (r *Rollup) bind(p *pod, name string) {
	old := p.node
	if old != nil && old.name == name {
		return
	}
	if old != nil {
		p.node = nil
		delete(old.pods, p.key)
		r.dropNode(old)
	}
	if name != "" {
		p.node = r.node(name)
		p.node.pods[p.key] = p
	}
}

// podOwner is the UID of the Pod that owns the request; empty when none does.
func podOwner(cr *fleetv1alpha1.CapacityRequest) types.UID {
	for i := range cr.OwnerReferences {
		if ref := &cr.OwnerReferences[i]; ref.Kind == "Pod" && ref.APIVersion == corev1.SchemeGroupVersion.String() {
			return ref.UID
		}
	}
	return ""
}

// uidOf is the pod's UID. Only an object that never was at an API server has none; its name then stands in.
func uidOf(p *corev1.Pod) types.UID {
	if p.UID == "" {
		return types.UID(p.Namespace + "/" + p.Name)
	}
	return p.UID
}

func ownerUID(o *owner) types.UID {
	if o == nil {
		return ""
	}
	return o.uid
}

func compareNames(a, b types.NamespacedName) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
}

func compareDaemons(a, b Daemon) int {
	return cmp.Or(
		slices.CompareFunc(a.NodeAffinity, b.NodeAffinity, compareRequirementSets),
		slices.CompareFunc(a.Tolerations, b.Tolerations, compareTolerations),
		compareResources(a.Resources, b.Resources),
	)
}

func compareResources(a, b Resources) int {
	names := sortedKeys(a)
	if c := slices.Compare(names, sortedKeys(b)); c != 0 {
		return c
	}
	for _, name := range names {
		if c := cmp.Compare(a[name], b[name]); c != 0 {
			return c
		}
	}
	return 0
}
