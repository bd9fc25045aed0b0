package sharded

import (
	"context"
	"errors"

	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

var _ reconcile.Reconciler = (*guardedReconciler)(nil)

// A guardedReconciler calls the reconciler for what this member owns and may work on, and drops every other request
// (Algorithm 2). Nothing is lost by that: whoever comes to own an object enqueues it then.
type guardedReconciler struct {
	inner reconcile.Reconciler
	kind  *kind
}

// Reconcile implements reconcile.Reconciler.
func (g *guardedReconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	key := req.NamespacedName
	if !g.kind.namespaced {
		key.Namespace = ""
	}
	j, err := g.kind.member.begin(g.kind, key)
	if err != nil {
		return turnedAway(ctx, g.kind.member, err)
	}
	return j.work(ctx, func(ctx context.Context) (reconcile.Result, error) { return g.inner.Reconcile(ctx, req) })
}

// work runs a reconcile in a context that carries the job and ends with the session, and ends the job.
func (j *job) work(ctx context.Context, reconciles func(context.Context) (reconcile.Result, error)) (reconcile.Result, error) {
	ctx, cancel := context.WithCancelCause(context.WithValue(ctx, jobKey{}, j))
	defer cancel(nil)
	stop := context.AfterFunc(j.life, func() { cancel(context.Cause(j.life)) })
	defer stop()
	forget := false
	defer func() { j.end(forget) }() // also if the reconciler panics
	result, err := reconciles(ctx)
	forget = err == nil && result.IsZero()
	if err != nil && j.member.wasReplaced(j) {
		ctrllog.FromContext(ctx).V(1).Info("request dropped", "reason", err.Error())
		return reconcile.Result{}, nil
	}
	if err != nil && j.life.Err() != nil {
		// The session has ended under it. The object is somebody's, and will be enqueued there.
		ctrllog.FromContext(ctx).V(1).Info("reconcile ended with the session", "error", err.Error())
		return reconcile.Result{}, nil
	}
	return result, err
}

// turnedAway is what becomes of a request that is not to be worked on here and now.
func turnedAway(ctx context.Context, e *member, err error) (reconcile.Result, error) {
	switch {
	case errors.Is(err, errNotStarted):
		return reconcile.Result{}, err
	case errors.Is(err, ErrFenced):
		// The answer to a renewal may be under way. If it never comes, the session ends and the request is dropped.
		return reconcile.Result{RequeueAfter: e.policy.RetryPeriod}, nil
	default:
		ctrllog.FromContext(ctx).V(1).Info("request dropped", "reason", err.Error())
		return reconcile.Result{}, nil
	}
}
