package playground

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	"github.com/drover-sh/drover/internal/controlplane"
)

// patience is how long a step may take. It is generous: a story's point is what happens, not how fast on a busy
// machine.
const patience = 3 * time.Minute

// Story is a scenario.
type Story struct {
	// Name is its name on the command line and, with a prefix, its namespace.
	Name string
	// Title says in a line what it shows.
	Title string
	// Offerings are what the provider sells during the story.
	Offerings []configv1alpha1.Offering
	// Kueue says that the story needs the Kueue manager.
	Kueue bool
	// Play plays it. It works through the Stage, which remembers the first failure; what is called after one does nothing.
	Play func(s *Stage)
}

// Step is something that happened in a story.
type Step struct {
	// Seconds since the story's start.
	Seconds float64 `json:"seconds"`
	Text    string  `json:"text"`
}

// Result tells how a story went.
type Result struct {
	Name    string  `json:"name"`
	OK      bool    `json:"ok"`
	Seconds float64 `json:"seconds"`
	// Pods and Requests that the story saw in its namespace; DaemonSet pods do not count.
	Pods     int `json:"pods"`
	Requests int `json:"requests"`
	// RollUpRows and RollUpBytes are the most that any roll-up had.
	RollUpRows  int `json:"rollUpRows"`
	RollUpBytes int `json:"rollUpBytes"`
	// NodesLaunched and NodesReclaimed count nodes that came, and that came and went.
	NodesLaunched  int `json:"nodesLaunched"`
	NodesReclaimed int `json:"nodesReclaimed"`
	// Objects are the Parents and Children, VirtualNodes those of their WatchGroup, Moves how often one of those came to
	// another member, and Reconciles how many were counted; only in stories about sharding.
	Objects      int `json:"objects,omitempty"`
	VirtualNodes int `json:"virtualNodes,omitempty"`
	Moves        int `json:"moves,omitempty"`
	Reconciles   int `json:"reconciles,omitempty"`
	// Workloads are those of Kueue, and Admissions how often Kueue admitted one; only in stories with Kueue.
	Workloads  int    `json:"workloads,omitempty"`
	Admissions int    `json:"admissions,omitempty"`
	Steps      []Step `json:"steps"`
	// Error says what was expected and what was seen instead, and Logs where to look.
	Error string `json:"error,omitempty"`
	Logs  string `json:"logs,omitempty"`
	// Interrupted is true when the story was ended from outside before it could show anything.
	Interrupted bool `json:"interrupted,omitempty"`
}

// Stage is what a story works with.
type Stage struct {
	ctx       context.Context
	p         *Playground
	story     string
	namespace string
	recorder  *recorder
	begin     time.Time
	// unscoped are the story's objects that have no namespace, which would take them along.
	unscoped []client.Object
	// atEnd is called before the story's objects are deleted, the last one first, whatever has happened.
	atEnd []func(context.Context) error
	// figures are added to the result.
	figures func(*Result)

	steps []Step
	err   error
	logs  string // where the logs are that explain err
}

// Run plays a story. The playground has to be idle: no other launched nodes and no requests.
func (p *Playground) Run(ctx context.Context, story Story) Result {
	var unready error
	if story.Kueue {
		unready = p.EnableKueue(ctx)
	}
	s := &Stage{ctx: ctx, p: p, story: story.Name, namespace: "story-" + story.Name, begin: time.Now()}
	p.present.StoryBegins(story)
	if unready != nil {
		s.fail(unready)
	}
	sampling, stopSampling := context.WithCancel(ctx)
	var sampler sync.WaitGroup
	sampler.Go(func() { p.sampleRollUps(sampling) })

	if s.prepare(story) {
		if s.err == nil {
			story.Play(s)
			s.checkRules()
		}
		s.cleanUp()
	}
	stopSampling()
	sampler.Wait()

	result := s.result(story)
	p.present.StoryEnds(story, result)
	return result
}

// prepare makes sure that the story has the playground for itself; when it returns false, there is nothing to clean up.
func (s *Stage) prepare(story Story) bool {
	s.p.view.look("", func(w *World) {
		if nodes, requests := w.Nodes(), w.Requests(); len(nodes)+len(requests) > 0 {
			s.fail(fmt.Errorf("the playground is in use: %d launched nodes, %d requests; a story needs it for itself: "+
				"delete what you created and wait until the nodes are gone", len(nodes), len(requests)))
		}
		s.recorder = newRecorder(s.namespace, w.v.nodes)
		w.v.recorder = s.recorder
	})
	if s.err != nil {
		return false
	}
	// The namespace is also the lock: whoever creates it plays, and cleans up.
	s.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: s.namespace}})
	if s.err != nil {
		return false
	}
	s.SetOfferings(story.Offerings)
	s.awaitOfferings(story.Offerings)
	return true
}

// awaitOfferings waits until the cluster knows what is sold: before that, a plan could still count on what was.
func (s *Stage) awaitOfferings(offerings []configv1alpha1.Offering) {
	want := map[string]int32{}
	for _, o := range offerings {
		for _, d := range o.Domains {
			want[o.Name] += d.Count
		}
	}
	s.Await(fmt.Sprintf("AvailableCapacity %v", want), func(w *World) (bool, string) {
		got := w.Available()
		return maps.Equal(got, want), fmt.Sprint(got)
	})
}

func (s *Stage) result(story Story) Result {
	r := Result{Name: story.Name, OK: s.err == nil, Seconds: time.Since(s.begin).Seconds(), Steps: s.steps}
	s.p.view.look("", func(w *World) {
		rec := s.recorder
		w.v.recorder = nil
		r.Pods, r.Requests = rec.podsSeen(), len(rec.requests)
		r.RollUpRows, r.RollUpBytes = rec.maxRows, rec.maxBytes
		r.NodesLaunched, r.NodesReclaimed = rec.nodesLaunched(), rec.nodesReclaimed()
		r.Workloads, r.Admissions = len(rec.workloads), rec.admissions()
	})
	if s.figures != nil {
		s.figures(&r)
	}
	if s.err != nil {
		r.Error, r.Logs, r.Interrupted = s.err.Error(), s.logs, s.ctx.Err() != nil
	}
	return r
}

// Failed says whether the story has failed already.
func (s *Stage) Failed() bool { return s.err != nil }

// Namespace is the story's own.
func (s *Stage) Namespace() string { return s.namespace }

// fail remembers the first failure, and the logs as they are then.
func (s *Stage) fail(err error) {
	if s.err == nil {
		s.err = err
		if s.ctx.Err() == nil { // an interruption has nothing to explain
			s.logs = s.p.keepLogs(s.story)
		}
	}
}

// Fail lets the story fail.
func (s *Stage) Fail(format string, args ...any) { s.fail(fmt.Errorf(format, args...)) }

// Update writes an object that the story made and has changed.
func (s *Stage) Update(o client.Object) {
	if s.err != nil {
		return
	}
	current := o.DeepCopyObject().(client.Object)
	err := retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		if err := s.p.view.client.Get(s.ctx, client.ObjectKeyFromObject(o), current); err != nil {
			return err
		}
		o.SetResourceVersion(current.GetResourceVersion())
		return s.p.view.client.Update(s.ctx, o)
	})
	if err != nil {
		s.fail(fmt.Errorf("updating %T %s: %w", o, o.GetName(), err))
	}
}

// Step tells what has happened.
func (s *Stage) Step(format string, args ...any) {
	if s.err != nil {
		return
	}
	step := Step{Seconds: time.Since(s.begin).Seconds(), Text: fmt.Sprintf(format, args...)}
	s.steps = append(s.steps, step)
	s.p.present.Step(step)
}

// Create makes objects, in the story's namespace where they have one.
func (s *Stage) Create(objects ...client.Object) {
	for _, o := range objects {
		if s.err != nil {
			return
		}
		namespaced, err := s.p.view.client.IsObjectNamespaced(o)
		if err != nil {
			s.fail(fmt.Errorf("creating %T %s: %w", o, o.GetName(), err))
			return
		}
		if namespaced {
			o.SetNamespace(s.namespace)
		}
		s.create(o)
		if _, node := o.(*corev1.Node); s.err == nil && !namespaced && !node { // nodes go by their label
			s.unscoped = append(s.unscoped, o)
		}
	}
}

func (s *Stage) create(o client.Object) {
	if s.err != nil {
		return
	}
	err := s.p.view.client.Create(s.ctx, o)
	if apierrors.IsAlreadyExists(err) {
		err = fmt.Errorf("%w (left by a story that was interrupted? delete it first)", err)
	}
	if err != nil {
		s.fail(fmt.Errorf("creating %T %s: %w", o, o.GetName(), err))
	}
}

// Delete deletes objects as kubectl does: what they own goes, too.
func (s *Stage) Delete(objects ...client.Object) {
	for _, o := range objects {
		if s.err != nil {
			return
		}
		err := s.p.view.client.Delete(s.ctx, o, client.PropagationPolicy(metav1.DeletePropagationBackground))
		if err != nil && !apierrors.IsNotFound(err) {
			s.fail(fmt.Errorf("deleting %T %s: %w", o, o.GetName(), err))
		}
	}
}

// SetOfferings changes what the provider sells.
func (s *Stage) SetOfferings(offerings []configv1alpha1.Offering) {
	if s.err == nil {
		if err := s.p.SetOfferings(offerings); err != nil {
			s.fail(err)
		}
	}
}

// Await waits until the condition holds. The condition also says what it sees, for people who watch and for the error.
// The rules are checked, too: a broken one ends the wait.
func (s *Stage) Await(expected string, condition func(w *World) (ok bool, seen string)) {
	if s.err != nil {
		return
	}
	ctx, cancel := context.WithTimeoutCause(s.ctx, patience, fmt.Errorf("%s have passed", patience))
	defer cancel()
	var seen string
	err := s.p.view.wait(ctx, func(w *World) bool {
		if len(s.recorder.violations) > 0 {
			return true
		}
		var ok bool
		ok, seen = condition(w)
		if s.recorder.shows != nil {
			s.recorder.shows(w)
		}
		if !ok {
			s.p.present.Progress(time.Since(s.begin), expected, seen)
		}
		return ok
	}, s.namespace)
	if err != nil {
		s.fail(fmt.Errorf("expected: %s; seen: %s (%w)%s", expected, seen, err, s.hints()))
	}
	s.checkRules()
}

// AwaitRollUps waits until the autoscaler has taken n further roll-ups: enough to have acted, if it were to act.
func (s *Stage) AwaitRollUps(n int) {
	first := -1
	s.Await(fmt.Sprintf("%d more roll-ups", n), func(w *World) (bool, string) {
		if first < 0 {
			first = w.RollUpsSent()
		}
		sent := w.RollUpsSent() - first
		if sent < 0 { // the manager has been restarted
			first = 0
		}
		return sent >= n, fmt.Sprintf("%d", sent)
	})
}

// Always adds a rule that has to hold from now to the end of the story, at every single change.
func (s *Stage) Always(name string, broken func(w *World) string) {
	s.p.view.look(s.namespace, func(w *World) {
		s.recorder.rules = append(s.recorder.rules, rule{name: name, broken: broken})
		s.recorder.check(w.v)
	})
}

// AtMostNodes is the rule that no more nodes than this are ever there.
func (s *Stage) AtMostNodes(limit int) {
	s.Always(fmt.Sprintf("at most %d nodes", limit), func(w *World) string {
		if n := len(w.Nodes()); n > limit {
			return fmt.Sprintf("%d nodes", n)
		}
		return ""
	})
}

// Look reads the world as it is.
func (s *Stage) Look(f func(w *World)) { s.p.view.look(s.namespace, f) }

func (s *Stage) checkRules() {
	s.p.view.look(s.namespace, func(*World) {
		if len(s.recorder.violations) > 0 {
			s.fail(errors.New("broken rule: " + strings.Join(s.recorder.violations, "; ")))
		}
	})
}

// Table shows what kubectl prints, cut to a few rows each.
func (s *Stage) Table(args ...string) {
	if s.err == nil {
		s.p.table(s.ctx, args...)
	}
}

func (p *Playground) table(ctx context.Context, args ...string) {
	if !p.present.WantsTables() {
		return
	}
	out, err := p.kubectl(ctx, args...)
	if err == nil {
		p.present.Table("kubectl "+strings.Join(args, " "), out)
	}
}

// kubectl runs it with the administrator's rights and returns what it prints.
func (p *Playground) kubectl(ctx context.Context, args ...string) (string, error) {
	path, err := controlplane.Binary("kubectl")
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, path, append([]string{"--kubeconfig=" + p.kube}, args...)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("kubectl %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return string(out), nil
}

// hints helps whoever reads a failure: why a pod waits, and what is on its way.
func (s *Stage) hints() string {
	var hints []string
	s.Look(func(w *World) {
		for _, p := range w.Pods() {
			i := slices.IndexFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
				return c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse
			})
			if i >= 0 && p.Spec.NodeName == "" {
				hints = append(hints, fmt.Sprintf("pod %s waits: %s", p.Name, p.Status.Conditions[i].Message))
				break
			}
		}
		for _, wl := range w.Workloads() {
			if !admitted(wl) {
				hints = append(hints, fmt.Sprintf("workload of job %s waits: %s", jobOf(wl), checkState(wl).Message))
				break
			}
		}
		phases := map[string]int{}
		for _, u := range w.Upcoming() {
			phases[string(u.Status.Phase)]++
		}
		if len(phases) > 0 {
			hints = append(hints, fmt.Sprintf("upcoming nodes: %v", phases))
		}
		rows, _ := w.RollUp()
		hints = append(hints, fmt.Sprintf("requests: %d, of them acknowledged: %d; roll-up: %d rows; nodes: %d, ready: %d",
			len(w.Requests()), w.Acknowledged(), rows, len(w.Nodes()), len(w.ReadyNodes())))
	})
	return "\n  " + strings.Join(hints, "\n  ")
}

// cleanUp deletes what the story made and waits until the nodes are gone, so that the next story starts from nothing.
// It works also after an interruption, but then for a short time only: what is left goes with the playground.
func (s *Stage) cleanUp() {
	ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(s.ctx), patience, fmt.Errorf("%s have passed", patience))
	if s.ctx.Err() != nil {
		ctx, cancel = context.WithTimeout(context.WithoutCancel(s.ctx), 5*time.Second)
	}
	defer cancel()
	c := s.p.view.client
	var ended error
	for _, end := range slices.Backward(s.atEnd) {
		ended = errors.Join(ended, end(ctx))
	}
	err := c.Delete(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: s.namespace}})
	if err == nil {
		// A pod that waits for its grace period on a node that is no more would keep the namespace.
		err = c.DeleteAllOf(ctx, &corev1.Pod{}, client.InNamespace(s.namespace),
			client.GracePeriodSeconds(0))
	}
	if err = client.IgnoreNotFound(err); err == nil && s.recorder != nil && s.ctx.Err() == nil {
		err = s.p.view.wait(ctx, func(w *World) bool {
			s.p.present.Progress(time.Since(s.begin), "cleaning up", fmt.Sprintf("%d pods, %d requests, %d nodes left",
				len(w.Pods()), len(w.Requests()), len(w.Nodes())))
			return len(w.Pods())+len(w.Requests())+len(w.Nodes()) == 0
		}, s.namespace)
		if err != nil {
			err = fmt.Errorf("%w%s", err, s.hints())
		}
	}
	err = errors.Join(ended, err, c.DeleteAllOf(ctx, &corev1.Node{}, client.HasLabels{labelStatic}), s.p.SetOfferings(DefaultOfferings()))
	gone := []client.Object{&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: s.namespace}}}
	for _, o := range slices.Backward(s.unscoped) {
		err = errors.Join(err, client.IgnoreNotFound(c.Delete(ctx, o)))
		gone = append(gone, o)
	}
	if s.ctx.Err() == nil && err == nil {
		err = s.awaitGone(ctx, gone)
	}
	switch {
	case s.ctx.Err() != nil:
		s.fail(context.Cause(s.ctx))
	case err != nil:
		s.fail(fmt.Errorf("cleaning up: %w", err))
	}
}

func (s *Stage) awaitGone(ctx context.Context, objects []client.Object) error {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for _, o := range objects {
		there := o.DeepCopyObject().(client.Object)
		for {
			err := s.p.view.client.Get(ctx, client.ObjectKeyFromObject(o), there)
			if apierrors.IsNotFound(err) {
				break
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("%T %s is still there: %w", o, o.GetName(), context.Cause(ctx))
			case <-tick.C:
			}
		}
	}
	return nil
}

// Kill ends a component as a crash would.
func (s *Stage) Kill(name string) {
	if s.err == nil {
		if err := s.p.Kill(name); err != nil {
			s.fail(err)
		}
	}
}

// Restart starts a component again.
func (s *Stage) Restart(name string) {
	if s.err == nil {
		if err := s.p.Restart(s.ctx, name); err != nil {
			s.fail(err)
		}
	}
}

// AddStaticNode makes a node that nobody launched.
func (s *Stage) AddStaticNode(name string, resources corev1.ResourceList) {
	s.Create(&corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name:        name,
			Labels:      map[string]string{labelStatic: "true", corev1.LabelHostname: name},
			Annotations: map[string]string{controlplane.KWOKAnnotation: controlplane.KWOKAnnotationValue},
		},
		Status: corev1.NodeStatus{Capacity: resources, Allocatable: resources},
	})
	s.Await("static node "+name+" Ready", func(w *World) (bool, string) {
		n := w.Node(name)
		if n == nil {
			return false, "no such node"
		}
		return nodeReady(n) && len(n.Spec.Taints) == 0, fmt.Sprintf("Ready: %t, taints: %v", nodeReady(n), n.Spec.Taints)
	})
}
