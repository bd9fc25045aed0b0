package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ParentSpec is what the Child of a Parent is to be.
type ParentSpec struct {
	// Value is copied to the Child.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	Value string `json:"value,omitempty"`
}

// Parent asks for one Child of the same name in the same namespace.
//
// +kubebuilder:object:root=true
// +kubebuilder:printcolumn:name="Value",type=string,JSONPath=`.spec.value`
// +kubebuilder:printcolumn:name="VN",type=string,JSONPath=`.metadata.labels.loadbalance\.k8s\.io/vn`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type Parent struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec ParentSpec `json:"spec,omitempty"`
}

// ParentList is a list of Parents.
//
// +kubebuilder:object:root=true
type ParentList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Parent `json:"items"`
}

// ChildSpec follows the spec of the Parent.
type ChildSpec struct {
	// Value is that of the Parent.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	Value string `json:"value,omitempty"`
}

// Child is what the sample controller makes of a Parent, which is its controller owner.
//
// +kubebuilder:object:root=true
// +kubebuilder:printcolumn:name="Value",type=string,JSONPath=`.spec.value`
// +kubebuilder:printcolumn:name="VN",type=string,JSONPath=`.metadata.labels.loadbalance\.k8s\.io/vn`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type Child struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec ChildSpec `json:"spec,omitempty"`
}

// ChildList is a list of Children.
//
// +kubebuilder:object:root=true
type ChildList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Child `json:"items"`
}

// GateName is the name of the one Gate of a namespace that counts.
const GateName = "gate"

// GateSpec says whether Children are made.
type GateSpec struct {
	// Open lets the sample controller work. A namespace without a Gate is closed.
	// +optional
	Open bool `json:"open,omitempty"`
}

// Gate holds the sample controller back in its namespace, so that many Parents can be there before the first Child is.
//
// +kubebuilder:object:root=true
// +kubebuilder:printcolumn:name="Open",type=boolean,JSONPath=`.spec.open`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="self.metadata.name == 'gate'",message="metadata.name must be gate"
type Gate struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec GateSpec `json:"spec,omitempty"`
}

// GateList is a list of Gates.
//
// +kubebuilder:object:root=true
type GateList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Gate `json:"items"`
}

// IndexPlaceholder stands in a name pattern for the number of the Parent.
const IndexPlaceholder = "{index}"

// ParentCreationSpec says which Parents to create. It is carried out once, and never changes.
//
// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="spec is immutable"
type ParentCreationSpec struct {
	// Count is how many.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000000
	Count int32 `json:"count"`

	// NamePattern is the name of each, with {index} in the place of its number, which starts at 0. By default it is the
	// name of the ParentCreation, a dash and the number.
	// +optional
	// +kubebuilder:validation:MaxLength=240
	// +kubebuilder:validation:XValidation:rule="self == '' || self.contains('{index}')",message="must contain {index}"
	NamePattern string `json:"namePattern,omitempty"`

	// Value is that of each Parent.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	Value string `json:"value,omitempty"`

	// Parallel is how many requests are under way at a time.
	// +optional
	// +kubebuilder:default=32
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000
	Parallel int32 `json:"parallel,omitempty"`
}

// ParentCreationStatus says how far it is.
type ParentCreationStatus struct {
	// Created is how many of the Parents have been created.
	// +optional
	Created int32 `json:"created"`

	// Done is set once all have been created; what is deleted afterwards is not created again.
	// +optional
	Done bool `json:"done,omitempty"`

	// Message is the first error of the last try.
	// +optional
	Message string `json:"message,omitempty"`
}

// ParentCreation asks for many Parents at once, in its namespace.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Count",type=integer,JSONPath=`.spec.count`
// +kubebuilder:printcolumn:name="Created",type=integer,JSONPath=`.status.created`
// +kubebuilder:printcolumn:name="Done",type=boolean,JSONPath=`.status.done`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Message",type=string,priority=1,JSONPath=`.status.message`
type ParentCreation struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +kubebuilder:validation:Required
	Spec   ParentCreationSpec   `json:"spec"`
	Status ParentCreationStatus `json:"status,omitempty"`
}

// ParentCreationList is a list of ParentCreations.
//
// +kubebuilder:object:root=true
type ParentCreationList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []ParentCreation `json:"items"`
}
