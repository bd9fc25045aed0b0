package provisioning

import (
	"fmt"
	"strconv"
	"time"

	autoscalingv1 "k8s.io/autoscaler/cluster-autoscaler/apis/provisioningrequest/autoscaling.x-k8s.io/v1"
)

// Parameters of a ProvisioningRequest that override the Options. Kueue passes those of its ProvisioningRequestConfig,
// and a workload's annotations provreq.kueue.x-k8s.io/<name>. Others are ignored.
const (
	// ParameterValidUntil is the API's own: seconds since the creation after which the request fails.
	ParameterValidUntil = "ValidUntilSeconds"
	// ParameterBooking is how many seconds the booking holds.
	ParameterBooking = "BookingSeconds"
)

// maxSeconds keeps a duration within what the clock can carry.
const maxSeconds = int64(365 * 24 * time.Hour / time.Second)

// termsOf reads the request's parameters over the defaults. The error names the parameter and its value.
func termsOf(pr *autoscalingv1.ProvisioningRequest, defaults Terms) (Terms, error) {
	terms := defaults
	for name, field := range map[string]*time.Duration{
		ParameterValidUntil: &terms.ProvisionTimeout, ParameterBooking: &terms.BookingTTL,
	} {
		value, set := pr.Spec.Parameters[name]
		if !set {
			continue
		}
		seconds, err := strconv.ParseInt(string(value), 10, 64)
		if err != nil || seconds <= 0 || seconds > maxSeconds {
			return defaults, fmt.Errorf("spec.parameters[%s]: %q is not a number of seconds between 1 and %d", name, value, maxSeconds)
		}
		*field = time.Duration(seconds) * time.Second
	}
	return terms, nil
}
