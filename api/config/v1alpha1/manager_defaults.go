package v1alpha1

import (
	"net"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Defaults of ManagerConfiguration. An address's port is the same in every manifest.
const (
	DefaultManagerNamespace       = "fleet-system"
	DefaultManagerMetricsAddress  = ":8443"
	DefaultManagerProbeAddress    = ":8081"
	DefaultAutoscalerBackoffBase  = 500 * time.Millisecond
	DefaultAutoscalerBackoffMax   = 30 * time.Second
	DefaultRollUpDebounce         = 200 * time.Millisecond
	DefaultRollUpPeriod           = 10 * time.Second
	DefaultRollUpTimeout          = 5 * time.Second
	DefaultAcknowledgeConcurrency = 16
	DefaultMaxConcurrentDrains    = 10
	DefaultReclaimSettleTime      = 2 * time.Second
	DefaultEvictionRetry          = 5 * time.Second
	DefaultDrainDeadline          = 15 * time.Minute
	DefaultReclaimRetryPeriod     = 15 * time.Second
	DefaultBackstopQPS            = 200
	DefaultBackstopBurst          = 400
	DefaultBackstopDelay          = 5 * time.Second
	DefaultProvisionTimeout       = 15 * time.Minute
	DefaultBookingTTL             = 10 * time.Minute // what the cluster autoscaler gives its own classes
	DefaultManagerWatchGroup      = "drover-manager"
	DefaultLeaveTimeout           = 10 * time.Second
	DefaultLeaseDuration          = 15 * time.Second
	DefaultRenewDeadline          = 10 * time.Second
	DefaultRetryPeriod            = 2 * time.Second

	maxAcknowledgeConcurrency = 256
	maxConcurrentDrains       = 1000
)

var _ Configuration = &ManagerConfiguration{}

// ManagerConfigurationKind is the kind of ManagerConfiguration.
const ManagerConfigurationKind = "ManagerConfiguration"

// Kind implements Configuration.
func (c *ManagerConfiguration) Kind() string { return ManagerConfigurationKind }

// Default implements Configuration.
func (c *ManagerConfiguration) Default() {
	setDefault(&c.Namespace, DefaultManagerNamespace)
	setDefault(&c.Demand, DemandTotal)
	setDefault(&c.MetricsBindAddress, DefaultManagerMetricsAddress)
	setDefault(&c.HealthProbeBindAddress, DefaultManagerProbeAddress)

	setDuration(&c.Autoscaler.BackoffBase, DefaultAutoscalerBackoffBase)
	setDuration(&c.Autoscaler.BackoffMax, DefaultAutoscalerBackoffMax)

	setDuration(&c.RollUp.Debounce, DefaultRollUpDebounce)
	setDuration(&c.RollUp.Period, DefaultRollUpPeriod)
	setDuration(&c.RollUp.Timeout, DefaultRollUpTimeout)
	setDefault(&c.RollUp.AcknowledgeConcurrency, DefaultAcknowledgeConcurrency)

	setDefault(&c.Reclaim.MaxConcurrentDrains, DefaultMaxConcurrentDrains)
	setDuration(&c.Reclaim.SettleTime, DefaultReclaimSettleTime)
	setDuration(&c.Reclaim.EvictionRetry, DefaultEvictionRetry)
	setDuration(&c.Reclaim.DrainDeadline, DefaultDrainDeadline)
	setDuration(&c.Reclaim.RetryPeriod, DefaultReclaimRetryPeriod)

	setTrue(&c.Backstop.Enabled)
	setDefault(&c.Backstop.QPS, DefaultBackstopQPS)
	setDefault(&c.Backstop.Burst, DefaultBackstopBurst)
	setDuration(&c.Backstop.Delay, DefaultBackstopDelay)

	setDuration(&c.Kueue.ProvisionTimeout, DefaultProvisionTimeout)
	setDuration(&c.Kueue.BookingTTL, DefaultBookingTTL)

	setDefault(&c.Sharding.WatchGroup, DefaultManagerWatchGroup)
	setDefault(&c.Sharding.Namespace, c.Namespace)
	setDuration(&c.Sharding.LeaveTimeout, DefaultLeaveTimeout)

	setTrue(&c.LeaderElection.LeaderElect)
	setDuration(&c.LeaderElection.LeaseDuration, DefaultLeaseDuration)
	setDuration(&c.LeaderElection.RenewDeadline, DefaultRenewDeadline)
	setDuration(&c.LeaderElection.RetryPeriod, DefaultRetryPeriod)
}

// Validate implements Configuration. It expects defaults to be filled.
func (c *ManagerConfiguration) Validate() field.ErrorList {
	var errs field.ErrorList
	path := field.NewPath("clusterID")
	if c.ClusterID == "" {
		errs = append(errs, field.Required(path, "the cluster's name in the fleet"))
	} else {
		for _, msg := range validation.IsDNS1123Subdomain(c.ClusterID) {
			errs = append(errs, field.Invalid(path, c.ClusterID, msg))
		}
	}
	for _, msg := range validation.IsDNS1123Label(c.Namespace) {
		errs = append(errs, field.Invalid(field.NewPath("namespace"), c.Namespace, msg))
	}
	if c.Demand != DemandTotal && c.Demand != DemandRequestsOnly {
		errs = append(errs, field.NotSupported(field.NewPath("demand"), c.Demand,
			[]DemandMode{DemandTotal, DemandRequestsOnly}))
	}
	errs = append(errs, bindAddress(field.NewPath("metricsBindAddress"), c.MetricsBindAddress)...)
	errs = append(errs, bindAddress(field.NewPath("healthProbeBindAddress"), c.HealthProbeBindAddress)...)
	errs = append(errs, c.Autoscaler.validate(field.NewPath("autoscaler"))...)
	errs = append(errs, c.RollUp.validate(field.NewPath("rollUp"))...)
	errs = append(errs, c.Reclaim.validate(field.NewPath("reclaim"))...)
	errs = append(errs, c.Backstop.validate(field.NewPath("backstop"))...)
	errs = append(errs, c.Kueue.validate(field.NewPath("kueue"))...)
	errs = append(errs, c.Sharding.validate(field.NewPath("sharding"))...)
	return append(errs, c.LeaderElection.validate(field.NewPath("leaderElection"))...)
}

func (c *AutoscalerClient) validate(path *field.Path) field.ErrorList {
	var errs field.ErrorList
	if c.Address == "" {
		errs = append(errs, field.Required(path.Child("address"), "a gRPC target, for example autoscaler.fleet-system.svc:9443"))
	}
	errs = append(errs, c.TLS.validateFields(path.Child("tls"))...)
	errs = append(errs, atLeast(path.Child("backoffBase"), c.BackoffBase, time.Millisecond)...)
	return append(errs, notBelow(path.Child("backoffMax"), c.BackoffMax, "backoffBase", c.BackoffBase)...)
}

// validateFields checks which fields stand together. Whether the files can be read is known when they are.
func (t *ClientTLS) validateFields(path *field.Path) field.ErrorList {
	var errs field.ErrorList
	if (t.CertFile == "") != (t.KeyFile == "") {
		missing := "keyFile"
		if t.CertFile == "" {
			missing = "certFile"
		}
		errs = append(errs, field.Required(path.Child(missing), "certFile and keyFile belong together"))
	}
	if t.Insecure && *t != (ClientTLS{Insecure: true}) {
		errs = append(errs, field.Invalid(path.Child("insecure"), true, "excludes every other field"))
	}
	return errs
}

func (c *RollUpConfig) validate(path *field.Path) field.ErrorList {
	errs := atLeast(path.Child("debounce"), c.Debounce, 0)
	errs = append(errs, atLeast(path.Child("period"), c.Period, 100*time.Millisecond)...)
	errs = append(errs, atLeast(path.Child("timeout"), c.Timeout, 10*time.Millisecond)...)
	return append(errs, between(path.Child("acknowledgeConcurrency"), c.AcknowledgeConcurrency, 1, maxAcknowledgeConcurrency)...)
}

func (c *ReclaimConfig) validate(path *field.Path) field.ErrorList {
	errs := between(path.Child("maxConcurrentDrains"), c.MaxConcurrentDrains, 1, maxConcurrentDrains)
	errs = append(errs, atLeast(path.Child("settleTime"), c.SettleTime, 0)...)
	errs = append(errs, atLeast(path.Child("evictionRetry"), c.EvictionRetry, 10*time.Millisecond)...)
	errs = append(errs, atLeast(path.Child("drainDeadline"), c.DrainDeadline, time.Second)...)
	return append(errs, atLeast(path.Child("retryPeriod"), c.RetryPeriod, 10*time.Millisecond)...)
}

func (c *BackstopConfig) validate(path *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, name := range c.SchedulerNames {
		if name == "" {
			errs = append(errs, field.Required(path.Child("schedulerNames").Index(i), "a pod's spec.schedulerName"))
		}
	}
	for i, ns := range c.Namespaces {
		for _, msg := range validation.IsDNS1123Label(ns) {
			errs = append(errs, field.Invalid(path.Child("namespaces").Index(i), ns, msg))
		}
	}
	if !(c.QPS > 0 && c.QPS <= maxWriterQPS) {
		errs = append(errs, field.Invalid(path.Child("qps"), c.QPS, "must be above 0 and at most 10000"))
	}
	errs = append(errs, between(path.Child("burst"), c.Burst, 1, maxWriterBurst)...)
	return append(errs, atLeast(path.Child("delay"), c.Delay, 0)...)
}

func (c *KueueConfig) validate(path *field.Path) field.ErrorList {
	errs := atLeast(path.Child("provisionTimeout"), c.ProvisionTimeout, time.Second)
	return append(errs, atLeast(path.Child("bookingTTL"), c.BookingTTL, time.Second)...)
}

func (c *ShardingConfig) validate(path *field.Path) field.ErrorList {
	var errs field.ErrorList
	for _, msg := range validation.IsDNS1123Label(c.WatchGroup) {
		errs = append(errs, field.Invalid(path.Child("watchGroup"), c.WatchGroup, msg))
	}
	for _, msg := range validation.IsDNS1123Label(c.Namespace) {
		errs = append(errs, field.Invalid(path.Child("namespace"), c.Namespace, msg))
	}
	return append(errs, atLeast(path.Child("leaveTimeout"), c.LeaveTimeout, time.Second)...)
}

func (c *LeaderElectionConfig) validate(path *field.Path) field.ErrorList {
	errs := atLeast(path.Child("retryPeriod"), c.RetryPeriod, 100*time.Millisecond)
	errs = append(errs, above(path.Child("renewDeadline"), c.RenewDeadline, "retryPeriod", c.RetryPeriod)...)
	return append(errs, above(path.Child("leaseDuration"), c.LeaseDuration, "renewDeadline", c.RenewDeadline)...)
}

// bindAddress says that address is neither host:port nor "0".
func bindAddress(path *field.Path, address string) field.ErrorList {
	if address == "0" {
		return nil
	}
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		return field.ErrorList{field.Invalid(path, address, `must be host:port, or "0" to turn it off`)}
	}
	if n, err := strconv.Atoi(port); err != nil || n < 0 || n > 65535 {
		return field.ErrorList{field.Invalid(path, address, "the port must be a number from 0 to 65535")}
	}
	return nil
}

func between(path *field.Path, value, least, most int32) field.ErrorList {
	if value >= least && value <= most {
		return nil
	}
	return field.ErrorList{field.Invalid(path, value,
		"must be at least "+strconv.Itoa(int(least))+" and at most "+strconv.Itoa(int(most)))}
}

// notBelow says that d is shorter than the field named other.
func notBelow(path *field.Path, d *metav1.Duration, other string, least *metav1.Duration) field.ErrorList {
	if d == nil || least == nil || d.Duration >= least.Duration {
		return nil
	}
	return field.ErrorList{field.Invalid(path, d.Duration.String(), "must not be below "+other+" ("+least.Duration.String()+")")}
}

// above says that d is not longer than the field named other.
func above(path *field.Path, d *metav1.Duration, other string, bound *metav1.Duration) field.ErrorList {
	if d == nil || bound == nil || d.Duration > bound.Duration {
		return nil
	}
	return field.ErrorList{field.Invalid(path, d.Duration.String(), "must be above "+other+" ("+bound.Duration.String()+")")}
}

func setDefault[T comparable](value *T, fallback T) {
	var zero T
	if *value == zero {
		*value = fallback
	}
}

func setDuration(value **metav1.Duration, fallback time.Duration) {
	if *value == nil {
		*value = &metav1.Duration{Duration: fallback}
	}
}

func setTrue(value **bool) {
	if *value == nil {
		on := true
		*value = &on
	}
}
