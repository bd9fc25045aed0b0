package admission

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/internal/builders"
	"github.com/drover-sh/drover/kueue/provisioning"
)

// desk is a Pass over objects in memory, for what a real API server does not do on demand: errors, and a cache that is
// behind. What Kueue does with the answers is shown in test/integration.
type desk struct {
	*Pass
	t     *testing.T
	clock *clocktesting.FakePassiveClock
	// refuse fails writes to the workloads of these names.
	refuse map[string]bool
	// behind is what the cache shows of workloads instead of what there is.
	behind *kueue.WorkloadList
}

func newDesk(t *testing.T, objects ...client.Object) *desk {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, kueue.AddToScheme, fleetv1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	d := &desk{t: t, clock: clocktesting.NewFakePassiveClock(now), refuse: map[string]bool{}}
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).
		WithStatusSubresource(&kueue.Workload{}, &kueue.AdmissionCheck{}, &fleetv1alpha1.CapacityRequest{}).
		WithIndex(&kueue.Workload{}, indexCheck, checksOf).WithIndex(&kueue.Workload{}, indexSentBack, isSentBack).
		WithInterceptorFuncs(interceptor.Funcs{
			SubResourcePatch: func(ctx context.Context, c client.Client, sub string, o client.Object, p client.Patch, opts ...client.SubResourcePatchOption) error {
				if d.refuse[o.GetName()] {
					return errors.New("the webhook refuses it")
				}
				return c.SubResource(sub).Patch(ctx, o, p, opts...)
			},
			Create: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.CreateOption) error {
				if d.refuse[o.GetNamespace()] {
					return errors.New("the namespace is being terminated")
				}
				return c.Create(ctx, o, opts...)
			},
			List: func(ctx context.Context, c client.WithWatch, l client.ObjectList, opts ...client.ListOption) error {
				if wls, ok := l.(*kueue.WorkloadList); ok && d.behind != nil {
					d.behind.DeepCopyInto(wls)
					return nil
				}
				return c.List(ctx, l, opts...)
			},
		}).Build()
	metrics, err := NewMetrics(prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	d.Pass = newPass(c, &events.FakeRecorder{}, Options{
		Namespace: "fleet-system", Clock: d.clock, Random: func() float64 { return 0 }, Claims: provisioning.NewClaims(),
	}, metrics)
	d.opts.Claims.Register(claimant, d.held)
	return d
}

// theCheck is an AdmissionCheck with a configuration, a flavor of nodes of type h100, and so many of them to be had.
func theCheck(spec fleetv1alpha1.CapacityCheckConfigSpec, count int32) []client.Object {
	return []client.Object{
		&fleetv1alpha1.CapacityCheckConfig{ObjectMeta: metav1.ObjectMeta{Name: "config"}, Spec: spec},
		&kueue.AdmissionCheck{ObjectMeta: metav1.ObjectMeta{Name: "check"}, Spec: kueue.AdmissionCheckSpec{
			ControllerName: ControllerName,
			Parameters:     &kueue.AdmissionCheckParametersReference{APIGroup: fleetv1alpha1.GroupName, Kind: "CapacityCheckConfig", Name: "config"},
		}},
		&kueue.ResourceFlavor{ObjectMeta: metav1.ObjectMeta{Name: "gpu"}, Spec: kueue.ResourceFlavorSpec{NodeLabels: map[string]string{"type": "h100"}}},
		theHint(count),
	}
}

func theHint(count int32) *fleetv1alpha1.AvailableCapacity {
	h := builders.AvailableCapacity("gpu-h100", count).Requires("type", corev1.NodeSelectorOpIn, "h100").
		Resources("cpu", "96", "memory", "1000Gi", "nvidia.com/gpu", "8").Obj()
	h.Status.ObservedTime = &metav1.Time{Time: now}
	return h
}

// reservedFor is a workload of count pods of eight GPUs that has held quota for a while.
func reservedFor(name string, count int32, held time.Duration) *kueue.Workload {
	gpus := corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("8")}
	return &kueue.Workload{
		ObjectMeta: metav1.ObjectMeta{Namespace: name, Name: name, UID: types.UID(name), CreationTimestamp: metav1.Time{Time: now}},
		Spec: kueue.WorkloadSpec{PodSets: []kueue.PodSet{{Name: "main", Count: count, Template: corev1.PodTemplateSpec{
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Resources: corev1.ResourceRequirements{Requests: gpus}}}},
		}}}},
		Status: kueue.WorkloadStatus{
			Admission: &kueue.Admission{ClusterQueue: "q", PodSetAssignments: []kueue.PodSetAssignment{{
				Name: "main", Count: &count, Flavors: map[corev1.ResourceName]kueue.ResourceFlavorReference{"nvidia.com/gpu": "gpu"},
			}}},
			Conditions: []metav1.Condition{{Type: kueue.WorkloadQuotaReserved, Status: metav1.ConditionTrue,
				LastTransitionTime: metav1.Time{Time: now.Add(-held)}}},
			AdmissionChecks: []kueue.AdmissionCheckState{{Name: "check", State: kueue.CheckStatePending}},
		},
	}
}

func (d *desk) reconcile() (ctrl.Result, error) { return d.Reconcile(d.t.Context(), ctrl.Request{}) }

func (d *desk) pass() ctrl.Result {
	d.t.Helper()
	result, err := d.reconcile()
	if err != nil {
		d.t.Fatal(err)
	}
	return result
}

func (d *desk) workload(name string) *kueue.Workload {
	d.t.Helper()
	var wl kueue.Workload
	if err := d.client.Get(d.t.Context(), client.ObjectKey{Namespace: name, Name: name}, &wl); err != nil {
		d.t.Fatal(err)
	}
	return &wl
}

func (d *desk) expect(name string, state kueue.CheckState, part string) {
	d.t.Helper()
	s := d.workload(name).Status.AdmissionChecks[0]
	if s.State != state || !strings.Contains(s.Message, part) {
		d.t.Errorf("%s is %s: %q, expected %s with %q", name, s.State, s.Message, state, part)
	}
}

func (d *desk) update(o client.Object, change func()) {
	d.t.Helper()
	before := o.DeepCopyObject().(client.Object)
	change()
	if err := d.client.Patch(d.t.Context(), o, client.MergeFrom(before)); err != nil {
		d.t.Fatal(err)
	}
}

// requests are the specs of the CapacityRequests by name.
func (d *desk) requests() map[string]fleetv1alpha1.CapacityRequest {
	d.t.Helper()
	var list fleetv1alpha1.CapacityRequestList
	if err := d.client.List(d.t.Context(), &list); err != nil {
		d.t.Fatal(err)
	}
	out := map[string]fleetv1alpha1.CapacityRequest{}
	for _, cr := range list.Items {
		out[cr.Name] = cr
	}
	return out
}

func (d *desk) acknowledge() {
	d.t.Helper()
	for _, cr := range d.requests() {
		before := cr.DeepCopy()
		cr.Status.Phase = fleetv1alpha1.CapacityRequestAcknowledged
		if err := d.client.Status().Patch(d.t.Context(), &cr, client.MergeFrom(before)); err != nil {
			d.t.Fatal(err)
		}
	}
}

func (d *desk) create(objects ...client.Object) {
	d.t.Helper()
	for _, o := range objects {
		if err := d.client.Create(d.t.Context(), o); err != nil {
			d.t.Fatal(err)
		}
	}
}

func h100(name string) *corev1.Node {
	return builders.Node(name).Label("type", "h100").Machine(name).Allocatable("cpu", "96", "nvidia.com/gpu", "8", "pods", "110").Ready().Obj()
}

var provisionMode = fleetv1alpha1.CapacityCheckConfigSpec{Mode: fleetv1alpha1.CapacityCheckProvision}

// A workload that cannot be written to, or whose namespace takes no requests, is reported and holds nobody else up.
func TestOneWorkloadInTroubleHoldsUpNobody(t *testing.T) {
	for mode, want := range map[fleetv1alpha1.CapacityCheckMode]string{
		fleetv1alpha1.CapacityCheckHint: "nodes can be had", fleetv1alpha1.CapacityCheckProvision: "Ready nodes have room for 0 of 1 pods",
	} {
		t.Run(string(mode), func(t *testing.T) {
			d := newDesk(t, append(theCheck(fleetv1alpha1.CapacityCheckConfigSpec{Mode: mode}, 9),
				reservedFor("first", 1, 0), reservedFor("second", 1, time.Minute))...)
			d.refuse["first"] = true
			if _, err := d.reconcile(); err == nil || !strings.Contains(err.Error(), "first") {
				t.Errorf("the error %v does not name the workload in trouble", err)
			}
			if got := d.workload("second").Status.AdmissionChecks[0].Message; !strings.Contains(got, want) {
				t.Errorf("the next workload says %q, expected %q", got, want)
			}
		})
	}
}

// Quota is not held for ever by a check that cannot decide, and the pass does not spin on it.
func TestBadParametersGiveQuotaBack(t *testing.T) {
	d := newDesk(t, append(theCheck(fleetv1alpha1.CapacityCheckConfigSpec{}, 9),
		reservedFor("fresh", 1, time.Minute), reservedFor("long", 1, time.Hour))...)
	if err := d.client.Delete(t.Context(), &fleetv1alpha1.CapacityCheckConfig{ObjectMeta: metav1.ObjectMeta{Name: "config"}}); err != nil {
		t.Fatal(err)
	}
	if again := d.pass().RequeueAfter; again < time.Second {
		t.Errorf("the pass comes again after %s", again)
	}
	d.expect("fresh", kueue.CheckStatePending, `there is no CapacityCheckConfig "config"`)
	if !*ptrTrue(d.workload("fresh").Spec.Active) || *ptrTrue(d.workload("long").Spec.Active) {
		t.Error("the workload that has waited for its time-out should have given its quota back, and the other one not")
	}
}

func ptrTrue(b *bool) *bool { return ptr.To(ptr.Deref(b, true)) }

// While the cache does not show yet that a workload was let pass, it is not decided again: the hint may have changed, and
// what was promised to it would be given to another.
func TestACacheThatIsBehindGivesNothingAway(t *testing.T) {
	d := newDesk(t, append(theCheck(fleetv1alpha1.CapacityCheckConfigSpec{}, 4), reservedFor("big", 4, time.Minute))...)
	behind := &kueue.WorkloadList{Items: []kueue.Workload{*d.workload("big")}}
	d.pass()
	d.expect("big", kueue.CheckStateReady, "4 × gpu-h100")

	hint := theHint(4)
	hint.ResourceVersion = ""
	d.update(hint, func() { hint.Spec.AvailableCount = 2 })
	d.create(reservedFor("small", 2, 0))
	behind.Items = append(behind.Items, *d.workload("small"))
	d.behind = behind
	d.pass()
	d.behind = nil
	d.expect("small", kueue.CheckStatePending, "needs 2 × 8 nvidia.com/gpu in flavor gpu; 0 available")
	if got := d.PromisedNodes()["gpu-h100"]; got != 4 {
		t.Errorf("%d nodes are promised, expected the 4 of the workload that passed", got)
	}
	d.pass()
	d.expect("big", kueue.CheckStateReady, "4 × gpu-h100")
}

// The next wait of a workload that has been admitted begins with the shortest pause again.
func TestRetriesAreForgottenOnAdmission(t *testing.T) {
	wl := reservedFor("w", 1, time.Minute)
	wl.Annotations = map[string]string{annotationRetries: "5"}
	d := newDesk(t, append(theCheck(fleetv1alpha1.CapacityCheckConfigSpec{}, 4), wl)...)
	d.pass()
	if got := retriesOf(d.workload("w")); got != 5 {
		t.Errorf("%d retries are left of a workload that is not admitted yet", got)
	}
	d.admit("w")
	d.pass()
	if got := retriesOf(d.workload("w")); got != 0 {
		t.Errorf("%d retries are left of an admitted workload", got)
	}
}

// admit does what Kueue does when all checks are Ready.
func (d *desk) admit(name string) {
	d.t.Helper()
	wl := d.workload(name)
	wl.Status.Conditions = append(wl.Status.Conditions, metav1.Condition{Type: kueue.WorkloadAdmitted, Status: metav1.ConditionTrue,
		LastTransitionTime: metav1.Time{Time: now}})
	if err := d.client.Status().Update(d.t.Context(), wl); err != nil {
		d.t.Fatal(err)
	}
}

// podOf is a pod as Kueue starts it, with the annotations of the check.
func (d *desk) podOf(wl, name, node string) *corev1.Pod {
	d.t.Helper()
	pod := builders.Pod(wl, name).Requests("nvidia.com/gpu", "8").Node(node).Obj()
	pod.CreationTimestamp = metav1.Time{Time: now}
	pod.Annotations = maps.Clone(d.workload(wl).Status.AdmissionChecks[0].PodSetUpdates[0].Annotations)
	return pod
}

// What a workload was promised is over when all of its pods have a node, though Kueue writes no PodsReady; a new leader
// knows it, too.
func TestAPromiseEndsWhenThePodsHaveNodes(t *testing.T) {
	d := newDesk(t, append(theCheck(fleetv1alpha1.CapacityCheckConfigSpec{}, 2), reservedFor("w", 2, time.Minute))...)
	d.pass()
	d.admit("w")
	d.create(d.podOf("w", "p1", "n1"), d.podOf("w", "p2", ""))
	d.pass()
	if got := d.PromisedNodes()["gpu-h100"]; got != 2 {
		t.Errorf("%d nodes are promised while a pod has no node, expected 2", got)
	}
	earlier := d.podOf("w", "p0", "n0") // it ran before the workload was preempted
	earlier.CreationTimestamp, earlier.Status.Phase = metav1.Time{Time: now.Add(-time.Hour)}, corev1.PodSucceeded
	for name, text := range earlier.Annotations {
		m, _ := readMark(text)
		earlier.Annotations[name] = strings.Replace(text, fmt.Sprint(m.Reserved), fmt.Sprint(m.Reserved-3600), 1)
	}
	d.create(earlier)
	d.pass()
	if got := d.PromisedNodes()["gpu-h100"]; got != 2 {
		t.Errorf("%d nodes are promised beside a pod of an earlier admission, expected 2", got)
	}
	pod := d.podOf("w", "p2", "")
	d.update(pod, func() { pod.Spec.NodeName = "n2" })
	d.pass()
	if got := d.PromisedNodes(); len(got) != 0 {
		t.Errorf("%v is promised to pods that have their nodes", got)
	}
	d.ledger = NewLedger()
	d.pass()
	if got := d.PromisedNodes(); len(got) != 0 {
		t.Errorf("after a restart %v is promised to pods that have their nodes", got)
	}
}

// A new leader reads the promises back from the workloads.
func TestPromisesAreReadBack(t *testing.T) {
	d := newDesk(t, append(theCheck(fleetv1alpha1.CapacityCheckConfigSpec{}, 4), reservedFor("w", 3, time.Minute))...)
	d.pass()
	d.ledger = NewLedger()
	d.create(reservedFor("late", 2, 0))
	d.pass()
	d.expect("late", kueue.CheckStatePending, "1 available, High (3 nodes are promised to others)")
}

// Room on Ready nodes is given once: to the workload that was let pass on it until its pods are there.
func TestRoomIsHeldUntilThePodsAreThere(t *testing.T) {
	d := newDesk(t, append(theCheck(fleetv1alpha1.CapacityCheckConfigSpec{}, 0), h100("n1"), h100("n2"), reservedFor("w", 2, time.Minute))...)
	d.pass()
	d.expect("w", kueue.CheckStateReady, "Ready nodes have room for 2 pods")
	d.create(reservedFor("late", 1, 0))
	d.pass()
	d.expect("late", kueue.CheckStatePending, "0 available")
	d.create(d.podOf("w", "p1", "n1"), h100("n3"))
	d.pass()
	d.expect("late", kueue.CheckStateReady, "Ready nodes have room for 1 pods")
}

// The two doors do not promise one node twice.
func TestDoorsSeeEachOther(t *testing.T) {
	d := newDesk(t, append(theCheck(provisionMode, 0), h100("n1"), h100("n2"), reservedFor("w", 1, time.Minute))...)
	gpus := provisioning.PodSet{Count: 1, Profile: capacity.Profile{Resources: capacity.Resources{"nvidia.com/gpu": 8}}}
	other := []provisioning.Holding{{PodSets: []provisioning.PodSet{gpus}, Nodes: []string{"n1"}}, {PodSets: []provisioning.PodSet{gpus}, Nodes: []string{"n2"}}}
	d.opts.Claims.Register("other", func(context.Context) ([]provisioning.Holding, error) { return other, nil })
	d.pass()
	d.acknowledge()
	d.pass()
	d.expect("w", kueue.CheckStatePending, "Ready nodes have room for 0 of 1 pods")
	other = other[:1]
	d.pass()
	d.expect("w", kueue.CheckStateReady, "n2")
	held, err := d.opts.Claims.Others(t.Context(), "other")
	if err != nil || len(held) != 1 || held[0].PodSets[0].Count != 1 {
		t.Errorf("the check says that it holds %+v (%v), expected one pod", held, err)
	}
}

// Nodes of the fleet are no ground to admit before the autoscaler has heard of the demand: it could take them for surplus.
func TestProvisionWaitsForTheAcknowledgement(t *testing.T) {
	d := newDesk(t, append(theCheck(provisionMode, 0), h100("n1"), reservedFor("w", 1, time.Minute))...)
	d.pass()
	d.pass()
	d.expect("w", kueue.CheckStatePending, "Ready nodes have room, and the autoscaler has taken 0 of 1 requests")
	d.acknowledge()
	d.pass()
	d.expect("w", kueue.CheckStateReady, "1 nodes are Ready and have room: n1")
}

// A workload that comes back with fewer pods, or on another flavor, asks for what it is now.
func TestProvisionFollowsTheAssignment(t *testing.T) {
	d := newDesk(t, append(theCheck(provisionMode, 0), reservedFor("w", 3, time.Minute),
		&kueue.ResourceFlavor{ObjectMeta: metav1.ObjectMeta{Name: "old"}, Spec: kueue.ResourceFlavorSpec{NodeLabels: map[string]string{"type": "a100"}}})...)
	d.pass()
	if got := len(d.requests()); got != 3 {
		t.Fatalf("%d requests for three pods", got)
	}
	wl := d.workload("w")
	a := &wl.Status.Admission.PodSetAssignments[0]
	a.Count, a.Flavors["nvidia.com/gpu"] = ptr.To[int32](2), "old"
	if err := d.client.Status().Update(t.Context(), wl); err != nil {
		t.Fatal(err)
	}
	d.pass()
	d.pass()
	requests := d.requests()
	if len(requests) != 2 {
		t.Errorf("%d requests for two pods: %v", len(requests), slices.Sorted(maps.Keys(requests)))
	}
	for name, cr := range requests {
		if got := fmt.Sprint(cr.Spec.Requirements); !strings.Contains(got, "a100") || strings.Contains(got, "h100") {
			t.Errorf("request %s still asks for %s", name, got)
		}
	}
}

// A gang that could only be had node by node is not asked for.
func TestProvisionKeepsGangsWhole(t *testing.T) {
	for policy, want := range map[fleetv1alpha1.AtomicProvisioningPolicy]kueue.CheckState{
		fleetv1alpha1.AtomicWait: kueue.CheckStatePending, fleetv1alpha1.AtomicReject: kueue.CheckStateRejected,
	} {
		spec := provisionMode
		spec.AtomicProvisioning = policy
		wl := reservedFor("w", 2, time.Minute)
		wl.Spec.PodSets[0].Template.Labels = map[string]string{capacity.LabelPodGroup: "gang"}
		d := newDesk(t, append(theCheck(spec, 9), wl)...)
		d.pass()
		d.expect("w", want, "no offering that matches supports atomic provisioning")
		if got := len(d.requests()); got != 0 {
			t.Errorf("%s: %d requests were written for a gang that nobody can bring as a whole", policy, got)
		}
	}
}
