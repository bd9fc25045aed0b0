package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// AutoscalerConfiguration configures cmd/autoscaler, the reference infrastructure autoscaler.
//
// +kubebuilder:object:root=true
type AutoscalerConfiguration struct {
	metav1.TypeMeta `json:",inline"`

	// ListenAddress of the gRPC server. Default :9443.
	ListenAddress string    `json:"listenAddress,omitempty"`
	TLS           ServerTLS `json:"tls,omitempty"`
	// HealthProbeBindAddress and MetricsBindAddress are host:port; "0" turns one off. Defaults :8081 and :8080.
	HealthProbeBindAddress string `json:"healthProbeBindAddress,omitempty"`
	MetricsBindAddress     string `json:"metricsBindAddress,omitempty"`

	// State is where machines and the last roll-ups are kept: a gocloud.dev/blob URL, file:///var/lib/drover by default.
	State string `json:"state,omitempty"`

	Provider ProviderConfig `json:"provider"`
	Policy   PolicyConfig   `json:"policy,omitempty"`
	Feed     FeedConfig     `json:"feed,omitempty"`
}

// FeedConfig says when a subscribed cluster is told of changes.
type FeedConfig struct {
	// Debounce collects changes before a message. Default 100ms.
	Debounce *metav1.Duration `json:"debounce,omitempty"`
	// Period sends without a change. Default 10s.
	Period *metav1.Duration `json:"period,omitempty"`
}

// ProviderConfig chooses the provider of nodes. Exactly one is set.
type ProviderConfig struct {
	KWOK *KWOKProvider `json:"kwok,omitempty"`
}

// KWOKProvider simulates a cloud: a machine is a Node object that kwok keeps alive.
type KWOKProvider struct {
	// OfferingsFile is a YAML file of kind OfferingList; it is read again when it changes.
	OfferingsFile string `json:"offeringsFile"`
	// Clusters says how to reach each cluster's API server. A cluster that is not listed gets no nodes.
	Clusters []KWOKCluster `json:"clusters"`
	// Latency of a launch until the machine exists, and until its Node registers. Defaults 0.
	LaunchLatency   *metav1.Duration `json:"launchLatency,omitempty"`
	RegisterLatency *metav1.Duration `json:"registerLatency,omitempty"`
	// LatencyJitter multiplies each latency by a factor between 1 and 1+LatencyJitter. Default 0.
	LatencyJitter float64 `json:"latencyJitter,omitempty"`
	// Faults, as probabilities between 0 and 1. LoseMachine: launched, but its Node never appears. FailLaunch: the launch
	// ends with an error. DropEvent, DuplicateEvent, ReorderEvent: what happens to completion events.
	Faults KWOKFaults `json:"faults,omitempty"`
	// Seed makes latency and faults reproducible. 0: chosen at start.
	Seed int64 `json:"seed,omitempty"`
}

// KWOKCluster is a cluster that the kwok provider may put nodes into.
type KWOKCluster struct {
	ID string `json:"id"`
	// Kubeconfig file; empty: the in-cluster configuration.
	Kubeconfig string `json:"kubeconfig,omitempty"`
}

// KWOKFaults are probabilities between 0 and 1.
type KWOKFaults struct {
	LoseMachine    float64 `json:"loseMachine,omitempty"`
	FailLaunch     float64 `json:"failLaunch,omitempty"`
	DropEvent      float64 `json:"dropEvent,omitempty"`
	DuplicateEvent float64 `json:"duplicateEvent,omitempty"`
	ReorderEvent   float64 `json:"reorderEvent,omitempty"`
}

// PolicyConfig bounds what the autoscaler does by itself.
type PolicyConfig struct {
	// DryRun plans and explains, and acts on nothing. The file is read again when it changes.
	DryRun bool `json:"dryRun,omitempty"`
	// DisableReclaim is the kill switch: nothing is reclaimed.
	DisableReclaim bool `json:"disableReclaim,omitempty"`
	// ConsolidationDelay is how long a machine has to be surplus before it is reclaimed. Default 30s.
	ConsolidationDelay *metav1.Duration `json:"consolidationDelay,omitempty"`
	// MaxReclaimsPerMinute caps reclaims per cluster per minute. Default 100.
	MaxReclaimsPerMinute int32 `json:"maxReclaimsPerMinute,omitempty"`
	// CollapseHold is how long a roll-up that lost more than CollapseFraction of the demand is held before it may
	// reclaim. Defaults 1m and 0.5. Launches are never held.
	CollapseHold     *metav1.Duration `json:"collapseHold,omitempty"`
	CollapseFraction float64          `json:"collapseFraction,omitempty"`
	// RegistrationDeadline is how long a launched machine may take to become a Ready node before it is Failed and
	// replaced. Default 10m.
	RegistrationDeadline *metav1.Duration `json:"registrationDeadline,omitempty"`
	// SettleTime is how long a Ready node is given to the scheduler before pods that are still pending count as a sign
	// that the plan was too tight. Default 30s.
	SettleTime *metav1.Duration `json:"settleTime,omitempty"`
	// SilentAfter flags a cluster whose roll-ups stopped. Default 5m. It is never drained for it.
	SilentAfter *metav1.Duration `json:"silentAfter,omitempty"`
	// PassDebounce collects changes before a planning pass. Default 100ms.
	PassDebounce *metav1.Duration `json:"passDebounce,omitempty"`
	// LaunchBackoffBase and LaunchBackoffMax bound the pause after a failed launch in which nothing more is asked of that
	// offering in that domain. Defaults 5s and 5m.
	LaunchBackoffBase *metav1.Duration `json:"launchBackoffBase,omitempty"`
	LaunchBackoffMax  *metav1.Duration `json:"launchBackoffMax,omitempty"`
	// FailedRetention is how long a failed machine stays visible. Default 5m.
	FailedRetention *metav1.Duration `json:"failedRetention,omitempty"`
	// KeptBackoff is how long a machine that its cluster could not give back is not asked for again. Default 1m.
	KeptBackoff *metav1.Duration `json:"keptBackoff,omitempty"`
	// SurveyPeriod is how often the provider's inventory is compared with the records. Default 30s.
	SurveyPeriod *metav1.Duration `json:"surveyPeriod,omitempty"`
}

// OfferingList is the file that the kwok provider reads: what can be had, where, and how much of it.
//
// +kubebuilder:object:root=true
type OfferingList struct {
	metav1.TypeMeta `json:",inline"`

	Offerings []Offering `json:"offerings"`
}

// Offering is a kind of node.
type Offering struct {
	// Name is a DNS label.
	Name string `json:"name"`
	// InstanceType becomes the label node.kubernetes.io/instance-type. Default: Name.
	InstanceType string            `json:"instanceType,omitempty"`
	Labels       map[string]string `json:"labels,omitempty"`
	// Resources are allocatable quantities of one node. "pods" defaults to 110.
	Resources map[string]string `json:"resources"`
	// Taints as "key=value:Effect" or "key:Effect".
	Taints []string `json:"taints,omitempty"`
	// Cost per node and hour.
	Cost float64 `json:"cost"`
	// Atomic: several nodes all together or not at all.
	Atomic bool `json:"atomic,omitempty"`
	// Availability hint: High (default), Medium, Low, None.
	Availability string `json:"availability,omitempty"`
	// ProvisioningTime is the estimate that AvailableCapacity shows.
	ProvisioningTime *metav1.Duration `json:"provisioningTime,omitempty"`
	// Domains where it can be had.
	Domains []OfferingDomain `json:"domains"`
}

// OfferingDomain is a zone, or a rack of a zone.
type OfferingDomain struct {
	Zone string `json:"zone"`
	Rack string `json:"rack,omitempty"`
	// Count is the total stock here, in nodes, whether in use or not.
	Count int32 `json:"count"`
}
