// Package controller is the sample controller of the paper's evaluation (section 7.2.1), as anybody would write it with
// controller-runtime: for each Parent it makes one Child, while the Gate is open. It deletes nothing.
//
// What makes it run on many replicas at once is sharded.ControllerManagedBy in SetupWithManager, and the cache and client
// of the manager, which the command sets. Start reading at Reconciler.
package controller

import (
	"context"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/drover-sh/drover/controllers/sharded"
	v1alpha1 "github.com/drover-sh/drover/examples/parentchild/api/v1alpha1"
)

// +kubebuilder:rbac:groups=parentchild.drover.sh,resources=parents,verbs=get;list;watch
// +kubebuilder:rbac:groups=parentchild.drover.sh,resources=gates,verbs=list;watch
// +kubebuilder:rbac:groups=parentchild.drover.sh,resources=children,verbs=get;list;watch;create;patch
// +kubebuilder:rbac:groups=parentchild.drover.sh,resources=parents/finalizers,verbs=update

// A Reconciler keeps one Child for each Parent, with the Parent's value.
type Reconciler struct {
	Client client.Client
	// Work is how long each reconcile takes besides its requests.
	Work time.Duration
}

var _ reconcile.Reconciler = (*Reconciler)(nil)

// SetupWithManager adds the controller to a manager. workers is how many Parents are reconciled at a time.
func (r *Reconciler) SetupWithManager(mgr ctrl.Manager, workers int) error {
	return sharded.ControllerManagedBy(mgr).
		For(&v1alpha1.Parent{}).
		Owns(&v1alpha1.Child{}).
		Watches(&v1alpha1.Gate{}, handler.EnqueueRequestsFromMapFunc(r.allParents)).
		WithOptions(controller.Options{MaxConcurrentReconciles: workers}).
		Complete(r)
}

// Reconcile implements reconcile.Reconciler.
func (r *Reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	if err := r.work(ctx); err != nil {
		return reconcile.Result{}, err
	}
	parent := &v1alpha1.Parent{}
	if err := r.Client.Get(ctx, req.NamespacedName, parent); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if parent.DeletionTimestamp != nil {
		return reconcile.Result{}, nil // the garbage collector takes the Child
	}
	if open, err := r.open(ctx, parent.Namespace); err != nil || !open {
		return reconcile.Result{}, err
	}
	child := &v1alpha1.Child{}
	err := r.Client.Get(ctx, req.NamespacedName, child)
	switch {
	case apierrors.IsNotFound(err):
		return reconcile.Result{}, r.create(ctx, parent)
	case err != nil:
		return reconcile.Result{}, err
	case !metav1.IsControlledBy(child, parent):
		// It is that of an earlier Parent of this name, and about to go; or it is somebody else's, and stays.
		return reconcile.Result{}, fmt.Errorf("child %s is not controlled by its parent, UID %s", req.NamespacedName, parent.UID)
	case child.Spec.Value != parent.Spec.Value:
		changed := child.DeepCopy()
		changed.Spec.Value = parent.Spec.Value
		return reconcile.Result{}, r.Client.Patch(ctx, changed, client.MergeFrom(child))
	}
	return reconcile.Result{}, nil
}

// work takes its time, unless the member loses its lease meanwhile.
func (r *Reconciler) work(ctx context.Context) error {
	if r.Work <= 0 {
		return nil
	}
	timer := time.NewTimer(r.Work)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-timer.C:
		return nil
	}
}

func (r *Reconciler) create(ctx context.Context, parent *v1alpha1.Parent) error {
	child := &v1alpha1.Child{
		ObjectMeta: metav1.ObjectMeta{Namespace: parent.Namespace, Name: parent.Name},
		Spec:       v1alpha1.ChildSpec{Value: parent.Spec.Value},
	}
	if err := ctrl.SetControllerReference(parent, child, r.Client.Scheme()); err != nil {
		return err
	}
	return r.Client.Create(ctx, child)
}

// open reports whether Children may be made in a namespace.
func (r *Reconciler) open(ctx context.Context, namespace string) (bool, error) {
	gate := &v1alpha1.Gate{}
	err := r.Client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: v1alpha1.GateName}, gate)
	return err == nil && gate.Spec.Open, client.IgnoreNotFound(err)
}

// allParents returns all Parents of a Gate's namespace, of which this replica keeps its own share only.
func (r *Reconciler) allParents(ctx context.Context, gate client.Object) []reconcile.Request {
	var parents v1alpha1.ParentList
	if err := r.Client.List(ctx, &parents, client.InNamespace(gate.GetNamespace()), client.UnsafeDisableDeepCopy); err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "Parents not listed after the gate has changed")
		return nil
	}
	requests := make([]reconcile.Request, 0, len(parents.Items))
	for i := range parents.Items {
		requests = append(requests, reconcile.Request{NamespacedName: types.NamespacedName{
			Namespace: parents.Items[i].Namespace, Name: parents.Items[i].Name,
		}})
	}
	return requests
}
