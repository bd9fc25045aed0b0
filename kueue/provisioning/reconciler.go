package provisioning

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	autoscalingv1 "k8s.io/autoscaler/cluster-autoscaler/apis/provisioningrequest/autoscaling.x-k8s.io/v1"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
)

// writers bounds how many CapacityRequests of one booking are written at a time.
const writers = 16

// Reconciler serves ProvisioningRequests of our class. One at a time: two decisions at once would promise the same
// room.
type Reconciler struct {
	// Client reads from the manager's cache. Live reads pod templates and priority classes, of which a booking needs a
	// few, once.
	Client client.Client
	Live   client.Reader
	// Namespace holds UpcomingNodes.
	Namespace string
	Defaults  Terms
	Clock     clock.PassiveClock
	Recorder  events.EventRecorder
	// Claims are shared with whoever else promises room on the fleet's nodes.
	Claims *Claims

	// workloads says that the cluster has Kueue's.
	workloads bool
	agenda    *agenda
	// bookings are those being written, so that templates are read once.
	bookings map[types.NamespacedName]Booking
	// promised are nodes that the cache may not show as booked yet.
	promised map[types.NamespacedName]promise
}

type promise struct {
	to    types.UID
	nodes []string
}

// Reconcile implements reconcile.Reconciler.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	r.Claims.Lock()
	defer r.Claims.Unlock()
	pr := &autoscalingv1.ProvisioningRequest{}
	if err := r.Client.Get(ctx, req.NamespacedName, pr); err != nil {
		if apierrors.IsNotFound(err) {
			r.forget(req.NamespacedName)
		}
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if pr.Spec.ProvisioningClassName != ClassName || pr.DeletionTimestamp != nil {
		r.forget(req.NamespacedName)
		return ctrl.Result{}, nil
	}
	err := r.serve(ctx, pr)
	if apierrors.IsConflict(err) {
		// The cache is behind: its next event brings the request back, and the agenda in any case.
		ctrl.LoggerFrom(ctx).V(1).Info("Somebody else wrote first", "cause", err.Error())
		return ctrl.Result{RequeueAfter: tick}, nil
	}
	return ctrl.Result{}, err
}

func (r *Reconciler) forget(key types.NamespacedName) {
	r.agenda.drop(key)
	delete(r.bookings, key)
	delete(r.promised, key)
}

func (r *Reconciler) serve(ctx context.Context, pr *autoscalingv1.ProvisioningRequest) error {
	state, err := r.stateOf(ctx, pr)
	if err != nil {
		return err
	}
	o := Observation{
		Now: r.Clock.Now(), Created: pr.CreationTimestamp.Time, Conditions: pr.Status.Conditions, Total: state.total(),
	}
	if o.Terms, err = termsOf(pr, r.Defaults); err != nil {
		o.Invalid = err.Error()
	}
	if what := tooMany(pr); what != "" {
		o.Invalid = what
	}
	if o.Quota, o.NoQuota, err = r.quota(ctx, pr); err != nil {
		return err
	}
	var booking Booking
	if !ended(pr) {
		if booking, err = r.bookingOf(ctx, pr, state); err != nil {
			var missing *missingError
			if !errors.As(err, &missing) {
				return err
			}
			o.Missing = err.Error()
		}
	}
	if len(booking.PodSets) > 0 {
		if err := r.handOver(ctx, booking, state); err != nil {
			return err
		}
		if err := r.observeRoom(ctx, pr, booking, state, &o); err != nil {
			return err
		}
	}
	o.Held, o.HandedOver, o.Acknowledged = state.counts()

	d := Decide(o)
	if d.Write {
		if err := r.write(ctx, booking, state); err != nil {
			return err
		}
	}
	if err := r.setStatus(ctx, pr, d, o); err != nil {
		return err
	}
	if d.Release {
		if err := r.release(ctx, pr, state); err != nil {
			return err
		}
	}
	if !d.Active {
		r.forget(client.ObjectKeyFromObject(pr))
		return nil
	}
	r.agenda.set(client.ObjectKeyFromObject(pr), o.Held, d.Again)
	return nil
}

// quota says since when the workload that owns the request has had its quota, and whether it has none. It says nothing of a
// request that no workload owns.
func (r *Reconciler) quota(ctx context.Context, pr *autoscalingv1.ProvisioningRequest) (since time.Time, none bool, err error) {
	owner := workloadOf(pr)
	if owner == "" || !r.workloads {
		return since, false, nil
	}
	var wl kueue.Workload
	err = r.Client.Get(ctx, types.NamespacedName{Namespace: pr.Namespace, Name: metav1.GetControllerOfNoCopy(pr).Name}, &wl)
	if apierrors.IsNotFound(err) || (err == nil && wl.UID != owner) {
		return since, false, nil // it goes, and the request with it
	}
	if err != nil {
		return since, false, fmt.Errorf("reading the workload of %s/%s: %w", pr.Namespace, pr.Name, err)
	}
	if !hasQuota(&wl) {
		return since, true, nil
	}
	return meta.FindStatusCondition(wl.Status.Conditions, kueue.WorkloadQuotaReserved).LastTransitionTime.Time, false, nil
}

// hasQuota reports whether the workload may ask for capacity.
func hasQuota(wl *kueue.Workload) bool {
	return meta.IsStatusConditionTrue(wl.Status.Conditions, kueue.WorkloadQuotaReserved) &&
		!meta.IsStatusConditionTrue(wl.Status.Conditions, kueue.WorkloadEvicted)
}

// workloadOf is the UID of the workload that controls the request; empty for none.
func workloadOf(o client.Object) types.UID {
	owner := metav1.GetControllerOfNoCopy(o)
	if owner == nil || owner.Kind != "Workload" || !strings.HasPrefix(owner.APIVersion, kueue.GroupVersion.Group+"/") {
		return ""
	}
	return owner.UID
}

// bookingOf gives what the request asks for. Once all is written, the CapacityRequests say it themselves, so that a
// template that is gone or changed does no harm.
func (r *Reconciler) bookingOf(ctx context.Context, pr *autoscalingv1.ProvisioningRequest, state *state) (Booking, error) {
	if b, known := r.bookings[client.ObjectKeyFromObject(pr)]; known && b.UID == pr.UID {
		return b, nil
	}
	if isTrue(pr.Status.Conditions, autoscalingv1.Provisioned) {
		return state.booking(pr), nil
	}
	templates := make([]PodTemplate, len(pr.Spec.PodSets))
	for i, set := range pr.Spec.PodSets {
		field := fmt.Sprintf("spec.podSets[%d].podTemplateRef.name", i)
		key := types.NamespacedName{Namespace: pr.Namespace, Name: set.PodTemplateRef.Name}
		var t corev1.PodTemplate
		if err := r.Live.Get(ctx, key, &t); apierrors.IsNotFound(err) {
			return Booking{}, &missingError{fmt.Sprintf("%s: there is no PodTemplate %s", field, key)}
		} else if err != nil {
			return Booking{}, fmt.Errorf("reading PodTemplate %s: %w", key, err)
		}
		templates[i].Template = t.Template
		if class := t.Template.Spec.PriorityClassName; t.Template.Spec.Priority == nil && class != "" {
			var pc schedulingv1.PriorityClass
			if err := r.Live.Get(ctx, types.NamespacedName{Name: class}, &pc); apierrors.IsNotFound(err) {
				return Booking{}, &missingError{fmt.Sprintf("%s: PodTemplate %s has priorityClassName %q, which does not exist",
					field, key, class)}
			} else if err != nil {
				return Booking{}, fmt.Errorf("reading PriorityClass %s: %w", class, err)
			}
			templates[i].Priority = pc.Value
		}
	}
	b := BookingOf(pr, templates)
	r.bookings[b.Key] = b
	return b, nil
}

type missingError struct{ what string }

func (e *missingError) Error() string { return e.what }

// handOver gives a request to every pod that has come for one.
func (r *Reconciler) handOver(ctx context.Context, b Booking, state *state) error {
	var done sync.Mutex
	var g errgroup.Group // one failure is no reason to break off the others
	g.SetLimit(writers)
	for _, h := range Match(b.PodSets, state.slots(false), state.pods) {
		cr := state.requests[h.Slot]
		g.Go(func() error {
			taken, err := r.give(ctx, cr, h.Pod)
			if err != nil {
				return err
			}
			done.Lock()
			defer done.Unlock()
			if taken == nil {
				delete(state.requests, h.Slot)
			} else {
				state.requests[h.Slot] = taken
			}
			return nil
		})
	}
	return g.Wait()
}

// give makes the pod own the request: the same object, and so the same row of the demand. It returns nil for a request
// that is gone.
func (r *Reconciler) give(ctx context.Context, cr *fleetv1alpha1.CapacityRequest, pod Consumer) (
	*fleetv1alpha1.CapacityRequest, error,
) {
	taken := cr.DeepCopy()
	taken.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID}}
	if taken.Labels == nil {
		taken.Labels = map[string]string{}
	}
	taken.Labels[fleetv1alpha1.LabelPodUID] = string(pod.UID)
	err := r.Client.Patch(ctx, taken, client.MergeFromWithOptions(cr, client.MergeFromWithOptimisticLock{}))
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("handing %s over to pod %s/%s: %w", cr.Name, cr.Namespace, pod.Name, err)
	}
	handovers.Inc()
	return taken, nil
}

// write creates the CapacityRequests that are missing.
func (r *Reconciler) write(ctx context.Context, b Booking, state *state) error {
	var g errgroup.Group
	g.SetLimit(writers)
	for name, podSet := range state.names {
		if state.requests[name] != nil {
			continue
		}
		g.Go(func() error {
			if err := r.Client.Create(ctx, b.Request(name, podSet)); err != nil && !apierrors.IsAlreadyExists(err) {
				return fmt.Errorf("writing CapacityRequest %s/%s: %w", b.Key.Namespace, name, err)
			}
			return nil
		})
	}
	return g.Wait()
}

// release deletes the CapacityRequests that no pod took over. One that is handed over at this moment has another
// version, and stays.
func (r *Reconciler) release(ctx context.Context, pr *autoscalingv1.ProvisioningRequest, state *state) error {
	var g errgroup.Group
	g.SetLimit(writers)
	for _, cr := range state.requests {
		if !metav1.IsControlledBy(cr, pr) {
			continue
		}
		g.Go(func() error {
			err := r.Client.Delete(ctx, cr, client.Preconditions{UID: &cr.UID, ResourceVersion: &cr.ResourceVersion})
			if client.IgnoreNotFound(err) != nil {
				return fmt.Errorf("deleting CapacityRequest %s/%s: %w", cr.Namespace, cr.Name, err)
			}
			return nil
		})
	}
	return g.Wait()
}

// setStatus writes the conditions where they differ, with the nodes that are booked.
func (r *Reconciler) setStatus(ctx context.Context, pr *autoscalingv1.ProvisioningRequest, d Decision, o Observation) error {
	now := pr.DeepCopy()
	var became []metav1.Condition
	for _, c := range d.Conditions {
		c.ObservedGeneration, c.LastTransitionTime = pr.Generation, metav1.NewTime(o.Now)
		if c.Status == metav1.ConditionTrue && !isTrue(pr.Status.Conditions, c.Type) {
			became = append(became, c)
		}
		meta.SetStatusCondition(&now.Status.Conditions, c)
	}
	if d.Book {
		now.Status.ProvisioningClassDetails = detailsOf(o.Placement)
	}
	if equality.Semantic.DeepEqual(pr.Status, now.Status) {
		return nil
	}
	patch := client.MergeFromWithOptions(pr, client.MergeFromWithOptimisticLock{})
	if err := r.Client.Status().Patch(ctx, now, patch); err != nil {
		return fmt.Errorf("writing the status of ProvisioningRequest %s/%s: %w", pr.Namespace, pr.Name, err)
	}
	if d.Book {
		r.promised[client.ObjectKeyFromObject(pr)] = promise{to: pr.UID, nodes: o.Placement.Nodes}
		waitSeconds.Observe(o.Now.Sub(o.Created).Seconds())
	}
	for _, c := range became {
		conditionsSet.WithLabelValues(c.Type, c.Reason).Inc()
		kind := corev1.EventTypeNormal
		if c.Type == autoscalingv1.Failed || c.Type == autoscalingv1.CapacityRevoked {
			kind = corev1.EventTypeWarning
		}
		r.Recorder.Eventf(pr, nil, kind, c.Reason, "Provision", "%s", c.Message)
		ctrl.LoggerFrom(ctx).Info("ProvisioningRequest", "condition", c.Type, "reason", c.Reason, "message", c.Message)
	}
	return nil
}

func ended(pr *autoscalingv1.ProvisioningRequest) bool {
	return slices.ContainsFunc([]string{autoscalingv1.Failed, autoscalingv1.BookingExpired, autoscalingv1.CapacityRevoked},
		func(kind string) bool { return isTrue(pr.Status.Conditions, kind) })
}

func consumed(pr *autoscalingv1.ProvisioningRequest) bool {
	c := find(pr.Status.Conditions, autoscalingv1.BookingExpired)
	return c != nil && c.Status == metav1.ConditionTrue && c.Reason == ReasonConsumed
}

const (
	// DetailNodes is the key of status.provisioningClassDetails that lists the nodes of the booking; where one detail
	// does not hold them all, "nodes-1", "nodes-2" and so on go on.
	DetailNodes = "nodes"
	// DetailDomain is the value of the topology key that the pods share, so that Kueue's podSetUpdates can select it.
	DetailDomain = "domain"

	// maxDetail and maxDetails are the API's limits.
	maxDetail  = 32768
	maxDetails = 60
)

func detailsOf(p Placement) map[string]autoscalingv1.Detail {
	details := map[string]autoscalingv1.Detail{}
	if p.Domain != "" {
		details[DetailDomain] = autoscalingv1.Detail(p.Domain)
	}
	var line strings.Builder
	put := func() {
		if n := len(details); line.Len() > 0 && n < maxDetails {
			key := DetailNodes
			for i := 1; details[key] != ""; i++ {
				key = fmt.Sprintf("%s-%d", DetailNodes, i)
			}
			details[key] = autoscalingv1.Detail(line.String())
		}
		line.Reset()
	}
	for _, n := range p.Nodes {
		if line.Len()+1+len(n) > maxDetail {
			put()
		}
		if line.Len() > 0 {
			line.WriteByte(',')
		}
		line.WriteString(n)
	}
	put()
	return details
}

// bookedNodes reads what detailsOf wrote.
func bookedNodes(details map[string]autoscalingv1.Detail) []string {
	var nodes []string
	for key, value := range details {
		if key == DetailNodes || strings.HasPrefix(key, DetailNodes+"-") {
			nodes = append(nodes, strings.Split(string(value), ",")...)
		}
	}
	slices.Sort(nodes)
	return nodes
}
