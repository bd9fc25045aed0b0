package playground

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
)

// AwaitPods waits until the controllers have made that many pods of the app.
func (s *Stage) AwaitPods(app string, n int) {
	s.Await(fmt.Sprintf("%d pods of %s", n, app), func(w *World) (bool, string) {
		got := len(w.PodsOf(app))
		return got == n, fmt.Sprintf("%d pods", got)
	})
}

// AwaitRequests waits until n pods are accounted for: each has a request that was carried to the autoscaler, or was
// bound before one was needed. It tells how many there are.
func (s *Stage) AwaitRequests(n int) {
	var acked, without int
	s.Await(fmt.Sprintf("%d CapacityRequests, all acknowledged", n), func(w *World) (bool, string) {
		requests := len(w.Requests())
		acked, without = w.Acknowledged(), s.recorder.boundWithout()
		return requests == acked && requests+without == n,
			fmt.Sprintf("%d requests, %d acknowledged, %d pods bound without", requests, acked, without)
	})
	if without > 0 {
		s.Step("%s, one for each pod that failed to schedule, all acknowledged; %d pods found a node without",
			count(acked, "CapacityRequest"), without)
		return
	}
	s.Step("%s, one for each pod, all acknowledged", count(acked, "CapacityRequest"))
}

// AwaitRunning waits until that many pods of the app run.
func (s *Stage) AwaitRunning(app string, n int) {
	s.Await(fmt.Sprintf("%d running pods of %s", n, app), func(w *World) (bool, string) {
		pods := w.PodsOf(app)
		got := countRunning(pods)
		return got == n, fmt.Sprintf("%d of %d running, %d nodes ready", got, len(pods), len(w.ReadyNodes()))
	})
}

// AwaitNodes waits until there are exactly that many launched nodes, all Ready, and none on its way.
func (s *Stage) AwaitNodes(n int) {
	s.Await(fmt.Sprintf("%d nodes, all Ready, none on its way", n), func(w *World) (bool, string) {
		nodes, ready, upcoming := len(w.Nodes()), len(w.ReadyNodes()), len(w.Upcoming())
		return nodes == n && ready == n && upcoming == 0,
			fmt.Sprintf("%d nodes, %d ready, %d on their way", nodes, ready, upcoming)
	})
}

// AwaitNoDemand waits until the pods of the app and their requests are gone.
func (s *Stage) AwaitNoDemand(app string) {
	s.Await("no pod of "+app+", no request of one", func(w *World) (bool, string) {
		pods := w.PodsOf(app)
		requests := 0
		for _, r := range w.Requests() {
			if strings.Contains(r.Name, app) {
				requests++
			}
		}
		return len(pods)+requests == 0, fmt.Sprintf("%d pods, %d requests", len(pods), requests)
	})
}

// StepRollUp tells how large the roll-up is, and fails when it has more rows than allowed.
func (s *Stage) StepRollUp(maxRows int) {
	s.Await(fmt.Sprintf("a roll-up of 1 to %d rows", maxRows), func(w *World) (bool, string) {
		rows, _ := w.RollUp()
		return rows >= 1, fmt.Sprintf("%d rows", rows)
	})
	s.Always(fmt.Sprintf("at most %d roll-up rows", maxRows), func(w *World) string {
		if rows, _ := w.RollUp(); rows > maxRows {
			return fmt.Sprintf("%d rows", rows)
		}
		return ""
	})
	s.Look(func(w *World) {
		rows, bytes := w.RollUp()
		s.Step("the cluster's demand reaches the autoscaler as %s, %d bytes", count(rows, "row"), bytes)
	})
}

// places counts nodes by the value of a label.
func places(nodes []*corev1.Node, label string) map[string]int {
	found := map[string]int{}
	for _, n := range nodes {
		found[n.Labels[label]]++
	}
	return found
}

// say writes a count by name as people would: "40 in a, 24 in b".
func say(counts map[string]int) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		parts = append(parts, fmt.Sprintf("%d in %s", counts[name], name))
	}
	return strings.Join(parts, ", ")
}

// zoneOrRack is the label that tells nodes of an offering apart.
const (
	zoneLabel = corev1.LabelTopologyZone
	rackLabel = fleetv1alpha1.LabelRack
	typeLabel = corev1.LabelInstanceTypeStable
)
