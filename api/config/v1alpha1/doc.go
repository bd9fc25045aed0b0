// Package v1alpha1 holds the versioned configuration files of Drover's programs: ManagerConfiguration (cmd/manager),
// AutoscalerConfiguration (cmd/autoscaler), CoordinatorConfiguration (cmd/coordinator), and the args of the scheduler plugins,
// CapacityRequestArgs and VNAffinityArgs. Each has defaults and a validation whose errors name the field and the value. Start
// reading at Load.
//
// +kubebuilder:object:generate=true
package v1alpha1
