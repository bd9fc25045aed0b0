package kwok

import (
	"fmt"
	"maps"
	"os"

	corev1 "k8s.io/api/core/v1"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/autoscaler/provider"
	"github.com/drover-sh/drover/capacity"
)

// readOfferings reads the file again if its content is not last.
func readOfferings(path, last string) (content string, out []provider.Offering, err error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return last, nil, fmt.Errorf("reading offerings: %w", err)
	}
	if content = string(data); content == last && last != "" {
		return last, nil, nil
	}
	var list configv1alpha1.OfferingList
	if err := configv1alpha1.Decode(data, &list); err != nil {
		return content, nil, fmt.Errorf("offerings file %s: %w", path, err)
	}
	out = make([]provider.Offering, 0, len(list.Offerings))
	for i := range list.Offerings {
		o, err := offeringOf(&list.Offerings[i])
		if err != nil {
			return content, nil, fmt.Errorf("offerings file %s: offerings[%d]: %w", path, i, err)
		}
		out = append(out, o)
	}
	return content, out, nil
}

func offeringOf(in *configv1alpha1.Offering) (provider.Offering, error) {
	allocatable, err := capacity.ParseResources(in.Resources)
	if err != nil {
		return provider.Offering{}, err
	}
	// What a kubelet puts on its node. A pod that selects its system by label has to find the offering, too.
	labels := map[string]string{corev1.LabelOSStable: "linux", corev1.LabelArchStable: "amd64"}
	maps.Copy(labels, in.Labels)
	labels[corev1.LabelInstanceTypeStable] = in.InstanceType
	out := provider.Offering{
		Offering: capacity.Offering{Name: in.Name, Labels: labels, Allocatable: allocatable, Cost: in.Cost,
			Atomic: in.Atomic},
		InstanceType: in.InstanceType, Availability: in.Availability,
	}
	if in.ProvisioningTime != nil {
		out.ProvisioningTime = in.ProvisioningTime.Duration
	}
	for _, text := range in.Taints {
		taint, err := configv1alpha1.ParseTaint(text)
		if err != nil {
			return provider.Offering{}, fmt.Errorf("taint %q: %w", text, err)
		}
		out.Taints = append(out.Taints, taint)
	}
	for _, d := range in.Domains {
		domain := capacity.Domain{Name: d.Name(), Labels: map[string]string{corev1.LabelTopologyZone: d.Zone},
			Available: d.Count}
		if d.Rack != "" {
			domain.Labels[fleetv1alpha1.LabelRack] = d.Rack
		}
		out.Domains = append(out.Domains, domain)
	}
	return out, nil
}
