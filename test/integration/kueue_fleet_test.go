package integration

import (
	"context"
	"fmt"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
)

// TestKueueOnTheFleet is the whole loop: Kueue, our check, the scheduler, and an autoscaler that launches the nodes.
func TestKueueOnTheFleet(t *testing.T) {
	all := startKueueWithout(t, "kueue-fleet")
	onFleet := func(j *batchv1.Job) { j.Spec.Template.Spec.SchedulerName = "drover-scheduler" }

	// The check promises nodes, the pods ask for them, the hint falls by them, and the promise is settled by that.
	t.Run("a hint is promised, taken and settled", func(t *testing.T) {
		k := all.in(t, "kueue-fleet-hint")
		k.queue(fleetv1alpha1.CapacityCheckConfigSpec{}, "512", "gpu-8")
		k.job("train", 4, "8", onFleet)
		k.untilAdmitted("train")
		k.untilPodsRun(4)
		expectNodeCount(t, 4)
		k.promises("gpu-8", 0)
	})

	// The autoscaler brings the nodes before Kueue admits, and the pods take the requests over, so that no node is launched
	// for anybody twice.
	t.Run("nodes are provisioned before admission", func(t *testing.T) {
		k := all.in(t, "kueue-fleet-provision")
		k.queue(fleetv1alpha1.CapacityCheckConfigSpec{Mode: fleetv1alpha1.CapacityCheckProvision, CheckPeriod: of(time.Second)}, "512", "gpu-8")
		k.job("train", 3, "8", onFleet)
		k.untilAdmitted("train")
		k.untilPodsRun(3)
		eventually(t, "three nodes are left of all", func(ctx context.Context) (bool, string) {
			found, failure := nodes(ctx)
			return failure == "" && len(found) == 3, fmt.Sprintf("%d nodes %s", len(found), failure)
		})
	})
}

func (k *kueueCluster) untilPodsRun(n int) {
	k.t.Helper()
	eventually(k.t, fmt.Sprintf("%d pods run", n), func(ctx context.Context) (bool, string) {
		wls, err := k.workloads(ctx)
		if err != nil {
			return false, err.Error()
		}
		var jobs batchv1.JobList
		if err := k.client.List(ctx, &jobs); err != nil {
			return false, err.Error()
		}
		active, ready := 0, 0
		for _, j := range jobs.Items {
			if j.Namespace == k.ns && j.Status.Ready != nil {
				active, ready = active+int(j.Status.Active), ready+int(*j.Status.Ready)
			}
		}
		return ready == n, fmt.Sprintf("%d of %d pods are ready%s", ready, active, story(wls))
	})
}

func expectNodeCount(t *testing.T, n int) {
	t.Helper()
	found, failure := nodes(t.Context())
	if failure != "" || len(found) != n {
		t.Errorf("there are %d nodes, expected %d %s", len(found), n, failure)
	}
}
