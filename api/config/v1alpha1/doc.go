// Package v1alpha1 holds the versioned configuration files of Drover's programs: ManagerConfiguration (cmd/manager),
// AutoscalerConfiguration (cmd/autoscaler) and CapacityRequestArgs (the scheduler plugin's args). Each has defaults and a
// validation whose errors name the field and the value. Start reading at Load.
//
// +kubebuilder:object:generate=true
package v1alpha1
