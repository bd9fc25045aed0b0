package provisioning

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	autoscalingv1 "k8s.io/autoscaler/cluster-autoscaler/apis/provisioningrequest/autoscaling.x-k8s.io/v1"

	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/internal/builders"
)

// request is a ProvisioningRequest of our class for pod sets of these sizes.
func request(name string, counts ...int32) *autoscalingv1.ProvisioningRequest {
	pr := &autoscalingv1.ProvisioningRequest{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID("uid-" + name)},
		Spec:       autoscalingv1.ProvisioningRequestSpec{ProvisioningClassName: ClassName},
	}
	for _, n := range counts {
		set := autoscalingv1.PodSet{Count: n, PodTemplateRef: autoscalingv1.Reference{Name: "t"}}
		pr.Spec.PodSets = append(pr.Spec.PodSets, set)
	}
	return pr
}

func template(b *builders.PodBuilder) PodTemplate {
	pod := b.Obj()
	return PodTemplate{Template: corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: pod.Labels, Annotations: pod.Annotations}, Spec: pod.Spec,
	}}
}

func TestPodSetsComeInGroups(t *testing.T) {
	rack := func() *builders.PodBuilder {
		return gpus("8").Annotation(capacity.AnnotationRequiredTopology, rackKey)
	}
	b := BookingOf(request("train", 1, 2, 4, 8, 16), []PodTemplate{
		template(gpus("1")), template(gpus("2")), template(rack()),
		template(rack().Annotation(annotationPodSetGroup, "both")), template(rack().Annotation(annotationPodSetGroup, "both")),
	})
	type got struct {
		Group, Key string
		MinCount   int32
	}
	var groups []got
	for _, s := range b.PodSets {
		g := s.Profile.Group
		groups = append(groups, got{g.Name[strings.LastIndex(g.Name, "/")+1:], g.TopologyKey, g.MinCount})
		if !strings.HasPrefix(g.Name, "ns/provisioning/train-") {
			t.Errorf("group %s is not of the request's own", g.Name)
		}
	}
	want := []got{
		{"all", "", 3}, {"all", "", 3}, {"set-2", rackKey, 4}, {"group-both", rackKey, 24}, {"group-both", rackKey, 24},
	}
	if diff := cmp.Diff(want, groups); diff != "" {
		t.Errorf("groups (-want +got):\n%s", diff)
	}
}

func TestRequestsKeepWhatThePodsNeed(t *testing.T) {
	high := template(gpus("8").NodeSelector("flavor", "h100").Tolerates("gpu", corev1.TaintEffectNoSchedule))
	high.Priority = 100
	pr := request("train", 2)
	b := BookingOf(pr, []PodTemplate{high})
	for name, i := range Slots(pr) {
		cr := b.Request(name, i)
		p := capacity.ProfileOfRequest(&cr.Spec)
		if p.ID() != b.PodSets[0].Profile.ID() {
			t.Errorf("request %s asks for something else: %+v", name, p)
		}
		if p.Priority != 100 || len(p.Requirements) != 1 || len(p.Tolerations) != 1 {
			t.Errorf("request %s lost something: %+v", name, p)
		}
		if o := metav1.GetControllerOf(cr); o == nil || o.UID != pr.UID || o.Kind != "ProvisioningRequest" {
			t.Errorf("request %s is owned by %v", name, o)
		}
	}
}

func TestSlotNamesAreTheirs(t *testing.T) {
	long := strings.Repeat("a", 200)
	seen := map[string]bool{}
	for _, pr := range []*autoscalingv1.ProvisioningRequest{
		request("train", 3, 2), request("eval", 1), request(long+"1", 1), request(long+"2", 1),
	} {
		slots := Slots(pr)
		if diff := cmp.Diff(slots, Slots(pr.DeepCopy())); diff != "" {
			t.Errorf("names differ from one time to the next:\n%s", diff)
		}
		for name := range slots {
			if seen[name] || len(name) > 63 {
				t.Errorf("name %s (%d characters) is doubled or too long", name, len(name))
			}
			seen[name] = true
		}
	}
	if len(seen) != 8 {
		t.Errorf("got %d names, want 8", len(seen))
	}
	again := request("train", 3, 2)
	again.UID = "another"
	for name := range Slots(again) {
		if seen[name] {
			t.Errorf("a request of the same name made later shares the name %s", name)
		}
	}
}
