package admission

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
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
)

// The check reads what a decision depends on, writes its own state into a workload's status and its condition into that of an
// AdmissionCheck, and keeps CapacityRequests in mode Provision.
// +kubebuilder:rbac:groups=kueue.x-k8s.io,resources=workloads;admissionchecks;resourceflavors;clusterqueues,verbs=list;watch
// +kubebuilder:rbac:groups=kueue.x-k8s.io,resources=workloads,verbs=patch
// +kubebuilder:rbac:groups=kueue.x-k8s.io,resources=workloads/status;admissionchecks/status,verbs=patch
// +kubebuilder:rbac:groups=fleet.lucy.sh,resources=capacitycheckconfigs,verbs=list;watch
// +kubebuilder:rbac:groups=fleet.lucy.sh,resources=capacityrequests,verbs=list;watch;create;patch;delete
// +kubebuilder:rbac:groups=fleet.lucy.sh,namespace=fleet-system,resources=availablecapacities,verbs=list;watch
// +kubebuilder:rbac:groups="",resources=pods;nodes,verbs=list;watch
// +kubebuilder:rbac:groups=apps,resources=daemonsets,verbs=list;watch
// +kubebuilder:rbac:groups=events.k8s.io,resources=events,verbs=create;patch

// ControllerName is the spec.controllerName of AdmissionChecks that this package serves.
const ControllerName = "fleet.lucy.sh/available-capacity"

// indexCheck finds workloads by the names of their checks.
const indexCheck = "drover.kueue/check"

// indexSentBack finds workloads that wait for their back-off to end.
const indexSentBack = "drover.kueue/sent-back"

// Options configure the check.
type Options struct {
	// Namespace holds AvailableCapacity. Default fleet-system.
	Namespace string
	// Clock is injected by tests. Default: the real one.
	Clock clock.PassiveClock
	// Random gives numbers in [0, 1) for jitter. Default: math/rand.
	Random func() float64
	// Registerer takes the metrics. Default: controller-runtime's registry.
	Registerer prometheus.Registerer
}

// SetupWithManager adds the check to mgr and returns its Pass. The manager's scheme has to know Kueue's v1beta2, the built-in
// types and fleet.lucy.sh, and Kueue's CRDs have to be there, or the manager will not start.
func SetupWithManager(ctx context.Context, mgr manager.Manager, opts Options) (*Pass, error) {
	if opts.Namespace == "" {
		opts.Namespace = fleetv1alpha1.SystemNamespace
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
	if err := mgr.GetFieldIndexer().IndexField(ctx, &kueue.Workload{}, indexCheck, func(obj client.Object) []string {
		var names []string
		for _, c := range obj.(*kueue.Workload).Status.AdmissionChecks {
			names = append(names, string(c.Name))
		}
		return names
	}); err != nil {
		return nil, fmt.Errorf("indexing workloads by check: %w", err)
	}
	if err := mgr.GetFieldIndexer().IndexField(ctx, &kueue.Workload{}, indexSentBack, func(obj client.Object) []string {
		if !sentBack(obj.(*kueue.Workload)) {
			return nil
		}
		return []string{"true"}
	}); err != nil {
		return nil, fmt.Errorf("indexing workloads that were sent back: %w", err)
	}
	p := &Pass{
		client: mgr.GetClient(), recorder: mgr.GetEventRecorder("drover-capacity-check"), opts: opts, metrics: metrics,
		ledger: NewLedger(),
	}
	all := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request {
		return []reconcile.Request{{}}
	})
	changed := builder.WithPredicates(predicate.GenerationChangedPredicate{})
	return p, ctrl.NewControllerManagedBy(mgr).
		Named("kueue-capacity-check").
		WithOptions(controller.Options{MaxConcurrentReconciles: 1}).
		Watches(&kueue.Workload{}, all).
		Watches(&kueue.AdmissionCheck{}, all).
		Watches(&kueue.ResourceFlavor{}, all, changed).
		Watches(&kueue.ClusterQueue{}, all, changed).
		Watches(&fleetv1alpha1.CapacityCheckConfig{}, all, changed).
		Watches(&fleetv1alpha1.AvailableCapacity{}, all).
		Watches(&fleetv1alpha1.CapacityRequest{}, all, builder.WithPredicates(ours())).
		Watches(&corev1.Node{}, all, builder.WithPredicates(nodeChanged())).
		Watches(&corev1.Pod{}, all, builder.WithPredicates(promisedPod())).
		Watches(&appsv1.DaemonSet{}, all, changed).
		Complete(p)
}

// ours passes CapacityRequests that the check wrote.
func ours() predicate.Predicate {
	return predicate.NewPredicateFuncs(func(obj client.Object) bool { return obj.GetLabels()[labelCheck] != "" })
}

// promisedPod passes a pod that came for what was promised, and its binding.
func promisedPod() predicate.Predicate {
	promised := func(obj client.Object) bool {
		for name := range obj.GetAnnotations() {
			if strings.HasPrefix(name, annotationPromise) {
				return true
			}
		}
		return false
	}
	return predicate.Funcs{
		CreateFunc:  func(e event.CreateEvent) bool { return promised(e.Object) },
		DeleteFunc:  func(event.DeleteEvent) bool { return false },
		GenericFunc: func(event.GenericEvent) bool { return false },
		UpdateFunc: func(e event.UpdateEvent) bool {
			before, ok1 := e.ObjectOld.(*corev1.Pod)
			after, ok2 := e.ObjectNew.(*corev1.Pod)
			return ok1 && ok2 && promised(after) && before.Spec.NodeName != after.Spec.NodeName
		},
	}
}

// nodeChanged passes what changes where pods can go; a heartbeat does not.
func nodeChanged() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		before, ok1 := e.ObjectOld.(*corev1.Node)
		after, ok2 := e.ObjectNew.(*corev1.Node)
		return !ok1 || !ok2 || ready(before) != ready(after) || before.Generation != after.Generation ||
			len(before.Labels) != len(after.Labels) || len(before.Spec.Taints) != len(after.Spec.Taints)
	}}
}

func ready(n *corev1.Node) bool {
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue && !n.Spec.Unschedulable
		}
	}
	return false
}
