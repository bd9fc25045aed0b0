package sharded

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
)

func TestTurnsBeginAndEndWithOwnership(t *testing.T) {
	var before []turnOf
	s := func(vns ...sharding.VirtualNode) sharding.Set { return sharding.SetOf(vns...) }
	for _, step := range []struct {
		name         string
		now          []turnOf
		gained, lost sharding.Set
		last         Turn
	}{
		{"a first turn", []turnOf{{1, s(0, 1, 2)}}, s(0, 1, 2), s(), 0},
		{"nothing new", []turnOf{{1, s(0, 1, 2)}}, s(), s(), 0},
		{"a part goes, and others come", []turnOf{{1, s(0)}, {2, s(5)}}, s(5), s(1, 2), 1},
		{"what goes and comes back between two looks is lost, and new", []turnOf{{1, s(0)}, {3, s(5)}}, s(5), s(5), 2},
		{"the session ends", nil, s(), s(0, 5), 3},
	} {
		gained, lost, last := compareTurns(before, step.now)
		if !gained.Equal(step.gained) || !lost.Equal(step.lost) || last != step.last {
			t.Errorf("%s: gained %v, lost %v up to turn %d; expected %v, %v, %d", step.name, gained, lost, last,
				step.gained, step.lost, step.last)
		}
		before = step.now
	}
}

// keyed is what the members of a test do to ServiceAccounts, which are not in the group and carry no label.
type keyed struct {
	t  *testing.T
	mu sync.Mutex
	// at is who is working on an object, last who was.
	at, last map[string]string
	// taken are the turns that have been taken over, by member.
	taken map[string]map[Turn]bool
	lost  map[string]int
	wrong []string
}

func (k *keyed) note(format string, args ...any) {
	k.wrong = append(k.wrong, fmt.Sprintf(format, args...))
}

// A keyedMember is one member's controller.
type keyedMember struct {
	*keyed
	client.Client
	name string
	turn Turn
}

func (m *keyedMember) takeover(_ context.Context, turn Turn) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, asked := m.taken[m.name][turn]
	m.taken[m.name][turn] = asked // done with the second call
	m.turn = turn
	return asked, nil
}

func (m *keyedMember) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	m.mu.Lock()
	if other := m.at[req.Name]; other != "" {
		m.note("%s and %s work on %s at once", other, m.name, req.Name)
	}
	if !m.taken[m.name][m.turn] {
		m.note("%s works on %s before turn %d is taken over", m.name, req.Name, m.turn)
	}
	m.at[req.Name] = m.name
	m.mu.Unlock()

	err := m.mark(ctx, req)

	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.at, req.Name)
	if err == nil {
		m.last[req.Name] = m.name
	}
	return reconcile.Result{}, err
}

// mark writes the member's name on the object.
func (m *keyedMember) mark(ctx context.Context, req reconcile.Request) error {
	var account corev1.ServiceAccount
	if err := m.Get(ctx, req.NamespacedName, &account); err != nil {
		return client.IgnoreNotFound(err)
	}
	before := account.DeepCopy()
	metav1.SetMetaDataAnnotation(&account.ObjectMeta, "example.com/by", m.name)
	return m.Patch(ctx, &account, client.MergeFrom(before))
}

// joinByKey starts a member whose controller divides ServiceAccounts by their names.
func (w *world) joinByKey(k *keyed, name string, leave time.Duration) *participant {
	w.t.Helper()
	p := &participant{world: w, name: name, done: make(chan struct{}), gate: &gate{}}
	p.group = New(Options{WatchGroup: groupName, Namespace: w.ns, Member: name, LeaveTimeout: leave})
	var err error
	p.mgr, err = ctrl.NewManager(apiServer, ctrl.Options{
		Scheme: testScheme(), NewCache: p.group.NewCache, NewClient: p.group.NewClient,
		Metrics:                 metricsserver.Options{BindAddress: "0"},
		Controller:              ctrlconfig.Controller{SkipNameValidation: ptr.To(true)},
		GracefulShutdownTimeout: ptr.To(2 * patience),
	})
	if err != nil {
		w.t.Fatal(err)
	}
	m := &keyedMember{keyed: k, Client: p.mgr.GetClient(), name: name}
	k.mu.Lock()
	k.taken[name] = map[Turn]bool{}
	k.mu.Unlock()
	err = ControllerManagedBy(p.mgr).For(&corev1.ServiceAccount{}).WithOptions(controller.Options{MaxConcurrentReconciles: 1}).
		ByKey(Keys{
			Of: func(req reconcile.Request) string { return req.Name },
			List: func(ctx context.Context) (list []reconcile.Request, err error) {
				var accounts corev1.ServiceAccountList
				err = p.mgr.GetCache().List(ctx, &accounts, client.InNamespace(w.ns))
				for i := range accounts.Items {
					list = append(list, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&accounts.Items[i])})
				}
				return list, err
			},
			Takeover: m.takeover,
			Lost: func(_ context.Context, _ Turn, lost func(reconcile.Request) bool) {
				k.mu.Lock()
				defer k.mu.Unlock()
				for object := range k.last {
					if lost(reconcile.Request{NamespacedName: client.ObjectKey{Namespace: w.ns, Name: object}}) {
						k.lost[name]++
					}
				}
			},
		}).Complete(m)
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	p.cancel = cancel
	go func() {
		defer close(p.done)
		if err := p.mgr.Start(p.group.LeaveOn(ctx)); err != nil {
			w.t.Errorf("member %s: %v", name, err)
		}
	}()
	w.t.Cleanup(p.stop)
	return p
}

// Objects that carry no label have one owner at any time, and each is reconciled by its new owner when that changes, though
// nothing has happened to it.
func TestKeysAreDividedAndHandedOver(t *testing.T) {
	w := newWorld(t)
	k := &keyed{t: t, at: map[string]string{}, last: map[string]string{}, taken: map[string]map[Turn]bool{}, lost: map[string]int{}}
	const objects = 40
	for i := range objects {
		account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: fmt.Sprint("object-", i)}}
		if err := w.c.Create(t.Context(), account); err != nil {
			t.Fatal(err)
		}
	}
	settled := func(what string, members ...*participant) {
		t.Helper()
		eventually(t, what, func() error {
			k.mu.Lock()
			defer k.mu.Unlock()
			share := map[string]int{}
			for i := range objects {
				name := fmt.Sprint("object-", i)
				var owner string
				for _, p := range members {
					if p.group.Owns(name) {
						owner = p.name
					}
				}
				if owner == "" || k.last[name] != owner {
					return fmt.Errorf("%s is %q's and was reconciled by %q", name, owner, k.last[name])
				}
				share[owner]++
			}
			if len(share) != len(members) {
				return fmt.Errorf("the shares are %v", share)
			}
			return nil
		})
	}
	a := w.joinByKey(k, "a", -1)
	settled("a alone", a)
	b := w.joinByKey(k, "b", 4*time.Second)
	settled("b has come", a, b)
	c := w.joinByKey(k, "c", 4*time.Second)
	settled("c has come", a, b, c)
	b.stop()
	settled("b has left", a, c)
	a.stop() // without a word
	w.runOut("a")
	settled("a has crashed", c)

	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.wrong) > 0 {
		t.Error(strings.Join(k.wrong, "\n"))
	}
	if k.lost["a"] == 0 || k.lost["c"] != 0 {
		t.Errorf("told of losses: %v; a has lost objects to b and c, and c none", k.lost)
	}
}

func TestWritesByKeyNeedOwnership(t *testing.T) {
	c := api(t)
	w := newWorldOn(t, apiServer, c, func(s *lbv1alpha1.WatchGroupSpec) {
		s.Lease.RetryPeriod = &metav1.Duration{Duration: time.Minute} // nothing is acquired again before the test is over
	})
	k := &keyed{t: t, at: map[string]string{}, last: map[string]string{}, taken: map[string]map[Turn]bool{}, lost: map[string]int{}}
	p := w.joinByKey(k, "a", 4*time.Second)
	eventually(t, "the first grant", func() error {
		if !p.group.Owns("object") {
			return errors.New("nothing is owned")
		}
		return nil
	})
	j, turn, err := p.group.member.beginKey("object")
	if err != nil || turn == 0 {
		t.Fatalf("turn %d: %v", turn, err)
	}
	ctx := context.WithValue(t.Context(), jobKey{}, j)
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "object"}}
	if err := p.mgr.GetClient().Create(ctx, account); err != nil {
		t.Errorf("the owner's write: %v", err)
	}
	p.group.member.newSession("another")
	if err := p.mgr.GetClient().Delete(ctx, account); !errors.Is(err, ErrFenced) {
		t.Errorf("a write of a session that has ended: %v, expected %v", err, ErrFenced)
	}
	j.end(false)
	if _, _, err := p.group.member.beginKey("object"); !errors.Is(err, ErrFenced) {
		t.Errorf("work without a lease: %v, expected %v", err, ErrFenced)
	}
	if p.group.Owns("object") {
		t.Error("a member without a lease owns something")
	}
}

func TestByKeyIsRefusedWhereItWouldNotHold(t *testing.T) {
	w := newWorld(t)
	manager := func(group string) ctrl.Manager {
		g := New(Options{WatchGroup: group, Namespace: w.ns, Member: "a"})
		mgr, err := ctrl.NewManager(apiServer, ctrl.Options{Scheme: testScheme(), NewCache: g.NewCache, NewClient: g.NewClient,
			Metrics: metricsserver.Options{BindAddress: "0"}, Controller: ctrlconfig.Controller{SkipNameValidation: ptr.To(true)}})
		if err != nil {
			t.Fatal(err)
		}
		return mgr
	}
	ordinary := reconcile.Func(func(context.Context, reconcile.Request) (reconcile.Result, error) { return reconcile.Result{}, nil })
	err := ControllerManagedBy(manager(groupName)).For(&corev1.ConfigMap{}).ByKey(Keys{}).Complete(ordinary)
	if err == nil || !strings.Contains(err.Error(), "configmaps") || !strings.Contains(err.Error(), w.ns+"/"+groupName) {
		t.Errorf("a kind of the group: %v", err)
	}
	eventual := &lbv1alpha1.WatchGroup{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "eventual"},
		Spec: lbv1alpha1.WatchGroupSpec{VirtualNodes: realV, Handoff: lbv1alpha1.HandoffEventual}}
	if err := w.c.Create(t.Context(), eventual); err == nil || !strings.Contains(err.Error(), "handoff") {
		t.Errorf("a group without resources and an owner at any time: %v", err)
	}
	eventual.Spec.Resources = []lbv1alpha1.Resource{{Resource: "configmaps"}}
	if err := w.c.Create(t.Context(), eventual); err != nil {
		t.Fatal(err)
	}
	err = ControllerManagedBy(manager("eventual")).For(&corev1.ServiceAccount{}).ByKey(Keys{}).Complete(ordinary)
	if err == nil || !strings.Contains(err.Error(), `spec.handoff: "Eventual"`) {
		t.Errorf("a group in which a key can have two owners: %v", err)
	}
}
