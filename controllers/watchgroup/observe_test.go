package watchgroup

import (
	"context"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/wire"
)

// A cache may be behind by a whole session. What the slice gives to the new one is not taken from it for that.
func TestASessionIsNotOverBecauseTheCacheIsBehind(t *testing.T) {
	c, ns := api(t)
	group := newGroup(t, c, ns, nil)
	lease := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "parents.a", Labels: map[string]string{lbv1alpha1.LabelWatchGroup: "parents"}},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: ptr.To("first"), LeaseDurationSeconds: ptr.To[int32](60)},
	}
	if err := c.Create(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	behind := lease.DeepCopy()
	patch := client.MergeFrom(lease.DeepCopy())
	lease.Spec.HolderIdentity = ptr.To("second")
	if err := c.Patch(t.Context(), lease, patch); err != nil {
		t.Fatal(err)
	}
	slice := &lbv1alpha1.VirtualNodeSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "parents.a"},
		Spec: wire.SliceSpec("parents", sharding.Slice{
			Member: "a", Session: "second", Epoch: 1, Owned: sharding.Span(0, 100),
		}),
	}
	if err := c.Create(t.Context(), slice); err != nil {
		t.Fatal(err)
	}
	api, err := client.NewWithWatch(apiServer, client.Options{Scheme: testScheme()})
	if err != nil {
		t.Fatal(err)
	}
	r := &Reconciler{
		Live: c, Now: MonotonicClock(),
		Client: interceptor.NewClient(api, interceptor.Funcs{
			List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
				if leases, ok := list.(*coordinationv1.LeaseList); ok {
					leases.Items = []coordinationv1.Lease{*behind}
					return nil
				}
				return c.List(ctx, list, opts...)
			},
		}),
	}
	v, err := r.observe(t.Context(), group, newTracker())
	if err != nil {
		t.Fatal(err)
	}
	if s := v.states["a"]; s.Session != "second" || s.Phase != sharding.PhaseServing {
		t.Errorf("the member is %s in session %q, want %s in %q", s.Phase, s.Session, sharding.PhaseServing, "second")
	}
}

// A list of slices shows what has been written and seen, and everything where that is not known.
func TestSlicesAreListedNoOlderThanWhatIsKnown(t *testing.T) {
	tr := newTracker()
	want := func(floor string) {
		t.Helper()
		if got := tr.slicesFrom(); got != floor {
			t.Errorf("slices are listed from %q, want %q", got, floor)
		}
	}
	want("")
	tr.sawSlice("7") // an event says nothing of what was written after it
	want("")
	tr.sawSlices("5")
	want("5")
	tr.sawSlice("9")
	want("9")
	tr.sawSlices("8")
	want("9")
	tr.forgetSlices()
	want("")
}

// What has been seen of a Lease is not set back by a cache that is behind.
func TestALeaseThatIsBehindIsOutdated(t *testing.T) {
	tr := newTracker()
	tr.saw(sharding.LeaseRecord{Member: "a", Session: "s", Renewal: "12", Duration: time.Second}, 0)
	for version, want := range map[string]bool{"9": true, "12": false, "13": false} {
		lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{ResourceVersion: version}}
		if got := tr.outdated("a", lease); got != want {
			t.Errorf("version %s, seen 12: outdated is %t, want %t", version, got, want)
		}
		if tr.outdated("b", lease) {
			t.Errorf("version %s of a member that was never seen is outdated", version)
		}
	}
}

// A coordinator that finds what it had claimed claimed by another waits, longer each time. One that has just come, or that has
// only changed its own name, does not.
func TestWhoLosesItsClaimsYields(t *testing.T) {
	tr := newTracker()
	waits := func(foreign bool, now time.Duration) time.Duration { return max(tr.yield(foreign, now)-now, 0) }
	if d := waits(true, 0); d != 0 {
		t.Errorf("a coordinator that has just come waits for %s", d)
	}
	now, before := time.Second, time.Duration(0)
	for n := range 4 {
		if d := waits(false, now); d != 0 {
			t.Errorf("with its own claims it waits for %s", d)
		}
		lost := waits(true, now)
		if lost < yieldBase<<n/2 || lost > yieldBase<<n*3/2 || lost <= before {
			t.Errorf("after loss %d it waits for %s, and before that for %s", n+1, lost, before)
		}
		if d := waits(true, now+lost/2); d != lost-lost/2 {
			t.Errorf("half of %s later it waits for %s", lost, d)
		}
		if d := waits(true, now+lost); d != 0 {
			t.Errorf("after its wait it waits for %s more", d)
		}
		now, before = now+lost, lost
	}
	now += time.Hour
	waits(false, now)
	if d := waits(true, now); d > yieldBase*3/2 {
		t.Errorf("an hour later it waits for %s", d)
	}
	now += time.Hour
	waits(false, now)
	tr.renameClaim()
	if d := waits(true, now); d != 0 {
		t.Errorf("under a new name of its own it waits for %s", d)
	}
}
