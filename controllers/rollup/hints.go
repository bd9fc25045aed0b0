package rollup

import (
	"context"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
)

// refreshHint is how far status.observedTime may lag behind the feed: often enough to show that a hint is fresh, seldom
// enough that hints are not a load.
const refreshHint = 30 * time.Second

// hintReconciler keeps one AvailableCapacity per offering of the feed. Its key is the offering's name.
type hintReconciler struct {
	client    client.Client
	namespace string
	feed      *feed
	log       logr.Logger

	written unseen
}

// Reconcile implements reconcile.Reconciler.
func (r *hintReconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	state := r.feed.current()
	if state == nil {
		return ctrl.Result{}, nil
	}
	hint := &fleetv1alpha1.AvailableCapacity{}
	err := r.client.Get(ctx, client.ObjectKey{Namespace: r.namespace, Name: req.Name}, hint)
	exists := err == nil
	if client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, fmt.Errorf("reading AvailableCapacity %s: %w", req.Name, err)
	}
	if wait := r.written.wait(req.Name, shownIf(exists, hint)); wait > 0 {
		return ctrl.Result{RequeueAfter: wait}, nil
	}
	spec := state.offerings[req.Name]
	if exists && hint.Labels[fleetv1alpha1.LabelManagedBy] != fleetv1alpha1.ManagedByManager {
		if spec != nil {
			r.log.V(1).Info("An AvailableCapacity that this operator did not write has the offering's name", "offering", req.Name)
		}
		return ctrl.Result{}, nil
	}
	switch {
	case spec == nil && !exists:
		return ctrl.Result{}, nil
	case spec == nil:
		if hint.DeletionTimestamp != nil {
			return ctrl.Result{}, nil
		}
		if err := r.client.Delete(ctx, hint, client.Preconditions{UID: &hint.UID}); client.IgnoreNotFound(err) != nil {
			return ctrl.Result{}, fmt.Errorf("deleting AvailableCapacity %s: %w", req.Name, err)
		}
		r.written.deleted(hint)
		return ctrl.Result{}, nil
	case !exists:
		hint = &fleetv1alpha1.AvailableCapacity{Spec: *spec}
		hint.Namespace, hint.Name = r.namespace, req.Name
		hint.Labels = map[string]string{fleetv1alpha1.LabelManagedBy: fleetv1alpha1.ManagedByManager}
		if err := r.client.Create(ctx, hint); err != nil {
			if apierrors.IsAlreadyExists(err) {
				return ctrl.Result{}, nil // the informer has not shown it yet, and will
			}
			return ctrl.Result{}, fmt.Errorf("creating AvailableCapacity %s: %w", req.Name, err)
		}
		r.written.wrote(hint)
	case !apiequality.Semantic.DeepEqual(hint.Spec, *spec):
		before := hint.DeepCopy()
		hint.Spec = *spec
		if err := r.client.Patch(ctx, hint, client.MergeFrom(before)); err != nil {
			return ctrl.Result{}, client.IgnoreNotFound(fmt.Errorf("updating AvailableCapacity %s: %w", req.Name, err))
		}
		r.written.wrote(hint)
	}
	if err := r.refresh(ctx, hint, state.receivedAt); err != nil {
		return ctrl.Result{}, err
	}
	return ctrl.Result{RequeueAfter: refreshHint}, nil
}

// refresh shows when the autoscaler last confirmed the hint. While the feed is away the time stands still.
func (r *hintReconciler) refresh(ctx context.Context, hint *fleetv1alpha1.AvailableCapacity, confirmed time.Time) error {
	if shown := hint.Status.ObservedTime; shown != nil && confirmed.Sub(shown.Time) < refreshHint {
		return nil
	}
	before := hint.DeepCopy()
	hint.Status.ObservedTime = &metav1.Time{Time: confirmed.Truncate(time.Second)}
	if err := r.client.Status().Patch(ctx, hint, client.MergeFrom(before)); err != nil {
		return client.IgnoreNotFound(fmt.Errorf("writing the status of AvailableCapacity %s: %w", hint.Name, err))
	}
	r.written.wrote(hint)
	return nil
}
