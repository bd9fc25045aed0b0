package provisioning

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	autoscalingv1 "k8s.io/autoscaler/cluster-autoscaler/apis/provisioningrequest/autoscaling.x-k8s.io/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/internal/builders"
	"github.com/drover-sh/drover/kueue/kueuetest"
)

// kueueWorld is a world in which the real Kueue manager runs, with one queue whose check is Kueue's own for
// ProvisioningRequests of our class.
type kueueWorld struct {
	*world
	queue string
}

type queueOptions struct {
	quota string // of nvidia.com/gpu
	tas   bool
}

func newKueueWorld(t *testing.T, o queueOptions) *kueueWorld {
	t.Helper()
	w := &kueueWorld{world: newWorld(t, Options{})}
	w.queue = w.ns
	manager, err := kueuetest.Start(t.Context(), cluster, kueuetest.Options{Dir: filepath.Join(directory, "kueue-"+w.ns)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		w.dismantle()
		if err := manager.Stop(); err != nil {
			t.Error(err)
		}
	})
	flavor := &kueue.ResourceFlavor{ObjectMeta: metav1.ObjectMeta{Name: w.queue}}
	if o.tas {
		flavor.Spec.NodeLabels = map[string]string{"pool": w.queue}
		flavor.Spec.TopologyName = ptr.To(kueue.TopologyReference(w.queue))
		w.create(&kueue.Topology{
			ObjectMeta: metav1.ObjectMeta{Name: w.queue},
			Spec: kueue.TopologySpec{Levels: []kueue.TopologyLevel{
				{NodeLabel: fleetv1alpha1.LabelRack}, {NodeLabel: corev1.LabelHostname},
			}},
		})
	}
	w.create(flavor)
	w.create(&kueue.ProvisioningRequestConfig{
		ObjectMeta: metav1.ObjectMeta{Name: w.queue},
		Spec: kueue.ProvisioningRequestConfigSpec{
			ProvisioningClassName: ClassName,
			RetryStrategy: &kueue.ProvisioningRequestRetryStrategy{
				BackoffLimitCount: ptr.To[int32](1), BackoffBaseSeconds: ptr.To[int32](1), BackoffMaxSeconds: ptr.To[int32](1),
			},
		},
	})
	w.create(&kueue.AdmissionCheck{
		ObjectMeta: metav1.ObjectMeta{Name: w.queue},
		Spec: kueue.AdmissionCheckSpec{
			ControllerName: kueue.ProvisioningRequestControllerName,
			Parameters: &kueue.AdmissionCheckParametersReference{
				APIGroup: kueue.GroupVersion.Group, Kind: "ProvisioningRequestConfig", Name: w.queue,
			},
		},
	})
	w.create(&kueue.ClusterQueue{
		ObjectMeta: metav1.ObjectMeta{Name: w.queue},
		Spec: kueue.ClusterQueueSpec{
			NamespaceSelector: &metav1.LabelSelector{},
			ResourceGroups: []kueue.ResourceGroup{{
				CoveredResources: []corev1.ResourceName{"nvidia.com/gpu"},
				Flavors: []kueue.FlavorQuotas{{Name: kueue.ResourceFlavorReference(w.queue), Resources: []kueue.ResourceQuota{
					{Name: "nvidia.com/gpu", NominalQuota: resource.MustParse(o.quota)},
				}}},
			}},
			AdmissionChecksStrategy: &kueue.AdmissionChecksStrategy{AdmissionChecks: []kueue.AdmissionCheckStrategyRule{
				{Name: kueue.AdmissionCheckReference(w.queue)},
			}},
		},
	})
	w.create(&kueue.LocalQueue{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: w.queue},
		Spec:       kueue.LocalQueueSpec{ClusterQueue: kueue.ClusterQueueReference(w.queue)},
	})
	return w
}

// dismantle removes the queue while Kueue still runs, which holds finalizers on its parts.
func (w *kueueWorld) dismantle() {
	ctx := context.Background()
	background := client.PropagationPolicy(metav1.DeletePropagationBackground)
	for _, obj := range []client.Object{&batchv1.Job{}, &kueue.LocalQueue{}} {
		if err := w.DeleteAllOf(ctx, obj, client.InNamespace(w.ns), background); err != nil {
			w.t.Error(err)
		}
	}
	at := metav1.ObjectMeta{Name: w.queue}
	for _, obj := range []client.Object{
		&kueue.ClusterQueue{ObjectMeta: at}, &kueue.AdmissionCheck{ObjectMeta: at},
		&kueue.ProvisioningRequestConfig{ObjectMeta: at}, &kueue.ResourceFlavor{ObjectMeta: at},
	} {
		if err := w.Delete(ctx, obj); err != nil {
			w.t.Error(err)
		}
	}
}

// submit creates a suspended Job of so many pods of eight GPUs each.
func (w *kueueWorld) submit(name string, pods int32, change func(*batchv1.Job)) {
	w.t.Helper()
	pod := gpus("8").Scheduler("").Obj()
	pod.Spec.Containers[0].Resources.Limits = pod.Spec.Containers[0].Resources.Requests
	pod.Spec.RestartPolicy = corev1.RestartPolicyNever
	job := &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: w.ns, Name: name, Labels: map[string]string{"kueue.x-k8s.io/queue-name": w.queue},
		},
		Spec: batchv1.JobSpec{
			Suspend: ptr.To(true), Parallelism: &pods, Completions: &pods, Template: corev1.PodTemplateSpec{Spec: pod.Spec},
		},
	}
	if change != nil {
		change(job)
	}
	w.create(job)
}

// poolNode is a node of the queue's flavor.
func (w *kueueWorld) poolNode(name, rack string) {
	w.t.Helper()
	n := builders.Node(name).Label("pool", w.queue).Machine(name).Rack(rack).
		Allocatable("nvidia.com/gpu", "8", "cpu", "64", "memory", "256Gi").Ready().Obj()
	n.UID = ""
	status := n.Status
	w.create(n)
	w.say(name, status)
}

// workload waits until the workload of a Job is as wanted, and returns it.
func (w *kueueWorld) workload(job, what string, wanted func(*kueue.Workload) bool) *kueue.Workload {
	w.t.Helper()
	var found *kueue.Workload
	w.eventually(fmt.Sprintf("workload of %s %s", job, what), func(ctx context.Context) (string, error) {
		var list kueue.WorkloadList
		if err := w.List(ctx, &list, client.InNamespace(w.ns)); err != nil {
			return "", err
		}
		for i := range list.Items {
			wl := &list.Items[i]
			if len(wl.OwnerReferences) != 1 || wl.OwnerReferences[0].Name != job {
				continue
			}
			if wanted(wl) {
				found = wl
				return "", nil
			}
			return fmt.Sprintf("%+v", wl.Status), nil
		}
		return "no workload", nil
	})
	return found
}

// says reports whether the workload's one check has this message.
func says(wl *kueue.Workload, message string) bool {
	return len(wl.Status.AdmissionChecks) == 1 && wl.Status.AdmissionChecks[0].Message == message
}

func reserved(wl *kueue.Workload) bool {
	return meta.IsStatusConditionTrue(wl.Status.Conditions, kueue.WorkloadQuotaReserved)
}

func admitted(wl *kueue.Workload) bool {
	return meta.IsStatusConditionTrue(wl.Status.Conditions, kueue.WorkloadAdmitted)
}

// schedule plays the scheduler for the pods of a Job: each goes to the first free node that its node selector takes.
// It returns the racks in which they stand.
func (w *kueueWorld) schedule(job string, pods int) map[string]int {
	w.t.Helper()
	racks := map[string]int{}
	w.eventually(fmt.Sprintf("%d bound pods of %s", pods, job), func(ctx context.Context) (string, error) {
		var list corev1.PodList
		if err := w.List(ctx, &list, client.InNamespace(w.ns), client.MatchingLabels{batchv1.JobNameLabel: job}); err != nil {
			return "", err
		}
		var nodes corev1.NodeList
		if err := w.List(ctx, &nodes); err != nil {
			return "", err
		}
		taken, bound := map[string]bool{}, 0
		clear(racks)
		for i := range list.Items {
			if at := list.Items[i].Spec.NodeName; at != "" {
				taken[at] = true
			}
		}
		for i := range list.Items {
			pod := &list.Items[i]
			for j := range nodes.Items {
				n := &nodes.Items[j]
				if pod.Spec.NodeName == n.Name {
					bound++
					racks[n.Labels[fleetv1alpha1.LabelRack]]++
				}
				if pod.Spec.NodeName != "" || taken[n.Name] || len(pod.Spec.SchedulingGates) > 0 ||
					!capacity.ProfileOfPod(pod).MatchesLabels(n.Labels) {
					continue
				}
				w.bind(pod, n.Name)
				taken[n.Name] = true
				break
			}
		}
		if bound == pods {
			return "", nil
		}
		return fmt.Sprintf("%d of %d bound", bound, len(list.Items)), nil
	})
	return racks
}

func TestKueueAdmitsAJobWhenItsNodesAreReady(t *testing.T) {
	w := newKueueWorld(t, queueOptions{quota: "64"})
	w.submit("train", 3, nil)
	w.acknowledge(3)
	wl := w.workload("train", "waits with our message", func(wl *kueue.Workload) bool {
		return says(wl, "room for 0 of 3 pods stands ready")
	})
	if admitted(wl) {
		t.Fatal("admitted without a node")
	}
	for _, name := range []string{"a", "b", "c"} {
		w.poolNode(name, "r1")
	}
	w.workload("train", "is admitted", admitted)
	// The pods that come take the booking's requests over: three pods, three requests, at any time.
	w.heldBy(map[string]int{"Pod": 3})
	if needs := w.rollup().Snapshot().Needs; len(needs) != 1 || needs[0].Count != 3 {
		t.Errorf("needs %+v, want one row of 3 pods", needs)
	}
	w.schedule("train", 3)
	// A pod that is bound needs no request any more, and is a row of its own once that has gone: three pods all the same.
	needs, pods := w.rollup().Snapshot().Needs, int32(0)
	for _, n := range needs {
		pods += n.Count
	}
	if pods != 3 {
		t.Errorf("needs %+v, want 3 pods", needs)
	}
	w.workload("train", "stays admitted when its booking is consumed", func(wl *kueue.Workload) bool {
		var list autoscalingv1.ProvisioningRequestList
		if err := w.List(t.Context(), &list, client.InNamespace(w.ns)); err != nil || len(list.Items) != 1 {
			return false
		}
		return isTrue(list.Items[0].Status.Conditions, autoscalingv1.BookingExpired) && admitted(wl)
	})
}

func TestKueuePutsATopologyAwareJobIntoOneRackThatWasNotThere(t *testing.T) {
	w := newKueueWorld(t, queueOptions{quota: "64", tas: true})
	w.submit("train", 2, func(job *batchv1.Job) {
		job.Spec.Template.Annotations = map[string]string{capacity.AnnotationRequiredTopology: fleetv1alpha1.LabelRack}
	})
	w.acknowledge(2)
	list, err := w.requests(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for i := range list {
		if g := list[i].Spec.Group; g == nil || g.TopologyKey != fleetv1alpha1.LabelRack {
			t.Errorf("request %s has group %+v, want one rack", list[i].Name, g)
		}
	}
	// One node in each of two racks is room, but not in one rack.
	w.poolNode("a", "r1")
	w.poolNode("b", "r2")
	wl := w.workload("train", "waits for a rack", func(wl *kueue.Workload) bool {
		return says(wl, "room for 1 of 2 pods stands ready")
	})
	if admitted(wl) {
		t.Fatal("admitted without a rack")
	}
	w.poolNode("c", "r2")
	w.workload("train", "is admitted", admitted)
	if racks := w.schedule("train", 2); racks["r2"] != 2 {
		t.Errorf("pods stand in racks %v, want both in r2", racks)
	}
	w.heldBy(map[string]int{"Pod": 2})
}

func TestKueueReleasesQuotaWhenNothingComes(t *testing.T) {
	w := newKueueWorld(t, queueOptions{quota: "16"})
	w.submit("never", 2, func(job *batchv1.Job) {
		job.Annotations = map[string]string{"provreq.kueue.x-k8s.io/" + ParameterValidUntil: "2"}
	})
	w.workload("never", "holds the quota", reserved)
	w.submit("next", 1, nil)
	w.workload("never", "is retried later", func(wl *kueue.Workload) bool {
		return !reserved(wl) && !admitted(wl)
	})
	w.workload("next", "has the quota", reserved)
	// The demand of the one that timed out is withdrawn.
	w.acknowledge(1)
	w.poolNode("a", "r1")
	w.workload("next", "is admitted", admitted)
}

func TestNothingIsHeldForAJobThatIsDeleted(t *testing.T) {
	w := newKueueWorld(t, queueOptions{quota: "64"})
	for _, name := range []string{"a", "b"} {
		w.poolNode(name, "r1")
	}
	w.submit("waits", 3, nil)
	w.acknowledge(3)
	w.workload("waits", "waits", func(wl *kueue.Workload) bool {
		return says(wl, "room for 2 of 3 pods stands ready")
	})
	job := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "waits"}}
	if err := w.Delete(t.Context(), job, client.PropagationPolicy(metav1.DeletePropagationBackground)); err != nil {
		t.Fatal(err)
	}
	w.heldBy(map[string]int{})
	w.submit("next", 2, nil)
	w.acknowledge(2)
	w.workload("next", "is admitted on what the other one waited with", admitted)
}
