package bench

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	goruntime "runtime"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

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
	pods  = size("DROVER_BENCH_PODS", 10_000)
	nodes = size("DROVER_BENCH_NODES", 500)
	// A machine's speed drifts by 15% within a minute, so that turns are short and many: pairs of neighbours are compared.
	attempts = min(size("DROVER_BENCH_ATTEMPTS", 2_500), pods)
	rounds   = size("DROVER_BENCH_ROUNDS", 20)
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

// BenchmarkPlugin lets the scheduler try 10,000 pending pods of 20 shapes on full nodes, 2,500 attempts a turn, by turns
// without the plugin and with it, and reports the medians over the rounds:
//
//   - attempts/s-off, attempts/s-on: scheduling attempts per second of wall-clock time;
//   - slowdown-%: by how much attempts/s fell, the median of the pairs; slowdown-low-% and slowdown-high-% are the bounds of
//     its 95% confidence interval, by the order statistics of the pairs;
//   - in-loop-%: the share of the scheduling loop that was spent in the plugin's PostFilter, by direct measurement; other
//     load on the machine does not disturb it;
//   - cpu-%: by how much more CPU the whole process took for the attempts, writes included.
//
// The scheduler reads pods and nodes from a real API server. In a real cluster the API server has its own machine; here it
// would compete for the loop's cores, so the plugin's writes go to a server that answers at once. DROVER_BENCH_WRITES=real
// lets them go to the real one.
func BenchmarkPlugin(b *testing.B) {
	klog.LogToStderr(false)
	klog.SetOutput(discard{})
	cp := startControlPlane(b)
	client := kubernetes.NewForConfigOrDie(fast(cp.Config()))
	populate(b, client)
	writes := writesTo(b, cp.Config())

	run(b, cp.Config(), writes, false) // conditions are written to the pods once, in no round that counts
	for b.Loop() {
		var off, on, slowdown, inLoop, cpu []float64
		for i := range rounds {
			results := map[bool]result{}
			for _, with := range []bool{i%2 == 0, i%2 != 0} { // who goes first changes with every round
				results[with] = run(b, cp.Config(), writes, with)
			}
			without, with := results[false], results[true]
			b.Logf("round %d: off %.0f attempts/s, on %.0f attempts/s; CPU %.3f and %.3f s; stolen %.1f and %.1f%%; in the loop %v of %v",
				i+1, without.rate(), with.rate(), without.cpu.Seconds(), with.cpu.Seconds(), without.stolen, with.stolen,
				with.inPlugin, with.took)
			off, on = append(off, without.rate()), append(on, with.rate())
			slowdown = append(slowdown, 100*(without.rate()/with.rate()-1))
			inLoop = append(inLoop, 100*with.inPlugin.Seconds()/with.took.Seconds())
			cpu = append(cpu, 100*(with.cpu.Seconds()/without.cpu.Seconds()-1))
		}
		b.ReportMetric(median(off), "attempts/s-off")
		b.ReportMetric(median(on), "attempts/s-on")
		b.ReportMetric(median(on)/median(off), "ratio")
		b.ReportMetric(median(slowdown), "slowdown-%")
		low, high := confidence(slowdown)
		b.ReportMetric(low, "slowdown-low-%")
		b.ReportMetric(high, "slowdown-high-%")
		b.ReportMetric(median(inLoop), "in-loop-%")
		b.ReportMetric(median(cpu), "cpu-%")
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

// result is one turn.
type result struct {
	took, inPlugin, cpu time.Duration
	stolen              float64 // percent of the machine's time that the hypervisor gave to others
}

func (r result) rate() float64 { return float64(attempts) / r.took.Seconds() }

// run starts a scheduler and returns when every pod has been tried once.
func run(b *testing.B, cfg, writes *rest.Config, withPlugin bool) result {
	b.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	meter := &meter{left: int64(attempts), done: make(chan struct{})}
	client := kubernetes.NewForConfigOrDie(fast(cfg))
	informers := scheduler.NewInformerFactory(client, 0)
	broadcaster := events.NewBroadcaster(&events.EventSinkImpl{Interface: client.EventsV1()}) // never started: no events
	defer broadcaster.Shutdown()
	sched, err := scheduler.New(ctx, client, informers, nil, profile.NewRecorderFactory(broadcaster),
		scheduler.WithKubeConfig(writes),
		scheduler.WithProfiles(profileWith(b, withPlugin)),
		scheduler.WithFrameworkOutOfTreeRegistry(frameworkruntime.Registry{
			meterName: func(context.Context, runtime.Object, fwk.Handle) (fwk.Plugin, error) { return meter, nil },
			capacityrequest.Name: func(ctx context.Context, args runtime.Object, h fwk.Handle) (fwk.Plugin, error) {
				plugin, err := capacityrequest.New(ctx, args, h)
				if err != nil {
					return nil, err
				}
				return &timed{inner: plugin.(fwk.PostFilterPlugin), meter: meter}, nil
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
	goruntime.GC() // no round pays for what the one before has left
	var running sync.WaitGroup
	stopProfile := startProfile(b, withPlugin)
	stolen, before, started := stolenTime(), cpuTime(b), time.Now()
	running.Go(func() { sched.Run(ctx) })
	<-meter.done
	stopProfile()
	r := result{took: time.Since(started), cpu: cpuTime(b) - before, inPlugin: time.Duration(meter.inPlugin.Load())}
	r.stolen = 100 * (stolenTime() - stolen).Seconds() / r.took.Seconds() / float64(goruntime.NumCPU())
	cancel()
	running.Wait()
	informers.Shutdown()
	return r
}

// profileWith is the default profile with the plugin, or without, and with the meter last.
func profileWith(b *testing.B, plugin bool) schedulerconfig.KubeSchedulerProfile {
	b.Helper()
	var versioned configv1.KubeSchedulerConfiguration
	schedulerscheme.Scheme.Default(&versioned)
	var cfg schedulerconfig.KubeSchedulerConfiguration
	if err := schedulerscheme.Scheme.Convert(&versioned, &cfg, nil); err != nil {
		b.Fatal(err)
	}
	p := cfg.Profiles[0]
	enabled := []schedulerconfig.Plugin{}
	if plugin {
		enabled = append(enabled, schedulerconfig.Plugin{Name: capacityrequest.Name})
		p.PluginConfig = append(p.PluginConfig, schedulerconfig.PluginConfig{
			Name: capacityrequest.Name,
			// What the round leaves in the queue is not its business.
			Args: &runtime.Unknown{ContentType: runtime.ContentTypeJSON, Raw: []byte(
				`{"apiVersion":"config.drover.sh/v1alpha1","kind":"CapacityRequestArgs","shutdownGracePeriod":"1ms"}`)},
		})
	}
	p.Plugins.PostFilter.Enabled = append(enabled, schedulerconfig.Plugin{Name: meterName})
	return p
}

// meterName is a PostFilter plugin that counts attempts.
const meterName = "Meter"

type meter struct {
	left     int64
	done     chan struct{}
	inPlugin atomic.Int64
}

func (m *meter) Name() string { return meterName }

func (m *meter) PostFilter(context.Context, fwk.CycleState, *corev1.Pod, fwk.NodeToStatusReader) (
	*fwk.PostFilterResult, *fwk.Status,
) {
	if atomic.AddInt64(&m.left, -1) == 0 {
		close(m.done)
	}
	return nil, fwk.NewStatus(fwk.Unschedulable)
}

// timed measures the time that the loop spends in a plugin.
type timed struct {
	inner fwk.PostFilterPlugin
	meter *meter
}

func (p *timed) Name() string { return p.inner.Name() }

func (p *timed) PostFilter(
	ctx context.Context, state fwk.CycleState, pod *corev1.Pod, statuses fwk.NodeToStatusReader,
) (*fwk.PostFilterResult, *fwk.Status) {
	start := time.Now()
	defer func() { p.meter.inPlugin.Add(int64(time.Since(start))) }()
	return p.inner.PostFilter(ctx, state, pod, statuses)
}

// startProfile writes a CPU profile of the round into the folder DROVER_BENCH_PROFILES, for `go tool pprof -diff_base`.
func startProfile(b *testing.B, withPlugin bool) (stop func()) {
	b.Helper()
	dir := os.Getenv("DROVER_BENCH_PROFILES")
	if dir == "" {
		return func() {}
	}
	f, err := os.CreateTemp(dir, map[bool]string{false: "off", true: "on"}[withPlugin]+"-*.pprof")
	if err != nil {
		b.Fatal(err)
	}
	if err := pprof.StartCPUProfile(f); err != nil {
		b.Fatal(err)
	}
	return func() { pprof.StopCPUProfile(); f.Close() }
}

// stolenTime is the time of all processors that the hypervisor gave to other machines; 0 where that is not known.
func stolenTime() time.Duration {
	data, _ := os.ReadFile("/proc/stat")
	line, _, _ := strings.Cut(string(data), "\n")
	const steal, perSecond = 8, 100
	fields := strings.Fields(line)
	if len(fields) <= steal {
		return 0
	}
	ticks, _ := strconv.Atoi(fields[steal])
	return time.Duration(ticks) * time.Second / perSecond
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

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }
