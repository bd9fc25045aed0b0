package capacityrequest

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/informers"
	clientsetfake "k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	fwk "k8s.io/kube-scheduler/framework"
	apidispatcher "k8s.io/kubernetes/pkg/scheduler/backend/api_dispatcher"
	internalcache "k8s.io/kubernetes/pkg/scheduler/backend/cache"
	internalqueue "k8s.io/kubernetes/pkg/scheduler/backend/queue"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	apicalls "k8s.io/kubernetes/pkg/scheduler/framework/api_calls"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/defaultbinder"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/defaultpreemption"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/feature"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/noderesources"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/queuesort"
	frameworkruntime "k8s.io/kubernetes/pkg/scheduler/framework/runtime"
	"k8s.io/kubernetes/pkg/scheduler/metrics"
	st "k8s.io/kubernetes/pkg/scheduler/testing"
	tf "k8s.io/kubernetes/pkg/scheduler/testing/framework"
	"k8s.io/utils/clock"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/demand"
)

func init() { metrics.Register() }

// memory is an API server for what the plugin writes.
type memory struct {
	mu       sync.Mutex
	requests map[string]*fleetv1alpha1.CapacityRequest
	creates  int
	warnings []string
	hang     bool
}

func newMemory() *memory { return &memory{requests: map[string]*fleetv1alpha1.CapacityRequest{}} }

func (m *memory) Create(ctx context.Context, r *fleetv1alpha1.CapacityRequest) error {
	if m.hang {
		<-ctx.Done()
		return ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.creates++
	if m.requests[r.Name] != nil {
		return apierrors.NewAlreadyExists(schema.GroupResource{}, r.Name)
	}
	m.requests[r.Name] = r.DeepCopy()
	return nil
}

func (m *memory) Get(_ context.Context, _, name string) (*fleetv1alpha1.CapacityRequest, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.requests[name].DeepCopy(), nil
}

func (m *memory) Update(_ context.Context, r *fleetv1alpha1.CapacityRequest) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.requests[r.Name] = r.DeepCopy()
	return nil
}

func (m *memory) Warn(_ context.Context, pod *corev1.Pod, reason, _ string, _ time.Time) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.warnings = append(m.warnings, pod.Name+": "+reason)
	return nil
}

func (m *memory) podNames() []string {
	names := []string{}
	for _, r := range m.requests {
		names = append(names, r.OwnerReferences[0].Name)
	}
	return sorted(names)
}

// groupTable is a demand.Groups for tests.
type groupTable map[string]demand.GroupFacts

func (g groupTable) GroupOf(pod *corev1.Pod) (demand.GroupFacts, bool) {
	facts, ok := g[pod.Labels[capacity.LabelPodGroup]]
	return facts, ok
}

// rig is a framework with the plugin in it.
type rig struct {
	framework framework.Framework
	plugin    *CapacityRequest
	api       *memory
}

type rigOptions struct {
	args      configv1alpha1.CapacityRequestArgs
	pods      []*corev1.Pod
	nodes     []*corev1.Node
	objects   []runtime.Object
	groups    groupTable
	templates []*fleetv1alpha1.AvailableCapacity
	api       *memory
	// before and after the plugin, by name.
	first, last []tf.RegisterPluginFunc
}

func newRig(t *testing.T, o rigOptions) *rig {
	t.Helper()
	logger, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithCancel(ctx)
	if o.api == nil {
		o.api = newMemory()
	}
	for _, p := range o.pods {
		o.objects = append(o.objects, p)
	}
	for _, n := range o.nodes {
		o.objects = append(o.objects, n)
	}
	cs := clientsetfake.NewClientset(o.objects...)
	factory := informers.NewSharedInformerFactory(cs, 0)
	dispatcher := apidispatcher.New(cs, 16, apicalls.Relevances)
	dispatcher.Run(logger)
	r := &rig{api: o.api}
	register := []tf.RegisterPluginFunc{
		tf.RegisterQueueSortPlugin(queuesort.Name, queuesort.New),
		tf.RegisterPluginAsExtensions(noderesources.Name, newFit, "Filter", "PreFilter"),
		tf.RegisterBindPlugin(defaultbinder.Name, defaultbinder.New),
	}
	register = append(register, o.first...)
	register = append(register, tf.RegisterPostFilterPlugin(Name,
		func(_ context.Context, _ runtime.Object, handle fwk.Handle) (fwk.Plugin, error) {
			o.args.Default()
			var err error
			r.plugin, err = newPlugin(&o.args, handle, parts{
				requests: o.api, events: o.api, groups: o.groups, clock: clock.RealClock{}, logger: klog.FromContext(ctx),
				templates: func() []*fleetv1alpha1.AvailableCapacity { return o.templates },
			})
			return r.plugin, err
		}))
	register = append(register, o.last...)
	f, err := tf.NewFramework(ctx, register, "",
		frameworkruntime.WithClientSet(cs),
		frameworkruntime.WithAPIDispatcher(dispatcher),
		frameworkruntime.WithEventRecorder(&events.FakeRecorder{}),
		frameworkruntime.WithInformerFactory(factory),
		frameworkruntime.WithPodNominator(internalqueue.NewSchedulingQueue(nil, factory)),
		frameworkruntime.WithSnapshotSharedLister(internalcache.NewSnapshot(o.pods, o.nodes)),
		frameworkruntime.WithLogger(logger),
		frameworkruntime.WithWaitingPods(frameworkruntime.NewWaitingPodsMap()),
		frameworkruntime.WithPodsInPreBind(frameworkruntime.NewPodsInPreBindMap()),
	)
	if err != nil {
		t.Fatal(err)
	}
	r.framework = f
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	t.Cleanup(func() {
		cancel()
		dispatcher.Close()
		factory.Shutdown()
	})
	return r
}

func newFit(ctx context.Context, _ runtime.Object, handle fwk.Handle) (fwk.Plugin, error) {
	args := defaultFitArgs()
	return noderesources.NewFit(ctx, args, handle, feature.Features{})
}

// fail runs the PostFilter plugins as the scheduler does after a failed attempt.
func (r *rig) fail(t *testing.T, pod *corev1.Pod, statuses fwk.NodeToStatusReader) (*fwk.PostFilterResult, *fwk.Status) {
	t.Helper()
	state := framework.NewCycleState()
	if _, s, _ := r.framework.RunPreFilterPlugins(t.Context(), state, pod); !s.IsSuccess() {
		t.Fatalf("PreFilter: %v", s)
	}
	return r.framework.RunPostFilterPlugins(t.Context(), state, pod, statuses)
}

// settle lets everything that was handed over be decided and written.
func (r *rig) settle(t *testing.T) {
	t.Helper()
	for r.plugin.gangs.queue.Len() > 0 {
		r.plugin.gangs.next()
	}
	r.plugin.start(t.Context())
	if err := r.plugin.Close(); err != nil { // drains
		t.Fatal(err)
	}
}

// on gives every node the status.
func on(nodes []*corev1.Node, s *fwk.Status) *framework.NodeToStatus {
	out := framework.NewDefaultNodeToStatus()
	for _, n := range nodes {
		out.Set(n.Name, s.Clone())
	}
	return out
}

// everywhere is what a PreFilter plugin's refusal looks like.
func everywhere(s *fwk.Status) *framework.NodeToStatus {
	out := framework.NewDefaultNodeToStatus()
	out.SetAbsentNodesStatus(s)
	return out
}

func noCPU() *fwk.Status {
	return fwk.NewStatus(fwk.Unschedulable, "Insufficient cpu").WithPlugin("NodeResourcesFit")
}

func pending(name string) *st.PodWrapper {
	return st.MakePod().Namespace("ns").Name(name).UID("uid-" + name).Req(map[corev1.ResourceName]string{"cpu": "4"})
}

func node(name string) *st.NodeWrapper {
	return st.MakeNode().Name(name).Capacity(map[corev1.ResourceName]string{"cpu": "4", "pods": "10"})
}

func TestPostFilter(t *testing.T) {
	nodes := []*corev1.Node{node("a").Obj(), node("b").Obj()}
	statuses := func(plugin string, code fwk.Code, reason string) *framework.NodeToStatus {
		return on(nodes, fwk.NewStatus(code, reason).WithPlugin(plugin))
	}
	gpuOnly := &fleetv1alpha1.AvailableCapacity{ObjectMeta: metav1.ObjectMeta{Name: "gpu"}}
	gpuOnly.Spec.NodeTemplate.Taints = []corev1.Taint{{Key: "gpu", Effect: corev1.TaintEffectNoSchedule}}
	claim := func(p *st.PodWrapper, name string) *corev1.Pod { return p.PVC(name).Obj() }
	bound := pending("bound").Obj()
	bound.Spec.NodeName = "a"
	terminating := pending("terminating").Obj()
	terminating.DeletionTimestamp, terminating.Finalizers = &metav1.Time{Time: time.Unix(1, 0)}, []string{"x/y"}

	for _, c := range []struct {
		name      string
		pod       *corev1.Pod
		statuses  fwk.NodeToStatusReader
		args      configv1alpha1.CapacityRequestArgs
		templates []*fleetv1alpha1.AvailableCapacity
		want      []string
		warnings  []string
	}{
		{name: "a pod that is short of CPU asks", pod: pending("p").Obj(), statuses: on(nodes, noCPU()), want: []string{"p"}},
		{
			name: "a taint asks while nothing is known of what can be had", pod: pending("p").Obj(),
			statuses: statuses("TaintToleration", fwk.UnschedulableAndUnresolvable, "node(s) had untolerated taint(s)"),
			want:     []string{"p"},
		},
		{
			name: "a taint that every offering has too does not", pod: pending("p").Obj(),
			statuses:  statuses("TaintToleration", fwk.UnschedulableAndUnresolvable, "node(s) had untolerated taint(s)"),
			templates: []*fleetv1alpha1.AvailableCapacity{gpuOnly},
			warnings:  []string{"p: " + capacity.ReasonNoOfferingTolerated},
		},
		{
			name: "a missing claim does not", pod: claim(pending("p"), "data"),
			statuses: everywhere(fwk.NewStatus(fwk.UnschedulableAndUnresolvable,
				`persistentvolumeclaim "data" not found`).WithPlugin("VolumeBinding")),
			warnings: []string{"p: " + capacity.ReasonVolumeClaimMissing},
		},
		{
			name: "a pod that names a node by affinity does not",
			pod:  pending("p").NodeAffinityIn("metadata.name", []string{"gone"}, st.NodeSelectorTypeMatchFields).Obj(),
			statuses: everywhere(fwk.NewStatus(fwk.UnschedulableAndUnresolvable,
				"node(s) didn't satisfy plugin(s) [NodeAffinity]")),
			warnings: []string{"p: " + capacity.ReasonTiedToNode},
		},
		{
			name: "a gang below its minimum waits in silence", pod: pending("p").Obj(),
			statuses: everywhere(fwk.NewStatus(fwk.UnschedulableAndUnresolvable,
				"pre-filter pod p cannot find enough sibling pods, current pods number: 1, minMember of group: 2").
				WithPlugin("Coscheduling")),
		},
		{
			name: "a gang that is short of a whole cluster's resources asks", pod: pending("p").Obj(),
			statuses: everywhere(fwk.NewStatus(fwk.UnschedulableAndUnresolvable, "resource gap: map[cpu:4]").
				WithPlugin("Coscheduling")),
			want: []string{"p"},
		},
		{
			name: "a namespace that is not listed does not ask", pod: pending("p").Obj(), statuses: on(nodes, noCPU()),
			args: configv1alpha1.CapacityRequestArgs{Namespaces: []string{"other"}},
		},
		{name: "a bound pod that is resized does not ask", pod: bound, statuses: on(nodes, noCPU())},
		{name: "a terminating pod does not ask", pod: terminating, statuses: on(nodes, noCPU())},
		{
			name: "events can be turned off", pod: claim(pending("p"), "data"),
			args:     configv1alpha1.CapacityRequestArgs{Events: new(bool)},
			statuses: everywhere(fwk.NewStatus(fwk.UnschedulableAndUnresolvable, "not found").WithPlugin("VolumeBinding")),
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, rigOptions{args: c.args, pods: []*corev1.Pod{c.pod}, nodes: nodes, templates: c.templates})
			result, status := r.plugin.PostFilter(t.Context(), framework.NewCycleState(), c.pod, c.statuses)
			if result != nil || status.Code() != fwk.Unschedulable || status.Message() != "" {
				t.Errorf("answered (%v, %v %q), want (nil, Unschedulable)", result, status.Code(), status.Message())
			}
			r.settle(t)
			if diff := cmp.Diff(append([]string{}, c.want...), r.api.podNames()); diff != "" {
				t.Errorf("pods with a request (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(c.warnings, r.api.warnings); diff != "" {
				t.Errorf("events (-want +got):\n%s", diff)
			}
		})
	}
}

func TestOrderBesidePreemption(t *testing.T) {
	preemption := tf.RegisterPluginAsExtensions(defaultpreemption.Name,
		func(ctx context.Context, _ runtime.Object, handle fwk.Handle) (fwk.Plugin, error) {
			return defaultpreemption.New(ctx, defaultPreemptionArgs(), handle, feature.Features{})
		}, "PostFilter")
	victim := st.MakePod().Namespace("ns").Name("victim").UID("victim").Node("a").Priority(1).
		Req(map[corev1.ResourceName]string{"cpu": "4"}).Obj()
	for _, c := range []struct {
		name        string
		first, last []tf.RegisterPluginFunc
		priority    int32
		nominated   string
		want        []string
	}{
		{name: "after it, a pod that preemption serves does not ask", first: []tf.RegisterPluginFunc{preemption},
			priority: 10, nominated: "a", want: []string{}},
		{name: "after it, a pod that preemption cannot serve asks", first: []tf.RegisterPluginFunc{preemption},
			want: []string{"p"}},
		{name: "before it, a pod that preemption serves asks, too, and preemption still serves it",
			last: []tf.RegisterPluginFunc{preemption}, priority: 10, nominated: "a", want: []string{"p"}},
		{name: "before it, a pod that preemption cannot serve asks", last: []tf.RegisterPluginFunc{preemption},
			want: []string{"p"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			pod := pending("p").Priority(c.priority).Obj()
			nodes := []*corev1.Node{node("a").Obj()}
			r := newRig(t, rigOptions{pods: []*corev1.Pod{victim, pod}, nodes: nodes, first: c.first, last: c.last})
			result, _ := r.fail(t, pod, on(nodes, noCPU()))
			got := ""
			if result != nil && result.NominatingInfo != nil {
				got = result.NominatedNodeName
			}
			if got != c.nominated {
				t.Errorf("nominated %q, want %q", got, c.nominated)
			}
			r.settle(t)
			if diff := cmp.Diff(c.want, r.api.podNames()); diff != "" {
				t.Errorf("pods with a request (-want +got):\n%s", diff)
			}
		})
	}
}

func TestPodThatWaitsForItsVictimsDoesNotAsk(t *testing.T) {
	preemption := tf.RegisterPluginAsExtensions(defaultpreemption.Name,
		func(ctx context.Context, _ runtime.Object, handle fwk.Handle) (fwk.Plugin, error) {
			return defaultpreemption.New(ctx, defaultPreemptionArgs(), handle, feature.Features{})
		}, "PostFilter")
	ending := func(change ...func(*corev1.Pod)) *corev1.Pod {
		victim := st.MakePod().Namespace("ns").Name("victim").UID("victim").Node("a").Priority(1).Terminating().
			Condition(corev1.DisruptionTarget, corev1.ConditionTrue, corev1.PodReasonPreemptionByScheduler).
			Req(map[corev1.ResourceName]string{"cpu": "4"}).Obj()
		for _, c := range change {
			c(victim)
		}
		return victim
	}
	full := func(code fwk.Code) *fwk.Status {
		return fwk.NewStatus(code, "Insufficient cpu").WithPlugin("NodeResourcesFit")
	}
	never := corev1.PreemptNever
	for _, c := range []struct {
		name   string
		victim *corev1.Pod
		status *fwk.Status
		asks   bool
	}{
		{name: "room is being made", victim: ending(), status: full(fwk.Unschedulable)},
		{name: "the node will not do any more", victim: ending(), status: full(fwk.UnschedulableAndUnresolvable), asks: true},
		{name: "the pod that ends there is no victim", status: full(fwk.Unschedulable), asks: true,
			victim: ending(func(p *corev1.Pod) { p.Status.Conditions = nil })},
		{name: "nor is one that matters as much", status: full(fwk.Unschedulable), asks: true,
			victim: ending(func(p *corev1.Pod) { *p.Spec.Priority = 10 })},
	} {
		for order, o := range map[string]rigOptions{
			"before": {last: []tf.RegisterPluginFunc{preemption}}, "after": {first: []tf.RegisterPluginFunc{preemption}},
		} {
			t.Run(order+" preemption, "+c.name, func(t *testing.T) {
				pod := pending("p").Priority(10).NominatedNodeName("a").Obj()
				if c.asks {
					pod.Spec.PreemptionPolicy = &never // so that preemption has nothing to offer in either order
				}
				o.nodes, o.pods = []*corev1.Node{node("a").Obj(), node("b").Obj()}, []*corev1.Pod{pod, c.victim}
				r := newRig(t, o)
				statuses := on(o.nodes, full(fwk.UnschedulableAndUnresolvable))
				statuses.Set("a", c.status)
				r.fail(t, pod, statuses)
				r.settle(t)
				if got := len(r.api.requests) > 0; got != c.asks {
					t.Errorf("asks: %v, want %v", got, c.asks)
				}
			})
		}
	}
}

func TestRepeatedAttemptsMakeOneWrite(t *testing.T) {
	pod, nodes := pending("p").Obj(), []*corev1.Node{node("a").Obj()}
	r := newRig(t, rigOptions{pods: []*corev1.Pod{pod}, nodes: nodes})
	for range 1000 {
		r.fail(t, pod, on(nodes, noCPU()))
	}
	r.settle(t)
	for range 1000 {
		r.fail(t, pod, on(nodes, noCPU()))
		if r.plugin.gangs.queue.Len() > 0 || !r.plugin.writer.Settled(pod) {
			t.Fatal("a pod that has its request is handed over again")
		}
	}
	if r.api.creates != 1 {
		t.Errorf("got %d writes, want 1", r.api.creates)
	}
}

func TestLeaderChangeMakesNoSecondRequest(t *testing.T) {
	pod, nodes, api := pending("p").Obj(), []*corev1.Node{node("a").Obj()}, newMemory()
	for range 2 {
		r := newRig(t, rigOptions{pods: []*corev1.Pod{pod}, nodes: nodes, api: api})
		r.fail(t, pod, on(nodes, noCPU()))
		r.settle(t)
	}
	if diff := cmp.Diff([]string{"p"}, api.podNames()); diff != "" {
		t.Errorf("pods with a request (-want +got):\n%s", diff)
	}
}

// servedElsewhere is what VNAffinity leaves in the cycle of a pod that another scheduler may preempt for.
type servedElsewhere struct{}

func (s servedElsewhere) Clone() fwk.StateData { return s }

func TestAPodThatAnotherSchedulerMayPreemptForAsksForNothing(t *testing.T) {
	nodes := []*corev1.Node{node("a").Obj()}
	pod := pending("p").Obj()
	r := newRig(t, rigOptions{pods: []*corev1.Pod{pod}, nodes: nodes})
	state := framework.NewCycleState()
	state.Write(capacity.NotYetRefusedKey, servedElsewhere{})
	if _, status := r.plugin.PostFilter(t.Context(), state, pod, on(nodes, noCPU())); status.Code() != fwk.Unschedulable {
		t.Errorf("%v", status)
	}
	r.settle(t)
	if got := r.api.podNames(); len(got) > 0 {
		t.Errorf("asked for %v", got)
	}
}

func TestHangingAPIServerDoesNotDelayPostFilter(t *testing.T) {
	api := newMemory()
	api.hang = true
	var pods []*corev1.Pod
	for i := range 200 {
		pods = append(pods, pending(fmt.Sprint("p", i)).Obj())
	}
	nodes := []*corev1.Node{node("a").Obj()}
	grace := &metav1.Duration{Duration: time.Nanosecond}
	r := newRig(t, rigOptions{
		pods: pods, nodes: nodes, api: api,
		args: configv1alpha1.CapacityRequestArgs{ShutdownGracePeriod: grace},
	})
	r.plugin.start(t.Context())
	for _, p := range pods { // would never end if one of them waited for a write
		r.fail(t, p, on(nodes, noCPU()))
	}
	if err := r.plugin.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestPodLeavesMemoryWhenItIsBound(t *testing.T) {
	pod, nodes := pending("p").Obj(), []*corev1.Node{node("a").Obj()}
	r := newRig(t, rigOptions{pods: []*corev1.Pod{pod}, nodes: nodes})
	r.fail(t, pod, on(nodes, noCPU()))
	if !r.plugin.writer.Settled(pod) {
		t.Fatal("the pod is not settled")
	}
	bound := pod.DeepCopy()
	bound.Spec.NodeName = "a"
	for _, forget := range []func(){
		func() { forgetter(r.plugin.writer).OnUpdate(pod, bound) },
		func() { forgetter(r.plugin.writer).OnDelete(pod) },
	} {
		r.fail(t, pod, on(nodes, noCPU()))
		forget()
		if r.plugin.writer.Settled(pod) {
			t.Error("the pod is still remembered")
		}
	}
}
