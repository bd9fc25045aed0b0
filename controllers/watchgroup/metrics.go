package watchgroup

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
)

// Outcomes of an admission review, as a label of the metric.
const (
	outcomeLabelled = "labelled" // it is created with its number
	outcomeLate     = "late"     // it takes part, and the backfill labels it
	outcomeKept     = "kept"     // the update left it alone
	outcomeRestored = "restored" // the update would have dropped it
	outcomeStripped = "stripped" // it does not take part, and came with one
	outcomeNone     = "none"     // it does not take part
	outcomeError    = "error"
)

// Metrics are the coordinator's, the webhook's and the backfill's. Their names begin with drover_watchgroup_.
type Metrics struct {
	Writes      *prometheus.CounterVec   // namespace, group, operation
	Revocations *prometheus.CounterVec   // namespace, group
	Admissions  *prometheus.CounterVec   // outcome
	Late        *prometheus.HistogramVec // resource

	mu     sync.Mutex
	groups map[types.NamespacedName]lbv1alpha1.WatchGroupStatus
	now    func() time.Time
}

var groupLabels = []string{"namespace", "group"}

// The gauges of a group are read off its status when they are scraped, so that ages grow while nothing happens.
var gauges = []struct {
	desc  *prometheus.Desc
	value func(*lbv1alpha1.WatchGroupStatus, time.Time) float64
}{
	{gauge("members", "Members that hold their Lease."),
		func(s *lbv1alpha1.WatchGroupStatus, _ time.Time) float64 { return float64(s.Members) }},
	{gauge("epoch", "The last change of any slice."),
		func(s *lbv1alpha1.WatchGroupStatus, _ time.Time) float64 { return float64(s.Epoch) }},
	{gauge("owned_virtual_nodes", "Virtual Nodes that have an owner."),
		func(s *lbv1alpha1.WatchGroupStatus, _ time.Time) float64 { return float64(s.Owned) }},
	{gauge("moving_virtual_nodes", "Virtual Nodes on their way to another member."),
		func(s *lbv1alpha1.WatchGroupStatus, _ time.Time) float64 { return float64(s.Moving) }},
	{gauge("unowned_virtual_nodes", "Virtual Nodes that have no owner."),
		func(s *lbv1alpha1.WatchGroupStatus, _ time.Time) float64 { return float64(s.Unowned) }},
	{gauge("unowned_objects", "Objects whose Virtual Nodes have no owner."),
		func(s *lbv1alpha1.WatchGroupStatus, _ time.Time) float64 { return float64(s.UnownedObjects) }},
	{gauge("unowned_seconds", "For how long some Virtual Node has had no owner; 0 if all have one."),
		func(s *lbv1alpha1.WatchGroupStatus, now time.Time) float64 {
			c := meta.FindStatusCondition(s.Conditions, lbv1alpha1.ConditionUnowned)
			if c == nil || c.Status != metav1.ConditionTrue {
				return 0
			}
			return now.Sub(c.LastTransitionTime.Time).Seconds()
		}},
	{gauge("unlabelled_objects", "Objects that take part and carry no label: no member sees them."),
		func(s *lbv1alpha1.WatchGroupStatus, _ time.Time) float64 { return float64(s.UnlabelledObjects) }},
	{gauge("oldest_unlabelled_seconds", "Age of the oldest object that takes part and carries no label; 0 if there is none."),
		func(s *lbv1alpha1.WatchGroupStatus, now time.Time) float64 {
			if s.OldestUnlabelled == nil {
				return 0
			}
			return now.Sub(s.OldestUnlabelled.Time).Seconds()
		}},
	{gauge("accepted", "1 if the group is followed, 0 if its spec is refused."),
		func(s *lbv1alpha1.WatchGroupStatus, _ time.Time) float64 {
			if meta.IsStatusConditionTrue(s.Conditions, lbv1alpha1.ConditionAccepted) {
				return 1
			}
			return 0
		}},
}

func gauge(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("drover_watchgroup_"+name, help, groupLabels, nil)
}

// NewMetrics registers the metrics with reg.
func NewMetrics(reg prometheus.Registerer) (*Metrics, error) {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "drover_watchgroup_" + name, Help: help}, labels)
	}
	m := &Metrics{
		Writes: counter("slice_writes_total", "Writes of slices that the API server accepted.",
			"namespace", "group", "operation"),
		Revocations: counter("revocations_total", "Sessions that were taken out of their Leases.", groupLabels...),
		Admissions:  counter("admissions_total", "Objects that the webhook saw, by what it did.", "outcome"),
		Late: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "drover_watchgroup_label_delay_seconds",
			Help:    "For how long an object was unlabelled that the backfill has labelled.",
			Buckets: []float64{.05, .1, .5, 1, 5, 30, 300, 3600},
		}, []string{"resource"}),
		groups: make(map[types.NamespacedName]lbv1alpha1.WatchGroupStatus),
		now:    time.Now,
	}
	for _, c := range []prometheus.Collector{m.Writes, m.Revocations, m.Admissions, m.Late, m} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, g := range gauges {
		ch <- g.desc
	}
}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.now()
	for key, status := range m.groups {
		for _, g := range gauges {
			ch <- prometheus.MustNewConstMetric(g.desc, prometheus.GaugeValue, g.value(&status, now), key.Namespace, key.Name)
		}
	}
}

func (m *Metrics) record(g *lbv1alpha1.WatchGroup) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.groups[types.NamespacedName{Namespace: g.Namespace, Name: g.Name}] = *g.Status.DeepCopy()
}

func (m *Metrics) forget(key types.NamespacedName) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.groups, key)
	labels := prometheus.Labels{"namespace": key.Namespace, "group": key.Name}
	m.Writes.DeletePartialMatch(labels)
	m.Revocations.DeletePartialMatch(labels)
}
