package playground

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
)

func TestAWorkloadThatIsAdmittedTwiceIsSeen(t *testing.T) {
	r := newRecorder("story", nil)
	see := func(admitted metav1.ConditionStatus) {
		wl := &kueue.Workload{ObjectMeta: metav1.ObjectMeta{Namespace: "story", Name: "job-a", UID: "a"}}
		wl.Status.Conditions = []metav1.Condition{
			{Type: kueue.WorkloadAdmitted, Status: admitted}, {Type: kueue.WorkloadQuotaReserved, Status: admitted},
		}
		wl.Status.Admission = &kueue.Admission{PodSetAssignments: []kueue.PodSetAssignment{
			{Flavors: map[corev1.ResourceName]kueue.ResourceFlavorReference{resourceGPU: "h100"}},
		}}
		r.saw(wl)
	}
	see(metav1.ConditionTrue)
	see(metav1.ConditionTrue) // the same once more
	if len(r.violations) > 0 || r.admissions() != 1 {
		t.Fatalf("%d admissions, violations %q; expected 1 and none", r.admissions(), r.violations)
	}
	see(metav1.ConditionFalse)
	see(metav1.ConditionTrue)
	if diff := cmp.Diff([]string{"no workload is admitted twice: workload job-a"}, r.violations); diff != "" {
		t.Errorf("violations (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"h100", "h100"}, r.workloads["a"].flavors); diff != "" {
		t.Errorf("flavors in which quota was reserved (-want +got):\n%s", diff)
	}
}

func TestWhatIsShownOfADescription(t *testing.T) {
	const described = `Name:         job-train-01-f849c
Status:
  Admission:
    Cluster Queue:  training
  Admission Checks:
    Last Transition Time:  2026-11-30T15:00:00Z
    Message:               needs 4 × 8 nvidia.com/gpu; 1 available
    Name:                  fleet-capacity
    Pod Set Updates:
      Name:  main
    State:   Pending
  Conditions:
    Message:               Quota reserved
Events:
  Type    Reason         Age   From             Message
  ----    ------         ----  ----             -------
  Normal  First          9s    kueue-admission  1
  Normal  Second         8s    kueue-admission  2
  Normal  Third          7s    kueue-admission  3
  Normal  Fourth         6s    kueue-admission  4
`
	const want = `Admission Checks:
  Message:  needs 4 × 8 nvidia.com/gpu; 1 available
  Name:     fleet-capacity
  State:    Pending

Events:
  Type    Reason         Age   From             Message
  Normal  Second         8s    kueue-admission  2
  Normal  Third          7s    kueue-admission  3
  Normal  Fourth         6s    kueue-admission  4`
	if diff := cmp.Diff(want, excerpt(described)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestKueueIsNotStartedInAPlaygroundOfAnotherProcess(t *testing.T) {
	attached := &Playground{}
	if err := attached.EnableKueue(t.Context()); !errors.Is(err, ErrNoKueue) {
		t.Errorf("without Kueue: %v, expected ErrNoKueue", err)
	}
	attached.hasKueue = true
	if err := attached.EnableKueue(t.Context()); err != nil {
		t.Errorf("with Kueue: %v", err)
	}
}

func TestTheManagerServesKueueWhereKueueRuns(t *testing.T) {
	for _, runs := range []bool{false, true} {
		p := &Playground{dir: t.TempDir(), kube: "/kubeconfig", ports: ports{1, 2, 3, 4, 5, 6}, hasKueue: runs}
		if err := p.writeConfigs(); err != nil {
			t.Fatal(err)
		}
		var c configv1alpha1.ManagerConfiguration
		if err := configv1alpha1.Load(p.config(Manager), &c); err != nil || c.Kueue.Enabled != runs {
			t.Errorf("kueue.enabled is %t, expected %t (%v)", c.Kueue.Enabled, runs, err)
		}
	}
}
