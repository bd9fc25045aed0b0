package provisioning

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	k8sruntime "k8s.io/apimachinery/pkg/runtime"
	autoscalingv1 "k8s.io/autoscaler/cluster-autoscaler/apis/provisioningrequest/autoscaling.x-k8s.io/v1"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/internal/builders"
)

func TestPodThatWasGatedConsumesItsBooking(t *testing.T) {
	scheme := k8sruntime.NewScheme()
	for _, add := range []func(*k8sruntime.Scheme) error{clientgoscheme.AddToScheme, autoscalingv1.AddToScheme, fleetv1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	at := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	pr := &autoscalingv1.ProvisioningRequest{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "pr", UID: "u", CreationTimestamp: metav1.Time{Time: at}},
		Spec:       autoscalingv1.ProvisioningRequestSpec{ProvisioningClassName: ClassName, PodSets: []autoscalingv1.PodSet{{Count: 1}}},
		Status:     autoscalingv1.ProvisioningRequestStatus{Conditions: []metav1.Condition{{Type: autoscalingv1.Provisioned, Status: metav1.ConditionTrue}}},
	}
	pod := builders.Pod("ns", "gated").Requests("cpu", "1").Node("n1").Obj()
	pod.CreationTimestamp = metav1.Time{Time: at.Add(-time.Minute)} // gated until Kueue admitted it
	pod.Annotations = map[string]string{autoscalingv1.ProvisioningRequestPodAnnotationKey: "pr"}
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionTrue, LastTransitionTime: metav1.Time{Time: at.Add(time.Minute)}}}
	one := func(v string) []string {
		if v == "" {
			return nil
		}
		return []string{v}
	}
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(pod).
		WithIndex(&fleetv1alpha1.CapacityRequest{}, indexBooking, func(o client.Object) []string { return one(o.GetLabels()[LabelBooking]) }).
		WithIndex(&corev1.Pod{}, indexConsumes, func(o client.Object) []string { return one(consumes(o)) }).Build()
	s, err := (&Reconciler{Client: c}).stateOf(t.Context(), pr)
	if err != nil {
		t.Fatal(err)
	}
	if len(s.pods) != 1 {
		t.Errorf("the pod that consumes the booking is not seen: the booking keeps asking for a second node until it expires")
	}
}

// Whoever may create a Job chooses the number of its pods: it must not be the number of our map's entries.
func TestSlotsOfTooManyPods(t *testing.T) {
	pr := &autoscalingv1.ProvisioningRequest{
		Spec: autoscalingv1.ProvisioningRequestSpec{PodSets: []autoscalingv1.PodSet{{Count: MaxPods}, {Count: 1}}},
	}
	if n := len(Slots(pr)); n != 0 {
		t.Errorf("%d slots, want none", n)
	}
	if what := tooMany(pr); !strings.Contains(what, "spec.podSets: 100001 pods") {
		t.Errorf("the request is refused with %q, want the field and the value", what)
	}
	pr.Spec.PodSets = pr.Spec.PodSets[1:]
	if n := len(Slots(pr)); n != 1 || tooMany(pr) != "" {
		t.Errorf("%d slots, want 1", n)
	}
}
