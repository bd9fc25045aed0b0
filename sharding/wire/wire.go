package wire

import (
	"fmt"

	"k8s.io/apimachinery/pkg/runtime/schema"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
)

// Slice reads what a VirtualNodeSlice says. A set that cannot be read is an error, which names the object, the field and
// the value: to take it for empty would let somebody else work on what it holds.
func Slice(o *lbv1alpha1.VirtualNodeSlice) (sharding.Slice, error) {
	r := reader{object: o.Namespace + "/" + o.Name}
	s := sharding.Slice{
		Member:   o.Spec.Member,
		Session:  o.Spec.Session,
		Claim:    o.Spec.Claim,
		Epoch:    sharding.Epoch(o.Spec.Epoch),
		Owned:    r.set("spec.owned", o.Spec.Owned),
		Incoming: r.orders("spec.incoming", o.Spec.Incoming),
		Draining: r.orders("spec.draining", o.Spec.Draining),
		Status: sharding.SliceStatus{
			Session: o.Status.Session,
			Epoch:   sharding.Epoch(o.Status.Epoch),
			Settled: sharding.Epoch(o.Status.Settled),
			Warm:    r.orders("status.warm", o.Status.Warm),
			Leaving: o.Status.Leaving,
		},
		Version: o.ResourceVersion,
	}
	for _, name := range o.Status.Unfiltered {
		s.Status.Unfiltered = append(s.Status.Unfiltered, sharding.Resource(name))
	}
	for i, g := range o.Spec.Grants {
		field := fmt.Sprintf("spec.grants[%d].virtualNodes", i)
		s.Grants = append(s.Grants, sharding.Grant{
			Epoch: sharding.Epoch(g.Epoch), VNs: r.set(field, g.VirtualNodes), Known: known(g.Known),
		})
	}
	for i, g := range o.Status.Released {
		field := fmt.Sprintf("status.released[%d].virtualNodes", i)
		s.Status.Released = append(s.Status.Released, sharding.Release{
			Epoch: sharding.Epoch(g.Epoch), VNs: r.set(field, g.VirtualNodes), Known: known(g.Known),
		})
	}
	return s, r.err
}

// SliceSpec writes the coordinator's part of a slice of the group.
func SliceSpec(watchGroup string, s sharding.Slice) lbv1alpha1.VirtualNodeSliceSpec {
	spec := lbv1alpha1.VirtualNodeSliceSpec{
		WatchGroup: watchGroup,
		Member:     s.Member,
		Session:    s.Session,
		Claim:      s.Claim,
		Epoch:      int64(s.Epoch),
		Owned:      Set(s.Owned),
		Incoming:   ordersOf(s.Incoming),
		Draining:   ordersOf(s.Draining),
		Counts: lbv1alpha1.SpecCounts{
			Owned: int32(s.Owned.Len()), Incoming: count(s.Incoming), Draining: count(s.Draining),
		},
	}
	for _, g := range s.Grants {
		spec.Grants = append(spec.Grants, lbv1alpha1.Grant{
			Epoch: int64(g.Epoch), VirtualNodes: Set(g.VNs), Known: knownOf(g.Known),
		})
	}
	return spec
}

// SliceStatus writes the member's part of a slice.
func SliceStatus(s sharding.SliceStatus) lbv1alpha1.VirtualNodeSliceStatus {
	status := lbv1alpha1.VirtualNodeSliceStatus{
		Session: s.Session,
		Epoch:   int64(s.Epoch),
		Settled: int64(s.Settled),
		Warm:    ordersOf(s.Warm),
		Leaving: s.Leaving,
	}
	for _, r := range s.Unfiltered {
		status.Unfiltered = append(status.Unfiltered, string(r))
	}
	for _, r := range s.Released {
		status.Released = append(status.Released, lbv1alpha1.Release{
			Epoch: int64(r.Epoch), VirtualNodes: Set(r.VNs), Known: knownOf(r.Known),
		})
	}
	return status
}

// Set writes a set.
func Set(s sharding.Set) lbv1alpha1.VirtualNodeSet { return lbv1alpha1.VirtualNodeSet(s.String()) }

// LeasePolicy reads a WatchGroup's lease parameters. Fields that are missing have their defaults.
func LeasePolicy(spec lbv1alpha1.WatchGroupSpec) sharding.LeasePolicy {
	lease := spec.WithDefaults().Lease
	return sharding.LeasePolicy{
		LeaseDuration:  lease.LeaseDuration.Duration,
		RenewDeadline:  lease.RenewDeadline.Duration,
		RetryPeriod:    lease.RetryPeriod.Duration,
		RequestTimeout: lease.RequestTimeout.Duration,
	}
}

// Buckets returns how the group's Virtual Nodes are divided for selectors. It follows from V alone, because every
// labelled object carries the number of its bucket.
func Buckets(spec lbv1alpha1.WatchGroupSpec) sharding.Buckets {
	return sharding.BucketsFor(int(spec.WithDefaults().VirtualNodes), sharding.DefaultMaxBuckets)
}

// ShardRanges returns how the hash space is divided in a group with selector ShardRange, and false in a group with labels.
// What does not go together is an error, which names field and value. That objects of a cluster-scoped resource have no
// namespace to hash is for the caller to look up.
func ShardRanges(spec lbv1alpha1.WatchGroupSpec) (sharding.HashRanges, bool, error) {
	spec = spec.WithDefaults()
	ranges := sharding.HashRanges{V: int(spec.VirtualNodes), Key: sharding.ShardKey(spec.ShardKey)}
	const with = "does not go with spec.selector ShardRange"
	switch {
	case spec.Selector == lbv1alpha1.SelectorLabels && spec.ShardKey != "":
		return ranges, false, fmt.Errorf("spec.shardKey: %q has no meaning with spec.selector Labels", spec.ShardKey)
	case spec.Selector == lbv1alpha1.SelectorLabels:
		return ranges, false, nil
	case spec.Selector != lbv1alpha1.SelectorShardRange:
		return ranges, false, fmt.Errorf("spec.selector: %q is neither %q nor %q", spec.Selector, lbv1alpha1.SelectorLabels,
			lbv1alpha1.SelectorShardRange)
	case spec.ShardKey != lbv1alpha1.ShardKeyUID && spec.ShardKey != lbv1alpha1.ShardKeyNamespace:
		return ranges, false, fmt.Errorf("spec.shardKey: %q is neither %q nor %q", spec.ShardKey, lbv1alpha1.ShardKeyUID,
			lbv1alpha1.ShardKeyNamespace)
	case spec.OptIn != lbv1alpha1.OptInAll:
		return ranges, false, fmt.Errorf("spec.optIn: %q %s, which knows no annotations", spec.OptIn, with)
	case spec.Assignment != lbv1alpha1.AssignmentBalanced:
		return ranges, false, fmt.Errorf("spec.assignment: %q %s, as it scatters Virtual Nodes over more ranges than a selector "+
			"may have", spec.Assignment, with)
	case spec.ShardKey == lbv1alpha1.ShardKeyUID && len(spec.Resources) != 1:
		return ranges, false, fmt.Errorf("spec.resources: %d resources do not go with spec.shardKey UID, as an object and what "+
			"it owns have different UIDs", len(spec.Resources))
	}
	return ranges, true, nil
}

// Resource is the name under which a slice speaks of a resource: "resource.group", or "resource" for the core group.
func Resource(gr schema.GroupResource) sharding.Resource { return sharding.Resource(gr.String()) }

// Coordinator returns the core's coordinator of a group under a claim, and checks it. Errors name field and value.
func Coordinator(claim string, spec lbv1alpha1.WatchGroupSpec) (sharding.Coordinator, error) {
	spec = spec.WithDefaults()
	c := sharding.Coordinator{
		Claim: claim, VirtualNodes: int(spec.VirtualNodes), Mode: sharding.Mode(spec.Handoff),
	}
	switch spec.Assignment {
	case lbv1alpha1.AssignmentBalanced:
		// Whole buckets move, so that selectors stay exact, as long as there are enough of them to share out evenly.
		c.Assignment = sharding.Balanced{Unit: Buckets(spec).Size}
	case lbv1alpha1.AssignmentConsistentHash:
		c.Assignment = sharding.ConsistentHash{}
	default:
		return c, fmt.Errorf("spec.assignment: %q is neither %q nor %q", spec.Assignment,
			lbv1alpha1.AssignmentBalanced, lbv1alpha1.AssignmentConsistentHash)
	}
	if spec.Hash != lbv1alpha1.HashCRC32 {
		return c, fmt.Errorf("spec.hash: %q is not %q", spec.Hash, lbv1alpha1.HashCRC32)
	}
	if err := c.Validate("spec."); err != nil {
		return c, err
	}
	if _, _, err := ShardRanges(spec); err != nil {
		return c, err
	}
	return c, LeasePolicy(spec).Validate("spec.lease.")
}

// A reader keeps the first error.
type reader struct {
	object string
	err    error
}

func (r *reader) set(field string, text lbv1alpha1.VirtualNodeSet) sharding.Set {
	set, err := sharding.ParseSet(string(text))
	if err != nil && r.err == nil {
		r.err = fmt.Errorf("VirtualNodeSlice %s: %s: %w", r.object, field, err)
	}
	return set
}

func (r *reader) orders(field string, list []lbv1alpha1.Order) []sharding.Order {
	var orders []sharding.Order
	for i, o := range list {
		orders = append(orders, sharding.Order{
			Epoch: sharding.Epoch(o.Epoch), VNs: r.set(fmt.Sprintf("%s[%d].virtualNodes", field, i), o.VirtualNodes),
		})
	}
	return orders
}

func ordersOf(list []sharding.Order) []lbv1alpha1.Order {
	var orders []lbv1alpha1.Order
	for _, o := range list {
		orders = append(orders, lbv1alpha1.Order{Epoch: int64(o.Epoch), VirtualNodes: Set(o.VNs)})
	}
	return orders
}

func count(list []sharding.Order) int32 {
	n := 0
	for _, o := range list {
		n += o.VNs.Len()
	}
	return int32(n)
}

func known(k *lbv1alpha1.KnownVersions) *sharding.Versions {
	if k == nil {
		return nil
	}
	versions := make(sharding.Versions, len(k.Versions))
	for r, v := range k.Versions {
		versions[sharding.Resource(r)] = sharding.Version(v)
	}
	return &versions
}

func knownOf(k *sharding.Versions) *lbv1alpha1.KnownVersions {
	if k == nil {
		return nil
	}
	out := &lbv1alpha1.KnownVersions{}
	for r, v := range *k {
		if out.Versions == nil {
			out.Versions = make(map[string]string, len(*k))
		}
		out.Versions[string(r)] = string(v)
	}
	return out
}
