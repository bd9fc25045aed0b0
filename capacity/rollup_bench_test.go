package capacity

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/internal/builders"
)

// burst makes n pending pods of some shapes, with their requests.
func burst(n, shapes int) (pods []*corev1.Pod, requests []*fleetv1alpha1.CapacityRequest) {
	for i := range n {
		shape := i % shapes
		pod := builders.Pod("ns", fmt.Sprintf("p-%d", i)).Requests("cpu", fmt.Sprint(1+shape), "memory", "2Gi").
			NodeSelector(zone, fmt.Sprint("z", shape%3)).Tolerates("team", corev1.TaintEffectNoSchedule).Obj()
		pods = append(pods, pod)
		spec := ProfileOfPod(pod).RequestSpec()
		requests = append(requests, builders.CapacityRequest("ns", fmt.Sprintf("cr-%d", i)).For(pod).Spec(spec).Obj())
	}
	return pods, requests
}

// One change of one request, among 10,000 of 20 shapes.
func BenchmarkRollupChange(b *testing.B) {
	for _, n := range []int{100, 10_000} {
		b.Run(fmt.Sprint(n, " requests"), func(b *testing.B) {
			pods, requests := burst(n, 20)
			r := NewRollup(DemandTotal)
			for i := range pods {
				r.UpsertPod(pods[i])
				r.UpsertRequest(requests[i])
			}
			b.ReportAllocs()
			b.ResetTimer()
			for i := range b.N {
				at := i % n
				r.DeleteRequest(key(requests[at].Name))
				r.UpsertRequest(requests[at])
			}
		})
	}
}

func BenchmarkRollupSnapshot(b *testing.B) {
	for _, n := range []int{100, 10_000} {
		b.Run(fmt.Sprint(n, " requests"), func(b *testing.B) {
			pods, requests := burst(n, 20)
			r := NewRollup(DemandTotal)
			for i := range pods {
				r.UpsertPod(pods[i])
				r.UpsertRequest(requests[i])
			}
			b.ReportAllocs()
			b.ResetTimer()
			for range b.N {
				if s := r.Snapshot(); len(s.Needs) != 20 {
					b.Fatalf("%d rows, want 20", len(s.Needs))
				}
			}
		})
	}
}

func BenchmarkProfileOfPod(b *testing.B) {
	pods, _ := burst(20, 20)
	b.ReportAllocs()
	for i := range b.N {
		_ = ProfileOfPod(pods[i%20]).ID()
	}
}
