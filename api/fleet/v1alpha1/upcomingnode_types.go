package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// UpcomingNodePhase is the life of a node on its way: Provisioning, Launched, Registered, then Ready or Failed.
//
// +kubebuilder:validation:Enum=Provisioning;Launched;Registered;Ready;Failed
type UpcomingNodePhase string

// Phases in their order. Ready and Failed are both final.
const (
	UpcomingNodeProvisioning UpcomingNodePhase = "Provisioning"
	UpcomingNodeLaunched     UpcomingNodePhase = "Launched"
	UpcomingNodeRegistered   UpcomingNodePhase = "Registered"
	UpcomingNodeReady        UpcomingNodePhase = "Ready"
	UpcomingNodeFailed       UpcomingNodePhase = "Failed"
)

// UpcomingNodeSpec describes the node to come as scheduling will see it.
type UpcomingNodeSpec struct {
	// Labels the node will carry.
	// +optional
	Labels map[string]string `json:"labels,omitempty"`

	// Resources are the node's allocatable resources.
	// +optional
	Resources ResourceList `json:"resources,omitempty"`

	// Taints the node will carry.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	Taints []corev1.Taint `json:"taints,omitempty"`
}

// UpcomingNodeStatus is how far the node has come.
//
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.phase) || has(self.phase)",message="phase only moves forward: it cannot be removed"
type UpcomingNodeStatus struct {
	// +optional
	// +kubebuilder:validation:XValidation:rule="self == oldSelf || !(oldSelf in ['Ready','Failed'])",message="phase only moves forward: Ready and Failed are final"
	// +kubebuilder:validation:XValidation:rule="!(oldSelf == 'Launched' && self == 'Provisioning')",message="phase only moves forward: Launched cannot become Provisioning"
	// +kubebuilder:validation:XValidation:rule="!(oldSelf == 'Registered' && self in ['Provisioning','Launched'])",message="phase only moves forward: Registered can become Ready or Failed only"
	Phase UpcomingNodePhase `json:"phase,omitempty"`

	// NodeRef names the Node object, once it exists.
	// +optional
	NodeRef *corev1.LocalObjectReference `json:"nodeRef,omitempty"`

	// ProviderID is the machine's id at its provider, as in the Node's spec.providerID.
	// +optional
	ProviderID string `json:"providerID,omitempty"`

	// ProvisioningStartTime is when the autoscaler decided to launch.
	// +optional
	ProvisioningStartTime *metav1.Time `json:"provisioningStartTime,omitempty"`

	// EstimatedReadyTime is when the autoscaler expects the node to be Ready.
	// +optional
	EstimatedReadyTime *metav1.Time `json:"estimatedReadyTime,omitempty"`

	// Message explains a failure or a delay.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	Message string `json:"message,omitempty"`
}

// UpcomingNode says that a node which matches its spec is being provisioned (section 6.3). The operator writes it and
// deletes it once the real Node is Ready.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=un,categories=fleet
// +kubebuilder:printcolumn:name="Phase",type=string,JSONPath=`.status.phase`
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.status.nodeRef.name`
// +kubebuilder:printcolumn:name="Instance Type",type=string,JSONPath=`.spec.labels.node\.kubernetes\.io/instance-type`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Zone",type=string,priority=1,JSONPath=`.spec.labels.topology\.kubernetes\.io/zone`
// +kubebuilder:printcolumn:name="Message",type=string,priority=1,JSONPath=`.status.message`
type UpcomingNode struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +kubebuilder:validation:Required
	Spec   UpcomingNodeSpec   `json:"spec"`
	Status UpcomingNodeStatus `json:"status,omitempty"`
}

// UpcomingNodeList is a list of UpcomingNodes.
//
// +kubebuilder:object:root=true
type UpcomingNodeList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []UpcomingNode `json:"items"`
}
