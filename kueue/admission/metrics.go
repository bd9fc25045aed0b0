package admission

import (
	"github.com/prometheus/client_golang/prometheus"
)

// Metrics are the check's. Their names begin with drover_kueue_.
type Metrics struct {
	Decisions *prometheus.CounterVec   // check, state, reason
	Wait      *prometheus.HistogramVec // check
	Promised  *prometheus.GaugeVec     // offering
	Promises  prometheus.Gauge
	Waiting   *prometheus.GaugeVec // check
}

// NewMetrics registers the metrics with reg.
func NewMetrics(reg prometheus.Registerer) (*Metrics, error) {
	m := &Metrics{
		Decisions: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "drover_kueue_decisions_total",
			Help: "States written to the admission check of a workload, by check, state and reason."},
			[]string{"check", "state", "reason"}),
		Wait: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "drover_kueue_wait_seconds",
			Help:    "Time from the reservation of quota until the check was Ready.",
			Buckets: prometheus.ExponentialBuckets(0.1, 3, 11)}, []string{"check"}),
		Promised: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "drover_kueue_promised_nodes",
			Help: "Nodes promised to workloads and not seen to be taken yet, by offering."}, []string{"offering"}),
		Promises: prometheus.NewGauge(prometheus.GaugeOpts{Name: "drover_kueue_promises",
			Help: "Workloads that hold a promise."}),
		Waiting: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "drover_kueue_waiting_workloads",
			Help: "Workloads that hold quota and wait for the check."}, []string{"check"}),
	}
	for _, c := range []prometheus.Collector{m.Decisions, m.Wait, m.Promised, m.Promises, m.Waiting} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// show sets the gauges that a pass determines.
func (m *Metrics) show(ledger *Ledger, hints []Hint, waiting map[string]int) {
	m.Promises.Set(float64(len(ledger.Keys())))
	totals := ledger.Totals()
	m.Promised.Reset()
	for i := range hints {
		m.Promised.WithLabelValues(hints[i].Name).Set(0)
	}
	for name, n := range totals {
		m.Promised.WithLabelValues(name).Set(float64(n))
	}
	m.Waiting.Reset()
	for check, n := range waiting {
		m.Waiting.WithLabelValues(check).Set(float64(n))
	}
}
