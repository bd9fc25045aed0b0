package vnaffinity

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/controllers/sharded"
	"github.com/drover-sh/drover/sharding"
)

var (
	podResource  = schema.GroupResource{Resource: "pods"}
	nodeResource = schema.GroupResource{Resource: "nodes"}
)

// nodeIndex finds the pods of a node in the scheduler's pod informer.
const nodeIndex = "vnaffinity/node"

const (
	// unsettledPatience is when a pod is tried again that found nodes on their way from one replica to another, or bound pods
	// that the scheduler's cache did not show yet.
	unsettledPatience = 200 * time.Millisecond
	// mostStalls is how often that doubles: a change lets the pod in at once, and nodes may stay without an owner for long.
	mostStalls = 5
	// countPeriod is how old the gauges of waiting pods may be.
	countPeriod = 2 * time.Second
)

// A seat is this replica's place in its group: sharded.Membership.
type seat interface {
	Member() string
	VirtualNodes() int
	Serving() sharded.Serving
	Draining() sharding.Set
	Peers() map[string]sharding.Slice
	Changed() (own, peers <-chan struct{})
	Progressed()
}

// work is the right to bind to the nodes of one Virtual Node: sharded.Work.
type work interface {
	Gain() uint64
	Session() string
	Send(ctx context.Context, send func(context.Context) error) error
	Wrote(gr schema.GroupResource, version string)
	WroteUnseen()
	End()
}

// schedulers is the role Schedulers: this replica is one of several that are active at once, and Virtual Nodes divide the
// pods and the nodes between them. Nothing is labelled, because every replica sees all pods and nodes, and computes the
// Virtual Node of each.
//
// # What keeps two replicas apart
//
// A pod is bound to a node by the replica that owns the node's Virtual Node, and by no other. Reserve takes the right to it,
// and the Virtual Node is not given up before the bind has been answered and this replica's own informer has shown it. The
// next owner starts on the node once its informer shows as much, and the scheduler's snapshot, which is filled by other
// handlers, as much as the informer. Bind asks for the right to write before every request, so that a replica that cannot
// renew its Lease has stopped before the others take over; a request that is late all the same is refused by the admission
// policy of manifests/overlays/schedulers, which compares the session that the Binding carries with the node's owner.
//
// Who holds a pod is a matter of order, not of safety: the API server binds a pod once, whoever asks.
//
// # Extension points
//
//   - PreEnqueue admits the pods that this replica holds. The others wait outside of its active queue, and come in by
//     Activate when they are handed on to it, or when their Virtual Node comes to be served.
//   - PreFilter names the nodes that this replica owns, so that no time is spent on others; Filter says the same of nodes
//     that are tried without it, as a nominated one is. The snapshot shows all nodes, so spread and affinity count all pods.
//   - PostFilter, before all others, finds out whether a pod that fits on none of them would fit on another replica's nodes,
//     and then stops the plugins after it: it moves on. As long as another replica may have something to preempt it lets
//     preemption here have its try, and tells the plugins after it to ask for nothing. A pod that moves on loses its
//     nominated node, unless it goes there. It reads the snapshot, and writes nothing.
//   - Reserve, Unreserve and Bind hold the right to bind, as above. Bind stands before DefaultBinder.
//   - SignPod adds nothing to a signature: the nodes are the same for all pods that this replica holds, and a node that a batch
//     suggests goes through Filter and Reserve.
//   - EventsToRegister names what may make a pod fit on nodes that its cycle did not try: those of other replicas, and new ones.
//     What happens to the nodes that it tried is for the plugins that turned them down.
//
// Start reading at decide, which is pure, then at schedulers.preFilter and schedulers.postFilter.
type schedulers struct {
	handle  fwk.Handle
	logger  klog.Logger
	seat    seat
	begin   func(sharding.VirtualNode) (work, error)
	client  kubernetes.Interface // has no limit of its own, since limiter stands before it
	limiter flowcontrol.RateLimiter
	indexer cache.Indexer // of the scheduler's pods
	// nodeIndexer has the scheduler's nodes by their names.
	nodeIndexer cache.Store
	metrics     *schedulerMetrics
	moves       workqueue.TypedRateLimitingInterface[types.UID]
	order       func() error // whether the profile has the plugin where it has to be
	after       func(time.Duration, func())

	member string
	v      int

	mu       sync.RWMutex
	roster   *roster
	serving  sharded.Serving
	pods     map[types.UID]*waiting
	nodes    map[string]sharding.VirtualNode
	verified sharding.Set // the part of serving in which the snapshot shows what the informer does
	upTo     uint64       // the last gain that verified knows of
	own      sets.Set[string]
	rights   map[types.UID]*right
	closing  bool
}

// waiting is a pod without a node.
type waiting struct {
	pod  *corev1.Pod // as last seen
	home sharding.VirtualNode
	hop  *hop
	// next is where it is being handed on to, nil if it is not. later becomes next if the pod has found no node when it is due.
	next, later *hop
	due         time.Time
	// tried are the names of the nodes that the last cycle here let other plugins look at.
	tried sets.Set[string]
	// last is set if this replica has found that the pod fits nowhere.
	last bool
	// stalls counts the attempts that found nodes unsettled since who owns what has changed.
	stalls int
}

// A right is that of one pod to be bound to one node.
type right struct {
	work     work
	node     string
	answered bool   // the API server has bound the pod
	seen     string // the version in which this replica's informer has shown the pod bound, or gone
}

func newSchedulers(handle fwk.Handle, seat seat, begin func(sharding.VirtualNode) (work, error), client kubernetes.Interface,
	limiter flowcontrol.RateLimiter, logger klog.Logger) (*schedulers, error) {
	s := &schedulers{
		handle: handle, logger: logger, seat: seat, begin: begin, client: client, limiter: limiter,
		metrics: newSchedulerMetrics(seat.Member()),
		moves: workqueue.NewTypedRateLimitingQueue(
			workqueue.NewTypedItemExponentialFailureRateLimiter[types.UID](100*time.Millisecond, 10*time.Second)),
		order:  orderIn(handle),
		after:  func(d time.Duration, f func()) { time.AfterFunc(d, f) },
		member: seat.Member(), v: seat.VirtualNodes(),
		pods:   make(map[types.UID]*waiting),
		nodes:  make(map[string]sharding.VirtualNode),
		rights: make(map[types.UID]*right),
	}
	s.roster = newRoster(s.v, nil)
	pods := handle.SharedInformerFactory().Core().V1().Pods().Informer()
	s.indexer = pods.GetIndexer()
	if _, ok := s.indexer.GetIndexers()[nodeIndex]; !ok {
		if err := pods.AddIndexers(cache.Indexers{nodeIndex: nodeIndexFunc}); err != nil {
			return nil, fmt.Errorf("adding index %s to the pod informer: %w", nodeIndex, err)
		}
	}
	if _, err := pods.AddEventHandler(podHandler(s)); err != nil {
		return nil, fmt.Errorf("watching pods: %w", err)
	}
	nodes := handle.SharedInformerFactory().Core().V1().Nodes().Informer()
	s.nodeIndexer = nodes.GetIndexer()
	if _, err := nodes.AddEventHandler(nodeHandler(s)); err != nil {
		return nil, fmt.Errorf("watching nodes: %w", err)
	}
	return s, nil
}

func nodeIndexFunc(obj any) ([]string, error) {
	pod, ok := obj.(*corev1.Pod)
	if !ok || pod.Spec.NodeName == "" {
		return nil, nil
	}
	return []string{pod.Spec.NodeName}, nil
}

func (s *schedulers) virtualNodeOfNode(name string) sharding.VirtualNode {
	if vn, ok := s.nodes[name]; ok {
		return vn
	}
	return sharding.VirtualNodeOf(nodeKey(name), s.v)
}

// run follows the group and hands pods on until ctx ends.
func (s *schedulers) run(ctx context.Context) {
	var done sync.WaitGroup
	for range 4 {
		done.Go(func() {
			for s.moveNext(ctx) {
			}
		})
	}
	ticks := time.NewTicker(countPeriod)
	defer ticks.Stop()
	for ctx.Err() == nil {
		own, peers := s.seat.Changed()
		s.look()
		select {
		case <-ctx.Done():
		case <-own:
		case <-peers:
		case <-ticks.C:
			s.count()
		}
	}
	s.moves.ShutDown()
	done.Wait()
	s.letGo()
}

// look takes in who owns what, and lets pods in that have come to be held here.
func (s *schedulers) look() {
	serving, peers, draining := s.seat.Serving(), s.seat.Peers(), s.seat.Draining()
	next := newRoster(s.v, peers)
	s.mu.Lock()
	was, wasServing := s.roster, s.serving
	moved := was.epoch != next.epoch || !slices.Equal(was.members, next.members) || !slices.Equal(was.owners, next.owners)
	var come []*corev1.Pod
	if moved || wasServing.Last != serving.Last || !wasServing.VNs.Equal(serving.VNs) {
		held := make(map[types.UID]bool, len(s.pods))
		for uid, w := range s.pods {
			held[uid] = s.holds(w)
		}
		s.roster, s.serving = next, serving
		for uid, w := range s.pods {
			// What waits here because it fits nowhere, or on a node that was on its way, is tried again when nodes have gone
			// from one to another.
			if s.holds(w) && (!held[uid] || (moved && w.last) || w.stalls > 0) {
				come = append(come, w.pod)
			}
			w.stalls = 0
		}
	}
	s.mu.Unlock()
	s.activate(come...)
	if draining.Empty() {
		return
	}
	// A pod that waits at Permit may wait for long, and would keep its node's Virtual Node here.
	s.handle.IterateOverWaitingPods(func(p fwk.WaitingPod) {
		if node := p.GetPod().Spec.NodeName; draining.Has(sharding.VirtualNodeOf(nodeKey(node), s.v)) {
			p.Reject(Name, capacity.NotYetRefusedByAll+": node "+node+" goes to another one")
			s.activateLater(p.GetPod())
		}
	})
}

// holds reports whether the pod is this replica's to schedule.
func (s *schedulers) holds(w *waiting) bool {
	switch {
	case s.serving.VNs.Empty() || w.next != nil:
		return false
	case w.hop != nil && s.roster.has(w.hop.To):
		return w.hop.To == s.member
	default:
		return s.serving.VNs.Has(w.home)
	}
}

// holder says to people where the pod waits.
func (s *schedulers) holder(w *waiting) string {
	h := w.hop
	if w.next != nil {
		h = w.next
	}
	if at := s.roster.holder(w.home, h); at != "" {
		return "scheduler " + at
	}
	return fmt.Sprintf("the next owner of Virtual Node %d", w.home)
}

func (s *schedulers) waiting(pod *corev1.Pod) *waiting {
	if w := s.pods[pod.UID]; w != nil {
		return w
	}
	return &waiting{pod: pod, home: sharding.VirtualNodeOf(podKey(pod), s.v), hop: hopOf(pod)}
}

// activate lets pods into the active queue. It is called without the lock, because the queue asks PreEnqueue under its own.
func (s *schedulers) activate(pods ...*corev1.Pod) {
	if len(pods) == 0 {
		return
	}
	byKey := make(map[string]*corev1.Pod, len(pods))
	for _, pod := range pods {
		byKey[pod.Namespace+"/"+pod.Name] = pod
	}
	s.handle.Activate(s.logger, byKey)
}

func (s *schedulers) activateLater(pod *corev1.Pod) {
	s.after(unsettledPatience, func() { s.activate(pod) })
}

// stall lets a pod in again after a while that grows until something changes.
func (s *schedulers) stall(pod *corev1.Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w := s.pods[pod.UID]; w != nil {
		s.after(unsettledPatience<<min(w.stalls, mostStalls), func() { s.activate(pod) })
		w.stalls++
	}
}

func podHandler(s *schedulers) cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) { s.podSeen(obj) },
		UpdateFunc: func(before, obj any) {
			// An informer that was cut off shows one that was made again under its name as one that has changed.
			then, ok := before.(*corev1.Pod)
			if now, isPod := obj.(*corev1.Pod); ok && isPod && then.UID != now.UID {
				s.podOver(then)
			}
			s.podSeen(obj)
		},
		DeleteFunc: func(obj any) {
			if last, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = last.Obj
			}
			if pod, ok := obj.(*corev1.Pod); ok {
				s.podOver(pod)
			}
		},
	}
}

func (s *schedulers) podSeen(obj any) {
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		return
	}
	if pod.Spec.NodeName != "" {
		s.podOver(pod)
		return
	}
	if pod.Spec.SchedulerName != s.handle.ProfileName() {
		return
	}
	s.mu.Lock()
	come := s.take(pod)
	s.mu.Unlock()
	if come {
		s.activate(pod)
	}
	s.seat.Progressed()
}

// take notes a pod as it is now, and reports whether it has come to be held here: it was handed on to this replica, or its
// key has changed. A controller adopts a pod, somebody edits its annotation; and a replica that starts later knows no other
// key.
func (s *schedulers) take(pod *corev1.Pod) bool {
	w := s.pods[pod.UID]
	if w == nil {
		w = s.waiting(pod)
		s.pods[pod.UID] = w
		return s.holds(w) && w.hop != nil
	}
	if c, err := resourceversion.CompareResourceVersion(pod.ResourceVersion, w.pod.ResourceVersion); err == nil && c < 0 {
		return false
	}
	held := s.holds(w)
	h := hopOf(pod)
	if (h == nil) != (w.hop == nil) || (h != nil && h.String() != w.hop.String()) {
		held = false
		// What was decided before is over. It may be what this replica has written, and has had no answer to: to write it once
		// more would take the pod from whoever it has come to since.
		w.last, w.next, w.later = false, nil, nil
	}
	w.pod, w.hop, w.home = pod, h, sharding.VirtualNodeOf(podKey(pod), s.v)
	return !held && s.holds(w)
}

// podOver notes a pod that needs no scheduler any more: bound, or gone.
func (s *schedulers) podOver(pod *corev1.Pod) {
	s.mu.Lock()
	delete(s.pods, pod.UID)
	r := s.rights[pod.UID]
	if r != nil {
		r.seen = pod.ResourceVersion
		s.settle(pod.UID, r)
	}
	s.mu.Unlock()
	s.seat.Progressed()
}

func nodeHandler(s *schedulers) cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) {
			if node, ok := obj.(*corev1.Node); ok {
				s.mu.Lock()
				defer s.mu.Unlock()
				s.nodes[node.Name], s.own = sharding.VirtualNodeOf(nodeKey(node.Name), s.v), nil
			}
		},
		DeleteFunc: func(obj any) {
			if last, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = last.Obj
			}
			if node, ok := obj.(*corev1.Node); ok {
				s.mu.Lock()
				defer s.mu.Unlock()
				delete(s.nodes, node.Name)
				s.own = nil
			}
		},
	}
}

// count sets the gauges.
func (s *schedulers) count() {
	s.mu.RLock()
	defer s.mu.RUnlock()
	held := 0
	for _, w := range s.pods {
		if s.holds(w) {
			held++
		}
	}
	s.metrics.held.Set(float64(held))
	s.metrics.elsewhere.Set(float64(len(s.pods) - held))
}
