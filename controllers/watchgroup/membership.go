package watchgroup

import (
	"strconv"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
)

// memberOf returns the member whose Lease or slice has that name in the group, and false if it is none of the group's.
func memberOf(group, name string) (string, bool) {
	member, ok := strings.CutPrefix(name, group+".")
	return member, ok && member != ""
}

// isMembers reports whether a Lease with the name of a member's is one: it carries the group's label, and what it says fits
// into a slice. One that does not is nobody's, so that the API server's refusal of its slice stops nobody else.
func isMembers(lease *coordinationv1.Lease, group, member string) bool {
	return lease.Labels[lbv1alpha1.LabelWatchGroup] == group && len(member) <= lbv1alpha1.MaxMemberLength &&
		len(holder(lease)) <= lbv1alpha1.MaxSessionLength
}

// groupOf returns the group that a Lease or slice of that name belongs to. A group's name holds no dot.
func groupOf(name string) string {
	group, _, ok := strings.Cut(name, ".")
	if !ok {
		return ""
	}
	return group
}

// recordOf is what a Lease says. Its resourceVersion changes with every renewal, and is compared for being equal only.
// A Lease that promises no duration has that of its group.
func recordOf(member string, lease *coordinationv1.Lease, fallback time.Duration) sharding.LeaseRecord {
	r := sharding.LeaseRecord{Member: member, Session: holder(lease), Renewal: lease.ResourceVersion, Duration: fallback}
	if seconds := lease.Spec.LeaseDurationSeconds; seconds != nil && *seconds > 0 {
		r.Duration = time.Duration(*seconds) * time.Second
	}
	return r
}

func holder(lease *coordinationv1.Lease) string {
	if lease == nil || lease.Spec.HolderIdentity == nil {
		return ""
	}
	return *lease.Spec.HolderIdentity
}

// weightOf is a member's share relative to the others'. What is not a number from 1 to 1000 counts as 1.
func weightOf(lease *coordinationv1.Lease) int {
	n, err := strconv.Atoi(lease.Annotations[lbv1alpha1.AnnotationWeight])
	if err != nil || n < 1 || n > lbv1alpha1.MaxWeight {
		return 1
	}
	return n
}

// podOf returns the Pod in which the Lease's holder says that it runs, nil if it does not say or the Pod is another one of
// the same name.
func podOf(lease *coordinationv1.Lease, pods map[string]*corev1.Pod, ended map[types.UID]*corev1.Pod) *corev1.Pod {
	uid := types.UID(lease.Annotations[lbv1alpha1.AnnotationPodUID])
	if uid == "" {
		return nil
	}
	if pod := pods[lease.Annotations[lbv1alpha1.AnnotationPodName]]; pod != nil && pod.UID == uid {
		return pod
	}
	return ended[uid]
}

// lostContainer is the reason with which kubelet reports a container that it could not find. Nobody has seen that one end.
const lostContainer = "ContainerStatusUnknown"

// terminated reports whether kubelet has seen the container end in which the Lease's holder runs. That a Pod is gone, or
// that somebody else has declared it failed, is no such thing.
//
// A container that was restarted has a new session soon. Until then its status may still speak of the one before, so
// the end has to be later than the session's begin. Both times were taken on the member's node, by one clock.
func terminated(pod *corev1.Pod, lease *coordinationv1.Lease) bool {
	if pod == nil || lease.Spec.AcquireTime == nil {
		return false
	}
	status := containerStatus(pod, lease.Annotations[lbv1alpha1.AnnotationContainer])
	if status == nil {
		return false
	}
	for _, state := range []*corev1.ContainerStateTerminated{status.State.Terminated, status.LastTerminationState.Terminated} {
		// FinishedAt is cut to whole seconds: an end within the second of the begin is left to the Lease.
		if state != nil && state.Reason != lostContainer && state.FinishedAt.After(lease.Spec.AcquireTime.Time) {
			return true
		}
	}
	return false
}

// containerStatus returns the status of the container of that name; without a name, that of the only one.
func containerStatus(pod *corev1.Pod, name string) *corev1.ContainerStatus {
	list := pod.Status.ContainerStatuses
	if name == "" && len(list) == 1 {
		return &list[0]
	}
	for i := range list {
		if list[i].Name == name {
			return &list[i]
		}
	}
	return nil
}

// unready reports whether the member's Pod is going away, or has stopped being ready during the session. A Pod that has not
// become ready yet is no reason to drain: its readiness may wait for what the member is to be given.
func unready(pod *corev1.Pod, lease *coordinationv1.Lease) bool {
	if pod == nil {
		return false
	}
	if pod.DeletionTimestamp != nil {
		return true
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady && c.Status == corev1.ConditionFalse && lease.Spec.AcquireTime != nil {
			return c.LastTransitionTime.After(lease.Spec.AcquireTime.Time)
		}
	}
	return false
}
