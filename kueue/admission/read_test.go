package admission

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
)

// A workload is written to only while it holds quota and nothing has ended it: a state written to an evicted one would keep
// it evicted for ever.
func TestOnlyReservedWorkloadsAreWrittenTo(t *testing.T) {
	with := func(change func(*kueue.Workload), conditions ...string) *kueue.Workload {
		wl := &kueue.Workload{Status: kueue.WorkloadStatus{Admission: &kueue.Admission{}}}
		for _, c := range conditions {
			wl.Status.Conditions = append(wl.Status.Conditions, metav1.Condition{Type: c, Status: metav1.ConditionTrue})
		}
		if change != nil {
			change(wl)
		}
		return wl
	}
	for name, c := range map[string]struct {
		wl   *kueue.Workload
		want bool
	}{
		"quota reserved":         {with(nil, kueue.WorkloadQuotaReserved), true},
		"admitted":               {with(nil, kueue.WorkloadQuotaReserved, kueue.WorkloadAdmitted), true},
		"pending":                {with(nil), false},
		"evicted":                {with(nil, kueue.WorkloadQuotaReserved, kueue.WorkloadEvicted), false},
		"finished":               {with(nil, kueue.WorkloadQuotaReserved, kueue.WorkloadFinished), false},
		"switched off":           {with(func(wl *kueue.Workload) { wl.Spec.Active = ptr.To(false) }, kueue.WorkloadQuotaReserved), false},
		"being deleted":          {with(func(wl *kueue.Workload) { wl.DeletionTimestamp = &metav1.Time{Time: now} }, kueue.WorkloadQuotaReserved), false},
		"admission is gone":      {with(func(wl *kueue.Workload) { wl.Status.Admission = nil }, kueue.WorkloadQuotaReserved), false},
		"reactivated, no quota":  {with(func(wl *kueue.Workload) { wl.Spec.Active = ptr.To(true) }), false},
		"reactivated, has quota": {with(func(wl *kueue.Workload) { wl.Spec.Active = ptr.To(true) }, kueue.WorkloadQuotaReserved), true},
	} {
		if got := reserved(c.wl); got != c.want {
			t.Errorf("%s: written to is %t, expected %t", name, got, c.want)
		}
	}
}

// What a pod set needs comes from its template, its flavors and what Kueue charges for it: partial admission lowers the
// count, limits stand for requests that are missing, and a RuntimeClass's overhead is in the charge alone.
func TestPodSetsAreReadWithTheirFlavors(t *testing.T) {
	c := &cluster{
		flavors: map[string]*kueue.ResourceFlavor{
			"gpu": {Spec: kueue.ResourceFlavorSpec{
				NodeLabels:  map[string]string{"type": "h100"},
				Tolerations: []corev1.Toleration{{Key: "gpu", Operator: corev1.TolerationOpExists}},
			}},
			"default": {},
		},
		queues: map[string]*kueue.ClusterQueue{"q": {Spec: kueue.ClusterQueueSpec{
			AdmissionChecksStrategy: &kueue.AdmissionChecksStrategy{AdmissionChecks: []kueue.AdmissionCheckStrategyRule{
				{Name: "capacity", OnFlavors: []kueue.ResourceFlavorReference{"gpu"}},
			}},
		}}},
	}
	template := func(limits corev1.ResourceList) corev1.PodTemplateSpec {
		return corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name: "c", Resources: corev1.ResourceRequirements{Limits: limits},
		}}}}
	}
	wl := &kueue.Workload{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "w", UID: "uid"},
		Spec: kueue.WorkloadSpec{PodSets: []kueue.PodSet{
			{Name: "workers", Count: 8, Template: template(corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("8")})},
			{Name: "driver", Count: 1, Template: template(corev1.ResourceList{"cpu": resource.MustParse("1")})},
		}},
		Status: kueue.WorkloadStatus{Admission: &kueue.Admission{ClusterQueue: "q", PodSetAssignments: []kueue.PodSetAssignment{
			{Name: "workers", Count: ptr.To[int32](4), Flavors: map[corev1.ResourceName]kueue.ResourceFlavorReference{
				"nvidia.com/gpu": "gpu", "cpu": "default",
			}, ResourceUsage: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("32"), "cpu": resource.MustParse("2"),
				// What a transformation or a device class makes of the request: no node has it.
				"example.com/gpu-memory": resource.MustParse("320")}},
			{Name: "driver", Flavors: map[corev1.ResourceName]kueue.ResourceFlavorReference{"cpu": "default"}},
		}}},
	}
	w := c.workload(wl, &check{object: &kueue.AdmissionCheck{ObjectMeta: metav1.ObjectMeta{Name: "capacity"}}}, &kueue.AdmissionCheckState{})
	workers, driver := w.PodSets[0], w.PodSets[1]
	if workers.Count != 4 || !workers.Concerned || workers.Flavor != "gpu" || !workers.Selected {
		t.Errorf("workers are read as %+v", workers)
	}
	want := capacity.Profile{
		Requirements: []capacity.Requirement{{Key: "type", Operator: capacity.OperatorIn, Values: []string{"h100"}}},
		Resources:    capacity.Resources{"nvidia.com/gpu": 8, "cpu": 500},
		Tolerations:  []corev1.Toleration{{Key: "gpu", Operator: corev1.TolerationOpExists}},
	}
	if diff := cmp.Diff(want, workers.Profile); diff != "" {
		t.Errorf("the workers' profile differs (-expected +read):\n%s", diff)
	}
	if diff := cmp.Diff(capacity.Resources{"nvidia.com/gpu": 8}, workers.Own); diff != "" {
		t.Errorf("a proof would go by other resources than the template's (-expected +read):\n%s", diff)
	}
	if driver.Concerned || driver.Count != 1 || driver.Flavor != "default" {
		t.Errorf("the driver uses no flavor of the check, but is read as %+v", driver)
	}
}

func TestActive(t *testing.T) {
	fresh, old := gpuHint("a", 1), gpuHint("b", 1, stale)
	open := fleetv1alpha1.CapacityCheckConfigSpec{OnStale: fleetv1alpha1.StaleFailOpen}
	for name, c := range map[string]struct {
		config  fleetv1alpha1.CapacityCheckConfigSpec
		problem string
		hints   []Hint
		status  metav1.ConditionStatus
		reason  string
	}{
		"all is fresh":           {hints: []Hint{fresh}, status: metav1.ConditionTrue, reason: reasonActive},
		"one of two is stale":    {hints: []Hint{fresh, old}, status: metav1.ConditionTrue, reason: reasonStale},
		"all is stale":           {hints: []Hint{old}, status: metav1.ConditionFalse, reason: reasonUnreachable},
		"no hint at all":         {status: metav1.ConditionFalse, reason: reasonUnreachable},
		"all is stale, and open": {config: open, hints: []Hint{old}, status: metav1.ConditionTrue, reason: reasonStale},
		"bad parameters":         {problem: "no such config", hints: []Hint{fresh}, status: metav1.ConditionFalse, reason: reasonBadParameters},
	} {
		k := &check{object: &kueue.AdmissionCheck{}, config: c.config.WithDefaults(), problem: c.problem}
		cond, until := active(k, c.hints, now)
		if cond.Status != c.status || cond.Reason != c.reason || cond.Message == "" {
			t.Errorf("%s: Active is %s (%s: %s), expected %s (%s)", name, cond.Status, cond.Reason, cond.Message, c.status, c.reason)
		}
		if name == "all is fresh" && !until.After(now) {
			t.Errorf("a fresh hint goes stale, but the condition is not looked at again (%s)", until)
		}
	}
}

// A workload that was sent back comes back by its annotation; without it the switch is the user's.
func TestOnlyOurOwnSwitchIsTurnedBack(t *testing.T) {
	wl := &kueue.Workload{Spec: kueue.WorkloadSpec{Active: ptr.To(false)}}
	if sentBack(wl) {
		t.Error("a workload that a user has switched off would be switched on")
	}
	wl.Annotations = map[string]string{annotationQueuedAgain: now.Add(time.Minute).Format(time.RFC3339), annotationRetries: "3"}
	if !sentBack(wl) || retriesOf(wl) != 3 {
		t.Errorf("sent back is %t after %d retries, expected it after 3", sentBack(wl), retriesOf(wl))
	}
	wl.Spec.Active = ptr.To(true)
	if sentBack(wl) {
		t.Error("a workload that a user has switched on again would be looked after for ever")
	}
	wl.Annotations[annotationRetries] = "many"
	if got := retriesOf(wl); got != 0 {
		t.Errorf("%d retries from an annotation that is no number", got)
	}
}
