package rollup

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/internal/builders"
)

// What is stripped is read by nobody: the profile, and the answers that eviction depends on, are the same without it.
func TestStrippedPodsHaveTheSameProfile(t *testing.T) {
	for name, pod := range map[string]*corev1.Pod{
		"plain":    builders.Pod("ns", "p").Requests("cpu", "1", "memory", "1Gi").Obj(),
		"sidecars": builders.Pod("ns", "p").Requests("cpu", "1").InitContainer("cpu", "4").Sidecar("cpu", "1").Obj(),
		"overhead": builders.Pod("ns", "p").Requests("cpu", "1").Overhead("cpu", "100m").PodRequests("cpu", "3").Obj(),
		"placed":   builders.Pod("ns", "p").Requests("cpu", "1").Node("n").Priority(7).HostPort(80).Claim("data").Obj(),
		"rules": builders.Pod("ns", "p").Label("app", "db").NodeSelector("disk", "ssd").
			NodeAffinity(builders.NodeExpr("zone", corev1.NodeSelectorOpIn, "a", "b")).
			PodAntiAffinity(corev1.LabelHostname, "app", "db").Spread(corev1.LabelTopologyZone, 1, corev1.DoNotSchedule).
			Tolerates("gpu", corev1.TaintEffectNoSchedule).Obj(),
		"gang":   builders.Pod("ns", "p").Requests("cpu", "1").PodGroup("g").PodAffinity(corev1.LabelTopologyZone, "a", "b").Obj(),
		"native": builders.Pod("ns", "p").Requests("cpu", "1").SchedulingGroup("g").Obj(),
		"kueue": builders.Pod("ns", "p").Label("kueue.x-k8s.io/pod-group-name", "g").
			Annotation("kueue.x-k8s.io/podset-required-topology", corev1.LabelTopologyZone).Obj(),
		"daemon": builders.Pod("ns", "p").Daemon("d").Obj(),
		"mirror": builders.Pod("ns", "p").Mirror().Obj(),
		"stays":  builders.Pod("ns", "p").Annotation(annotationSafeToEvict, "false").Obj(),
		"ending": builders.Pod("ns", "p").Node("n").Terminating(time.Unix(1, 0)).Obj(),
		"ended":  builders.Pod("ns", "p").Node("n").Phase(corev1.PodFailed).Obj(),
	} {
		t.Run(name, func(t *testing.T) {
			pod.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "kubectl"}}
			metav1.SetMetaDataAnnotation(&pod.ObjectMeta, corev1.LastAppliedConfigAnnotation, "{}")
			for i := range pod.Spec.InitContainers {
				pod.Spec.InitContainers[i].Env = []corev1.EnvVar{{Name: "A", Value: "B"}}
			}
			pod.Spec.Containers = append(pod.Spec.Containers, corev1.Container{Name: "more", Args: []string{"x"}, RestartPolicy: nil})
			pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: "config",
				VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{}}})
			stripped, err := stripPod(pod.DeepCopy())
			if err != nil {
				t.Fatal(err)
			}
			got := stripped.(*corev1.Pod)
			if diff := cmp.Diff(capacity.ProfileOfPod(pod), capacity.ProfileOfPod(got)); diff != "" {
				t.Errorf("the profile changed (-whole +stripped):\n%s", diff)
			}
			if evictable(pod) != evictable(got) || stays(pod) != stays(got) {
				t.Error("a different answer to whether the pod may be evicted")
			}
			if diff := cmp.Diff(hostPorts(pod), hostPorts(got)); diff != "" {
				t.Errorf("host ports changed: %s", diff)
			}
			if len(got.ManagedFields) != 0 || got.Annotations[corev1.LastAppliedConfigAnnotation] != "" ||
				len(got.Spec.Containers[1].Args) != 0 || len(got.Spec.Volumes) == len(pod.Spec.Volumes) {
				t.Errorf("not stripped: %+v", got)
			}
		})
	}
}

// The back-stop looks for a claim's class, and for whether its volume is on the way, where older and newer clusters say so.
func TestStrippedClaimsKeepTheirClassAndNode(t *testing.T) {
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{
		corev1.BetaStorageClassAnnotation:          "fast",
		"volume.kubernetes.io/selected-node":       "n",
		corev1.LastAppliedConfigAnnotation:         "{}",
		"volume.kubernetes.io/storage-provisioner": "x",
	}}}
	got, err := CacheOptions("fleet-system").DefaultTransform(claim)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{corev1.BetaStorageClassAnnotation: "fast", "volume.kubernetes.io/selected-node": "n"}
	if diff := cmp.Diff(want, got.(*corev1.PersistentVolumeClaim).Annotations); diff != "" {
		t.Errorf("annotations (-want +got):\n%s", diff)
	}
}
