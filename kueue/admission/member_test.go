package admission

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/controllers/sharded"
	"github.com/drover-sh/drover/kueue/provisioning"
)

// aMember is a replica with a Pass of its own, whose cache shows workloads as they were when it was refreshed last.
type aMember struct {
	*Pass
	keys sharded.Keys
	api  client.Client
	seen kueue.WorkloadList
}

// The parts of a manager that Claims ask for.
type memberManager struct {
	manager.Manager
	member *aMember
}

func (m memberManager) GetScheme() *runtime.Scheme  { return m.member.api.Scheme() }
func (m memberManager) GetAPIReader() client.Reader { return consistent{m.member.api} }
func (m memberManager) GetCache() cache.Cache       { return memberCache{member: m.member} }

type memberCache struct {
	cache.Cache
	member *aMember
}

func (c memberCache) List(ctx context.Context, l client.ObjectList, opts ...client.ListOption) error {
	return c.member.client.List(ctx, l, opts...)
}

// consistent answers lists with a version as of which they are. The API in memory has none, and counts the versions of each
// object by itself: any that is later than all of them does.
type consistent struct{ client.Reader }

func (r consistent) List(ctx context.Context, l client.ObjectList, opts ...client.ListOption) error {
	err := r.Reader.List(ctx, l, opts...)
	l.SetResourceVersion("1000000")
	return err
}

func newMember(t *testing.T, d *desk) *aMember {
	t.Helper()
	m := &aMember{api: d.client}
	metrics, err := NewMetrics(prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	lagging := interceptor.NewClient(d.client.(client.WithWatch), interceptor.Funcs{
		List: func(ctx context.Context, c client.WithWatch, l client.ObjectList, opts ...client.ListOption) error {
			if wls, ok := l.(*kueue.WorkloadList); ok {
				m.seen.DeepCopyInto(wls)
				return nil
			}
			return c.List(ctx, l, opts...)
		},
	})
	claims := provisioning.NewClaims()
	claims.Shard(memberManager{member: m})
	m.Pass = newPass(lagging, &events.FakeRecorder{}, Options{
		Namespace: "fleet-system", Clock: d.clock, Random: func() float64 { return 0 }, Claims: claims,
	}, metrics)
	m.keys = m.bind()
	return m
}

func (m *aMember) refresh(t *testing.T) {
	t.Helper()
	m.seen = kueue.WorkloadList{}
	if err := m.api.List(t.Context(), &m.seen); err != nil {
		t.Fatal(err)
	}
}

// pass is what a member does with a request: nothing before it has taken over.
func (m *aMember) pass(t *testing.T, turn sharded.Turn) (done bool) {
	t.Helper()
	done, err := m.keys.Takeover(t.Context(), turn)
	if err != nil {
		t.Fatal(err)
	}
	if !done {
		return false
	}
	if _, err := m.Reconcile(t.Context(), ctrl.Request{}); err != nil {
		t.Fatal(err)
	}
	return true
}

// fleetOf is what members decide about: workloads in memory, and a hint of so many nodes.
type fleetOf struct {
	*desk
	nodes   int32
	created int
}

func (f *fleetOf) create(pods, priority int32) string {
	f.t.Helper()
	f.created++
	wl := reservedFor(fmt.Sprintf("w%03d", f.created), pods, 0)
	wl.Spec.Priority = &priority
	if err := f.client.Create(f.t.Context(), wl); err != nil {
		f.t.Fatal(err)
	}
	return wl.Name
}

func (f *fleetOf) remove(name string) {
	f.t.Helper()
	wl := &kueue.Workload{ObjectMeta: metav1.ObjectMeta{Namespace: name, Name: name}}
	if err := f.client.Delete(f.t.Context(), wl); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fleetOf) workloads() []kueue.Workload {
	f.t.Helper()
	var all kueue.WorkloadList
	if err := f.client.List(f.t.Context(), &all); err != nil {
		f.t.Fatal(err)
	}
	return all.Items
}

// left is how many nodes are not promised, by what the workloads say.
func (f *fleetOf) left() int32 {
	f.t.Helper()
	left := f.nodes
	for _, wl := range f.workloads() {
		if wl.Status.AdmissionChecks[0].State == kueue.CheckStateReady {
			left -= wl.Spec.PodSets[0].Count
		}
	}
	return left
}

func (f *fleetOf) expectNothingTwice(when string) {
	f.t.Helper()
	if left := f.left(); left < 0 {
		f.t.Fatalf("%s: %d of %d nodes are promised", when, f.nodes-left, f.nodes)
	}
}

func newFleetOf(t *testing.T, nodes int32) (*fleetOf, []*aMember) {
	t.Helper()
	f := &fleetOf{desk: newDesk(t, theCheck(fleetv1alpha1.CapacityCheckConfigSpec{}, nodes)...), nodes: nodes}
	return f, []*aMember{newMember(t, f.desk), newMember(t, f.desk)}
}

var always = func(ctrl.Request) bool { return true }

// takesOver passes with a cache that is up to date, as soon as the member looks at it.
func (m *aMember) takesOver(t *testing.T, turn sharded.Turn) {
	t.Helper()
	m.refresh(t)
	for deadline := time.Now().Add(time.Minute); !m.pass(t, turn); {
		if time.Now().After(deadline) {
			t.Fatal("never taken over")
		}
	}
}

// A cache may be behind in such a way that no write of its owner meets a conflict: the workload that it takes for the only
// one has not been written since. Then nothing but the wait for what stood at the API server keeps the promise from being
// given twice.
func TestATakeoverWaitsForWhatWasPromised(t *testing.T) {
	f, members := newFleetOf(t, 10)
	a, b := members[0], members[1]
	first := f.create(10, 0)
	f.create(8, 0) // waits: all is promised
	a.takesOver(t, 1)
	f.remove(first)
	b.refresh(t)
	f.create(10, 5) // takes all before the other gets anything, which waits as before
	a.takesOver(t, 1)
	if left := f.left(); left != 0 {
		t.Fatalf("%d nodes are left, expected the important workload to have all", left)
	}
	a.keys.Lost(t.Context(), 1, always)
	if b.pass(t, 2) {
		t.Error("decided by a cache that is behind")
	}
	f.expectNothingTwice("after the takeover")
	b.takesOver(t, 2)
	f.expectNothingTwice("when the cache has caught up")
}

// TestMembersPromiseOnce hands the decisions over between two members at any moment, with caches that are as far behind as
// they like, while workloads come and go. Never is more promised than there is, and in the end everything is that fits.
func TestMembersPromiseOnce(t *testing.T) {
	for seed := range uint64(12) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 0))
			f, members := newFleetOf(t, 10)
			owner, turn := 0, sharded.Turn(1)
			for step := range 60 {
				var what string
				switch n := random.IntN(10); {
				case n < 2:
					what = "a workload comes"
					f.create(1+random.Int32N(10), random.Int32N(3))
				case n < 3:
					what = "a workload goes"
					if all := f.workloads(); len(all) > 0 {
						f.remove(all[random.IntN(len(all))].Name)
					}
				case n < 5:
					what = "a cache moves on"
					members[random.IntN(2)].refresh(t)
				case n < 6:
					what = "another takes over"
					members[owner].keys.Lost(t.Context(), turn, always)
					owner, turn = 1-owner, turn+1
				default:
					what = "the owner looks"
					members[owner].pass(t, turn)
				}
				f.expectNothingTwice(fmt.Sprintf("step %d, %s", step, what))
			}
			members[owner].takesOver(t, turn)
			left := f.left()
			for _, wl := range f.workloads() {
				if n := wl.Spec.PodSets[0].Count; wl.Status.AdmissionChecks[0].State == kueue.CheckStatePending && n <= left {
					t.Errorf("%s waits for %d of %d nodes that are left", wl.Name, n, left)
				}
			}
		})
	}
}

func TestWhoDoesNotDecideShowsNoPromises(t *testing.T) {
	d := newDesk(t, append(theCheck(fleetv1alpha1.CapacityCheckConfigSpec{}, 10), reservedFor("w", 4, 0))...)
	m := newMember(t, d)
	m.takesOver(t, 1)
	shown := func() float64 { return testutil.ToFloat64(m.metrics.Promised.WithLabelValues("gpu-h100")) }
	if n := shown(); n != 4 {
		t.Errorf("%v nodes are shown as promised, expected 4", n)
	}
	m.keys.Lost(t.Context(), 1, always)
	if n := shown(); n != 0 {
		t.Errorf("another member decides, but %v nodes are shown as promised", n)
	}
}
