package demand

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/utils/clock"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
)

// Judge gathers what is known about a pod that failed to schedule and lets package capacity decide. Its functions read
// caches; one that is nil is not asked, and what it would have told speaks neither for nor against the pod.
type Judge struct {
	Volumes Volumes
	// Templates lists AvailableCapacity; nil or empty: not known, because nobody has to write any.
	Templates func() []*fleetv1alpha1.AvailableCapacity
	// Freshness is how old a template's observedTime may be. With an older one in the list, no template is evidence.
	Freshness time.Duration
	// Pods lists a namespace's pods.
	Pods func(namespace string) ([]*corev1.Pod, error)
	// Node reads one node; it tells in which domain a pod stands.
	Node func(name string) (*corev1.Node, error)
	// ResourceClaim returns the API server's NotFound where there is no such ResourceClaim.
	ResourceClaim func(namespace, name string) error
	Clock         clock.PassiveClock
}

// Decide says whether a new node could help the pod. Rejections are nil for a caller that did not see the scheduling cycle.
func (j *Judge) Decide(pod *corev1.Pod, rejections []capacity.Rejection) capacity.Decision {
	if j.heldElsewhere(pod) {
		rejections = append(slices.Clone(rejections), inUse)
	}
	return capacity.Classify(pod, capacity.Facts{
		Rejections:    rejections,
		Templates:     j.templates(),
		Volumes:       j.Volumes.Of(pod),
		Affinity:      j.affinity(pod),
		MissingClaims: j.missingClaims(pod),
	})
}

// inUse is what the scheduler says of a volume that one pod may use at a time, for callers that did not hear it.
var inUse = capacity.Rejection{
	Plugin:       "VolumeRestrictions",
	Reason:       "node(s) unavailable due to PersistentVolumeClaim with ReadWriteOncePod access mode already in-use by another pod",
	Unresolvable: true,
}

func (j *Judge) templates() []capacity.Template {
	if j.Templates == nil {
		return nil
	}
	var out []capacity.Template
	for _, ac := range j.Templates() {
		if at := ac.Status.ObservedTime; at != nil && j.Freshness > 0 && j.Clock.Since(at.Time) > j.Freshness {
			return nil
		}
		out = append(out, capacity.TemplateOf(ac))
	}
	return out
}

// heldElsewhere reports whether the pod mounts a ReadWriteOncePod claim that another pod with a node mounts.
func (j *Judge) heldElsewhere(pod *corev1.Pod) bool {
	if j.Pods == nil || j.Volumes.Claim == nil {
		return false
	}
	single := map[string]bool{}
	for i := range pod.Spec.Volumes {
		name, ok := claimOf(pod, &pod.Spec.Volumes[i])
		if !ok {
			continue
		}
		claim, err := j.Volumes.Claim(pod.Namespace, name)
		if err == nil && slices.Contains(claim.Spec.AccessModes, corev1.ReadWriteOncePod) {
			single[name] = true
		}
	}
	if len(single) == 0 {
		return false
	}
	others, err := j.Pods(pod.Namespace)
	if err != nil {
		return false
	}
	return slices.ContainsFunc(others, func(other *corev1.Pod) bool {
		if other.UID == pod.UID || other.Spec.NodeName == "" || capacity.IsTerminal(other) {
			return false
		}
		for i := range other.Spec.Volumes {
			if name, ok := claimOf(other, &other.Spec.Volumes[i]); ok && single[name] {
				return true
			}
		}
		return false
	})
}

// affinity finds the pods that the pod's required affinity selects: as for the scheduler, those that match all of its terms.
// Namespaces that are selected by label are not known here.
//
// A pod that meets its own terms follows its set. Where that stands is named only if some of it is on a node that the
// autoscaler does not own: of the rest the autoscaler knows, and a choice that is still open stays so.
func (j *Judge) affinity(pod *corev1.Pod) []capacity.Affinity {
	if j.Pods == nil || pod.Spec.Affinity == nil || pod.Spec.Affinity.PodAffinity == nil {
		return nil
	}
	terms := pod.Spec.Affinity.PodAffinity.RequiredDuringSchedulingIgnoredDuringExecution
	selected, known := j.selected(pod, terms)
	if !known {
		return nil
	}
	nodes, static := j.nodesOf(selected)
	out := make([]capacity.Affinity, len(terms))
	for i := range terms {
		out[i].Matched = len(selected) > 0
		if static || decides(&terms[i], pod) {
			out[i].Domains = domains(nodes, terms[i].TopologyKey)
		}
	}
	return out
}

// selected lists the pods with a node that every term selects; false where that is not known.
func (j *Judge) selected(pod *corev1.Pod, terms []corev1.PodAffinityTerm) ([]*corev1.Pod, bool) {
	var selectors []labels.Selector
	var namespaces []string
	for i := range terms {
		selector, err := metav1.LabelSelectorAsSelector(terms[i].LabelSelector)
		if err != nil || terms[i].NamespaceSelector != nil {
			return nil, false
		}
		selectors = append(selectors, selector)
		own := terms[i].Namespaces
		if len(own) == 0 {
			own = []string{pod.Namespace}
		}
		if i == 0 {
			namespaces = slices.Compact(slices.Sorted(slices.Values(own)))
		} else {
			namespaces = slices.DeleteFunc(namespaces, func(ns string) bool { return !slices.Contains(own, ns) })
		}
	}
	var selected []*corev1.Pod
	for _, ns := range namespaces {
		pods, err := j.Pods(ns)
		if err != nil {
			return nil, false
		}
		for _, other := range pods {
			if other.Spec.NodeName == "" || capacity.IsTerminal(other) || other.UID == pod.UID {
				continue
			}
			if !slices.ContainsFunc(selectors, func(s labels.Selector) bool { return !s.Matches(labels.Set(other.Labels)) }) {
				selected = append(selected, other)
			}
		}
	}
	return selected, true
}

// maxDomains bounds the values of a requirement; a choice among more is none, practically.
const maxDomains = 100

// nodesOf reads the nodes of the pods. Static: one at least is not the autoscaler's.
func (j *Judge) nodesOf(pods []*corev1.Pod) (nodes []*corev1.Node, static bool) {
	if j.Node == nil {
		return nil, false
	}
	seen := sets.New[string]()
	for _, pod := range pods {
		if seen.Has(pod.Spec.NodeName) {
			continue
		}
		seen.Insert(pod.Spec.NodeName)
		if node, err := j.Node(pod.Spec.NodeName); err == nil {
			nodes = append(nodes, node)
			static = static || node.Labels[fleetv1alpha1.LabelMachine] == ""
		}
	}
	return nodes, static
}

// domains are the values that the nodes have for the key, sorted; nil where there are none, or too many.
func domains(nodes []*corev1.Node, key string) []string {
	values := sets.New[string]()
	for _, node := range nodes {
		if value, ok := node.Labels[key]; ok {
			values.Insert(value)
		}
	}
	if values.Len() > maxDomains {
		return nil
	}
	return sets.List(values)
}

// decides reports whether it matters where the pods are that the term selects, though all were the autoscaler's.
func decides(term *corev1.PodAffinityTerm, pod *corev1.Pod) bool {
	selector, err := metav1.LabelSelectorAsSelector(term.LabelSelector)
	own := len(term.Namespaces) == 0 || slices.Contains(term.Namespaces, pod.Namespace)
	return err == nil && (term.TopologyKey == corev1.LabelHostname || !own || !selector.Matches(labels.Set(pod.Labels)))
}

// missingClaims lists the ResourceClaims that the pod names and that do not exist. One that is made from a template and is
// not there yet is none of them: its controller makes it.
func (j *Judge) missingClaims(pod *corev1.Pod) []string {
	if j.ResourceClaim == nil {
		return nil
	}
	var missing []string
	for i := range pod.Spec.ResourceClaims {
		if pod.Spec.ResourceClaims[i].ResourceClaimName == nil {
			continue
		}
		name := *pod.Spec.ResourceClaims[i].ResourceClaimName
		if apierrors.IsNotFound(j.ResourceClaim(pod.Namespace, name)) {
			missing = append(missing, "ResourceClaim "+name)
		}
	}
	return missing
}
