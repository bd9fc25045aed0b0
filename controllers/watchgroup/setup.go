package watchgroup

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/time/rate"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
)

// Options say what runs in this process.
type Options struct {
	// Coordinate runs the coordinator.
	Coordinate bool
	// Backfill labels what the webhook did not. Its writes are bounded by QPS and Burst.
	Backfill    bool
	QPS         float64
	Burst       int
	AuditPeriod time.Duration
	// Webhook serves the mutating webhook with the manager's webhook server, and keeps its rules and the policy's.
	Webhook bool
	// CAFile holds the authority of the webhook's certificate; "" if somebody else writes it into the configuration.
	CAFile string
	// Metrics; nil registers new ones with controller-runtime's registry.
	Metrics *Metrics
	// Now is the coordinator's monotonic clock; nil is the process's.
	Now func() sharding.Instant
}

// SetupWithManager adds to mgr what o says. The manager's cache has to be made with CacheOptions.
func SetupWithManager(mgr manager.Manager, o Options) error {
	if o.Metrics == nil {
		var err error
		if o.Metrics, err = NewMetrics(metrics.Registry); err != nil {
			return fmt.Errorf("registering metrics: %w", err)
		}
	}
	if o.Now == nil {
		o.Now = MonotonicClock()
	}
	config := rest.CopyConfig(mgr.GetConfig())
	objects, err := metadata.NewForConfigAndClient(config, mgr.GetHTTPClient())
	if err != nil {
		return fmt.Errorf("client for metadata: %w", err)
	}
	owners := NewOwners(objects, mgr.GetRESTMapper())
	arrears := make(chan event.GenericEvent, 1)
	var backfill *Backfill
	if o.Backfill {
		backfill = &Backfill{
			Groups: mgr.GetClient(), Metadata: objects, Mapper: mgr.GetRESTMapper(), Owners: owners, Metrics: o.Metrics,
			Limit: rate.NewLimiter(rate.Limit(o.QPS), o.Burst), AuditPeriod: o.AuditPeriod,
			Changed: func() {
				select {
				case arrears <- event.GenericEvent{Object: &lbv1alpha1.WatchGroup{}}:
				default:
				}
			},
		}
		if err := mgr.Add(backfill); err != nil {
			return fmt.Errorf("adding the backfill: %w", err)
		}
	}
	if o.Coordinate {
		r := &Reconciler{
			Client: mgr.GetClient(), Live: mgr.GetAPIReader(), Recorder: mgr.GetEventRecorder("drover-coordinator"),
			Metrics: o.Metrics, Backfill: backfill, Now: o.Now,
		}
		if err := r.setup(mgr, arrears); err != nil {
			return fmt.Errorf("setting up the coordinator: %w", err)
		}
	}
	if o.Webhook {
		// Replicas that do not lead need the groups, too, and before the first object comes.
		if _, err := mgr.GetCache().GetInformer(context.Background(), &lbv1alpha1.WatchGroup{},
			cache.BlockUntilSynced(false)); err != nil {
			return fmt.Errorf("watching WatchGroups: %w", err)
		}
		mgr.GetWebhookServer().Register(WebhookPath,
			NewWebhook(&Labeler{Groups: mgr.GetClient(), Owners: owners, Metrics: o.Metrics}))
		if err := setupGuards(mgr, &Guards{Client: mgr.GetClient(), CAFile: o.CAFile}); err != nil {
			return fmt.Errorf("setting up the webhook's rules: %w", err)
		}
	}
	return nil
}

// changed lets through what changes a spec or begins a deletion.
var changed = predicate.GenerationChangedPredicate{}

func (r *Reconciler) setup(mgr manager.Manager, arrears <-chan event.GenericEvent) error {
	return ctrl.NewControllerManagedBy(mgr).
		Named("watchgroup").
		Watches(&lbv1alpha1.WatchGroup{}, r.onGroups(), builder.WithPredicates(changed)).
		Watches(&lbv1alpha1.WatchGroup{}, &handler.EnqueueRequestForObject{}, builder.WithPredicates(changed)).
		Watches(&lbv1alpha1.VirtualNodeSlice{}, r.onSlices()).
		Watches(&coordinationv1.Lease{}, r.onLeases()).
		Watches(&corev1.Pod{}, r.onPods()).
		WatchesRawSource(source.Channel(arrears, r.onGroups())).
		WithOptions(controller.Options{
			MaxConcurrentReconciles: 4,
			RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](
				20*time.Millisecond, 5*time.Second),
		}).
		Complete(r)
}

func setupGuards(mgr manager.Manager, g *Guards) error {
	one := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request {
		return []reconcile.Request{{}}
	})
	named := func(name string) predicate.Predicate {
		return predicate.NewPredicateFuncs(func(o client.Object) bool { return o.GetName() == name })
	}
	return ctrl.NewControllerManagedBy(mgr).
		Named("watchgroup-guards").
		Watches(&lbv1alpha1.WatchGroup{}, one, builder.WithPredicates(changed)).
		Watches(&admissionregistrationv1.MutatingWebhookConfiguration{}, one,
			builder.WithPredicates(named(WebhookConfigurationName))).
		Watches(&admissionregistrationv1.ValidatingAdmissionPolicy{}, one, builder.WithPredicates(named(PolicyName))).
		Complete(g)
}
