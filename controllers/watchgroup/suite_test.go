package watchgroup

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/internal/controlplane"
)

// patience is how long a condition may take to come true on a slow machine. No test waits for it when all is well.
const patience = 5 * time.Minute

var (
	plane     *controlplane.ControlPlane
	apiServer *rest.Config
)

func TestMain(m *testing.M) { os.Exit(runTests(m)) }

func runTests(m *testing.M) int {
	ctrl.SetLogger(logr.Discard())
	dir, err := os.MkdirTemp("", "watchgroup")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	plane, err = controlplane.Start(context.Background(), controlplane.Options{
		Dir: dir,
		CRDPaths: []string{
			filepath.Join("..", "..", "manifests", "crd", "bases"),
			filepath.Join("testdata", "crds.yaml"),
		},
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() {
		if err := plane.Stop(); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}()
	apiServer = plane.Config()
	apiServer.QPS = -1
	return m.Run()
}

func testScheme() *runtime.Scheme {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, lbv1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			panic(err)
		}
	}
	return scheme
}

// api returns a client of the administrator's, and a namespace of the test's own.
func api(t *testing.T) (client.Client, string) {
	t.Helper()
	c, err := client.New(apiServer, client.Options{Scheme: testScheme()})
	if err != nil {
		t.Fatal(err)
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "watchgroup-"}}
	if err := c.Create(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { removeGroups(t, c, ns.Name) })
	return c, ns.Name
}

// removeGroups takes a test's groups out of the way of the next: they have a say in what is labelled everywhere.
func removeGroups(t *testing.T, c client.Client, namespace string) {
	ctx := context.Background()
	var groups lbv1alpha1.WatchGroupList
	var slices lbv1alpha1.VirtualNodeSliceList
	if err := c.List(ctx, &groups, client.InNamespace(namespace)); err != nil {
		t.Error(err)
	}
	if err := c.List(ctx, &slices, client.InNamespace(namespace)); err != nil {
		t.Error(err)
	}
	var all []client.Object
	for i := range groups.Items {
		all = append(all, &groups.Items[i])
	}
	for i := range slices.Items {
		all = append(all, &slices.Items[i])
	}
	for _, o := range all {
		if err := client.IgnoreNotFound(c.Delete(ctx, o)); err != nil {
			t.Error(err)
		}
		free := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))
		if err := client.IgnoreNotFound(c.Patch(ctx, o, free)); err != nil {
			t.Error(err)
		}
	}
}

// newGroup creates a group of ConfigMaps with a Lease that runs out fast.
func newGroup(t *testing.T, c client.Client, namespace string, change func(*lbv1alpha1.WatchGroupSpec)) *lbv1alpha1.WatchGroup {
	t.Helper()
	d := func(d time.Duration) *metav1.Duration { return &metav1.Duration{Duration: d} }
	g := &lbv1alpha1.WatchGroup{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "parents"},
		Spec: lbv1alpha1.WatchGroupSpec{
			VirtualNodes: 100,
			Resources:    []lbv1alpha1.Resource{{Resource: "configmaps"}},
			Lease: lbv1alpha1.LeaseParameters{
				LeaseDuration: d(4 * time.Second), RenewDeadline: d(2 * time.Second), RetryPeriod: d(300 * time.Millisecond),
				RequestTimeout: d(time.Second),
			},
			NewcomerGrace: d(0),
		},
	}
	if change != nil {
		change(&g.Spec)
	}
	if err := c.Create(t.Context(), g); err != nil {
		t.Fatal(err)
	}
	return g
}

// A process is one run of what cmd/coordinator runs. It ends with the test, or by stop.
type process struct {
	stop    context.CancelFunc
	done    chan struct{}
	metrics *Metrics
	// writes counts what it has written, by "verb path"; cut, when set, decides which requests fail before they are sent.
	writes *traffic
}

// late, when set, is waited for by what comes on watches of children.
type traffic struct {
	mu    sync.Mutex
	count map[string]int
	cut   atomic.Pointer[func(*http.Request) error]
	late  atomic.Pointer[chan struct{}]
}

// A lateBody is a watch that falls behind.
type lateBody struct {
	io.ReadCloser
	*traffic
}

func (b *lateBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if late := b.late.Load(); late != nil {
		<-*late
	}
	return n, err
}

// errAnswerLost, from traffic.cut, lets a request land and loses its answer.
var errAnswerLost = errors.New("connection reset by peer")

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

func (w *traffic) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(req *http.Request) (*http.Response, error) {
		if req.Method == http.MethodGet {
			res, err := next.RoundTrip(req)
			if err == nil && req.URL.Query().Has("watch") && strings.HasSuffix(req.URL.Path, "/children") {
				res.Body = &lateBody{res.Body, w}
			}
			return res, err
		}
		var lost error
		if cut := w.cut.Load(); cut != nil {
			if lost = (*cut)(req); lost != nil && !errors.Is(lost, errAnswerLost) {
				return nil, lost
			}
		}
		res, err := next.RoundTrip(req)
		if lost != nil && err == nil {
			res.Body.Close()
			return nil, lost
		}
		if err == nil && res.StatusCode < 300 {
			w.mu.Lock()
			w.count[req.Method+" "+req.URL.Path]++
			w.mu.Unlock()
		}
		return res, err
	})
}

// start runs a coordinator on the API server.
func start(t *testing.T, config *rest.Config, o Options, changeManager ...func(*ctrl.Options)) *process {
	t.Helper()
	return startCut(t, config, o, nil, changeManager...)
}

// startCut runs a coordinator of whose writes some fail from the beginning.
func startCut(t *testing.T, config *rest.Config, o Options, cut func(*http.Request) error,
	changeManager ...func(*ctrl.Options)) *process {
	t.Helper()
	p := &process{done: make(chan struct{}), writes: &traffic{count: make(map[string]int)}}
	if cut != nil {
		p.writes.cut.Store(&cut)
	}
	var err error
	if p.metrics, err = NewMetrics(prometheus.NewRegistry()); err != nil {
		t.Fatal(err)
	}
	o.Metrics = p.metrics
	if o.QPS == 0 {
		o.QPS, o.Burst, o.AuditPeriod = 1000, 1000, time.Hour
	}
	config = rest.CopyConfig(config)
	config.QPS = -1
	config.Wrap(p.writes.wrap)
	options := ctrl.Options{
		Scheme: testScheme(), Cache: CacheOptions(), Logger: logr.Discard(),
		Metrics:                metricsserver.Options{BindAddress: "0"},
		HealthProbeBindAddress: "0",
		Controller:             ctrlconfig.Controller{SkipNameValidation: ptr.To(true)},
	}
	for _, change := range changeManager {
		change(&options)
	}
	mgr, err := ctrl.NewManager(config, options)
	if err != nil {
		t.Fatal(err)
	}
	if err := SetupWithManager(mgr, o); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	p.stop = func() {
		cancel()
		<-p.done
	}
	go func() {
		defer close(p.done)
		if err := mgr.Start(ctx); err != nil {
			t.Errorf("manager: %v", err)
		}
	}()
	t.Cleanup(p.stop)
	return p
}

// eventually waits until check returns "", and fails with what it returned last.
func eventually(t *testing.T, what string, check func() string) {
	t.Helper()
	deadline := time.Now().Add(patience)
	ticks := time.NewTicker(20 * time.Millisecond)
	defer ticks.Stop()
	for {
		last := check()
		if last == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %s", what, last)
		}
		<-ticks.C
	}
}
