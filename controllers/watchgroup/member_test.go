package watchgroup

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/wire"
)

const configMaps sharding.Resource = "configmaps"

// A cast is the members of one group, and watches that no two of them may work on one Virtual Node.
type cast struct {
	t     *testing.T
	c     client.Client
	group *lbv1alpha1.WatchGroup
	now   func() sharding.Instant

	mu      sync.Mutex
	members map[string]*member
	clash   string
}

func newCast(t *testing.T, c client.Client, group *lbv1alpha1.WatchGroup) *cast {
	k := &cast{t: t, c: c, group: group, now: MonotonicClock(), members: make(map[string]*member)}
	t.Cleanup(func() {
		for _, m := range k.members {
			m.kill()
		}
		if k.clash != "" {
			t.Error(k.clash)
		}
	})
	return k
}

// A member is the Member machine with a Lease, a slice and a list of ConfigMaps around it: the least that a coordinator has
// to deal with.
type member struct {
	*cast
	id   string
	stop context.CancelFunc
	done chan struct{}
	pod  *corev1.Pod

	m     *sharding.Member // under cast.mu
	fence *sharding.Fence

	unfiltered []sharding.Resource // under cast.mu
}

func newFence(group *lbv1alpha1.WatchGroup) *sharding.Fence {
	return sharding.NewFence(wire.LeasePolicy(group.Spec))
}

// join starts a member, in a Pod if there is one.
func (k *cast) join(id string, pod *corev1.Pod) *member {
	compare := func(a, b sharding.Version) (int, error) {
		return resourceversion.CompareResourceVersion(string(a), string(b))
	}
	fence := newFence(k.group)
	m := &member{cast: k, id: id, pod: pod, done: make(chan struct{}), fence: fence,
		m: sharding.NewMember(id, sharding.Dependencies{configMaps: nil}, compare, fence)}
	k.mu.Lock()
	k.members[id] = m
	k.mu.Unlock()
	ctx, cancel := context.WithCancel(context.Background())
	m.stop = cancel
	go m.run(ctx)
	return m
}

// kill ends the member without a word.
func (m *member) kill() {
	m.stop()
	<-m.done
}

// leave ends the member after it has been relieved, and releases its Lease.
func (m *member) leave() {
	eventually(m.t, m.id+" is relieved", func() string {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.m.Leave() // again and again: a new session knows nothing of the wish of the last one
		if !m.m.Relieved() {
			return "owns " + m.m.Owned().String()
		}
		return ""
	})
	m.kill()
	m.release()
}

// release takes an ended member's session out of its Lease.
func (m *member) release() {
	lease := m.readLease()
	patch := client.MergeFrom(lease.DeepCopy())
	lease.Spec.HolderIdentity = ptr.To("")
	if err := m.c.Patch(context.Background(), lease, patch); err != nil {
		m.t.Error(err)
	}
}

func (m *member) readLease() *coordinationv1.Lease {
	lease := &coordinationv1.Lease{}
	key := client.ObjectKey{Namespace: m.group.Namespace, Name: lbv1alpha1.MemberName(m.group.Name, m.id)}
	if err := m.c.Get(context.Background(), key, lease); err != nil {
		m.t.Error(err)
	}
	return lease
}

// run keeps the Lease and follows the slice until ctx ends.
func (m *member) run(ctx context.Context) {
	defer close(m.done)
	ticks := time.NewTicker(10 * time.Millisecond)
	defer ticks.Stop()
	var renewed sharding.Instant
	var lease *coordinationv1.Lease
	for first := true; ; first = false {
		m.mu.Lock()
		if first || m.m.Expired(m.now()) || m.m.Session() == "" {
			m.m.StartSession(string(uuid.NewUUID()))
			lease = nil
		}
		m.check()
		m.mu.Unlock()
		if now := m.now(); lease == nil || now-renewed > wire.LeasePolicy(m.group.Spec).RetryPeriod {
			lease = m.renew(ctx, lease)
			renewed = now
		}
		m.follow(ctx)
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
		}
	}
}

// check notes if two members may reconcile one Virtual Node. The caller holds the lock.
func (k *cast) check() {
	now := k.now()
	owners := make(map[string]sharding.Set)
	for id, m := range k.members {
		select {
		case <-m.done:
			continue
		default:
		}
		if !m.fence.Holds(now) {
			continue
		}
		for other, vns := range owners {
			if both := vns.Intersect(m.m.Owned()); !both.Empty() && k.clash == "" {
				k.clash = fmt.Sprintf("%s and %s both own %s", id, other, both)
			}
		}
		owners[id] = m.m.Owned()
	}
}

// renew acquires the Lease, or renews it. It returns the Lease as written, nil if it is not held.
func (m *member) renew(ctx context.Context, lease *coordinationv1.Lease) *coordinationv1.Lease {
	m.mu.Lock()
	session, sent := m.m.Session(), m.now()
	acquire := lease == nil
	may := !acquire || m.m.Acquire(sent)
	m.mu.Unlock()
	if !may {
		return nil
	}
	lease, err := m.writeLease(ctx, lease, session)
	m.mu.Lock()
	defer m.mu.Unlock()
	if err != nil {
		if apierrors.IsConflict(err) || apierrors.IsNotFound(err) || acquire {
			m.m.StartSession(string(uuid.NewUUID()))
			return nil
		}
		return lease
	}
	m.m.Renewed(session, sent, m.now())
	return lease
}

func (m *member) writeLease(ctx context.Context, lease *coordinationv1.Lease, session string) (*coordinationv1.Lease, error) {
	now := metav1.NowMicro()
	if lease != nil {
		next := lease.DeepCopy()
		next.Spec.RenewTime = &now
		if err := m.c.Update(ctx, next); err != nil {
			return lease, err
		}
		return next, nil
	}
	lease = &coordinationv1.Lease{}
	lease.Namespace, lease.Name = m.group.Namespace, lbv1alpha1.MemberName(m.group.Name, m.id)
	err := m.c.Get(ctx, client.ObjectKeyFromObject(lease), lease)
	exists := err == nil
	if client.IgnoreNotFound(err) != nil {
		return nil, err
	}
	lease.Labels = map[string]string{lbv1alpha1.LabelWatchGroup: m.group.Name}
	if m.pod != nil {
		lease.Annotations = map[string]string{lbv1alpha1.AnnotationPodName: m.pod.Name,
			lbv1alpha1.AnnotationPodUID: string(m.pod.UID), lbv1alpha1.AnnotationContainer: "main"}
	}
	lease.Spec = coordinationv1.LeaseSpec{HolderIdentity: &session, AcquireTime: &now, RenewTime: &now,
		LeaseDurationSeconds: ptr.To(int32(wire.LeasePolicy(m.group.Spec).LeaseDuration / time.Second))}
	if exists {
		return lease, m.c.Update(ctx, lease)
	}
	return lease, m.c.Create(ctx, lease)
}

// follow takes in the slice, does the lists that it asks for, and answers.
func (m *member) follow(ctx context.Context) {
	o := &lbv1alpha1.VirtualNodeSlice{}
	key := client.ObjectKey{Namespace: m.group.Namespace, Name: lbv1alpha1.MemberName(m.group.Name, m.id)}
	if err := m.c.Get(ctx, key, o); err != nil {
		return
	}
	s, err := wire.Slice(o)
	if err != nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fail(m.m.Observe(s))
	m.check()
	m.m.NextPurges()
	for _, f := range m.m.NextFetches() {
		m.fetch(ctx, f)
	}
	if behind := m.m.Behind(configMaps); !behind.Empty() {
		m.m.Lost(configMaps, behind)
	}
	if s.Session != m.m.Session() {
		return
	}
	said := m.m.Status(m.now())
	said.Unfiltered = m.unfiltered
	status := wire.SliceStatus(said)
	if equality.Semantic.DeepEqual(status, o.Status) {
		return
	}
	o.Status = status
	if err := m.c.Status().Update(ctx, o); err != nil && !apierrors.IsConflict(err) && ctx.Err() == nil &&
		!apierrors.IsNotFound(err) && !errors.Is(err, context.Canceled) && apierrors.ReasonForError(err) != metav1.StatusReasonUnknown {
		m.t.Errorf("%s: %v", m.id, err)
	}
}

func (m *member) fetch(ctx context.Context, f sharding.Fetch) {
	var list corev1.ConfigMapList
	if err := m.c.List(ctx, &list, client.InNamespace(m.group.Namespace)); err != nil {
		m.m.ListFailed(f)
		return
	}
	_, err := m.m.Listed(f, sharding.Version(list.ResourceVersion))
	m.fail(err)
}

func (m *member) fail(err error) {
	if err != nil {
		m.t.Errorf("%s: %v", m.id, err)
	}
}

// owned returns how many Virtual Nodes each running member may work on.
func (k *cast) owned() map[string]int {
	k.mu.Lock()
	defer k.mu.Unlock()
	n := make(map[string]int)
	for id, m := range k.members {
		select {
		case <-m.done:
			continue
		default:
		}
		if m.fence.Holds(k.now()) {
			n[id] = m.m.Owned().Minus(m.m.Awaiting(configMaps)).Len()
		}
	}
	return n
}

// share waits until the members own what they should.
func (k *cast) share(want map[string]int) {
	k.t.Helper()
	eventually(k.t, "Virtual Nodes are shared out", func() string {
		if got := k.owned(); !equality.Semantic.DeepEqual(got, want) {
			return fmt.Sprintf("they are %v, want %v", got, want)
		}
		return ""
	})
}

// shareAlike waits until these members own everything in equal shares. Who has one more, where that cannot be, is whoever had
// more before: not the same after a session has run out.
func (k *cast) shareAlike(members ...string) {
	k.t.Helper()
	eventually(k.t, "Virtual Nodes are shared out", func() string {
		got, all := k.owned(), int(k.group.Spec.VirtualNodes)
		sum := 0
		for _, id := range members {
			n, ok := got[id]
			if !ok || n < all/len(members) || n > (all+len(members)-1)/len(members) {
				return fmt.Sprintf("they are %v", got)
			}
			sum += n
		}
		if sum != all || len(got) != len(members) {
			return fmt.Sprintf("they are %v, want %d of %v", got, all, members)
		}
		return ""
	})
}
