package capacity_test

import (
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/drover-sh/drover/capacity"
)

// catalogue makes 20 offerings in three zones: five sizes of four families.
func catalogue(stock int32) []capacity.Offering {
	var offerings []capacity.Offering
	for family, memory := range []int64{2, 4, 8, 16} {
		for size := range 5 {
			cpu := int64(4) << size
			o := capacity.Offering{
				Name:   fmt.Sprintf("f%d-%d", family, cpu),
				Labels: map[string]string{"family": fmt.Sprint(family), "cpu": fmt.Sprint(cpu)},
				Allocatable: capacity.Resources{
					corev1.ResourceCPU: cpu*1000 - 100, corev1.ResourceMemory: cpu * memory << 30, corev1.ResourcePods: 110,
				},
				Cost: float64(cpu) * (0.03 + 0.004*float64(memory)),
			}
			for _, z := range zones {
				o.Domains = append(o.Domains, capacity.Domain{
					Name: z, Available: stock, Labels: map[string]string{corev1.LabelTopologyZone: z},
				})
			}
			offerings = append(offerings, o)
		}
	}
	return offerings
}

// shapes makes n needs of different size and rules, with count pods each.
func shapes(n int, count int32) []capacity.Need {
	needs := make([]capacity.Need, 0, n)
	for i := range n {
		need := capacity.Need{ID: fmt.Sprintf("need-%02d", i), Count: count, Pending: count}
		need.Profile.Resources = capacity.Resources{
			corev1.ResourceCPU:    100 + int64(i*i)*7,
			corev1.ResourceMemory: (1 + int64(i*37%13)) << 29,
		}
		need.Profile.Priority = int32(i % 3)
		spread := capacity.Spread{TopologyKey: corev1.LabelTopologyZone, MaxSkew: 1, WhenUnsatisfiable: corev1.ScheduleAnyway}
		switch i % 8 {
		case 1:
			spread.WhenUnsatisfiable = corev1.DoNotSchedule
			need.Profile.Spread = []capacity.Spread{spread}
		case 3:
			need.Profile.Spread = []capacity.Spread{spread}
		case 5:
			need.Profile.Group = &capacity.Group{Name: need.ID, MinCount: count, TopologyKey: corev1.LabelTopologyZone}
		}
		needs = append(needs, need)
	}
	return needs
}

func daemons() []capacity.Daemon {
	return []capacity.Daemon{{Resources: capacity.Resources{corev1.ResourceCPU: 150, corev1.ResourceMemory: 200 << 20}}}
}

// BenchmarkPlanBurst: 20,000 pods of 40 shapes pending at once in a cluster without a node.
func BenchmarkPlanBurst(b *testing.B) {
	in := capacity.Input{Offerings: catalogue(10_000), Clusters: []capacity.ClusterInput{
		{ID: "c", Needs: shapes(40, 500), Daemons: daemons()},
	}}
	var p capacity.Plan
	for b.Loop() {
		p = capacity.MakePlan(in)
	}
	b.ReportMetric(float64(len(p.Launches)), "launches")
}

// BenchmarkPlanSteady: a cluster of more than 5,000 machines at constant demand, and when demand falls to a tenth.
func BenchmarkPlanSteady(b *testing.B) {
	f := &fleet{offerings: catalogue(10_000), clusters: []capacity.ClusterInput{
		{ID: "c", Needs: shapes(40, 500), Daemons: daemons()},
	}}
	for len(f.clusters[0].Machines) < 5000 {
		for i := range f.clusters[0].Needs {
			f.clusters[0].Needs[i].Count += 500
		}
		f.apply(capacity.MakePlan(f.input()))
	}
	f.settle()
	for i := range f.clusters[0].Needs {
		f.clusters[0].Needs[i].Pending = 0
	}
	for _, share := range []int32{1, 10} {
		b.Run(fmt.Sprintf("demand=1/%d", share), func(b *testing.B) {
			in := f.input()
			in.Clusters = slices.Clone(in.Clusters)
			in.Clusters[0].Needs = slices.Clone(in.Clusters[0].Needs)
			for i := range in.Clusters[0].Needs {
				in.Clusters[0].Needs[i].Count /= share
			}
			var p capacity.Plan
			for b.Loop() {
				p = capacity.MakePlan(in)
			}
			surplus := 0
			for _, r := range p.Reclaims {
				surplus += len(r.Surplus)
			}
			b.ReportMetric(float64(len(p.Allotments)), "machines")
			b.ReportMetric(float64(len(p.Launches)), "launches")
			b.ReportMetric(float64(surplus), "surplus")
		})
	}
}

// BenchmarkPlanFleet: 200 clusters with 40 needs each, nothing there yet.
func BenchmarkPlanFleet(b *testing.B) {
	in := capacity.Input{Offerings: catalogue(100_000)}
	for i := range 200 {
		in.Clusters = append(in.Clusters, capacity.ClusterInput{
			ID: fmt.Sprintf("c%03d", i), Needs: shapes(40, 25), Daemons: daemons(),
		})
	}
	var p capacity.Plan
	for b.Loop() {
		p = capacity.MakePlan(in)
	}
	b.ReportMetric(float64(len(p.Launches)), "launches")
}
