package capacity

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/internal/builders"
)

// world holds the objects that exist and counts them from scratch, by the rules as they are written down.
type world struct {
	mode     DemandMode
	requests map[string]*fleetv1alpha1.CapacityRequest
	pods     map[string]*corev1.Pod
	nodes    map[string]*corev1.Node
	daemons  map[string]*appsv1.DaemonSet
}

func newWorld(mode DemandMode) *world {
	return &world{
		mode:     mode,
		requests: map[string]*fleetv1alpha1.CapacityRequest{},
		pods:     map[string]*corev1.Pod{},
		nodes:    map[string]*corev1.Node{},
		daemons:  map[string]*appsv1.DaemonSet{},
	}
}

func (w *world) managed(pod *corev1.Pod) bool {
	node := w.nodes[pod.Spec.NodeName]
	return node != nil && node.Labels[fleetv1alpha1.LabelMachine] != ""
}

func ended(pod *corev1.Pod) bool { return pod.DeletionTimestamp != nil || IsTerminal(pod) }

func (w *world) podByUID(uid types.UID) *corev1.Pod {
	for _, pod := range w.pods {
		if pod.UID == uid {
			return pod
		}
	}
	return nil
}

func (w *world) snapshot() (Snapshot, map[string]bool) {
	rows := map[string]*Need{}
	counted := map[string]bool{}
	add := func(p Profile, pending bool) {
		row := rows[p.ID()]
		if row == nil {
			row = &Need{ID: p.ID(), Profile: p.WithMinCount(0)}
			rows[p.ID()] = row
		}
		row.Count++
		if pending {
			row.Pending++
		}
		if p.Group != nil && p.Group.MinCount > row.Profile.Group.MinCount {
			row.Profile = row.Profile.WithMinCount(p.Group.MinCount)
		}
	}
	asked := map[types.UID]bool{}
	for _, name := range sortedKeys(w.requests) {
		cr := w.requests[name]
		uid := podOwner(cr)
		if uid == "" {
			counted[name] = true
			add(ProfileOfRequest(&cr.Spec), false)
			continue
		}
		pod := w.podByUID(uid)
		counts := pod != nil && !ended(pod) && (pod.Spec.NodeName == "" || w.managed(pod)) && !asked[uid]
		asked[uid] = true
		if counts || w.mode == DemandRequestsOnly {
			counted[name] = true
			add(ProfileOfRequest(&cr.Spec), pod != nil && !ended(pod) && pod.Spec.NodeName == "")
		}
	}
	if w.mode == DemandTotal {
		for _, pod := range w.pods {
			if !asked[pod.UID] && !ended(pod) && w.managed(pod) && !IsDaemonPod(pod) && !IsMirrorPod(pod) {
				add(ProfileOfPod(pod).WithMinCount(0), false)
			}
		}
	}
	var s Snapshot
	for _, row := range rows {
		if g := row.Profile.Group; g != nil && g.TopologyKey != "" {
			row.Profile.Requirements = canonicalRequirements(append(slices.Clone(row.Profile.Requirements),
				Requirement{Key: g.TopologyKey, Operator: OperatorSame}))
		}
		s.Needs = append(s.Needs, *row)
	}
	for _, ds := range w.daemons {
		s.Daemons = append(s.Daemons, DaemonOf(ds))
	}
	return s, counted
}

// Whatever happens, and in whatever order, the roll-up is what a count from scratch gives, and when all is gone
// nothing is left of it.
func TestRollupEqualsACountFromScratch(t *testing.T) {
	for _, mode := range []DemandMode{DemandTotal, DemandRequestsOnly} {
		t.Run(string(mode), func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) { checkRollup(t, mode) })
		})
	}
}

func checkRollup(t *rapid.T, mode DemandMode) {
	r, w := NewRollup(mode), newWorld(mode)
	name := func(prefix string, n int) string {
		return fmt.Sprintf("%s%d", prefix, rapid.IntRange(1, n).Draw(t, prefix))
	}
	actions := map[string]func(*rapid.T){
		"upsert a pod": func(t *rapid.T) {
			pod := genRollupPod(t, name("pod", 4), name("node", 3))
			// A UID belongs to one name only.
			if other := w.podByUID(pod.UID); other != nil && other.Name != pod.Name {
				t.Skip("the UID is taken")
			}
			w.pods[pod.Name] = pod
			r.UpsertPod(pod)
		},
		"delete a pod": func(*rapid.T) {
			n := name("pod", 4)
			delete(w.pods, n)
			r.DeletePod(key(n))
		},
		"upsert a request": func(t *rapid.T) {
			cr := genRequest(t, name("cr", 5))
			w.requests[cr.Name] = cr
			r.UpsertRequest(cr)
		},
		"delete a request": func(*rapid.T) {
			n := name("cr", 5)
			delete(w.requests, n)
			r.DeleteRequest(key(n))
		},
		"upsert a node": func(t *rapid.T) {
			b := builders.Node(name("node", 3))
			if rapid.Bool().Draw(t, "managed") {
				b.Machine("m")
			}
			w.nodes[b.Obj().Name] = b.Obj()
			r.UpsertNode(b.Obj())
		},
		"delete a node": func(*rapid.T) {
			n := name("node", 3)
			delete(w.nodes, n)
			r.DeleteNode(n)
		},
		"upsert a DaemonSet": func(t *rapid.T) {
			cpu := rapid.SampledFrom([]string{"1", "2"}).Draw(t, "cpu")
			ds := builders.DaemonSet("ns", name("ds", 2)).Requests("cpu", cpu).Obj()
			w.daemons[ds.Name] = ds
			r.UpsertDaemonSet(ds)
		},
		"delete a DaemonSet": func(*rapid.T) {
			n := name("ds", 2)
			delete(w.daemons, n)
			r.DeleteDaemonSet(key(n))
		},
	}
	var last Snapshot
	var lastVersion uint64
	actions[""] = func(t *rapid.T) {
		want, counted := w.snapshot()
		got := r.Snapshot()
		if diff := cmp.Diff(want, got, sortNeeds, sortDaemons, cmpopts.EquateEmpty()); diff != "" {
			t.Fatalf("roll-up (-from scratch +incremental):\n%s", diff)
		}
		for name := range w.requests {
			if r.Counted(key(name)) != counted[name] {
				t.Fatalf("request %s counted: %v, want %v", name, r.Counted(key(name)), counted[name])
			}
		}
		for _, row := range r.rows {
			if row.count < 0 || row.pending < 0 || row.pending > row.count || row.refs <= 0 {
				t.Fatalf("row %s: count %d, pending %d, references %d", row.id, row.count, row.pending, row.refs)
			}
		}
		if r.Version() == lastVersion && !cmp.Equal(last, got) {
			t.Fatal("the snapshot changed and the version did not")
		}
		last, lastVersion = got, r.Version()
	}
	t.Repeat(actions)

	for n := range w.nodes {
		r.DeleteNode(n)
	}
	for n := range w.requests {
		r.DeleteRequest(key(n))
	}
	for n := range w.pods {
		r.DeletePod(key(n))
	}
	for n := range w.daemons {
		r.DeleteDaemonSet(key(n))
	}
	expectEmpty(t, r)
}

var (
	sortNeeds   = cmpopts.SortSlices(func(a, b Need) bool { return a.ID < b.ID })
	sortDaemons = cmpopts.SortSlices(func(a, b Daemon) bool { return compareDaemons(a, b) < 0 })
)

func genRollupPod(t *rapid.T, name, node string) *corev1.Pod {
	b := builders.Pod("ns", name).UID(string(uid(rapid.IntRange(1, 6).Draw(t, "uid")))).
		Requests("cpu", rapid.SampledFrom([]string{"1", "2"}).Draw(t, "cpu"))
	if rapid.Bool().Draw(t, "bound") {
		b.Node(node)
	}
	switch rapid.IntRange(0, 7).Draw(t, "kind") {
	case 0:
		b.Daemon("agent")
	case 1:
		b.Mirror()
	case 2:
		b.Phase(corev1.PodSucceeded)
	case 3:
		b.Terminating(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC))
	case 4:
		b.PodGroup("gang").Label("a", "b").PodAffinity(rack, "a", "b")
	}
	return b.Obj()
}

func genRequest(t *rapid.T, name string) *fleetv1alpha1.CapacityRequest {
	b := builders.CapacityRequest("ns", name).Requests("cpu", rapid.SampledFrom([]string{"1", "2"}).Draw(t, "cpu"))
	if n := rapid.IntRange(0, 6).Draw(t, "owner"); n > 0 {
		b.For(builders.Pod("ns", "owner").UID(string(uid(n))).Obj())
	}
	if rapid.Bool().Draw(t, "inGroup") {
		b.Group("ns/gang", rapid.Int32Range(0, 2).Draw(t, "minCount"), rack)
	}
	return b.Obj()
}
