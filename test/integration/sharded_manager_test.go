package integration

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/internal/manager"
	"github.com/drover-sh/drover/kueue/provisioning"
	"github.com/drover-sh/drover/sharding"
)

// TestShardedManagers runs the manager as the overlay sharded-manager deploys it: three replicas that all work at once, under
// the ServiceAccount, with the real coordinator and the real Kueue. Replicas are killed, stopped and robbed of the
// leadership while workloads wait and pods ask.
func TestShardedManagers(t *testing.T) {
	s := startSharded(t, "manager-a", "manager-b", "manager-c")
	t.Run("capacity is promised once", s.promisesOnce)
	t.Run("every replica serves its pods", s.servesPods)
	t.Run("rights", s.usesItsRights)
}

// promisesOnce: the fleet carries six of ten workloads. Whoever decides, no node is promised twice, and they go in order.
func (s *shardedFleet) promisesOnce(t *testing.T) {
	k := s.kueue.in(t, "sharded-promises")
	account := s.audit(t, k.ns, "gpu-h100")
	account.carries(25)
	k.hint("gpu-h100", 25) // 200 GPUs
	k.queue(fleetv1alpha1.CapacityCheckConfigSpec{}, "512", "gpu-h100")
	for i := range 10 {
		k.job(fmt.Sprintf("job-%d", i), 4, "8")
		if i == 2 {
			s.kill(t, s.decides(t))
		}
	}
	in, wls := k.admitted(6)
	var waiting []string
	for name := range wls {
		if !slices.Contains(in, name) {
			waiting = append(waiting, name)
		}
	}
	slices.SortFunc(waiting, func(a, b string) int {
		return cmp.Or(wls[a].CreationTimestamp.Compare(wls[b].CreationTimestamp.Time), cmp.Compare(a, b))
	})
	s.settled(t)
	faults := []struct {
		what string
		do   func()
	}{
		{"the replica that decides is killed", func() { s.kill(t, s.decides(t)) }},
		{"the replica that decides is stopped", func() { s.restart(t, s.decides(t)) }},
		{"the leader is robbed of its Lease", func() { s.rob(t) }},
		{"a replica is added, and the one that decides is killed", func() {
			s.configure("manager-d")
			s.fleet.start("manager-d")
			s.kill(t, s.decides(t))
		}},
	}
	for i, next := range waiting {
		in = append(in, next)
		slices.Sort(in)
		nodes := int32(24 + 4*(i+1))
		account.carries(nodes)
		faults[i].do()
		k.hint("gpu-h100", nodes)
		if got, _ := k.admitted(7 + i); !slices.Equal(got, in) {
			t.Fatalf("%v are admitted after %s, expected %v: %s was next", got, faults[i].what, in, next)
		}
	}
	s.settled(t)
	eventually(t, "40 nodes are promised to ten workloads, by one replica", func(ctx context.Context) (bool, string) {
		by, state := s.metric(ctx, `drover_kueue_promised_nodes{offering="gpu-h100"}`)
		return len(by) == 1 && sum(by) == 40, state
	})
	if _, wls = k.admitted(10); t.Failed() {
		return
	}
	for _, wl := range wls {
		if is(wl, kueue.WorkloadEvicted) {
			t.Errorf("workload %s was evicted on the way", wl.Name)
		}
	}
	background := client.PropagationPolicy(metav1.DeletePropagationBackground)
	if err := k.client.DeleteAllOf(t.Context(), &batchv1.Job{}, client.InNamespace(k.ns), background); err != nil {
		t.Fatal(err)
	}
	eventually(t, "nothing is promised any more", func(ctx context.Context) (bool, string) {
		by, state := s.metric(ctx, `drover_kueue_promised_nodes{offering="gpu-h100"}`)
		return len(by) == 0, state
	})
	account.expectNothingTwice(t)
}

// servesPods: pods of a scheduler without the plugin are divided among the replicas, get one request each, and are served
// by the others when a replica dies.
func (s *shardedFleet) servesPods(t *testing.T) {
	ns := namespace(t, "sharded-backstop")
	const written = `drover_demand_writes_total{result="created",source="backstop"}`
	before, _ := s.counted(t, written, 0)
	ask := func(name string, n int) {
		for i := range n {
			p := pod(t, ns, fmt.Sprintf("%s-%d", name, i), requests("cpu", "1"), func(spec *corev1.PodSpec) {
				spec.SchedulerName = "default-scheduler" // nobody runs it: the test speaks for it
			})
			old := p.DeepCopy()
			p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse,
				Reason: corev1.PodReasonUnschedulable, Message: "no nodes available to schedule pods", LastTransitionTime: metav1.Now()}}
			if err := env.client.Status().Patch(t.Context(), p, client.MergeFrom(old)); err != nil {
				t.Fatal(err)
			}
		}
	}
	expectRequests := func(n int) {
		t.Helper()
		eventually(t, fmt.Sprintf("%d pods have a request each", n), func(ctx context.Context) (bool, string) {
			var all fleetv1alpha1.CapacityRequestList
			failure := list(ctx, &all, client.InNamespace(ns))
			owners := map[types.UID]int{}
			for i := range all.Items {
				owners[all.Items[i].OwnerReferences[0].UID]++
			}
			return len(owners) == n && len(all.Items) == n, fmt.Sprintf("%d requests of %d pods %s", len(all.Items), len(owners), failure)
		})
	}
	ask("calm", 60)
	expectRequests(60)
	// A replica counts what it has written once it is answered: the last one may be there before that.
	after, state := s.counted(t, written, sum(before)+60)
	for _, name := range s.members() {
		if after[name] <= before[name] {
			t.Errorf("%s has written no request: %s", name, state)
		}
	}
	if n := sum(after) - sum(before); n != 60 {
		t.Errorf("60 pods took %v creations: %s", n, state)
	}
	s.expectNoLabels(t, ns)

	ask("before", 20)
	victim := s.members()[0]
	if err := s.fleet.running[victim].Kill(); err != nil {
		t.Fatal(err)
	}
	ask("after", 20)
	expectRequests(100)
	s.fleet.start(victim)
	s.settled(t)
}

// expectNoLabels: dividing pods wrote to none of them.
func (s *shardedFleet) expectNoLabels(t *testing.T, ns string) {
	t.Helper()
	var pods corev1.PodList
	if failure := list(t.Context(), &pods, client.InNamespace(ns)); failure != "" {
		t.Fatal(failure)
	}
	for i := range pods.Items {
		if label := pods.Items[i].Labels[sharding.LabelVirtualNode]; label != "" {
			t.Errorf("pod %s carries the label of Virtual Node %s", pods.Items[i].Name, label)
		}
	}
}

// usesItsRights: what a member is granted beside the manager's rights is what it needs, no less and no more.
func (s *shardedFleet) usesItsRights(t *testing.T) {
	used, refused := readAudit(t, s.began)
	for _, r := range refused {
		t.Errorf("the API server refused, for want of a right: %s", r)
	}
	const role = "drover-watchgroup-member"
	for _, r := range kindOf[rbacv1.ClusterRole](t, build(t, "watchgroup"), "ClusterRole") {
		if r.Name != role {
			continue
		}
		granted := grantedTo(t, role, nil, []rbacv1.Role{{ // as it is bound
			ObjectMeta: metav1.ObjectMeta{Name: role, Namespace: system}, Rules: r.Rules,
		}})
		expectUsed(t, role, used["drover-manager"], slices.DeleteFunc(granted, func(g right) bool {
			return g.verb == "get" && g.resource == "virtualnodeslices" // only when a status meets a conflict
		}))
	}
	for _, binding := range kindOf[rbacv1.RoleBinding](t, build(t, "default"), "RoleBinding") {
		if binding.RoleRef.Name == role {
			t.Errorf("RoleBinding %s of the default overlay grants a member's rights", binding.Name)
		}
	}
}

// shardedFleet is several managers, the coordinator that divides their work, and Kueue.
type shardedFleet struct {
	fleet *fleet
	kueue *kueueCluster
	// client knows workloads and slices, and can watch.
	client client.WithWatch
	began  time.Time
}

// startSharded starts Kueue, the coordinator and managers of these names.
func startSharded(t *testing.T, members ...string) *shardedFleet {
	t.Helper()
	k := startKueueWithout(t, "sharded", "autoscaler", "scheduler", "manager")
	s := &shardedFleet{fleet: k.fleet, kueue: k, began: time.Now()}
	if err := lbv1alpha1.AddToScheme(k.client.Scheme()); err != nil {
		t.Fatal(err)
	}
	var err error
	if s.client, err = client.NewWithWatch(env.cp.Config(), client.Options{Scheme: k.client.Scheme()}); err != nil {
		t.Fatal(err)
	}
	base := filepath.Join(env.root, "manifests", "watchgroup")
	if out, err := kubectl(t.Context(), "apply", "--server-side", "-k", base); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	s.deployGroup(t)
	t.Cleanup(func() {
		ctx, cancel := cleanupContext()
		defer cancel()
		if out, err := kubectl(ctx, "delete", "--ignore-not-found", "-k", base); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
	})
	t.Cleanup(func() { s.dissolve(t) })
	s.configureCoordinator()
	for _, name := range members {
		s.configure(name)
		s.fleet.launch(name)
	}
	s.unready(t, members[0])
	s.fleet.start("coordinator")
	for _, name := range members {
		s.fleet.waitReady(name)
	}
	s.settled(t)
	return s
}

// dissolve ends the group and the programs while they have their rights, so that nothing is refused and nothing is left.
func (s *shardedFleet) dissolve(t *testing.T) {
	ctx, cancel := cleanupContext()
	defer cancel()
	for _, member := range s.members() {
		if err := s.fleet.running[member].Stop(20 * time.Second); err != nil {
			t.Error(err)
		}
	}
	group := &lbv1alpha1.WatchGroup{ObjectMeta: metav1.ObjectMeta{Namespace: system, Name: "drover-manager"}}
	if err := client.IgnoreNotFound(s.client.Delete(ctx, group)); err != nil {
		t.Error(err)
	}
	if state, gone := poll(ctx, func(ctx context.Context) (bool, string) {
		err := s.client.Get(ctx, client.ObjectKeyFromObject(group), group)
		return apierrors.IsNotFound(err), fmt.Sprintf("%v %v", err, group.Status)
	}); !gone {
		t.Errorf("the group does not go: %s", state)
	}
	if err := s.fleet.group.Stop(20 * time.Second); err != nil {
		t.Error(err)
	}
}

// deployGroup applies what the overlay adds for members, with Leases that a test can wait for.
func (s *shardedFleet) deployGroup(t *testing.T) {
	t.Helper()
	objects := build(t, "sharded-manager")
	groups := kindOf[lbv1alpha1.WatchGroup](t, objects, "WatchGroup")
	if len(groups) != 1 {
		t.Fatalf("the overlay has %d WatchGroups", len(groups))
	}
	group := &groups[0]
	group.Spec.Lease = lbv1alpha1.LeaseParameters{
		LeaseDuration: of(8 * time.Second), RenewDeadline: of(5 * time.Second), RetryPeriod: of(300 * time.Millisecond),
		RequestTimeout: of(2500 * time.Millisecond),
	}
	group.Spec.NewcomerGrace = of(time.Second)
	made := []client.Object{group}
	for _, b := range kindOf[rbacv1.RoleBinding](t, objects, "RoleBinding") {
		if b.RoleRef.Name == "drover-watchgroup-member" {
			made = append(made, &b)
		}
	}
	if len(made) != 2 {
		t.Fatalf("the overlay binds a member's role %d times", len(made)-1)
	}
	for _, o := range made {
		if err := s.client.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			ctx, cancel := cleanupContext()
			defer cancel()
			if err := client.IgnoreNotFound(s.client.Delete(ctx, o)); err != nil {
				t.Error(err)
			}
		})
	}
}

func (s *shardedFleet) configureCoordinator() {
	f := s.fleet
	c := &configv1alpha1.CoordinatorConfiguration{TypeMeta: metav1.TypeMeta{
		APIVersion: configv1alpha1.GroupVersion.String(), Kind: "CoordinatorConfiguration",
	}}
	c.Webhook.Enabled = ptr.To(false) // there is nothing to label
	health := f.port()
	c.HealthProbeBindAddress, c.MetricsBindAddress = address(health), "0"
	f.args["coordinator"] = []string{"--config=" + f.writeYAML("coordinator.yaml", c), "--kubeconfig=" + f.kubeconfig("coordinator")}
	f.ready["coordinator"] = "http://" + address(health) + "/readyz"
}

func (s *shardedFleet) configure(member string) {
	s.fleet.configureManager(member, func(c *configv1alpha1.ManagerConfiguration) {
		c.Kueue.Enabled, c.Sharding.Enabled = true, true
		c.Sharding.LeaveTimeout = of(5 * time.Second)
	})
}

// unready waits until a replica says that it has nothing to do yet. The rest of it is up.
func (s *shardedFleet) unready(t *testing.T, member string) {
	t.Helper()
	eventually(t, member+" waits for its share", func(ctx context.Context) (bool, string) {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.fleet.ready[member], nil)
		if err != nil {
			t.Fatal(err)
		}
		answer, err := http.DefaultClient.Do(req)
		if err != nil {
			return false, err.Error()
		}
		defer answer.Body.Close()
		text, err := io.ReadAll(answer.Body)
		return answer.StatusCode != http.StatusOK && strings.Contains(string(text), "[-]sharding") &&
			strings.Contains(string(text), "[+]rollup"), fmt.Sprint(string(text), err)
	})
}

// members are the replicas that run.
func (s *shardedFleet) members() []string {
	var names []string
	for name, p := range s.fleet.running {
		if strings.HasPrefix(name, "manager-") && p.Running() {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// settled waits until the replicas that run share out everything, and nothing moves.
func (s *shardedFleet) settled(t *testing.T) {
	t.Helper()
	want := int32(len(s.members()))
	eventually(t, fmt.Sprintf("%d members have everything", want), func(ctx context.Context) (bool, string) {
		group := &lbv1alpha1.WatchGroup{}
		if err := s.client.Get(ctx, client.ObjectKey{Namespace: system, Name: "drover-manager"}, group); err != nil {
			return false, err.Error()
		}
		st := group.Status
		if st.Members != want || st.Owned != group.Spec.VirtualNodes || st.Moving != 0 {
			return false, fmt.Sprintf("%d members own %d, %d are moving", st.Members, st.Owned, st.Moving)
		}
		var slices lbv1alpha1.VirtualNodeSliceList
		if err := s.client.List(ctx, &slices, client.InNamespace(system)); err != nil {
			return false, err.Error()
		}
		for _, slice := range slices.Items {
			if slice.Spec.Counts.Owned == 0 {
				return false, fmt.Sprintf("%s owns nothing", slice.Name)
			}
		}
		return len(slices.Items) == int(want), fmt.Sprintf("%d slices", len(slices.Items))
	})
}

// decides is the replica that decides for Kueue.
func (s *shardedFleet) decides(t *testing.T) (owner string) {
	t.Helper()
	eventually(t, "somebody decides for Kueue", func(ctx context.Context) (bool, string) {
		var list lbv1alpha1.VirtualNodeSliceList
		if err := s.client.List(ctx, &list, client.InNamespace(system)); err != nil {
			return false, err.Error()
		}
		for _, slice := range list.Items {
			owned, err := sharding.ParseSet(string(slice.Spec.Owned))
			if err != nil {
				t.Fatal(err)
			}
			if owned.Has(sharding.VirtualNodeOf(provisioning.HashKey, 1000)) && s.fleet.running[slice.Spec.Member].Running() {
				owner = slice.Spec.Member
				return true, ""
			}
		}
		return false, fmt.Sprintf("%d slices", len(list.Items))
	})
	return owner
}

// kill is kill -9 and, once others have taken over, the start of a successor.
func (s *shardedFleet) kill(t *testing.T, member string) {
	t.Helper()
	if err := s.fleet.running[member].Kill(); err != nil {
		t.Fatal(err)
	}
	s.decides(t)
	s.fleet.start(member)
}

// restart asks a replica to stop, and starts it again.
func (s *shardedFleet) restart(t *testing.T, member string) {
	t.Helper()
	if err := s.fleet.running[member].Stop(20 * time.Second); err != nil {
		t.Fatal(err)
	}
	s.fleet.start(member)
}

// rob takes the leadership from the leader, which ends. Its work as a member goes to others.
func (s *shardedFleet) rob(t *testing.T) {
	t.Helper()
	key := client.ObjectKey{Namespace: system, Name: manager.LeaseName}
	var robbed string
	eventually(t, "the leader ends", func(ctx context.Context) (bool, string) {
		lease := &coordinationv1.Lease{}
		if err := s.client.Get(ctx, key, lease); err != nil {
			return false, err.Error()
		}
		before := lease.DeepCopy()
		now := metav1.NowMicro()
		lease.Spec.HolderIdentity, lease.Spec.RenewTime, lease.Spec.LeaseDurationSeconds = ptr.To("somebody"), &now, ptr.To[int32](4)
		if err := s.client.Patch(ctx, lease, client.MergeFrom(before)); err != nil {
			return false, err.Error()
		}
		for name, p := range s.fleet.running {
			if strings.HasPrefix(name, "manager-") && !p.Running() {
				robbed = name
			}
		}
		return robbed != "", "all run on"
	})
	// Whoever has robbed it has no use for it.
	if err := removeLease(t.Context(), manager.LeaseName); err != nil {
		t.Fatal(err)
	}
	s.decides(t)
	s.fleet.start(robbed)
}

// counted waits until every replica answers and the sum of a counter's samples is no less than that.
func (s *shardedFleet) counted(t *testing.T, sample string, least float64) (by map[string]float64, state string) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s is %v at least", sample, least), func(ctx context.Context) (bool, string) {
		by, state = s.metric(ctx, sample)
		for _, n := range by {
			if n < 0 {
				return false, state
			}
		}
		return sum(by) >= least, state
	})
	return by, state
}

// metric reads a sample of every replica that runs; a replica that has none, or 0, is left out.
func (s *shardedFleet) metric(ctx context.Context, sample string) (by map[string]float64, state string) {
	by = map[string]float64{}
	for _, name := range s.members() {
		v, _, err := s.fleet.metric(ctx, name, scraperToken(s.fleet.t), sample)
		if err != nil {
			state += fmt.Sprintf(" %s: %v", name, err)
			by[name] = -1
		} else if v != 0 {
			by[name] = v
		}
	}
	return by, fmt.Sprint(by, state)
}

func sum(by map[string]float64) (total float64) {
	for _, v := range by {
		total += v
	}
	return total
}

// account watches what is promised. Events come in the order of the writes, so that no moment is missed.
type account struct {
	check string
	watch watch.Interface
	done  chan struct{}

	mu      sync.Mutex
	nodes   int32
	holders map[types.UID]int32
	most    int32
	wrong   []string
}

func (s *shardedFleet) audit(t *testing.T, check, offering string) *account {
	t.Helper()
	w, err := s.client.Watch(t.Context(), &kueue.WorkloadList{}, client.InNamespace(check))
	if err != nil {
		t.Fatal(err)
	}
	a := &account{check: check, watch: w, done: make(chan struct{}), holders: map[types.UID]int32{}}
	t.Cleanup(w.Stop)
	go func() {
		defer close(a.done)
		for e := range w.ResultChan() {
			if wl, ok := e.Object.(*kueue.Workload); ok {
				a.see(wl, e.Type == watch.Deleted)
			}
		}
	}()
	return a
}

// carries says how many nodes the fleet has for promises from here on.
func (a *account) carries(nodes int32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.nodes = nodes
}

func (a *account) see(wl *kueue.Workload, gone bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.holders, wl.UID)
	for _, state := range wl.Status.AdmissionChecks {
		if gone || string(state.Name) != a.check || state.State != kueue.CheckStateReady ||
			!apimeta.IsStatusConditionTrue(wl.Status.Conditions, kueue.WorkloadQuotaReserved) {
			continue
		}
		for _, set := range wl.Spec.PodSets {
			a.holders[wl.UID] += set.Count // a node each
		}
	}
	var total int32
	for _, n := range a.holders {
		total += n
	}
	a.most = max(a.most, total)
	if total > a.nodes {
		a.wrong = append(a.wrong, fmt.Sprintf("%d of %d nodes after %s", total, a.nodes, wl.Name))
	}
}

func (a *account) expectNothingTwice(t *testing.T) {
	t.Helper()
	a.watch.Stop()
	<-a.done
	if len(a.wrong) > 0 {
		t.Errorf("more was promised than there was:\n  %s", strings.Join(a.wrong, "\n  "))
	}
	if a.most != 40 {
		t.Errorf("at most %d nodes were promised at a time, expected 40: was everything seen?", a.most)
	}
}
