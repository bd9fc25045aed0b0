package v1alpha1

const (
	// SystemNamespace is where AvailableCapacity and UpcomingNode objects live (section 6.2 and 6.3).
	SystemNamespace = "fleet-system"

	// LabelMachine is set by the operator on a Node that the autoscaler provisioned; its value is the machine's id, which
	// is also the name of the UpcomingNode that announced it. A node without this label is static: nobody's demand.
	LabelMachine = "fleet.lucy.sh/machine"

	// LabelPodUID is set on a CapacityRequest that stands for a pod; its value is the pod's UID.
	LabelPodUID = "fleet.lucy.sh/pod-uid"

	// LabelManagedBy names the component that writes an AvailableCapacity or UpcomingNode, so that a resync deletes only
	// what it wrote itself.
	LabelManagedBy = "app.kubernetes.io/managed-by"

	// ManagedByManager is the value of LabelManagedBy for objects that the roll-up operator owns.
	ManagedByManager = "drover-manager"

	// TaintReclaiming is put by the operator on a node that is being drained for reclaim, beside spec.unschedulable.
	TaintReclaiming = "fleet.lucy.sh/reclaiming"

	// LabelRack is the rack label that the document's examples use for co-location.
	LabelRack = "topology.kubernetes.io/rack"
)
