package autoscaler

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"gocloud.dev/blob/memblob"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"k8s.io/utils/clock"

	fleetpb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
	"github.com/drover-sh/drover/autoscaler/provider/fake"
	"github.com/drover-sh/drover/capacity"
)

// countingStore counts what is written.
type countingStore struct {
	Store
	writes atomic.Int64
	broken atomic.Bool
}

func (s *countingStore) SaveRollUp(ctx context.Context, r *RollUp) error {
	if s.broken.Load() {
		return errCrash
	}
	s.writes.Add(1)
	return s.Store.SaveRollUp(ctx, r)
}

// live is a running autoscaler behind gRPC, with the fake cloud.
type live struct {
	store  *countingStore
	runner *Runner
	needs  fleetpb.InfrastructureAutoscalerClient
	feed   fleetpb.CapacityFeedClient
}

func startLive(t testing.TB, policy Policy) *live {
	t.Helper()
	bucket := memblob.OpenBucket(nil)
	l := &live{store: &countingStore{Store: NewStore(bucket)}}
	clk := clock.RealClock{}
	cloud := fake.NewCloud(clk, small(100))
	engine := NewEngine(policy, capacity.MakePlan, RandomID)
	l.runner = NewRunner(engine, l.store, cloud.Provider(), clk, logr.Discard(), prometheus.NewRegistry())
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = l.runner.Run(ctx)
	}()
	listener := bufconn.Listen(1 << 20)
	server := grpc.NewServer(grpc.MaxRecvMsgSize(maxMessage))
	NewServer(l.runner, clk, time.Millisecond, time.Minute).Register(server)
	go func() { _ = server.Serve(listener) }()
	conn, err := grpc.NewClient("passthrough:///live", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = conn.Close()
		cancel()
		<-done
		server.Stop()
		_ = bucket.Close()
	})
	l.needs, l.feed = fleetpb.NewInfrastructureAutoscalerClient(conn), fleetpb.NewCapacityFeedClient(conn)
	return l
}

func fastPolicy() Policy {
	p := testPolicy()
	p.PassDebounce = time.Millisecond
	return p
}

func needMessage(count int32) *fleetpb.ClusterCapacityNeeds {
	return &fleetpb.ClusterCapacityNeeds{ClusterId: "east", Session: "s", Sequence: uint64(count),
		Needs: []*fleetpb.CapacityNeed{{Resources: map[string]string{"cpu": "10", "pods": "1"}, Count: count}}}
}

func TestInvalidRollUpsNameFieldAndValueAndChangeNothing(t *testing.T) {
	l := startLive(t, fastPolicy())
	if _, err := l.needs.UpdateClusterNeeds(t.Context(), needMessage(2)); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name   string
		break_ func(*fleetpb.ClusterCapacityNeeds)
		want   []string
	}{
		{"no cluster", func(m *fleetpb.ClusterCapacityNeeds) { m.ClusterId = "" }, []string{"cluster_id", `""`}},
		{"odd cluster", func(m *fleetpb.ClusterCapacityNeeds) { m.ClusterId = "a/b" }, []string{"cluster_id", `"a/b"`}},
		{"long cluster", func(m *fleetpb.ClusterCapacityNeeds) { m.ClusterId = strings.Repeat("x", 201) },
			[]string{"cluster_id", "xxx", "200"}},
		{"cluster too long for a file", func(m *fleetpb.ClusterCapacityNeeds) { m.ClusterId = strings.Repeat("ü", 40) },
			[]string{"cluster_id", "200"}},
		{"rows", func(m *fleetpb.ClusterCapacityNeeds) {
			row := m.Needs[0]
			for len(m.Needs) < 100_000 {
				m.Needs = append(m.Needs, row)
			}
		}, []string{"needs", "100000", "10000"}},
		{"daemons", func(m *fleetpb.ClusterCapacityNeeds) { m.Daemons = make([]*fleetpb.DaemonOverhead, 1001) },
			[]string{"daemons", "1001"}},
		{"pods", func(m *fleetpb.ClusterCapacityNeeds) { m.Needs[0].Count = 100_000_001 },
			[]string{"needs", "100000001"}},
		{"resources", func(m *fleetpb.ClusterCapacityNeeds) {
			for i := range 1001 {
				m.Needs[0].Resources[fmt.Sprintf("example.com/r%d", i)] = "1"
			}
		}, []string{"needs", "different resources", "1000"}},
		{"id of the planner's memory", func(m *fleetpb.ClusterCapacityNeeds) { m.Needs[0].Id = "x/full" },
			[]string{"needs[0].id", `"x/full"`}},
		{"long id", func(m *fleetpb.ClusterCapacityNeeds) { m.Needs[0].Id = strings.Repeat("x", 65) },
			[]string{"needs[0].id", "64"}},
		{"long value", func(m *fleetpb.ClusterCapacityNeeds) {
			m.Needs[0].Requirements = []*fleetpb.NodeSelectorRequirement{{Key: "a", Operator: "In",
				Values: []string{strings.Repeat("x", 2000)}}}
		}, []string{"needs[0]", `"xxx`, "1024"}},
		{"negative count", func(m *fleetpb.ClusterCapacityNeeds) { m.Needs[0].Count = -3 }, []string{"needs[0].count", "-3"}},
		{"bad quantity", func(m *fleetpb.ClusterCapacityNeeds) { m.Needs[0].Resources["cpu"] = "ten" },
			[]string{"needs[0].resources", "ten"}},
		{"bad operator", func(m *fleetpb.ClusterCapacityNeeds) {
			m.Needs[0].Requirements = []*fleetpb.NodeSelectorRequirement{{Key: "zone", Operator: "Like"}}
		}, []string{"needs[0].requirements[0].operator", "Like"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			m := needMessage(9)
			test.break_(m)
			_, err := l.needs.UpdateClusterNeeds(t.Context(), m)
			if status.Code(err) != codes.InvalidArgument {
				t.Fatalf("got %v, want InvalidArgument", err)
			}
			for _, part := range test.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("error %q does not mention %q", err, part)
				}
			}
		})
	}
	for _, test := range []struct {
		observation *fleetpb.MachineObservation
		want        []string
	}{
		{&fleetpb.MachineObservation{State: "Ready"}, []string{"machines[0].id", `""`}},
		{&fleetpb.MachineObservation{Id: "m", State: "Tired"}, []string{"machines[0].state", `"Tired"`}},
		{&fleetpb.MachineObservation{Id: "m", State: "Drained"}, []string{"machines[0].reclaim_id"}},
		{&fleetpb.MachineObservation{Id: "m", State: "Ready", Allocatable: map[string]string{"cpu": "x"}},
			[]string{"machines[0].allocatable", "x"}},
	} {
		_, err := l.feed.ReportMachines(t.Context(), &fleetpb.MachineReport{ClusterId: "east",
			Machines: []*fleetpb.MachineObservation{test.observation}})
		for _, part := range test.want {
			if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), part) {
				t.Errorf("got %v, want InvalidArgument that mentions %q", err, part)
			}
		}
	}
	l.runner.mu.Lock()
	defer l.runner.mu.Unlock()
	if got := l.runner.engine.clusters["east"].rollUp.pods(); got != 2 {
		t.Errorf("the demand is %d pods, want 2 as before", got)
	}
}

func TestARepeatedRollUpIsNotStoredAgain(t *testing.T) {
	l := startLive(t, fastPolicy())
	send := func(m *fleetpb.ClusterCapacityNeeds) {
		t.Helper()
		if _, err := l.needs.UpdateClusterNeeds(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}
	send(needMessage(2))
	for i := range 50 {
		m := needMessage(2)
		m.Sequence = uint64(10 + i)
		send(m)
	}
	if got := l.store.writes.Load(); got != 1 {
		t.Errorf("stored %d roll-ups, want 1", got)
	}
	late := needMessage(7)
	send(late) // sequence 7 is before the last of those that repeated
	l.runner.mu.Lock()
	pods := l.runner.engine.clusters["east"].rollUp.pods()
	l.runner.mu.Unlock()
	if pods != 2 {
		t.Errorf("a late roll-up changed the demand to %d pods", pods)
	}
	send(needMessage(70))
	send(needMessage(71))
	back := needMessage(70)
	back.Sequence = 72
	send(back)
	l.runner.mu.Lock()
	pods = l.runner.engine.clusters["east"].rollUp.pods()
	l.runner.mu.Unlock()
	if pods != 70 {
		t.Errorf("the demand is %d pods, want 70: what returns to an earlier content is no repetition", pods)
	}
}

func TestOnlyWhatIsStoredIsAcknowledged(t *testing.T) {
	l := startLive(t, fastPolicy())
	l.store.broken.Store(true)
	_, err := l.needs.UpdateClusterNeeds(t.Context(), needMessage(2))
	if status.Code(err) != codes.Unavailable {
		t.Fatalf("got %v, want Unavailable", err)
	}
	l.store.broken.Store(false)
	for {
		// It is taken again a second after the failure at the latest.
		if _, err = l.needs.UpdateClusterNeeds(t.Context(), needMessage(2)); status.Code(err) != codes.Unavailable {
			break
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	if l.store.writes.Load() == 0 {
		t.Error("acknowledged, and not stored")
	}
}

// next receives feeds until one satisfies.
func next(t *testing.T, stream grpc.ServerStreamingClient[fleetpb.FeedState], what string,
	ok func(*fleetpb.FeedState) bool) *fleetpb.FeedState {
	t.Helper()
	for {
		state, err := stream.Recv()
		if err != nil {
			t.Fatalf("waiting for %s: %v", what, err)
		}
		if ok(state) {
			return state
		}
	}
}

func TestAClusterIsServedFromRollUpToReclaim(t *testing.T) {
	policy := fastPolicy()
	policy.ConsolidationDelay, policy.CollapseHold = 0, time.Millisecond
	l := startLive(t, policy)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	stream, err := l.feed.Subscribe(ctx, &fleetpb.SubscribeRequest{ClusterId: "east"})
	if err != nil {
		t.Fatal(err)
	}
	first := next(t, stream, "the offerings", func(s *fleetpb.FeedState) bool { return len(s.Offerings) == 1 })
	if first.ClusterId != "east" || first.Session == "" || first.Sequence == 0 || !first.Timestamp.IsValid() {
		t.Errorf("the first message lacks who, when or in which order: %v", first)
	}
	if o := first.Offerings[0]; o.Name != "small" || o.AvailableCount != 100 || o.Availability != "High" ||
		first.Shapes[o.Shape].Resources["cpu"] != "16" {
		t.Errorf("the offering is %v", o)
	}
	if _, err := l.needs.UpdateClusterNeeds(ctx, needMessage(2)); err != nil {
		t.Fatal(err)
	}
	state := next(t, stream, "two launched machines", func(s *fleetpb.FeedState) bool {
		n := 0
		for _, m := range s.Machines {
			if m.Phase == "Launched" {
				n++
			}
		}
		return n == 2
	})
	if state.Sequence <= first.Sequence || state.Session != first.Session {
		t.Error("the order of the messages cannot be told")
	}
	if v := state.Verdicts[0]; v.State != "InFlight" || v.InFlight != 2 {
		t.Errorf("the verdict is %v", v)
	}
	report := func(id, state, reclaim string) {
		t.Helper()
		ack, err := l.feed.ReportMachines(ctx, &fleetpb.MachineReport{ClusterId: "east",
			Machines: []*fleetpb.MachineObservation{{Id: id, State: state, NodeName: id, ReclaimId: reclaim}}})
		if err != nil || !ack.Acknowledged {
			t.Fatalf("reporting %s %s: %v, %v", id, state, ack, err)
		}
	}
	for _, m := range state.Machines {
		if m.ProviderId == "" || m.NodeName == "" || m.ProvisioningStartTime == nil || m.EstimatedReadyTime == nil {
			t.Errorf("machine %v is not described", m)
		}
		report(m.Id, "Ready", "")
	}
	next(t, stream, "Ready machines to leave the list", func(s *fleetpb.FeedState) bool {
		return len(s.Machines) == 0 && s.Verdicts[0].State == "Met"
	})
	if _, err := l.needs.UpdateClusterNeeds(ctx, &fleetpb.ClusterCapacityNeeds{ClusterId: "east", Session: "s", Sequence: 3}); err != nil {
		t.Fatal(err)
	}
	state = next(t, stream, "an instruction", func(s *fleetpb.FeedState) bool { return len(s.Reclaims) == 1 && s.Reclaims[0].Count == 2 })
	reclaim := state.Reclaims[0]
	if len(reclaim.Candidates) != 2 || reclaim.Reason == "" {
		t.Errorf("the instruction is %v", reclaim)
	}
	for _, id := range reclaim.Candidates {
		report(id, "Draining", reclaim.Id)
		report(id, "Drained", reclaim.Id)
	}
	next(t, stream, "everything to end", func(s *fleetpb.FeedState) bool {
		return len(s.Reclaims) == 0 && len(s.Terminating) == 0 && s.Offerings[0].AvailableCount == 100
	})
}

func TestASlowSubscriberGetsTheLatestStateOnly(t *testing.T) {
	h := newHub()
	s := h.subscribe("east")
	for i := range 1000 {
		h.publish(&fleetpb.FeedState{ClusterId: "east", Sequence: uint64(i)})
	}
	<-s.changed
	if got := h.take(s).Sequence; got != 999 {
		t.Errorf("took state %d, want the latest", got)
	}
	select {
	case <-s.changed:
		t.Error("there is more to take than the latest state")
	default:
	}
	h.unsubscribe(s)
	if h.wanted("east") || len(h.topics) != 0 {
		t.Error("a topic without subscribers stays")
	}
}

func TestTheStreamEndsWhenTheAutoscalerStops(t *testing.T) {
	l := startLive(t, fastPolicy())
	stream, err := l.feed.Subscribe(t.Context(), &fleetpb.SubscribeRequest{ClusterId: "east"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	l.runner.hub.close()
	for err == nil {
		_, err = stream.Recv()
	}
	if status.Code(err) != codes.Unavailable {
		t.Errorf("got %v, want Unavailable", err)
	}
}

func TestThePolicyFollowsItsFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	write := func(policy string) {
		t.Helper()
		text := fmt.Sprintf("apiVersion: config.drover.sh/v1alpha1\nkind: AutoscalerConfiguration\ntls: {insecure: true}\n"+
			"provider: {kwok: {offeringsFile: x, clusters: [{id: east}]}}\npolicy: %s\n", policy)
		if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
	}
	write("{}")
	clk := &stepClock{steps: make(chan func() bool)}
	policies := make(chan Policy, 1)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = watchPolicy(ctx, path, clk, logr.Discard(), func(p Policy) { policies <- p })
	}()
	look := func() { clk.steps <- nil }
	look()
	look() // unchanged
	write("{dryRun: true}")
	look()
	if p := <-policies; !p.DryRun {
		t.Error("dryRun is not set")
	}
	write("{dryRun: perhaps}")
	look()
	write("{disableReclaim: true}")
	look()
	if p := <-policies; !p.DisableReclaim || p.DryRun {
		t.Error("the policy is not the file's")
	}
	cancel()
	<-done
	if len(policies) > 0 {
		t.Error("a file that is not valid changed the policy")
	}
}

// stepClock lets After end when the test says so.
type stepClock struct {
	clock.RealClock
	steps chan func() bool
}

func (c *stepClock) After(time.Duration) <-chan time.Time {
	out := make(chan time.Time)
	go func() {
		if _, open := <-c.steps; open {
			out <- time.Time{}
		}
	}()
	return out
}

func BenchmarkRepeatedRollUp(b *testing.B) {
	l := startLive(b, fastPolicy())
	server := NewServer(l.runner, clock.RealClock{}, 0, time.Minute)
	m := &fleetpb.ClusterCapacityNeeds{ClusterId: "east", Session: "s", Sequence: 1}
	for i := range 20 {
		m.Needs = append(m.Needs, &fleetpb.CapacityNeed{Count: 500,
			Resources: map[string]string{"cpu": fmt.Sprint(i + 1), "memory": "4Gi", "pods": "1"}})
	}
	if _, err := server.UpdateClusterNeeds(b.Context(), m); err != nil {
		b.Fatal(err)
	}
	b.ResetTimer()
	for b.Loop() {
		if _, err := server.UpdateClusterNeeds(b.Context(), m); err != nil {
			b.Fatal(err)
		}
	}
}

// Whoever only listens is told what there is, and leaves nothing behind: a peer that subscribes under ever new ids must not
// make the autoscaler grow. With its first roll-up it is a cluster like any other.
func TestWhoOnlySubscribesIsNotRemembered(t *testing.T) {
	l := startLive(t, fastPolicy())
	stream, err := l.feed.Subscribe(t.Context(), &fleetpb.SubscribeRequest{ClusterId: "east"})
	if err != nil {
		t.Fatal(err)
	}
	if state, err := stream.Recv(); err != nil || len(state.Offerings) != 1 {
		t.Fatalf("received %v, %v, want the offerings", state, err)
	}
	l.runner.mu.Lock()
	known := len(l.runner.engine.clusters) + len(l.runner.engine.strangers)
	l.runner.mu.Unlock()
	if known != 0 {
		t.Errorf("%d clusters are remembered", known)
	}
	if _, err := l.needs.UpdateClusterNeeds(t.Context(), needMessage(2)); err != nil {
		t.Fatal(err)
	}
	for {
		state, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if len(state.Verdicts) == 1 {
			return
		}
	}
}
