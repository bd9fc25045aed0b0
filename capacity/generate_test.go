package capacity

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"github.com/drover-sh/drover/internal/builders"
)

// Small sets of names, so that generated objects often share parts.
var (
	genKeys   = []string{corev1.LabelTopologyZone, "topology.kubernetes.io/rack", "disk", "gpu", corev1.LabelHostname}
	genValues = []string{"a", "b", "c", "1", "20"}
)

func genSelectorRequirement(t *rapid.T) corev1.NodeSelectorRequirement {
	key := rapid.SampledFrom(genKeys).Draw(t, "key")
	op := rapid.SampledFrom([]corev1.NodeSelectorOperator{
		corev1.NodeSelectorOpIn, corev1.NodeSelectorOpNotIn, corev1.NodeSelectorOpExists,
		corev1.NodeSelectorOpDoesNotExist, corev1.NodeSelectorOpGt, corev1.NodeSelectorOpLt,
	}).Draw(t, "operator")
	var values []string
	switch op {
	case corev1.NodeSelectorOpIn, corev1.NodeSelectorOpNotIn:
		values = rapid.SliceOfN(rapid.SampledFrom(genValues), 1, 4).Draw(t, "values")
	case corev1.NodeSelectorOpGt, corev1.NodeSelectorOpLt:
		values = []string{rapid.SampledFrom([]string{"-3", "0", "1", "20"}).Draw(t, "bound")}
	}
	return builders.NodeExpr(key, op, values...)
}

func genToleration(t *rapid.T) corev1.Toleration {
	tol := corev1.Toleration{
		Key: rapid.SampledFrom([]string{"gpu", "team", corev1.TaintNodeNotReady, ""}).Draw(t, "taint"),
		Effect: rapid.SampledFrom([]corev1.TaintEffect{
			"", corev1.TaintEffectNoSchedule, corev1.TaintEffectNoExecute,
		}).Draw(t, "effect"),
	}
	if tol.Key == "" || rapid.Bool().Draw(t, "exists") {
		tol.Operator = corev1.TolerationOpExists
		return tol
	}
	tol.Operator = rapid.SampledFrom([]corev1.TolerationOperator{"", corev1.TolerationOpEqual}).Draw(t, "tolOp")
	tol.Value = rapid.SampledFrom(genValues).Draw(t, "tolValue")
	if tol.Effect == corev1.TaintEffectNoExecute && rapid.Bool().Draw(t, "runsOut") {
		seconds := int64(300)
		tol.TolerationSeconds = &seconds
	}
	return tol
}

func genResources(t *rapid.T) corev1.ResourceList {
	list := corev1.ResourceList{}
	for _, pair := range rapid.SliceOfN(rapid.SampledFrom([][2]string{
		{"cpu", "1"}, {"cpu", "250m"}, {"cpu", "100u"}, {"memory", "1Gi"}, {"memory", "1500M"}, {"memory", "0.5"},
		{"ephemeral-storage", "10Gi"}, {"nvidia.com/gpu", "8"}, {"cpu", "0"}, {"hugepages-2Mi", "4Mi"},
	}), 0, 4).Draw(t, "requests") {
		for name, q := range builders.Resources(pair[0], pair[1]) {
			list[name] = q
		}
	}
	return list
}

func genTerm(t *rapid.T) corev1.PodAffinityTerm {
	term := corev1.PodAffinityTerm{
		TopologyKey: rapid.SampledFrom(genKeys).Draw(t, "topologyKey"),
		LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{
			"app": rapid.SampledFrom([]string{"web", "db"}).Draw(t, "app"),
		}},
	}
	if rapid.Bool().Draw(t, "hasNamespaces") {
		term.Namespaces = []string{"shop", "bank"}
	}
	return term
}

// genPod draws a pod that uses everything that a profile depends on.
func genPod(t *rapid.T) *corev1.Pod {
	b := builders.Pod("shop", "pod").Label("app", "web").Priority(rapid.Int32Range(-5, 5).Draw(t, "priority"))
	pod := b.Obj()
	pod.Spec.Containers[0].Resources.Requests = genResources(t)
	pod.Spec.Overhead = genResources(t)
	pod.Spec.NodeSelector =
		rapid.MapOfN(rapid.SampledFrom(genKeys), rapid.SampledFrom(genValues), 0, 2).Draw(t, "selector")
	pod.Spec.Tolerations = rapid.SliceOfN(rapid.Custom(genToleration), 0, 4).Draw(t, "tolerations")
	pod.Spec.Affinity = &corev1.Affinity{PodAffinity: &corev1.PodAffinity{}, PodAntiAffinity: &corev1.PodAntiAffinity{}}
	terms := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) corev1.NodeSelectorTerm {
		term := corev1.NodeSelectorTerm{
			MatchExpressions: rapid.SliceOfN(rapid.Custom(genSelectorRequirement), 0, 4).Draw(t, "expressions"),
		}
		if rapid.Float64Range(0, 1).Draw(t, "byName") < 0.1 {
			term.MatchFields = []corev1.NodeSelectorRequirement{
				builders.NodeExpr("metadata.name", corev1.NodeSelectorOpIn, "node-1"),
			}
		}
		return term
	}), 0, 4).Draw(t, "terms")
	if len(terms) > 0 {
		pod.Spec.Affinity.NodeAffinity = &corev1.NodeAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: terms},
		}
	}
	pod.Spec.Affinity.PodAffinity.RequiredDuringSchedulingIgnoredDuringExecution =
		rapid.SliceOfN(rapid.Custom(genTerm), 0, 3).Draw(t, "affinity")
	pod.Spec.Affinity.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution =
		rapid.SliceOfN(rapid.Custom(genTerm), 0, 3).Draw(t, "antiAffinity")
	pod.Spec.TopologySpreadConstraints = rapid.SliceOfN(rapid.Custom(func(t *rapid.T) corev1.TopologySpreadConstraint {
		c := corev1.TopologySpreadConstraint{
			TopologyKey: rapid.SampledFrom(genKeys).Draw(t, "spreadKey"),
			MaxSkew:     rapid.Int32Range(1, 3).Draw(t, "maxSkew"),
			WhenUnsatisfiable: rapid.SampledFrom([]corev1.UnsatisfiableConstraintAction{
				corev1.DoNotSchedule, corev1.ScheduleAnyway,
			}).Draw(t, "when"),
		}
		if rapid.Bool().Draw(t, "hasMinDomains") {
			n := rapid.Int32Range(1, 3).Draw(t, "minDomains")
			c.MinDomains = &n
		}
		return c
	}), 0, 3).Draw(t, "spread")
	switch rapid.IntRange(0, 4).Draw(t, "group") {
	case 0:
		pod.Labels[LabelPodGroup] = "gang"
	case 1:
		name := "gang"
		pod.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: &name}
	case 2:
		pod.Annotations = map[string]string{AnnotationRequiredTopology: "topology.kubernetes.io/rack"}
	}
	return pod
}

// shuffled returns the same pod with every list in another order.
func shuffled(t *rapid.T, pod *corev1.Pod) *corev1.Pod {
	p := pod.DeepCopy()
	p.Spec.Tolerations = permuted(t, p.Spec.Tolerations)
	p.Spec.TopologySpreadConstraints = permuted(t, p.Spec.TopologySpreadConstraints)
	a := p.Spec.Affinity
	a.PodAffinity.RequiredDuringSchedulingIgnoredDuringExecution =
		permuted(t, a.PodAffinity.RequiredDuringSchedulingIgnoredDuringExecution)
	a.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution =
		permuted(t, a.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution)
	if a.NodeAffinity != nil {
		terms := a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
		for i := range terms {
			terms[i].MatchExpressions = permuted(t, terms[i].MatchExpressions)
			for j := range terms[i].MatchExpressions {
				terms[i].MatchExpressions[j].Values = permuted(t, terms[i].MatchExpressions[j].Values)
			}
		}
		a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms = permuted(t, terms)
	}
	return p
}

func permuted[T any](t *rapid.T, in []T) []T {
	if len(in) < 2 {
		return in
	}
	return rapid.Permutation(in).Draw(t, "order")
}

func genLabels(t *rapid.T) map[string]string {
	return rapid.MapOfN(rapid.SampledFrom(genKeys), rapid.SampledFrom(genValues), 0, 5).Draw(t, "labels")
}

func uid(n int) types.UID { return types.UID(fmt.Sprintf("uid-%d", n)) }
