package bench

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path"
	"runtime"
	"runtime/debug"
	"runtime/pprof"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	crcontroller "sigs.k8s.io/controller-runtime/pkg/controller"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	"github.com/drover-sh/drover/controllers/sharded"
	v1alpha1 "github.com/drover-sh/drover/examples/parentchild/api/v1alpha1"
	"github.com/drover-sh/drover/examples/parentchild/controller"
	"github.com/drover-sh/drover/examples/parentchild/recording"
	"github.com/drover-sh/drover/internal/coordinator"
	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/history"
)

// Where these are set, the test binary is not a benchmark but one of the programs that a benchmark starts.
const (
	memberEnv      = "DROVER_BENCH_RUN_MEMBER"      // a memberConfig
	coordinatorEnv = "DROVER_BENCH_RUN_COORDINATOR" // a file of kind CoordinatorConfiguration
	kubeconfigEnv  = "DROVER_BENCH_RUN_KUBECONFIG"
)

func TestMain(m *testing.M) {
	var err error
	switch {
	case os.Getenv(memberEnv) != "":
		err = runMember(ctrl.SetupSignalHandler(), os.Getenv(memberEnv))
	case os.Getenv(coordinatorEnv) != "":
		err = runCoordinator(ctrl.SetupSignalHandler(), os.Getenv(coordinatorEnv))
	default:
		os.Exit(m.Run())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// runCoordinator is cmd/coordinator.
func runCoordinator(ctx context.Context, file string) error {
	var config configv1alpha1.CoordinatorConfiguration
	if err := configv1alpha1.Load(file, &config); err != nil {
		return err
	}
	stop, err := profileProcess("coordinator")
	if err != nil {
		return err
	}
	defer stop()
	log := klog.NewKlogr()
	ctrl.SetLogger(log)
	return coordinator.Run(ctx, &config, os.Getenv(kubeconfigEnv), log)
}

// memberConfig is what a member is told when it is started.
type memberConfig struct {
	Kubeconfig string
	Group      string
	Name       string
	Pod        sharded.Pod
	Socket     string // of the benchmark
	QPS        float32
	Workers    int
	// Beat, if set, has every Parent reconciled again and again at this interval, without a write, and every reconcile told
	// to the benchmark. Otherwise the member is the sample controller as it is.
	Beat time.Duration
}

// A message is what a member tells the benchmark. At is by the clock that all processes of the machine share.
type message struct {
	Member  string
	At      time.Duration
	Settled sharding.Set `json:",omitempty"` // is served from now on
	Object  string       `json:",omitempty"` // was reconciled, from Start to At
	Start   time.Duration
	Usage   *usage `json:",omitempty"`
}

// usage is what a member has taken so far.
type usage struct {
	Heap        uint64 // bytes in use after a garbage collection
	Resident    uint64 // bytes of memory that the operating system counts
	WatchBytes  int64  // of the watches of Parents and Children
	WatchEvents int64  // of these, without bookmarks
	Watched     int    // Virtual Nodes that the watches select, of Parents and of Children
}

// A bencher is a member's side of the benchmark's socket.
type bencher struct {
	member string
	mu     sync.Mutex
	conn   net.Conn
	out    *json.Encoder

	watchBytes, watchEvents atomic.Int64
}

func (b *bencher) tell(m message) {
	m.Member = b.member
	b.mu.Lock()
	defer b.mu.Unlock()
	_ = b.out.Encode(m) // a benchmark that has gone wants to hear nothing
}

// answer tells what the member uses whenever it is asked.
func (b *bencher) answer() {
	for lines := bufio.NewScanner(b.conn); lines.Scan(); {
		debug.FreeOSMemory()
		debug.FreeOSMemory() // what finalizers have freed
		var mem runtime.MemStats
		runtime.ReadMemStats(&mem)
		u := usage{Heap: mem.HeapAlloc, WatchBytes: b.watchBytes.Load(), WatchEvents: b.watchEvents.Load()}
		if text, err := os.ReadFile("/proc/self/statm"); err == nil {
			if fields := strings.Fields(string(text)); len(fields) > 1 {
				pages, _ := strconv.ParseUint(fields[1], 10, 64)
				u.Resident = pages * uint64(os.Getpagesize())
			}
		}
		u.Watched = watched()
		b.tell(message{At: recording.Now(), Usage: &u})
	}
}

// watched reads the metric.
func watched() (vns int) {
	families, err := ctrlmetrics.Registry.Gather()
	if err != nil {
		return -1
	}
	for _, f := range families {
		if f.GetName() == "drover_sharded_watched_virtual_nodes" {
			for _, m := range f.GetMetric() {
				vns += int(m.GetGauge().GetValue())
			}
		}
	}
	return vns
}

// runMember is the sample controller as a member of a group, and tells the benchmark what it does.
func runMember(ctx context.Context, text string) error {
	var c memberConfig
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		return fmt.Errorf("%s: %w", memberEnv, err)
	}
	conn, err := net.Dial("unix", c.Socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	b := &bencher{member: c.Name, conn: conn, out: json.NewEncoder(conn)}
	b.tell(message{At: recording.Now()})
	go b.answer()
	stop, err := profileProcess(c.Name)
	if err != nil {
		return err
	}
	defer stop()
	ctrl.SetLogger(logr.Discard())
	klog.SetLogger(logr.Discard())
	config, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig)
	if err != nil {
		return err
	}
	config.QPS, config.Burst = c.QPS, max(int(c.QPS), 1)
	config.Wrap(func(inner http.RoundTripper) http.RoundTripper { return &watchCounter{inner: inner, bencher: b} })
	scheme := kruntime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return err
	}
	group := sharded.New(sharded.Options{
		WatchGroup: c.Group, Namespace: namespace, Member: c.Name, Pod: c.Pod,
		Record: func(r history.Record) {
			if r.Kind == history.Settled {
				b.tell(message{At: recording.Now(), Settled: r.VNs})
			}
		},
	})
	mgr, err := ctrl.NewManager(config, ctrl.Options{
		Scheme: scheme, Metrics: server.Options{BindAddress: "0"}, NewCache: group.NewCache, NewClient: group.NewClient,
	})
	if err != nil {
		return err
	}
	if err := setUpController(mgr, c, b); err != nil {
		return err
	}
	return mgr.Start(group.LeaveOn(ctx))
}

func setUpController(mgr ctrl.Manager, c memberConfig, b *bencher) error {
	sample := &controller.Reconciler{Client: mgr.GetClient()}
	if c.Beat == 0 {
		return sample.SetupWithManager(mgr, c.Workers)
	}
	return sharded.ControllerManagedBy(mgr).
		For(&v1alpha1.Parent{}).
		Owns(&v1alpha1.Child{}).
		WithOptions(crcontroller.Options{MaxConcurrentReconciles: c.Workers}).
		Complete(reconcile.Func(func(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
			start := recording.Now()
			_, err := sample.Reconcile(ctx, req)
			if err == nil {
				b.tell(message{Object: req.String(), Start: start, At: recording.Now()})
			}
			return reconcile.Result{RequeueAfter: c.Beat}, err
		}))
}

// A watchCounter counts what comes by the watches of Parents and Children.
type watchCounter struct {
	inner   http.RoundTripper
	bencher *bencher
}

func (w *watchCounter) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := w.inner.RoundTrip(r)
	if err != nil || r.URL.Query().Get("watch") == "" {
		return resp, err
	}
	if kind := path.Base(r.URL.Path); kind == "parents" || kind == "children" {
		resp.Body = &countedBody{ReadCloser: resp.Body, bencher: w.bencher}
	}
	return resp, nil
}

type countedBody struct {
	io.ReadCloser
	bencher *bencher
	line    []byte // the beginning of the event that is being read, as far as its type
}

func (c *countedBody) Read(p []byte) (int, error) {
	n, err := c.ReadCloser.Read(p)
	c.bencher.watchBytes.Add(int64(n))
	for rest := p[:n]; len(rest) > 0; {
		end := bytes.IndexByte(rest, '\n')
		part := rest
		if end >= 0 {
			part = rest[:end]
		}
		c.line = append(c.line, part[:min(len(part), 32-min(len(c.line), 32))]...)
		if end < 0 {
			break
		}
		if !bytes.Contains(c.line, []byte("BOOKMARK")) {
			c.bencher.watchEvents.Add(1)
		}
		c.line, rest = c.line[:0], rest[end+1:]
	}
	return n, err
}

// profileProcess writes a CPU profile of this process's whole life into the folder DROVER_BENCH_PROFILES.
func profileProcess(name string) (stop func(), err error) {
	dir := os.Getenv("DROVER_BENCH_PROFILES")
	if dir == "" {
		return func() {}, nil
	}
	f, err := os.CreateTemp(dir, name+"-*.pprof")
	if err != nil {
		return nil, err
	}
	if err := pprof.StartCPUProfile(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { pprof.StopCPUProfile(); f.Close() }, nil
}
