package capacity

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// Rejection is one way in which the scheduler turned nodes down, as it tells a PostFilter plugin. The scheduler
// records only the first filter that failed on a node, so that what a rejection does not say is not known to be met.
type Rejection struct {
	// Plugin that rejected. Empty: a PreFilterResult left the nodes out before any plugin looked at them, an extender
	// rejected, or nobody knows.
	Plugin string
	// Reason in the plugin's words.
	Reason string
	// Unresolvable: the plugin says that evicting pods would not help (UnschedulableAndUnresolvable).
	Unresolvable bool
	// Nodes that were rejected so.
	Nodes int32
}

// VolumeState is what has become of a claim that a pod mounts.
type VolumeState string

// States of a Volume.
const (
	VolumeBound   VolumeState = "Bound"
	VolumeDelayed VolumeState = "Delayed" // binds with its first consumer
	// VolumeProvisioning binds with its first consumer, and is being made for a node that the scheduler chose before.
	VolumeProvisioning VolumeState = "Provisioning"
	VolumeUnbound      VolumeState = "Unbound"     // binds immediately, and has not
	VolumeNoClaim      VolumeState = "NoClaim"     // there is no such claim
	VolumeLost         VolumeState = "Lost"        // bound to a volume that does not exist
	VolumeTerminating  VolumeState = "Terminating" // the claim is being deleted
)

// Volume is one claim that a pod mounts.
type Volume struct {
	Claim string
	State VolumeState
	// Ephemeral claims are made by a controller shortly after the pod.
	Ephemeral bool
	// Requirements on the node: the bound volume's place, or the class's allowed topology.
	Requirements []Requirement
	// AnyOf are sets of requirements of which the node has to meet one, too: a volume in several places, or a class with
	// several topologies.
	AnyOf [][]Requirement
}

// WithVolumes returns the profile with the places of the pod's volumes added, in canonical form.
func (p Profile) WithVolumes(volumes []Volume) Profile {
	for _, v := range volumes {
		if len(v.Requirements) > 0 {
			p = p.WithRequirements(v.Requirements...)
		}
		p = p.WithAnyOf(v.AnyOf...)
	}
	return p
}

// Affinity is what is known of the pods that one term of a pod's required affinity selects.
type Affinity struct {
	// Matched: at least one such pod has a node.
	Matched bool
	// Domains are the values of the term's topology key where they stand; none: not known, or left open because the pods
	// are of the pod's own set, whose group says that they stay together.
	Domains []string
}

// Facts is what Classify knows beside the pod. What is nil is not known and speaks neither for nor against a new
// node.
type Facts struct {
	// Rejections are what the scheduler said; nil for a caller that did not see the scheduling cycle.
	Rejections []Rejection
	// Templates of the nodes that can be had. Nil: not known, every template is taken to match. Empty: there is none.
	Templates []Template
	Volumes   []Volume
	// Affinity has one entry for each term of the pod's required pod affinity, in the pod's order.
	Affinity []Affinity
	// MissingClaims names ResourceClaims, or DeviceClasses, that the pod needs and that do not exist.
	MissingClaims []string
}

// Decision says whether a new node could help a pod.
type Decision struct {
	// Request is true when a new node could help, and a CapacityRequest should be written.
	Request bool
	// Silent is true when there is nothing to tell anyone either: the pod is not waiting for a node, or not yet.
	Silent bool
	// Reason is one of the Reason constants, fit for an event or a metric's label.
	Reason string
	// Message says what is in the way and what a person can do about it.
	Message string
	// ExtraRequirements are to be added to the pod's profile and its volumes' places: the domains of the pods that it has
	// to stand with.
	ExtraRequirements []Requirement
}

// Reasons of a Decision. They are stable.
const (
	// ReasonNewNodeHelps is the one reason of a request.
	ReasonNewNodeHelps = "NewNodeHelps"

	// Silent reasons: the pod is not waiting for a node now.
	ReasonTerminating  = "Terminating"
	ReasonEnded        = "Ended"
	ReasonResizing     = "Resizing"
	ReasonGated        = "Gated"
	ReasonGroupWaiting = "GroupWaiting"
	ReasonClaimPending = "ClaimPending"

	// The pod can stand only where no new node will be.
	ReasonNodeNameSet    = "NodeNameSet"
	ReasonTiedToNode     = "TiedToNode"
	ReasonTiedToPods     = "TiedToPods"
	ReasonNoMatchingPods = "NoMatchingPods"
	ReasonNodesExcluded  = "NodesExcluded"

	// Storage or devices have to change first.
	ReasonVolumeClaimMissing     = "VolumeClaimMissing"
	ReasonVolumeClaimUnbound     = "VolumeClaimUnbound"
	ReasonVolumeClaimTerminating = "VolumeClaimTerminating"
	ReasonVolumeMissing          = "VolumeMissing"
	ReasonVolumeInUse            = "VolumeInUse"
	ReasonResourceClaimMissing   = "ResourceClaimMissing"
	ReasonResourceClaimInUse     = "ResourceClaimInUse"

	// The pod or the cluster has to change first.
	ReasonPodInvalid          = "PodInvalid"
	ReasonOverQuota           = "OverQuota"
	ReasonNodeFeaturesMissing = "NodeFeaturesMissing"

	// No offering fits.
	ReasonNoOffering            = "NoOffering"
	ReasonNoOfferingMatches     = "NoOfferingMatches"
	ReasonNoOfferingTolerated   = "NoOfferingTolerated"
	ReasonNoOfferingLargeEnough = "NoOfferingLargeEnough"
	ReasonNoOfferingHasTopology = "NoOfferingHasTopology"
)

// Classify decides whether a new node could help a pod that failed to schedule. It looks at what a new node would
// change and not at the words of the failure: a pod that is short of CPU on one node and tied to another by name is
// not helped.
//
// The order is: is the pod waiting for a node at all; is it tied to what exists; do its volumes, devices and affinity
// allow any node; did the scheduler name something that no node changes; does a template fit; did it name anything
// that a node does change. A fact that is not known never decides against the pod.
func Classify(pod *corev1.Pod, facts Facts) Decision {
	extra := extraRequirements(pod, facts)
	profile := ProfileOfPod(pod).WithVolumes(facts.Volumes).WithRequirements(extra...)
	missingLabel := topologyLabelMissing(facts.Rejections)
	for _, check := range []func() *Decision{
		func() *Decision { return notWaiting(pod) },
		func() *Decision { return tied(pod, profile) },
		func() *Decision { return volumesForbid(facts.Volumes) },
		func() *Decision { return claimsForbid(facts.MissingClaims) },
		func() *Decision { return affinityForbids(pod, facts.Affinity) },
		func() *Decision { return rejectionsForbid(facts.Rejections) },
		func() *Decision { return noTemplate(profile, facts.Templates, missingLabel) },
		func() *Decision { return nothingHelps(facts.Rejections) },
	} {
		if d := check(); d != nil {
			return *d
		}
	}
	return Decision{
		Request:           true,
		Reason:            ReasonNewNodeHelps,
		Message:           helpMessage(facts.Rejections),
		ExtraRequirements: extra,
	}
}

func no(reason, format string, args ...any) *Decision {
	return &Decision{Reason: reason, Message: fmt.Sprintf(format, args...)}
}

func silent(reason, format string, args ...any) *Decision {
	d := no(reason, format, args...)
	d.Silent = true
	return d
}

func notWaiting(pod *corev1.Pod) *Decision {
	switch {
	case pod.DeletionTimestamp != nil:
		return silent(ReasonTerminating, "the pod is being deleted")
	case IsTerminal(pod):
		return silent(ReasonEnded, "the pod has ended in phase %s", pod.Status.Phase)
	case pod.Spec.NodeName != "" && resizing(pod):
		return silent(ReasonResizing, "the pod is on node %q and is only being resized", pod.Spec.NodeName)
	case pod.Spec.NodeName != "":
		return no(ReasonNodeNameSet, "spec.nodeName is %q, so no scheduler places the pod and it can run on that node "+
			"only; create it again without spec.nodeName", pod.Spec.NodeName)
	case len(pod.Spec.SchedulingGates) > 0:
		return silent(ReasonGated, "the pod is held by the scheduling gate %q", pod.Spec.SchedulingGates[0].Name)
	}
	return nil
}

func resizing(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return (c.Type == corev1.PodResizePending || c.Type == corev1.PodResizeInProgress) && c.Status == corev1.ConditionTrue
	})
}

// tied finds pods whose every set of requirements names nodes that exist, by field or by hostname label: a new node
// has another name.
func tied(pod *corev1.Pod, profile Profile) *Decision {
	sets := append([][]Requirement{profile.Requirements}, profile.Alternatives...)
	var names Requirement
	for _, set := range sets {
		at := slices.IndexFunc(set, namesNodes)
		if at < 0 {
			return nil
		}
		names = set[at]
	}
	if len(names.Values) == 0 {
		return no(ReasonTiedToNode, "the pod's required node affinity has no term that selects a node")
	}
	if slices.ContainsFunc(requirementSetsOf(&pod.Spec), func(set []Requirement) bool {
		return slices.ContainsFunc(set, namesNodes)
	}) {
		return no(ReasonTiedToNode, "the pod's node selector or affinity asks for %s, and no new node has that name; "+
			"correct it", names)
	}
	return no(ReasonTiedToNode, "a volume of the pod is on a node itself (%s), and the pod can run there only; "+
		"make room there, or use another volume", names)
}

func namesNodes(r Requirement) bool {
	return r.Key == fieldNodeName || r.Key == corev1.LabelHostname && r.Operator == OperatorIn
}

// extraRequirements are the domains of the pods that the pod has to stand with, where they are known.
func extraRequirements(pod *corev1.Pod, facts Facts) []Requirement {
	var reqs []Requirement
	terms := requiredAffinity(pod)
	if len(facts.Affinity) == len(terms) {
		for i := range terms {
			// A domain of one node is judged by affinityForbids: no request can be met there.
			if a := facts.Affinity[i]; len(a.Domains) > 0 && terms[i].TopologyKey != corev1.LabelHostname {
				reqs = append(reqs, Requirement{Key: terms[i].TopologyKey, Operator: OperatorIn, Values: a.Domains})
			}
		}
	}
	return canonicalRequirements(reqs)
}

func requiredAffinity(pod *corev1.Pod) []corev1.PodAffinityTerm {
	if pod.Spec.Affinity == nil || pod.Spec.Affinity.PodAffinity == nil {
		return nil
	}
	return pod.Spec.Affinity.PodAffinity.RequiredDuringSchedulingIgnoredDuringExecution
}

func volumesForbid(volumes []Volume) *Decision {
	for _, v := range volumes {
		switch v.State {
		case VolumeNoClaim:
			if v.Ephemeral {
				return silent(ReasonClaimPending, "the PersistentVolumeClaim %q of an ephemeral volume is not made yet", v.Claim)
			}
			return no(ReasonVolumeClaimMissing, "the PersistentVolumeClaim %q does not exist: create it", v.Claim)
		case VolumeLost:
			return no(ReasonVolumeMissing, "the PersistentVolumeClaim %q is bound to a PersistentVolume that does not exist",
				v.Claim)
		case VolumeTerminating:
			return no(ReasonVolumeClaimTerminating, "the PersistentVolumeClaim %q is being deleted", v.Claim)
		case VolumeProvisioning:
			return silent(ReasonClaimPending, "the volume of PersistentVolumeClaim %q is being made for a node that was chosen",
				v.Claim)
		case VolumeUnbound:
			return no(ReasonVolumeClaimUnbound, "the PersistentVolumeClaim %q is not bound, and its StorageClass does not wait "+
				"for a node: see the claim's events", v.Claim)
		}
	}
	return nil
}

func claimsForbid(missing []string) *Decision {
	if len(missing) == 0 {
		return nil
	}
	return no(ReasonResourceClaimMissing, "the pod needs devices by way of %s, which does not exist",
		strings.Join(missing, ", "))
}

// affinityForbids follows the scheduler: a term has to be met by a pod that runs; only where none matches at all, a
// pod that matches all of its own terms may be the first.
func affinityForbids(pod *corev1.Pod, known []Affinity) *Decision {
	terms := requiredAffinity(pod)
	if len(known) != len(terms) {
		return nil
	}
	first := true
	for i := range terms {
		first = first && matchesSelf(&terms[i], pod)
	}
	for i := range terms {
		switch {
		case !known[i].Matched && !first:
			return no(ReasonNoMatchingPods, "the pod's required affinity on %s selects no pod that runs, and not the pod "+
				"itself: start those pods first, or correct the selector", terms[i].TopologyKey)
		case known[i].Matched && terms[i].TopologyKey == corev1.LabelHostname:
			return no(ReasonTiedToPods, "the pod has to stand on the node of the pods that its required affinity selects: "+
				"only room on that node helps")
		}
	}
	return nil
}

func topologyLabelMissing(rejections []Rejection) bool {
	return slices.ContainsFunc(rejections, func(r Rejection) bool {
		return r.Plugin == pluginPodTopologySpread && strings.Contains(r.Reason, reasonMissingLabel)
	})
}
