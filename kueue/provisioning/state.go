package provisioning

import (
	"context"
	"fmt"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	autoscalingv1 "k8s.io/autoscaler/cluster-autoscaler/apis/provisioningrequest/autoscaling.x-k8s.io/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
)

// state is what the cluster holds of one booking.
type state struct {
	// names maps the name of every request that the booking ever has to its pod set.
	names    map[string]int
	requests map[string]*fleetv1alpha1.CapacityRequest
	pods     []Consumer
	owner    types.UID
}

func (r *Reconciler) stateOf(ctx context.Context, pr *autoscalingv1.ProvisioningRequest) (*state, error) {
	s := &state{names: Slots(pr), requests: map[string]*fleetv1alpha1.CapacityRequest{}, owner: pr.UID}
	var requests fleetv1alpha1.CapacityRequestList
	if err := r.Client.List(ctx, &requests, client.InNamespace(pr.Namespace),
		client.MatchingFields{indexBooking: string(pr.UID)}); err != nil {
		return nil, fmt.Errorf("listing the CapacityRequests of %s/%s: %w", pr.Namespace, pr.Name, err)
	}
	for i := range requests.Items {
		if _, own := s.names[requests.Items[i].Name]; own {
			s.requests[requests.Items[i].Name] = &requests.Items[i]
		}
	}
	var pods corev1.PodList
	if err := r.Client.List(ctx, &pods, client.InNamespace(pr.Namespace), client.UnsafeDisableDeepCopy,
		client.MatchingFields{indexConsumes: pr.Name}); err != nil {
		return nil, fmt.Errorf("listing the pods that consume %s/%s: %w", pr.Namespace, pr.Name, err)
	}
	for i := range pods.Items {
		pod := &pods.Items[i]
		if pod.DeletionTimestamp != nil || earlier(pod, pr) {
			continue
		}
		s.pods = append(s.pods, Consumer{
			Name: pod.Name, UID: pod.UID, Profile: capacity.ProfileOfPod(pod),
			Bound: pod.Spec.NodeName != "", Ended: capacity.IsTerminal(pod),
		})
	}
	return s, nil
}

// earlier reports whether the pod came for an earlier request of the same name, and has nothing to do with this one. A pod
// that was there before the request is no sign of that: Kueue gates pods that nobody controls until they are admitted. One
// that had its node before is, and any one before the request is Provisioned, as none is let go before that.
func earlier(pod *corev1.Pod, pr *autoscalingv1.ProvisioningRequest) bool {
	if !pod.CreationTimestamp.Before(&pr.CreationTimestamp) {
		return false
	}
	if !isTrue(pr.Status.Conditions, autoscalingv1.Provisioned) {
		return true
	}
	for i := range pod.Status.Conditions {
		if c := &pod.Status.Conditions[i]; c.Type == corev1.PodScheduled && c.Status == corev1.ConditionTrue {
			return c.LastTransitionTime.Before(&pr.CreationTimestamp)
		}
	}
	return false
}

func (s *state) total() int32 { return int32(len(s.names)) }

// counts gives the requests that the booking holds, those that pods own, and how many of the former are acknowledged.
func (s *state) counts() (held, handedOver, acknowledged int32) {
	for _, slot := range s.slots(false) {
		switch {
		case slot.Pod != "":
			handedOver++
		case slot.Acknowledged:
			held, acknowledged = held+1, acknowledged+1
		default:
			held++
		}
	}
	return held, handedOver, acknowledged
}

// slots lists the requests that there are, and with missing those still to be written, which are as good as held.
func (s *state) slots(missing bool) []Slot {
	var slots []Slot
	for name, podSet := range s.names {
		cr := s.requests[name]
		if cr == nil {
			if missing {
				slots = append(slots, Slot{Name: name, PodSet: podSet})
			}
			continue
		}
		slot := Slot{
			Name: name, PodSet: podSet, Acknowledged: cr.Status.Phase == fleetv1alpha1.CapacityRequestAcknowledged,
		}
		if owner := metav1.GetControllerOfNoCopy(cr); owner == nil || owner.UID != s.owner {
			slot.Pod = "unknown"
			for _, ref := range cr.OwnerReferences {
				slot.Pod = ref.UID
			}
		}
		slots = append(slots, slot)
	}
	return slots
}

// booking reads the booking from the requests that are left of it. A pod set of which none is left asks for nothing.
func (s *state) booking(pr *autoscalingv1.ProvisioningRequest) Booking {
	b := Booking{Key: client.ObjectKeyFromObject(pr), UID: pr.UID}
	for _, set := range pr.Spec.PodSets {
		b.PodSets = append(b.PodSets, PodSet{Count: set.Count})
	}
	for name, cr := range s.requests {
		b.PodSets[s.names[name]].Profile = capacity.ProfileOfRequest(&cr.Spec)
	}
	return b
}

// observeRoom finds out where the booking fits.
func (r *Reconciler) observeRoom(ctx context.Context, pr *autoscalingv1.ProvisioningRequest, b Booking, state *state,
	o *Observation) error {
	var list corev1.NodeList
	if err := r.Client.List(ctx, &list, client.UnsafeDisableDeepCopy, client.HasLabels{fleetv1alpha1.LabelMachine}); err != nil {
		return fmt.Errorf("listing the fleet's nodes: %w", err)
	}
	held := isTrue(pr.Status.Conditions, autoscalingv1.Provisioned)
	if held {
		for _, name := range bookedNodes(pr.Status.ProvisioningClassDetails) {
			if !slices.ContainsFunc(list.Items, func(n corev1.Node) bool { return n.Name == name }) {
				o.Vanished = append(o.Vanished, name)
			}
		}
		if len(o.Vanished) == 0 {
			return nil
		}
	}
	var daemonSets appsv1.DaemonSetList
	if err := r.Client.List(ctx, &daemonSets, client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("listing DaemonSets: %w", err)
	}
	daemons := DaemonsOf(daemonSets.Items)
	var nodes []Node
	for i := range list.Items {
		n := &list.Items[i]
		if !held && !IsReady(n) {
			continue
		}
		var pods corev1.PodList
		if err := r.Client.List(ctx, &pods, client.UnsafeDisableDeepCopy, client.MatchingFields{indexNode: n.Name}); err != nil {
			return fmt.Errorf("listing the pods on node %s: %w", n.Name, err)
		}
		nodes = append(nodes, NodeOf(n, pods.Items, daemons))
	}
	room := NewRoom(nodes)
	own, err := r.holdings(ctx, pr.UID)
	if err != nil {
		return err
	}
	others, err := r.Claims.Others(ctx, controllerName)
	if err != nil {
		return err
	}
	for _, h := range append(own, others...) {
		room.Hold(h)
	}
	o.Placement = room.Place(Outstanding(b.PodSets, state.slots(!held), state.pods))
	if !o.Placement.Complete() {
		return r.observeUpcoming(ctx, b, o)
	}
	return nil
}

// holdings lists what all bookings but one hold. One that is consumed holds on to the room of its pods that have no node
// yet.
func (r *Reconciler) holdings(ctx context.Context, except types.UID) ([]Holding, error) {
	var all autoscalingv1.ProvisioningRequestList
	if err := r.Client.List(ctx, &all, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("listing ProvisioningRequests: %w", err)
	}
	var out []Holding
	for i := range all.Items {
		other := &all.Items[i]
		if other.UID == except || other.Spec.ProvisioningClassName != ClassName || (ended(other) && !consumed(other)) {
			continue
		}
		nodes := bookedNodes(other.Status.ProvisioningClassDetails)
		if !isTrue(other.Status.Conditions, autoscalingv1.Provisioned) {
			// The cache may be behind what was written a moment ago.
			p, written := r.promised[client.ObjectKeyFromObject(other)]
			if !written || p.to != other.UID {
				continue
			}
			nodes = p.nodes
		}
		state, err := r.stateOf(ctx, other)
		if err != nil {
			return nil, err
		}
		out = append(out, Holding{
			PodSets: Outstanding(state.booking(other).PodSets, state.slots(false), state.pods), Nodes: nodes,
		})
	}
	return out, nil
}

// observeUpcoming counts the nodes on their way that one of the pod sets could use.
func (r *Reconciler) observeUpcoming(ctx context.Context, b Booking, o *Observation) error {
	var upcoming fleetv1alpha1.UpcomingNodeList
	if err := r.Client.List(ctx, &upcoming, client.UnsafeDisableDeepCopy, client.InNamespace(r.Namespace)); err != nil {
		return fmt.Errorf("listing UpcomingNodes in %s: %w", r.Namespace, err)
	}
	for i := range upcoming.Items {
		u := &upcoming.Items[i]
		if u.Status.Phase == fleetv1alpha1.UpcomingNodeReady || u.Status.Phase == fleetv1alpha1.UpcomingNodeFailed {
			continue
		}
		if slices.ContainsFunc(b.PodSets, func(s PodSet) bool {
			return s.Profile.MatchesLabels(u.Spec.Labels) && capacity.Tolerates(s.Profile.Tolerations, u.Spec.Taints)
		}) {
			o.Upcoming++
		}
	}
	return nil
}
