package integration

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/internal/builders"
)

func of(d time.Duration) *metav1.Duration { return &metav1.Duration{Duration: d} }

// impatient gives quota back after two seconds and comes back after two, then four.
func impatient() fleetv1alpha1.CapacityCheckConfigSpec {
	return fleetv1alpha1.CapacityCheckConfigSpec{
		Timeout: of(2 * time.Second), BackoffBase: of(2 * time.Second), BackoffMax: of(4 * time.Second), CheckPeriod: of(time.Second),
	}
}

// TestKueueWaits is what becomes of workloads that the fleet cannot carry, on the real Kueue manager.
func TestKueueWaits(t *testing.T) {
	all := startKueueAlone(t, "kueue-waits")

	t.Run("quota that waits in vain is given back, and the next workload runs", func(t *testing.T) {
		k := all.in(t, "kueue-timeout")
		k.hint("gpu", 1)
		k.queue(impatient(), "32", "gpu")
		k.job("big", 4, "8") // holds the whole quota, and there is one node
		eventually(t, "the big workload holds the quota", func(ctx context.Context) (bool, string) {
			wls, err := k.workloads(ctx)
			return err == nil && is(wls["big"], kueue.WorkloadQuotaReserved), story(wls)
		})
		k.job("small", 1, "8")
		k.untilAdmitted("small")
		// It has not been forgotten: when the nodes are there, it runs.
		k.remove("small")
		k.hint("gpu", 4)
		k.untilAdmitted("big")
	})

	t.Run("a retry backs off, writes little, and never leaves the workload evicted", func(t *testing.T) {
		k := all.in(t, "kueue-retry")
		k.hint("gpu", 0)
		config := impatient()
		config.BackoffMax = of(8 * time.Second) // three pauses that grow, whatever their jitter
		k.queue(config, "32", "gpu")
		w, err := clientWatch(t, k)
		if err != nil {
			t.Fatal(err)
		}
		k.job("patient", 1, "8")
		states, writes := countUntil(t, w, 3)
		// A round is: quota reserved, pending, retry, evicted, quota released, requeued. Kueue writes most of it.
		if writes > 3*20 {
			t.Errorf("three rounds took %d writes: that is no back-off\n%s", writes, strings.Join(states, "\n"))
		}
		eventually(t, "it is queued again", func(ctx context.Context) (bool, string) {
			wls, err := k.workloads(ctx)
			if err != nil {
				return false, err.Error()
			}
			return is(wls["patient"], kueue.WorkloadQuotaReserved) && !is(wls["patient"], kueue.WorkloadEvicted), story(wls)
		})
		k.hint("gpu", 1)
		k.untilAdmitted("patient")
	})

	t.Run("a pod that no node can carry is rejected, with the proof", func(t *testing.T) {
		k := all.in(t, "kueue-rejected")
		k.hint("gpu", 5)
		k.queue(fleetv1alpha1.CapacityCheckConfigSpec{}, "64", "gpu")
		k.job("huge", 1, "16")
		eventually(t, "the workload is deactivated and says why", func(ctx context.Context) (bool, string) {
			wls, err := k.workloads(ctx)
			if err != nil || wls["huge"] == nil {
				return false, fmt.Sprint(err)
			}
			active := wls["huge"].Spec.Active
			events, err := k.events(ctx)
			return err == nil && active != nil && !*active &&
				strings.Contains(events, "can never run in flavor gpu: a pod of set main asks for 16 nvidia.com/gpu, and the largest node that can be had, gpu, has 8"), story(wls) + events
		})
	})

	t.Run("a stale hint closes the queue, and a fresh one opens it", func(t *testing.T) {
		k := all.in(t, "kueue-stale")
		k.hint("gpu", 5)
		config := impatient()
		config.StaleAfter = of(6 * time.Second)
		config.Timeout = of(time.Minute)
		k.queue(config, "64", "gpu")
		// Fresh for as long as it takes: on a slow machine one hint is stale before anybody has looked at it.
		var hinted time.Time
		fresh := func() {
			if time.Since(hinted) > config.StaleAfter.Duration/3 {
				k.hint("gpu", 5)
				hinted = time.Now()
			}
		}
		active := func(status metav1.ConditionStatus, reason string) {
			t.Helper()
			eventually(t, fmt.Sprintf("the check is Active=%s (%s)", status, reason), func(ctx context.Context) (bool, string) {
				if status == metav1.ConditionTrue {
					fresh()
				}
				var check kueue.AdmissionCheck
				if err := k.client.Get(ctx, client.ObjectKey{Name: k.ns}, &check); err != nil {
					return false, err.Error()
				}
				for _, c := range check.Status.Conditions {
					if c.Type == kueue.AdmissionCheckActive {
						return c.Status == status && c.Reason == reason, fmt.Sprintf("%+v", c)
					}
				}
				return false, "no condition"
			})
		}
		active(metav1.ConditionFalse, "AutoscalerUnreachable")
		k.job("waits", 1, "8")
		eventually(t, "waits is admitted while hints are fresh", func(ctx context.Context) (bool, string) {
			fresh()
			wls, err := k.workloads(ctx)
			return err == nil && is(wls["waits"], kueue.WorkloadAdmitted), story(wls)
		})
		active(metav1.ConditionTrue, "Active")
		if err := k.client.Delete(t.Context(), &fleetv1alpha1.CapacityCheckConfig{ObjectMeta: metav1.ObjectMeta{Name: k.ns}}); err != nil {
			t.Fatal(err)
		}
		active(metav1.ConditionFalse, "BadParametersRef")
	})

	t.Run("a config that is edited while workloads wait is heeded", func(t *testing.T) {
		k := all.in(t, "kueue-edit")
		k.hint("gpu", 5)
		k.queue(fleetv1alpha1.CapacityCheckConfigSpec{MinAvailability: "High"}, "64", "gpu")
		k.availability("gpu", "Low")
		k.job("waits", 1, "8")
		k.untilMessage("waits", "5 available, Low, which is below High")
		k.configure(func(c *fleetv1alpha1.CapacityCheckConfigSpec) { c.MinAvailability = "Low" })
		k.untilAdmitted("waits")
		k.promises("gpu", 1)
		k.remove("waits")
		k.promises("gpu", 0)
	})

	t.Run("a promised workload that is preempted or deleted gives its promise back", func(t *testing.T) {
		k := all.in(t, "kueue-preempted")
		k.hint("gpu", 4)
		k.queue(fleetv1alpha1.CapacityCheckConfigSpec{}, "32", "gpu")
		var cq kueue.ClusterQueue
		if err := k.client.Get(t.Context(), client.ObjectKey{Name: k.ns}, &cq); err != nil {
			t.Fatal(err)
		}
		before := cq.DeepCopy()
		cq.Spec.Preemption = &kueue.ClusterQueuePreemption{WithinClusterQueue: kueue.PreemptionPolicyLowerPriority}
		if err := k.client.Patch(t.Context(), &cq, client.MergeFrom(before)); err != nil {
			t.Fatal(err)
		}
		urgent := &kueue.WorkloadPriorityClass{ObjectMeta: metav1.ObjectMeta{Name: "urgent"}, Value: 1000}
		k.create(urgent)
		t.Cleanup(func() {
			ctx, cancel := cleanupContext()
			defer cancel()
			if err := client.IgnoreNotFound(k.client.Delete(ctx, urgent)); err != nil {
				t.Error(err)
			}
		})
		k.job("low", 4, "8")
		k.untilAdmitted("low")
		k.promises("gpu", 4)
		k.job("high", 2, "8", func(j *batchv1.Job) { j.Labels["kueue.x-k8s.io/priority-class"] = "urgent" })
		k.untilAdmitted("high")
		k.promises("gpu", 2)
		k.remove("high")
		k.untilAdmitted("low")
		k.promises("gpu", 4)
		k.remove("low")
		k.promises("gpu", 0)
	})

	t.Run("Provision asks for the nodes and admits when they are Ready", func(t *testing.T) {
		k := all.in(t, "kueue-provision")
		k.hint("gpu", 0)
		k.queue(fleetv1alpha1.CapacityCheckConfigSpec{Mode: fleetv1alpha1.CapacityCheckProvision, CheckPeriod: of(time.Second)}, "64", "gpu")
		k.job("train", 2, "8")
		k.untilMessage("train", "Ready nodes have room for 0 of 2 pods")
		k.untilRequests("Workload", 2)
		for _, name := range []string{"gpu-1", "gpu-2"} {
			k.node(name, "gpu")
			if name == "gpu-1" {
				k.untilMessage("train", "Ready nodes have room for 1 of 2 pods")
			}
		}
		k.untilAdmitted("train")
		k.untilRequests("Pod", 2) // handed over: nothing is counted twice
		k.remove("train")
		k.untilRequests("Workload", 0)
	})
}

// TestKueueStaysOnAFlavor shows what Kueue does with a check that sends a workload back because its flavor is out of stock:
// it assigns the same flavor again, as long as there is quota for it. A check has no say in the choice of the flavor, so
// that a free second flavor is reached only when the first has no quota. What is left to us is to say so.
func TestKueueStaysOnAFlavor(t *testing.T) {
	k := startKueue(t, "kueue-flavors")
	k.hint("reserved", 0)
	k.hint("spot", 10)
	k.queue(impatient(), "32", "reserved", "spot")
	w, err := clientWatch(t, k)
	if err != nil {
		t.Fatal(err)
	}
	k.job("train", 1, "8")
	_, _ = countUntil(t, w, 2)
	var flavor kueue.ResourceFlavorReference
	eventually(t, "quota is reserved for the third time", func(ctx context.Context) (bool, string) {
		wls, err := k.workloads(ctx)
		if err != nil || !is(wls["train"], kueue.WorkloadQuotaReserved) {
			return false, story(wls)
		}
		flavor = wls["train"].Status.Admission.PodSetAssignments[0].Flavors["nvidia.com/gpu"]
		return true, ""
	})
	if flavor != "reserved" {
		t.Errorf("Kueue moved on to flavor %s by itself after two retries: this test, and the advice in docs/kueue.md, are out of date", flavor)
	}
	// Without quota on the first flavor it goes to the second.
	var cq kueue.ClusterQueue
	if err := k.client.Get(t.Context(), client.ObjectKey{Name: k.ns}, &cq); err != nil {
		t.Fatal(err)
	}
	before := cq.DeepCopy()
	cq.Spec.ResourceGroups[0].Flavors[0].Resources[0].NominalQuota = resource.MustParse("0")
	if err := k.client.Patch(t.Context(), &cq, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	k.untilAdmitted("train")
}

// clientWatch follows the namespace's workloads from now on.
func clientWatch(t *testing.T, k *kueueCluster) (watch.Interface, error) {
	t.Helper()
	c, err := client.NewWithWatch(env.cp.Config(), client.Options{Scheme: k.client.Scheme()})
	if err != nil {
		return nil, err
	}
	w, err := c.Watch(t.Context(), &kueue.WorkloadList{}, client.InNamespace(k.ns))
	if err == nil {
		t.Cleanup(w.Stop)
	}
	return w, err
}

// countUntil counts the writes to a single workload until it has given its quota back so many times.
func countUntil(t *testing.T, w watch.Interface, rounds int) (states []string, writes int) {
	t.Helper()
	deadline := time.After(patience)
	active, pauses := true, []int{}
	for len(pauses) < rounds {
		select {
		case e, open := <-w.ResultChan():
			if !open {
				t.Fatal("the watch ended")
			}
			wl, ok := e.Object.(*kueue.Workload)
			if !ok || len(wl.Status.AdmissionChecks) == 0 {
				continue
			}
			writes++
			s := wl.Status.AdmissionChecks[0]
			states = append(states, fmt.Sprintf("active %t, %s: %s", *wl.Spec.Active, s.State, s.Message))
			if active && !*wl.Spec.Active {
				_, after, _ := strings.Cut(s.Message, "queued again in ")
				var seconds int
				if _, err := fmt.Sscanf(after, "%d s", &seconds); err != nil {
					t.Fatalf("the message %q does not say when it is queued again: %v", s.Message, err)
				}
				pauses = append(pauses, seconds)
			}
			active = *wl.Spec.Active
		case <-deadline:
			t.Fatalf("%d retries of %d\n%s", len(pauses), rounds, strings.Join(states, "\n"))
		}
	}
	if !slices.IsSorted(pauses) || pauses[0] < 2 {
		t.Errorf("pauses of %v seconds are no back-off from 2 s", pauses)
	}
	return states, writes
}

func (k *kueueCluster) untilAdmitted(name string) {
	k.t.Helper()
	eventually(k.t, name+" is admitted", func(ctx context.Context) (bool, string) {
		wls, err := k.workloads(ctx)
		return err == nil && is(wls[name], kueue.WorkloadAdmitted), story(wls)
	})
}

func (k *kueueCluster) untilMessage(name, part string) {
	k.t.Helper()
	eventually(k.t, fmt.Sprintf("%s waits and says %q", name, part), func(ctx context.Context) (bool, string) {
		wls, err := k.workloads(ctx)
		return err == nil && strings.Contains(story(map[string]*kueue.Workload{name: orEmpty(wls[name])}), part), story(wls)
	})
}

func orEmpty(wl *kueue.Workload) *kueue.Workload {
	if wl == nil {
		return &kueue.Workload{}
	}
	return wl
}

// promises waits until the manager says that so many nodes of the offering are promised.
func (k *kueueCluster) promises(offering string, nodes float64) {
	k.t.Helper()
	eventually(k.t, fmt.Sprintf("%v nodes of %s are promised", nodes, offering), func(context.Context) (bool, string) {
		n, state := k.promised(offering)
		return n == nodes, state
	})
}

func (k *kueueCluster) remove(job string) {
	k.t.Helper()
	j := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: k.ns, Name: job}}
	if err := k.client.Delete(k.t.Context(), j, client.PropagationPolicy(metav1.DeletePropagationBackground)); err != nil {
		k.t.Fatal(err)
	}
}

func (k *kueueCluster) availability(hint string, a fleetv1alpha1.Availability) {
	k.t.Helper()
	k.changeHint(hint, func(ac *fleetv1alpha1.AvailableCapacity) { ac.Spec.Availability = a })
}

// node adds a node of eight GPUs that kwok keeps Ready.
func (k *kueueCluster) node(name, instanceType string, change ...func(*corev1.Node)) {
	k.t.Helper()
	n := builders.Node(name).Label(corev1.LabelInstanceTypeStable, instanceType).Allocatable("cpu", "96", "nvidia.com/gpu", "8", "pods", "110").Obj()
	n.UID = ""
	n.Annotations = map[string]string{"kwok.x-k8s.io/node": "fake"}
	for _, c := range change {
		c(n)
	}
	allocatable := n.Status.Allocatable
	k.create(n)
	before := n.DeepCopy()
	before.Status.Allocatable, before.Status.Capacity = nil, nil
	n.Status.Allocatable, n.Status.Capacity = allocatable, allocatable
	if err := k.client.Status().Patch(k.t.Context(), n, client.MergeFrom(before)); err != nil {
		k.t.Fatal(err)
	}
}

// events are the notes of the namespace's Events.
func (k *kueueCluster) events(ctx context.Context) (string, error) {
	var list corev1.EventList
	if err := k.client.List(ctx, &list, client.InNamespace(k.ns)); err != nil {
		return "", err
	}
	var b strings.Builder
	for _, e := range list.Items {
		fmt.Fprintf(&b, "\n  %s %s: %s", e.InvolvedObject.Kind, e.Reason, e.Message)
	}
	return b.String(), nil
}
