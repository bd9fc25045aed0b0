package vnaffinity

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/internal/builders"
	"github.com/drover-sh/drover/sharding"
)

const (
	nearOwners = `,"objects":{"namespace":"ns","watchGroup":"g"}`
	inDomains  = `,"objects":{"mode":"Domains"}`
)

func groupKey(namespace, name string) types.NamespacedName {
	return types.NamespacedName{Namespace: namespace, Name: name}
}

func withVN(name string, vn int) *corev1.Pod {
	return builders.Pod("work", name).Label(sharding.LabelVirtualNode, fmt.Sprint(vn)).Obj()
}

func withKey(name, key string) *corev1.Pod {
	return builders.Pod("work", name).Annotation(sharding.AnnotationHashKey, key).Obj()
}

// ownersRig has three members, one in each zone, that own a third each of 900 Virtual Nodes.
func ownersRig(t *testing.T) *rig {
	r := newRig(t, nearOwners, nodesIn(2, 2, 2))
	group := &lbv1alpha1.WatchGroup{}
	group.Namespace, group.Name, group.Spec.VirtualNodes = "ns", "g", 900
	r.groups.setGroup(group, true)
	for i, node := range []string{"a-0", "b-0", "c-0"} {
		pod := memberPod(fmt.Sprint("m", i)).Obj()
		r.put(pod, node)
		bound := pod.DeepCopy()
		bound.Spec.NodeName = node
		r.sees(bound)
		r.owns("ns", "g", pod.Name, fmt.Sprintf("%d-%d", 300*i, 300*i+299))
	}
	return r
}

func TestObjectsGoToTheDomainOfTheirOwner(t *testing.T) {
	r := ownersRig(t)
	for _, c := range []struct {
		pod  *corev1.Pod
		zone string
	}{
		{withVN("p0", 0), "a"}, {withVN("p1", 299), "a"}, {withVN("p2", 300), "b"}, {withVN("p3", 899), "c"},
		{withKey("p4", "key"), string(rune('a' + int(sharding.VirtualNodeOf("key", 900))/300))},
	} {
		scores, refused := r.cycle(c.pod)
		if got := best(scores); len(got) != 2 || zoneOf(got[0]) != c.zone || zoneOf(got[1]) != c.zone || len(refused) > 0 {
			t.Errorf("%s goes to %v, want zone %s: %v", c.pod.Name, got, c.zone, scores)
		}
	}
	// A Virtual Node on its way belongs to the member that it goes to.
	moving := sliceOf("ns", "g", "m2", "600-899")
	moving.Spec.Incoming = []lbv1alpha1.Order{{Epoch: 2, VirtualNodes: "0"}}
	r.groups.setSlice(moving)
	if scores, _ := r.cycle(withVN("p", 0)); zoneOf(best(scores)[0]) != "c" {
		t.Errorf("a pod whose Virtual Node moves: %v", scores)
	}
}

// Nothing is known of these: the plugin says nothing.
func TestObjectsThatAreSkipped(t *testing.T) {
	for name, pod := range map[string]*corev1.Pod{
		"no Virtual Node of the group": withVN("p", 900),
		"not a number":                 builders.Pod("work", "p").Label(sharding.LabelVirtualNode, "x").Obj(),
		"an ordinary pod":              builders.Pod("work", "p").Obj(),
	} {
		if scores, _ := ownersRig(t).cycle(pod); slices.Max(slices.Collect(maps.Values(scores))) != 0 {
			t.Errorf("%s: %v", name, scores)
		}
	}
	r := newRig(t, nearOwners, nodesIn(1, 1))
	if scores, _ := r.cycle(withVN("p", 0)); scores["a-0"] != scores["b-0"] {
		t.Errorf("without a group: %v", scores)
	}
}

// A Virtual Node that nobody owns still has one domain.
func TestObjectsWithoutAnOwnerStayTogether(t *testing.T) {
	r := ownersRig(t)
	r.owns("ns", "g", "m0", "0-98,100-299")
	scores, _ := r.cycle(withVN("p", 99))
	again, _ := r.cycle(withVN("q", 99))
	if got := best(scores); len(got) != 2 || !slices.Equal(got, best(again)) {
		t.Errorf("%v, %v", scores, again)
	}
}

// The owner's domain takes its bound and no more; the rest goes to one other domain.
func TestObjectsOverflowToOneDomain(t *testing.T) {
	r := ownersRig(t)
	var pods []*corev1.Pod
	for i := range 60 {
		pods = append(pods, withVN(fmt.Sprintf("p%02d", i), 5))
	}
	r.sees(pods...)
	in := map[string]int{}
	for _, p := range pods {
		in[zoneOf(r.schedule(p))]++
	}
	// 60 pods, a third each: a fair part is 20, and 25 are the bound.
	if in["a"] != 25 || !slices.Contains([]int{25, 10}, in["b"]) || in["b"]+in["c"] != 35 {
		t.Errorf("pods in zones: %v", in)
	}
}

// A handful stays together, whatever the mean is.
func TestHandfulsStayTogether(t *testing.T) {
	r := newRig(t, inDomains, nodesIn(3, 3, 3))
	in := map[string]int{}
	for i := range 10 {
		p := withKey(fmt.Sprint("p", i), "one")
		r.sees(p)
		in[zoneOf(r.schedule(p))]++
	}
	if len(in) != 1 {
		t.Errorf("ten pods with one key are in %v", in)
	}
}

// Only the domains of selected nodes take part.
func TestDomainsOfOtherNodesDoNotTakePart(t *testing.T) {
	nodes := nodesIn(1, 1, 1)
	nodes[2].Labels["pool"] = "cache"
	r := newRig(t, `,"objects":{"mode":"Domains","nodeSelector":{"pool":"cache"}}`, nodes)
	for i := range 20 {
		if scores, _ := r.cycle(withKey("p", fmt.Sprint(i))); !slices.Equal(best(scores), []string{"c-0"}) {
			t.Errorf("key %d: %v", i, scores)
		}
	}
}

// locality is what the full-size experiment looks at.
type locality struct{ together, worst float64 }

// localityOf looks at pods of keys in n domains.
func localityOf(domains []string, keys, n int) locality {
	load, byKey := map[string]int{}, map[int]map[string]int{}
	for i, domain := range domains {
		load[domain]++
		if byKey[i%keys] == nil {
			byKey[i%keys] = map[string]int{}
		}
		byKey[i%keys][domain]++
	}
	together := 0
	for _, in := range byKey {
		together += slices.Max(slices.Collect(maps.Values(in)))
	}
	return locality{
		together: float64(together) / float64(len(domains)),
		worst:    float64(slices.Max(slices.Collect(maps.Values(load)))) * float64(n) / float64(len(domains)),
	}
}

// differ demands of pods in 12 domains, then 13, what the role promises; at most this part of the placements may differ.
func differ(t *testing.T, before, after []string, l12, l13 locality, most float64) {
	t.Helper()
	moved := 0
	for i := range before {
		if before[i] != after[i] {
			moved++
		}
	}
	share := float64(moved) / float64(len(before))
	t.Logf("12 racks: %.1f%% of pods share their key's rack, the fullest has %.3f × mean; 13 racks: %.1f%%, %.3f × mean; %.1f%% differ",
		100*l12.together, l12.worst, 100*l13.together, l13.worst, 100*share)
	if l12.together < 0.9 || l13.together < 0.9 {
		t.Errorf("%.3f and %.3f of the pods share a rack with their key, want 0.9", l12.together, l13.together)
	}
	if l12.worst > 1.25 || l13.worst > 1.25 {
		t.Errorf("the fullest rack has %.3f and %.3f times the mean, want at most 1.25", l12.worst, l13.worst)
	}
	if share > most {
		t.Errorf("%.3f of the placements differ, want at most %.2f", share, most)
	}
}

// placeKeys schedules 5,000 pods with 500 keys on n racks of 10 nodes, and returns the rack of each pod. Where they trickle, the
// plugin does not know of a pod before it comes.
func placeKeys(t *testing.T, n int, trickle bool) []string {
	const pods, keys, perRack = 5000, 500, 10
	var nodes []*corev1.Node
	for rack := range n {
		for i := range perRack {
			nodes = append(nodes, builders.Node(fmt.Sprintf("n-%02d-%02d", rack, i)).
				Label("example.com/rack", fmt.Sprintf("rack-%02d", rack)).Obj())
		}
	}
	r := newRig(t, `,"objects":{"mode":"Domains","topologyKey":"example.com/rack"}`, nodes)
	all := make([]*corev1.Pod, pods)
	for i := range all {
		all[i] = withKey(fmt.Sprintf("p%04d", i), fmt.Sprintf("key-%03d", i%keys))
	}
	if !trickle {
		r.sees(all...)
	}
	racks := make([]string, pods)
	for i, p := range all {
		if trickle {
			r.sees(p)
		}
		racks[i] = r.schedule(p)[:4]
	}
	return racks
}

// The scheduler's own framework and cache, at full size: every pod goes through all extension points, and is assumed.
func TestCacheLocality(t *testing.T) {
	if testing.Short() {
		t.Skip("20,000 scheduling cycles")
	}
	if underRace {
		placeKeys(t, 12, true) // there is nothing in the other rounds that may race and is not in this one
		return
	}
	for name, trickle := range map[string]bool{"all pods are there before": false, "pods trickle in": true} {
		t.Run(name, func(t *testing.T) {
			before, after := placeKeys(t, 12, trickle), placeKeys(t, 13, trickle)
			differ(t, before, after, localityOf(before, 500, 12), localityOf(after, 500, 13), 0.12)
		})
	}
}
