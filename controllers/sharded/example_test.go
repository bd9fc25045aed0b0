package sharded_test

import (
	"context"
	"os"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/drover-sh/drover/controllers/sharded"
)

// webReconciler is whatever it was before: nothing in a reconciler knows of shards.
type webReconciler struct{ client.Client }

func (r *webReconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	var web appsv1.Deployment
	return reconcile.Result{}, client.IgnoreNotFound(r.Get(ctx, req.NamespacedName, &web))
}

// A controller that runs on every replica, each with its share. POD_NAME, POD_NAMESPACE and POD_UID are in the
// environment, by the downward API, and the WatchGroup "webs" names deployments and configmaps as its resources.
func Example() {
	shards := sharded.New(sharded.Options{WatchGroup: "webs"})
	mgr, err := ctrl.NewManager(ctrl.GetConfigOrDie(), ctrl.Options{
		NewCache:  shards.NewCache,
		NewClient: shards.NewClient,
	})
	if err != nil {
		os.Exit(1)
	}
	err = sharded.ControllerManagedBy(mgr).
		For(&appsv1.Deployment{}).
		Owns(&corev1.ConfigMap{}).
		Complete(&webReconciler{mgr.GetClient()})
	if err != nil {
		os.Exit(1)
	}
	if err := mgr.Start(ctrl.SetupSignalHandler()); err != nil {
		os.Exit(1)
	}
}

// Two lines more tell the Deployment whether a member is serving, and let a member work on until others have taken over
// what it has.
func ExampleGroup_LeaveOn() {
	shards := sharded.New(sharded.Options{WatchGroup: "webs"})
	mgr, err := ctrl.NewManager(ctrl.GetConfigOrDie(), ctrl.Options{
		NewCache:  shards.NewCache,
		NewClient: shards.NewClient,
	})
	if err != nil {
		os.Exit(1)
	}
	if err := mgr.AddReadyzCheck("sharded", healthz.Checker(shards.Ready)); err != nil {
		os.Exit(1)
	}
	if err := mgr.Start(shards.LeaveOn(ctrl.SetupSignalHandler())); err != nil {
		os.Exit(1)
	}
}

// What a process does once and for everybody is no reconcile, and does not wait for one.
func ExampleUnguarded() {
	var c client.Client // of a manager with a Group
	defaults := &corev1.ConfigMap{}
	defaults.Namespace, defaults.Name = "default", "defaults"
	if err := c.Create(sharded.Unguarded(context.Background()), defaults); client.IgnoreAlreadyExists(err) != nil {
		os.Exit(1)
	}
}
