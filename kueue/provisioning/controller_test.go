package provisioning

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	autoscalingv1 "k8s.io/autoscaler/cluster-autoscaler/apis/provisioningrequest/autoscaling.x-k8s.io/v1"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/internal/builders"
)

const (
	yes = metav1.ConditionTrue
	no  = metav1.ConditionFalse
)

func TestClusterWithoutTheAPIIsNotServed(t *testing.T) {
	if testing.Short() {
		t.Skip("needs an API server")
	}
	if withoutAPI != nil {
		t.Errorf("setting up without the API: %v, want nothing to happen", withoutAPI)
	}
}

// arrive creates a pod that consumes the booking, and binds it where a node is named.
func (w *world) arrive(name, booking, node string, b *builders.PodBuilder) *corev1.Pod {
	w.t.Helper()
	pod := b.Annotation(autoscalingv1.ProvisioningRequestPodAnnotationKey, booking).
		Annotation(autoscalingv1.ProvisioningClassPodAnnotationKey, ClassName).Obj()
	pod.ObjectMeta = metav1.ObjectMeta{Namespace: w.ns, Name: name, Annotations: pod.Annotations}
	pod.Spec.Containers[0].Resources.Limits = pod.Spec.Containers[0].Resources.Requests
	w.create(pod)
	if node != "" {
		w.bind(pod, node)
	}
	return pod
}

// bind does what a scheduler does.
func (w *world) bind(pod *corev1.Pod, node string) {
	w.t.Helper()
	binding := &corev1.Binding{Target: corev1.ObjectReference{Kind: "Node", Name: node}}
	if err := w.SubResource("binding").Create(w.t.Context(), pod, binding); err != nil {
		w.t.Fatalf("binding %s to %s: %v", pod.Name, node, err)
	}
}

func TestBookingFromDemandToThePods(t *testing.T) {
	w := newWorld(t, Options{})
	w.fleetNode("a", "r1", "8", true)
	w.provision("train", 4, gpus("4"))
	w.hasCondition("train", autoscalingv1.Accepted, yes, ReasonAccepted)
	w.heldBy(map[string]int{"ProvisioningRequest": 4})
	w.acknowledge(4)
	w.eventually("progress in the message", func(ctx context.Context) (string, error) {
		c := w.hasCondition("train", autoscalingv1.Provisioned, no, ReasonWaiting)
		if c.Message != "room for 2 of 4 pods stands ready" {
			return c.Message, nil
		}
		return "", nil
	})

	w.fleetNode("b", "r2", "8", false)
	w.setReady("b")
	w.hasCondition("train", autoscalingv1.Provisioned, yes, ReasonProvisioned)
	var pr autoscalingv1.ProvisioningRequest
	if err := w.Get(t.Context(), client.ObjectKey{Namespace: w.ns, Name: "train"}, &pr); err != nil {
		t.Fatal(err)
	}
	if got := pr.Status.ProvisioningClassDetails[DetailNodes]; got != "a,b" {
		t.Errorf("booked nodes %q, want a,b", got)
	}

	for i := range 4 {
		w.arrive(fmt.Sprint("train-", i), "train", "ab"[i/2:i/2+1], gpus("4"))
		want := map[string]int{"Pod": i + 1}
		if i < 3 {
			want["ProvisioningRequest"] = 3 - i
		}
		w.heldBy(want)
	}
	w.hasCondition("train", autoscalingv1.BookingExpired, yes, ReasonConsumed)

	t.Run("and the roll-up counts every pod once", func(t *testing.T) {
		rollup := w.rollup()
		if needs := rollup.Snapshot().Needs; len(needs) != 1 || needs[0].Count != 4 {
			t.Errorf("needs %+v, want one row of 4 pods", needs)
		}
	})
}

// rollup counts the namespace's demand as the operator does.
func (w *world) rollup() *capacity.Rollup {
	w.t.Helper()
	r := capacity.NewRollup(capacity.DemandTotal)
	var nodes corev1.NodeList
	var pods corev1.PodList
	if err := w.List(w.t.Context(), &nodes); err != nil {
		w.t.Fatal(err)
	}
	if err := w.List(w.t.Context(), &pods, client.InNamespace(w.ns)); err != nil {
		w.t.Fatal(err)
	}
	requests, err := w.requests(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	for i := range nodes.Items {
		r.UpsertNode(&nodes.Items[i])
	}
	for i := range pods.Items {
		r.UpsertPod(&pods.Items[i])
	}
	for i := range requests {
		r.UpsertRequest(&requests[i])
	}
	return r
}

func TestRoomIsPromisedToOneBookingOnly(t *testing.T) {
	w := newWorld(t, Options{})
	const bookings = 8
	for i := range bookings {
		w.provision(fmt.Sprint("train-", i), 2, gpus("8"))
	}
	w.acknowledge(2 * bookings)
	for i := range 6 {
		w.fleetNode(fmt.Sprint("n", i), "r1", "8", true)
	}
	provisioned := func(ctx context.Context) (names []string, err error) {
		var list autoscalingv1.ProvisioningRequestList
		err = w.List(ctx, &list, client.InNamespace(w.ns))
		for i := range list.Items {
			if isTrue(list.Items[i].Status.Conditions, autoscalingv1.Provisioned) {
				names = append(names, list.Items[i].Name)
			}
		}
		return names, err
	}
	w.eventually("three bookings for six nodes", func(ctx context.Context) (string, error) {
		names, err := provisioned(ctx)
		if len(names) == 3 {
			return "", err
		}
		return fmt.Sprint(names), err
	})

	// Another manager knows no more than the objects say.
	w.kill()
	w.serve(Options{})
	w.fleetNode("late", "r1", "1", true)
	w.fleetNode("m0", "r1", "8", true)
	w.fleetNode("m1", "r1", "8", true)
	w.eventually("a fourth booking for two more nodes", func(ctx context.Context) (string, error) {
		names, err := provisioned(ctx)
		if len(names) == 4 {
			return "", err
		}
		return fmt.Sprint(names), err
	})
	var list autoscalingv1.ProvisioningRequestList
	if err := w.List(t.Context(), &list, client.InNamespace(w.ns)); err != nil {
		t.Fatal(err)
	}
	seen := map[string]string{}
	for i := range list.Items {
		for _, n := range bookedNodes(list.Items[i].Status.ProvisioningClassDetails) {
			if seen[n] != "" {
				t.Errorf("node %s is promised to %s and to %s", n, seen[n], list.Items[i].Name)
			}
			seen[n] = list.Items[i].Name
		}
	}
}

func TestPodsThatShareARackWaitForOneRack(t *testing.T) {
	w := newWorld(t, Options{})
	w.fleetNode("a", "r1", "8", true)
	w.fleetNode("b", "r2", "8", true)
	w.provision("train", 2, gpus("8").Annotation(capacity.AnnotationRequiredTopology, fleetv1alpha1.LabelRack))
	w.acknowledge(2)
	c := w.hasCondition("train", autoscalingv1.Provisioned, no, ReasonWaiting)
	if !strings.HasPrefix(c.Message, "room for ") {
		t.Errorf("message %q", c.Message)
	}
	list, err := w.requests(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for i := range list {
		if g := list[i].Spec.Group; g == nil || g.TopologyKey != fleetv1alpha1.LabelRack || g.MinCount != 2 {
			t.Errorf("request %s has group %+v", list[i].Name, g)
		}
	}
	w.fleetNode("c", "r2", "8", true)
	w.hasCondition("train", autoscalingv1.Provisioned, yes, ReasonProvisioned)
	var pr autoscalingv1.ProvisioningRequest
	if err := w.Get(t.Context(), client.ObjectKey{Namespace: w.ns, Name: "train"}, &pr); err != nil {
		t.Fatal(err)
	}
	d := pr.Status.ProvisioningClassDetails
	if d[DetailNodes] != "b,c" || d[DetailDomain] != "r2" {
		t.Errorf("details %v, want nodes b,c in domain r2", d)
	}
}

func TestWhatDoesNotComeInTimeFailsAndIsWithdrawn(t *testing.T) {
	clock := clocktesting.NewFakeClock(time.Now())
	w := newWorld(t, Options{Clock: clock, ProvisionTimeout: time.Hour})
	w.provision("default", 1, gpus("8"))
	w.provision("short", 2, gpus("8"), ParameterValidUntil, "120")
	w.heldBy(map[string]int{"ProvisioningRequest": 3})
	w.stepUntil(clock, 3*time.Minute, "short", autoscalingv1.Failed, ReasonTimedOut)
	w.heldBy(map[string]int{"ProvisioningRequest": 1})
	w.stepUntil(clock, time.Hour, "default", autoscalingv1.Failed, ReasonTimedOut)
	w.heldBy(map[string]int{})
}

// stepUntil moves the clock on, once, and then by seconds, as the agenda may not have looked yet.
func (w *world) stepUntil(clock *clocktesting.FakeClock, d time.Duration, name, kind, reason string) {
	w.t.Helper()
	clock.Step(d)
	w.eventually(fmt.Sprintf("%s to be %s (%s)", name, kind, reason), func(ctx context.Context) (string, error) {
		clock.Step(tick)
		var pr autoscalingv1.ProvisioningRequest
		if err := w.Get(ctx, client.ObjectKey{Namespace: w.ns, Name: name}, &pr); err != nil {
			return "", err
		}
		if c := find(pr.Status.Conditions, kind); c != nil && c.Status == yes && c.Reason == reason {
			return "", nil
		}
		return fmt.Sprintf("%+v", pr.Status), nil
	})
}

func TestBookingThatNobodyConsumesExpires(t *testing.T) {
	clock := clocktesting.NewFakeClock(time.Now())
	w := newWorld(t, Options{Clock: clock})
	w.fleetNode("a", "r1", "8", true)
	w.provision("train", 2, gpus("4"), ParameterBooking, "300")
	w.acknowledge(2)
	w.hasCondition("train", autoscalingv1.Provisioned, yes, ReasonProvisioned)
	w.arrive("train-0", "train", "", gpus("4"))
	w.heldBy(map[string]int{"ProvisioningRequest": 1, "Pod": 1})
	w.stepUntil(clock, 6*time.Minute, "train", autoscalingv1.BookingExpired, ReasonExpired)
	w.heldBy(map[string]int{"Pod": 1})
	w.arrive("train-1", "train", "", gpus("4"))
	w.heldBy(map[string]int{"Pod": 1})
}

func TestNodeThatVanishesRevokesTheBooking(t *testing.T) {
	w := newWorld(t, Options{})
	w.fleetNode("a", "r1", "8", true)
	n := w.fleetNode("b", "r1", "8", true)
	w.provision("train", 2, gpus("8"))
	w.acknowledge(2)
	w.hasCondition("train", autoscalingv1.Provisioned, yes, ReasonProvisioned)
	if err := w.Delete(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	c := w.hasCondition("train", autoscalingv1.CapacityRevoked, yes, ReasonNodesVanished)
	if c.Message != "1 node gone (b) before the pods arrived; room for 1 of 2 pods is left" {
		t.Errorf("message %q", c.Message)
	}
	w.heldBy(map[string]int{})
}

func TestPriorityComesFromTheClass(t *testing.T) {
	w := newWorld(t, Options{})
	class := &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: "p-" + w.ns}, Value: 77}
	w.create(class)
	pod := gpus("1")
	pt := w.template("train", pod)
	pt.Template.Spec.PriorityClassName = class.Name
	w.create(pt)
	pr := request("train", 1)
	pr.Namespace, pr.UID, pr.Spec.Parameters = w.ns, "", map[string]autoscalingv1.Parameter{}
	pr.Spec.PodSets[0].PodTemplateRef.Name = "train"
	w.create(pr)
	w.heldBy(map[string]int{"ProvisioningRequest": 1})
	list, err := w.requests(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if list[0].Spec.Priority != 77 {
		t.Errorf("priority %d, want 77", list[0].Spec.Priority)
	}
}

func TestInvalidRequestsFailWithFieldAndValue(t *testing.T) {
	clock := clocktesting.NewFakeClock(time.Now())
	w := newWorld(t, Options{Clock: clock})
	w.provision("parameter", 1, gpus("1"), ParameterBooking, "soon")
	c := w.hasCondition("parameter", autoscalingv1.Failed, yes, ReasonInvalid)
	if want := `spec.parameters[BookingSeconds]: "soon" is not a number of seconds between 1 and 31536000`; c.Message != want {
		t.Errorf("message %q, want %q", c.Message, want)
	}
	pr := request("template", 1)
	pr.Namespace, pr.UID, pr.Spec.Parameters = w.ns, "", map[string]autoscalingv1.Parameter{}
	pr.Spec.PodSets[0].PodTemplateRef.Name = "nothing"
	w.create(pr)
	w.stepUntil(clock, time.Minute, "template", autoscalingv1.Failed, ReasonInvalid)
	c = w.hasCondition("template", autoscalingv1.Failed, yes, ReasonInvalid)
	if want := "spec.podSets[0].podTemplateRef.name: there is no PodTemplate " + w.ns + "/nothing"; c.Message != want {
		t.Errorf("message %q, want %q", c.Message, want)
	}
}

// The API's schema takes a DNS subdomain for a class; a name with a slash, as other names of the group have, is
// refused.
func TestClassNameIsOneThatTheAPITakes(t *testing.T) {
	w := newWorld(t, Options{})
	pr := request("slash", 1)
	pr.Namespace, pr.UID, pr.Spec.Parameters = w.ns, "", map[string]autoscalingv1.Parameter{}
	pr.Spec.ProvisioningClassName = "fleet.lucy.sh/capacity"
	if err := w.Create(t.Context(), pr); !apierrors.IsInvalid(err) {
		t.Errorf("got %v, want the class name refused", err)
	}
	pr.Spec.ProvisioningClassName = "another.example.com"
	w.create(pr)
	w.provision("ours", 1, gpus("1"))
	w.hasCondition("ours", autoscalingv1.Accepted, yes, ReasonAccepted)
	if err := w.Get(t.Context(), client.ObjectKeyFromObject(pr), pr); err != nil || len(pr.Status.Conditions) > 0 {
		t.Errorf("a request of another class has conditions %v (error %v)", pr.Status.Conditions, err)
	}
}

// Nodes on which the admission check has let a workload pass are not booked, until that workload lets go.
func TestRoomOfTheOtherDoorIsNotBooked(t *testing.T) {
	claims := NewClaims()
	var mu sync.Mutex
	held := []Holding{{PodSets: []PodSet{set(1, "", "", gpus("8"))}}}
	claims.Register("other", func(context.Context) ([]Holding, error) {
		mu.Lock()
		defer mu.Unlock()
		return held, nil
	})
	w := newWorld(t, Options{Claims: claims})
	w.fleetNode("a", "r1", "8", true)
	w.provision("train", 1, gpus("8"))
	w.acknowledge(1)
	w.eventually("the booking waits for room", func(ctx context.Context) (string, error) {
		c := w.hasCondition("train", autoscalingv1.Provisioned, no, ReasonWaiting)
		if c.Message != "room for 0 of 1 pods stands ready" {
			return c.Message, nil
		}
		return "", nil
	})
	mu.Lock()
	held = nil
	mu.Unlock()
	w.fleetNode("b", "r1", "1", true) // has the booking looked at
	w.hasCondition("train", autoscalingv1.Provisioned, yes, ReasonProvisioned)
	claims.Lock()
	defer claims.Unlock()
	booked, err := claims.Others(t.Context(), "other")
	if err != nil || len(booked) != 1 || len(booked[0].PodSets) != 1 || booked[0].PodSets[0].Count != 1 {
		t.Errorf("the class says that it holds %+v (%v), want one pod", booked, err)
	}
}

// Between a pod's arrival and its binding its room is nobody else's, though the booking is consumed by then.
func TestConsumedBookingHoldsTheRoomOfPodsWithoutANode(t *testing.T) {
	w := newWorld(t, Options{})
	w.fleetNode("a", "r1", "8", true)
	w.provision("first", 1, gpus("8"))
	w.acknowledge(1)
	w.hasCondition("first", autoscalingv1.Provisioned, yes, ReasonProvisioned)
	pod := w.arrive("first-0", "first", "", gpus("8"))
	w.hasCondition("first", autoscalingv1.BookingExpired, yes, ReasonConsumed)
	w.provision("second", 1, gpus("8"))
	w.acknowledge(2)
	w.fleetNode("b", "r1", "1", true) // has the booking looked at
	w.eventually("the second booking waits", func(ctx context.Context) (string, error) {
		c := w.hasCondition("second", autoscalingv1.Provisioned, no, ReasonWaiting)
		if c.Message != "room for 0 of 1 pods stands ready" {
			return c.Message, nil
		}
		return "", nil
	})
	w.bind(pod, "a")
	w.fleetNode("c", "r1", "8", true)
	w.hasCondition("second", autoscalingv1.Provisioned, yes, ReasonProvisioned)
	var pr autoscalingv1.ProvisioningRequest
	if err := w.Get(t.Context(), client.ObjectKey{Namespace: w.ns, Name: "second"}, &pr); err != nil {
		t.Fatal(err)
	}
	if got := bookedNodes(pr.Status.ProvisioningClassDetails); len(got) != 1 || got[0] != "c" {
		t.Errorf("the second booking stands on %v, want c", got)
	}
}
