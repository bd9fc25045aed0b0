package playground

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	autoscalingv1 "k8s.io/autoscaler/cluster-autoscaler/apis/provisioningrequest/autoscaling.x-k8s.io/v1"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/capacity"
)

// labelStatic marks a node that a story makes itself: nobody's machine.
const labelStatic = "playground.drover.sh/static"

// capacityEventAction is the action of the events that the writer of requests makes.
const capacityEventAction = "RequestCapacity"

// view follows what is in the cluster by watches. Whoever waits for a condition is woken by every change, and the
// recorder of the story that is being played sees every single one, so that what was wrong for a moment only is seen,
// too.
type view struct {
	client    client.Client
	informers cache.Cache
	cancel    context.CancelFunc
	done      chan struct{}

	mu       sync.Mutex
	changed  chan struct{} // closed, and made anew, at every change
	pods     map[types.UID]*corev1.Pod
	nodes    map[string]*corev1.Node
	requests map[types.UID]*fleetv1alpha1.CapacityRequest
	upcoming map[string]*fleetv1alpha1.UpcomingNode
	hints    map[string]*fleetv1alpha1.AvailableCapacity
	events   map[types.UID]*corev1.Event
	// Empty where Kueue does not run.
	workloads map[types.UID]*kueue.Workload
	checks    map[string]*kueue.AdmissionCheck
	bookings  map[types.UID]*autoscalingv1.ProvisioningRequest

	rollUp   rollUp
	recorder *recorder
}

func newView(ctx context.Context, kubeconfig string) (*view, error) {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("playground: %w", err)
	}
	config.QPS, config.Burst = 500, 1000
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), fleetv1alpha1.AddToScheme(scheme), kueue.AddToScheme(scheme),
		autoscalingv1.AddToScheme(scheme), lbv1alpha1.AddToScheme(scheme)); err != nil {
		return nil, fmt.Errorf("playground: %w", err)
	}
	v := &view{
		done:     make(chan struct{}),
		changed:  make(chan struct{}),
		pods:     map[types.UID]*corev1.Pod{},
		nodes:    map[string]*corev1.Node{},
		requests: map[types.UID]*fleetv1alpha1.CapacityRequest{},
		upcoming: map[string]*fleetv1alpha1.UpcomingNode{},
		hints:    map[string]*fleetv1alpha1.AvailableCapacity{},
		events:   map[types.UID]*corev1.Event{},

		workloads: map[types.UID]*kueue.Workload{},
		checks:    map[string]*kueue.AdmissionCheck{},
		bookings:  map[types.UID]*autoscalingv1.ProvisioningRequest{},
	}
	if v.client, err = client.New(config, client.Options{Scheme: scheme}); err != nil {
		return nil, fmt.Errorf("playground: %w", err)
	}
	if v.informers, err = cache.New(config, cache.Options{Scheme: scheme}); err != nil {
		return nil, fmt.Errorf("playground: %w", err)
	}
	var watching context.Context
	watching, v.cancel = context.WithCancel(context.Background())
	go func() {
		defer close(v.done)
		_ = v.informers.Start(watching)
	}()
	if err := v.follow(ctx, &corev1.Pod{}, &corev1.Node{}, &corev1.Event{}, &fleetv1alpha1.CapacityRequest{},
		&fleetv1alpha1.UpcomingNode{}, &fleetv1alpha1.AvailableCapacity{}); err != nil {
		v.stop()
		return nil, err
	}
	return v, nil
}

// follow watches further kinds, and returns when what is there of them has been seen.
func (v *view) follow(ctx context.Context, objects ...client.Object) error {
	for _, object := range objects {
		var seen toolscache.ResourceEventHandlerRegistration
		informer, err := v.informers.GetInformer(ctx, object)
		if err == nil {
			seen, err = informer.AddEventHandler(v.handler())
		}
		if err == nil && !toolscache.WaitForCacheSync(ctx.Done(), seen.HasSynced) {
			err = context.Cause(ctx)
		}
		if err != nil {
			return fmt.Errorf("watching %T: %w", object, err)
		}
	}
	return nil
}

// unfollow ends the watches of kinds.
func (v *view) unfollow(ctx context.Context, objects ...client.Object) error {
	var errs []error
	for _, object := range objects {
		errs = append(errs, v.informers.RemoveInformer(ctx, object))
	}
	return errors.Join(errs...)
}

func (v *view) stop() {
	v.cancel()
	<-v.done
}

func (v *view) handler() toolscache.ResourceEventHandlerFuncs {
	return toolscache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { v.update(func() { v.put(o) }) },
		UpdateFunc: func(_, o any) { v.update(func() { v.put(o) }) },
		DeleteFunc: func(o any) {
			if gone, ok := o.(toolscache.DeletedFinalStateUnknown); ok {
				o = gone.Obj
			}
			v.update(func() { v.drop(o) })
		},
	}
}

// update makes a change and wakes whoever waits for one.
func (v *view) update(change func()) {
	v.mu.Lock()
	defer v.mu.Unlock()
	change()
	if v.recorder != nil {
		v.recorder.check(v)
	}
	close(v.changed)
	v.changed = make(chan struct{})
}

func (v *view) put(object any) {
	switch o := object.(type) {
	case *corev1.Pod:
		v.pods[o.UID] = o
	case *corev1.Node:
		v.nodes[o.Name] = o
	case *corev1.Event:
		v.events[o.UID] = o
	case *fleetv1alpha1.CapacityRequest:
		v.requests[o.UID] = o
	case *fleetv1alpha1.UpcomingNode:
		v.upcoming[o.Name] = o
	case *fleetv1alpha1.AvailableCapacity:
		v.hints[o.Name] = o
	case *kueue.Workload:
		v.workloads[o.UID] = o
	case *kueue.AdmissionCheck:
		v.checks[o.Name] = o
	case *autoscalingv1.ProvisioningRequest:
		v.bookings[o.UID] = o
	}
	if v.recorder != nil {
		v.recorder.saw(object)
	}
}

func (v *view) drop(object any) {
	switch o := object.(type) {
	case *corev1.Pod:
		delete(v.pods, o.UID)
	case *corev1.Node:
		delete(v.nodes, o.Name)
	case *corev1.Event:
		delete(v.events, o.UID)
	case *fleetv1alpha1.CapacityRequest:
		delete(v.requests, o.UID)
	case *fleetv1alpha1.UpcomingNode:
		delete(v.upcoming, o.Name)
	case *fleetv1alpha1.AvailableCapacity:
		delete(v.hints, o.Name)
	case *kueue.Workload:
		delete(v.workloads, o.UID)
	case *kueue.AdmissionCheck:
		delete(v.checks, o.Name)
	case *autoscalingv1.ProvisioningRequest:
		delete(v.bookings, o.UID)
	}
	if v.recorder != nil {
		v.recorder.lost(object)
	}
}

// wait returns when the condition holds; it is looked at after every change, with the view locked, and now and then
// without one, so that what is shown of the wait does not stand still.
func (v *view) wait(ctx context.Context, condition func(*World) bool, namespace string) error {
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	for {
		v.mu.Lock()
		ok := condition(&World{v: v, namespace: namespace})
		changed := v.changed
		v.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-changed:
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// look calls f with the world as it is.
func (v *view) look(namespace string, f func(*World)) {
	v.mu.Lock()
	defer v.mu.Unlock()
	f(&World{v: v, namespace: namespace})
}

// World is what a story sees of the cluster at one moment: pods and requests of its own namespace, and all nodes. What
// it returns is shared and must not be changed. It is valid only in the function that it is given to.
type World struct {
	v         *view
	namespace string // empty: all
}

// Pods of the story, those of DaemonSets excepted, by name.
func (w *World) Pods() []*corev1.Pod {
	return sorted(w.v.pods, func(p *corev1.Pod) bool { return w.mine(p) && !capacity.IsDaemonPod(p) })
}

// PodsOf is Pods with that value of the label app.
func (w *World) PodsOf(app string) []*corev1.Pod {
	return slices.DeleteFunc(w.Pods(), func(p *corev1.Pod) bool { return p.Labels["app"] != app })
}

// DaemonPods are the story's pods of DaemonSets.
func (w *World) DaemonPods() []*corev1.Pod {
	return sorted(w.v.pods, func(p *corev1.Pod) bool { return w.mine(p) && capacity.IsDaemonPod(p) })
}

// Running counts the pods that run.
func (w *World) Running() int { return countRunning(w.Pods()) }

// Requests of the story's namespace.
func (w *World) Requests() []*fleetv1alpha1.CapacityRequest {
	return sorted(w.v.requests, func(r *fleetv1alpha1.CapacityRequest) bool { return w.mine(r) })
}

// Acknowledged counts the requests that a roll-up has carried to the autoscaler.
func (w *World) Acknowledged() (n int) {
	for _, r := range w.Requests() {
		if r.Status.Phase == fleetv1alpha1.CapacityRequestAcknowledged {
			n++
		}
	}
	return n
}

// Nodes that were launched for demand.
func (w *World) Nodes() []*corev1.Node {
	return sorted(w.v.nodes, func(n *corev1.Node) bool { return n.Labels[labelStatic] == "" })
}

// ReadyNodes are those Nodes that are Ready.
func (w *World) ReadyNodes() []*corev1.Node {
	return slices.DeleteFunc(w.Nodes(), func(n *corev1.Node) bool { return !nodeReady(n) })
}

// Node by name; nil when there is none.
func (w *World) Node(name string) *corev1.Node { return w.v.nodes[name] }

// Upcoming are the UpcomingNodes.
func (w *World) Upcoming() []*fleetv1alpha1.UpcomingNode {
	return sorted(w.v.upcoming, func(*fleetv1alpha1.UpcomingNode) bool { return true })
}

// Available is what can be had, by offering.
func (w *World) Available() map[string]int32 {
	found := map[string]int32{}
	for name, h := range w.v.hints {
		found[name] = h.Spec.AvailableCount
	}
	return found
}

// CapacityEvents are the events about the story's pods that tell why no request was made for one.
func (w *World) CapacityEvents() []*corev1.Event {
	return sorted(w.v.events, func(e *corev1.Event) bool { return w.mine(e) && e.Action == capacityEventAction })
}

// Workloads of the story, in the order in which Kueue's queue and the check look at equals: by age, then by name.
func (w *World) Workloads() []*kueue.Workload {
	all := sorted(w.v.workloads, func(wl *kueue.Workload) bool { return w.mine(wl) })
	slices.SortStableFunc(all, func(a, b *kueue.Workload) int {
		return a.CreationTimestamp.Compare(b.CreationTimestamp.Time)
	})
	return all
}

// WorkloadOf is the workload of the Job; nil when there is none.
func (w *World) WorkloadOf(job string) *kueue.Workload {
	all := w.Workloads()
	if i := slices.IndexFunc(all, func(wl *kueue.Workload) bool { return jobOf(wl) == job }); i >= 0 {
		return all[i]
	}
	return nil
}

// AdmissionCheck by name; nil when there is none.
func (w *World) AdmissionCheck(name string) *kueue.AdmissionCheck { return w.v.checks[name] }

// ProvisioningRequests of the story.
func (w *World) ProvisioningRequests() []*autoscalingv1.ProvisioningRequest {
	return sorted(w.v.bookings, func(pr *autoscalingv1.ProvisioningRequest) bool { return w.mine(pr) })
}

// Promises counts the workloads for which the admission check holds capacity, by the manager's own metrics.
func (w *World) Promises() int { return w.v.rollUp.promises }

// RollUp is the last roll-up by the manager's own metrics.
func (w *World) RollUp() (rows, bytes int) { return w.v.rollUp.rows, w.v.rollUp.bytes }

// RollUpsSent counts the roll-ups that the autoscaler has taken since the manager's start.
func (w *World) RollUpsSent() int { return w.v.rollUp.sent }

func (w *World) mine(o client.Object) bool {
	return w.namespace == "" || o.GetNamespace() == w.namespace
}

func sorted[K comparable, O client.Object](objects map[K]O, keep func(O) bool) []O {
	var kept []O
	for _, o := range objects {
		if keep(o) {
			kept = append(kept, o)
		}
	}
	slices.SortFunc(kept, func(a, b O) int {
		return cmp.Or(cmp.Compare(a.GetNamespace(), b.GetNamespace()), cmp.Compare(a.GetName(), b.GetName()))
	})
	return kept
}

func countRunning(pods []*corev1.Pod) (n int) {
	for _, p := range pods {
		if p.Status.Phase == corev1.PodRunning && p.DeletionTimestamp == nil {
			n++
		}
	}
	return n
}

func nodeReady(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}
