package builders

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
)

// CapacityRequestBuilder builds a CapacityRequest.
type CapacityRequestBuilder struct{ cr fleetv1alpha1.CapacityRequest }

// CapacityRequest starts a request that nothing owns.
func CapacityRequest(namespace, name string) *CapacityRequestBuilder {
	return &CapacityRequestBuilder{cr: fleetv1alpha1.CapacityRequest{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID("cr-" + namespace + "-" + name)},
	}}
}

// Obj returns the request.
func (b *CapacityRequestBuilder) Obj() *fleetv1alpha1.CapacityRequest { return b.cr.DeepCopy() }

// For makes the pod own the request and labels it with the pod's UID.
func (b *CapacityRequestBuilder) For(pod *corev1.Pod) *CapacityRequestBuilder {
	b.cr.OwnerReferences = []metav1.OwnerReference{{
		APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID,
	}}
	b.cr.Labels = with(b.cr.Labels, fleetv1alpha1.LabelPodUID, string(pod.UID))
	return b
}

// Spec sets the whole spec.
func (b *CapacityRequestBuilder) Spec(spec fleetv1alpha1.CapacityRequestSpec) *CapacityRequestBuilder {
	spec.DeepCopyInto(&b.cr.Spec)
	return b
}

// Requests adds to spec.resources.requests.
func (b *CapacityRequestBuilder) Requests(pairs ...string) *CapacityRequestBuilder {
	list := merged(corev1.ResourceList(b.cr.Spec.Resources.Requests), Resources(pairs...))
	b.cr.Spec.Resources.Requests = fleetv1alpha1.ResourceList(list)
	return b
}

// Requires adds a requirement.
func (b *CapacityRequestBuilder) Requires(
	key string, op corev1.NodeSelectorOperator, values ...string,
) *CapacityRequestBuilder {
	b.cr.Spec.Requirements = append(b.cr.Spec.Requirements,
		fleetv1alpha1.NodeSelectorRequirement{Key: key, Operator: op, Values: values})
	return b
}

// Priority sets spec.priority.
func (b *CapacityRequestBuilder) Priority(p int32) *CapacityRequestBuilder {
	b.cr.Spec.Priority = p
	return b
}

// Tolerates adds a toleration of every value of a taint key.
func (b *CapacityRequestBuilder) Tolerates(key string, effect corev1.TaintEffect) *CapacityRequestBuilder {
	b.cr.Spec.Tolerations = append(b.cr.Spec.Tolerations,
		corev1.Toleration{Key: key, Operator: corev1.TolerationOpExists, Effect: effect})
	return b
}

// Spread adds a topology spread.
func (b *CapacityRequestBuilder) Spread(
	topologyKey string, maxSkew int32, when corev1.UnsatisfiableConstraintAction,
) *CapacityRequestBuilder {
	b.cr.Spec.TopologySpread = append(b.cr.Spec.TopologySpread,
		fleetv1alpha1.TopologySpread{TopologyKey: topologyKey, MaxSkew: maxSkew, WhenUnsatisfiable: when})
	return b
}

// Group sets spec.group.
func (b *CapacityRequestBuilder) Group(name string, minCount int32, topologyKey string) *CapacityRequestBuilder {
	b.cr.Spec.Group = &fleetv1alpha1.Group{Name: name, MinCount: minCount, TopologyKey: topologyKey}
	return b
}

// Phase sets status.phase.
func (b *CapacityRequestBuilder) Phase(p fleetv1alpha1.CapacityRequestPhase) *CapacityRequestBuilder {
	b.cr.Status.Phase = p
	return b
}

// AvailableCapacityBuilder builds an AvailableCapacity.
type AvailableCapacityBuilder struct {
	ac fleetv1alpha1.AvailableCapacity
}

// AvailableCapacity starts a hint of nodes that are there in high confidence.
func AvailableCapacity(name string, count int32) *AvailableCapacityBuilder {
	return &AvailableCapacityBuilder{ac: fleetv1alpha1.AvailableCapacity{
		ObjectMeta: metav1.ObjectMeta{Namespace: fleetv1alpha1.SystemNamespace, Name: name, UID: types.UID("ac-" + name)},
		Spec: fleetv1alpha1.AvailableCapacitySpec{
			Resources: fleetv1alpha1.ResourceList{}, AvailableCount: count, Availability: fleetv1alpha1.AvailabilityHigh,
		},
	}}
}

// Obj returns the hint.
func (b *AvailableCapacityBuilder) Obj() *fleetv1alpha1.AvailableCapacity { return b.ac.DeepCopy() }

// Requires adds a requirement that the nodes' labels will meet.
func (b *AvailableCapacityBuilder) Requires(
	key string, op corev1.NodeSelectorOperator, values ...string,
) *AvailableCapacityBuilder {
	b.ac.Spec.Requirements = append(b.ac.Spec.Requirements,
		fleetv1alpha1.NodeSelectorRequirement{Key: key, Operator: op, Values: values})
	return b
}

// Resources adds to the nodes' allocatable resources.
func (b *AvailableCapacityBuilder) Resources(pairs ...string) *AvailableCapacityBuilder {
	b.ac.Spec.Resources = fleetv1alpha1.ResourceList(
		merged(corev1.ResourceList(b.ac.Spec.Resources), Resources(pairs...)))
	return b
}

// Label adds a label that the nodes will carry.
func (b *AvailableCapacityBuilder) Label(key, value string) *AvailableCapacityBuilder {
	b.ac.Spec.NodeTemplate.Labels = with(b.ac.Spec.NodeTemplate.Labels, key, value)
	return b
}

// Taint adds a taint that the nodes will carry.
func (b *AvailableCapacityBuilder) Taint(key, value string, effect corev1.TaintEffect) *AvailableCapacityBuilder {
	b.ac.Spec.NodeTemplate.Taints = append(b.ac.Spec.NodeTemplate.Taints,
		corev1.Taint{Key: key, Value: value, Effect: effect})
	return b
}

// Availability sets the confidence.
func (b *AvailableCapacityBuilder) Availability(a fleetv1alpha1.Availability) *AvailableCapacityBuilder {
	b.ac.Spec.Availability = a
	return b
}

// Cost sets the price of one node for one hour.
func (b *AvailableCapacityBuilder) Cost(c float64) *AvailableCapacityBuilder {
	b.ac.Spec.Cost = c
	return b
}

// UpcomingNodeBuilder builds an UpcomingNode.
type UpcomingNodeBuilder struct{ un fleetv1alpha1.UpcomingNode }

// UpcomingNode starts a node on its way, in phase Provisioning.
func UpcomingNode(name string) *UpcomingNodeBuilder {
	return &UpcomingNodeBuilder{un: fleetv1alpha1.UpcomingNode{
		ObjectMeta: metav1.ObjectMeta{Namespace: fleetv1alpha1.SystemNamespace, Name: name, UID: types.UID("un-" + name)},
		Status:     fleetv1alpha1.UpcomingNodeStatus{Phase: fleetv1alpha1.UpcomingNodeProvisioning},
	}}
}

// Obj returns the upcoming node.
func (b *UpcomingNodeBuilder) Obj() *fleetv1alpha1.UpcomingNode { return b.un.DeepCopy() }

// Label adds a label that the node will carry.
func (b *UpcomingNodeBuilder) Label(key, value string) *UpcomingNodeBuilder {
	b.un.Spec.Labels = with(b.un.Spec.Labels, key, value)
	return b
}

// Resources adds to the node's allocatable resources.
func (b *UpcomingNodeBuilder) Resources(pairs ...string) *UpcomingNodeBuilder {
	b.un.Spec.Resources = fleetv1alpha1.ResourceList(
		merged(corev1.ResourceList(b.un.Spec.Resources), Resources(pairs...)))
	return b
}

// Taint adds a taint that the node will carry.
func (b *UpcomingNodeBuilder) Taint(key, value string, effect corev1.TaintEffect) *UpcomingNodeBuilder {
	b.un.Spec.Taints = append(b.un.Spec.Taints, corev1.Taint{Key: key, Value: value, Effect: effect})
	return b
}

// Phase sets status.phase.
func (b *UpcomingNodeBuilder) Phase(p fleetv1alpha1.UpcomingNodePhase) *UpcomingNodeBuilder {
	b.un.Status.Phase = p
	return b
}

// Node sets status.nodeRef.
func (b *UpcomingNodeBuilder) Node(name string) *UpcomingNodeBuilder {
	b.un.Status.NodeRef = &corev1.LocalObjectReference{Name: name}
	return b
}

// ProviderID sets status.providerID.
func (b *UpcomingNodeBuilder) ProviderID(id string) *UpcomingNodeBuilder {
	b.un.Status.ProviderID = id
	return b
}

// Started sets status.provisioningStartTime.
func (b *UpcomingNodeBuilder) Started(at time.Time) *UpcomingNodeBuilder {
	started := metav1.NewTime(at)
	b.un.Status.ProvisioningStartTime = &started
	return b
}
