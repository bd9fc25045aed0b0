package vnaffinity

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/informers"
	clientsetfake "k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/apis/config"
	internalcache "k8s.io/kubernetes/pkg/scheduler/backend/cache"
	internalqueue "k8s.io/kubernetes/pkg/scheduler/backend/queue"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/feature"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/noderesources"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/queuesort"
	frameworkruntime "k8s.io/kubernetes/pkg/scheduler/framework/runtime"
	st "k8s.io/kubernetes/pkg/scheduler/testing"
	tf "k8s.io/kubernetes/pkg/scheduler/testing/framework"

	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/controllers/sharded"
	"github.com/drover-sh/drover/sharding"
)

const testV = 1000

// A fakeSeat is a place in a group that a test gives and takes.
type fakeSeat struct {
	name     string // "a" if empty
	mu       sync.Mutex
	serving  sharded.Serving
	draining sharding.Set
	peers    map[string]sharding.Slice
	began    []*fakeWork
	refuse   error
}

func (f *fakeSeat) Member() string    { return cmp.Or(f.name, "a") }
func (f *fakeSeat) VirtualNodes() int { return testV }

func (f *fakeSeat) Serving() sharded.Serving         { return f.serving }
func (f *fakeSeat) Draining() sharding.Set           { return f.draining }
func (f *fakeSeat) Peers() map[string]sharding.Slice { return f.peers }

func (f *fakeSeat) Changed() (own, peers <-chan struct{}) { return nil, nil }

func (f *fakeSeat) Progressed() {}

// begin gives the right to vn as sharded.Membership does.
func (f *fakeSeat) begin(vn sharding.VirtualNode) (work, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.refuse != nil {
		return nil, f.refuse
	}
	if !f.serving.VNs.Has(vn) {
		return nil, sharded.ErrNotOwned
	}
	w := &fakeWork{seat: f}
	for _, g := range f.serving.Gains {
		if g.VNs.Has(vn) {
			w.gain = g.No
		}
	}
	f.began = append(f.began, w)
	return w, nil
}

// gain serves the nodes from now on, by a new gain, and no others that belong to nobody's slice.
func (f *fakeSeat) gain(nodes ...string) {
	vns := vnsOf(nodes...)
	f.serving.Last++
	f.serving.VNs = f.serving.VNs.Union(vns)
	f.serving.Gains = append(f.serving.Gains, sharded.Gain{No: f.serving.Last, VNs: vns})
	f.give(f.Member(), nodes...)
}

// lose serves nothing any more.
func (f *fakeSeat) lose() {
	f.serving.VNs, f.serving.Gains = nil, nil
	delete(f.peers, "a")
}

// give lets a member's slice own the nodes.
func (f *fakeSeat) give(member string, nodes ...string) {
	s := f.peers[member]
	s.Member, s.Session, s.Epoch = member, member+"-1", s.Epoch+1
	s.Owned = s.Owned.Union(vnsOf(nodes...))
	f.peers[member] = s
}

func vnsOf(nodes ...string) sharding.Set {
	var list []sharding.VirtualNode
	for _, n := range nodes {
		list = append(list, sharding.VirtualNodeOf(nodeKey(n), testV))
	}
	return sharding.SetOf(list...)
}

type fakeWork struct {
	seat   *fakeSeat
	gain   uint64
	fenced bool
	wrote  []string
	unseen bool
	ended  bool
}

func (w *fakeWork) Gain() uint64    { return w.gain }
func (w *fakeWork) Session() string { return "a-1" }
func (w *fakeWork) Send(ctx context.Context, send func(context.Context) error) error {
	if w.fenced || w.ended {
		return sharded.ErrFenced
	}
	return send(ctx)
}
func (w *fakeWork) Wrote(_ schema.GroupResource, version string) { w.wrote = append(w.wrote, version) }
func (w *fakeWork) WroteUnseen()                                 { w.unseen = true }
func (w *fakeWork) End()                                         { w.ended = true }

// A replica is member a: the scheduler's framework with the plugin and NodeResourcesFit, its cache, and a place in a group.
type replica struct {
	t         *testing.T
	seat      *fakeSeat
	plugin    *VNAffinity
	framework framework.Framework
	cache     internalcache.Cache
	snapshot  *internalcache.Snapshot
	client    *clientsetfake.Clientset
	logger    klog.Logger
	known     interface { // what the pod informer shows
		Add(obj any) error
	}
	nodes interface { // what the node informer shows
		Add(obj any) error
	}
	queue  internalqueue.SchedulingQueue
	asked  []string              // the pods that came to the PostFilter plugin behind this one
	result *fwk.PostFilterResult // of the last cycle

	mu        sync.Mutex
	activated map[string]bool // the pods that were let into the queue
}

// Activate implements fwk.PodActivator.
func (r *replica) Activate(_ klog.Logger, pods map[string]*corev1.Pod) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, pod := range pods {
		r.activated[pod.Name] = true
	}
}

// wasActivated reports whether the pod was let in since it was last asked.
func (r *replica) wasActivated(name string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	was := r.activated[name]
	delete(r.activated, name)
	return was
}

// Name and PostFilter make the replica the plugin behind.
func (r *replica) Name() string { return "Behind" }

func (r *replica) PostFilter(_ context.Context, _ fwk.CycleState, pod *corev1.Pod, _ fwk.NodeToStatusReader) (*fwk.PostFilterResult, *fwk.Status) {
	r.asked = append(r.asked, pod.Name)
	return nil, fwk.NewStatus(fwk.Unschedulable)
}

// newReplica has nodes n0 to n5 with 4 CPU each; a serves n0 and n1, b owns n2 and n3, c owns n4, and n5 is on its way.
func newReplica(t *testing.T, pods ...*corev1.Pod) *replica {
	t.Helper()
	logger, ctx := ktesting.NewTestContext(t)
	logger = klog.LoggerWithValues(logger.V(0))
	ctx, cancel := context.WithCancel(ctx)
	t.Cleanup(cancel)
	r := &replica{t: t, seat: &fakeSeat{peers: map[string]sharding.Slice{}}, cache: internalcache.New(ctx, nil, false),
		snapshot: internalcache.NewEmptySnapshot(), logger: logger, plugin: &VNAffinity{stop: cancel}, activated: map[string]bool{}}
	objects := []runtime.Object{}
	for _, p := range pods {
		objects = append(objects, p)
	}
	r.client = clientsetfake.NewClientset(objects...)
	factory := informers.NewSharedInformerFactory(r.client, 0)
	r.queue = internalqueue.NewSchedulingQueue(nil, factory)
	var err error
	r.framework, err = tf.NewFramework(ctx, []tf.RegisterPluginFunc{
		tf.RegisterQueueSortPlugin(queuesort.Name, queuesort.New),
		tf.RegisterPluginAsExtensions(noderesources.Name, func(ctx context.Context, _ runtime.Object, h fwk.Handle) (fwk.Plugin, error) {
			return noderesources.NewFit(ctx, &config.NodeResourcesFitArgs{ScoringStrategy: &config.ScoringStrategy{
				Type: config.LeastAllocated, Resources: []config.ResourceSpec{{Name: "cpu", Weight: 1}},
			}}, h, feature.Features{})
		}, "Filter", "PreFilter"),
		tf.RegisterPluginAsExtensions(Name, func(_ context.Context, _ runtime.Object, h fwk.Handle) (fwk.Plugin, error) {
			r.plugin.schedulers, err = newSchedulers(h, r.seat, r.seat.begin, r.client, flowcontrol.NewFakeAlwaysRateLimiter(), logger)
			r.plugin.filters = []filterer{r.plugin.schedulers}
			return r.plugin, err
		}, "PreEnqueue", "PreFilter", "Filter", "PostFilter", "Reserve", "Bind"),
		tf.RegisterPostFilterPlugin("Behind", func(context.Context, runtime.Object, fwk.Handle) (fwk.Plugin, error) { return r, nil }),
	}, "drover-scheduler",
		frameworkruntime.WithEventRecorder(&events.FakeRecorder{}),
		frameworkruntime.WithInformerFactory(factory),
		frameworkruntime.WithPodNominator(r.queue),
		frameworkruntime.WithWaitingPods(frameworkruntime.NewWaitingPodsMap()),
		frameworkruntime.WithSnapshotSharedLister(r.snapshot),
		frameworkruntime.WithLogger(logger),
	)
	if err != nil {
		t.Fatal(err)
	}
	r.framework.SetPodActivator(r)
	s := r.plugin.schedulers
	s.order = func() error { return nil } // the framework of tests knows no PreEnqueue plugins
	r.known, r.nodes = s.indexer, factory.Core().V1().Nodes().Informer().GetIndexer()
	for i := range 6 {
		n := st.MakeNode().Name(fmt.Sprint("n", i)).Capacity(map[corev1.ResourceName]string{"cpu": "4", "pods": "110"}).Obj()
		r.cache.AddNode(logger, n)
		s.nodes[n.Name] = sharding.VirtualNodeOf(nodeKey(n.Name), testV)
	}
	r.seat.give("b", "n2", "n3")
	r.seat.give("c", "n4")
	r.seat.gain("n0", "n1")
	s.look()
	return r
}

// at makes a pod whose home is the replica that owns the node.
func at(node, name, cpu string) *corev1.Pod {
	return st.MakePod().Namespace("ns").Name(name).UID(name).SchedulerName("drover-scheduler").
		Annotation(sharding.AnnotationHashKey, nodeKey(node)).Req(map[corev1.ResourceName]string{"cpu": cpu}).Obj()
}

func (r *replica) fill(nodes ...string) {
	r.t.Helper()
	for _, n := range nodes {
		if err := r.cache.AddPod(r.logger, st.MakePod().Namespace("ns").Name("fill-"+n).UID("fill-"+n).Node(n).
			Req(map[corev1.ResourceName]string{"cpu": "4"}).Obj()); err != nil {
			r.t.Fatal(err)
		}
	}
}

// cycle runs a pod's scheduling cycle, and returns the nodes that it fits on, or what PostFilter says.
func (r *replica) cycle(pod *corev1.Pod) (fwk.CycleState, []string, *fwk.Status) {
	r.t.Helper()
	r.plugin.schedulers.podSeen(pod)
	return r.attempt(pod)
}

// attempt is a cycle of a pod that the plugin may not have heard of yet.
func (r *replica) attempt(pod *corev1.Pod) (fwk.CycleState, []string, *fwk.Status) {
	r.t.Helper()
	if err := r.cache.UpdateSnapshot(r.logger, r.snapshot); err != nil {
		r.t.Fatal(err)
	}
	state := framework.NewCycleState()
	result, status, _ := r.framework.RunPreFilterPlugins(r.t.Context(), state, pod)
	statuses := framework.NewDefaultNodeToStatus()
	var fits []string
	if status.IsSuccess() && !result.AllNodes() {
		for _, name := range slices.Sorted(maps.Keys(result.NodeNames)) {
			info, err := r.snapshot.NodeInfos().Get(name)
			if err != nil {
				continue
			}
			if s := r.framework.RunFilterPlugins(r.t.Context(), state, pod, info); s.IsSuccess() {
				fits = append(fits, name)
			} else {
				statuses.Set(name, s)
			}
		}
	}
	if len(fits) > 0 {
		return state, fits, nil
	}
	r.result, status = r.framework.RunPostFilterPlugins(r.t.Context(), state, pod, statuses)
	return state, nil, status
}

func TestOnlyOwnNodesAreTried(t *testing.T) {
	r := newReplica(t)
	pod := at("n0", "p", "1")
	state, fits, _ := r.cycle(pod)
	if want := []string{"n0", "n1"}; !slices.Equal(fits, want) {
		t.Errorf("fits on %v, want %v", fits, want)
	}
	// A nominated node is tried whatever PreFilter has named.
	for name, own := range map[string]bool{"n1": true, "n2": false, "n5": false} {
		info, err := r.snapshot.NodeInfos().Get(name)
		if err != nil {
			t.Fatal(err)
		}
		if s := r.framework.RunFilterPlugins(t.Context(), state, pod, info); s.IsSuccess() != own || (!own && s.Code() != fwk.UnschedulableAndUnresolvable) {
			t.Errorf("node %s: %v", name, s)
		}
	}
}

func TestPreEnqueueAdmitsThePodsThatThisReplicaHolds(t *testing.T) {
	r := newReplica(t)
	hopped := func(node, to string) *corev1.Pod {
		p := at(node, "p", "1")
		p.Annotations[AnnotationReplica] = hop{To: to}.String()
		return p
	}
	for _, test := range []struct {
		name string
		pod  *corev1.Pod
		want string // "" for admitted
	}{
		{"at home here", at("n0", "p", "1"), ""},
		{"at home there", at("n2", "p", "1"), "scheduler b"},
		{"handed on to this one", hopped("n2", "a"), ""},
		{"handed on to another one", hopped("n0", "c"), "scheduler c"},
		{"handed on to one that is gone", hopped("n0", "x"), ""},
		{"on its way", at("n5", "p", "1"), "next owner of Virtual Node"},
	} {
		s := r.plugin.PreEnqueue(t.Context(), test.pod)
		if (test.want == "") != s.IsSuccess() || !strings.Contains(s.Message(), test.want) {
			t.Errorf("%s: %v, want %q", test.name, s, test.want)
		}
	}
	r.seat.lose()
	r.plugin.schedulers.look()
	if s := r.plugin.PreEnqueue(t.Context(), hopped("n2", "a")); s.IsSuccess() {
		t.Error("a replica that has nothing admits pods")
	}
}

func TestAPodMovesOnBeforeAnybodyPreempts(t *testing.T) {
	pod := at("n0", "p", "1")
	r := newReplica(t, pod)
	r.fill("n0", "n1", "n2", "n3", "n5")
	_, _, status := r.cycle(pod)
	if status.Code() != fwk.UnschedulableAndUnresolvable || !strings.Contains(status.Message(), "moves on to c") || capacity.RefusedByAll(status.Message()) {
		t.Errorf("PostFilter: %v", status)
	}
	if len(r.asked) != 0 {
		t.Error("the plugins behind were asked for a pod that fits elsewhere")
	}
	for _, a := range r.client.Actions() {
		if a.GetVerb() == "patch" {
			t.Error("PostFilter has written")
		}
	}
	r.plugin.schedulers.moveNext(t.Context())
	moved, err := r.client.CoreV1().Pods("ns").Get(t.Context(), "p", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if h := hopOf(moved); h == nil || h.To != "c" || !slices.Equal(h.Refused, []string{"a"}) {
		t.Errorf("the pod carries %v", h)
	}
	if len(moved.Status.Conditions) != 1 || !strings.Contains(moved.Status.Conditions[0].Message, "waits at scheduler c") {
		t.Errorf("conditions: %v", moved.Status.Conditions)
	}
	if s := r.plugin.PreEnqueue(t.Context(), moved); s.IsSuccess() {
		t.Error("the pod is still admitted here")
	}
}

func TestAPodThatFitsNowhereComesToThePluginsBehind(t *testing.T) {
	r := newReplica(t)
	r.fill("n0", "n1", "n2", "n3", "n4", "n5")
	if _, _, status := r.cycle(at("n0", "p", "1")); status.Code() != fwk.Unschedulable || !strings.Contains(status.Message(), "waits at a") || !capacity.RefusedByAll(status.Message()) {
		t.Errorf("PostFilter: %v", status)
	}
	if !slices.Equal(r.asked, []string{"p"}) {
		t.Errorf("behind came %v", r.asked)
	}
}

func TestAPodThatFitsOnANodeOnItsWayWaits(t *testing.T) {
	r := newReplica(t)
	r.fill("n0", "n1", "n2", "n3", "n4")
	if _, _, status := r.cycle(at("n0", "p", "1")); status.Code() != fwk.UnschedulableAndUnresolvable || !strings.Contains(status.Message(), "on its way") || capacity.RefusedByAll(status.Message()) {
		t.Errorf("PostFilter: %v", status)
	}
	if len(r.asked) != 0 {
		t.Errorf("behind came %v", r.asked)
	}
}

// The node on its way may come here in the same epoch: then the others have to find this replica unasked.
func TestAPodThatFitsOnANodeOnItsWayIsNotRefusedByMovingOn(t *testing.T) {
	pod := at("n0", "p", "1")
	r := newReplica(t, pod)
	r.fill("n0", "n1", "n2", "n3")
	if _, _, status := r.cycle(pod); !strings.Contains(status.Message(), "moves on to c") {
		t.Errorf("PostFilter: %v", status)
	}
	r.plugin.schedulers.moveNext(t.Context())
	moved, err := r.client.CoreV1().Pods("ns").Get(t.Context(), "p", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if h := hopOf(moved); h == nil || h.To != "c" || len(h.Refused) > 0 {
		t.Errorf("the pod carries %v", h)
	}
}

func TestAPodOfAnotherReplicaIsLeftAlone(t *testing.T) {
	r := newReplica(t)
	if _, fits, status := r.cycle(at("n2", "p", "1")); len(fits) > 0 || status.Code() != fwk.UnschedulableAndUnresolvable {
		t.Errorf("fits on %v: %v", fits, status)
	}
	if len(r.asked) != 0 {
		t.Errorf("behind came %v", r.asked)
	}
}

// What the last owner has bound reaches the informer, and the scheduler's cache by other handlers, later.
func TestANodeIsTakenUpOnceTheSnapshotShowsItsPods(t *testing.T) {
	r := newReplica(t)
	bound := at("n1", "bound", "1")
	bound.Spec.NodeName = "n1"
	if err := r.known.Add(bound); err != nil {
		t.Fatal(err)
	}
	if _, fits, _ := r.cycle(at("n0", "p", "1")); !slices.Equal(fits, []string{"n0"}) {
		t.Errorf("fits on %v", fits)
	}
	if err := r.cache.AddPod(r.logger, bound); err != nil {
		t.Fatal(err)
	}
	if _, fits, _ := r.cycle(at("n0", "p", "1")); !slices.Equal(fits, []string{"n0", "n1"}) {
		t.Errorf("once it is shown: fits on %v", fits)
	}
}

func (r *replica) binds() int {
	n := 0
	for _, a := range r.client.Actions() {
		if a.GetSubresource() == "binding" {
			n++
		}
	}
	return n
}

// Preemption has had its try on this replica's nodes, and nominated none.
func TestAPodMovesOnToWhereItCanPreempt(t *testing.T) {
	pod := at("n0", "p", "1")
	priority := int32(10)
	pod.Spec.Priority = &priority
	for _, test := range []struct {
		name      string
		nominated string
		want      *hop
	}{
		{"nothing to preempt here", "", &hop{To: "b", Refused: []string{"a"}, Preempting: true}},
		{"preemption has served it", "n0", nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newReplica(t, pod)
			r.fill("n0", "n1", "n2", "n3", "n4", "n5")
			r.cycle(pod)
			s := r.plugin.schedulers
			if len(r.asked) != 1 {
				t.Fatalf("behind came %v", r.asked)
			}
			now := pod.DeepCopy()
			now.Status.NominatedNodeName = test.nominated
			s.podSeen(now)
			_, h, _ := s.moving(pod.UID)
			if (h == nil) != (test.want == nil) || (h != nil && (h.To != test.want.To || h.Preempting != test.want.Preempting)) {
				t.Errorf("goes to %v, want %v", h, test.want)
			}
			// A promise that is taken back holds it up no longer.
			s.podSeen(pod)
			if _, h, _ = s.moving(pod.UID); h == nil || h.To != "b" {
				t.Errorf("without a nomination it goes to %v", h)
			}
		})
	}
}

// As long as another replica may preempt, the plugins behind hear that the pod is not theirs to buy a node for.
func TestCapacityIsAskedForAfterAllHavePreempted(t *testing.T) {
	pod := at("n0", "p", "1")
	priority := int32(10)
	pod.Spec.Priority = &priority
	for _, test := range []struct {
		name  string
		hop   *hop
		asked bool
	}{
		{"the first of two", nil, false},
		{"the last", &hop{To: "a", Refused: []string{"b", "c"}, Preempting: true, Epoch: 1}, true},
	} {
		r := newReplica(t)
		r.fill("n0", "n1", "n2", "n3", "n4", "n5")
		p := pod.DeepCopy()
		if test.hop != nil {
			p.Annotations[AnnotationReplica] = test.hop.String()
		}
		state, _, status := r.cycle(p)
		_, err := state.Read(capacity.NotYetRefusedKey)
		if status.Code() != fwk.Unschedulable || capacity.RefusedByAll(status.Message()) != test.asked || (err != nil) != test.asked {
			t.Errorf("%s: %v, asked for capacity: %v, want %v", test.name, status, err != nil, test.asked)
		}
	}
}

// Nodes may be without an owner for long. The pods that fit there are tried ever more rarely, and at once when that changes.
func TestPodsThatWaitForNodesOnTheirWayDoNotSpin(t *testing.T) {
	r := newReplica(t)
	s := r.plugin.schedulers
	r.fill("n0", "n1", "n2", "n3", "n4")
	pod := at("n0", "p", "1")
	for range 3 {
		r.cycle(pod)
	}
	if n := s.pods[pod.UID].stalls; n != 3 {
		t.Errorf("%d attempts are counted, want 3", n)
	}
	r.wasActivated("p")
	r.seat.give("b", "n5")
	r.seat.give("b")
	s.look()
	if n := s.pods[pod.UID].stalls; n != 0 || !r.wasActivated("p") {
		t.Errorf("%d attempts are counted after a change, and it is not tried at once", n)
	}
}

// A hop that was decided on before the group changed is not written.
func TestAHopOfYesterdayIsNotWritten(t *testing.T) {
	pod := at("n0", "p", "1")
	r := newReplica(t, pod)
	r.fill("n0", "n1")
	if _, _, status := r.cycle(pod); !strings.Contains(status.Message(), "moves on to b") {
		t.Fatalf("%v", status)
	}
	r.seat.give("c", "n5")
	r.seat.give("c", "n5")
	r.plugin.schedulers.look()
	if _, h, stays := r.plugin.schedulers.moving(pod.UID); h != nil || stays == nil {
		t.Errorf("goes to %v, stays %v", h, stays != nil)
	}
}

// A pod is woken by what happens where its last cycle did not look. Where it looked, the plugins that turned it down hear of it.
func TestWhatWasNotTriedWakesItsPods(t *testing.T) {
	mine, others, early := at("n0", "mine", "1"), at("n2", "others", "1"), at("n0", "early", "1")
	r := newReplica(t, mine, early)
	s := r.plugin.schedulers
	s.mu.Lock()
	vn := s.nodes["n1"]
	delete(s.nodes, "n1") // the scheduler's cache was told of it first
	s.own = nil
	s.mu.Unlock()
	r.cycle(early)
	s.mu.Lock()
	s.nodes["n1"], s.own = vn, nil
	s.mu.Unlock()
	r.cycle(mine)
	choosy := st.MakePod().Namespace("ns").Name("choosy").UID("choosy").SchedulerName("drover-scheduler").Annotation(sharding.AnnotationHashKey, nodeKey("n0")).
		PodAffinityExists("app", "zone", st.PodAffinityWithRequiredReq).Obj()
	r.cycle(choosy)
	stored := at("n0", "stored", "1")
	stored.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{
		PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "c"},
	}}}
	device := at("n0", "device", "1")
	device.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "d"}}
	extended := st.MakePod().Namespace("ns").Name("extended").UID("extended").Annotation(sharding.AnnotationHashKey, nodeKey("n0")).
		Req(map[corev1.ResourceName]string{"example.com/gpu": "1"}).Obj()
	proud := st.MakePod().Name("proud").UID("proud").Node("n0").PodAntiAffinityExists("app", "zone", st.PodAntiAffinityWithRequiredReq).Obj()
	on := func(node string) any { return st.MakePod().Name("other").UID("other").Node(node).Obj() }
	node := func(name string) any { return st.MakeNode().Name(name).Obj() }
	in := func(name, zone string) any { return st.MakeNode().Name(name).Label("zone", zone).Obj() }
	for _, test := range []struct {
		what       string
		resource   fwk.EventResource
		action     fwk.ActionType
		pod        *corev1.Pod
		before, by any
		want       fwk.QueueingHint
	}{
		{"another's node has changed", fwk.Node, fwk.UpdateNodeAllocatable, mine, node("n2"), node("n2"), fwk.Queue},
		{"an own node has changed that the plugin had not heard of", fwk.Node, fwk.UpdateNodeTaint, early, node("n1"), node("n1"), fwk.Queue},
		{"an own node has changed", fwk.Node, fwk.UpdateNodeTaint, mine, node("n0"), node("n0"), fwk.QueueSkip},
		{"another's node has come", fwk.Node, fwk.Add, mine, nil, node("n2"), fwk.Queue},
		// There may have been none to try before.
		{"an own node has come", fwk.Node, fwk.Add, mine, nil, node("n0"), fwk.Queue},
		{"another's node can do more", fwk.Node, fwk.UpdateNodeDeclaredFeature, mine, node("n2"), node("n2"), fwk.Queue},
		// What is in a domain matters to the nodes of others in it.
		{"an own node has changed its zone", fwk.Node, fwk.UpdateNodeLabel, mine, in("n0", "x"), in("n0", "y"), fwk.Queue},
		{"an own node takes part in a spread", fwk.Node, fwk.UpdateNodeTaint, choosy, node("n0"), node("n0"), fwk.Queue},
		{"an own node has gone", fwk.Node, fwk.Delete, mine, node("n0"), nil, fwk.Queue},
		{"a node has gone, and the pod waits elsewhere", fwk.Node, fwk.Delete, others, node("n0"), nil, fwk.QueueSkip},
		{"one has gone that kept others from the zone", fwk.Pod, fwk.Delete, mine, proud, nil, fwk.Queue},
		{"one has come that keeps others from the zone", fwk.Pod, fwk.Add, mine, nil, proud, fwk.QueueSkip},
		{"a node has come, and the pod waits elsewhere", fwk.Node, fwk.Add, others, nil, node("n0"), fwk.QueueSkip},
		{"a pod has gone from another's node", fwk.Pod, fwk.Delete, mine, on("n2"), nil, fwk.Queue},
		{"a pod has gone from an own node", fwk.Pod, fwk.Delete, mine, on("n0"), nil, fwk.QueueSkip},
		{"a pod has gone that had no node", fwk.Pod, fwk.Delete, mine, on(""), nil, fwk.QueueSkip},
		{"a pod has gone, and the pod waits elsewhere", fwk.Pod, fwk.Delete, others, on("n4"), nil, fwk.QueueSkip},
		{"a pod on another's node has shrunk", fwk.Pod, fwk.UpdatePodScaleDown, mine, on("n2"), on("n2"), fwk.Queue},
		{"a pod on an own node has shrunk", fwk.Pod, fwk.UpdatePodScaleDown, mine, on("n0"), on("n0"), fwk.QueueSkip},
		{"a pod has come to another's node", fwk.Pod, fwk.Add, mine, nil, on("n2"), fwk.QueueSkip},
		{"a pod has come that may be wanted as a neighbour", fwk.Pod, fwk.Add, choosy, nil, on("n2"), fwk.Queue},
		{"one has gone that may not be wanted in the zone", fwk.Pod, fwk.Delete, choosy, on("n0"), nil, fwk.Queue},
		{"the pod tolerates more", fwk.Pod, fwk.UpdatePodToleration, mine, mine, mine, fwk.Queue},
		{"a volume has come", fwk.PersistentVolume, fwk.Add, stored, nil, nil, fwk.Queue},
		{"a volume has come for others", fwk.PersistentVolume, fwk.Add, mine, nil, nil, fwk.QueueSkip},
		{"devices have come", fwk.ResourceSlice, fwk.Add, device, nil, nil, fwk.Queue},
		{"devices have come for an extended resource", fwk.ResourceSlice, fwk.Add, extended, nil, nil, fwk.Queue},
		{"devices have come for others", fwk.ResourceSlice, fwk.Add, mine, nil, nil, fwk.QueueSkip},
	} {
		got := fwk.QueueSkip
		for _, e := range s.events() {
			if e.Event.Resource != test.resource || e.Event.ActionType&test.action == 0 {
				continue
			}
			hint, err := e.QueueingHintFn(r.logger, test.pod, test.before, test.by)
			if err != nil {
				t.Errorf("%s: %v", test.what, err)
			}
			got = max(got, hint)
		}
		if got != test.want {
			t.Errorf("%s: %v, want %v", test.what, got, test.want)
		}
	}
}

type profileOf struct {
	fwk.Handle
	plugins config.Plugins
}

func (p profileOf) ProfileName() string          { return "drover-scheduler" }
func (p profileOf) ListPlugins() *config.Plugins { return &p.plugins }

func TestTheOrderOfAProfileIsChecked(t *testing.T) {
	set := func(names ...string) config.PluginSet {
		var s config.PluginSet
		for _, n := range names {
			s.Enabled = append(s.Enabled, config.Plugin{Name: n})
		}
		return s
	}
	right := config.Plugins{
		PreEnqueue: set(Name), PreFilter: set("X", Name), Filter: set("X", Name), Reserve: set("X", Name),
		PostFilter: set(Name, "DefaultPreemption"), Bind: set(Name, "DefaultBinder"),
	}
	if err := orderIn(profileOf{plugins: right})(); err != nil {
		t.Error(err)
	}
	wrong := right
	wrong.Bind, wrong.PostFilter, wrong.Reserve = set("DefaultBinder", Name), set("DefaultPreemption", Name), set("X")
	err := orderIn(profileOf{plugins: wrong})()
	for _, part := range []string{"profile drover-scheduler", "plugins.bind.enabled", "plugins.postFilter.enabled", "plugins.reserve.enabled"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("error %v does not mention %s", err, part)
		}
	}
}

func TestTheRoleIsRefusedWhereItCannotWork(t *testing.T) {
	args := raw(head + `,"schedulers":{"namespace":"ns","watchGroup":"g"}}`)
	yes := true
	s := &seats{leadsAlone: func() (bool, error) { return yes, nil }}
	if err := s.check(args, profileOf{}); err == nil || !strings.Contains(err.Error(), "leaderElection.leaderElect") {
		t.Errorf("with an election: %v", err)
	}
	yes = false
	if err := s.check(args, profileOf{}); err != nil {
		t.Error(err)
	}
	if err := s.check(args, profileOf{}); err == nil || !strings.Contains(err.Error(), "profile drover-scheduler has them already") {
		t.Errorf("twice: %v", err)
	}
	if err := s.check(nil, profileOf{}); err != nil {
		t.Errorf("another role: %v", err)
	}
}
