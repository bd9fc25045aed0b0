package autoscaler

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/drover-sh/drover/capacity"
)

// metrics of the autoscaler; all names begin with drover_autoscaler_.
type metrics struct {
	rollUps, reports, events, surveys *prometheus.CounterVec
	calls                             *prometheus.CounterVec
	storeErrors                       prometheus.Counter
	passes                            prometheus.Histogram
	machines                          *prometheus.GaugeVec
	pods                              *prometheus.GaugeVec
	held, silent, reclaims            *prometheus.GaugeVec
	available, feeds                  *prometheus.GaugeVec
}

// newMetrics registers the counters; the gauges are read at each scrape.
func newMetrics(registry prometheus.Registerer) *metrics {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		v := prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "drover", Subsystem: "autoscaler", Name: name,
			Help: help}, labels)
		registry.MustRegister(v)
		return v
	}
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: "drover", Subsystem: "autoscaler", Name: name,
			Help: help}, labels)
	}
	m := &metrics{
		rollUps:  counter("rollups_total", "Roll-ups by result: stored, unchanged, late, invalid, unavailable.", "result"),
		reports:  counter("machine_reports_total", "Machine reports by result: stored, invalid, unavailable.", "result"),
		events:   counter("provider_events_total", "Provider events by type.", "type"),
		surveys:  counter("provider_surveys_total", "Listings of the provider's machines by result: ok, error.", "result"),
		calls:    counter("provider_calls_total", "Provider calls by verb and result: accepted, refused.", "verb", "result"),
		machines: gauge("machines", "Machines by cluster and state.", "cluster", "state"),
		pods:     gauge("pods", "Demand in pods by cluster and verdict: Met, InFlight, Short.", "cluster", "verdict"),
		held:     gauge("cluster_held", "1 while nothing is reclaimed from the cluster.", "cluster"),
		silent:   gauge("cluster_silent", "1 while the cluster's roll-ups have stopped.", "cluster"),
		reclaims: gauge("reclaims_wanted", "Machines that the cluster is asked to give back, chosen or not.", "cluster"),
		available: gauge("offering_available", "Machines of an offering that can still be launched, by domain.",
			"offering", "domain"),
		feeds: gauge("feed_subscribers", "Open feed subscriptions."),
		storeErrors: prometheus.NewCounter(prometheus.CounterOpts{Namespace: "drover", Subsystem: "autoscaler",
			Name: "store_errors_total", Help: "Failed writes to the state store."}),
		passes: prometheus.NewHistogram(prometheus.HistogramOpts{Namespace: "drover", Subsystem: "autoscaler",
			Name: "pass_duration_seconds", Help: "Time of one planning pass over all clusters.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 4, 9)}),
	}
	registry.MustRegister(m.storeErrors, m.passes)
	return m
}

// gauges reads the engine when it is scraped, so that no turn pays for it.
type gauges struct {
	runner *Runner
	m      *metrics
}

func (g gauges) vectors() []*prometheus.GaugeVec {
	return []*prometheus.GaugeVec{g.m.machines, g.m.pods, g.m.held, g.m.silent, g.m.reclaims, g.m.available, g.m.feeds}
}

// Describe implements prometheus.Collector.
func (g gauges) Describe(ch chan<- *prometheus.Desc) {
	for _, v := range g.vectors() {
		v.Describe(ch)
	}
}

// Collect implements prometheus.Collector.
func (g gauges) Collect(ch chan<- prometheus.Metric) {
	g.runner.mu.Lock()
	g.m.observe(g.runner.engine, g.runner.clock.Now())
	g.runner.mu.Unlock()
	g.m.feeds.WithLabelValues().Set(float64(g.runner.hub.subscribers()))
	for _, v := range g.vectors() {
		v.Collect(ch)
	}
}

// observe sets the gauges.
func (m *metrics) observe(e *Engine, now time.Time) {
	for id, c := range e.clusters {
		states := map[MachineState]float64{}
		for _, machine := range c.machines {
			states[machine.State]++
		}
		for _, state := range []MachineState{Requested, Launched, Registered, Active, Reclaiming, Terminating, Failed} {
			m.machines.WithLabelValues(id, string(state)).Set(states[state])
		}
		var met, inFlight, short float64
		for _, v := range c.verdicts {
			met, inFlight, short = met+float64(v.Met), inFlight+float64(v.InFlight), short+float64(v.Short)
		}
		m.pods.WithLabelValues(id, string(capacity.VerdictMet)).Set(met)
		m.pods.WithLabelValues(id, string(capacity.VerdictInFlight)).Set(inFlight)
		m.pods.WithLabelValues(id, string(capacity.VerdictShort)).Set(short)
		m.held.WithLabelValues(id).Set(oneIf(c.held != ""))
		m.silent.WithLabelValues(id).Set(oneIf(c.silent))
		wanted := states[Reclaiming]
		for _, r := range c.Reclaims {
			wanted += float64(r.Want)
		}
		m.reclaims.WithLabelValues(id).Set(wanted)
	}
	m.available.Reset()
	for _, o := range e.stock(now) {
		for _, d := range o.Domains {
			m.available.WithLabelValues(o.Name, d.Name).Set(float64(d.Available))
		}
	}
}

func oneIf(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
