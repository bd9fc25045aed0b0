// Package controlplane starts a real Kubernetes control plane on loopback: etcd and kube-apiserver through
// controller-runtime's envtest, and, where asked for, kube-controller-manager (garbage collection, Jobs, Deployments,
// tokens, taints of nodes) and kwok, which plays the kubelet of every Node that carries its annotation. Integration
// tests and the playground run on it.
//
// It never downloads anything: the programs come from KUBEBUILDER_ASSETS, or from bin/control-plane, where `make
// control-plane` puts them. Everything else is in Options.Dir: data, certificates, kubeconfigs, logs. Several control
// planes run side by side, and none leaves a process behind, whatever happens to its owner.
//
// Start reading at Start.
package controlplane
