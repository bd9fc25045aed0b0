package admission

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
)

// Reasons of the condition Active.
const (
	reasonActive        = "Active"
	reasonBadParameters = "BadParametersRef"
	reasonUnreachable   = "AutoscalerUnreachable"
	reasonStale         = "Stale"
)

// active says whether a check can decide at all. A check that is not active closes its queues, so it is told from one that
// can still admit something; until is when the answer changes by itself.
func active(k *check, hints []Hint, now time.Time) (cond metav1.Condition, until time.Time) {
	cond = metav1.Condition{
		Type: kueue.AdmissionCheckActive, Status: metav1.ConditionTrue, Reason: reasonActive,
		Message: "The admission check is active", ObservedGeneration: k.object.Generation,
	}
	if k.problem != "" {
		cond.Status, cond.Reason, cond.Message = metav1.ConditionFalse, reasonBadParameters, k.problem
		return cond, time.Time{}
	}
	staleAfter := k.config.StaleAfter.Duration
	stale, last := 0, time.Time{}
	for i := range hints {
		if hints[i].Observed.After(last) {
			last = hints[i].Observed
		}
		if !hints[i].Fresh(now, staleAfter) {
			stale++
			continue
		}
		until = sooner(until, hints[i].Observed.Add(staleAfter+time.Millisecond))
	}
	switch {
	case stale == 0 && len(hints) > 0:
		return cond, until
	case stale < len(hints):
		cond.Reason = reasonStale
		cond.Message = fmt.Sprintf("%d of %d AvailableCapacity are older than %s and not believed", stale, len(hints), staleAfter)
		return cond, until
	case len(hints) == 0:
		cond.Message = "There is no AvailableCapacity: the autoscaler has not told of any"
	case last.IsZero():
		cond.Message = "The autoscaler has confirmed no AvailableCapacity yet"
	default:
		cond.Message = fmt.Sprintf("The autoscaler has confirmed no AvailableCapacity since %s", last.UTC().Format(time.RFC3339))
	}
	if k.config.OnStale == fleetv1alpha1.StaleFailOpen {
		cond.Reason, cond.Message = reasonStale, cond.Message+"; workloads are admitted unseen"
		return cond, until
	}
	cond.Status, cond.Reason = metav1.ConditionFalse, reasonUnreachable
	return cond, until
}

// keepActive writes the condition when it has changed.
func (p *Pass) keepActive(ctx context.Context, k *check, hints []Hint, now time.Time) (until time.Time, err error) {
	cond, until := active(k, hints, now)
	before := k.object.DeepCopy()
	cond.LastTransitionTime = metav1.NewTime(now)
	if !apimeta.SetStatusCondition(&k.object.Status.Conditions, cond) {
		return until, nil
	}
	patch := client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
	err = p.client.Status().Patch(ctx, k.object, patch, client.FieldOwner(ControllerName))
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return until, nil // its change brings the next pass
	}
	if err != nil {
		return until, fmt.Errorf("writing condition Active of AdmissionCheck %s: %w", k.object.Name, err)
	}
	if old := apimeta.FindStatusCondition(before.Status.Conditions, kueue.AdmissionCheckActive); old == nil || old.Status != cond.Status {
		kind := corev1.EventTypeNormal
		if cond.Status == metav1.ConditionFalse {
			kind = corev1.EventTypeWarning
		}
		p.recorder.Eventf(k.object, nil, kind, cond.Reason, "AdmissionCheckActive", "%s", cond.Message)
	}
	return until, nil
}
