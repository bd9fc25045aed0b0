package watchgroup

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/log"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/wire"
)

const (
	// labelGrace is how old an unlabelled object is before it is reported: roots whose name is made up by the API
	// server are unlabelled for a moment, every one of them.
	labelGrace = 3 * time.Second
	// unownedGrace is how long Virtual Nodes have been unowned before their objects are counted, and countPeriod how
	// often they are while that lasts.
	unownedGrace = 10 * time.Second
	countPeriod  = 30 * time.Second
	// maxAuditErrors is how many of an audit's errors are logged.
	maxAuditErrors = 10
)

// An arrear is what the backfill has not labelled of a resource. known is set once it has seen what there is.
type arrear struct {
	known   bool
	objects int
	oldest  time.Time
	err     string
}

// arrears says what is unlabelled of each resource, and for how long.
func (b *Backfill) arrears(now time.Time) map[schema.GroupResource]arrear {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := make(map[schema.GroupResource]arrear)
	for gr, err := range b.failing {
		all[gr] = arrear{err: err.Error()}
	}
	for gr, f := range b.feeds {
		a := arrear{known: f.informer.HasSynced()}
		if err := f.failing(); err != nil {
			a.err = fmt.Sprintf("resource %s: %v", gr, err)
		}
		all[gr] = a
	}
	for it, created := range b.waiting {
		if now.Sub(created) < labelGrace {
			continue
		}
		a := all[it.resource]
		a.objects++
		if a.oldest.IsZero() || created.Before(a.oldest) {
			a.oldest = created
		}
		all[it.resource] = a
	}
	return all
}

// tell reports that something has changed since it was told last.
func (b *Backfill) tell() {
	now := b.arrears(time.Now())
	if b.Changed != nil && !maps.Equal(now, b.told) {
		b.told = now
		b.Changed()
	}
}

func resourcesOf(group *lbv1alpha1.WatchGroup) map[schema.GroupResource]bool {
	all := make(map[schema.GroupResource]bool, len(group.Spec.Resources))
	for _, res := range labelledResources(group) {
		all[schema.GroupResource{Group: res.Group, Resource: res.Resource}] = true
	}
	return all
}

// reportObjects says in a group's status which of its objects no member sees.
func (r *Reconciler) reportObjects(group *lbv1alpha1.WatchGroup, s *lbv1alpha1.WatchGroupStatus) {
	if r.Backfill == nil || byRange(group) {
		return
	}
	all := r.Backfill.arrears(time.Now())
	var sum arrear
	var failure string
	for _, res := range labelledResources(group) {
		a := all[schema.GroupResource{Group: res.Group, Resource: res.Resource}]
		sum.objects += a.objects
		if sum.oldest.IsZero() || !a.oldest.IsZero() && a.oldest.Before(sum.oldest) {
			sum.oldest = a.oldest
		}
		if failure == "" {
			failure = a.err
		}
	}
	if failure == "" && !r.Backfill.synced(resourcesOf(group)) {
		return // what the status says is better than nothing: it is a coordinator's that has seen the objects
	}
	s.UnlabelledObjects, s.OldestUnlabelled = int32(sum.objects), nil
	if !sum.oldest.IsZero() {
		s.OldestUnlabelled = &metav1.Time{Time: sum.oldest}
	}
	c := metav1.Condition{Type: lbv1alpha1.ConditionUnlabelled, Status: metav1.ConditionFalse, Reason: lbv1alpha1.ReasonAllLabelled}
	switch {
	case group.Spec.OptIn == lbv1alpha1.OptInNone:
		c.Reason = lbv1alpha1.ReasonNoLabels
	case failure != "":
		c.Status, c.Reason, c.Message = metav1.ConditionUnknown, lbv1alpha1.ReasonBackfillFailed, failure
	case sum.objects > 0:
		c.Status, c.Reason = metav1.ConditionTrue, lbv1alpha1.ReasonBackfill
		c.Message = fmt.Sprintf("%d objects carry no label, the oldest since %s", sum.objects, sum.oldest.UTC().Format(time.RFC3339))
	}
	set(group, s, c)
}

// labelledResources returns the resources whose objects carry labels because of this group.
func labelledResources(group *lbv1alpha1.WatchGroup) []lbv1alpha1.Resource {
	if group.Spec.OptIn == lbv1alpha1.OptInNone {
		return nil
	}
	return group.Spec.Resources
}

// countUnowned counts the objects in Virtual Nodes that have been unowned for a while, and asks for another look while that
// lasts. It returns what the status says already where it is too early to count.
func (r *Reconciler) countUnowned(ctx context.Context, group *lbv1alpha1.WatchGroup, t *tracker, v *view, unowned sharding.Set) int32 {
	if unowned.Empty() || r.Backfill == nil {
		t.counted = 0
		return 0
	}
	c := meta.FindStatusCondition(group.Status.Conditions, lbv1alpha1.ConditionUnowned)
	if c == nil || c.Status != metav1.ConditionTrue {
		v.timer.at(v.timer.now + unownedGrace)
		return 0
	}
	if early := unownedGrace - time.Since(c.LastTransitionTime.Time); early > 0 {
		v.timer.at(v.timer.now + early)
		return group.Status.UnownedObjects
	}
	if next := t.counted + countPeriod; t.counted > 0 && v.timer.now < next {
		v.timer.at(next)
		return group.Status.UnownedObjects
	}
	n, err := r.Backfill.countIn(ctx, group, unowned)
	if err != nil {
		log.FromContext(ctx).Error(err, "Counting the objects that nobody owns")
		return group.Status.UnownedObjects
	}
	t.counted = max(v.timer.now, 1)
	v.timer.at(v.timer.now + countPeriod)
	return n
}

// countIn counts the objects of a group that lie in these Virtual Nodes.
func (b *Backfill) countIn(ctx context.Context, group *lbv1alpha1.WatchGroup, vns sharding.Set) (int32, error) {
	if ranges, ok := rangesOf(group); ok {
		return b.countInRanges(ctx, group, ranges, vns)
	}
	buckets := wire.Buckets(group.Spec)
	selector := metav1.LabelSelector{}
	if s, _ := buckets.Selector(vns); vns.Len() < buckets.V {
		selector.MatchExpressions = []metav1.LabelSelectorRequirement{{Key: s.Label, Operator: metav1.LabelSelectorOpIn, Values: s.Values}}
	} else {
		selector.MatchExpressions = []metav1.LabelSelectorRequirement{{Key: sharding.LabelVirtualNode,
			Operator: metav1.LabelSelectorOpExists}}
	}
	var n int32
	for _, res := range labelledResources(group) {
		f := b.feed(schema.GroupResource{Group: res.Group, Resource: res.Resource})
		if f == nil {
			continue
		}
		if err := b.pages(ctx, f.mapping, metav1.NamespaceAll, metav1.ListOptions{LabelSelector: metav1.FormatLabelSelector(&selector)}, func(o *metav1.PartialObjectMetadata) error {
			if vn, err := sharding.ParseVirtualNode(o.Labels[sharding.LabelVirtualNode], buckets.V); err == nil && vns.Has(vn) {
				n++
			}
			return nil
		}); err != nil {
			return 0, err
		}
	}
	return n, nil
}

// pages lists objects of a namespace, or of all, page by page. options select them.
func (b *Backfill) pages(ctx context.Context, mapping *meta.RESTMapping, namespace string, options metav1.ListOptions,
	do func(*metav1.PartialObjectMetadata) error) error {
	options.Limit = auditPage
	for {
		list, err := b.Metadata.Resource(mapping.Resource).Namespace(namespace).List(ctx, options)
		if err != nil {
			return fmt.Errorf("listing %s: %w", mapping.Resource.GroupResource(), err)
		}
		for i := range list.Items {
			if err := do(&list.Items[i]); err != nil {
				return err
			}
		}
		if options.Continue = list.Continue; options.Continue == "" {
			return nil
		}
	}
}

// An audited resource has been looked at as a whole, for a division into buckets.
type audited struct {
	buckets  sharding.Buckets
	at       time.Time
	failures int // in a row
}

// due reports whether it is time for another look. One that has failed is repeated sooner, but not at once: a single object
// that cannot be mended would have all of them listed all the time.
func (a audited) due(buckets sharding.Buckets, now time.Time, period time.Duration) bool {
	if a.failures > 0 {
		period = min(period, feedPeriod<<min(a.failures, 10))
	}
	return a.buckets != buckets || now.Sub(a.at) >= period
}

// audits looks at all labelled objects now and then: one whose labels are not those of a Virtual Node of its group is found
// by no member, and by no watch for unlabelled objects either. So are all at once where a group comes back with another
// number of Virtual Nodes: nobody waits for the next period then.
func (b *Backfill) audits(ctx context.Context) {
	done := make(map[schema.GroupResource]audited)
	ticks := time.NewTicker(feedPeriod)
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
		}
		all, err := b.schemes(ctx)
		if err != nil {
			continue
		}
		for gr, s := range all {
			f := b.feed(gr)
			last := done[gr]
			if f == nil || !f.informer.HasSynced() || !last.due(s.buckets, time.Now(), b.AuditPeriod) {
				continue
			}
			if err := b.audit(ctx, all, s, f.mapping); err != nil {
				if ctx.Err() == nil {
					log.FromContext(ctx).Error(err, "Auditing labels", "resource", gr.String())
				}
				done[gr] = audited{s.buckets, time.Now(), last.failures + 1}
				continue
			}
			done[gr] = audited{buckets: s.buckets, at: time.Now()}
		}
	}
}

// audit mends labels that are not those of a Virtual Node. What does not take part any more but is labelled stays labelled:
// a label never changes.
func (b *Backfill) audit(ctx context.Context, all map[schema.GroupResource]scheme, s scheme, mapping *meta.RESTMapping) error {
	var errs []error
	failed := 0
	labelled := metav1.ListOptions{LabelSelector: sharding.LabelVirtualNode}
	err := b.pages(ctx, mapping, metav1.NamespaceAll, labelled, func(o *metav1.PartialObjectMetadata) error {
		carried := read(o)
		if _, ok := carried.valid(s.buckets); ok {
			return nil
		}
		want, takes, err := b.want(ctx, all, s, mapping, o)
		if vn, err := sharding.ParseVirtualNode(carried.virtualNode, s.buckets.V); err == nil {
			// Only the bucket is wrong: the Virtual Node stays.
			want, takes = labelsOf(s.buckets, vn), true
		}
		if err == nil && takes {
			log.FromContext(ctx).Info("Mending labels", "resource", mapping.Resource.Resource, "namespace", o.Namespace,
				"name", o.Name, "carried", carried.virtualNode, "bucket", carried.bucket, "want", want.virtualNode)
			err = b.label(ctx, mapping, o, want)
		}
		if err != nil {
			if failed++; failed <= maxAuditErrors {
				errs = append(errs, err)
			}
		}
		return nil
	})
	if failed > maxAuditErrors {
		errs = append(errs, fmt.Errorf("and %d objects more", failed-maxAuditErrors))
	}
	return errors.Join(append(errs, err)...)
}
