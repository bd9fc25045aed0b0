package admission

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/kueue/provisioning"
)

// Rejected is for what can never be met, as only a person brings a workload back from it. Whatever the fleet looks like, a
// rejected workload has a pod that fits no node that could be had or is there, all of them known for certain, and the
// message names both; or it is a gang that the configuration refuses. Nothing that has room or stock is rejected.
func TestRejectedIsNeverMet(t *testing.T) {
	rejections := 0
	rapid.Check(t, func(t *rapid.T) {
		types := []string{"h100", "a100"}
		var world World
		world.Now, world.Ledger, world.Random = now, NewLedger(), func() float64 { return 0 }
		var room []provisioning.Node
		for i := range rapid.IntRange(0, 4).Draw(t, "hints") {
			h := gpuHint(fmt.Sprintf("h%d", i), rapid.Int32Range(0, 4).Draw(t, "count"), ofType(rapid.SampledFrom(types).Draw(t, "type")))
			h.Template.Allocatable = capacity.Resources{"cpu": 96000, "nvidia.com/gpu": rapid.SampledFrom([]int64{1, 4, 8}).Draw(t, "gpus")}
			h.Atomic = rapid.Bool().Draw(t, "atomic")
			h.Availability = rapid.SampledFrom(confidence).Draw(t, "availability")
			if rapid.IntRange(0, 5).Draw(t, "stale") == 0 {
				stale(&h)
			}
			world.Hints = append(world.Hints, h)
		}
		for i := range rapid.IntRange(0, 2).Draw(t, "nodes") {
			n := gpuNode(fmt.Sprintf("n%d", i))
			n.Labels = map[string]string{"type": rapid.SampledFrom(types).Draw(t, "node type")}
			n.Free["nvidia.com/gpu"] = rapid.SampledFrom([]int64{1, 8, 16}).Draw(t, "node gpus")
			world.Nodes = append(world.Nodes, NodeShape{Labels: n.Labels, Allocatable: n.Free.Clone()})
			if rapid.Bool().Draw(t, "free") {
				room = append(room, n)
			}
		}
		world.Room = provisioning.NewRoom(room)
		var sets []PodSet
		for i := range rapid.IntRange(1, 3).Draw(t, "sets") {
			s := pods(fmt.Sprintf("s%d", i), rapid.Int32Range(1, 4).Draw(t, "pods"), rapid.SampledFrom([]int64{1, 8, 9, 16}).Draw(t, "asks"))
			if rapid.Bool().Draw(t, "gang") {
				gang(&s)
			}
			sets = append(sets, s)
		}
		w := workload(sets...)
		w.Reserved = now.Add(-time.Duration(rapid.IntRange(0, 20).Draw(t, "held")) * time.Minute)
		w.Config.AtomicProvisioning = rapid.SampledFrom([]fleetv1alpha1.AtomicProvisioningPolicy{
			fleetv1alpha1.AtomicWait, fleetv1alpha1.AtomicReject, fleetv1alpha1.AtomicWaive,
		}).Draw(t, "policy")

		d := Decide(w, world)
		if d.State != kueue.CheckStateRejected {
			return
		}
		rejections++
		for i := range sets {
			if (d.Reason == ReasonPodTooLarge && proven(&sets[i], world, d.Message)) ||
				(d.Reason == ReasonNotAtomic && w.Config.AtomicProvisioning == fleetv1alpha1.AtomicReject && refused(&sets[i], world)) {
				return
			}
		}
		t.Fatalf("rejected without a proof: %s: %s", d.Reason, d.Message)
	})
	if rejections == 0 {
		t.Error("nothing was ever rejected: the test shows nothing")
	}
}

// proven checks from scratch that no node can carry a pod of the set, and that the message says so of this set.
func proven(set *PodSet, world World, message string) bool {
	asks := set.Own["nvidia.com/gpu"]
	for i := range world.Hints {
		h := &world.Hints[i]
		if h.Template.Labels["type"] != "h100" {
			continue
		}
		if !h.Fresh(now, fleetv1alpha1.DefaultCheckStaleAfter) || h.Template.Allocatable["nvidia.com/gpu"] >= asks {
			return false
		}
	}
	for _, n := range world.Nodes {
		if n.Labels["type"] == "h100" && n.Allocatable["nvidia.com/gpu"] >= asks {
			return false
		}
	}
	return strings.Contains(message, fmt.Sprintf("a pod of set %s asks for %d nvidia.com/gpu", set.Name, asks))
}

// refused checks that the set is a gang, and that no offering of its flavor gives nodes together.
func refused(set *PodSet, world World) bool {
	if !set.Gang() {
		return false
	}
	for i := range world.Hints {
		h := &world.Hints[i]
		if h.Template.Labels["type"] == "h100" && h.Fresh(now, fleetv1alpha1.DefaultCheckStaleAfter) && h.Atomic {
			return false
		}
	}
	return true
}
