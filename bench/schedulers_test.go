package bench

import (
	"context"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/drover-sh/drover/internal/activeschedulers"
	"github.com/drover-sh/drover/internal/controlplane"
)

// BenchmarkSchedulers compares three active schedulers with a lone one that has no group, in turns of one run: one, three,
// three, one. A turn begins when its first pod is created, and ends when its last pod is bound. Everything is real, and on
// few cores the API server, the schedulers and the creation of the pods take the same processors, so that pods a second say
// little about what three machines could do. What the schedulers use themselves, in attempts and in CPU time a pod, says
// more.
//
//	go test -run '^$' -bench Schedulers -benchtime 1x -timeout 30m ./bench/...
//
// DROVER_BENCH_ACTIVE_NODES and DROVER_BENCH_ACTIVE_PODS change the size.
func BenchmarkSchedulers(b *testing.B) {
	nodes, pods := size("DROVER_BENCH_ACTIVE_NODES", 300), size("DROVER_BENCH_ACTIVE_PODS", 1500)
	c, err := activeschedulers.Start(b.Context(), b.TempDir(), controlplane.Options{})
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		if err := c.Stop(); err != nil {
			b.Error(err)
		}
	}()
	t := &activeTurns{b: b, c: c, pods: pods}
	t.makeNodes(nodes)
	sums := map[int]*activeTurn{1: {}, 3: {}}
	for range b.N {
		for _, n := range []int{1, 3, 3, 1} {
			r := t.run(n)
			b.Logf("%d schedulers: %.0f pods/s, %.2f attempts and %.2f ms of scheduler CPU a pod, %.0f handed on, %.0f conflicts, "+
				"%.0f placements given up", n, r.rate, r.attempts/float64(pods), r.cpu*1000/float64(pods), r.moves, r.conflicts, r.refused)
			sums[n].add(r)
		}
	}
	turns := float64(2 * b.N)
	for n, name := range map[int]string{1: "one", 3: "three"} {
		s := sums[n]
		b.ReportMetric(s.rate/turns, name+"-pods/s")
		b.ReportMetric(s.attempts/turns/float64(pods), name+"-attempts/pod")
		b.ReportMetric(s.cpu*1000/turns/float64(pods), name+"-cpu-ms/pod")
	}
	b.ReportMetric(sums[3].conflicts/turns, "three-conflicts/turn")
	b.ReportMetric(sums[3].moves/turns, "three-moves/turn")
	b.ReportMetric(sums[3].rate/sums[1].rate, "three/one")
	b.ReportMetric(0, "ns/op")
}

type activeTurn struct{ rate, attempts, cpu, moves, conflicts, refused float64 }

func (t *activeTurn) add(o activeTurn) {
	t.rate, t.attempts, t.cpu = t.rate+o.rate, t.attempts+o.attempts, t.cpu+o.cpu
	t.moves, t.conflicts, t.refused = t.moves+o.moves, t.conflicts+o.conflicts, t.refused+o.refused
}

type activeTurns struct {
	b    *testing.B
	c    *activeschedulers.Cluster
	pods int
	turn int
}

func (t *activeTurns) makeNodes(n int) {
	inParallel(t.b, n, func(i int) error {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("node-%05d", i)}}
		node.Labels = map[string]string{corev1.LabelHostname: node.Name}
		node.Status.Capacity = list("16", "64Gi")
		node.Status.Capacity[corev1.ResourcePods] = resource.MustParse("110")
		node.Status.Allocatable = node.Status.Capacity
		if err := t.c.Client.Create(context.Background(), node); err != nil {
			return err
		}
		before := node.DeepCopy()
		node.Spec.Taints = nil // the API server's: nobody will say that the node is ready
		return t.c.Client.Patch(context.Background(), node, client.MergeFrom(before))
	})
}

// run lets n schedulers place the pods. One has no group.
func (t *activeTurns) run(n int) activeTurn {
	t.b.Helper()
	t.turn++
	var running []*activeschedulers.Scheduler
	for i := range n {
		start := t.c.StartLoneScheduler
		if n > 1 {
			start = func(name string) (*activeschedulers.Scheduler, error) { return t.c.StartScheduler(name) }
		}
		s, err := start(fmt.Sprintf("turn-%d-%d", t.turn, i))
		if err != nil {
			t.b.Fatal(err)
		}
		running = append(running, s)
	}
	t.wait("the schedulers are ready", func(ctx context.Context) bool {
		for _, s := range running {
			if _, err := s.Metric("scheduler_schedule_attempts_total", ""); err != nil {
				return false
			}
		}
		owned, still, err := t.c.Owned(ctx)
		return err == nil && (n == 1 || (still && len(owned) == n))
	})
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("turn-", t.turn)}}
	if err := t.c.Client.Create(t.b.Context(), ns); err != nil {
		t.b.Fatal(err)
	}
	before := t.cpu(running)
	started := time.Now()
	inParallel(t.b, t.pods, func(i int) error {
		p := pod(fmt.Sprintf("p-%05d", i), list("100m", "100Mi"), "")
		p.Namespace, p.Spec.SchedulerName = ns.Name, activeschedulers.SchedulerName
		return t.c.Client.Create(context.Background(), p)
	})
	t.wait("all pods are bound", func(context.Context) bool {
		// The counter is cheaper to read than the pods.
		sum, _ := t.sum(running, "scheduler_schedule_attempts_total", `result="scheduled"`)
		return int(sum) >= t.pods
	})
	took := time.Since(started)
	r := activeTurn{rate: float64(t.pods) / took.Seconds(), cpu: t.cpu(running) - before}
	for _, m := range []struct {
		to   *float64
		name string
	}{
		{&r.attempts, "scheduler_schedule_attempts_total"}, {&r.moves, "drover_vnaffinity_moves_total"},
		{&r.conflicts, "drover_vnaffinity_bind_conflicts_total"}, {&r.refused, "drover_vnaffinity_reserve_refused_total"},
	} {
		var err error
		if *m.to, err = t.sum(running, m.name, ""); err != nil {
			t.b.Fatal(err)
		}
	}
	for _, s := range running {
		if err := s.Stop(20 * time.Second); err != nil {
			t.b.Error(err)
		}
	}
	if err := t.c.Client.DeleteAllOf(t.b.Context(), &corev1.Pod{}, client.InNamespace(ns.Name), client.GracePeriodSeconds(0)); err != nil {
		t.b.Fatal(err)
	}
	return r
}

func (t *activeTurns) sum(running []*activeschedulers.Scheduler, name, labels string) (float64, error) {
	sum := 0.0
	for _, s := range running {
		v, err := s.Metric(name, labels)
		if err != nil {
			return 0, err
		}
		sum += v
	}
	return sum, nil
}

// cpu returns the seconds of CPU that the schedulers have used.
func (t *activeTurns) cpu(running []*activeschedulers.Scheduler) float64 {
	t.b.Helper()
	sum := 0.0
	for _, s := range running {
		v, err := s.Metric("process_cpu_seconds_total", "")
		if err != nil {
			t.b.Fatal(err)
		}
		sum += v
	}
	return sum
}

func (t *activeTurns) wait(what string, done func(context.Context) bool) {
	t.b.Helper()
	ctx, cancel := context.WithTimeout(t.b.Context(), 5*time.Minute)
	defer cancel()
	for !done(ctx) {
		select {
		case <-ctx.Done():
			t.b.Fatalf("waited in vain until %s", what)
		case <-time.After(50 * time.Millisecond):
		}
	}
}
