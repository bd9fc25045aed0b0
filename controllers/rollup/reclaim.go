package rollup

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	fleetpb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
)

// annotationCordoned marks a node that the operator itself cordoned. Without it the cordon is somebody else's, and stays
// when a reclaim is withdrawn.
const annotationCordoned = "fleet.lucy.sh/cordoned-by-reclaim"

// chooser decides which nodes answer the feed's reclaim instructions and marks them: cordon and taint, in one write. The
// taint's value is the instruction's id and makes the decision durable; drainReconciler does the rest. A pass looks at all
// instructions and runs alone, so that two never count on the same free room.
type chooser struct {
	client    client.Client
	feed      *feed
	reports   *reporter
	maxDrains int
	retry     time.Duration
	clock     clock.PassiveClock
	metrics   *Metrics
	log       logr.Logger
	// refused are nodes whose drain was given up, and until when they are left alone.
	refused *refusals

	// marks are this process's last writes to nodes that the cache does not show yet, by node name.
	marks map[string]mark
}

// mark is a write that the cache is behind of: while it shows the old version, reclaim is what counts.
type mark struct {
	oldVersion string
	reclaim    string // empty: released
}

// refusals remembers nodes that could not be drained. Lost at a restart, which costs one more attempt.
type refusals struct {
	mu    sync.Mutex
	until map[string]time.Time
}

func (r *refusals) add(node string, until time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.until[node] = until
}

func (r *refusals) active(node string, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	until, found := r.until[node]
	if found && !now.Before(until) {
		delete(r.until, node)
		return false
	}
	return found
}

// Reconcile implements reconcile.Reconciler. The request carries nothing.
func (c *chooser) Reconcile(ctx context.Context, _ ctrl.Request) (ctrl.Result, error) {
	state := c.feed.current()
	if state == nil {
		return ctrl.Result{}, nil
	}
	asked := map[string]bool{}
	for _, r := range state.reclaims {
		for _, id := range r.candidates {
			asked[id] = true
		}
	}
	c.reports.forgetKept(func(machine string) bool { return asked[machine] })
	if len(state.reclaims) == 0 {
		clear(c.marks)
		return ctrl.Result{}, nil
	}
	pass, err := c.newPass(ctx)
	if err != nil {
		return ctrl.Result{}, err
	}
	unmet := false
	var errs []error
	for _, id := range slices.Sorted(maps.Keys(state.reclaims)) {
		met, err := c.answer(ctx, pass, state, state.reclaims[id])
		unmet = unmet || !met
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return ctrl.Result{}, err
	}
	if unmet {
		// Pods come and go; a fresh look now and then finds what has become possible.
		return ctrl.Result{RequeueAfter: c.retry}, nil
	}
	return ctrl.Result{}, nil
}

// pass is the cluster at the start of a pass, and what the pass changes.
type pass struct {
	nodes     []*corev1.Node
	byMachine map[string]*corev1.Node
	reclaim   map[string]string // node name to the instruction that it is drained for
	hosts     map[string]*Host

	// podsOn reads a node's pods from the cache. Only nodes that matter are asked for: most passes see a few.
	podsOn func(node string) ([]*corev1.Pod, error)
	err    error // the first failure of podsOn
}

func (c *chooser) newPass(ctx context.Context) (*pass, error) {
	var nodes corev1.NodeList
	if err := c.client.List(ctx, &nodes, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("listing nodes: %w", err)
	}
	p := &pass{
		byMachine: map[string]*corev1.Node{}, reclaim: map[string]string{}, hosts: map[string]*Host{},
		podsOn: func(node string) ([]*corev1.Pod, error) { return podsOn(ctx, c.client, node) },
	}
	marks := map[string]mark{}
	for i := range nodes.Items {
		node := &nodes.Items[i]
		p.nodes = append(p.nodes, node)
		if id := node.Labels[fleetv1alpha1.LabelMachine]; id != "" {
			p.byMachine[id] = node
		}
		p.reclaim[node.Name] = reclaimOf(node)
		if m, found := c.marks[node.Name]; found && m.oldVersion == node.ResourceVersion {
			p.reclaim[node.Name] = m.reclaim
			marks[node.Name] = m
		}
	}
	c.marks = marks
	return p, nil
}

// podsOn lists the pods that are bound to a node, from the cache. They are shared with it: read only.
func podsOn(ctx context.Context, c client.Reader, node string) ([]*corev1.Pod, error) {
	var list corev1.PodList
	if err := c.List(ctx, &list, client.MatchingFields{indexPodNode: node}, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("listing the pods on node %s: %w", node, err)
	}
	pods := make([]*corev1.Pod, len(list.Items))
	for i := range list.Items {
		pods[i] = &list.Items[i]
	}
	return pods, nil
}

func (p *pass) pods(node string) []*corev1.Pod {
	pods, err := p.podsOn(node)
	if err != nil && p.err == nil {
		p.err = err
	}
	return pods
}

// host describes a node for the choice, once per pass.
func (p *pass) host(node *corev1.Node) *Host {
	h := p.hosts[node.Name]
	if h == nil {
		h = hostOf(node, p.pods(node.Name))
		p.hosts[node.Name] = h
	}
	h.Closed = h.Closed || p.reclaim[node.Name] != ""
	return h
}

// loaded counts the nodes under reclaim that still run pods.
func (p *pass) loaded() (n int) {
	for _, node := range p.nodes {
		if p.reclaim[node.Name] != "" && slices.ContainsFunc(p.pods(node.Name), evictable) {
			n++
		}
	}
	return n
}

// answer brings the nodes drained for one instruction to its count: the candidates that are listed, those under way and
// those whose node is gone already included. It returns whether nothing is left to choose.
func (c *chooser) answer(ctx context.Context, p *pass, state *feedState, r *reclaim) (met bool, err error) {
	var under, free []*corev1.Node
	gone := 0
	for _, id := range r.candidates {
		node := p.byMachine[id]
		switch {
		case node == nil && state.machines[id] == nil:
			c.missing(id, r, state)
			gone++
		case node == nil || node.DeletionTimestamp != nil:
			// On its way in, or out by somebody else's hand.
		case p.reclaim[node.Name] == r.id:
			under = append(under, node)
		case p.reclaim[node.Name] == "" && !state.terminating[id] && !c.refused.active(node.Name, c.clock.Now()):
			free = append(free, node)
		}
	}
	missing := r.count - len(under) - gone
	if missing < 0 {
		return true, c.giveBack(ctx, p, under, -missing)
	}
	if missing == 0 {
		return true, nil
	}
	return c.take(ctx, p, r, free, missing)
}

// missing answers for a candidate that has no node. Mostly its end is on its way to the autoscaler. Where it is not, as
// the node went while nobody led, the instruction would wait for it for ever: another has to be asked for. That the machine
// is gone cannot be said, as a node may have lost its label only.
func (c *chooser) missing(id string, r *reclaim, state *feedState) {
	if state.terminating[id] || c.reports.latest(id).GetState() == stateGone {
		return
	}
	c.keep(Kept{Host: &Host{Machine: id}, Reason: "the cluster has no node that is labelled as this machine"}, r)
}

// take chooses among the free candidates and marks them.
func (c *chooser) take(ctx context.Context, p *pass, r *reclaim, free []*corev1.Node, missing int) (met bool, err error) {
	candidates := make([]*Host, 0, len(free))
	nodes := make(map[string]*corev1.Node, len(free))
	for _, node := range free {
		candidates = append(candidates, p.host(node))
		nodes[node.Name] = node
	}
	chosen, kept, _ := Choose(missing, max(c.maxDrains-p.loaded(), 0), candidates, p.allHosts)
	if p.err != nil {
		return false, p.err
	}
	var errs []error
	for _, host := range chosen {
		if err := c.mark(ctx, p, nodes[host.Name], r); err != nil {
			errs = append(errs, err)
			continue
		}
		missing--
	}
	for _, k := range kept {
		c.keep(k, r)
	}
	return missing == 0, errors.Join(errs...)
}

func (p *pass) allHosts() []*Host {
	hosts := make([]*Host, 0, len(p.nodes))
	for _, node := range p.nodes {
		hosts = append(hosts, p.host(node))
	}
	return hosts
}

// mark cordons and taints a node. The version makes sure that nothing else was written to its taints meanwhile.
func (c *chooser) mark(ctx context.Context, p *pass, cached *corev1.Node, r *reclaim) error {
	node := cached.DeepCopy()
	if !node.Spec.Unschedulable {
		node.Spec.Unschedulable = true
		metav1.SetMetaDataAnnotation(&node.ObjectMeta, annotationCordoned, r.id)
	}
	// Rounded up, as a Kubernetes time has whole seconds and a node must not seem to have been cordoned for longer.
	since := metav1.NewTime(c.clock.Now().Add(time.Second - 1).Truncate(time.Second))
	node.Spec.Taints = append(node.Spec.Taints, corev1.Taint{
		Key: fleetv1alpha1.TaintReclaiming, Value: r.id, Effect: corev1.TaintEffectNoSchedule, TimeAdded: &since,
	})
	if err := c.client.Patch(ctx, node, optimistic(cached)); err != nil {
		return client.IgnoreNotFound(fmt.Errorf("cordoning node %s for reclaim %s: %w", node.Name, r.id, err))
	}
	p.reclaim[node.Name] = r.id
	c.marks[node.Name] = mark{oldVersion: cached.ResourceVersion, reclaim: r.id}
	c.metrics.Reclaims.WithLabelValues("draining").Inc()
	c.log.Info("A node is given back", "node", node.Name, "machine", node.Labels[fleetv1alpha1.LabelMachine],
		"reclaim", r.id, "reason", r.reason)
	return nil
}

// giveBack releases nodes of an instruction that asks for fewer than before, those with the most left to move first. What
// was reported drained is the autoscaler's already.
func (c *chooser) giveBack(ctx context.Context, p *pass, under []*corev1.Node, excess int) error {
	under = slices.DeleteFunc(under, func(node *corev1.Node) bool {
		return c.reports.latest(node.Labels[fleetv1alpha1.LabelMachine]).GetState() == stateDrained
	})
	left := map[string]int{}
	for _, node := range under {
		for _, pod := range p.pods(node.Name) {
			if evictable(pod) {
				left[node.Name]++
			}
		}
	}
	slices.SortStableFunc(under, func(a, b *corev1.Node) int { return left[b.Name] - left[a.Name] })
	var errs []error
	for _, node := range under[:min(excess, len(under))] {
		if err := release(ctx, c.client, node); err != nil {
			errs = append(errs, err)
			continue
		}
		p.reclaim[node.Name] = ""
		c.marks[node.Name] = mark{oldVersion: node.ResourceVersion}
		c.metrics.Reclaims.WithLabelValues("withdrawn").Inc()
		c.log.Info("A node stays after all: fewer are asked for", "node", node.Name)
	}
	return errors.Join(errs...)
}

// keep reports that a candidate cannot go. The reporter drops what was said already.
func (c *chooser) keep(k Kept, r *reclaim) {
	if c.reports.report(&fleetpb.MachineObservation{
		Id: k.Host.Machine, State: stateKept, NodeName: k.Host.Name, ReclaimId: r.id, Message: truncate(k.Reason, maxMessage),
	}) {
		c.metrics.Reclaims.WithLabelValues("kept").Inc()
		c.log.Info("A node is kept", "node", k.Host.Name, "reclaim", r.id, "reason", k.Reason)
	}
}

// release takes the mark off a node. A cordon that was there before stays.
func release(ctx context.Context, c client.Client, cached *corev1.Node) error {
	node := cached.DeepCopy()
	node.Spec.Taints = slices.DeleteFunc(node.Spec.Taints, func(t corev1.Taint) bool {
		return t.Key == fleetv1alpha1.TaintReclaiming
	})
	if _, ours := node.Annotations[annotationCordoned]; ours {
		node.Spec.Unschedulable = false
		delete(node.Annotations, annotationCordoned)
	}
	if err := c.Patch(ctx, node, optimistic(cached)); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("putting node %s back to service: %w", node.Name, err)
	}
	return nil
}

// optimistic is a patch that holds only for the version it was made from: a node's taints are one list with many writers.
func optimistic(from *corev1.Node) client.Patch {
	return client.MergeFromWithOptions(from, client.MergeFromWithOptimisticLock{})
}
