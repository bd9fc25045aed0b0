package sharded

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/history"
)

const (
	parents  = sharding.Resource("parents")
	children = sharding.Resource("children")
	testV    = 12
)

var testDependencies = sharding.Dependencies{parents: {children}, children: nil}

func TestCacheHoldsWhatIsOwnedOrIncoming(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var r *rig
		switch selector := rapid.SampledFrom([]string{"labels", "buckets", "ranges", "ignored ranges"}).Draw(t, "selector"); selector {
		case "labels":
			r = newRig(t, testV, 1)
		case "buckets":
			r = newRig(t, testV, 3)
		default:
			r = newHashRig(t, testV, selector == "ranges")
		}
		defer r.m.stop()
		names := []string{"p0", "p1", "p2", "p3", "p4", "p5", "p6", "p7"}
		vnOf := func(name string) sharding.VirtualNode { return sharding.VirtualNodeOf(name, testV) }
		some := func(from sharding.Set) sharding.Set {
			var picked []sharding.VirtualNode
			for vn := range from.All() {
				if rapid.Bool().Draw(t, "pick") {
					picked = append(picked, vn)
				}
			}
			return sharding.SetOf(picked...)
		}
		all := sharding.Span(0, testV)
		draining := func() sharding.Set {
			var vns sharding.Set
			for _, o := range r.slice.Draining {
				vns = vns.Union(o.VNs)
			}
			return vns
		}
		release := func() {}
		steps := rapid.IntRange(5, 40).Draw(t, "steps")
		for range steps {
			res := rapid.SampledFrom([]sharding.Resource{parents, children}).Draw(t, "resource")
			name := rapid.SampledFrom(names).Draw(t, "name")
			switch rapid.IntRange(0, 15).Draw(t, "step") {
			case 0, 1, 2, 3:
				r.script.write(res, name, vnOf(name), nil)
			case 4:
				r.script.remove(res, name)
			case 5, 6:
				if vns := some(all.Minus(r.slice.Owned).Minus(r.incoming()).Minus(draining())); !vns.Empty() {
					r.prefetch(vns)
				}
			case 7:
				if vns := some(r.incoming()); !vns.Empty() {
					r.withdraw(vns)
				}
			case 8, 9:
				if vns := some(r.incoming()); !vns.Empty() {
					r.grant(vns, r.known(vns))
				}
			case 10:
				if vns := some(all.Minus(r.slice.Owned).Minus(draining())); !vns.Empty() {
					r.grant(vns, nil)
				}
			case 11:
				if vns := some(r.slice.Owned); !vns.Empty() {
					r.drain(vns)
				}
			case 12:
				release()
				r.take()
			case 13:
				if rapid.Bool().Draw(t, "restart with the gate turned") {
					r.script.become(rapid.Bool().Draw(t, "gate"))
				} else {
					r.script.endWatches(rapid.Bool().Draw(t, "gone"))
				}
			case 14:
				switch rapid.IntRange(0, 2).Draw(t, "fault") {
				case 0:
					r.script.failLists(1)
				case 1:
					r.script.expireLists(1)
				default:
					release()
					release = r.script.holdLists()
				}
			case 15:
				if rapid.IntRange(0, 3).Draw(t, "restart") == 0 {
					r.restart()
				}
			}
		}
		release()
		r.take()
		r.settled()
		r.withdraw(r.incoming())
		r.settled()
		r.check()
	})
}

// quietly runs f and fails if anything is listed, or any handler called, meanwhile.
func (r *rig) quietly(f func()) {
	r.t.Helper()
	lists, events := r.tape.count(history.Listed), 0
	for _, h := range r.told {
		events += len(h.all())
	}
	f()
	now := 0
	for _, h := range r.told {
		now += len(h.all())
	}
	if n := r.tape.count(history.Listed); n != lists || now != events {
		r.t.Fatalf("%d lists and %d events, want none", n-lists, now-events)
	}
}

func fill(r *rig, n int) {
	for i := range n {
		name := fmt.Sprintf("p%d", i)
		r.script.write(parents, name, sharding.VirtualNodeOf(name, testV), nil)
		r.script.write(children, name, sharding.VirtualNodeOf(name, testV), nil)
	}
}

func TestRetainedVirtualNodesAreNeitherListedNorToldAgain(t *testing.T) {
	r := newRig(t, testV, 1)
	defer r.m.stop()
	r.patient()
	fill(r, 40)
	kept, moved := sharding.Span(0, 6), sharding.Span(6, 6)
	r.grant(kept, nil)
	r.settled()
	before := len(r.told[parents].all())

	r.prefetch(moved)
	r.settled()
	if n := len(r.told[parents].all()); n != before {
		t.Fatalf("%d events while Virtual Nodes were incoming, want none", n-before)
	}
	r.quietly(func() {
		r.m.mu.Lock()
		defer r.m.mu.Unlock()
		if got := r.m.m.Cached(parents); !got.Contains(moved) {
			t.Fatalf("cached %s", got)
		}
	})
	r.grant(moved, r.known(moved))
	r.settled()
	want := len(r.script.content(parents, moved))
	if n := len(r.told[parents].all()) - before; n != want {
		t.Fatalf("%d events for the gain, want one for each of its %d objects", n, want)
	}
	for _, rec := range r.tape.all() {
		if rec.Kind == history.Listed && rec.VNs.Intersects(kept) && rec.VNs.Intersects(moved) {
			t.Fatalf("list %s mixes what is kept with what is gained", rec.VNs)
		}
	}
	r.check()
}

func TestGainIsToldAtLowPriority(t *testing.T) {
	r := newRig(t, testV, 1)
	defer r.m.stop()
	fill(r, 5)
	r.grant(sharding.Span(0, testV), nil)
	r.settled()
	for _, e := range r.told[parents].all() {
		if e[:3] != "add" || e[len(e)-len("initial=true"):] != "initial=true" {
			t.Fatalf("%q, want an add that is part of an initial list", e)
		}
	}
	vn := sharding.VirtualNodeOf("fresh", testV)
	r.script.write(parents, "fresh", vn, nil)
	r.settled()
	if e := r.told[parents].all(); e[len(e)-1] != "add fresh initial=false" {
		t.Fatalf("last event %q, want a fresh add", e[len(e)-1])
	}
}

func TestLosingVirtualNodesTellsNobodyOfDeletions(t *testing.T) {
	r := newRig(t, testV, 1)
	defer r.m.stop()
	fill(r, 40)
	r.grant(sharding.Span(0, testV), nil)
	r.settled()
	r.quietly(func() {
		r.drain(sharding.Span(0, 6))
		r.take()
		r.settled()
		r.restart()
		if n := len(r.m.kinds[parents].store.indexer.List()); n != 0 {
			t.Fatalf("%d objects after the session has ended, want none", n)
		}
	})
}

func TestDeletionsAreToldOnce(t *testing.T) {
	for _, tc := range []struct {
		name string
		lose bool // the watch, so that a list has to find out
	}{{"by the watch", false}, {"by a list", true}} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t, testV, 1)
			defer r.m.stop()
			fill(r, 10)
			r.grant(sharding.Span(0, testV), nil)
			r.settled()
			if tc.lose {
				r.script.mu.Lock()
				r.script.late = true
				lists := r.script.lists[parents]
				r.script.mu.Unlock()
				release := r.script.holdLists()
				defer release()
				r.script.endWatches(true)
				eventually(t, "list", func() error {
					r.script.mu.Lock()
					defer r.script.mu.Unlock()
					if n := r.script.lists[parents]; n <= lists {
						return fmt.Errorf("%d lists", n)
					}
					return nil
				})
				r.script.remove(parents, "p3") // while nobody watches
				release()
			} else {
				r.script.remove(parents, "p3")
			}
			eventually(t, "deletion", func() error {
				n := 0
				for _, e := range r.told[parents].all() {
					if e == "delete p3" {
						n++
					}
				}
				if n != 1 {
					return fmt.Errorf("told %d times", n)
				}
				return nil
			})
			r.settled()
			if _, vn, ok := r.m.locate(r.m.kinds[parents], client.ObjectKey{Namespace: "default", Name: "p3"}); !ok ||
				vn != sharding.VirtualNodeOf("p3", testV) {
				t.Fatalf("located at %d, %t: its deletion could not be reconciled", vn, ok)
			}
			r.check()
		})
	}
}

func TestStreamsAreJoined(t *testing.T) {
	const v = 64
	r := newRig(t, v, 1)
	defer r.m.stop()
	r.patient()
	for vn := range sharding.Span(0, v).All() {
		r.script.write(parents, fmt.Sprintf("p%d", vn), vn, nil)
	}
	for vn := range sharding.Span(0, 40).All() {
		one := sharding.SetOf(vn)
		r.prefetch(one)
		r.warm(one)
		r.grant(one, r.known(one))
		r.settled()
		r.script.write(parents, fmt.Sprintf("p%d", vn), vn, nil)
	}
	r.settled()
	r.m.mu.RLock()
	n := len(r.m.kinds[parents].streams)
	r.m.mu.RUnlock()
	if n > maxStreams+1 {
		t.Fatalf("%d streams after 40 handoffs, want at most %d", n, maxStreams+1)
	}
	for _, res := range []sharding.Resource{parents, children} {
		if got := r.script.lists[res]; got != 40 {
			t.Fatalf("%d lists of %s, want one for each handoff", got, res)
		}
	}
	r.check()
}

// A watch was asked for what the member had then. When it has less, another one takes its place, where it was: what another
// member has is its traffic, and nothing is listed again.
func TestWatchesAreNarrowed(t *testing.T) {
	r := newRig(t, testV, 1)
	defer r.m.stop()
	r.patient()
	fill(r, 20)
	all, kept := sharding.Span(0, testV), sharding.Span(0, testV/2)
	r.prefetch(all)
	r.warm(all)
	r.grant(all, r.known(all))
	r.settled()
	lists := r.tape.count(history.Listed)
	r.drain(all.Minus(kept))
	watched := func() float64 { return testutil.ToFloat64(r.m.metrics.watched(string(parents))) }
	if n := watched(); n != testV {
		t.Errorf("watches %v Virtual Nodes while %s are on their way, want all", n, all.Minus(kept))
	}
	r.take()
	eventually(t, "the watches are narrowed", func() error {
		if n := watched(); n != testV/2 {
			return fmt.Errorf("watches %v Virtual Nodes", n)
		}
		return nil
	})
	fill(r, 20)
	r.settled()
	want, err := r.m.mapping.query(kept)
	if err != nil {
		t.Fatal(err)
	}
	r.script.mu.Lock()
	for _, res := range []sharding.Resource{parents, children} {
		began := r.script.watches[res]
		if len(began) != 2 || !reflect.DeepEqual(began[1], want) {
			t.Errorf("watches of %s: %v, want a second of %v", res, began, want)
		}
	}
	r.script.mu.Unlock()
	if n := r.tape.count(history.Listed); n != lists {
		t.Errorf("%d lists, want none after the first %d", n, lists)
	}
	r.check()
}

func TestListStillCountsForWhatWentAndCameBack(t *testing.T) {
	r := newRig(t, testV, 1)
	defer r.m.stop()
	one := sharding.SetOf(1)
	r.script.write(parents, "p1", 1, nil)
	r.script.write(parents, "p2", 2, nil)
	r.prefetch(sharding.SetOf(1, 2))
	r.settled()
	release := r.script.holdLists()
	defer release()
	r.script.endWatches(true)
	eventually(t, "the second list", func() error {
		r.script.mu.Lock()
		defer r.script.mu.Unlock()
		if n := r.script.lists[parents]; n != 2 {
			return fmt.Errorf("%d lists", n)
		}
		return nil
	})
	r.withdraw(one)
	r.prefetch(one)
	release()
	r.settled()
}

func TestGrantIsServedFromTheWatch(t *testing.T) {
	r := newRig(t, testV, 1)
	defer r.m.stop()
	r.patient()
	fill(r, 20)
	vns := sharding.Span(0, 6)
	r.prefetch(vns)
	r.settled()
	fill(r, 20) // the previous owner goes on writing
	r.settled()
	lists := r.tape.count(history.Listed)
	r.grant(vns, r.known(vns))
	r.m.mu.RLock()
	ready := r.m.ready
	r.m.mu.RUnlock()
	if !ready.Equal(vns) {
		t.Fatalf("serves %s at once, want all of %s", ready, vns)
	}
	r.settled()
	if n := r.tape.count(history.Listed); n != lists {
		t.Fatalf("%d lists after the grant, want none", n-lists)
	}
}

func TestVersionThatNoWatchNamesIsListed(t *testing.T) {
	r := newRig(t, testV, 1)
	defer r.m.stop()
	r.script.write(parents, "p1", 1, nil)
	both := sharding.SetOf(1, 2)
	r.prefetch(both)
	r.settled()
	// A change that concerns neither, as one of a Virtual Node that the previous owner gave to somebody else.
	last := r.script.write(parents, "p5", 5, nil)
	r.grant(both, &sharding.Versions{parents: last})
	r.settled()
}

func TestReadsWaitForTheBarrierOnly(t *testing.T) {
	r := newRig(t, testV, 1)
	defer r.m.stop()
	fill(r, 40)
	kept, moved := sharding.Span(0, 6), sharding.Span(6, 6)
	r.grant(kept, nil)
	r.settled()
	release := r.script.holdLists()
	r.grant(moved, nil)
	rd := &reader{member: r.m, live: noReads{t}, slots: make(chan struct{}, 1)}
	k := r.m.kinds[children]
	for i := range 40 {
		name := fmt.Sprintf("p%d", i)
		key := client.ObjectKey{Namespace: "default", Name: name}
		if kept.Has(sharding.VirtualNodeOf(name, testV)) {
			if err := rd.get(t.Context(), k, key, &corev1.ConfigMap{}); err != nil {
				t.Fatalf("read of %s, which is kept: %v", name, err)
			}
		}
	}
	// What a reconcile of a moving Virtual Node reads, and every list, waits.
	j := &job{member: r.m, ticket: sharding.Ticket{VN: 7}, life: r.m.life}
	ctx, cancel := context.WithCancel(context.WithValue(t.Context(), jobKey{}, j))
	cancel()
	err := rd.get(ctx, k, client.ObjectKey{Namespace: "default", Name: "unheard-of"}, &corev1.ConfigMap{})
	if !isBlocked(err) {
		t.Fatalf("read in a Virtual Node in motion: %v, want it to wait until its context ends", err)
	}
	if _, err := rd.selected(ctx, k, &client.ListOptions{}); !isBlocked(err) {
		t.Fatalf("list while Virtual Nodes are in motion: %v, want it to wait", err)
	}
	listed := make(chan int, 1)
	go func() {
		objs, err := rd.selected(t.Context(), k, &client.ListOptions{})
		if err != nil {
			t.Error(err)
		}
		listed <- len(objs)
	}()
	release()
	if n := <-listed; n != 40 {
		t.Fatalf("%d objects listed, want all 40", n)
	}
}

func TestRefusedReadsOfAReconcile(t *testing.T) {
	r := newRig(t, testV, 1)
	defer r.m.stop()
	r.script.write(parents, "p1", 1, nil)
	r.grant(sharding.SetOf(1), nil)
	r.settled()
	k := r.m.kinds[parents]
	j, err := r.m.begin(k, client.ObjectKey{Namespace: "default", Name: "p1"})
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name, label string
		refuse      bool
		want        error
	}{
		{"of another member", "2", true, ErrNotOwned},
		{"of another member, by default", "2", false, nil},
		{"of this member, not cached yet", "1", true, nil},
		{"of nobody", "", true, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			rd := &reader{member: r.m, live: answers{tc.label}, slots: make(chan struct{}, 1), refuse: tc.refuse}
			ctx := context.WithValue(t.Context(), jobKey{}, j)
			err := rd.get(ctx, k, client.ObjectKey{Namespace: "default", Name: "x"}, &corev1.ConfigMap{})
			if !errors.Is(err, tc.want) || (tc.want == nil && err != nil) {
				t.Errorf("%v, want %v", err, tc.want)
			}
		})
	}
}

// answers finds every object, with a label of its own choice.
type answers struct{ vn string }

func (a answers) Get(_ context.Context, key client.ObjectKey, obj client.Object, _ ...client.GetOption) error {
	obj.SetNamespace(key.Namespace)
	obj.SetName(key.Name)
	obj.SetResourceVersion("1000")
	obj.SetLabels(map[string]string{sharding.LabelVirtualNode: a.vn})
	return nil
}

func (a answers) List(context.Context, client.ObjectList, ...client.ListOption) error { return nil }

// noReads fails the test when something is read live.
type noReads struct{ t *testing.T }

func (r noReads) Get(_ context.Context, key client.ObjectKey, _ client.Object, _ ...client.GetOption) error {
	r.t.Errorf("live read of %s", key)
	return nil
}

func (r noReads) List(context.Context, client.ObjectList, ...client.ListOption) error {
	r.t.Error("live list")
	return nil
}

func TestDrainWaitsForReconcilesAndTellsTheirVersions(t *testing.T) {
	r := newRig(t, testV, 1)
	defer r.m.stop()
	r.script.write(parents, "p1", 1, nil)
	r.script.write(parents, "p2", 2, nil)
	r.grant(sharding.SetOf(1, 2), nil)
	r.settled()
	k := r.m.kinds[parents]
	j, err := r.m.begin(k, client.ObjectKey{Namespace: "default", Name: "p1"})
	if err != nil {
		t.Fatal(err)
	}
	r.drain(sharding.SetOf(1, 2))
	released := func() sharding.Set {
		var vns sharding.Set
		for _, rel := range r.status().Released {
			vns = vns.Union(rel.VNs)
		}
		return vns
	}
	if got := released(); !got.Equal(sharding.SetOf(2)) {
		t.Fatalf("released %s while 1 is being reconciled, want 2", got)
	}
	if _, err := r.m.begin(k, client.ObjectKey{Namespace: "default", Name: "p2"}); err == nil {
		t.Fatal("a reconcile has begun in a Virtual Node that is being drained")
	}
	sentAt, err := r.m.mayWrite(j)
	if err != nil {
		t.Fatal(err)
	}
	version := r.script.write(parents, "p1", 1, nil)
	r.m.answered(j, sentAt, result{kind: k, version: version})
	j.end(true)
	if got := released(); !got.Equal(sharding.SetOf(1, 2)) {
		t.Fatalf("released %s after the reconcile has ended, want 1-2", got)
	}
	for _, rel := range r.status().Released {
		if rel.VNs.Has(1) && (rel.Known == nil || (*rel.Known)[parents] != version) {
			t.Fatalf("release %+v does not tell version %s", rel, version)
		}
	}
}

func TestDeletionHoldsTheDrainUntilItsVersionIsKnown(t *testing.T) {
	r := newRig(t, testV, 1)
	defer r.m.stop()
	r.script.write(parents, "p1", 1, nil)
	r.script.write(children, "p1", 1, nil)
	r.grant(sharding.SetOf(1), nil)
	r.settled()
	k, child := r.m.kinds[parents], r.m.kinds[children]
	j, err := r.m.begin(k, client.ObjectKey{Namespace: "default", Name: "p1"})
	if err != nil {
		t.Fatal(err)
	}
	d := r.m.expectDeletion(j, child, "default/p1")
	sentAt, err := r.m.mayWrite(j)
	if err != nil {
		t.Fatal(err)
	}
	r.m.answered(j, sentAt, result{kind: child, later: true})
	r.m.deletionAnswered(d, true)
	j.end(true)
	r.drain(sharding.SetOf(1))
	if got := r.status().Released; len(got) != 0 {
		t.Fatalf("released %v before the watch has told the deletion's version", got)
	}
	version := r.script.remove(children, "p1")
	eventually(t, "release", func() error {
		got := r.status().Released
		if len(got) != 1 || got[0].Known == nil || (*got[0].Known)[children] != version {
			return fmt.Errorf("released %+v, want the version %s of the deletion", got, version)
		}
		return nil
	})
}

func TestChildrenLeadToAParentThatIsGone(t *testing.T) {
	r := newRig(t, testV, 1)
	defer r.m.stop()
	yes := true
	r.script.write(children, "orphan", 3, func(c *corev1.ConfigMap) {
		c.OwnerReferences = []metav1.OwnerReference{{APIVersion: "test/v1", Kind: "Parent", Name: "parent", Controller: &yes}}
	})
	r.grant(sharding.SetOf(3), nil)
	r.settled()
	j, err := r.m.begin(r.m.kinds[parents], client.ObjectKey{Namespace: "default", Name: "parent"})
	if err != nil || j.ticket.VN != 3 {
		t.Fatalf("%v, %v: want the parent to be reconciled where its child is", j, err)
	}
	if _, err := r.m.begin(r.m.kinds[parents], client.ObjectKey{Namespace: "default", Name: "unheard-of"}); err == nil {
		t.Fatal("an object of which nothing is known has been reconciled")
	}
}

func TestFencedMemberStops(t *testing.T) {
	r := newRig(t, testV, 1)
	defer r.m.stop()
	r.script.write(parents, "p1", 1, nil)
	r.grant(sharding.SetOf(1), nil)
	r.settled()
	k, key := r.m.kinds[parents], client.ObjectKey{Namespace: "default", Name: "p1"}
	j, err := r.m.begin(k, key)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.m.serving(); err != nil {
		t.Fatalf("a member with its share is not ready: %v", err)
	}
	r.advance(r.m.policy.RenewDeadline)
	if err := r.m.serving(); !isFenced(err) {
		t.Fatalf("readiness after renewDeadline: %v, want ErrFenced", err)
	}
	if _, err := r.m.mayWrite(j); !isFenced(err) {
		t.Fatalf("write after renewDeadline: %v, want ErrFenced", err)
	}
	if _, err := r.m.begin(k, key); !isFenced(err) {
		t.Fatalf("reconcile after renewDeadline: %v, want ErrFenced", err)
	}
	g := &guardedReconciler{kind: k}
	if res, err := g.Reconcile(t.Context(), reconcile.Request{NamespacedName: key}); err != nil || res.RequeueAfter == 0 {
		t.Fatalf("request of a fenced member: %+v, %v, want it to stay in the queue", res, err)
	}
	if !r.m.expired() {
		t.Fatal("the session has not expired")
	}
	r.restart()
	if err := r.m.serving(); err == nil {
		t.Fatal("a member is ready before its first slice")
	}
	if j.life.Err() == nil {
		t.Fatal("the reconcile's context outlives its session")
	}
	if _, err := r.m.mayWrite(j); !isFenced(err) {
		t.Fatalf("write of the old session: %v, want ErrFenced", err)
	}
	if _, err := r.m.begin(k, key); err == nil {
		t.Fatal("the new session reconciles what it was not granted")
	}
}

// What a grant tells that cannot be read is listed instead, and so is what a list tells with a version that is none: nothing
// is served before, and nothing is stuck.
func TestVersionsThatCannotBeReadAreListedAgain(t *testing.T) {
	r := newRig(t, testV, 1)
	defer r.m.stop()
	fill(r, 20)
	vns := sharding.Span(0, 6)
	r.prefetch(vns)
	r.settled()
	lists := r.tape.count(history.Listed)
	release := r.script.holdLists()
	defer release()
	r.grant(vns, &sharding.Versions{parents: "seven", children: "1"})
	r.m.mu.RLock()
	ready := r.m.ready
	r.m.mu.RUnlock()
	if !ready.Empty() {
		t.Errorf("serves %s, of which it does not know what its parents have to show", ready)
	}
	r.script.mu.Lock()
	r.script.illegible = 2
	r.script.mu.Unlock()
	release()
	r.settled()
	if n := r.tape.count(history.Listed) - lists; n != 3 {
		t.Errorf("%d lists, want two that cannot be used and one that can", n)
	}
	r.check()
}
