package capacity

import (
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	schedulinghelpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/klog/v2"
	"pgregory.net/rapid"

	"github.com/drover-sh/drover/internal/builders"
)

func TestRequirementMatches(t *testing.T) {
	labels := map[string]string{"zone": "a", "gen": "5", "empty": ""}
	for name, tc := range map[string]struct {
		r    Requirement
		want bool
	}{
		"In":                           {Requirement{"zone", OperatorIn, []string{"b", "a"}}, true},
		"In, other value":              {Requirement{"zone", OperatorIn, []string{"b"}}, false},
		"In, no label":                 {Requirement{"rack", OperatorIn, []string{"a"}}, false},
		"In, no label, empty value":    {Requirement{"rack", OperatorIn, []string{""}}, false},
		"In, empty label":              {Requirement{"empty", OperatorIn, []string{""}}, true},
		"NotIn":                        {Requirement{"zone", OperatorNotIn, []string{"b"}}, true},
		"NotIn, this value":            {Requirement{"zone", OperatorNotIn, []string{"a"}}, false},
		"NotIn, no label":              {Requirement{"rack", OperatorNotIn, []string{"a"}}, true},
		"Exists":                       {Requirement{"empty", OperatorExists, nil}, true},
		"Exists, no label":             {Requirement{"rack", OperatorExists, nil}, false},
		"DoesNotExist":                 {Requirement{"rack", OperatorDoesNotExist, nil}, true},
		"DoesNotExist, label":          {Requirement{"zone", OperatorDoesNotExist, nil}, false},
		"Gt":                           {Requirement{"gen", OperatorGt, []string{"4"}}, true},
		"Gt, equal":                    {Requirement{"gen", OperatorGt, []string{"5"}}, false},
		"Gt, as numbers, not as texts": {Requirement{"gen", OperatorGt, []string{"40"}}, false},
		"Lt":                           {Requirement{"gen", OperatorLt, []string{"40"}}, true},
		"Gt, label is no number":       {Requirement{"zone", OperatorGt, []string{"1"}}, false},
		"Gt, bound is no number":       {Requirement{"gen", OperatorGt, []string{"x"}}, false},
		"Gt, no label":                 {Requirement{"rack", OperatorGt, []string{"1"}}, false},
		"Gt, bound with a sign":        {Requirement{"gen", OperatorGt, []string{"-1"}}, false},
		"Gt, no bound":                 {Requirement{"gen", OperatorGt, nil}, false},
		"Same is about several nodes":  {Requirement{"rack", OperatorSame, nil}, true},
		"an unknown operator":          {Requirement{"zone", "Near", []string{"a"}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := tc.r.Matches(labels); got != tc.want {
				t.Errorf("%s matches %v: %v, want %v", tc.r, labels, got, tc.want)
			}
			if got := MatchesAll([]Requirement{{"zone", OperatorExists, nil}, tc.r}, labels); got != tc.want {
				t.Errorf("with another that is met: %v, want %v", got, tc.want)
			}
		})
	}
}

// A set of requirements keeps its meaning when it becomes canonical.
func TestCanonicalRequirementsMeanTheSame(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var reqs []Requirement
		for _, e := range rapid.SliceOfN(rapid.Custom(genSelectorRequirement), 0, 6).Draw(t, "requirements") {
			reqs = append(reqs, Requirement{Key: e.Key, Operator: Operator(e.Operator), Values: e.Values})
		}
		labels := genLabels(t)
		canonical := canonicalRequirements(reqs)
		if got, want := MatchesAll(canonical, labels), MatchesAll(reqs, labels); got != want {
			t.Fatalf("%v matches %v: %v, but %v: %v", reqs, labels, want, canonical, got)
		}
	})
}

// Tolerates says what the scheduler's TaintToleration filter says.
func TestTolerates(t *testing.T) {
	var logger klog.Logger // says nothing
	rapid.Check(t, func(t *rapid.T) {
		numbers := []string{"5", "05", "-5", "0", "+5", "x", ""}
		tolerations := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) corev1.Toleration {
			tol := genToleration(t)
			if tol.Key != "" && rapid.Bool().Draw(t, "compares") {
				tol.Operator = rapid.SampledFrom([]corev1.TolerationOperator{"Lt", "Gt"}).Draw(t, "comparison")
				tol.Value = rapid.SampledFrom(numbers).Draw(t, "bound")
			}
			return tol
		}), 0, 4).Draw(t, "tolerations")
		taints := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) corev1.Taint {
			return corev1.Taint{
				Key:   rapid.SampledFrom([]string{"gpu", "team"}).Draw(t, "key"),
				Value: rapid.SampledFrom(append(numbers, genValues...)).Draw(t, "value"),
				Effect: rapid.SampledFrom([]corev1.TaintEffect{
					corev1.TaintEffectNoSchedule, corev1.TaintEffectNoExecute, corev1.TaintEffectPreferNoSchedule,
				}).Draw(t, "effect"),
			}
		}), 0, 3).Draw(t, "taints")
		hard := func(t *corev1.Taint) bool { return t.Effect != corev1.TaintEffectPreferNoSchedule }
		_, untolerated := schedulinghelpers.FindMatchingUntoleratedTaint(logger, taints, tolerations, hard, true)
		if got := Tolerates(tolerations, taints); got == untolerated {
			t.Fatalf("Tolerates(%v, %v) = %v, the scheduler says %v", tolerations, taints, got, !untolerated)
		}
	})
}

func TestTolerationsCompareNumbers(t *testing.T) {
	taint := []corev1.Taint{{Key: "load", Value: "5", Effect: corev1.TaintEffectNoSchedule}}
	for _, tc := range []struct {
		op    corev1.TolerationOperator
		bound string
		want  bool
	}{
		{corev1.TolerationOpLt, "10", true},
		{corev1.TolerationOpLt, "5", false},
		{corev1.TolerationOpGt, "1", true},
		{corev1.TolerationOpGt, "x", false},
		{"Near", "5", false},
	} {
		if got := Tolerates([]corev1.Toleration{{Key: "load", Operator: tc.op, Value: tc.bound}}, taint); got != tc.want {
			t.Errorf("load=5 tolerated by %s %s: %v, want %v", tc.op, tc.bound, got, tc.want)
		}
	}
}

func TestDaemonRunsOn(t *testing.T) {
	ds := func(change func(*builders.PodBuilder)) *appsv1.DaemonSet {
		return builders.DaemonSet("kube-system", "agent").Requests("cpu", "100m").Template(change).Obj()
	}
	gpu := map[string]string{"gpu": "h100"}
	notReady := []corev1.Taint{{Key: corev1.TaintNodeNotReady, Effect: corev1.TaintEffectNoExecute}}
	tainted := []corev1.Taint{{Key: "gpu", Effect: corev1.TaintEffectNoSchedule}}
	for name, tc := range map[string]struct {
		ds     *appsv1.DaemonSet
		labels map[string]string
		taints []corev1.Taint
		want   bool
	}{
		"every node":             {ds(func(*builders.PodBuilder) {}), nil, nil, true},
		"not a tainted one":      {ds(func(*builders.PodBuilder) {}), nil, tainted, false},
		"a tainted one":          {ds(func(b *builders.PodBuilder) { b.Tolerates("gpu", "") }), nil, tainted, true},
		"a node that is not yet": {ds(func(*builders.PodBuilder) {}), nil, notReady, true},
		"selected":               {ds(func(b *builders.PodBuilder) { b.NodeSelector("gpu", "h100") }), gpu, nil, true},
		"not selected":           {ds(func(b *builders.PodBuilder) { b.NodeSelector("gpu", "a100") }), gpu, nil, false},
		"one of two terms": {ds(func(b *builders.PodBuilder) {
			b.NodeAffinity(builders.NodeExpr("gpu", corev1.NodeSelectorOpExists)).
				NodeAffinity(builders.NodeExpr("fpga", corev1.NodeSelectorOpExists))
		}), gpu, nil, true},
		"one node by name": {ds(func(b *builders.PodBuilder) {
			b.NodeAffinityTerm(corev1.NodeSelectorTerm{MatchFields: []corev1.NodeSelectorRequirement{
				builders.NodeExpr("metadata.name", corev1.NodeSelectorOpIn, "node-1"),
			}})
		}), gpu, nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			d := DaemonOf(tc.ds)
			if got := d.RunsOn(tc.labels, tc.taints); got != tc.want {
				t.Errorf("runs on a node with labels %v and taints %v: %v, want %v", tc.labels, tc.taints, got, tc.want)
			}
			if d.Resources["cpu"] != 100 {
				t.Errorf("resources %v, want 100m of CPU", d.Resources)
			}
		})
	}
}

func TestWhatKindOfPodItIs(t *testing.T) {
	pod := func() *builders.PodBuilder { return builders.Pod("ns", "p") }
	for name, tc := range map[string]struct {
		pod                      *corev1.Pod
		daemon, mirror, terminal bool
	}{
		"plain":           {pod: pod().Obj()},
		"of a DaemonSet":  {pod: pod().Daemon("agent").Obj(), daemon: true},
		"of a ReplicaSet": {pod: pod().Owner("ReplicaSet", "web").Obj()},
		"static":          {pod: pod().Mirror().Obj(), mirror: true},
		"running":         {pod: pod().Node("n").Obj()},
		"succeeded":       {pod: pod().Phase(corev1.PodSucceeded).Obj(), terminal: true},
		"failed":          {pod: pod().Phase(corev1.PodFailed).Obj(), terminal: true},
	} {
		t.Run(name, func(t *testing.T) {
			if IsDaemonPod(tc.pod) != tc.daemon || IsMirrorPod(tc.pod) != tc.mirror || IsTerminal(tc.pod) != tc.terminal {
				t.Errorf("daemon %v, mirror %v, terminal %v", IsDaemonPod(tc.pod), IsMirrorPod(tc.pod), IsTerminal(tc.pod))
			}
		})
	}
}
