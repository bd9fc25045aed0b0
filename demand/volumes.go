package demand

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/component-helpers/storage/ephemeral"

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

// zoneLabels are those that the scheduler's VolumeZone compares, outside a volume's node affinity.
var zoneLabels = []string{
	corev1.LabelTopologyZone, corev1.LabelTopologyRegion,
	corev1.LabelFailureDomainBetaZone, corev1.LabelFailureDomainBetaRegion,
}

// claimOf returns the name of the claim behind a pod's volume; false where there is none.
func claimOf(pod *corev1.Pod, volume *corev1.Volume) (string, bool) {
	switch {
	case volume.PersistentVolumeClaim != nil:
		return volume.PersistentVolumeClaim.ClaimName, true
	case volume.Ephemeral != nil:
		return ephemeral.VolumeClaimName(pod, volume), true
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
			if volume, ok := v.describe(pod.Namespace, name); ok {
				volume.Ephemeral = pod.Spec.Volumes[i].Ephemeral != nil
				out = append(out, volume)
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
		out.State, out.Requirements = capacity.VolumeDelayed, allowed(class)
	}
	return out, true
}

func (v Volumes) bound(out capacity.Volume, name string) (capacity.Volume, bool) {
	if v.Volume == nil {
		return out, false
	}
	volume, err := v.Volume(name)
	switch {
	case apierrors.IsNotFound(err):
		out.State = capacity.VolumeLost
		return out, true
	case err != nil:
		return out, false
	}
	out.State, out.Requirements = capacity.VolumeBound, placeOf(volume)
	return out, true
}

func placeOf(volume *corev1.PersistentVolume) []capacity.Requirement {
	var reqs []capacity.Requirement
	for _, key := range zoneLabels {
		if value := volume.Labels[key]; value != "" {
			reqs = append(reqs, capacity.Requirement{
				Key: key, Operator: capacity.OperatorIn, Values: strings.Split(value, volumeZoneSeparator),
			})
		}
	}
	if volume.Spec.NodeAffinity == nil || volume.Spec.NodeAffinity.Required == nil {
		return reqs
	}
	return append(reqs, fromTerms(volume.Spec.NodeAffinity.Required.NodeSelectorTerms)...)
}

// fromTerms turns ORed terms into ANDed requirements where that is possible: one term, or several that each list values of
// the same keys. Others are left out: then the node may come in the wrong place, and the scheduler says so again.
func fromTerms(terms []corev1.NodeSelectorTerm) []capacity.Requirement {
	if len(terms) == 0 {
		return nil
	}
	var reqs []capacity.Requirement
	for _, e := range terms[0].MatchExpressions {
		reqs = append(reqs, capacity.Requirement{
			Key: e.Key, Operator: capacity.Operator(e.Operator), Values: append([]string(nil), e.Values...),
		})
	}
	for _, term := range terms[1:] {
		if len(term.MatchExpressions) != 1 || len(reqs) != 1 || reqs[0].Operator != capacity.OperatorIn ||
			term.MatchExpressions[0].Key != reqs[0].Key ||
			term.MatchExpressions[0].Operator != corev1.NodeSelectorOpIn {
			return nil
		}
		reqs[0].Values = append(reqs[0].Values, term.MatchExpressions[0].Values...)
	}
	return reqs
}

// allowed are the topologies of a class, as far as one requirement can say them.
func allowed(class *storagev1.StorageClass) []capacity.Requirement {
	if len(class.AllowedTopologies) != 1 {
		return nil
	}
	var reqs []capacity.Requirement
	for _, e := range class.AllowedTopologies[0].MatchLabelExpressions {
		reqs = append(reqs, capacity.Requirement{Key: e.Key, Operator: capacity.OperatorIn, Values: e.Values})
	}
	return reqs
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
