package integration

import (
	"context"
	"fmt"
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

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
)

// TestKueueStates is every way in which a workload before the check can change, on the real Kueue manager: each ends in the
// right state, and nothing stays promised.
func TestKueueStates(t *testing.T) {
	all := startKueueAlone(t, "kueue-states")

	t.Run("a gang waits for atomic provisioning, and is refused where the config says so", func(t *testing.T) {
		k := all.in(t, "kueue-gang")
		k.hint("gpu", 9)
		k.queue(fleetv1alpha1.CapacityCheckConfigSpec{CheckPeriod: of(time.Second)}, "64", "gpu")
		gang := func(j *batchv1.Job) {
			j.Spec.Template.Labels = map[string]string{capacity.LabelPodGroup: j.Name}
		}
		k.job("waits", 2, "8", gang)
		k.untilMessage("waits", "needs 2 × 8 nvidia.com/gpu in flavor gpu all together; no offering that matches supports atomic provisioning")
		k.changeHint("gpu", func(ac *fleetv1alpha1.AvailableCapacity) { ac.Spec.SupportsAtomicProvisioning = true })
		k.untilAdmitted("waits")
		k.promises("gpu", 2)

		k.changeHint("gpu", func(ac *fleetv1alpha1.AvailableCapacity) { ac.Spec.SupportsAtomicProvisioning = false })
		k.job("refused", 2, "8", gang)
		k.untilMessage("refused", "no offering that matches supports atomic provisioning")
		k.configure(func(c *fleetv1alpha1.CapacityCheckConfigSpec) { c.AtomicProvisioning = fleetv1alpha1.AtomicReject })
		k.untilRejected("refused", "all together; no offering that matches supports atomic provisioning")
		k.remove("waits")
		k.promises("gpu", 0)
	})

	t.Run("partial admission is promised what was admitted", func(t *testing.T) {
		k := all.in(t, "kueue-partial")
		k.hint("gpu", 3)
		k.queue(fleetv1alpha1.CapacityCheckConfigSpec{CheckPeriod: of(time.Second)}, "32", "gpu")
		k.job("train", 8, "8", func(j *batchv1.Job) {
			j.Annotations = map[string]string{"kueue.x-k8s.io/job-min-parallelism": "2"}
		})
		k.untilMessage("train", "needs 4 × 8 nvidia.com/gpu in flavor gpu; 3 available")
		k.hint("gpu", 4)
		k.untilAdmitted("train")
		k.promises("gpu", 4)
		k.remove("train")
		k.promises("gpu", 0)
	})

	t.Run("several pod sets in several flavors each need their own nodes", func(t *testing.T) {
		k := all.in(t, "kueue-sets")
		k.hint("gpu-a", 2)
		k.hint("gpu-b", 1)
		k.queue(fleetv1alpha1.CapacityCheckConfigSpec{CheckPeriod: of(time.Second)}, "16", "gpu-a", "gpu-b")
		k.plainWorkload("pair", 2, 2)
		k.untilPlain("pair", "waits for its second flavor", func(wl *kueue.Workload) bool {
			return strings.Contains(wl.Status.AdmissionChecks[0].Message, "needs 2 × 8 nvidia.com/gpu in flavor gpu-b; 1 available")
		})
		k.promises("gpu-a", 0) // nothing is promised by halves
		k.hint("gpu-b", 2)
		wl := k.untilPlain("pair", "is admitted", func(wl *kueue.Workload) bool { return is(wl, kueue.WorkloadAdmitted) })
		for i, want := range []kueue.ResourceFlavorReference{"gpu-a", "gpu-b"} {
			if got := wl.Status.Admission.PodSetAssignments[i].Flavors["nvidia.com/gpu"]; got != want {
				t.Errorf("pod set %d is on flavor %s, expected %s", i, got, want)
			}
		}
		k.promises("gpu-a", 2)
		k.promises("gpu-b", 2)
		if err := k.client.Delete(t.Context(), wl); err != nil {
			t.Fatal(err)
		}
		k.promises("gpu-a", 0)
		k.promises("gpu-b", 0)
	})

	t.Run("a check that is deleted lets go of everything", func(t *testing.T) {
		k := all.in(t, "kueue-check")
		k.hint("gpu", 2)
		k.queue(fleetv1alpha1.CapacityCheckConfigSpec{CheckPeriod: of(time.Second)}, "64", "gpu")
		k.job("runs", 2, "8")
		k.untilAdmitted("runs")
		k.promises("gpu", 2)
		k.job("waits", 2, "8")
		k.untilMessage("waits", "0 available")
		k.changeQueue(func(cq *kueue.ClusterQueue) { cq.Spec.AdmissionChecksStrategy = nil })
		if err := k.client.Delete(t.Context(), &kueue.AdmissionCheck{ObjectMeta: metav1.ObjectMeta{Name: k.ns}}); err != nil {
			t.Fatal(err)
		}
		k.untilAdmitted("waits") // by quota alone
		k.promises("gpu", 0)
	})

	t.Run("hints that go stale stop a workload that waits, and fail open where the config says so", func(t *testing.T) {
		k := all.in(t, "kueue-open")
		k.hint("gpu", 1)
		k.queue(fleetv1alpha1.CapacityCheckConfigSpec{StaleAfter: of(3 * time.Second), CheckPeriod: of(time.Second)}, "64", "gpu")
		// Hints come until it holds quota: a queue whose check has none that are fresh gives none away.
		k.job("train", 2, "8")
		hinted := time.Now()
		eventually(t, "train holds quota", func(ctx context.Context) (bool, string) {
			if time.Since(hinted) > time.Second {
				k.hint("gpu", 1)
				hinted = time.Now()
			}
			wls, err := k.workloads(ctx)
			return err == nil && is(wls["train"], kueue.WorkloadQuotaReserved), story(wls)
		})
		k.untilMessage("train", "needs 2 × 8 nvidia.com/gpu in flavor gpu; hints are stale, last confirmed at ")
		k.configure(func(c *fleetv1alpha1.CapacityCheckConfigSpec) { c.OnStale = fleetv1alpha1.StaleFailOpen })
		k.untilAdmitted("train")
		k.untilEvent("HintsStaleFailOpen", "admitted unseen")
		k.job("next", 9, "1") // the queue stays open
		k.untilAdmitted("next")
		k.remove("train")
		k.remove("next")
		k.promises("gpu", 0)
	})

	t.Run("nodes that are there carry a workload, once", func(t *testing.T) {
		k := all.in(t, "kueue-there")
		k.hint("gpu", 0)
		k.node("gpu-1", "gpu")
		k.queue(fleetv1alpha1.CapacityCheckConfigSpec{CheckPeriod: of(time.Second)}, "64", "gpu")
		k.job("first", 1, "8")
		k.untilAdmitted("first")
		k.job("second", 1, "8")
		k.untilMessage("second", "needs 1 × 8 nvidia.com/gpu in flavor gpu; 0 available")
		k.fleet.kill("manager")
		k.hint("gpu", 1) // the first one holds the node across a restart, too
		k.untilAdmitted("second")
		k.promises("gpu", 1)
		k.remove("first")
		k.remove("second")
		k.promises("gpu", 0)
	})

	t.Run("a manager that is killed while nodes come asks once and admits once", func(t *testing.T) {
		k := all.in(t, "kueue-killed")
		k.hint("gpu", 0)
		k.queue(fleetv1alpha1.CapacityCheckConfigSpec{Mode: fleetv1alpha1.CapacityCheckProvision, CheckPeriod: of(time.Second)}, "64", "gpu")
		c, err := client.NewWithWatch(env.cp.Config(), client.Options{Scheme: k.client.Scheme()})
		if err != nil {
			t.Fatal(err)
		}
		w, err := c.Watch(t.Context(), &fleetv1alpha1.CapacityRequestList{}, client.InNamespace(k.ns))
		if err != nil {
			t.Fatal(err)
		}
		seen := make(chan map[string]bool, 1)
		go func() {
			made := map[string]bool{}
			for e := range w.ResultChan() {
				if cr, ok := e.Object.(*fleetv1alpha1.CapacityRequest); ok {
					made[string(cr.UID)] = true
				}
			}
			seen <- made
		}()
		k.job("train", 2, "8")
		k.untilMessage("train", "Ready nodes have room for 0 of 2 pods")
		k.fleet.kill("manager")
		k.node("gpu-1", "gpu")
		k.untilMessage("train", "Ready nodes have room for 1 of 2 pods")
		k.fleet.kill("manager")
		k.node("gpu-2", "gpu")
		k.untilAdmitted("train")
		k.fleet.kill("manager")
		// The pods have no node yet, so that theirs are not free, as the new process knows.
		k.job("late", 1, "8")
		k.untilMessage("late", "Ready nodes have room for 0 of 1 pods")
		k.untilRequests("Pod", 2)
		k.untilRequests("Workload", 1)
		w.Stop()
		if made := <-seen; len(made) < 2 || len(made) > 3 {
			t.Errorf("%d requests were made for three pods", len(made))
		}
		k.remove("train")
		k.untilAdmitted("late")
		k.remove("late")
		k.untilRequests("Workload", 0)
	})

	t.Run("Kueue holds the quota of a Retry until its delay is over", func(t *testing.T) {
		k := all.in(t, "kueue-itself")
		k.queue(fleetv1alpha1.CapacityCheckConfigSpec{}, "8", "gpu")
		k.byHand("by-hand")
		k.changeQueue(func(cq *kueue.ClusterQueue) {
			cq.Spec.AdmissionChecksStrategy.AdmissionChecks = []kueue.AdmissionCheckStrategyRule{{Name: "by-hand"}}
		})
		k.untilReserved("retried", 1)
		const delay = 4
		k.answer("retried", "by-hand", kueue.CheckStateRetry, ptr.To[int32](delay))
		var evicted, retried time.Time
		eventually(t, "the workload is evicted", func(ctx context.Context) (bool, string) {
			wls, err := k.workloads(ctx)
			if err != nil {
				return false, err.Error()
			}
			wl := wls["retried"]
			for _, s := range wl.Status.AdmissionChecks {
				if s.State == kueue.CheckStateRetry {
					retried = s.LastTransitionTime.Time
				}
			}
			if c := apimeta.FindStatusCondition(wl.Status.Conditions, kueue.WorkloadEvicted); c != nil {
				evicted = c.LastTransitionTime.Time
			}
			return !evicted.IsZero(), story(wls)
		})
		// Times of the API have whole seconds.
		if held := evicted.Sub(retried); held < (delay-1)*time.Second {
			t.Errorf("quota was released %s after a Retry with a delay of %d s: this Kueue does what its API says, and the check "+
				"could use the state Retry (see kueue/admission/back.go and docs/kueue.md)", held, delay)
		}
	})
}

// configure edits the check's configuration.
func (k *kueueCluster) configure(change func(*fleetv1alpha1.CapacityCheckConfigSpec)) {
	k.t.Helper()
	config := &fleetv1alpha1.CapacityCheckConfig{}
	k.edit(client.ObjectKey{Name: k.ns}, config, func() { change(&config.Spec) })
}

func (k *kueueCluster) changeQueue(change func(*kueue.ClusterQueue)) {
	k.t.Helper()
	cq := &kueue.ClusterQueue{}
	k.edit(client.ObjectKey{Name: k.ns}, cq, func() { change(cq) })
}

func (k *kueueCluster) changeHint(name string, change func(*fleetv1alpha1.AvailableCapacity)) {
	k.t.Helper()
	ac := &fleetv1alpha1.AvailableCapacity{}
	k.edit(client.ObjectKey{Namespace: system, Name: name}, ac, func() { change(ac) })
}

// edit reads an object, changes it and patches the difference.
func (k *kueueCluster) edit(key client.ObjectKey, o client.Object, change func()) {
	k.t.Helper()
	if err := k.client.Get(k.t.Context(), key, o); err != nil {
		k.t.Fatal(err)
	}
	before := o.DeepCopyObject().(client.Object)
	change()
	if err := k.client.Patch(k.t.Context(), o, client.MergeFrom(before)); err != nil {
		k.t.Fatal(err)
	}
}

// plainWorkload is a workload without a Job, of a pod set for each of the counts, of eight GPUs a pod.
func (k *kueueCluster) plainWorkload(name string, counts ...int32) {
	k.t.Helper()
	wl := &kueue.Workload{ObjectMeta: metav1.ObjectMeta{Namespace: k.ns, Name: name}, Spec: kueue.WorkloadSpec{QueueName: "queue"}}
	for i, n := range counts {
		wl.Spec.PodSets = append(wl.Spec.PodSets, kueue.PodSet{
			Name: kueue.PodSetReference(fmt.Sprintf("set-%d", i)), Count: n,
			Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{
				RestartPolicy: corev1.RestartPolicyNever,
				Containers: []corev1.Container{{Name: "c", Image: "i", Resources: corev1.ResourceRequirements{
					Requests: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("8")},
				}}},
			}},
		})
	}
	k.create(wl)
}

// untilPlain waits until a workload without a Job is as wanted.
func (k *kueueCluster) untilPlain(name, what string, wanted func(*kueue.Workload) bool) *kueue.Workload {
	k.t.Helper()
	wl := &kueue.Workload{}
	eventually(k.t, name+" "+what, func(ctx context.Context) (bool, string) {
		if err := k.client.Get(ctx, client.ObjectKey{Namespace: k.ns, Name: name}, wl); err != nil {
			return false, err.Error()
		}
		return len(wl.Status.AdmissionChecks) > 0 && wanted(wl), story(map[string]*kueue.Workload{name: wl})
	})
	return wl
}

// untilReserved submits a Job and waits until it holds quota. A queue opens a moment after its check.
func (k *kueueCluster) untilReserved(name string, pods int32) {
	k.t.Helper()
	k.job(name, pods, "8")
	eventually(k.t, name+" holds quota", func(ctx context.Context) (bool, string) {
		wls, err := k.workloads(ctx)
		return err == nil && is(wls[name], kueue.WorkloadQuotaReserved), story(wls)
	})
}

// untilRejected waits until Kueue has deactivated the workload because of the check, and an Event says why.
func (k *kueueCluster) untilRejected(name, proof string) {
	k.t.Helper()
	eventually(k.t, name+" is deactivated and says why", func(ctx context.Context) (bool, string) {
		wls, err := k.workloads(ctx)
		if err != nil || wls[name] == nil {
			return false, fmt.Sprint(err)
		}
		events, err := k.events(ctx)
		return err == nil && !ptr.Deref(wls[name].Spec.Active, true) && !is(wls[name], kueue.WorkloadQuotaReserved) &&
			strings.Contains(events, proof), story(wls) + events
	})
}

func (k *kueueCluster) untilEvent(parts ...string) {
	k.t.Helper()
	eventually(k.t, fmt.Sprintf("an Event says %q", parts), func(ctx context.Context) (bool, string) {
		events, err := k.events(ctx)
		if err != nil {
			return false, err.Error()
		}
		for _, line := range strings.Split(events, "\n") {
			has := true
			for _, part := range parts {
				has = has && strings.Contains(line, part)
			}
			if has {
				return true, ""
			}
		}
		return false, events
	})
}

// untilRequests waits until so many CapacityRequests of the namespace are owned by an object of the kind.
func (k *kueueCluster) untilRequests(owner string, n int) {
	k.t.Helper()
	eventually(k.t, fmt.Sprintf("%d requests are owned by a %s", n, owner), func(ctx context.Context) (bool, string) {
		var crs fleetv1alpha1.CapacityRequestList
		if err := k.client.List(ctx, &crs, client.InNamespace(k.ns)); err != nil {
			return false, err.Error()
		}
		owners := map[string]int{}
		for _, cr := range crs.Items {
			for _, ref := range cr.OwnerReferences {
				owners[ref.Kind]++
			}
		}
		return owners[owner] == n, fmt.Sprint(owners)
	})
}

// byHand makes an AdmissionCheck that the test itself answers.
func (k *kueueCluster) byHand(name string) {
	k.t.Helper()
	check := &kueue.AdmissionCheck{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: kueue.AdmissionCheckSpec{ControllerName: "drover.test/by-hand"}}
	k.create(check)
	before := check.DeepCopy()
	apimeta.SetStatusCondition(&check.Status.Conditions, metav1.Condition{
		Type: kueue.AdmissionCheckActive, Status: metav1.ConditionTrue, Reason: "Active", Message: "answered by the test",
	})
	if err := k.client.Status().Patch(k.t.Context(), check, client.MergeFrom(before)); err != nil {
		k.t.Fatal(err)
	}
}

// answer sets the state of a check of the Job's workload, as an external controller does.
func (k *kueueCluster) answer(job, check string, state kueue.CheckState, requeueAfter *int32) {
	k.t.Helper()
	eventually(k.t, fmt.Sprintf("check %s of %s is %s", check, job, state), func(ctx context.Context) (bool, string) {
		wls, err := k.workloads(ctx)
		if err != nil || wls[job] == nil {
			return false, fmt.Sprint(err)
		}
		wl := wls[job]
		before := wl.DeepCopy()
		for i := range wl.Status.AdmissionChecks {
			if s := &wl.Status.AdmissionChecks[i]; string(s.Name) == check {
				s.State, s.RequeueAfterSeconds, s.LastTransitionTime = state, requeueAfter, metav1.Now()
				s.Message = "answered by the test"
				err = k.client.Status().Patch(ctx, wl, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
				return err == nil, fmt.Sprint(err)
			}
		}
		return false, story(wls)
	})
}
