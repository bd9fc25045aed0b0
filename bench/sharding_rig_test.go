package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	v1alpha1 "github.com/drover-sh/drover/examples/parentchild/api/v1alpha1"
	"github.com/drover-sh/drover/examples/parentchild/recording"
	"github.com/drover-sh/drover/internal/controlplane"
	"github.com/drover-sh/drover/internal/process"
	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/wire"
)

const (
	groupName = "parents"
	// patience bounds every wait. It is a limit for hangs, not an expectation of speed.
	patience = 2 * time.Minute
)

// A shardedRig is a control plane with a coordinator, a group of V Virtual Nodes over Parents and Children, and its members.
type shardedRig struct {
	b       *testing.B
	dir     string
	cp      *controlplane.ControlPlane
	group   *process.Group
	client  client.WithWatch
	v       int
	buckets sharding.Buckets
	socket  string
	objects map[sharding.VirtualNode]int // how many Parents and Children together are in each
	parents int
	changes int

	mu       sync.Mutex
	changed  chan struct{} // closed, and replaced, whenever something of what follows changes
	slices   map[string]sharding.Slice
	leases   map[string]time.Duration // by member: when its Lease was last seen to get a new holder
	leaving  map[string]time.Duration // by member: when it was first seen to ask
	draining []seen
	settled  []seen
	beats    func(message)
	usages   map[string]*usage
	members  map[string]*rigMember
}

// seen is what happened to Virtual Nodes. It is taken apart when all is over: 50,000 of them one by one take time.
type seen struct {
	at  time.Duration
	vns sharding.Set
}

type rigMember struct {
	process *process.Process
	conn    net.Conn
}

type rigOptions struct {
	virtualNodes int
	webhook      bool
	lease        lbv1alpha1.LeaseParameters
}

// startSharded starts everything but members. There is no webhook: what the benchmark creates is labelled already.
func startSharded(b *testing.B, o rigOptions) *shardedRig {
	b.Helper()
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		b.Fatal(err)
	}
	r := &shardedRig{
		b: b, dir: b.TempDir(), v: o.virtualNodes, objects: make(map[sharding.VirtualNode]int), changed: make(chan struct{}),
		slices: make(map[string]sharding.Slice), leases: make(map[string]time.Duration), leaving: make(map[string]time.Duration),
		usages: make(map[string]*usage), members: make(map[string]*rigMember),
	}
	r.cp, err = controlplane.Start(context.Background(), controlplane.Options{
		Dir:      filepath.Join(r.dir, "control-plane"),
		CRDPaths: []string{filepath.Join(root, "manifests/crd/bases"), filepath.Join(root, "examples/parentchild/crd")},
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := r.cp.Stop(); err != nil {
			b.Error(err)
		}
	})
	if r.group, err = process.NewGroup(filepath.Join(r.dir, "programs")); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		for _, m := range r.members {
			_ = m.process.Kill()
		}
		if err := r.group.Stop(10 * time.Second); err != nil {
			b.Error(err)
		}
		if b.Failed() {
			b.Logf("the end of the coordinator's log:\n%s", process.Tail(r.group.LogFile("coordinator"), 20))
		}
	})
	scheme := kruntime.NewScheme()
	err = errors.Join(clientgoscheme.AddToScheme(scheme), lbv1alpha1.AddToScheme(scheme), v1alpha1.AddToScheme(scheme))
	if err != nil {
		b.Fatal(err)
	}
	config := r.cp.Config()
	config.QPS = -1
	if r.client, err = client.NewWithWatch(config, client.Options{Scheme: scheme}); err != nil {
		b.Fatal(err)
	}
	r.makeGroup(o)
	r.listen()
	r.watch()
	r.startCoordinator(o)
	return r
}

func (r *shardedRig) makeGroup(o rigOptions) {
	r.b.Helper()
	g := &lbv1alpha1.WatchGroup{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: groupName},
		Spec: lbv1alpha1.WatchGroupSpec{
			VirtualNodes: int32(o.virtualNodes), OptIn: lbv1alpha1.OptInAll,
			Resources: []lbv1alpha1.Resource{
				{Group: v1alpha1.GroupVersion.Group, Resource: "parents"},
				{Group: v1alpha1.GroupVersion.Group, Resource: "children"},
			},
			Lease: o.lease, NewcomerGrace: &metav1.Duration{},
		},
	}
	gate := &v1alpha1.Gate{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: v1alpha1.GateName}, Spec: v1alpha1.GateSpec{Open: true},
	}
	for _, obj := range []client.Object{g, gate} {
		if err := r.client.Create(context.Background(), obj); err != nil {
			r.b.Fatal(err)
		}
	}
	r.buckets = wire.Buckets(g.Spec)
}

func (r *shardedRig) startCoordinator(o rigOptions) {
	r.b.Helper()
	webhook := "{enabled: false}"
	if o.webhook {
		webhook = r.admit()
	}
	file := filepath.Join(r.dir, "coordinator.yaml")
	config := fmt.Sprintf(`apiVersion: config.drover.sh/v1alpha1
kind: CoordinatorConfiguration
namespace: %s
metricsBindAddress: "0"
healthProbeBindAddress: "0"
webhook: %s
`, namespace, webhook)
	if err := os.WriteFile(file, []byte(config), 0o644); err != nil {
		r.b.Fatal(err)
	}
	r.launch("coordinator", coordinatorEnv+"="+file, kubeconfigEnv+"="+r.cp.Kubeconfig())
}

func (r *shardedRig) launch(name string, env ...string) *process.Process {
	r.b.Helper()
	p, err := r.group.Start(process.Spec{
		Name: name, Path: os.Args[0], Env: append(env, "POD_NAME=", "POD_NAMESPACE=", "POD_UID=", "CONTAINER_NAME="),
	})
	if err != nil {
		r.b.Fatal(err)
	}
	return p
}

// listen takes in what members tell.
func (r *shardedRig) listen() {
	r.b.Helper()
	r.socket = filepath.Join(r.dir, "bench.sock")
	l, err := net.Listen("unix", r.socket)
	if err != nil {
		r.b.Fatal(err)
	}
	r.b.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go r.hear(conn)
		}
	}()
}

func (r *shardedRig) hear(conn net.Conn) {
	defer conn.Close()
	in := json.NewDecoder(bufio.NewReaderSize(conn, 1<<16))
	for {
		var m message
		if in.Decode(&m) != nil {
			return
		}
		r.note(func() {
			switch {
			case m.Object != "":
				if r.beats != nil {
					r.beats(m)
				}
			case m.Usage != nil:
				r.usages[m.Member] = m.Usage
			case m.Settled != nil:
				r.settled = append(r.settled, seen{m.At, m.Settled})
			default:
				r.members[m.Member].conn = conn
			}
		})
	}
}

// note changes what is known, and wakes who waits for that.
func (r *shardedRig) note(change func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change()
	close(r.changed)
	r.changed = make(chan struct{})
}

// until waits until done, which is called under the lock, is true.
func (r *shardedRig) until(what string, done func() bool) {
	r.b.Helper()
	timeout := time.NewTimer(patience)
	defer timeout.Stop()
	for {
		r.mu.Lock()
		ok, changed := done(), r.changed
		r.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-changed:
		case <-timeout.C:
			r.b.Fatalf("waited in vain until %s", what)
		}
	}
}

// watch follows slices and Leases as the coordinator and the members do, and notes when each thing was seen.
func (r *shardedRig) watch() {
	r.b.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	r.b.Cleanup(cancel)
	follow := func(list client.ObjectList, see func(watch.Event)) {
		if err := r.client.List(ctx, list, client.InNamespace(namespace)); err != nil {
			r.b.Fatal(err)
		}
		w, err := r.client.Watch(ctx, list, client.InNamespace(namespace),
			&client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: list.GetResourceVersion()}})
		if err != nil {
			r.b.Fatal(err)
		}
		go func() {
			defer w.Stop()
			for e := range w.ResultChan() {
				r.note(func() { see(e) })
			}
		}()
	}
	holders := make(map[string]string)
	follow(&coordinationv1.LeaseList{}, func(e watch.Event) {
		if lease, ok := e.Object.(*coordinationv1.Lease); ok {
			member := lease.Name[min(len(groupName)+1, len(lease.Name)):]
			if holder := ptr.Deref(lease.Spec.HolderIdentity, ""); holder != holders[member] {
				holders[member], r.leases[member] = holder, recording.Now()
			}
		}
	})
	follow(&lbv1alpha1.VirtualNodeSliceList{}, func(e watch.Event) {
		if o, ok := e.Object.(*lbv1alpha1.VirtualNodeSlice); ok {
			r.seeSlice(o, e.Type == watch.Deleted)
		}
	})
}

func (r *shardedRig) seeSlice(o *lbv1alpha1.VirtualNodeSlice, deleted bool) {
	now := recording.Now()
	s, err := wire.Slice(o)
	if err != nil {
		r.b.Error(err)
		return
	}
	if deleted {
		delete(r.slices, s.Member)
		return
	}
	before := r.slices[s.Member]
	r.slices[s.Member] = s
	if s.Status.Leaving && r.leaving[s.Member] == 0 {
		r.leaving[s.Member] = now
	}
	known := make(map[sharding.Epoch]bool)
	for _, d := range before.Draining {
		known[d.Epoch] = true
	}
	for _, d := range s.Draining {
		if !known[d.Epoch] {
			r.draining = append(r.draining, seen{now, d.VNs})
		}
	}
}

// join starts a member and returns its process.
func (r *shardedRig) join(c memberConfig) *rigMember {
	r.b.Helper()
	c.Kubeconfig, c.Group, c.Socket = r.cp.Kubeconfig(), groupName, r.socket
	text, err := json.Marshal(c)
	if err != nil {
		r.b.Fatal(err)
	}
	m := &rigMember{}
	r.note(func() { r.members[c.Name] = m })
	m.process = r.launch(c.Name, memberEnv+"="+string(text))
	return m
}

// quiet waits until so many members own everything in equal shares, and nothing moves.
func (r *shardedRig) quiet(members int) {
	r.b.Helper()
	r.until(fmt.Sprintf("%d members have their share", members), func() bool { return r.isQuiet(members) })
}

func (r *shardedRig) isQuiet(members int) bool {
	owned, working := 0, 0
	for _, s := range r.slices {
		if n := s.Owned.Len(); n > 0 {
			owned += n
			working++
		}
		if s.Moving() > 0 || s.Status.Settled < s.Epoch || s.Status.Session != s.Session {
			return false
		}
	}
	return owned == r.v && working == members && len(r.slices) == members
}

// usageOf asks a member what it uses.
func (r *shardedRig) usageOf(name string) usage {
	r.b.Helper()
	var conn net.Conn
	r.until(name+" is connected", func() bool {
		conn = r.members[name].conn
		return conn != nil
	})
	r.note(func() { delete(r.usages, name) })
	if _, err := conn.Write([]byte("usage\n")); err != nil {
		r.b.Fatal(err)
	}
	r.until(name+" has told what it uses", func() bool { return r.usages[name] != nil })
	return *r.usages[name]
}

// populate makes Parents, each with its Child if children is set, labelled as the webhook would.
func (r *shardedRig) populate(parents int, children bool) {
	r.b.Helper()
	inParallel(r.b, parents, func(i int) error {
		name := parentName(i)
		vn := r.virtualNodeOf(name)
		labels := map[string]string{
			sharding.LabelVirtualNode: vn.LabelValue(), sharding.LabelBucket: fmt.Sprint(r.buckets.Of(vn)),
		}
		meta := metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: labels}
		p := &v1alpha1.Parent{ObjectMeta: meta, Spec: v1alpha1.ParentSpec{Value: "v"}}
		if err := r.client.Create(context.Background(), p); err != nil || !children {
			return err
		}
		meta.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(p, v1alpha1.GroupVersion.WithKind("Parent"))}
		return r.client.Create(context.Background(), &v1alpha1.Child{ObjectMeta: meta, Spec: v1alpha1.ChildSpec{Value: "v"}})
	})
	r.parents = parents
	for i := range parents {
		n := 1
		if children {
			n = 2
		}
		r.objects[r.virtualNodeOf(parentName(i))] += n
	}
}

func parentName(i int) string { return fmt.Sprintf("parent-%05d", i) }

func (r *shardedRig) virtualNodeOf(parent string) sharding.VirtualNode {
	ref := sharding.ObjectRef{Group: v1alpha1.GroupVersion.Group, Kind: "Parent", Namespace: namespace, Name: parent}
	return sharding.VirtualNodeOf(ref.Key(), r.v)
}

// gate opens or closes the sample controller's gate.
func (r *shardedRig) gate(open bool) {
	r.b.Helper()
	gate := &v1alpha1.Gate{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: v1alpha1.GateName}}
	patch := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"spec":{"open":%t}}`, open))
	if err := r.client.Patch(context.Background(), gate, patch); err != nil {
		r.b.Fatal(err)
	}
}

// plainList lists the objects of vns as any program with client-go would, one kind after the other, and returns how long
// that took.
func (r *shardedRig) plainList(vns sharding.Set) time.Duration {
	r.b.Helper()
	s, _ := r.buckets.Selector(vns)
	selector := metav1.FormatLabelSelector(&metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{
		{Key: s.Label, Operator: metav1.LabelSelectorOpIn, Values: s.Values},
	}})
	config := r.cp.Config()
	config.QPS, config.APIPath, config.GroupVersion = -1, "/apis", &v1alpha1.GroupVersion
	scheme := r.client.Scheme()
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	rc, err := rest.RESTClientFor(config)
	if err != nil {
		r.b.Fatal(err)
	}
	// The connection is there before the clock starts, as a member's is.
	if err := rc.Get().Resource("gates").Do(context.Background()).Error(); err != nil {
		r.b.Fatal(err)
	}
	want := 0
	for vn := range vns.All() {
		want += r.objects[vn]
	}
	start := time.Now()
	var parents v1alpha1.ParentList
	var children v1alpha1.ChildList
	for resource, list := range map[string]kruntime.Object{"parents": &parents, "children": &children} {
		err := rc.Get().Resource(resource).VersionedParams(&metav1.ListOptions{LabelSelector: selector}, metav1.ParameterCodec).
			Do(context.Background()).Into(list)
		if err != nil {
			r.b.Fatal(err)
		}
	}
	took := time.Since(start)
	if n := len(parents.Items) + len(children.Items); n != want {
		r.b.Fatalf("listed %d objects, want %d", n, want)
	}
	return took
}
