package rollup

import (
	"context"
	"sync"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
)

// acknowledger writes phase Acknowledged on requests that a roll-up carried, once each, beside the sends. What it has to
// do is a set of requests that exist, so it cannot outgrow the cluster; what it loses in a restart is Pending still and
// comes back with the next send.
type acknowledger struct {
	client      client.Client
	demand      *demand
	concurrency int
	metrics     *Metrics
	log         logr.Logger

	queue workqueue.TypedRateLimitingInterface[requestKey]

	mu sync.Mutex
	// written are requests whose patch the API server took and the informer has not shown yet.
	written map[requestKey]bool
}

func newAcknowledger(c client.Client, d *demand, concurrency int, m *Metrics, log logr.Logger) *acknowledger {
	return &acknowledger{
		client: c, demand: d, concurrency: concurrency, metrics: m, log: log,
		written: map[requestKey]bool{},
		queue: workqueue.NewTypedRateLimitingQueue(
			workqueue.NewTypedItemExponentialFailureRateLimiter[requestKey](50*time.Millisecond, 30*time.Second)),
	}
}

// add takes the requests that a successful send carried.
func (a *acknowledger) add(included []requestKey) {
	a.mu.Lock()
	for key := range a.written {
		if !a.demand.waits(key) {
			delete(a.written, key)
		}
	}
	a.mu.Unlock()
	for _, key := range included {
		a.queue.Add(key)
	}
}

// Start implements manager.Runnable.
func (a *acknowledger) Start(ctx context.Context) error {
	var workers sync.WaitGroup
	for range a.concurrency {
		workers.Go(func() {
			for a.work(ctx) {
			}
		})
	}
	<-ctx.Done()
	a.queue.ShutDown()
	workers.Wait()
	return nil
}

func (a *acknowledger) work(ctx context.Context) bool {
	key, shutdown := a.queue.Get()
	if shutdown {
		return false
	}
	defer a.queue.Done(key)
	if ctx.Err() != nil {
		return false
	}
	err := a.acknowledge(ctx, key)
	switch {
	case err == nil:
		a.queue.Forget(key)
	case ctx.Err() != nil:
		return false
	default:
		a.metrics.Acknowledgements.WithLabelValues(resultError).Inc()
		a.log.V(1).Info("Acknowledging failed; it is tried again",
			"capacityRequest", key.NamespacedName, "error", err.Error())
		a.queue.AddRateLimited(key)
	}
	return true
}

func (a *acknowledger) acknowledge(ctx context.Context, key requestKey) error {
	if !a.demand.waits(key) || a.isWritten(key) {
		return nil
	}
	cr := &fleetv1alpha1.CapacityRequest{}
	cr.Namespace, cr.Name = key.Namespace, key.Name
	err := a.client.Status().Patch(ctx, cr, acknowledgePatch(key.uid))
	switch {
	case err == nil:
		a.mu.Lock()
		a.written[key] = true
		a.mu.Unlock()
		a.metrics.Acknowledgements.WithLabelValues(resultSuccess).Inc()
		return nil
	case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		// Gone, or another object under that name: the informer tells of that one.
		return nil
	default:
		return err
	}
}

func (a *acknowledger) isWritten(key requestKey) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.written[key]
}

// acknowledgePatch moves the phase forward, of the object with this UID only.
func acknowledgePatch(uid types.UID) client.Patch {
	return client.RawPatch(types.MergePatchType,
		[]byte(`{"metadata":{"uid":"`+string(uid)+`"},"status":{"phase":"`+string(fleetv1alpha1.CapacityRequestAcknowledged)+`"}}`))
}
