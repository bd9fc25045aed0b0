package sharded

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/internal/controlplane"
	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/history"
)

const shardingGate = "--feature-gates=ShardedListAndWatch="

// gated returns an API server of the test's own that filters by hash.
func gated(t *testing.T) (*controlplane.ControlPlane, *rest.Config, client.Client) {
	t.Helper()
	if testing.Short() {
		t.Skip("needs an API server")
	}
	cp, err := controlplane.Start(t.Context(), controlplane.Options{
		Dir:           t.TempDir(),
		CRDPaths:      []string{filepath.Join("..", "..", "manifests", "crd", "bases")},
		APIServerArgs: map[string][]string{"feature-gates": {"ShardedListAndWatch=true"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cp.Stop(); err != nil {
			t.Error(err)
		}
	})
	config := cp.Config()
	config.QPS = -1
	c, err := client.New(config, client.Options{Scheme: testScheme()})
	if err != nil {
		t.Fatal(err)
	}
	return cp, config, c
}

func byNamespace(s *lbv1alpha1.WatchGroupSpec) {
	s.Selector, s.ShardKey, s.OptIn = lbv1alpha1.SelectorShardRange, lbv1alpha1.ShardKeyNamespace, lbv1alpha1.OptInAll
}

func byUID(s *lbv1alpha1.WatchGroupSpec) {
	byNamespace(s)
	s.ShardKey, s.Resources = lbv1alpha1.ShardKeyUID, s.Resources[:1]
}

// spread gives a world namespaces for its parents that lie in many Virtual Nodes.
func (w *world) spread(n int) *world {
	w.t.Helper()
	w.spaces = nil
	for range n {
		ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "parents-"}}
		if err := w.c.Create(w.t.Context(), ns); err != nil {
			w.t.Fatal(err)
		}
		w.spaces = append(w.spaces, ns.Name)
	}
	return w
}

// A noter is a controller of parents alone: it notes on each which generation it has seen.
type noter struct {
	client.Client
	parents *parentReconciler
}

func (r *noter) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	var parent corev1.ConfigMap
	if err := r.Get(ctx, req.NamespacedName, &parent); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if parent.Annotations[observed] == parent.Data[wanted] {
		return reconcile.Result{}, nil
	}
	before := parent.DeepCopy()
	metav1.SetMetaDataAnnotation(&parent.ObjectMeta, observed, parent.Data[wanted])
	if err := r.Patch(ctx, &parent, client.MergeFrom(before)); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	r.parents.wrote(ctx, realParents, &parent, false)
	return reconcile.Result{}, nil
}

func buildNoter(p *participant) error {
	r := &parentReconciler{Client: p.mgr.GetClient(), world: p.world, member: p.name}
	return ControllerManagedBy(p.mgr).For(&corev1.ConfigMap{}).
		WithOptions(controller.Options{MaxConcurrentReconciles: 4}).
		Complete(&noter{Client: p.mgr.GetClient(), parents: r})
}

// noted waits until n parents are noted at the generation.
func (w *world) noted(n, generation int) {
	w.t.Helper()
	eventually(w.t, "every parent noted", func() error {
		var parents corev1.ConfigMapList
		if err := w.list(&parents); err != nil {
			return err
		}
		seen := 0
		for _, p := range parents.Items {
			if p.Annotations[observed] == strconv.Itoa(generation) {
				seen++
			}
		}
		if seen != n {
			return fmt.Errorf("%d of %d at %d", seen, n, generation)
		}
		return nil
	})
}

// writing lets somebody write all the time, until the function that is returned is called.
func (w *world) writing(n, generation int) (stop func()) {
	done, writer := make(chan struct{}), sync.WaitGroup{}
	writer.Go(func() {
		pace := time.NewTicker(10 * time.Millisecond)
		defer pace.Stop()
		for i := 0; ; i++ {
			select {
			case <-done:
				return
			case <-pace.C:
				w.tryUser(fmt.Sprintf("p%d", i%n), generation)
			}
		}
	})
	return func() {
		close(done)
		writer.Wait()
	}
}

// filters waits until all members agree whether the API server filters each resource, and say so in metric and slice.
func (w *world) filters(want bool, members ...*participant) {
	w.t.Helper()
	eventually(w.t, fmt.Sprintf("filtering is seen as %t", want), func() error {
		for _, p := range members {
			var slice lbv1alpha1.VirtualNodeSlice
			if err := w.c.Get(context.Background(), p.group.memberKey(), &slice); err != nil {
				return err
			}
			for _, k := range p.group.member.order {
				missing := k.filter.Load() == filterMissing
				gauge := testutil.ToFloat64(p.group.member.metrics.unfiltered(string(k.resource))) == 1
				told := slices.Contains(slice.Status.Unfiltered, string(k.resource))
				if k.filter.Load() == filterUnknown || missing == want || gauge == want || told == want {
					return fmt.Errorf("%s, %s: unfiltered %t, by the metric %t, by the slice %t", p.name, k.resource, missing,
						gauge, told)
				}
			}
		}
		return nil
	})
}

// asked checks that members have selected by range, consistently, and never by label.
func (w *world) asked(members ...*participant) {
	w.t.Helper()
	for _, p := range members {
		p.gate.mu.Lock()
		lists := 0
		for _, q := range p.gate.queries {
			if q.Get("labelSelector") != "" || !strings.HasPrefix(q.Get("shardSelector"), "shardRange(object.metadata.") {
				w.t.Errorf("%s selects by %v", p.name, q)
			}
			if q.Get("watch") == "" {
				lists++
				if q.Get("resourceVersion") != "" {
					w.t.Errorf("%s lists at resourceVersion %q", p.name, q.Get("resourceVersion"))
				}
			}
		}
		if lists == 0 {
			w.t.Errorf("%s has listed nothing", p.name)
		}
		p.gate.mu.Unlock()
	}
}

// The same as with labels, and by Namespace through restarts of the API server that turn its filter off and on.
func TestShardRangeMembersComeAndGo(t *testing.T) {
	cp, config, c := gated(t)
	for name, tc := range map[string]struct {
		change func(*lbv1alpha1.WatchGroupSpec)
		spaces int
		turned bool
		build  func(*participant) error
		done   func(w *world, n, generation int)
	}{
		"Namespace": {byNamespace, 40, true, buildParents, (*world).reconciled},
		"UID":       {byUID, 1, false, buildNoter, (*world).noted},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorldOn(t, config, c, func(s *lbv1alpha1.WatchGroupSpec) {
				leasesFor(4 * time.Second)(s)
				tc.change(s)
			}).spread(tc.spaces)
			w.build = tc.build
			const n = 80
			w.users(n, 1)
			a := w.join("a", nil)
			w.shared(a)
			tc.done(w, n, 1)
			w.filters(true, a)

			stop := w.writing(n, 2)
			b, crashing := w.join("b", nil), w.join("c", func(o *Options) { o.LeaveTimeout = -1 })
			w.shared(a, b, crashing)
			w.asked(a, b, crashing)
			crashing.stop()
			w.shared(a, b)

			turn := func(on bool) {
				if tc.turned {
					if err := cp.RestartAPIServer(t.Context(), fmt.Sprint(shardingGate, on)); err != nil {
						t.Fatal(err)
					}
				}
			}
			turn(false)
			w.shared(a, b)
			w.filters(!tc.turned, a, b)
			d := w.join("d", nil)
			w.shared(a, b, d)
			b.stop() // leaves
			w.shared(a, d)
			w.filters(!tc.turned, a, d)
			turn(true)
			w.shared(a, d)
			w.filters(true, a, d)
			stop()
			w.users(n, 3)
			tc.done(w, n, 3)
			w.shared(a, d)
			w.check()
		})
	}
}

// A server that has never heard of shard selectors sends everything; members keep what is theirs, and say so.
func TestShardRangeOnAServerThatDoesNotFilter(t *testing.T) {
	c := api(t)
	w := newWorldOn(t, apiServer, c, byNamespace).spread(20)
	const n = 40
	w.users(n, 1)
	child := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "of-somebody-else"}}
	if err := c.Create(t.Context(), child); err != nil {
		t.Fatal(err)
	}
	a := w.join("a", nil)
	w.shared(a)
	w.filters(false, a) // one member selects everything: only the probe can tell
	b := w.join("b", nil)
	w.shared(a, b)
	w.filters(false, a, b)
	w.users(n, 2)
	w.reconciled(n, 2)
	w.shared(a, b)
	w.check()
}

func TestWhetherTheServerFilters(t *testing.T) {
	for name, tc := range map[string]struct {
		filters, echoes bool
		objects         int // in a Virtual Node that is not asked for
		want            int32
	}{
		"it says so":                  {true, true, 1, filterSeen},
		"it does not say so":          {true, false, 1, filterSeen},
		"it sends what was not asked": {false, false, 1, filterMissing},
		"there is nothing to be seen": {false, false, 0, filterMissing},
		"and it filters nevertheless": {true, false, 0, filterSeen},
	} {
		t.Run(name, func(t *testing.T) {
			r := newHashRig(t, testV, tc.filters)
			defer r.m.stop()
			r.script.echoes = tc.echoes
			for _, res := range []sharding.Resource{parents, children} {
				r.script.write(res, "p1", 1, nil)
				for i := range tc.objects {
					r.script.write(res, fmt.Sprintf("x%d", i), 7, nil)
				}
			}
			r.grant(sharding.SetOf(1), nil)
			r.settled()
			seen := func(want int32) {
				t.Helper()
				eventually(t, "verdict", func() error {
					for _, k := range r.m.order {
						if got := k.filter.Load(); got != want {
							return fmt.Errorf("%s: %d, want %d", k.resource, got, want)
						}
					}
					r.m.mu.Lock()
					defer r.m.mu.Unlock()
					if got := len(r.m.status().Unfiltered); (got == 2) != (want == filterMissing) {
						return fmt.Errorf("the slice names %d resources", got)
					}
					return nil
				})
			}
			seen(tc.want)
			// Another server answers from here on, of the other sort.
			r.script.become(!tc.filters)
			seen(filterSeen + filterMissing - tc.want)
		})
	}
}

// Whatever the server sends, handlers are told of what is the member's, and nothing else is cached.
func TestUnfilteredAnswersAreFilteredHere(t *testing.T) {
	r := newHashRig(t, testV, false)
	defer r.m.stop()
	r.patient()
	r.script.write(parents, "ours", 1, nil)
	r.script.write(parents, "listed", 7, nil)
	r.grant(sharding.SetOf(1), nil)
	r.settled()
	r.script.write(parents, "watched", 7, nil)
	r.script.write(parents, "ours", 1, nil)
	r.script.remove(parents, "listed")
	r.script.write(parents, "ours too", 1, nil)
	eventually(t, "the last event", func() error { return r.complete(parents) })
	for _, event := range r.told[parents].all() {
		if !strings.Contains(event, "ours") {
			t.Errorf("told of %q", event)
		}
	}
	r.check()
}

// A verdict that was under way while a later request told otherwise is late.
func TestLateVerdictsCountForNothing(t *testing.T) {
	r := newHashRig(t, testV, true)
	defer r.m.stop()
	k := r.m.kinds[parents]
	r.m.sawFilter(k, filterMissing, 7)
	r.m.sawFilter(k, filterSeen, 6)
	if got := k.filter.Load(); got != filterMissing {
		t.Errorf("an earlier request has had the last word: %d", got)
	}
	r.m.sawFilter(k, filterSeen, 8)
	if got := k.filter.Load(); got != filterSeen {
		t.Errorf("a later request is not heard: %d", got)
	}
}

// What a list says to have selected is compared with what was asked for: otherwise objects could be missing unnoticed.
func TestListThatSelectedSomethingElseIsRefused(t *testing.T) {
	r := newHashRig(t, testV, true)
	defer r.m.stop()
	s := newStream(r.m, r.m.kinds[parents])
	q, err := r.m.mapping.query(sharding.SetOf(1))
	if err != nil {
		t.Fatal(err)
	}
	other, _ := r.script.hashes.Selector(sharding.SetOf(2))
	if err := s.judgeList(1, q, page{shard: other}); err == nil || !strings.Contains(err.Error(), other) {
		t.Errorf("%v: does not name what was selected", err)
	}
}

// An object that has been deleted and made anew is another one, and by UID another member's.
func TestNamesakesAreKeptApart(t *testing.T) {
	r := newHashRig(t, testV, true)
	defer r.m.stop()
	r.script.write(parents, "p", 1, nil)
	r.grant(sharding.SetOf(1), nil)
	r.settled()
	k, key := r.m.kinds[parents], client.ObjectKey{Namespace: "default", Name: "p"}
	j, err := r.m.begin(k, key)
	if err != nil {
		t.Fatal(err)
	}
	r.script.remove(parents, "p")
	r.settled()
	rd := &reader{member: r.m, live: namesake{uidIn(r.script.hashes, 2)}, slots: make(chan struct{}, 1)}
	inner := reconcile.Func(func(ctx context.Context, _ reconcile.Request) (reconcile.Result, error) {
		return reconcile.Result{}, rd.get(ctx, k, key, &corev1.ConfigMap{})
	})
	if err := rd.get(context.WithValue(t.Context(), jobKey{}, j), k, key, &corev1.ConfigMap{}); !errors.Is(err, ErrNotOwned) {
		t.Errorf("a reconcile reads the namesake of its object: %v, want ErrNotOwned", err)
	}
	j.end(false)
	if _, err := r.m.begin(k, key); !errors.Is(err, ErrNotOwned) {
		t.Errorf("the namesake is reconciled here: %v, want ErrNotOwned", err)
	}

	// One that comes while a reconcile is at work, and is this member's, waits for a reconcile of its own.
	r.script.write(parents, "p", 1, nil)
	r.settled()
	g := &guardedReconciler{kind: k, inner: reconcile.Func(func(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
		r.script.remove(parents, "p")
		r.settled()
		return inner(ctx, req)
	})}
	if res, err := g.Reconcile(t.Context(), reconcile.Request{NamespacedName: key}); err != nil || !res.IsZero() {
		t.Errorf("the request that met the namesake: %+v, %v, want it to be dropped", res, err)
	}
	r.grant(sharding.SetOf(2), nil)
	r.script.write(parents, "p", 1, nil)
	r.settled()
	j, err = r.m.begin(k, key)
	if err != nil {
		t.Fatal(err)
	}
	r.script.remove(parents, "p")
	r.script.write(parents, "p", 2, nil)
	r.settled()
	if err := rd.get(context.WithValue(t.Context(), jobKey{}, j), k, key, &corev1.ConfigMap{}); !errors.Is(err, ErrNotOwned) {
		t.Errorf("a reconcile reads the cached namesake of its object: %v, want ErrNotOwned", err)
	}
	j.end(false)
	if j, err = r.m.begin(k, key); err != nil || j.ticket.VN != 2 {
		t.Errorf("the namesake is not reconciled where it is: %v, %v", j, err)
	}
}

// namesake finds every object, with a UID of its own choice.
type namesake struct{ uid types.UID }

func (a namesake) Get(_ context.Context, key client.ObjectKey, obj client.Object, _ ...client.GetOption) error {
	obj.SetNamespace(key.Namespace)
	obj.SetName(key.Name)
	obj.SetResourceVersion("1000")
	obj.SetUID(a.uid)
	return nil
}

func (a namesake) List(context.Context, client.ObjectList, ...client.ListOption) error { return nil }

// A write of an object that is no more does not reach the one that has its name.
func TestWritesDoNotReachANamesake(t *testing.T) {
	c := api(t)
	w := newWorldOn(t, apiServer, c, byUID)
	w.build = buildNoter
	a := w.join("a", nil)
	w.shared(a)
	make1 := func() *corev1.ConfigMap {
		o := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "p"}}
		if err := c.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		return o
	}
	first := make1()
	if err := c.Delete(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	second := make1()
	changed := first.DeepCopy()
	changed.Data = map[string]string{"by": "the old owner"}
	raw := func(t types.PatchType, text string) client.Patch { return client.RawPatch(t, []byte(text)) }
	member := a.mgr.GetClient()
	for name, write := range map[string]func(*corev1.ConfigMap) error{
		"update":      func(o *corev1.ConfigMap) error { o.ResourceVersion = ""; return member.Update(t.Context(), o) },
		"merge patch": func(o *corev1.ConfigMap) error { return member.Patch(t.Context(), o, client.MergeFrom(first)) },
		"other merge": func(o *corev1.ConfigMap) error {
			return member.Patch(t.Context(), o, raw(types.MergePatchType, `{"metadata":null}`))
		},
		"strategic": func(o *corev1.ConfigMap) error { return member.Patch(t.Context(), o, client.StrategicMergeFrom(first)) },
		"JSON patch": func(o *corev1.ConfigMap) error {
			return member.Patch(t.Context(), o, raw(types.JSONPatchType, `[{"op":"add","path":"/data","value":{"a":"b"}}]`))
		},
		"delete":       func(o *corev1.ConfigMap) error { return member.Delete(t.Context(), o) },
		"delete as of": func(o *corev1.ConfigMap) error { return member.Delete(t.Context(), o, client.Preconditions{}) },
	} {
		err := write(changed.DeepCopy())
		if !apierrors.IsConflict(err) && !apierrors.IsInvalid(err) {
			t.Errorf("%s of the first object, where the second is: %v, want it refused", name, err)
		}
	}
	var now corev1.ConfigMap
	if err := c.Get(t.Context(), client.ObjectKeyFromObject(second), &now); err != nil {
		t.Fatal(err)
	}
	if now.UID != second.UID || len(now.Data) != 0 {
		t.Errorf("the second object has been changed: %v", now.Data)
	}
	// The second itself takes them.
	patched := second.DeepCopy()
	patched.Data = map[string]string{"by": "its owner"}
	if err := member.Patch(t.Context(), patched, client.MergeFrom(second)); err != nil {
		t.Error(err)
	}
	if err := member.Delete(t.Context(), second); err != nil {
		t.Error(err)
	}
}

// Where the key tells the Virtual Node, so does a write without a reconcile, and a reconcile of what is not there.
func TestNamespacesTellTheirVirtualNode(t *testing.T) {
	c := api(t)
	w := newWorldOn(t, apiServer, c, byNamespace).spread(12)
	a, b := w.join("a", nil), w.join("b", nil)
	w.shared(a, b)
	for _, space := range w.spaces {
		vn, ok := w.by.at(client.ObjectKey{Namespace: space, Name: "x"})
		if !ok {
			t.Fatal("a namespace does not tell its Virtual Node")
		}
		for _, p := range []*participant{a, b} {
			owns := p.group.member.owned().Has(vn)
			for verb, do := range map[string]func() error{
				"create": func() error {
					return p.mgr.GetClient().Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: space, Name: "x"}})
				},
				"delete all of": func() error {
					return p.mgr.GetClient().DeleteAllOf(t.Context(), &corev1.Secret{}, client.InNamespace(space))
				},
				"reconcile": func() error {
					j, err := p.group.member.begin(p.group.member.kinds[realParents], client.ObjectKey{Namespace: space, Name: "gone"})
					if err == nil {
						j.end(true)
					}
					return err
				},
			} {
				if err := do(); owns != (err == nil) || (!owns && !errors.Is(err, ErrNotOwned)) {
					t.Errorf("%s, owner %t, %s: %v", p.name, owns, verb, err)
				}
			}
		}
	}
}

func TestWrongCombinationsAreRefused(t *testing.T) {
	c := api(t)
	open := func(change func(*lbv1alpha1.WatchGroupSpec)) (*world, error) {
		w := newWorldOn(t, apiServer, c, change)
		g := New(Options{WatchGroup: groupName, Namespace: w.ns, Member: "a"})
		_, err := g.NewCache(rest.CopyConfig(apiServer), cache.Options{Scheme: testScheme()})
		return w, err
	}
	_, err := open(func(s *lbv1alpha1.WatchGroupSpec) {
		byNamespace(s)
		s.Resources[1].Resource = "nodes"
	})
	if want := `spec.resources[1]: "nodes" is cluster-scoped`; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v: does not say %q", err, want)
	}
	w, err := open(byUID)
	if err != nil {
		t.Fatal(err)
	}
	w.build = func(p *participant) error {
		err := buildParents(p)
		for _, want := range []string{"Owns(*v1.Secret)", `spec.shardKey "UID"`, w.ns + "/" + groupName} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%v: does not say %q", err, want)
			}
		}
		return buildNoter(p)
	}
	w.shared(w.join("a", nil))
}

// Handoffs of ranges leave what stays alone, as those of labels do: no list, no event.
func TestRetainedRangesAreNeitherListedNorToldAgain(t *testing.T) {
	r := newHashRig(t, testV, false)
	defer r.m.stop()
	r.patient()
	fill(r, 40)
	kept, moved := sharding.Span(0, 6), sharding.Span(6, 6)
	r.grant(kept, nil)
	r.settled()
	r.prefetch(moved)
	r.settled()
	r.quietly(func() {
		r.withdraw(moved)
		r.settled()
	})
	for _, rec := range r.tape.all() {
		if rec.Kind == history.Listed && rec.VNs.Intersects(kept) && rec.VNs.Intersects(moved) {
			t.Errorf("%s was listed with what is kept", moved)
		}
	}
}
