package bench

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime/pprof"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	configv1 "k8s.io/kube-scheduler/config/v1"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler"
	schedulerconfig "k8s.io/kubernetes/pkg/scheduler/apis/config"
	schedulerscheme "k8s.io/kubernetes/pkg/scheduler/apis/config/scheme"
	frameworkruntime "k8s.io/kubernetes/pkg/scheduler/framework/runtime"
	"k8s.io/kubernetes/pkg/scheduler/profile"

	"github.com/drover-sh/drover/demand"
	"github.com/drover-sh/drover/internal/controlplane"
	"github.com/drover-sh/drover/plugins/capacityrequest"
)

// The size of the experiment. Every node is full, so that every pod fails once in every round.
var (
	pods   = size("DROVER_BENCH_PODS", 10_000)
	nodes  = size("DROVER_BENCH_NODES", 500)
	rounds = size("DROVER_BENCH_ROUNDS", 6)
	// turn is the number of attempts between switching the plugin on and off. The speed of a shared machine drifts by 15%
	// within a minute, so that turns are of about a second, and neighbours are compared.
	turn = size("DROVER_BENCH_TURN", 500)
)

const (
	shapes    = 20
	workers   = 32
	namespace = "default"
)

func size(name string, otherwise int) int {
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil && n > 0 {
		return n
	}
	return otherwise
}

// BenchmarkPlugin lets the scheduler try 10,000 pending pods of 20 shapes on full nodes. In every turn of 500 attempts the
// plugin is off or on: off, its PostFilter is left out and its writes wait. The order is off, on, on, off, and again, so that
// a steady drift favours neither. Reported are the medians over the pairs of neighbours:
//
//   - attempts/s-off, attempts/s-on: scheduling attempts per second of wall-clock time;
//   - slowdown-%: by how much attempts/s fell; slowdown-low-% and slowdown-high-% bound its 95% confidence interval, by the
//     order statistics of the pairs;
//   - in-loop-%: the share of the scheduling loop that was spent in the plugin's PostFilter, by direct measurement; other
//     load on the machine does not disturb it;
//   - cpu-%: by how much more CPU the whole process took for the attempts, writes included;
//   - writes/s: requests written per second of the turns that are on.
//
// The scheduler reads pods and nodes from a real API server. In a real cluster the API server has its own machine; here it
// would compete for the loop's cores, so the plugin's writes go to a server that answers at once. DROVER_BENCH_WRITES=real
// lets them go to the real one.
func BenchmarkPlugin(b *testing.B) {
	klog.SetLogger(logr.Discard()) // a scheduler that is stopped amid its queue complains about the pods in flight
	cp := startControlPlane(b)
	client := kubernetes.NewForConfigOrDie(fast(cp.Config()))
	populate(b, client)
	writes := writesTo(b, cp.Config())

	run(b, cp.Config(), writes) // conditions are written to the pods once, in no round that counts
	for b.Loop() {
		var off, on, slowdown, inLoop, cpu, written []float64
		for range rounds {
			turns := run(b, cp.Config(), writes)
			for i := 2; i+1 < len(turns); i += 2 { // the first pair is when caches are cold
				without, with := turns[i], turns[i+1]
				if without.on {
					without, with = with, without
				}
				off, on = append(off, without.rate()), append(on, with.rate())
				slowdown = append(slowdown, 100*(without.rate()/with.rate()-1))
				inLoop = append(inLoop, 100*with.inPlugin.Seconds()/with.took.Seconds())
				cpu = append(cpu, 100*(with.cpu.Seconds()/without.cpu.Seconds()-1))
				written = append(written, float64(with.writes)/with.took.Seconds())
			}
		}
		b.ReportMetric(float64(len(slowdown)), "pairs")
		b.ReportMetric(median(off), "attempts/s-off")
		b.ReportMetric(median(on), "attempts/s-on")
		b.ReportMetric(median(slowdown), "slowdown-%")
		low, high := confidence(slowdown)
		b.ReportMetric(low, "slowdown-low-%")
		b.ReportMetric(high, "slowdown-high-%")
		b.ReportMetric(median(inLoop), "in-loop-%")
		b.ReportMetric(median(cpu), "cpu-%")
		b.ReportMetric(median(written), "writes/s")
	}
}

func median(values []float64) float64 {
	slices.Sort(values)
	n := len(values)
	return (values[(n-1)/2] + values[n/2]) / 2
}

// confidence is the interval that holds the median with a probability of at least 95%: how many of n values are below it
// follows a binomial distribution, whatever the values' own is.
func confidence(values []float64) (low, high float64) {
	slices.Sort(values)
	n := len(values)
	tail, term, outside := 0.0, math.Pow(0.5, float64(n)), 0
	for outside < n/2 && tail+term <= 0.025 {
		tail += term
		term *= float64(n-outside) / float64(outside+1)
		outside++
	}
	outside = max(outside-1, 0)
	return values[outside], values[n-1-outside]
}

// turnResult is one turn.
type turnResult struct {
	on                  bool
	took, inPlugin, cpu time.Duration
	writes              int64
}

func (r turnResult) rate() float64 { return float64(turn) / r.took.Seconds() }

// run starts a scheduler and returns when every pod has been tried once, with the turns.
func run(b *testing.B, cfg, writes *rest.Config) []turnResult {
	b.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	meter := newMeter(b)
	gated := rest.CopyConfig(writes)
	gated.Wrap(func(inner http.RoundTripper) http.RoundTripper { return &gate{inner: inner, meter: meter} })
	client := kubernetes.NewForConfigOrDie(fast(cfg))
	informers := scheduler.NewInformerFactory(client, 0)
	broadcaster := events.NewBroadcaster(&events.EventSinkImpl{Interface: client.EventsV1()}) // never started: no events
	defer broadcaster.Shutdown()
	sched, err := scheduler.New(ctx, client, informers, nil, profile.NewRecorderFactory(broadcaster),
		scheduler.WithKubeConfig(gated),
		scheduler.WithProfiles(profileWithPlugin(b)),
		scheduler.WithFrameworkOutOfTreeRegistry(frameworkruntime.Registry{
			meterName: func(context.Context, runtime.Object, fwk.Handle) (fwk.Plugin, error) { return meter, nil },
			capacityrequest.Name: func(ctx context.Context, args runtime.Object, h fwk.Handle) (fwk.Plugin, error) {
				plugin, err := capacityrequest.New(ctx, args, h)
				if err != nil {
					return nil, err
				}
				return &switched{inner: plugin.(fwk.PostFilterPlugin), meter: meter}, nil
			},
		}))
	if err != nil {
		b.Fatal(err)
	}
	informers.Start(ctx.Done())
	informers.WaitForCacheSync(ctx.Done())
	if err := sched.WaitForHandlersSync(ctx); err != nil {
		b.Fatal(err)
	}
	var running sync.WaitGroup
	stopProfile := startProfile(b)
	meter.begin()
	running.Go(func() { sched.Run(ctx) })
	<-meter.done
	stopProfile()
	cancel()
	meter.switchTo(true) // what waits at the gate may end
	running.Wait()
	informers.Shutdown()
	return meter.turns
}

// profileWithPlugin is the default profile with the plugin, and with the meter last.
func profileWithPlugin(b *testing.B) schedulerconfig.KubeSchedulerProfile {
	b.Helper()
	var versioned configv1.KubeSchedulerConfiguration
	schedulerscheme.Scheme.Default(&versioned)
	var cfg schedulerconfig.KubeSchedulerConfiguration
	if err := schedulerscheme.Scheme.Convert(&versioned, &cfg, nil); err != nil {
		b.Fatal(err)
	}
	p := cfg.Profiles[0]
	p.PluginConfig = append(p.PluginConfig, schedulerconfig.PluginConfig{
		Name: capacityrequest.Name,
		// What the round leaves in the queue is not its business.
		Args: &runtime.Unknown{ContentType: runtime.ContentTypeJSON, Raw: []byte(
			`{"apiVersion":"config.drover.sh/v1alpha1","kind":"CapacityRequestArgs","shutdownGracePeriod":"1ms"}`)},
	})
	p.Plugins.PostFilter.Enabled = append(p.Plugins.PostFilter.Enabled,
		schedulerconfig.Plugin{Name: capacityrequest.Name}, schedulerconfig.Plugin{Name: meterName})
	return p
}

// meterName is a PostFilter plugin that counts attempts, and switches the plugin CapacityRequest off and on.
const meterName = "Meter"

type meter struct {
	b     *testing.B
	turns []turnResult // of the loop's goroutine, until done
	done  chan struct{}

	attempts         int // of this turn
	started          time.Time
	startedCPU       time.Duration
	inPlugin, writes atomic.Int64

	mu sync.Mutex
	on chan struct{} // closed while the plugin is on
}

func newMeter(b *testing.B) *meter {
	return &meter{b: b, done: make(chan struct{}), on: make(chan struct{})}
}

func (m *meter) begin() { m.attempts, m.started, m.startedCPU = 0, time.Now(), cpuTime(m.b) }

func (m *meter) switchTo(on bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case on && !m.isOn():
		close(m.on)
	case !on && m.isOn():
		m.on = make(chan struct{})
	}
}

func (m *meter) isOn() bool {
	select {
	case <-m.on:
		return true
	default:
		return false
	}
}

// opened is closed while the plugin is on.
func (m *meter) opened() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.on
}

func (m *meter) Name() string { return meterName }

func (m *meter) PostFilter(context.Context, fwk.CycleState, *corev1.Pod, fwk.NodeToStatusReader) (
	*fwk.PostFilterResult, *fwk.Status,
) {
	if m.attempts++; m.attempts == turn {
		m.endTurn()
	}
	return nil, fwk.NewStatus(fwk.Unschedulable)
}

// onIn says whether the plugin is on in a turn: off, on, on, off, and again.
func onIn(turn int) bool { return turn%4 == 1 || turn%4 == 2 }

func (m *meter) endTurn() {
	m.turns = append(m.turns, turnResult{
		on: onIn(len(m.turns)), took: time.Since(m.started), cpu: cpuTime(m.b) - m.startedCPU,
		inPlugin: time.Duration(m.inPlugin.Swap(0)), writes: m.writes.Swap(0),
	})
	if n := len(m.turns); n == pods/turn {
		close(m.done)
	} else if n < pods/turn {
		m.switchTo(onIn(n))
	}
	m.begin()
}

// switched leaves the plugin out while it is off, and measures the time that the loop spends in it.
type switched struct {
	inner fwk.PostFilterPlugin
	meter *meter
}

func (p *switched) Name() string { return p.inner.Name() }

func (p *switched) PostFilter(
	ctx context.Context, state fwk.CycleState, pod *corev1.Pod, statuses fwk.NodeToStatusReader,
) (*fwk.PostFilterResult, *fwk.Status) {
	select {
	case <-p.meter.opened():
	default:
		return nil, fwk.NewStatus(fwk.Unschedulable)
	}
	start := time.Now()
	defer func() { p.meter.inPlugin.Add(int64(time.Since(start))) }()
	return p.inner.PostFilter(ctx, state, pod, statuses)
}

// gate lets the plugin's writes wait while it is off.
type gate struct {
	inner http.RoundTripper
	meter *meter
}

func (g *gate) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method == http.MethodPost {
		select {
		case <-g.meter.opened():
			g.meter.writes.Add(1)
		case <-r.Context().Done():
			return nil, r.Context().Err()
		}
	}
	return g.inner.RoundTrip(r)
}

// startProfile writes a CPU profile of the round into the folder DROVER_BENCH_PROFILES.
func startProfile(b *testing.B) (stop func()) {
	b.Helper()
	dir := os.Getenv("DROVER_BENCH_PROFILES")
	if dir == "" {
		return func() {}
	}
	f, err := os.CreateTemp(dir, "round-*.pprof")
	if err != nil {
		b.Fatal(err)
	}
	if err := pprof.StartCPUProfile(f); err != nil {
		b.Fatal(err)
	}
	return func() { pprof.StopCPUProfile(); f.Close() }
}

func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

func startControlPlane(b *testing.B) *controlplane.ControlPlane {
	b.Helper()
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		b.Fatal(err)
	}
	cp, err := controlplane.Start(context.Background(), controlplane.Options{
		Dir:      b.TempDir(),
		CRDPaths: []string{filepath.Join(root, "manifests", "crd", "bases")},
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := cp.Stop(); err != nil {
			b.Error(err)
		}
	})
	return cp
}

// writesTo is the configuration that the plugin gets its clients from.
func writesTo(b *testing.B, real *rest.Config) *rest.Config {
	b.Helper()
	if os.Getenv("DROVER_BENCH_WRITES") == "real" {
		b.Cleanup(func() { deleteRequests(b, real) })
		return real
	}
	server := httptest.NewServer(http.HandlerFunc(answerAtOnce))
	b.Cleanup(func() { server.CloseClientConnections(); server.Close() })
	return &rest.Config{Host: server.URL}
}

// answerAtOnce accepts every write, and has no object of any kind.
func answerAtOnce(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	switch {
	case r.Method == http.MethodPost:
		w.WriteHeader(http.StatusCreated)
		fmt.Fprint(w, `{"apiVersion":"fleet.lucy.sh/v1alpha1","kind":"CapacityRequest"}`)
	case r.URL.Query().Get("watch") == "true":
		if r.URL.Query().Get("sendInitialEvents") == "true" {
			w.WriteHeader(http.StatusUnprocessableEntity) // as a server without streaming lists
			return
		}
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	case filepath.Base(r.URL.Path) == "availablecapacities":
		fmt.Fprint(w, `{"apiVersion":"fleet.lucy.sh/v1alpha1","kind":"AvailableCapacityList",`+
			`"metadata":{"resourceVersion":"1"},"items":[]}`)
	default:
		http.NotFound(w, r) // PodGroups are not there
	}
}

func deleteRequests(b *testing.B, cfg *rest.Config) {
	client, err := demand.RESTClient(cfg, 100, 100)
	if err != nil {
		b.Fatal(err)
	}
	err = client.Delete().Namespace(namespace).Resource("capacityrequests").Do(context.Background()).Error()
	if err != nil {
		b.Error(err)
	}
}

// populate makes full nodes and pending pods.
func populate(b *testing.B, client kubernetes.Interface) {
	b.Helper()
	inParallel(b, nodes, func(i int) error {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{
			Name: fmt.Sprintf("node-%05d", i),
			Labels: map[string]string{
				corev1.LabelHostname:     fmt.Sprintf("node-%05d", i),
				corev1.LabelTopologyZone: fmt.Sprintf("zone-%d", i%3),
			},
		}}
		n.Status.Capacity = list("16", "64Gi")
		n.Status.Capacity[corev1.ResourcePods] = resource.MustParse("110")
		n.Status.Allocatable = n.Status.Capacity
		n, err := client.CoreV1().Nodes().Create(context.Background(), n, metav1.CreateOptions{})
		if err != nil {
			return err
		}
		n.Spec.Taints = nil // the API server's: nobody will say that the node is ready
		if n, err = client.CoreV1().Nodes().Update(context.Background(), n, metav1.UpdateOptions{}); err != nil {
			return err
		}
		return createPod(client, pod(fmt.Sprintf("filler-%05d", i), list("16", "1Gi"), n.Name))
	})
	inParallel(b, pods, func(i int) error {
		shape := i % shapes
		p := pod(fmt.Sprintf("pending-%05d", i), list(fmt.Sprint(1+shape%8), fmt.Sprintf("%dGi", 1+shape)), "")
		p.Labels = map[string]string{"app": fmt.Sprint("shape-", shape)}
		return createPod(client, p)
	})
}

func list(cpu, memory string) corev1.ResourceList {
	return corev1.ResourceList{
		corev1.ResourceCPU: resource.MustParse(cpu), corev1.ResourceMemory: resource.MustParse(memory),
	}
}

func pod(name string, requests corev1.ResourceList, node string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: corev1.PodSpec{
			NodeName: node,
			Containers: []corev1.Container{{
				Name: "c", Image: "none", Resources: corev1.ResourceRequirements{Requests: requests},
			}},
		},
	}
}

func createPod(client kubernetes.Interface, p *corev1.Pod) error {
	_, err := client.CoreV1().Pods(p.Namespace).Create(context.Background(), p, metav1.CreateOptions{})
	return err
}

func inParallel(b *testing.B, n int, do func(i int) error) {
	b.Helper()
	var next atomic.Int64
	var group sync.WaitGroup
	for range workers {
		group.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				if err := do(i); err != nil {
					b.Errorf("object %d: %v", i, err)
					return
				}
			}
		})
	}
	group.Wait()
	if b.Failed() {
		b.FailNow()
	}
}

func fast(cfg *rest.Config) *rest.Config {
	cfg = rest.CopyConfig(cfg)
	cfg.QPS, cfg.Burst = 5000, 5000
	cfg.ContentType = runtime.ContentTypeProtobuf
	return cfg
}
