package sharded

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/drover-sh/drover/sharding"
)

const (
	// virtualNodeIndex finds objects by the number of their Virtual Node.
	virtualNodeIndex = "drover.sh/virtual-node"
	// ownerIndex finds objects by their controller owner, if that is of the group.
	ownerIndex = "drover.sh/owner"
	// tombstoneAge is how long the Virtual Node of a deleted object is remembered for a reconcile that has not yet
	// succeeded. It is longer than the longest back-off of a queue.
	tombstoneAge = time.Hour
)

// A store holds the objects of one kind that belong to this member's Virtual Nodes, owned or incoming. Its indexer has
// a lock of its own; what belongs together is kept together by the member's lock.
type store struct {
	mapping    mapping
	indexer    toolscache.Indexer
	tombstones map[string]tombstone // by key; guarded by the member's lock
	pruneAt    int
}

// A tombstone remembers where a deleted object was, so that its deletion can be reconciled.
type tombstone struct {
	vn   sharding.VirtualNode
	seen time.Time
}

func newStore(m mapping, namespaced func(schema.GroupKind) (bool, bool)) *store {
	indexers := toolscache.Indexers{
		toolscache.NamespaceIndex: toolscache.MetaNamespaceIndexFunc,
		virtualNodeIndex: func(obj any) ([]string, error) {
			vn, err := m.of(obj.(client.Object))
			if err != nil {
				return nil, nil // put stores nothing of the kind
			}
			return []string{vn.LabelValue()}, nil
		},
		ownerIndex: func(obj any) ([]string, error) {
			o := obj.(client.Object)
			owner := metav1.GetControllerOf(o)
			if owner == nil {
				return nil, nil
			}
			kind := schema.FromAPIVersionAndKind(owner.APIVersion, owner.Kind).GroupKind()
			scoped, ok := namespaced(kind)
			if !ok {
				return nil, nil
			}
			key := client.ObjectKey{Name: owner.Name}
			if scoped {
				key.Namespace = o.GetNamespace()
			}
			return []string{ownerKey(kind, key)}, nil
		},
	}
	return &store{
		mapping:    m,
		indexer:    toolscache.NewIndexer(toolscache.MetaNamespaceKeyFunc, indexers),
		tombstones: make(map[string]tombstone),
	}
}

func ownerKey(kind schema.GroupKind, key client.ObjectKey) string {
	return kind.Group + "/" + kind.Kind + "/" + key.Namespace + "/" + key.Name
}

// keyOf is the store's key for an object: "namespace/name", or "name" if it is cluster-scoped.
func keyOf(key client.ObjectKey) string {
	if key.Namespace == "" {
		return key.Name
	}
	return key.Namespace + "/" + key.Name
}

func (s *store) get(key string) (client.Object, bool) {
	obj, ok, err := s.indexer.GetByKey(key)
	if err != nil || !ok {
		return nil, false
	}
	return obj.(client.Object), true
}

func (s *store) put(obj client.Object) {
	// The error would be that obj has no metadata.
	_ = s.indexer.Update(obj)
	delete(s.tombstones, keyOf(client.ObjectKeyFromObject(obj)))
}

func (s *store) remove(obj client.Object) {
	_ = s.indexer.Delete(obj)
}

// bury removes a deleted object and remembers where it was.
func (s *store) bury(obj client.Object, vn sharding.VirtualNode, now time.Time) {
	s.remove(obj)
	if len(s.tombstones) >= s.pruneAt {
		for key, t := range s.tombstones {
			if now.Sub(t.seen) > tombstoneAge {
				delete(s.tombstones, key)
			}
		}
		s.pruneAt = 2*len(s.tombstones) + 1024
	}
	s.tombstones[keyOf(client.ObjectKeyFromObject(obj))] = tombstone{vn, now}
}

// within returns the objects of vns.
func (s *store) within(vns sharding.Set) []client.Object {
	var found []client.Object
	if vns.Empty() {
		return nil
	}
	if vns.Len() > 64 {
		for _, obj := range s.indexer.List() {
			o := obj.(client.Object)
			if vn, err := s.mapping.of(o); err == nil && vns.Has(vn) {
				found = append(found, o)
			}
		}
		return found
	}
	for vn := range vns.All() {
		objs, err := s.indexer.ByIndex(virtualNodeIndex, vn.LabelValue())
		if err != nil {
			continue
		}
		for _, obj := range objs {
			found = append(found, obj.(client.Object))
		}
	}
	return found
}

// forget drops vns. It is no news about objects: nobody is told.
func (s *store) forget(vns sharding.Set) {
	for _, obj := range s.within(vns) {
		s.remove(obj)
	}
	for key, t := range s.tombstones {
		if vns.Has(t.vn) {
			delete(s.tombstones, key)
		}
	}
}

// virtualNodeOf reads the label of an object.
func virtualNodeOf(obj client.Object, v int) (sharding.VirtualNode, error) {
	return sharding.ParseVirtualNode(obj.GetLabels()[sharding.LabelVirtualNode], v)
}

func (s *store) forgetAll() {
	// Replace cannot fail: there is nothing to find a key for.
	_ = s.indexer.Replace(nil, "")
	s.tombstones = make(map[string]tombstone)
}
