package demand

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-helpers/storage/ephemeral"
	"k8s.io/component-helpers/storage/volume"

	"github.com/drover-sh/drover/capacity"
)

// Volumes looks at what a pod's volumes ask of its node. The functions read caches; one that is nil is not asked. They
// return the API server's NotFound where there is no such object.
type Volumes struct {
	Claim  func(namespace, name string) (*corev1.PersistentVolumeClaim, error)
	Volume func(name string) (*corev1.PersistentVolume, error)
	Class  func(name string) (*storagev1.StorageClass, error)
}

// volumeZoneSeparator joins the zones of a regional volume in a label's value.
const volumeZoneSeparator = "__"

// zoneLabels are the labels of a volume that the scheduler's VolumeZone compares, outside the volume's node affinity, each
// with the node label that it is about: for the old labels it takes the new ones of a node, and new nodes have no others.
var zoneLabels = []struct{ volume, node string }{
	{corev1.LabelTopologyZone, corev1.LabelTopologyZone},
	{corev1.LabelTopologyRegion, corev1.LabelTopologyRegion},
	{corev1.LabelFailureDomainBetaZone, corev1.LabelTopologyZone},
	{corev1.LabelFailureDomainBetaRegion, corev1.LabelTopologyRegion},
}

// claimOf returns the name of the claim behind a pod's volume; false where there is none.
func claimOf(pod *corev1.Pod, v *corev1.Volume) (string, bool) {
	switch {
	case v.PersistentVolumeClaim != nil:
		return v.PersistentVolumeClaim.ClaimName, true
	case v.Ephemeral != nil:
		return ephemeral.VolumeClaimName(pod, v), true
	}
	return "", false
}

// Of describes the claims that the pod mounts; nil where claims are not known at all.
func (v Volumes) Of(pod *corev1.Pod) []capacity.Volume {
	if v.Claim == nil {
		return nil
	}
	var out []capacity.Volume
	for i := range pod.Spec.Volumes {
		if name, ok := claimOf(pod, &pod.Spec.Volumes[i]); ok {
			if described, ok := v.describe(pod.Namespace, name); ok {
				described.Ephemeral = pod.Spec.Volumes[i].Ephemeral != nil
				out = append(out, described)
			}
		}
	}
	return out
}

// describe reads one claim. It returns false where what is known does not suffice.
func (v Volumes) describe(namespace, name string) (capacity.Volume, bool) {
	out := capacity.Volume{Claim: name}
	claim, err := v.Claim(namespace, name)
	switch {
	case apierrors.IsNotFound(err):
		out.State = capacity.VolumeNoClaim
		return out, true
	case err != nil:
		return out, false
	case claim.DeletionTimestamp != nil:
		out.State = capacity.VolumeTerminating
	case claim.Status.Phase == corev1.ClaimLost:
		out.State = capacity.VolumeLost
	case claim.Spec.VolumeName != "":
		return v.bound(out, claim.Spec.VolumeName)
	default:
		class, err := v.classOf(claim)
		if err != nil {
			return out, false
		}
		if class == nil || class.VolumeBindingMode == nil ||
			*class.VolumeBindingMode != storagev1.VolumeBindingWaitForFirstConsumer {
			out.State = capacity.VolumeUnbound
			break
		}
		if claim.Annotations[volume.AnnSelectedNode] != "" {
			// Until its provisioner is done or gives up, the claim fits that node only, and either changes the claim.
			out.State = capacity.VolumeProvisioning
			break
		}
		out.State = capacity.VolumeDelayed
		out.Requirements, out.AnyOf = choice(allowed(class))
	}
	return out, true
}

func (v Volumes) bound(out capacity.Volume, name string) (capacity.Volume, bool) {
	if v.Volume == nil {
		return out, false
	}
	found, err := v.Volume(name)
	switch {
	case apierrors.IsNotFound(err):
		out.State = capacity.VolumeLost
		return out, true
	case err != nil:
		return out, false
	}
	out.State = capacity.VolumeBound
	out.Requirements, out.AnyOf = choice(termsOf(found))
	out.Requirements = append(zonesOf(found), out.Requirements...)
	return out, true
}

func zonesOf(v *corev1.PersistentVolume) []capacity.Requirement {
	var reqs []capacity.Requirement
	for _, key := range zoneLabels {
		if value := v.Labels[key.volume]; value != "" {
			reqs = append(reqs, capacity.Requirement{
				Key: key.node, Operator: capacity.OperatorIn, Values: strings.Split(value, volumeZoneSeparator),
			})
		}
	}
	return reqs
}

// termsOf are the ORed terms of a volume's node affinity.
func termsOf(v *corev1.PersistentVolume) [][]capacity.Requirement {
	if v.Spec.NodeAffinity == nil || v.Spec.NodeAffinity.Required == nil {
		return nil
	}
	var sets [][]capacity.Requirement
	for _, term := range v.Spec.NodeAffinity.Required.NodeSelectorTerms {
		var set []capacity.Requirement
		for _, e := range slices.Concat(term.MatchExpressions, term.MatchFields) {
			if e.Key == metav1.ObjectNameField && e.Operator == corev1.NodeSelectorOpNotIn {
				continue // a new node has another name
			}
			set = append(set, capacity.Requirement{
				Key: e.Key, Operator: capacity.Operator(e.Operator), Values: slices.Clone(e.Values),
			})
		}
		if len(term.MatchExpressions)+len(term.MatchFields) > 0 { // an empty term selects nothing
			sets = append(sets, set)
		}
	}
	return sets
}

// allowed are the ORed topologies of a class. An empty one allows every place.
func allowed(class *storagev1.StorageClass) [][]capacity.Requirement {
	var sets [][]capacity.Requirement
	for _, term := range class.AllowedTopologies {
		var set []capacity.Requirement
		for _, e := range term.MatchLabelExpressions {
			set = append(set, capacity.Requirement{Key: e.Key, Operator: capacity.OperatorIn, Values: slices.Clone(e.Values)})
		}
		if len(set) == 0 {
			return nil
		}
		sets = append(sets, set)
	}
	return sets
}

// choice is ORed sets as requirements where those say it all, which is the shortest: one set, or several that each list
// values of one and the same key. Otherwise the sets stay as they are.
func choice(sets [][]capacity.Requirement) (reqs []capacity.Requirement, anyOf [][]capacity.Requirement) {
	if len(sets) <= 1 {
		return slices.Concat(sets...), nil
	}
	if slices.ContainsFunc(sets, func(set []capacity.Requirement) bool { return len(set) == 0 }) {
		return nil, nil // every new node will do
	}
	all := capacity.Requirement{Key: sets[0][0].Key, Operator: capacity.OperatorIn}
	for _, set := range sets {
		if len(set) != 1 || set[0].Key != all.Key || set[0].Operator != capacity.OperatorIn {
			return nil, sets
		}
		all.Values = append(all.Values, set[0].Values...)
	}
	return []capacity.Requirement{all}, nil
}

// classOf returns the claim's StorageClass; nil where it names none or it does not exist.
func (v Volumes) classOf(claim *corev1.PersistentVolumeClaim) (*storagev1.StorageClass, error) {
	name := claim.Annotations[corev1.BetaStorageClassAnnotation]
	if name == "" && claim.Spec.StorageClassName != nil {
		name = *claim.Spec.StorageClassName
	}
	if name == "" || v.Class == nil {
		return nil, nil
	}
	class, err := v.Class(name)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return class, err
}
