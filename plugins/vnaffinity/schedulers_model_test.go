package vnaffinity

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	clientsetfake "k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	internalcache "k8s.io/kubernetes/pkg/scheduler/backend/cache"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework/parallelize"
	st "k8s.io/kubernetes/pkg/scheduler/testing"
	"pgregory.net/rapid"

	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/sharding"
)

// A fleet is an API server with nodes that take one pod each, and schedulers that hear of what happens there each in its own
// time. What they decide by is the plugin; the queue, the cache and the filter around it are as simple as can be.
type fleet struct {
	t        *rapid.T
	pods     map[types.UID]*corev1.Pod
	on       map[string]types.UID // the pod on each node
	log      []func(*actor)       // what happened, for all to hear in this order
	version  int
	made     int
	epoch    sharding.Epoch
	peers    map[string]sharding.Slice
	onTheWay map[string]string // nodes, by who is to get them
	actors   []*actor
	asked    map[types.UID]string // by whom capacity was asked for
	forged   map[types.UID]bool   // whose annotation somebody has written
}

// An actor is one scheduler. It is the handle of its plugin.
type actor struct {
	fwk.Handle
	w        *fleet
	s        *schedulers
	seat     *fakeSeat
	factory  informers.SharedInformerFactory
	snapshot *internalcache.Snapshot
	heard    int
	queue    map[types.UID]bool // the pods without a node that it knows, and whether they are to be tried
	assumed  map[types.UID]*corev1.Pod
	flies    *flight
	timers   []func()
	written  map[types.UID]*corev1.Pod // hops that are written, and not answered yet
}

var fleetNodes = []string{"n0", "n1", "n2", "n3"}

func newFleet(t *rapid.T, client kubernetes.Interface) *fleet {
	w := &fleet{t: t, pods: map[types.UID]*corev1.Pod{}, on: map[string]types.UID{}, epoch: 1, peers: map[string]sharding.Slice{},
		onTheWay: map[string]string{}, asked: map[types.UID]string{}, forged: map[types.UID]bool{}}
	for i := range rapid.IntRange(2, 3).Draw(t, "schedulers") {
		a := &actor{w: w}
		a.start(string(rune('a'+i)), client)
		w.actors = append(w.actors, a)
	}
	for i, n := range fleetNodes {
		w.onTheWay[n] = w.actors[i%len(w.actors)].seat.name
	}
	w.arrive()
	return w
}

// start begins with nothing.
func (a *actor) start(name string, client kubernetes.Interface) {
	*a = actor{w: a.w, seat: &fakeSeat{name: name, peers: map[string]sharding.Slice{}},
		factory: informers.NewSharedInformerFactory(client, 0), queue: map[types.UID]bool{}, assumed: map[types.UID]*corev1.Pod{},
		written: map[types.UID]*corev1.Pod{}}
	var err error
	if a.s, err = newSchedulers(a, a.seat, a.seat.begin, client, flowcontrol.NewFakeAlwaysRateLimiter(), klog.Background()); err != nil {
		a.w.t.Fatal(err)
	}
	a.s.after = func(_ time.Duration, f func()) { a.timers = append(a.timers, f) }
	a.s.order = func() error { return nil }
	for _, n := range fleetNodes {
		a.s.nodes[n] = sharding.VirtualNodeOf(nodeKey(n), testV)
		if err := a.s.nodeIndexer.Add(st.MakeNode().Name(n).Obj()); err != nil {
			a.w.t.Fatal(err)
		}
	}
}

// restart ends a scheduler, whose nodes go to whoever is named, and starts it anew: it lists what there is.
func (w *fleet) restart(a *actor, to string) {
	for _, node := range fleetNodes {
		if a.seat.serving.VNs.Has(sharding.VirtualNodeOf(nodeKey(node), testV)) {
			w.onTheWay[node] = to
		}
	}
	w.epoch++
	delete(w.peers, a.seat.name)
	a.s.moves.ShutDown()
	a.start(a.seat.name, a.s.client)
	a.heard = len(w.log)
	a.seat.peers = maps.Clone(w.peers)
	for _, uid := range slices.Sorted(maps.Keys(w.pods)) {
		w.show(a, nil, w.pods[uid])
	}
	a.s.look()
	w.slices()
}

func (w *fleet) stop() {
	for _, a := range w.actors {
		a.s.moves.ShutDown()
	}
}

func (a *actor) String() string                                         { return a.seat.name }
func (a *actor) ProfileName() string                                    { return "drover-scheduler" }
func (a *actor) SharedInformerFactory() informers.SharedInformerFactory { return a.factory }
func (a *actor) Parallelizer() fwk.Parallelizer                         { return parallelize.NewParallelizer(1) }
func (a *actor) SnapshotSharedLister() fwk.SharedLister                 { return a.snapshot }
func (a *actor) IterateOverWaitingPods(func(fwk.WaitingPod))            {}
func (a *actor) NominatedPodsForNode(string) []fwk.PodInfo              { return nil }

func (a *actor) Activate(_ klog.Logger, pods map[string]*corev1.Pod) {
	for _, pod := range pods {
		a.enqueue(pod)
	}
}

func (a *actor) RunFilterPluginsWithNominatedPods(ctx context.Context, state fwk.CycleState, pod *corev1.Pod, node fwk.NodeInfo) *fwk.Status {
	if s := a.s.filter(ctx, state, pod, node); !s.IsSuccess() {
		return s
	}
	if len(node.GetPods()) > 0 {
		return fwk.NewStatus(fwk.Unschedulable, "Insufficient pods")
	}
	return nil
}

// enqueue lets a pod in if the queue has it and the plugin admits it.
func (a *actor) enqueue(pod *corev1.Pod) {
	if _, known := a.queue[pod.UID]; known {
		a.queue[pod.UID] = (&VNAffinity{schedulers: a.s}).PreEnqueue(context.Background(), pod).IsSuccess()
	}
}

// hear takes in the next thing that happened.
func (a *actor) hear() bool {
	if a.heard == len(a.w.log) {
		return false
	}
	a.heard++
	a.w.log[a.heard-1](a)
	return true
}

// tell lets everybody hear of a pod, before by its last version and after by its next one.
func (w *fleet) tell(before, after *corev1.Pod) {
	w.log = append(w.log, func(a *actor) { w.show(a, before, after) })
}

func (w *fleet) show(a *actor, before, after *corev1.Pod) {
	indexer, handler := a.s.indexer, podHandler(a.s)
	var err error
	switch {
	case before == nil:
		err = indexer.Add(after)
		handler.OnAdd(after, false)
	case after == nil:
		err = indexer.Delete(before)
		handler.OnDelete(before)
	default:
		err = indexer.Update(after)
		handler.OnUpdate(before, after)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	switch {
	case after == nil || after.Spec.NodeName != "":
		uid := cmp.Or(after, before).UID
		delete(a.queue, uid)
		delete(a.assumed, uid)
	case before == nil:
		a.queue[after.UID] = false
		a.enqueue(after)
	}
	if after == nil && before.Spec.NodeName != "" {
		a.wake(before)
	}
}

// wake asks the hints of the plugin, and of the filter, whose pods want to be tried where one has gone from a node.
func (a *actor) wake(gone *corev1.Pod) {
	for uid, active := range a.queue {
		w := a.s.pods[uid]
		if active || w == nil {
			continue
		}
		helps := w.tried.Has(gone.Spec.NodeName)
		for _, e := range a.s.events() {
			if e.Event.Resource == fwk.Pod {
				hint, err := e.QueueingHintFn(klog.Background(), w.pod, gone, nil)
				helps = helps || err == nil && hint == fwk.Queue
			}
		}
		if helps {
			a.enqueue(w.pod)
		}
	}
}

func (w *fleet) put(pod *corev1.Pod) *corev1.Pod {
	w.version++
	pod.ResourceVersion = strconv.Itoa(w.version)
	w.tell(w.pods[pod.UID], pod)
	w.pods[pod.UID] = pod
	return pod
}

func (w *fleet) remove(pod *corev1.Pod) {
	delete(w.pods, pod.UID)
	if pod.Spec.NodeName != "" {
		delete(w.on, pod.Spec.NodeName)
	}
	w.tell(pod, nil)
}

// slices lets everybody hear who owns what now.
func (w *fleet) slices() {
	peers := maps.Clone(w.peers)
	w.log = append(w.log, func(a *actor) {
		a.seat.peers = peers
		a.s.look()
	})
}

// depart takes a node from who serves it, if no bind is under way there.
func (w *fleet) depart(node, to string) {
	vns := vnsOf(node)
	for _, a := range w.actors {
		if !a.seat.serving.VNs.Intersect(vns).Empty() {
			for _, r := range a.s.rights {
				if r.node == node {
					return
				}
			}
			a.seat.serving.VNs = a.seat.serving.VNs.Minus(vns)
			a.s.look()
			w.epoch++
			slice := w.peers[a.seat.name]
			slice.Owned, slice.Epoch = slice.Owned.Minus(vns), w.epoch
			w.peers[a.seat.name] = slice
			w.onTheWay[node] = to
			w.slices()
		}
	}
}

// arrive gives nodes on their way to those that have heard all that happened before.
func (w *fleet) arrive() {
	for _, node := range slices.Sorted(maps.Keys(w.onTheWay)) {
		for _, a := range w.actors {
			if a.seat.name != w.onTheWay[node] || a.heard < len(w.log) {
				continue
			}
			delete(w.onTheWay, node)
			own, peers := a.seat.peers[a.seat.name], a.seat.peers
			a.seat.peers = map[string]sharding.Slice{}
			a.seat.gain(node)
			a.seat.peers = peers
			own.Member, own.Session, own.Epoch = a.seat.name, a.seat.name+"-1", w.epoch
			own.Owned = w.peers[a.seat.name].Owned.Union(vnsOf(node))
			w.peers[a.seat.name] = own
			a.s.look()
			w.slices()
			break
		}
	}
}

// see fills the snapshot with what the scheduler has heard, and with what it has bound itself.
func (a *actor) see() []fwk.NodeInfo {
	var pods []*corev1.Pod
	for _, obj := range a.s.indexer.List() {
		if pod := obj.(*corev1.Pod); pod.Spec.NodeName != "" {
			pods = append(pods, pod)
		}
	}
	for _, pod := range a.assumed {
		pods = append(pods, pod)
	}
	var nodes []*corev1.Node
	for _, n := range fleetNodes {
		nodes = append(nodes, st.MakeNode().Name(n).Obj())
	}
	a.snapshot = internalcache.NewSnapshot(pods, nodes)
	infos, err := a.snapshot.NodeInfos().List()
	if err != nil {
		a.w.t.Fatal(err)
	}
	return infos
}

// schedule tries one pod, once the one before has landed.
func (a *actor) schedule(uid types.UID) {
	a.land()
	if !a.queue[uid] {
		return
	}
	w, ctx := a.w, context.Background()
	a.queue[uid] = false
	pod := a.s.pods[uid].pod
	infos := a.see()
	state := framework.NewCycleState()
	_, status := a.s.preFilter(ctx, state, pod, infos)
	if status.IsSuccess() {
		for _, info := range infos {
			node := info.Node().Name
			if !a.RunFilterPluginsWithNominatedPods(ctx, state, pod, info).IsSuccess() {
				continue
			}
			a.flies = &flight{pod, node, state}
			return
		}
	}
	_, status = a.s.postFilter(ctx, state, pod)
	if status.Code() != fwk.Unschedulable || !capacity.RefusedByAll(status.Message()) {
		return
	}
	w.asked[uid] = a.seat.name
	// A pod that has lost its room five times counts as refused. Whoever writes its annotation may say that it has.
	if w.settled() && !w.forged[uid] && w.pods[uid] != nil && len(w.on) < len(fleetNodes) {
		w.t.Fatalf("%s asks for capacity for %s, and everybody knows that there is room", a.seat.name, uid)
	}
}

// A flight is a cycle that has found a node, and has not taken it yet.
type flight struct {
	pod   *corev1.Pod
	node  string
	state fwk.CycleState
}

// land ends the cycle that is under way.
func (a *actor) land() bool {
	f := a.flies
	if f == nil {
		return false
	}
	a.flies = nil
	if a.s.reserve(f.state, f.pod, f.node).IsSuccess() {
		a.bind(f.pod.UID, f.node)
	}
	return true
}

// settled reports whether everybody has heard everything, and no node is on its way.
func (w *fleet) settled() bool {
	return len(w.onTheWay) == 0 && !slices.ContainsFunc(w.actors, func(a *actor) bool { return a.heard < len(w.log) })
}

func (a *actor) bind(uid types.UID, node string) {
	w, right := a.w, a.s.rights[uid]
	now := w.pods[uid]
	if now == nil || now.Spec.NodeName != "" { // the API server says no
		right.work.End()
		delete(a.s.rights, uid)
		return
	}
	if other, taken := w.on[node]; taken {
		w.t.Fatalf("%s binds %s to %s, where %s is", a.seat.name, uid, node, other)
	}
	w.on[node] = uid
	bound := now.DeepCopy()
	bound.Spec.NodeName = node
	a.assumed[uid] = w.put(bound)
	a.s.bound(uid, right)
}

// move hands a pod on, if it is to. The answer may come later.
func (a *actor) move(uid types.UID, answered bool) bool {
	if moved := a.written[uid]; moved != nil && answered {
		delete(a.written, uid)
		if a.s.hasMoved(uid, moved) {
			a.enqueue(moved)
		}
		return true
	}
	_, h, stays := a.s.moving(uid)
	if stays != nil {
		a.enqueue(stays)
	}
	now := a.w.pods[uid]
	if h == nil || now == nil {
		return stays != nil
	}
	moved := now.DeepCopy()
	moved.Annotations[AnnotationReplica] = h.String()
	a.written[uid] = a.w.put(moved)
	if answered {
		return a.move(uid, true)
	}
	return true
}

func (a *actor) time() bool {
	timers := a.timers
	a.timers = nil
	for _, f := range timers {
		f()
	}
	return len(timers) > 0
}

func (w *fleet) draw(pods map[types.UID]*corev1.Pod, which func(*corev1.Pod) bool) *corev1.Pod {
	var names []types.UID
	for uid, pod := range pods {
		if which(pod) {
			names = append(names, uid)
		}
	}
	if len(names) == 0 {
		return nil
	}
	slices.Sort(names)
	return pods[rapid.SampledFrom(names).Draw(w.t, "pod")]
}

func waits(pod *corev1.Pod) bool { return pod.Spec.NodeName == "" }
func runs(pod *corev1.Pod) bool  { return pod.Spec.NodeName != "" }

func (w *fleet) step() {
	a := rapid.SampledFrom(w.actors).Draw(w.t, "who")
	node := rapid.SampledFrom(fleetNodes)
	switch rapid.IntRange(0, 14).Draw(w.t, "what") {
	case 0, 1:
		w.made++
		w.put(at(node.Draw(w.t, "home"), fmt.Sprint("p", w.made), "1"))
	case 2:
		if pod := w.draw(w.pods, runs); pod != nil {
			w.remove(pod)
		}
	case 3:
		if pod := w.draw(w.pods, waits); pod != nil {
			switch rapid.IntRange(0, 2).Draw(w.t, "how") {
			case 0:
				w.remove(pod)
			case 1: // its key changes
				pod = pod.DeepCopy()
				pod.Annotations[sharding.AnnotationHashKey] = nodeKey(node.Draw(w.t, "home"))
				w.put(pod)
			case 2: // somebody writes its annotation
				w.forged[pod.UID] = true
				pod = pod.DeepCopy()
				pod.Annotations[AnnotationReplica] = hop{To: "b", Refused: []string{"a", "c"}, Preempting: true, Again: 3, Epoch: w.epoch}.String()
				w.put(pod)
			}
		}
	case 4:
		w.depart(node.Draw(w.t, "node"), a.seat.name)
	case 5:
		w.arrive()
	case 6:
		a.time()
	case 7, 8:
		for _, uid := range slices.Sorted(maps.Keys(a.queue)) {
			if a.queue[uid] {
				a.schedule(uid)
				break
			}
		}
	case 9:
		if pod := w.draw(w.pods, waits); pod != nil {
			a.move(pod.UID, rapid.Bool().Draw(w.t, "answered"))
		}
	case 10:
		a.land()
	case 11:
		w.restart(a, rapid.SampledFrom(w.actors).Draw(w.t, "to").seat.name)
	default:
		a.hear()
	}
}

// rest lets everything happen that is to happen, until nothing does.
func (w *fleet) rest() {
	for range 1000 {
		busy := false
		w.arrive()
		for _, a := range w.actors {
			for a.hear() {
				busy = true
			}
			busy = a.land() || busy
			busy = a.time() || busy
			for uid := range maps.Clone(a.written) {
				busy = a.move(uid, true) || busy
			}
			for _, uid := range slices.Sorted(maps.Keys(a.s.pods)) {
				busy = a.move(uid, true) || busy
			}
			for _, uid := range slices.Sorted(maps.Keys(a.queue)) {
				if a.queue[uid] {
					busy = true
					a.schedule(uid)
				}
			}
		}
		if !busy && w.settled() {
			return
		}
	}
	w.t.Fatal("it goes on without end")
}

// Whatever happens, and in whatever order schedulers hear of it, no node is filled twice, no pod is forgotten while a node
// has room for it, and one scheduler asks for capacity for each pod that is left.
func TestNoPodIsForgotten(t *testing.T) {
	client := clientsetfake.NewClientset()
	rapid.Check(t, func(t *rapid.T) {
		w := newFleet(t, client)
		defer w.stop()
		for range rapid.IntRange(0, 200).Draw(t, "steps") {
			w.step()
		}
		w.rest()
		for uid, pod := range w.pods {
			if !waits(pod) {
				continue
			}
			if len(w.on) < len(fleetNodes) {
				t.Fatalf("%s waits, and there is room", uid)
			}
			var at []string
			for _, a := range w.actors {
				if a.s.holds(a.s.pods[uid]) {
					at = append(at, a.seat.name)
				}
			}
			if len(at) != 1 || w.asked[uid] != at[0] {
				t.Fatalf("%s is held by %v, and %q asked for capacity", uid, at, w.asked[uid])
			}
		}
	})
}
