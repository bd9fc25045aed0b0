package admission

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"
)

// Marks of a workload that gave its quota back: when it is queued again, and how often that was.
const (
	annotationQueuedAgain = "fleet.lucy.sh/queued-again-at"
	annotationRetries     = "fleet.lucy.sh/retries"
)

// sendBack takes the workload out of the queue until its back-off is over, by its switch spec.active. The check's state
// Retry would be the plain way, but Kueue v0.17 ends the reservation only after the delay of a Retry, not before it, and
// queues the workload at once: the quota would be held all the time by what cannot run. (Its workload controller returns to
// wait for requeueState.requeueAt before it comes to the eviction.) What is switched off gives its quota back at once. The
// annotation makes the return independent of this process; whoever removes it keeps the workload switched off.
func (p *Pass) sendBack(ctx context.Context, wl *kueue.Workload, d Decision, retries int32, now time.Time) (*kueue.Workload, error) {
	after := wl.DeepCopy()
	after.Spec.Active = ptr.To(false)
	if after.Annotations == nil {
		after.Annotations = map[string]string{}
	}
	after.Annotations[annotationQueuedAgain] = now.Add(d.RequeueAfter).UTC().Format(time.RFC3339)
	after.Annotations[annotationRetries] = strconv.Itoa(int(retries))
	patch := client.MergeFromWithOptions(wl, client.MergeFromWithOptimisticLock{})
	return after, p.client.Patch(ctx, after, patch, client.FieldOwner(ControllerName))
}

// forgive forgets the retries of a workload that has been admitted: its next wait is another one.
func (p *Pass) forgive(ctx context.Context, it *item) error {
	if it.object.Annotations[annotationRetries] == "" ||
		!apimeta.IsStatusConditionTrue(it.object.Status.Conditions, kueue.WorkloadAdmitted) {
		return nil
	}
	after := it.object.DeepCopy()
	delete(after.Annotations, annotationRetries)
	patch := client.MergeFromWithOptions(it.object, client.MergeFromWithOptimisticLock{})
	err := p.client.Patch(ctx, after, patch, client.FieldOwner(ControllerName))
	if err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
		return fmt.Errorf("forgetting the retries of workload %s: %w", it.w.Name, err)
	}
	return nil
}

// comeBack queues again whose back-off is over and whose quota has been released, also when their check is gone by now. It
// returns when the next one is due.
func (p *Pass) comeBack(ctx context.Context, now time.Time) (next time.Time, err error) {
	var workloads kueue.WorkloadList
	if err := p.client.List(ctx, &workloads, client.MatchingFields{indexSentBack: "true"}); err != nil {
		return next, fmt.Errorf("listing workloads that were sent back: %w", err)
	}
	var errs []error
	for i := range workloads.Items {
		wl := &workloads.Items[i]
		if wl.Annotations[annotationQueuedAgain] == "" {
			continue // the cache was indexed before it changed
		}
		if !sentBack(wl) {
			// Somebody else switched it on. The mark must not outlive that: whoever switches it off next wants it off.
			errs = append(errs, p.unmark(ctx, wl))
			continue
		}
		due, err := time.Parse(time.RFC3339, wl.Annotations[annotationQueuedAgain])
		switch {
		case err != nil:
			continue // not our writing
		case due.After(now):
			next = sooner(next, due)
			continue
		case wl.DeletionTimestamp != nil, apimeta.IsStatusConditionTrue(wl.Status.Conditions, kueue.WorkloadQuotaReserved):
			continue // its release brings the next pass
		}
		after := wl.DeepCopy()
		after.Spec.Active = ptr.To(true)
		delete(after.Annotations, annotationQueuedAgain)
		patch := client.MergeFromWithOptions(wl, client.MergeFromWithOptimisticLock{})
		if err := p.client.Patch(ctx, after, patch, client.FieldOwner(ControllerName)); err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
			errs = append(errs, fmt.Errorf("queueing workload %s/%s again: %w", wl.Namespace, wl.Name, err))
		}
	}
	return next, errors.Join(errs...)
}

// unmark takes the time of return off a workload that is back already.
func (p *Pass) unmark(ctx context.Context, wl *kueue.Workload) error {
	after := wl.DeepCopy()
	delete(after.Annotations, annotationQueuedAgain)
	patch := client.MergeFromWithOptions(wl, client.MergeFromWithOptimisticLock{})
	err := p.client.Patch(ctx, after, patch, client.FieldOwner(ControllerName))
	if err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
		return fmt.Errorf("taking the mark off workload %s/%s: %w", wl.Namespace, wl.Name, err)
	}
	return nil
}

// retriesOf is how often the workload was sent back.
func retriesOf(wl *kueue.Workload) int32 {
	n, err := strconv.ParseInt(wl.Annotations[annotationRetries], 10, 32)
	if err != nil || n < 0 {
		return 0
	}
	return int32(n)
}

// sentBack says whether the workload is to be switched on again by us.
func sentBack(wl *kueue.Workload) bool {
	return wl.Annotations[annotationQueuedAgain] != "" && !ptr.Deref(wl.Spec.Active, true)
}
