package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// CapacityRequestArgs are the args of the scheduler plugin CapacityRequest.
//
// +kubebuilder:object:root=true
type CapacityRequestArgs struct {
	metav1.TypeMeta `json:",inline"`

	// Namespaces whose pods may ask for capacity; empty: all.
	Namespaces []string `json:"namespaces,omitempty"`
	// QPS and Burst of the writer, in CapacityRequests. Defaults 200 and 400.
	QPS   float64 `json:"qps,omitempty"`
	Burst int32   `json:"burst,omitempty"`
	// Demand is Total (default) or RequestsOnly.
	Demand DemandMode `json:"demand,omitempty"`
}
