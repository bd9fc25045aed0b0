package rollup

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
)

const (
	resultSuccess = "success"
	resultError   = "error"
)

// Metrics are the operator's. Their names begin with drover_rollup_.
type Metrics struct {
	Rows        prometheus.Gauge
	Bytes       prometheus.Gauge
	Sends       *prometheus.CounterVec // result
	LastSuccess prometheus.Gauge

	Acknowledgements *prometheus.CounterVec // result

	FeedConnected prometheus.Gauge
	FeedStates    *prometheus.CounterVec // result: applied, late, foreign
	FeedInvalid   prometheus.Counter
	Reports       *prometheus.CounterVec // result

	UpcomingNodes *prometheus.GaugeVec   // phase
	NeedVerdicts  *prometheus.GaugeVec   // state
	Reclaims      *prometheus.CounterVec // result: draining, drained, withdrawn, kept
	Evictions     *prometheus.CounterVec // result: evicted, refused, gone, error
}

// NewMetrics registers the metrics with reg.
func NewMetrics(reg prometheus.Registerer) (*Metrics, error) {
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Name: "drover_rollup_" + name, Help: help})
	}
	gaugeVec := func(name, label, help string) *prometheus.GaugeVec {
		return prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "drover_rollup_" + name, Help: help}, []string{label})
	}
	counterVec := func(name, label, help string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "drover_rollup_" + name, Help: help}, []string{label})
	}
	m := &Metrics{
		Rows:             gauge("rows", "Rows of the last roll-up that the autoscaler took."),
		Bytes:            gauge("bytes", "Size on the wire of the last roll-up that the autoscaler took."),
		Sends:            counterVec("sends_total", "result", "Roll-ups sent, by result."),
		LastSuccess:      gauge("last_success_timestamp_seconds", "When the autoscaler last took a roll-up."),
		Acknowledgements: counterVec("acknowledgements_total", "result", "Writes of phase Acknowledged, by result."),
		FeedConnected:    gauge("feed_connected", "1 while the autoscaler's feed is open and has delivered a state."),
		FeedStates:       counterVec("feed_states_total", "result", "States received from the feed: applied, late or foreign."),
		FeedInvalid: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "drover_rollup_feed_invalid_total", Help: "Entries of feed states that were left out because they are invalid."}),
		Reports:       counterVec("reports_total", "result", "Machine reports sent, by result."),
		UpcomingNodes: gaugeVec("upcoming_nodes", "phase", "Machines on their way in the last feed state, by phase."),
		NeedVerdicts:  gaugeVec("need_verdict", "state", "Rows of the roll-up by the autoscaler's verdict."),
		Reclaims:      counterVec("reclaims_total", "result", "Nodes under reclaim: draining, drained, withdrawn or kept."),
		Evictions:     counterVec("evictions_total", "result", "Evictions asked for: evicted, refused, gone or error."),
	}
	for _, c := range []prometheus.Collector{
		m.Rows, m.Bytes, m.Sends, m.LastSuccess, m.Acknowledgements, m.FeedConnected, m.FeedStates, m.FeedInvalid,
		m.Reports, m.UpcomingNodes, m.NeedVerdicts, m.Reclaims, m.Evictions,
	} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func (m *Metrics) sent(rows, bytes int, at time.Time) {
	m.Rows.Set(float64(rows))
	m.Bytes.Set(float64(bytes))
	m.LastSuccess.Set(float64(at.UnixNano()) / float64(time.Second))
}

// feedApplied shows the gauges that a feed state determines.
func (m *Metrics) feedApplied(s *feedState) {
	phases := map[fleetv1alpha1.UpcomingNodePhase]int{}
	for _, machine := range s.machines {
		phases[machine.phase]++
	}
	for _, phase := range []fleetv1alpha1.UpcomingNodePhase{
		fleetv1alpha1.UpcomingNodeProvisioning, fleetv1alpha1.UpcomingNodeLaunched,
		fleetv1alpha1.UpcomingNodeRegistered, fleetv1alpha1.UpcomingNodeFailed,
	} {
		m.UpcomingNodes.WithLabelValues(string(phase)).Set(float64(phases[phase]))
	}
	states := map[capacity.VerdictState]int{}
	for _, v := range s.verdicts {
		states[v.state]++
	}
	for _, state := range []capacity.VerdictState{capacity.VerdictMet, capacity.VerdictInFlight, capacity.VerdictShort} {
		m.NeedVerdicts.WithLabelValues(string(state)).Set(float64(states[state]))
	}
}
