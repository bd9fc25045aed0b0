package integration

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
)

// podOption changes the pods of a workload.
type podOption func(*corev1.PodSpec)

// requests adds resource requests, as "cpu", "1", "nvidia.com/gpu", "8".
func requests(pairs ...string) podOption {
	return func(s *corev1.PodSpec) {
		list := corev1.ResourceList{}
		for i := 0; i < len(pairs); i += 2 {
			list[corev1.ResourceName(pairs[i])] = resource.MustParse(pairs[i+1])
		}
		// Extended resources need a limit, which has to equal the request.
		s.Containers[0].Resources = corev1.ResourceRequirements{Requests: list, Limits: list}
	}
}

func tolerateGPU(s *corev1.PodSpec) {
	s.Tolerations = append(s.Tolerations, corev1.Toleration{Key: "nvidia.com/gpu", Operator: corev1.TolerationOpExists})
}

// sameRack wants all pods with the label app=name on one rack.
func sameRack(name string) podOption {
	return func(s *corev1.PodSpec) {
		s.Affinity = &corev1.Affinity{PodAffinity: &corev1.PodAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{
				TopologyKey:   fleetv1alpha1.LabelRack,
				LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}},
			}},
		}}
	}
}

// apart wants no two pods with the label app=name on one node.
func apart(name string) podOption {
	return func(s *corev1.PodSpec) {
		s.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{
				TopologyKey:   corev1.LabelHostname,
				LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}},
			}},
		}}
	}
}

// preferApart would rather not have two pods with the label app=name on one node.
func preferApart(name string) podOption {
	return func(s *corev1.PodSpec) {
		s.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{
			PreferredDuringSchedulingIgnoredDuringExecution: []corev1.WeightedPodAffinityTerm{{
				Weight: 100,
				PodAffinityTerm: corev1.PodAffinityTerm{
					TopologyKey:   corev1.LabelHostname,
					LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}},
				},
			}},
		}}
	}
}

// hostsOf are the nodes that the pods are bound to.
func hostsOf(pods []corev1.Pod) map[string]int {
	hosts := map[string]int{}
	for _, p := range pods {
		hosts[p.Spec.NodeName]++
	}
	return hosts
}

// overZones spreads pods with the label app=name over the zones.
func overZones(name string) podOption {
	return func(s *corev1.PodSpec) {
		s.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{
			TopologyKey: corev1.LabelTopologyZone, MaxSkew: 1, WhenUnsatisfiable: corev1.DoNotSchedule,
			LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}},
		}}
	}
}

func podSpec(options ...podOption) corev1.PodSpec {
	s := corev1.PodSpec{
		SchedulerName:                 "drover-scheduler",
		TerminationGracePeriodSeconds: ptr.To[int64](1),
		Containers:                    []corev1.Container{{Name: "main", Image: "none"}},
	}
	for _, option := range options {
		option(&s)
	}
	return s
}

// job creates a Job of n pods that all run at once and do not end by themselves.
func job(t *testing.T, ns, name string, n int32, options ...podOption) *batchv1.Job {
	t.Helper()
	spec := podSpec(options...)
	spec.RestartPolicy = corev1.RestartPolicyNever
	j := &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name},
		Spec: batchv1.JobSpec{
			Parallelism: ptr.To(n), Completions: ptr.To(n),
			BackoffLimit: ptr.To[int32](1000), // a pod that is preempted or evicted counts as failed
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": name}}, Spec: spec,
			},
		},
	}
	create(t, j)
	return j
}

// replicas keeps n pods running. One that is preempted is replaced at once, where a Job backs off.
func replicas(t *testing.T, ns, name string, n int32, options ...podOption) *appsv1.ReplicaSet {
	t.Helper()
	labels := map[string]string{"app": name}
	r := &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name},
		Spec: appsv1.ReplicaSetSpec{
			Replicas: ptr.To(n),
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: podSpec(options...)},
		},
	}
	create(t, r)
	return r
}

// daemonSet puts a pod on every node, before all others: it may come last and preempt.
func daemonSet(t *testing.T, ns, name string, options ...podOption) *appsv1.DaemonSet {
	t.Helper()
	labels := map[string]string{"app": name}
	spec := podSpec(options...)
	spec.PriorityClassName = "system-node-critical"
	d := &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name},
		Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: spec},
		},
	}
	create(t, d)
	return d
}

func pod(t *testing.T, ns, name string, options ...podOption) *corev1.Pod {
	t.Helper()
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, Labels: map[string]string{"app": name}},
		Spec:       podSpec(options...),
	}
	create(t, p)
	return p
}

func create(t *testing.T, o client.Object) {
	t.Helper()
	if err := env.client.Create(t.Context(), o); err != nil {
		t.Fatalf("creating %T %s: %v", o, o.GetName(), err)
	}
}

func remove(t *testing.T, o client.Object) {
	t.Helper()
	if err := env.client.Delete(t.Context(), o, client.PropagationPolicy(metav1.DeletePropagationBackground)); err != nil {
		t.Fatalf("deleting %T %s: %v", o, o.GetName(), err)
	}
}

// running returns the pods that run and have the label app=app.
func running(ctx context.Context, ns, app string) ([]corev1.Pod, string) {
	var pods corev1.PodList
	if failure := list(ctx, &pods, client.InNamespace(ns), client.MatchingLabels{"app": app}); failure != "" {
		return nil, failure
	}
	return slices.DeleteFunc(pods.Items, func(p corev1.Pod) bool {
		return p.Status.Phase != corev1.PodRunning || p.DeletionTimestamp != nil
	}), ""
}

// waitRunning waits until exactly n pods run, and returns them.
func waitRunning(t *testing.T, ns, app string, n int) []corev1.Pod {
	t.Helper()
	var pods []corev1.Pod
	eventually(t, fmt.Sprintf("%d pods of %s run", n, app), func(ctx context.Context) (bool, string) {
		var failure string
		pods, failure = running(ctx, ns, app)
		return len(pods) == n, fmt.Sprintf("%d run %s", len(pods), failure)
	})
	return pods
}

// nodes returns the nodes that the autoscaler provisioned.
func nodes(ctx context.Context) ([]corev1.Node, string) {
	var all corev1.NodeList
	failure := list(ctx, &all)
	return slices.DeleteFunc(all.Items, func(n corev1.Node) bool { return n.Labels["static"] != "" }), failure
}

func waitNodes(t *testing.T, n int) []corev1.Node {
	t.Helper()
	var found []corev1.Node
	eventually(t, fmt.Sprintf("there are %d nodes", n), func(ctx context.Context) (bool, string) {
		var failure string
		found, failure = nodes(ctx)
		return len(found) == n, fmt.Sprintf("%d nodes %s", len(found), failure)
	})
	return found
}

// waitQuiet waits until nothing is left of any demand: no provisioned node, none on its way, no request.
func waitQuiet(t *testing.T) {
	t.Helper()
	eventually(t, "no provisioned node, upcoming node and request is left", func(ctx context.Context) (bool, string) {
		found, failure := nodes(ctx)
		var upcoming fleetv1alpha1.UpcomingNodeList
		var requests fleetv1alpha1.CapacityRequestList
		failure += list(ctx, &upcoming) + list(ctx, &requests)
		state := fmt.Sprintf("%d nodes, %d upcoming nodes, %d requests %s",
			len(found), len(upcoming.Items), len(requests.Items), failure)
		return failure == "" && len(found)+len(upcoming.Items)+len(requests.Items) == 0, state
	})
}

// staticNode is a node that the autoscaler does not own.
func staticNode(t *testing.T, name string, pairs ...string) *corev1.Node {
	t.Helper()
	allocatable := corev1.ResourceList{corev1.ResourcePods: resource.MustParse("110")}
	for i := 0; i < len(pairs); i += 2 {
		allocatable[corev1.ResourceName(pairs[i])] = resource.MustParse(pairs[i+1])
	}
	n := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name:        name,
			Labels:      map[string]string{"static": "true", corev1.LabelHostname: name},
			Annotations: map[string]string{"kwok.x-k8s.io/node": "fake"},
		},
		Status: corev1.NodeStatus{Allocatable: allocatable, Capacity: allocatable},
	}
	create(t, n)
	t.Cleanup(func() {
		ctx, cancel := cleanupContext()
		defer cancel()
		if err := client.IgnoreNotFound(env.client.Delete(ctx, n)); err != nil {
			t.Error(err)
		}
	})
	eventually(t, "static node "+name+" is ready", func(ctx context.Context) (bool, string) {
		err := env.client.Get(ctx, client.ObjectKeyFromObject(n), n)
		return err == nil && nodeReady(n) && len(n.Spec.Taints) == 0, fmt.Sprint(err, n.Spec.Taints)
	})
	return n
}

// recorder sees every node and every CapacityRequest from its start on, also those that are gone at the end.
type recorder struct {
	mu       sync.Mutex
	nodes    map[string]*corev1.Node
	requests map[types.UID]map[string]bool // names by the pod's UID; "" for requests without a pod
}

func record(t *testing.T) *recorder {
	t.Helper()
	r := &recorder{nodes: map[string]*corev1.Node{}, requests: map[types.UID]map[string]bool{}}
	follow(t, cache.Options{Scheme: env.client.Scheme()}, toolscache.ResourceEventHandlerFuncs{AddFunc: r.add},
		&corev1.Node{}, &fleetv1alpha1.CapacityRequest{})
	return r
}

// follow tells the handler of every change to objects of these kinds until the test ends.
func follow(t *testing.T, options cache.Options, handler toolscache.ResourceEventHandler, kinds ...client.Object) {
	t.Helper()
	c, err := cache.New(env.cp.Config(), options)
	if err != nil {
		t.Fatal(err)
	}
	// The test's context ends before its cleanups: the watch lives as long as the test.
	ctx, cancel := context.WithCancel(context.Background())
	for _, o := range kinds {
		informer, err := c.GetInformer(ctx, o, cache.BlockUntilSynced(false))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := informer.AddEventHandler(handler); err != nil {
			t.Fatal(err)
		}
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := c.Start(ctx); err != nil {
			t.Errorf("following %T: %v", kinds, err)
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	syncCtx, cancelSync := context.WithTimeout(ctx, patience)
	defer cancelSync()
	if !c.WaitForCacheSync(syncCtx) {
		t.Fatalf("following %T: caches do not synchronise", kinds)
	}
}

func (r *recorder) add(object any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch o := object.(type) {
	case *corev1.Node:
		if o.Labels["static"] == "" {
			r.nodes[o.Name] = o
		}
	case *fleetv1alpha1.CapacityRequest:
		var uid types.UID
		for _, owner := range o.OwnerReferences {
			if owner.Kind == "Pod" {
				uid = owner.UID
			}
		}
		if r.requests[uid] == nil {
			r.requests[uid] = map[string]bool{}
		}
		r.requests[uid][o.Namespace+"/"+o.Name] = true
	}
}

// await waits until the recorder, whose watches may be a moment behind what a test reads, has seen as much. What it finds by
// then is for the caller to judge.
func (r *recorder) await(t *testing.T, seen func() bool) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	poll(ctx, func(context.Context) (bool, string) {
		r.mu.Lock()
		defer r.mu.Unlock()
		return seen(), ""
	})
}

// expectNodes fails when another number of nodes was ever launched, named by what they are.
func (r *recorder) expectNodes(t *testing.T, n int) {
	t.Helper()
	r.await(t, func() bool { return len(r.nodes) >= n })
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.nodes) != n {
		t.Errorf("%d nodes were launched, want %d: %v", len(r.nodes), n, r.instanceTypes())
	}
}

func (r *recorder) instanceTypes() map[string]int {
	counts := map[string]int{}
	for _, n := range r.nodes {
		counts[n.Labels[corev1.LabelInstanceTypeStable]]++
	}
	return counts
}

// expectOneRequestPerPod fails when one of these pods had no request, or any pod had two.
func (r *recorder) expectOneRequestPerPod(t *testing.T, pods []corev1.Pod) {
	t.Helper()
	r.await(t, func() bool { return r.withoutRequest(pods) == 0 })
	r.mu.Lock()
	defer r.mu.Unlock()
	for uid, names := range r.requests {
		if uid != "" && len(names) != 1 {
			t.Errorf("pod %s had %d requests: %v", uid, len(names), names)
		}
	}
	if n := r.withoutRequest(pods); n > 0 {
		t.Errorf("%d of %d pods never had a request", n, len(pods))
	}
}

func (r *recorder) withoutRequest(pods []corev1.Pod) (n int) {
	for _, p := range pods {
		if len(r.requests[p.UID]) == 0 {
			n++
		}
	}
	return n
}

// expectZones fails unless the nodes that were ever launched are in so many zones.
func (r *recorder) expectZones(t *testing.T, n int) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	zones := map[string]int{}
	for _, node := range r.nodes {
		zones[node.Labels[corev1.LabelTopologyZone]]++
	}
	if len(zones) != n {
		t.Errorf("nodes by zone: %v, want %d zones", zones, n)
	}
}

// expectNoRequestFor fails when one of the pods ever had a request.
func (r *recorder) expectNoRequestFor(t *testing.T, pods ...corev1.Pod) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range pods {
		if names := r.requests[p.UID]; len(names) > 0 {
			t.Errorf("pod %s has a request: %v", p.Name, names)
		}
	}
}

// valuesOf counts the values of a label over nodes.
func valuesOf(found []corev1.Node, label string) map[string]int {
	counts := map[string]int{}
	for _, n := range found {
		counts[n.Labels[label]]++
	}
	return counts
}
