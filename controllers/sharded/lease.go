package sharded

import (
	"context"
	"strconv"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
)

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
		e.retries(err, "lease not read")
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
		e.retries(err, "lease not acquired")
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
	k.label(lease)
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

// label puts the label back, if somebody has taken it away: the coordinator would not know the member by its Lease.
func (k *leaseKeeper) label(lease *coordinationv1.Lease) {
	if lease.Labels == nil {
		lease.Labels = make(map[string]string, 1)
	}
	lease.Labels[lbv1alpha1.LabelWatchGroup] = k.options.WatchGroup
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
	k.label(next)
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
		e.retries(err, "lease not renewed")
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
