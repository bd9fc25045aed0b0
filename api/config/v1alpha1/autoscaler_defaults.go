package v1alpha1

import (
	"net"
	"net/url"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

var (
	_ Configuration = &AutoscalerConfiguration{}
	_ Configuration = &OfferingList{}
)

// Kind implements Configuration.
func (*AutoscalerConfiguration) Kind() string { return "AutoscalerConfiguration" }

// Kind implements Configuration.
func (*OfferingList) Kind() string { return "OfferingList" }

func orString(p *string, value string) {
	if *p == "" {
		*p = value
	}
}

func orDuration(p **metav1.Duration, value time.Duration) {
	if *p == nil {
		*p = &metav1.Duration{Duration: value}
	}
}

// Default implements Configuration.
func (c *AutoscalerConfiguration) Default() {
	orString(&c.ListenAddress, ":9443")
	orString(&c.HealthProbeBindAddress, ":8081")
	orString(&c.MetricsBindAddress, ":8080")
	orString(&c.State, "file:///var/lib/drover")
	if k := c.Provider.KWOK; k != nil {
		orDuration(&k.LaunchLatency, 0)
		orDuration(&k.RegisterLatency, 0)
	}
	orDuration(&c.Feed.Debounce, 100*time.Millisecond)
	orDuration(&c.Feed.Period, 10*time.Second)
	c.Policy.Default()
}

// Default fills what the policy leaves out.
func (p *PolicyConfig) Default() {
	orDuration(&p.ConsolidationDelay, 30*time.Second)
	if p.MaxReclaimsPerMinute == 0 {
		p.MaxReclaimsPerMinute = 100
	}
	orDuration(&p.CollapseHold, time.Minute)
	if p.CollapseFraction == 0 {
		p.CollapseFraction = 0.5
	}
	orDuration(&p.RegistrationDeadline, 10*time.Minute)
	orDuration(&p.SettleTime, 30*time.Second)
	orDuration(&p.SilentAfter, 5*time.Minute)
	orDuration(&p.PassDebounce, 100*time.Millisecond)
	orDuration(&p.LaunchBackoffBase, 5*time.Second)
	orDuration(&p.LaunchBackoffMax, 5*time.Minute)
	orDuration(&p.FailedRetention, 5*time.Minute)
	orDuration(&p.KeptBackoff, time.Minute)
	orDuration(&p.SurveyPeriod, 30*time.Second)
}

// Validate implements Configuration.
func (c *AutoscalerConfiguration) Validate() field.ErrorList {
	errs := append(validateListenAddress(field.NewPath("listenAddress"), c.ListenAddress, false),
		validateServerTLS(field.NewPath("tls"), c.TLS)...)
	errs = append(errs, validateListenAddress(field.NewPath("healthProbeBindAddress"), c.HealthProbeBindAddress, true)...)
	errs = append(errs, validateListenAddress(field.NewPath("metricsBindAddress"), c.MetricsBindAddress, true)...)
	if u, err := url.Parse(c.State); err != nil {
		errs = append(errs, field.Invalid(field.NewPath("state"), c.State, "must be a gocloud.dev/blob URL: "+err.Error()))
	} else if u.Scheme == "" || u.Scheme == "file" && !filepath.IsAbs(u.Path) {
		errs = append(errs, field.Invalid(field.NewPath("state"), c.State,
			"must be a gocloud.dev/blob URL such as file:///var/lib/drover"))
	}
	provider := field.NewPath("provider")
	if c.Provider.KWOK == nil {
		errs = append(errs, field.Required(provider.Child("kwok"), "exactly one provider has to be set"))
	} else {
		errs = append(errs, c.Provider.KWOK.validate(provider.Child("kwok"))...)
	}
	errs = append(errs, c.Policy.validate(field.NewPath("policy"))...)
	errs = append(errs, nonNegative(field.NewPath("feed", "debounce"), c.Feed.Debounce)...)
	return append(errs, positive(field.NewPath("feed", "period"), c.Feed.Period)...)
}

func (k *KWOKProvider) validate(path *field.Path) field.ErrorList {
	var errs field.ErrorList
	if k.OfferingsFile == "" {
		errs = append(errs, field.Required(path.Child("offeringsFile"), "a YAML file of kind OfferingList"))
	}
	if len(k.Clusters) == 0 {
		errs = append(errs, field.Required(path.Child("clusters"), "at least one cluster"))
	}
	seen := map[string]bool{}
	for i, cluster := range k.Clusters {
		id := path.Child("clusters").Index(i).Child("id")
		switch {
		case cluster.ID == "":
			errs = append(errs, field.Required(id, "the cluster's id in the fleet"))
		case seen[cluster.ID]:
			errs = append(errs, field.Duplicate(id, cluster.ID))
		}
		seen[cluster.ID] = true
	}
	errs = append(errs, nonNegative(path.Child("launchLatency"), k.LaunchLatency)...)
	errs = append(errs, nonNegative(path.Child("registerLatency"), k.RegisterLatency)...)
	if k.LatencyJitter < 0 {
		errs = append(errs, field.Invalid(path.Child("latencyJitter"), k.LatencyJitter, "must not be negative"))
	}
	faults := path.Child("faults")
	for _, p := range []struct {
		name  string
		value float64
	}{
		{"loseMachine", k.Faults.LoseMachine}, {"failLaunch", k.Faults.FailLaunch}, {"dropEvent", k.Faults.DropEvent},
		{"duplicateEvent", k.Faults.DuplicateEvent}, {"reorderEvent", k.Faults.ReorderEvent},
	} {
		if p.value < 0 || p.value > 1 {
			errs = append(errs, field.Invalid(faults.Child(p.name), p.value, "must be between 0 and 1"))
		}
	}
	return errs
}

func (p *PolicyConfig) validate(path *field.Path) field.ErrorList {
	var errs field.ErrorList
	for _, d := range []struct {
		name  string
		value *metav1.Duration
	}{
		{"consolidationDelay", p.ConsolidationDelay}, {"collapseHold", p.CollapseHold}, {"settleTime", p.SettleTime},
		{"passDebounce", p.PassDebounce}, {"failedRetention", p.FailedRetention}, {"keptBackoff", p.KeptBackoff},
	} {
		errs = append(errs, nonNegative(path.Child(d.name), d.value)...)
	}
	for _, d := range []struct {
		name  string
		value *metav1.Duration
	}{
		{"registrationDeadline", p.RegistrationDeadline}, {"silentAfter", p.SilentAfter}, {"surveyPeriod", p.SurveyPeriod},
		{"launchBackoffBase", p.LaunchBackoffBase}, {"launchBackoffMax", p.LaunchBackoffMax},
	} {
		errs = append(errs, positive(path.Child(d.name), d.value)...)
	}
	if p.LaunchBackoffBase != nil && p.LaunchBackoffMax != nil &&
		p.LaunchBackoffBase.Duration > p.LaunchBackoffMax.Duration {
		errs = append(errs, field.Invalid(path.Child("launchBackoffBase"), p.LaunchBackoffBase.Duration.String(),
			"must not exceed launchBackoffMax"))
	}
	if p.MaxReclaimsPerMinute < 0 {
		errs = append(errs, field.Invalid(path.Child("maxReclaimsPerMinute"), p.MaxReclaimsPerMinute,
			"must be positive; disableReclaim turns reclaim off"))
	}
	if p.CollapseFraction < 0 || p.CollapseFraction > 1 {
		errs = append(errs, field.Invalid(path.Child("collapseFraction"), p.CollapseFraction, "must be between 0 and 1"))
	}
	return errs
}

// Default implements Configuration.
func (l *OfferingList) Default() {
	for i := range l.Offerings {
		o := &l.Offerings[i]
		orString(&o.InstanceType, o.Name)
		orString(&o.Availability, "High")
		if _, set := o.Resources["pods"]; !set && o.Resources != nil {
			o.Resources["pods"] = "110"
		}
	}
}

// Validate implements Configuration.
func (l *OfferingList) Validate() field.ErrorList {
	var errs field.ErrorList
	seen := map[string]bool{}
	for i := range l.Offerings {
		path := field.NewPath("offerings").Index(i)
		name := l.Offerings[i].Name
		if seen[name] {
			errs = append(errs, field.Duplicate(path.Child("name"), name))
		}
		seen[name] = true
		errs = append(errs, l.Offerings[i].validate(path)...)
	}
	return errs
}

func (o *Offering) validate(path *field.Path) field.ErrorList {
	var errs field.ErrorList
	for _, msg := range validation.IsDNS1123Label(o.Name) {
		errs = append(errs, field.Invalid(path.Child("name"), o.Name, msg))
	}
	for key, value := range o.Labels {
		for _, msg := range append(validation.IsQualifiedName(key), validation.IsValidLabelValue(value)...) {
			errs = append(errs, field.Invalid(path.Child("labels").Key(key), value, msg))
		}
	}
	for _, msg := range validation.IsValidLabelValue(o.InstanceType) {
		errs = append(errs, field.Invalid(path.Child("instanceType"), o.InstanceType, msg))
	}
	if len(o.Resources) == 0 {
		errs = append(errs, field.Required(path.Child("resources"), "allocatable quantities of one node"))
	}
	for name, text := range o.Resources {
		key := path.Child("resources").Key(name)
		if quantity, err := resource.ParseQuantity(text); err != nil {
			errs = append(errs, field.Invalid(key, text, "must be a quantity: "+err.Error()))
		} else if quantity.Sign() <= 0 {
			errs = append(errs, field.Invalid(key, text, "must be positive"))
		}
	}
	for i, text := range o.Taints {
		if _, err := ParseTaint(text); err != nil {
			errs = append(errs, field.Invalid(path.Child("taints").Index(i), text, err.Error()))
		}
	}
	if o.Cost < 0 {
		errs = append(errs, field.Invalid(path.Child("cost"), o.Cost, "must not be negative"))
	}
	switch o.Availability {
	case "High", "Medium", "Low", "None":
	default:
		errs = append(errs, field.NotSupported(path.Child("availability"), o.Availability,
			[]string{"High", "Medium", "Low", "None"}))
	}
	errs = append(errs, nonNegative(path.Child("provisioningTime"), o.ProvisioningTime)...)
	if len(o.Domains) == 0 {
		errs = append(errs, field.Required(path.Child("domains"), "at least one domain"))
	}
	seen := map[string]bool{}
	for i, d := range o.Domains {
		at := path.Child("domains").Index(i)
		for name, value := range map[string]string{"zone": d.Zone, "rack": d.Rack} {
			for _, msg := range validation.IsValidLabelValue(value) {
				errs = append(errs, field.Invalid(at.Child(name), value, msg))
			}
		}
		switch {
		case d.Zone == "":
			errs = append(errs, field.Required(at.Child("zone"), "the zone's name"))
		case seen[d.Name()]:
			errs = append(errs, field.Duplicate(at, d.Name()))
		}
		seen[d.Name()] = true
		if d.Count < 0 {
			errs = append(errs, field.Invalid(at.Child("count"), d.Count, "must not be negative"))
		}
	}
	return errs
}

// Name is the domain's name within its offering: the zone, or zone/rack.
func (d OfferingDomain) Name() string {
	if d.Rack == "" {
		return d.Zone
	}
	return d.Zone + "/" + d.Rack
}

// taintError says what is wrong with a taint's text.
type taintError string

func (e taintError) Error() string { return string(e) }

// ParseTaint reads "key=value:Effect" or "key:Effect".
func ParseTaint(text string) (corev1.Taint, error) {
	head, effect, found := strings.Cut(text, ":")
	if !found {
		return corev1.Taint{}, taintError("must be key=value:Effect or key:Effect")
	}
	key, value, _ := strings.Cut(head, "=")
	if msgs := append(validation.IsQualifiedName(key), validation.IsValidLabelValue(value)...); len(msgs) > 0 {
		return corev1.Taint{}, taintError(strings.Join(msgs, "; "))
	}
	taint := corev1.Taint{Key: key, Value: value, Effect: corev1.TaintEffect(effect)}
	switch taint.Effect {
	case corev1.TaintEffectNoSchedule, corev1.TaintEffectPreferNoSchedule, corev1.TaintEffectNoExecute:
		return taint, nil
	}
	return corev1.Taint{}, taintError("the effect must be NoSchedule, PreferNoSchedule or NoExecute")
}

func validateServerTLS(path *field.Path, tls ServerTLS) field.ErrorList {
	var errs field.ErrorList
	if tls.Insecure {
		for name, value := range map[string]string{"certFile": tls.CertFile, "keyFile": tls.KeyFile,
			"clientCAFile": tls.ClientCAFile} {
			if value != "" {
				errs = append(errs, field.Invalid(path.Child(name), value, "must be empty with insecure: true"))
			}
		}
		return errs
	}
	if tls.CertFile == "" {
		errs = append(errs, field.Required(path.Child("certFile"), "a server needs a certificate, or insecure: true"))
	}
	if tls.KeyFile == "" {
		errs = append(errs, field.Required(path.Child("keyFile"), "a server needs its certificate's key, or insecure: true"))
	}
	return errs
}

func validateListenAddress(path *field.Path, address string, offAllowed bool) field.ErrorList {
	if offAllowed && address == "0" {
		return nil
	}
	if _, _, err := net.SplitHostPort(address); err != nil {
		return field.ErrorList{field.Invalid(path, address, "must be host:port: "+err.Error())}
	}
	return nil
}

func nonNegative(path *field.Path, d *metav1.Duration) field.ErrorList {
	if d != nil && d.Duration < 0 {
		return field.ErrorList{field.Invalid(path, d.Duration.String(), "must not be negative")}
	}
	return nil
}

func positive(path *field.Path, d *metav1.Duration) field.ErrorList {
	if d != nil && d.Duration <= 0 {
		return field.ErrorList{field.Invalid(path, d.Duration.String(), "must be positive")}
	}
	return nil
}
