package admission

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/kueue/provisioning"
)

// Hint is an AvailableCapacity as far as a decision depends on it.
type Hint struct {
	Name         string
	Template     capacity.Template
	Count        int32
	Availability fleetv1alpha1.Availability
	Cost         float64
	Atomic       bool
	// Ready is the usual time from the request to a Ready node; 0: unknown.
	Ready time.Duration
	// Observed is when the autoscaler last confirmed the hint; zero: never.
	Observed time.Time
	// Created is when the hint appeared.
	Created time.Time
	// Labels are the template's labels beyond its requirements.
	Labels map[string]string
}

// HintOf reads an AvailableCapacity.
func HintOf(ac *fleetv1alpha1.AvailableCapacity) Hint {
	h := Hint{
		Name: ac.Name, Template: capacity.TemplateOf(ac), Count: ac.Spec.AvailableCount,
		Availability: ac.Spec.Availability, Cost: ac.Spec.Cost, Atomic: ac.Spec.SupportsAtomicProvisioning,
		Labels: ac.Spec.NodeTemplate.Labels, Created: ac.CreationTimestamp.Time,
	}
	if t := ac.Spec.EstimatedProvisioningTime; t != nil {
		h.Ready = t.Duration
	}
	if t := ac.Status.ObservedTime; t != nil {
		h.Observed = t.Time
	}
	return h
}

// Fresh says whether the hint is believed at that time.
func (h *Hint) Fresh(now time.Time, staleAfter time.Duration) bool {
	return !h.Observed.IsZero() && now.Sub(h.Observed) <= staleAfter
}

// confidence orders availabilities, best first.
var confidence = []fleetv1alpha1.Availability{
	fleetv1alpha1.AvailabilityHigh, fleetv1alpha1.AvailabilityMedium, fleetv1alpha1.AvailabilityLow,
	fleetv1alpha1.AvailabilityNone,
}

// reaches says whether the confidence is at least as good as the threshold.
func reaches(a, threshold fleetv1alpha1.Availability) bool {
	i := slices.Index(confidence, a)
	return i >= 0 && i <= slices.Index(confidence, threshold)
}

// PodSet is what one pod set of a workload needs, flavors resolved.
type PodSet struct {
	Name  string
	Count int32
	// Profile holds the pod's own needs and the labels and tolerations of its flavors.
	Profile capacity.Profile
	// Flavor names the flavor for messages: that of the scarcest kind of resource.
	Flavor string
	// Selected is true when a flavor names node labels: whoever wrote them chose the nodes, taints included.
	Selected bool
	// Own is what the template itself asks for, without what quota alone knows: a proof goes by nothing else.
	Own capacity.Resources
	// Lent are the tolerations that the pods get for the taints of the nodes that their flavor selects.
	Lent []corev1.Toleration
	// Pinned are the node labels that the pod, its flavors and other checks already select.
	Pinned map[string]string
	// Annotated are the annotations that the pod has, or gets from other checks.
	Annotated map[string]string
	// Concerned is false for a pod set none of whose flavors the check is bound to (onFlavors).
	Concerned bool
}

// onNodes is the pod set as it is placed on nodes that exist.
func (p *PodSet) onNodes(policy fleetv1alpha1.AtomicProvisioningPolicy) provisioning.PodSet {
	profile := p.Profile
	profile.Tolerations = slices.Concat(profile.Tolerations, p.Lent)
	if profile.Group != nil && policy != fleetv1alpha1.AtomicWaive {
		profile = profile.WithMinCount(p.Count)
	}
	return provisioning.PodSet{Profile: profile.Canonical(), Count: p.Count}
}

// Gang says whether the pods are of use together only.
func (p *PodSet) Gang() bool { return p.Profile.Group != nil }

// resource is the resource that messages speak of: the device if the pod asks for one, else cpu.
func (p *PodSet) resource() (name corev1.ResourceName, amount int64) {
	return dominant(p.Profile.Resources)
}

// concerned lists the pod sets that the check decides about.
func (w *Workload) concerned() []*PodSet {
	var out []*PodSet
	for i := range w.PodSets {
		if w.PodSets[i].Concerned && w.PodSets[i].Count > 0 {
			out = append(out, &w.PodSets[i])
		}
	}
	return out
}

// Workload is a workload with quota reserved.
type Workload struct {
	// Key is unique for the workload and the check.
	Key string
	UID types.UID
	// Name is "<namespace>/<name>", for messages.
	Name     string
	Priority int32
	// Queued is what the order of equal priority goes by.
	Queued time.Time
	// Reserved is when the quota was reserved.
	Reserved time.Time
	// Retries is how often the check has already sent the workload back.
	Retries int32
	// Running is true for a workload that was admitted before it met the check.
	Running bool
	PodSets []PodSet
	Config  fleetv1alpha1.CapacityCheckConfigSpec // with defaults
}

// NodeShape is a node that exists, as a proof has to consider it.
type NodeShape struct {
	Labels      map[string]string
	Allocatable capacity.Resources
}
