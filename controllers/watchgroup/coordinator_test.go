package watchgroup

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding/wire"
)

var coordinate = Options{Coordinate: true}

// quiet waits until the group's status says that everything has one owner.
func (k *cast) quiet(members int) *lbv1alpha1.WatchGroup {
	k.t.Helper()
	g := &lbv1alpha1.WatchGroup{}
	eventually(k.t, "the group is quiet", func() string {
		if err := k.c.Get(k.t.Context(), client.ObjectKeyFromObject(k.group), g); err != nil {
			return err.Error()
		}
		s := g.Status
		if s.Members != int32(members) || s.Owned != g.Spec.VirtualNodes || s.Moving != 0 || s.Unowned != 0 ||
			meta.IsStatusConditionTrue(s.Conditions, lbv1alpha1.ConditionUnowned) ||
			meta.IsStatusConditionTrue(s.Conditions, lbv1alpha1.ConditionMoving) ||
			!meta.IsStatusConditionTrue(s.Conditions, lbv1alpha1.ConditionAccepted) {
			return fmt.Sprintf("%+v", s)
		}
		return ""
	})
	return g
}

func TestMembersJoinAndLeaveGracefully(t *testing.T) {
	c, ns := api(t)
	k := newCast(t, c, newGroup(t, c, ns, nil))
	start(t, apiServer, coordinate)
	k.join("a", nil)
	k.share(map[string]int{"a": 100})
	b := k.join("b", nil)
	k.share(map[string]int{"a": 50, "b": 50})
	k.join("c", nil)
	k.shareAlike("a", "b", "c")
	k.quiet(3)
	b.leave()
	k.share(map[string]int{"a": 50, "c": 50})
	k.quiet(2)
	eventually(t, "nothing is left of a member that has gone", func() string {
		err := c.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: "parents.b"}, &lbv1alpha1.VirtualNodeSlice{})
		if !apierrors.IsNotFound(err) {
			return fmt.Sprintf("its slice: %v", err)
		}
		err = c.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: "parents.b"}, &coordinationv1.Lease{})
		if !apierrors.IsNotFound(err) {
			return fmt.Sprintf("its Lease: %v", err)
		}
		return ""
	})
}

func TestACrashedMemberIsReplacedWhenItsLeaseRunsOut(t *testing.T) {
	c, ns := api(t)
	k := newCast(t, c, newGroup(t, c, ns, nil))
	start(t, apiServer, coordinate)
	k.join("a", nil)
	b := k.join("b", nil)
	k.share(map[string]int{"a": 50, "b": 50})
	b.kill()
	k.share(map[string]int{"a": 100})
	k.quiet(1)
	if session := holder(b.readLeaseIfAny()); session != "" {
		t.Errorf("session %s was replaced, and still holds its Lease", session)
	}
}

// readLeaseIfAny returns the member's Lease, nil if it has been collected.
func (m *member) readLeaseIfAny() *coordinationv1.Lease {
	lease := &coordinationv1.Lease{}
	key := client.ObjectKey{Namespace: m.group.Namespace, Name: lbv1alpha1.MemberName(m.group.Name, m.id)}
	if err := m.c.Get(m.t.Context(), key, lease); err != nil {
		return nil
	}
	return lease
}

// A Lease that is deleted by hand says nothing about its member, which may be at work for as long as it holds what it has.
func TestADeletedLeaseIsWaitedForLikeAnExpiry(t *testing.T) {
	c, ns := api(t)
	k := newCast(t, c, newGroup(t, c, ns, nil))
	start(t, apiServer, coordinate)
	k.join("a", nil)
	b := k.join("b", nil)
	k.share(map[string]int{"a": 50, "b": 50})
	lease := b.readLease()
	if err := c.Delete(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	eventually(t, "b begins a new session", func() string {
		if now := holder(b.readLeaseIfAny()); now == "" || now == holder(lease) {
			return now
		}
		return ""
	})
	// b comes back under a new session, and nobody clashed (see newCast).
	k.share(map[string]int{"a": 50, "b": 50})
	k.quiet(2)
}

// pod creates a Pod of the group and lets it look as kubelet would.
func (k *cast) newPod(name string) *corev1.Pod {
	k.t.Helper()
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: k.group.Namespace, Name: name,
			Labels: map[string]string{lbv1alpha1.LabelWatchGroup: k.group.Name}},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "none"}}, NodeName: "nowhere",
			ServiceAccountName: "controller"},
	}
	if err := k.c.Create(k.t.Context(), p); err != nil {
		k.t.Fatal(err)
	}
	return p
}

func (k *cast) kubelet(p *corev1.Pod, status func(*corev1.PodStatus)) {
	k.t.Helper()
	if err := k.c.Get(k.t.Context(), client.ObjectKeyFromObject(p), p); err != nil {
		k.t.Fatal(err)
	}
	patch := client.MergeFrom(p.DeepCopy())
	status(&p.Status)
	if err := k.c.Status().Patch(k.t.Context(), p, patch); err != nil {
		k.t.Fatal(err)
	}
}

// slowLease makes a group whose Leases do not run out during the test, nor do its sessions, however long the machine stands
// still.
func slowLease(s *lbv1alpha1.WatchGroupSpec) {
	s.Lease.LeaseDuration = &metav1.Duration{Duration: time.Hour}
	s.Lease.RenewDeadline = &metav1.Duration{Duration: 30 * time.Minute}
}

func ended(at time.Time) func(*corev1.PodStatus) {
	return func(s *corev1.PodStatus) {
		s.ContainerStatuses = []corev1.ContainerStatus{{Name: "main", State: corev1.ContainerState{
			Terminated: &corev1.ContainerStateTerminated{ExitCode: 137, StartedAt: metav1.NewTime(at.Add(-time.Minute)),
				FinishedAt: metav1.NewTime(at)}}}}
	}
}

func TestAMemberWhoseContainerEndedIsReplacedAtOnce(t *testing.T) {
	c, ns := api(t)
	k := newCast(t, c, newGroup(t, c, ns, slowLease))
	start(t, apiServer, coordinate)
	k.join("a", nil)
	p := k.newPod("b")
	b := k.join("b", p)
	k.share(map[string]int{"a": 50, "b": 50})
	b.kill()
	k.kubelet(p, ended(time.Now().Add(2*time.Second)))
	k.share(map[string]int{"a": 100})
	k.quiet(1)
}

// Kubelet's last word reaches the API server, and the Pod is removed right after it.
func TestAPodThatEndedAndIsGoneCountsAsEnded(t *testing.T) {
	c, ns := api(t)
	k := newCast(t, c, newGroup(t, c, ns, slowLease))
	start(t, apiServer, coordinate)
	k.join("a", nil)
	p := k.newPod("b")
	b := k.join("b", p)
	k.share(map[string]int{"a": 50, "b": 50})
	b.kill()
	k.kubelet(p, ended(time.Now().Add(2*time.Second)))
	if err := c.Delete(t.Context(), p, client.GracePeriodSeconds(0)); err != nil {
		t.Fatal(err)
	}
	k.share(map[string]int{"a": 100})
}

// An unready Pod's process may well be at work: it is asked to drain, and loses nothing before it has.
func TestAnUnreadyMemberIsDrained(t *testing.T) {
	c, ns := api(t)
	k := newCast(t, c, newGroup(t, c, ns, slowLease))
	start(t, apiServer, coordinate)
	k.join("a", nil)
	p := k.newPod("b")
	k.join("b", p)
	k.share(map[string]int{"a": 50, "b": 50})
	ready := func(status corev1.ConditionStatus, at time.Time) func(*corev1.PodStatus) {
		return func(s *corev1.PodStatus) {
			s.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: status, LastTransitionTime: metav1.NewTime(at)}}
		}
	}
	k.kubelet(p, ready(corev1.ConditionFalse, time.Now().Add(2*time.Second)))
	k.share(map[string]int{"a": 100, "b": 0})
	k.kubelet(p, ready(corev1.ConditionTrue, time.Now().Add(4*time.Second)))
	k.share(map[string]int{"a": 50, "b": 50})
}

// Somebody deletes a Pod: its process has its grace period, and hands over what it has meanwhile.
func TestAMemberWhosePodIsDeletedIsDrained(t *testing.T) {
	c, ns := api(t)
	k := newCast(t, c, newGroup(t, c, ns, slowLease))
	start(t, apiServer, coordinate)
	k.join("a", nil)
	p := k.newPod("b")
	k.join("b", p)
	k.share(map[string]int{"a": 50, "b": 50})
	if err := c.Delete(t.Context(), p, client.GracePeriodSeconds(600)); err != nil {
		t.Fatal(err)
	}
	k.share(map[string]int{"a": 100, "b": 0})
}

// Nobody waits for a timer where a Lease has been released.
func TestAReleasedLeaseIsNoticed(t *testing.T) {
	c, ns := api(t)
	k := newCast(t, c, newGroup(t, c, ns, slowLease))
	start(t, apiServer, coordinate)
	k.join("a", nil)
	b := k.join("b", nil)
	k.share(map[string]int{"a": 50, "b": 50})
	k.quiet(2)
	b.leave()
	k.quiet(1)
}

func TestTwoCoordinatorsAtOnceDoNoHarm(t *testing.T) {
	c, ns := api(t)
	k := newCast(t, c, newGroup(t, c, ns, nil))
	start(t, apiServer, coordinate)
	start(t, apiServer, coordinate)
	k.join("a", nil)
	b := k.join("b", nil)
	k.share(map[string]int{"a": 50, "b": 50})
	k.join("c", nil)
	k.shareAlike("a", "b", "c")
	b.kill()
	k.share(map[string]int{"a": 50, "c": 50})
}

// Coordinators die after one write, after two, and so on; each goes on from what it finds.
func TestACoordinatorMayDieAfterAnyWrite(t *testing.T) {
	c, ns := api(t)
	k := newCast(t, c, newGroup(t, c, ns, slowLease))
	want := []map[string]int{{"a": 100}, {"a": 50, "b": 50}, {"a": 34, "b": 33, "c": 33}}
	died := errors.New("the coordinator has died")
	deaths := 0
	for i, id := range []string{"a", "b", "c"} {
		k.join(id, nil)
		for settled := false; !settled; deaths++ {
			limit := int32(1 + deaths%7)
			var writes atomic.Int32
			cut := func(req *http.Request) error {
				if strings.Contains(req.URL.Path, "/virtualnodeslices") && writes.Add(1) > limit {
					return died
				}
				return nil
			}
			p := startCut(t, apiServer, coordinate, cut)
			eventually(t, "the coordinator dies, or there is nothing left to do", func() string {
				settled = fmt.Sprint(k.owned()) == fmt.Sprint(want[i])
				if !settled && writes.Load() <= limit {
					return fmt.Sprintf("%v after %d writes", k.owned(), writes.Load())
				}
				return ""
			})
			p.stop()
		}
	}
	if deaths < 6 {
		t.Errorf("it died %d times only", deaths)
	}
}

// Requests fail without an answer, and half of them have landed: the coordinator goes on under another claim, and nothing is
// decided on what it does not know.
func TestLostAnswersDoNoHarm(t *testing.T) {
	c, ns := api(t)
	k := newCast(t, c, newGroup(t, c, ns, nil))
	var n, lost atomic.Int32
	startCut(t, apiServer, coordinate, func(req *http.Request) error {
		if !strings.Contains(req.URL.Path, "/virtualnodeslices") || n.Add(1)%7 != 0 {
			return nil
		}
		if lost.Add(1)%2 == 0 {
			return errors.New("no route to host")
		}
		return errAnswerLost
	})
	for i, ids := 1, []string{"a", "b", "c"}; i <= len(ids); i++ { // one after the other, which takes the most writes
		k.join(ids[i-1], nil)
		k.shareAlike(ids[:i]...)
	}
	k.members["b"].kill()
	k.share(map[string]int{"a": 50, "c": 50})
	if lost.Load() < 2 {
		t.Errorf("%d requests were lost only", lost.Load())
	}
}

// What is refused is named with its field and value, and the members keep what they have.
func TestAGroupThatCannotBeFollowedSaysWhy(t *testing.T) {
	c, ns := api(t)
	k := newCast(t, c, newGroup(t, c, ns, slowLease))
	start(t, apiServer, coordinate)
	k.join("a", nil)
	k.share(map[string]int{"a": 100})
	younger := &lbv1alpha1.WatchGroup{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "younger"},
		Spec: lbv1alpha1.WatchGroupSpec{VirtualNodes: 7, Resources: []lbv1alpha1.Resource{{Group: "apps", Resource: "deployments"},
			{Resource: "configmaps"}}}}
	if err := c.Create(t.Context(), younger); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the younger group is refused", func() string {
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(younger), younger); err != nil {
			return err.Error()
		}
		cond := meta.FindStatusCondition(younger.Status.Conditions, lbv1alpha1.ConditionAccepted)
		if cond == nil || cond.Status != metav1.ConditionFalse || cond.Reason != lbv1alpha1.ReasonConflict {
			return fmt.Sprint(younger.Status.Conditions)
		}
		for _, part := range []string{"spec.resources[1]", "configmaps", ns + "/parents", "100", "7"} {
			if !strings.Contains(cond.Message, part) {
				t.Fatalf("%q does not mention %s", cond.Message, part)
			}
		}
		return ""
	})
	k.quiet(1)
	if err := c.Delete(t.Context(), k.group); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the group waits for its member", func() string {
		g := &lbv1alpha1.WatchGroup{}
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(k.group), g); err != nil {
			t.Fatal(err)
		}
		if cond := meta.FindStatusCondition(g.Status.Conditions, lbv1alpha1.ConditionAccepted); cond == nil ||
			cond.Reason != lbv1alpha1.ReasonDeleting {
			return fmt.Sprint(cond)
		}
		return ""
	})
	k.share(map[string]int{"a": 100})
	k.members["a"].kill()
	k.members["a"].release()
	eventually(t, "the group goes with its last member, and the younger one takes its place", func() string {
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(k.group), &lbv1alpha1.WatchGroup{}); !apierrors.IsNotFound(err) {
			return fmt.Sprint(err)
		}
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(younger), younger); err != nil {
			return err.Error()
		}
		if !meta.IsStatusConditionTrue(younger.Status.Conditions, lbv1alpha1.ConditionAccepted) {
			return fmt.Sprint(younger.Status.Conditions)
		}
		return ""
	})
}

// A slice that cannot be read is not taken for empty: nothing moves until it is mended, and the group says why.
func TestASliceThatCannotBeReadStopsTheGroupAndNothingElse(t *testing.T) {
	c, ns := api(t)
	k := newCast(t, c, newGroup(t, c, ns, slowLease))
	start(t, apiServer, coordinate)
	k.join("a", nil)
	k.share(map[string]int{"a": 100})
	slice := &lbv1alpha1.VirtualNodeSlice{}
	edit := func(owned string) {
		if err := c.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: "parents.a"}, slice); err != nil {
			t.Fatal(err)
		}
		patch := client.MergeFrom(slice.DeepCopy())
		slice.Spec.Owned = lbv1alpha1.VirtualNodeSet(owned)
		if err := c.Patch(t.Context(), slice, patch); err != nil {
			t.Fatal(err)
		}
	}
	edit("9-3")
	eventually(t, "the group says what it cannot read", func() string {
		g := &lbv1alpha1.WatchGroup{}
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(k.group), g); err != nil {
			t.Fatal(err)
		}
		cond := meta.FindStatusCondition(g.Status.Conditions, lbv1alpha1.ConditionAccepted)
		if cond == nil || cond.Status != metav1.ConditionFalse || !strings.Contains(cond.Message, `parents.a: spec.owned: `) ||
			!strings.Contains(cond.Message, `"9-3"`) {
			return fmt.Sprint(cond)
		}
		return ""
	})
	k.join("b", nil)
	edit("0-99")
	k.share(map[string]int{"a": 50, "b": 50})
	k.quiet(2)
}

// Somebody deletes a slice by hand: its member goes on working on what it has, so the slice stays.
func TestASliceDeletedByHandStaysUntilItsMemberIsGone(t *testing.T) {
	c, ns := api(t)
	k := newCast(t, c, newGroup(t, c, ns, slowLease))
	start(t, apiServer, coordinate)
	a := k.join("a", nil)
	k.join("b", nil)
	k.share(map[string]int{"a": 50, "b": 50})
	slice := &lbv1alpha1.VirtualNodeSlice{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "parents.a"}}
	if err := c.Delete(t.Context(), slice); err != nil {
		t.Fatal(err)
	}
	k.join("c", nil)
	k.share(map[string]int{"a": 34, "b": 33, "c": 33})
	a.leave()
	k.share(map[string]int{"b": 50, "c": 50})
	eventually(t, "the slice is gone", func() string {
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(slice), slice); !apierrors.IsNotFound(err) {
			return fmt.Sprint(err)
		}
		return ""
	})
}

// In a rolling update each Virtual Node moves once: a newcomer takes over what the one it replaces leaves.
func TestARollingUpdateMovesEachVirtualNodeOnce(t *testing.T) {
	c, ns := api(t)
	k := newCast(t, c, newGroup(t, c, ns, func(s *lbv1alpha1.WatchGroupSpec) {
		slowLease(s)
		s.NewcomerGrace = &metav1.Duration{Duration: time.Hour}
	}))
	start(t, apiServer, coordinate)
	a := k.join("a", nil)
	k.share(map[string]int{"a": 100})
	b := k.join("b", nil)
	eventually(t, "b has a slice", func() string {
		if err := c.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: "parents.b"}, &lbv1alpha1.VirtualNodeSlice{}); err != nil {
			return err.Error()
		}
		return ""
	})
	k.share(map[string]int{"a": 100, "b": 0})
	a.leave()
	k.share(map[string]int{"b": 100})
	_ = b
}

func TestOneHundredThousandVirtualNodesFit(t *testing.T) {
	c, ns := api(t)
	k := newCast(t, c, newGroup(t, c, ns, func(s *lbv1alpha1.WatchGroupSpec) {
		slowLease(s)
		s.VirtualNodes = 100_000
		s.Assignment = lbv1alpha1.AssignmentConsistentHash // the worst for sets: no two neighbours belong together
	}))
	start(t, apiServer, coordinate)
	k.join("a", nil)
	k.share(map[string]int{"a": 100_000})
	k.join("b", nil)
	g := k.quiet(2)
	var list lbv1alpha1.VirtualNodeSliceList
	if err := c.List(t.Context(), &list, client.InNamespace(ns)); err != nil {
		t.Fatal(err)
	}
	n := 0
	for i := range list.Items {
		s, err := wire.Slice(&list.Items[i])
		if err != nil {
			t.Fatal(err)
		}
		n += s.Owned.Len()
		t.Logf("%s owns %d in %d bytes", s.Member, s.Owned.Len(), len(list.Items[i].Spec.Owned))
	}
	if n != int(g.Spec.VirtualNodes) {
		t.Errorf("%d of %d are owned", n, g.Spec.VirtualNodes)
	}
}
