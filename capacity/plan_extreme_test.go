package capacity_test

import (
	"math"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/drover-sh/drover/capacity"
)

// Counts, amounts and prices come from clusters and providers that nobody checked. None may wrap around: a plan stays
// within the stock, accounts for every pod, and is the one that a sane number in its place would have led to.
func TestPlanWithExtremeNumbers(t *testing.T) {
	most := func(n capacity.Need) capacity.Need {
		n.Count, n.Pending = math.MaxInt32, math.MaxInt32
		return n
	}
	gang := func(n capacity.Need, min int32) capacity.Need {
		n.Profile.Group = &capacity.Group{Name: "gang", MinCount: min}
		return n
	}
	one := func(n capacity.Need) capacity.Need {
		n.Count, n.Pending = 1, 1
		return n
	}
	priced := func(name string, cost float64) capacity.Offering {
		o := cpuOffering(name, 16, cost, 5)
		return o
	}
	for _, test := range []struct {
		name      string
		offerings []capacity.Offering
		needs     []capacity.Need
		daemons   []capacity.Daemon
		launches  int
		offering  string
	}{
		{"as many pods as can be said", []capacity.Offering{cpuOffering("cpu-16", 16, 1, 5), cpuOffering("cpu-32", 32, 1, 5)},
			[]capacity.Need{most(cpuNeed("a", 1)), most(cpuNeed("b", 2))}, nil, 10, ""},
		{"a gang larger than a count", []capacity.Offering{cpuOffering("cpu-16", 16, 1, 5)},
			[]capacity.Need{gang(most(cpuNeed("a", 1)), math.MaxInt32), gang(most(cpuNeed("b", 1)), 0)}, nil, 0, ""},
		{"a gang that may be incomplete, larger than a count", []capacity.Offering{cpuOffering("cpu-16", 16, 1, 5)},
			[]capacity.Need{gang(most(cpuNeed("a", 1)), 2), gang(most(cpuNeed("b", 1)), 2)}, nil, 5, ""},
		{"daemons that ask for everything", []capacity.Offering{cpuOffering("cpu-16", 16, 1, 5)},
			[]capacity.Need{one(cpuNeed("a", 1))}, []capacity.Daemon{
				{Resources: capacity.Resources{corev1.ResourceCPU: math.MaxInt64}},
				{Resources: capacity.Resources{corev1.ResourceCPU: math.MaxInt64}}}, 0, ""},
		{"a price that is no number", []capacity.Offering{priced("nan", math.NaN()), priced("sane", 9)},
			[]capacity.Need{one(cpuNeed("a", 1))}, nil, 1, "sane"},
		{"a price below nothing", []capacity.Offering{priced("paid", math.Inf(-1)), priced("sane", 9)},
			[]capacity.Need{one(cpuNeed("a", 1))}, nil, 1, "paid"},
		{"a price without end", []capacity.Offering{priced("dear", math.Inf(1)), priced("sane", 9)},
			[]capacity.Need{one(cpuNeed("a", 1))}, nil, 1, "sane"},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := simFleet(test.offerings[0], test.needs...)
			plan := capacity.MakePlan(capacity.Input{Offerings: test.offerings, Clusters: []capacity.ClusterInput{
				{ID: f.clusters[0].ID, Needs: test.needs, Daemons: test.daemons}}})
			if got := len(plan.Launches); got != test.launches {
				t.Errorf("%d launches, want %d", got, test.launches)
			}
			for _, l := range plan.Launches {
				if test.offering != "" && l.Offering != test.offering {
					t.Errorf("launched %s, want %s", l.Offering, test.offering)
				}
			}
			for i, v := range plan.Verdicts {
				if v.Met < 0 || v.InFlight < 0 || v.Short < 0 ||
					int64(v.Met)+int64(v.InFlight)+int64(v.Short) != int64(test.needs[i].Count) {
					t.Errorf("%d pods are %d met, %d in flight, %d short", test.needs[i].Count, v.Met, v.InFlight, v.Short)
				}
			}
		})
	}
}
