package autoscaler

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"k8s.io/utils/clock"

	"github.com/drover-sh/drover/autoscaler/provider"
	"github.com/drover-sh/drover/capacity"
)

const (
	// storeRetry is the pause after a failed write to the state store.
	storeRetry = time.Second
	// callRetry is the pause after a provider call that was not accepted; it doubles up to callRetryMax.
	callRetry, callRetryMax = time.Second, 30 * time.Second
	// callTimeout bounds one provider call.
	callTimeout = 10 * time.Second
	// storeConcurrency bounds writes to the state store at a time.
	storeConcurrency = 16
)

// Runner drives an Engine: it stores, acknowledges, calls the provider and publishes, in that order. Run does it until
// its context ends; a test calls Turn by itself.
type Runner struct {
	store    Store
	provider provider.Interface
	clock    clock.Clock
	log      logr.Logger
	metrics  *metrics
	hub      *hub
	ledger   *ledger

	mu      sync.Mutex // guards engine and waiters
	engine  *Engine
	waiters []*waiter

	kick chan struct{}
	// note takes what the engine decided and why; by default it goes to the log.
	note func(Note)
	// storeNotBefore puts off the next write after a failure, and refusals the next provider calls, by cluster: one that
	// cannot be reached is no reason to starve the others. Used by Turn alone.
	storeNotBefore time.Time
	refusals       map[string]refusal
}

// errStopping answers what came too late to be stored.
var errStopping = errors.New("the autoscaler is shutting down")

// waiter is a roll-up that is acknowledged once it is stored.
type waiter struct {
	entry ledgerEntry
	done  chan error
}

// NewRunner returns a runner of engine, whose metrics are in registry.
func NewRunner(engine *Engine, store Store, p provider.Interface, c clock.Clock, log logr.Logger,
	registry prometheus.Registerer) *Runner {
	r := &Runner{store: store, provider: p, clock: c, log: log, metrics: newMetrics(registry), engine: engine,
		hub: newHub(), ledger: newLedger(), refusals: map[string]refusal{}, kick: make(chan struct{}, 1)}
	r.note = r.logNote
	registry.MustRegister(gauges{r, r.metrics})
	return r
}

func (r *Runner) logNote(n Note) {
	if n.From != n.To {
		r.log.Info("Machine changed state", "cluster", n.Cluster, "machine", n.Subject, "from", n.From, "to", n.To,
			"reason", n.Why)
		return
	}
	r.log.Info("Decision", "cluster", n.Cluster, "subject", n.Subject, "reason", n.Why)
}

// Restore loads the state store into the engine. Call it once, before anything else.
func (r *Runner) Restore(ctx context.Context) error {
	saved, err := r.store.Load(ctx)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.engine.Restore(r.clock.Now(), saved)
}

// Run works until ctx ends.
func (r *Runner) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return r.provider.Run(ctx, r.Event) })
	group.Go(func() error { return r.turns(ctx) })
	group.Go(func() error { return r.surveys(ctx) })
	err := group.Wait()
	r.hub.close()
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

func (r *Runner) turns(ctx context.Context) error {
	for {
		next := r.Turn(ctx)
		var timer <-chan time.Time
		if !next.IsZero() {
			timer = r.clock.After(max(next.Sub(r.clock.Now()), time.Millisecond))
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-r.kick:
		case <-timer:
		}
	}
}

// surveys compares the records with the provider's list, first soon after the start: what happened while nobody
// listened has no other way to be seen.
func (r *Runner) surveys(ctx context.Context) error {
	pause := time.Second
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-r.clock.After(pause):
		}
		r.Survey(ctx)
		r.mu.Lock()
		pause = r.engine.policy.SurveyPeriod
		r.mu.Unlock()
	}
}

func (r *Runner) wake() {
	select {
	case r.kick <- struct{}{}:
	default:
	}
}

// with runs f with the engine and wakes the loop.
func (r *Runner) with(f func(now time.Time, e *Engine)) {
	r.mu.Lock()
	f(r.clock.Now(), r.engine)
	r.mu.Unlock()
	r.wake()
}

// Event takes a provider's event.
func (r *Runner) Event(event provider.Event) {
	r.metrics.events.WithLabelValues(string(event.Type)).Inc()
	r.with(func(now time.Time, e *Engine) { e.Event(now, event) })
}

// SetPolicy changes the policy.
func (r *Runner) SetPolicy(p Policy) {
	r.with(func(now time.Time, e *Engine) { e.SetPolicy(now, p) })
}

// Survey lists every known cluster's machines. A list that fails is logged and tried again at the next survey.
func (r *Runner) Survey(ctx context.Context) {
	r.mu.Lock()
	clusters := slices.Sorted(maps.Keys(r.engine.clusters))
	r.mu.Unlock()
	for _, cluster := range clusters {
		started := r.clock.Now()
		instances, err := r.provider.List(ctx, cluster)
		if err != nil {
			if ctx.Err() == nil {
				r.metrics.surveys.WithLabelValues("error").Inc()
				r.log.Error(err, "Listing the provider's machines", "cluster", cluster)
			}
			continue
		}
		r.metrics.surveys.WithLabelValues("ok").Inc()
		r.with(func(now time.Time, e *Engine) { e.Survey(now, started, cluster, instances) })
	}
}

// Turn does everything that is due and returns when the next thing will be; zero: when an input comes.
func (r *Runner) Turn(ctx context.Context) time.Time {
	offerings, err := r.provider.Offerings(ctx)
	if err != nil {
		r.log.Error(err, "Reading the provider's offerings; the last ones stay in force")
	}
	r.mu.Lock()
	now := r.clock.Now()
	if err == nil {
		r.engine.SetOfferings(now, offerings)
	}
	r.ledger.drain(r.engine.Seen)
	if due := r.engine.PassDue(); !due.IsZero() && !due.After(now) {
		r.pass(now)
	}
	ready := r.engine.Ready()
	waiters := r.waiters
	r.waiters = nil
	r.mu.Unlock()

	for _, note := range ready.Notes {
		r.note(note)
	}
	if !r.save(ctx, now, ready, waiters) {
		return r.storeNotBefore
	}
	retry := r.call(ctx, now, ready.Calls)

	r.mu.Lock()
	defer r.mu.Unlock()
	r.publish(now, ready.Feeds)
	next := r.engine.PassDue()
	if !retry.IsZero() && (next.IsZero() || retry.Before(next)) {
		next = retry
	}
	return next
}

func (r *Runner) pass(now time.Time) {
	started := time.Now()
	r.engine.Pass(now)
	r.metrics.passes.Observe(time.Since(started).Seconds())
}

// save stores a Ready and then acknowledges. On failure nothing is acknowledged and nothing else is done, and
// everything is tried again later.
func (r *Runner) save(ctx context.Context, now time.Time, ready Ready, waiters []*waiter) bool {
	err := error(nil)
	if len(ready.RollUps)+len(ready.Records) > 0 {
		if now.Before(r.storeNotBefore) {
			err = errors.New("the state store does not take writes just now")
		} else {
			err = r.write(ctx, ready)
		}
	}
	if err != nil {
		if !now.Before(r.storeNotBefore) {
			r.metrics.storeErrors.Inc()
			r.log.Error(err, "Storing state; nothing is acknowledged or acted on until it succeeds")
			r.storeNotBefore = now.Add(storeRetry)
		}
		r.mu.Lock()
		r.engine.NotStored(ready)
		r.mu.Unlock()
		for _, w := range waiters {
			w.done <- err
		}
		return false
	}
	r.storeNotBefore = time.Time{}
	for _, w := range waiters {
		r.ledger.stored(w.entry)
		w.done <- nil
	}
	return true
}

func (r *Runner) write(ctx context.Context, ready Ready) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(storeConcurrency)
	for _, rollUp := range ready.RollUps {
		group.Go(func() error { return r.store.SaveRollUp(ctx, rollUp) })
	}
	for _, record := range ready.Records {
		group.Go(func() error { return r.store.SaveRecord(ctx, record) })
	}
	return group.Wait()
}

// refusal is a pause in which a cluster's machines are not asked for.
type refusal struct {
	until time.Time
	pause time.Duration
}

// call makes the provider calls and returns when the next one is due that was put off; zero: none was.
func (r *Runner) call(ctx context.Context, now time.Time, calls []Call) (next time.Time) {
	for _, c := range calls {
		refused := r.refusals[c.Cluster]
		if !now.Before(refused.until) {
			if r.accepted(now, c, r.callOne(ctx, c)) {
				delete(r.refusals, c.Cluster)
				continue
			}
			refused.pause = min(max(2*refused.pause, callRetry), callRetryMax)
			refused.until = now.Add(refused.pause)
			r.refusals[c.Cluster] = refused
		}
		if next.IsZero() || refused.until.Before(next) {
			next = refused.until
		}
	}
	return next
}

// accepted tells the engine how a call ended.
func (r *Runner) accepted(now time.Time, c Call, err error) bool {
	result := "accepted"
	if err != nil {
		result = "refused"
	}
	r.metrics.calls.WithLabelValues(c.verb(), result).Inc()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.engine.Accepted(now, c, err)
	return err == nil
}

func (c Call) verb() string {
	if c.Launch {
		return "launch"
	}
	return "terminate"
}

func (r *Runner) callOne(ctx context.Context, c Call) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if c.Launch {
		return r.provider.Launch(ctx, c.Request)
	}
	return r.provider.Terminate(ctx, c.Ref)
}

// publish hands changed feeds to their subscribers.
func (r *Runner) publish(now time.Time, clusters []string) {
	var stock []capacity.Offering
	for _, id := range clusters {
		if r.hub.wanted(id) {
			if stock == nil {
				stock = r.engine.stock(now)
			}
			r.hub.publish(r.engine.feedWith(now, id, stock))
		}
	}
}

// submit takes a roll-up and returns once it is stored. digest identifies its content.
func (r *Runner) submit(ctx context.Context, rollUp *RollUp, digest digest) error {
	w := &waiter{done: make(chan error, 1)}
	r.mu.Lock()
	r.ledger.drain(r.engine.Seen)
	w.entry = r.ledger.enter(rollUp, digest)
	if !r.engine.RollUp(r.clock.Now(), rollUp) {
		r.metrics.rollUps.WithLabelValues("late").Inc()
		r.log.V(1).Info("Ignored a late roll-up", "cluster", rollUp.Cluster, "sequence", rollUp.Sequence)
		w.entry.generation = 0 // not what is stored
	}
	r.waiters = append(r.waiters, w)
	r.mu.Unlock()
	return r.stored(ctx, w, "roll-up")
}

// stored starts a turn and returns once what w waits for is in the store. what names it in the error.
func (r *Runner) stored(ctx context.Context, w *waiter, what string) error {
	r.wake()
	select {
	case err := <-w.done:
		return err
	case <-r.hub.closed:
		return errStopping
	case <-ctx.Done():
		return fmt.Errorf("waiting for the %s to be stored: %w", what, ctx.Err())
	}
}
