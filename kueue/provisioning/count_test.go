package provisioning

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	autoscalingv1 "k8s.io/autoscaler/cluster-autoscaler/apis/provisioningrequest/autoscaling.x-k8s.io/v1"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/internal/builders"
)

// What the roll-up makes of a booking of one pod, in every state that the pod goes through: docs/design/bookings-become-pods.md.
func TestRollupCountsABookedPodOnce(t *testing.T) {
	pr := request("train", 1)
	booking := BookingOf(pr, []PodTemplate{template(gpus("8"))})
	held := booking.Request(requestName(booking.stem(), 0, 0), 0)
	pod := func() *builders.PodBuilder { return gpus("8").UID("pod") }
	taken := held.DeepCopy()
	taken.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: "p", UID: "pod"}}
	own := builders.CapacityRequest("ns", "cr-p").For(pod().Obj()).
		Spec(capacity.ProfileOfPod(pod().Obj()).RequestSpec()).Obj()

	for _, c := range []struct {
		name     string
		requests []*fleetv1alpha1.CapacityRequest
		pod      *corev1.Pod
		want     int32
	}{
		{"not there yet", []*fleetv1alpha1.CapacityRequest{held}, nil, 1},
		{"there without a node", []*fleetv1alpha1.CapacityRequest{taken}, pod().Obj(), 1},
		{"on a node of the fleet", []*fleetv1alpha1.CapacityRequest{taken}, pod().Node("fleet").Obj(), 1},
		{"on a static node", []*fleetv1alpha1.CapacityRequest{taken}, pod().Node("static").Obj(), 0},
		{"ended", []*fleetv1alpha1.CapacityRequest{taken}, pod().Node("fleet").Phase(corev1.PodSucceeded).Obj(), 0},
		{"gone", []*fleetv1alpha1.CapacityRequest{taken}, nil, 0},
		{"failed to schedule", []*fleetv1alpha1.CapacityRequest{taken, own}, pod().Obj(), 1},
		{"and found a node after all", []*fleetv1alpha1.CapacityRequest{taken, own}, pod().Node("fleet").Obj(), 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := capacity.NewRollup(capacity.DemandTotal)
			r.UpsertNode(builders.Node("fleet").Machine("m").Obj())
			r.UpsertNode(builders.Node("static").Obj())
			if c.pod != nil {
				r.UpsertPod(c.pod)
			}
			for _, cr := range c.requests {
				r.UpsertRequest(cr)
			}
			var got int32
			for _, need := range r.Snapshot().Needs {
				got += need.Count
				if need.ID != booking.PodSets[0].Profile.ID() {
					t.Errorf("row %s is not the booking's", need.ID)
				}
			}
			if got != c.want {
				t.Errorf("counted %d times, want %d", got, c.want)
			}
		})
	}
}

func TestBookedNodesAreRememberedHoweverMany(t *testing.T) {
	for _, n := range []int{0, 1, 2000} {
		var nodes []string
		for i := range n {
			nodes = append(nodes, fmt.Sprintf("node-%s-%06d", strings.Repeat("x", 40), i))
		}
		details := detailsOf(Placement{Nodes: nodes, Domain: "r7"})
		for key, value := range details {
			if len(value) > maxDetail {
				t.Errorf("%d nodes: detail %s has %d characters", n, key, len(value))
			}
		}
		if diff := cmp.Diff(nodes, bookedNodes(details)); diff != "" {
			t.Errorf("%d nodes (-want +got):\n%s", n, diff)
		}
		if details[DetailDomain] != "r7" {
			t.Errorf("domain %q", details[DetailDomain])
		}
	}
}

func TestParametersOverrideTheDefaults(t *testing.T) {
	defaults := Terms{ProvisionTimeout: time.Hour, BookingTTL: time.Minute}
	for _, c := range []struct {
		parameters map[string]autoscalingv1.Parameter
		want       Terms
		err        string
	}{
		{nil, defaults, ""},
		{map[string]autoscalingv1.Parameter{"ValidUntilSeconds": "90", "other": "x"}, Terms{90 * time.Second, time.Minute}, ""},
		{map[string]autoscalingv1.Parameter{"BookingSeconds": "5"}, Terms{time.Hour, 5 * time.Second}, ""},
		{map[string]autoscalingv1.Parameter{"BookingSeconds": "-5"}, defaults, `spec.parameters[BookingSeconds]: "-5"`},
		{map[string]autoscalingv1.Parameter{"ValidUntilSeconds": "99999999999999999999"}, defaults, "spec.parameters[ValidUntilSeconds]"},
		{map[string]autoscalingv1.Parameter{"ValidUntilSeconds": "10m"}, defaults, `"10m" is not a number of seconds`},
	} {
		pr := request("train", 1)
		pr.Spec.Parameters = c.parameters
		got, err := termsOf(pr, defaults)
		if got != c.want {
			t.Errorf("%v: got %+v, want %+v", c.parameters, got, c.want)
		}
		if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%v: error %v, want %q", c.parameters, err, c.err)
		}
	}
}
