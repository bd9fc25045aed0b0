package builders

import (
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
)

// NodeBuilder builds a Node.
type NodeBuilder struct{ node corev1.Node }

// Node starts a node that is not Ready yet and carries its hostname label and 110 pods.
func Node(name string) *NodeBuilder {
	b := &NodeBuilder{node: corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("node-" + name), Labels: map[string]string{
			corev1.LabelHostname: name,
		}},
	}}
	return b.Allocatable("pods", "110")
}

// Obj returns the node.
func (b *NodeBuilder) Obj() *corev1.Node { return b.node.DeepCopy() }

// Label adds a label.
func (b *NodeBuilder) Label(key, value string) *NodeBuilder {
	b.node.Labels = with(b.node.Labels, key, value)
	return b
}

// Annotation adds an annotation.
func (b *NodeBuilder) Annotation(key, value string) *NodeBuilder {
	b.node.Annotations = with(b.node.Annotations, key, value)
	return b
}

// Machine marks the node as the autoscaler's.
func (b *NodeBuilder) Machine(id string) *NodeBuilder { return b.Label(fleetv1alpha1.LabelMachine, id) }

// Zone sets the zone label.
func (b *NodeBuilder) Zone(zone string) *NodeBuilder { return b.Label(corev1.LabelTopologyZone, zone) }

// Rack sets the rack label.
func (b *NodeBuilder) Rack(rack string) *NodeBuilder { return b.Label(fleetv1alpha1.LabelRack, rack) }

// InstanceType sets the instance type label.
func (b *NodeBuilder) InstanceType(t string) *NodeBuilder {
	return b.Label(corev1.LabelInstanceTypeStable, t)
}

// Allocatable adds to capacity and allocatable: name, quantity, and so on.
func (b *NodeBuilder) Allocatable(pairs ...string) *NodeBuilder {
	b.node.Status.Allocatable = merged(b.node.Status.Allocatable, Resources(pairs...))
	b.node.Status.Capacity = b.node.Status.Allocatable.DeepCopy()
	return b
}

// Taint adds a taint.
func (b *NodeBuilder) Taint(key, value string, effect corev1.TaintEffect) *NodeBuilder {
	b.node.Spec.Taints = append(b.node.Spec.Taints, corev1.Taint{Key: key, Value: value, Effect: effect})
	return b
}

// ProviderID sets spec.providerID.
func (b *NodeBuilder) ProviderID(id string) *NodeBuilder {
	b.node.Spec.ProviderID = id
	return b
}

// Unschedulable cordons the node.
func (b *NodeBuilder) Unschedulable() *NodeBuilder {
	b.node.Spec.Unschedulable = true
	return b
}

// Ready makes the node Ready.
func (b *NodeBuilder) Ready() *NodeBuilder {
	b.node.Status.Conditions = append(b.node.Status.Conditions,
		corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady"})
	return b
}

// DaemonSetBuilder builds a DaemonSet.
type DaemonSetBuilder struct {
	ds  appsv1.DaemonSet
	pod *PodBuilder
}

// DaemonSet starts a DaemonSet for every node.
func DaemonSet(namespace, name string) *DaemonSetBuilder {
	selector := map[string]string{"app": name}
	return &DaemonSetBuilder{
		ds: appsv1.DaemonSet{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID("DaemonSet-" + name)},
			Spec:       appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: selector}},
		},
		pod: Pod(namespace, name).Scheduler("").Label("app", name),
	}
}

// Template changes the pod template.
func (b *DaemonSetBuilder) Template(change func(*PodBuilder)) *DaemonSetBuilder {
	change(b.pod)
	return b
}

// Requests adds to the main container's requests.
func (b *DaemonSetBuilder) Requests(pairs ...string) *DaemonSetBuilder {
	b.pod.Requests(pairs...)
	return b
}

// Obj returns the DaemonSet.
func (b *DaemonSetBuilder) Obj() *appsv1.DaemonSet {
	ds := b.ds.DeepCopy()
	pod := b.pod.Obj()
	ds.Spec.Template = corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: pod.Labels, Annotations: pod.Annotations},
		Spec:       pod.Spec,
	}
	return ds
}
