package admission

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
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

// room is what mode Provision needs of the cluster in one pass.
type room struct {
	nodes *provisioning.Room
	// requests of a workload and check, by key and name.
	requests map[string]map[string]*fleetv1alpha1.CapacityRequest
	// pods that carry a workload's promise, by key.
	pods map[string][]provisioning.Consumer
}

// room reads the requests, and the nodes and pods if any workload of mode Provision is there. Room of those that passed and
// whose pods have not all come is taken first.
func (p *Pass) room(ctx context.Context, c *cluster, waiting, settled []*item) (*room, error) {
	r := &room{
		requests: map[string]map[string]*fleetv1alpha1.CapacityRequest{}, pods: map[string][]provisioning.Consumer{},
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
	wanted := false
	for _, it := range append(append([]*item(nil), waiting...), settled...) {
		wanted = wanted || it.w.Config.Mode == fleetv1alpha1.CapacityCheckProvision
	}
	if !wanted {
		return r, nil
	}
	var pods corev1.PodList
	if err := p.client.List(ctx, &pods, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("listing pods: %w", err)
	}
	onNode := map[string][]corev1.Pod{}
	for i := range pods.Items {
		pod := &pods.Items[i]
		if pod.Spec.NodeName != "" {
			onNode[pod.Spec.NodeName] = append(onNode[pod.Spec.NodeName], *pod)
		}
		for name, value := range pod.Annotations {
			if !strings.HasPrefix(name, annotationPromise) || pod.DeletionTimestamp != nil {
				continue
			}
			for _, it := range settled {
				if value == string(it.object.UID) && name == promiseAnnotation(it.check) {
					r.pods[it.w.Key] = append(r.pods[it.w.Key], provisioning.Consumer{
						Name: pod.Name, UID: pod.UID, Profile: capacity.ProfileOfPod(pod),
						Bound: pod.Spec.NodeName != "", Ended: capacity.IsTerminal(pod),
					})
				}
			}
		}
	}
	var nodes []provisioning.Node
	for i := range c.nodes {
		if provisioning.IsReady(&c.nodes[i]) {
			nodes = append(nodes, provisioning.NodeOf(&c.nodes[i], onNode[c.nodes[i].Name]))
		}
	}
	r.nodes = provisioning.NewRoom(nodes)
	for _, it := range settled {
		if it.w.Config.Mode == fleetv1alpha1.CapacityCheckProvision && !it.over() {
			sets := it.booked(c.hints)
			r.nodes.Place(provisioning.Outstanding(sets, r.slots(it, sets), r.pods[it.w.Key]))
		}
	}
	return r, nil
}

// over says whether nothing has to be held for a workload that passed any more.
func (it *item) over() bool {
	return apimeta.IsStatusConditionTrue(it.object.Status.Conditions, kueue.WorkloadPodsReady)
}

// booked is what the workload asks of nodes, with the tolerations that its flavors' nodes need.
func (it *item) booked(hints []Hint) []provisioning.PodSet {
	var out []provisioning.PodSet
	for i := range it.w.PodSets {
		set := &it.w.PodSets[i]
		if !set.Concerned || set.Count <= 0 {
			continue
		}
		p := set.Profile
		p.Tolerations = append(append([]corev1.Toleration(nil), p.Tolerations...), lent(set, hints)...)
		if p.Group != nil && it.w.Config.AtomicProvisioning != fleetv1alpha1.AtomicWaive {
			group := *p.Group
			group.MinCount = set.Count
			p.Group = &group
		}
		out = append(out, provisioning.PodSet{Profile: p.Canonical(), Count: set.Count})
	}
	return out
}

// lent are the tolerations that pods of a flavor which chose its nodes by labels get for the taints of those nodes.
func lent(set *PodSet, hints []Hint) []corev1.Toleration {
	if !set.Selected {
		return nil
	}
	var out []corev1.Toleration
	for i := range hints {
		if meets(&hints[i].Template, &set.Profile) {
			out = append(out, tolerationsFor(hints[i].Template.Taints, append(append([]corev1.Toleration(nil), set.Profile.Tolerations...), out...))...)
		}
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

// requestNames names the request of every pod, with the index of its pod set.
func requestNames(it *item, sets []provisioning.PodSet) map[string]int {
	sum := sha256.Sum256([]byte(it.w.Key))
	stem := "kueue-" + strings.TrimRight(it.object.Name[:min(len(it.object.Name), 100)], ".-") + "-" + hex.EncodeToString(sum[:5])
	names := map[string]int{}
	for i, set := range sets {
		for n := range set.Count {
			names[fmt.Sprintf("%s-%d-%d", stem, i, n)] = i
		}
	}
	return names
}

// provision asks for the nodes and admits when they are Ready.
func (p *Pass) provision(ctx context.Context, c *cluster, it *item, world World, r *room) (Decision, error) {
	w := &it.w
	if d, done := trivial(w); done {
		return d, nil
	}
	stock := newStock(w, world)
	for i := range w.PodSets {
		set := &w.PodSets[i]
		if !set.Concerned || set.Count <= 0 {
			continue
		}
		matching := stock.matching(set)
		if fresh := stock.fresh(matching); len(fresh) > 0 {
			if proof := tooLarge(set, matching, fresh, world.Nodes); proof != "" {
				return Decision{State: kueue.CheckStateRejected, Reason: ReasonPodTooLarge, Message: proof}, nil
			}
		}
	}
	sets := it.booked(c.hints)
	written, acknowledged := 0, 0
	for name, set := range requestNames(it, sets) {
		cr := r.requests[w.Key][name]
		if cr == nil {
			if err := p.client.Create(ctx, it.request(name, sets[set])); err != nil && !apierrors.IsAlreadyExists(err) {
				return Decision{}, fmt.Errorf("writing CapacityRequest %s/%s: %w", it.object.Namespace, name, err)
			}
		} else if cr.Status.Phase == fleetv1alpha1.CapacityRequestAcknowledged {
			acknowledged++
		}
		written++
	}
	placement := r.nodes.Place(sets)
	if placement.Complete() {
		d := Decision{State: kueue.CheckStateReady, Reason: ReasonNodesReady,
			Message: fmt.Sprintf("%d nodes are Ready and have room: %s", len(placement.Nodes), some(placement.Nodes))}
		for i := range w.PodSets {
			set := &w.PodSets[i]
			if !set.Concerned || set.Count <= 0 {
				continue
			}
			d.Updates = annotate(d.Updates, it.check, set.Name, string(it.object.UID))
			d.Updates[len(d.Updates)-1].Tolerations = lent(set, c.hints)
		}
		return d, nil
	}
	first := &w.PodSets[0]
	for i := range w.PodSets {
		if w.PodSets[i].Concerned {
			first = &w.PodSets[i]
			break
		}
	}
	why := fmt.Sprintf("needs %s; Ready nodes have room for %d of %d pods, the autoscaler has taken %d of %d requests",
		asks(first), placement.Placed, placement.Wanted, acknowledged, written)
	if eta := expected(stock.fresh(stock.matching(first))); eta > 0 {
		why += ", a node takes about " + eta.String()
	}
	return wait(w, world, ReasonProvisioning, why), nil
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

func (it *item) request(name string, set provisioning.PodSet) *fleetv1alpha1.CapacityRequest {
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
		Spec: set.Profile.RequestSpec(),
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

// tidyRequests hands requests over to the pods that have come, and deletes those that nothing needs: of workloads that are not
// before the check any more, that run, or whose pods have not come within the promise's time-out.
func (p *Pass) tidyRequests(ctx context.Context, c *cluster, r *room, all []*item, now time.Time) error {
	needed := map[string]bool{}
	for _, it := range all {
		if it.w.Config.Mode != fleetv1alpha1.CapacityCheckProvision || it.over() {
			continue
		}
		ready := it.state.State == kueue.CheckStateReady
		if ready && now.Sub(it.state.LastTransitionTime.Time) > it.w.Config.PromiseTimeout.Duration {
			continue
		}
		needed[it.w.Key] = true
		if !ready {
			continue
		}
		sets := it.booked(c.hints)
		for _, h := range provisioning.Match(sets, r.slots(it, sets), r.pods[it.w.Key]) {
			if err := p.handOver(ctx, r.requests[it.w.Key][h.Slot], h.Pod); err != nil {
				return err
			}
		}
	}
	for key, requests := range r.requests {
		if needed[key] {
			continue
		}
		for _, cr := range requests {
			if ownerPod(cr) != "" {
				continue
			}
			err := p.client.Delete(ctx, cr, client.Preconditions{UID: &cr.UID, ResourceVersion: &cr.ResourceVersion})
			if client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) {
				return fmt.Errorf("deleting CapacityRequest %s/%s: %w", cr.Namespace, cr.Name, err)
			}
		}
	}
	return nil
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
