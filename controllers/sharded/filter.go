package sharded

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/wire"
)

// An API server that does not know shard selectors, or whose feature gate is off, ignores them and sends everything. Streams
// drop what is not theirs, so that this costs traffic only; what follows finds it out and tells the operator.

// What was last seen of a kind: whether the API server filters what it sends.
const (
	filterUnknown int32 = iota
	filterSeen
	filterMissing
)

func mappingOf(spec lbv1alpha1.WatchGroupSpec) (mapping, error) {
	ranges, ok, err := wire.ShardRanges(spec)
	if err != nil {
		return nil, err
	}
	if ok {
		return byHash{ranges}, nil
	}
	return byLabel{wire.Buckets(spec)}, nil
}

// shardOf returns the shard selector that the server says it has followed, "" if it says nothing.
func shardOf(list client.ObjectList) string {
	switch l := list.(type) {
	case *unstructured.UnstructuredList:
		selector, _, _ := unstructured.NestedString(l.Object, "metadata", "shardInfo", "selector")
		return selector
	case metav1.ShardedListInterface:
		if info := l.GetShardInfo(); info != nil {
			return info.Selector
		}
	}
	return ""
}

// judgeList looks whether a page was filtered. It is, if it says so. If it does not, an object that was not asked for tells
// that it is not; and without one nobody knows yet, because Kubernetes 1.36 filters lists of custom resources and does
// not say so. ask is the number of the request.
func (s *stream) judgeList(ask int64, q query, p page) error {
	switch {
	case q.shard == "":
		return nil
	case p.shard == q.shard:
		s.member.sawFilter(s.kind, filterSeen, ask)
		return nil
	case p.shard != "":
		return fmt.Errorf("list of %s: the API server has selected %q and was asked for %q", s.kind.resource, p.shard, q.shard)
	}
	for _, obj := range p.objects {
		if s.judge(ask, q, obj) {
			return nil
		}
	}
	if s.kind.filter.Load() == filterUnknown {
		go s.probe()
	}
	return nil
}

// judge reports whether an object has been sent that was not asked for.
func (s *stream) judge(ask int64, q query, obj client.Object) bool {
	if q.shard == "" {
		return false
	}
	vn, err := s.member.mapping.of(obj)
	if err != nil || q.selected.Has(vn) {
		return false
	}
	s.member.sawFilter(s.kind, filterMissing, ask)
	return true
}

// probe asks for nothing: a server that filters has nothing to send. Nor has one that does not if there are no objects; that
// shows with the first one that was not asked for.
func (s *stream) probe() {
	hash, ok := s.member.mapping.(byHash)
	if !ok {
		return
	}
	ask := s.kind.asks.Add(1)
	nothing, _ := hash.ranges.Selector(nil)
	p, err := s.kind.source.list(s.ctx, query{shard: nothing, limit: 1}, "")
	switch {
	case err != nil: // the next watch that has to begin again asks again
	case p.shard == nothing || len(p.objects) == 0:
		s.member.sawFilter(s.kind, filterSeen, ask)
	default:
		s.member.sawFilter(s.kind, filterMissing, ask)
	}
}

// sawFilter notes whether the API server filters what it sends of a kind, unless a later request has told already.
func (e *member) sawFilter(k *kind, seen int32, ask int64) {
	if seen == filterMissing && k.filter.Load() == seen {
		return // as of every event that a watch brings too much
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if ask < k.told {
		return
	}
	k.told = ask
	if k.filter.Swap(seen) == seen {
		return
	}
	missing := seen == filterMissing
	e.metrics.unfiltered(string(k.resource)).Set(0)
	if missing {
		e.metrics.unfiltered(string(k.resource)).Set(1)
		e.log.Info("the API server sends what was not selected: its feature gate ShardedListAndWatch is off, or it has none",
			"resource", k.resource)
	}
	e.pump()
}

// status is what the member has to say in its slice. The lock is held.
func (e *member) status() sharding.SliceStatus {
	status := e.m.Status(e.clock())
	for _, k := range e.order {
		if k.filter.Load() == filterMissing {
			status.Unfiltered = append(status.Unfiltered, k.resource)
		}
	}
	return status
}
