package admission

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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

	mu      sync.Mutex // of the ledger, which PromisedNodes reads
	ledger  *Ledger
	rebuilt bool
}

var _ reconcile.Reconciler = &Pass{}

// item is one workload before one check.
type item struct {
	object *kueue.Workload
	check  string
	state  *kueue.AdmissionCheckState
	w      Workload
}

// PromisedNodes is how many nodes are promised, by offering.
func (p *Pass) PromisedNodes() map[string]int32 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ledger.Totals()
}

// Reconcile implements reconcile.Reconciler.
func (p *Pass) Reconcile(ctx context.Context, _ ctrl.Request) (ctrl.Result, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.opts.Clock.Now()
	c, err := p.read(ctx)
	if err != nil {
		return ctrl.Result{}, err
	}
	p.ledger.Observe(c.hints)
	next := sooner(time.Time{}, p.ledger.Expire(now))

	var waiting, settled []*item
	live := map[string]bool{}
	counts := map[string]int{}
	for _, check := range c.checks {
		until, err := p.keepActive(ctx, check, c.hints, now)
		if err != nil {
			return ctrl.Result{}, err
		}
		next = sooner(next, until)
		items, err := p.items(ctx, c, check)
		if err != nil {
			return ctrl.Result{}, err
		}
		for _, it := range items {
			live[it.w.Key] = true
			switch it.state.State {
			case kueue.CheckStatePending:
				waiting = append(waiting, it)
				counts[it.check]++
			case kueue.CheckStateReady:
				settled = append(settled, it)
			}
		}
	}
	again, err := p.comeBack(ctx, now)
	if err != nil {
		return ctrl.Result{}, err
	}
	next = sooner(next, again)
	for _, key := range p.ledger.Keys() {
		if !live[key] {
			p.ledger.Release(key)
		}
	}
	for _, it := range settled {
		p.settle(it, now)
	}
	p.rebuilt = true

	world := World{Hints: c.hints, Nodes: c.shapes(), Ledger: p.ledger, Now: now, Random: p.opts.Random}
	room, err := p.room(ctx, c, waiting, settled)
	if err != nil {
		return ctrl.Result{}, err
	}
	if err := p.tidyRequests(ctx, c, room, slices.Concat(waiting, settled), now); err != nil {
		return ctrl.Result{}, err
	}
	slices.SortStableFunc(waiting, func(a, b *item) int {
		return cmp.Or(cmp.Compare(b.w.Priority, a.w.Priority), a.w.Queued.Compare(b.w.Queued), cmp.Compare(a.w.Name, b.w.Name))
	})
	for _, it := range waiting {
		d, err := p.decide(ctx, c, it, world, room)
		if err != nil {
			return ctrl.Result{}, err
		}
		if err := p.write(ctx, it, d, now); err != nil {
			return ctrl.Result{}, err
		}
		if d.State == kueue.CheckStatePending {
			next = sooner(next, now.Add(it.w.Config.CheckPeriod.Duration))
			next = sooner(next, it.w.Reserved.Add(it.w.Config.Timeout.Duration))
		}
	}
	p.metrics.show(p.ledger, c.hints, counts)
	if next.IsZero() {
		return ctrl.Result{}, nil
	}
	return ctrl.Result{RequeueAfter: max(next.Sub(now), 10*time.Millisecond)}, nil
}

// settle follows a promise whose workload has passed the check.
func (p *Pass) settle(it *item, now time.Time) {
	key := it.w.Key
	since := it.state.LastTransitionTime.Time
	if !p.rebuilt {
		nodes := readPromise(it.state.PodSetUpdates, it.check)
		until := since.Add(it.w.Config.PromiseTimeout.Duration)
		if len(nodes) > 0 && until.After(now) {
			p.ledger.Promise(Promise{Key: key, Nodes: nodes, Since: since, Until: until})
		}
	}
	if apimeta.IsStatusConditionTrue(it.object.Status.Conditions, kueue.WorkloadPodsReady) {
		p.ledger.Release(key)
	}
	if apimeta.IsStatusConditionTrue(it.object.Status.Conditions, kueue.WorkloadAdmitted) {
		p.ledger.Admitted(key)
	}
}

func (p *Pass) decide(ctx context.Context, c *cluster, it *item, world World, room *room) (Decision, error) {
	if check := c.check(it.check); check.problem != "" {
		p.ledger.Release(it.w.Key)
		return Decision{State: kueue.CheckStatePending, Reason: reasonBadParameters,
			Message: "the admission check is not active: " + check.problem}, nil
	}
	if it.w.Config.Mode == fleetv1alpha1.CapacityCheckProvision {
		p.ledger.Release(it.w.Key)
		return p.provision(ctx, c, it, world, room)
	}
	d := Decide(&it.w, world)
	if d.State != kueue.CheckStateReady || len(d.Nodes) == 0 {
		p.ledger.Release(it.w.Key)
		return d, nil
	}
	p.ledger.Promise(Promise{
		Key: it.w.Key, Nodes: maps.Clone(d.Nodes), Since: world.Now,
		Until: world.Now.Add(it.w.Config.PromiseTimeout.Duration),
	})
	d.Updates = writePromise(d.Updates, it.check, it.w.PodSets[0].Name, d.Nodes)
	return d, nil
}

// write puts the decision into the workload's status, if it says anything new. A workload that has changed meanwhile is left
// alone: its change brings the next pass.
func (p *Pass) write(ctx context.Context, it *item, d Decision, now time.Time) error {
	if len(d.Message) > maxMessage {
		d.Message = d.Message[:maxMessage]
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
	patch := client.MergeFromWithOptions(it.object, client.MergeFromWithOptimisticLock{})
	err := p.client.Status().Patch(ctx, after, patch, client.FieldOwner(ControllerName))
	if err == nil && d.State == kueue.CheckStateRetry {
		err = p.sendBack(ctx, after, d, it.w.Retries+1, now)
	}
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("writing check %s of workload %s: %w", it.check, it.w.Name, err)
	}
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

func sooner(a, b time.Time) time.Time {
	if a.IsZero() || (!b.IsZero() && b.Before(a)) {
		return b
	}
	return a
}
