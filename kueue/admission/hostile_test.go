package admission

import (
	"context"
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
)

// A person switches a sent-back workload on before its time; later somebody (kueuectl stop, Rejected) switches it off.
func TestWhatSomebodyElseSwitchesOffStaysOff(t *testing.T) {
	d := newDesk(t, append(theCheck(fleetv1alpha1.CapacityCheckConfigSpec{}, 0), reservedFor("w", 1, time.Hour))...)
	d.pass() // sent back
	wl := d.workload("w")
	if ptr.Deref(wl.Spec.Active, true) || wl.Annotations[annotationQueuedAgain] == "" {
		t.Fatal("not sent back")
	}
	// A person: kubectl patch active=true.
	d.update(wl, func() { wl.Spec.Active = ptr.To(true) })
	d.pass()
	// An hour later it is rejected or stopped by an administrator: Kueue ends the reservation.
	d.clock.SetTime(now.Add(time.Hour))
	wl = d.workload("w")
	d.update(wl, func() { wl.Spec.Active = ptr.To(false) })
	wl.Status.Admission = nil
	wl.Status.Conditions = []metav1.Condition{{Type: kueue.WorkloadQuotaReserved, Status: metav1.ConditionFalse}}
	if err := d.client.Status().Update(t.Context(), wl); err != nil {
		t.Fatal(err)
	}
	d.pass()
	if ptr.Deref(d.workload("w").Spec.Active, true) {
		t.Error("a workload that somebody else switched off was switched on again")
	}
}

// A check with bad parameters is added to a queue with running workloads.
func TestRunningWorkloadSurvivesBadParameters(t *testing.T) {
	d := newDesk(t, append(theCheck(fleetv1alpha1.CapacityCheckConfigSpec{}, 9), reservedFor("w", 1, time.Hour))...)
	if err := d.client.Delete(t.Context(), &fleetv1alpha1.CapacityCheckConfig{ObjectMeta: metav1.ObjectMeta{Name: "config"}}); err != nil {
		t.Fatal(err)
	}
	d.admit("w") // admitted and running; Kueue adds the new check as Pending
	d.pass()
	if !ptr.Deref(d.workload("w").Spec.Active, true) {
		t.Error("a running workload was switched off because a check has bad parameters")
	}
}

// Pods of Kueue's pod integration exist, gated, before the quota is reserved.
func TestPodsThatWereGatedArrive(t *testing.T) {
	d := newDesk(t, append(theCheck(fleetv1alpha1.CapacityCheckConfigSpec{}, 2), reservedFor("w", 2, time.Minute))...)
	d.pass()
	d.admit("w")
	for _, p := range []string{"p1", "p2"} {
		pod := d.podOf("w", p, "node-"+p)
		pod.CreationTimestamp = metav1.Time{Time: now.Add(-2 * time.Minute)} // before Reserved
		pod.Status.Conditions = append(pod.Status.Conditions, corev1.PodCondition{
			Type: corev1.PodScheduled, Status: corev1.ConditionTrue, LastTransitionTime: metav1.Time{Time: now}})
		d.create(pod)
	}
	d.pass()
	if got := d.PromisedNodes(); len(got) != 0 {
		t.Errorf("%v is still promised although all pods run", got)
	}
}

// Status writes while the spec cannot be patched.
func TestRefusedSwitchIsNoLoop(t *testing.T) {
	d := newDesk(t, append(theCheck(fleetv1alpha1.CapacityCheckConfigSpec{}, 0), reservedFor("w", 1, time.Hour))...)
	n := 0
	d.client = interceptor.NewClient(d.client.(client.WithWatch), interceptor.Funcs{
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
			if _, ok := o.(*kueue.Workload); ok {
				return errors.New("forbidden")
			}
			return c.Patch(ctx, o, p, opts...)
		},
		SubResourcePatch: func(ctx context.Context, c client.Client, sub string, o client.Object, p client.Patch, opts ...client.SubResourcePatchOption) error {
			if _, ok := o.(*kueue.Workload); ok {
				n++
			}
			return c.SubResource(sub).Patch(ctx, o, p, opts...)
		},
	})
	r := 0.0
	d.opts.Random = func() float64 { r += 0.13; return r - float64(int(r)) }
	messages := map[string]bool{}
	for range 10 {
		_, _ = d.reconcile()
		messages[d.workload("w").Status.AdmissionChecks[0].Message] = true
	}
	if len(messages) > 1 {
		t.Errorf("10 passes, %d status writes, %d different messages: every write wakes the next pass", n, len(messages))
	}
}

// Kueue's schema allows eight tolerations in one podSetUpdate.
func TestAtMostEightTolerations(t *testing.T) {
	objs := theCheck(fleetv1alpha1.CapacityCheckConfigSpec{}, 0)
	for _, r := range []string{"a", "b", "c", "d", "e", "f", "g", "h", "i"} {
		h := theHint(1)
		h.Name = "gpu-" + r
		h.Spec.NodeTemplate.Taints = []corev1.Taint{{Key: "reserved-for-" + r, Effect: corev1.TaintEffectNoSchedule}}
		objs = append(objs, h)
	}
	d := newDesk(t, append(objs, h100("n1"), reservedFor("w", 1, time.Minute))...)
	d.pass()
	s := d.workload("w").Status.AdmissionChecks[0]
	for _, u := range s.PodSetUpdates {
		if len(u.Tolerations) > 8 {
			t.Errorf("%s with %d tolerations: Kueue's CRD refuses more than 8, and the workload holds its quota for ever", s.State, len(u.Tolerations))
		}
	}
}

// At the most, too, workloads come back one after the other.
func TestBackoffHasJitterAtTheMost(t *testing.T) {
	c := fleetv1alpha1.CapacityCheckConfigSpec{}.WithDefaults()
	a := Backoff(c, 20, func() float64 { return 0.1 })
	b := Backoff(c, 20, func() float64 { return 0.9 })
	if a == b {
		t.Errorf("all come back after exactly %s", a)
	}
	if a > c.BackoffMax.Duration || b > c.BackoffMax.Duration {
		t.Errorf("%s and %s, want at most %s", a, b, c.BackoffMax.Duration)
	}
}

// A cluster's hints are written one by one: the largest so far is no proof.
func TestIncompleteCatalogProvesNothing(t *testing.T) {
	small := theHint(5)
	objs := theCheck(fleetv1alpha1.CapacityCheckConfigSpec{}, 0)
	objs[3] = small
	small.Name, small.CreationTimestamp = "gpu-small", metav1.Time{Time: now.Add(-time.Second)}
	small.Spec.Resources["nvidia.com/gpu"] = *ptrQ("1")
	d := newDesk(t, append(objs, reservedFor("w", 1, time.Second))...)
	d.pass()
	s := d.workload("w").Status.AdmissionChecks[0]
	if s.State == kueue.CheckStateRejected {
		t.Errorf("rejected while the catalog is being written: %s", s.Message)
	}
	d.clock.SetTime(now.Add(10 * time.Second))
	d.pass()
	if s := d.workload("w").Status.AdmissionChecks[0]; s.State != kueue.CheckStateRejected {
		t.Errorf("%s, want Rejected: the catalog has settled: %s", s.State, s.Message)
	}
}

// An offering that is renamed or drops out for a moment is no proof either.
func TestHintThatHasJustGoneProvesNothing(t *testing.T) {
	small := theHint(5)
	small.Name = "gpu-small"
	small.Spec.Resources["nvidia.com/gpu"] = *ptrQ("1")
	d := newDesk(t, append(theCheck(fleetv1alpha1.CapacityCheckConfigSpec{}, 0), small)...)
	d.pass()
	if err := d.client.Delete(t.Context(), theHint(0)); err != nil {
		t.Fatal(err)
	}
	d.create(reservedFor("w", 1, time.Second))
	d.pass()
	d.expect("w", kueue.CheckStatePending, "0 available")
	d.clock.SetTime(now.Add(10 * time.Second))
	d.pass()
	d.expect("w", kueue.CheckStateRejected, "gpu-small")
}

func ptrQ(s string) *resource.Quantity { q := resource.MustParse(s); return &q }

// Whoever may create a Job chooses the number of its pods.
func TestTooManyPodsAreRejected(t *testing.T) {
	d := newDesk(t, append(theCheck(provisionMode, 1), reservedFor("w", 2147483647, 0))...)
	d.pass()
	d.expect("w", kueue.CheckStateRejected, "2147483647 pods")
}

// Room that is held on nodes ends with the promise, also when nothing else wakes the pass.
func TestPassComesBackWhenAPromiseEnds(t *testing.T) {
	timeout := &metav1.Duration{Duration: 5 * time.Minute}
	objs := theCheck(fleetv1alpha1.CapacityCheckConfigSpec{PromiseTimeout: timeout}, 0)
	d := newDesk(t, append(objs, h100("n1"), reservedFor("w", 1, time.Minute))...)
	d.pass()
	d.expect("w", kueue.CheckStateReady, "Ready nodes have room")
	d.admit("w")
	d.clock.SetTime(now.Add(4 * time.Minute))
	// The hint's freshness wakes the pass, too, while there is one.
	if err := d.client.Delete(t.Context(), theHint(0)); err != nil {
		t.Fatal(err)
	}
	d.pass()
	if again := d.pass().RequeueAfter; again != time.Minute {
		t.Errorf("the pass comes again after %s, want the minute that the promise has left", again)
	}
}
