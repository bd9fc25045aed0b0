package provisioning

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"

	"github.com/drover-sh/drover/capacity"
)

func consumer(name, gpu string) Consumer {
	return Consumer{Name: name, UID: types.UID(name), Profile: capacity.ProfileOfPod(gpus(gpu).Obj())}
}

func TestMatch(t *testing.T) {
	sets := []PodSet{set(2, "g", "", gpus("8")), set(1, "g", "", gpus("1"))}
	all := []Slot{{Name: "0-0", PodSet: 0}, {Name: "0-1", PodSet: 0}, {Name: "1-0", PodSet: 1}}
	for _, c := range []struct {
		name  string
		slots []Slot
		pods  []Consumer
		want  map[string]string // slot: pod
	}{
		{"each pod takes a request of its own set", all, []Consumer{consumer("a", "1"), consumer("b", "8")},
			map[string]string{"1-0": "a", "0-0": "b"}},
		{"a pod that has one takes no other", []Slot{{Name: "0-0", Pod: "a"}, {Name: "0-1"}}, []Consumer{consumer("a", "8")},
			map[string]string{}},
		{"a pod beyond the booking gets none", []Slot{{Name: "1-0", PodSet: 1}}, []Consumer{consumer("a", "1"), consumer("b", "1")},
			map[string]string{"1-0": "a"}},
		{"a smaller pod takes a larger request", all, []Consumer{consumer("a", "4")}, map[string]string{"0-0": "a"}},
		{"but not one that fits another pod exactly", []Slot{{Name: "0-0"}, {Name: "1-0", PodSet: 1}},
			[]Consumer{consumer("a", "4"), consumer("b", "8")}, map[string]string{"0-0": "b", "1-0": "a"}},
		{"a larger pod is one of the announced all the same", []Slot{{Name: "1-0", PodSet: 1}}, []Consumer{consumer("a", "8")},
			map[string]string{"1-0": "a"}},
		{"requests that are gone are not handed over", nil, []Consumer{consumer("a", "8")}, map[string]string{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := map[string]string{}
			for _, h := range Match(sets, c.slots, c.pods) {
				got[h.Slot] = h.Pod.Name
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("handovers (-want +got):\n%s", diff)
			}
		})
	}
}

func TestOutstandingCountsEveryPodOnce(t *testing.T) {
	sets := []PodSet{set(4, "g", "", gpus("8"))}
	slots := []Slot{{Name: "held"}, {Name: "gated", Pod: "a"}, {Name: "bound", Pod: "b"}, {Name: "left", Pod: "c"}}
	bound := consumer("b", "8")
	bound.Bound = true
	got := Outstanding(sets, slots, []Consumer{consumer("a", "8"), bound})
	if got[0].Count != 2 {
		t.Errorf("outstanding %d, want the one that is held and the one without a node", got[0].Count)
	}
	if sets[0].Count != 4 {
		t.Error("the booking itself changed")
	}
}
