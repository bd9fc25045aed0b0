package sharded

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
)

func TestMembersComeAndGo(t *testing.T) {
	w := newWorld(t)
	const n = 80
	w.users(n, 1)
	a := w.join("a", nil)
	w.shared(a)
	w.reconciled(n, 1)

	// Somebody writes all the time from here on.
	stop, writing := make(chan struct{}), sync.WaitGroup{}
	writing.Go(func() {
		pace := time.NewTicker(10 * time.Millisecond)
		defer pace.Stop()
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			case <-pace.C:
				w.user(fmt.Sprintf("p%d", i%n), 2)
			}
		}
	})
	b := w.join("b", nil)
	c := w.join("c", nil)
	w.shared(a, b, c)

	b.stop() // leaves
	w.shared(a, c)
	if got := w.holder("b"); got != "" {
		t.Errorf("the lease of a member that has left is held by %q", got)
	}
	d := w.join("d", func(o *Options) { o.LeaveTimeout = -1 })
	w.shared(a, c, d)
	d.stop() // dies
	if got := w.holder("d"); got == "" {
		t.Error("the lease of a member that has died is free")
	}
	w.runOut("d")
	w.shared(a, c)
	close(stop)
	writing.Wait()
	w.users(n, 3)
	w.reconciled(n, 3)
	w.check()
}

// A member that is cut off stops by its own clock, is replaced, and comes back as another session.
func TestAMemberThatIsCutOffIsReplaced(t *testing.T) {
	c := api(t)
	w := newWorldOn(t, apiServer, c, leasesFor(4*time.Second))
	const n = 40
	w.users(n, 1)
	a, b := w.join("a", nil), w.join("b", nil)
	w.shared(a, b)
	w.reconciled(n, 1)
	stop := w.writing(n, 2)
	before := b.group.member.session()
	b.gate.close()
	eventually(t, "b is fenced", func() error {
		if err := b.group.Ready(nil); err == nil {
			return errors.New("it is ready")
		}
		return nil
	})
	w.shared(a)
	b.gate.open()
	w.shared(a, b)
	if b.group.member.session() == before {
		t.Error("a member that was cut off came back under its old session")
	}
	stop()
	w.users(n, 3)
	w.reconciled(n, 3)
	w.check()
}

// Nobody can take over from the last member, so it does not wait for anybody.
func TestTheLastMemberLeavesAtOnce(t *testing.T) {
	w := newWorld(t)
	w.users(3, 1)
	a := w.join("a", func(o *Options) { o.LeaveTimeout = 2 * patience })
	w.shared(a)
	w.reconciled(3, 1)
	a.cancel()
	eventually(t, "it has left", func() error {
		select {
		case <-a.done:
			return nil
		default:
			return errors.New("it waits")
		}
	})
	if got := w.holder("a"); got != "" {
		t.Errorf("its lease is held by %q", got)
	}
	w.check()
}

func (w *world) holder(member string) string {
	w.t.Helper()
	k := leaseKeeper{client: w.c, key: client.ObjectKey{Namespace: w.ns, Name: groupName + "." + member}}
	lease, err := k.read(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	if lease.Spec.HolderIdentity == nil {
		return ""
	}
	return *lease.Spec.HolderIdentity
}

func TestListsAreConsistentAndWatchesGoOnFromThem(t *testing.T) {
	w := newWorld(t)
	w.users(5, 1)
	a := w.join("a", nil)
	w.shared(a)
	w.reconciled(5, 1)
	a.gate.mu.Lock()
	defer a.gate.mu.Unlock()
	lists, watches := 0, 0
	for _, q := range a.gate.queries {
		version := q.Get("resourceVersion")
		if q.Get("watch") == "" {
			lists++
			if version != "" || q.Get("resourceVersionMatch") != "" {
				t.Errorf("list at resourceVersion %q: it may miss what the previous owner wrote last", version)
			}
			continue
		}
		watches++
		if version == "" || version == "0" || q.Get("allowWatchBookmarks") != "true" {
			t.Errorf("watch from resourceVersion %q, bookmarks %q", version, q.Get("allowWatchBookmarks"))
		}
	}
	if lists < 2 || watches < 2 {
		t.Errorf("%d lists and %d watches, want one of each kind at least", lists, watches)
	}
}

func TestDeletedParentIsReconciledOnce(t *testing.T) {
	w := newWorld(t)
	w.users(10, 1)
	a, b := w.join("a", nil), w.join("b", nil)
	w.shared(a, b)
	w.reconciled(10, 1)
	if err := w.c.Delete(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "p9"}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "child deleted", func() error {
		err := w.c.Get(t.Context(), client.ObjectKey{Namespace: w.ns, Name: "p9"}, &corev1.Secret{})
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("get: %w", err)
		}
		return nil
	})
}

func TestChildThatNoCacheShows(t *testing.T) {
	w := newWorld(t)
	w.user("p0", 2)
	// It carries no label, as one that was made while the webhook was down.
	child := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "p0"},
		Data: map[string][]byte{wanted: []byte("1")}}
	if err := w.c.Create(t.Context(), child); err != nil {
		t.Fatal(err)
	}
	a := w.join("a", nil)
	w.shared(a)
	w.reconciled(1, 2)
	if err := w.c.Get(t.Context(), client.ObjectKeyFromObject(child), child); err != nil {
		t.Fatal(err)
	}
	if len(child.OwnerReferences) != 0 {
		t.Error("the child was made anew, want it to be found and brought up to date")
	}
}

func TestReadsOfWhatIsNotOwned(t *testing.T) {
	w := newWorld(t)
	w.users(20, 1)
	a := w.join("a", nil)
	b := w.join("b", func(o *Options) { o.UnownedReads = RefuseRead })
	w.shared(a, b)
	w.reconciled(20, 1)
	for i := range 20 {
		name := fmt.Sprintf("p%d", i)
		key := client.ObjectKey{Namespace: w.ns, Name: name}
		for _, p := range []*participant{a, b} {
			vn, _ := sharding.ParseVirtualNode(labelsFor(w.ns, name)[sharding.LabelVirtualNode], realV)
			owns := p.group.member.owned().Has(vn)
			err := p.mgr.GetClient().Get(t.Context(), key, &corev1.ConfigMap{})
			switch {
			case p == b && !owns:
				if !errors.Is(err, ErrNotOwned) {
					t.Errorf("%s reads %s, which it does not own: %v, want ErrNotOwned", p.name, name, err)
				}
			case err != nil:
				t.Errorf("%s reads %s: %v", p.name, name, err)
			}
		}
	}
	var list corev1.ConfigMapList
	if err := a.mgr.GetClient().List(t.Context(), &list, client.InNamespace(w.ns)); err != nil {
		t.Fatal(err)
	}
	var meta metav1.PartialObjectMetadataList
	meta.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("ConfigMapList"))
	if err := a.mgr.GetClient().List(t.Context(), &meta, client.InNamespace(w.ns)); err != nil {
		t.Fatal(err)
	}
	if len(list.Items) == 0 || len(list.Items) >= 20 || len(meta.Items) != len(list.Items) {
		t.Errorf("lists %d objects and the metadata of %d, want the part of 20 that it owns", len(list.Items), len(meta.Items))
	}
	// Kinds outside the group are the stock cache's.
	if err := a.mgr.GetClient().Get(t.Context(), client.ObjectKey{Name: w.ns}, &corev1.Namespace{}); err != nil {
		t.Error(err)
	}
}

func TestWritesOutsideAReconcile(t *testing.T) {
	w := newWorld(t)
	a := w.join("a", nil)
	w.shared(a)
	c := a.mgr.GetClient()
	unlabelled := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "unlabelled"}}
	if err := c.Create(t.Context(), unlabelled); !errors.Is(err, ErrNotOwned) {
		t.Errorf("create without a reconcile and without a label: %v, want ErrNotOwned", err)
	}
	if err := c.Create(Unguarded(t.Context()), unlabelled); err != nil {
		t.Errorf("create by an unguarded context: %v", err)
	}
	labelled := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "p0", Labels: labelsFor(w.ns, "p0")}}
	if err := c.Create(t.Context(), labelled); err != nil {
		t.Errorf("create in a Virtual Node that is owned: %v", err)
	}
	if err := c.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "x"}}); err != nil {
		t.Errorf("create of a kind outside the group: %v", err)
	}
	b := w.join("b", nil)
	w.shared(a, b)
	for _, p := range []*participant{a, b} {
		vn, _ := virtualNodeOf(labelled, realV)
		before := labelled.DeepCopy()
		labelled.Data = map[string]string{wanted: p.name}
		err := p.mgr.GetClient().Patch(t.Context(), labelled, client.MergeFrom(before))
		if owns := p.group.member.owned().Has(vn); owns != (err == nil) || (!owns && !errors.Is(err, ErrNotOwned)) {
			t.Errorf("%s, owner %t, patches: %v", p.name, owns, err)
		}
	}
}

// What a reconcile deletes by a selector is its own, as what it lists is the member's.
func TestAReconcileDeletesAllOfItsOwn(t *testing.T) {
	w := newWorld(t)
	w.build = func(*participant) error { return nil }
	a := w.join("a", nil)
	w.shared(a)
	secret := func(name string, vn sharding.VirtualNode, mine string) *corev1.Secret {
		o := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name,
			Labels: map[string]string{sharding.LabelVirtualNode: vn.LabelValue(), "mine": mine}}}
		if err := w.c.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		return o
	}
	secret("its-own", 1, "yes")
	secret("not-selected", 1, "no")
	foreign := secret("of-another-reconcile", 2, "yes")
	e := a.group.member
	e.mu.Lock()
	j, err := e.beginIn(e.kinds[realParents], 1)
	e.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	defer j.end(false)
	ctx := context.WithValue(t.Context(), jobKey{}, j)
	remain := func(what string, want ...string) {
		t.Helper()
		var list corev1.SecretList
		if err := w.c.List(t.Context(), &list, client.InNamespace(w.ns), client.HasLabels{"mine"}); err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, o := range list.Items {
			got = append(got, o.Name)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: %v remain, want %v", what, got, want)
		}
	}
	c, space, selector := a.mgr.GetClient(), client.InNamespace(w.ns), client.MatchingLabels{"mine": "yes"}
	for _, like := range []*corev1.Secret{{}, foreign} {
		if err := c.DeleteAllOf(ctx, like, space, selector); err != nil {
			t.Error(err)
		}
		remain("by a reconcile", "not-selected", "of-another-reconcile")
	}
	if err := c.DeleteAllOf(Unguarded(ctx), &corev1.Secret{}, space, selector); err != nil {
		t.Error(err)
	}
	remain("unguarded", "not-selected")
}

// Many may read one cached object without a copy, as unstructured content, too.
func TestReadsWithoutACopyLeaveTheCacheAlone(t *testing.T) {
	k := &kind{resource: "widgets", gvk: schema.GroupVersionKind{Group: "example.com", Version: "v1", Kind: "Widget"}}
	cached := &unstructured.Unstructured{Object: map[string]any{}}
	cached.SetGroupVersionKind(k.gvk)
	cached.SetName("w")
	var readers sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			for range 1000 {
				out := &unstructured.Unstructured{}
				if err := assign(k, cached, out); err != nil || out.GroupVersionKind() != k.gvk || out.GetName() != "w" {
					t.Errorf("%v, %v", out, err)
					return
				}
			}
		})
	}
	readers.Wait()
}

func TestOptionsAreChecked(t *testing.T) {
	t.Setenv("POD_NAME", "pod-0")
	err := New(Options{WatchGroup: "a.b", Namespace: "ns", Member: "other", Weight: -1, MaxLiveReads: -2,
		UnownedReads: "Perhaps", Resync: Resync{Period: 90 * time.Second}}).options.validate()
	for _, want := range []string{`WatchGroup: "a.b"`, `Member: "other" is not the name of the Pod, "pod-0"`, "Weight: -1",
		"MaxLiveReads: -2", `UnownedReads: "Perhaps"`, "Resync.period: 1m30s"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: does not say %q", err, want)
		}
	}
	// What the coordinator, or the API server, would not take is not offered to them.
	t.Setenv("POD_NAME", "")
	long := strings.Repeat("m", 63) + "." + strings.Repeat("m", 63) + "." + strings.Repeat("m", 62)
	err = New(Options{WatchGroup: "a", Namespace: "ns", Member: long, Weight: 1001}).options.validate()
	for _, want := range []string{fmt.Sprintf("Member: %q is longer than 189", long), "Weight: 1001"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: does not say %q", err, want)
		}
	}
	if err := New(Options{WatchGroup: "a", Namespace: "ns", Member: long[1:], Weight: 1000}).options.validate(); err != nil {
		t.Errorf("what is just allowed: %v", err)
	}
}

// A write whose sender is stopped must not land when another member is at work, however long admission takes: the API server
// is told when to give it up.
func TestWritesCarryTheirTimeout(t *testing.T) {
	w := newWorld(t)
	w.users(3, 1)
	a := w.join("a", nil)
	w.shared(a)
	w.reconciled(3, 1)
	a.gate.mu.Lock()
	defer a.gate.mu.Unlock()
	if len(a.gate.writes) == 0 {
		t.Fatal("no write of a controller went through")
	}
	for _, q := range a.gate.writes {
		if got := q.Get("timeout"); got != realPolicy.RequestTimeout.String() {
			t.Errorf("a write was sent with timeout %q, want %s", got, realPolicy.RequestTimeout)
		}
	}
}

// A half that cannot start ends the other, and the manager learns why.
func TestACacheThatCannotStartSaysWhy(t *testing.T) {
	w := newWorld(t)
	broken := errors.New("no such kind")
	for name, change := range map[string]func(*groupCache){
		"the slice's half": func(c *groupCache) { c.group.slices = brokenCache{c.group.slices, broken} },
		"the stock half":   func(c *groupCache) { c.Cache = brokenCache{c.Cache, broken} },
	} {
		t.Run(name, func(t *testing.T) {
			g := New(Options{WatchGroup: groupName, Namespace: w.ns, Member: "a", LeaveTimeout: -1})
			c, err := g.NewCache(rest.CopyConfig(apiServer), cache.Options{Scheme: testScheme()})
			if err != nil {
				t.Fatal(err)
			}
			change(c.(*groupCache))
			ended := make(chan error, 1)
			go func() { ended <- c.Start(t.Context()) }()
			select {
			case err := <-ended:
				if !errors.Is(err, broken) {
					t.Errorf("it ended with %v, want %v", err, broken)
				}
			case <-time.After(patience):
				t.Error("it goes on with one half")
			}
		})
	}
}

// A brokenCache cannot be used.
type brokenCache struct {
	cache.Cache
	err error
}

func (c brokenCache) GetInformer(context.Context, client.Object, ...cache.InformerGetOption) (cache.Informer, error) {
	return nil, c.err
}

func (c brokenCache) Start(context.Context) error { return c.err }

func TestMissingGroupIsNamed(t *testing.T) {
	api(t)
	g := New(Options{WatchGroup: "none", Namespace: "default", Member: "a"})
	_, err := g.NewCache(rest.CopyConfig(apiServer), cache.Options{Scheme: testScheme()})
	if err == nil || !strings.Contains(err.Error(), "read WatchGroup default/none") {
		t.Errorf("%v: does not name the group", err)
	}
}

// What only somebody else can mend is said aloud: a member without rights is silent otherwise, and never ready.
func TestAMissingRightIsLogged(t *testing.T) {
	forbidden := apierrors.NewForbidden(lbv1alpha1.GroupVersion.WithResource("virtualnodeslices").GroupResource(), "g.a",
		errors.New("cannot update resource"))
	for name, tc := range map[string]struct {
		err   error
		aloud bool
	}{
		"a missing right":         {forbidden, true},
		"no credentials":          {apierrors.NewUnauthorized("no token"), true},
		"an invalid object":       {apierrors.NewInvalid(lbv1alpha1.GroupVersion.WithKind("VirtualNodeSlice").GroupKind(), "g.a", nil), true},
		"what passes":             {apierrors.NewServiceUnavailable("starting"), false},
		"what somebody else does": {apierrors.NewConflict(lbv1alpha1.GroupVersion.WithResource("leases").GroupResource(), "g.a", nil), false},
		"no answer":               {errors.New("connection refused"), false},
	} {
		var lines []string
		e := &member{log: funcr.New(func(_, args string) { lines = append(lines, args) }, funcr.Options{})}
		e.retries(tc.err, "status not written", "resource", "parents")
		if aloud := len(lines) == 1 && strings.Contains(lines[0], `"resource"="parents"`); aloud != tc.aloud {
			t.Errorf("%s: said %q, want aloud %t", name, lines, tc.aloud)
		}
	}
}
