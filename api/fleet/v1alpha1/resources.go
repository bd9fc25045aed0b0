package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// ResourceList maps a resource name to a positive quantity. It converts to and from a corev1.ResourceList. Fifteen names are
// the most for which the API server accepts the rule's cost.
//
// +kubebuilder:validation:MaxProperties=15
// +kubebuilder:validation:XValidation:rule="self.all(k, sign(quantity(string(self[k]))) > 0)",message="every quantity must be positive"
type ResourceList map[corev1.ResourceName]resource.Quantity
