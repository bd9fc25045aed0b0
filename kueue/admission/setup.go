package admission

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/controllers/sharded"
	"github.com/drover-sh/drover/kueue/provisioning"
)

// The check reads what a decision depends on, writes its own state into a workload's status and its condition into that of
// an AdmissionCheck, and keeps CapacityRequests in mode Provision.
// +kubebuilder:rbac:groups=kueue.x-k8s.io,resources=workloads;admissionchecks;resourceflavors;clusterqueues,verbs=list;watch
// +kubebuilder:rbac:groups=kueue.x-k8s.io,resources=workloads,verbs=patch
// +kubebuilder:rbac:groups=kueue.x-k8s.io,resources=workloads/status;admissionchecks/status,verbs=patch
// +kubebuilder:rbac:groups=fleet.lucy.sh,resources=capacitycheckconfigs,verbs=list;watch
// +kubebuilder:rbac:groups=fleet.lucy.sh,resources=capacityrequests,verbs=list;watch;create;patch;delete
// +kubebuilder:rbac:groups=fleet.lucy.sh,namespace=fleet-system,resources=availablecapacities;upcomingnodes,verbs=list;watch
// +kubebuilder:rbac:groups="",resources=pods;nodes,verbs=list;watch
// +kubebuilder:rbac:groups=apps,resources=daemonsets,verbs=list;watch
// +kubebuilder:rbac:groups=events.k8s.io,resources=events,verbs=create;patch

// ControllerName is the spec.controllerName of AdmissionChecks that this package serves.
const ControllerName = "fleet.lucy.sh/available-capacity"

// indexCheck finds workloads by the names of their checks.
const indexCheck = "drover.kueue/check"

// indexSentBack finds workloads that are marked as sent back.
const indexSentBack = "drover.kueue/sent-back"

// Options configure the check.
type Options struct {
	// Namespace holds AvailableCapacity. Default fleet-system.
	Namespace string
	// Claims are shared with the ProvisioningRequest class, if both are served. Default: the check's own. Where they are
	// sharded, the passes are those of the member that owns provisioning.HashKey.
	Claims *provisioning.Claims
	// Clock is injected by tests. Default: the real one.
	Clock clock.PassiveClock
	// Random gives numbers in [0, 1) for jitter. Default: math/rand.
	Random func() float64
	// Registerer takes the metrics. Default: controller-runtime's registry.
	Registerer prometheus.Registerer
}

// SetupWithManager adds the check to mgr and returns its Pass. The manager's scheme has to know Kueue's v1beta2, the
// built-in types and fleet.lucy.sh, and Kueue's CRDs have to be there, or the manager will not start.
func SetupWithManager(ctx context.Context, mgr manager.Manager, opts Options) (*Pass, error) {
	if opts.Namespace == "" {
		opts.Namespace = fleetv1alpha1.SystemNamespace
	}
	if opts.Claims == nil {
		opts.Claims = provisioning.NewClaims()
	}
	if opts.Clock == nil {
		opts.Clock = clock.RealClock{}
	}
	if opts.Random == nil {
		opts.Random = rand.Float64
	}
	if opts.Registerer == nil {
		opts.Registerer = ctrlmetrics.Registry
	}
	metrics, err := NewMetrics(opts.Registerer)
	if err != nil {
		return nil, fmt.Errorf("registering metrics: %w", err)
	}
	if err := mgr.GetFieldIndexer().IndexField(ctx, &kueue.Workload{}, indexCheck, checksOf); err != nil {
		return nil, fmt.Errorf("indexing workloads by check: %w", err)
	}
	if err := mgr.GetFieldIndexer().IndexField(ctx, &kueue.Workload{}, indexSentBack, isSentBack); err != nil {
		return nil, fmt.Errorf("indexing workloads that were sent back: %w", err)
	}
	p := newPass(mgr.GetClient(), mgr.GetEventRecorder("drover-capacity-check"), opts, metrics)
	keys := p.bind()
	all := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request {
		return []reconcile.Request{{}}
	})
	changed := builder.WithPredicates(predicate.GenerationChangedPredicate{})
	b := sharded.ControllerManagedBy(mgr)
	if opts.Claims.Sharded() {
		b = b.ByKey(keys)
	}
	return p, b.
		Named("kueue-capacity-check").
		WithOptions(controller.Options{MaxConcurrentReconciles: 1}).
		Watches(&kueue.Workload{}, all).
		Watches(&kueue.AdmissionCheck{}, all).
		Watches(&kueue.ResourceFlavor{}, all, changed).
		Watches(&kueue.ClusterQueue{}, all, changed).
		Watches(&fleetv1alpha1.CapacityCheckConfig{}, all, changed).
		Watches(&fleetv1alpha1.AvailableCapacity{}, all).
		Watches(&fleetv1alpha1.UpcomingNode{}, all, changed).
		Watches(&fleetv1alpha1.CapacityRequest{}, all, builder.WithPredicates(ours())).
		Watches(&corev1.Node{}, all, builder.WithPredicates(nodeChanged())).
		Watches(&corev1.Pod{}, all, builder.WithPredicates(podMoved())).
		Watches(&appsv1.DaemonSet{}, all, changed).
		Complete(p)
}

func newPass(c client.Client, recorder events.EventRecorder, opts Options, metrics *Metrics) *Pass {
	return &Pass{
		client: c, recorder: recorder, opts: opts, metrics: metrics, ledger: NewLedger(), written: map[types.UID]written{},
	}
}

// bind makes the pass a holder of the claims, and returns how it is one member's.
func (p *Pass) bind() sharded.Keys {
	p.opts.Claims.Register(claimant, p.held)
	p.opts.Claims.OnTurn(p.reset,
		sharded.Scope{List: &kueue.WorkloadList{}},
		sharded.Scope{List: &fleetv1alpha1.CapacityRequestList{}, Options: []client.ListOption{client.HasLabels{labelCheck}}})
	return p.opts.Claims.Keys(func(context.Context) ([]reconcile.Request, error) { return []reconcile.Request{{}}, nil })
}

func checksOf(obj client.Object) []string {
	var names []string
	for _, c := range obj.(*kueue.Workload).Status.AdmissionChecks {
		names = append(names, string(c.Name))
	}
	return names
}

func isSentBack(obj client.Object) []string {
	if obj.GetAnnotations()[annotationQueuedAgain] == "" {
		return nil
	}
	return []string{"true"}
}

// ours passes CapacityRequests that the check wrote.
func ours() predicate.Predicate {
	return predicate.NewPredicateFuncs(func(obj client.Object) bool { return obj.GetLabels()[labelCheck] != "" })
}

// podMoved passes what changes the free room of nodes: a pod that leaves its node or ends there, and of those that came for
// what was promised also their arrival and their binding.
func podMoved() predicate.Predicate {
	promised := func(obj client.Object) bool {
		for name := range obj.GetAnnotations() {
			if strings.HasPrefix(name, annotationPromise) {
				return true
			}
		}
		return false
	}
	return predicate.Funcs{
		CreateFunc: func(e event.CreateEvent) bool { return promised(e.Object) },
		DeleteFunc: func(e event.DeleteEvent) bool {
			pod, ok := e.Object.(*corev1.Pod)
			return ok && pod.Spec.NodeName != "" && !capacity.IsTerminal(pod)
		},
		GenericFunc: func(event.GenericEvent) bool { return false },
		UpdateFunc: func(e event.UpdateEvent) bool {
			before, ok1 := e.ObjectOld.(*corev1.Pod)
			after, ok2 := e.ObjectNew.(*corev1.Pod)
			if !ok1 || !ok2 {
				return false
			}
			return promised(after) && before.Spec.NodeName != after.Spec.NodeName ||
				after.Spec.NodeName != "" && capacity.IsTerminal(after) && !capacity.IsTerminal(before)
		},
	}
}

// nodeChanged passes what changes where pods can go; a heartbeat does not.
func nodeChanged() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		before, ok1 := e.ObjectOld.(*corev1.Node)
		after, ok2 := e.ObjectNew.(*corev1.Node)
		return !ok1 || !ok2 || provisioning.IsReady(before) != provisioning.IsReady(after) ||
			!equality.Semantic.DeepEqual(before.Labels, after.Labels) ||
			!equality.Semantic.DeepEqual(before.Spec.Taints, after.Spec.Taints) ||
			!equality.Semantic.DeepEqual(before.Status.Allocatable, after.Status.Allocatable)
	}}
}
