package autoscaler

import (
	"time"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
)

// Policy bounds what the engine does by itself; the fields are those of configv1alpha1.PolicyConfig.
type Policy struct {
	DryRun, DisableReclaim  bool
	ConsolidationDelay      time.Duration
	MaxReclaimsPerMinute    int32
	CollapseHold            time.Duration
	CollapseFraction        float64
	RegistrationDeadline    time.Duration
	SettleTime              time.Duration
	SilentAfter             time.Duration
	PassDebounce            time.Duration
	BackoffBase, BackoffMax time.Duration
	FailedRetention         time.Duration
	KeptBackoff             time.Duration
	SurveyPeriod            time.Duration
}

// PolicyFrom reads a configuration; what it leaves out has its default.
func PolicyFrom(c configv1alpha1.PolicyConfig) Policy {
	c.Default()
	return Policy{
		DryRun: c.DryRun, DisableReclaim: c.DisableReclaim, ConsolidationDelay: c.ConsolidationDelay.Duration,
		MaxReclaimsPerMinute: c.MaxReclaimsPerMinute, CollapseHold: c.CollapseHold.Duration,
		CollapseFraction: c.CollapseFraction, RegistrationDeadline: c.RegistrationDeadline.Duration,
		SettleTime: c.SettleTime.Duration, SilentAfter: c.SilentAfter.Duration, PassDebounce: c.PassDebounce.Duration,
		BackoffBase: c.LaunchBackoffBase.Duration, BackoffMax: c.LaunchBackoffMax.Duration,
		FailedRetention: c.FailedRetention.Duration, KeptBackoff: c.KeptBackoff.Duration,
		SurveyPeriod: c.SurveyPeriod.Duration,
	}
}
