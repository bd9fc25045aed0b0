// Package capacityrequest is the scheduler plugin CapacityRequest: it turns a scheduling failure straight into a
// CapacityRequest (section 6.1), from what the scheduler knows at that moment.
//
// The plugin decides in the scheduling loop and acts outside it. PostFilter reads caches, hands the pod to package demand,
// and always answers Unschedulable with no result, so that it neither nominates a node nor cuts another plugin off. It never
// lists, writes or waits.
//
// # Order
//
// PostFilter plugins run in order until one answers Success. Listed under postFilter.enabled the plugin comes after
// DefaultPreemption, and is called only where preemption cannot help: the right demand, because victims come back as demand
// of their own. Before DefaultPreemption it also asks for pods that preemption serves; once those are bound their requests
// count only where the node is the autoscaler's, so this costs launches that are dropped again, and nothing else. In either
// order it leaves a pod alone whose victims are still ending on the node that it was promised. Beside
// Coscheduling it should come first, because Coscheduling's PostFilter takes back the members that wait on nodes.
//
// # Pod groups of Kubernetes itself
//
// With the feature gates for pod groups on (they are off by default in 1.36), the scheduler tries a whole group in one
// cycle, and calls PostFilter for each member that does not fit, with the members before it assumed on their nodes. For the
// plugin that is a member's failure like any other; members that fitted are asked for too, as the group is taken back. When
// the scheduler repeats a group for one candidate placement, or after preemption for the group, it skips PostFilter.
//
// # One rack for a gang
//
// A group's topologyKey tells the autoscaler to launch into one domain. What makes the scheduler use one domain is a
// required pod affinity of the members to each other on the same key, or a topology constraint of the in-tree PodGroup. The
// affinity makes a group with a topologyKey all by itself.
//
// Start reading at CapacityRequest.PostFilter.
package capacityrequest

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-base/metrics/legacyregistry"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/utils/clock"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/demand"
	"github.com/drover-sh/drover/demand/podgroups"
)

// Name of the plugin in the registry and in configurations.
const Name = "CapacityRequest"

// source names the plugin's writer in metrics, events and logs.
const source = "scheduler"

// CapacityRequest is a plugin that asks for capacity for pods that fit on no node.
type CapacityRequest struct {
	handle     fwk.Handle
	namespaces sets.Set[string] // empty: all
	writer     *demand.Writer
	gangs      *gangs
	stopped    sync.WaitGroup
	stop       context.CancelFunc
}

var (
	_ fwk.PostFilterPlugin = &CapacityRequest{}
	_ io.Closer            = &CapacityRequest{}
)

// Factory returns the plugin's factory. configFile, which may be nil, names the file that the args come from, for errors.
func Factory(configFile func() string) func(context.Context, runtime.Object, fwk.Handle) (fwk.Plugin, error) {
	return func(ctx context.Context, obj runtime.Object, handle fwk.Handle) (fwk.Plugin, error) {
		plugin, err := New(ctx, obj, handle)
		if err != nil && configFile != nil && configFile() != "" {
			return nil, fmt.Errorf("configuration file %s: pluginConfig %s: %w", configFile(), Name, err)
		}
		return plugin, err
	}
}

// New returns the plugin and starts its writer and informers, which run until ctx ends. Wrong args are an error that names
// the field and the value.
func New(ctx context.Context, obj runtime.Object, handle fwk.Handle) (fwk.Plugin, error) {
	args, err := decodeArgs(obj)
	if err != nil {
		return nil, fmt.Errorf("args: %w", err)
	}
	if err := demand.RegisterMetrics(legacyregistry.Registerer()); err != nil {
		return nil, fmt.Errorf("registering metrics: %w", err)
	}
	// Reads are few and long: informers. Writes are bounded by the writer, not by its client.
	client, err := demand.RESTClient(handle.KubeConfig(), args.QPS+informerQPS, int(args.Burst)+informerQPS)
	if err != nil {
		return nil, err
	}
	warnings, err := demand.EventsClient(handle.KubeConfig(), args.QPS, int(args.Burst))
	if err != nil {
		return nil, err
	}
	logger := klog.LoggerWithName(klog.FromContext(ctx), Name)
	groups, err := podgroups.New(handle.KubeConfig(), logger)
	if err != nil {
		return nil, err
	}
	var p *CapacityRequest
	offers := newTemplates(client, args.CapacityNamespace, func() { p.writer.Recheck() })
	p, err = newPlugin(args, handle, parts{
		requests:  demand.NewRequests(client),
		events:    demand.NewEvents(warnings, "drover.sh/"+source, hostname()),
		groups:    groups,
		templates: offers.List,
		clock:     clock.RealClock{},
		logger:    logger,
	})
	if err != nil {
		return nil, err
	}
	run := []func(context.Context){groups.Run, offers.run}
	if s := p.writer.Suppressor(); s != nil {
		run = append(run, func(ctx context.Context) { watchUpcomingNodes(ctx, client, args.CapacityNamespace, s) })
	}
	groups.OnChange(p.gangs.verify)
	p.start(ctx, run...)
	return p, nil
}

// informerQPS is the share of the client's rate limit that informers may need beside the writer.
const informerQPS = 10

// yield is how long after a failed attempt the loop counts as being at work. Attempts take milliseconds.
const yield = 100 * time.Millisecond

// parts are what New makes from the scheduler's configuration, and tests from memory.
type parts struct {
	requests  demand.Requests
	events    demand.Events
	groups    demand.Groups
	templates func() []*fleetv1alpha1.AvailableCapacity
	clock     clock.WithTicker
	logger    klog.Logger
}

// newPlugin wires the plugin. Nothing runs yet.
func newPlugin(args *configv1alpha1.CapacityRequestArgs, handle fwk.Handle, with parts) (*CapacityRequest, error) {
	factory := handle.SharedInformerFactory()
	pods := factory.Core().V1().Pods()
	judge := judgeOf(handle)
	judge.Templates, judge.Freshness, judge.Clock = with.templates, args.TemplateFreshness.Duration, with.clock
	if !*args.Events {
		with.events = nil
	}
	options := demand.Options{
		Source:        source,
		Requests:      with.requests,
		Events:        with.events,
		Decide:        judge.Decide,
		Describe:      demand.Describer{Groups: with.groups, Volumes: judge.Volumes}.Profile,
		Pending:       pendingIn(pods.Lister()),
		QPS:           args.QPS,
		Burst:         int(args.Burst),
		Yield:         yield,
		RewritePeriod: args.RewritePeriod.Duration,
		DrainTimeout:  args.ShutdownGracePeriod.Duration,
		Clock:         with.clock,
		Logger:        with.logger,
	}
	if args.Demand == configv1alpha1.DemandRequestsOnly {
		options.Suppressor = demand.NewSuppressor()
	}
	writer, err := demand.NewWriter(options)
	if err != nil {
		return nil, err
	}
	informer := pods.Informer()
	if err := addIndexers(informer, cache.Indexers{
		gangIndex:            gangIndexFunc,
		cache.NamespaceIndex: cache.MetaNamespaceIndexFunc,
	}); err != nil {
		return nil, err
	}
	if _, err := informer.AddEventHandler(forgetter(writer)); err != nil {
		return nil, fmt.Errorf("watching pods: %w", err)
	}
	return &CapacityRequest{
		handle:     handle,
		namespaces: sets.New(args.Namespaces...),
		writer:     writer,
		gangs:      newGangs(informer.GetIndexer(), with.groups, writer, judge.Decide),
	}, nil
}

// start runs the writer, the gangs and what else has to run.
func (p *CapacityRequest) start(ctx context.Context, more ...func(context.Context)) {
	ctx, p.stop = context.WithCancel(ctx)
	for _, run := range append(more, p.writer.Run, p.gangs.run) {
		p.stopped.Go(func() { run(ctx) })
	}
}

// Name returns name of the plugin. It is used in logs, etc.
func (p *CapacityRequest) Name() string {
	return Name
}

// Close stops the plugin and returns when its writer has drained its queue, or its grace period is over.
func (p *CapacityRequest) Close() error {
	if p.stop != nil {
		p.stop()
	}
	p.stopped.Wait()
	return nil
}

// PostFilter hands a pod that failed to the writer, with what the scheduler objected to. It is called at every failed
// attempt, and mostly for pods that have their request.
func (p *CapacityRequest) PostFilter(
	_ context.Context, state fwk.CycleState, pod *corev1.Pod, statuses fwk.NodeToStatusReader,
) (*fwk.PostFilterResult, *fwk.Status) {
	switch {
	case mayBeServedElsewhere(state):
	case p.namespaces.Len() > 0 && !p.namespaces.Has(pod.Namespace):
	case pod.Spec.NodeName != "", pod.DeletionTimestamp != nil:
		// Bound pods come here to be resized; a terminating pod needs nothing.
	case p.writer.Settled(pod):
		// Nothing is read but one map.
	case p.roomIsMade(pod, statuses):
		// Preemption has served the pod, and declines it until its victims are gone.
	default:
		p.handOver(pod, rejectionsOf(statuses, p.nodes()))
	}
	return nil, fwk.NewStatus(fwk.Unschedulable)
}

// mayBeServedElsewhere reports whether VNAffinity has said that another scheduler may still preempt for the pod.
func mayBeServedElsewhere(state fwk.CycleState) bool {
	if state == nil {
		return false
	}
	_, err := state.Read(capacity.NotYetRefusedKey)
	return err == nil
}

// roomIsMade reports whether pods that were preempted for this one are on their way out of the node that it was promised. It
// is the test by which DefaultPreemption waits for them: then, too, the plugins after it are called.
func (p *CapacityRequest) roomIsMade(pod *corev1.Pod, statuses fwk.NodeToStatusReader) bool {
	name := pod.Status.NominatedNodeName
	if name == "" || p.nodes() == nil || statuses.Get(name).Code() == fwk.UnschedulableAndUnresolvable {
		return false
	}
	info, err := p.nodes().Get(name)
	if err != nil {
		return false
	}
	return slices.ContainsFunc(info.GetPods(), func(other fwk.PodInfo) bool {
		victim := other.GetPod()
		return victim.DeletionTimestamp != nil &&
			corev1helpers.PodPriority(victim) < corev1helpers.PodPriority(pod) &&
			slices.ContainsFunc(victim.Status.Conditions, func(c corev1.PodCondition) bool {
				return c.Type == corev1.DisruptionTarget && c.Status == corev1.ConditionTrue &&
					c.Reason == corev1.PodReasonPreemptionByScheduler
			})
	})
}

func (p *CapacityRequest) handOver(pod *corev1.Pod, rejections []capacity.Rejection) {
	key := podgroups.KeyOf(pod)
	switch {
	case key == "":
		p.writer.Enqueue(pod, rejections)
	case !backsOff(rejections):
		p.gangs.fail(key, gangFailure{member: pod, rejections: rejections, placed: p.placed(key)})
	}
}

// placed lists the members of the gang that wait at Permit on a node which the autoscaler does not own: they have what they
// need already.
func (p *CapacityRequest) placed(key string) sets.Set[types.UID] {
	placed := sets.New[types.UID]()
	p.handle.IterateOverWaitingPods(func(waiting fwk.WaitingPod) {
		pod := waiting.GetPod()
		if podgroups.KeyOf(pod) == key && p.static(pod.Spec.NodeName) {
			placed.Insert(pod.UID)
		}
	})
	return placed
}

func (p *CapacityRequest) static(nodeName string) bool {
	if nodeName == "" || p.nodes() == nil {
		return false
	}
	info, err := p.nodes().Get(nodeName)
	if err != nil || info.Node() == nil {
		return false
	}
	_, managed := info.Node().Labels[fleetv1alpha1.LabelMachine]
	return !managed
}

func (p *CapacityRequest) nodes() fwk.NodeInfoLister {
	lister := p.handle.SnapshotSharedLister()
	if lister == nil {
		return nil
	}
	return lister.NodeInfos()
}

// judgeOf reads through the scheduler's own informers.
func judgeOf(handle fwk.Handle) *demand.Judge {
	factory := handle.SharedInformerFactory()
	pods := factory.Core().V1().Pods().Lister()
	claims := factory.Core().V1().PersistentVolumeClaims().Lister()
	volumes := factory.Core().V1().PersistentVolumes().Lister()
	classes := factory.Storage().V1().StorageClasses().Lister()
	nodes := factory.Core().V1().Nodes().Lister()
	return &demand.Judge{
		Volumes: demand.Volumes{
			Claim: func(namespace, name string) (*corev1.PersistentVolumeClaim, error) {
				return claims.PersistentVolumeClaims(namespace).Get(name)
			},
			Volume: volumes.Get,
			Class:  classes.Get,
		},
		Pods: func(namespace string) ([]*corev1.Pod, error) {
			return pods.Pods(namespace).List(labels.Everything())
		},
		Node: nodes.Get,
		ResourceClaim: func(namespace, name string) error {
			if dra := handle.SharedDRAManager(); dra != nil {
				_, err := dra.ResourceClaims().Get(namespace, name)
				return err
			}
			return nil
		},
	}
}

// addIndexers adds those that are not there: another profile's plugin, or another plugin, may have been first.
func addIndexers(informer cache.SharedIndexInformer, wanted cache.Indexers) error {
	known := informer.GetIndexer().GetIndexers()
	for name, index := range wanted {
		if _, ok := known[name]; ok {
			continue
		}
		if err := informer.AddIndexers(cache.Indexers{name: index}); err != nil {
			return fmt.Errorf("adding index %s to the pod informer: %w", name, err)
		}
	}
	return nil
}

// pendingIn says whether a pod still needs a node.
func pendingIn(pods corelisters.PodLister) func(*corev1.Pod) bool {
	return func(pod *corev1.Pod) bool {
		now, err := pods.Pods(pod.Namespace).Get(pod.Name)
		return err == nil && now.UID == pod.UID && now.Spec.NodeName == "" && now.DeletionTimestamp == nil
	}
}

// forgetter keeps the writer's memory to the pods that are pending.
func forgetter(writer *demand.Writer) cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		UpdateFunc: func(_, obj any) {
			if pod, ok := obj.(*corev1.Pod); ok && pod.Spec.NodeName != "" {
				writer.Forget(pod.UID)
			}
		},
		DeleteFunc: func(obj any) {
			if tombstone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = tombstone.Obj
			}
			if pod, ok := obj.(*corev1.Pod); ok {
				writer.Forget(pod.UID)
			}
		},
	}
}

func hostname() string {
	name, err := os.Hostname()
	if err != nil {
		return source
	}
	return name
}
