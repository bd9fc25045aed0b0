package capacity

import (
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// IsDaemonPod reports whether a DaemonSet controls the pod. Its share travels as a Daemon, not as a need.
func IsDaemonPod(pod *corev1.Pod) bool {
	owner := metav1.GetControllerOfNoCopy(pod)
	return owner != nil && owner.Kind == "DaemonSet" && owner.APIVersion == appsv1.SchemeGroupVersion.String()
}

// IsMirrorPod reports whether the pod stands for a static pod, which lives and dies with its node.
func IsMirrorPod(pod *corev1.Pod) bool {
	_, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]
	return mirror
}

// IsTerminal reports whether the pod has ended and takes no room any more.
func IsTerminal(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// DaemonOf gives what a DaemonSet takes from every node that it matches.
func DaemonOf(ds *appsv1.DaemonSet) Daemon {
	spec := &ds.Spec.Template.Spec
	return Daemon{
		NodeAffinity: canonicalSets(requirementSetsOf(spec)),
		Tolerations:  canonicalTolerations(spec.Tolerations),
		Resources:    requestsOf(spec),
	}
}

// RunsOn reports whether a node with these labels and taints carries the DaemonSet. Taints for a node's state keep no
// DaemonSet away: its controller adds the tolerations.
func (d Daemon) RunsOn(labels map[string]string, taints []corev1.Taint) bool {
	if len(d.NodeAffinity) > 0 && !slices.ContainsFunc(d.NodeAffinity, func(set []Requirement) bool {
		return MatchesAll(set, labels)
	}) {
		return false
	}
	lasting := slices.DeleteFunc(slices.Clone(taints), func(t corev1.Taint) bool {
		return slices.Contains(stateTaints, t.Key)
	})
	return Tolerates(d.Tolerations, lasting)
}
