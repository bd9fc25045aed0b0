package backstop

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/demand"
	"github.com/drover-sh/drover/demand/podgroups"
	"github.com/drover-sh/drover/internal/builders"
)

// endless is a cache that waits for a list which never comes.
type endless struct {
	client.Reader
	t *testing.T
}

var errNoList = errors.New("no list")

func (e endless) wait(ctx context.Context) error {
	if _, ends := ctx.Deadline(); !ends {
		e.t.Error("a read that may wait for ever")
	}
	return errNoList
}

func (e endless) Get(ctx context.Context, _ client.ObjectKey, _ client.Object, _ ...client.GetOption) error {
	return e.wait(ctx)
}

func (e endless) List(ctx context.Context, _ client.ObjectList, _ ...client.ListOption) error {
	return e.wait(ctx)
}

func TestReadsThatCannotBeAnsweredEndAndProveNothing(t *testing.T) {
	pod := withAffinity(withClaim(builders.Pod("ns", "p").UID("uid").Obj(), "data"), "app", "absent")
	claim := "devices"
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "c", ResourceClaimName: &claim}}
	reader := endless{t: t}
	if d := judgeOf(reader, "fleet-system").Decide(pod, nil); !d.Request {
		t.Errorf("decided %+v, want a request", d)
	}
	pendingIn(reader)(pod)
}

// requestTable is an API server for CapacityRequests, by pod.
type requestTable struct {
	mu        sync.Mutex
	minCounts map[string]int32
	changed   chan struct{}
}

func (r *requestTable) put(request *fleetv1alpha1.CapacityRequest) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.minCounts[request.OwnerReferences[0].Name] = request.Spec.Group.MinCount
	r.changed <- struct{}{}
}

func (r *requestTable) Create(_ context.Context, request *fleetv1alpha1.CapacityRequest) error {
	if _, err := r.Get(context.Background(), request.Namespace, request.OwnerReferences[0].Name); err == nil {
		return apierrors.NewAlreadyExists(schema.GroupResource{}, request.Name)
	}
	r.put(request)
	return nil
}

func (r *requestTable) Get(_ context.Context, _, name string) (*fleetv1alpha1.CapacityRequest, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for pod, minCount := range r.minCounts {
		p := builders.Pod("ns", pod).UID(pod).PodGroup("g").Obj()
		if name == pod || name == demand.Name(p.Name, p.UID) {
			return demand.RequestFor(p, capacity.ProfileOfPod(p).WithMinCount(minCount)), nil
		}
	}
	return nil, apierrors.NewNotFound(schema.GroupResource{}, name)
}

func (r *requestTable) Update(_ context.Context, request *fleetv1alpha1.CapacityRequest) error {
	r.put(request)
	return nil
}

func TestPodGroupThatComesLateReachesTheRequestsOfItsMembers(t *testing.T) {
	members := []client.Object{
		builders.Pod("ns", "m0").UID("m0").PodGroup("g").Obj(), builders.Pod("ns", "m1").UID("m1").PodGroup("g").Obj(),
		builders.Pod("ns", "bound").UID("bound").PodGroup("g").Node("n").Obj(),
		builders.Pod("ns", "else").UID("else").PodGroup("h").Obj(),
		builders.Pod("other", "m0").UID("other").PodGroup("g").Obj(),
	}
	reader := fake.NewClientBuilder().WithObjects(members...).WithIndex(&corev1.Pod{}, gangIndex, gangOf).Build()
	api := &requestTable{minCounts: map[string]int32{}, changed: make(chan struct{}, 10)}
	var minCount int32
	writer, err := demand.NewWriter(demand.Options{
		Source: "test", Requests: api,
		Describe: func(pod *corev1.Pod) capacity.Profile { return capacity.ProfileOfPod(pod).WithMinCount(minCount) },
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { writer.Run(ctx) })
	defer running.Wait()
	defer cancel()
	writes := func(n int) {
		t.Helper()
		for range n {
			select {
			case <-api.changed:
			case <-time.After(patience):
				t.Fatal("a write never came")
			}
		}
	}
	for _, pod := range []client.Object{members[0], members[1], members[3]} {
		writer.Enqueue(pod.(*corev1.Pod), nil)
	}
	writes(3)

	minCount = 2
	verifierOf(reader, writer)(podgroups.KeyOf(members[0].(*corev1.Pod)))
	writes(2)
	api.mu.Lock()
	defer api.mu.Unlock()
	if api.minCounts["m0"] != 2 || api.minCounts["m1"] != 2 || api.minCounts["else"] != 0 || len(api.minCounts) != 3 {
		t.Errorf("minimum of each request: %v, want 2 for m0 and m1 only", api.minCounts)
	}
}
