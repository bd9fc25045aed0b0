package integration

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/internal/builders"
	"github.com/drover-sh/drover/kueue/admission"
	"github.com/drover-sh/drover/kueue/kueuetest"
)

const queueLabel = "kueue.x-k8s.io/queue-name"

// kueueCluster is the real Kueue manager, our manager with the admission check, and a client that knows both.
type kueueCluster struct {
	t      *testing.T
	fleet  *fleet
	client client.Client
	ns     string
	// bookings are those of bookingQueue's tests.
	bookings *bookings
}

// startKueue starts Kueue and our manager, without an autoscaler: what the fleet has is what the test writes into
// AvailableCapacity, so that every figure is the test's own.
func startKueue(t *testing.T, ns string) *kueueCluster {
	t.Helper()
	return startKueueAlone(t, ns).in(t, ns)
}

// in gives a test a namespace of its own, and takes away afterwards what it made.
func (k *kueueCluster) in(t *testing.T, ns string) *kueueCluster {
	t.Helper()
	own := &kueueCluster{t: t, fleet: k.fleet, client: k.client, ns: ns}
	namespace(t, ns)
	t.Cleanup(own.clean)
	return own
}

// startKueueAlone starts the programs for several tests, each of which calls in.
func startKueueAlone(t *testing.T, name string) *kueueCluster {
	t.Helper()
	return startKueueWithout(t, name, "autoscaler", "scheduler")
}

// startKueueWithout leaves some of our programs out.
func startKueueWithout(t *testing.T, name string, without ...string) *kueueCluster {
	t.Helper()
	scheme := kueuetest.Scheme()
	if err := fleetv1alpha1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	c, err := client.New(env.cp.Config(), client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	k := &kueueCluster{t: t, client: c}
	m, err := kueuetest.Start(t.Context(), env.cp, kueuetest.Options{Dir: filepath.Join(env.dir, "kueue", name)})
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
		without: without,
		manager: func(c *configv1alpha1.ManagerConfiguration) { c.Kueue.Enabled = true },
	})
	return k
}

// clean removes what would hold the next test up, while Kueue is there to let go of it.
func (k *kueueCluster) clean() {
	ctx, cancel := cleanupContext()
	defer cancel()
	background := client.PropagationPolicy(metav1.DeletePropagationBackground)
	for _, o := range []client.Object{&batchv1.Job{}, &kueue.Workload{}} {
		if err := k.client.DeleteAllOf(ctx, o, client.InNamespace(k.ns), background); err != nil {
			k.t.Error(err)
		}
	}
	state, ok := poll(ctx, func(ctx context.Context) (bool, string) {
		var wls kueue.WorkloadList
		if err := k.client.List(ctx, &wls); err != nil {
			return false, err.Error()
		}
		return len(wls.Items) == 0, fmt.Sprintf("%d workloads", len(wls.Items))
	})
	if !ok {
		k.t.Errorf("workloads stay behind: %s", state)
	}
	for _, o := range []client.Object{&kueue.ClusterQueue{}, &kueue.ResourceFlavor{}, &kueue.AdmissionCheck{}, &kueue.ProvisioningRequestConfig{},
		&fleetv1alpha1.CapacityCheckConfig{}, &fleetv1alpha1.AvailableCapacity{}, &corev1.Node{}} {
		var opts []client.DeleteAllOfOption
		if _, ok := o.(*fleetv1alpha1.AvailableCapacity); ok {
			opts = append(opts, client.InNamespace(system))
		}
		if err := k.client.DeleteAllOf(ctx, o, opts...); err != nil {
			k.t.Error(err)
		}
	}
	_, ok = poll(ctx, func(ctx context.Context) (bool, string) {
		var cqs kueue.ClusterQueueList
		var flavors kueue.ResourceFlavorList
		var checks kueue.AdmissionCheckList
		for _, l := range []client.ObjectList{&cqs, &flavors, &checks} {
			if err := k.client.List(ctx, l); err != nil {
				return false, err.Error()
			}
		}
		return len(cqs.Items)+len(flavors.Items)+len(checks.Items) == 0, "queues stay"
	})
	if !ok {
		k.t.Error("Kueue's queues, flavors or checks stay behind")
	}
}

func (k *kueueCluster) create(objects ...client.Object) {
	k.t.Helper()
	for _, o := range objects {
		if err := k.client.Create(k.t.Context(), o); err != nil {
			k.t.Fatalf("creating %T %s: %v", o, o.GetName(), err)
		}
	}
}

// queue makes a check with that configuration, and a queue of that many GPUs for each of the flavors, in their order.
// A flavor's nodes are those of the instance type of its name.
func (k *kueueCluster) queue(config fleetv1alpha1.CapacityCheckConfigSpec, gpus string, flavors ...string) {
	k.t.Helper()
	group := kueue.ResourceGroup{CoveredResources: []corev1.ResourceName{"nvidia.com/gpu"}}
	for _, name := range flavors {
		k.create(&kueue.ResourceFlavor{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: kueue.ResourceFlavorSpec{
			NodeLabels: map[string]string{corev1.LabelInstanceTypeStable: name},
		}})
		group.Flavors = append(group.Flavors, kueue.FlavorQuotas{Name: kueue.ResourceFlavorReference(name),
			Resources: []kueue.ResourceQuota{{Name: "nvidia.com/gpu", NominalQuota: resource.MustParse(gpus)}}})
	}
	k.create(
		&fleetv1alpha1.CapacityCheckConfig{ObjectMeta: metav1.ObjectMeta{Name: k.ns}, Spec: config},
		&kueue.AdmissionCheck{ObjectMeta: metav1.ObjectMeta{Name: k.ns}, Spec: kueue.AdmissionCheckSpec{
			ControllerName: admission.ControllerName,
			Parameters:     &kueue.AdmissionCheckParametersReference{APIGroup: fleetv1alpha1.GroupName, Kind: "CapacityCheckConfig", Name: k.ns},
		}},
		&kueue.ClusterQueue{ObjectMeta: metav1.ObjectMeta{Name: k.ns}, Spec: kueue.ClusterQueueSpec{
			NamespaceSelector: &metav1.LabelSelector{},
			ResourceGroups:    []kueue.ResourceGroup{group},
			AdmissionChecksStrategy: &kueue.AdmissionChecksStrategy{AdmissionChecks: []kueue.AdmissionCheckStrategyRule{
				{Name: kueue.AdmissionCheckReference(k.ns)},
			}},
		}},
		&kueue.LocalQueue{ObjectMeta: metav1.ObjectMeta{Namespace: k.ns, Name: "queue"},
			Spec: kueue.LocalQueueSpec{ClusterQueue: kueue.ClusterQueueReference(k.ns)}},
	)
}

// hint says that the fleet has that many nodes of eight GPUs.
func (k *kueueCluster) hint(name string, nodes int32) {
	k.t.Helper()
	want := builders.AvailableCapacity(name, nodes).
		Requires(corev1.LabelInstanceTypeStable, corev1.NodeSelectorOpIn, name).
		Resources("cpu", "96", "memory", "1000Gi", "nvidia.com/gpu", "8").Obj()
	want.UID = ""
	var have fleetv1alpha1.AvailableCapacity
	if err := k.client.Get(k.t.Context(), client.ObjectKeyFromObject(want), &have); err == nil {
		before := have.DeepCopy()
		have.Spec = want.Spec
		if err := k.client.Patch(k.t.Context(), &have, client.MergeFrom(before)); err != nil {
			k.t.Fatal(err)
		}
	} else {
		k.create(want)
		have = *want
	}
	before := have.DeepCopy()
	have.Status.ObservedTime = &metav1.Time{Time: time.Now()}
	if err := k.client.Status().Patch(k.t.Context(), &have, client.MergeFrom(before)); err != nil {
		k.t.Fatal(err)
	}
}

// job submits a Job of so many pods of eight GPUs.
func (k *kueueCluster) job(name string, pods int32, gpus string, change ...func(*batchv1.Job)) {
	k.t.Helper()
	job := &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Namespace: k.ns, Name: name, Labels: map[string]string{queueLabel: "queue"}},
		Spec: batchv1.JobSpec{
			Suspend: ptr.To(true), Parallelism: ptr.To(pods), Completions: ptr.To(pods),
			Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{
				RestartPolicy: corev1.RestartPolicyNever, SchedulerName: "nobody",
				Containers: []corev1.Container{{Name: "c", Image: "i", Resources: corev1.ResourceRequirements{
					Limits: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse(gpus)},
				}}},
			}},
		},
	}
	for _, c := range change {
		c(job)
	}
	k.create(job)
}

// workloads lists the workloads by the name of their Job.
func (k *kueueCluster) workloads(ctx context.Context) (map[string]*kueue.Workload, error) {
	var wls kueue.WorkloadList
	if err := k.client.List(ctx, &wls, client.InNamespace(k.ns)); err != nil {
		return nil, err
	}
	out := map[string]*kueue.Workload{}
	for i := range wls.Items {
		for _, ref := range wls.Items[i].OwnerReferences {
			out[ref.Name] = &wls.Items[i]
		}
	}
	return out, nil
}

func is(wl *kueue.Workload, condition string) bool {
	return wl != nil && apimeta.IsStatusConditionTrue(wl.Status.Conditions, condition)
}

// story tells of every workload: its conditions and the state of its checks.
func story(wls map[string]*kueue.Workload) string {
	var lines []string
	for name, wl := range wls {
		line := name + ":"
		for _, c := range wl.Status.Conditions {
			if c.Status == metav1.ConditionTrue {
				line += " " + c.Type
			}
		}
		for _, s := range wl.Status.AdmissionChecks {
			line += fmt.Sprintf(" [%s %s: %s]", s.Name, s.State, s.Message)
		}
		lines = append(lines, line)
	}
	slices.Sort(lines)
	return "\n  " + strings.Join(lines, "\n  ")
}

// admitted waits until exactly so many Jobs' workloads are admitted and every other one holds quota and waits. It returns
// the names of the former, sorted.
func (k *kueueCluster) admitted(count int) (names []string, wls map[string]*kueue.Workload) {
	k.t.Helper()
	eventually(k.t, fmt.Sprintf("exactly %d are admitted and the others wait", count), func(ctx context.Context) (bool, string) {
		var err error
		if wls, err = k.workloads(ctx); err != nil {
			return false, err.Error()
		}
		names = nil
		waiting := true
		for name, wl := range wls {
			if is(wl, kueue.WorkloadAdmitted) {
				names = append(names, name)
				continue
			}
			waiting = waiting && len(wl.Status.AdmissionChecks) == 1 && strings.HasPrefix(wl.Status.AdmissionChecks[0].Message, "needs ")
		}
		slices.Sort(names)
		return len(names) == count && waiting, story(wls)
	})
	return names, wls
}

// promised is how many nodes of the offering the manager says are promised.
func (k *kueueCluster) promised(offering string) (float64, string) {
	v, found, err := k.fleet.metric(k.t.Context(), "manager", scraperToken(k.t),
		fmt.Sprintf("drover_kueue_promised_nodes{offering=%q}", offering))
	if err != nil || !found {
		return -1, fmt.Sprintf("found %t: %v", found, err)
	}
	return v, fmt.Sprint(v)
}
