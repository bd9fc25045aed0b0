package playground

import (
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/kueue/admission"
	"github.com/drover-sh/drover/kueue/provisioning"
)

const queueLabel = "kueue.x-k8s.io/queue-name"

// queued makes a Job one that Kueue starts when its queue admits it.
func queued(queue string, j *batchv1.Job) *batchv1.Job {
	j.Labels = map[string]string{queueLabel: queue}
	j.Spec.Suspend = ptr.To(true)
	return j
}

// inOneRack asks Kueue's Topology Aware Scheduling for all pods of the set in one rack.
func inOneRack(t corev1.PodTemplateSpec) corev1.PodTemplateSpec {
	t.Annotations = map[string]string{capacity.AnnotationRequiredTopology: rackLabel}
	return t
}

// flavor is a ResourceFlavor of the nodes with that label. topology may be empty.
func flavor(name, label, value, topology string) *kueue.ResourceFlavor {
	f := &kueue.ResourceFlavor{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       kueue.ResourceFlavorSpec{NodeLabels: map[string]string{label: value}},
	}
	if topology != "" {
		f.Spec.TopologyName = ptr.To(kueue.TopologyReference(topology))
	}
	return f
}

// queue is a LocalQueue, and a ClusterQueue story-<name> that has quota for that many GPUs in each of the flavors, in their
// order. Its workloads have to pass the check.
func queue(name string, gpus int64, check string, flavors ...string) []client.Object {
	quota := func(name corev1.ResourceName, q resource.Quantity) kueue.ResourceQuota {
		return kueue.ResourceQuota{Name: name, NominalQuota: q}
	}
	group := kueue.ResourceGroup{CoveredResources: []corev1.ResourceName{resourceGPU, corev1.ResourceCPU, corev1.ResourceMemory}}
	for _, f := range flavors {
		group.Flavors = append(group.Flavors, kueue.FlavorQuotas{
			Name: kueue.ResourceFlavorReference(f),
			Resources: []kueue.ResourceQuota{
				quota(resourceGPU, *resource.NewQuantity(gpus, resource.DecimalSI)),
				quota(corev1.ResourceCPU, resource.MustParse("100k")),
				quota(corev1.ResourceMemory, resource.MustParse("1Pi")),
			},
		})
	}
	return []client.Object{
		&kueue.ClusterQueue{
			ObjectMeta: metav1.ObjectMeta{Name: "story-" + name},
			Spec: kueue.ClusterQueueSpec{
				NamespaceSelector: &metav1.LabelSelector{},
				ResourceGroups:    []kueue.ResourceGroup{group},
				AdmissionChecksStrategy: &kueue.AdmissionChecksStrategy{AdmissionChecks: []kueue.AdmissionCheckStrategyRule{
					{Name: kueue.AdmissionCheckReference(check)},
				}},
			},
		},
		&kueue.LocalQueue{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec:       kueue.LocalQueueSpec{ClusterQueue: kueue.ClusterQueueReference("story-" + name)},
		},
	}
}

// capacityCheck is an AdmissionCheck of ours with its configuration.
func capacityCheck(name string, config fleetv1alpha1.CapacityCheckConfigSpec) []client.Object {
	return []client.Object{
		&fleetv1alpha1.CapacityCheckConfig{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: config},
		admissionCheck(name, admission.ControllerName, fleetv1alpha1.GroupName, "CapacityCheckConfig"),
	}
}

// provisioningCheck is Kueue's own ProvisioningRequest check with our class.
func provisioningCheck(name string) []client.Object {
	return []client.Object{
		&kueue.ProvisioningRequestConfig{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec:       kueue.ProvisioningRequestConfigSpec{ProvisioningClassName: provisioning.ClassName},
		},
		admissionCheck(name, kueue.ProvisioningRequestControllerName, kueue.GroupVersion.Group, "ProvisioningRequestConfig"),
	}
}

// admissionCheck has parameters of its own name.
func admissionCheck(name, controller, group, kind string) *kueue.AdmissionCheck {
	return &kueue.AdmissionCheck{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: kueue.AdmissionCheckSpec{
			ControllerName: controller,
			Parameters:     &kueue.AdmissionCheckParametersReference{APIGroup: group, Kind: kind, Name: name},
		},
	}
}

// racks is a Topology of racks and hosts.
func racks(name string) *kueue.Topology {
	return &kueue.Topology{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       kueue.TopologySpec{Levels: []kueue.TopologyLevel{{NodeLabel: rackLabel}, {NodeLabel: corev1.LabelHostname}}},
	}
}

// jobOf is the name of the workload's Job.
func jobOf(wl *kueue.Workload) string {
	for _, owner := range wl.OwnerReferences {
		if owner.Kind == "Job" {
			return owner.Name
		}
	}
	return ""
}

func admitted(wl *kueue.Workload) bool {
	return wl != nil && apimeta.IsStatusConditionTrue(wl.Status.Conditions, kueue.WorkloadAdmitted)
}

// reserved says whether the workload holds quota.
func reserved(wl *kueue.Workload) bool {
	return apimeta.IsStatusConditionTrue(wl.Status.Conditions, kueue.WorkloadQuotaReserved)
}

// checkState is that of the workload's first check; the zero value where it has none yet.
func checkState(wl *kueue.Workload) kueue.AdmissionCheckState {
	if wl == nil || len(wl.Status.AdmissionChecks) == 0 {
		return kueue.AdmissionCheckState{}
	}
	return wl.Status.AdmissionChecks[0]
}

// flavorOf is the flavor in which quota for the resource is reserved.
func flavorOf(wl *kueue.Workload, name corev1.ResourceName) string {
	if wl.Status.Admission == nil || len(wl.Status.Admission.PodSetAssignments) == 0 {
		return ""
	}
	return string(wl.Status.Admission.PodSetAssignments[0].Flavors[name])
}
