package provisioning

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
)

var (
	conditionsSet = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "drover_kueue_provisioning_conditions_total",
		Help: "Conditions of ProvisioningRequests that became true, by type and reason.",
	}, []string{"condition", "reason"})
	waitSeconds = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name:    "drover_kueue_provisioning_wait_seconds",
		Help:    "Time from the creation of a ProvisioningRequest to Provisioned.",
		Buckets: prometheus.ExponentialBuckets(1, 2, 14),
	})
	activeBookings = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "drover_kueue_provisioning_active_bookings",
		Help: "ProvisioningRequests that wait for capacity or hold it.",
	})
	heldPods = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "drover_kueue_provisioning_held_pods",
		Help: "Pods for which bookings hold a CapacityRequest: asked for or standing ready, and not taken over by a pod.",
	})
	handovers = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "drover_kueue_provisioning_handovers_total",
		Help: "CapacityRequests that went from a booking to a pod.",
	})
)

// registerMetrics registers the package's metrics with reg. Doing it again is fine.
func registerMetrics(reg prometheus.Registerer) error {
	for _, c := range []prometheus.Collector{conditionsSet, waitSeconds, activeBookings, heldPods, handovers} {
		var again prometheus.AlreadyRegisteredError
		if err := reg.Register(c); err != nil && !errors.As(err, &again) {
			return err
		}
	}
	return nil
}
