package watchgroup

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/wire"
)

// A refusal is why a group is not followed: a reason of ConditionAccepted, and what it says.
type refusal struct {
	reason, message string
}

// A scheme is how objects of a resource are labelled: the same for every group that shares it.
type scheme struct {
	buckets sharding.Buckets
	// all is whether every object takes part, and not only those that opt in.
	all bool
	// group is the first one that has the resource.
	group string
	// siblings are all resources of the groups that have this one, itself included.
	siblings map[schema.GroupResource]bool
}

// rank orders groups before their age does: those that have been accepted as they are come first, then those that have been
// accepted before they were edited. An edit takes no resource from a group that works, be it younger: its objects would get
// other numbers under the hands of its members. One that is refused for its edit stays so when the other is edited.
func rank(g *lbv1alpha1.WatchGroup) int {
	switch c := meta.FindStatusCondition(g.Status.Conditions, lbv1alpha1.ConditionAccepted); {
	case c == nil || c.Status != metav1.ConditionTrue:
		return 2
	case c.ObservedGeneration != g.Generation:
		return 1
	default:
		return 0
	}
}

// schemes says how the objects of each resource are labelled, by the groups with labels, and which groups are refused.
// Groups that work come first, and older ones, so that one that is added or edited by mistake takes nothing from one that
// works.
func schemes(groups []lbv1alpha1.WatchGroup) (map[schema.GroupResource]scheme, map[string]*refusal) {
	sorted := slices.Clone(groups)
	slices.SortFunc(sorted, func(a, b lbv1alpha1.WatchGroup) int {
		return cmp.Or(cmp.Compare(rank(&a), rank(&b)), a.CreationTimestamp.Compare(b.CreationTimestamp.Time),
			cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	byResource := make(map[schema.GroupResource]scheme)
	refused := make(map[string]*refusal)
	for i := range sorted {
		g := &sorted[i]
		if r := refuse(g, byResource); r != nil {
			refused[name(g)] = r
			continue
		}
		if byRange(g) {
			continue // its objects are not labelled
		}
		spec := g.Spec.WithDefaults()
		if spec.OptIn == lbv1alpha1.OptInNone {
			continue // its objects carry no label
		}
		for _, res := range spec.Resources {
			gr := schema.GroupResource{Group: res.Group, Resource: res.Resource}
			s, ok := byResource[gr]
			if !ok {
				s = scheme{buckets: wire.Buckets(spec), group: name(g), siblings: make(map[schema.GroupResource]bool)}
			}
			s.all = s.all || spec.OptIn == lbv1alpha1.OptInAll
			for _, sibling := range spec.Resources {
				s.siblings[schema.GroupResource{Group: sibling.Group, Resource: sibling.Resource}] = true
			}
			byResource[gr] = s
		}
	}
	return byResource, refused
}

// refuse says why a group cannot be followed beside the older ones, nil if it can.
func refuse(g *lbv1alpha1.WatchGroup, older map[schema.GroupResource]scheme) *refusal {
	spec := g.Spec.WithDefaults()
	if _, err := wire.Coordinator("check", spec); err != nil {
		return &refusal{lbv1alpha1.ReasonInvalid, err.Error()}
	}
	if spec.OptIn == lbv1alpha1.OptInNone || byRange(g) {
		return nil // no number stands on its objects that others could contradict
	}
	for i, res := range spec.Resources {
		s, ok := older[schema.GroupResource{Group: res.Group, Resource: res.Resource}]
		if ok && s.buckets.V != int(spec.VirtualNodes) {
			return &refusal{lbv1alpha1.ReasonConflict, fmt.Sprintf(
				"spec.resources[%d]: WatchGroup %s has %s, too, with virtualNodes %d instead of %d: an object carries one number",
				i, s.group, schema.GroupResource{Group: res.Group, Resource: res.Resource}, s.buckets.V, spec.VirtualNodes)}
		}
	}
	return nil
}

func name(g *lbv1alpha1.WatchGroup) string { return g.Namespace + "/" + g.Name }

// refusal says why the group cannot be followed, nil if it can.
func (r *Reconciler) refusal(ctx context.Context, group *lbv1alpha1.WatchGroup) (*refusal, error) {
	var list lbv1alpha1.WatchGroupList
	if err := r.Client.List(ctx, &list); err != nil {
		return nil, fmt.Errorf("listing WatchGroups: %w", err)
	}
	_, refused := schemes(list.Items)
	if why := refused[name(group)]; why != nil {
		return why, nil
	}
	return scopeRefusal(ctx, r.Client.RESTMapper(), group.Spec), nil
}
