package integration

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	autoscalingv1 "k8s.io/autoscaler/cluster-autoscaler/apis/provisioningrequest/autoscaling.x-k8s.io/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/kueue/kueuetest"
	"github.com/drover-sh/drover/kueue/provisioning"
)

// Two nodes could be had in the first rack and four in the second: a job of three has one place to go.
const rackOfferings = `
apiVersion: config.drover.sh/v1alpha1
kind: OfferingList
offerings:
- name: gpu-8
  instanceType: a3-highgpu-8g # as in manifests/kueue
  resources: {cpu: "96", memory: 1000Gi, nvidia.com/gpu: "8"}
  cost: 30
  domains:
  - {zone: zone-a, rack: rack-a1, count: 2}
  - {zone: zone-b, rack: rack-b1, count: 4}
`

// startKueueOnFleet starts Kueue and all our programs: nodes come from the autoscaler, and pods are placed by our scheduler.
func startKueueOnFleet(t *testing.T, ns, offerings string) *kueueCluster {
	t.Helper()
	scheme := kueuetest.Scheme()
	if err := fleetv1alpha1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	c, err := client.New(env.cp.Config(), client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	k := &kueueCluster{t: t, client: c, ns: ns}
	m, err := kueuetest.Start(t.Context(), env.cp, kueuetest.Options{Dir: filepath.Join(env.dir, "kueue", ns)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := cleanupContext()
		defer cancel()
		if err := m.Stop(); err != nil {
			t.Error(err)
		}
		if err := kueuetest.Uninstall(ctx, env.cp); err != nil {
			t.Error(err)
		}
	})
	if out, err := kubectl(t.Context(), "apply", "--server-side", "-k", filepath.Join(env.root, "manifests", "kueue")); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	k.fleet = startFleet(t, fleetOptions{
		offerings: offerings,
		manager:   func(c *configv1alpha1.ManagerConfiguration) { c.Kueue.Enabled = true },
	})
	return k.in(t, ns)
}

// rackQueue applies the queue that the manifests ship for topology-aware jobs, and opens it to the test's namespace.
func (k *kueueCluster) rackQueue() {
	k.t.Helper()
	file := filepath.Join(env.root, "manifests", "kueue", "topology", "queue.yaml")
	if out, err := kubectl(k.t.Context(), "apply", "-f", file); err != nil {
		k.t.Fatalf("%v\n%s", err, out)
	}
	k.t.Cleanup(func() {
		ctx, cancel := cleanupContext()
		defer cancel()
		// Kueue holds what is in use, and so does not let go of all of it now.
		if out, err := kubectl(ctx, "delete", "--wait=false", "-f", file); err != nil {
			k.t.Errorf("%v\n%s", err, out)
		}
	})
	k.create(&kueue.LocalQueue{
		ObjectMeta: metav1.ObjectMeta{Namespace: k.ns, Name: "queue"}, Spec: kueue.LocalQueueSpec{ClusterQueue: "racks"},
	})
}

// TestKueueTopologyScalesUpIntoOneRack is the whole way: a Job that has to stand in one rack is queued while there is no node at
// all. Kueue asks by a ProvisioningRequest, the fleet brings the nodes of one rack, Kueue admits the workload onto them, and its
// pods take the booking's place in the demand, so that nothing more is launched and nothing is taken away.
func TestKueueTopologyScalesUpIntoOneRack(t *testing.T) {
	k := startKueueOnFleet(t, "kueue-topology", rackOfferings)
	k.rackQueue()
	k.job("train", 3, "8", func(job *batchv1.Job) {
		job.Spec.Template.Annotations = map[string]string{capacity.AnnotationRequiredTopology: fleetv1alpha1.LabelRack}
		job.Spec.Template.Spec.SchedulerName = "drover-scheduler"
	})

	eventually(t, "three pods run in one rack", func(ctx context.Context) (bool, string) {
		var pods corev1.PodList
		var nodes corev1.NodeList
		if err := k.client.List(ctx, &pods, client.InNamespace(k.ns)); err != nil {
			return false, err.Error()
		}
		if err := k.client.List(ctx, &nodes); err != nil {
			return false, err.Error()
		}
		rack := map[string]string{}
		for i := range nodes.Items {
			rack[nodes.Items[i].Name] = nodes.Items[i].Labels[fleetv1alpha1.LabelRack]
		}
		running := map[string]int{}
		for i := range pods.Items {
			if pods.Items[i].Status.Phase == corev1.PodRunning {
				running[rack[pods.Items[i].Spec.NodeName]]++
			}
		}
		wls, err := k.workloads(ctx)
		return err == nil && running["rack-b1"] == 3, fmt.Sprintf("running by rack: %v%s", running, story(wls))
	})
	eventually(t, "the pods have consumed the booking", func(ctx context.Context) (bool, string) {
		var prs autoscalingv1.ProvisioningRequestList
		if err := k.client.List(ctx, &prs, client.InNamespace(k.ns)); err != nil || len(prs.Items) != 1 {
			return false, fmt.Sprintf("%d requests, error %v", len(prs.Items), err)
		}
		conditions := prs.Items[0].Status.Conditions
		expired := apimeta.FindStatusCondition(conditions, autoscalingv1.BookingExpired)
		return expired != nil && expired.Reason == provisioning.ReasonConsumed, fmt.Sprint(conditions)
	})
	var requests fleetv1alpha1.CapacityRequestList
	if err := k.client.List(t.Context(), &requests, client.InNamespace(k.ns)); err != nil {
		t.Fatal(err)
	}
	for i := range requests.Items {
		if o := requests.Items[i].OwnerReferences; len(o) != 1 || o[0].Kind != "Pod" {
			t.Errorf("request %s is owned by %v, want a pod", requests.Items[i].Name, o)
		}
	}
	var nodes corev1.NodeList
	if err := k.client.List(t.Context(), &nodes); err != nil {
		t.Fatal(err)
	}
	if len(requests.Items) != 3 || len(nodes.Items) != 3 {
		t.Errorf("%d requests and %d nodes for three pods of a node each", len(requests.Items), len(nodes.Items))
	}
}
