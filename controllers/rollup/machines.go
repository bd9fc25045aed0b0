package rollup

import (
	"context"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	fleetpb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
)

// phaseOrder ranks phases; an UpcomingNode only moves up. Ready and Failed are both final.
var phaseOrder = map[fleetv1alpha1.UpcomingNodePhase]int{
	fleetv1alpha1.UpcomingNodeProvisioning: 1,
	fleetv1alpha1.UpcomingNodeLaunched:     2,
	fleetv1alpha1.UpcomingNodeRegistered:   3,
	fleetv1alpha1.UpcomingNodeReady:        4,
	fleetv1alpha1.UpcomingNodeFailed:       4,
}

// repeatReport is how long a machine may stay listed after its Ready report was acknowledged before it is said again.
const repeatReport = 30 * time.Second

// machineReconciler follows one machine through its life: announced by the feed, seen as a Node, Ready. Its key is the
// machine's id. It reads the feed's last state, the UpcomingNode and the Node, and acts on the difference, so that it may
// be called at any time, any number of times.
type machineReconciler struct {
	client    client.Client
	namespace string
	feed      *feed
	reports   *reporter
	clock     clock.PassiveClock
	log       logr.Logger

	nodes, announced unseen // Nodes and UpcomingNodes
}

// Reconcile implements reconcile.Reconciler.
func (r *machineReconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	state := r.feed.current()
	if state == nil {
		// Nothing is known yet, least of all that anything is not listed. The first state asks for everything again.
		return ctrl.Result{}, nil
	}
	id := req.Name
	m := state.machines[id]
	node, err := r.node(ctx, id, m)
	if err != nil {
		return ctrl.Result{}, err
	}
	if node != nil {
		if err := r.label(ctx, id, node); err != nil {
			return ctrl.Result{}, err
		}
		r.observe(id, m, node)
	} else if last := r.reports.latest(id).GetState(); last != "" && last != stateGone {
		r.reports.report(&fleetpb.MachineObservation{Id: id, State: stateGone})
	}
	return r.announce(ctx, id, m, node)
}

// node finds the machine's Node: by the label; by what was reported, where somebody took the label off; or, while the
// machine is listed, by what the provider says of it.
func (r *machineReconciler) node(ctx context.Context, id string, m *machine) (*corev1.Node, error) {
	var nodes corev1.NodeList
	if err := r.client.List(ctx, &nodes, client.MatchingFields{indexNodeMachine: id}); err != nil {
		return nil, fmt.Errorf("looking for the node of machine %s: %w", id, err)
	}
	if len(nodes.Items) > 0 {
		return &nodes.Items[0], nil
	}
	if last := r.reports.latest(id); last.GetNodeName() != "" && last.GetState() != stateGone {
		node, err := r.named(ctx, last.GetNodeName())
		if err != nil || node != nil && node.Labels[fleetv1alpha1.LabelMachine] == "" {
			return node, err
		}
	}
	if m == nil {
		return nil, nil
	}
	if m.providerID != "" {
		if err := r.client.List(ctx, &nodes, client.MatchingFields{indexNodeProviderID: m.providerID}); err != nil {
			return nil, fmt.Errorf("looking for the node of machine %s: %w", id, err)
		}
		for i := range nodes.Items {
			if belongs(&nodes.Items[i], m) {
				return &nodes.Items[i], nil
			}
		}
	}
	if m.nodeName != "" {
		node, err := r.named(ctx, m.nodeName)
		if err != nil || node != nil && belongs(node, m) {
			return node, err
		}
	}
	return nil, nil
}

// named reads a node; nil when there is none.
func (r *machineReconciler) named(ctx context.Context, name string) (*corev1.Node, error) {
	var node corev1.Node
	if err := r.client.Get(ctx, client.ObjectKey{Name: name}, &node); err != nil {
		if apierrors.IsNotFound(err) {
			return nil, nil
		}
		return nil, fmt.Errorf("reading node %s: %w", name, err)
	}
	return &node, nil
}

// belongs says whether an unlabelled node is the machine's. A provider's id decides; the name only where one is missing.
func belongs(node *corev1.Node, m *machine) bool {
	if node.Labels[fleetv1alpha1.LabelMachine] != "" || node.DeletionTimestamp != nil {
		return false
	}
	if node.Spec.ProviderID != "" && m.providerID != "" {
		return node.Spec.ProviderID == m.providerID
	}
	return m.nodeName != "" && node.Name == m.nodeName
}

// label makes the node's identity durable.
func (r *machineReconciler) label(ctx context.Context, id string, node *corev1.Node) error {
	if unseen := r.nodes.wait(node.Name, node) > 0; unseen || node.Labels[fleetv1alpha1.LabelMachine] == id {
		return nil
	}
	before := node.DeepCopy()
	if node.Labels == nil {
		node.Labels = map[string]string{}
	}
	node.Labels[fleetv1alpha1.LabelMachine] = id
	if err := r.client.Patch(ctx, node, client.MergeFrom(before)); err != nil {
		return client.IgnoreNotFound(fmt.Errorf("labelling node %s as machine %s: %w", node.Name, id, err))
	}
	r.nodes.wrote(node)
	r.log.Info("A machine's node has appeared", "machine", id, "node", node.Name)
	return nil
}

// observe reports how far the node is. The reporter drops what the autoscaler knows already.
func (r *machineReconciler) observe(id string, m *machine, node *corev1.Node) {
	if reclaimOf(node) != "" {
		return // the drain reports on it
	}
	observation := &fleetpb.MachineObservation{Id: id, NodeName: node.Name}
	switch {
	case isReady(node):
		observation.State = stateReady
		observation.Allocatable = capacity.ResourcesOf(node.Status.Allocatable).Strings()
	case m != nil:
		observation.State = stateRegistered
	default:
		return // a node that was Ready once and is not now: for its kubelet to mend
	}
	r.reports.report(observation)
}

func isReady(node *corev1.Node) bool {
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// announce brings the UpcomingNode in line: it stands from the first word of the machine until the autoscaler knows that
// the node is Ready, or until the machine is no longer listed.
func (r *machineReconciler) announce(ctx context.Context, id string, m *machine, node *corev1.Node) (ctrl.Result, error) {
	un := &fleetv1alpha1.UpcomingNode{}
	err := r.client.Get(ctx, client.ObjectKey{Namespace: r.namespace, Name: id}, un)
	exists := err == nil
	if client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, fmt.Errorf("reading UpcomingNode %s: %w", id, err)
	}
	if wait := r.announced.wait(id, shownIf(exists, un)); wait > 0 {
		return ctrl.Result{RequeueAfter: wait}, nil
	}
	if exists && un.Labels[fleetv1alpha1.LabelManagedBy] != fleetv1alpha1.ManagedByManager {
		if m != nil {
			r.log.V(1).Info("An UpcomingNode that this operator did not write has the machine's name", "machine", id)
		}
		return ctrl.Result{}, nil
	}
	ready := node != nil && isReady(node)
	since, acknowledged := r.reports.acknowledged(id, stateReady)
	switch {
	case m == nil || ready && acknowledged:
		if exists && un.DeletionTimestamp == nil {
			// The phase is shown as Ready before the object goes, so that a watcher sees the end.
			if m != nil {
				if err := r.writeStatus(ctx, un, m, node); err != nil {
					return ctrl.Result{}, err
				}
			}
			if err := r.client.Delete(ctx, un, client.Preconditions{UID: &un.UID}); client.IgnoreNotFound(err) != nil {
				return ctrl.Result{}, fmt.Errorf("deleting UpcomingNode %s: %w", id, err)
			}
			r.announced.deleted(un)
		}
		if m != nil {
			// Still listed: the autoscaler may have taken the report and lost it.
			wait := repeatReport - r.clock.Since(since)
			if wait <= 0 {
				r.reports.repeat(id)
				wait = repeatReport
			}
			return ctrl.Result{RequeueAfter: wait}, nil
		}
		return ctrl.Result{}, nil
	case !exists && ready:
		return ctrl.Result{}, nil // nothing to announce any more; the report is on its way
	case !exists:
		un = &fleetv1alpha1.UpcomingNode{Spec: m.spec}
		un.Namespace, un.Name = r.namespace, id
		un.Labels = map[string]string{fleetv1alpha1.LabelManagedBy: fleetv1alpha1.ManagedByManager}
		if err := r.client.Create(ctx, un); err != nil {
			if apierrors.IsAlreadyExists(err) {
				return ctrl.Result{}, nil // the informer has not shown it yet, and will
			}
			return ctrl.Result{}, fmt.Errorf("creating UpcomingNode %s: %w", id, err)
		}
		r.announced.wrote(un)
	case !apiequality.Semantic.DeepEqual(un.Spec, m.spec):
		before := un.DeepCopy()
		un.Spec = m.spec
		if err := r.client.Patch(ctx, un, client.MergeFrom(before)); err != nil {
			return ctrl.Result{}, client.IgnoreNotFound(fmt.Errorf("updating UpcomingNode %s: %w", id, err))
		}
		r.announced.wrote(un)
	}
	return ctrl.Result{}, r.writeStatus(ctx, un, m, node)
}

// writeStatus moves the status on, and writes nothing when it stands where it should.
func (r *machineReconciler) writeStatus(ctx context.Context, un *fleetv1alpha1.UpcomingNode, m *machine, node *corev1.Node) error {
	before := un.DeepCopy()
	next := &un.Status
	next.Phase = forward(next.Phase, m.phase)
	if node != nil {
		seen := fleetv1alpha1.UpcomingNodeRegistered
		if isReady(node) {
			seen = fleetv1alpha1.UpcomingNodeReady
		}
		next.Phase = forward(next.Phase, seen)
		next.NodeRef = &corev1.LocalObjectReference{Name: node.Name}
	}
	if m.providerID != "" {
		next.ProviderID = m.providerID
	}
	if m.started != nil {
		next.ProvisioningStartTime = m.started
	}
	if m.expected != nil {
		next.EstimatedReadyTime = m.expected
	}
	next.Message = m.message
	if apiequality.Semantic.DeepEqual(before.Status, un.Status) {
		return nil
	}
	if err := r.client.Status().Patch(ctx, un, client.MergeFrom(before)); err != nil {
		return client.IgnoreNotFound(fmt.Errorf("writing the status of UpcomingNode %s: %w", un.Name, err))
	}
	r.announced.wrote(un)
	return nil
}

// forward is the later of two phases; what is final stays.
func forward(now, next fleetv1alpha1.UpcomingNodePhase) fleetv1alpha1.UpcomingNodePhase {
	if phaseOrder[next] > phaseOrder[now] {
		return next
	}
	return now
}

// reclaimOf is the id of the instruction that the node is being drained for; empty when it is not.
func reclaimOf(node *corev1.Node) string {
	if t := reclaimTaint(node); t != nil {
		return t.Value
	}
	return ""
}

func reclaimTaint(node *corev1.Node) *corev1.Taint {
	for i := range node.Spec.Taints {
		if node.Spec.Taints[i].Key == fleetv1alpha1.TaintReclaiming {
			return &node.Spec.Taints[i]
		}
	}
	return nil
}

// machinesOf names the machines that a Node's change may concern.
func (r *machineReconciler) machinesOf(node *corev1.Node) (ids []string) {
	if id := node.Labels[fleetv1alpha1.LabelMachine]; id != "" {
		return []string{id}
	}
	state := r.feed.current()
	if state == nil {
		return nil
	}
	if id := state.byProviderID[node.Spec.ProviderID]; id != "" && node.Spec.ProviderID != "" {
		ids = append(ids, id)
	}
	if id := state.byNodeName[node.Name]; id != "" {
		ids = append(ids, id)
	}
	return ids
}

// nodeGone reports the machine of a Node that was deleted. Whatever the reporter knew, this is the last word on it.
func (r *machineReconciler) nodeGone(node *corev1.Node) {
	if id := node.Labels[fleetv1alpha1.LabelMachine]; id != "" {
		r.reports.report(&fleetpb.MachineObservation{Id: id, State: stateGone, NodeName: node.Name})
	}
}
