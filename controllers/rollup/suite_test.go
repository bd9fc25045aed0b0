package rollup

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/testr"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	grpcbackoff "google.golang.org/grpc/backoff"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/internal/controlplane"
)

// patience is how long a condition may take to come true on a slow machine. No test waits for it when all is well.
const patience = 2 * time.Minute

var fastConnect = grpc.ConnectParams{
	Backoff:           grpcbackoff.Config{BaseDelay: 5 * time.Millisecond, Multiplier: 1.2, MaxDelay: 50 * time.Millisecond},
	MinConnectTimeout: 10 * time.Second,
}

var (
	apiServer    *rest.Config
	apiServerErr error
	apiServerUse sync.Once
	stopServer   = func() {}
)

func TestMain(m *testing.M) {
	ctrl.SetLogger(logr.Discard())
	code := m.Run()
	stopServer()
	os.Exit(code)
}

// api returns the API server that the tests of this package share, started when the first one asks. What a test leaves is
// removed, as demand is counted over the whole cluster.
func api(t *testing.T) client.Client {
	t.Helper()
	if testing.Short() {
		t.Skip("needs an API server")
	}
	apiServerUse.Do(func() {
		dir, err := os.MkdirTemp("", "rollup")
		if err != nil {
			apiServerErr = err
			return
		}
		cp, err := controlplane.Start(context.Background(), controlplane.Options{
			Dir:      dir,
			CRDPaths: []string{filepath.Join("..", "..", "manifests", "crd", "bases")},
		})
		if err != nil {
			os.RemoveAll(dir)
			apiServerErr = err
			return
		}
		apiServer = cp.Config()
		stopServer = func() {
			if err := cp.Stop(); err != nil {
				fmt.Fprintln(os.Stderr, err)
			}
			os.RemoveAll(dir)
		}
	})
	if apiServerErr != nil {
		t.Fatal(apiServerErr)
	}
	config := rest.CopyConfig(apiServer)
	config.QPS = -1
	c, err := client.New(config, client.Options{Scheme: testScheme()})
	if err != nil {
		t.Fatal(err)
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: fleetv1alpha1.SystemNamespace}}
	if err := c.Create(t.Context(), ns); err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	t.Cleanup(func() { clean(t, c) })
	return c
}

func testScheme() *runtime.Scheme {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, fleetv1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			panic(err)
		}
	}
	return scheme
}

func clean(t *testing.T, c client.Client) {
	t.Helper()
	ctx := context.Background()
	for _, ns := range []string{"default", fleetv1alpha1.SystemNamespace} {
		for _, obj := range []client.Object{
			&policyv1.PodDisruptionBudget{}, &corev1.Pod{}, &fleetv1alpha1.CapacityRequest{},
			&fleetv1alpha1.UpcomingNode{}, &fleetv1alpha1.AvailableCapacity{},
		} {
			if err := c.DeleteAllOf(ctx, obj, client.InNamespace(ns), client.GracePeriodSeconds(0)); err != nil {
				t.Error(err)
			}
		}
	}
	if err := c.DeleteAllOf(ctx, &corev1.Node{}); err != nil {
		t.Error(err)
	}
}

// writes counts the operator's requests that are not reads, by "verb path", and may fail some.
type writes struct {
	mu    sync.Mutex
	count map[string]int
	fail  func(*http.Request) bool
}

func (w *writes) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(req *http.Request) (*http.Response, error) {
		if req.Method == http.MethodGet {
			res, err := next.RoundTrip(req)
			if err == nil && req.URL.Query().Has("watch") {
				res.Body = lateBody{res.Body}
			}
			return res, err
		}
		w.mu.Lock()
		fail := w.fail != nil && w.fail(req)
		if !fail {
			w.count[req.Method+" "+req.URL.Path]++
		}
		w.mu.Unlock()
		if fail {
			return nil, fmt.Errorf("the test refuses %s %s", req.Method, req.URL.Path)
		}
		return next.RoundTrip(req)
	})
}

// A lateBody is a watch that falls behind, as those of a busy machine do: an answer to a write is there before its event.
type lateBody struct{ io.ReadCloser }

func (b lateBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	<-time.After(5 * time.Millisecond)
	return n, err
}

// of sums what matches a part of "verb path".
func (w *writes) of(part string) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for key, count := range w.count {
		if strings.Contains(key, part) {
			n += count
		}
	}
	return n
}

func (w *writes) all() (n int) { return w.of("") }

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// testConfig has times that let a test see everything soon.
func testConfig() *configv1alpha1.ManagerConfiguration {
	ms := func(n int) *metav1.Duration { return &metav1.Duration{Duration: time.Duration(n) * time.Millisecond} }
	c := &configv1alpha1.ManagerConfiguration{ClusterID: testCluster}
	c.Autoscaler.Address = "scripted"
	c.Autoscaler.BackoffBase, c.Autoscaler.BackoffMax = ms(5), ms(50)
	c.RollUp.Debounce, c.RollUp.Period = ms(20), ms(500)
	c.Reclaim.SettleTime, c.Reclaim.EvictionRetry, c.Reclaim.RetryPeriod = ms(0), ms(50), ms(100)
	c.Default()
	return c
}

// running is an operator in this process.
type running struct {
	t      *testing.T
	cancel context.CancelFunc
	done   chan error
	writes *writes
	gather prometheus.Gatherer
}

// operate starts an operator, as another process would, and ends it with the test.
func operate(t *testing.T, conn *grpc.ClientConn, config *configv1alpha1.ManagerConfiguration, change ...func(*Options)) *running {
	t.Helper()
	return operateAs(t, conn, config, func(*ctrl.Options) {}, change...)
}

// operateAs is operate with a manager that is different.
func operateAs(t *testing.T, conn *grpc.ClientConn, config *configv1alpha1.ManagerConfiguration, as func(*ctrl.Options),
	change ...func(*Options)) *running {
	t.Helper()
	w := &writes{count: map[string]int{}}
	restConfig := rest.CopyConfig(apiServer)
	restConfig.QPS = -1
	restConfig.Wrap(w.wrap)
	log := logr.Discard()
	if os.Getenv("VERBOSE") != "" {
		log = testr.New(t)
	}
	options := ctrl.Options{
		Scheme:     testScheme(),
		Logger:     log,
		Cache:      CacheOptions(config.Namespace),
		Metrics:    metricsserver.Options{BindAddress: "0"},
		Controller: ctrlconfig.Controller{SkipNameValidation: ptr.To(true)},
	}
	as(&options)
	mgr, err := ctrl.NewManager(restConfig, options)
	if err != nil {
		t.Fatal(err)
	}
	registry := prometheus.NewRegistry()
	opts := Options{Config: config, Conn: conn, Registerer: registry, HoldDrained: 300 * time.Millisecond}
	for _, f := range change {
		f(&opts)
	}
	ctx, cancel := context.WithCancel(context.Background())
	if err := Setup(ctx, mgr, opts); err != nil {
		cancel()
		t.Fatal(err)
	}
	r := &running{t: t, cancel: cancel, done: make(chan error, 1), writes: w, gather: registry}
	go func() { r.done <- mgr.Start(ctx) }()
	t.Cleanup(r.stop)
	return r
}

// stop ends the operator and waits for it. It may be called twice.
func (r *running) stop() {
	r.cancel()
	if r.done == nil {
		return
	}
	if err := <-r.done; err != nil {
		r.t.Errorf("the operator ended with %v", err)
	}
	r.done = nil
}

func (r *running) metric(name string) float64 {
	r.t.Helper()
	families, err := r.gather.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	sum := 0.0
	for _, family := range families {
		if family.GetName() != name {
			continue
		}
		for _, m := range family.GetMetric() {
			sum += m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	return sum
}

// eventually polls until holds says nothing.
func eventually(t *testing.T, holds func() error) {
	t.Helper()
	var last error
	deadline := time.Now().Add(patience)
	for time.Now().Before(deadline) {
		if last = holds(); last == nil {
			return
		}
		select {
		case <-t.Context().Done():
			t.Fatal(t.Context().Err())
		case <-time.After(10 * time.Millisecond):
		}
	}
	t.Fatalf("not within %s: %v", patience, last)
}

// is is a condition with an explanation of what is missing.
func is(holds bool, format string, args ...any) error {
	if holds {
		return nil
	}
	return fmt.Errorf(format, args...)
}

func create(t *testing.T, c client.Client, objects ...client.Object) {
	t.Helper()
	for _, obj := range objects {
		copied := obj.DeepCopyObject().(client.Object)
		if err := c.Create(t.Context(), obj); err != nil {
			t.Fatalf("creating %T %s: %v", obj, obj.GetName(), err)
		}
		switch want := copied.(type) {
		case *corev1.Node:
			// The API server taints a new node as not ready, and no controller takes that off here.
			node := obj.(*corev1.Node)
			before := node.DeepCopy()
			node.Spec.Taints = want.Spec.Taints
			if err := c.Patch(t.Context(), node, client.MergeFrom(before)); err != nil {
				t.Fatal(err)
			}
			before = node.DeepCopy()
			node.Status = want.Status
			if err := c.Status().Patch(t.Context(), node, client.MergeFrom(before)); err != nil {
				t.Fatal(err)
			}
		case *corev1.Pod:
			pod := obj.(*corev1.Pod)
			if want.Status.Phase != "" {
				before := pod.DeepCopy()
				pod.Status = want.Status
				if err := c.Status().Patch(t.Context(), pod, client.MergeFrom(before)); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}
