package vnaffinity

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
)

// The metrics of the role Schedulers.
var (
	replicaPods = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "drover_vnaffinity_waiting_pods",
		Help: "Pods of this profile without a node, by whether this replica holds them or another one does.",
	}, []string{"member", "at"})
	replicaMoves = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "drover_vnaffinity_moves_total",
		Help: "Pods that this replica has handed on to another one, by why: they seemed to fit there, or could preempt there.",
	}, []string{"member", "to", "why"})
	replicaRefused = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "drover_vnaffinity_reserve_refused_total",
		Help: "Placements that were given up because the node had gone to another replica.",
	}, []string{"member"})
	replicaConflicts = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "drover_vnaffinity_bind_conflicts_total",
		Help: "Binds that the API server refused because the pod had a node already, or had changed.",
	}, []string{"member"})
)

type schedulerMetrics struct {
	held, elsewhere    prometheus.Gauge
	refused, conflicts prometheus.Counter
	moved              func(*hop) prometheus.Counter
}

func newSchedulerMetrics(member string) *schedulerMetrics {
	return &schedulerMetrics{
		held:      replicaPods.WithLabelValues(member, "here"),
		elsewhere: replicaPods.WithLabelValues(member, "elsewhere"),
		refused:   replicaRefused.WithLabelValues(member),
		conflicts: replicaConflicts.WithLabelValues(member),
		moved: func(h *hop) prometheus.Counter {
			why := "fits"
			if h.Preempting {
				why = "preempts"
			}
			return replicaMoves.WithLabelValues(member, h.To, why)
		},
	}
}

func registerSchedulerMetrics(r prometheus.Registerer) error {
	for _, c := range []prometheus.Collector{replicaPods, replicaMoves, replicaRefused, replicaConflicts} {
		var again prometheus.AlreadyRegisteredError
		if err := r.Register(c); err != nil && !errors.As(err, &again) {
			return err
		}
	}
	return nil
}
