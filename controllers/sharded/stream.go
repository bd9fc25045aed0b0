package sharded

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/history"
)

const (
	// pageSize bounds the answers of a list, so that one of many objects does not have to be held twice.
	pageSize = 5000
	// maxStreams is how many watches of one kind a member keeps before it joins them. Every handoff adds one.
	maxStreams = 8
	// narrowPatience is how long a watch may bring what the member has given away, before it is opened anew for the rest.
	narrowPatience = 2 * time.Second
)

// A listWatcher lists and watches the objects of one kind that a query selects, and perhaps more.
type listWatcher interface {
	// list returns one page of a consistent list, as a list with resourceVersion "" is. token is that of the page
	// before, "" for the first.
	list(ctx context.Context, q query, token string) (page, error)
	// watch starts after version, with bookmarks.
	watch(ctx context.Context, q query, version sharding.Version) (watch.Interface, error)
}

type page struct {
	objects []client.Object
	version sharding.Version
	token   string
	shard   string // the shard selector that the server says it has followed, "" if it says nothing
}

// clientSource is the API server.
type clientSource struct {
	client  client.WithWatch
	newList func() client.ObjectList
}

func (s clientSource) list(ctx context.Context, q query, token string) (page, error) {
	list := s.newList()
	err := s.client.List(ctx, list, q.options(metav1.ListOptions{Limit: pageSize, Continue: token}))
	if err != nil {
		return page{}, err
	}
	items, err := meta.ExtractListWithAlloc(list)
	if err != nil {
		return page{}, err
	}
	p := page{version: sharding.Version(list.GetResourceVersion()), token: list.GetContinue(), shard: shardOf(list)}
	for _, item := range items {
		obj, ok := item.(client.Object)
		if !ok {
			return page{}, fmt.Errorf("list of %T holds a %T", list, item)
		}
		p.objects = append(p.objects, obj)
	}
	return p, nil
}

func (s clientSource) watch(ctx context.Context, q query, version sharding.Version) (watch.Interface, error) {
	return s.client.Watch(ctx, s.newList(), q.options(metav1.ListOptions{
		ResourceVersion: string(version), AllowWatchBookmarks: true,
	}))
}

// A stream fills the cache of one kind for some Virtual Nodes: first a list, then a watch from there on. It is
// client-go's reflector with two differences. What it is for shrinks when Virtual Nodes go, while the selector of a
// watch that runs stays what it was: the rest is dropped here, until the watch is opened anew, where it was, once nothing
// moves any more. And it never lists again by itself, because that is for
// the handoff to decide. (client-go's RetryWatcher would resume a watch for us, but keeps bookmarks to itself.)
type stream struct {
	member *member
	kind   *kind
	life   context.Context
	ctx    context.Context
	cancel context.CancelFunc
	anew   chan struct{} // asks for a watch in the place of the one that runs

	// The member's lock guards what follows.
	fetch    sharding.Fetch
	left     sharding.Set // while listing: what the list still counts for
	parts    []part       // while watching
	selected sharding.Set // what the watch that runs was asked for
}

// A part of a stream has seen all changes up to version.
type part struct {
	vns     sharding.Set
	version sharding.Version
	dirty   bool // the Member does not know of version yet
}

func newStream(e *member, k *kind) *stream {
	s := &stream{member: e, kind: k, life: e.life, anew: make(chan struct{}, 1)}
	s.ctx, s.cancel = context.WithCancel(e.life)
	k.streams = append(k.streams, s)
	return s
}

// begin lists what the Member asked for, and goes on watching.
func (s *stream) begin(delay time.Duration) {
	if !sleep(s.ctx, delay) {
		s.member.listFailed(s, context.Canceled)
		return
	}
	vns := s.member.narrow(s)
	if vns.Empty() {
		s.member.listFailed(s, context.Canceled)
		return
	}
	objs, version, err := s.listAll(vns)
	if err != nil {
		s.member.listFailed(s, err)
		return
	}
	s.member.listed(s, objs, version)
	s.follow()
}

func (s *stream) listAll(vns sharding.Set) ([]client.Object, sharding.Version, error) {
	q, err := s.member.mapping.query(vns)
	if err != nil {
		return nil, "", err
	}
	var all []client.Object
	for token := ""; ; {
		ask := s.kind.asks.Add(1)
		p, err := s.kind.source.list(s.ctx, q, token)
		if err != nil {
			return nil, "", err
		}
		if err := s.judgeList(ask, q, p); err != nil {
			return nil, "", err
		}
		all = append(all, p.objects...)
		if p.token == "" {
			return all, p.version, nil
		}
		token = p.token
	}
}

func newBackoff() wait.Backoff {
	return wait.Backoff{Duration: 50 * time.Millisecond, Factor: 2, Jitter: 0.2, Steps: 8, Cap: 10 * time.Second}
}

// follow watches until the stream is stopped, or cannot go on where it was.
func (s *stream) follow() {
	backoff, again := newBackoff(), false
	for s.ctx.Err() == nil {
		vns, version := s.member.resumeAt(s)
		if vns.Empty() {
			return
		}
		q, err := s.member.mapping.query(vns)
		if err != nil {
			s.member.log.Error(err, "cannot watch", "resource", s.kind.resource)
			return
		}
		w, err := s.kind.source.watch(s.ctx, q, version)
		if err == nil {
			if again {
				go s.probe() // this may be another server than before
			}
			again = true
			var any bool
			any, err = s.consume(w, q)
			w.Stop()
			if any {
				backoff = newBackoff()
			}
		}
		switch {
		case s.ctx.Err() != nil:
			return
		case errors.Is(err, errAnew):
			continue
		case apierrors.IsGone(err) || apierrors.IsResourceExpired(err):
			s.member.lost(s)
			return
		case err != nil:
			s.member.retries(err, "watch failed", "resource", s.kind.resource)
		}
		sleep(s.ctx, backoff.Step())
	}
}

var errAnew = errors.New("the watch is to be opened anew")

// consume takes events until the watch ends. any tells that some came.
func (s *stream) consume(w watch.Interface, q query) (any bool, err error) {
	for {
		select {
		case <-s.ctx.Done():
			return any, nil
		case <-s.anew:
			return any, errAnew
		case e, ok := <-w.ResultChan():
			switch {
			case !ok:
				return any, nil
			case e.Type == watch.Error:
				return any, apierrors.FromObject(e.Object)
			}
			obj, ok := e.Object.(client.Object)
			if !ok {
				return any, fmt.Errorf("watch of %s brought a %T", s.kind.resource, e.Object)
			}
			any = true
			if e.Type != watch.Bookmark {
				s.judge(s.kind.asks.Load(), q, obj)
			}
			if err := s.member.observe(s, e.Type, obj); err != nil {
				s.member.log.Error(err, "watch event dropped, listing again", "resource", s.kind.resource)
				s.member.lost(s)
				return any, err
			}
		}
	}
}

// vns returns what the stream is for.
func (s *stream) vns() sharding.Set {
	vns := s.left
	for _, p := range s.parts {
		vns = vns.Union(p.vns)
	}
	return vns
}

// yield leaves vns to a later list, and stops the stream when nothing is left.
func (s *stream) yield(vns sharding.Set) {
	s.left = s.left.Minus(vns)
	s.drop(vns)
}

// drop ends the watch of vns. A list that is under way still counts for them: they may be wanted again when it is done.
func (s *stream) drop(vns sharding.Set) {
	for i := range s.parts {
		s.parts[i].vns = s.parts[i].vns.Minus(vns)
	}
	s.parts = slices.DeleteFunc(s.parts, func(p part) bool { return p.vns.Empty() })
	if s.left.Empty() && len(s.parts) == 0 {
		s.stop()
	} else if s.wide() {
		s.member.narrowLater(s.kind)
	}
}

// wide reports whether the watch that runs was asked for more than the stream is for.
func (s *stream) wide() bool { return len(s.parts) > 0 && !s.selected.Minus(s.vns()).Empty() }

// narrowLater opens the watches of a kind anew that bring what the member has no more, as soon as nothing moves.
func (e *member) narrowLater(k *kind) {
	if k.narrowing {
		return
	}
	k.narrowing = true
	life := e.life
	e.after(e.narrowAfter, func() {
		k.narrowing = false
		if life.Err() != nil {
			return
		}
		for _, s := range k.streams {
			switch {
			case !s.wide():
			case e.slice.Moving() > 0:
				e.narrowLater(k)
				return
			default:
				wake(s.anew)
			}
		}
	})
}

func (s *stream) stop() {
	s.cancel()
	s.left, s.parts = nil, nil
	s.kind.streams = slices.DeleteFunc(s.kind.streams, func(o *stream) bool { return o == s })
}

// partOf returns the part that vn is in, nil if the stream is not for it.
func (s *stream) partOf(vn sharding.VirtualNode) *part {
	for i := range s.parts {
		if s.parts[i].vns.Has(vn) {
			return &s.parts[i]
		}
	}
	return nil
}

// progress notes that everything up to version has been delivered, to whichever part that is news.
func (s *stream) progress(version sharding.Version) error {
	for i := range s.parts {
		p := &s.parts[i]
		c, err := compareVersions(p.version, version)
		if err != nil {
			return err
		}
		if c < 0 {
			p.version, p.dirty = version, true
		}
	}
	return nil
}

// join makes one stream of several: a watch from the oldest of their versions, over all their Virtual Nodes. What
// younger parts have seen already comes again and is dropped by its version.
func (e *member) join(k *kind) {
	var old []*stream
	for _, s := range k.streams {
		if len(s.parts) > 0 && s.left.Empty() {
			old = append(old, s)
		}
	}
	if len(old) <= maxStreams {
		return
	}
	joined := newStream(e, k)
	for _, s := range old {
		joined.parts = append(joined.parts, s.parts...)
		s.stop()
	}
	go joined.follow()
}

// resumeAt returns for what, and from where on, the stream's next watch is.
func (e *member) resumeAt(s *stream) (sharding.Set, sharding.Version) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var first sharding.Version
	for _, p := range s.parts {
		if c, err := compareVersions(p.version, first); first == "" || (err == nil && c < 0) {
			first = p.version
		}
	}
	s.selected = s.vns()
	e.metrics.observe(e)
	return s.selected, first
}

// narrow returns what a list that is about to begin is for: later ones may have taken over a part of it.
func (e *member) narrow(s *stream) sharding.Set {
	e.mu.Lock()
	defer e.mu.Unlock()
	if s.life.Err() != nil || s.left.Empty() {
		return nil
	}
	e.metrics.lists(string(s.kind.resource)).Inc()
	e.rec(history.Record{Kind: history.Listed, Resource: s.kind.resource, VNs: s.left})
	return s.left
}

// sleep waits, and reports whether ctx still lives.
func sleep(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
