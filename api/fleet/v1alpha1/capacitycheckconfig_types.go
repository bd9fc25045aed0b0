package v1alpha1

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// CapacityCheckMode says on what ground a workload is admitted.
//
// +kubebuilder:validation:Enum=Hint;Provision
type CapacityCheckMode string

const (
	// CapacityCheckHint admits when Ready nodes have room, or AvailableCapacity says that the nodes can be had.
	CapacityCheckHint CapacityCheckMode = "Hint"
	// CapacityCheckProvision asks for the nodes by CapacityRequests and admits when they are Ready.
	CapacityCheckProvision CapacityCheckMode = "Provision"
)

// AtomicProvisioningPolicy says what becomes of a gang for which only nodes can be had that come one by one.
//
// +kubebuilder:validation:Enum=Wait;Reject;Waive
type AtomicProvisioningPolicy string

const (
	// AtomicWait lets the gang wait for an offering that supports atomic provisioning.
	AtomicWait AtomicProvisioningPolicy = "Wait"
	// AtomicReject deactivates the workload when no offering of its flavor supports atomic provisioning.
	AtomicReject AtomicProvisioningPolicy = "Reject"
	// AtomicWaive treats a gang like any other workload.
	AtomicWaive AtomicProvisioningPolicy = "Waive"
)

// StalePolicy says what to do while hints are older than StaleAfter.
//
// +kubebuilder:validation:Enum=FailClosed;FailOpen
type StalePolicy string

const (
	// StaleFailClosed admits nothing on stale hints.
	StaleFailClosed StalePolicy = "FailClosed"
	// StaleFailOpen admits whatever has quota while no hint is fresh.
	StaleFailOpen StalePolicy = "FailOpen"
)

// Defaults of CapacityCheckConfigSpec.
const (
	DefaultCheckStaleAfter     = 3 * time.Minute
	DefaultCheckPeriod         = 40 * time.Second
	DefaultCheckTimeout        = 10 * time.Minute
	DefaultCheckPromiseTimeout = 15 * time.Minute
	DefaultCheckBackoffBase    = time.Minute
	DefaultCheckBackoffMax     = 30 * time.Minute
)

// CapacityCheckConfigSpec holds the parameters of an AdmissionCheck of the controller fleet.lucy.sh/available-capacity.
//
// +kubebuilder:validation:XValidation:rule="!has(self.backoffBase) || !has(self.backoffMax) || duration(self.backoffMax) >= duration(self.backoffBase)",message="backoffMax must not be below backoffBase"
type CapacityCheckConfigSpec struct {
	// Mode is Hint or Provision.
	// +optional
	// +kubebuilder:default=Hint
	Mode CapacityCheckMode `json:"mode,omitempty"`

	// MinAvailability is the least confidence on which a workload is admitted.
	// +optional
	// +kubebuilder:validation:XValidation:rule="self != 'None'",message="must be High, Medium or Low"
	// +kubebuilder:default=Medium
	MinAvailability Availability `json:"minAvailability,omitempty"`

	// AtomicProvisioning is the policy for gangs on offerings without supportsAtomicProvisioning.
	// +optional
	// +kubebuilder:default=Wait
	AtomicProvisioning AtomicProvisioningPolicy `json:"atomicProvisioning,omitempty"`

	// StaleAfter is the age at which a hint is not believed any more. Hints are confirmed every half minute.
	// +optional
	// +kubebuilder:default="3m"
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s')",message="must be at least 1s"
	StaleAfter *metav1.Duration `json:"staleAfter,omitempty"`

	// OnStale is FailClosed or FailOpen. FailClosed is the default: an autoscaler that cannot be heard cannot be asked for
	// nodes either, and a workload that was admitted in vain holds its quota against those that could run.
	// +optional
	// +kubebuilder:default=FailClosed
	OnStale StalePolicy `json:"onStale,omitempty"`

	// CheckPeriod is how often a waiting workload is looked at when nothing else changes.
	// +optional
	// +kubebuilder:default="40s"
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s')",message="must be at least 1s"
	CheckPeriod *metav1.Duration `json:"checkPeriod,omitempty"`

	// Timeout is how long a workload may hold quota while it waits. After it the workload gives its quota back and is queued
	// again after a back-off. 0s gives it back at once.
	// +optional
	// +kubebuilder:default="10m"
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('0s')",message="must not be negative"
	Timeout *metav1.Duration `json:"timeout,omitempty"`

	// PromiseTimeout is how long capacity stays set aside for an admitted workload whose nodes never show.
	// +optional
	// +kubebuilder:default="15m"
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s')",message="must be at least 1s"
	PromiseTimeout *metav1.Duration `json:"promiseTimeout,omitempty"`

	// BackoffBase and BackoffMax bound the pause before a workload that gave its quota back is queued again; it doubles with
	// every retry, and up to a fifth is added at random.
	// +optional
	// +kubebuilder:default="1m"
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s')",message="must be at least 1s"
	BackoffBase *metav1.Duration `json:"backoffBase,omitempty"`

	// +optional
	// +kubebuilder:default="30m"
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s')",message="must be at least 1s"
	BackoffMax *metav1.Duration `json:"backoffMax,omitempty"`
}

// WithDefaults returns the spec with every field filled: what the API server fills, and what an AdmissionCheck without
// parameters gets.
func (s CapacityCheckConfigSpec) WithDefaults() CapacityCheckConfigSpec {
	fill := func(d **metav1.Duration, fallback time.Duration) {
		if *d == nil {
			*d = &metav1.Duration{Duration: fallback}
		}
	}
	if s.Mode == "" {
		s.Mode = CapacityCheckHint
	}
	if s.MinAvailability == "" {
		s.MinAvailability = AvailabilityMedium
	}
	if s.AtomicProvisioning == "" {
		s.AtomicProvisioning = AtomicWait
	}
	if s.OnStale == "" {
		s.OnStale = StaleFailClosed
	}
	fill(&s.StaleAfter, DefaultCheckStaleAfter)
	fill(&s.CheckPeriod, DefaultCheckPeriod)
	fill(&s.Timeout, DefaultCheckTimeout)
	fill(&s.PromiseTimeout, DefaultCheckPromiseTimeout)
	fill(&s.BackoffBase, DefaultCheckBackoffBase)
	fill(&s.BackoffMax, DefaultCheckBackoffMax)
	return s
}

// CapacityCheckConfig is what an AdmissionCheck of Kueue refers to in its parameters. It is cluster-scoped, as that
// reference has no namespace.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:scope=Cluster,shortName=ccc,categories=fleet
// +kubebuilder:printcolumn:name="Mode",type=string,JSONPath=`.spec.mode`
// +kubebuilder:printcolumn:name="Min Availability",type=string,JSONPath=`.spec.minAvailability`
// +kubebuilder:printcolumn:name="On Stale",type=string,JSONPath=`.spec.onStale`
// +kubebuilder:printcolumn:name="Timeout",type=string,JSONPath=`.spec.timeout`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type CapacityCheckConfig struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +optional
	// +kubebuilder:default={}
	Spec CapacityCheckConfigSpec `json:"spec,omitempty"`
}

// CapacityCheckConfigList is a list of CapacityCheckConfigs.
//
// +kubebuilder:object:root=true
type CapacityCheckConfigList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []CapacityCheckConfig `json:"items"`
}
