package capacity

import (
	"cmp"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
)

// stateTaints are put on a node by Kubernetes for the state that it is in. They come and go and belong to no
// offering, so tolerating them changes nothing about which node to launch; the DaemonSet controller tolerates all of
// them.
var stateTaints = []string{
	corev1.TaintNodeNotReady,
	corev1.TaintNodeUnreachable,
	corev1.TaintNodeUnschedulable,
	corev1.TaintNodeMemoryPressure,
	corev1.TaintNodeDiskPressure,
	corev1.TaintNodePIDPressure,
	corev1.TaintNodeNetworkUnavailable,
}

// Tolerates reports whether the tolerations cover every NoSchedule and NoExecute taint. PreferNoSchedule keeps no pod
// away.
func Tolerates(tolerations []corev1.Toleration, taints []corev1.Taint) bool {
	return firstUntolerated(tolerations, taints) == nil
}

func firstUntolerated(tolerations []corev1.Toleration, taints []corev1.Taint) *corev1.Taint {
	for i := range taints {
		t := &taints[i]
		if t.Effect == corev1.TaintEffectPreferNoSchedule {
			continue
		}
		if !slices.ContainsFunc(tolerations, func(tol corev1.Toleration) bool { return tolerates(&tol, t) }) {
			return t
		}
	}
	return nil
}

func tolerates(tol *corev1.Toleration, taint *corev1.Taint) bool {
	if tol.Effect != "" && tol.Effect != taint.Effect {
		return false
	}
	if tol.Key != "" && tol.Key != taint.Key {
		return false
	}
	switch tol.Operator {
	case "", corev1.TolerationOpEqual:
		return tol.Value == taint.Value
	case corev1.TolerationOpExists:
		return true
	case corev1.TolerationOpLt:
		return taintCompares(taint.Value, OperatorLt, tol.Value)
	case corev1.TolerationOpGt:
		return taintCompares(taint.Value, OperatorGt, tol.Value)
	default:
		return false
	}
}

// taintCompares takes numbers as the scheduler does: both in their shortest form, with a minus sign or without.
func taintCompares(taint string, op Operator, bound string) bool {
	t, ok := decimal(taint)
	b, known := decimal(bound)
	if !ok || !known {
		return false
	}
	if op == OperatorGt {
		return t > b
	}
	return t < b
}

func decimal(s string) (int64, bool) {
	n, err := strconv.ParseInt(s, 10, 64)
	return n, err == nil && strconv.FormatInt(n, 10) == s
}

// canonicalTolerations sorts, removes duplicates and drops what decides nothing about a node to launch: tolerations
// of the taints that only describe a node's state, and those that run out (tolerationSeconds), with which a pod would
// be evicted again from a node whose taint stays. One that tolerates everything makes the others redundant.
func canonicalTolerations(in []corev1.Toleration) []corev1.Toleration {
	var out []corev1.Toleration
	for _, t := range in {
		if t.TolerationSeconds != nil || slices.Contains(stateTaints, t.Key) {
			continue
		}
		if t.Operator == "" {
			t.Operator = corev1.TolerationOpEqual
		}
		if t.Operator == corev1.TolerationOpExists {
			t.Value = ""
			if t.Key == "" && t.Effect == "" {
				return []corev1.Toleration{t}
			}
		}
		out = append(out, t)
	}
	slices.SortFunc(out, compareTolerations)
	return slices.CompactFunc(out, func(a, b corev1.Toleration) bool { return compareTolerations(a, b) == 0 })
}

func compareTolerations(a, b corev1.Toleration) int {
	return cmp.Or(
		cmp.Compare(a.Key, b.Key),
		cmp.Compare(a.Operator, b.Operator),
		cmp.Compare(a.Value, b.Value),
		cmp.Compare(a.Effect, b.Effect),
	)
}
