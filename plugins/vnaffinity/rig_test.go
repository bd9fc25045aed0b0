package vnaffinity

import (
	"context"
	"maps"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/informers"
	clientsetfake "k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	fwk "k8s.io/kube-scheduler/framework"
	internalcache "k8s.io/kubernetes/pkg/scheduler/backend/cache"
	internalqueue "k8s.io/kubernetes/pkg/scheduler/backend/queue"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/defaultbinder"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/queuesort"
	frameworkruntime "k8s.io/kubernetes/pkg/scheduler/framework/runtime"
	"k8s.io/kubernetes/pkg/scheduler/metrics"
	tf "k8s.io/kubernetes/pkg/scheduler/testing/framework"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
)

func init() { metrics.Register() }

// rig is the scheduler's framework with the plugin, and the scheduler's own cache, without an API server.
type rig struct {
	t         *testing.T
	framework framework.Framework
	plugin    *VNAffinity
	groups    *groups
	cache     internalcache.Cache
	snapshot  *internalcache.Snapshot
	logger    klog.Logger
	// activated are the pods that the plugin took out of the queue.
	activated []string
	// known is what the pod informer shows.
	known interface {
		Add(obj any) error
		Update(obj any) error
		Delete(obj any) error
	}
}

func newRig(t *testing.T, args string, nodes []*corev1.Node) *rig {
	t.Helper()
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.Verbosity(0)))
	ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
	t.Cleanup(cancel)
	decoded, err := decodeArgs(raw(head + args + "}"))
	if err != nil {
		t.Fatal(err)
	}
	factory := informers.NewSharedInformerFactory(clientsetfake.NewClientset(), 0)
	r := &rig{
		t: t, logger: logger, groups: newGroups(logger), snapshot: internalcache.NewEmptySnapshot(),
		cache: internalcache.New(ctx, nil, false), plugin: &VNAffinity{stop: cancel},
	}
	for _, n := range nodes {
		r.cache.AddNode(logger, n)
	}
	points := []string{"PreFilter", "Filter", "PreScore", "Score"}
	r.framework, err = tf.NewFramework(ctx, []tf.RegisterPluginFunc{
		tf.RegisterQueueSortPlugin(queuesort.Name, queuesort.New),
		tf.RegisterBindPlugin(defaultbinder.Name, defaultbinder.New),
		tf.RegisterPluginAsExtensions(Name, func(_ context.Context, _ runtime.Object, h fwk.Handle) (fwk.Plugin, error) {
			return r.plugin, r.plugin.placeBy(decoded, h, r.groups, logger)
		}, points...),
	}, "drover-scheduler",
		frameworkruntime.WithEventRecorder(&events.FakeRecorder{}),
		frameworkruntime.WithInformerFactory(factory),
		frameworkruntime.WithPodNominator(internalqueue.NewSchedulingQueue(nil, factory)),
		frameworkruntime.WithSnapshotSharedLister(r.snapshot),
		frameworkruntime.WithLogger(logger),
	)
	if err != nil {
		t.Fatal(err)
	}
	r.framework.SetPodActivator(r)
	r.known = factory.Core().V1().Pods().Informer().GetIndexer()
	return r
}

// Activate implements fwk.PodActivator.
func (r *rig) Activate(_ klog.Logger, pods map[string]*corev1.Pod) {
	r.activated = append(r.activated, slices.Sorted(maps.Keys(pods))...)
}

// sees lets the informer show pods.
func (r *rig) sees(pods ...*corev1.Pod) {
	r.t.Helper()
	for _, p := range pods {
		if err := r.known.Add(p); err != nil {
			r.t.Fatal(err)
		}
	}
}

// owns says what a member's VirtualNodeSlice owns.
func (r *rig) owns(namespace, group, member, owned string) {
	r.groups.setSlice(sliceOf(namespace, group, member, owned))
}

func sliceOf(namespace, group, member, owned string) *lbv1alpha1.VirtualNodeSlice {
	o := &lbv1alpha1.VirtualNodeSlice{}
	o.Namespace, o.Name = namespace, lbv1alpha1.MemberName(group, member)
	o.Spec.WatchGroup, o.Spec.Member, o.Spec.Owned = group, member, lbv1alpha1.VirtualNodeSet(owned)
	return o
}

// cycle runs the pod's scheduling cycle up to the scores. Refused are the nodes that Filter refuses, with its reasons.
func (r *rig) cycle(pod *corev1.Pod) (scores map[string]int64, refused map[string]string) {
	r.t.Helper()
	ctx := r.t.Context()
	if err := r.cache.UpdateSnapshot(r.logger, r.snapshot); err != nil {
		r.t.Fatal(err)
	}
	nodes, err := r.snapshot.NodeInfos().List()
	if err != nil {
		r.t.Fatal(err)
	}
	state := framework.NewCycleState()
	if _, status, _ := r.framework.RunPreFilterPlugins(ctx, state, pod); !status.IsSuccess() {
		r.t.Fatalf("PreFilter: %v", status)
	}
	refused = map[string]string{}
	var feasible []fwk.NodeInfo
	for _, n := range nodes {
		status := r.framework.RunFilterPlugins(ctx, state, pod, n)
		switch {
		case status.IsSuccess():
			feasible = append(feasible, n)
		case status.Code() == fwk.Unschedulable:
			refused[n.Node().Name] = strings.Join(status.Reasons(), "; ")
		default:
			r.t.Fatalf("Filter: %v", status)
		}
	}
	scores = map[string]int64{}
	if len(feasible) == 0 {
		return scores, refused
	}
	if status := r.framework.RunPreScorePlugins(ctx, state, pod, feasible); !status.IsSuccess() {
		r.t.Fatalf("PreScore: %v", status)
	}
	all, status := r.framework.RunScorePlugins(ctx, state, pod, feasible)
	if !status.IsSuccess() {
		r.t.Fatalf("Score: %v", status)
	}
	for _, s := range all {
		scores[s.Name] = s.TotalScore
	}
	return scores, refused
}

// schedule assumes the pod on the best node, the first by name of several, and returns the node; "" where it fits nowhere.
func (r *rig) schedule(pod *corev1.Pod) string {
	r.t.Helper()
	scores, _ := r.cycle(pod)
	best := ""
	for name, score := range scores {
		if best == "" || score > scores[best] || score == scores[best] && name < best {
			best = name
		}
	}
	if best != "" {
		r.put(pod, best)
	}
	return best
}

// put assumes the pod on the node.
func (r *rig) put(pod *corev1.Pod, node string) {
	r.t.Helper()
	assumed := pod.DeepCopy()
	assumed.Spec.NodeName = node
	if err := r.cache.AssumePod(r.logger, assumed); err != nil {
		r.t.Fatal(err)
	}
}

// best returns the nodes with the highest score, sorted.
func best(scores map[string]int64) []string {
	var top int64
	var names []string
	for name, score := range scores {
		switch {
		case len(names) == 0 || score > top:
			top, names = score, []string{name}
		case score == top:
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}
