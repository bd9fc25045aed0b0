package backstop

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/event"

	clocktesting "k8s.io/utils/clock/testing"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/demand"
	"github.com/drover-sh/drover/internal/builders"
)

func requests(ctx context.Context, c client.Client, ns string) ([]fleetv1alpha1.CapacityRequest, error) {
	var list fleetv1alpha1.CapacityRequestList
	err := c.List(ctx, &list, client.InNamespace(ns))
	return list.Items, err
}

func TestUnschedulablePodWithoutAnyNodeGetsOneRequest(t *testing.T) {
	c, ns := start(t, nil)
	pod := unschedulable(t, c, builders.Pod(ns, "web-0").Requests("cpu", "2").Obj())

	key := client.ObjectKey{Namespace: ns, Name: demand.Name(pod.Name, pod.UID)}
	var got fleetv1alpha1.CapacityRequest
	eventually(t, "a request for the pod", func(ctx context.Context) (bool, error) {
		return c.Get(ctx, key, &got) == nil, nil
	})
	want := demand.RequestFor(pod, capacity.ProfileOfPod(pod))
	if diff := cmp.Diff(want.OwnerReferences, got.OwnerReferences); diff != "" {
		t.Errorf("owner (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(capacity.ProfileOfRequest(&want.Spec), capacity.ProfileOfRequest(&got.Spec)); diff != "" {
		t.Errorf("need (-want +got):\n%s", diff)
	}
}

func TestPluginAndBackstopTogetherMakeOneRequestPerPod(t *testing.T) {
	const pods = 50
	c, ns := start(t, nil)
	client, err := demand.RESTClient(apiServer, 1000, 1000)
	if err != nil {
		t.Fatal(err)
	}
	plugin, err := demand.NewWriter(demand.Options{Source: "plugin", Requests: demand.NewRequests(client), QPS: 1000})
	if err != nil {
		t.Fatal(err)
	}
	for i := range pods {
		plugin.Enqueue(unschedulable(t, c, builders.Pod(ns, fmt.Sprint("web-", i)).Requests("cpu", "2").Obj()), nil)
	}
	ctx, stop := context.WithCancel(t.Context())
	stop()
	plugin.Run(ctx) // writes all of them, at the same time as the back-stop
	if plugin.Settled(builders.Pod(ns, "other").UID("other").Obj()) {
		t.Error("a pod that nobody asked for is settled")
	}

	owners := map[string]int{}
	eventually(t, "a request for every pod", func(ctx context.Context) (bool, error) {
		all, err := requests(ctx, c, ns)
		clear(owners)
		for i := range all {
			owners[all[i].OwnerReferences[0].Name]++
		}
		return len(owners) == pods, err
	})
	for name, n := range owners {
		if n != 1 {
			t.Errorf("pod %s has %d requests, want 1", name, n)
		}
	}
}

func TestPodThatNoNodeHelpsGetsOneEventAndNoRequest(t *testing.T) {
	c, ns := start(t, nil)
	for _, pod := range []*corev1.Pod{
		withClaim(builders.Pod(ns, "claim").Requests("cpu", "1").Obj(), "missing"),
		withAffinity(builders.Pod(ns, "affinity").Requests("cpu", "1").Obj(), "app", "absent"),
		tiedTo(builders.Pod(ns, "tied").Requests("cpu", "1").Obj(), "gone"),
	} {
		unschedulable(t, c, pod)
	}
	rejected(t, c, builders.Pod(ns, "device").Requests("cpu", "1").Obj(), "0/3 nodes are available: resourceclaim in use.")
	rejected(t, c, builders.Pod(ns, "gang").Requests("cpu", "1").Obj(), "0/3 nodes are available: pre-filter pod gang cannot "+
		"find enough sibling pods, current pods number: 1, minMember of group: 4.") // waits in silence
	want := map[string]string{
		"claim":    capacity.ReasonVolumeClaimMissing,
		"affinity": capacity.ReasonNoMatchingPods,
		"tied":     capacity.ReasonTiedToNode,
		"device":   capacity.ReasonResourceClaimInUse,
	}
	got := map[string]string{}
	eventually(t, "an event for every pod", func(ctx context.Context) (bool, error) {
		var list eventsv1.EventList
		err := c.List(ctx, &list, client.InNamespace(ns))
		clear(got)
		for i := range list.Items {
			got[list.Items[i].Regarding.Name] += list.Items[i].Reason
		}
		return len(got) == len(want), err
	})
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	if all, err := requests(t.Context(), c, ns); err != nil || len(all) != 0 {
		t.Errorf("got %d requests (error %v), want none", len(all), err)
	}

	t.Run("and another process that sees the same adds no event", func(t *testing.T) {
		var pod corev1.Pod
		if err := c.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: "claim"}, &pod); err != nil {
			t.Fatal(err)
		}
		other := demand.NewEvents(kubernetes.NewForConfigOrDie(apiServer).EventsV1(), "drover.sh/other", "other")
		err := other.Warn(t.Context(), &pod, capacity.ReasonVolumeClaimMissing, "in other words", time.Now())
		if err != nil {
			t.Fatal(err)
		}
		var list eventsv1.EventList
		if err := c.List(t.Context(), &list, client.InNamespace(ns)); err != nil || len(list.Items) != len(want) {
			t.Errorf("got %d events (error %v), want %d", len(list.Items), err, len(want))
		}
	})
}

func TestPodThatNamesANodeIsToldOnlyWhereTheNodeDoesNotExist(t *testing.T) {
	c, cached, ns := startCached(t, nil)
	node := builders.Node(ns + "-there").Obj()
	create(t, c, node)
	shown(t, cached, node)
	create(t, c, builders.Pod(ns, "fine").Requests("cpu", "1").Node(node.Name).Obj())
	create(t, c, builders.Pod(ns, "lost").Requests("cpu", "1").Node(ns+"-gone").Obj())
	// What comes after both have been looked at.
	create(t, c, builders.Pod(ns, "later").Requests("cpu", "1").Node(ns+"-gone").Obj())

	var list eventsv1.EventList
	eventually(t, "an event for each pod whose node does not exist", func(ctx context.Context) (bool, error) {
		err := c.List(ctx, &list, client.InNamespace(ns))
		return len(list.Items) == 2, err
	})
	for i := range list.Items {
		e := &list.Items[i]
		if e.Regarding.Name == "fine" || e.Reason != capacity.ReasonNodeNameSet {
			t.Errorf("pod %s has event %s, want %s on lost and later only", e.Regarding.Name, e.Reason, capacity.ReasonNodeNameSet)
		}
		if want := "without spec.nodeName"; !strings.Contains(e.Note, want) {
			t.Errorf("event says %q, want %q in it", e.Note, want)
		}
	}
	if all, err := requests(t.Context(), c, ns); err != nil || len(all) != 0 {
		t.Errorf("got %d requests (error %v), want none", len(all), err)
	}
}

func TestOfferingThatComesLaterHelps(t *testing.T) {
	var system string
	c, cached, ns := startCached(t, func(o *Options) { system = o.Namespace })
	small := inNamespace(system, builders.AvailableCapacity("small", 5).Resources("cpu", "4").Obj())
	create(t, c, small)
	shown(t, cached, small)
	pod := builders.Pod(ns, "big").Requests("cpu", "16").Obj()
	unschedulable(t, c, pod)
	eventually(t, "an event", func(ctx context.Context) (bool, error) {
		var list eventsv1.EventList
		err := c.List(ctx, &list, client.InNamespace(ns))
		return len(list.Items) == 1 && list.Items[0].Reason == capacity.ReasonNoOfferingLargeEnough, err
	})
	create(t, c, inNamespace(system, builders.AvailableCapacity("large", 5).Resources("cpu", "64").Obj()))
	eventually(t, "a request", func(ctx context.Context) (bool, error) {
		all, err := requests(ctx, c, ns)
		return len(all) == 1, err
	})
}

func inNamespace(ns string, ac *fleetv1alpha1.AvailableCapacity) *fleetv1alpha1.AvailableCapacity {
	ac.Namespace = ns
	return ac
}

func withClaim(pod *corev1.Pod, claim string) *corev1.Pod {
	pod.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{
		PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim},
	}}}
	return pod
}

func withAffinity(pod *corev1.Pod, key, value string) *corev1.Pod {
	pod.Spec.Affinity = &corev1.Affinity{PodAffinity: &corev1.PodAffinity{
		RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{
			TopologyKey:   corev1.LabelTopologyZone,
			LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{key: value}},
		}},
	}}
	return pod
}

func tiedTo(pod *corev1.Pod, node string) *corev1.Pod {
	pod.Spec.NodeSelector = map[string]string{corev1.LabelHostname: node}
	return pod
}

// named is a pod that was created with spec.nodeName.
func named(node string, created time.Time) *corev1.Pod {
	pod := builders.Pod("ns", "p").UID("uid").Requests("cpu", "1").Node(node).Phase(corev1.PodPending).Obj()
	pod.CreationTimestamp = metav1.NewTime(created)
	return pod
}

func running(pod *corev1.Pod) *corev1.Pod {
	pod.Status.Phase = corev1.PodRunning
	return pod
}

// unit returns a Reconciler on objects in memory, whose writer never runs.
func unit(t *testing.T, config configv1alpha1.BackstopConfig, now time.Time, pod *corev1.Pod) *Reconciler {
	t.Helper()
	clock := clocktesting.NewFakeClock(now)
	writer, err := demand.NewWriter(demand.Options{Source: "test", Requests: demand.NewRequests(nil), Clock: clock})
	if err != nil {
		t.Fatal(err)
	}
	return &Reconciler{
		Reader: fake.NewClientBuilder().WithObjects(pod, builders.Node("there").Obj()).Build(),
		Writer: writer,
		Serves: servesFor(config),
		Delay:  delayOf(config),
		Clock:  clock,
	}
}

func TestReconcileChoosesItsPods(t *testing.T) {
	now := time.Unix(10_000, 0)
	failed := func(change ...func(*corev1.Pod)) *corev1.Pod {
		pod := builders.Pod("ns", "p").UID("uid").Scheduler("theirs").Requests("cpu", "1").Obj()
		pod.Status.Conditions = []corev1.PodCondition{{
			Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable,
			LastTransitionTime: metav1.NewTime(now.Add(-time.Minute)),
		}}
		for _, c := range change {
			c(pod)
		}
		return pod
	}
	for _, c := range []struct {
		name   string
		pod    *corev1.Pod
		config configv1alpha1.BackstopConfig
		asks   bool
		after  time.Duration
	}{
		{name: "an unschedulable pod", pod: failed(), asks: true, after: recheck},
		{
			name: "one that just failed is left to the plugin for the delay",
			pod: failed(func(p *corev1.Pod) {
				p.Status.Conditions[0].LastTransitionTime = metav1.NewTime(now.Add(-2 * time.Second))
			}),
			config: configv1alpha1.BackstopConfig{Delay: &metav1.Duration{Duration: 5 * time.Second}},
			after:  3 * time.Second,
		},
		{name: "a gated one", pod: failed(func(p *corev1.Pod) {
			p.Status.Conditions[0].Reason = corev1.PodReasonSchedulingGated
			p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "x"}}
		})},
		{name: "one whose scheduler has not spoken", pod: failed(func(p *corev1.Pod) { p.Status.Conditions = nil })},
		{name: "one whose scheduler had an error", pod: failed(func(p *corev1.Pod) {
			p.Status.Conditions[0].Reason = corev1.PodReasonSchedulerError
		})},
		{name: "one that a scheduler gave its node", pod: failed(func(p *corev1.Pod) {
			p.Spec.NodeName, p.Status.Conditions[0].Status = "gone", corev1.ConditionTrue
		})},
		{name: "one that another active scheduler is still to try", pod: failed(func(p *corev1.Pod) {
			p.Status.Conditions[0].Message = "0/3 nodes are available: 3 Insufficient cpu. " + capacity.NotYetRefusedByAll +
				": fits on no node of scheduler a, moves on to b"
		})},
		{name: "one that all active schedulers have refused", asks: true, after: recheck, pod: failed(func(p *corev1.Pod) {
			p.Status.Conditions[0].Message = "0/3 nodes are available: 3 Insufficient cpu. fits on no node of any of 3 schedulers, waits at b"
		})},
		{name: "one that names a node that exists", pod: named("there", now.Add(-time.Minute))},
		{name: "one that names a node that does not exist is told so", pod: named("gone", now.Add(-time.Minute)), asks: true},
		{
			name: "one that did so a moment ago is left to the node for the delay", pod: named("gone", now.Add(-time.Second)),
			after: 4 * time.Second,
		},
		{name: "one that runs where nobody knows the node", pod: running(named("gone", now.Add(-time.Minute)))},
		{name: "one that has ended", pod: failed(func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed })},
		{name: "one of a DaemonSet", pod: failed(func(p *corev1.Pod) {
			yes := true
			p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "d", UID: "d", Controller: &yes}}
		})},
		{
			name: "one of a listed scheduler", pod: failed(), asks: true, after: recheck,
			config: configv1alpha1.BackstopConfig{SchedulerNames: []string{"ours", "theirs"}},
		},
		{name: "one of another scheduler", pod: failed(), config: configv1alpha1.BackstopConfig{SchedulerNames: []string{"ours"}}},
		{name: "one of another namespace", pod: failed(), config: configv1alpha1.BackstopConfig{Namespaces: []string{"other"}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := unit(t, c.config, now, c.pod)
			result, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(c.pod)})
			if err != nil {
				t.Fatal(err)
			}
			if got := r.Writer.Settled(c.pod); got != c.asks {
				t.Errorf("asks: %v, want %v", got, c.asks)
			}
			if diff := cmp.Diff(ctrl.Result{RequeueAfter: c.after}, result); diff != "" {
				t.Errorf("result (-want +got):\n%s", diff)
			}
		})
	}
}

func TestBoundAndDeletedPodsAreForgotten(t *testing.T) {
	pod := builders.Pod("ns", "p").UID("uid").Obj()
	for name, seen := range map[string]func(*Reconciler){
		"bound": func(r *Reconciler) {
			bound := pod.DeepCopy()
			bound.Spec.NodeName = "n"
			bound.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionTrue}}
			r.predicate().Update(event.UpdateEvent{ObjectOld: pod, ObjectNew: bound})
		},
		"deleted": func(r *Reconciler) { r.predicate().Delete(event.DeleteEvent{Object: pod}) },
	} {
		t.Run(name, func(t *testing.T) {
			r := unit(t, configv1alpha1.BackstopConfig{}, time.Unix(1, 0), pod)
			r.Writer.Enqueue(pod, nil)
			seen(r)
			if r.Writer.Settled(pod) {
				t.Error("the pod is still remembered")
			}
		})
	}
}
