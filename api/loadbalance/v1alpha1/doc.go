// Package v1alpha1 holds the objects by which a controller is scaled out: WatchGroup ("these members share these kinds")
// and VirtualNodeSlice ("this member has these Virtual Nodes"). Group, annotations and labels have the names of
// "Cache-Consistent Dynamic Load Balancing for Kubernetes Controllers"; what a slice says in addition to the paper's is
// the exclusive handoff of package sharding.
//
// The package holds types and their validation markers only. It never talks to an API server, and sharding/wire turns
// its objects into the values that package sharding decides on. Start reading at WatchGroup.
//
// +kubebuilder:object:generate=true
// +groupName=loadbalance.k8s.io
package v1alpha1
