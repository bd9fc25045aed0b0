package sharded

import (
	"errors"
	"fmt"
	"sync"
	"time"

	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

var _ cache.Informer = (*informer)(nil)

// An informer tells handlers what happens to the objects that the member serves: all that there are when it starts to
// serve their Virtual Node, as of an initial list, and every change from there on. It says nothing when a Virtual Node
// goes to another member.
type informer struct {
	kind    *kind
	started <-chan struct{}

	mu        sync.Mutex
	listeners map[*listener]bool
	stopped   bool
}

func newInformer(k *kind, started <-chan struct{}) *informer {
	return &informer{kind: k, started: started, listeners: make(map[*listener]bool)}
}

// A notice is one thing to tell: old is nil for an object that is new here, object for one that is gone.
type notice struct {
	old, object client.Object
	initial     bool // object was there when its Virtual Node came
	unseen      bool // the end of old was not seen, only its absence
}

// tell hands a notice to every handler. It never waits for one.
func (i *informer) tell(n notice) {
	i.mu.Lock()
	defer i.mu.Unlock()
	for l := range i.listeners {
		l.add(n)
	}
}

// AddEventHandler implements cache.Informer.
func (i *informer) AddEventHandler(h toolscache.ResourceEventHandler) (toolscache.ResourceEventHandlerRegistration, error) {
	return i.add(h, nil)
}

// AddEventHandlerWithResyncPeriod implements cache.Informer. The period is ignored: Options.Resync spreads resyncs over
// time instead.
func (i *informer) AddEventHandlerWithResyncPeriod(h toolscache.ResourceEventHandler, _ time.Duration) (
	toolscache.ResourceEventHandlerRegistration, error) {
	return i.add(h, nil)
}

// AddEventHandlerWithOptions implements cache.Informer. A resync period is ignored, as above.
func (i *informer) AddEventHandlerWithOptions(h toolscache.ResourceEventHandler, _ toolscache.HandlerOptions) (
	toolscache.ResourceEventHandlerRegistration, error) {
	return i.add(h, nil)
}

// add registers a handler and tells it of everything that is served already. project, if set, is how it wants objects.
func (i *informer) add(h toolscache.ResourceEventHandler, project func(client.Object) client.Object) (
	toolscache.ResourceEventHandlerRegistration, error) {
	l := newListener(i, h, project)
	if err := i.kind.member.introduce(i, l); err != nil {
		return nil, err
	}
	go l.run()
	return l, nil
}

func (i *informer) register(l *listener) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.stopped {
		return fmt.Errorf("informer of %s has stopped", i.kind.resource)
	}
	i.listeners[l] = true
	return nil
}

// RemoveEventHandler implements cache.Informer.
func (i *informer) RemoveEventHandler(handle toolscache.ResourceEventHandlerRegistration) error {
	l, ok := handle.(*listener)
	if !ok {
		return fmt.Errorf("informer of %s: %T is not one of its registrations", i.kind.resource, handle)
	}
	i.mu.Lock()
	delete(i.listeners, l)
	i.mu.Unlock()
	l.stop()
	return nil
}

// AddIndexers implements cache.Informer.
func (i *informer) AddIndexers(indexers toolscache.Indexers) error {
	return i.kind.store.indexer.AddIndexers(indexers)
}

// HasSynced implements cache.Informer. A member that owns nothing has nothing to wait for, so it is true as soon as the
// cache runs.
func (i *informer) HasSynced() bool { return toolscache.IsDone(i.HasSyncedChecker()) }

// HasSyncedChecker implements cache.Informer.
func (i *informer) HasSyncedChecker() toolscache.DoneChecker {
	return done{"sharded cache of " + string(i.kind.resource), i.started}
}

// IsStopped implements cache.Informer.
func (i *informer) IsStopped() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.stopped
}

func (i *informer) stop() {
	i.mu.Lock()
	listeners := i.listeners
	i.listeners, i.stopped = make(map[*listener]bool), true
	i.mu.Unlock()
	for l := range listeners {
		l.stop()
	}
}

type done struct {
	name string
	ch   <-chan struct{}
}

func (d done) Name() string          { return d.name }
func (d done) Done() <-chan struct{} { return d.ch }

// A listener calls one handler, one notice after the other, from a queue without bound: the member does not wait for a
// handler, and a handler may read from the cache.
type listener struct {
	informer *informer
	handler  toolscache.ResourceEventHandler
	project  func(client.Object) client.Object

	mu       sync.Mutex
	wake     *sync.Cond
	queue    []notice
	stopping bool
}

func newListener(i *informer, h toolscache.ResourceEventHandler, project func(client.Object) client.Object) *listener {
	if project == nil {
		project = func(obj client.Object) client.Object { return obj }
	}
	l := &listener{informer: i, handler: h, project: project}
	l.wake = sync.NewCond(&l.mu)
	return l
}

func (l *listener) add(n notice) {
	l.mu.Lock()
	l.queue = append(l.queue, n)
	l.mu.Unlock()
	l.wake.Signal()
}

func (l *listener) stop() {
	l.mu.Lock()
	l.stopping = true
	l.mu.Unlock()
	l.wake.Signal()
}

func (l *listener) run() {
	for {
		l.mu.Lock()
		for len(l.queue) == 0 && !l.stopping {
			l.wake.Wait()
		}
		if l.stopping {
			l.mu.Unlock()
			return
		}
		batch := l.queue
		l.queue = nil
		l.mu.Unlock()
		for _, n := range batch {
			l.call(n)
		}
	}
}

func (l *listener) call(n notice) {
	switch {
	case n.old == nil:
		l.handler.OnAdd(l.project(n.object), n.initial)
	case n.object != nil:
		l.handler.OnUpdate(l.project(n.old), l.project(n.object))
	case n.unseen:
		l.handler.OnDelete(toolscache.DeletedFinalStateUnknown{
			Key: keyOf(client.ObjectKeyFromObject(n.old)), Obj: l.project(n.old),
		})
	default:
		l.handler.OnDelete(l.project(n.old))
	}
}

// HasSynced implements toolscache.ResourceEventHandlerRegistration.
func (l *listener) HasSynced() bool { return l.informer.HasSynced() }

// HasSyncedChecker implements toolscache.ResourceEventHandlerRegistration.
func (l *listener) HasSyncedChecker() toolscache.DoneChecker { return l.informer.HasSyncedChecker() }

// projected is an informer whose handlers want objects in another form than the cache has, such as their metadata only.
type projected struct {
	*informer
	project func(client.Object) client.Object
}

func (p projected) AddEventHandler(h toolscache.ResourceEventHandler) (toolscache.ResourceEventHandlerRegistration, error) {
	return p.add(h, p.project)
}

func (p projected) AddEventHandlerWithResyncPeriod(h toolscache.ResourceEventHandler, _ time.Duration) (
	toolscache.ResourceEventHandlerRegistration, error) {
	return p.add(h, p.project)
}

func (p projected) AddEventHandlerWithOptions(h toolscache.ResourceEventHandler, _ toolscache.HandlerOptions) (
	toolscache.ResourceEventHandlerRegistration, error) {
	return p.add(h, p.project)
}

var errNotStarted = errors.New("the sharded cache has not started")
