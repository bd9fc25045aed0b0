package provisioning

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	autoscalingv1 "k8s.io/autoscaler/cluster-autoscaler/apis/provisioningrequest/autoscaling.x-k8s.io/v1"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/controllers/sharded"
)

// +kubebuilder:rbac:groups=autoscaling.x-k8s.io,resources=provisioningrequests,verbs=list;watch
// +kubebuilder:rbac:groups=autoscaling.x-k8s.io,resources=provisioningrequests/status,verbs=patch
// +kubebuilder:rbac:groups=fleet.lucy.sh,resources=capacityrequests,verbs=list;watch;create;patch;delete
// +kubebuilder:rbac:groups=kueue.x-k8s.io,resources=workloads,verbs=list;watch
// +kubebuilder:rbac:groups="",resources=nodes;pods,verbs=list;watch
// +kubebuilder:rbac:groups=apps,resources=daemonsets,verbs=list;watch
// +kubebuilder:rbac:groups="",resources=podtemplates,verbs=get
// +kubebuilder:rbac:groups=scheduling.k8s.io,resources=priorityclasses,verbs=get
// +kubebuilder:rbac:groups=events.k8s.io,resources=events,verbs=create;patch
// +kubebuilder:rbac:groups=fleet.lucy.sh,namespace=fleet-system,resources=upcomingnodes,verbs=list;watch

// Defaults of Options.
const (
	DefaultProvisionTimeout = 15 * time.Minute
	// DefaultBookingTTL is what the cluster autoscaler gives its own classes.
	DefaultBookingTTL = 10 * time.Minute
)

const (
	controllerName = "kueue-provisioning"

	// Fields of the cache's indexes. Their names are this package's own, as a manager has one index of a name.
	indexBooking  = "provisioning/booking"
	indexConsumes = "provisioning/consumes"
	indexNode     = "provisioning/node"
	indexWorkload = "provisioning/workload"
)

// Options configure the class.
type Options struct {
	// Namespace holds UpcomingNode objects. Default fleet-system.
	Namespace string
	// ProvisionTimeout is how long after its creation a request may wait for capacity before it fails. Default 15
	// minutes; a request's parameter ValidUntilSeconds overrides it.
	ProvisionTimeout time.Duration
	// BookingTTL is how long capacity is held for pods that do not come. Default 10 minutes; a request's parameter
	// BookingSeconds overrides it.
	BookingTTL time.Duration
	// Claims are shared with the admission check, if both are served. Default: the class's own. Where they are sharded, the
	// class is served by the member that owns HashKey.
	Claims *Claims
	// Clock is injected by tests. Default: the real one.
	Clock clock.WithTicker
}

// SetupWithManager adds the class to mgr. The manager's scheme has to know corev1, appsv1, schedulingv1, Kueue's v1beta2,
// fleet.lucy.sh/v1alpha1 and autoscaling.x-k8s.io/v1, and its cache has to keep the annotations autoscaling.x-k8s.io/
// and kueue.x-k8s.io/ of pods.
//
// Where the cluster has no ProvisioningRequest of version v1, nothing is added and that is logged: without it the
// manager's cache would never sync. The class is served after a restart.
func SetupWithManager(mgr ctrl.Manager, opts Options) error {
	kind := autoscalingv1.SchemeGroupVersion.WithKind("ProvisioningRequest")
	if !mgr.GetScheme().Recognizes(kind) {
		return fmt.Errorf("the manager's scheme does not know %s", kind)
	}
	if _, err := mgr.GetRESTMapper().RESTMapping(kind.GroupKind(), kind.Version); meta.IsNoMatchError(err) {
		mgr.GetLogger().WithName(controllerName).Info("The cluster has no ProvisioningRequest; the class is not served",
			"class", ClassName)
		return nil
	} else if err != nil {
		return fmt.Errorf("looking for %s: %w", kind, err)
	}
	opts.setDefaults()
	if err := registerMetrics(metrics.Registry); err != nil {
		return fmt.Errorf("registering metrics: %w", err)
	}
	if err := addIndexes(mgr.GetFieldIndexer()); err != nil {
		return err
	}
	agenda := newAgenda(opts.Clock)
	agenda.everywhere = opts.Claims.Sharded()
	if err := mgr.Add(agenda); err != nil {
		return fmt.Errorf("adding the agenda: %w", err)
	}
	r := &Reconciler{
		Client: mgr.GetClient(), Live: mgr.GetAPIReader(), Namespace: opts.Namespace,
		Defaults: Terms{ProvisionTimeout: opts.ProvisionTimeout, BookingTTL: opts.BookingTTL},
		Clock:    opts.Clock, Recorder: mgr.GetEventRecorder(controllerName), Claims: opts.Claims, agenda: agenda,
		bookings: map[types.NamespacedName]Booking{}, promised: map[types.NamespacedName]promise{},
	}
	opts.Claims.Register(controllerName, func(ctx context.Context) ([]Holding, error) { return r.holdings(ctx, "") })
	opts.Claims.OnTurn(r.reset,
		sharded.Scope{List: &autoscalingv1.ProvisioningRequestList{}},
		sharded.Scope{List: &fleetv1alpha1.CapacityRequestList{}, Options: []client.ListOption{client.HasLabels{LabelBooking}}})
	ours := predicate.NewPredicateFuncs(func(o client.Object) bool {
		pr, ok := o.(*autoscalingv1.ProvisioningRequest)
		return ok && pr.Spec.ProvisioningClassName == ClassName
	})
	b := sharded.ControllerManagedBy(mgr).Named(controllerName).
		For(&autoscalingv1.ProvisioningRequest{}, builder.WithPredicates(ours)).
		Watches(&fleetv1alpha1.CapacityRequest{}, handler.EnqueueRequestsFromMapFunc(bookingOfRequest)).
		Watches(&corev1.Pod{}, podEvents{agenda}).
		Watches(&corev1.Node{}, nodeEvents{agenda}).
		WatchesRawSource(source.TypedChannel(agenda.wakes, handler.TypedFuncs[types.NamespacedName, reconcile.Request]{
			GenericFunc: func(_ context.Context, e event.TypedGenericEvent[types.NamespacedName], q queue) {
				q.Add(reconcile.Request{NamespacedName: e.Object})
			},
		})).
		WithOptions(controller.Options{MaxConcurrentReconciles: 1})
	if opts.Claims.Sharded() {
		b = b.ByKey(opts.Claims.Keys(r.all))
	}
	// Requests may be made without Kueue.
	workload := kueue.SchemeGroupVersion.WithKind("Workload")
	switch _, err := mgr.GetRESTMapper().RESTMapping(workload.GroupKind(), workload.Version); {
	case err == nil:
		r.workloads = true
		b = b.Watches(&kueue.Workload{}, handler.EnqueueRequestsFromMapFunc(r.requestsOf), builder.WithPredicates(quotaMoved()))
	case !meta.IsNoMatchError(err):
		return fmt.Errorf("looking for %s: %w", workload, err)
	}
	if err := b.Complete(r); err != nil {
		return fmt.Errorf("building controller %s: %w", controllerName, err)
	}
	return nil
}

// reset forgets what the cache may not show yet: by then it does, and another member may have written since.
func (r *Reconciler) reset() {
	r.agenda.clear()
	clear(r.bookings)
	clear(r.promised)
}

// all lists the requests of the class.
func (r *Reconciler) all(ctx context.Context) ([]reconcile.Request, error) {
	var list autoscalingv1.ProvisioningRequestList
	if err := r.Client.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("listing ProvisioningRequests: %w", err)
	}
	var out []reconcile.Request
	for i := range list.Items {
		if list.Items[i].Spec.ProvisioningClassName == ClassName {
			out = append(out, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&list.Items[i])})
		}
	}
	return out, nil
}

func (o *Options) setDefaults() {
	if o.Namespace == "" {
		o.Namespace = fleetv1alpha1.SystemNamespace
	}
	if o.ProvisionTimeout <= 0 {
		o.ProvisionTimeout = DefaultProvisionTimeout
	}
	if o.BookingTTL <= 0 {
		o.BookingTTL = DefaultBookingTTL
	}
	if o.Claims == nil {
		o.Claims = NewClaims()
	}
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
}

func addIndexes(indexer client.FieldIndexer) error {
	for _, index := range []struct {
		object client.Object
		field  string
		value  func(client.Object) string
	}{
		{&fleetv1alpha1.CapacityRequest{}, indexBooking, func(o client.Object) string { return o.GetLabels()[LabelBooking] }},
		{&autoscalingv1.ProvisioningRequest{}, indexWorkload, func(o client.Object) string { return string(workloadOf(o)) }},
		{&corev1.Pod{}, indexConsumes, consumes},
		{&corev1.Pod{}, indexNode, func(o client.Object) string { return o.(*corev1.Pod).Spec.NodeName }},
	} {
		if err := indexer.IndexField(context.Background(), index.object, index.field, func(o client.Object) []string {
			if v := index.value(o); v != "" {
				return []string{v}
			}
			return nil
		}); err != nil {
			return fmt.Errorf("indexing %T by %s: %w", index.object, index.field, err)
		}
	}
	return nil
}

// consumes is the name of the ProvisioningRequest that the pod consumes; empty for none of ours.
func consumes(o client.Object) string {
	a := o.GetAnnotations()
	if class, set := a[autoscalingv1.ProvisioningClassPodAnnotationKey]; set && class != ClassName {
		return ""
	}
	return a[autoscalingv1.ProvisioningRequestPodAnnotationKey]
}

func bookingOfRequest(_ context.Context, o client.Object) []reconcile.Request {
	name := o.GetAnnotations()[AnnotationBooking]
	if name == "" || o.GetLabels()[LabelBooking] == "" {
		return nil
	}
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Namespace: o.GetNamespace(), Name: name}}}
}

// requestsOf finds the requests of a workload.
func (r *Reconciler) requestsOf(ctx context.Context, o client.Object) []reconcile.Request {
	var list autoscalingv1.ProvisioningRequestList
	if err := r.Client.List(ctx, &list, client.InNamespace(o.GetNamespace()), client.UnsafeDisableDeepCopy,
		client.MatchingFields{indexWorkload: string(o.GetUID())}); err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "Listing the ProvisioningRequests of a workload", "workload", client.ObjectKeyFromObject(o))
		return nil
	}
	var out []reconcile.Request
	for i := range list.Items {
		out = append(out, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&list.Items[i])})
	}
	return out
}

// quotaMoved passes a workload that gets quota or loses it.
func quotaMoved() predicate.Predicate {
	return predicate.Funcs{
		CreateFunc: func(event.CreateEvent) bool { return true },
		UpdateFunc: func(e event.UpdateEvent) bool {
			before, ok1 := e.ObjectOld.(*kueue.Workload)
			after, ok2 := e.ObjectNew.(*kueue.Workload)
			return ok1 && ok2 && hasQuota(before) != hasQuota(after)
		},
		DeleteFunc:  func(event.DeleteEvent) bool { return false },
		GenericFunc: func(event.GenericEvent) bool { return false },
	}
}

type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]

func addAll(q queue, keys []types.NamespacedName) {
	for _, key := range keys {
		q.Add(reconcile.Request{NamespacedName: key})
	}
}

// podEvents wakes the booking that a pod consumes, and all of them when a pod leaves room behind.
type podEvents struct{ agenda *agenda }

func (h podEvents) one(o client.Object, q queue) {
	if name := consumes(o); name != "" {
		addAll(q, []types.NamespacedName{{Namespace: o.GetNamespace(), Name: name}})
	}
}

func (h podEvents) Create(_ context.Context, e event.CreateEvent, q queue) { h.one(e.Object, q) }

func (h podEvents) Update(_ context.Context, e event.UpdateEvent, q queue) {
	before, after := e.ObjectOld.(*corev1.Pod), e.ObjectNew.(*corev1.Pod)
	h.one(after, q)
	if after.Spec.NodeName != "" && capacity.IsTerminal(after) && !capacity.IsTerminal(before) {
		addAll(q, h.agenda.active())
	}
}

func (h podEvents) Delete(_ context.Context, e event.DeleteEvent, q queue) {
	h.one(e.Object, q)
	if pod := e.Object.(*corev1.Pod); pod.Spec.NodeName != "" && !capacity.IsTerminal(pod) {
		addAll(q, h.agenda.active())
	}
}

func (h podEvents) Generic(context.Context, event.GenericEvent, queue) {}

// nodeEvents wakes all bookings when a node of the fleet comes, goes, or changes in what decides where pods fit.
type nodeEvents struct{ agenda *agenda }

func managed(o client.Object) bool { return o.GetLabels()[fleetv1alpha1.LabelMachine] != "" }

func (h nodeEvents) Create(_ context.Context, e event.CreateEvent, q queue) {
	if managed(e.Object) {
		addAll(q, h.agenda.active())
	}
}

func (h nodeEvents) Update(_ context.Context, e event.UpdateEvent, q queue) {
	before, after := e.ObjectOld.(*corev1.Node), e.ObjectNew.(*corev1.Node)
	if !managed(before) && !managed(after) {
		return
	}
	// Heartbeats change neither.
	if IsReady(before) != IsReady(after) || !equality.Semantic.DeepEqual(before.Labels, after.Labels) ||
		!equality.Semantic.DeepEqual(before.Spec.Taints, after.Spec.Taints) ||
		!equality.Semantic.DeepEqual(before.Status.Allocatable, after.Status.Allocatable) {
		addAll(q, h.agenda.active())
	}
}

func (h nodeEvents) Delete(_ context.Context, e event.DeleteEvent, q queue) {
	if managed(e.Object) {
		addAll(q, h.agenda.active())
	}
}

func (h nodeEvents) Generic(context.Context, event.GenericEvent, queue) {}
