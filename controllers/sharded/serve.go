package sharded

import (
	"slices"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/history"
)

func (e *member) tell(k *kind, key string, vn sharding.VirtualNode, version sharding.Version, n notice) {
	k.informer.tell(n)
	e.rec(history.Record{Kind: history.Delivered, Resource: k.resource, Object: key, VN: vn, Version: version})
}

// settle finds out what has come to be served, and tells handlers of every object there as of an initial list, which
// makes them enqueue it at low priority. What is served no more is not mentioned.
func (e *member) settle() {
	ready := e.m.Owned()
	for _, k := range e.order {
		ready = ready.Minus(e.m.Awaiting(k.resource))
	}
	gained := ready.Minus(e.ready)
	e.ready = ready
	e.gain(gained)
	e.settled = e.settled || (e.slice.Session != "" && ready.Equal(e.m.Owned()))
	now := e.clock()
	for i := range e.arrivals {
		if part := e.arrivals[i].vns.Intersect(ready); !part.Empty() {
			e.metrics.barrier.Observe((now - e.arrivals[i].at).Seconds())
			e.arrivals[i].vns = e.arrivals[i].vns.Minus(part)
		}
		e.arrivals[i].vns = e.arrivals[i].vns.Intersect(e.m.Owned())
	}
	e.arrivals = slices.DeleteFunc(e.arrivals, func(a arrival) bool { return a.vns.Empty() })
	if gained.Empty() {
		return
	}
	e.rec(history.Record{Kind: history.Settled, VNs: gained})
	for _, k := range e.order {
		for _, obj := range k.store.within(gained) {
			vn, err := e.mapping.of(obj)
			if err != nil {
				continue
			}
			e.tell(k, keyOf(client.ObjectKeyFromObject(obj)), vn, sharding.Version(obj.GetResourceVersion()),
				notice{object: obj, initial: true})
		}
	}
}

// introduce registers a listener and tells it, and no other, of everything that is served.
func (e *member) introduce(i *informer, l *listener) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := i.register(l); err != nil {
		return err
	}
	for _, obj := range i.kind.store.within(e.ready) {
		l.add(notice{object: obj, initial: true})
	}
	return nil
}

// locate returns the Virtual Node of an object: from the object, from its key where that tells, from where it was before it
// was deleted, or from what it owns, as children follow their parent. But for the key, nothing of the kind is known about
// an object of another member.
func (e *member) locate(k *kind, key client.ObjectKey) (client.Object, sharding.VirtualNode, bool) {
	name := keyOf(key)
	if obj, ok := k.store.get(name); ok {
		vn, err := e.mapping.of(obj)
		return obj, vn, err == nil
	}
	if vn, ok := e.mapping.at(key); ok {
		return nil, vn, true
	}
	if t, ok := k.store.tombstones[name]; ok {
		return nil, t.vn, true
	}
	owner := ownerKey(k.gvk.GroupKind(), key)
	for _, child := range e.order {
		objs, err := child.store.indexer.ByIndex(ownerIndex, owner)
		if err != nil {
			continue
		}
		for _, obj := range objs {
			if vn, err := e.mapping.of(obj.(client.Object)); err == nil {
				return nil, vn, true
			}
		}
	}
	return nil, 0, false
}
