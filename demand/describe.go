package demand

import (
	corev1 "k8s.io/api/core/v1"

	"github.com/drover-sh/drover/capacity"
)

// GroupFacts is what a PodGroup object says of its members.
type GroupFacts struct {
	// MinCount is how many members have to run together; 0: unknown, or any number is useful.
	MinCount int32
	// TopologyKey, when set, is the node label of which all members have to share one value.
	TopologyKey string
}

// Groups finds the PodGroup that a pod names. It reads a cache.
type Groups interface {
	// GroupOf returns false where the pod names no group, or the group does not exist (yet).
	GroupOf(pod *corev1.Pod) (GroupFacts, bool)
}

// Describer says what a pod needs of a node, with what the pod itself does not tell: its volumes' places, and its gang. Both
// writers use it, so that they ask for the same.
type Describer struct {
	Groups  Groups  // nil: pods name no groups
	Volumes Volumes // nil listers: volumes are not looked at
}

// Profile returns the pod's canonical profile.
func (d Describer) Profile(pod *corev1.Pod) capacity.Profile {
	return d.withGroup(pod, capacity.ProfileOfPod(pod).WithVolumes(d.Volumes.Of(pod)))
}

// withGroup adds what the pod's PodGroup says. A topology key is taken from the most explicit source: the pod's annotation,
// its PodGroup, then what the pod implies (Kueue's annotation, or a required affinity to pods like itself). The annotation
// alone makes no group: the scheduler would not keep the pods together either.
func (d Describer) withGroup(pod *corev1.Pod, p capacity.Profile) capacity.Profile {
	if p.Group == nil {
		return p
	}
	group := *p.Group
	if d.Groups != nil {
		if facts, ok := d.Groups.GroupOf(pod); ok {
			group.MinCount = facts.MinCount
			if facts.TopologyKey != "" {
				group.TopologyKey = facts.TopologyKey
			}
		}
	}
	if key := pod.Annotations[AnnotationSameTopology]; key != "" {
		group.TopologyKey = key
	}
	p.Group = &group
	return p
}
