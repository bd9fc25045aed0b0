package chaos

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	v1alpha1 "github.com/drover-sh/drover/examples/parentchild/api/v1alpha1"
	"github.com/drover-sh/drover/examples/parentchild/recording"
	"github.com/drover-sh/drover/internal/controlplane"
	"github.com/drover-sh/drover/internal/process"
	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/history"
	"github.com/drover-sh/drover/sharding/wire"
)

const (
	namespace    = "chaos"
	groupName    = "parents"
	virtualNodes = 1000

	leaseDuration = 6 * time.Second
	// patience is how long a test waits for what has to come. It is a limit for hangs, not an expectation of speed.
	patience = 5 * time.Minute
)

func TestMain(m *testing.M) {
	ctrl.SetLogger(logr.Discard())
	var err error
	if binaries, err = os.MkdirTemp("", "drover-chaos-bin-"); err != nil {
		fmt.Fprintln(os.Stderr, "chaos:", err)
		os.Exit(1)
	}
	code := m.Run()
	os.RemoveAll(binaries)
	os.Exit(code)
}

// binaries is the folder that programs builds into.
var binaries string

// programs builds the real programs, once.
var programs = sync.OnceValues(func() (string, error) {
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		return "", err
	}
	build := exec.Command("go", "build", "-o", binaries+"/", "./cmd/coordinator", "./examples/parentchild")
	build.Dir = root
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building the programs: %w\n%s", err, out)
	}
	return binaries, nil
})

// A cluster is everything that a test breaks.
type cluster struct {
	t      *testing.T
	dir    string
	bin    string
	cp     *controlplane.ControlPlane
	group  *process.Group
	store  *store
	user   *recording.Recorder
	client client.Client // the user's

	admission    admission
	members      []*member
	coordinators []*program
	coordinator  string        // the kubeconfig of all coordinators
	controller   string        // that of all members, but for the address
	work         time.Duration // of a reconcile, besides its requests
	ending       atomic.Bool
	begun        time.Time // when rights were given
}

type options struct {
	handoff      lbv1alpha1.HandoffMode
	members      int
	coordinators int
	apiServer    map[string][]string
	work         time.Duration
	lease        time.Duration // that of members, zero for leaseDuration
}

func start(t *testing.T, o options) *cluster {
	t.Helper()
	c := &cluster{t: t, work: o.work}
	var err error
	if c.bin, err = programs(); err != nil {
		t.Fatal(err)
	}
	if c.dir, err = os.MkdirTemp("", "drover-chaos-"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("history, logs and record files are kept in %s", c.dir)
			return
		}
		os.RemoveAll(c.dir)
	})
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		t.Fatal(err)
	}
	c.cp, err = controlplane.Start(t.Context(), controlplane.Options{
		Dir: filepath.Join(c.dir, "control-plane"), ControllerManager: true, APIServerArgs: o.apiServer,
		CRDPaths: []string{filepath.Join(root, "manifests/crd/bases"), filepath.Join(root, "examples/parentchild/crd")},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.cp.Stop(); err != nil {
			t.Error(err)
		}
	})
	c.store = watchStore(t, c.cp.EtcdURL())
	if c.group, err = process.NewGroup(filepath.Join(c.dir, "programs")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.group.Stop(10 * time.Second) })
	c.connect()
	c.ticks()
	c.admit(root, o.coordinators)
	c.setUp(o)
	c.authorize(root)
	c.begun = time.Now()
	for i := range o.coordinators {
		c.coordinators = append(c.coordinators, c.newCoordinator(i))
	}
	for i := range o.members {
		c.members = append(c.members, c.newMember(i))
	}
	return c
}

func testScheme() *runtime.Scheme {
	s := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(s), lbv1alpha1.AddToScheme(s), v1alpha1.AddToScheme(s)); err != nil {
		panic(err)
	}
	return s
}

// connect makes the user's client, whose writes are recorded as the members' are.
func (c *cluster) connect() {
	c.t.Helper()
	var err error
	if c.user, err = recording.Create(filepath.Join(c.dir, "user.jsonl")); err != nil {
		c.t.Fatal(err)
	}
	config := c.cp.Config()
	config.QPS = -1
	c.user.Configure(config, recording.Identity{Actor: history.User})
	if c.client, err = client.New(config, client.Options{Scheme: testScheme()}); err != nil {
		c.t.Fatal(err)
	}
}

// ticks writes an object ten times a second. When a landing without a request of its own was made is known to lie between
// the landings before and after it, and this bounds it.
func (c *cluster) ticks() {
	ctx, cancel := context.WithCancel(context.Background())
	var wait sync.WaitGroup
	c.t.Cleanup(func() { cancel(); wait.Wait() })
	wait.Go(func() {
		every := time.NewTicker(100 * time.Millisecond)
		defer every.Stop()
		for n := 0; ; n++ {
			select {
			case <-ctx.Done():
				return
			case <-every.C:
			}
			request, done := context.WithTimeout(ctx, 2*time.Second)
			tick := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "clock"}}
			patch := client.RawPatch("application/merge-patch+json", fmt.Appendf(nil, `{"data":{"tick":"%d"}}`, n))
			if err := c.client.Patch(request, tick, patch); err != nil {
				tick.Data = map[string]string{"tick": "new"}
				_ = c.client.Create(request, tick) // it is there, or the API server is not
			}
			done()
		}
	})
}

func (c *cluster) setUp(o options) {
	c.t.Helper()
	seconds := func(d time.Duration) *metav1.Duration { return &metav1.Duration{Duration: d} }
	lease := cmp.Or(o.lease, leaseDuration)
	for _, obj := range []client.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}},
		&v1alpha1.Gate{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: v1alpha1.GateName}, Spec: v1alpha1.GateSpec{Open: true},
		},
		&lbv1alpha1.WatchGroup{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: groupName},
			Spec: lbv1alpha1.WatchGroupSpec{
				VirtualNodes: virtualNodes, Handoff: o.handoff, OptIn: lbv1alpha1.OptInAll,
				Resources: []lbv1alpha1.Resource{
					{Group: v1alpha1.GroupVersion.Group, Resource: "parents"},
					{Group: v1alpha1.GroupVersion.Group, Resource: "children"},
				},
				Lease: lbv1alpha1.LeaseParameters{
					LeaseDuration: seconds(lease), RenewDeadline: seconds(lease / 2),
					RetryPeriod: seconds(500 * time.Millisecond), RequestTimeout: seconds(2 * time.Second),
				},
				NewcomerGrace: seconds(time.Second),
			},
		},
	} {
		if err := c.client.Create(c.t.Context(), obj); err != nil {
			c.t.Fatal(err)
		}
	}
}

func (c *cluster) path(name string) string { return filepath.Join(c.dir, name) }

// note records a fault, or its end.
func (c *cluster) note(who, what string) {
	c.user.Record(history.Record{Kind: history.Changed, Member: who, What: what})
}

// eventually polls until check returns nothing to complain about.
func (c *cluster) eventually(what string, check func(context.Context) error) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	for {
		err := check(ctx)
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			c.t.Fatalf("waited in vain until %s; at last: %v\n%s", what, err, c.dump())
		case <-tick.C:
		}
	}
}

// settled complains while the group is not quiet, or its members have not all of it in equal shares.
func (c *cluster) settled(ctx context.Context, members int) error {
	var g lbv1alpha1.WatchGroup
	if err := c.client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: groupName}, &g); err != nil {
		return err
	}
	s := g.Status
	if int(s.Members) != members || s.Unowned != 0 || s.Moving != 0 || s.UnlabelledObjects != 0 || s.Owned != virtualNodes {
		return fmt.Errorf("members %d, owned %d, unowned %d, moving %d, unlabelled %d; conditions %s", s.Members, s.Owned,
			s.Unowned, s.Moving, s.UnlabelledObjects, conditions(s.Conditions))
	}
	for _, condition := range []string{
		lbv1alpha1.ConditionUnowned, lbv1alpha1.ConditionMoving, lbv1alpha1.ConditionUnlabelled,
	} {
		if !meta.IsStatusConditionFalse(s.Conditions, condition) {
			return fmt.Errorf("conditions %s", conditions(s.Conditions))
		}
	}
	owned, err := c.owned(ctx)
	if err != nil {
		return err
	}
	working := 0
	for member, vns := range owned {
		switch most := virtualNodes*11/members/10 + 1; {
		case vns.Len() > most:
			return fmt.Errorf("%s owns %d Virtual Nodes, more than %d", member, vns.Len(), most)
		case !vns.Empty():
			working++
		}
	}
	if working != members {
		return fmt.Errorf("%d of %d members own something", working, members)
	}
	return nil
}

// owned returns what the members own, by their slices.
func (c *cluster) owned(ctx context.Context) (map[string]sharding.Set, error) {
	var slices lbv1alpha1.VirtualNodeSliceList
	if err := c.client.List(ctx, &slices, client.InNamespace(namespace)); err != nil {
		return nil, err
	}
	owned := make(map[string]sharding.Set)
	for i := range slices.Items {
		s, err := wire.Slice(&slices.Items[i])
		if err != nil {
			return nil, err
		}
		owned[s.Member] = s.Owned
	}
	return owned, nil
}

func conditions(list []metav1.Condition) string {
	var b strings.Builder
	for _, c := range list {
		fmt.Fprintf(&b, "%s=%s(%s) ", c.Type, c.Status, c.Message)
	}
	return b.String()
}

// dump shows the ends of the programs' logs.
func (c *cluster) dump() string {
	var b strings.Builder
	logs, _ := filepath.Glob(filepath.Join(c.group.LogDir(), "*.log"))
	for _, log := range logs {
		fmt.Fprintf(&b, "the end of %s:\n%s\n", filepath.Base(log), process.Tail(log, 10))
	}
	return b.String()
}
