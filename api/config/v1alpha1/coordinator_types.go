package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// CoordinatorConfiguration configures cmd/coordinator: the coordinator of WatchGroups, its webhook and its backfill.
//
// +kubebuilder:object:root=true
type CoordinatorConfiguration struct {
	metav1.TypeMeta `json:",inline"`

	// Namespace holds the Lease that replicas compete for. Default fleet-system.
	Namespace      string               `json:"namespace,omitempty"`
	Webhook        LabelWebhookConfig   `json:"webhook,omitempty"`
	Backfill       BackfillConfig       `json:"backfill,omitempty"`
	LeaderElection LeaderElectionConfig `json:"leaderElection,omitempty"`

	// MetricsBindAddress, HealthProbeBindAddress are host:port; "0" turns one off. Defaults :8443 (TLS, with authentication
	// and authorization by the API server) and :8081.
	MetricsBindAddress     string `json:"metricsBindAddress,omitempty"`
	HealthProbeBindAddress string `json:"healthProbeBindAddress,omitempty"`
	// MetricsInsecure serves metrics without TLS and without authentication.
	MetricsInsecure bool `json:"metricsInsecure,omitempty"`
}

// LabelWebhookConfig configures the webhook that labels objects when they are created. Every replica serves it.
type LabelWebhookConfig struct {
	// Enabled serves it. Without it the backfill labels every object, a moment after its creation. Default true.
	Enabled *bool `json:"enabled,omitempty"`
	// BindAddress is host:port. Default :9443.
	BindAddress string `json:"bindAddress,omitempty"`
	// CertFile and KeyFile, in one directory, are read again when they change. Defaults /etc/drover-tls/tls.crt and
	// /etc/drover-tls/tls.key.
	CertFile string `json:"certFile,omitempty"`
	KeyFile  string `json:"keyFile,omitempty"`
	// CAFile is the authority of that certificate. The leader writes it into the MutatingWebhookConfiguration; empty: somebody
	// else does, such as cert-manager.
	CAFile string `json:"caFile,omitempty"`
}

// BackfillConfig bounds the labelling of objects that the webhook has not labelled.
type BackfillConfig struct {
	// Enabled turns it on. Default true.
	Enabled *bool `json:"enabled,omitempty"`
	// Writes per second, and burst. Defaults 100 and 200.
	QPS   float64 `json:"qps,omitempty"`
	Burst int32   `json:"burst,omitempty"`
	// AuditPeriod is the time between two looks at all labelled objects. Default 1h.
	AuditPeriod *metav1.Duration `json:"auditPeriod,omitempty"`
}
