package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Availability is the confidence that AvailableCount can be had (section 6.2).
//
// +kubebuilder:validation:Enum=High;Medium;Low;None
type Availability string

// Confidence levels, best first.
const (
	AvailabilityHigh   Availability = "High"
	AvailabilityMedium Availability = "Medium"
	AvailabilityLow    Availability = "Low"
	AvailabilityNone   Availability = "None"
)

// AvailableCapacitySpec describes nodes that could be provisioned. It is a hint: not a source of truth, not a reservation.
type AvailableCapacitySpec struct {
	// Requirements are what the nodes' labels will meet.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	Requirements []NodeSelectorRequirement `json:"requirements,omitempty"`

	// Resources are the allocatable resources of one node, before DaemonSets.
	Resources ResourceList `json:"resources"`

	// AvailableCount is the number of nodes.
	// +kubebuilder:validation:Minimum=0
	AvailableCount int32 `json:"availableCount"`

	// Availability is the confidence in AvailableCount.
	Availability Availability `json:"availability"`

	// Cost is the price of one node for one hour, in the fleet's currency.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Cost float64 `json:"cost,omitempty"`

	// SupportsAtomicProvisioning says that several nodes can be had all together or not at all.
	// +optional
	SupportsAtomicProvisioning bool `json:"supportsAtomicProvisioning,omitempty"`

	// EstimatedProvisioningTime is how long a node takes from the request to Ready.
	// +optional
	EstimatedProvisioningTime *metav1.Duration `json:"estimatedProvisioningTime,omitempty"`

	// NodeTemplate holds labels and taints that the nodes will carry beyond Requirements.
	// +optional
	NodeTemplate NodeTemplate `json:"nodeTemplate,omitempty"`
}

// NodeTemplate is the part of a node that scheduling reads.
type NodeTemplate struct {
	// +optional
	Labels map[string]string `json:"labels,omitempty"`
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	Taints []corev1.Taint `json:"taints,omitempty"`
}

// AvailableCapacityStatus says how fresh the hint is.
type AvailableCapacityStatus struct {
	// ObservedTime is when the autoscaler last confirmed the hint.
	// +optional
	ObservedTime *metav1.Time `json:"observedTime,omitempty"`
}

// AvailableCapacity is an eventually consistent hint of what could be provisioned (section 6.2). Kueue reads it for
// admission, people read it for planning; if nothing reads it, the system works without it.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:path=availablecapacities,singular=availablecapacity,shortName=ac,categories=fleet
// +kubebuilder:printcolumn:name="Instance Type",type=string,JSONPath=`.spec.requirements[?(@.key=="node.kubernetes.io/instance-type")].values[0]`
// +kubebuilder:printcolumn:name="Available",type=integer,JSONPath=`.spec.availableCount`
// +kubebuilder:printcolumn:name="Cost",type=number,JSONPath=`.spec.cost`
// +kubebuilder:printcolumn:name="Availability",type=string,JSONPath=`.spec.availability`
// +kubebuilder:printcolumn:name="Atomic",type=boolean,priority=1,JSONPath=`.spec.supportsAtomicProvisioning`
// +kubebuilder:printcolumn:name="ETA",type=string,priority=1,JSONPath=`.spec.estimatedProvisioningTime`
type AvailableCapacity struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +kubebuilder:validation:Required
	Spec   AvailableCapacitySpec   `json:"spec"`
	Status AvailableCapacityStatus `json:"status,omitempty"`
}

// AvailableCapacityList is a list of AvailableCapacity objects.
//
// +kubebuilder:object:root=true
type AvailableCapacityList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []AvailableCapacity `json:"items"`
}
