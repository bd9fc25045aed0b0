package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// CapacityRequestPhase is the life of a request: Pending, then Acknowledged, written once and never touched again.
//
// +kubebuilder:validation:Enum=Pending;Acknowledged
type CapacityRequestPhase string

const (
	// CapacityRequestPending means that no roll-up has carried the request yet. An empty phase means the same.
	CapacityRequestPending CapacityRequestPhase = "Pending"
	// CapacityRequestAcknowledged means that a roll-up which carried the request reached the autoscaler.
	CapacityRequestAcknowledged CapacityRequestPhase = "Acknowledged"
)

// CapacityRequestSpec says which one node share is needed (section 6.1). One request stands for one pod; there is no count.
type CapacityRequestSpec struct {
	// Requirements are ANDed node label requirements. The operator Same does not exist here: it is made from Group in the
	// roll-up.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	Requirements []NodeSelectorRequirement `json:"requirements,omitempty"`

	// Alternatives are further sets of ANDed requirements, each as good as Requirements: the remaining
	// nodeSelectorTerms of a pod's required node affinity, which Kubernetes ORs. Requirements holds the first.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	Alternatives []RequirementSet `json:"alternatives,omitempty"`

	// Resources are what the pod requests of one node.
	// +optional
	Resources ResourceRequests `json:"resources,omitempty"`

	// Priority is the value of the pod's PriorityClass.
	// +optional
	Priority int32 `json:"priority,omitempty"`

	// TopologySpread is copied from the pod's topologySpreadConstraints.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	TopologySpread []TopologySpread `json:"topologySpread,omitempty"`

	// Tolerations are the pod's tolerations: a tainted offering is launched only for what tolerates it.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	Tolerations []corev1.Toleration `json:"tolerations,omitempty"`

	// AntiAffinity lists topology keys in whose domains at most one pod of the same set may stand: the pod's required
	// anti-affinity against its own labels.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=8
	AntiAffinity []AntiAffinity `json:"antiAffinity,omitempty"`

	// Group is set for a member of a gang or of a set that has to share a topology domain.
	// +optional
	Group *Group `json:"group,omitempty"`
}

// NodeSelectorRequirement is a requirement on a node label.
//
// +kubebuilder:validation:XValidation:rule="self.operator in ['In','NotIn'] ? has(self.values) && size(self.values) > 0 : true",message="values must not be empty when operator is In or NotIn"
// +kubebuilder:validation:XValidation:rule="self.operator in ['Exists','DoesNotExist'] ? !has(self.values) || size(self.values) == 0 : true",message="values must be empty when operator is Exists or DoesNotExist"
// +kubebuilder:validation:XValidation:rule="self.operator in ['Gt','Lt'] ? has(self.values) && size(self.values) == 1 && self.values[0].matches('^-?[0-9]+$') : true",message="values must hold exactly one integer when operator is Gt or Lt"
type NodeSelectorRequirement struct {
	// Key is the label key.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=317
	Key string `json:"key"`

	// Operator is one of In, NotIn, Exists, DoesNotExist, Gt, Lt.
	// +kubebuilder:validation:Enum=In;NotIn;Exists;DoesNotExist;Gt;Lt
	Operator corev1.NodeSelectorOperator `json:"operator"`

	// Values are compared with the label's value.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=63
	Values []string `json:"values,omitempty"`
}

// RequirementSet is a set of ANDed requirements.
type RequirementSet struct {
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	Requirements []NodeSelectorRequirement `json:"requirements"`
}

// ResourceRequests holds the requests of a pod.
type ResourceRequests struct {
	// Requests maps a resource name to a positive quantity.
	// +optional
	Requests ResourceList `json:"requests,omitempty"`
}

// TopologySpread asks to spread pods of one profile over the domains of a topology key.
type TopologySpread struct {
	// TopologyKey is the node label whose values are the domains.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=317
	TopologyKey string `json:"topologyKey"`

	// MaxSkew is the largest allowed difference between the fullest and the emptiest domain, in pods.
	// +kubebuilder:validation:Minimum=1
	MaxSkew int32 `json:"maxSkew"`

	// WhenUnsatisfiable is DoNotSchedule or ScheduleAnyway.
	// +kubebuilder:validation:Enum=DoNotSchedule;ScheduleAnyway
	WhenUnsatisfiable corev1.UnsatisfiableConstraintAction `json:"whenUnsatisfiable"`

	// MinDomains is the pod's minDomains: with fewer domains than this the emptiest counts as zero.
	// +optional
	// +kubebuilder:validation:Minimum=1
	MinDomains *int32 `json:"minDomains,omitempty"`
}

// AntiAffinity keeps the members of one set apart.
type AntiAffinity struct {
	// TopologyKey is the node label in whose domains at most one member may stand.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=317
	TopologyKey string `json:"topologyKey"`

	// Set identifies which pods exclude each other: a hash of namespace and selector.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Set string `json:"set,omitempty"`
}

// Group is a gang, a co-located set, or both.
type Group struct {
	// Name is unique in the cluster: "<namespace>/<name>" for a group that a pod names.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=317
	Name string `json:"name"`

	// MinCount is how many members have to run together; 0 means that any number is useful.
	// +optional
	// +kubebuilder:validation:Minimum=0
	MinCount int32 `json:"minCount,omitempty"`

	// TopologyKey, when set, asks for all members in one domain of this key; the roll-up turns it into the requirement
	// {key, Same} (section 8).
	// +optional
	// +kubebuilder:validation:MaxLength=317
	TopologyKey string `json:"topologyKey,omitempty"`
}

// CapacityRequestStatus is written once.
//
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.phase) || has(self.phase)",message="phase only moves forward: it cannot be removed"
type CapacityRequestStatus struct {
	// Phase is Pending or Acknowledged.
	// +optional
	// +kubebuilder:validation:XValidation:rule="!(oldSelf == 'Acknowledged' && self == 'Pending')",message="phase only moves forward: Acknowledged cannot become Pending"
	Phase CapacityRequestPhase `json:"phase,omitempty"`
}

// CapacityRequest declares a need for resources (section 6.1). It lives in the namespace of the pod that owns it, so that
// deletion of the pod collects it; requests without a pod (kubectl, CI, Kueue) hold their capacity until they are deleted.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=cr,categories=fleet
// +kubebuilder:printcolumn:name="Phase",type=string,JSONPath=`.status.phase`
// +kubebuilder:printcolumn:name="GPU",type=string,JSONPath=`.spec.resources.requests.nvidia\.com/gpu`
// +kubebuilder:printcolumn:name="Priority",type=integer,JSONPath=`.spec.priority`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="CPU",type=string,priority=1,JSONPath=`.spec.resources.requests.cpu`
// +kubebuilder:printcolumn:name="Memory",type=string,priority=1,JSONPath=`.spec.resources.requests.memory`
// +kubebuilder:printcolumn:name="Group",type=string,priority=1,JSONPath=`.spec.group.name`
// +kubebuilder:printcolumn:name="Pod",type=string,priority=1,JSONPath=`.metadata.ownerReferences[?(@.kind=="Pod")].name`
type CapacityRequest struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +kubebuilder:validation:Required
	Spec   CapacityRequestSpec   `json:"spec"`
	Status CapacityRequestStatus `json:"status,omitempty"`
}

// CapacityRequestList is a list of CapacityRequests.
//
// +kubebuilder:object:root=true
type CapacityRequestList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []CapacityRequest `json:"items"`
}
