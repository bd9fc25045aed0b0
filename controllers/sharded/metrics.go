package sharded

import (
	"github.com/prometheus/client_golang/prometheus"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/drover-sh/drover/sharding"
)

// The metrics of all groups of the process. Their names begin with drover_sharded_, and all carry group and member.
var (
	epochs = gauge("epoch", "Epoch of the slice that the member acts on.")
	owned  = gauge("owned_virtual_nodes", "Virtual Nodes that the member owns.")
	served = gauge("served_virtual_nodes", "Virtual Nodes that the member owns and whose caches are complete.")
	moving = gauge("moving_virtual_nodes", "Virtual Nodes that are incoming or draining.")
	leases = gauge("lease_held", "1 while the member holds its lease.")

	barriers = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "drover_sharded_barrier_seconds",
		Help:    "Time from the grant of Virtual Nodes until reads of them wait no more.",
		Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10},
	}, []string{"group", "member"})

	blockedReads = counter("blocked_reads_total", "Reads that had to wait for a cache to become complete.")
	liveReads    = counter("live_reads_total", "Reads that the API server answered: of what is not owned, and of what the "+
		"cache does not show.", "reason")
	fencedWrites = counter("fenced_writes_total", "Writes that were refused because the member may not write.")
	lists        = counter("lists_total", "Lists that were begun for a handoff or after a watch was lost.", "resource")
	unfiltered   = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "drover_sharded_unfiltered",
		Help: "1 while the API server sends what was not selected; of groups with selector ShardRange.",
	}, []string{"group", "member", "resource"})
	watched = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "drover_sharded_watched_virtual_nodes",
		Help: "Virtual Nodes that the member's watches select. Those that it has no more are dropped here.",
	}, []string{"group", "member", "resource"})
	sessions = counter("sessions_total", "Sessions that the member has begun.")
)

func gauge(name, help string) *prometheus.GaugeVec {
	return prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "drover_sharded_" + name, Help: help}, []string{"group", "member"})
}

func counter(name, help string, more ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "drover_sharded_" + name, Help: help},
		append([]string{"group", "member"}, more...))
}

var collectors = []prometheus.Collector{epochs, owned, served, moving, leases, barriers, blockedReads, liveReads,
	fencedWrites, lists, unfiltered, watched, sessions}

func init() { ctrlmetrics.Registry.MustRegister(collectors...) }

// memberMetrics are those of one member.
type memberMetrics struct {
	epoch, owned, served, moving, leases prometheus.Gauge
	barrier                              prometheus.Observer
	blockedReads, fencedWrites, sessions prometheus.Counter
	liveReads, lists                     func(label string) prometheus.Counter
	unfiltered, watched                  func(resource string) prometheus.Gauge
}

func newMemberMetrics(group, member string) *memberMetrics {
	with := func(vec *prometheus.CounterVec) func(string) prometheus.Counter {
		return func(label string) prometheus.Counter { return vec.WithLabelValues(group, member, label) }
	}
	gauges := func(vec *prometheus.GaugeVec) func(string) prometheus.Gauge {
		return func(label string) prometheus.Gauge { return vec.WithLabelValues(group, member, label) }
	}
	return &memberMetrics{
		epoch:        epochs.WithLabelValues(group, member),
		owned:        owned.WithLabelValues(group, member),
		served:       served.WithLabelValues(group, member),
		moving:       moving.WithLabelValues(group, member),
		leases:       leases.WithLabelValues(group, member),
		barrier:      barriers.WithLabelValues(group, member),
		blockedReads: blockedReads.WithLabelValues(group, member),
		fencedWrites: fencedWrites.WithLabelValues(group, member),
		sessions:     sessions.WithLabelValues(group, member),
		liveReads:    with(liveReads),
		lists:        with(lists),
		unfiltered:   gauges(unfiltered),
		watched:      gauges(watched),
	}
}

// observe sets the gauges; the member's lock is held.
func (m *memberMetrics) observe(e *member) {
	m.epoch.Set(float64(e.slice.Epoch))
	m.owned.Set(float64(e.m.Owned().Len()))
	m.served.Set(float64(e.ready.Len()))
	m.moving.Set(float64(e.slice.Moving()))
	for _, k := range e.order {
		if k.external == nil {
			m.watched(string(k.resource)).Set(float64(k.selected().Len()))
		}
	}
}

// selected returns what the watches of the kind bring; the member's lock is held.
func (k *kind) selected() (vns sharding.Set) {
	for _, s := range k.streams {
		if len(s.parts) > 0 {
			vns = vns.Union(s.selected)
		}
	}
	return vns
}
