package capacity

import (
	"cmp"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
)

// DemandMode says what a roll-up counts. Its values are those of the configuration files.
type DemandMode string

const (
	// DemandTotal counts requests and every bound pod on a managed node.
	DemandTotal DemandMode = "Total"
	// DemandRequestsOnly counts CapacityRequests and nothing else.
	DemandRequestsOnly DemandMode = "RequestsOnly"
)

// Rollup adds a cluster's demand up to a few rows (section 7). It is told of every change to requests, pods, nodes
// and DaemonSets, in any order and as often as one likes, and always equals what a count from scratch would give. A
// change costs O(1), but for a node that becomes managed or static, which costs its own pods; a Snapshot costs the
// number of profiles.
//
// In mode Total a request that a Pod owns counts while that pod is known, has not ended, is not terminating, and is
// unbound or stands on a managed node: a pod that found room on a static node is nobody's demand. A request without
// such an owner counts until it is deleted. A bound pod without a request counts by its own profile while its node is
// managed; mirror and DaemonSet pods never do. A node is managed while it carries the label fleet.lucy.sh/machine. In
// mode RequestsOnly every request counts; pods only tell which of them are pending.
//
// A Rollup is not safe for concurrent use, and keeps none of the objects that it is given.
type Rollup struct {
	mode         DemandMode
	profileOfPod func(*corev1.Pod) Profile

	rows     map[string]*row
	requests map[types.NamespacedName]*request
	pods     map[types.NamespacedName]*pod
	// byUID finds the pod that owns a request. A request may know the pod's UID before the pod is known.
	byUID map[types.UID]*owner
	nodes map[string]*node
	// daemons is small: one entry for each DaemonSet.
	daemons map[types.NamespacedName]Daemon
	version uint64
}

// row is one profile and what of it counts. It lives as long as anything has that profile, counted or not.
type row struct {
	id      string
	profile Profile
	refs    int
	count   int32
	pending int32
	// minCounts says how often each Group.MinCount occurs among what counts, as it is no part of the profile's
	// identity.
	minCounts map[int32]int32
}

type request struct {
	key      types.NamespacedName
	owner    *owner // nil when no Pod owns it
	row      *row
	minCount int32
	counted  contribution
}

type pod struct {
	key         types.NamespacedName
	owner       *owner
	row         *row
	node        *node // nil while unbound
	ended       bool  // terminal or terminating
	exempt      bool  // a mirror or DaemonSet pod
	daemon      bool
	mirror      bool
	terminating bool
	counted     contribution
}

// owner joins a pod and its requests by UID, whichever comes first.
type owner struct {
	uid      types.UID
	pod      *pod
	requests []*request // sorted by key; in mode Total only the first counts, so that a doubled request does no harm
}

type node struct {
	name    string
	known   bool
	managed bool
	pods    map[types.NamespacedName]*pod
}

// contribution is what an object has added to a row, so that it can be taken back exactly.
type contribution struct {
	row      *row
	pending  bool
	minCount int32
}

// Snapshot is a roll-up at one moment: a full replacement of the one before.
type Snapshot struct {
	// Needs are sorted by priority, highest first, then by ID. A group's topology key appears as a Same requirement.
	Needs   []Need
	Daemons []Daemon
}

// An Option changes how a Rollup reads what it is given.
type Option func(*Rollup)

// WithPodProfile sets what gives a pod's profile, instead of ProfileOfPod. A caller that writes requests with more
// than the pod says (the place of its volumes, the topology of its gang) passes the same function here, so that bound
// pods without a request count in the same row. It has to return canonical profiles.
func WithPodProfile(profile func(*corev1.Pod) Profile) Option {
	return func(r *Rollup) { r.profileOfPod = profile }
}

// NewRollup returns an empty roll-up.
func NewRollup(mode DemandMode, options ...Option) *Rollup {
	r := &Rollup{
		profileOfPod: ProfileOfPod,

		mode:     mode,
		rows:     map[string]*row{},
		requests: map[types.NamespacedName]*request{},
		pods:     map[types.NamespacedName]*pod{},
		byUID:    map[types.UID]*owner{},
		nodes:    map[string]*node{},
		daemons:  map[types.NamespacedName]Daemon{},
	}
	for _, option := range options {
		option(r)
	}
	return r
}

// UpsertRequest takes in a new or changed request.
func (r *Rollup) UpsertRequest(cr *fleetv1alpha1.CapacityRequest) {
	key := types.NamespacedName{Namespace: cr.Namespace, Name: cr.Name}
	profile := ProfileOfRequest(&cr.Spec)
	uid := podOwner(cr)
	req := r.requests[key]
	if req != nil && ownerUID(req.owner) != uid {
		// Another object under the same name.
		r.DeleteRequest(key)
		req = nil
	}
	if req == nil {
		req = &request{key: key}
		r.requests[key] = req
		if uid != "" {
			req.owner = r.ownerOf(uid)
			at, _ := slices.BinarySearchFunc(req.owner.requests, key, func(o *request, k types.NamespacedName) int {
				return compareNames(o.key, k)
			})
			req.owner.requests = slices.Insert(req.owner.requests, at, req)
		}
	}
	old := req.row
	req.row = r.acquire(profile)
	req.minCount = 0
	if profile.Group != nil {
		req.minCount = profile.Group.MinCount
	}
	r.settleRequest(req)
	r.release(old)
}

// DeleteRequest forgets a request; an unknown one is no error.
func (r *Rollup) DeleteRequest(key types.NamespacedName) {
	req := r.requests[key]
	if req == nil {
		return
	}
	delete(r.requests, key)
	r.count(&req.counted, nil, false, 0)
	r.release(req.row)
	if o := req.owner; o != nil {
		o.requests = slices.DeleteFunc(o.requests, func(other *request) bool { return other == req })
		r.settle(o)
		r.forget(o)
	}
}

// UpsertPod takes in a new or changed pod. Another UID under a known name is another pod: the former one is gone.
func (r *Rollup) UpsertPod(p *corev1.Pod) {
	key := types.NamespacedName{Namespace: p.Namespace, Name: p.Name}
	uid := uidOf(p)
	known := r.pods[key]
	if known != nil && known.owner.uid != uid {
		r.DeletePod(key)
		known = nil
	}
	if known == nil {
		o := r.ownerOf(uid)
		if o.pod != nil {
			r.DeletePod(o.pod.key)
			o = r.ownerOf(uid)
		}
		known = &pod{key: key, owner: o}
		o.pod = known
		r.pods[key] = known
	}
	known.terminating = p.DeletionTimestamp != nil
	known.ended = known.terminating || IsTerminal(p)
	known.daemon, known.mirror = IsDaemonPod(p), IsMirrorPod(p)
	known.exempt = known.daemon || known.mirror
	old := known.row
	known.row = r.acquire(r.profileOfPod(p))
	r.bind(known, p.Spec.NodeName)
	r.settle(known.owner)
	r.release(old)
}

// DeletePod forgets a pod; an unknown one is no error.
func (r *Rollup) DeletePod(key types.NamespacedName) {
	p := r.pods[key]
	if p == nil {
		return
	}
	delete(r.pods, key)
	r.count(&p.counted, nil, false, 0)
	r.bind(p, "")
	r.release(p.row)
	p.owner.pod = nil
	r.settle(p.owner)
	r.forget(p.owner)
}

// UpsertNode takes in a new or changed node. Only its label fleet.lucy.sh/machine is read.
func (r *Rollup) UpsertNode(n *corev1.Node) {
	known := r.node(n.Name)
	known.known = true
	r.setManaged(known, n.Labels[fleetv1alpha1.LabelMachine] != "")
}

// DeleteNode forgets a node; an unknown one is no error. Pods that are still bound to it stop counting.
func (r *Rollup) DeleteNode(name string) {
	n := r.nodes[name]
	if n == nil {
		return
	}
	n.known = false
	r.setManaged(n, false)
	r.dropNode(n)
}

// UpsertDaemonSet takes in a new or changed DaemonSet.
func (r *Rollup) UpsertDaemonSet(ds *appsv1.DaemonSet) {
	key := types.NamespacedName{Namespace: ds.Namespace, Name: ds.Name}
	daemon := DaemonOf(ds)
	if old, ok := r.daemons[key]; ok && compareDaemons(old, daemon) == 0 {
		return
	}
	r.daemons[key] = daemon
	r.version++
}

// DeleteDaemonSet forgets a DaemonSet; an unknown one is no error.
func (r *Rollup) DeleteDaemonSet(key types.NamespacedName) {
	if _, ok := r.daemons[key]; ok {
		delete(r.daemons, key)
		r.version++
	}
}

// Version changes with every change that a Snapshot would show, and perhaps with some that cancel out.
func (r *Rollup) Version() uint64 { return r.version }

// Snapshot gives the rows that count something. It shares no memory with the roll-up but the profiles' slices and
// maps, which are never written to again.
func (r *Rollup) Snapshot() Snapshot {
	var s Snapshot
	for _, row := range r.rows {
		if row.count > 0 {
			s.Needs = append(s.Needs, row.need())
		}
	}
	slices.SortFunc(s.Needs, func(a, b Need) int {
		return cmp.Or(cmp.Compare(b.Profile.Priority, a.Profile.Priority), cmp.Compare(a.ID, b.ID))
	})
	for _, d := range r.daemons {
		s.Daemons = append(s.Daemons, d)
	}
	slices.SortFunc(s.Daemons, compareDaemons)
	return s
}

func (w *row) need() Need {
	p := w.profile
	if p.Group != nil {
		var minCount int32
		for n := range w.minCounts {
			minCount = max(minCount, n)
		}
		p = p.WithMinCount(minCount)
		if key := p.Group.TopologyKey; key != "" {
			p.Requirements = canonicalRequirements(
				append(slices.Clone(p.Requirements), Requirement{Key: key, Operator: OperatorSame}))
		}
	}
	return Need{ID: w.id, Profile: p, Count: w.count, Pending: w.pending}
}

// Counted reports whether the request is part of what a Snapshot counts now, and so reaches the autoscaler with it.
func (r *Rollup) Counted(key types.NamespacedName) bool {
	req := r.requests[key]
	return req != nil && req.counted.row != nil
}

// PodOnNode is a pod as the roll-up knows it.
type PodOnNode struct {
	Key         types.NamespacedName
	UID         types.UID
	Profile     Profile
	Daemon      bool
	Mirror      bool
	Terminating bool
}

// PodsOn lists the pods on a node that have not ended, terminating ones included, sorted by key.
func (r *Rollup) PodsOn(name string) []PodOnNode {
	n := r.nodes[name]
	if n == nil {
		return nil
	}
	var pods []PodOnNode
	for _, p := range n.pods {
		if p.ended && !p.terminating {
			continue
		}
		pods = append(pods, PodOnNode{
			Key: p.key, UID: p.owner.uid, Profile: p.row.profile,
			Daemon: p.daemon, Mirror: p.mirror, Terminating: p.terminating,
		})
	}
	slices.SortFunc(pods, func(a, b PodOnNode) int { return compareNames(a.Key, b.Key) })
	return pods
}
