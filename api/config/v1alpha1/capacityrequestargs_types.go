package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// CapacityRequestArgs are the args of the scheduler plugin CapacityRequest, given under pluginConfig of a
// KubeSchedulerConfiguration. Every scheduler profile has its own.
//
// +kubebuilder:object:root=true
type CapacityRequestArgs struct {
	metav1.TypeMeta `json:",inline"`

	// Namespaces whose pods may ask for capacity; empty: all.
	Namespaces []string `json:"namespaces,omitempty"`
	// QPS and Burst of the writer, in CapacityRequests. Defaults 200 and 400. While the scheduling loop is failing pods, the
	// writer keeps to a quarter of QPS, so that it takes the loop no time that can be felt, and then makes up for it.
	QPS   float64 `json:"qps,omitempty"`
	Burst int32   `json:"burst,omitempty"`
	// Demand is Total (default) or RequestsOnly.
	Demand DemandMode `json:"demand,omitempty"`
	// CapacityNamespace holds AvailableCapacity and UpcomingNode. Default fleet-system.
	CapacityNamespace string `json:"capacityNamespace,omitempty"`
	// TemplateFreshness is how old status.observedTime of an AvailableCapacity may be before it is no longer evidence
	// that no node can help a pod: while any template is older, the pod gets the benefit of the doubt. A template without
	// an observedTime is always fresh. Default 10m.
	TemplateFreshness *metav1.Duration `json:"templateFreshness,omitempty"`
	// RewritePeriod is how long a pod's request is taken for granted. A pod that still fails after it has its request
	// verified, and written again where somebody deleted it. Default 10m.
	RewritePeriod *metav1.Duration `json:"rewritePeriod,omitempty"`
	// Events turns the event on a pod that no node can help on or off. Default true.
	Events *bool `json:"events,omitempty"`
	// ShutdownGracePeriod bounds how long the writer drains its queue when the scheduler stops. Default 5s.
	ShutdownGracePeriod *metav1.Duration `json:"shutdownGracePeriod,omitempty"`
}
