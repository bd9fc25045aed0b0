package rollup

import (
	"context"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	"k8s.io/utils/clock"

	fleetpb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity/wire"
)

// sender sends the roll-up: debounced after a change, and on a period. One send is in flight at most, and each replaces
// the whole of what was said before. While the autoscaler is away the sender holds nothing but the roll-up itself.
type sender struct {
	clusterID string
	session   string
	demand    *demand
	client    fleetpb.InfrastructureAutoscalerClient
	acks      *acknowledger
	clock     clock.Clock
	backoff   backoff
	metrics   *Metrics
	log       logr.Logger

	debounce, period, timeout time.Duration

	sequence uint64
	failing  bool
}

// syncPoll is how often the sender looks whether the handlers have seen everything; only at the start.
const syncPoll = 50 * time.Millisecond

// Start implements manager.Runnable.
func (s *sender) Start(ctx context.Context) error {
	for !s.demand.synced() {
		if !sleep(ctx, s.clock, syncPoll) {
			return nil
		}
	}
	s.demand.signal()
	pause := s.debounce
	for {
		if !s.await(ctx, pause) {
			return nil
		}
		pause = s.debounce
		if err := s.send(ctx); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			pause = s.backoff.next()
			s.failed(err, pause)
			// What failed is still to be said, whether or not anything changes.
			s.demand.signal()
			continue
		}
		s.succeeded()
	}
}

// await returns true when a roll-up is due: pause after the first change, and after a period at the latest.
func (s *sender) await(ctx context.Context, pause time.Duration) bool {
	period := s.clock.NewTimer(s.period)
	defer period.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-period.C():
	case <-s.demand.changed:
		if !sleep(ctx, s.clock, pause) {
			return false
		}
	}
	// Changes up to here are in the snapshot that follows.
	select {
	case <-s.demand.changed:
	default:
	}
	return ctx.Err() == nil
}

func (s *sender) send(ctx context.Context) error {
	snapshot, included := s.demand.snapshot()
	s.sequence++
	msg := wire.SnapshotToProto(snapshot)
	msg.ClusterId = s.clusterID
	msg.Session, msg.Sequence, msg.Timestamp = s.session, s.sequence, timestamppb.New(s.clock.Now())
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	answer, err := s.client.UpdateClusterNeeds(ctx, msg)
	if err != nil {
		return fmt.Errorf("sending roll-up %d of %d rows: %w", s.sequence, len(msg.Needs), err)
	}
	if !answer.GetAcknowledged() {
		return fmt.Errorf("sending roll-up %d of %d rows: the autoscaler did not acknowledge it", s.sequence, len(msg.Needs))
	}
	s.metrics.sent(len(msg.Needs), proto.Size(msg), s.clock.Now())
	s.acks.add(included)
	return nil
}

func (s *sender) failed(err error, pause time.Duration) {
	s.metrics.Sends.WithLabelValues(resultError).Inc()
	if !s.failing {
		// Once per outage; the metric counts on.
		s.log.Error(err, "The autoscaler takes no roll-ups; demand is kept and sent when it is back", "retryIn", pause)
	} else {
		s.log.V(1).Info("Roll-up failed again", "error", err.Error(), "retryIn", pause)
	}
	s.failing = true
}

func (s *sender) succeeded() {
	s.backoff.reset()
	s.metrics.Sends.WithLabelValues(resultSuccess).Inc()
	if s.failing {
		s.log.Info("The autoscaler takes roll-ups again", "sequence", s.sequence)
	}
	s.failing = false
}

// sleep waits for d by the clock; false when ctx ended first.
func sleep(ctx context.Context, c clock.Clock, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	timer := c.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C():
		return true
	}
}
