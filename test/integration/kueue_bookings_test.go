package integration

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	autoscalingv1 "k8s.io/autoscaler/cluster-autoscaler/apis/provisioningrequest/autoscaling.x-k8s.io/v1"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/kueue/provisioning"
)

// TestKueueBookings is how a booking ends, as Kueue's own ProvisioningRequest check sees it: the real Kueue manager, our
// manager as a process that is killed, and the autoscaler's part played by the test, so that nodes come and go when the test
// says.
func TestKueueBookings(t *testing.T) {
	all := startKueueAlone(t, "kueue-bookings")

	t.Run("a booking that nobody consumes expires, and Kueue asks again", func(t *testing.T) {
		k := all.in(t, "kueue-expired")
		k.bookingQueue(1, "open-later")
		k.machine("gpu-1")
		k.job("train", 1, "8", parameter(provisioning.ParameterBooking, "8"))
		k.acknowledge(1)
		k.untilRequest(1, autoscalingv1.Provisioned, provisioning.ReasonProvisioned)
		k.untilRequest(1, autoscalingv1.BookingExpired, provisioning.ReasonExpired)
		k.untilRequest(2, autoscalingv1.Accepted, provisioning.ReasonAccepted)
		k.untilRequests("ProvisioningRequest", 1) // that of the first attempt is gone
		k.answer("train", "open-later", kueue.CheckStateReady, nil)
		k.acknowledge(1)
		k.untilAdmitted("train")
		k.untilRequests("Pod", 1)
		k.remove("train")
		k.untilRequests("ProvisioningRequest", 0)
	})

	t.Run("after the last attempt Kueue gives up, and nothing is asked for any more", func(t *testing.T) {
		k := all.in(t, "kueue-failed")
		k.bookingQueue(1)
		k.job("never", 2, "8", parameter(provisioning.ParameterValidUntil, "1"))
		k.untilRequest(1, autoscalingv1.Failed, provisioning.ReasonTimedOut)
		k.untilRequest(2, autoscalingv1.Failed, provisioning.ReasonTimedOut)
		k.untilRejected("never", "after 1s room for 0 of 2 pods stands ready; the demand is withdrawn")
		k.untilRequests("ProvisioningRequest", 0)
	})

	t.Run("a booking whose node is lost is revoked, and Kueue deactivates the workload", func(t *testing.T) {
		k := all.in(t, "kueue-revoked")
		k.bookingQueue(1, "open-later")
		k.machine("gpu-1")
		k.job("train", 1, "8")
		k.acknowledge(1)
		k.untilRequest(1, autoscalingv1.Provisioned, provisioning.ReasonProvisioned)
		if err := k.client.Delete(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gpu-1"}}); err != nil {
			t.Fatal(err)
		}
		k.untilRequest(1, autoscalingv1.CapacityRevoked, provisioning.ReasonNodesVanished)
		k.untilRejected("train", "1 node gone (gpu-1) before the pods arrived")
		k.untilRequests("ProvisioningRequest", 0)
	})

	t.Run("a workload without quota asks for nothing until it has some again", func(t *testing.T) {
		k := all.in(t, "kueue-quota-lost")
		k.bookingQueue(1)
		k.job("train", 1, "8")
		k.untilRequests("ProvisioningRequest", 1)
		k.activate("train", false)
		k.untilRequests("ProvisioningRequest", 0)
		k.activate("train", true)
		k.acknowledge(1)
		k.machine("gpu-1")
		k.untilRequest(1, autoscalingv1.Provisioned, provisioning.ReasonProvisioned) // the same request, and no attempt lost
		k.untilAdmitted("train")
	})

	t.Run("a manager that is killed at every step books once", func(t *testing.T) {
		k := all.in(t, "kueue-booking-killed")
		k.bookingQueue(1)
		k.job("train", 2, "8")
		k.untilRequests("ProvisioningRequest", 2)
		k.fleet.kill("manager")
		k.acknowledge(2)
		k.machine("gpu-1")
		k.untilMessage("train", "room for 1 of 2 pods stands ready")
		k.fleet.kill("manager")
		k.machine("gpu-2")
		k.untilAdmitted("train")
		k.untilRequests("Pod", 2)
		k.fleet.kill("manager")
		// Its pods have no node yet: the room is theirs, as the new process knows.
		k.job("late", 1, "8")
		k.acknowledge(1)
		k.untilMessage("late", "room for 0 of 1 pods stands ready")
		k.untilRequests("Pod", 2)
		k.untilRequests("ProvisioningRequest", 1)
	})
}

// bookingQueue makes a queue whose check is Kueue's own for ProvisioningRequests of our class, with so many attempts after
// the first, and beside it checks that the test answers.
func (k *kueueCluster) bookingQueue(attempts int32, others ...string) {
	k.t.Helper()
	k.bookings = recordBookings(k)
	checks := []kueue.AdmissionCheckStrategyRule{{Name: kueue.AdmissionCheckReference(k.ns)}}
	for _, name := range others {
		k.byHand(name)
		checks = append(checks, kueue.AdmissionCheckStrategyRule{Name: kueue.AdmissionCheckReference(name)})
	}
	k.create(
		&kueue.ResourceFlavor{ObjectMeta: metav1.ObjectMeta{Name: "gpu"}, Spec: kueue.ResourceFlavorSpec{
			NodeLabels: map[string]string{corev1.LabelInstanceTypeStable: "gpu"},
		}},
		&kueue.ProvisioningRequestConfig{ObjectMeta: metav1.ObjectMeta{Name: k.ns}, Spec: kueue.ProvisioningRequestConfigSpec{
			ProvisioningClassName: provisioning.ClassName,
			RetryStrategy: &kueue.ProvisioningRequestRetryStrategy{
				BackoffLimitCount: &attempts, BackoffBaseSeconds: ptr.To[int32](1), BackoffMaxSeconds: ptr.To[int32](1),
			},
		}},
		&kueue.AdmissionCheck{ObjectMeta: metav1.ObjectMeta{Name: k.ns}, Spec: kueue.AdmissionCheckSpec{
			ControllerName: kueue.ProvisioningRequestControllerName,
			Parameters:     &kueue.AdmissionCheckParametersReference{APIGroup: kueue.GroupVersion.Group, Kind: "ProvisioningRequestConfig", Name: k.ns},
		}},
		&kueue.ClusterQueue{ObjectMeta: metav1.ObjectMeta{Name: k.ns}, Spec: kueue.ClusterQueueSpec{
			NamespaceSelector: &metav1.LabelSelector{},
			ResourceGroups: []kueue.ResourceGroup{{CoveredResources: []corev1.ResourceName{"nvidia.com/gpu"},
				Flavors: []kueue.FlavorQuotas{{Name: "gpu", Resources: []kueue.ResourceQuota{{Name: "nvidia.com/gpu", NominalQuota: resource.MustParse("64")}}}}}},
			AdmissionChecksStrategy: &kueue.AdmissionChecksStrategy{AdmissionChecks: checks},
		}},
		&kueue.LocalQueue{ObjectMeta: metav1.ObjectMeta{Namespace: k.ns, Name: "queue"},
			Spec: kueue.LocalQueueSpec{ClusterQueue: kueue.ClusterQueueReference(k.ns)}},
	)
}

// parameter passes a parameter of the ProvisioningRequest by the Job.
func parameter(name, value string) func(*batchv1.Job) {
	return func(j *batchv1.Job) { j.Annotations = map[string]string{"provreq.kueue.x-k8s.io/" + name: value} }
}

// activate throws the switch of the Job's workload.
func (k *kueueCluster) activate(job string, on bool) {
	k.t.Helper()
	wls, err := k.workloads(k.t.Context())
	if err != nil || wls[job] == nil {
		k.t.Fatalf("no workload of %s: %v", job, err)
	}
	wl := &kueue.Workload{}
	k.edit(client.ObjectKeyFromObject(wls[job]), wl, func() { wl.Spec.Active = &on })
}

// machine adds a node of the fleet.
func (k *kueueCluster) machine(name string) {
	k.t.Helper()
	k.node(name, "gpu", func(n *corev1.Node) { n.Labels[fleetv1alpha1.LabelMachine] = name })
}

// acknowledge does what the roll-up does once the autoscaler has taken it, for so many requests of bookings at least.
func (k *kueueCluster) acknowledge(n int) {
	k.t.Helper()
	eventually(k.t, fmt.Sprintf("%d requests of bookings are acknowledged", n), func(ctx context.Context) (bool, string) {
		var crs fleetv1alpha1.CapacityRequestList
		if err := k.client.List(ctx, &crs, client.InNamespace(k.ns)); err != nil {
			return false, err.Error()
		}
		have := 0
		for i := range crs.Items {
			cr := &crs.Items[i]
			if o := cr.OwnerReferences; len(o) != 1 || o[0].Kind != "ProvisioningRequest" {
				continue
			}
			have++
			before := cr.DeepCopy()
			cr.Status.Phase = fleetv1alpha1.CapacityRequestAcknowledged
			if err := k.client.Status().Patch(ctx, cr, client.MergeFrom(before)); err != nil {
				return false, err.Error()
			}
		}
		return have >= n, fmt.Sprintf("%d", have)
	})
}

// untilRequest waits until the ProvisioningRequest of that attempt has had the condition. Kueue numbers the attempts in the
// name.
func (k *kueueCluster) untilRequest(attempt int, condition, reason string) {
	k.t.Helper()
	eventually(k.t, fmt.Sprintf("attempt %d is %s (%s)", attempt, condition, reason), func(ctx context.Context) (bool, string) {
		wls, err := k.workloads(ctx)
		if err != nil {
			return false, err.Error()
		}
		said := story(wls)
		for _, pr := range k.bookings.all() {
			said += fmt.Sprintf("\n  %s: %+v", pr.Name, pr.Status.Conditions)
			c := apimeta.FindStatusCondition(pr.Status.Conditions, condition)
			if strings.HasSuffix(pr.Name, fmt.Sprintf("-%d", attempt)) && c != nil && c.Status == metav1.ConditionTrue && c.Reason == reason {
				return true, ""
			}
		}
		return false, said
	})
}

// bookings remembers all that ProvisioningRequests ever said: Kueue takes one away with which it has done, a second after that.
type bookings struct {
	mu   sync.Mutex
	seen []*autoscalingv1.ProvisioningRequest
}

func recordBookings(k *kueueCluster) *bookings {
	k.t.Helper()
	b := &bookings{}
	saw := func(o any) {
		if pr, ok := o.(*autoscalingv1.ProvisioningRequest); ok {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.seen = append(b.seen, pr)
		}
	}
	follow(k.t, cache.Options{Scheme: k.client.Scheme(), DefaultNamespaces: map[string]cache.Config{k.ns: {}}},
		toolscache.ResourceEventHandlerFuncs{AddFunc: saw, UpdateFunc: func(_, o any) { saw(o) }}, &autoscalingv1.ProvisioningRequest{})
	return b
}

func (b *bookings) all() []*autoscalingv1.ProvisioningRequest {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.seen)
}
