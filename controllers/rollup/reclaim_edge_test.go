package rollup

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	fleetpb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
	"github.com/drover-sh/drover/internal/builders"
)

// report is the last report of a machine in a state.
func (s *scripted) report(machine, state string) *fleetpb.MachineObservation {
	s.mu.Lock()
	defer s.mu.Unlock()
	var last *fleetpb.MachineObservation
	for _, o := range s.reports {
		if o.Id == machine && o.State == state {
			last = o
		}
	}
	return last
}

// underReclaim is a managed node that is being drained for an instruction.
func underReclaim(i int, instruction string) *corev1.Node {
	n := managed(i)
	n.Spec.Unschedulable = true
	n.Annotations = map[string]string{annotationCordoned: instruction}
	n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: fleetv1alpha1.TaintReclaiming, Value: instruction,
		Effect: corev1.TaintEffectNoSchedule})
	return n
}

// A pod that must not be moved was bound while its node was chosen: nothing on the node is evicted, and it stays.
func TestADrainEndsAtAPodThatMustStay(t *testing.T) {
	for _, test := range []struct {
		name string
		pod  *corev1.Pod
		want string
	}{
		{"bare", builders.Pod("default", "bare").Requests("cpu", "1").Node("node-00").Obj(), "default/bare has no controller"},
		{"marked", replica("marked", "node-00").Annotation(annotationDoNotDisrupt, "true").Obj(), "default/marked carries"},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := api(t)
			create(t, c, underReclaim(0, "r-1"), replica("a", "node-00").Obj(), test.pod)
			autoscaler, conn := newScripted(t)
			op := operate(t, conn, testConfig())
			autoscaler.say(&fleetpb.FeedState{Reclaims: []*fleetpb.Reclaim{{Id: "r-1", Candidates: candidates(1), Count: 1}}})
			wantReported(t, autoscaler, "m-00", stateKept)
			eventually(t, func() error { got := marked(t, c); return is(len(got) == 0, "still under reclaim: %v", got) })
			if kept := autoscaler.report("m-00", stateKept); kept.ReclaimId != "r-1" || !strings.Contains(kept.Message, test.want) {
				t.Errorf("the report is %v, want one that says %q", kept, test.want)
			}
			if n := op.writes.of("/eviction"); n != 0 {
				t.Errorf("%d evictions", n)
			}
		})
	}
}

// An eviction that the API server puts off is a refusal like any other: the worker comes back to it.
func TestAnEvictionThatIsPutOffHoldsNoWorker(t *testing.T) {
	metrics, err := NewMetrics(prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	c := fake.NewClientBuilder().WithScheme(testScheme()).WithInterceptorFuncs(interceptor.Funcs{
		SubResourceCreate: func(ctx context.Context, _ client.Client, _ string, _, _ client.Object, _ ...client.SubResourceCreateOption) error {
			<-ctx.Done()
			return fmt.Errorf("waiting to try again: %w", ctx.Err())
		}}).Build()
	r := &drainReconciler{client: c, metrics: metrics, log: logr.Discard(),
		config: reclaimSettings{evictionTimeout: time.Millisecond, evictionRetry: 7 * time.Second}}
	result, err := r.evict(t.Context(), underReclaim(0, "r-1"), []*corev1.Pod{replica("a", "node-00").Obj()})
	if err != nil || result.RequeueAfter != 7*time.Second {
		t.Errorf("got %v, %v, want another look after the pause", result, err)
	}
}

// A candidate whose node went while nobody led is answered for, so that another can be asked for in its place.
func TestACandidateWithoutANodeIsAnsweredFor(t *testing.T) {
	c := api(t)
	create(t, c, managed(1))
	autoscaler, conn := newScripted(t)
	operate(t, conn, testConfig())
	autoscaler.say(&fleetpb.FeedState{
		Terminating: []string{"m-02"}, Shapes: shapes(), Machines: []*fleetpb.UpcomingMachine{machineAt("m-03", "Launched")},
		Reclaims: []*fleetpb.Reclaim{{Id: "r-1", Candidates: []string{"m-00", "m-01", "m-02", "m-03"}, Count: 2}},
	})
	wantReported(t, autoscaler, "m-00", stateKept)
	if o := autoscaler.report("m-00", stateKept); o.ReclaimId != "r-1" || !strings.Contains(o.Message, "no node") {
		t.Errorf("the report is %v", o)
	}
	// The autoscaler leaves out what was answered for, and asks for what there is.
	autoscaler.say(&fleetpb.FeedState{Reclaims: []*fleetpb.Reclaim{{Id: "r-1", Candidates: []string{"m-01"}, Count: 1}}})
	wantReported(t, autoscaler, "m-01", stateDrained)
	for _, id := range []string{"m-02", "m-03"} {
		if got := autoscaler.reported(id); len(got) > 0 {
			t.Errorf("%s, which is on its way out or in, was reported %v", id, got)
		}
	}
}
