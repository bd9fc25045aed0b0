package sharded

import (
	"cmp"
	"context"
	"errors"
	"strconv"
	"strings"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/uuid"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/history"
	"github.com/drover-sh/drover/sharding/wire"
)

// What a member reads and writes beside its controllers' kinds, all in the WatchGroup's namespace. Leases and slices are named
// after the members, which come and go, so that no names can stand here.
//
// +kubebuilder:rbac:groups=loadbalance.k8s.io,namespace=fleet-system,resources=watchgroups,verbs=get
// +kubebuilder:rbac:groups=loadbalance.k8s.io,namespace=fleet-system,resources=virtualnodeslices,verbs=get;list;watch
// +kubebuilder:rbac:groups=loadbalance.k8s.io,namespace=fleet-system,resources=virtualnodeslices/status,verbs=update
// +kubebuilder:rbac:groups=coordination.k8s.io,namespace=fleet-system,resources=leases,verbs=get;create;update

// run keeps the process a member of the group until ctx ends, and then leaves.
func (g *Group) run(ctx context.Context) error {
	e := g.member
	k := &leaseKeeper{
		member: e, client: g.api, key: g.memberKey(), options: g.options, mine: make(map[string]bool),
		place: cmp.Or(strings.Trim(g.options.Pod.UID+"."+g.options.Pod.Container, "."), string(uuid.NewUUID())),
	}
	deps := g.dependencies()
	if err := deps.Validate(); err != nil {
		return err
	}
	e.start(deps, k.newSession())
	work, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	if err := g.watchSlice(work); err != nil {
		return err
	}
	var background sync.WaitGroup
	background.Go(func() {
		if err := g.slices.Start(work); err != nil {
			g.log.Error(err, "slice not watched")
		}
	})
	background.Go(func() { g.publish(work) })
	background.Go(func() { k.run(work) })
	background.Go(func() { e.resyncs.run(ctx) })
	select {
	case <-ctx.Done():
		g.askToLeave()
	case <-g.leave:
	}
	if g.options.LeaveTimeout > 0 {
		g.relieve()
	}
	close(g.left)
	<-ctx.Done()
	session := e.session()
	e.stop()
	stop()
	background.Wait()
	if g.options.LeaveTimeout > 0 {
		e.quiet()
		k.release(session)
	}
	return nil
}

// relieve asks the coordinator to take everything from the member, and waits until it has.
func (g *Group) relieve() {
	e := g.member
	deadline := time.NewTimer(g.options.LeaveTimeout)
	defer deadline.Stop()
	for changed := e.askToLeave(); ; {
		var done bool
		if done, changed = e.relieved(); done {
			return
		}
		select {
		case <-changed:
		case <-deadline.C:
			g.log.Info("leaving before others have taken over everything", "owned", e.owned().Len())
			return
		}
	}
}

func (e *member) askToLeave() <-chan struct{} {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.m.Leave()
	e.leaving = true
	e.pump()
	return e.changed
}

// relieved reports whether the member has nothing left, and has said so; or whether nobody can take anything from it,
// because it has no slice or no lease.
func (e *member) relieved() (bool, <-chan struct{}) {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := e.clock()
	if e.slice.Session == "" || !e.fence.Holds(now) {
		return true, e.changed
	}
	return e.m.Relieved() && equality.Semantic.DeepEqual(e.m.Status(now), e.slice.Status), e.changed
}

// quiet waits until no write of this process is under way, or can land any more.
func (e *member) quiet() {
	for {
		e.mu.Lock()
		left := e.m.QuietAt() - e.clock()
		sending := e.sending
		e.mu.Unlock()
		if sending == 0 || left <= 0 {
			return
		}
		t := time.NewTimer(left)
		select {
		case <-e.acted:
		case <-t.C:
		}
		t.Stop()
	}
}

func (e *member) owned() sharding.Set {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.m.Owned()
}

func (e *member) session() string {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.m.Session()
}

// serving returns why the member is not serving, nil if it is.
func (e *member) serving() error {
	e.mu.RLock()
	defer e.mu.RUnlock()
	switch {
	case e.m == nil:
		return errNotStarted
	case e.leaving:
		return errors.New("member is leaving its group")
	case !e.fence.Holds(e.clock()):
		return ErrFenced
	case !e.settled:
		return errors.New("member has not yet done what its first slice asks for")
	}
	return nil
}

// A leaseKeeper holds the member's Lease. The Lease's holder is the session: whoever loses it starts a new one.
type leaseKeeper struct {
	member  *member
	client  client.Client
	key     client.ObjectKey
	options Options
	place   string
	mine    map[string]bool // sessions of this process

	watch    sharding.LeaseWatch
	lease    *coordinationv1.Lease // as last written by this session
	acquired bool
}

// newSession names a life of the member. Its place tells a later process whether this one has ended: in one container
// of one Pod, processes run one after the other.
func (k *leaseKeeper) newSession() string {
	name := k.place + "_" + string(uuid.NewUUID())
	k.mine[name] = true
	k.member.metrics.sessions.Inc()
	return name
}

func (k *leaseKeeper) run(ctx context.Context) {
	for ctx.Err() == nil {
		if k.member.expired() {
			k.end("renewDeadline has passed")
		}
		again := k.step(ctx)
		k.member.reportLease()
		if !again {
			sleep(ctx, k.member.untilStep())
		}
	}
}

func (k *leaseKeeper) end(why string) {
	if k.acquired {
		k.member.log.Info("session ended", "reason", why)
	}
	k.acquired, k.lease = false, nil
	k.member.newSession(k.newSession())
}

// step acquires or renews the Lease. It reports whether to do so again at once.
func (k *leaseKeeper) step(ctx context.Context) (again bool) {
	ctx, cancel := context.WithTimeout(ctx, k.member.policy.RequestTimeout)
	defer cancel()
	if !k.acquired {
		return k.acquire(ctx)
	}
	return k.renew(ctx)
}

func (k *leaseKeeper) acquire(ctx context.Context) bool {
	e := k.member
	lease, err := k.read(ctx)
	missing := apierrors.IsNotFound(err)
	if err != nil && !missing {
		e.log.V(1).Info("lease not read", "error", err.Error())
		return false
	}
	session := e.session()
	if !missing {
		holder := ptr.Deref(lease.Spec.HolderIdentity, "")
		now := e.clock()
		k.watch.Observe(sharding.LeaseRecord{
			Member: e.id, Session: holder, Renewal: lease.ResourceVersion,
			Duration: time.Duration(ptr.Deref(lease.Spec.LeaseDurationSeconds, 0)) * time.Second,
		}, now)
		ended := k.mine[holder] || strings.HasPrefix(holder, k.place+"_")
		if !k.watch.MayAcquire(e.id, session, ended, now) {
			return false
		}
	}
	sentAt, ok := e.mayAcquire()
	if !ok {
		return false
	}
	k.fill(lease, session)
	if missing {
		err = k.client.Create(ctx, lease)
	} else {
		err = k.client.Update(ctx, lease)
	}
	if err != nil {
		e.log.V(1).Info("lease not acquired", "error", err.Error())
		k.end("lease not acquired")
		return false
	}
	k.acquired, k.lease = true, lease
	e.renewed(session, sentAt)
	return false
}

func (k *leaseKeeper) read(ctx context.Context) (*coordinationv1.Lease, error) {
	lease := &coordinationv1.Lease{}
	return lease, k.client.Get(ctx, k.key, lease)
}

func (k *leaseKeeper) fill(lease *coordinationv1.Lease, session string) {
	now := metav1.NowMicro()
	lease.Name, lease.Namespace = k.key.Name, k.key.Namespace
	set := func(m *map[string]string, key, value string) {
		switch {
		case value == "":
			delete(*m, key)
		case *m == nil:
			*m = map[string]string{key: value}
		default:
			(*m)[key] = value
		}
	}
	set(&lease.Labels, lbv1alpha1.LabelWatchGroup, k.options.WatchGroup)
	set(&lease.Annotations, lbv1alpha1.AnnotationPodName, k.options.Pod.Name)
	set(&lease.Annotations, lbv1alpha1.AnnotationPodUID, k.options.Pod.UID)
	set(&lease.Annotations, lbv1alpha1.AnnotationContainer, k.options.Pod.Container)
	weight := ""
	if k.options.Weight > 0 {
		weight = strconv.Itoa(k.options.Weight)
	}
	set(&lease.Annotations, lbv1alpha1.AnnotationWeight, weight)
	lease.Spec.HolderIdentity = &session
	lease.Spec.LeaseDurationSeconds = ptr.To(int32(k.member.policy.LeaseDuration / time.Second))
	lease.Spec.AcquireTime, lease.Spec.RenewTime = &now, &now
	lease.Spec.LeaseTransitions = ptr.To(ptr.Deref(lease.Spec.LeaseTransitions, 0) + 1)
}

func (k *leaseKeeper) renew(ctx context.Context) (again bool) {
	e, session := k.member, ptr.Deref(k.lease.Spec.HolderIdentity, "")
	if e.session() != session || e.revoked() {
		k.end("the slice is gone")
		return true
	}
	next := k.lease.DeepCopy()
	now := metav1.NowMicro()
	next.Spec.RenewTime = &now
	sentAt := e.clock()
	err := k.client.Update(ctx, next)
	switch {
	case err == nil:
		k.lease = next
		e.renewed(session, sentAt)
		return false
	case apierrors.IsConflict(err):
		// Somebody has written the Lease: an earlier renewal of ours whose answer was lost, or who revoked it.
		current, err := k.read(ctx)
		if err != nil && !apierrors.IsNotFound(err) {
			return false
		} else if err == nil && ptr.Deref(current.Spec.HolderIdentity, "") == session {
			k.lease = current
			return true
		}
		k.end("the lease was revoked")
		return true
	case apierrors.IsNotFound(err):
		k.end("the lease is gone")
		return true
	default:
		e.log.V(1).Info("lease not renewed", "error", err.Error())
		return false
	}
}

// release gives the Lease up, so that nobody waits for it to run out.
func (k *leaseKeeper) release(session string) {
	if !k.acquired || k.lease == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), k.member.policy.RequestTimeout)
	defer cancel()
	lease := k.lease
	for range 2 {
		if ptr.Deref(lease.Spec.HolderIdentity, "") != session {
			return
		}
		lease.Spec.HolderIdentity = nil
		lease.Spec.RenewTime = ptr.To(metav1.NowMicro())
		err := k.client.Update(ctx, lease)
		if !apierrors.IsConflict(err) {
			if err != nil {
				k.member.log.Error(err, "lease not released: it will run out")
			}
			return
		}
		if lease, err = k.read(ctx); err != nil {
			return
		}
	}
}

func (e *member) expired() bool {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.m.Expired(e.clock())
}

func (e *member) mayAcquire() (sharding.Instant, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := e.clock()
	return now, e.m.Acquire(now)
}

func (e *member) renewed(session string, sentAt sharding.Instant) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.m.Renewed(session, sentAt, e.clock())
}

func (e *member) reportLease() {
	e.mu.RLock()
	defer e.mu.RUnlock()
	held := 0.0
	if e.fence.Holds(e.clock()) {
		held = 1
	}
	e.metrics.leases.Set(held)
}

// untilStep is how long to wait until the next renewal, or until the member has to stop if that is sooner.
func (e *member) untilStep() time.Duration {
	e.mu.RLock()
	defer e.mu.RUnlock()
	if now := e.clock(); e.fence.Holds(now) {
		return min(e.policy.RetryPeriod, e.fence.Deadline()-now)
	}
	return e.policy.RetryPeriod
}

func sliceCacheOptions(key client.ObjectKey, scheme *runtime.Scheme, opts cache.Options) cache.Options {
	return cache.Options{
		HTTPClient: opts.HTTPClient, Mapper: opts.Mapper, Scheme: scheme,
		ByObject: map[client.Object]cache.ByObject{
			&lbv1alpha1.VirtualNodeSlice{}: {
				Namespaces: map[string]cache.Config{key.Namespace: {}},
				Field:      fields.OneTermEqualSelector("metadata.name", key.Name),
			},
		},
	}
}

func (g *Group) watchSlice(ctx context.Context) error {
	informer, err := g.slices.GetInformer(ctx, &lbv1alpha1.VirtualNodeSlice{}, cache.BlockUntilSynced(false))
	if err != nil {
		return err
	}
	_, err = informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc:    func(obj any) { g.sliceSeen(obj.(*lbv1alpha1.VirtualNodeSlice)) },
		UpdateFunc: func(_, obj any) { g.sliceSeen(obj.(*lbv1alpha1.VirtualNodeSlice)) },
		DeleteFunc: func(any) { g.member.sliceGone() },
	})
	return err
}

func (g *Group) sliceSeen(obj *lbv1alpha1.VirtualNodeSlice) {
	s, err := wire.Slice(obj)
	if err != nil {
		g.log.Error(err, "slice refused")
		return
	}
	g.member.observeSlice(s)
}

// publish writes the slice's status whenever it has something new to say.
func (g *Group) publish(ctx context.Context) {
	backoff := newBackoff()
	for {
		select {
		case <-ctx.Done():
			return
		case <-g.member.publish:
		}
		status, version, ok := g.member.news()
		if !ok {
			continue
		}
		// The API server takes nothing but the status from this.
		obj := &lbv1alpha1.VirtualNodeSlice{Status: wire.SliceStatus(status)}
		obj.Name, obj.Namespace, obj.ResourceVersion = g.memberKey().Name, g.memberKey().Namespace, version
		request, cancel := context.WithTimeout(ctx, g.member.policy.RequestTimeout)
		err := g.api.Status().Update(request, obj)
		if apierrors.IsConflict(err) {
			err = g.api.Get(request, g.memberKey(), obj)
		}
		cancel()
		if err != nil {
			g.log.V(1).Info("status not written", "error", err.Error())
			sleep(ctx, backoff.Step())
			wake(g.member.publish)
			continue
		}
		backoff = newBackoff()
		g.sliceSeen(obj)
	}
}

// news returns what the slice's status does not say yet, and the version that it has.
func (e *member) news() (sharding.SliceStatus, string, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	status := e.m.Status(e.clock())
	stale := e.slice.Session != "" && e.slice.Session == e.m.Session() && !equality.Semantic.DeepEqual(status, e.slice.Status)
	return status, e.slice.Version, stale
}

// sliceGone ends the session: nothing says any more that the member owns anything.
func (e *member) sliceGone() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.orphaned = e.slice.Session != "" && e.slice.Session == e.m.Session()
}

func (e *member) revoked() bool {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.orphaned
}

func (e *member) recordSnapshots() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.m == nil || e.record == nil {
		return
	}
	for _, k := range e.order {
		rec := history.Record{Kind: history.Snapshot, Resource: k.resource}
		for _, obj := range k.store.indexer.List() {
			o := obj.(client.Object)
			rec.Objects = append(rec.Objects, keyOf(client.ObjectKeyFromObject(o))+"@"+o.GetResourceVersion())
		}
		e.rec(rec)
	}
}
