package v1alpha1

const (
	// LabelWatchGroup names the WatchGroup on the slices, Leases and Pods of its members. A Lease without it is no
	// member's unless it has a slice already; a slice is its group's by its spec.
	LabelWatchGroup = "loadbalance.k8s.io/watch-group"

	// AnnotationPodName says on a member's Lease in which Pod the session runs that holds it, so that the coordinator can
	// see that Pod become unready, or end. A member that runs outside a Pod leaves it and the next two out.
	AnnotationPodName = "loadbalance.k8s.io/pod-name"
	// AnnotationPodUID is that Pod's UID.
	AnnotationPodUID = "loadbalance.k8s.io/pod-uid"
	// AnnotationContainer is the name of the container.
	AnnotationContainer = "loadbalance.k8s.io/container"

	// AnnotationWeight says on a member's Lease how large its share is relative to the others', as an integer from 1 to
	// MaxWeight. Without it, and for any other value, the weight is 1.
	AnnotationWeight = "loadbalance.k8s.io/weight"

	// Finalizer keeps a VirtualNodeSlice until nobody acts on it any more, and a WatchGroup until it has no member: an
	// object that somebody deletes by hand would otherwise give away what a member is still working on.
	Finalizer = "loadbalance.k8s.io/coordinator"

	// FieldWatchGroup is the selectable field of VirtualNodeSlice that names its group.
	FieldWatchGroup = "spec.watchGroup"
)

const (
	// MaxWeight bounds what a Lease may claim, so that one member's mistake cannot leave the others without a share.
	MaxWeight = 1000
	// MaxMemberLength is how long a member's name may be: together with the longest name of a group, and the dot, it is the
	// longest name of an object.
	MaxMemberLength = 189
	// MaxSessionLength is how long the name of a session may be.
	MaxSessionLength = 253
)

// MemberName is the name of a member's VirtualNodeSlice and of its Lease, both in the WatchGroup's namespace. A group's
// name holds no dot, so different members have different names.
func MemberName(watchGroup, member string) string { return watchGroup + "." + member }
