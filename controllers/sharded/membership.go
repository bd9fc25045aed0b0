package sharded

import (
	"cmp"
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/uuid"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/history"
	"github.com/drover-sh/drover/sharding/wire"
)

// What a member reads and writes beside its controllers' kinds, all in the WatchGroup's namespace: the ClusterRole of
// manifests/watchgroup/member_role.yaml, bound there. Leases and slices are named after the members, which come and go,
// so that no names can stand here.
//
// +kubebuilder:rbac:groups=loadbalance.k8s.io,resources=watchgroups,verbs=get
// +kubebuilder:rbac:groups=loadbalance.k8s.io,resources=virtualnodeslices,verbs=get;list;watch
// +kubebuilder:rbac:groups=loadbalance.k8s.io,resources=virtualnodeslices/status,verbs=update
// +kubebuilder:rbac:groups=coordination.k8s.io,resources=leases,verbs=get;create;update

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
	e.askToLeave()
	for {
		done, changed := e.relieved()
		if done {
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

func (e *member) askToLeave() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.m.Leave()
	e.leaving = true
	e.pump()
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
	return e.m.Relieved() && equality.Semantic.DeepEqual(e.status(), e.slice.Status), e.changed
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

// sliceCacheOptions make a cache of the member's slice, or of those of the whole group for a Membership.
func (g *Group) sliceCacheOptions(scheme *runtime.Scheme, opts cache.Options) cache.Options {
	key := g.memberKey()
	field := fields.OneTermEqualSelector("metadata.name", key.Name)
	if g.membership != nil {
		field = fields.OneTermEqualSelector(lbv1alpha1.FieldWatchGroup, g.key.Name)
	}
	return cache.Options{
		HTTPClient: opts.HTTPClient, Mapper: opts.Mapper, Scheme: scheme,
		ByObject: map[client.Object]cache.ByObject{
			&lbv1alpha1.VirtualNodeSlice{}: {
				Namespaces: map[string]cache.Config{key.Namespace: {}},
				Field:      field,
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
		DeleteFunc: g.sliceGone,
	})
	return err
}

func (g *Group) sliceSeen(obj *lbv1alpha1.VirtualNodeSlice) {
	s, err := wire.Slice(obj)
	if err != nil {
		g.log.Error(err, "slice refused")
		return
	}
	if g.membership != nil {
		g.membership.peerSeen(s, false)
	}
	if obj.Name == g.memberKey().Name {
		g.member.observeSlice(s)
	}
}

func (g *Group) sliceGone(obj any) {
	if last, ok := obj.(toolscache.DeletedFinalStateUnknown); ok {
		obj = last.Obj
	}
	o, ok := obj.(*lbv1alpha1.VirtualNodeSlice)
	if ok && g.membership != nil {
		g.membership.peerSeen(sharding.Slice{Member: o.Spec.Member, Version: o.ResourceVersion}, true)
	}
	if !ok || o.Name == g.memberKey().Name {
		g.member.sliceGone()
	}
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
			g.member.retries(err, "status not written")
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
	status := e.status()
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
