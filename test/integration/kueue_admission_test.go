package integration

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
)

// TestKueueAdmitsWhatTheFleetCarries: quota says yes to ten workloads of 32 GPUs, the fleet to six. Six run and four wait with
// a message. As capacity appears they go in order. The manager is killed in the middle, and nobody is admitted on the nodes of
// another.
func TestKueueAdmitsWhatTheFleetCarries(t *testing.T) {
	k := startKueue(t, "kueue-carries")
	k.hint("gpu-h100", 25) // 200 GPUs
	k.queue(fleetv1alpha1.CapacityCheckConfigSpec{}, "512", "gpu-h100")
	for i := range 10 {
		k.job(fmt.Sprintf("job-%d", i), 4, "8")
		if i == 2 {
			k.fleet.kill("manager")
		}
	}
	// Which six is Kueue's choice: it orders by whole seconds. From here on all hold quota, and the order is ours.
	in, wls := k.admitted(6)
	const want = "needs 4 × 8 nvidia.com/gpu in flavor gpu-h100; 1 available, High"
	var waiting []string
	for name, wl := range wls {
		if slices.Contains(in, name) {
			continue
		}
		waiting = append(waiting, name)
		if got := wl.Status.AdmissionChecks[0].Message; !strings.HasPrefix(got, want) || !strings.Contains(got, "next check in 40 s") {
			t.Errorf("%s waits with message %q, expected it to begin with %q and to say when it is checked next", name, got, want)
		}
	}
	slices.SortFunc(waiting, func(a, b string) int {
		return cmp.Or(wls[a].CreationTimestamp.Compare(wls[b].CreationTimestamp.Time), cmp.Compare(a, b))
	})
	k.fleet.kill("manager")
	for i, next := range waiting {
		in = append(in, next)
		slices.Sort(in)
		k.hint("gpu-h100", int32(24+4*(i+1)))
		if got, _ := k.admitted(7 + i); !slices.Equal(got, in) {
			t.Fatalf("%v are admitted, expected %v: %s was next", got, in, next)
		}
	}
	_, wls = k.admitted(10)
	k.promises("gpu-h100", 40)
	for _, wl := range wls {
		if is(wl, kueue.WorkloadEvicted) {
			t.Errorf("workload %s was evicted on the way", wl.Name)
		}
	}
	background := client.PropagationPolicy(metav1.DeletePropagationBackground)
	if err := k.client.DeleteAllOf(t.Context(), &batchv1.Job{}, client.InNamespace(k.ns), background); err != nil {
		t.Fatal(err)
	}
	k.promises("gpu-h100", 0)
}
