package sharded

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	serversharding "k8s.io/apiserver/pkg/sharding"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/history"
)

// patience is how long a condition may take to come true on a slow machine. No test waits for it when all is well.
const patience = 2 * time.Minute

func eventually(t interface {
	Helper()
	Fatalf(string, ...any)
}, what string, ok func() error) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		err := ok()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %v", what, err)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// A tape keeps records in the order in which they come, from whatever goroutine.
type tape struct {
	mu      sync.Mutex
	start   time.Time
	records []history.Record
}

func newTape() *tape { return &tape{start: time.Now()} }

func (t *tape) add(r history.Record) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r.At = time.Since(t.start)
	t.records = append(t.records, r)
}

func (t *tape) all() []history.Record {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.records)
}

func (t *tape) count(kind history.Kind) int {
	n := 0
	for _, r := range t.all() {
		if r.Kind == kind {
			n++
		}
	}
	return n
}

// A script is an API server for one test: one store of versions, several resources, watches that replay a log, and faults
// on demand.
type script struct {
	tape      *tape
	buckets   sharding.Buckets
	mu        sync.Mutex
	revision  int
	tables    map[sharding.Resource]*scriptTable
	wake      chan struct{} // closed, and replaced, by every change
	closing   int           // a watch that began under a lower number ends
	gone      int           // and if under a lower one of these, with 410
	failing   int           // lists that are going to fail
	expiring  int           // lists whose second page is going to be gone
	illegible int           // lists whose version is going to be none
	hold      chan struct{} // if set, lists are answered once it is closed, as of when they were asked
	late      bool          // or as of then
	lists     map[sharding.Resource]int
	watches   map[sharding.Resource][]query // that were begun
	hashes    sharding.HashRanges           // by which objects get UIDs; none if V is 0
	filters   bool                          // shard selectors are followed, and not ignored
	echoes    bool                          // and lists say so
}

type scriptTable struct {
	objects map[string]*corev1.ConfigMap
	log     []watch.Event
}

func newScript(tape *tape, buckets sharding.Buckets, resources ...sharding.Resource) *script {
	s := &script{
		tape: tape, buckets: buckets, revision: 1, tables: make(map[sharding.Resource]*scriptTable), wake: make(chan struct{}),
		lists: make(map[sharding.Resource]int), watches: make(map[sharding.Resource][]query),
	}
	for _, r := range resources {
		s.tables[r] = &scriptTable{objects: make(map[string]*corev1.ConfigMap)}
	}
	return s
}

func (s *script) changed() {
	close(s.wake)
	s.wake = make(chan struct{})
}

// write creates or updates an object and returns its version.
func (s *script) write(r sharding.Resource, name string, vn sharding.VirtualNode, change func(*corev1.ConfigMap)) sharding.Version {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.revision++
	obj := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
		Namespace: "default", Name: name, ResourceVersion: strconv.Itoa(s.revision),
		Labels: map[string]string{
			sharding.LabelVirtualNode: vn.LabelValue(),
			sharding.LabelBucket:      strconv.Itoa(s.buckets.Of(vn)),
		},
	}}
	if s.hashes.V > 0 {
		obj.UID = uidIn(s.hashes, vn)
	}
	if change != nil {
		change(obj)
	}
	table := s.tables[r]
	event := watch.Added
	if table.objects[name] != nil {
		event = watch.Modified
	}
	table.objects[name] = obj
	table.log = append(table.log, watch.Event{Type: event, Object: obj})
	s.tape.add(history.Record{Kind: history.Wrote, Actor: history.User, Resource: r, Object: "default/" + name, VN: vn,
		Version: sharding.Version(obj.ResourceVersion), Digest: obj.ResourceVersion})
	s.changed()
	return sharding.Version(obj.ResourceVersion)
}

func (s *script) remove(r sharding.Resource, name string) sharding.Version {
	s.mu.Lock()
	defer s.mu.Unlock()
	table := s.tables[r]
	old := table.objects[name]
	if old == nil {
		return ""
	}
	s.revision++
	obj := old.DeepCopy()
	obj.ResourceVersion = strconv.Itoa(s.revision)
	delete(table.objects, name)
	table.log = append(table.log, watch.Event{Type: watch.Deleted, Object: obj})
	vn, _ := virtualNodeOf(old, 1<<20)
	s.tape.add(history.Record{Kind: history.Wrote, Actor: history.User, Resource: r, Object: "default/" + name, VN: vn,
		Version: sharding.Version(obj.ResourceVersion), Deleted: true})
	s.changed()
	return sharding.Version(obj.ResourceVersion)
}

// last returns the version of the last change of a resource that concerns vns, "" if there is none.
func (s *script) last(r sharding.Resource, vns sharding.Set) sharding.Version {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range slices.Backward(s.tables[r].log) {
		obj := e.Object.(*corev1.ConfigMap)
		if vn, err := virtualNodeOf(obj, 1<<20); err == nil && vns.Has(vn) {
			return sharding.Version(obj.ResourceVersion)
		}
	}
	return ""
}

// content returns "name@version" of the objects of vns, sorted.
func (s *script) content(r sharding.Resource, vns sharding.Set) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var found []string
	for name, obj := range s.tables[r].objects {
		if vn, err := virtualNodeOf(obj, 1<<20); err == nil && vns.Has(vn) {
			found = append(found, "default/"+name+"@"+obj.ResourceVersion)
		}
	}
	slices.Sort(found)
	return found
}

func (s *script) endWatches(gone bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closing++
	if gone {
		s.gone = s.closing
	}
	s.changed()
}

func (s *script) failLists(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failing = n
}

func (s *script) expireLists(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.expiring = n
}

// holdLists lets lists wait for their answer until the function that is returned is called.
func (s *script) holdLists() (release func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	held := make(chan struct{})
	s.hold = held
	return sync.OnceFunc(func() {
		s.mu.Lock()
		if s.hold == held {
			s.hold = nil
		}
		s.mu.Unlock()
		close(held)
	})
}

// scripted is one resource of a script.
type scripted struct {
	*script
	resource sharding.Resource
}

// uidIn returns a UID whose Virtual Node is vn.
func uidIn(r sharding.HashRanges, vn sharding.VirtualNode) types.UID {
	for i := 0; ; i++ {
		if uid := fmt.Sprintf("%04d-uid", i); r.Of(uid) == vn {
			return types.UID(uid)
		}
	}
}

// filter returns what the server sends of a query, by the real server's parser and matcher, and what it says that it
// selected. Under the lock.
func (s scripted) filter(q query) (selects func(*corev1.ConfigMap) bool, shard string) {
	if q.labels != nil {
		return func(o *corev1.ConfigMap) bool { return q.labels.Matches(labels.Set(o.Labels)) }, ""
	}
	server, err := serversharding.Parse(q.shard)
	if err != nil {
		panic(err)
	}
	if !s.filters {
		return func(*corev1.ConfigMap) bool { return true }, ""
	}
	if s.echoes {
		shard = server.String()
	}
	return func(o *corev1.ConfigMap) bool {
		matches, err := server.Matches(o)
		return err == nil && matches
	}, shard
}

// become makes the server one that follows shard selectors, or ignores them; watches begin anew.
func (s *script) become(filters bool) {
	s.mu.Lock()
	s.filters = filters
	s.mu.Unlock()
	s.endWatches(false)
}

// list answers in two pages of one snapshot.
func (s scripted) list(ctx context.Context, q query, token string) (page, error) {
	s.mu.Lock()
	selects, shard := s.filter(q)
	hold := s.hold
	if token != "" {
		if s.expiring > 0 {
			s.expiring--
			s.mu.Unlock()
			return page{}, apierrors.NewResourceExpired("the continue token has expired")
		}
		version, names, _ := strings.Cut(token, " ")
		p := page{version: sharding.Version(version), shard: shard}
		at, _ := strconv.Atoi(version)
		rest := strings.Split(names, ",")
		p.objects = s.asOf(at, selects, func(name string) bool { return slices.Contains(rest, name) })
		s.smudge(&p)
		s.mu.Unlock()
		return p, nil
	}
	s.lists[s.resource]++
	if s.failing > 0 {
		s.failing--
		s.mu.Unlock()
		return page{}, apierrors.NewServiceUnavailable("scripted")
	}
	if s.late && hold != nil {
		s.mu.Unlock()
		select {
		case <-hold:
		case <-ctx.Done():
			return page{}, ctx.Err()
		}
		s.mu.Lock()
		hold = nil
	}
	all := s.asOf(s.revision, selects, func(string) bool { return true })
	p := page{version: sharding.Version(strconv.Itoa(s.revision)), shard: shard}
	s.mu.Unlock()
	if hold != nil {
		select {
		case <-hold:
		case <-ctx.Done():
			return page{}, ctx.Err()
		}
	}
	half := (len(all) + 1) / 2
	p.objects = all[:half]
	if half < len(all) {
		var rest []string
		for _, obj := range all[half:] {
			rest = append(rest, obj.GetName())
		}
		p.token = string(p.version) + " " + strings.Join(rest, ",")
		return p, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.smudge(&p)
	return p, nil
}

// smudge takes the version from the last page of a list that is to have none. Under the lock.
func (s *script) smudge(p *page) {
	if s.illegible > 0 {
		s.illegible--
		p.version = ""
	}
}

// asOf returns the objects at a revision. Under the lock.
func (s scripted) asOf(revision int, selects func(*corev1.ConfigMap) bool, want func(name string) bool) []client.Object {
	state := make(map[string]*corev1.ConfigMap)
	for _, e := range s.tables[s.resource].log {
		obj := e.Object.(*corev1.ConfigMap)
		if at, _ := strconv.Atoi(obj.ResourceVersion); at > revision {
			break
		}
		if e.Type == watch.Deleted {
			delete(state, obj.Name)
		} else {
			state[obj.Name] = obj
		}
	}
	var found []client.Object
	for _, name := range slices.Sorted(maps.Keys(state)) {
		if selects(state[name]) && want(name) {
			found = append(found, state[name].DeepCopy())
		}
	}
	return found
}

func (s scripted) watch(ctx context.Context, q query, version sharding.Version) (watch.Interface, error) {
	at, err := strconv.Atoi(string(version))
	if err != nil {
		return nil, fmt.Errorf("watch from %q: %w", version, err)
	}
	s.mu.Lock()
	generation := s.closing
	s.watches[s.resource] = append(s.watches[s.resource], q)
	selects, _ := s.filter(q)
	s.mu.Unlock()
	out := &scriptWatch{events: make(chan watch.Event), done: make(chan struct{})}
	go func() {
		defer close(out.events)
		for {
			s.mu.Lock()
			var batch []watch.Event
			for _, e := range s.tables[s.resource].log {
				obj := e.Object.(*corev1.ConfigMap)
				if v, _ := strconv.Atoi(obj.ResourceVersion); v > at && selects(obj) {
					batch = append(batch, watch.Event{Type: e.Type, Object: obj.DeepCopy()})
				}
			}
			if s.revision > at && s.revision%3 == 0 {
				batch = append(batch, watch.Event{Type: watch.Bookmark,
					Object: &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{ResourceVersion: strconv.Itoa(s.revision)}}})
			}
			at = s.revision
			ended, gone, wake := s.closing > generation, s.gone > generation, s.wake
			s.mu.Unlock()
			if ended && gone {
				status := apierrors.NewResourceExpired("too old resource version").Status()
				batch = []watch.Event{{Type: watch.Error, Object: &status}}
			}
			for _, e := range batch {
				select {
				case out.events <- e:
				case <-out.done:
					return
				case <-ctx.Done():
					return
				}
			}
			if ended {
				return
			}
			select {
			case <-wake:
			case <-out.done:
				return
			case <-ctx.Done():
				return
			}
		}
	}()
	return out, nil
}

type scriptWatch struct {
	events chan watch.Event
	done   chan struct{}
	once   sync.Once
}

func (w *scriptWatch) ResultChan() <-chan watch.Event { return w.events }
func (w *scriptWatch) Stop()                          { w.once.Do(func() { close(w.done) }) }

func isBlocked(err error) bool { return errors.Is(err, ErrBlocked) }
func isFenced(err error) bool  { return errors.Is(err, ErrFenced) }
