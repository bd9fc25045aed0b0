package fake_test

import (
	"testing"
	"time"

	"k8s.io/utils/clock"

	"github.com/drover-sh/drover/autoscaler/provider"
	"github.com/drover-sh/drover/autoscaler/provider/fake"
	"github.com/drover-sh/drover/autoscaler/provider/providertest"
	"github.com/drover-sh/drover/capacity"
)

func TestConformance(t *testing.T) {
	providertest.Run(t, func(_ *testing.T, faults providertest.Faults) providertest.Subject {
		cloud := fake.NewCloud(clock.RealClock{}, provider.Offering{Offering: capacity.Offering{Name: "small",
			Domains: []capacity.Domain{{Name: "a", Available: 8}}}})
		if faults.Slow {
			cloud.Latency = time.Second
		}
		if faults.LaunchFailure != "" {
			cloud.Fail = func(provider.Request) string { return faults.LaunchFailure }
		}
		cloud.Events = func(provider.Event) int {
			switch {
			case faults.DropEvents:
				return 0
			case faults.DoubleEvents:
				return 2
			}
			return 1
		}
		return providertest.Subject{
			New:     func(*testing.T) provider.Interface { return cloud.Provider() },
			Cluster: "east", Offering: "small", Domain: "a", Stock: 8,
			Existing: func(*testing.T) []string {
				var out []string
				for _, m := range cloud.Machines() {
					out = append(out, m.ID)
				}
				return out
			},
		}
	})
}
