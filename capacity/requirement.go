package capacity

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// fieldNodeName is the one node field that a node selector can name. As a Requirement it stands for a label that no
// node carries: a pod that is tied to one node by name is helped by no new node.
const fieldNodeName = "metadata.name"

// MatchesAll reports whether a node with these labels meets every requirement. Same relates nodes to each other and
// is ignored here; an unknown operator is met by nothing.
func MatchesAll(reqs []Requirement, labels map[string]string) bool {
	for i := range reqs {
		if !reqs[i].Matches(labels) {
			return false
		}
	}
	return true
}

// Matches reports whether a node with these labels meets the requirement, by the scheduler's rules: NotIn and
// DoesNotExist are met by a node without the label, Gt and Lt compare integers.
func (r Requirement) Matches(labels map[string]string) bool {
	value, has := labels[r.Key]
	switch r.Operator {
	case OperatorIn:
		return has && slices.Contains(r.Values, value)
	case OperatorNotIn:
		return !has || !slices.Contains(r.Values, value)
	case OperatorExists:
		return has
	case OperatorDoesNotExist:
		return !has
	case OperatorGt, OperatorLt:
		return has && len(r.Values) == 1 && compares(value, r.Operator, r.Values[0])
	case OperatorSame:
		return true
	default:
		return false
	}
}

// compares follows the scheduler, for which a bound has to be a label's value: with a sign, it is met by nothing.
func compares(label string, op Operator, bound string) bool {
	if strings.HasPrefix(bound, "-") || strings.HasPrefix(bound, "+") {
		return false
	}
	l, err := strconv.ParseInt(label, 10, 64)
	if err != nil {
		return false
	}
	b, err := strconv.ParseInt(bound, 10, 64)
	if err != nil {
		return false
	}
	if op == OperatorGt {
		return l > b
	}
	return l < b
}

// String gives the requirement as a person would write it: "zone in [a b]", "gpu exists".
func (r Requirement) String() string {
	switch r.Operator {
	case OperatorExists:
		return r.Key + " exists"
	case OperatorDoesNotExist:
		return r.Key + " does not exist"
	case OperatorSame:
		if len(r.Values) == 0 {
			return r.Key + " same"
		}
	}
	s := r.Key + " " + string(r.Operator) + " ["
	for i, v := range r.Values {
		if i > 0 {
			s += " "
		}
		s += v
	}
	return s + "]"
}

func compareRequirements(a, b Requirement) int {
	return cmp.Or(
		cmp.Compare(a.Key, b.Key),
		cmp.Compare(a.Operator, b.Operator),
		slices.Compare(a.Values, b.Values),
	)
}

func compareRequirementSets(a, b []Requirement) int {
	return slices.CompareFunc(a, b, compareRequirements)
}

// canonicalRequirements sorts a set of ANDed requirements and takes out what adds nothing: In of one key are
// intersected (kept side by side where nothing is left, which no node meets), NotIn united, duplicates removed, and
// Exists dropped beside an In.
func canonicalRequirements(reqs []Requirement) []Requirement {
	var out []Requirement
	in := map[string][]Requirement{}
	notIn := map[string][]string{}
	for _, r := range reqs {
		r = canonicalRequirement(r)
		switch r.Operator {
		case OperatorIn:
			in[r.Key] = append(in[r.Key], r)
		case OperatorNotIn:
			notIn[r.Key] = append(notIn[r.Key], r.Values...)
		default:
			out = append(out, r)
		}
	}
	out = slices.DeleteFunc(out, func(r Requirement) bool {
		return r.Operator == OperatorExists && len(in[r.Key]) > 0
	})
	for key, same := range in {
		common := same[0].Values
		for _, r := range same[1:] {
			common = intersect(common, r.Values)
		}
		if len(common) == 0 {
			out = append(out, same...)
			continue
		}
		out = append(out, Requirement{Key: key, Operator: OperatorIn, Values: common})
	}
	for key, values := range notIn {
		out = append(out, Requirement{Key: key, Operator: OperatorNotIn, Values: sortedUnique(values)})
	}
	slices.SortFunc(out, compareRequirements)
	return slices.CompactFunc(out, func(a, b Requirement) bool { return compareRequirements(a, b) == 0 })
}

func canonicalRequirement(r Requirement) Requirement {
	switch r.Operator {
	case OperatorExists, OperatorDoesNotExist:
		r.Values = nil
	default:
		r.Values = sortedUnique(r.Values)
	}
	return r
}

func intersect(a, b []string) []string {
	var both []string
	for _, v := range a {
		if slices.Contains(b, v) {
			both = append(both, v)
		}
	}
	return both
}

// requirementSetsOf gives the ORed sets of ANDed requirements that a pod's nodeSelector and required node affinity
// put on a node. None at all: every node will do.
func requirementSetsOf(spec *corev1.PodSpec) [][]Requirement {
	var base []Requirement
	for key, value := range spec.NodeSelector {
		base = append(base, Requirement{Key: key, Operator: OperatorIn, Values: []string{value}})
	}
	selector := requiredNodeAffinity(spec)
	if selector == nil {
		if len(base) == 0 {
			return nil
		}
		return [][]Requirement{base}
	}
	var sets [][]Requirement
	for i := range selector.NodeSelectorTerms {
		term := &selector.NodeSelectorTerms[i]
		if len(term.MatchExpressions)+len(term.MatchFields) == 0 {
			continue // An empty term selects nothing.
		}
		sets = append(sets, append(slices.Clone(base), requirementsOfTerm(term)...))
	}
	if len(sets) == 0 {
		// Terms that select nothing exclude every node.
		sets = append(sets, append(base, Requirement{Key: fieldNodeName, Operator: OperatorExists}))
	}
	return sets
}

func requiredNodeAffinity(spec *corev1.PodSpec) *corev1.NodeSelector {
	if spec.Affinity == nil || spec.Affinity.NodeAffinity == nil {
		return nil
	}
	return spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
}

func requirementsOfTerm(term *corev1.NodeSelectorTerm) []Requirement {
	var reqs []Requirement
	for _, e := range term.MatchExpressions {
		reqs = append(reqs, Requirement{Key: e.Key, Operator: Operator(e.Operator), Values: e.Values})
	}
	for _, f := range term.MatchFields {
		// A new node is none of the nodes that NotIn excludes by name.
		if f.Operator == corev1.NodeSelectorOpNotIn {
			continue
		}
		reqs = append(reqs, Requirement{Key: f.Key, Operator: Operator(f.Operator), Values: f.Values})
	}
	return reqs
}

// canonicalSets sorts ORed sets and removes duplicates. A set without requirements is met by every node and makes the
// others redundant; the result is then nil.
func canonicalSets(sets [][]Requirement) [][]Requirement {
	out := make([][]Requirement, 0, len(sets))
	for _, s := range sets {
		c := canonicalRequirements(s)
		if len(c) == 0 {
			return nil
		}
		out = append(out, c)
	}
	slices.SortFunc(out, compareRequirementSets)
	return slices.CompactFunc(out, func(a, b []Requirement) bool { return compareRequirementSets(a, b) == 0 })
}
