package watchgroup

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/wire"
)

// +kubebuilder:rbac:groups=loadbalance.k8s.io,resources=watchgroups,verbs=list;watch;patch
// +kubebuilder:rbac:groups=loadbalance.k8s.io,resources=watchgroups/status,verbs=patch
// +kubebuilder:rbac:groups=loadbalance.k8s.io,resources=virtualnodeslices,verbs=create;delete;list;update;watch
// +kubebuilder:rbac:groups=coordination.k8s.io,resources=leases,verbs=create;delete;get;list;update;watch
// +kubebuilder:rbac:groups="",resources=pods,verbs=list;watch
// +kubebuilder:rbac:groups=events.k8s.io,resources=events,verbs=create;patch

// Reconciler is the coordinator of all WatchGroups. At most one process runs it at a time, by leader election; that two do
// for a moment does no harm (see sharding.Coordinator).
type Reconciler struct {
	// Client reads from a cache and writes.
	Client client.Client
	// Live reads from the API server.
	Live     client.Reader
	Recorder events.EventRecorder
	Metrics  *Metrics
	// Backfill tells what objects carry no label; nil where there is no backfill.
	Backfill *Backfill
	// Now reads a monotonic clock.
	Now func() sharding.Instant

	mu       sync.Mutex
	trackers map[types.NamespacedName]*tracker
}

var _ reconcile.Reconciler = &Reconciler{}

// maxConflicts is how often in a row a group is looked at again at once because somebody else has written its slices. More
// of them are another coordinator's, and one of the two has to wait.
const maxConflicts = 3

// MonotonicClock returns a clock that starts now and that no change of the wall clock moves.
func MonotonicClock() func() sharding.Instant {
	start := time.Now()
	return func() sharding.Instant { return time.Since(start) }
}

// tracker returns what is remembered of a group.
func (r *Reconciler) tracker(key types.NamespacedName) *tracker {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.trackers == nil {
		r.trackers = make(map[types.NamespacedName]*tracker)
	}
	t := r.trackers[key]
	if t == nil {
		t = newTracker()
		r.trackers[key] = t
	}
	return t
}

func (r *Reconciler) forget(key types.NamespacedName) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.trackers, key)
	r.Metrics.forget(key)
}

// Reconcile takes a group as far as it gets until a member acts, or members change, and writes down what it saw.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	group := &lbv1alpha1.WatchGroup{}
	if err := r.Client.Get(ctx, req.NamespacedName, group); err != nil {
		if client.IgnoreNotFound(err) == nil {
			r.forget(req.NamespacedName)
		}
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if group.DeletionTimestamp == nil {
		if why, err := r.refusal(ctx, group); err != nil || why != nil {
			return ctrl.Result{}, errors.Join(err, r.reportRefusal(ctx, group, why))
		}
	}
	if group.DeletionTimestamp == nil && !controllerutil.ContainsFinalizer(group, lbv1alpha1.Finalizer) {
		before := group.DeepCopy()
		controllerutil.AddFinalizer(group, lbv1alpha1.Finalizer)
		if err := r.Client.Patch(ctx, group, client.MergeFrom(before)); err != nil {
			return ctrl.Result{}, fmt.Errorf("protecting WatchGroup %s: %w", req, err)
		}
	}
	t := r.tracker(req.NamespacedName)
	v, err := r.step(ctx, group, t)
	if unreadable := (*sliceError)(nil); errors.As(err, &unreadable) {
		return ctrl.Result{}, errors.Join(err, r.reportRefusal(ctx, group, &refusal{lbv1alpha1.ReasonInvalid, err.Error()}))
	}
	if err != nil {
		return ctrl.Result{}, err
	}
	if err := r.collectLeases(ctx, group, t, v); err != nil {
		return ctrl.Result{}, err
	}
	if group.DeletionTimestamp != nil {
		if done, err := r.dissolve(ctx, group, v); done || err != nil {
			return ctrl.Result{}, err
		}
	}
	if err := r.report(ctx, group, t, v); err != nil {
		return ctrl.Result{}, err
	}
	return ctrl.Result{RequeueAfter: v.timer.next}, nil
}

// step makes the core's writes until it wants none, and returns what it saw last.
func (r *Reconciler) step(ctx context.Context, group *lbv1alpha1.WatchGroup, t *tracker) (*view, error) {
	for conflicts := 0; ; {
		c, err := wire.Coordinator(t.claim, group.Spec)
		if err != nil {
			return nil, err
		}
		v, err := r.observe(ctx, group, t)
		if err != nil {
			return nil, err
		}
		writes := c.Step(v.observation)
		foreign := slices.ContainsFunc(v.observation.Slices, func(s sharding.Slice) bool { return s.Claim != t.claim })
		if until := t.yield(foreign, v.timer.now); until > v.timer.now {
			v.timer.at(until)
			return v, nil
		}
		if len(writes) == 0 {
			return v, nil
		}
		log.FromContext(ctx).V(1).Info("Moving Virtual Nodes", "writes", len(writes), "epoch", writes[0].Slice.Epoch)
		err = r.apply(ctx, group, t, v, writes)
		switch {
		case errors.Is(err, errUnknown):
			// It may land at any time: nothing may be decided under the same claim as if it had not.
			t.renameClaim()
			return nil, err
		case apierrors.IsConflict(err) && conflicts < maxConflicts:
			// A member has written its status meanwhile. That is how things go on, and no reason to wait.
			conflicts++
		case err != nil:
			return nil, err
		default:
			conflicts = 0
		}
	}
}

// dissolve ends a group that is being deleted once no member of it runs; until then it goes on as ever.
func (r *Reconciler) dissolve(ctx context.Context, group *lbv1alpha1.WatchGroup, v *view) (bool, error) {
	for _, s := range v.states {
		if s.Session != "" {
			return false, nil
		}
	}
	for member, s := range v.slices {
		if mayWork(s) {
			return false, nil
		}
		if err := r.remove(ctx, v.objects[member]); err != nil {
			return false, fmt.Errorf("deleting the slice of member %s: %w", member, err)
		}
	}
	before := group.DeepCopy()
	if controllerutil.RemoveFinalizer(group, lbv1alpha1.Finalizer) {
		if err := r.Client.Patch(ctx, group, client.MergeFrom(before)); client.IgnoreNotFound(err) != nil {
			return false, fmt.Errorf("releasing WatchGroup %s/%s: %w", group.Namespace, group.Name, err)
		}
	}
	return true, nil
}
