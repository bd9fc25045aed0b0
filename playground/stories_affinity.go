package playground

import (
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/internal/controlplane"
	"github.com/drover-sh/drover/sharding"
)

// Affinity places by Virtual Nodes: the members of a WatchGroup apart, by what they own, and pods with one hash key together.
func Affinity() Story {
	const perKey = 8
	owned := []int{40, 40, 360, 40, 40, 40, 360, 40, 40} // of 1000
	keys := []string{"model-a", "model-b", "model-c", "model-d", "model-i", "model-k"}
	return Story{
		Name:      "affinity",
		Title:     "members spread by the Virtual Nodes that they own; pods of one hash key share a zone, also when a zone comes",
		Offerings: []configv1alpha1.Offering{cpuOffering(100)},
		Play: func(s *Stage) {
			s.AtMostNodes(0)
			s.addZone("us-east-1a", 18)
			s.addZone("us-east-1b", 6)
			s.addZone("us-east-1c", 6)
			s.Step("30 nodes in 3 zones, one three times as large")

			first := 0
			for i, n := range owned {
				s.Create(sliceOf("owners", fmt.Sprintf("owners-%d", i), first, n))
				first += n
			}
			for i := range owned {
				s.Create(pod(fmt.Sprintf("owners-%d", i), memberOf("owners", template("owners", "cpu", "1", "memory", "1Gi"))))
			}
			s.AwaitRunning("owners", len(owned))
			s.Look(func(w *World) {
				lost := map[string]int{}
				for _, p := range w.PodsOf("owners") {
					var i int
					if _, err := fmt.Sscanf(p.Name, "owners-%d", &i); err == nil {
						lost[w.zoneOf(p)] += owned[i]
					}
				}
				if worst := slices.Max(slices.Collect(maps.Values(lost))); worst > 450 {
					s.fail(fmt.Errorf("expected: at most 450 of 1000 Virtual Nodes in a zone; seen: %s", say(lost)))
				}
				s.Step("9 members, two of which own 36%% each; Virtual Nodes of 1000: %s", say(lost))
			})

			web := deployment("web", 6, memberOf("web", template("web", "cpu", "1", "memory", "1Gi")))
			s.Create(web)
			s.awaitTwoInEachZone("")
			s.Step("6 members of another group, which own nothing yet: 2 in each zone")
			web.Spec.Template.Annotations = map[string]string{"version": "2"}
			s.Update(web)
			s.awaitTwoInEachZone("2")
			s.Step("rolling update: the new 6 are 2 in each zone, too")

			var before, after map[string]string
			models := s.createModels(keys, perKey)
			before = s.awaitModels(keys, perKey)
			s.Step("%d pods of %d hash keys: those of a key share a zone", perKey*len(keys), len(keys))
			s.Table("get", "pods", "-n", s.Namespace(), "-l", "app=model-a", "-o", "custom-columns=POD:.metadata.name,NODE:.spec.nodeName")
			s.Delete(models...)
			for _, key := range keys {
				s.AwaitNoDemand(key)
			}
			s.addZone("us-east-1d", 6)
			s.createModels(keys, perKey)
			after = s.awaitModels(keys, perKey)
			moved := 0
			for _, key := range keys {
				switch {
				case before[key] == after[key]:
				case after[key] == "us-east-1d":
					moved++
				default:
					s.Fail("expected: keys move to the new zone only; seen: %s moves from %s to %s", key, before[key], after[key])
				}
			}
			s.Step("a fourth zone, all pods made again: %d of %d keys are in it, the others where they were", moved, len(keys))
		},
	}
}

// addZone makes nodes that nobody launched, in a zone.
func (s *Stage) addZone(zone string, nodes int) {
	resources := quantities("cpu", "16", "memory", "64Gi", "pods", "110")
	name := func(i int) string { return fmt.Sprintf("%s-%02d", zone, i) }
	for i := range nodes {
		s.Create(&corev1.Node{
			ObjectMeta: metav1.ObjectMeta{
				Name:        name(i),
				Labels:      map[string]string{labelStatic: "true", corev1.LabelHostname: name(i), zoneLabel: zone},
				Annotations: map[string]string{controlplane.KWOKAnnotation: controlplane.KWOKAnnotationValue},
			},
			Status: corev1.NodeStatus{Capacity: resources, Allocatable: resources},
		})
	}
	s.Await(fmt.Sprintf("%d static nodes Ready in %s", nodes, zone), func(w *World) (bool, string) {
		ready := 0
		for i := range nodes {
			if n := w.Node(name(i)); n != nil && nodeReady(n) && len(n.Spec.Taints) == 0 {
				ready++
			}
		}
		return ready == nodes, fmt.Sprintf("%d", ready)
	})
}

// memberOf makes the pods members of a WatchGroup.
func memberOf(group string, t corev1.PodTemplateSpec) corev1.PodTemplateSpec {
	t.Labels[lbv1alpha1.LabelWatchGroup] = group
	t.Spec.SchedulerName = affinityProfile
	return t
}

// sliceOf is what a coordinator would write: the member owns n Virtual Nodes from the first on.
func sliceOf(group, member string, first, n int) *unstructured.Unstructured {
	o := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{
		"watchGroup": group, "member": member, "epoch": int64(1), "owned": fmt.Sprintf("%d-%d", first, first+n-1),
	}}}
	o.SetGroupVersionKind(lbv1alpha1.GroupVersion.WithKind("VirtualNodeSlice"))
	o.SetName(lbv1alpha1.MemberName(group, member))
	return o
}

func (w *World) zoneOf(p *corev1.Pod) string {
	if n := w.Node(p.Spec.NodeName); n != nil {
		return n.Labels[zoneLabel]
	}
	return ""
}

// awaitTwoInEachZone waits for the six pods of web, of a version of their template.
func (s *Stage) awaitTwoInEachZone(version string) {
	s.Await("2 running pods of web in each of 3 zones", func(w *World) (bool, string) {
		in, pods := map[string]int{}, w.PodsOf("web")
		for _, p := range pods {
			if p.Status.Phase == corev1.PodRunning && p.DeletionTimestamp == nil && p.Annotations["version"] == version {
				in[w.zoneOf(p)]++
			}
		}
		return len(pods) == 6 && maps.Equal(in, map[string]int{"us-east-1a": 2, "us-east-1b": 2, "us-east-1c": 2}), say(in)
	})
}

// createModels makes a Deployment for each hash key.
func (s *Stage) createModels(keys []string, pods int32) []client.Object {
	var made []client.Object
	for _, key := range keys {
		t := template(key, "cpu", "100m", "memory", "128Mi")
		t.Annotations = map[string]string{sharding.AnnotationHashKey: key}
		t.Spec.SchedulerName = affinityProfile
		made = append(made, deployment(key, pods, t))
	}
	s.Create(made...)
	return made
}

// awaitModels waits until all pods of each key run in one zone, and returns the zones.
func (s *Stage) awaitModels(keys []string, pods int) map[string]string {
	zones := map[string]string{}
	for _, key := range keys {
		s.Await(fmt.Sprintf("%d running pods of %s in one zone", pods, key), func(w *World) (bool, string) {
			in := map[string]int{}
			for _, p := range w.PodsOf(key) {
				if p.Status.Phase == corev1.PodRunning && p.DeletionTimestamp == nil {
					in[w.zoneOf(p)]++
					zones[key] = w.zoneOf(p)
				}
			}
			return len(in) == 1 && in[zones[key]] == pods, say(in)
		})
	}
	return zones
}
