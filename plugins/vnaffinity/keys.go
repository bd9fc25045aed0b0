package vnaffinity

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/drover-sh/drover/sharding"
)

// nodeKey is the hash key of a node.
func nodeKey(name string) string { return sharding.ObjectRef{Kind: "Node", Name: name}.Key() }

// podKey is the hash key by which a pod finds the replica that schedules it: its own annotation, else its controller's, so
// that one replica decides on all pods of a workload, and with them on their spread and their affinity to each other. A pod
// that can go to one node only, as those of a DaemonSet, has that node's key: any other replica would only hand it on.
func podKey(pod *corev1.Pod) string {
	if node := pinnedTo(pod); node != "" {
		return nodeKey(node)
	}
	owner := ""
	if c := metav1.GetControllerOfNoCopy(pod); c != nil {
		group := schema.FromAPIVersionAndKind(c.APIVersion, c.Kind).Group
		owner = sharding.ObjectRef{Group: group, Kind: c.Kind, Namespace: pod.Namespace, Name: c.Name}.Key()
	}
	self := sharding.ObjectRef{Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name}
	return sharding.HashKey(pod.Annotations[sharding.AnnotationHashKey], owner, self)
}

// pinnedTo returns the name of the only node that the pod's required node affinity leaves, "" if there may be several.
func pinnedTo(pod *corev1.Pod) string {
	a := pod.Spec.Affinity
	if a == nil || a.NodeAffinity == nil || a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return ""
	}
	node := ""
	for _, term := range a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		name := ""
		for _, f := range term.MatchFields {
			if f.Key == metav1.ObjectNameField && f.Operator == corev1.NodeSelectorOpIn && len(f.Values) == 1 {
				name = f.Values[0]
			}
		}
		if name == "" || (node != "" && node != name) {
			return ""
		}
		node = name
	}
	return node
}
