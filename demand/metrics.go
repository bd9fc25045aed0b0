package demand

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
)

// Results of a write, as the metric drover_demand_writes_total names them.
const (
	ResultCreated  = "created"  // a new request
	ResultExisted  = "existed"  // it was there already, and right
	ResultUpdated  = "updated"  // it was there, and the pod has changed since
	ResultConflict = "conflict" // the name belongs to another pod's request
	ResultHeld     = "held"     // an upcoming node has room (RequestsOnly)
	ResultGone     = "gone"     // the pod needs no node any more
	ResultRefused  = "refused"  // no node can help the pod
	ResultSilent   = "silent"   // the pod does not wait for a node now
	ResultInvalid  = "invalid"  // refused for good
	ResultRetried  = "retried"  // failed, will be tried again
)

var (
	writes = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "drover_demand_writes_total",
		Help: "Pods handled by the writer of CapacityRequests, by result.",
	}, []string{"source", "result"})
	depth = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "drover_demand_queue_depth",
		Help: "Pods that wait for the writer of CapacityRequests.",
	}, []string{"source"})
	tracked = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "drover_demand_tracked_pods",
		Help: "Pending pods that the writer of CapacityRequests remembers.",
	}, []string{"source"})
	latency = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "drover_demand_write_latency_seconds",
		Help:    "Time from the scheduling failure to the CapacityRequest.",
		Buckets: prometheus.ExponentialBuckets(0.005, 2, 15),
	}, []string{"source"})
	unhelpable = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "drover_demand_unhelpable_pods_total",
		Help: "Pods that no node can help, by reason, each counted once per reason.",
	}, []string{"source", "reason"})
)

// RegisterMetrics registers the package's metrics with reg. Doing it again is fine.
func RegisterMetrics(reg prometheus.Registerer) error {
	for _, c := range []prometheus.Collector{writes, depth, tracked, latency, unhelpable} {
		var again prometheus.AlreadyRegisteredError
		if err := reg.Register(c); err != nil && !errors.As(err, &again) {
			return err
		}
	}
	return nil
}
