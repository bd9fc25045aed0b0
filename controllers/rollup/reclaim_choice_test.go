package rollup

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"pgregory.net/rapid"

	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/internal/builders"
)

func hosting(node *builders.NodeBuilder, pods ...*builders.PodBuilder) *Host {
	var list []*corev1.Pod
	for _, p := range pods {
		list = append(list, p.Obj())
	}
	return hostOf(node.Obj(), list)
}

func worker(name string) *builders.NodeBuilder {
	return builders.Node(name).Machine("m-"+name).Allocatable("cpu", "4", "memory", "8Gi", "pods", "10").Ready()
}

func web(name string) *builders.PodBuilder {
	return builders.Pod("ns", name).Requests("cpu", "1").Owner("ReplicaSet", "web")
}

func names(hosts []*Host) string {
	var out []string
	for _, h := range hosts {
		out = append(out, h.Name)
	}
	return strings.Join(out, " ")
}

func TestChoose(t *testing.T) {
	gpu := corev1.Taint{Key: "gpu", Value: "yes", Effect: corev1.TaintEffectNoSchedule}
	for _, c := range []struct {
		rule       string
		count      int
		drains     int // 10 when 0
		candidates []*Host
		others     []*Host
		want       string
		kept       map[string]string // node to a part of the reason
		limited    bool
	}{
		{
			rule:  "empty nodes go first, in order of name",
			count: 2,
			candidates: []*Host{
				hosting(worker("a"), web("p")), hosting(worker("c")), hosting(worker("b")), hosting(worker("d")),
			},
			want: "b c",
		},
		{
			rule:  "DaemonSet, mirror, finished and terminating pods leave a node empty",
			count: 1,
			candidates: []*Host{hosting(worker("a"),
				builders.Pod("ns", "d").Daemon("d"), builders.Pod("ns", "m").Mirror(),
				web("done").Phase(corev1.PodFailed))},
			want: "a",
		},
		{
			rule:  "then the lowest priority, and then the fewest pods",
			count: 2,
			candidates: []*Host{
				hosting(worker("a"), web("a1").Priority(100)),
				hosting(worker("b"), web("b1"), web("b2")),
				hosting(worker("c"), web("c1"), web("c2"), web("c3")),
			},
			others: []*Host{hosting(worker("free").Allocatable("cpu", "8", "pods", "110"))},
			want:   "b c",
		},
		{
			rule:       "pods must fit elsewhere, all together",
			count:      1,
			candidates: []*Host{hosting(worker("a"), web("p1"), web("p2"), web("p3"))},
			others:     []*Host{hosting(worker("x").Allocatable("cpu", "2", "pods", "10"))},
			kept:       map[string]string{"a": "pod ns/p3 fits on no other node: 1 have too little free"},
		},
		{
			rule:       "pods already on a node take room there, DaemonSet pods included",
			count:      1,
			candidates: []*Host{hosting(worker("a"), web("p1"))},
			others:     []*Host{hosting(worker("x"), builders.Pod("ns", "d").Daemon("d").Requests("cpu", "3500m"))},
			kept:       map[string]string{"a": "too little free"},
		},
		{
			rule:       "what has moved once is moved along",
			count:      3,
			candidates: []*Host{hosting(worker("a"), web("a1"), web("a2")), hosting(worker("b"), web("b1"), web("b2")), hosting(worker("c"), web("c1"), web("c2"))},
			want:       "a",
			kept: map[string]string{
				"b": "too little free",
				"c": "too little free",
			},
		},
		{
			rule:       "a closed node takes nothing",
			count:      1,
			candidates: []*Host{hosting(worker("a"), web("p1"))},
			others:     []*Host{hosting(worker("x").Unschedulable())},
			kept:       map[string]string{"a": "1 are closed to pods"},
		},
		{
			rule:       "a node that is not ready takes nothing",
			count:      1,
			candidates: []*Host{hosting(worker("a"), web("p1"))},
			others:     []*Host{hosting(builders.Node("x").Allocatable("cpu", "4", "pods", "10"))},
			kept:       map[string]string{"a": "1 are closed to pods"},
		},
		{
			rule:       "taints keep a pod away",
			count:      1,
			candidates: []*Host{hosting(worker("a"), web("p1"))},
			others:     []*Host{hosting(worker("x").Taint(gpu.Key, gpu.Value, gpu.Effect))},
			kept:       map[string]string{"a": "taints that it does not tolerate"},
		},
		{
			rule:       "a toleration lets it in",
			count:      1,
			candidates: []*Host{hosting(worker("a"), web("p1").Tolerates("gpu", corev1.TaintEffectNoSchedule))},
			others:     []*Host{hosting(worker("x").Taint(gpu.Key, gpu.Value, gpu.Effect))},
			want:       "a",
		},
		{
			rule:       "node selectors are kept",
			count:      1,
			candidates: []*Host{hosting(worker("a").Label("disk", "ssd"), web("p1").NodeSelector("disk", "ssd"))},
			others:     []*Host{hosting(worker("x"))},
			kept:       map[string]string{"a": "node selector"},
		},
		{
			rule:       "required affinity is kept",
			count:      1,
			candidates: []*Host{hosting(worker("a"), web("p1").NodeAffinity(builders.NodeExpr("disk", corev1.NodeSelectorOpIn, "ssd")))},
			others:     []*Host{hosting(worker("x").Label("disk", "hdd")), hosting(worker("y").Label("disk", "ssd"))},
			want:       "a",
		},
		{
			rule:       "host ports are kept apart",
			count:      1,
			candidates: []*Host{hosting(worker("a"), web("p1").HostPort(80))},
			others:     []*Host{hosting(worker("x"), builders.Pod("ns", "d").Daemon("d").HostPort(80))},
			kept:       map[string]string{"a": "host port"},
		},
		{
			rule:       "volumes keep a pod in its zone",
			count:      1,
			candidates: []*Host{hosting(worker("a").Zone("z1"), web("p1").Claim("data"))},
			others:     []*Host{hosting(worker("x").Zone("z2"))},
			kept:       map[string]string{"a": "another zone than its volumes"},
		},
		{
			rule:  "members of an anti-affinity set stay apart",
			count: 1,
			candidates: []*Host{hosting(worker("a").Label(corev1.LabelHostname, "a"),
				web("p1").Label("app", "db").PodAntiAffinity(corev1.LabelHostname, "app", "db"))},
			others: []*Host{hosting(worker("x").Label(corev1.LabelHostname, "x"),
				web("p2").Label("app", "db").PodAntiAffinity(corev1.LabelHostname, "app", "db"))},
			kept: map[string]string{"a": "must not share a domain"},
		},
		{
			rule:  "a spread is not made worse",
			count: 1,
			candidates: []*Host{hosting(worker("a").Zone("z1"),
				web("p1").Spread(corev1.LabelTopologyZone, 1, corev1.DoNotSchedule))},
			others: []*Host{hosting(worker("x").Zone("z2"))},
			kept:   map[string]string{"a": "could break its spread"},
		},
		{
			rule:  "a soft spread holds nothing up",
			count: 1,
			candidates: []*Host{hosting(worker("a").Zone("z1"),
				web("p1").Spread(corev1.LabelTopologyZone, 1, corev1.ScheduleAnyway))},
			others: []*Host{hosting(worker("x").Zone("z2"))},
			want:   "a",
		},
		{
			rule:       "a pod without a controller would not come back",
			count:      1,
			candidates: []*Host{hosting(worker("a"), builders.Pod("ns", "bare").Requests("cpu", "1"))},
			others:     []*Host{hosting(worker("x"))},
			kept:       map[string]string{"a": "pod ns/bare has no controller"},
		},
		{
			rule:       "a pod may ask to stay",
			count:      1,
			candidates: []*Host{hosting(worker("a"), web("p1").Annotation(annotationDoNotDisrupt, "true"))},
			others:     []*Host{hosting(worker("x"))},
			kept:       map[string]string{"a": annotationDoNotDisrupt},
		},
		{
			rule:   "drains are bounded, empty nodes are not counted",
			count:  3,
			drains: -1,
			candidates: []*Host{
				hosting(worker("a")), hosting(worker("b")), hosting(worker("c"), web("c1")),
			},
			want:    "a b",
			limited: true,
		},
		{
			rule:       "a failed move leaves the room as it was",
			count:      1,
			candidates: []*Host{hosting(worker("a"), web("a1"), web("a2").NodeSelector("no", "where")), hosting(worker("b"), web("b1").Priority(5), web("b2"))},
			others:     []*Host{hosting(worker("x").Allocatable("cpu", "2", "pods", "2"))},
			want:       "b",
			kept:       map[string]string{"a": "pod ns/a2"},
		},
	} {
		t.Run(c.rule, func(t *testing.T) {
			drains := 10
			if c.drains != 0 {
				drains = 0
			}
			hosts := append(slices.Clone(c.candidates), c.others...)
			chosen, kept, limited := Choose(c.count, drains, c.candidates, func() []*Host { return hosts })
			if got := names(chosen); got != c.want {
				t.Errorf("chosen are %q, want %q", got, c.want)
			}
			if limited != c.limited {
				t.Errorf("limited is %v, want %v", limited, c.limited)
			}
			reasons := map[string]string{}
			for _, k := range kept {
				reasons[k.Host.Name] = k.Reason
			}
			if got, want := slices.Sorted(maps.Keys(reasons)), slices.Sorted(maps.Keys(c.kept)); !slices.Equal(got, want) {
				t.Errorf("kept are %v, want %v", reasons, c.kept)
			}
			for name, part := range c.kept {
				if !strings.Contains(reasons[name], part) {
					t.Errorf("%s is kept because %q, want %q in it", name, reasons[name], part)
				}
			}
		})
	}
}

// Whatever the cluster: never more nodes than asked for, no node with pods that stay, every displaced pod has a place next
// to all others, and the hosts are as they were.
func TestChooseNeverStrandsAPod(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var hosts, candidates []*Host
		n := rapid.IntRange(1, 8).Draw(t, "hosts")
		for i := range n {
			h := &Host{Name: fmt.Sprint("h", i), Machine: "m", Labels: map[string]string{},
				Free:   capacity.Resources{corev1.ResourceCPU: rapid.Int64Range(0, 8).Draw(t, "free"), corev1.ResourcePods: 20},
				Closed: rapid.IntRange(0, 5).Draw(t, "closed") == 0}
			for j := range rapid.IntRange(0, 4).Draw(t, "pods") {
				p := Resident{Name: fmt.Sprintf("p%d-%d", i, j), Priority: rapid.Int32Range(0, 3).Draw(t, "priority"),
					Profile: capacity.Profile{Resources: capacity.Resources{corev1.ResourceCPU: rapid.Int64Range(1, 4).Draw(t, "cpu")}}}
				if rapid.IntRange(0, 9).Draw(t, "stays") == 0 {
					p.Stays = "stays"
				}
				h.Residents = append(h.Residents, p)
			}
			hosts = append(hosts, h)
			if rapid.Bool().Draw(t, "candidate") {
				candidates = append(candidates, h)
			}
		}
		count := rapid.IntRange(0, 8).Draw(t, "count")
		before := fmt.Sprintf("%+v", flat(hosts))
		chosen, kept, _ := Choose(count, 100, candidates, func() []*Host { return hosts })
		if after := fmt.Sprintf("%+v", flat(hosts)); after != before {
			t.Fatalf("the hosts were changed: %s, before %s", after, before)
		}
		if len(chosen) > count {
			t.Fatalf("%d chosen, %d asked for", len(chosen), count)
		}
		if len(chosen) < count && len(chosen)+len(kept) != len(candidates) {
			t.Fatalf("%d chosen and %d kept of %d candidates: one was not looked at", len(chosen), len(kept), len(candidates))
		}
		gone := map[string]bool{}
		for _, h := range chosen {
			gone[h.Name] = true
			for _, p := range h.Residents {
				if p.Stays != "" {
					t.Fatalf("%s goes with %s", h.Name, p.Name)
				}
			}
		}
		// A necessary condition that needs no packing: what is displaced is no more than what is free.
		var displaced, free int64
		for _, h := range hosts {
			switch {
			case gone[h.Name]:
				for _, p := range h.Residents {
					displaced += p.Profile.Resources[corev1.ResourceCPU]
				}
			case !h.Closed:
				free += h.Free[corev1.ResourceCPU]
			}
		}
		if displaced > free {
			t.Fatalf("%d are displaced, %d are free", displaced, free)
		}
	})
}

func flat(hosts []*Host) (out []Host) {
	for _, h := range hosts {
		out = append(out, *h)
	}
	return out
}
