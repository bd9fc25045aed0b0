package v1alpha1

import (
	"path/filepath"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Defaults of CoordinatorConfiguration. An address's port is the same in every manifest.
const (
	DefaultWebhookAddress = ":9443"
	DefaultWebhookCert    = "/etc/drover-tls/tls.crt"
	DefaultWebhookKey     = "/etc/drover-tls/tls.key"
	DefaultBackfillQPS    = 100
	DefaultBackfillBurst  = 200
	DefaultAuditPeriod    = time.Hour
)

var _ Configuration = &CoordinatorConfiguration{}

// CoordinatorConfigurationKind is the kind of CoordinatorConfiguration.
const CoordinatorConfigurationKind = "CoordinatorConfiguration"

// Kind implements Configuration.
func (c *CoordinatorConfiguration) Kind() string { return CoordinatorConfigurationKind }

// Default implements Configuration.
func (c *CoordinatorConfiguration) Default() {
	setDefault(&c.Namespace, DefaultManagerNamespace)
	setDefault(&c.MetricsBindAddress, DefaultManagerMetricsAddress)
	setDefault(&c.HealthProbeBindAddress, DefaultManagerProbeAddress)

	setTrue(&c.Webhook.Enabled)
	setDefault(&c.Webhook.BindAddress, DefaultWebhookAddress)
	setDefault(&c.Webhook.CertFile, DefaultWebhookCert)
	setDefault(&c.Webhook.KeyFile, DefaultWebhookKey)

	setTrue(&c.Backfill.Enabled)
	setDefault(&c.Backfill.QPS, DefaultBackfillQPS)
	setDefault(&c.Backfill.Burst, DefaultBackfillBurst)
	setDuration(&c.Backfill.AuditPeriod, DefaultAuditPeriod)

	setTrue(&c.LeaderElection.LeaderElect)
	setDuration(&c.LeaderElection.LeaseDuration, DefaultLeaseDuration)
	setDuration(&c.LeaderElection.RenewDeadline, DefaultRenewDeadline)
	setDuration(&c.LeaderElection.RetryPeriod, DefaultRetryPeriod)
}

// Validate implements Configuration. It expects defaults to be filled.
func (c *CoordinatorConfiguration) Validate() field.ErrorList {
	var errs field.ErrorList
	for _, msg := range validation.IsDNS1123Label(c.Namespace) {
		errs = append(errs, field.Invalid(field.NewPath("namespace"), c.Namespace, msg))
	}
	errs = append(errs, bindAddress(field.NewPath("metricsBindAddress"), c.MetricsBindAddress)...)
	errs = append(errs, bindAddress(field.NewPath("healthProbeBindAddress"), c.HealthProbeBindAddress)...)
	errs = append(errs, c.Webhook.validate(field.NewPath("webhook"))...)
	errs = append(errs, c.Backfill.validate(field.NewPath("backfill"))...)
	return append(errs, c.LeaderElection.validate(field.NewPath("leaderElection"))...)
}

func (c *LabelWebhookConfig) validate(path *field.Path) field.ErrorList {
	var errs field.ErrorList
	if c.BindAddress == "0" {
		errs = append(errs, field.Invalid(path.Child("bindAddress"), c.BindAddress, "must be host:port; enabled: false turns it off"))
	} else {
		errs = append(errs, bindAddress(path.Child("bindAddress"), c.BindAddress)...)
	}
	if !filepath.IsAbs(c.CertFile) {
		errs = append(errs, field.Invalid(path.Child("certFile"), c.CertFile, "must be an absolute path"))
	}
	if filepath.Dir(c.KeyFile) != filepath.Dir(c.CertFile) {
		errs = append(errs, field.Invalid(path.Child("keyFile"), c.KeyFile, "must be in the directory of certFile"))
	}
	return errs
}

func (c *BackfillConfig) validate(path *field.Path) field.ErrorList {
	var errs field.ErrorList
	if !(c.QPS > 0 && c.QPS <= maxWriterQPS) {
		errs = append(errs, field.Invalid(path.Child("qps"), c.QPS, "must be above 0 and at most 10000"))
	}
	errs = append(errs, between(path.Child("burst"), c.Burst, 1, maxWriterBurst)...)
	return append(errs, atLeast(path.Child("auditPeriod"), c.AuditPeriod, time.Minute)...)
}
