package watchgroup

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/wire"
)

// A census is who has what, in numbers.
type census struct {
	members int
	epoch   sharding.Epoch
	owned   sharding.Set
	moving  sharding.Set
	unowned sharding.Set
}

// count takes the census of what was seen. What a session has that has ended is nobody's.
func count(v *view, virtualNodes int) census {
	var c census
	for _, s := range v.states {
		if s.Session != "" {
			c.members++
		}
	}
	for member, s := range v.slices {
		c.epoch = max(c.epoch, s.Epoch)
		if v.states[member].Session != s.Session || s.Session == "" {
			continue
		}
		c.owned = c.owned.Union(s.Held())
		for _, list := range [][]sharding.Order{s.Incoming, s.Draining} {
			for _, o := range list {
				c.moving = c.moving.Union(o.VNs)
			}
		}
	}
	all := sharding.Span(0, virtualNodes)
	c.owned = c.owned.Intersect(all)
	c.unowned = all.Minus(c.owned)
	return c
}

// report writes what was seen into the group's status, if it says something new, and into the metrics.
func (r *Reconciler) report(ctx context.Context, group *lbv1alpha1.WatchGroup, t *tracker, v *view) error {
	c := count(v, int(group.Spec.WithDefaults().VirtualNodes))
	unowned := r.countUnowned(ctx, group, t, v, c.unowned)
	return r.patchStatus(ctx, group, func(s *lbv1alpha1.WatchGroupStatus) {
		s.Epoch = int64(c.epoch)
		s.Members, s.Owned = int32(c.members), int32(c.owned.Len())
		s.Moving, s.Unowned = int32(c.moving.Len()), int32(c.unowned.Len())
		s.UnownedVirtualNodes = wire.Set(c.unowned)
		accepted := metav1.Condition{Type: lbv1alpha1.ConditionAccepted, Status: metav1.ConditionTrue,
			Reason: lbv1alpha1.ReasonAccepted}
		if group.DeletionTimestamp != nil {
			accepted.Reason = lbv1alpha1.ReasonDeleting
			accepted.Message = fmt.Sprintf("waiting for %d members to stop", c.members)
		}
		set(group, s, accepted)
		set(group, s, unownedCondition(c))
		set(group, s, movingCondition(c))
		s.UnownedObjects = unowned
		r.reportObjects(group, s)
		if byRange(group) {
			r.reportRanges(group, s, v)
		}
	})
}

func unownedCondition(c census) metav1.Condition {
	switch {
	case c.unowned.Empty():
		return metav1.Condition{Type: lbv1alpha1.ConditionUnowned, Status: metav1.ConditionFalse, Reason: lbv1alpha1.ReasonAllOwned}
	case c.members == 0:
		return metav1.Condition{Type: lbv1alpha1.ConditionUnowned, Status: metav1.ConditionTrue,
			Reason: lbv1alpha1.ReasonNoMembers, Message: "no member holds a Lease"}
	default:
		return metav1.Condition{Type: lbv1alpha1.ConditionUnowned, Status: metav1.ConditionTrue,
			Reason:  lbv1alpha1.ReasonHandoff,
			Message: fmt.Sprintf("%d Virtual Nodes wait for an owner", c.unowned.Len())}
	}
}

func movingCondition(c census) metav1.Condition {
	if c.moving.Empty() {
		return metav1.Condition{Type: lbv1alpha1.ConditionMoving, Status: metav1.ConditionFalse, Reason: lbv1alpha1.ReasonSettled}
	}
	return metav1.Condition{Type: lbv1alpha1.ConditionMoving, Status: metav1.ConditionTrue, Reason: lbv1alpha1.ReasonHandoff,
		Message: fmt.Sprintf("%d Virtual Nodes change hands", c.moving.Len())}
}

// reportRefusal says why the group is not followed. What its members have, they keep.
func (r *Reconciler) reportRefusal(ctx context.Context, group *lbv1alpha1.WatchGroup, why *refusal) error {
	if why == nil {
		return nil
	}
	return r.patchStatus(ctx, group, func(s *lbv1alpha1.WatchGroupStatus) {
		set(group, s, metav1.Condition{Type: lbv1alpha1.ConditionAccepted, Status: metav1.ConditionFalse,
			Reason: why.reason, Message: why.message})
	})
}

func set(group *lbv1alpha1.WatchGroup, s *lbv1alpha1.WatchGroupStatus, c metav1.Condition) {
	c.ObservedGeneration = group.Generation
	meta.SetStatusCondition(&s.Conditions, c)
}

// patchStatus writes the status if change changes it.
func (r *Reconciler) patchStatus(ctx context.Context, group *lbv1alpha1.WatchGroup,
	change func(*lbv1alpha1.WatchGroupStatus)) error {
	before := group.DeepCopy()
	group.Status.ObservedGeneration = group.Generation
	change(&group.Status)
	r.Metrics.record(group)
	if equality.Semantic.DeepEqual(before.Status, group.Status) {
		return nil
	}
	if err := r.Client.Status().Patch(ctx, group, client.MergeFrom(before)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("status of WatchGroup %s: %w", name(group), err)
	}
	return nil
}
