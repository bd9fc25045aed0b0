package history

import (
	"cmp"
	"slices"
	"time"

	"github.com/drover-sh/drover/sharding"
)

func (c *checker) wrote(r *Record) {
	o := object{r.Resource, r.Object}
	s := c.objects[o]
	if s == nil {
		s = &state{vn: r.VN, writes: make(map[string]written)}
		c.objects[o] = s
	}
	if s.exists && s.vn != r.VN {
		c.violated(I5, "the Virtual Node of %s was changed from %d to %d", o, s.vn, r.VN)
	}
	switch r.Actor {
	case User:
		if c.roots[o.resource] && !r.Deleted {
			c.due[o] = r.At
		}
	case Reconciler:
		c.mustOwn(r, "writes "+o.String())
		if s.exists && !r.Deleted && r.Digest != "" && r.Digest == s.digest {
			c.violated(I5, "%s writes %s and changes nothing", r.Session, o)
		}
		s.writes[r.Session] = written{r.At, r.Version, r.Deleted}
	default:
		c.violated(I5, "%s writes %s", r.Actor, o)
	}
	if r.Deleted {
		delete(c.due, o)
	} else if !s.exists {
		s.created = r.At
	}
	c.place(o, s, r.VN)
	s.exists, s.version, s.digest = !r.Deleted, r.Version, r.Digest
}

func (c *checker) place(o object, s *state, vn sharding.VirtualNode) {
	delete(c.inVN[s.vn], o)
	if c.inVN[vn] == nil {
		c.inVN[vn] = make(map[object]bool)
	}
	c.inVN[vn][o] = true
	s.vn = vn
}

// overdue reports what has needed a reconcile for longer than the bound at time now, each object once.
func (c *checker) overdue(now time.Duration) {
	late := make([]object, 0)
	for o, due := range c.due {
		if c.late(due, now) {
			late = append(late, o)
		}
	}
	slices.SortFunc(late, func(a, b object) int {
		return cmp.Or(cmp.Compare(a.resource, b.resource), cmp.Compare(a.name, b.name))
	})
	for _, o := range late {
		c.overdueOne(o, c.due[o], now)
		delete(c.due, o)
	}
}

func (c *checker) late(due, now time.Duration) bool {
	return c.opts.Bound > 0 && now-max(due, c.changed) > c.opts.Bound
}

func (c *checker) overdueOne(o object, due, now time.Duration) {
	if c.late(due, now) {
		c.violated(I4, "%s needed a reconcile at %v, the members last changed at %v, and nobody started by %v",
			o, due, c.changed, now)
	}
}

func (c *checker) listed(r *Record) {
	s := c.sessionOf(r.Session)
	if again := s.kept.Minus(s.excused[r.Resource]).Intersect(r.VNs); !again.Empty() && !c.ended[r.Session] {
		c.violated(I6, "%s lists %s again for Virtual Nodes %v, which it has kept", r.Session, r.Resource, again)
	}
	c.forget(r.Session, r.Resource, r.VNs)
	s.excused[r.Resource] = s.excused[r.Resource].Minus(r.VNs)
	for vn := range r.VNs.All() {
		s.listedAt[place{r.Resource, vn}] = r.At
	}
}

// forget excuses the deliveries that follow from a list or a new watch.
func (c *checker) forget(name string, res sharding.Resource, vns sharding.Set) {
	for o, d := range c.sessionOf(name).delivered {
		if o.resource == res && vns.Has(d.vn) {
			delete(c.sessionOf(name).delivered, o)
		}
	}
}

func (c *checker) delivered(r *Record) {
	if c.ended[r.Session] {
		return
	}
	o := object{r.Resource, r.Object}
	s := c.sessionOf(r.Session)
	if d, ok := s.delivered[o]; ok && !c.less(d.version, r.Version) {
		c.violated(I6, "%s is told of %s at version %s after version %s", r.Session, o, r.Version, d.version)
	}
	s.delivered[o] = delivery{r.VN, r.Version}
}

func (c *checker) snapshot(r *Record) {
	want := make(map[string]bool)
	for o, s := range c.objects {
		if o.resource == r.Resource && s.exists && c.owners[s.vn].session == r.Session {
			want[o.name+"@"+string(s.version)] = true
		}
	}
	for _, name := range slices.Sorted(slices.Values(r.Objects)) {
		if !want[name] {
			c.violated(I7, "the cache of %s for %s holds %s, which it should not", r.Session, r.Resource, name)
		}
		delete(want, name)
	}
	missing := make([]string, 0, len(want))
	for name := range want {
		missing = append(missing, name)
	}
	slices.Sort(missing)
	for _, name := range missing {
		c.violated(I7, "the cache of %s for %s lacks %s", r.Session, r.Resource, name)
	}
}
