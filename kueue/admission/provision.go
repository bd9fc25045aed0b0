package admission

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/kueue/provisioning"
)

// Marks of the CapacityRequests that mode Provision writes: the workload's UID, and the check in a label's form and in full.
const (
	labelWorkload   = "fleet.lucy.sh/workload-uid"
	labelCheck      = "fleet.lucy.sh/admission-check"
	annotationCheck = "fleet.lucy.sh/admission-check"
)

// claimant names the check among those that promise room on nodes.
const claimant = "kueue-capacity-check"

// room is what a pass knows of nodes, requests and pods.
type room struct {
	// nodes are the Ready ones, with what is free on them when everybody has come who was promised room.
	nodes *provisioning.Room
	// managed are the nodes that the fleet may take back.
	managed map[string]bool
	// requests of a workload and check, by key and name.
	requests map[string]map[string]*fleetv1alpha1.CapacityRequest
	// pods of workloads that have passed, by key.
	pods map[string][]markedPod
}

type markedPod struct {
	pod      *corev1.Pod
	podSet   string
	reserved int64
}

// room reads requests and pods, and the free room if anybody waits for it.
func (p *Pass) room(ctx context.Context, c *cluster, q *queue, now time.Time) (*room, error) {
	r := &room{
		nodes: provisioning.NewRoom(nil), managed: map[string]bool{},
		requests: map[string]map[string]*fleetv1alpha1.CapacityRequest{}, pods: map[string][]markedPod{},
	}
	var requests fleetv1alpha1.CapacityRequestList
	if err := p.client.List(ctx, &requests, client.HasLabels{labelCheck}); err != nil {
		return nil, fmt.Errorf("listing CapacityRequests of the check: %w", err)
	}
	for i := range requests.Items {
		cr := &requests.Items[i]
		key := cr.Annotations[annotationCheck] + "/" + cr.Labels[labelWorkload]
		if r.requests[key] == nil {
			r.requests[key] = map[string]*fleetv1alpha1.CapacityRequest{}
		}
		r.requests[key][cr.Name] = cr
	}
	onNode, err := p.pods(ctx, q, r)
	if err != nil || len(q.waiting) == 0 {
		return r, err
	}
	daemons := provisioning.DaemonsOf(c.daemons)
	var nodes []provisioning.Node
	for i := range c.nodes {
		n := &c.nodes[i]
		if provisioning.IsReady(n) {
			nodes = append(nodes, provisioning.NodeOf(n, onNode[n.Name], daemons))
			r.managed[n.Name] = n.Labels[fleetv1alpha1.LabelMachine] != ""
		}
	}
	r.nodes = provisioning.NewRoom(nodes)
	for _, h := range r.holdings(q, now) {
		r.nodes.Hold(h)
	}
	return r, nil
}

// pods reads all pods: those of workloads that have passed into the room, and those that have a node by its name.
func (p *Pass) pods(ctx context.Context, q *queue, r *room) (onNode map[string][]corev1.Pod, err error) {
	passed := map[string]*item{} // by annotation and workload
	for _, it := range q.settled {
		if _, made := it.promise(); made {
			passed[promiseAnnotation(it.check)+"/"+string(it.w.UID)] = it
		}
	}
	if len(passed) == 0 && len(q.waiting) == 0 {
		return nil, nil
	}
	var pods corev1.PodList
	if err := p.client.List(ctx, &pods, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("listing pods: %w", err)
	}
	onNode = map[string][]corev1.Pod{}
	for i := range pods.Items {
		pod := &pods.Items[i]
		if pod.Spec.NodeName != "" {
			onNode[pod.Spec.NodeName] = append(onNode[pod.Spec.NodeName], *pod)
		}
		for name, text := range pod.Annotations {
			if !strings.HasPrefix(name, annotationPromise) || pod.DeletionTimestamp != nil {
				continue
			}
			m, _ := readMark(text)
			if it := passed[name+"/"+string(m.Workload)]; it != nil {
				r.pods[it.w.Key] = append(r.pods[it.w.Key], markedPod{pod, m.PodSet, m.Reserved})
			}
		}
	}
	return onNode, nil
}

// missing is how many pods of each set have no node yet. Those that have ended had one; those of an earlier admission do not
// count.
func (r *room) missing(it *item) map[string]int32 {
	missing := map[string]int32{}
	for _, set := range it.w.concerned() {
		missing[set.Name] = set.Count
	}
	for _, m := range r.pods[it.w.Key] {
		if m.pod.Spec.NodeName != "" && missing[m.podSet] > 0 && m.reserved == it.w.Reserved.Unix() {
			missing[m.podSet]--
		}
	}
	return missing
}

// arrived says whether nothing has to be held for a workload that has passed: its pods run, or all of them have a node.
func (r *room) arrived(it *item) bool {
	if apimeta.IsStatusConditionTrue(it.object.Status.Conditions, kueue.WorkloadPodsReady) {
		return true
	}
	for _, n := range r.missing(it) {
		if n > 0 {
			return false
		}
	}
	return true
}

// holdings are the pods of workloads that have passed and that are not on their nodes yet. Wherever they were promised room,
// the scheduler puts them first where there is some.
func (r *room) holdings(q *queue, now time.Time) []provisioning.Holding {
	var out []provisioning.Holding
	for _, it := range q.settled {
		if _, made := it.promise(); !made || r.arrived(it) || !it.until().After(now) {
			continue
		}
		missing := r.missing(it)
		var h provisioning.Holding
		for _, set := range it.w.concerned() {
			s := set.onNodes(it.w.Config.AtomicProvisioning)
			s.Count = missing[set.Name]
			h.PodSets = append(h.PodSets, s)
		}
		out = append(out, h)
	}
	return out
}

// held tells other claimants what the check holds.
func (p *Pass) held(ctx context.Context) ([]provisioning.Holding, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c, err := p.read(ctx)
	if err != nil {
		return nil, err
	}
	q, err := p.queue(ctx, c)
	if err != nil {
		return nil, err
	}
	q.waiting = nil
	now := p.opts.Clock.Now()
	r, err := p.room(ctx, c, q, now)
	if err != nil {
		return nil, err
	}
	return r.holdings(q, now), nil
}

// booked is what the workload asks of nodes, set by set.
func (it *item) booked() []provisioning.PodSet {
	var out []provisioning.PodSet
	for _, set := range it.w.concerned() {
		out = append(out, set.onNodes(it.w.Config.AtomicProvisioning))
	}
	return out
}

// consumers are the pods of the workload, as requests are matched with them.
func (r *room) consumers(it *item) []provisioning.Consumer {
	var out []provisioning.Consumer
	for _, m := range r.pods[it.w.Key] {
		out = append(out, provisioning.Consumer{
			Name: m.pod.Name, UID: m.pod.UID, Profile: capacity.ProfileOfPod(m.pod),
			Bound: m.pod.Spec.NodeName != "", Ended: capacity.IsTerminal(m.pod),
		})
	}
	return out
}

// slots lists the requests of a workload that exist.
func (r *room) slots(it *item, sets []provisioning.PodSet) []provisioning.Slot {
	var out []provisioning.Slot
	names := requestNames(it, sets)
	for name, cr := range r.requests[it.w.Key] {
		set, known := names[name]
		if !known {
			continue
		}
		out = append(out, provisioning.Slot{Name: name, PodSet: set, Pod: ownerPod(cr),
			Acknowledged: cr.Status.Phase == fleetv1alpha1.CapacityRequestAcknowledged})
	}
	return out
}

func ownerPod(cr *fleetv1alpha1.CapacityRequest) types.UID {
	for _, ref := range cr.OwnerReferences {
		if ref.Kind == "Pod" {
			return ref.UID
		}
	}
	return ""
}

// tooMany says whether there are more pods than requests are written for.
func tooMany(sets []provisioning.PodSet) bool { return podsOf(sets) > provisioning.MaxPods }

func podsOf(sets []provisioning.PodSet) (total int64) {
	for i := range sets {
		total += int64(sets[i].Count)
	}
	return total
}

// requestNames names the request of every pod, with the index of its pod set; none where they are too many.
func requestNames(it *item, sets []provisioning.PodSet) map[string]int {
	sum := sha256.Sum256([]byte(it.w.Key))
	stem := "kueue-" + strings.TrimRight(it.object.Name[:min(len(it.object.Name), 100)], ".-") + "-" + hex.EncodeToString(sum[:5])
	names := map[string]int{}
	if tooMany(sets) {
		return names
	}
	for i, set := range sets {
		for n := range set.Count {
			names[fmt.Sprintf("%s-%d-%d", stem, i, n)] = i
		}
	}
	return names
}

// provision asks for the nodes and admits when they are Ready. An error does not keep it from a decision.
func (p *Pass) provision(ctx context.Context, c *cluster, it *item, world World, r *room) (Decision, error) {
	w := &it.w
	if d, done := trivial(w); done {
		return d, nil
	}
	sets := it.booked()
	if tooMany(sets) {
		return Decision{State: kueue.CheckStateRejected, Reason: ReasonTooManyPods, Message: fmt.Sprintf(
			"can never be provisioned: it has %d pods, and at most %d can be asked for at once", podsOf(sets), provisioning.MaxPods)}, nil
	}
	stock := newStock(w, world)
	for _, set := range w.concerned() {
		matching := stock.matching(set)
		if fresh := stock.fresh(matching); len(fresh) > 0 {
			if proof := tooLarge(set, matching, fresh, world); proof != "" {
				return Decision{State: kueue.CheckStateRejected, Reason: ReasonPodTooLarge, Message: proof}, nil
			}
		}
	}
	placement := r.nodes.Place(sets)
	if !placement.Complete() {
		if d, refused := stock.refuse(w.concerned()); refused {
			return d, nil
		}
	}
	acknowledged, err := p.request(ctx, it, sets, r)
	first := w.concerned()[0]
	switch {
	case err != nil:
		placement.GiveBack()
		return wait(w, world, ReasonProvisioning, fmt.Sprintf("needs %s; %v", asks(first), err)), err
	case placement.Complete() && acknowledged < placement.Wanted && slices.ContainsFunc(placement.Nodes, func(n string) bool { return r.managed[n] }):
		// Until the autoscaler has heard of the demand it may take the nodes for surplus.
		return wait(w, world, ReasonProvisioning, fmt.Sprintf("needs %s; Ready nodes have room, and the autoscaler has taken %d of %d requests",
			asks(first), acknowledged, placement.Wanted)), nil
	case placement.Complete():
		d := Decision{State: kueue.CheckStateReady, Reason: ReasonNodesReady,
			Message: fmt.Sprintf("%d nodes are Ready and have room: %s", len(placement.Nodes), some(placement.Nodes))}
		for _, set := range w.concerned() {
			if len(set.Lent) > 0 {
				d.Updates = append(d.Updates, kueue.PodSetUpdate{Name: kueue.PodSetReference(set.Name), Tolerations: set.Lent[:min(len(set.Lent), maxTolerations)]})
			}
		}
		return d, nil
	}
	why := fmt.Sprintf("needs %s; Ready nodes have room for %d of %d pods, the autoscaler has taken %d of %d requests",
		asks(first), placement.Placed, placement.Wanted, acknowledged, placement.Wanted)
	if eta := expected(stock.fresh(stock.matching(first))); eta > 0 {
		why += ", a node takes about " + eta.String()
	}
	return wait(w, world, ReasonProvisioning, why), nil
}

// refuse keeps a gang from being provisioned node by node: it waits or is rejected, as the configuration says. Without a
// fresh hint nothing is known about that.
func (s *stock) refuse(sets []*PodSet) (Decision, bool) {
	if s.w.Config.AtomicProvisioning == fleetv1alpha1.AtomicWaive {
		return Decision{}, false
	}
	for _, set := range sets {
		fresh := s.fresh(s.matching(set))
		alone := func(h *Hint) bool { return h.Atomic || perNode(set, h.Template.Allocatable) >= set.Count }
		if !set.Gang() || len(fresh) == 0 || slices.ContainsFunc(fresh, alone) {
			continue
		}
		message := needsAtomic(set)
		if s.w.Config.AtomicProvisioning == fleetv1alpha1.AtomicReject && s.world.settled() {
			return Decision{State: kueue.CheckStateRejected, Reason: ReasonNotAtomic, Message: message}, true
		}
		return wait(s.w, s.world, ReasonNotAtomic, message), true
	}
	return Decision{}, false
}

// writers bounds how many CapacityRequests are written at a time.
const writers = 16

// request makes a CapacityRequest stand for every pod and says how many of them the autoscaler has taken. What an earlier
// assignment of the workload has left behind, more pods or pods of another flavor, is deleted.
func (p *Pass) request(ctx context.Context, it *item, sets []provisioning.PodSet, r *room) (acknowledged int32, err error) {
	names := requestNames(it, sets)
	specs := make([]fleetv1alpha1.CapacityRequestSpec, len(sets))
	for i := range sets {
		specs[i] = sets[i].Profile.RequestSpec()
	}
	have := r.requests[it.w.Key]
	for name, cr := range have {
		set, wanted := names[name]
		if ownerPod(cr) != "" || (wanted && equality.Semantic.DeepEqual(
			capacity.ProfileOfRequest(&cr.Spec), capacity.ProfileOfRequest(&specs[set]))) {
			continue
		}
		if err := p.remove(ctx, cr); err != nil {
			return 0, err
		}
		delete(have, name)
	}
	var g errgroup.Group
	g.SetLimit(writers)
	for _, name := range slices.Sorted(maps.Keys(names)) {
		if cr := have[name]; cr != nil {
			if cr.Status.Phase == fleetv1alpha1.CapacityRequestAcknowledged {
				acknowledged++
			}
			continue
		}
		g.Go(func() error {
			err := p.client.Create(ctx, it.request(name, specs[names[name]]))
			if err != nil && !apierrors.IsAlreadyExists(err) {
				return fmt.Errorf("CapacityRequests cannot be written: %w", err)
			}
			return nil
		})
	}
	return acknowledged, g.Wait()
}

// remove deletes a request that has not changed meanwhile.
func (p *Pass) remove(ctx context.Context, cr *fleetv1alpha1.CapacityRequest) error {
	err := p.client.Delete(ctx, cr, client.Preconditions{UID: &cr.UID, ResourceVersion: &cr.ResourceVersion})
	if client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) {
		return fmt.Errorf("deleting CapacityRequest %s/%s: %w", cr.Namespace, cr.Name, err)
	}
	return nil
}

func expected(hints []*Hint) time.Duration {
	var eta time.Duration
	for _, h := range hints {
		if h.Ready > 0 && (eta == 0 || h.Ready < eta) {
			eta = h.Ready
		}
	}
	return eta
}

func some(names []string) string {
	if len(names) > 5 {
		return strings.Join(names[:5], ", ") + ", …"
	}
	return strings.Join(names, ", ")
}

func (it *item) request(name string, spec fleetv1alpha1.CapacityRequestSpec) *fleetv1alpha1.CapacityRequest {
	controller := true
	return &fleetv1alpha1.CapacityRequest{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: it.object.Namespace, Name: name,
			Labels:      map[string]string{labelWorkload: string(it.object.UID), labelCheck: checkLabel(it.check)},
			Annotations: map[string]string{annotationCheck: it.check},
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: kueue.SchemeGroupVersion.String(), Kind: "Workload", Name: it.object.Name, UID: it.object.UID,
				Controller: &controller,
			}},
		},
		Spec: spec,
	}
}

// checkLabel is the check's name where it can be a label's value, else a hash.
func checkLabel(check string) string {
	if len(check) <= 63 {
		return check
	}
	sum := sha256.Sum256([]byte(check))
	return hex.EncodeToString(sum[:8])
}

// tidyRequests hands requests over to the pods that have come, and deletes those that nothing needs: of workloads that are
// not before the check any more, that run, or whose pods have not come within the promise's time-out.
func (p *Pass) tidyRequests(ctx context.Context, c *cluster, r *room, q *queue, now time.Time) error {
	needed := map[string]bool{}
	for _, it := range q.waiting {
		// A config may be edited while workloads wait.
		needed[it.w.Key] = it.w.Config.Mode == fleetv1alpha1.CapacityCheckProvision && c.check(it.check).problem == ""
	}
	var g errgroup.Group
	g.SetLimit(writers)
	for _, it := range q.settled {
		requests := r.requests[it.w.Key]
		if len(requests) == 0 {
			continue
		}
		sets := it.booked()
		for _, h := range provisioning.Match(sets, r.slots(it, sets), r.consumers(it)) {
			cr := requests[h.Slot]
			g.Go(func() error { return p.handOver(ctx, cr, h.Pod) })
			delete(requests, h.Slot)
		}
		needed[it.w.Key] = !r.arrived(it) && it.until().After(now)
	}
	for key, requests := range r.requests {
		if needed[key] {
			continue
		}
		for _, cr := range requests {
			if ownerPod(cr) == "" {
				g.Go(func() error { return p.remove(ctx, cr) })
			}
		}
	}
	return g.Wait()
}

// handOver gives a request to a pod: the same object, owned by the pod from now on, so that nothing is counted twice.
func (p *Pass) handOver(ctx context.Context, cr *fleetv1alpha1.CapacityRequest, pod provisioning.Consumer) error {
	before := cr.DeepCopy()
	cr.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID}}
	cr.Labels[fleetv1alpha1.LabelPodUID] = string(pod.UID)
	err := p.client.Patch(ctx, cr, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	if client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) {
		return fmt.Errorf("handing CapacityRequest %s/%s over to pod %s: %w", cr.Namespace, cr.Name, pod.Name, err)
	}
	return nil
}
