package kwok

import (
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/drover-sh/drover/autoscaler/provider"
	"github.com/drover-sh/drover/capacity"
)

const (
	// LabelMachine marks the provider's Nodes; its value is the machine's id.
	LabelMachine = "fleet.lucy.sh/kwok-machine"
	// labelType selects the nodes that kwok manages, where it is started to manage nodes by label.
	labelType, typeKWOK = "type", "kwok"

	// annotationFake makes the kwok controller keep the Node alive.
	annotationFake = "kwok.x-k8s.io/node"
	// Annotations from which a restart learns what the machine is.
	annotationOffering    = "fleet.lucy.sh/kwok-offering"
	annotationDomain      = "fleet.lucy.sh/kwok-domain"
	annotationRequestedAt = "fleet.lucy.sh/kwok-requested-at"
)

// ProviderID is the spec.providerID of a machine's Node.
func ProviderID(ref provider.Ref) string { return "kwok://" + ref.Cluster + "/" + ref.ID }

// nodeName of a machine. The id is a DNS label, unique in the fleet and short: nothing better could be made of it.
func nodeName(ref provider.Ref) string { return ref.ID }

// node builds a machine's Node as a kubelet would register it: with its resources, and not Ready yet.
func node(request provider.Request) *corev1.Node {
	resources := request.Allocatable.List()
	n := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name:   nodeName(request.Ref),
			Labels: maps.Clone(request.Labels),
			Annotations: map[string]string{
				annotationFake:        "fake",
				annotationOffering:    request.Offering,
				annotationDomain:      request.Domain,
				annotationRequestedAt: request.RequestedAt.UTC().Format(time.RFC3339Nano),
			},
		},
		Spec: corev1.NodeSpec{ProviderID: ProviderID(request.Ref), Taints: request.Taints},
		Status: corev1.NodeStatus{
			Capacity: resources, Allocatable: resources.DeepCopy(),
			NodeInfo: corev1.NodeSystemInfo{
				OperatingSystem: request.Labels[corev1.LabelOSStable], Architecture: request.Labels[corev1.LabelArchStable],
				KubeletVersion: "kwok",
			},
		},
	}
	if n.Labels == nil {
		n.Labels = map[string]string{}
	}
	n.Labels[LabelMachine] = request.ID
	n.Labels[labelType] = typeKWOK
	n.Labels[corev1.LabelHostname] = n.Name
	return n
}

// requestOf reads a request back from a Node.
func requestOf(cluster string, n *corev1.Node) provider.Request {
	requestedAt, err := time.Parse(time.RFC3339Nano, n.Annotations[annotationRequestedAt])
	if err != nil {
		requestedAt = n.CreationTimestamp.Time
	}
	return provider.Request{
		Ref:      provider.Ref{ID: n.Labels[LabelMachine], Cluster: cluster},
		Offering: n.Annotations[annotationOffering], Domain: n.Annotations[annotationDomain],
		Labels: n.Labels, Allocatable: capacity.ResourcesOf(n.Status.Allocatable), Taints: n.Spec.Taints,
		RequestedAt: requestedAt,
	}
}
