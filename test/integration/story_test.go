package integration

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	rpc "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
)

// TestStory plays the stories one after the other on one fleet: each begins with no provisioned node and ends with none, which
// is part of what it shows.
func TestStory(t *testing.T) {
	f := startFleet(t, fleetOptions{})
	for _, story := range []struct {
		name string
		play func(*testing.T, *fleet)
	}{
		{"training", trainingStory},
		{"packing", packingStory},
		{"withdrawal", withdrawalStory},
		{"stockout", stockoutStory},
		{"scale from zero over zones", scaleFromZeroStory},
		{"apart", apartStory},
		{"taints", taintsStory},
		{"configuration failures", configFailureStory},
		{"static nodes", staticNodesStory},
		{"request without a pod", requestWithoutPodStory},
	} {
		t.Run(story.name, func(t *testing.T) { story.play(t, f) })
		if t.Failed() {
			// The cluster is not as the next story expects it.
			return
		}
	}
}

// The training story of section 10: 64 pods of 8 GPUs that have to share a rack. One rack has 52 nodes, the other 64.
func trainingStory(t *testing.T, f *fleet) {
	ns := namespace(t, "training")
	seen := record(t)
	staticNode(t, "small", "cpu", "1") // with a node in the cluster it is the scheduler's plugin that asks
	// Stock comes when all have asked: a pod that finds a node before it was ever refused has no request, rightly.
	f.setOfferings(t, strings.NewReplacer("count: 52", "count: 0", "count: 64", "count: 0").Replace(defaultOfferings))
	waitAvailable(t, "gpu-8", 0)
	training := job(t, ns, "trainer", 64, requests("cpu", "90", "nvidia.com/gpu", "8"), tolerateGPU, sameRack("trainer"))
	eventually(t, "64 requests are there", func(ctx context.Context) (bool, string) {
		var requests fleetv1alpha1.CapacityRequestList
		failure := list(ctx, &requests, client.InNamespace(ns))
		return len(requests.Items) == 64, fmt.Sprintf("%d %s", len(requests.Items), failure)
	})
	f.setOfferings(t, defaultOfferings)

	pods := waitRunning(t, ns, "trainer", 64)
	seen.expectNodes(t, 64)
	seen.expectOneRequestPerPod(t, pods)
	if racks := valuesOf(waitNodes(t, 64), fleetv1alpha1.LabelRack); len(racks) != 1 || racks["rack-b1"] != 64 {
		t.Errorf("nodes by rack: %v, want all 64 in rack-b1", racks)
	}
	var acknowledged int
	eventually(t, "64 requests are acknowledged", func(ctx context.Context) (bool, string) {
		var requests fleetv1alpha1.CapacityRequestList
		failure := list(ctx, &requests, client.InNamespace(ns))
		acknowledged = 0
		for _, r := range requests.Items {
			if r.Status.Phase == fleetv1alpha1.CapacityRequestAcknowledged {
				acknowledged++
			}
		}
		return acknowledged == 64 && len(requests.Items) == 64,
			fmt.Sprintf("%d of %d %s", acknowledged, len(requests.Items), failure)
	})
	rows, ok, err := f.metric(t.Context(), "manager", scraperToken(t), "drover_rollup_rows")
	if err != nil || !ok || rows < 1 || rows > 2 {
		t.Errorf("the roll-up has %v rows (there: %t, error: %v), want 1 or 2", rows, ok, err)
	}

	remove(t, training)
	waitQuiet(t)
	seen.expectNodes(t, 64)
}

// 100 pods of 1 CPU on nodes of 16, of which a DaemonSet takes a half: 15 to a node, 7 nodes.
func packingStory(t *testing.T, _ *fleet) {
	ns := namespace(t, "packing")
	seen := record(t)
	daemon := daemonSet(t, ns, "agent", requests("cpu", "500m"))
	// A node is there before its agent's pod is, and the batch takes its room: the agent then preempts.
	batch := replicas(t, ns, "batch", 100, requests("cpu", "1"))

	waitRunning(t, ns, "batch", 100)
	seen.expectNodes(t, 7)
	waitRunning(t, ns, "agent", 7)

	remove(t, batch)
	waitQuiet(t)
	remove(t, daemon)
}

// The training ends: exactly its nodes go, and no other pod moves.
func withdrawalStory(t *testing.T, _ *fleet) {
	ns := namespace(t, "withdrawal")
	training := job(t, ns, "trainer", 16, requests("nvidia.com/gpu", "8"), tolerateGPU)
	batch := job(t, ns, "etl", 10, requests("cpu", "10"), overZones("etl"))
	waitRunning(t, ns, "trainer", 16)
	before := waitRunning(t, ns, "etl", 10)
	waitNodes(t, 26)

	remove(t, training)
	left := waitNodes(t, 10)
	if kinds := valuesOf(left, corev1.LabelInstanceTypeStable); kinds["cpu-16"] != 10 {
		t.Errorf("nodes that are left: %v, want the 10 of the batch", kinds)
	}
	places := map[types.UID]string{}
	for _, p := range before {
		places[p.UID] = p.Spec.NodeName
	}
	for _, p := range waitRunning(t, ns, "etl", 10) {
		if places[p.UID] != p.Spec.NodeName {
			t.Errorf("pod %s moved or is a replacement", p.Name)
		}
	}
	remove(t, batch)
	waitQuiet(t)
}

// Of 8 nodes 4 can be had: 4 come, 4 pods wait, nobody asks for more than the difference; when stock returns, it heals.
func stockoutStory(t *testing.T, f *fleet) {
	ns := namespace(t, "stockout")
	seen := record(t)
	f.setOfferings(t, strings.NewReplacer("count: 52", "count: 4", "count: 64", "count: 0").Replace(defaultOfferings))
	waitAvailable(t, "gpu-8", 4)
	defer f.setOfferings(t, defaultOfferings)
	training := job(t, ns, "trainer", 8, requests("nvidia.com/gpu", "8"), tolerateGPU)

	waitRunning(t, ns, "trainer", 4)
	state := f.waitFeed(t, "4 of the pods cannot be served", func(s *rpc.FeedState) bool {
		v := short(s)
		return v != nil && v.Short == 4 && v.Met+v.InFlight == 4
	})
	if v := short(state); v.Reason == "" || v.NearestOffering != "gpu-8" {
		t.Errorf("the verdict does not explain itself: %v", v)
	}
	seen.expectNodes(t, 4)

	f.setOfferings(t, defaultOfferings)
	waitRunning(t, ns, "trainer", 8)
	seen.expectNodes(t, 8)
	remove(t, training)
	waitQuiet(t)
	waitAvailable(t, "gpu-8", 52+64)
}

// No node at all, so that the scheduler's plugin is never called: the back-stop asks. The spread decides where.
func scaleFromZeroStory(t *testing.T, f *fleet) {
	ns := namespace(t, "from-zero")
	seen := record(t)
	// Stock comes when all have asked, as in the training story.
	f.setOfferings(t, strings.ReplaceAll(defaultOfferings, "count: 20", "count: 0"))
	waitAvailable(t, "cpu-16", 0)
	web := job(t, ns, "web", 3, requests("cpu", "1"), overZones("web"))
	eventually(t, "3 requests are there", func(ctx context.Context) (bool, string) {
		var requests fleetv1alpha1.CapacityRequestList
		failure := list(ctx, &requests, client.InNamespace(ns))
		return len(requests.Items) == 3, fmt.Sprintf("%d %s", len(requests.Items), failure)
	})
	f.setOfferings(t, defaultOfferings)
	pods := waitRunning(t, ns, "web", 3)
	seen.expectOneRequestPerPod(t, pods)
	seen.expectNodes(t, 3)
	seen.expectZones(t, 3)
	remove(t, web)
	waitQuiet(t)
}

// Pods that must not share a node get one each, and no more.
func apartStory(t *testing.T, _ *fleet) {
	ns := namespace(t, "apart")
	seen := record(t)
	db := job(t, ns, "db", 10, requests("cpu", "1"), apart("db"))
	waitRunning(t, ns, "db", 10)
	seen.expectNodes(t, 10)
	remove(t, db)
	waitQuiet(t)
}

// Only the GPU nodes are large enough for this pod, and it does not tolerate their taint: no launch, and one event that says
// so. Its twin that does tolerate it gets a node, which is none for the other.
func taintsStory(t *testing.T, _ *fleet) {
	ns := namespace(t, "taints")
	seen := record(t)
	refused := pod(t, ns, "refused", requests("cpu", "64"))
	eventually(t, "the pod has its event", func(ctx context.Context) (bool, string) {
		found := warnings(ctx, refused)
		return len(found) == 1, fmt.Sprint(found)
	})
	seen.expectNodes(t, 0)
	seen.expectNoRequestFor(t, *refused)

	tolerant := pod(t, ns, "tolerant", requests("cpu", "64"), tolerateGPU)
	waitRunning(t, ns, "tolerant", 1)
	seen.expectNodes(t, 1)
	remove(t, refused)
	remove(t, tolerant)
	waitQuiet(t)
}

// What no node can help gets one event and no request.
func configFailureStory(t *testing.T, f *fleet) {
	ns := namespace(t, "config-failure")
	seen := record(t)
	staticNode(t, "occupied", "cpu", "1")
	pvc := pod(t, ns, "missing-pvc", requests("cpu", "2"), func(s *corev1.PodSpec) {
		s.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "nowhere"},
		}}}
	})
	byName := pod(t, ns, "node-by-name", requests("cpu", "2"), func(s *corev1.PodSpec) {
		s.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
				NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{{
					Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{"gone"},
				}}}},
			},
		}}
	})
	alone := pod(t, ns, "no-companion", requests("cpu", "2"), func(s *corev1.PodSpec) {
		sameRack("nobody")(s)
	})
	impossible := pod(t, ns, "impossible-label", requests("cpu", "1"), func(s *corev1.PodSpec) {
		s.NodeSelector = map[string]string{"planet": "mars"}
	})
	named := pod(t, ns, "named", requests("cpu", "2"), func(s *corev1.PodSpec) { s.NodeName = "occupied" })

	for _, p := range []*corev1.Pod{pvc, byName, alone, impossible} {
		eventually(t, "pod "+p.Name+" has its event", func(ctx context.Context) (bool, string) {
			found := warnings(ctx, p)
			return len(found) == 1, fmt.Sprint(found)
		})
	}
	// A pod that a node helps, asked for later and served: by now the others have been looked at again.
	fine := pod(t, ns, "fine", requests("cpu", "2"))
	waitRunning(t, ns, "fine", 1)
	seen.expectNoRequestFor(t, *pvc, *byName, *alone, *impossible, *named)
	for _, p := range []*corev1.Pod{pvc, byName, alone, impossible} {
		if found := warnings(t.Context(), p); len(found) != 1 {
			t.Errorf("pod %s has %d events, want 1: %v", p.Name, len(found), found)
		}
	}
	seen.expectNodes(t, 1)
	for _, p := range []*corev1.Pod{pvc, byName, alone, impossible, named, fine} {
		if err := client.IgnoreNotFound(env.client.Delete(t.Context(), p)); err != nil {
			t.Fatal(err)
		}
	}
	waitQuiet(t)
}

// warnings are the notes of our own events on a pod.
func warnings(ctx context.Context, p *corev1.Pod) []string {
	var events eventsv1.EventList
	if failure := list(ctx, &events, client.InNamespace(p.Namespace)); failure != "" {
		return []string{failure, ""}
	}
	var notes []string
	for _, e := range events.Items {
		if e.Regarding.UID == p.UID && e.Action == "RequestCapacity" {
			notes = append(notes, e.Note)
		}
	}
	return notes
}

// Pods on a node that the autoscaler does not own are nobody's demand, requests or not.
func staticNodesStory(t *testing.T, _ *fleet) {
	ns := namespace(t, "static")
	seen := record(t)
	staticNode(t, "static-0", "cpu", "10")
	job(t, ns, "steady", 10, requests("cpu", "1"))
	steady := waitRunning(t, ns, "steady", 10)
	gpu := pod(t, ns, "gpu", requests("nvidia.com/gpu", "1"), tolerateGPU)
	waitRunning(t, ns, "gpu", 1)
	seen.expectNodes(t, 1) // the GPU pod's, and none for the ten
	seen.expectNoRequestFor(t, steady...)
	remove(t, gpu)
	waitQuiet(t)
}

// A request made by hand holds its node until it is deleted, with no pod in sight. A pod under a disruption budget that has
// come to stand there is moved by eviction, not by force.
func requestWithoutPodStory(t *testing.T, _ *fleet) {
	ns := namespace(t, "by-hand")
	request := &fleetv1alpha1.CapacityRequest{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "by-hand"},
		Spec: fleetv1alpha1.CapacityRequestSpec{Resources: fleetv1alpha1.ResourceRequests{
			Requests: fleetv1alpha1.ResourceList{corev1.ResourceCPU: resource.MustParse("12")},
		}},
	}
	create(t, request)
	waitNodes(t, 1)
	eventually(t, "the request is acknowledged", func(ctx context.Context) (bool, string) {
		err := env.client.Get(ctx, client.ObjectKeyFromObject(request), request)
		return request.Status.Phase == fleetv1alpha1.CapacityRequestAcknowledged, fmt.Sprint(request.Status, err)
	})
	remove(t, request)
	waitQuiet(t)
}

// setOfferings replaces the offerings file, which the autoscaler reads again, in one step.
func (f *fleet) setOfferings(t *testing.T, content string) {
	t.Helper()
	next := f.offeringsFile + ".next"
	if err := os.WriteFile(next, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(next, f.offeringsFile); err != nil {
		t.Fatal(err)
	}
}

// waitAvailable waits until the cluster is told that so many nodes of the instance type can be had.
func waitAvailable(t *testing.T, instanceType string, n int32) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d nodes of %s are available", n, instanceType), func(ctx context.Context) (bool, string) {
		var all fleetv1alpha1.AvailableCapacityList
		failure := list(ctx, &all)
		found, sum := false, int32(0)
		for _, a := range all.Items {
			for _, r := range a.Spec.Requirements {
				if r.Key == corev1.LabelInstanceTypeStable && slices.Contains(r.Values, instanceType) {
					found, sum = true, sum+a.Spec.AvailableCount
				}
			}
		}
		return found && sum == n, fmt.Sprintf("%d of %d hints %s", sum, len(all.Items), failure)
	})
}
