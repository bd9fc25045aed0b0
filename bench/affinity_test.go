package bench

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
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
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/names"
	frameworkruntime "k8s.io/kubernetes/pkg/scheduler/framework/runtime"
	"k8s.io/kubernetes/pkg/scheduler/profile"

	"github.com/drover-sh/drover/plugins/vnaffinity"
)

// The two profiles, and the plugin that measures both.
const (
	profileOff = "without-vnaffinity"
	profileOn  = "with-vnaffinity"
	stopwatch  = "Stopwatch"
)

// BenchmarkAffinity lets the scheduler place 10,000 pods that have nothing to do with Virtual Nodes on 500 nodes, in turns of
// 500. The pods of a turn ask for a profile with the plugin VNAffinity, with its roles Members (and a limit) and Objects on, or
// for one without it; the order is off, on, on, off, and again. Every pod goes through a whole scheduling cycle, and is assumed
// on its node; nothing is written, so that the API server takes no time from the loop. Reported are medians over the pairs of
// neighbouring turns:
//
//   - pods/s-off, pods/s-on: pods placed per second of wall-clock time;
//   - slowdown-%: by how much pods/s fell; slowdown-low-% and slowdown-high-% bound its 95% confidence interval.
func BenchmarkAffinity(b *testing.B) {
	klog.SetLogger(logr.Discard()) // a scheduler that is stopped complains about the pods in flight
	cp := startControlPlane(b)
	client := kubernetes.NewForConfigOrDie(fast(cp.Config()))
	populateEmpty(b, client)

	for b.Loop() {
		var off, on, slowdown []float64
		for range rounds {
			turns := place(b, cp.Config())
			for i := 2; i+1 < len(turns); i += 2 { // the first pair is when caches are cold
				without, with := turns[i], turns[i+1]
				if without.on {
					without, with = with, without
				}
				off, on = append(off, without.rate()), append(on, with.rate())
				slowdown = append(slowdown, 100*(without.rate()/with.rate()-1))
			}
		}
		b.ReportMetric(float64(len(slowdown)), "pairs")
		b.ReportMetric(median(off), "pods/s-off")
		b.ReportMetric(median(on), "pods/s-on")
		b.ReportMetric(median(slowdown), "slowdown-%")
		low, high := confidence(slowdown)
		b.ReportMetric(low, "slowdown-low-%")
		b.ReportMetric(high, "slowdown-high-%")
	}
}

// populateEmpty makes nodes with nothing on them, and pending pods whose turn is in their scheduler's name.
func populateEmpty(b *testing.B, client kubernetes.Interface) {
	b.Helper()
	inParallel(b, nodes, func(i int) error {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{
			Name: fmt.Sprintf("node-%05d", i),
			Labels: map[string]string{
				corev1.LabelHostname:     fmt.Sprintf("node-%05d", i),
				corev1.LabelTopologyZone: fmt.Sprintf("zone-%d", i%3),
			},
		}}
		n.Status.Capacity = list("64", "256Gi")
		n.Status.Capacity[corev1.ResourcePods] = resource.MustParse("110")
		n.Status.Allocatable = n.Status.Capacity
		n, err := client.CoreV1().Nodes().Create(context.Background(), n, metav1.CreateOptions{})
		if err != nil {
			return err
		}
		n.Spec.Taints = nil // the API server's: nobody will say that the node is ready
		_, err = client.CoreV1().Nodes().Update(context.Background(), n, metav1.UpdateOptions{})
		return err
	})
	// The queue has the pods of one priority in the order in which they happen to come, so every turn has its own.
	inParallel(b, pods/turn+1, func(i int) error {
		class := &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("turn-", i)}, Value: int32(pods/turn - i)}
		_, err := client.SchedulingV1().PriorityClasses().Create(context.Background(), class, metav1.CreateOptions{})
		return err
	})
	inParallel(b, pods, func(i int) error {
		p := pod(fmt.Sprintf("plain-%05d", i), list("100m", "128Mi"), "")
		p.Spec.SchedulerName, p.Spec.PriorityClassName = profileOff, fmt.Sprint("turn-", i/turn)
		if onIn(i / turn) {
			p.Spec.SchedulerName = profileOn
		}
		return createPod(client, p)
	})
}

// place starts a scheduler and returns when every pod has been placed once, with the turns.
func place(b *testing.B, cfg *rest.Config) []turnResult {
	b.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	watch := &placements{b: b, done: make(chan struct{})}
	client := kubernetes.NewForConfigOrDie(fast(cfg))
	informers := scheduler.NewInformerFactory(client, 0)
	broadcaster := events.NewBroadcaster(&events.EventSinkImpl{Interface: client.EventsV1()}) // never started: no events
	defer broadcaster.Shutdown()
	sched, err := scheduler.New(ctx, client, informers, nil, profile.NewRecorderFactory(broadcaster),
		scheduler.WithKubeConfig(cfg),
		scheduler.WithProfiles(affinityProfile(b, profileOff), affinityProfile(b, profileOn)),
		scheduler.WithFrameworkOutOfTreeRegistry(frameworkruntime.Registry{
			stopwatch:       func(context.Context, runtime.Object, fwk.Handle) (fwk.Plugin, error) { return watch, nil },
			vnaffinity.Name: vnaffinity.New,
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
	watch.started = time.Now()
	running.Go(func() { sched.Run(ctx) })
	<-watch.done
	stopProfile()
	cancel()
	running.Wait()
	informers.Shutdown()
	return watch.turns
}

// affinityProfile is the default profile with the stopwatch, and with the plugin if the name says so.
func affinityProfile(b *testing.B, name string) schedulerconfig.KubeSchedulerProfile {
	b.Helper()
	var versioned configv1.KubeSchedulerConfiguration
	schedulerscheme.Scheme.Default(&versioned)
	var cfg schedulerconfig.KubeSchedulerConfiguration
	if err := schedulerscheme.Scheme.Convert(&versioned, &cfg, nil); err != nil {
		b.Fatal(err)
	}
	p := cfg.Profiles[0]
	p.SchedulerName = name
	p.Plugins.Reserve.Enabled = []schedulerconfig.Plugin{{Name: stopwatch}}
	p.Plugins.Bind.Enabled = []schedulerconfig.Plugin{{Name: stopwatch}}
	p.Plugins.Bind.Disabled = []schedulerconfig.Plugin{{Name: names.DefaultBinder}}
	if name == profileOff {
		return p
	}
	p.PluginConfig = append(p.PluginConfig, schedulerconfig.PluginConfig{
		Name: vnaffinity.Name,
		Args: &runtime.Unknown{ContentType: runtime.ContentTypeJSON, Raw: []byte(
			`{"apiVersion":"config.drover.sh/v1alpha1","kind":"VNAffinityArgs","objects":{"mode":"Domains"},` +
				`"members":{"maxShareLostPerDomain":{"topology.kubernetes.io/zone":0.5}}}`)},
	})
	for _, set := range []*schedulerconfig.PluginSet{&p.Plugins.PreFilter, &p.Plugins.Filter, &p.Plugins.PreScore, &p.Plugins.Score} {
		set.Enabled = append(set.Enabled, schedulerconfig.Plugin{Name: vnaffinity.Name, Weight: 20})
	}
	return p
}

// placements is a plugin that counts the pods that get a node, and binds them in nobody's eyes but the scheduler's.
type placements struct {
	b       *testing.B
	turns   []turnResult // of the loop's goroutine, until done
	done    chan struct{}
	placed  int // in this turn
	started time.Time
}

func (p *placements) Name() string { return stopwatch }

func (p *placements) Reserve(_ context.Context, _ fwk.CycleState, pod *corev1.Pod, _ string) *fwk.Status {
	on := pod.Spec.SchedulerName == profileOn
	if on != onIn(len(p.turns)) && len(p.turns) < pods/turn {
		p.b.Errorf("turn %d: pod %s asks for %s: the queue is not in the order of priority", len(p.turns), pod.Name, pod.Spec.SchedulerName)
	}
	if p.placed++; p.placed == turn {
		p.turns = append(p.turns, turnResult{on: on, took: time.Since(p.started)})
		p.placed, p.started = 0, time.Now()
		if len(p.turns) == pods/turn {
			close(p.done)
		}
	}
	return nil
}

func (p *placements) Unreserve(context.Context, fwk.CycleState, *corev1.Pod, string) {}

func (p *placements) Bind(context.Context, fwk.CycleState, *corev1.Pod, string) *fwk.Status {
	return nil
}
