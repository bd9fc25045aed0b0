package watchgroup

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/wire"
)

// A desk is a coordinator whose clock and moves are the test's, on the real API server. Its members are Leases and answers
// that the test writes.
type desk struct {
	t     *testing.T
	c     client.Client
	group *lbv1alpha1.WatchGroup
	r     *Reconciler
	now   sharding.Instant
	hooks interceptor.Funcs // of the coordinator's client and live reader
}

func newDesk(t *testing.T, change func(*lbv1alpha1.WatchGroupSpec)) *desk {
	t.Helper()
	c, ns := api(t)
	d := &desk{t: t, c: c, group: newGroup(t, c, ns, change), now: time.Hour}
	d.restart()
	return d
}

// restart puts another coordinator in the place of the one at work.
func (d *desk) restart() {
	d.t.Helper()
	inner, err := client.NewWithWatch(apiServer, client.Options{Scheme: testScheme()})
	if err != nil {
		d.t.Fatal(err)
	}
	c := interceptor.NewClient(inner, interceptor.Funcs{
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
			if d.hooks.List != nil {
				return d.hooks.List(ctx, c, list, opts...)
			}
			return c.List(ctx, list, opts...)
		},
		Update: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.UpdateOption) error {
			if d.hooks.Update != nil {
				return d.hooks.Update(ctx, c, o, opts...)
			}
			return c.Update(ctx, o, opts...)
		},
		Delete: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.DeleteOption) error {
			if d.hooks.Delete != nil {
				return d.hooks.Delete(ctx, c, o, opts...)
			}
			return c.Delete(ctx, o, opts...)
		},
	})
	metrics, err := NewMetrics(prometheus.NewRegistry())
	if err != nil {
		d.t.Fatal(err)
	}
	d.r = &Reconciler{Client: c, Live: c, Recorder: events.NewFakeRecorder(1000), Metrics: metrics,
		Now: func() sharding.Instant { return d.now }}
}

// look has the coordinator look once, and returns what it ended with.
func (d *desk) look() error {
	_, err := d.r.Reconcile(d.t.Context(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(d.group)})
	return err
}

func (d *desk) looks() {
	d.t.Helper()
	if err := d.look(); err != nil {
		d.t.Fatal(err)
	}
}

// looksAgainWithin looks, and fails if the coordinator does not want to look again soon enough.
func (d *desk) looksAgainWithin(limit time.Duration) {
	d.t.Helper()
	result, err := d.r.Reconcile(d.t.Context(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(d.group)})
	if err != nil || result.RequeueAfter <= 0 || result.RequeueAfter > limit {
		d.t.Errorf("it looks again in %s (%v), want in %s at the latest", result.RequeueAfter, err, limit)
	}
}

func (d *desk) key(member string) client.ObjectKey {
	return client.ObjectKey{Namespace: d.group.Namespace, Name: lbv1alpha1.MemberName(d.group.Name, member)}
}

// holds writes a member's Lease: who holds it, "" for nobody, and with which annotations.
func (d *desk) holds(member, session string, annotations map[string]string) *coordinationv1.Lease {
	d.t.Helper()
	key, now := d.key(member), metav1.NowMicro()
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name}}
	err := d.c.Get(d.t.Context(), key, lease)
	if client.IgnoreNotFound(err) != nil {
		d.t.Fatal(err)
	}
	missing := err != nil
	lease.Labels = map[string]string{lbv1alpha1.LabelWatchGroup: d.group.Name}
	lease.Annotations = annotations
	lease.Spec = coordinationv1.LeaseSpec{HolderIdentity: &session, AcquireTime: &now, RenewTime: &now,
		LeaseDurationSeconds: ptr.To(int32(leaseDuration(d.group) / time.Second))}
	if missing {
		err = d.c.Create(d.t.Context(), lease)
	} else {
		err = d.c.Update(d.t.Context(), lease)
	}
	if err != nil {
		d.t.Fatal(err)
	}
	return lease
}

// slice returns a member's slice, nil if there is none.
func (d *desk) slice(member string) *sharding.Slice {
	d.t.Helper()
	o := &lbv1alpha1.VirtualNodeSlice{}
	if err := d.c.Get(d.t.Context(), d.key(member), o); apierrors.IsNotFound(err) {
		return nil
	} else if err != nil {
		d.t.Fatal(err)
	}
	s, err := wire.Slice(o)
	if err != nil {
		d.t.Fatal(err)
	}
	return &s
}

// answers lets a member say that it has done all that its slice asks for.
func (d *desk) answers(member string, change func(*sharding.SliceStatus)) {
	d.t.Helper()
	s := d.slice(member)
	status := sharding.SliceStatus{Session: s.Session, Epoch: s.Epoch, Settled: s.Epoch, Warm: s.Incoming}
	for _, o := range s.Draining {
		status.Released = append(status.Released, sharding.Release{Epoch: o.Epoch, VNs: o.VNs,
			Known: &sharding.Versions{configMaps: "1"}})
	}
	if change != nil {
		change(&status)
	}
	d.says(member, status)
}

func (d *desk) says(member string, status sharding.SliceStatus) {
	d.t.Helper()
	key := d.key(member)
	o := &lbv1alpha1.VirtualNodeSlice{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name}}
	before := o.DeepCopy()
	o.Status = wire.SliceStatus(status)
	if err := d.c.Status().Patch(d.t.Context(), o, client.MergeFrom(before)); err != nil {
		d.t.Fatal(err)
	}
	// The coordinator's handler sees the event before anybody looks. Without it the list may be one of a moment ago.
	if t := d.r.known(client.ObjectKeyFromObject(d.group)); t != nil {
		t.sawSlice(o.ResourceVersion)
	}
}

// settles lets the members answer until nothing moves.
func (d *desk) settles(members ...string) {
	d.t.Helper()
	for range 10 {
		d.looks()
		moving := 0
		for _, m := range members {
			moving += d.slice(m).Moving()
			d.answers(m, nil)
		}
		if moving == 0 {
			d.looks()
			return
		}
	}
	d.t.Fatal("the members answer, and their slices go on moving")
}

// own fails if the members do not own as many Virtual Nodes as said; one of none has no slice.
func (d *desk) own(what string, want map[string]int) {
	d.t.Helper()
	got := make(map[string]int)
	for m := range want {
		if s := d.slice(m); s != nil {
			got[m] = s.Owned.Len()
		}
	}
	if !reflect.DeepEqual(got, want) {
		d.t.Errorf("%s: %v, want %v", what, got, want)
	}
}

// A session that ends, by a released Lease, leaves what it had to its member for as long as the group says.
func TestWhatAMemberHadWaitsForItsReturn(t *testing.T) {
	d := newDesk(t, func(s *lbv1alpha1.WatchGroupSpec) {
		slowLease(s)
		s.ReturnGrace = &metav1.Duration{Duration: 30 * time.Second}
	})
	d.holds("a", "a1", nil)
	d.holds("b", "b1", nil)
	d.settles("a", "b")
	d.own("two members", map[string]int{"a": 50, "b": 50})
	had := d.slice("b").Owned

	d.holds("b", "", nil)
	d.looks()
	d.own("b has stopped", map[string]int{"a": 50, "b": 50})
	d.now += 29 * time.Second
	d.holds("a", "a1", nil)
	d.looks()
	d.own("b is still waited for", map[string]int{"a": 50, "b": 50})
	d.holds("b", "b2", nil)
	d.looks()
	s := d.slice("b")
	if s.Session != "b2" || !s.Owned.Equal(had) || len(s.Grants) != 1 || s.Grants[0].Known != nil {
		t.Errorf("b is back and has %+v, want what it had, with nothing known of it", *s)
	}
	if a := d.slice("a"); a.Moving() != 0 {
		t.Errorf("something of a's moves because b came back: %+v", *a)
	}
	d.settles("a", "b")

	d.holds("b", "", nil)
	d.looksAgainWithin(30 * time.Second)
	d.now += 31 * time.Second
	d.holds("a", "a1", nil)
	d.looks()
	d.own("b has not come back", map[string]int{"a": 100})
}

// Without a grace nobody is waited for.
func TestWhatAMemberHadIsGivenAwayAtOnce(t *testing.T) {
	d := newDesk(t, nil)
	d.holds("a", "a1", nil)
	d.holds("b", "b1", nil)
	d.settles("a", "b")
	d.holds("b", "", nil)
	d.looks()
	d.own("b has stopped", map[string]int{"a": 100})
}

func TestAMembersShareFollowsItsWeight(t *testing.T) {
	d := newDesk(t, nil)
	d.holds("a", "a1", map[string]string{lbv1alpha1.AnnotationWeight: "3"})
	d.holds("b", "b1", nil)
	d.settles("a", "b")
	d.own("3 to 1", map[string]int{"a": 75, "b": 25})
	d.holds("a", "a1", map[string]string{lbv1alpha1.AnnotationWeight: "many"})
	d.settles("a", "b")
	d.own("a weight that is none", map[string]int{"a": 50, "b": 50})
}

// The paper's handoff: in one step everybody has the new share, and nobody has answered anything.
func TestAnEventualHandoffIsOneStep(t *testing.T) {
	d := newDesk(t, func(s *lbv1alpha1.WatchGroupSpec) { s.Handoff = lbv1alpha1.HandoffEventual })
	d.holds("a", "a1", nil)
	d.looks()
	d.own("alone", map[string]int{"a": 100})
	d.holds("b", "b1", nil)
	d.looks()
	d.own("b has come", map[string]int{"a": 50, "b": 50})
	for _, m := range []string{"a", "b"} {
		if s := d.slice(m); s.Moving() != 0 {
			t.Errorf("%s is asked to prefetch or to drain: %+v", m, *s)
		}
	}
	g := d.slice("b").Grants
	if len(g) != 1 || g[0].Known != nil || g[0].VNs.Len() != 50 {
		t.Errorf("b is granted %+v, want all of its share, to be listed", g)
	}
}

// A new coordinator takes nobody for a newcomer who owns something already.
func TestOnlyNewcomersAreNew(t *testing.T) {
	d := newDesk(t, func(s *lbv1alpha1.WatchGroupSpec) {
		slowLease(s)
		s.NewcomerGrace = &metav1.Duration{Duration: 30 * time.Second}
	})
	d.holds("a", "a1", nil)
	d.looks()
	d.holds("b", "b1", nil)
	d.settles("a", "b")
	d.own("b is new", map[string]int{"a": 100, "b": 0})
	d.looksAgainWithin(30 * time.Second)
	d.now += 30 * time.Second
	d.settles("a", "b")
	d.own("b is new no more", map[string]int{"a": 50, "b": 50})
	d.restart()
	d.holds("a", "a1", map[string]string{lbv1alpha1.AnnotationWeight: "3"})
	d.settles("a", "b")
	d.own("a counts for more, and the coordinator is another", map[string]int{"a": 75, "b": 25})
}

// The wish to leave is that of one session: the next one wants to work.
func TestTheWishToLeaveEndsWithItsSession(t *testing.T) {
	d := newDesk(t, nil)
	d.holds("a", "a1", nil)
	d.holds("b", "b1", nil)
	d.settles("a", "b")
	d.answers("b", func(s *sharding.SliceStatus) { s.Leaving = true })
	d.holds("b", "b2", nil)
	d.looks()
	d.own("b has died while it left, and is back", map[string]int{"a": 50, "b": 50})
}

// A Lease that was deleted by hand is waited for as long as its session might have gone on, and then closed: the session that
// held it finds one that nobody holds.
func TestADeletedLeaseIsClosedWhenItWouldHaveRunOut(t *testing.T) {
	d := newDesk(t, nil)
	d.holds("a", "a1", nil)
	lease := d.holds("b", "b1", nil)
	d.settles("a", "b")
	if err := d.c.Delete(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	d.now += time.Minute
	d.holds("a", "a1", nil)
	d.looks()
	d.now += leaseDuration(d.group) - time.Millisecond
	d.holds("a", "a1", nil)
	d.looks()
	d.own("b may be at work", map[string]int{"a": 50, "b": 50})
	d.now += time.Millisecond
	d.looks()
	d.own("b has stopped", map[string]int{"a": 100})
	if err := d.c.Get(t.Context(), d.key("b"), lease); err != nil || holder(lease) != "" {
		t.Errorf("b's Lease: %v, held by %q, want one that nobody holds", err, holder(lease))
	}
}

// A namespace that is going away takes its group with it, though no Lease can be written there any more.
func TestAGroupGoesWithItsNamespace(t *testing.T) {
	d := newDesk(t, nil)
	d.holds("a", "a1", nil)
	lease := d.holds("b", "b1", nil)
	d.settles("a", "b")
	for _, o := range []client.Object{&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: d.group.Namespace}}, lease,
		d.holds("a", "a1", nil), d.group} {
		if err := d.c.Delete(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	d.looks()
	d.own("they may be at work", map[string]int{"a": 50, "b": 50})
	d.now += leaseDuration(d.group)
	d.looks()
	d.own("nobody is", map[string]int{})
	if err := d.c.Get(t.Context(), client.ObjectKeyFromObject(d.group), &lbv1alpha1.WatchGroup{}); !apierrors.IsNotFound(err) {
		t.Errorf("the group: %v, want it gone", err)
	}
	for _, m := range []string{"a", "b"} {
		if s := d.slice(m); s != nil {
			t.Errorf("the slice of %s is left", m)
		}
	}
}

// Other Leases may have the name of a member's: a leader election calls its own "parents.example.com". And what no slice can
// say of a Lease is nobody else's trouble.
func TestOnlyMembersLeasesAreMembers(t *testing.T) {
	d := newDesk(t, nil)
	foreign := d.holds("example.com", "leader", nil)
	foreign.Labels = nil
	if err := d.c.Update(t.Context(), foreign); err != nil {
		t.Fatal(err)
	}
	long := strings.Repeat("m", lbv1alpha1.MaxMemberLength+1)
	d.holds(long, "m1", nil)
	d.holds("talker", strings.Repeat("s", lbv1alpha1.MaxSessionLength+1), nil)
	d.holds("a", "a1", nil)
	d.settles("a")
	for range 3 {
		d.now += time.Hour
		d.holds("a", "a1", nil)
		d.looks()
	}
	d.own("a is the only member", map[string]int{"a": 100})
	for _, m := range []string{"example.com", long, "talker"} {
		if s := d.slice(m); s != nil {
			t.Errorf("%s has a slice: %+v", m, *s)
		}
	}
	version := foreign.ResourceVersion
	if err := d.c.Get(t.Context(), client.ObjectKeyFromObject(foreign), foreign); err != nil || foreign.ResourceVersion != version {
		t.Errorf("somebody else's Lease was written: %v", err)
	}
	// A member is one by its slice, whatever has become of its Lease's label.
	lease := d.holds("a", "a1", nil)
	lease.Labels = nil
	if err := d.c.Update(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		d.now += leaseDuration(d.group) - time.Millisecond
		if err := d.c.Get(t.Context(), d.key("a"), lease); err != nil {
			t.Fatal(err)
		}
		lease.Spec.RenewTime = ptr.To(metav1.NowMicro())
		if err := d.c.Update(t.Context(), lease); err != nil {
			t.Fatal(err)
		}
		d.looks()
	}
	d.own("a goes on", map[string]int{"a": 100})
}

// A Lease that nobody holds stays for a while, for its member to take again.
func TestALeaseThatNobodyHoldsIsCollectedLater(t *testing.T) {
	d := newDesk(t, nil)
	d.holds("a", "a1", nil)
	d.holds("b", "b1", nil)
	d.settles("a", "b")
	d.holds("b", "", nil)
	d.looks()
	d.now += leaseDuration(d.group) - time.Millisecond
	d.holds("a", "a1", nil)
	d.looks()
	if err := d.c.Get(t.Context(), d.key("b"), &coordinationv1.Lease{}); err != nil {
		t.Errorf("it is gone before its time: %v", err)
	}
	d.now += time.Millisecond
	d.looks()
	if err := d.c.Get(t.Context(), d.key("b"), &coordinationv1.Lease{}); !apierrors.IsNotFound(err) {
		t.Errorf("it stays: %v", err)
	}
}

// Sessions are read after slices: what a slice says to a session that began later must not be taken for being over.
func TestLeasesAreReadAfterSlices(t *testing.T) {
	d := newDesk(t, nil)
	var order []string
	d.hooks.List = func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
		order = append(order, strings.TrimPrefix(fmt.Sprintf("%T", list), "*"))
		return c.List(ctx, list, opts...)
	}
	d.looks()
	want := []string{"v1alpha1.WatchGroupList", "v1alpha1.VirtualNodeSliceList", "v1.LeaseList", "v1.PodList"}
	if !reflect.DeepEqual(order, want) {
		t.Errorf("it lists %v, want %v", order, want)
	}
}

// after lets something happen once, right after the coordinator has listed something.
func (d *desk) after(list client.ObjectList, do func()) {
	done := false
	d.hooks.List = func(ctx context.Context, c client.WithWatch, l client.ObjectList, opts ...client.ListOption) error {
		err := c.List(ctx, l, opts...)
		if !done && reflect.TypeOf(l) == reflect.TypeOf(list) {
			done = true
			do()
		}
		return err
	}
}

// What has changed since it was read is not overwritten, and not given away.
func TestWritesDependOnWhatWasRead(t *testing.T) {
	t.Run("a slice", func(t *testing.T) {
		d := newDesk(t, nil)
		d.holds("a", "a1", nil)
		d.settles("a")
		d.holds("b", "b1", nil)
		d.looks()
		d.answers("b", nil) // warm: the next step drains a
		epoch := d.slice("a").Epoch
		d.after(&lbv1alpha1.VirtualNodeSliceList{}, func() {
			d.answers("a", func(s *sharding.SliceStatus) { s.Leaving = true })
		})
		var first error
		d.hooks.Update = func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.UpdateOption) error {
			err := c.Update(ctx, o, opts...)
			if first == nil && o.GetName() == d.key("a").Name {
				first = cmp.Or(err, errors.New("none"))
			}
			return err
		}
		d.look() // which looks again after a conflict
		if !apierrors.IsConflict(first) {
			t.Errorf("the slice has changed, and the write ended with error %v", first)
		}
		if s := d.slice("a"); s.Epoch <= epoch || !s.Status.Leaving {
			t.Errorf("the coordinator has not gone on from what it saw then: %+v", *s)
		}
	})
	t.Run("a Lease", func(t *testing.T) {
		d := newDesk(t, nil)
		d.holds("a", "a1", nil)
		d.holds("b", "b1", nil)
		d.settles("a", "b")
		d.now += leaseDuration(d.group)
		d.holds("a", "a1", nil)
		d.after(&coordinationv1.LeaseList{}, func() { d.holds("b", "b1", nil) })
		if err := d.look(); !apierrors.IsConflict(err) {
			t.Errorf("the member has renewed, and its revocation ended with %v", err)
		}
		lease := &coordinationv1.Lease{}
		if err := d.c.Get(t.Context(), d.key("b"), lease); err != nil || holder(lease) != "b1" {
			t.Errorf("b's Lease is held by %q (%v), want b1", holder(lease), err)
		}
		d.looks()
		d.own("b has renewed in time", map[string]int{"a": 50, "b": 50})
	})
	t.Run("a slice that goes", func(t *testing.T) {
		d := newDesk(t, nil)
		d.holds("a", "a1", nil)
		d.holds("b", "b1", nil)
		d.settles("a", "b")
		var first error
		d.hooks.Delete = func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.DeleteOption) error {
			d.says("b", sharding.SliceStatus{Session: "b2"})
			d.hooks.Delete = nil
			first = c.Delete(ctx, o, opts...)
			return first
		}
		d.holds("b", "", nil)
		d.look() // which looks again after a conflict
		if !apierrors.IsConflict(first) {
			t.Errorf("the slice has changed, and its deletion ended with %v", first)
		}
	})
}

// Nothing is decided under the same claim as a write that may still land; a write that was refused cannot.
func TestAWriteWithoutAnAnswerEndsTheClaim(t *testing.T) {
	slices := lbv1alpha1.GroupVersion.WithResource("virtualnodeslices").GroupResource()
	for name, test := range map[string]struct {
		err     error
		unknown bool
	}{
		"no answer":              {errors.New("connection reset by peer"), true},
		"the server is at fault": {apierrors.NewInternalError(errors.New("etcdserver: leader changed")), true},
		"the server gave it up":  {apierrors.NewTimeoutError("request did not complete", 1), true},
		"a proxy gave it up":     {apierrors.NewGenericServerResponse(http.StatusRequestTimeout, "put", slices, "x", "", 0, false), true},
		"a proxy's answer":       {apierrors.NewServiceUnavailable("try again"), true},
		"refused":                {apierrors.NewForbidden(slices, "x", nil), false},
		"too much at once":       {apierrors.NewTooManyRequestsError("slow down"), false},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDesk(t, nil)
			d.holds("a", "a1", nil)
			d.settles("a")
			claim := d.r.tracker(client.ObjectKeyFromObject(d.group)).claim
			if got := d.slice("a").Claim; got != claim {
				t.Fatalf("a's slice has claim %q, want %q", got, claim)
			}
			d.hooks.Update = func(context.Context, client.WithWatch, client.Object, ...client.UpdateOption) error { return test.err }
			d.holds("a", "a2", nil)
			if err := d.look(); !errors.Is(err, test.err) {
				t.Errorf("it ended with %v, want %v", err, test.err)
			}
			d.hooks.Update = nil
			d.looks()
			if got := d.slice("a").Claim; (got != claim) != test.unknown {
				t.Errorf("it goes on under %q, before it was %q", got, claim)
			}
		})
	}
}

// A coordinator whose slices another one has taken over writes none of them for a while, and says when it looks again.
func TestACoordinatorLeavesTheSlicesToTheOneThatTookThemOver(t *testing.T) {
	d := newDesk(t, nil)
	d.holds("a", "a1", nil)
	d.settles("a")
	first := d.r
	d.restart()
	d.looks()
	second := d.r.tracker(client.ObjectKeyFromObject(d.group)).claim
	if got := d.slice("a").Claim; got != second {
		t.Fatalf("the slice has claim %q, want %q, so that nothing is taken over", got, second)
	}
	version := d.slice("a").Version
	d.r = first
	d.looksAgainWithin(yieldMax * 2)
	if s := d.slice("a"); s.Claim != second || s.Version != version {
		t.Errorf("the first coordinator has written the slice, which has claim %q, want %q", s.Claim, second)
	}
	d.now = first.tracker(client.ObjectKeyFromObject(d.group)).until
	d.holds("a", "a1", nil)
	d.looks()
	if got := d.slice("a").Claim; got == second {
		t.Error("the first coordinator leaves the slice alone for ever")
	}
}

// What is known of a member ends with it, or a long life would fill the memory.
func TestNobodyIsRememberedForEver(t *testing.T) {
	d := newDesk(t, nil)
	d.holds("a", "a1", nil)
	d.settles("a")
	for i := range 3 {
		id := fmt.Sprintf("b%d", i)
		d.holds(id, id, nil)
		d.settles("a", id)
		d.holds(id, "", nil)
		d.looks()
		d.now += leaseDuration(d.group)
		d.holds("a", "a1", nil)
		d.looks() // collects the Lease
		d.looks()
	}
	tr := d.r.tracker(client.ObjectKeyFromObject(d.group))
	if len(tr.renewals) != 1 || len(tr.since) != 1 || len(tr.stopped) != 0 || len(tr.idle) != 0 {
		t.Errorf("of members that are gone it knows renewals %v, since %v, stopped %v, idle %v", tr.renewals, tr.since, tr.stopped,
			tr.idle)
	}
	if err := d.c.Get(t.Context(), client.ObjectKeyFromObject(d.group), d.group); err != nil {
		t.Fatal(err)
	}
	version := d.group.ResourceVersion
	d.looks()
	d.looks()
	if err := d.c.Get(t.Context(), client.ObjectKeyFromObject(d.group), d.group); err != nil || d.group.ResourceVersion != version {
		t.Errorf("a group to which nothing happens is written (%v)", err)
	}
}
