package rollup

import (
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-helpers/storage/volume"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
)

// annotationPrefixes are the annotations that something in the manager reads. The rest of a pod's annotations can weigh
// more than the pod.
var annotationPrefixes = []string{
	"kubernetes.io/config.mirror",
	"kubernetes.io/config.source",
	"scheduling.k8s.io/",
	"scheduling.x-k8s.io/",
	"kueue.x-k8s.io/",
	"autoscaling.x-k8s.io/",
	"fleet.lucy.sh/",
	corev1.BetaStorageClassAnnotation, // of claims
	volume.AnnSelectedNode,            // of claims
	annotationSafeToEvict,
	annotationDoNotDisrupt,
}

// CacheOptions returns the options of the manager's cache: objects of the system namespace only where the kind is ours, and
// every object stripped of what nothing in the manager reads. Objects from this cache must never be written back by an
// update; patches that are diffs of two such objects are fine.
func CacheOptions(namespace string) cache.Options {
	inNamespace := map[string]cache.Config{namespace: {}}
	return cache.Options{
		DefaultTransform: stripMetadata,
		ByObject: map[client.Object]cache.ByObject{
			&corev1.Pod{}:                      {Transform: stripPod},
			&corev1.Node{}:                     {Transform: stripNode},
			&appsv1.DaemonSet{}:                {Transform: stripDaemonSet},
			&fleetv1alpha1.UpcomingNode{}:      {Namespaces: inNamespace},
			&fleetv1alpha1.AvailableCapacity{}: {Namespaces: inNamespace},
		},
	}
}

// stripMetadata drops what no controller reads of any object.
func stripMetadata(obj any) (any, error) {
	if o, ok := obj.(metav1.Object); ok {
		o.SetManagedFields(nil)
		if a := o.GetAnnotations(); a != nil {
			o.SetAnnotations(keepAnnotations(a))
		}
	}
	return obj, nil
}

func keepAnnotations(all map[string]string) map[string]string {
	var kept map[string]string
	for key, value := range all {
		for _, prefix := range annotationPrefixes {
			if strings.HasPrefix(key, prefix) {
				if kept == nil {
					kept = map[string]string{}
				}
				kept[key] = value
				break
			}
		}
	}
	return kept
}

// stripPod keeps of a pod what its profile, the classification of its failure and its eviction depend on.
func stripPod(obj any) (any, error) {
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		return obj, nil
	}
	if _, err := stripMetadata(pod); err != nil {
		return nil, err
	}
	pod.Spec.Containers = stripContainers(pod.Spec.Containers)
	pod.Spec.InitContainers = stripContainers(pod.Spec.InitContainers)
	pod.Spec.EphemeralContainers = nil
	pod.Spec.ImagePullSecrets = nil
	pod.Spec.HostAliases = nil
	pod.Spec.SecurityContext = nil
	pod.Spec.DNSConfig = nil
	pod.Spec.ReadinessGates = nil

	// Only volumes that a scheduler has to place matter.
	var volumes []corev1.Volume
	for _, v := range pod.Spec.Volumes {
		source := corev1.VolumeSource{
			PersistentVolumeClaim: v.PersistentVolumeClaim,
			Ephemeral:             v.Ephemeral,
		}
		if source.PersistentVolumeClaim != nil || source.Ephemeral != nil {
			volumes = append(volumes, corev1.Volume{Name: v.Name, VolumeSource: source})
		}
	}
	pod.Spec.Volumes = volumes

	pod.Status.ContainerStatuses = nil
	pod.Status.InitContainerStatuses = nil
	pod.Status.EphemeralContainerStatuses = nil
	pod.Status.PodIPs = nil
	pod.Status.HostIPs = nil
	return pod, nil
}

// stripContainers keeps what a container takes of a node: resources, host ports, and whether it is a sidecar.
func stripContainers(containers []corev1.Container) []corev1.Container {
	for i := range containers {
		c := &containers[i]
		containers[i] = corev1.Container{
			Name:          c.Name,
			Resources:     c.Resources,
			Ports:         c.Ports,
			RestartPolicy: c.RestartPolicy,
		}
	}
	return containers
}

// stripNode keeps labels, taints, capacity and conditions. Images and volumes make up most of a real node.
func stripNode(obj any) (any, error) {
	node, ok := obj.(*corev1.Node)
	if !ok {
		return obj, nil
	}
	if _, err := stripMetadata(node); err != nil {
		return nil, err
	}
	node.Status = corev1.NodeStatus{
		Capacity:    node.Status.Capacity,
		Allocatable: node.Status.Allocatable,
		Conditions:  node.Status.Conditions,
	}
	return node, nil
}

// stripDaemonSet keeps the template's placement and resources.
func stripDaemonSet(obj any) (any, error) {
	ds, ok := obj.(*appsv1.DaemonSet)
	if !ok {
		return obj, nil
	}
	if _, err := stripMetadata(ds); err != nil {
		return nil, err
	}
	ds.Spec.Template.Spec.Containers = stripContainers(ds.Spec.Template.Spec.Containers)
	ds.Spec.Template.Spec.InitContainers = stripContainers(ds.Spec.Template.Spec.InitContainers)
	ds.Spec.Template.Spec.Volumes = nil
	ds.Status = appsv1.DaemonSetStatus{}
	return ds, nil
}
