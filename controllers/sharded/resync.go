package sharded

import (
	"context"
	"fmt"
	"sync"
	"time"

	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/priorityqueue"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/drover-sh/drover/sharding"
)

// Resync is when objects are reconciled that nothing happens to.
type Resync struct {
	// Period is how often each object is. It is a whole number of slices; zero means 10 hours, as in controller-runtime,
	// and less than zero never.
	Period time.Duration
	// Tick is how often the objects are enqueued that are due; zero means a minute, or Slice if that is shorter. It bounds
	// how late one is.
	Tick time.Duration
	// Slice is how finely the period is divided: the objects of a slice are due together. It is whole seconds; zero
	// means a minute.
	Slice time.Duration
}

const (
	defaultResyncPeriod = 10 * time.Hour
	defaultResyncTick   = time.Minute
	defaultResyncSlice  = time.Minute
)

func (r Resync) withDefaults() Resync {
	if r.Period == 0 {
		r.Period = defaultResyncPeriod
	}
	if r.Slice == 0 {
		r.Slice = defaultResyncSlice
	}
	if r.Tick == 0 {
		r.Tick = min(defaultResyncTick, max(r.Slice, time.Second))
	}
	return r
}

func (r Resync) validate(field string) error {
	if r.Period < 0 {
		return nil
	}
	if r.Tick < 0 {
		return fmt.Errorf("%s.tick: %s is negative", field, r.Tick)
	}
	return r.slicing().Validate(field)
}

func (r Resync) slicing() sharding.Resync { return sharding.Resync{Period: r.Period, Slice: r.Slice} }

// resyncs enqueue, at each tick and at low priority, the served objects whose slice has come, instead of all at once. An
// object that changes hands keeps its slice, since every member computes the same.
type resyncs struct {
	member *member
	when   Resync
	clock  clock.WithTicker

	mu     sync.Mutex
	queues []resyncQueue
	last   time.Time
}

type resyncQueue struct {
	kind  *kind
	queue workqueue.TypedRateLimitingInterface[reconcile.Request]
}

func (r *resyncs) add(k *kind, q workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.queues = append(r.queues, resyncQueue{k, q})
	return nil
}

// run ticks until ctx is done.
func (r *resyncs) run(ctx context.Context) {
	if r.when.Period < 0 {
		return
	}
	r.tick(r.clock.Now())
	ticker := r.clock.NewTicker(r.when.Tick)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C():
			r.tick(r.clock.Now())
		}
	}
}

func (r *resyncs) tick(now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	due := r.when.slicing().Tick(r.last, now)
	for _, q := range r.queues {
		for _, key := range r.member.served(q.kind) {
			if due.Has(key) {
				enqueueLow(q.queue, key)
			}
		}
	}
	r.last = due.Done(r.last)
}

// served returns the keys of the objects of a kind that the member serves.
func (e *member) served(k *kind) []string {
	e.mu.RLock()
	defer e.mu.RUnlock()
	var keys []string
	for _, obj := range k.store.within(e.ready) {
		keys = append(keys, keyOf(client.ObjectKeyFromObject(obj)))
	}
	return keys
}

// enqueueLow adds a request behind everything that something has happened to. A queue without priorities takes it as any.
func enqueueLow(q workqueue.TypedRateLimitingInterface[reconcile.Request], key string) {
	namespace, name, err := toolscache.SplitMetaNamespaceKey(key)
	if err != nil {
		return
	}
	req := reconcile.Request{NamespacedName: client.ObjectKey{Namespace: namespace, Name: name}}
	if p, ok := q.(priorityqueue.PriorityQueue[reconcile.Request]); ok {
		low := handler.LowPriority
		p.AddWithOpts(priorityqueue.AddOpts{Priority: &low}, req)
		return
	}
	q.Add(req)
}
