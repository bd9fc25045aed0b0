package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ManagerConfiguration configures cmd/manager: the roll-up operator and the pod back-stop of one cluster.
//
// +kubebuilder:object:root=true
type ManagerConfiguration struct {
	metav1.TypeMeta `json:",inline"`

	// ClusterID is the cluster's name in the fleet; with mutual TLS the certificate has to carry it. Required.
	ClusterID string `json:"clusterID"`
	// Namespace holds AvailableCapacity and UpcomingNode. Default fleet-system.
	Namespace string `json:"namespace,omitempty"`
	// Demand is Total (default) or RequestsOnly.
	Demand DemandMode `json:"demand,omitempty"`

	Autoscaler     AutoscalerClient     `json:"autoscaler"`
	RollUp         RollUpConfig         `json:"rollUp,omitempty"`
	Reclaim        ReclaimConfig        `json:"reclaim,omitempty"`
	Backstop       BackstopConfig       `json:"backstop,omitempty"`
	Kueue          KueueConfig          `json:"kueue,omitempty"`
	Sharding       ShardingConfig       `json:"sharding,omitempty"`
	LeaderElection LeaderElectionConfig `json:"leaderElection,omitempty"`

	// MetricsBindAddress, HealthProbeBindAddress are host:port; "0" turns one off. Defaults :8443 (TLS, with authentication
	// and authorization by the API server) and :8081.
	MetricsBindAddress     string `json:"metricsBindAddress,omitempty"`
	HealthProbeBindAddress string `json:"healthProbeBindAddress,omitempty"`
	// MetricsInsecure serves metrics without TLS and without authentication.
	MetricsInsecure bool `json:"metricsInsecure,omitempty"`
}

// AutoscalerClient says where the infrastructure autoscaler is.
type AutoscalerClient struct {
	// Address is a gRPC target, for example autoscaler.fleet-system.svc:9443. Required.
	Address string    `json:"address"`
	TLS     ClientTLS `json:"tls,omitempty"`
	// BackoffBase and BackoffMax bound the reconnect back-off. Defaults 500ms and 30s.
	BackoffBase *metav1.Duration `json:"backoffBase,omitempty"`
	BackoffMax  *metav1.Duration `json:"backoffMax,omitempty"`
}

// RollUpConfig says when roll-ups are sent.
type RollUpConfig struct {
	// Debounce collects changes before a send. Default 200ms.
	Debounce *metav1.Duration `json:"debounce,omitempty"`
	// Period sends without a change. Default 10s.
	Period *metav1.Duration `json:"period,omitempty"`
	// Timeout of one send. Default 5s.
	Timeout *metav1.Duration `json:"timeout,omitempty"`
	// AcknowledgeConcurrency bounds concurrent status patches. Default 16.
	AcknowledgeConcurrency int32 `json:"acknowledgeConcurrency,omitempty"`
}

// ReclaimConfig bounds what giving nodes back may disturb.
type ReclaimConfig struct {
	// MaxConcurrentDrains is how many nodes that still run pods are drained at a time. Empty nodes do not count.
	// Default 10.
	MaxConcurrentDrains int32 `json:"maxConcurrentDrains,omitempty"`
	// SettleTime is how long a node has to be cordoned and empty before it is reported drained: a scheduler that had not
	// seen the cordon yet may still bind a pod. Default 2s.
	SettleTime *metav1.Duration `json:"settleTime,omitempty"`
	// EvictionRetry is the pause before an eviction that a PodDisruptionBudget refused is tried again. Default 5s.
	EvictionRetry *metav1.Duration `json:"evictionRetry,omitempty"`
	// DrainDeadline is how long a drain may take. After it the node goes back to service and is reported as kept.
	// Default 15m.
	DrainDeadline *metav1.Duration `json:"drainDeadline,omitempty"`
	// RetryPeriod is how long an instruction that could not be met in full rests before the nodes are looked at again.
	// Default 15s.
	RetryPeriod *metav1.Duration `json:"retryPeriod,omitempty"`
}

// BackstopConfig configures the pod back-stop (the document's section 12).
type BackstopConfig struct {
	// Enabled turns it on. Default true.
	Enabled *bool `json:"enabled,omitempty"`
	// SchedulerNames whose pods it serves; empty: every scheduler's.
	SchedulerNames []string `json:"schedulerNames,omitempty"`
	// Namespaces it serves; empty: all.
	Namespaces []string `json:"namespaces,omitempty"`
	// Writes per second of CapacityRequests, and burst. Defaults 200 and 400.
	QPS   float64 `json:"qps,omitempty"`
	Burst int32   `json:"burst,omitempty"`
	// Delay leaves the scheduler plugin time to write first. Default 5s.
	Delay *metav1.Duration `json:"delay,omitempty"`
}

// KueueConfig configures what the manager does for Kueue.
type KueueConfig struct {
	// Enabled turns on the admission check fleet.lucy.sh/available-capacity and, where the cluster has ProvisioningRequests,
	// the class capacity.fleet.lucy.sh. Kueue's CRDs have to be installed. Default false.
	Enabled bool `json:"enabled,omitempty"`
	// ProvisionTimeout is how long a ProvisioningRequest may wait for capacity before it fails. Default 15m; its parameter
	// ValidUntilSeconds overrides it.
	ProvisionTimeout *metav1.Duration `json:"provisionTimeout,omitempty"`
	// BookingTTL is how long the capacity of a ProvisioningRequest is held for pods that do not come. Default 10m; its
	// parameter BookingSeconds overrides it.
	BookingTTL *metav1.Duration `json:"bookingTTL,omitempty"`
}

// ShardingConfig makes the replicas members of a WatchGroup.
type ShardingConfig struct {
	// Enabled runs the back-stop and what the manager does for Kueue on all replicas at once, each of them on its own share.
	// What is one for the whole cluster (the roll-up, the feed, the reclaim) stays with the leader. The WatchGroup and its
	// coordinator have to be there. Default false: the leader does everything.
	Enabled bool `json:"enabled,omitempty"`
	// WatchGroup is the group's name. Default drover-manager.
	WatchGroup string `json:"watchGroup,omitempty"`
	// Namespace is that of the group and of the Pods. Default: the manager's namespace.
	Namespace string `json:"namespace,omitempty"`
	// LeaveTimeout is how long a replica that is stopped goes on until others have taken over its share. Default 10s.
	LeaveTimeout *metav1.Duration `json:"leaveTimeout,omitempty"`
}

// LeaderElectionConfig configures leader election by a Lease.
type LeaderElectionConfig struct {
	// LeaderElect turns it on. Default true.
	LeaderElect   *bool            `json:"leaderElect,omitempty"`
	LeaseDuration *metav1.Duration `json:"leaseDuration,omitempty"` // default 15s
	RenewDeadline *metav1.Duration `json:"renewDeadline,omitempty"` // default 10s
	RetryPeriod   *metav1.Duration `json:"retryPeriod,omitempty"`   // default 2s
}
