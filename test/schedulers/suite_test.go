package schedulers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/tools/cache"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/internal/activeschedulers"
	"github.com/drover-sh/drover/internal/controlplane"
	"github.com/drover-sh/drover/internal/process"
	"github.com/drover-sh/drover/plugins/vnaffinity"
	"github.com/drover-sh/drover/sharding"
)

// patience is how long a test waits for what has to come. It is a limit for hangs, not an expectation of speed.
const patience = 5 * time.Minute

var (
	cluster    *activeschedulers.Cluster
	clusterErr error
	startOnce  sync.Once
	dir        string
)

func TestMain(m *testing.M) {
	ctrl.SetLogger(logr.Discard())
	code := m.Run()
	if cluster != nil {
		if err := cluster.Stop(); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}
	if code == 0 {
		os.RemoveAll(dir)
	} else if dir != "" {
		fmt.Fprintln(os.Stderr, "schedulers: logs of every process are kept in", dir)
	}
	os.Exit(code)
}

// size is one of the environment's, or the small one.
func size(t *testing.T, name string, otherwise int) int {
	t.Helper()
	v := os.Getenv(name)
	if v == "" {
		return otherwise
	}
	n, err := strconv.Atoi(v)
	if err != nil {
		t.Fatalf("environment variable %s: %v", name, err)
	}
	return n
}

// eventually polls until check says that it is done, at most for patience. A check that takes long, as one that lists
// thousands of objects does, is made the more seldom, because what it takes is missing where it waits for something.
func eventually(t *testing.T, what string, check func(context.Context) (done bool, state string)) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for {
		started := time.Now()
		done, state := check(ctx)
		if done {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("waited in vain until %s; at last: %s", what, state)
		case <-time.After(max(100*time.Millisecond, 4*time.Since(started))):
		}
	}
}

// A world is one test's share of the cluster: its nodes, its pods, and its schedulers.
type world struct {
	t      *testing.T
	client client.Client
	ns     string
	ready  time.Time // since when the nodes take pods

	mu         sync.Mutex
	schedulers map[string]*activeschedulers.Scheduler
	bound      map[types.UID]map[string]bool // the nodes that a pod has been seen on
}

func newWorld(t *testing.T, members ...string) *world {
	t.Helper()
	return newWorldWith(t, nil, members...)
}

// newWorldWith has more PostFilter plugins in the profile of every scheduler.
func newWorldWith(t *testing.T, postFilters []string, members ...string) *world {
	t.Helper()
	if testing.Short() {
		t.Skip("needs a control plane")
	}
	startOnce.Do(func() {
		if dir, clusterErr = os.MkdirTemp("", "drover-schedulers-"); clusterErr == nil {
			cluster, clusterErr = activeschedulers.Start(context.Background(), dir, controlplane.Options{ControllerManager: true, KWOK: true})
		}
	})
	if clusterErr != nil {
		t.Fatal(clusterErr)
	}
	w := &world{
		t: t, client: cluster.Client, schedulers: make(map[string]*activeschedulers.Scheduler), bound: make(map[types.UID]map[string]bool),
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "schedulers-"}}
	if err := w.client.Create(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
	w.ns = ns.Name
	t.Cleanup(w.clear)
	w.watch()
	for _, m := range members {
		w.start(m, postFilters...)
	}
	w.settled(members...)
	return w
}

// clear leaves nothing to the next test.
func (w *world) clear() {
	for _, s := range w.schedulers {
		if err := s.Stop(20 * time.Second); err != nil {
			w.t.Error(err)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	// One by one: the API server breaks a request off after a minute, and so the deletion of ten thousand pods at once.
	var pods corev1.PodList
	var nodes corev1.NodeList
	if err := errors.Join(w.client.List(ctx, &pods, client.InNamespace(w.ns)), w.client.List(ctx, &nodes)); err != nil {
		w.t.Error(err)
	}
	w.parallel(len(pods.Items), func(i int) error {
		return client.IgnoreNotFound(w.client.Delete(ctx, &pods.Items[i], client.GracePeriodSeconds(0)))
	})
	w.parallel(len(nodes.Items), func(i int) error {
		return client.IgnoreNotFound(w.client.Delete(ctx, &nodes.Items[i], client.GracePeriodSeconds(0)))
	})
	for ctx.Err() == nil {
		owned, _, err := cluster.Owned(ctx)
		if err == nil && len(owned) <= 1 { // the last slice keeps the epoch
			return
		}
		time.Sleep(200 * time.Millisecond)
	}
	w.t.Error("the members of this test are still in the group")
}

func (w *world) start(member string, morePostFilters ...string) {
	w.t.Helper()
	s, err := cluster.StartScheduler(member, morePostFilters...)
	if err != nil {
		w.t.Fatal(err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.schedulers[member] = s
}

// stop asks a replica to end; it is not the world's any more.
func (w *world) stop(member string) error {
	w.mu.Lock()
	s := w.schedulers[member]
	delete(w.schedulers, member)
	w.mu.Unlock()
	return s.Stop(20 * time.Second)
}

// settled waits until just these members share the group.
func (w *world) settled(members ...string) {
	w.t.Helper()
	eventually(w.t, fmt.Sprintf("%v share the group", members), func(ctx context.Context) (bool, string) {
		for name, s := range w.schedulers {
			if !s.Running() {
				return false, name + " has ended:\n" + process.Tail(s.LogFile(), 20)
			}
		}
		owned, still, err := cluster.Owned(ctx)
		if err != nil {
			return false, err.Error()
		}
		for _, m := range members {
			still = still && owned[m] > 0
		}
		return still && len(owned) == len(members), fmt.Sprintf("%v, still %v", owned, still)
	})
}

// watchRequests notes every CapacityRequest that is ever made, and returns how many each pod has got so far, by its name.
func (w *world) watchRequests() func() map[string]int {
	w.t.Helper()
	client, err := metadata.NewForConfig(cluster.ControlPlane.Config())
	if err != nil {
		w.t.Fatal(err)
	}
	factory := metadatainformer.NewFilteredSharedInformerFactory(client, 0, w.ns, nil)
	requests := fleetv1alpha1.GroupVersion.WithResource("capacityrequests")
	made := make(map[string]map[types.UID]bool)
	if _, err := factory.ForResource(requests).Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: func(obj any) {
		if o, ok := obj.(*metav1.PartialObjectMetadata); ok && len(o.OwnerReferences) > 0 {
			w.mu.Lock()
			defer w.mu.Unlock()
			pod := o.OwnerReferences[0].Name
			if made[pod] == nil {
				made[pod] = make(map[types.UID]bool)
			}
			made[pod][o.UID] = true
		}
	}}); err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	factory.Start(ctx.Done())
	if !factory.WaitForCacheSync(ctx.Done())[requests] {
		w.t.Fatal("CapacityRequests are not watched")
	}
	w.t.Cleanup(func() { cancel(); factory.Shutdown() })
	return func() map[string]int {
		w.mu.Lock()
		defer w.mu.Unlock()
		counts := make(map[string]int, len(made))
		for pod, uids := range made {
			counts[pod] = len(uids)
		}
		return counts
	}
}

// watch notes every node that a pod is ever bound to.
func (w *world) watch() {
	config := cluster.ControlPlane.Config()
	clientset, err := kubernetes.NewForConfig(config)
	if err != nil {
		w.t.Fatal(err)
	}
	factory := informers.NewSharedInformerFactoryWithOptions(clientset, 0, informers.WithNamespace(w.ns))
	seen := func(obj any) {
		pod, ok := obj.(*corev1.Pod)
		if !ok || pod.Spec.NodeName == "" {
			return
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.bound[pod.UID] == nil {
			w.bound[pod.UID] = make(map[string]bool)
		}
		w.bound[pod.UID][pod.Spec.NodeName] = true
	}
	if _, err := factory.Core().V1().Pods().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: seen, UpdateFunc: func(_, obj any) { seen(obj) },
	}); err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	w.t.Cleanup(func() { cancel(); factory.Shutdown() })
}

func (w *world) parallel(n int, do func(i int) error) {
	w.t.Helper()
	next := make(chan int)
	errs := make(chan error, n)
	var workers sync.WaitGroup
	for range 16 {
		workers.Go(func() {
			for i := range next {
				if err := do(i); err != nil {
					errs <- err
				}
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	workers.Wait()
	select {
	case err := <-errs:
		w.t.Fatal(err)
	default:
	}
}

func amounts(milli int64, pods int64) corev1.ResourceList {
	return corev1.ResourceList{
		corev1.ResourceCPU:    *resource.NewMilliQuantity(milli, resource.DecimalSI),
		corev1.ResourceMemory: resource.MustParse("64Gi"),
		corev1.ResourcePods:   *resource.NewQuantity(pods, resource.DecimalSI),
	}
}

// nodes makes n nodes that kwok keeps ready, with so much CPU each, and waits until they take pods.
func (w *world) nodes(n int, milli func(i int) int64, labels func(i int) map[string]string) {
	w.t.Helper()
	w.addNodes(0, n, milli, labels)
}

// nodesFrom adds nodes to those that are there.
func (w *world) nodesFrom(first, n int, milli int64) {
	w.t.Helper()
	w.addNodes(first, n, func(int) int64 { return milli }, nil)
}

func (w *world) addNodes(first, n int, milli func(i int) int64, labels func(i int) map[string]string) {
	w.t.Helper()
	w.parallel(n, func(i int) error {
		i += first
		name := fmt.Sprintf("node-%04d", i)
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{
			Name: name, Annotations: map[string]string{"kwok.x-k8s.io/node": "fake"},
			Labels: map[string]string{corev1.LabelHostname: name},
		}}
		if labels != nil {
			for k, v := range labels(i) {
				node.Labels[k] = v
			}
		}
		node.Status.Capacity = amounts(milli(i), 110)
		node.Status.Allocatable = node.Status.Capacity
		return w.client.Create(w.t.Context(), node)
	})
	eventually(w.t, "the nodes are ready", func(ctx context.Context) (bool, string) {
		var list corev1.NodeList
		if err := w.client.List(ctx, &list); err != nil {
			return false, err.Error()
		}
		ready := 0
		for _, node := range list.Items {
			if len(node.Spec.Taints) == 0 {
				ready++
			}
		}
		return ready == first+n, fmt.Sprintf("%d of %d", ready, first+n)
	})
	w.ready = time.Now()
}

func (w *world) pod(name string, milli int64, change func(*corev1.Pod)) *corev1.Pod {
	zero := int64(0)
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name},
		Spec: corev1.PodSpec{
			SchedulerName: activeschedulers.SchedulerName, TerminationGracePeriodSeconds: &zero,
			Containers: []corev1.Container{{Name: "c", Image: "none", Resources: corev1.ResourceRequirements{
				Requests: corev1.ResourceList{corev1.ResourceCPU: *resource.NewMilliQuantity(milli, resource.DecimalSI)},
			}}},
		},
	}
	if change != nil {
		change(pod)
	}
	return pod
}

// priority makes a PriorityClass for this test.
func (w *world) priority(name string, value int32) string {
	w.t.Helper()
	class := &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: w.ns + "-" + name}, Value: value}
	if err := w.client.Create(w.t.Context(), class); err != nil {
		w.t.Fatal(err)
	}
	eventually(w.t, "the API server knows the PriorityClass", func(ctx context.Context) (bool, string) {
		pod := w.pod("any", 1, func(pod *corev1.Pod) { pod.Spec.PriorityClassName = class.Name })
		err := w.client.Create(ctx, pod, client.DryRunAll)
		return err == nil, fmt.Sprint(err)
	})
	w.t.Cleanup(func() {
		if err := w.client.Delete(context.Background(), class); err != nil {
			w.t.Error(err)
		}
	})
	return class.Name
}

func (w *world) list() []corev1.Pod {
	w.t.Helper()
	var list corev1.PodList
	if err := w.client.List(w.t.Context(), &list, client.InNamespace(w.ns)); err != nil {
		w.t.Fatal(err)
	}
	return list.Items
}

// bindings waits until so many pods have a node. It is patient as long as there are ever more of them.
func (w *world) bindings(n int) {
	w.t.Helper()
	have, last := 0, time.Now()
	for have < n {
		w.mu.Lock()
		now := len(w.bound)
		w.mu.Unlock()
		if now != have {
			have, last = now, time.Now()
		}
		if time.Since(last) > patience {
			w.t.Fatalf("waited in vain until %d pods have a node: %d have; %s", n, have, w.waiting())
		}
		select {
		case <-w.t.Context().Done():
			return
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// waiting says what a few pods wait for that have no node.
func (w *world) waiting() string {
	if w.t.Context().Err() != nil {
		return ""
	}
	text, n := "", 0
	for _, pod := range w.list() {
		if pod.Spec.NodeName != "" {
			continue
		}
		if n++; n > 3 {
			continue
		}
		text += fmt.Sprintf("\n  %s %s", pod.Name, pod.Annotations[vnaffinity.AnnotationReplica])
		for _, c := range pod.Status.Conditions {
			text += fmt.Sprintf("\n    %s %s", c.Type, c.Message)
		}
	}
	return fmt.Sprintf("%d wait: %s", n, text)
}

// check adds up what the API server has. binders counts pods by the replica that bound them.
func (w *world) check(pods int) (binders map[string]int) {
	w.t.Helper()
	var nodes corev1.NodeList
	if err := w.client.List(w.t.Context(), &nodes); err != nil {
		w.t.Fatal(err)
	}
	room := make(map[string]int64, len(nodes.Items))
	for _, n := range nodes.Items {
		room[n.Name] = n.Status.Allocatable.Cpu().MilliValue()
	}
	used, count := make(map[string]int64), make(map[string]int)
	binders = make(map[string]int)
	list := w.list()
	if len(list) != pods {
		w.t.Errorf("%d pods are there, want %d", len(list), pods)
	}
	sessions, err := w.sessions()
	if err != nil {
		w.t.Fatal(err)
	}
	for _, pod := range list {
		if pod.Spec.NodeName == "" {
			w.t.Errorf("pod %s was forgotten", pod.Name)
			continue
		}
		if vn, ok := pod.Labels[sharding.LabelVirtualNode]; ok {
			w.t.Errorf("pod %s is labelled with Virtual Node %s: the group takes no object", pod.Name, vn)
		}
		used[pod.Spec.NodeName] += pod.Spec.Containers[0].Resources.Requests.Cpu().MilliValue()
		count[pod.Spec.NodeName]++
		by := pod.Annotations[vnaffinity.AnnotationBoundBy]
		if name := sessions[by]; name != "" {
			by = name
		} else if by != "" {
			by = "one that is gone"
		}
		binders[by]++
	}
	for node, milli := range used {
		if milli > room[node] || count[node] > 110 {
			w.t.Errorf("node %s is over-committed: %d pods with %dm of %dm", node, count[node], milli, room[node])
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for uid, on := range w.bound {
		if len(on) > 1 {
			w.t.Errorf("pod %s was bound twice: %v", uid, on)
		}
	}
	return binders
}

// sessions maps the sessions that hold Virtual Nodes now to their members.
func (w *world) sessions() (map[string]string, error) {
	var list lbv1alpha1.VirtualNodeSliceList
	if err := w.client.List(w.t.Context(), &list, client.InNamespace(activeschedulers.Namespace)); err != nil {
		return nil, err
	}
	out := make(map[string]string, len(list.Items))
	for _, s := range list.Items {
		out[s.Spec.Session] = s.Spec.Member
	}
	return out, nil
}

// report logs what the replicas have counted.
func (w *world) report() {
	w.t.Helper()
	w.t.Logf("%.0f s since the nodes were ready", time.Since(w.ready).Seconds())
	for name, s := range w.schedulers {
		if !s.Running() {
			continue
		}
		line := name + ":"
		for _, m := range []struct{ what, metric, labels string }{
			{"attempts", "scheduler_schedule_attempts_total", ""},
			{"bound", "scheduler_schedule_attempts_total", `result="scheduled"`},
			{"handed on", "drover_vnaffinity_moves_total", ""},
			{"conflicts", "drover_vnaffinity_bind_conflicts_total", ""},
			{"placements given up", "drover_vnaffinity_reserve_refused_total", ""},
		} {
			v, err := s.Metric(m.metric, m.labels)
			if err != nil {
				w.t.Log(err)
			}
			line += fmt.Sprintf(" %s %.0f,", m.what, v)
		}
		w.t.Log(line)
	}
}
