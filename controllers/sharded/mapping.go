package sharded

import (
	"errors"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/drover-sh/drover/sharding"
)

// A mapping says in which Virtual Node an object is, and how lists and watches select Virtual Nodes. Whatever they bring, a
// stream keeps only what of puts into its Virtual Nodes: a selector saves traffic, and decides nothing.
type mapping interface {
	// of returns the Virtual Node of an object.
	of(obj client.Object) (sharding.VirtualNode, error)
	// at returns the Virtual Node of whatever has a key, false where the key does not tell.
	at(key client.ObjectKey) (sharding.VirtualNode, bool)
	// needs names what of reads.
	needs() string
	// query selects vns.
	query(vns sharding.Set) (query, error)
}

// A query is the selector of a list or watch.
type query struct {
	labels labels.Selector // nil for all
	shard  string          // "" for all
	limit  int64           // 0 for pageSize
	// selected are the Virtual Nodes that a server sends which follows shard; nil if labels select.
	selected sharding.Set
}

// options returns raw with the query's selectors.
func (q query) options(raw metav1.ListOptions) *client.ListOptions {
	raw.ShardSelector = q.shard
	if q.limit > 0 {
		raw.Limit = q.limit
	}
	return &client.ListOptions{LabelSelector: q.labels, Limit: raw.Limit, Continue: raw.Continue, Raw: &raw}
}

// byLabel is the mapping of a group with labels.
type byLabel struct {
	buckets sharding.Buckets
}

func (m byLabel) of(obj client.Object) (sharding.VirtualNode, error) {
	return virtualNodeOf(obj, m.buckets.V)
}

func (byLabel) needs() string { return "label " + sharding.LabelVirtualNode }

func (byLabel) at(client.ObjectKey) (sharding.VirtualNode, bool) { return 0, false }

func (m byLabel) query(vns sharding.Set) (query, error) {
	s, _ := m.buckets.Selector(vns)
	r, err := labels.NewRequirement(s.Label, selection.In, s.Values)
	if err != nil {
		return query{}, fmt.Errorf("selector for Virtual Nodes %s: %w", vns, err)
	}
	return query{labels: labels.NewSelector().Add(*r)}, nil
}

// byHash is the mapping of a group with selector ShardRange.
type byHash struct {
	ranges sharding.HashRanges
}

func (m byHash) of(obj client.Object) (sharding.VirtualNode, error) {
	value := obj.GetNamespace()
	if m.ranges.Key == sharding.ShardByUID {
		value = string(obj.GetUID())
	}
	if value == "" {
		return 0, fmt.Errorf("object %s has no %s", client.ObjectKeyFromObject(obj), m.ranges.Key)
	}
	return m.ranges.Of(value), nil
}

func (m byHash) needs() string { return string(m.ranges.Key) }

func (m byHash) at(key client.ObjectKey) (sharding.VirtualNode, bool) {
	if m.ranges.Key != sharding.ShardByNamespace || key.Namespace == "" {
		return 0, false
	}
	return m.ranges.Of(key.Namespace), true
}

func (m byHash) query(vns sharding.Set) (query, error) {
	if vns.Empty() {
		return query{}, errors.New("shard selector for no Virtual Nodes")
	}
	shard, selected := m.ranges.Selector(vns)
	return query{shard: shard, selected: selected}, nil
}

// keyedByUID reports whether another object under the same name is in another Virtual Node.
func keyedByUID(m mapping) bool {
	hash, ok := m.(byHash)
	return ok && hash.ranges.Key == sharding.ShardByUID
}
