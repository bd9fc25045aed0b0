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

// ClaimOf returns the name of the claim behind a pod's volume; false where there is none.
func ClaimOf(pod *corev1.Pod, volume *corev1.Volume) (string, bool) {
	switch {
	case volume.PersistentVolumeClaim != nil:
		return volume.PersistentVolumeClaim.ClaimName, true
	case volume.Ephemeral != nil:
		return ephemeral.VolumeClaimName(pod, volume), true
	}
	return "", false
}

// Requirements are the node requirements of the pod's volumes: the places of those that are bound, and the topologies
// that a class allows those that bind with their first consumer. What cannot be found asks for nothing.
func (v Volumes) Requirements(pod *corev1.Pod) []capacity.Requirement {
	if v.Claim == nil {
		return nil
	}
	var reqs []capacity.Requirement
	for i := range pod.Spec.Volumes {
		name, ok := ClaimOf(pod, &pod.Spec.Volumes[i])
		if !ok {
			continue
		}
		claim, err := v.Claim(pod.Namespace, name)
		if err != nil {
			continue
		}
		if claim.Spec.VolumeName != "" {
			reqs = append(reqs, v.placeOf(claim.Spec.VolumeName)...)
			continue
		}
		reqs = append(reqs, v.allowed(claim)...)
	}
	return reqs
}

func (v Volumes) placeOf(name string) []capacity.Requirement {
	if v.Volume == nil {
		return nil
	}
	volume, err := v.Volume(name)
	if err != nil {
		return nil
	}
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

// allowed are the topologies of a claim's class, as far as one requirement can say them.
func (v Volumes) allowed(claim *corev1.PersistentVolumeClaim) []capacity.Requirement {
	class, err := v.ClassOf(claim)
	if err != nil || class == nil || len(class.AllowedTopologies) != 1 {
		return nil
	}
	var reqs []capacity.Requirement
	for _, e := range class.AllowedTopologies[0].MatchLabelExpressions {
		reqs = append(reqs, capacity.Requirement{Key: e.Key, Operator: capacity.OperatorIn, Values: e.Values})
	}
	return reqs
}

// ClassOf returns the claim's StorageClass; nil where it names none or it does not exist.
func (v Volumes) ClassOf(claim *corev1.PersistentVolumeClaim) (*storagev1.StorageClass, error) {
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
