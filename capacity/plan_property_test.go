package capacity_test

import (
	"fmt"
	"reflect"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"pgregory.net/rapid"

	"github.com/drover-sh/drover/capacity"
)

var zones = []string{"a", "b", "c"}

func drawFleet(t *rapid.T) *fleet {
	f := &fleet{}
	for i := range rapid.IntRange(1, 4).Draw(t, "offerings") {
		cpu := rapid.SampledFrom([]int64{4, 8, 16, 32}).Draw(t, "cpu")
		o := capacity.Offering{
			Name: fmt.Sprintf("o%d", i), Labels: map[string]string{"size": fmt.Sprint(cpu)},
			Allocatable: capacity.Resources{
				corev1.ResourceCPU:    cpu * 1000,
				corev1.ResourceMemory: cpu * rapid.SampledFrom([]int64{2, 4, 8}).Draw(t, "memory"),
				corev1.ResourcePods:   rapid.SampledFrom([]int64{5, 30, 110}).Draw(t, "pods"),
			},
			Cost: float64(rapid.IntRange(0, 40).Draw(t, "cost")) / 10,
		}
		if rapid.IntRange(0, 4).Draw(t, "tainted") == 0 {
			o.Taints = []corev1.Taint{{Key: "special", Effect: corev1.TaintEffectNoSchedule}}
		}
		for _, z := range zones[:rapid.IntRange(1, 3).Draw(t, "zones")] {
			for r := range rapid.IntRange(1, 2).Draw(t, "racks") {
				rack := fmt.Sprintf("%s%d", z, r)
				o.Domains = append(o.Domains, capacity.Domain{
					Name: rack, Labels: map[string]string{corev1.LabelTopologyZone: z, "rack": rack},
					Available: rapid.SampledFrom([]int32{0, 1, 3, 10, 100}).Draw(t, "stock"),
				})
			}
		}
		f.offerings = append(f.offerings, o)
	}
	for i := range rapid.IntRange(1, 2).Draw(t, "clusters") {
		c := f.cluster(fmt.Sprintf("c%d", i))
		for range rapid.IntRange(0, 2).Draw(t, "daemons") {
			c.Daemons = append(c.Daemons, capacity.Daemon{Resources: capacity.Resources{corev1.ResourceCPU: 300}})
		}
		for j := range rapid.IntRange(1, 7).Draw(t, "needs") {
			c.Needs = append(c.Needs, drawNeed(t, fmt.Sprintf("n%d", j)))
		}
	}
	return f
}

func drawNeed(t *rapid.T, id string) capacity.Need {
	n := capacity.Need{ID: id, Count: rapid.Int32Range(0, 30).Draw(t, "count")}
	p := &n.Profile
	p.Resources = capacity.Resources{corev1.ResourceCPU: rapid.SampledFrom([]int64{100, 500, 1000, 3000, 6000, 10000}).Draw(t, "podCPU")}
	if rapid.Bool().Draw(t, "hasMemory") {
		p.Resources[corev1.ResourceMemory] = rapid.Int64Range(1, 20).Draw(t, "podMemory")
	}
	p.Priority = rapid.SampledFrom([]int32{0, 0, 100}).Draw(t, "priority")
	if rapid.IntRange(0, 2).Draw(t, "tolerant") == 0 {
		p.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	}
	hard := func(key string) capacity.Spread {
		return capacity.Spread{
			TopologyKey: key, MaxSkew: rapid.Int32Range(1, 3).Draw(t, "skew"), WhenUnsatisfiable: corev1.DoNotSchedule,
			MinDomains: rapid.SampledFrom([]int32{0, 0, 0, 2, 4}).Draw(t, "minDomains"),
		}
	}
	switch rapid.IntRange(0, 11).Draw(t, "rule") {
	case 0:
		p.Requirements = []capacity.Requirement{{Key: corev1.LabelTopologyZone, Operator: capacity.OperatorSame}}
	case 1:
		p.Group = &capacity.Group{Name: "g" + id, MinCount: rapid.Int32Range(0, 40).Draw(t, "min"), TopologyKey: "rack"}
	case 2:
		p.Group = &capacity.Group{Name: "shared", MinCount: rapid.Int32Range(1, 40).Draw(t, "min")}
	case 3:
		p.Spread = []capacity.Spread{hard(corev1.LabelTopologyZone)}
	case 4:
		p.Spread = []capacity.Spread{hard(corev1.LabelHostname)}
	case 5:
		p.Spread = []capacity.Spread{{TopologyKey: corev1.LabelTopologyZone, MaxSkew: 1, WhenUnsatisfiable: corev1.ScheduleAnyway}}
	case 6:
		p.AntiAffinity = []capacity.AntiAffinity{{TopologyKey: corev1.LabelHostname, Set: "set"}}
	case 7:
		p.AntiAffinity = []capacity.AntiAffinity{{TopologyKey: corev1.LabelTopologyZone, Set: "set"}}
	case 8:
		p.Requirements = []capacity.Requirement{{Key: "size", Operator: capacity.OperatorGt, Values: []string{"7"}}}
		p.Alternatives = [][]capacity.Requirement{{{Key: corev1.LabelTopologyZone, Operator: capacity.OperatorNotIn, Values: []string{"a"}}}}
	case 9:
		p.Requirements = []capacity.Requirement{{Key: corev1.LabelHostname, Operator: capacity.OperatorSame}}
	case 10:
		p.AntiAffinity = []capacity.AntiAffinity{{TopologyKey: corev1.LabelHostname, Set: id}}
		p.Spread = []capacity.Spread{hard(corev1.LabelTopologyZone)}
	}
	return n
}

// pass makes a plan, holds it to what is true of every plan, and applies it; reclaims are carried out as the plan would.
func pass(t *rapid.T, f *fleet) capacity.Plan {
	in := f.input()
	p := capacity.MakePlan(in)
	if err := checkPlan(in, p); err != nil {
		t.Fatalf("%v\n%s", err, describe(f, p))
	}
	if again := capacity.MakePlan(in); !reflect.DeepEqual(p, again) {
		t.Fatalf("the same input gave another plan:\n%s\n%s", describe(f, p), describe(f, again))
	}
	f.apply(p)
	for _, r := range p.Reclaims {
		for _, id := range r.Surplus {
			f.remove(id)
		}
	}
	return p
}

// wantIdle states the law of constant demand.
func wantIdle(t *rapid.T, f *fleet, when string) {
	if p := pass(t, f); !idle(p) {
		t.Fatalf("%s a plan still acts:\n%s", when, describe(f, p))
	}
}

// TestPlanAtConstantDemand: one plan does all that can be done; from then on nothing happens, neither while machines are on
// their way nor when they are up. After a change of demand or a loss, whole machines become free within a few passes, and
// then nothing happens again.
func TestPlanAtConstantDemand(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := drawFleet(t)
		pass(t, f)
		wantIdle(t, f, "right after the first plan")
		f.settle()
		wantIdle(t, f, "with all machines up")
		wantIdle(t, f, "with all machines up")
		for range rapid.IntRange(1, 3).Draw(t, "changes") {
			change(t, f)
			pass(t, f)
			for range 4 {
				f.settle()
				pass(t, f)
			}
			wantIdle(t, f, "some passes after a change")
			f.settle()
			wantIdle(t, f, "some passes after a change")
		}
	})
}

func change(t *rapid.T, f *fleet) {
	for i := range f.clusters {
		c := &f.clusters[i]
		for j := range c.Needs {
			if rapid.Bool().Draw(t, "changed") {
				c.Needs[j].Count = rapid.Int32Range(0, 30).Draw(t, "count")
			}
		}
		if len(c.Machines) > 0 && rapid.Bool().Draw(t, "lost") {
			m := c.Machines[rapid.IntRange(0, len(c.Machines)-1).Draw(t, "machine")]
			f.remove(m.ID)
		}
		c.Held = rapid.IntRange(0, 5).Draw(t, "held") == 0
	}
	for i := range f.offerings {
		for j := range f.offerings[i].Domains {
			if rapid.IntRange(0, 3).Draw(t, "restocked") == 0 {
				f.offerings[i].Domains[j].Available = rapid.SampledFrom([]int32{0, 1, 3, 10, 100}).Draw(t, "stock")
			}
		}
	}
}

// TestPlanDoesNotDependOnOrder: whatever order clusters, needs, machines and offerings come in, the decision is the same.
func TestPlanDoesNotDependOnOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := drawFleet(t)
		pass(t, f)
		f.settle()
		change(t, f)
		want := describe(f, capacity.MakePlan(f.input()))
		slices.Reverse(f.offerings)
		slices.Reverse(f.clusters)
		for i := range f.clusters {
			slices.Reverse(f.clusters[i].Needs)
			slices.Reverse(f.clusters[i].Machines)
		}
		for i := range f.offerings {
			slices.Reverse(f.offerings[i].Domains)
		}
		if got := describe(f, capacity.MakePlan(f.input())); got != want {
			t.Fatalf("another order gave another plan:\n%s\n%s", got, want)
		}
	})
}
