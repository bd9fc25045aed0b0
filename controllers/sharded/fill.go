package sharded

import (
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/history"
)

func (e *member) purge(p sharding.Purge) {
	k := e.kinds[p.Resource]
	k.store.forget(p.VNs)
	e.rec(history.Record{Kind: history.Dropped, Resource: p.Resource, VNs: p.VNs})
	for _, s := range slices.Clone(k.streams) {
		s.drop(p.VNs)
	}
}

func (e *member) fetch(f sharding.Fetch) {
	k := e.kinds[f.Resource]
	if k.external != nil {
		e.confirm(k, f)
		return
	}
	for _, s := range slices.Clone(k.streams) {
		s.yield(f.VNs)
	}
	s := newStream(e, k)
	s.fetch, s.left = f, f.VNs
	go s.begin(e.delay(k))
}

// delay is how long the next list of a kind waits: not at all, unless the last one failed.
func (e *member) delay(k *kind) time.Duration {
	if k.backoff.Steps == newBackoff().Steps {
		return 0
	}
	return k.backoff.Duration
}

func (e *member) listFailed(s *stream, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if s.life.Err() != nil {
		return
	}
	stopped := s.ctx.Err() != nil // a later list has taken over
	e.m.ListFailed(s.fetch)
	if !stopped {
		e.retries(err, "list failed", "resource", s.kind.resource)
		e.rec(history.Record{Kind: history.Lost, Resource: s.kind.resource, VNs: s.left})
		s.stop()
		s.kind.backoff.Step()
	}
	e.pump()
}

// listed puts the answer of a list in the place of what the store has of its Virtual Nodes.
func (e *member) listed(s *stream, objs []client.Object, version sharding.Version) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if s.life.Err() != nil {
		return
	}
	k := s.kind
	vns, err := e.m.Listed(s.fetch, version)
	if err != nil {
		e.log.Error(err, "list refused", "resource", k.resource)
		e.rec(history.Record{Kind: history.Lost, Resource: k.resource, VNs: s.left})
		k.backoff.Step()
	}
	vns = vns.Intersect(s.left)
	s.left = nil
	if err != nil || vns.Empty() {
		s.stop()
		e.pump()
		return
	}
	k.backoff = newBackoff()
	found := make(map[string]bool, len(objs))
	for _, obj := range objs {
		if vn, err := e.mapping.of(obj); err == nil && vns.Has(vn) {
			found[keyOf(client.ObjectKeyFromObject(obj))] = true
			e.put(k, vn, obj)
		}
	}
	for _, old := range k.store.within(vns) {
		if !found[keyOf(client.ObjectKeyFromObject(old))] {
			e.gone(k, old, version, true)
		}
	}
	s.parts = []part{{vns: vns, version: version}}
	e.rec(history.Record{Kind: history.Filled, Resource: k.resource, VNs: vns})
	e.pump()
}

// observe takes in one event of a watch. An error means that the watch is of no use.
func (e *member) observe(s *stream, event watch.EventType, obj client.Object) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if s.ctx.Err() != nil {
		return nil
	}
	k, version := s.kind, sharding.Version(obj.GetResourceVersion())
	if event != watch.Bookmark {
		vn, err := e.mapping.of(obj)
		if p := s.partOf(vn); err == nil && p != nil {
			c, err := compareVersions(p.version, version)
			switch {
			case err != nil:
				return err
			case c >= 0: // seen already
			case event == watch.Deleted:
				e.gone(k, obj, version, false)
			default:
				e.put(k, vn, obj)
			}
		}
	}
	if err := s.progress(version); err != nil {
		return err
	}
	if !e.m.Awaiting(k.resource).Empty() {
		e.flush()
		e.pump()
	}
	return nil
}

// flush tells the machine how far the watches have come. It need not know before it has to compare.
func (e *member) flush() {
	for _, k := range e.order {
		if k.external != nil {
			e.flushExternal(k)
		}
		for _, s := range k.streams {
			for i := range s.parts {
				p := &s.parts[i]
				if !p.dirty {
					continue
				}
				p.dirty = false
				if err := e.m.Progressed(k.resource, p.vns, p.version); err != nil {
					e.log.Error(err, "progress refused", "resource", k.resource, "version", p.version)
				}
			}
		}
	}
}

// put stores an object, if it is newer than what is there, and tells who has to know.
func (e *member) put(k *kind, vn sharding.VirtualNode, obj client.Object) {
	key := keyOf(client.ObjectKeyFromObject(obj))
	version := sharding.Version(obj.GetResourceVersion())
	old, had := k.store.get(key)
	if had && !older(old, version) {
		return
	}
	if k.transform != nil {
		transformed, err := k.transform(obj)
		if err != nil {
			e.log.Error(err, "object not transformed", "resource", k.resource, "object", key)
		} else {
			obj = transformed
		}
	}
	k.store.put(obj)
	if obj.GetDeletionTimestamp() != nil {
		e.deletionSeen(k, key, version)
	}
	if e.ready.Has(vn) {
		e.tell(k, key, vn, version, notice{old: old, object: obj})
	}
}

// gone takes an object out of the store; obj is how it was last seen, and version that of its end, or one after it.
func (e *member) gone(k *kind, obj client.Object, version sharding.Version, unseen bool) {
	key := keyOf(client.ObjectKeyFromObject(obj))
	old, had := k.store.get(key)
	if !had || !older(old, version) {
		return
	}
	vn, err := e.mapping.of(old)
	if err != nil {
		return
	}
	k.store.bury(old, vn, time.Now())
	e.deletionSeen(k, key, version)
	if e.ready.Has(vn) {
		e.tell(k, key, vn, version, notice{old: obj, unseen: unseen})
	}
}

func older(obj client.Object, version sharding.Version) bool {
	c, err := compareVersions(sharding.Version(obj.GetResourceVersion()), version)
	return err != nil || c < 0
}

// lost ends a stream that cannot go on where it was. What it cached stays and is served until it has been listed again.
func (e *member) lost(s *stream) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if s.ctx.Err() == nil {
		e.lose(s.kind.resource, s.vns())
	}
}

func (e *member) lose(r sharding.Resource, vns sharding.Set) {
	e.rec(history.Record{Kind: history.Lost, Resource: r, VNs: vns})
	e.m.Lost(r, vns)
	for _, s := range slices.Clone(e.kinds[r].streams) {
		s.drop(vns)
	}
	e.pump()
}

// waitForEvents gives what the previous owner told of some time to arrive by the watch.
func (e *member) waitForEvents(r sharding.Resource) {
	behind := e.m.Behind(r)
	if behind.Empty() || e.patient[r] {
		return
	}
	e.patient[r] = true
	life := e.life
	e.after(e.patience, func() {
		e.patient[r] = false
		if still := behind.Intersect(e.m.Behind(r)); life.Err() == nil && !still.Empty() {
			e.lose(r, still)
			return
		}
		e.pump() // others may be behind by now
	})
}
