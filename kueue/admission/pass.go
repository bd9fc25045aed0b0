package admission

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
)

// maxMessage is what Kueue's schema and an Event's note allow at once.
const maxMessage = 1000

// Pass decides every waiting workload of every check at once, in the order of the queue: only so do many workloads share one
// hint without two of them counting on the same nodes. It is a reconciler with a single key.
type Pass struct {
	client   client.Client
	recorder events.EventRecorder
	opts     Options
	metrics  *Metrics

	mu     sync.Mutex // of what follows; taken after the claims' lock
	ledger *Ledger
	// written are workloads as they were written last, while the cache may not show it.
	written map[types.UID]written
	// catalog are the names of the hints of the last pass, and shrunk is when one of them was seen to be gone.
	catalog map[string]bool
	shrunk  time.Time
}

var _ reconcile.Reconciler = &Pass{}

// written is a workload after our writes, and the versions that these were made over.
type written struct {
	over   []string
	object *kueue.Workload
}

// item is one workload before one check.
type item struct {
	object *kueue.Workload
	check  string
	state  *kueue.AdmissionCheckState
	w      Workload
}

// promise reads what the workload was promised when it passed the check; made is false where that was nothing.
func (it *item) promise() (nodes map[string]int32, made bool) {
	if it.state.State != kueue.CheckStateReady {
		return nil, false
	}
	return readPromise(it.state.PodSetUpdates, it.check)
}

// since is when the state was set.
func (it *item) since() time.Time { return it.state.LastTransitionTime.Time }

// until is when a promise of the workload lapses.
func (it *item) until() time.Time { return it.since().Add(it.w.Config.PromiseTimeout.Duration) }

// PromisedNodes is how many nodes are promised, by offering.
func (p *Pass) PromisedNodes() map[string]int32 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ledger.Totals()
}

// reset forgets everything, as a restart does: what was promised is read back from the workloads. What another member has
// settled meanwhile must not be settled again by what was seen before its turn.
func (p *Pass) reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ledger = NewLedger()
	p.written = map[types.UID]written{}
	p.catalog, p.shrunk = nil, time.Time{}
	p.metrics.show(p.ledger, nil, nil)
}

// Reconcile implements reconcile.Reconciler. What goes wrong with one workload or one check is reported, and keeps nobody
// else waiting.
func (p *Pass) Reconcile(ctx context.Context, _ ctrl.Request) (ctrl.Result, error) {
	p.opts.Claims.Lock()
	defer p.opts.Claims.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.opts.Clock.Now()
	c, err := p.read(ctx)
	if err != nil {
		return ctrl.Result{}, err
	}
	p.ledger.Observe(c.hints, c.upcoming)
	p.compare(c.hints, now)
	next := sooner(time.Time{}, p.ledger.Expire(now))

	var errs []error
	for _, check := range c.checks {
		until, err := p.keepActive(ctx, check, c.hints, now)
		errs = append(errs, err)
		next = sooner(next, until)
	}
	q, err := p.queue(ctx, c)
	if err != nil {
		return ctrl.Result{}, err
	}
	again, err := p.comeBack(ctx, now)
	errs = append(errs, err)
	next = sooner(next, again)

	room, err := p.room(ctx, c, q, now)
	if err != nil {
		return ctrl.Result{}, err
	}
	others, err := p.opts.Claims.Others(ctx, claimant)
	if err != nil {
		return ctrl.Result{}, err
	}
	for _, h := range others {
		room.nodes.Hold(h)
	}
	p.ledger.Keep(q.live())
	for _, it := range q.settled {
		p.settle(it, room, now)
		errs = append(errs, p.forgive(ctx, it))
		if _, made := it.promise(); made && it.until().After(now) {
			next = sooner(next, it.until()) // what is held for it ends then, also when nothing happens
		}
	}
	errs = append(errs, p.tidyRequests(ctx, c, room, q, now))

	world := World{
		Hints: c.hints, Shrunk: p.shrunk, Nodes: c.shapes(), Room: room.nodes, Ledger: p.ledger, Now: now, Random: p.opts.Random,
	}
	for _, it := range q.waiting {
		d, err := p.decide(ctx, c, it, world, room)
		errs = append(errs, err, p.write(ctx, it, d, now))
		if d.State == kueue.CheckStatePending {
			next = sooner(next, now.Add(it.w.Config.CheckPeriod.Duration))
			next = sooner(next, it.w.Reserved.Add(it.w.Config.Timeout.Duration))
			if t := world.settledAt(); t.After(now) {
				next = sooner(next, t)
			}
		}
	}
	p.metrics.show(p.ledger, c.hints, q.counts())
	if err := errors.Join(errs...); err != nil {
		return ctrl.Result{}, err
	}
	if next.IsZero() {
		return ctrl.Result{}, nil
	}
	return ctrl.Result{RequeueAfter: max(next.Sub(now), 10*time.Millisecond)}, nil
}

// compare notes whether a hint has gone since the last pass.
func (p *Pass) compare(hints []Hint, now time.Time) {
	catalog := map[string]bool{}
	for i := range hints {
		catalog[hints[i].Name] = true
	}
	for name := range p.catalog {
		if !catalog[name] {
			p.shrunk = now
		}
	}
	p.catalog = catalog
}

// queue is who is before a check.
type queue struct {
	// waiting are those to decide, in their order; settled those that passed.
	waiting, settled []*item
}

func (p *Pass) queue(ctx context.Context, c *cluster) (*queue, error) {
	q := &queue{}
	behind := map[types.UID]written{}
	for _, check := range c.checks {
		items, err := p.items(ctx, c, check, behind)
		if err != nil {
			return nil, err
		}
		for _, it := range items {
			switch it.state.State {
			case kueue.CheckStatePending:
				q.waiting = append(q.waiting, it)
			case kueue.CheckStateReady:
				q.settled = append(q.settled, it)
			}
		}
	}
	p.written = behind
	slices.SortStableFunc(q.waiting, func(a, b *item) int {
		return cmp.Or(cmp.Compare(b.w.Priority, a.w.Priority), a.w.Queued.Compare(b.w.Queued), cmp.Compare(a.w.Name, b.w.Name))
	})
	return q, nil
}

func (q *queue) live() map[string]bool {
	live := map[string]bool{}
	for _, it := range slices.Concat(q.waiting, q.settled) {
		live[it.w.Key] = true
	}
	return live
}

func (q *queue) counts() map[string]int {
	counts := map[string]int{}
	for _, it := range q.waiting {
		counts[it.check]++
	}
	return counts
}

// settle follows a promise whose workload has passed the check. What the ledger does not know is read back from the
// workload.
func (p *Pass) settle(it *item, room *room, now time.Time) {
	key := it.w.Key
	if known, ok := p.ledger.Get(key); !ok || known.Since.Unix() != it.since().Unix() {
		if nodes, _ := it.promise(); len(nodes) > 0 && it.until().After(now) {
			p.ledger.Promise(Promise{Key: key, Nodes: nodes, Since: it.since(), Until: it.until()})
		}
	}
	if room.arrived(it) {
		p.ledger.End(key)
	}
	if apimeta.IsStatusConditionTrue(it.object.Status.Conditions, kueue.WorkloadAdmitted) {
		p.ledger.Admitted(key)
	}
}

func (p *Pass) decide(ctx context.Context, c *cluster, it *item, world World, room *room) (d Decision, err error) {
	switch check := c.check(it.check); {
	case it.w.Running:
		d, _ = trivial(&it.w) // whatever is wrong with the check, it is not the workload's to pay for
	case check.problem != "":
		d = wait(&it.w, world, reasonBadParameters, "the admission check is not active: "+check.problem)
	case it.w.Config.Mode == fleetv1alpha1.CapacityCheckProvision:
		d, err = p.provision(ctx, c, it, world, room)
	default:
		d = Decide(&it.w, world)
	}
	if d.State != kueue.CheckStateReady || len(d.Nodes) == 0 {
		p.ledger.Release(it.w.Key)
	} else {
		p.ledger.Promise(Promise{
			Key: it.w.Key, Nodes: d.Nodes, Since: world.Now, Until: world.Now.Add(it.w.Config.PromiseTimeout.Duration),
		})
	}
	if d.State == kueue.CheckStateReady && !it.w.Running {
		d.Updates = writePromise(d.Updates, it.check, &it.w, d.Nodes)
	}
	return d, err
}

// write puts the decision into the workload's status, if it says anything new. A workload that has changed meanwhile is left
// alone: its change brings the next pass.
func (p *Pass) write(ctx context.Context, it *item, d Decision, now time.Time) error {
	if len(d.Message) > maxMessage {
		d.Message = strings.ToValidUTF8(d.Message[:maxMessage], "")
	}
	if it.state.State == d.State && it.state.Message == d.Message {
		return nil
	}
	after := it.object.DeepCopy()
	for i := range after.Status.AdmissionChecks {
		s := &after.Status.AdmissionChecks[i]
		if string(s.Name) != it.check {
			continue
		}
		// A Retry leaves the state alone: see sendBack.
		if s.State != d.State && d.State != kueue.CheckStateRetry {
			s.State, s.LastTransitionTime = d.State, metav1.NewTime(now)
		}
		s.Message, s.PodSetUpdates, s.RequeueAfterSeconds = d.Message, d.Updates, nil
	}
	over := []string{it.object.ResourceVersion}
	patch := client.MergeFromWithOptions(it.object, client.MergeFromWithOptimisticLock{})
	var err error
	if d.State == kueue.CheckStateRetry && saidBefore(it.state.Message, d.Message) {
		after = it.object // the switch was refused before; a new pause is no news, and would wake the next pass at once
	} else {
		err = p.client.Status().Patch(ctx, after, patch, client.FieldOwner(ControllerName))
	}
	if err == nil && d.State == kueue.CheckStateRetry {
		over = append(over, after.ResourceVersion)
		after, err = p.sendBack(ctx, after, d, it.w.Retries+1, now)
	}
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("writing check %s of workload %s: %w", it.check, it.w.Name, err)
	}
	p.written[after.UID] = written{over: over, object: after}
	p.metrics.Decisions.WithLabelValues(it.check, string(d.State), d.Reason).Inc()
	if d.State == kueue.CheckStateReady {
		p.metrics.Wait.WithLabelValues(it.check).Observe(now.Sub(it.w.Reserved).Seconds())
	}
	kind := corev1.EventTypeNormal
	if d.State == kueue.CheckStateRetry || d.State == kueue.CheckStateRejected {
		kind = corev1.EventTypeWarning
	}
	p.recorder.Eventf(after, nil, kind, d.Reason, "AdmissionCheck"+string(d.State), "%s: %s", it.check, d.Message)
	return nil
}

// saidBefore says whether two messages of a workload that is sent back differ in the pause only.
func saidBefore(have, want string) bool {
	have, sent, _ := strings.Cut(have, pauseText)
	want, _, _ = strings.Cut(want, pauseText)
	return have == want && sent != ""
}

func sooner(a, b time.Time) time.Time {
	if a.IsZero() || (!b.IsZero() && b.Before(a)) {
		return b
	}
	return a
}
