package capacity

import (
	"cmp"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourcehelper "k8s.io/component-helpers/resource"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
)

// Limits of the CapacityRequest schema that a pod can exceed where leaving out the rest is harmless: fewer
// alternatives mean a narrower choice of node, never a wrong one.
const maxAlternatives = 16

// maxAntiAffinity bounds the rules in the same way: with the rest left out a node may be planned too full, and the pods that
// do not fit stay pending and are planned again.
const maxAntiAffinity = 8

// ProfileOfPod gives what the pod needs of a node, in canonical form. It reads the spec only, never the status, so
// that a pod's profile is the same before and after it is bound. Zones of bound volumes are not in the pod: the
// caller adds them to Requirements and calls Canonical again.
//
// Requests are counted as the scheduler's NodeResourcesFit counts them: the greater of the containers (with sidecars)
// and the largest init container, pod-level resources instead where they are set, and the runtime's overhead on top.
func ProfileOfPod(pod *corev1.Pod) Profile {
	p := profileOfSpec(&pod.Spec)
	for i := range pod.Spec.TopologySpreadConstraints {
		c := &pod.Spec.TopologySpreadConstraints[i]
		s := Spread{TopologyKey: c.TopologyKey, MaxSkew: c.MaxSkew, WhenUnsatisfiable: c.WhenUnsatisfiable}
		if c.MinDomains != nil {
			s.MinDomains = *c.MinDomains
		}
		p.Spread = append(p.Spread, s)
	}
	p.AntiAffinity = append(antiAffinityOf(pod), HostPortsOf(&pod.Spec)...)
	p.AntiAffinity = p.AntiAffinity[:min(len(p.AntiAffinity), maxAntiAffinity)]
	p.Group = groupOf(pod)
	return p.Canonical()
}

// profileOfSpec holds what a pod and a pod template have in common.
func profileOfSpec(spec *corev1.PodSpec) Profile {
	var p Profile
	p.setSets(canonicalSets(requirementSetsOf(spec)))
	p.Alternatives = p.Alternatives[:min(len(p.Alternatives), maxAlternatives)]
	p.Resources = requestsOf(spec)
	if spec.Priority != nil {
		p.Priority = *spec.Priority
	}
	p.Tolerations = spec.Tolerations
	return p
}

func requestsOf(spec *corev1.PodSpec) Resources {
	return ResourcesOf(resourcehelper.PodRequests(&corev1.Pod{Spec: *spec}, resourcehelper.PodResourcesOptions{}))
}

// ProfileOfRequest gives what a CapacityRequest asks for, in canonical form.
func ProfileOfRequest(spec *fleetv1alpha1.CapacityRequestSpec) Profile {
	p := Profile{
		Requirements: requirementsFromAPI(spec.Requirements),
		Resources:    ResourcesOf(corev1.ResourceList(spec.Resources.Requests)),
		Priority:     spec.Priority,
		Tolerations:  spec.Tolerations,
	}
	for _, set := range spec.Alternatives {
		p.Alternatives = append(p.Alternatives, requirementsFromAPI(set.Requirements))
	}
	for _, s := range spec.TopologySpread {
		c := Spread{TopologyKey: s.TopologyKey, MaxSkew: s.MaxSkew, WhenUnsatisfiable: s.WhenUnsatisfiable}
		if s.MinDomains != nil {
			c.MinDomains = *s.MinDomains
		}
		p.Spread = append(p.Spread, c)
	}
	for _, a := range spec.AntiAffinity {
		p.AntiAffinity = append(p.AntiAffinity, AntiAffinity{TopologyKey: a.TopologyKey, Set: a.Set})
	}
	if g := spec.Group; g != nil {
		p.Group = &Group{Name: g.Name, MinCount: g.MinCount, TopologyKey: g.TopologyKey}
	}
	return p.Canonical()
}

func requirementsFromAPI(in []fleetv1alpha1.NodeSelectorRequirement) []Requirement {
	var out []Requirement
	for _, r := range in {
		out = append(out, Requirement{Key: r.Key, Operator: Operator(r.Operator), Values: r.Values})
	}
	return out
}

// RequestSpec is the inverse of ProfileOfRequest. Same requirements are left out: they exist on the wire only
// (section 8).
func (p Profile) RequestSpec() fleetv1alpha1.CapacityRequestSpec {
	p = p.Canonical()
	spec := fleetv1alpha1.CapacityRequestSpec{
		Requirements: requirementsToAPI(p.Requirements),
		Priority:     p.Priority,
		Tolerations:  p.Tolerations,
	}
	if len(p.Resources) > 0 {
		spec.Resources.Requests = fleetv1alpha1.ResourceList(p.Resources.List())
	}
	for _, set := range p.Alternatives {
		spec.Alternatives = append(spec.Alternatives, fleetv1alpha1.RequirementSet{Requirements: requirementsToAPI(set)})
	}
	for _, s := range p.Spread {
		t := fleetv1alpha1.TopologySpread{
			TopologyKey: s.TopologyKey, MaxSkew: s.MaxSkew, WhenUnsatisfiable: s.WhenUnsatisfiable,
		}
		if s.MinDomains > 0 {
			minDomains := s.MinDomains
			t.MinDomains = &minDomains
		}
		spec.TopologySpread = append(spec.TopologySpread, t)
	}
	for _, a := range p.AntiAffinity {
		spec.AntiAffinity = append(spec.AntiAffinity, fleetv1alpha1.AntiAffinity{TopologyKey: a.TopologyKey, Set: a.Set})
	}
	if g := p.Group; g != nil {
		spec.Group = &fleetv1alpha1.Group{Name: g.Name, MinCount: g.MinCount, TopologyKey: g.TopologyKey}
	}
	return spec
}

func requirementsToAPI(in []Requirement) []fleetv1alpha1.NodeSelectorRequirement {
	var out []fleetv1alpha1.NodeSelectorRequirement
	for _, r := range in {
		if r.Operator == OperatorSame {
			continue
		}
		out = append(out, fleetv1alpha1.NodeSelectorRequirement{
			Key: r.Key, Operator: corev1.NodeSelectorOperator(r.Operator), Values: r.Values,
		})
	}
	return out
}

// Canonical returns the same needs in the one form that equal needs share: sorted, without duplicates, redundant
// entries and zero amounts. Calling it again changes nothing. The result shares no memory that Canonical wrote to
// with p.
func (p Profile) Canonical() Profile {
	// Same stands beside the alternatives, not in one of them: it binds the need as a whole.
	var same, plain []Requirement
	for _, r := range p.Requirements {
		if r.Operator == OperatorSame {
			same = append(same, canonicalRequirement(r))
		} else {
			plain = append(plain, r)
		}
	}
	c := Profile{Resources: p.Resources.Clone(), Priority: p.Priority}
	if len(plain) > 0 {
		c.setSets(canonicalSets(append([][]Requirement{plain}, p.Alternatives...)))
	}
	if len(same) > 0 {
		c.Requirements = canonicalRequirements(append(slices.Clone(c.Requirements), same...))
	}
	c.Spread = canonicalSpread(p.Spread)
	c.Tolerations = canonicalTolerations(p.Tolerations)
	c.AntiAffinity = append(c.AntiAffinity, p.AntiAffinity...) // nil stays nil, and none becomes nil
	slices.SortFunc(c.AntiAffinity, func(a, b AntiAffinity) int {
		return cmp.Or(cmp.Compare(a.TopologyKey, b.TopologyKey), cmp.Compare(a.Set, b.Set))
	})
	c.AntiAffinity = slices.Compact(c.AntiAffinity)
	if g := p.Group; g != nil && (g.Name != "" || g.TopologyKey != "") {
		group := *g
		c.Group = &group
	}
	return c
}

func (p *Profile) setSets(sets [][]Requirement) {
	p.Requirements, p.Alternatives = nil, nil
	if len(sets) > 0 {
		p.Requirements = sets[0]
	}
	if len(sets) > 1 {
		p.Alternatives = sets[1:]
	}
}

func canonicalSpread(in []Spread) []Spread {
	out := append([]Spread(nil), in...)
	slices.SortFunc(out, func(a, b Spread) int {
		return cmp.Or(
			cmp.Compare(a.TopologyKey, b.TopologyKey),
			cmp.Compare(a.WhenUnsatisfiable, b.WhenUnsatisfiable),
			cmp.Compare(a.MaxSkew, b.MaxSkew),
			cmp.Compare(a.MinDomains, b.MinDomains),
		)
	})
	return slices.Compact(out)
}

// MatchesLabels reports whether a node with these labels meets Requirements or one of the Alternatives.
func (p Profile) MatchesLabels(labels map[string]string) bool {
	if MatchesAll(p.Requirements, labels) {
		return true
	}
	for _, set := range p.Alternatives {
		if MatchesAll(set, labels) {
			return true
		}
	}
	return false
}

// WithRequirements returns the profile with requirements added to every alternative, in canonical form: what a
// volume's zone does to a pod.
func (p Profile) WithRequirements(reqs ...Requirement) Profile {
	p.Requirements = append(slices.Clone(p.Requirements), reqs...)
	alternatives := make([][]Requirement, len(p.Alternatives))
	for i, set := range p.Alternatives {
		alternatives[i] = append(slices.Clone(set), reqs...)
	}
	p.Alternatives = alternatives
	return p.Canonical()
}

// WithAnyOf returns the profile with a further choice: a node has to meet one of the sets, beside what it had to meet
// before. No set at all changes nothing. Of more combinations than a request can carry only the first are kept.
func (p Profile) WithAnyOf(sets ...[]Requirement) Profile {
	if len(sets) == 0 {
		return p
	}
	var combined [][]Requirement
	for _, own := range append([][]Requirement{p.Requirements}, p.Alternatives...) {
		for _, set := range sets {
			combined = append(combined, slices.Concat(own, set))
		}
	}
	// What asks for two values of one label at once is met by no node. It stays only where there is nothing else.
	combined = canonicalSets(combined)
	if slices.ContainsFunc(combined, possible) {
		combined = slices.DeleteFunc(combined, func(set []Requirement) bool { return !possible(set) })
	}
	p.setSets(combined)
	p.Alternatives = p.Alternatives[:min(len(p.Alternatives), maxAlternatives)]
	return p.Canonical()
}

// possible reports whether no label of a canonical set has to be In two sets of values that share none.
func possible(set []Requirement) bool {
	for i := 1; i < len(set); i++ {
		if set[i].Key == set[i-1].Key && set[i].Operator == OperatorIn && set[i-1].Operator == OperatorIn {
			return false
		}
	}
	return true
}

// WithMinCount returns the profile with the group's minimum set; without a group it changes nothing. A pod does not
// say how many members its gang needs, so whoever knows the gang does.
func (p Profile) WithMinCount(n int32) Profile {
	if p.Group == nil {
		return p
	}
	g := *p.Group
	g.MinCount = n
	p.Group = &g
	return p
}
