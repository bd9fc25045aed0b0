package playground

import (
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
)

const (
	resourceGPU = "nvidia.com/gpu"
	taintGPU    = "nvidia.com/gpu"
	image       = "example.invalid/playground" // never pulled
)

// gpuOffering sells nodes of 8 GPUs in racks, whose names map to the number of nodes.
func gpuOffering(racks ...configv1alpha1.OfferingDomain) configv1alpha1.Offering {
	return configv1alpha1.Offering{
		Name:             "gpu-h100",
		InstanceType:     "a3-highgpu-8g",
		Labels:           map[string]string{"accelerator-type": "nvidia-h100-80gb"},
		Resources:        map[string]string{"cpu": "208", "memory": "1872Gi", resourceGPU: "8"},
		Taints:           []string{taintGPU + "=present:NoSchedule"},
		Cost:             31.22,
		Atomic:           true,
		ProvisioningTime: duration(launchLatency + registerLatency),
		Domains:          racks,
	}
}

// a100Offering sells another kind of them.
func a100Offering(racks ...configv1alpha1.OfferingDomain) configv1alpha1.Offering {
	o := gpuOffering(racks...)
	o.Name, o.InstanceType, o.Cost = "gpu-a100", "a2-ultragpu-8g", 40.55
	o.Labels = map[string]string{"accelerator-type": "nvidia-a100-80gb"}
	return o
}

func rack(zone, name string, nodes int32) configv1alpha1.OfferingDomain {
	return configv1alpha1.OfferingDomain{Zone: zone, Rack: name, Count: nodes}
}

// cpuOffering sells nodes of 16 CPUs in three zones.
func cpuOffering(nodesPerZone int32) configv1alpha1.Offering {
	o := configv1alpha1.Offering{
		Name:             "cpu-general",
		InstanceType:     "m6i.4xlarge",
		Resources:        map[string]string{"cpu": "16", "memory": "64Gi"},
		Cost:             0.77,
		ProvisioningTime: duration(launchLatency + registerLatency),
	}
	for _, zone := range []string{"us-east-1a", "us-east-1b", "us-east-1c"} {
		o.Domains = append(o.Domains, configv1alpha1.OfferingDomain{Zone: zone, Count: nodesPerZone})
	}
	return o
}

// DefaultOfferings are what a playground sells outside of stories.
func DefaultOfferings() []configv1alpha1.Offering {
	return []configv1alpha1.Offering{
		cpuOffering(100),
		gpuOffering(rack("us-east-1a", "rack-1a-07", 64), rack("us-east-1a", "rack-1a-08", 40),
			rack("us-east-1b", "rack-1b-03", 80)),
	}
}

// template is a pod that asks for the resources, given as pairs of name and quantity, and calls itself app.
func template(app string, pairs ...string) corev1.PodTemplateSpec {
	requests := quantities(pairs...)
	limits := corev1.ResourceList{}
	if gpus, ok := requests[resourceGPU]; ok { // an extended resource has to be limited to what is requested
		limits[resourceGPU] = gpus
	}
	return corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": app}},
		Spec: corev1.PodSpec{
			SchedulerName:                 Scheduler,
			TerminationGracePeriodSeconds: ptr.To[int64](1),
			Containers: []corev1.Container{{
				Name: "main", Image: image, Resources: corev1.ResourceRequirements{Requests: requests, Limits: limits},
			}},
		},
	}
}

// tolerating adds a toleration of everything that a taint with the key does.
func tolerating(t corev1.PodTemplateSpec, key string) corev1.PodTemplateSpec {
	t.Spec.Tolerations = append(t.Spec.Tolerations, corev1.Toleration{Key: key, Operator: corev1.TolerationOpExists})
	return t
}

// sharing asks that all pods of the app stand in one domain of the key.
func sharing(t corev1.PodTemplateSpec, key string) corev1.PodTemplateSpec {
	t.Spec.Affinity = &corev1.Affinity{PodAffinity: &corev1.PodAffinity{
		RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{
			TopologyKey:   key,
			LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": t.Labels["app"]}},
		}},
	}}
	return t
}

// training is pods of 8 GPUs each.
func training(app string) corev1.PodTemplateSpec {
	return tolerating(template(app, "cpu", "96", "memory", "768Gi", resourceGPU, "8"), taintGPU)
}

// job runs pods all at once until it is deleted.
func job(name string, pods int32, t corev1.PodTemplateSpec) *batchv1.Job {
	t.Spec.RestartPolicy = corev1.RestartPolicyNever
	return &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       batchv1.JobSpec{Parallelism: &pods, Completions: &pods, Template: t},
	}
}

func deployment(name string, pods int32, t corev1.PodTemplateSpec) *appsv1.Deployment {
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: appsv1.DeploymentSpec{
			Replicas: &pods, Selector: &metav1.LabelSelector{MatchLabels: t.Labels}, Template: t,
		},
	}
}

func daemonSet(name string, t corev1.PodTemplateSpec) *appsv1.DaemonSet {
	return &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: t.Labels}, Template: t},
	}
}

func pod(name string, t corev1.PodTemplateSpec) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: t.Labels},
		Spec:       t.Spec,
	}
}

func request(name string, pairs ...string) *fleetv1alpha1.CapacityRequest {
	return &fleetv1alpha1.CapacityRequest{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: fleetv1alpha1.CapacityRequestSpec{
			Resources: fleetv1alpha1.ResourceRequests{Requests: fleetv1alpha1.ResourceList(quantities(pairs...))},
		},
	}
}

// quantities panics on what is not a quantity: every caller passes constants.
func quantities(pairs ...string) corev1.ResourceList {
	list := corev1.ResourceList{}
	for i := 0; i+1 < len(pairs); i += 2 {
		list[corev1.ResourceName(pairs[i])] = resource.MustParse(pairs[i+1])
	}
	return list
}

func count(n int, singular string) string {
	if n == 1 {
		return fmt.Sprintf("1 %s", singular)
	}
	return fmt.Sprintf("%d %ss", n, singular)
}
