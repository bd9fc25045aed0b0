// Package v1alpha1 holds the capacity contract: CapacityRequest ("I need resources"), AvailableCapacity ("here is what
// could be provisioned") and UpcomingNode ("a node is on the way"). Names and fields follow section 6 of "Fleet-Scale
// Kubernetes: An Operating Model for Homogeneous Clusters with Decoupled Capacity"; every field beyond that document is
// optional, so that a client which knows only the document still interoperates.
//
// The package holds types and their validation markers only. It never talks to an API server; start reading at
// CapacityRequest.
//
// +kubebuilder:object:generate=true
// +groupName=fleet.lucy.sh
package v1alpha1
