package watchgroup

import (
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
)

var acquired = time.Date(2030, 1, 2, 3, 4, 5, 600_000_000, time.UTC)

func leaseOf(annotations map[string]string) *coordinationv1.Lease {
	return &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: "g.a", ResourceVersion: "7", Annotations: annotations},
		Spec: coordinationv1.LeaseSpec{HolderIdentity: ptr.To("s1"), LeaseDurationSeconds: ptr.To[int32](4),
			AcquireTime: ptr.To(metav1.NewMicroTime(acquired))},
	}
}

// terminatedAt is how kubelet reports the end of a container.
func terminatedAt(at time.Time, reason string) *corev1.ContainerStateTerminated {
	return &corev1.ContainerStateTerminated{FinishedAt: metav1.NewTime(at.Truncate(time.Second)), Reason: reason}
}

// Only an end that kubelet has seen counts, and only if it is that of the session: a container that was restarted has another.
func TestOnlyAnEndThatWasSeenCounts(t *testing.T) {
	later, earlier := acquired.Add(3*time.Second), acquired.Add(-3*time.Second)
	for name, test := range map[string]struct {
		statuses []corev1.ContainerStatus
		phase    corev1.PodPhase
		want     bool
	}{
		"it runs":                     {statuses: []corev1.ContainerStatus{{Name: "main"}}},
		"it ended":                    {statuses: []corev1.ContainerStatus{{Name: "main", State: corev1.ContainerState{Terminated: terminatedAt(later, "Error")}}}, want: true},
		"it ended and is in back-off": {statuses: []corev1.ContainerStatus{{Name: "main", LastTerminationState: corev1.ContainerState{Terminated: terminatedAt(later, "Error")}}}, want: true},
		"the one before it ended":     {statuses: []corev1.ContainerStatus{{Name: "main", LastTerminationState: corev1.ContainerState{Terminated: terminatedAt(earlier, "Error")}}}},
		"an old status of the one before": {statuses: []corev1.ContainerStatus{{Name: "main",
			State: corev1.ContainerState{Terminated: terminatedAt(earlier, "Error")}}}},
		"an end in the second of the begin": {statuses: []corev1.ContainerStatus{{Name: "main",
			State: corev1.ContainerState{Terminated: terminatedAt(acquired, "Error")}}}},
		"kubelet lost it": {statuses: []corev1.ContainerStatus{{Name: "main",
			State: corev1.ContainerState{Terminated: terminatedAt(later, lostContainer)}}}},
		"another container ended": {statuses: []corev1.ContainerStatus{{Name: "main"},
			{Name: "sidecar", State: corev1.ContainerState{Terminated: terminatedAt(later, "Completed")}}}},
		"somebody declared it failed": {statuses: []corev1.ContainerStatus{{Name: "main"}}, phase: corev1.PodFailed},
	} {
		t.Run(name, func(t *testing.T) {
			pod := &corev1.Pod{Status: corev1.PodStatus{Phase: test.phase, ContainerStatuses: test.statuses}}
			if got := terminated(pod, leaseOf(map[string]string{lbv1alpha1.AnnotationContainer: "main"})); got != test.want {
				t.Errorf("terminated: %v, want %v", got, test.want)
			}
		})
	}
	if terminated(nil, leaseOf(nil)) {
		t.Error("a Pod that is not there has been seen by nobody to end")
	}
}

func TestUnreadyIsWhoStoppedBeingReady(t *testing.T) {
	condition := func(status corev1.ConditionStatus, at time.Time) *corev1.Pod {
		return &corev1.Pod{Status: corev1.PodStatus{Conditions: []corev1.PodCondition{
			{Type: corev1.PodReady, Status: status, LastTransitionTime: metav1.NewTime(at)}}}}
	}
	deleted := condition(corev1.ConditionTrue, acquired)
	deleted.DeletionTimestamp = ptr.To(metav1.NewTime(acquired))
	for name, test := range map[string]struct {
		pod  *corev1.Pod
		want bool
	}{
		"ready":               {condition(corev1.ConditionTrue, acquired.Add(time.Minute)), false},
		"not ready yet":       {condition(corev1.ConditionFalse, acquired.Add(-time.Minute)), false},
		"not ready any more":  {condition(corev1.ConditionFalse, acquired.Add(time.Minute)), true},
		"being deleted":       {deleted, true},
		"nothing known":       {&corev1.Pod{}, false},
		"not in a Pod at all": {nil, false},
	} {
		if got := unready(test.pod, leaseOf(nil)); got != test.want {
			t.Errorf("%s: unready %v, want %v", name, got, test.want)
		}
	}
}

func TestAPodIsTheMembersByItsUID(t *testing.T) {
	lease := leaseOf(map[string]string{lbv1alpha1.AnnotationPodName: "a", lbv1alpha1.AnnotationPodUID: "1"})
	same, other := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: "1"}}, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: "2"}}
	if got := podOf(lease, map[string]*corev1.Pod{"a": same}, nil); got != same {
		t.Errorf("got %v", got)
	}
	if got := podOf(lease, map[string]*corev1.Pod{"a": other}, nil); got != nil {
		t.Errorf("a Pod of the same name that came later is taken for it: %v", got)
	}
	if got := podOf(lease, nil, map[types.UID]*corev1.Pod{"1": same}); got != same {
		t.Errorf("what was seen of a Pod that is gone is not used: %v", got)
	}
}

func TestLeasesAreReadAsTheyArePromised(t *testing.T) {
	r := recordOf("a", leaseOf(nil), time.Hour)
	if want := (sharding.LeaseRecord{Member: "a", Session: "s1", Renewal: "7", Duration: 4 * time.Second}); r != want {
		t.Errorf("got %+v, want %+v", r, want)
	}
	for weight, want := range map[string]int{"": 1, "3": 3, "0": 1, "-2": 1, "many": 1, "1001": 1} {
		if got := weightOf(leaseOf(map[string]string{lbv1alpha1.AnnotationWeight: weight})); got != want {
			t.Errorf("weight %q counts as %d, want %d", weight, got, want)
		}
	}
	for name, want := range map[string]string{"g.a": "g", "g.a.b": "g", "g": ""} {
		if got := groupOf(name); got != want {
			t.Errorf("%s is of group %q, want %q", name, got, want)
		}
	}
	if _, ok := memberOf("g", "ga.b"); ok {
		t.Error("a member of another group is taken for one of g")
	}
}

// A cache may bring what is older than a list: it must not set back who holds a Lease.
func TestALateRenewalDoesNotSetASessionBack(t *testing.T) {
	tr := newTracker()
	record := func(session, version string) sharding.LeaseRecord {
		return sharding.LeaseRecord{Member: "a", Session: session, Renewal: version, Duration: 10}
	}
	tr.saw(record("new", "100"), 1)
	tr.saw(record("old", "99"), 2)
	if got := tr.session("a", 3); got != "new" {
		t.Errorf("session %q holds the Lease, want the one that was seen in its later version", got)
	}
	if got := tr.session("a", 11); got != "" {
		t.Errorf("an older version has renewed the Lease: session %q at its end", got)
	}
}
