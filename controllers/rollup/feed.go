package rollup

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/utils/clock"

	fleetpb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
)

// feed follows the autoscaler's stream and keeps the last state that it said. Doubled, late and lost messages do no harm:
// a state is taken only if its sequence is higher than what its session has said before, and each is complete.
type feed struct {
	clusterID string
	client    fleetpb.CapacityFeedClient
	clock     clock.Clock
	backoff   backoff
	metrics   *Metrics
	log       logr.Logger
	// silence ends a stream on which nothing came for that long: a connection can die without a word.
	silence time.Duration
	// onState is called after every new state, with what changed. fresh marks a session that was not heard before: what it
	// was told by reports before is to be said again.
	onState func(s, before *feedState, c changes, fresh bool)

	mu    sync.RWMutex
	state *feedState
	// sequences has the last sequence of each session heard, newest session last; bounded.
	sequences []sessionSequence
	failing   bool
}

type sessionSequence struct {
	session  string
	sequence uint64
}

// maxSessions bounds the memory for sessions. An autoscaler has one at a time; more are replicas taking turns.
const maxSessions = 16

// errSilent ends a stream that has gone quiet.
var errSilent = errors.New("nothing came for too long")

// current returns the last state, nil before the first.
func (f *feed) current() *feedState {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.state
}

// Start implements manager.Runnable.
func (f *feed) Start(ctx context.Context) error {
	for ctx.Err() == nil {
		err := f.follow(ctx)
		f.metrics.FeedConnected.Set(0)
		if ctx.Err() != nil {
			return nil
		}
		pause := f.backoff.next()
		if !f.failing {
			f.log.Error(err, "The autoscaler's feed is away; the cluster stays as it is until it is back", "retryIn", pause)
		} else {
			f.log.V(1).Info("The feed is still away", "error", err.Error(), "retryIn", pause)
		}
		f.failing = true
		sleep(ctx, f.clock, pause)
	}
	return nil
}

// follow reads one stream to its end.
func (f *feed) follow(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stream, err := f.client.Subscribe(ctx, &fleetpb.SubscribeRequest{ClusterId: f.clusterID})
	if err != nil {
		return fmt.Errorf("subscribing: %w", err)
	}
	watchdog := f.clock.NewTimer(f.silence)
	defer watchdog.Stop()
	heard := make(chan struct{}, 1)
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-heard:
				if !watchdog.Stop() {
					select {
					case <-watchdog.C():
					default:
					}
				}
				watchdog.Reset(f.silence)
			case <-watchdog.C():
				cancel(errSilent)
				return
			}
		}
	}()
	for {
		msg, err := stream.Recv()
		if err != nil {
			if cause := context.Cause(ctx); errors.Is(cause, errSilent) {
				return cause
			}
			if errors.Is(err, io.EOF) {
				return errors.New("the autoscaler closed the feed")
			}
			return fmt.Errorf("receiving: %w", err)
		}
		select {
		case heard <- struct{}{}:
		default:
		}
		if f.apply(msg) {
			f.backoff.reset()
			if f.failing {
				f.log.Info("The feed is back", "session", msg.GetSession(), "sequence", msg.GetSequence())
				f.failing = false
			}
		}
	}
}

// apply takes a message; false when it belongs to another cluster. It is called by one goroutine at a time.
func (f *feed) apply(msg *fleetpb.FeedState) bool {
	if msg.GetClusterId() != f.clusterID {
		f.metrics.FeedStates.WithLabelValues("foreign").Inc()
		f.log.Error(nil, "The feed sent another cluster's state; it is ignored",
			"cluster", msg.GetClusterId(), "want", f.clusterID)
		return false
	}
	f.metrics.FeedConnected.Set(1)
	fresh, late := f.register(msg.GetSession(), msg.GetSequence())
	if late {
		f.metrics.FeedStates.WithLabelValues("late").Inc()
		return true
	}
	before := f.current()
	state, problems := newFeedState(msg, before, f.clock.Now())
	for _, problem := range problems {
		f.metrics.FeedInvalid.Inc()
		f.log.Error(problem, "An entry of the feed is invalid and left out", "sequence", msg.GetSequence())
	}
	f.mu.Lock()
	f.state = state
	f.mu.Unlock()
	f.metrics.FeedStates.WithLabelValues("applied").Inc()
	f.metrics.feedApplied(state)
	f.onState(state, before, state.diff(before), fresh)
	return true
}

// register notes a message's place in its session.
func (f *feed) register(session string, sequence uint64) (fresh, late bool) {
	for i := range f.sequences {
		s := &f.sequences[i]
		if s.session != session {
			continue
		}
		if sequence <= s.sequence {
			return false, true
		}
		s.sequence = sequence
		// Another process spoke in between: what this one knows of the reports since then is uncertain.
		fresh = i != len(f.sequences)-1
		f.sequences = append(append(f.sequences[:i:i], f.sequences[i+1:]...), sessionSequence{session, sequence})
		return fresh, false
	}
	f.sequences = append(f.sequences, sessionSequence{session, sequence})
	if len(f.sequences) > maxSessions {
		f.sequences = f.sequences[1:]
	}
	return true, false
}
