// Package kwok is a provider of simulated nodes: a machine is a Node object in the cluster's API server, which the kwok
// controller keeps alive. It behaves like a cloud on purpose: launches take time, stock runs out, launches fail,
// machines are lost on the way, and events are dropped, doubled and reordered, all to order and reproducible by a seed.
//
// It keeps no state of its own. After a restart it finds its machines again from the Nodes, which carry what is needed,
// and from the requests that the autoscaler repeats with their first time.
//
// It never touches a Node without its own label, and never sets the label fleet.lucy.sh/machine: that is the
// operator's.
//
// Start reading at Provider.
package kwok

// What the provider does in a cluster, and nothing else; the integration tests run it under exactly these rights.
//
// +kubebuilder:rbac:groups="",resources=nodes,verbs=list;watch;create;delete
