package sharding_test

import (
	"slices"

	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/history"
)

// fetch lists and then watches. A list is read at one moment but arrives in pages; now and then the pages to come are
// gone (410).
func (p *process) fetch(f sharding.Fetch) {
	p.rec(history.Record{Kind: history.Listed, Resource: f.Resource, VNs: f.VNs})
	p.stopStreams(f.Resource, f.VNs)
	session := p.m.Session()
	failed := func() {
		if session != p.m.Session() {
			return
		}
		p.rec(history.Record{Kind: history.Lost, Resource: f.Resource, VNs: f.VNs})
		p.m.ListFailed(f)
		p.after(p.w.delay(), p.pump)
	}
	p.request(func() func() {
		t := p.w.tables[f.Resource]
		at, version := len(t.log), t.revision
		if p.w.mutation == watchCache {
			if back := p.w.rng.IntN(12); back > 0 && at > back {
				at -= back
				version = t.log[at-1].version
			}
		}
		found := contentAt(t, at, f.VNs)
		gone := p.w.chance(0.05)
		return func() {
			if gone {
				failed()
				return
			}
			if session == p.m.Session() {
				p.listed(f, found, at, version)
			}
		}
	}, failed)
}

func (p *process) listed(f sharding.Fetch, found map[string]item, at int, version int64) {
	vns, err := p.m.Listed(f, versionOf(version))
	p.must(err)
	if vns.Empty() {
		return
	}
	p.stopStreams(f.Resource, vns)
	cache := p.caches[f.Resource]
	for name, it := range cache {
		if _, ok := found[name]; vns.Has(it.vn) && !ok {
			delete(cache, name)
			p.queue[name] = true
		}
	}
	for _, name := range sortedNames(found) {
		if it := found[name]; vns.Has(it.vn) && cache[name] != it {
			cache[name] = it
			p.queue[name] = true
			p.rec(history.Record{Kind: history.Delivered, Resource: f.Resource, Object: name, VN: it.vn,
				Version: versionOf(it.version)})
		}
	}
	p.rec(history.Record{Kind: history.Filled, Resource: f.Resource, VNs: vns})
	p.streams = append(p.streams, &stream{resource: f.Resource, vns: vns, at: at})
	p.notify(f.Resource)
	p.pump()
}

// contentAt returns the table's objects of vns after the first at entries of its log.
func contentAt(t *table, at int, vns sharding.Set) map[string]item {
	found := make(map[string]item)
	if at == len(t.log) {
		for name, it := range t.items {
			if vns.Has(it.vn) {
				found[name] = it
			}
		}
		return found
	}
	for _, it := range t.log[:at] {
		switch {
		case !vns.Has(it.vn):
		case it.deleted:
			delete(found, it.name)
		default:
			found[it.name] = it
		}
	}
	return found
}

// notify wakes the streams of a resource that have something to deliver.
func (p *process) notify(res sharding.Resource) {
	if !p.up || p.cut {
		return
	}
	for _, s := range p.streams {
		if s.resource == res && !s.moving {
			s.moving = true
			session := p.m.Session()
			p.after(p.w.delay(), func() {
				s.moving = false
				if session == p.m.Session() && slices.Contains(p.streams, s) {
					p.deliver(s)
				}
			})
		}
	}
}

// deliver brings the cache up to date along one stream, with the progress that events and bookmarks tell.
func (p *process) deliver(s *stream) {
	if p.cut {
		return // the connection hangs; heal wakes it
	}
	if p.w.chance(0.003) {
		p.lose(s.resource, s.vns)
		return
	}
	t := p.w.tables[s.resource]
	var progress int64
	for ; s.at < len(t.log); s.at++ {
		it := t.log[s.at]
		if !s.vns.Has(it.vn) {
			continue
		}
		if progress = it.version; it.deleted {
			delete(p.caches[s.resource], it.name)
		} else {
			p.caches[s.resource][it.name] = it
		}
		p.queue[it.name] = true
		p.rec(history.Record{Kind: history.Delivered, Resource: s.resource, Object: it.name, VN: it.vn,
			Version: versionOf(it.version)})
	}
	if p.w.chance(0.2) && len(t.log) > 0 {
		progress = max(progress, t.log[s.at-1].version) // a bookmark
	}
	if progress > 0 {
		p.must(p.m.Progressed(s.resource, s.vns, versionOf(progress)))
	}
	p.pump()
}
