package capacityrequest

import (
	"context"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	fwk "k8s.io/kube-scheduler/framework"
	schedulerconfig "k8s.io/kubernetes/pkg/scheduler/apis/config"
	st "k8s.io/kubernetes/pkg/scheduler/testing"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/demand"
	"github.com/drover-sh/drover/demand/podgroups"
)

func sorted(names []string) []string {
	slices.Sort(names)
	return names
}

func defaultFitArgs() *schedulerconfig.NodeResourcesFitArgs {
	return &schedulerconfig.NodeResourcesFitArgs{ScoringStrategy: &schedulerconfig.ScoringStrategy{
		Type:      schedulerconfig.LeastAllocated,
		Resources: []schedulerconfig.ResourceSpec{{Name: "cpu", Weight: 1}},
	}}
}

func defaultPreemptionArgs() *schedulerconfig.DefaultPreemptionArgs {
	return &schedulerconfig.DefaultPreemptionArgs{MinCandidateNodesPercentage: 10, MinCandidateNodesAbsolute: 100}
}

func member(name string) *st.PodWrapper { return pending(name).Label(capacity.LabelPodGroup, "train") }

func TestGang(t *testing.T) {
	nodes := []*corev1.Node{node("static").Obj(), node("managed").Label(fleetv1alpha1.LabelMachine, "m-1").Obj()}
	on1 := func(p *corev1.Pod, node string) *corev1.Pod { p.Spec.NodeName = node; return p }
	for _, c := range []struct {
		name     string
		pods     []*corev1.Pod // the first one fails
		groups   groupTable
		waiting  map[string]string // member to node, waiting at Permit
		statuses fwk.NodeToStatusReader
		want     []string
		warnings []string
	}{
		{
			name: "one member's failure asks for all that have no node",
			pods: []*corev1.Pod{
				member("m0").Obj(), member("m1").Obj(), member("m2").Obj(), on1(member("m3").Obj(), "managed"),
				pending("other").Obj(), pending("othergang").Label(capacity.LabelPodGroup, "eval").Obj(),
			},
			want: []string{"m0", "m1", "m2"},
		},
		{
			name:    "members that wait on a static node are left out, those on a managed one are not",
			pods:    []*corev1.Pod{member("m0").Obj(), member("m1").Obj(), member("m2").Obj()},
			waiting: map[string]string{"m1": "static", "m2": "managed"},
			want:    []string{"m0", "m2"},
		},
		{
			name:     "a gang of which too few can ever run asks for nothing, and the member at fault is told",
			pods:     []*corev1.Pod{member("m0").Obj(), member("m1").PVC("missing").Obj(), member("m2").Obj()},
			groups:   groupTable{"train": {MinCount: 3}},
			want:     []string{},
			warnings: []string{"m1: " + capacity.ReasonVolumeClaimMissing},
		},
		{
			name:   "one that can do without the hopeless member asks for the others",
			pods:   []*corev1.Pod{member("m0").Obj(), member("m1").PVC("missing").Obj(), member("m2").Obj()},
			groups: groupTable{"train": {MinCount: 2}},
			want:   []string{"m0", "m2"},

			warnings: []string{"m1: " + capacity.ReasonVolumeClaimMissing},
		},
		{
			name:     "a failing member that no node helps gets the event, and nobody asks",
			pods:     []*corev1.Pod{member("m0").PVC("missing").Obj(), member("m1").Obj()},
			warnings: []string{"m0: " + capacity.ReasonVolumeClaimMissing},
			want:     []string{},
		},
		{
			name: "a gang that backs off after a failure says nothing new",
			pods: []*corev1.Pod{member("m0").Obj(), member("m1").Obj()},
			statuses: everywhere(fwk.NewStatus(fwk.UnschedulableAndUnresolvable, "podGroup ns/train failed recently").
				WithPlugin("Coscheduling")),
			want: []string{},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, rigOptions{pods: c.pods, nodes: nodes, groups: c.groups})
			for name, node := range c.waiting {
				r.framework.AddWaitingPod(member(name).Node(node).Obj(), map[string]time.Duration{"Gang": time.Hour})
			}
			if c.statuses == nil {
				c.statuses = on(nodes, noCPU())
			}
			r.plugin.PostFilter(t.Context(), nil, c.pods[0], c.statuses)
			r.settle(t)
			if diff := cmp.Diff(c.want, r.api.podNames()); diff != "" {
				t.Errorf("pods with a request (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(c.warnings, r.api.warnings); diff != "" {
				t.Errorf("events (-want +got):\n%s", diff)
			}
		})
	}
}

func TestGangIsOneGroup(t *testing.T) {
	pods := []*corev1.Pod{member("m0").Obj(), member("m1").Annotation(demand.AnnotationSameTopology, "rack").Obj()}
	nodes := []*corev1.Node{node("a").Obj()}
	r := newRig(t, rigOptions{
		pods: pods, nodes: nodes,
		groups: groupTable{"train": {MinCount: 2, TopologyKey: "zone"}},
	})
	r.plugin.PostFilter(t.Context(), nil, pods[0], on(nodes, noCPU()))
	r.settle(t)
	got := map[string]fleetv1alpha1.Group{}
	for _, request := range r.api.requests {
		got[request.OwnerReferences[0].Name] = *request.Spec.Group
	}
	want := map[string]fleetv1alpha1.Group{
		"m0": {Name: "ns/train", MinCount: 2, TopologyKey: "zone"},
		"m1": {Name: "ns/train", MinCount: 2, TopologyKey: "rack"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("groups (-want +got):\n%s", diff)
	}
}

func TestPodGroupThatComesLateReachesTheRequestsOfItsMembers(t *testing.T) {
	pods := []*corev1.Pod{member("m0").Obj(), member("m1").Obj(), member("bound").Node("a").Obj(), pending("other").Obj()}
	nodes := []*corev1.Node{node("a").Obj()}
	groups := groupTable{}
	r := newRig(t, rigOptions{pods: pods, nodes: nodes, groups: groups})
	r.plugin.PostFilter(t.Context(), nil, pods[0], on(nodes, noCPU()))
	r.plugin.PostFilter(t.Context(), nil, pods[3], on(nodes, noCPU()))
	r.plugin.start(t.Context())
	defer r.plugin.Close()
	minCounts := func(want map[string]int32) {
		t.Helper()
		got := map[string]int32{}
		err := wait.PollUntilContextTimeout(t.Context(), time.Millisecond, time.Minute, true, func(context.Context) (bool, error) {
			r.api.mu.Lock()
			defer r.api.mu.Unlock()
			clear(got)
			for _, request := range r.api.requests {
				got[request.OwnerReferences[0].Name] = 0
				if g := request.Spec.Group; g != nil {
					got[request.OwnerReferences[0].Name] = g.MinCount
				}
			}
			return maps.Equal(want, got), nil
		})
		if err != nil {
			t.Errorf("minimum of each request (-want +got):\n%s", cmp.Diff(want, got))
		}
	}
	minCounts(map[string]int32{"m0": 0, "m1": 0, "other": 0})

	groups["train"] = demand.GroupFacts{MinCount: 2}
	r.plugin.gangs.verify(podgroups.KeyOf(pods[0]))
	minCounts(map[string]int32{"m0": 2, "m1": 2, "other": 0})

	t.Run("and so does what it says later", func(t *testing.T) {
		groups["train"] = demand.GroupFacts{MinCount: 3}
		r.plugin.gangs.verify(podgroups.KeyOf(pods[0]))
		minCounts(map[string]int32{"m0": 3, "m1": 3, "other": 0})
	})
}
