package demand

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
)

var resourceName = schema.GroupResource{Group: fleetv1alpha1.GroupName, Resource: requestsResource}

// fakeAPI is an API server that holds CapacityRequests and events in memory.
type fakeAPI struct {
	mu       sync.Mutex
	objects  map[string]*fleetv1alpha1.CapacityRequest
	verbs    []string
	warnings []string
	// fail returns the error of a call, by its number from 0; nil: it succeeds.
	fail func(call int) error
	// hang, where set, lets every call wait until it is closed or the call's context ends.
	hang chan struct{}
}

func newFakeAPI() *fakeAPI { return &fakeAPI{objects: map[string]*fleetv1alpha1.CapacityRequest{}} }

func (f *fakeAPI) call(ctx context.Context, verb string, do func() error) error {
	if f.hang != nil {
		select {
		case <-f.hang:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	n := len(f.verbs)
	f.verbs = append(f.verbs, verb)
	if f.fail != nil {
		if err := f.fail(n); err != nil {
			return err
		}
	}
	return do()
}

func (f *fakeAPI) Create(ctx context.Context, r *fleetv1alpha1.CapacityRequest) error {
	return f.call(ctx, "create", func() error {
		if f.objects[r.Name] != nil {
			return apierrors.NewAlreadyExists(resourceName, r.Name)
		}
		f.objects[r.Name] = r.DeepCopy()
		return nil
	})
}

func (f *fakeAPI) Get(ctx context.Context, _, name string) (out *fleetv1alpha1.CapacityRequest, err error) {
	err = f.call(ctx, "get", func() error {
		if out = f.objects[name]; out == nil {
			return apierrors.NewNotFound(resourceName, name)
		}
		out = out.DeepCopy()
		return nil
	})
	return out, err
}

func (f *fakeAPI) Update(ctx context.Context, r *fleetv1alpha1.CapacityRequest) error {
	return f.call(ctx, "update", func() error {
		f.objects[r.Name] = r.DeepCopy()
		return nil
	})
}

func (f *fakeAPI) Warn(_ context.Context, pod *corev1.Pod, reason, note string, _ time.Time) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.warnings = append(f.warnings, fmt.Sprintf("%s: %s: %s", pod.Name, reason, note))
	return nil
}

func newTestWriter(t *testing.T, api *fakeAPI, change func(*Options)) *Writer {
	t.Helper()
	opts := Options{Source: t.Name(), Requests: api, Events: api, Workers: 1, BackoffBase: time.Nanosecond}
	if change != nil {
		change(&opts)
	}
	w, err := NewWriter(opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.queue.ShutDown)
	return w
}

// work handles what is queued now, and what retries add, in the test's own goroutine.
func work(t *testing.T, w *Writer) {
	t.Helper()
	for w.queue.Len() > 0 {
		w.next(t.Context())
	}
}

func pod(name string, change ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID("uid-" + name), Generation: 1},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name:      "c",
			Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{"cpu": resource.MustParse("1")}},
		}}},
	}
	for _, c := range change {
		c(p)
	}
	return p
}

func cpu(quantity string, generation int64) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Containers[0].Resources.Requests["cpu"] = resource.MustParse(quantity)
		p.Generation = generation
	}
}

func wantVerbs(t *testing.T, api *fakeAPI, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, api.verbs); diff != "" {
		t.Errorf("calls to the API server (-want +got):\n%s", diff)
	}
}

func TestRequestStandsForItsPod(t *testing.T) {
	api := newFakeAPI()
	w := newTestWriter(t, api, nil)
	w.Enqueue(pod("web-0"), nil)
	work(t, w)

	want := &fleetv1alpha1.CapacityRequest{
		TypeMeta: metav1.TypeMeta{APIVersion: "fleet.lucy.sh/v1alpha1", Kind: "CapacityRequest"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace:       "ns",
			Name:            Name("web-0", "uid-web-0"),
			Labels:          map[string]string{"fleet.lucy.sh/pod-uid": "uid-web-0"},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: "web-0", UID: "uid-web-0"}},
		},
		Spec: capacity.ProfileOfPod(pod("web-0")).RequestSpec(),
	}
	if diff := cmp.Diff(want, api.objects[want.Name]); diff != "" {
		t.Errorf("request (-want +got):\n%s", diff)
	}
}

func TestRapidRepeatedAttemptsMakeOneWrite(t *testing.T) {
	api := newFakeAPI()
	w := newTestWriter(t, api, nil)
	for range 1000 {
		w.Enqueue(pod("web-0"), nil)
	}
	work(t, w)
	for range 1000 {
		if !w.Settled(pod("web-0")) {
			t.Fatal("a pod whose request is written is not settled")
		}
		w.Enqueue(pod("web-0"), nil)
	}
	work(t, w)
	wantVerbs(t, api, "create")
}

func TestTwoWritersMakeOneRequest(t *testing.T) {
	api := newFakeAPI()
	for range 2 {
		w := newTestWriter(t, api, nil)
		w.Enqueue(pod("web-0"), nil)
		work(t, w)
		if !w.Settled(pod("web-0")) {
			t.Error("the pod is not settled")
		}
	}
	wantVerbs(t, api, "create", "create", "get")
	if len(api.objects) != 1 {
		t.Errorf("got %d requests, want 1", len(api.objects))
	}
}

func TestRequestOfAnotherPodIsLeftAlone(t *testing.T) {
	api := newFakeAPI()
	name := Name("web-0", "uid-web-0")
	foreign := &fleetv1alpha1.CapacityRequest{ObjectMeta: metav1.ObjectMeta{
		Name: name, Labels: map[string]string{fleetv1alpha1.LabelPodUID: "other"},
	}}
	api.objects[name] = foreign.DeepCopy()
	w := newTestWriter(t, api, nil)
	w.Enqueue(pod("web-0"), nil)
	work(t, w)
	if diff := cmp.Diff(foreign, api.objects[name]); diff != "" {
		t.Errorf("the other pod's request changed:\n%s", diff)
	}
	wantVerbs(t, api, "create", "get")
}

func TestResizedPodUpdatesItsRequest(t *testing.T) {
	api := newFakeAPI()
	w := newTestWriter(t, api, nil)
	w.Enqueue(pod("web-0"), nil)
	work(t, w)

	resized := pod("web-0", cpu("3", 2))
	if w.Settled(resized) {
		t.Error("a resized pod is settled")
	}
	w.Enqueue(resized, nil)
	work(t, w)
	wantVerbs(t, api, "create", "create", "get", "update")
	got := api.objects[Name("web-0", "uid-web-0")].Spec.Resources.Requests["cpu"]
	if got.String() != "3" {
		t.Errorf("request has cpu %s, want 3", got.String())
	}

	t.Run("and one that changed otherwise does not", func(t *testing.T) {
		w.Enqueue(pod("web-0", cpu("3000m", 3)), nil)
		work(t, w)
		wantVerbs(t, api, "create", "create", "get", "update", "create", "get")
	})
}

func TestDeletedRequestIsWrittenAgainAfterTheRewritePeriod(t *testing.T) {
	api := newFakeAPI()
	clock := clocktesting.NewFakeClock(time.Unix(1000, 0))
	w := newTestWriter(t, api, func(o *Options) { o.Clock, o.RewritePeriod = clock, time.Minute })
	w.Enqueue(pod("web-0"), nil)
	work(t, w)
	clear(api.objects)

	clock.Step(59 * time.Second)
	w.Enqueue(pod("web-0"), nil)
	work(t, w)
	wantVerbs(t, api, "create")

	clock.Step(time.Second)
	w.Enqueue(pod("web-0"), nil)
	work(t, w)
	wantVerbs(t, api, "create", "create")
}

func TestErrors(t *testing.T) {
	terminating := apierrors.NewForbidden(resourceName, "x", errors.New("namespace is being terminated"))
	terminating.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: corev1.NamespaceTerminatingCause}}
	invalid := apierrors.NewInvalid(schema.GroupKind{Group: fleetv1alpha1.GroupName, Kind: "CapacityRequest"}, "x", nil)
	crdMissing := apierrors.NewGenericServerResponse(http.StatusNotFound, "post", resourceName, "", "", 0, true)
	for _, c := range []struct {
		name     string
		err      error
		written  bool // after the error went away
		tracked  int
		warnings int
	}{
		{name: "a server error is tried again", err: apierrors.NewInternalError(errors.New("etcd")), written: true, tracked: 1},
		{name: "a timeout is tried again", err: context.DeadlineExceeded, written: true, tracked: 1},
		{name: "a missing right is tried again", err: apierrors.NewForbidden(resourceName, "x", nil), written: true, tracked: 1},
		{name: "a missing CRD is tried again", err: crdMissing, written: true, tracked: 1},
		{name: "a terminating namespace drops the pod", err: terminating},
		{
			name: "a missing namespace drops the pod",
			err:  apierrors.NewNotFound(schema.GroupResource{Resource: "namespaces"}, "ns"),
		},
		{name: "an invalid request gets one event and no further try", err: invalid, tracked: 1, warnings: 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			api := newFakeAPI()
			api.fail = func(call int) error {
				if call < 2 {
					return c.err
				}
				return nil
			}
			w := newTestWriter(t, api, nil)
			w.Enqueue(pod("web-0"), nil)
			w.next(t.Context())
			if c.written {
				w.next(t.Context())
				w.next(t.Context())
			}
			if got := len(api.objects) == 1; got != c.written {
				t.Errorf("written: %v, want %v", got, c.written)
			}
			if got := len(w.pods); got != c.tracked {
				t.Errorf("%d pods are remembered, want %d", got, c.tracked)
			}
			if got := len(api.warnings); got != c.warnings {
				t.Errorf("got %d events, want %d: %v", got, c.warnings, api.warnings)
			}
			if got := w.queue.NumRequeues("uid-web-0"); got != 0 {
				t.Errorf("the queue still counts %d failures", got)
			}
		})
	}
}

func TestPodThatNeedsNoNodeAnyMoreIsDropped(t *testing.T) {
	api := newFakeAPI()
	w := newTestWriter(t, api, func(o *Options) { o.Pending = func(*corev1.Pod) bool { return false } })
	w.Enqueue(pod("web-0"), nil)
	work(t, w)
	wantVerbs(t, api)
	if len(w.pods) != 0 || len(api.warnings) != 0 {
		t.Errorf("remembers %d pods and wrote %v, want nothing", len(w.pods), api.warnings)
	}
}

func TestForgottenPodIsNotResurrectedByAWriteUnderWay(t *testing.T) {
	api := newFakeAPI()
	w := newTestWriter(t, api, nil)
	w.opts.Describe = func(p *corev1.Pod) capacity.Profile { // called in the middle of the write
		w.Forget(p.UID)
		return capacity.ProfileOfPod(p)
	}
	w.Enqueue(pod("web-0"), nil)
	work(t, w)
	if len(w.pods) != 0 {
		t.Errorf("remembers %d pods, want none", len(w.pods))
	}
}

// decide returns decisions one after the other, the last one for ever.
func decide(decisions ...capacity.Decision) func(*corev1.Pod, []capacity.Rejection) capacity.Decision {
	return func(*corev1.Pod, []capacity.Rejection) capacity.Decision {
		d := decisions[0]
		if len(decisions) > 1 {
			decisions = decisions[1:]
		}
		return d
	}
}

func TestPodThatNoNodeHelpsGetsOneEventPerReason(t *testing.T) {
	api := newFakeAPI()
	first := capacity.Decision{Reason: "VolumeClaimMissing", Message: "create it"}
	w := newTestWriter(t, api, func(o *Options) {
		o.Decide = decide(first, first, first, capacity.Decision{Reason: "NodeNameSet", Message: "names a node"})
	})
	for range 100 {
		if w.Settled(pod("web-0")) {
			t.Fatal("a pod that was refused is settled: what is in its way may go")
		}
		w.Enqueue(pod("web-0"), nil)
		work(t, w)
	}
	want := []string{
		"web-0: VolumeClaimMissing: no new node can help the pod: create it",
		"web-0: NodeNameSet: no new node can help the pod: names a node",
	}
	if diff := cmp.Diff(want, api.warnings); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	wantVerbs(t, api)
}

func TestReasonsOfOnePodAreBounded(t *testing.T) {
	api := newFakeAPI()
	n := 0
	w := newTestWriter(t, api, func(o *Options) {
		o.Decide = func(*corev1.Pod, []capacity.Rejection) capacity.Decision {
			n++
			return capacity.Decision{Reason: fmt.Sprint("Reason", n)}
		}
	})
	for range 100 {
		w.Enqueue(pod("web-0"), nil)
		work(t, w)
	}
	if got := len(api.warnings); got != maxWarnings {
		t.Errorf("got %d events, want %d", got, maxWarnings)
	}
}

func TestPodThatWaitsForSomethingElseGetsNothing(t *testing.T) {
	api := newFakeAPI()
	w := newTestWriter(t, api, func(o *Options) { o.Decide = decide(capacity.Decision{Silent: true, Reason: "Gated"}) })
	w.Enqueue(pod("web-0"), nil)
	work(t, w)
	wantVerbs(t, api)
	if len(api.warnings) != 0 {
		t.Errorf("got events %v, want none", api.warnings)
	}
}

func TestRecheckAsksForPodsThatCanBeHelpedNow(t *testing.T) {
	api := newFakeAPI()
	w := newTestWriter(t, api, func(o *Options) {
		o.Decide = decide(capacity.Decision{Reason: "NoOfferingMatches"}, capacity.Decision{Request: true})
	})
	w.Enqueue(pod("web-0"), nil)
	work(t, w)
	wantVerbs(t, api)
	w.Recheck()
	work(t, w)
	wantVerbs(t, api, "create")
	w.Recheck()
	work(t, w)
	wantVerbs(t, api, "create")
}

func TestHangingAPIServerBlocksNoCaller(t *testing.T) {
	api := newFakeAPI()
	api.hang = make(chan struct{})
	w := newTestWriter(t, api, func(o *Options) { o.Timeout = time.Hour; o.DrainTimeout = time.Nanosecond })
	ctx, stop := context.WithCancel(t.Context())
	finished := make(chan struct{})
	go func() { defer close(finished); w.Run(ctx) }()
	for i := range 10_000 { // would never end if one of them waited for the API server
		p := pod(fmt.Sprint("web-", i))
		w.Enqueue(p, nil)
		w.Settled(p)
		if i%2 == 0 {
			w.Forget(p.UID)
		}
	}
	if len(w.pods) != 5000 {
		t.Errorf("remembers %d pods, want the 5000 that are pending", len(w.pods))
	}
	stop()
	<-finished // within the bound, although no call ever returns by itself
}

func TestStopDrainsWhatIsQueued(t *testing.T) {
	api := newFakeAPI()
	w := newTestWriter(t, api, func(o *Options) { o.Workers = 4; o.DrainTimeout = time.Hour })
	for i := range 100 {
		w.Enqueue(pod(fmt.Sprint("web-", i)), nil)
	}
	ctx, stop := context.WithCancel(t.Context())
	stop()
	w.Run(ctx)
	if len(api.objects) != 100 {
		t.Errorf("got %d requests, want all 100", len(api.objects))
	}
}

func TestRateLimitIsKept(t *testing.T) {
	api := newFakeAPI()
	clock := clocktesting.NewFakeClock(time.Unix(1000, 0))
	w := newTestWriter(t, api, func(o *Options) { o.Clock, o.QPS, o.Burst = clock, 1, 2 })
	for i := range 3 {
		w.Enqueue(pod(fmt.Sprint("web-", i)), nil)
	}
	w.next(t.Context())
	w.next(t.Context())
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	w.next(ctx) // has to wait for a second, and may not
	if len(api.objects) != 2 {
		t.Errorf("got %d requests in no time, want the burst of 2", len(api.objects))
	}
}

func TestWritesYieldToTheLoopAndMakeUpAfterwards(t *testing.T) {
	clock := clocktesting.NewFakeClock(time.Unix(1000, 0))
	w := newTestWriter(t, newFakeAPI(), func(o *Options) {
		o.Clock, o.QPS, o.Burst, o.Yield = clock, 40, 8, 100*time.Millisecond
	})
	delays := func(writes int) (delays []time.Duration) {
		for range writes {
			delays = append(delays, w.reserve(clock.Now()).Round(time.Millisecond))
		}
		return delays
	}
	const ms = time.Millisecond
	w.Settled(pod("a"))
	if diff := cmp.Diff([]time.Duration{0, 100 * ms, 200 * ms, 300 * ms}, delays(4)); diff != "" {
		t.Errorf("while the loop is at work, writes wait for a quarter of 40/s, without burst (-want +got):\n%s", diff)
	}
	clock.Step(99 * ms)
	if diff := cmp.Diff([]time.Duration{301 * ms}, delays(1)); diff != "" {
		t.Errorf("the loop is still at work (-want +got):\n%s", diff)
	}
	clock.Step(ms)
	if diff := cmp.Diff([]time.Duration{0, 0, 0, 0, 0, 0, 0, 25 * ms}, delays(8)); diff != "" {
		t.Errorf("after the loop, the burst is there and the rate is whole: 8 - 5 + 4 tokens (-want +got):\n%s", diff)
	}
}
