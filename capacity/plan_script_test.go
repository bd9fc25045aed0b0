package capacity_test

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	corev1 "k8s.io/api/core/v1"

	"github.com/drover-sh/drover/capacity"
)

// TestPlanScripts plays the scenarios of testdata/plan. A script sets the scene with
//
//	offering name=N cost=C cpu=.. [memory=.. gpu=.. pods=..] [taint=..] [label=(k=v, ..)]   lines: domain stock=N [zone=..] [rack=..]
//	daemon cpu=.. [tolerate=all]
//	need id=N count=N cpu=.. [pending=N priority=N group=N min=N same=K spread=(K skew hard|soft [min])] [anti=K set=N]
//	     lines: requirements ("zone in a b", "zone notin a", "gen gt 3", "zone exists"), "or", "tolerate KEY"
//	cluster id=N (what follows concerns that cluster), hold reason=.., release
//
// and goes on with plan (make a plan, check it, print it and apply it), advance (all in flight become nodes that the
// scheduler has used), machines, reclaim (the cluster gives back what the plan would choose), drain id=M, lose id=M,
// shrink id=M cpu=.., stock offering=N domain=N n=N.
func TestPlanScripts(t *testing.T) {
	datadriven.Walk(t, "testdata/plan", func(t *testing.T, path string) {
		s := &script{fleet: &fleet{}, at: "main"}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			return s.run(t, d)
		})
	})
}

type script struct {
	fleet *fleet
	at    string
	last  capacity.Plan
}

var shortKeys = map[string]string{
	"zone": corev1.LabelTopologyZone, "rack": "topology.kubernetes.io/rack", "hostname": corev1.LabelHostname,
}

var shortResources = map[string]string{"gpu": "nvidia.com/gpu"}

func key(short string) string {
	if k, ok := shortKeys[short]; ok {
		return k
	}
	return short
}

func (s *script) run(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	c := s.fleet.cluster(s.at)
	switch d.Cmd {
	case "cluster":
		s.at = arg(d, "id")
		s.fleet.cluster(s.at)
	case "hold":
		c.Held, c.HeldReason = true, arg(d, "reason")
	case "release":
		c.Held, c.HeldReason = false, ""
	case "offering":
		s.offering(t, d)
	case "daemon":
		daemon := capacity.Daemon{Resources: resources(t, d)}
		if arg(d, "tolerate") == "all" {
			daemon.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
		}
		c.Daemons = append(c.Daemons, daemon)
	case "need":
		s.need(t, d, c)
	case "plan":
		in := s.fleet.input()
		s.last = capacity.MakePlan(in)
		if err := checkPlan(in, s.last); err != nil {
			t.Errorf("%s: %v", d.Pos, err)
		}
		text := describe(s.fleet, s.last)
		s.fleet.apply(s.last)
		return text
	case "advance":
		s.fleet.settle()
	case "reclaim":
		for _, r := range s.last.Reclaims {
			for _, id := range r.Surplus {
				s.fleet.remove(id)
			}
		}
	case "lose":
		s.fleet.remove(arg(d, "id"))
	case "drain":
		m := s.fleet.machine(arg(d, "id"))
		m.State, m.Settled = capacity.MachineReclaiming, false
	case "shrink":
		m := s.fleet.machine(arg(d, "id"))
		m.Allocatable = resources(t, d)
	case "stock":
		s.fleet.domain(arg(d, "offering"), arg(d, "domain")).Available = number(t, arg(d, "n"))
	case "machines":
	default:
		t.Fatalf("%s: unknown command %s", d.Pos, d.Cmd)
	}
	if d.Cmd == "machines" || d.Cmd == "advance" {
		var b strings.Builder
		var names, texts []string
		for _, c := range s.fleet.clusters {
			for _, m := range c.Machines {
				names = append(names, m.ID)
				texts = append(texts, fmt.Sprintf("%s in %s, %s, %s\n", m.Offering, m.Domain, m.State, allotment(m.Allotment)))
			}
		}
		writeRuns(&b, names, texts)
		if b.Len() == 0 {
			return "no machine\n"
		}
		return b.String()
	}
	return ""
}

func (s *script) offering(t *testing.T, d *datadriven.TestData) {
	t.Helper()
	o := capacity.Offering{Name: arg(d, "name"), Labels: map[string]string{}, Allocatable: resources(t, d)}
	var err error
	if o.Cost, err = strconv.ParseFloat(arg(d, "cost"), 64); err != nil {
		t.Fatalf("%s: cost: %v", d.Pos, err)
	}
	if taint := arg(d, "taint"); taint != "" {
		o.Taints = []corev1.Taint{{Key: taint, Effect: corev1.TaintEffectNoSchedule}}
	}
	for _, l := range args(d, "label") {
		k, v, _ := strings.Cut(l, ":")
		o.Labels[key(k)] = v
	}
	for line := range strings.Lines(d.Input) {
		fields := strings.Fields(line)
		domain := capacity.Domain{Name: fields[0], Labels: map[string]string{}}
		for _, f := range fields[1:] {
			if k, v, _ := strings.Cut(f, "="); k == "stock" {
				domain.Available = number(t, v)
			} else {
				domain.Labels[key(k)] = v
			}
		}
		o.Domains = append(o.Domains, domain)
	}
	s.fleet.offerings = append(s.fleet.offerings, o)
}

// need adds a need, or replaces the one of the same id; count=0 removes it.
func (s *script) need(t *testing.T, d *datadriven.TestData, c *capacity.ClusterInput) {
	t.Helper()
	n := capacity.Need{ID: arg(d, "id"), Count: number(t, arg(d, "count")), Pending: number(t, arg(d, "pending"))}
	known := -1
	for i := range c.Needs {
		if c.Needs[i].ID == n.ID {
			known = i
		}
	}
	if known >= 0 && len(d.CmdArgs) <= 3 && d.Input == "" {
		n.Profile = c.Needs[known].Profile // only the counts change
	} else {
		n.Profile = profile(t, d)
	}
	switch {
	case known < 0:
		c.Needs = append(c.Needs, n)
	case n.Count == 0:
		c.Needs = append(c.Needs[:known], c.Needs[known+1:]...)
	default:
		c.Needs[known] = n
	}
}

func profile(t *testing.T, d *datadriven.TestData) capacity.Profile {
	t.Helper()
	p := capacity.Profile{Resources: resources(t, d), Priority: number(t, arg(d, "priority"))}
	if name := arg(d, "group"); name != "" {
		p.Group = &capacity.Group{Name: name, MinCount: number(t, arg(d, "min"))}
	}
	if k := arg(d, "same"); k != "" {
		p.Requirements = append(p.Requirements, capacity.Requirement{Key: key(k), Operator: capacity.OperatorSame})
	}
	for _, spread := range args(d, "spread") {
		f := strings.Split(spread, "/")
		sp := capacity.Spread{TopologyKey: key(f[0]), MaxSkew: number(t, f[1]), WhenUnsatisfiable: corev1.DoNotSchedule}
		if f[2] == "soft" {
			sp.WhenUnsatisfiable = corev1.ScheduleAnyway
		}
		if len(f) > 3 {
			sp.MinDomains = number(t, f[3])
		}
		p.Spread = append(p.Spread, sp)
	}
	if k := arg(d, "anti"); k != "" {
		set := arg(d, "set")
		if set == "" {
			set = arg(d, "id")
		}
		p.AntiAffinity = []capacity.AntiAffinity{{TopologyKey: key(k), Set: set}}
	}
	set := &p.Requirements
	for line := range strings.Lines(d.Input) {
		f := strings.Fields(line)
		switch f[0] {
		case "or":
			p.Alternatives = append(p.Alternatives, nil)
			set = &p.Alternatives[len(p.Alternatives)-1]
		case "tolerate":
			p.Tolerations = append(p.Tolerations, corev1.Toleration{Key: f[1], Operator: corev1.TolerationOpExists})
		default:
			ops := map[string]capacity.Operator{
				"in": capacity.OperatorIn, "notin": capacity.OperatorNotIn, "exists": capacity.OperatorExists,
				"absent": capacity.OperatorDoesNotExist, "gt": capacity.OperatorGt, "lt": capacity.OperatorLt,
				"same": capacity.OperatorSame,
			}
			*set = append(*set, capacity.Requirement{Key: key(f[0]), Operator: ops[f[1]], Values: f[2:]})
		}
	}
	return p
}

func resources(t *testing.T, d *datadriven.TestData) capacity.Resources {
	t.Helper()
	m := map[string]string{}
	for _, name := range []string{"cpu", "memory", "gpu", "pods"} {
		if v := arg(d, name); v != "" {
			full := name
			if long, ok := shortResources[name]; ok {
				full = long
			}
			m[full] = v
		}
	}
	r, err := capacity.ParseResources(m)
	if err != nil {
		t.Fatalf("%s: %v", d.Pos, err)
	}
	return r
}

func arg(d *datadriven.TestData, name string) string { return strings.Join(args(d, name), " ") }

func args(d *datadriven.TestData, name string) []string {
	for _, a := range d.CmdArgs {
		if a.Key == name {
			return a.Vals
		}
	}
	return nil
}

func number(t *testing.T, text string) int32 {
	t.Helper()
	if text == "" {
		return 0
	}
	n, err := strconv.ParseInt(text, 10, 32)
	if err != nil {
		t.Fatal(err)
	}
	return int32(n)
}
