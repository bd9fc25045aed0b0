package playground

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/internal/activeschedulers"
	"github.com/drover-sh/drover/plugins/vnaffinity"
)

// Schedulers lets three schedulers be active at once, and kills one of them. Nothing sold is wanted: pods that wait for the
// Lease of the one that was killed are not short of capacity.
func Schedulers() Story {
	const zone, nodes, perNode = "us-east-1a", 18, 16
	const first = nodes * perNode / 3
	return Story{
		Name:      "schedulers",
		Title:     "3 schedulers active at once share nodes and pods; one is killed -9; no node over-committed, no pod lost",
		Offerings: []configv1alpha1.Offering{cpuOffering(100)},
		Play: func(s *Stage) {
			s.AtMostNodes(0)
			s.Always("nobody asks for capacity", func(w *World) string {
				if n := len(w.Requests()); n > 0 {
					return fmt.Sprintf("%d requests", n)
				}
				return ""
			})
			s.Always("no node has more on it than fits", func(w *World) string { return overCommitted(w) })
			s.addZone(zone, nodes)
			c := s.activeSchedulers("a", "b", "c")
			if s.Failed() {
				return
			}

			s.createActive("web", first, nil)
			s.AwaitRunning("web", first)
			s.Look(func(w *World) { s.Step("%d pods running; bound by %s", first, boundBy(w, "web")) })

			s.createActive("pinned", nodes, func(i int, p *corev1.Pod) {
				p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: fmt.Sprintf("%s-%02d", zone, i)}
			})
			s.AwaitRunning("pinned", nodes)
			s.Look(func(w *World) {
				moved := 0
				for _, p := range w.PodsOf("pinned") {
					if p.Annotations[vnaffinity.AnnotationReplica] != "" {
						moved++
					}
				}
				if moved == 0 {
					s.fail(errors.New("expected: pods that move on; seen: none"))
				}
				s.Step("%d pods that fit on one node each: %d moved on to the scheduler that owns it", nodes, moved)
			})

			if err := c["b"].Kill(); err != nil {
				s.fail(err)
			}
			s.Step("scheduler b is killed (kill -9)")
			const rest = nodes*perNode - first - nodes
			s.createActive("late", rest, nil)
			s.AwaitRunning("late", rest)
			s.Look(func(w *World) {
				s.Step("%d more pods fill the last place of every node, those of b included; bound by %s", rest, boundBy(w, "late"))
			})
		},
	}
}

// activeSchedulers starts the coordinator and schedulers of these names. All of it goes when the story ends.
func (s *Stage) activeSchedulers(names ...string) map[string]*activeschedulers.Scheduler {
	if s.Failed() {
		return nil
	}
	c, err := activeschedulers.On(s.ctx, s.p.kube, activeschedulers.Programs{
		Coordinator: s.p.programOf(coordinator), Scheduler: s.p.programOf(Scheduler),
	}, s.p.storyDir(s.story))
	if err != nil {
		s.fail(err)
		return nil
	}
	started := make(map[string]*activeschedulers.Scheduler)
	s.atEnd = append(s.atEnd, func(ctx context.Context) error {
		var errs []error
		for _, p := range started {
			if s.ctx.Err() != nil {
				errs = append(errs, p.Kill())
			} else {
				errs = append(errs, p.Stop(stopGrace))
			}
		}
		if s.ctx.Err() != nil { // nobody waits for Leases
			group := &lbv1alpha1.WatchGroup{}
			group.Namespace, group.Name = activeschedulers.Namespace, activeschedulers.Group
			errs = append(errs, client.IgnoreNotFound(s.p.view.client.Delete(ctx, group)), s.unhold(ctx, activeschedulers.Namespace))
		}
		errs = append(errs, c.Remove(ctx))
		if s.err == nil || s.p.entry != nil { // otherwise its logs explain what was wrong
			errs = append(errs, os.RemoveAll(s.p.storyDir(s.story)))
		}
		return errors.Join(errs...)
	})
	for _, name := range names {
		p, err := c.StartScheduler(name)
		if err != nil {
			s.fail(err)
			break
		}
		started[name] = p
	}
	s.Await(fmt.Sprintf("%d schedulers share the Virtual Nodes", len(names)), func(*World) (bool, string) {
		owned, still, err := c.Owned(s.ctx)
		if err != nil {
			return false, err.Error()
		}
		all := !slices.ContainsFunc(names, func(name string) bool { return owned[name] == 0 })
		if still && all {
			s.Step("%d schedulers are active; of %d Virtual Nodes they own %s", len(names), activeschedulers.VirtualNodes, say(owned))
			return true, ""
		}
		return false, say(owned)
	})
	return started
}

// createActive creates pods of one CPU for the active schedulers.
func (s *Stage) createActive(app string, n int, change func(i int, p *corev1.Pod)) {
	for i := range n {
		p := pod(fmt.Sprintf("%s-%03d", app, i), template(app, "cpu", "1", "memory", "1Gi"))
		p.Spec.SchedulerName = activeschedulers.SchedulerName
		if change != nil {
			change(i, p)
		}
		s.Create(p)
	}
}

// overCommitted names the first node that has more CPU requested on it than it has.
func overCommitted(w *World) string {
	used := map[string]int64{}
	for _, app := range []string{"web", "pinned", "late"} {
		for _, p := range w.PodsOf(app) {
			if p.Spec.NodeName != "" {
				used[p.Spec.NodeName] += p.Spec.Containers[0].Resources.Requests.Cpu().MilliValue()
			}
		}
	}
	for name, milli := range used {
		if n := w.Node(name); n != nil && milli > n.Status.Allocatable.Cpu().MilliValue() {
			return fmt.Sprintf("%s has %dm of %s", name, milli, n.Status.Allocatable.Cpu())
		}
	}
	return ""
}

// boundBy says how many sessions have bound how many pods.
func boundBy(w *World, app string) string {
	counts := map[string]int{}
	for _, p := range w.PodsOf(app) {
		counts[p.Annotations[vnaffinity.AnnotationBoundBy]]++
	}
	var parts []string
	for _, n := range counts {
		parts = append(parts, fmt.Sprint(n))
	}
	slices.Sort(parts)
	return fmt.Sprintf("%d schedulers: %s", len(counts), strings.Join(parts, ", "))
}
