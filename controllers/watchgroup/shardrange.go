package watchgroup

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/log"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/wire"
)

// A group with selector ShardRange has no labels: webhook, backfill, audit and policy have nothing to do with it.

func byRange(group *lbv1alpha1.WatchGroup) bool {
	return group.Spec.Selector == lbv1alpha1.SelectorShardRange
}

// scopeRefusal refuses resources without namespaces where Virtual Nodes go by namespace: all their objects would be in one.
// What is not served yet is not refused; a member looks again when it starts.
func scopeRefusal(ctx context.Context, mapper meta.RESTMapper, spec lbv1alpha1.WatchGroupSpec) *refusal {
	if spec.ShardKey != lbv1alpha1.ShardKeyNamespace {
		return nil
	}
	for i, res := range spec.Resources {
		gr := schema.GroupResource{Group: res.Group, Resource: res.Resource}
		mapping, err := mappingOf(mapper, gr)
		if err != nil {
			log.FromContext(ctx).V(1).Info("Scope of a resource is not known", "resource", gr.String(), "error", err.Error())
			continue
		}
		if mapping.Scope.Name() == meta.RESTScopeNameRoot {
			return &refusal{lbv1alpha1.ReasonInvalid, fmt.Sprintf("spec.resources[%d]: %q is cluster-scoped: its objects have no "+
				"namespace, as spec.shardKey %q needs", i, gr, spec.ShardKey)}
		}
	}
	return nil
}

func mappingOf(mapper meta.RESTMapper, gr schema.GroupResource) (*meta.RESTMapping, error) {
	kind, err := mapper.KindFor(gr.WithVersion(""))
	if err != nil {
		return nil, fmt.Errorf("resource %s: %w", gr, err)
	}
	mapping, err := mapper.RESTMapping(kind.GroupKind(), kind.Version)
	if err != nil {
		return nil, fmt.Errorf("resource %s: %w", gr, err)
	}
	return mapping, nil
}

// countInRanges counts the objects of a group that lie in these Virtual Nodes, among whatever the API server sends.
func (b *Backfill) countInRanges(ctx context.Context, group *lbv1alpha1.WatchGroup, ranges sharding.HashRanges,
	vns sharding.Set) (int32, error) {
	var n int32
	selector, _ := ranges.Selector(vns)
	for _, res := range group.Spec.Resources {
		mapping, err := mappingOf(b.Mapper, schema.GroupResource{Group: res.Group, Resource: res.Resource})
		if err != nil {
			return 0, err
		}
		if err := b.pages(ctx, mapping, metav1.NamespaceAll, metav1.ListOptions{ShardSelector: selector}, func(o *metav1.PartialObjectMetadata) error {
			value := o.Namespace
			if ranges.Key == sharding.ShardByUID {
				value = string(o.UID)
			}
			if vns.Has(ranges.Of(value)) {
				n++
			}
			return nil
		}); err != nil {
			return 0, err
		}
	}
	return n, nil
}

// reportRanges says that nothing waits for a label, and which members the API server sends more than they select.
func (r *Reconciler) reportRanges(group *lbv1alpha1.WatchGroup, s *lbv1alpha1.WatchGroupStatus, v *view) {
	s.UnlabelledObjects, s.OldestUnlabelled = 0, nil
	set(group, s, metav1.Condition{Type: lbv1alpha1.ConditionUnlabelled, Status: metav1.ConditionFalse,
		Reason: lbv1alpha1.ReasonNoLabels})
	before := meta.IsStatusConditionTrue(s.Conditions, lbv1alpha1.ConditionUnfiltered)
	c := unfilteredCondition(v)
	set(group, s, c)
	if !before && c.Status == metav1.ConditionTrue {
		r.Recorder.Eventf(group, nil, corev1.EventTypeWarning, c.Reason, "Watch", "%s", c.Message)
	}
}

func unfilteredCondition(v *view) metav1.Condition {
	all := make(map[sharding.Resource][]string) // the members by resource
	for _, member := range slices.Sorted(maps.Keys(v.slices)) {
		s := v.slices[member]
		if s.Session == "" || v.states[member].Session != s.Session || s.Status.Session != s.Session {
			continue
		}
		for _, r := range s.Status.Unfiltered {
			all[r] = append(all[r], member)
		}
	}
	if len(all) == 0 {
		return metav1.Condition{Type: lbv1alpha1.ConditionUnfiltered, Status: metav1.ConditionFalse,
			Reason: lbv1alpha1.ReasonFiltered}
	}
	var parts []string
	for _, r := range slices.Sorted(maps.Keys(all)) {
		parts = append(parts, fmt.Sprintf("%s to %d members, %s the first", r, len(all[r]), all[r][0]))
	}
	return metav1.Condition{Type: lbv1alpha1.ConditionUnfiltered, Status: metav1.ConditionTrue,
		Reason: lbv1alpha1.ReasonNotFiltered,
		Message: "the API server sends all objects (" + strings.Join(parts, "; ") +
			"): is its feature gate ShardedListAndWatch on?"}
}

// rangesOf returns how the hash space of a group is divided, and false for one with labels. The group has been accepted.
func rangesOf(group *lbv1alpha1.WatchGroup) (sharding.HashRanges, bool) {
	ranges, ok, err := wire.ShardRanges(group.Spec)
	return ranges, ok && err == nil
}
