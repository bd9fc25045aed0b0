package capacity

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
)

// Template is a kind of node that can be had, as far as an AvailableCapacity tells.
type Template struct {
	Name string
	// Labels that every node of the kind carries.
	Labels map[string]string
	// Requirements that the nodes' other labels will meet: a zone out of three.
	Requirements []Requirement
	Taints       []corev1.Taint
	Allocatable  Resources
}

// TemplateOf reads an AvailableCapacity. How many nodes there are at the moment plays no part: stock comes and goes,
// and a pod that waits for it has to be heard.
func TemplateOf(ac *fleetv1alpha1.AvailableCapacity) Template {
	t := Template{
		Name:         ac.Name,
		Labels:       map[string]string{},
		Requirements: canonicalRequirements(requirementsFromAPI(ac.Spec.Requirements)),
		Taints:       ac.Spec.NodeTemplate.Taints,
		Allocatable:  ResourcesOf(corev1.ResourceList(ac.Spec.Resources)),
	}
	for _, r := range t.Requirements {
		if r.Operator == OperatorIn && len(r.Values) == 1 {
			t.Labels[r.Key] = r.Values[0]
		}
	}
	for key, value := range ac.Spec.NodeTemplate.Labels {
		t.Labels[key] = value
	}
	return t
}

// Yields reports whether a node with these labels is of the kind.
func (t Template) Yields(labels map[string]string) bool {
	for key, value := range t.Labels {
		if labels[key] != value {
			return false
		}
	}
	return MatchesAll(t.Requirements, labels)
}

// CouldMeet reports whether a node of the kind can meet the requirement. A label that the template does not mention
// is not there, except for those that a kubelet puts on every node: the hostname, which nobody knows beforehand, and the
// system, which may be the one that is asked for.
func (t Template) CouldMeet(r Requirement) bool {
	if _, known := t.Labels[r.Key]; known {
		return r.Matches(t.Labels)
	}
	if r.Key == corev1.LabelHostname {
		return r.Operator == OperatorExists || r.Operator == OperatorNotIn || r.Operator == OperatorSame
	}
	mentioned := false
	for _, own := range t.Requirements {
		if own.Key != r.Key {
			continue
		}
		mentioned = true
		if !overlaps(own, r) {
			return false
		}
	}
	switch {
	case mentioned:
		return true
	case r.Key == corev1.LabelOSStable || r.Key == corev1.LabelArchStable:
		return r.Operator != OperatorDoesNotExist
	default:
		return r.Matches(nil)
	}
}

// overlaps reports whether a node that meets what a template promises of a label can meet what is asked of it as
// well.
func overlaps(promised, asked Requirement) bool {
	matches := func(value string) bool { return asked.Matches(map[string]string{asked.Key: value}) }
	switch promised.Operator {
	case OperatorIn:
		return slices.ContainsFunc(promised.Values, matches)
	case OperatorDoesNotExist:
		return asked.Matches(nil)
	case OperatorNotIn:
		if asked.Operator == OperatorIn {
			return slices.ContainsFunc(asked.Values, func(v string) bool { return !slices.Contains(promised.Values, v) })
		}
		return true
	default: // Exists, Gt, Lt: there is some value.
		return asked.Operator != OperatorDoesNotExist
	}
}

func (t Template) unmet(reqs []Requirement) []Requirement {
	var out []Requirement
	for _, r := range reqs {
		if !t.CouldMeet(r) {
			out = append(out, r)
		}
	}
	return out
}

// nearestUnmet gives what is lacking in the alternative that lacks least; none means that the labels will do.
func (t Template) nearestUnmet(p Profile) []Requirement {
	least := t.unmet(p.Requirements)
	for _, set := range p.Alternatives {
		if unmet := t.unmet(set); len(unmet) < len(least) {
			least = unmet
		}
	}
	return least
}

// noTemplate holds the templates against the whole profile, as a new node has to pass every filter. It follows the
// order in which people think of it: labels, taints, size, topology labels.
func noTemplate(p Profile, templates []Template, topologyLabelMissing bool) *Decision {
	if templates == nil {
		return nil
	}
	if len(templates) == 0 {
		return no(ReasonNoOffering, "no AvailableCapacity exists: the autoscaler offers no nodes at all")
	}
	fit := slices.Clone(templates)
	slices.SortFunc(fit, func(a, b Template) int { return cmp.Compare(a.Name, b.Name) })
	var d *Decision
	for _, narrow := range []func(Profile, []Template) ([]Template, *Decision){withLabels, withTaints, withRoom} {
		if fit, d = narrow(p, fit); d != nil {
			return d
		}
	}
	if !topologyLabelMissing {
		return nil
	}
	_, d = withTopology(p, fit)
	return d
}

func withLabels(p Profile, in []Template) (out []Template, d *Decision) {
	var nearest Template
	var lacking []Requirement
	for _, t := range in {
		unmet := t.nearestUnmet(p)
		if len(unmet) == 0 {
			out = append(out, t)
			continue
		}
		if lacking == nil || len(unmet) < len(lacking) {
			nearest, lacking = t, unmet
		}
	}
	if len(out) > 0 {
		return out, nil
	}
	texts := make([]string, len(lacking))
	for i, r := range lacking {
		texts[i] = r.String()
	}
	return nil, no(ReasonNoOfferingMatches,
		"no offering meets the pod's node selector, affinity and volumes; the nearest, %s, fails %s",
		nearest.Name, strings.Join(texts, ", "))
}

func withTaints(p Profile, in []Template) (out []Template, d *Decision) {
	for _, t := range in {
		if Tolerates(p.Tolerations, t.Taints) {
			out = append(out, t)
		}
	}
	if len(out) > 0 {
		return out, nil
	}
	taint := firstUntolerated(p.Tolerations, in[0].Taints)
	return nil, no(ReasonNoOfferingTolerated,
		"the pod tolerates the taints of no offering that it could use; %s carries %s", in[0].Name, taint.ToString())
}

func withRoom(p Profile, in []Template) (out []Template, d *Decision) {
	nearest, lacking := in[0], p.Resources.Lacking(in[0].Allocatable)
	for _, t := range in {
		l := p.Resources.Lacking(t.Allocatable)
		if len(l) == 0 {
			out = append(out, t)
		}
		if len(l) < len(lacking) || len(l) == len(lacking) && larger(t, nearest, l) {
			nearest, lacking = t, l
		}
	}
	if len(out) > 0 {
		return out, nil
	}
	asked, has := p.Resources.Strings(), nearest.Allocatable.Strings()
	texts := make([]string, len(lacking))
	for i, name := range lacking {
		texts[i] = fmt.Sprintf("%s of %s where it has %s", asked[string(name)], name, cmp.Or(has[string(name)], "none"))
	}
	return nil, no(ReasonNoOfferingLargeEnough,
		"the pod is larger than any offering that it could use; of the nearest, %s, it asks %s",
		nearest.Name, strings.Join(texts, ", "))
}

// larger reports whether a has more than b of the first resource that is lacking.
func larger(a, b Template, lacking []corev1.ResourceName) bool {
	return len(lacking) > 0 && a.Allocatable[lacking[0]] > b.Allocatable[lacking[0]]
}

func withTopology(p Profile, in []Template) (out []Template, d *Decision) {
	for _, s := range p.Spread {
		if s.WhenUnsatisfiable != corev1.DoNotSchedule {
			continue
		}
		out = nil
		for _, t := range in {
			if t.CouldMeet(Requirement{Key: s.TopologyKey, Operator: OperatorExists}) {
				out = append(out, t)
			}
		}
		if len(out) == 0 {
			return nil, no(ReasonNoOfferingHasTopology,
				"the pod has to be spread over %s, and no offering that it could use has that label", s.TopologyKey)
		}
		in = out
	}
	return in, nil
}
