package admission

import (
	"context"
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"
	"pgregory.net/rapid"
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

// consistent answers lists with the version as of which they are, which the API in memory does not.
type consistent struct{ client.Reader }

func (r consistent) List(ctx context.Context, l client.ObjectList, opts ...client.ListOption) error {
	if err := r.Reader.List(ctx, l, opts...); err != nil {
		return err
	}
	newest := 0
	for _, o := range l.(*metav1.PartialObjectMetadataList).Items {
		if v, err := strconv.Atoi(o.ResourceVersion); err == nil {
			newest = max(newest, v)
		}
	}
	l.SetResourceVersion(strconv.Itoa(newest))
	return nil
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

func (m *aMember) refresh(t interface{ Fatal(...any) }) {
	m.seen = kueue.WorkloadList{}
	if err := m.api.List(context.Background(), &m.seen); err != nil {
		t.Fatal(err)
	}
}

// pass is what a member does with a request: nothing before it has taken over.
func (m *aMember) pass(t interface{ Fatal(...any) }, turn sharded.Turn) (done bool) {
	done, err := m.keys.Takeover(context.Background(), turn)
	if err != nil {
		t.Fatal(err)
	}
	if !done {
		return false
	}
	if _, err := m.Reconcile(context.Background(), ctrl.Request{}); err != nil {
		t.Fatal(err)
	}
	return true
}

// TestMembersPromiseOnce hands the decisions over between two members at any moment, with caches that are as far behind as
// they like. Never is more promised than there is, and in the end everything is that fits.
func TestMembersPromiseOnce(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		const nodes = 10
		d := newDesk(t, theCheck(fleetv1alpha1.CapacityCheckConfigSpec{}, nodes)...)
		members := []*aMember{newMember(t, d), newMember(t, d)}
		owner, turn, workloads := 0, sharded.Turn(1), 0
		promised := func() (n int32) {
			var all kueue.WorkloadList
			if err := d.client.List(context.Background(), &all); err != nil {
				rt.Fatal(err)
			}
			for i := range all.Items {
				if s := all.Items[i].Status.AdmissionChecks[0]; s.State == kueue.CheckStateReady {
					n += all.Items[i].Spec.PodSets[0].Count
				}
			}
			return n
		}
		rt.Repeat(map[string]func(*rapid.T){
			"a workload comes": func(rt *rapid.T) {
				workloads++
				wl := reservedFor(fmt.Sprint("w", workloads), rapid.Int32Range(1, 4).Draw(rt, "pods"), 0)
				if err := d.client.Create(context.Background(), wl); err != nil {
					rt.Fatal(err)
				}
			},
			"the owner looks": func(rt *rapid.T) { members[owner].pass(rt, turn) },
			"a cache moves on": func(rt *rapid.T) {
				members[rapid.IntRange(0, 1).Draw(rt, "whose")].refresh(rt)
			},
			"another takes over": func(*rapid.T) {
				before, last := members[owner], turn
				owner, turn = 1-owner, turn+1
				before.keys.Lost(context.Background(), last, func(ctrl.Request) bool { return true })
			},
			"": func(rt *rapid.T) {
				if n := promised(); n > nodes {
					rt.Fatalf("%d of %d nodes are promised", n, nodes)
				}
			},
		})
		members[owner].refresh(rt)
		for deadline := time.Now().Add(time.Minute); !members[owner].pass(rt, turn); {
			if time.Now().After(deadline) {
				rt.Fatal("nobody takes over")
			}
		}
		var all kueue.WorkloadList
		if err := d.client.List(context.Background(), &all); err != nil {
			rt.Fatal(err)
		}
		left := nodes - promised()
		for i := range all.Items {
			if s := all.Items[i].Status.AdmissionChecks[0]; s.State == kueue.CheckStatePending && all.Items[i].Spec.PodSets[0].Count <= left {
				rt.Fatalf("%s waits for %d of %d nodes that are left", all.Items[i].Name, all.Items[i].Spec.PodSets[0].Count, left)
			}
		}
	})
}

func TestWhoDoesNotDecideShowsNoPromises(t *testing.T) {
	d := newDesk(t, append(theCheck(fleetv1alpha1.CapacityCheckConfigSpec{}, 10), reservedFor("w", 4, 0))...)
	m := newMember(t, d)
	m.refresh(t)
	if !m.pass(t, 1) {
		t.Fatal("not taken over")
	}
	shown := func() float64 { return testutil.ToFloat64(m.metrics.Promised.WithLabelValues("gpu-h100")) }
	if n := shown(); n != 4 {
		t.Errorf("%v nodes are shown as promised, expected 4", n)
	}
	m.keys.Lost(t.Context(), 1, func(ctrl.Request) bool { return true })
	if n := shown(); n != 0 {
		t.Errorf("another member decides, but %v nodes are shown as promised", n)
	}
}
