package sharded

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/drover-sh/drover/sharding"
)

var (
	configMaps = schema.GroupResource{Resource: "configmaps"}
	secrets    = schema.GroupResource{Resource: "secrets"}
)

// A gatedCache is as far as the API server, once its gate is open.
type gatedCache struct {
	c    client.Client
	gate chan struct{}
}

func (g *gatedCache) Reach(ctx context.Context) (string, error) {
	select {
	case <-ctx.Done():
		return "", ctx.Err()
	case <-g.gate:
	}
	var list corev1.ConfigMapList
	err := g.c.List(ctx, &list, client.Limit(1))
	return list.ResourceVersion, err
}

func (g *gatedCache) Version() string { return "" }

func open() chan struct{} {
	gate := make(chan struct{})
	close(gate)
	return gate
}

// join makes a member whose caches are behind a gate each.
func (w *world) membership(name string, configMapGate, secretGate chan struct{}) *Membership {
	w.t.Helper()
	m, err := NewMembership(apiServer, Options{WatchGroup: groupName, Namespace: w.ns, Member: name}, map[schema.GroupResource]Resource{
		configMaps: {Cache: &gatedCache{w.c, configMapGate}, Reads: []schema.GroupResource{secrets}},
		secrets:    {Cache: &gatedCache{w.c, secretGate}},
	})
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- m.Run(ctx) }()
	w.t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Error(err)
		}
	})
	return m
}

func TestAMembershipServesWhatItsCachesShow(t *testing.T) {
	w := newWorld(t)
	serves := func(m *Membership, want int) func() error {
		return func() error {
			if got := m.Serving().VNs.Len(); got != want {
				return fmt.Errorf("%s serves %d", m.Member(), got)
			}
			return nil
		}
	}
	a := w.membership("a", open(), open())
	eventually(t, "the only member serves all", serves(a, realV))
	first := a.Serving()
	if len(first.Gains) != 1 || first.Gains[0].No != first.Last || !first.Gains[0].VNs.Equal(first.VNs) {
		t.Errorf("gains %v of %v", first.Gains, first.VNs)
	}
	var works []*Work
	for vn := range sharding.VirtualNode(realV) {
		work, err := a.Begin(configMaps, vn)
		if err != nil {
			t.Fatal(err)
		}
		if work.Gain() != first.Last || work.VirtualNode() != vn || work.Session() != a.Session() {
			t.Fatalf("work in %d: gain %d of session %s", work.VirtualNode(), work.Gain(), work.Session())
		}
		works = append(works, work)
	}

	// Nothing is taken from a before b's caches are there.
	gate := make(chan struct{})
	b := w.membership("b", gate, open())
	eventually(t, "b is asked to prefetch", func() error {
		if s := a.Peers()["b"]; len(s.Incoming) == 0 {
			return fmt.Errorf("its slice is %+v", s)
		}
		return nil
	})
	if got := a.Serving().VNs.Len(); got != realV {
		t.Errorf("a serves %d while b has nothing", got)
	}
	close(gate)
	eventually(t, "a is asked to drain", func() error {
		if a.Draining().Empty() {
			return errors.New("not yet")
		}
		return nil
	})
	moving := a.Draining()

	// Nothing is given to b while a is at work.
	work := works[moving[0].First]
	var written corev1.ConfigMap
	if err := work.Send(t.Context(), func(ctx context.Context) error {
		written.Namespace, written.GenerateName = w.ns, "written-"
		return w.c.Create(ctx, &written)
	}); err != nil {
		t.Fatalf("a write in a Virtual Node that drains: %v", err)
	}
	if _, err := a.Begin(configMaps, moving[0].First); !errors.Is(err, ErrNotOwned) {
		t.Errorf("work is begun in a Virtual Node that drains: %v", err)
	}
	for _, other := range works {
		if other != work {
			other.End()
		}
	}
	eventually(t, "b serves the rest", func() error {
		if moving = a.Draining(); moving.Len() != 1 {
			return fmt.Errorf("a drains %v", moving)
		}
		return serves(b, realV/2-1)()
	})
	if b.Serving().VNs.Has(work.VirtualNode()) {
		t.Errorf("b serves %d, in which a is at work", work.VirtualNode())
	}
	work.Wrote(configMaps, written.ResourceVersion)
	work.End()
	eventually(t, "b serves its half", serves(b, realV/2))
	eventually(t, "a serves its half", serves(a, realV/2))
	if both := a.Serving().VNs.Intersect(b.Serving().VNs); !both.Empty() {
		t.Errorf("both serve %v", both)
	}
}

// What the last owner wrote has to be in the cache first.
func TestAMembershipWaitsForWhatTheLastOwnerWrote(t *testing.T) {
	known := sharding.Versions{"configmaps": "100", "secrets": "1"}
	m := newUnstartedMembership(t)
	e := m.member
	e.start(m.group.dependencies(), "s1")
	e.mu.Lock()
	e.m.Acquire(e.clock())
	e.m.Renewed("s1", e.clock(), e.clock())
	e.mu.Unlock()
	e.observeSlice(sharding.Slice{Member: "m", Session: "s1", Epoch: 1, Version: "1",
		Incoming: []sharding.Order{{Epoch: 1, VNs: sharding.Span(0, 10)}}})
	eventually(t, "it is warm", func() error {
		if status, _, _ := e.news(); len(status.Warm) == 0 {
			return errors.New("not yet")
		}
		return nil
	})
	e.observeSlice(sharding.Slice{Member: "m", Session: "s1", Epoch: 2, Version: "2", Owned: sharding.Span(0, 10),
		Grants: []sharding.Grant{{Epoch: 2, VNs: sharding.Span(0, 10), Known: &known}}})
	if _, err := m.Begin(configMaps, 3); !errors.Is(err, ErrBlocked) || !m.Serving().VNs.Empty() {
		t.Errorf("work is begun before the cache has come so far: %v", err)
	}
	e.kinds["configmaps"].external.(*staleCache).version.Store("99")
	m.Progressed()
	if !m.Serving().VNs.Empty() {
		t.Error("99 counts as 100")
	}
	e.kinds["configmaps"].external.(*staleCache).version.Store("101")
	m.Progressed()
	work, err := m.Begin(configMaps, 3)
	if err != nil || work.Gain() != 1 {
		t.Fatalf("work: %v", err)
	}
	// Nothing is sent once the session is over.
	e.newSession("s2")
	if err := work.Send(t.Context(), func(context.Context) error { t.Error("sent"); return nil }); !errors.Is(err, ErrFenced) || !Refused(err) {
		t.Errorf("a write of a session that is over: %v", err)
	}
	if !m.Serving().VNs.Empty() {
		t.Error("a session that has just begun serves")
	}
}

// A staleCache has seen the version 50 when it is asked first, and then what it is told.
type staleCache struct {
	asked   chan struct{}
	version atomic.Value
}

func (s *staleCache) Version() string {
	v, _ := s.version.Load().(string)
	return v
}

func (s *staleCache) Reach(ctx context.Context) (string, error) {
	select {
	case s.asked <- struct{}{}:
		return "50", nil
	default:
	}
	<-ctx.Done()
	return "", ctx.Err()
}

func newUnstartedMembership(t *testing.T) *Membership {
	t.Helper()
	w := newWorld(t)
	m, err := NewMembership(apiServer, Options{WatchGroup: groupName, Namespace: w.ns, Member: "m"}, map[schema.GroupResource]Resource{
		configMaps: {Cache: &staleCache{asked: make(chan struct{}, 1)}, Reads: []schema.GroupResource{secrets}},
		secrets:    {Cache: &staleCache{asked: make(chan struct{}, 1)}},
	})
	if err != nil {
		t.Fatal(err)
	}
	m.member.patience = patience // no second look
	t.Cleanup(m.member.stop)
	return m
}

func TestAMembershipNamesWhatItsGroupLacks(t *testing.T) {
	w := newWorld(t)
	nodes := schema.GroupResource{Resource: "nodes"}
	for _, test := range []struct {
		resources map[schema.GroupResource]Resource
		want      []string
	}{
		{map[schema.GroupResource]Resource{configMaps: {}}, []string{"spec.resources[1]", `"secrets"`, `["configmaps"]`}},
		{map[schema.GroupResource]Resource{configMaps: {}, secrets: {}, nodes: {}}, []string{"spec.resources", `["nodes"]`, "missing"}},
	} {
		_, err := NewMembership(apiServer, Options{WatchGroup: groupName, Namespace: w.ns, Member: "m"}, test.resources)
		for _, part := range append(test.want, w.ns+"/"+groupName) {
			if err == nil || !strings.Contains(err.Error(), part) {
				t.Errorf("error %v does not mention %s", err, part)
			}
		}
	}
	if _, err := NewMembership(apiServer, Options{WatchGroup: "absent", Namespace: w.ns, Member: "m"}, nil); err == nil ||
		!strings.Contains(err.Error(), w.ns+"/absent") {
		t.Errorf("a group that does not exist: %v", err)
	}
}
