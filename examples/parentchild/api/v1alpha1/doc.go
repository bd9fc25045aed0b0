// Package v1alpha1 holds the objects of the sample controller (section 7.2.1 of "Cache-Consistent Dynamic Load Balancing
// for Kubernetes Controllers"): a Parent for which there is to be one Child, the Gate that lets children be created, and
// the ParentCreation that asks for many Parents at once.
//
// It holds types and their validation markers only. Start reading at Parent.
//
// +kubebuilder:object:generate=true
// +groupName=parentchild.drover.sh
package v1alpha1
