// Package creation is the operator of the paper's experiments (section 7.2.1): it creates the Parents that a
// ParentCreation asks for, as fast as the API server takes them. Start reading at Reconciler.
package creation

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	v1alpha1 "github.com/drover-sh/drover/examples/parentchild/api/v1alpha1"
)

// +kubebuilder:rbac:groups=parentchild.drover.sh,resources=parentcreations,verbs=get;list;watch
// +kubebuilder:rbac:groups=parentchild.drover.sh,resources=parentcreations/status,verbs=patch
// +kubebuilder:rbac:groups=parentchild.drover.sh,resources=parents,verbs=create

const defaultParallel = 32

// A Reconciler carries out each ParentCreation once. One that was interrupted goes on where it is: what exists already
// counts as created.
type Reconciler struct {
	Client client.Client
}

var _ reconcile.Reconciler = (*Reconciler)(nil)

// SetupWithManager adds the operator to a manager.
func (r *Reconciler) SetupWithManager(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).For(&v1alpha1.ParentCreation{}).Complete(r)
}

// Reconcile implements reconcile.Reconciler.
func (r *Reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	creation := &v1alpha1.ParentCreation{}
	if err := r.Client.Get(ctx, req.NamespacedName, creation); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if creation.Status.Done || creation.DeletionTimestamp != nil {
		return reconcile.Result{}, nil
	}
	created, failed := r.createAll(ctx, creation)
	before := creation.DeepCopy()
	creation.Status = v1alpha1.ParentCreationStatus{Created: created, Done: failed == nil}
	if failed != nil {
		creation.Status.Message = failed.Error()
	}
	if err := r.Client.Status().Patch(ctx, creation, client.MergeFrom(before)); client.IgnoreNotFound(err) != nil {
		return reconcile.Result{}, fmt.Errorf("status of ParentCreation %s: %w", req.NamespacedName, err)
	}
	return reconcile.Result{}, failed
}

// createAll returns how many of the Parents exist afterwards, and the first error.
func (r *Reconciler) createAll(ctx context.Context, c *v1alpha1.ParentCreation) (int32, error) {
	var created atomic.Int32
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(int(cmp.Or(c.Spec.Parallel, defaultParallel)))
	for i := range c.Spec.Count {
		group.Go(func() error {
			parent := &v1alpha1.Parent{
				ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: nameOf(c, i)},
				Spec:       v1alpha1.ParentSpec{Value: c.Spec.Value},
			}
			if err := r.Client.Create(ctx, parent); err != nil && !apierrors.IsAlreadyExists(err) {
				return fmt.Errorf("create Parent %s: %w", parent.Name, err)
			}
			created.Add(1)
			return nil
		})
	}
	err := group.Wait()
	return created.Load(), err
}

func nameOf(c *v1alpha1.ParentCreation, i int32) string {
	pattern := cmp.Or(c.Spec.NamePattern, c.Name+"-"+v1alpha1.IndexPlaceholder)
	return strings.ReplaceAll(pattern, v1alpha1.IndexPlaceholder, strconv.Itoa(int(i)))
}
