package watchgroup

import (
	"context"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/wire"
)

// A view is everything that one look at a group shows.
type view struct {
	observation sharding.Observation
	objects     map[string]*lbv1alpha1.VirtualNodeSlice // by member
	slices      map[string]*sharding.Slice              // by member
	leases      map[string]*coordinationv1.Lease        // by member
	states      map[string]sharding.MemberState
	timer       timer
}

// observe reads slices, then Leases, then Pods. Slices come from one list, which shows every write of this coordinator that
// was answered before. Where a Lease does not hold the session that its slice speaks to, it is read after them, so that no
// session is taken for over because the news of it is late. Sessions that have ended are taken out of their Leases before
// anybody acts on it.
func (r *Reconciler) observe(ctx context.Context, group *lbv1alpha1.WatchGroup, t *tracker) (*view, error) {
	v := &view{
		objects: make(map[string]*lbv1alpha1.VirtualNodeSlice),
		slices:  make(map[string]*sharding.Slice),
		leases:  make(map[string]*coordinationv1.Lease),
		states:  make(map[string]sharding.MemberState),
	}
	if err := r.readSlices(ctx, group, t, v); err != nil {
		return nil, err
	}
	if err := r.readLeases(ctx, group, t, v); err != nil {
		return nil, err
	}
	pods, err := r.readPods(ctx, group)
	if err != nil {
		return nil, err
	}
	v.timer.now = r.Now()
	for member := range v.members() {
		state, err := r.memberState(ctx, group, t, v, pods, member)
		if err != nil {
			return nil, err
		}
		v.states[member] = state
		v.observation.Members = append(v.observation.Members, state)
	}
	if at, ok := t.nextExpiry(v.timer.now); ok {
		v.timer.at(at)
	}
	v.prune(t)
	return v, nil
}

// readSlices lists the slices as of a moment after this coordinator's last write, and after the last event that it has seen.
// To be as of now, the API server would have to wait until its watch cache has heard from etcd, which on a quiet resource
// takes 100 ms. It need not be: what another coordinator has written since, it has claimed first, and a write of ours to
// what it has claimed is refused.
func (r *Reconciler) readSlices(ctx context.Context, group *lbv1alpha1.WatchGroup, t *tracker, v *view) error {
	var list lbv1alpha1.VirtualNodeSliceList
	options := []client.ListOption{
		client.InNamespace(group.Namespace), client.MatchingFields{lbv1alpha1.FieldWatchGroup: group.Name},
	}
	if floor := t.slicesFrom(); floor != "" {
		options = append(options, &client.ListOptions{Raw: &metav1.ListOptions{
			ResourceVersion: floor, ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan,
		}})
	}
	if err := r.Live.List(ctx, &list, options...); err != nil {
		t.forgetSlices()
		return fmt.Errorf("listing the slices of %s/%s: %w", group.Namespace, group.Name, err)
	}
	t.sawSlices(list.ResourceVersion)
	for i := range list.Items {
		o := &list.Items[i]
		s, err := wire.Slice(o)
		if err != nil {
			return &sliceError{err}
		}
		v.objects[s.Member], v.slices[s.Member] = o, &s
		v.observation.Slices = append(v.observation.Slices, s)
	}
	return nil
}

// A sliceError means that a slice cannot be read. Nothing is given to anybody until it is mended: what it holds is not known.
type sliceError struct{ error }

func (e *sliceError) Unwrap() error { return e.error }

// readLeases reads the Leases of all who may be members: from the cache, and from the API server where the cache does not
// show the session that the slice speaks to. A cache that still shows a session which has ended does no harm: its successor
// acts on nothing that its slice says before it is spoken to.
//
// The name alone makes none a member: leader elections have Leases, too, and like to call them "name.example.com". Whoever
// has a slice is one, whatever has become of the label. The Lease of a member that is still in a slice may be gone, because
// somebody has deleted it: nobody knows how long the member goes on, so it is waited for as for an expiry.
func (r *Reconciler) readLeases(ctx context.Context, group *lbv1alpha1.WatchGroup, t *tracker, v *view) error {
	var list coordinationv1.LeaseList
	if err := r.Client.List(ctx, &list, client.InNamespace(group.Namespace)); err != nil {
		return fmt.Errorf("listing the Leases of %s/%s: %w", group.Namespace, group.Name, err)
	}
	for i := range list.Items {
		lease := &list.Items[i]
		member, ok := memberOf(group.Name, lease.Name)
		if !ok || v.slices[member] == nil && !isMembers(lease, group.Name, member) {
			continue
		}
		v.leases[member] = lease
	}
	if err := r.readLeasesAnew(ctx, group, t, v); err != nil {
		return err
	}
	now := r.Now()
	duration := leaseDuration(group)
	for member, lease := range v.leases {
		t.saw(recordOf(member, lease, duration), now)
	}
	for member, s := range v.slices {
		if v.leases[member] == nil && s.Session != "" && mayWork(s) {
			t.saw(sharding.LeaseRecord{Member: member, Session: s.Session, Duration: duration}, now)
		}
	}
	return nil
}

// readLeasesAnew reads from the API server the Leases that do not hold the sessions of their slices, or that are older than
// what has been seen of them.
func (r *Reconciler) readLeasesAnew(ctx context.Context, group *lbv1alpha1.WatchGroup, t *tracker, v *view) error {
	for member, s := range v.slices {
		if cached := v.leases[member]; cached != nil && holder(cached) == s.Session && !t.outdated(member, cached) {
			continue
		}
		lease := &coordinationv1.Lease{}
		key := client.ObjectKey{Namespace: group.Namespace, Name: lbv1alpha1.MemberName(group.Name, member)}
		switch err := r.Live.Get(ctx, key, lease); {
		case err == nil:
			v.leases[member] = lease
		case apierrors.IsNotFound(err):
			delete(v.leases, member)
		default:
			return fmt.Errorf("reading Lease %s: %w", key, err)
		}
	}
	return nil
}

// mayWork reports whether the session that the slice speaks to may be working on something.
func mayWork(s *sharding.Slice) bool { return s != nil && (!s.Held().Empty() || len(s.Draining) > 0) }

func leaseDuration(group *lbv1alpha1.WatchGroup) time.Duration {
	return wire.LeasePolicy(group.Spec).LeaseDuration
}

// readPods reads the members' Pods from the cache. They only ever bring forward what the Leases say later.
func (r *Reconciler) readPods(ctx context.Context, group *lbv1alpha1.WatchGroup) (map[string]*corev1.Pod, error) {
	var list corev1.PodList
	if err := r.Client.List(ctx, &list, client.InNamespace(group.Namespace), client.UnsafeDisableDeepCopy,
		client.MatchingLabels{lbv1alpha1.LabelWatchGroup: group.Name}); err != nil {
		return nil, fmt.Errorf("listing the Pods of %s/%s: %w", group.Namespace, group.Name, err)
	}
	pods := make(map[string]*corev1.Pod, len(list.Items))
	for i := range list.Items {
		pods[list.Items[i].Name] = &list.Items[i]
	}
	return pods, nil
}

// members are all that have a Lease, or a slice that tells of one.
func (v *view) members() map[string]bool {
	members := make(map[string]bool, len(v.leases)+len(v.slices))
	for m := range v.leases {
		members[m] = true
	}
	for m := range v.slices {
		members[m] = true
	}
	return members
}

func (r *Reconciler) memberState(ctx context.Context, group *lbv1alpha1.WatchGroup, t *tracker, v *view,
	pods map[string]*corev1.Pod, member string) (sharding.MemberState, error) {
	state := sharding.MemberState{ID: member}
	lease, slice, now := v.leases[member], v.slices[member], v.timer.now
	facts := sharding.MemberFacts{Session: t.session(member, now)}
	if lease != nil {
		state.Weight = weightOf(lease)
		pod := podOf(lease, pods, t.endedPods())
		facts.Terminated = facts.Session != "" && terminated(pod, lease)
		facts.Unready = unready(pod, lease)
		if holder(lease) != "" && (facts.Session == "" || facts.Terminated) {
			if err := r.revoke(ctx, group, t, v, member, facts.Terminated); err != nil {
				return state, err
			}
			facts.Session, facts.Terminated = "", false
		}
	} else if facts.Session == "" && mayWork(slice) {
		if err := r.bury(ctx, group, v, member); err != nil {
			return state, err
		}
	}
	if slice != nil {
		facts.LeaveAsked = slice.Status.Leaving && slice.Status.Session == facts.Session
	}
	r.graces(group, t, v, member, &facts)
	state.Session, state.Phase = facts.Session, facts.Phase()
	return state, nil
}

// graces says who is new and who is expected back.
func (r *Reconciler) graces(group *lbv1alpha1.WatchGroup, t *tracker, v *view, member string, facts *sharding.MemberFacts) {
	spec := group.Spec.WithDefaults()
	slice, now := v.slices[member], v.timer.now
	if facts.Session == "" {
		if end := first(t.stopped, member, now) + spec.ReturnGrace.Duration; now < end && mayWork(slice) {
			facts.ReturnGrace = true
			v.timer.at(end)
		}
		return
	}
	delete(t.stopped, member)
	delete(t.idle, member)
	if _, ok := t.since[facts.Session]; !ok && slice != nil && slice.Session == facts.Session && !slice.Owned.Empty() {
		// It is new to this coordinator only.
		t.since[facts.Session] = now - spec.NewcomerGrace.Duration
	}
	if end := first(t.since, facts.Session, now) + spec.NewcomerGrace.Duration; now < end {
		facts.NewcomerGrace = true
		v.timer.at(end)
	}
}

// revoke takes a session that has ended out of its Lease, on the condition that the Lease is still the one that was read. A
// member that has renewed meanwhile wins, and one that comes back finds that its session is over.
func (r *Reconciler) revoke(ctx context.Context, group *lbv1alpha1.WatchGroup, t *tracker, v *view, member string,
	seen bool) error {
	lease := v.leases[member].DeepCopy()
	session := holder(lease)
	lease.Spec.HolderIdentity = ptr.To("")
	if err := r.write(ctx, func(ctx context.Context) error { return r.Client.Update(ctx, lease) }); err != nil {
		return fmt.Errorf("taking session %q out of Lease %s/%s: %w", session, lease.Namespace, lease.Name, err)
	}
	v.leases[member] = lease
	t.saw(recordOf(member, lease, leaseDuration(group)), v.timer.now)
	why := "its Lease has expired"
	if seen {
		why = "its container has ended"
	}
	r.Recorder.Eventf(group, nil, corev1.EventTypeWarning, "MemberStopped", "Revoke", "Member %s stopped: %s", member, why)
	r.Metrics.Revocations.WithLabelValues(group.Namespace, group.Name).Inc()
	return nil
}

// bury puts an empty Lease where one has disappeared, so that the member, if it should still be there, finds that its
// session is over.
func (r *Reconciler) bury(ctx context.Context, group *lbv1alpha1.WatchGroup, v *view, member string) error {
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{
		Namespace: group.Namespace, Name: lbv1alpha1.MemberName(group.Name, member),
		Labels: map[string]string{lbv1alpha1.LabelWatchGroup: group.Name},
	}}
	lease.Spec.HolderIdentity = ptr.To("")
	err := r.write(ctx, func(ctx context.Context) error { return r.Client.Create(ctx, lease) })
	if apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		// Nobody gets a Lease there any more, and without one the member finds its session over as well. Waiting for it
		// would keep the slices, and with them the namespace, for ever.
		return nil
	}
	if err != nil {
		return fmt.Errorf("closing the session of %s, whose Lease has disappeared: %w", member, err)
	}
	v.leases[member] = lease
	return nil
}

// prune drops from memory what is no more.
func (v *view) prune(t *tracker) {
	sessions, pods := make(map[string]bool), make(map[types.UID]bool)
	for _, s := range v.states {
		sessions[s.Session] = true
	}
	for _, lease := range v.leases {
		pods[types.UID(lease.Annotations[lbv1alpha1.AnnotationPodUID])] = true
	}
	t.keep(v.members(), sessions, pods)
}

// collectLeases deletes Leases that nobody holds and no slice needs, once they have been so for as long as a member
// would need to take them again.
func (r *Reconciler) collectLeases(ctx context.Context, group *lbv1alpha1.WatchGroup, t *tracker, v *view) error {
	for member, lease := range v.leases {
		if v.states[member].Session != "" || holder(lease) != "" || mayWork(v.slices[member]) {
			delete(t.idle, member)
			continue
		}
		end := first(t.idle, member, v.timer.now) + leaseDuration(group)
		if v.timer.now < end && group.DeletionTimestamp == nil {
			v.timer.at(end)
			continue
		}
		err := r.Client.Delete(ctx, lease, client.Preconditions{UID: &lease.UID, ResourceVersion: &lease.ResourceVersion})
		if client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) {
			return fmt.Errorf("deleting Lease %s/%s, which nobody holds: %w", lease.Namespace, lease.Name, err)
		}
	}
	return nil
}
