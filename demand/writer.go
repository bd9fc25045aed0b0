package demand

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"golang.org/x/time/rate"

	"github.com/drover-sh/drover/capacity"
)

// Options configure a Writer. Its functions are called in the writer's goroutines and read caches only.
type Options struct {
	// Source names the caller in logs, metrics and events: "scheduler", "backstop". Required.
	Source string
	// Requests writes CapacityRequests. Required.
	Requests Requests
	// Events puts warnings on pods; nil: none are written.
	Events Events
	// Decide says whether a new node could help a pod that failed for these reasons. Default: always.
	Decide func(*corev1.Pod, []capacity.Rejection) capacity.Decision
	// Describe says what a pod needs of a node. Default capacity.ProfileOfPod.
	Describe func(*corev1.Pod) capacity.Profile
	// Pending says whether the pod, by its UID, still exists and has no node. It reads a cache. Default: always.
	Pending func(*corev1.Pod) bool
	// Suppressor holds requests back for which an upcoming node has room. Nil where demand is the total.
	Suppressor *Suppressor

	// QPS and Burst bound the writes. Defaults 200 and 400.
	QPS   float64
	Burst int
	// Yield is for a writer that shares its processors with the loop that finds the failures. While failures are asked about
	// (Settled) less than Yield apart, the writer takes a quarter of QPS and no burst, and makes up for it afterwards: a
	// write costs about as much CPU as a tenth of a scheduling attempt, and the loop is what everybody waits for. Default 0:
	// the writer never yields.
	Yield time.Duration
	// Workers bounds the writes under way at once. Default 16.
	Workers int
	// Timeout of one write. Default 10s.
	Timeout time.Duration
	// RewritePeriod is how long a written request is taken for granted. Default 10m.
	RewritePeriod time.Duration
	// BackoffBase and BackoffMax bound the delay between tries. Defaults 200ms and 1m.
	BackoffBase, BackoffMax time.Duration
	// DrainTimeout bounds how long Run goes on with what is queued after its context ended. Default 5s.
	DrainTimeout time.Duration

	Clock  clock.WithTicker
	Logger klog.Logger
}

func (o *Options) setDefaults() error {
	if o.Source == "" || o.Requests == nil {
		return errors.New("demand: Source and Requests are required")
	}
	if o.Decide == nil {
		o.Decide = func(*corev1.Pod, []capacity.Rejection) capacity.Decision {
			return capacity.Decision{Request: true, Reason: capacity.ReasonNewNodeHelps}
		}
	}
	if o.Describe == nil {
		o.Describe = capacity.ProfileOfPod
	}
	if o.Pending == nil {
		o.Pending = func(*corev1.Pod) bool { return true }
	}
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	setDefault(&o.QPS, 200)
	setDefault(&o.Burst, 400)
	setDefault(&o.Workers, 16)
	setDefault(&o.Timeout, 10*time.Second)
	setDefault(&o.RewritePeriod, 10*time.Minute)
	setDefault(&o.BackoffBase, 200*time.Millisecond)
	setDefault(&o.BackoffMax, time.Minute)
	setDefault(&o.DrainTimeout, 5*time.Second)
	return nil
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// Writer turns pods that failed to schedule into CapacityRequests, one per pod UID. Make one with NewWriter, start it with
// Run. All methods may be called at any time from any goroutine; none but Run blocks.
type Writer struct {
	opts    Options
	queue   workqueue.TypedRateLimitingInterface[types.UID]
	limiter *rate.Limiter
	// yielding limits beside limiter while the loop is at work.
	yielding *rate.Limiter
	// asked is when Settled was called last, in nanoseconds of the Clock.
	asked atomic.Int64

	mu   sync.Mutex
	pods map[types.UID]*podState
}

// podState is what the Writer remembers of a pending pod.
type podState struct {
	// pod and rejections as handed over last. They are let go of when nothing more can come of them.
	pod        *corev1.Pod
	rejections []capacity.Rejection
	since      time.Time // of the failure that is not dealt with yet

	// wanted: the pod waits for the writer.
	wanted bool
	// refused: the last decision was that no node helps.
	refused bool
	// written is when the request was last known to be right, for the pod's generation; zero: never.
	written    time.Time
	generation int64
	// handed counts what was handed over, so that the outcome of a write is not taken for that of a later one.
	handed int
	// warned are the reasons of the events that the pod has.
	warned map[string]struct{}
}

// yieldShare is what a writer that yields leaves to the loop: all but one in yieldShare of its writes.
const yieldShare = 4

// maxWarnings bounds the different warnings that one pod can get in its life.
const maxWarnings = 8

// NewWriter returns a Writer that does nothing until Run. The error says which option is missing.
func NewWriter(opts Options) (*Writer, error) {
	if err := opts.setDefaults(); err != nil {
		return nil, err
	}
	backoff := workqueue.NewTypedItemExponentialFailureRateLimiter[types.UID](opts.BackoffBase, opts.BackoffMax)
	return &Writer{
		opts: opts,
		queue: workqueue.NewTypedRateLimitingQueueWithConfig(backoff,
			workqueue.TypedRateLimitingQueueConfig[types.UID]{Clock: opts.Clock}),
		limiter:  rate.NewLimiter(rate.Limit(opts.QPS), opts.Burst),
		yielding: rate.NewLimiter(rate.Limit(opts.QPS/yieldShare), 1),
		pods:     map[types.UID]*podState{},
	}, nil
}

// Settled reports whether the pod's request is written, or about to be, for the pod as it is. A caller that gets true needs
// to do nothing. It costs one map access, so that it can be asked at every scheduling attempt, and should be: a writer that
// yields (Options.Yield) learns from it that the loop is at work.
func (w *Writer) Settled(pod *corev1.Pod) bool {
	if w.opts.Yield > 0 {
		w.asked.Store(w.opts.Clock.Now().UnixNano())
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.pods[pod.UID]
	return s != nil && w.settled(s, pod)
}

func (w *Writer) settled(s *podState, pod *corev1.Pod) bool {
	if s.generation != pod.Generation {
		return false
	}
	return s.wanted || !s.written.IsZero() && w.opts.Clock.Since(s.written) < w.opts.RewritePeriod
}

// Enqueue hands over a pod that failed to schedule, with what the scheduler objected to, if known. It does nothing where the
// pod is settled. The pod is not changed and must not be changed by the caller afterwards: objects of an informer's cache
// are right.
//
// If no node can help the pod, it gets one event for each reason, whatever the number of calls; a request that exists stays,
// because it was right when it was written.
func (w *Writer) Enqueue(pod *corev1.Pod, rejections []capacity.Rejection) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.pods[pod.UID]
	if s == nil {
		s = &podState{}
		w.pods[pod.UID] = s
	}
	if w.settled(s, pod) {
		return
	}
	s.pod, s.rejections, s.generation, s.wanted = pod, rejections, pod.Generation, true
	s.handed++
	if s.since.IsZero() {
		s.since = w.opts.Clock.Now()
	}
	w.queue.Add(pod.UID)
	w.observe()
}

// Verify has the pod's request compared with the pod again, because something around the pod has changed that the request
// tells, as its group. It does nothing for a pod whose request is not written: that is yet to come.
func (w *Writer) Verify(pod *corev1.Pod) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.pods[pod.UID]
	if s == nil || s.written.IsZero() && !s.wanted {
		return
	}
	// A write that is under way may have read the old state: it does not count.
	s.pod, s.generation, s.wanted, s.written = pod, pod.Generation, true, time.Time{}
	s.handed++
	w.queue.Add(pod.UID)
	w.observe()
}

// Recheck decides again on every pod that no node could help, because what can be had has changed.
func (w *Writer) Recheck() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for uid, s := range w.pods {
		if s.refused && s.pod != nil {
			s.wanted = true
			s.handed++
			w.queue.Add(uid)
		}
	}
	w.observe()
}

// Suppressor returns the writer's Suppressor; nil where demand is the total.
func (w *Writer) Suppressor() *Suppressor { return w.opts.Suppressor }

// Forget drops what is known of a pod that is gone, or has a node. A write under way is not stopped; the request goes with
// the pod that owns it.
func (w *Writer) Forget(uid types.UID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, known := w.pods[uid]; !known {
		return
	}
	delete(w.pods, uid)
	w.queue.Forget(uid)
	if w.opts.Suppressor != nil {
		w.opts.Suppressor.Release(uid)
	}
	w.observe()
}

func (w *Writer) observe() {
	tracked.WithLabelValues(w.opts.Source).Set(float64(len(w.pods)))
	depth.WithLabelValues(w.opts.Source).Set(float64(w.queue.Len()))
}

// Run writes until ctx ends, then goes on with what is queued for at most DrainTimeout, and returns. It may be called once.
func (w *Writer) Run(ctx context.Context) {
	// The work's context outlives ctx by the drain, and a scheduling cycle's context never reaches here at all.
	work, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()

	var workers sync.WaitGroup
	for range w.opts.Workers {
		workers.Go(func() {
			for w.next(work) {
			}
		})
	}
	done := make(chan struct{})
	go func() { workers.Wait(); close(done) }()

	<-ctx.Done()
	w.queue.ShutDown()
	timer := w.opts.Clock.NewTimer(w.opts.DrainTimeout)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C():
		w.opts.Logger.Info("Stopped before every CapacityRequest was written; the next leader writes the rest",
			"source", w.opts.Source, "left", w.queue.Len())
		cancel()
		<-done
	}
}

// next handles one pod and reports whether there may be more.
func (w *Writer) next(ctx context.Context) bool {
	uid, shutdown := w.queue.Get()
	if shutdown || ctx.Err() != nil {
		return false
	}
	defer w.queue.Done(uid)
	if err := w.handle(ctx, uid); err != nil && ctx.Err() == nil {
		w.retry(uid, err)
		return true
	}
	w.queue.Forget(uid)
	return true
}

// handle decides on the pod and writes. An error means that it has to be tried again.
func (w *Writer) handle(ctx context.Context, uid types.UID) error {
	w.mu.Lock()
	w.observe()
	s := w.pods[uid]
	if s == nil || !s.wanted {
		w.mu.Unlock()
		return nil
	}
	pod, rejections, since, handed := s.pod, s.rejections, s.since, s.handed
	w.mu.Unlock()

	if !w.opts.Pending(pod) {
		w.count(ResultGone)
		w.Forget(uid)
		return nil
	}
	result, err := w.act(ctx, pod, rejections)
	w.releaseForgotten(uid)
	if err != nil {
		return err
	}
	w.finish(uid, s, handed, since, result)
	return nil
}

// act does what the decision on the pod asks for.
func (w *Writer) act(ctx context.Context, pod *corev1.Pod, rejections []capacity.Rejection) (result string, err error) {
	decision := w.opts.Decide(pod, rejections)
	switch {
	case decision.Silent:
		return ResultSilent, nil
	case !decision.Request:
		return ResultRefused, w.warn(ctx, pod, decision.Reason, "no new node can help the pod: "+decision.Message)
	}
	if err := w.wait(ctx); err != nil {
		return "", err
	}
	return w.write(ctx, pod, decision.ExtraRequirements)
}

// releaseForgotten takes back the room that a write promised to a pod which was forgotten meanwhile: nobody else would.
func (w *Writer) releaseForgotten(uid types.UID) {
	if w.opts.Suppressor == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.pods[uid] == nil {
		w.opts.Suppressor.Release(uid)
	}
}

// finish notes the outcome, unless the pod was forgotten or handed over again while the write was under way.
func (w *Writer) finish(uid types.UID, s *podState, handed int, since time.Time, result string) {
	w.count(result)
	now := w.opts.Clock.Now()
	if result == ResultCreated {
		latency.WithLabelValues(w.opts.Source).Observe(now.Sub(since).Seconds())
	}
	if result == ResultGone {
		w.Forget(uid)
		return
	}
	w.update(uid, s, func() {
		if s.handed != handed {
			return // it is queued again
		}
		s.wanted, s.since, s.refused = false, time.Time{}, result == ResultRefused
		switch result {
		case ResultRefused:
			return // the pod is kept for Recheck
		case ResultSilent, ResultHeld: // looked at again when it fails again
		default:
			s.written = now
		}
		// The informer's cache replaces its objects, and an entry should not keep an old one alive.
		s.pod, s.rejections = nil, nil
	})
}

// update changes the entry under the lock, if it is still the pod's.
func (w *Writer) update(uid types.UID, s *podState, change func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.pods[uid] == s {
		change()
	}
}

func (w *Writer) retry(uid types.UID, err error) {
	w.count(ResultRetried)
	w.opts.Logger.Error(err, "Could not write for a pod; trying again", "source", w.opts.Source, "podUID", uid,
		"tries", w.queue.NumRequeues(uid)+1)
	if delay, ok := suggestedDelay(err); ok {
		w.queue.AddAfter(uid, delay)
		return
	}
	w.queue.AddRateLimited(uid)
}

func (w *Writer) count(result string) { writes.WithLabelValues(w.opts.Source, result).Inc() }

// wait takes a token of the rate limit. The error is that of ctx.
func (w *Writer) wait(ctx context.Context) error {
	delay := w.reserve(w.opts.Clock.Now())
	if delay <= 0 {
		return nil
	}
	timer := w.opts.Clock.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-timer.C():
		return nil
	case <-ctx.Done():
		return fmt.Errorf("waiting for the rate limit: %w", ctx.Err())
	}
}

// reserve takes a token of the rate limit, and one of the slower limit while the loop is at work, and says how long to wait.
func (w *Writer) reserve(now time.Time) time.Duration {
	delay := w.limiter.ReserveN(now, 1).DelayFrom(now)
	if w.opts.Yield > 0 && now.UnixNano()-w.asked.Load() < int64(w.opts.Yield) {
		delay = max(delay, w.yielding.ReserveN(now, 1).DelayFrom(now))
	}
	return delay
}
