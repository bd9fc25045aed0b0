// Package demand is the one writer of CapacityRequests (section 6.1). The scheduler plugin and the pod back-stop both hand
// it pods that failed to schedule; it turns each into one CapacityRequest, however often and by however many processes the
// pod is handed over.
//
// Callers never wait: Enqueue, Report and Forget take a lock for a map access and do no I/O. The writes happen in a few
// goroutines of Run, at a bounded rate, in an order keyed by pod UID, with a context of their own: a scheduling cycle that
// ends, or an API server that hangs, has no hold on them.
//
// Two writers never make two requests, because a request's name follows from the pod (Name) and AlreadyExists is success.
// A request is owned by its pod, so garbage collection withdraws it; nothing here deletes one. The memory taken is
// proportional to the pods that are pending.
//
// The package never decides whether a node could help: package capacity does, with what Judge gathers. Start reading at Writer.
package demand

// AnnotationSameTopology, on a PodGroup or on a pod that is in a group, names the node label of which all members have to
// share one value, for example topology.kubernetes.io/rack. It tells the autoscaler only. The scheduler itself keeps the
// members together by what it knows: a required pod affinity of the members to each other on the same key (which alone
// makes a group, too), or a topology constraint of the in-tree PodGroup.
const AnnotationSameTopology = "fleet.lucy.sh/same-topology"
