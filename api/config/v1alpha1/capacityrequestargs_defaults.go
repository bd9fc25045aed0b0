package v1alpha1

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Defaults of CapacityRequestArgs.
const (
	DefaultWriterQPS                         = 200
	DefaultWriterBurst                       = 400
	DefaultCapacityNamespace                 = "fleet-system"
	DefaultTemplateFreshness                 = 10 * time.Minute
	DefaultRewritePeriod                     = 10 * time.Minute
	DefaultWriterShutdownGracePeriod         = 5 * time.Second
	maxWriterQPS                     float64 = 10_000
	maxWriterBurst                   int32   = 100_000
)

var _ Configuration = &CapacityRequestArgs{}

// CapacityRequestArgsKind is the kind of CapacityRequestArgs.
const CapacityRequestArgsKind = "CapacityRequestArgs"

// Kind implements Configuration.
func (a *CapacityRequestArgs) Kind() string { return CapacityRequestArgsKind }

// Default implements Configuration.
func (a *CapacityRequestArgs) Default() {
	if a.QPS == 0 {
		a.QPS = DefaultWriterQPS
	}
	if a.Burst == 0 {
		a.Burst = DefaultWriterBurst
	}
	if a.Demand == "" {
		a.Demand = DemandTotal
	}
	if a.CapacityNamespace == "" {
		a.CapacityNamespace = DefaultCapacityNamespace
	}
	if a.TemplateFreshness == nil {
		a.TemplateFreshness = &metav1.Duration{Duration: DefaultTemplateFreshness}
	}
	if a.RewritePeriod == nil {
		a.RewritePeriod = &metav1.Duration{Duration: DefaultRewritePeriod}
	}
	if a.Events == nil {
		on := true
		a.Events = &on
	}
	if a.ShutdownGracePeriod == nil {
		a.ShutdownGracePeriod = &metav1.Duration{Duration: DefaultWriterShutdownGracePeriod}
	}
}

// Validate implements Configuration. It expects defaults to be filled.
func (a *CapacityRequestArgs) Validate() field.ErrorList {
	var errs field.ErrorList
	for i, ns := range a.Namespaces {
		for _, msg := range validation.IsDNS1123Label(ns) {
			errs = append(errs, field.Invalid(field.NewPath("namespaces").Index(i), ns, msg))
		}
	}
	if !(a.QPS > 0 && a.QPS <= maxWriterQPS) {
		errs = append(errs, field.Invalid(field.NewPath("qps"), a.QPS, "must be above 0 and at most 10000"))
	}
	if a.Burst < 1 || a.Burst > maxWriterBurst {
		errs = append(errs, field.Invalid(field.NewPath("burst"), a.Burst, "must be at least 1 and at most 100000"))
	}
	if a.Demand != DemandTotal && a.Demand != DemandRequestsOnly {
		errs = append(errs, field.NotSupported(field.NewPath("demand"), a.Demand,
			[]DemandMode{DemandTotal, DemandRequestsOnly}))
	}
	for _, msg := range validation.IsDNS1123Label(a.CapacityNamespace) {
		errs = append(errs, field.Invalid(field.NewPath("capacityNamespace"), a.CapacityNamespace, msg))
	}
	errs = append(errs, atLeast(field.NewPath("templateFreshness"), a.TemplateFreshness, time.Second)...)
	errs = append(errs, atLeast(field.NewPath("rewritePeriod"), a.RewritePeriod, time.Second)...)
	errs = append(errs, atLeast(field.NewPath("shutdownGracePeriod"), a.ShutdownGracePeriod, 0)...)
	return errs
}

// atLeast says that d is shorter than least. A missing d is fine.
func atLeast(path *field.Path, d *metav1.Duration, least time.Duration) field.ErrorList {
	if d == nil || d.Duration >= least {
		return nil
	}
	return field.ErrorList{field.Invalid(path, d.Duration.String(), "must be at least "+least.String())}
}
