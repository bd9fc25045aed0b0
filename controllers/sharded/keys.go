package sharded

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
)

// Keys divide the requests of a controller among the members by keys of its own: where labels on the objects would cost
// more than they bring, or where requests belong together that no owner joins. Nothing is labelled, so the kinds need not
// be in the WatchGroup, every member caches all of them, and a request is worked on by the owner of its key's Virtual Node.
//
// The handoff is that of objects: one owner at any time, drained before the next one starts, and writes with the context of
// Reconcile are refused once the member may not write. But the caches are the stock ones, and may be behind what the
// owner before has written: Takeover is the place to wait for that, with a CatchUp, where it matters.
type Keys struct {
	// Of returns the hash key of a request. Requests of one key are always on one member.
	Of func(reconcile.Request) string
	// List returns the requests that there are, from the manager's cache. When Virtual Nodes come, those that are in them
	// are enqueued, at low priority.
	List func(context.Context) ([]reconcile.Request, error)
	// Takeover, if set, is called before each reconcile. The reconcile is tried again a moment later while it returns
	// false. A turn that it has not been called with before has just begun.
	Takeover func(context.Context, Turn) (done bool, err error)
	// Lost, if set, is told of Virtual Nodes that are not this member's any more. Their turns had numbers up to last, and
	// lost reports whether a request is in them. It may come when a later turn has begun.
	Lost func(ctx context.Context, last Turn, lost func(reconcile.Request) bool)
}

// A Turn is the time for which a member owns a Virtual Node without a break. Turns are numbered from 1, in the order in
// which they begin in this process.
type Turn uint64

// takeoverRetry is the pause before a takeover that is not done is tried again.
const takeoverRetry = 50 * time.Millisecond

// ByKey divides the controller's requests by keys. The kind of For, if there is one, must not be in the group, and the
// group's handoff must be Exclusive.
func (b *Builder) ByKey(keys Keys) *Builder {
	b.keys = &keys
	return b
}

// Owns reports whether this member owns the Virtual Node of a key, and holds its lease. It is for work that is not a
// reconcile, and promises nothing for any later moment.
func (g *Group) Owns(key string) bool {
	e := g.member
	if e == nil {
		return false
	}
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.m != nil && e.fence.Holds(e.clock()) && e.m.Owned().Has(sharding.VirtualNodeOf(key, e.v))
}

// A turnOf is a turn that has not ended, and where.
type turnOf struct {
	number Turn
	vns    sharding.Set
}

// countTurns follows what the member owns; the member's lock is held.
func (e *member) countTurns() {
	owned := e.m.Owned()
	if owned.Equal(e.counted) {
		return
	}
	e.counted = owned
	gained := owned
	var turns []turnOf
	for _, t := range e.turns {
		if vns := t.vns.Intersect(owned); !vns.Empty() {
			turns = append(turns, turnOf{t.number, vns})
			gained = gained.Minus(vns)
		}
	}
	if !gained.Empty() {
		e.turned++
		turns = append(turns, turnOf{e.turned, gained})
	}
	e.turns = turns
}

// turnsNow returns the turns, ascending, and a channel that is closed when they may have changed.
func (e *member) turnsNow() ([]turnOf, <-chan struct{}) {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.turns, e.changed
}

// beginKey starts work on behalf of a key, if it is to be done here and now.
func (e *member) beginKey(key string) (*job, Turn, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.m == nil {
		return nil, 0, errNotStarted
	}
	vn := sharding.VirtualNodeOf(key, e.v)
	ticket, err := e.m.Begin("", vn, e.clock()) // no resource of the group: there is no cache to wait for
	if err != nil {
		return nil, 0, err
	}
	j := &job{member: e, ticket: ticket, session: e.m.Session(), life: e.life}
	for _, t := range e.turns {
		if t.vns.Has(vn) {
			return j, t.number, nil
		}
	}
	e.m.End(ticket)
	return nil, 0, ErrNotOwned
}

// buildByKey makes the builder's controller one by keys, and returns its reconciler.
func (b *Builder) buildByKey(c *groupCache, r reconcile.Reconciler) (reconcile.Reconciler, error) {
	if r == nil {
		return nil, errors.New("controller by keys: no reconciler")
	}
	if c.group.handoff != lbv1alpha1.HandoffExclusive {
		return nil, fmt.Errorf("controller by keys: WatchGroup %s: spec.handoff: %q is not %q, so that a key could have two owners",
			c.group.key, c.group.handoff, lbv1alpha1.HandoffExclusive)
	}
	if b.root != nil {
		if k, err := c.kindOf(b.root); err != nil {
			return nil, err
		} else if k != nil {
			return nil, fmt.Errorf("controller of %s: its kind is in WatchGroup %s, which divides it by labels, not by keys",
				k.resource, c.group.key)
		}
	}
	keyed := &keyedReconciler{inner: r, member: c.group.member, keys: *b.keys}
	b.inner.WatchesRawSource(source.Func(func(ctx context.Context, q requestQueue) error {
		go keyed.follow(ctx, q)
		return nil
	}))
	return keyed, nil
}

type requestQueue = workqueue.TypedRateLimitingInterface[reconcile.Request]

var _ reconcile.Reconciler = (*keyedReconciler)(nil)

// A keyedReconciler calls the reconciler for requests whose key is this member's, and drops every other.
type keyedReconciler struct {
	inner  reconcile.Reconciler
	member *member
	keys   Keys
}

// Reconcile implements reconcile.Reconciler.
func (k *keyedReconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	j, turn, err := k.member.beginKey(k.keys.Of(req))
	if err != nil {
		return turnedAway(ctx, k.member, err)
	}
	return j.work(ctx, func(ctx context.Context) (reconcile.Result, error) {
		if k.keys.Takeover != nil {
			done, err := k.keys.Takeover(ctx, turn)
			if err != nil {
				return reconcile.Result{}, fmt.Errorf("taking over: %w", err)
			}
			if !done {
				return reconcile.Result{RequeueAfter: takeoverRetry}, nil
			}
		}
		return k.inner.Reconcile(ctx, req)
	})
}

// follow enqueues the requests of Virtual Nodes that come, and tells of those that go, until ctx ends.
func (k *keyedReconciler) follow(ctx context.Context, q requestQueue) {
	var before []turnOf
	backoff := newBackoff()
	for ctx.Err() == nil {
		now, changed := k.member.turnsNow()
		gained, lost, last := compareTurns(before, now)
		if !lost.Empty() && k.keys.Lost != nil {
			k.keys.Lost(ctx, last, func(req reconcile.Request) bool { return lost.Has(k.virtualNode(req)) })
		}
		if !gained.Empty() {
			if err := k.enqueue(ctx, q, gained); err != nil {
				k.member.log.Error(err, "requests of new Virtual Nodes not listed: trying again")
				before = slices.DeleteFunc(slices.Clone(now), func(t turnOf) bool { return t.vns.Intersects(gained) })
				sleep(ctx, backoff.Step())
				continue
			}
			backoff = newBackoff()
		}
		before = now
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
}

func (k *keyedReconciler) virtualNode(req reconcile.Request) sharding.VirtualNode {
	return sharding.VirtualNodeOf(k.keys.Of(req), k.member.v)
}

func (k *keyedReconciler) enqueue(ctx context.Context, q requestQueue, vns sharding.Set) error {
	list, err := k.keys.List(ctx)
	if err != nil {
		return err
	}
	for _, req := range list {
		if vns.Has(k.virtualNode(req)) {
			enqueueLow(q, keyOf(req.NamespacedName))
		}
	}
	return nil
}

// compareTurns returns the Virtual Nodes of turns that are new, those whose turn has ended, and the latest turn of these. A
// turn never gains.
func compareTurns(before, now []turnOf) (gained, lost sharding.Set, last Turn) {
	still := make(map[Turn]sharding.Set, len(now))
	for _, t := range now {
		still[t.number] = t.vns
		if !slices.ContainsFunc(before, func(b turnOf) bool { return b.number == t.number }) {
			gained = gained.Union(t.vns)
		}
	}
	for _, t := range before {
		if vns := t.vns.Minus(still[t.number]); !vns.Empty() {
			lost, last = lost.Union(vns), max(last, t.number)
		}
	}
	return gained, lost, last
}
