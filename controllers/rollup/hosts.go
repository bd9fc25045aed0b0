package rollup

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
)

// Annotations by which a pod asks not to be moved, as other autoscalers know them. People have set them already.
const (
	annotationSafeToEvict  = "cluster-autoscaler.kubernetes.io/safe-to-evict"
	annotationDoNotDisrupt = "karpenter.sh/do-not-disrupt"
)

// evictable says whether a drain has to move the pod: DaemonSet and mirror pods go with their node, and what has ended is
// in nobody's way.
func evictable(pod *corev1.Pod) bool {
	return !capacity.IsDaemonPod(pod) && !capacity.IsMirrorPod(pod) && !capacity.IsTerminal(pod)
}

// stays says why a pod must not be evicted by reclaim; empty when it may be.
func stays(pod *corev1.Pod) string {
	switch {
	case pod.Annotations[annotationSafeToEvict] == "false":
		return fmt.Sprintf("carries %s: false", annotationSafeToEvict)
	case pod.Annotations[annotationDoNotDisrupt] == "true":
		return fmt.Sprintf("carries %s: true", annotationDoNotDisrupt)
	case metav1.GetControllerOfNoCopy(pod) == nil:
		return "has no controller that would start it again"
	}
	return ""
}

// hostOf describes a node and its pods for Choose.
func hostOf(node *corev1.Node, pods []*corev1.Pod) *Host {
	h := &Host{
		Name:    node.Name,
		Machine: node.Labels[fleetv1alpha1.LabelMachine],
		Labels:  node.Labels,
		Taints:  node.Spec.Taints,
		Free:    capacity.ResourcesOf(node.Status.Allocatable),
		Closed:  closed(node),
	}
	for _, pod := range pods {
		if capacity.IsTerminal(pod) {
			continue
		}
		profile := capacity.ProfileOfPod(pod)
		resident := Resident{
			Name: pod.Namespace + "/" + pod.Name, Priority: profile.Priority, Profile: profile, Ports: hostPorts(pod),
		}
		h.Free = h.Free.Sub(oneMore(resident))
		// A terminating pod still takes its room, and needs no other.
		if !evictable(pod) || pod.DeletionTimestamp != nil {
			h.Ports = append(h.Ports, resident.Ports...)
			continue
		}
		resident.ProfileID = profile.ID()
		resident.Zonal = len(pod.Spec.Volumes) > 0 // the cache keeps only volumes that claim storage
		resident.Stays = stays(pod)
		h.Residents = append(h.Residents, resident)
	}
	return h
}

// closed says that no pod will be scheduled to the node.
func closed(node *corev1.Node) bool {
	return node.Spec.Unschedulable || node.DeletionTimestamp != nil || !isReady(node) || reclaimOf(node) != ""
}

func hostPorts(pod *corev1.Pod) (ports []string) {
	for i := range pod.Spec.Containers {
		for _, p := range pod.Spec.Containers[i].Ports {
			if p.HostPort > 0 {
				ports = append(ports, fmt.Sprintf("%s/%d", p.Protocol, p.HostPort))
			}
		}
	}
	return ports
}
