package integration

import (
	"context"
	"fmt"
	"net"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	rpc "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
)

// documentsServer is an autoscaler that knows only the source document: it takes roll-ups and has no feed.
type documentsServer struct {
	rpc.UnimplementedInfrastructureAutoscalerServer

	mu   sync.Mutex
	last *rpc.ClusterCapacityNeeds
	most int // bytes of the largest message
}

func (s *documentsServer) UpdateClusterNeeds(
	_ context.Context, needs *rpc.ClusterCapacityNeeds,
) (*rpc.Acknowledgement, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last, s.most = needs, max(s.most, proto.Size(needs))
	return &rpc.Acknowledgement{Acknowledged: true}, nil
}

// total returns the last message's rows and the sum of their counts.
func (s *documentsServer) total() (rows, count, most int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range s.last.GetNeeds() {
		count += int(n.Count)
	}
	return len(s.last.GetNeeds()), count, s.most
}

// 10,000 requests of 20 shapes are 20 rows and 4 KiB on the wire, and each is acknowledged once. The autoscaler at the other
// end knows only the document, and is served all the same.
func TestStoryRollUpOfTenThousand(t *testing.T) {
	const total, shapes = 10_000, 20
	server := &documentsServer{}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	rpc.RegisterInfrastructureAutoscalerServer(s, server)
	served := make(chan error, 1)
	go func() { served <- s.Serve(listener) }()
	t.Cleanup(func() {
		s.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})

	ns := namespace(t, "ten-thousand")
	f := startFleet(t, fleetOptions{
		without: []string{"autoscaler", "scheduler"},
		manager: func(c *configv1alpha1.ManagerConfiguration) {
			c.Autoscaler.Address = listener.Addr().String()
			c.Autoscaler.TLS = configv1alpha1.ClientTLS{Insecure: true}
		},
	})
	inParallel(t, total, func(i int) error { return env.client.Create(t.Context(), shapedRequest(ns, i, i%shapes)) })
	eventually(t, "a roll-up carries all requests", func(context.Context) (bool, string) {
		rows, count, most := server.total()
		return rows == shapes && count == total, fmt.Sprintf("%d rows, %d requests, %d bytes", rows, count, most)
	})
	rows, _, most := server.total()
	t.Logf("%d requests of %d shapes: %d rows, at most %d bytes", total, shapes, rows, most)
	if most > 4096 {
		t.Errorf("the largest roll-up has %d bytes on the wire, want at most 4096", most)
	}
	// The manager's own count first: ten thousand objects are too many to list again and again.
	const writes = `drover_rollup_acknowledgements_total{result="success"}`
	token := scraperToken(t)
	eventually(t, "as many acknowledgements are written", func(ctx context.Context) (bool, string) {
		value, _, err := f.metric(ctx, "manager", token, writes)
		return value >= total, fmt.Sprint(value, err)
	})
	var all fleetv1alpha1.CapacityRequestList
	if failure := list(t.Context(), &all, client.InNamespace(ns)); failure != "" || len(all.Items) != total {
		t.Fatalf("%d requests %s", len(all.Items), failure)
	}
	for _, r := range all.Items {
		if r.Status.Phase != fleetv1alpha1.CapacityRequestAcknowledged {
			t.Fatalf("request %s is %q", r.Name, r.Status.Phase)
		}
	}
	eventually(t, "the manager answers", func(ctx context.Context) (bool, string) {
		value, _, err := f.metric(ctx, "manager", token, writes)
		if err == nil && value != total {
			t.Errorf("%v acknowledgements for %d requests: each is written once", value, total)
		}
		return err == nil, fmt.Sprint(err)
	})

	// One by one: the API server breaks a request off after a minute, and so the deletion of ten thousand at once.
	inParallel(t, total, func(i int) error { return env.client.Delete(t.Context(), &all.Items[i]) })
	eventually(t, "a roll-up withdraws all", func(context.Context) (bool, string) {
		rows, count, _ := server.total()
		return rows == 0, fmt.Sprintf("%d rows, %d requests", rows, count)
	})
}

// inParallel calls do for 0 to n-1.
func inParallel(t *testing.T, n int, do func(i int) error) {
	t.Helper()
	indices := make(chan int)
	errs := make(chan error, 32)
	for range cap(errs) {
		go func() {
			var failure error
			for i := range indices {
				if failure == nil {
					failure = do(i)
				}
			}
			errs <- failure
		}()
	}
	for i := range n {
		indices <- i
	}
	close(indices)
	for range cap(errs) {
		if err := <-errs; err != nil {
			t.Fatal(err)
		}
	}
}

// shapedRequest is request number i; its shape has requirements, tolerations and priorities as real ones do.
func shapedRequest(ns string, i, shape int) *fleetv1alpha1.CapacityRequest {
	requests := fleetv1alpha1.ResourceList{
		corev1.ResourceCPU:    *resource.NewQuantity(int64(1+shape), resource.DecimalSI),
		corev1.ResourceMemory: *resource.NewQuantity(int64(1+shape)<<30, resource.BinarySI),
	}
	spec := fleetv1alpha1.CapacityRequestSpec{Priority: int32(shape%3) * 1000}
	if shape%2 == 0 {
		requests["nvidia.com/gpu"] = resource.MustParse("8")
		spec.Tolerations = []corev1.Toleration{{Key: "nvidia.com/gpu", Operator: corev1.TolerationOpExists}}
	}
	if shape%4 == 1 {
		spec.Requirements = []fleetv1alpha1.NodeSelectorRequirement{{
			Key: corev1.LabelTopologyZone, Operator: corev1.NodeSelectorOpIn, Values: []string{"zone-a", "zone-b"},
		}}
	}
	if shape%5 == 0 {
		spec.TopologySpread = []fleetv1alpha1.TopologySpread{{
			TopologyKey: corev1.LabelTopologyZone, MaxSkew: 1, WhenUnsatisfiable: corev1.DoNotSchedule,
		}}
	}
	spec.Resources.Requests = requests
	return &fleetv1alpha1.CapacityRequest{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: fmt.Sprintf("r-%05d", i)}, Spec: spec,
	}
}
