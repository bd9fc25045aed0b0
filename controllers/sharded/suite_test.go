package sharded

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/internal/controlplane"
	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/history"
	"github.com/drover-sh/drover/sharding/wire"
)

var (
	apiServer    *rest.Config
	apiServerErr error
	apiServerUse sync.Once
	stopServer   = func() {}
)

func TestMain(m *testing.M) {
	ctrl.SetLogger(logr.Discard())
	code := m.Run()
	stopServer()
	os.Exit(code)
}

// api returns the API server that the tests of this package share, started when the first one asks.
func api(t *testing.T) client.Client {
	t.Helper()
	if testing.Short() {
		t.Skip("needs an API server")
	}
	apiServerUse.Do(func() {
		dir, err := os.MkdirTemp("", "sharded")
		if err != nil {
			apiServerErr = err
			return
		}
		cp, err := controlplane.Start(context.Background(), controlplane.Options{
			Dir:      dir,
			CRDPaths: []string{filepath.Join("..", "..", "manifests", "crd", "bases")},
		})
		if err != nil {
			os.RemoveAll(dir)
			apiServerErr = err
			return
		}
		apiServer = cp.Config()
		apiServer.QPS = -1
		stopServer = func() {
			if err := cp.Stop(); err != nil {
				fmt.Fprintln(os.Stderr, err)
			}
			os.RemoveAll(dir)
		}
	})
	if apiServerErr != nil {
		t.Fatal(apiServerErr)
	}
	c, err := client.New(apiServer, client.Options{Scheme: testScheme()})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func testScheme() *runtime.Scheme {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, lbv1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			panic(err)
		}
	}
	return scheme
}

// The parents of these tests are ConfigMaps, their children Secrets of the same name.
const (
	realParents  = sharding.Resource("configmaps")
	realChildren = sharding.Resource("secrets")
	realV        = 60
	groupName    = "parents"
)

// realPolicy is that of a group in which no Lease runs out, however long the machine stands still: a member that loses its
// own begins anew, and what a test has seen that it owns is no longer so.
var realPolicy = sharding.LeasePolicy{
	LeaseDuration: 10 * time.Minute, RenewDeadline: 5 * time.Minute, RetryPeriod: 300 * time.Millisecond,
	RequestTimeout: time.Minute,
}

// leasesFor makes a group whose Leases run out after d.
func leasesFor(d time.Duration) func(*lbv1alpha1.WatchGroupSpec) {
	return func(s *lbv1alpha1.WatchGroupSpec) {
		s.Lease.LeaseDuration = &metav1.Duration{Duration: d}
		s.Lease.RenewDeadline = &metav1.Duration{Duration: d / 2}
		s.Lease.RequestTimeout = &metav1.Duration{Duration: d * 3 / 8}
	}
}

// A world is a WatchGroup in a namespace of its own, with a coordinator and whatever members a test starts.
type world struct {
	t      *testing.T
	config *rest.Config
	c      client.Client
	ns     string
	by     mapping
	spaces []string // the namespaces of the parents
	// build adds the controller to a member's manager.
	build func(p *participant) error
	tape  *tape
	lease time.Duration
	mu    sync.Mutex
	over  map[string]bool // sessions that the tape knows to have ended
	dead  map[string]bool // members that have ended without a word, and whose Leases have run out since
}

func newWorld(t *testing.T) *world {
	t.Helper()
	c := api(t)
	return newWorldOn(t, apiServer, c, nil)
}

// newWorldOn makes a world on another API server, or of another group.
func newWorldOn(t *testing.T, config *rest.Config, c client.Client, change func(*lbv1alpha1.WatchGroupSpec)) *world {
	t.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "sharded-"}}
	if err := c.Create(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
	d := func(d time.Duration) *metav1.Duration { return &metav1.Duration{Duration: d} }
	group := &lbv1alpha1.WatchGroup{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns.Name, Name: groupName},
		Spec: lbv1alpha1.WatchGroupSpec{
			VirtualNodes: realV,
			Resources:    []lbv1alpha1.Resource{{Resource: string(realParents)}, {Resource: string(realChildren)}},
			Lease: lbv1alpha1.LeaseParameters{
				LeaseDuration: d(realPolicy.LeaseDuration), RenewDeadline: d(realPolicy.RenewDeadline),
				RetryPeriod: d(realPolicy.RetryPeriod), RequestTimeout: d(realPolicy.RequestTimeout),
			},
		},
	}
	if change != nil {
		change(&group.Spec)
	}
	if err := c.Create(t.Context(), group); err != nil {
		t.Fatal(err)
	}
	by, err := mappingOf(group.Spec)
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, config: config, c: c, ns: ns.Name, by: by, spaces: []string{ns.Name}, build: buildParents,
		tape: newTape(), lease: wire.LeasePolicy(group.Spec).LeaseDuration, over: make(map[string]bool),
		dead: make(map[string]bool)}
	t.Cleanup(func() {
		for _, space := range w.spaces {
			for _, obj := range []client.Object{&corev1.ConfigMap{}, &corev1.Secret{}} {
				if err := c.DeleteAllOf(context.Background(), obj, client.InNamespace(space)); err != nil {
					t.Error(err)
				}
			}
		}
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		(&driver{world: w, claim: "driver"}).run(ctx)
	}()
	t.Cleanup(func() { cancel(); <-done })
	return w
}

// A driver is the least that a coordinator can be.
type driver struct {
	*world
	claim string
	watch sharding.LeaseWatch
	holds map[string]string
}

func (d *driver) run(ctx context.Context) {
	d.holds = make(map[string]string)
	for sleep(ctx, 5*time.Millisecond) {
		if err := d.step(ctx); err != nil && ctx.Err() == nil && !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err) {
			d.t.Logf("coordinator: %v", err)
		}
	}
}

func (d *driver) step(ctx context.Context) error {
	var list lbv1alpha1.VirtualNodeSliceList
	if err := d.c.List(ctx, &list, client.InNamespace(d.ns)); err != nil {
		return err
	}
	var obs sharding.Observation
	for i := range list.Items {
		s, err := wire.Slice(&list.Items[i])
		if err != nil {
			return err
		}
		obs.Slices = append(obs.Slices, s)
		for _, r := range s.Status.Released {
			if s.Status.Session == s.Session {
				d.tape.add(history.Record{Kind: history.Released, Member: s.Member, Session: s.Session, VNs: r.VNs})
			}
		}
	}
	var leases coordinationv1.LeaseList
	if err := d.c.List(ctx, &leases, client.InNamespace(d.ns)); err != nil {
		return err
	}
	for i := range leases.Items {
		l := &leases.Items[i]
		member := strings.TrimPrefix(l.Name, groupName+".")
		holder := ptr.Deref(l.Spec.HolderIdentity, "")
		if old := d.holds[member]; old != "" && old != holder {
			d.ended(member, old)
		}
		d.holds[member] = holder
		d.watch.Observe(sharding.LeaseRecord{Member: member, Session: holder, Renewal: l.ResourceVersion,
			Duration: d.lease}, bootTime())
		if holder != "" && d.hasRunOut(member) {
			l.Spec.HolderIdentity = nil
			if err := d.c.Update(ctx, l); err != nil {
				return err
			}
			d.ended(member, holder)
			d.holds[member], holder = "", ""
		}
		asked := false
		for _, s := range obs.Slices {
			asked = asked || (s.Member == member && s.Status.Leaving && s.Status.Session == holder)
		}
		facts := sharding.MemberFacts{Session: holder, LeaveAsked: asked}
		obs.Members = append(obs.Members, sharding.MemberState{ID: member, Session: holder, Phase: facts.Phase()})
	}
	coordinator := sharding.Coordinator{Claim: d.claim, VirtualNodes: realV, Mode: sharding.Exclusive, Assignment: sharding.Balanced{}}
	for _, w := range coordinator.Step(obs) {
		if err := d.write(ctx, w, obs.Slices); err != nil {
			return err
		}
	}
	return nil
}

func (d *driver) write(ctx context.Context, w sharding.Write, observed []sharding.Slice) error {
	obj := &lbv1alpha1.VirtualNodeSlice{Spec: wire.SliceSpec(groupName, w.Slice)}
	obj.Namespace, obj.Name = d.ns, lbv1alpha1.MemberName(groupName, w.Slice.Member)
	switch w.Op {
	case sharding.Create:
		return d.c.Create(ctx, obj)
	case sharding.Delete:
		return d.c.Delete(ctx, obj, client.Preconditions{ResourceVersion: &w.Slice.Version})
	}
	// What is given is noted before the member can act on it.
	gained := w.Slice.Owned
	for _, s := range observed {
		if s.Member == w.Slice.Member && s.Session == w.Slice.Session {
			gained = gained.Minus(s.Owned)
		}
	}
	note := func(kind history.Kind) {
		if !gained.Empty() {
			d.tape.add(history.Record{Kind: kind, Member: w.Slice.Member, Session: w.Slice.Session, VNs: gained})
		}
	}
	note(history.Granted)
	obj.ResourceVersion = w.Slice.Version
	err := d.c.Update(ctx, obj)
	if err != nil {
		note(history.Released)
	}
	return err
}

func (d *driver) hasRunOut(member string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.dead[member] || d.watch.Session(member, bootTime()) == ""
}

// runOut lets time pass until the Lease of a member that has ended without a word has run out.
func (w *world) runOut(member string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.dead[member] = true
}

func (w *world) ended(member, session string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.over[session] {
		w.over[session] = true
		w.tape.add(history.Record{Kind: history.SessionEnded, Member: member, Session: session})
	}
}

// A participant is a member with a manager and a controller of its own.
type participant struct {
	world  *world
	name   string
	group  *Group
	mgr    ctrl.Manager
	cancel context.CancelFunc
	done   chan struct{}
	gate   *gate
}

// A gate is a network that can be cut.
type gate struct {
	mu  sync.Mutex
	cut chan struct{} // nil while the network is whole; closed when it is again
	// queries are those of the lists and watches of Virtual Nodes that went through.
	queries []url.Values
	// writes are those of the writes of the group's kinds.
	writes []url.Values
}

var groupPath = regexp.MustCompile(`/(configmaps|secrets)(/|$)`)

func (g *gate) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		g.mu.Lock()
		cut := g.cut
		if q := r.URL.Query(); strings.Contains(q.Get("labelSelector"), sharding.LabelVirtualNode) || q.Get("shardSelector") != "" {
			g.queries = append(g.queries, q)
		}
		if r.Method != http.MethodGet && groupPath.MatchString(r.URL.Path) {
			g.writes = append(g.writes, r.URL.Query())
		}
		g.mu.Unlock()
		if cut != nil {
			select {
			case <-cut:
			case <-r.Context().Done():
				return nil, r.Context().Err()
			}
		}
		return next.RoundTrip(r)
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func (g *gate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.cut = make(chan struct{})
}

func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.cut != nil {
		close(g.cut)
		g.cut = nil
	}
}

func (w *world) join(name string, change func(*Options)) *participant {
	w.t.Helper()
	p := &participant{world: w, name: name, done: make(chan struct{}), gate: &gate{}}
	o := Options{WatchGroup: groupName, Namespace: w.ns, Member: name, LeaveTimeout: 4 * time.Second, Record: w.tape.add}
	if change != nil {
		change(&o)
	}
	p.group = New(o)
	config := rest.CopyConfig(w.config)
	config.Wrap(p.gate.wrap)
	var err error
	p.mgr, err = ctrl.NewManager(config, ctrl.Options{
		Scheme:    testScheme(),
		NewCache:  p.group.NewCache,
		NewClient: p.group.NewClient,
		Metrics:   metricsserver.Options{BindAddress: "0"},
		Controller: ctrlconfig.Controller{
			SkipNameValidation: ptr.To(true),
		},
		GracefulShutdownTimeout: ptr.To(2 * patience),
	})
	if err != nil {
		w.t.Fatal(err)
	}
	if err := w.build(p); err != nil {
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

// buildParents adds the controller of parents and children.
func buildParents(p *participant) error {
	return ControllerManagedBy(p.mgr).For(&corev1.ConfigMap{}).Owns(&corev1.Secret{}).
		WithOptions(controller.Options{MaxConcurrentReconciles: 4}).
		Complete(&parentReconciler{Client: p.mgr.GetClient(), world: p.world, member: p.name})
}

func (p *participant) stop() {
	p.gate.open()
	p.cancel()
	<-p.done
}
