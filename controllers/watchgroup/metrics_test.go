package watchgroup

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
)

// metricValue returns the value of a gauge of the group, 0 if there is none.
func metricValue(t *testing.T, m *Metrics, name string, group *lbv1alpha1.WatchGroup) float64 {
	t.Helper()
	reg := prometheus.NewRegistry()
	reg.MustRegister(m)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, metric := range f.GetMetric() {
			if f.GetName() == name && hasLabel(metric, "namespace", group.Namespace) && hasLabel(metric, "group", group.Name) {
				return metric.GetGauge().GetValue()
			}
		}
	}
	return 0
}

func hasLabel(m *dto.Metric, name, value string) bool {
	for _, l := range m.GetLabel() {
		if l.GetName() == name && l.GetValue() == value {
			return true
		}
	}
	return false
}
