package podgroups

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	fakediscovery "k8s.io/client-go/discovery/fake"
	fakedynamic "k8s.io/client-go/dynamic/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/klog/v2"

	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/demand"
)

func coscheduling(name string, minMember any, annotations map[string]any) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "scheduling.x-k8s.io/v1alpha1", "kind": "PodGroup",
		"metadata": map[string]any{"namespace": "ns", "name": name, "annotations": annotations},
		"spec":     map[string]any{"minMember": minMember},
	}}
}

func inTree(name string, spec map[string]any) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "scheduling.k8s.io/v1alpha2", "kind": "PodGroup",
		"metadata": map[string]any{"namespace": "ns", "name": name},
		"spec":     spec,
	}}
}

func labelled(name string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Labels: map[string]string{capacity.LabelPodGroup: name},
	}}
}

func referring(name string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns"}}
	p.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: &name}
	return p
}

func TestFactsOf(t *testing.T) {
	gang := map[string]any{"schedulingPolicy": map[string]any{"gang": map[string]any{"minCount": int64(3)}}}
	constrained := map[string]any{"schedulingConstraints": map[string]any{
		"topology": []any{map[string]any{"key": "rack"}, map[string]any{"key": "zone"}},
	}}
	for _, c := range []struct {
		name string
		in   *unstructured.Unstructured
		want demand.GroupFacts
	}{
		{"minMember", coscheduling("g", int64(8), nil), demand.GroupFacts{MinCount: 8}},
		{"minMember of the wrong type says nothing", coscheduling("g", "many", nil), demand.GroupFacts{}},
		{"a negative one says nothing", coscheduling("g", int64(-1), nil), demand.GroupFacts{}},
		{"one that is too large says nothing", coscheduling("g", int64(1)<<40, nil), demand.GroupFacts{}},
		{
			"our annotation", coscheduling("g", int64(8), map[string]any{demand.AnnotationSameTopology: "rack"}),
			demand.GroupFacts{MinCount: 8, TopologyKey: "rack"},
		},
		{
			"ours wins over Kueue's", coscheduling("g", int64(1), map[string]any{
				capacity.AnnotationRequiredTopology: "zone", demand.AnnotationSameTopology: "rack",
			}),
			demand.GroupFacts{MinCount: 1, TopologyKey: "rack"},
		},
		{"an in-tree gang", inTree("g", gang), demand.GroupFacts{MinCount: 3}},
		{"an in-tree group without a gang policy", inTree("g", map[string]any{}), demand.GroupFacts{}},
		{"an in-tree topology constraint, the first one", inTree("g", constrained), demand.GroupFacts{TopologyKey: "rack"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, FactsOf(c.in)); diff != "" {
				t.Errorf("facts (-want +got):\n%s", diff)
			}
		})
	}
}

func TestKeyOfTellsGangsApart(t *testing.T) {
	other := labelled("g")
	other.Namespace = "other"
	keys := map[string]bool{}
	for _, p := range []*corev1.Pod{labelled("g"), labelled("h"), other, referring("g"), {}} {
		keys[KeyOf(p)] = true
	}
	if len(keys) != 5 || !keys[""] {
		t.Errorf("got keys %v, want five different ones, the empty one for the pod without a group", keys)
	}
}

// served is discovery with these resources.
type served struct {
	fakediscovery.FakeDiscovery
	mu sync.Mutex
}

func (s *served) ServerResourcesForGroupVersion(gv string) (*metav1.APIResourceList, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.FakeDiscovery.ServerResourcesForGroupVersion(gv)
}

func TestCacheReadsTheAPIsThatExist(t *testing.T) {
	disco := &served{FakeDiscovery: fakediscovery.FakeDiscovery{Fake: &clienttesting.Fake{}}}
	disco.Resources = []*metav1.APIResourceList{{
		GroupVersion: Coscheduling.GroupVersion().String(), APIResources: []metav1.APIResource{{Name: "podgroups"}},
	}}
	client := fakedynamic.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(),
		map[schema.GroupVersionResource]string{Coscheduling: "PodGroupList"}, coscheduling("g", int64(8), nil))
	c := NewForClients(client, disco, klog.Background())
	if _, known := c.GroupOf(labelled("g")); known {
		t.Error("a group is known before anything was read")
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { c.Run(ctx) })
	defer running.Wait()
	defer cancel()

	err := wait.PollUntilContextTimeout(ctx, time.Millisecond, time.Minute, true, func(context.Context) (bool, error) {
		facts, known := c.GroupOf(labelled("g"))
		return known && facts == demand.GroupFacts{MinCount: 8}, nil
	})
	if err != nil {
		t.Fatal("the group that exists never became known")
	}
	for name, pod := range map[string]*corev1.Pod{
		"a group that does not exist":         labelled("absent"),
		"a group of an API that is not there": referring("g"),
		"no group":                            {},
	} {
		if facts, known := c.GroupOf(pod); known {
			t.Errorf("%s is known: %+v", name, facts)
		}
	}
}

func TestCacheTellsOfGroupsThatSaySomethingNew(t *testing.T) {
	var told []string
	c := NewForClients(nil, nil, klog.Background())
	c.OnChange(func(key string) { told = append(told, key) })
	h := c.handler(Coscheduling.Group)

	status := coscheduling("g", int64(8), nil)
	status.SetResourceVersion("2")
	for _, step := range []struct {
		name string
		do   func()
		want []string
	}{
		{"a new group", func() { h.OnAdd(coscheduling("g", int64(8), nil), false) }, []string{KeyOf(labelled("g"))}},
		{"the same again", func() { h.OnUpdate(coscheduling("g", int64(8), nil), status) }, nil},
		{"another minimum", func() { h.OnUpdate(status, coscheduling("g", int64(4), nil)) }, []string{KeyOf(labelled("g"))}},
		{"the group goes", func() { h.OnDelete(status) }, nil},
	} {
		told = nil
		step.do()
		if diff := cmp.Diff(step.want, told); diff != "" {
			t.Errorf("%s (-want +got):\n%s", step.name, diff)
		}
	}
}
