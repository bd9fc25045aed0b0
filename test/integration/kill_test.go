package integration

import (
	"context"
	"fmt"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
)

// TestKill kills one program with SIGKILL at several moments of a training story. It ends as if nothing had happened: every
// pod runs, none has had two requests, and no node was launched too many.
func TestKill(t *testing.T) {
	const size = 16
	moments := []struct {
		name string
		come func(context.Context, string) (bool, string)
	}{
		{"the first requests are there", func(ctx context.Context, ns string) (bool, string) {
			var requests fleetv1alpha1.CapacityRequestList
			failure := list(ctx, &requests, client.InNamespace(ns))
			return len(requests.Items) > 0, fmt.Sprintf("%d requests %s", len(requests.Items), failure)
		}},
		{"the first nodes are there", func(ctx context.Context, _ string) (bool, string) {
			found, failure := nodes(ctx)
			return len(found) > 0, fmt.Sprintf("%d nodes %s", len(found), failure)
		}},
		{"the first pods run", func(ctx context.Context, ns string) (bool, string) {
			pods, failure := running(ctx, ns, "trainer")
			return len(pods) > 0, fmt.Sprintf("%d pods run %s", len(pods), failure)
		}},
	}
	for _, victim := range []string{"scheduler", "manager", "autoscaler"} {
		t.Run(victim, func(t *testing.T) {
			f := startFleet(t, fleetOptions{})
			ns := namespace(t, "kill-"+victim)
			seen := record(t)
			staticNode(t, "kill-"+victim, "cpu", "1")
			training := job(t, ns, "trainer", size, requests("nvidia.com/gpu", "8"), tolerateGPU, sameRack("trainer"))
			for _, moment := range moments {
				eventually(t, moment.name, func(ctx context.Context) (bool, string) { return moment.come(ctx, ns) })
				f.kill(victim)
			}
			waitRunning(t, ns, "trainer", size)
			seen.expectOneRequestPerPod(t, nil)
			seen.expectNodes(t, size)

			remove(t, training)
			eventually(t, "the first nodes are given back", func(ctx context.Context) (bool, string) {
				found, failure := nodes(ctx)
				draining := 0
				for _, n := range found {
					if n.Spec.Unschedulable {
						draining++
					}
				}
				return failure == "" && (draining > 0 || len(found) < size),
					fmt.Sprintf("%d nodes, %d of them draining %s", len(found), draining, failure)
			})
			f.kill(victim)
			waitQuiet(t)
			seen.expectNodes(t, size)
		})
	}
}
