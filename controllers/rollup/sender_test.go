package rollup

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	clocktesting "k8s.io/utils/clock/testing"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	fleetpb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/internal/builders"
)

// sends is the autoscaler's side of a sender: a call is seen on calls and answered by answers.
type sends struct {
	calls   chan *fleetpb.ClusterCapacityNeeds
	answers chan error
	mu      sync.Mutex
	open    int
	most    int
}

func (s *sends) UpdateClusterNeeds(ctx context.Context, m *fleetpb.ClusterCapacityNeeds, _ ...grpc.CallOption) (*fleetpb.Acknowledgement, error) {
	s.mu.Lock()
	s.open++
	s.most = max(s.most, s.open)
	s.mu.Unlock()
	defer func() { s.mu.Lock(); s.open--; s.mu.Unlock() }()
	s.calls <- m
	select {
	case err := <-s.answers:
		return &fleetpb.Acknowledgement{Acknowledged: err == nil}, err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

type senderTest struct {
	*testing.T
	*sends
	clock  *clocktesting.FakeClock
	demand *demand
	synced chan struct{}
}

// newSenderTest starts a sender with a debounce of 1s, a period of 10s and a back-off from 2s to 8s without jitter.
func newSenderTest(t *testing.T) *senderTest {
	t.Helper()
	metrics, err := NewMetrics(prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	st := &senderTest{
		T: t, clock: clocktesting.NewFakeClock(time.Unix(1_000_000, 0)), demand: newDemand(capacity.DemandTotal),
		sends:  &sends{calls: make(chan *fleetpb.ClusterCapacityNeeds), answers: make(chan error)},
		synced: make(chan struct{}),
	}
	st.demand.hasSynced = []func() bool{func() bool {
		select {
		case <-st.synced:
			return true
		default:
			return false
		}
	}}
	s := &sender{
		clusterID: testCluster, session: "s", demand: st.demand, client: st.sends, clock: st.clock, metrics: metrics,
		acks: newAcknowledger(nil, st.demand, 1, metrics, logr.Discard()), log: logr.Discard(),
		backoff:  backoff{base: 4 * time.Second, max: 16 * time.Second, random: func() float64 { return 0 }},
		debounce: time.Second, period: 10 * time.Second, timeout: time.Hour,
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Start(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return st
}

// waits blocks until the sender has that many timers, so that the clock may move.
func (st *senderTest) waits(timers int) {
	st.Helper()
	eventually(st.T, func() error {
		return is(st.clock.Waiters() == timers, "%d timers, want %d", st.clock.Waiters(), timers)
	})
}

func (st *senderTest) call() *fleetpb.ClusterCapacityNeeds {
	st.Helper()
	select {
	case m := <-st.calls:
		return m
	case <-time.After(patience):
		st.Fatal("no roll-up was sent")
		return nil
	}
}

func (st *senderTest) quiet(why string) {
	st.Helper()
	select {
	case m := <-st.calls:
		st.Fatalf("%s: a roll-up %v was sent", why, m)
	default:
	}
}

func (st *senderTest) need(i int) {
	st.demand.upsertRequest(builders.CapacityRequest("default", fmt.Sprint("cr-", i)).Requests("cpu", fmt.Sprint(i)).Obj())
}

// start lets the sender through its first roll-up.
func (st *senderTest) start() {
	st.Helper()
	st.waits(1) // it looks whether all is seen
	close(st.synced)
	st.clock.Step(syncPoll)
	st.waits(2) // debounce and period
	st.clock.Step(time.Second)
	st.call()
	st.answers <- nil
	st.waits(1)
}

// A roll-up before everything was seen would look like a collapse of demand.
func TestNothingIsSentBeforeTheCachesHaveSynced(t *testing.T) {
	st := newSenderTest(t)
	st.need(1)
	for range 100 {
		st.waits(1)
		st.clock.Step(syncPoll)
	}
	st.quiet("the caches have not synced")
	st.need(2)
	st.waits(1)
	close(st.synced)
	st.clock.Step(syncPoll)
	st.waits(2)
	st.clock.Step(time.Second)
	if m := st.call(); len(m.Needs) != 2 || m.Session != "s" || m.Sequence != 1 || m.ClusterId != testCluster {
		t.Errorf("the first roll-up is %v, want both rows, session s, sequence 1", m)
	}
	st.answers <- nil
}

func TestChangesAreDebounced(t *testing.T) {
	st := newSenderTest(t)
	st.start()
	st.need(1)
	st.waits(2)
	st.clock.Step(600 * time.Millisecond)
	st.need(2)
	st.need(3)
	st.quiet("the debounce is not over")
	st.clock.Step(400 * time.Millisecond)
	if m := st.call(); len(m.Needs) != 3 || m.Sequence != 2 {
		t.Errorf("the roll-up has %d rows and sequence %d, want 3 and 2", len(m.Needs), m.Sequence)
	}
	st.answers <- nil
	st.waits(1)
	st.quiet("nothing has changed since")
}

func TestThePeriodSendsWithoutAChange(t *testing.T) {
	st := newSenderTest(t)
	st.start()
	for range 3 {
		st.waits(1)
		st.clock.Step(10*time.Second - 1)
		st.quiet("the period is not over")
		st.clock.Step(1)
		st.call()
		st.answers <- nil
	}
}

// While one send hangs, whatever happens makes the next one, and no more than that.
func TestOneSendIsInFlight(t *testing.T) {
	st := newSenderTest(t)
	st.start()
	st.need(1)
	st.waits(2)
	st.clock.Step(time.Second)
	st.call()
	for i := 2; i < 1000; i++ {
		st.need(i)
	}
	st.clock.Step(time.Minute)
	st.quiet("a send is in flight")
	st.answers <- nil
	st.waits(2)
	st.clock.Step(time.Second)
	if m := st.call(); len(m.Needs) != 999 {
		t.Errorf("the next roll-up has %d rows, want all 999", len(m.Needs))
	}
	st.answers <- nil
	st.waits(1)
	st.quiet("nothing has changed since")
	if st.most != 1 {
		t.Errorf("%d sends were in flight at once", st.most)
	}
}

// Errors are followed by growing pauses, which changes do not shorten, and nothing is acknowledged by them.
func TestBackOff(t *testing.T) {
	st := newSenderTest(t)
	st.start()
	st.need(1)
	st.waits(2)
	st.clock.Step(time.Second)
	st.call()
	for _, pause := range []time.Duration{2, 4, 8, 8, 8} {
		st.answers <- errors.New("away")
		st.waits(2)
		st.need(2)
		st.clock.Step(pause*time.Second - 1)
		st.quiet(fmt.Sprintf("the pause of %ds is not over", pause))
		st.clock.Step(1)
		st.call()
	}
	st.answers <- nil
	st.waits(1)
	st.need(3)
	st.waits(2)
	st.clock.Step(time.Second)
	st.call() // after a success the debounce counts again
	st.answers <- nil
}

// Only what is Pending and counted is acknowledged; a request that is Acknowledged already never is.
func TestSnapshotNamesWhatToAcknowledge(t *testing.T) {
	d := newDemand(capacity.DemandTotal)
	pending := builders.CapacityRequest("default", "pending").Requests("cpu", "1").Obj()
	done := builders.CapacityRequest("default", "done").Requests("cpu", "1").Phase(fleetv1alpha1.CapacityRequestAcknowledged).Obj()
	orphan := builders.CapacityRequest("default", "orphan").For(builders.Pod("default", "unknown").Obj()).Requests("cpu", "1").Obj()
	for _, cr := range []*fleetv1alpha1.CapacityRequest{pending, done, orphan} {
		d.upsertRequest(cr)
	}
	snapshot, included := d.snapshot()
	if len(snapshot.Needs) != 1 || snapshot.Needs[0].Count != 2 {
		t.Errorf("needs are %v, want one row of two", snapshot.Needs)
	}
	if len(included) != 1 || included[0].Name != "pending" {
		t.Errorf("to acknowledge are %v, want pending only", included)
	}
	acknowledged := pending.DeepCopy()
	acknowledged.Status.Phase = fleetv1alpha1.CapacityRequestAcknowledged
	d.upsertRequest(acknowledged)
	d.deleteRequest(orphan)
	if _, included := d.snapshot(); len(included) != 0 || len(d.unacknowledged) != 0 {
		t.Errorf("to acknowledge are %v, want none", included)
	}
}

// The pauses stay between half and the whole of what has grown, up to the limit, however many failures.
func TestBackoffBounds(t *testing.T) {
	for _, random := range []float64{0, 0.5, 0.999} {
		b := backoff{base: time.Second, max: 30 * time.Second, random: func() float64 { return random }}
		for i := range 200 {
			grown := 30 * time.Second
			if i < 5 {
				grown = time.Second << i
			}
			if got := b.next(); got < grown/2 || got > grown {
				t.Fatalf("pause %d is %s, want between %s and %s", i, got, grown/2, grown)
			}
		}
		b.reset()
		if got := b.next(); got > time.Second {
			t.Errorf("after a success the pause is %s", got)
		}
	}
}
