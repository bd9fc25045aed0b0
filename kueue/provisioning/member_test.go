package provisioning

import (
	"context"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	autoscalingv1 "k8s.io/autoscaler/cluster-autoscaler/apis/provisioningrequest/autoscaling.x-k8s.io/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/drover-sh/drover/controllers/sharded"
)

// reader is the API server or a cache with ProvisioningRequests in one version each.
type reader struct {
	client.Reader
	versions map[types.UID]string
}

func (r *reader) List(_ context.Context, out client.ObjectList, _ ...client.ListOption) error {
	switch out := out.(type) {
	case *metav1.PartialObjectMetadataList:
		out.ResourceVersion = "100"
		for uid, v := range r.versions {
			out.Items = append(out.Items, metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{UID: uid, ResourceVersion: v}})
		}
	case *autoscalingv1.ProvisioningRequestList:
		for uid, v := range r.versions {
			out.Items = append(out.Items, autoscalingv1.ProvisioningRequest{ObjectMeta: metav1.ObjectMeta{UID: uid, ResourceVersion: v}})
		}
	}
	return nil
}

// TestATurnBeginsAfresh: who takes over decides nothing before its cache shows what the owner before has written, and
// remembers nothing of an earlier turn.
func TestATurnBeginsAfresh(t *testing.T) {
	live, cached := &reader{}, &reader{}
	c := NewClaims()
	c.shard = &shard{catchUp: func(scopes ...sharded.Scope) *sharded.CatchUp {
		return sharded.NewCatchUp(scheme(), live, cached, scopes...)
	}}
	resets := 0
	c.OnTurn(func() { resets++ }, sharded.Scope{List: &autoscalingv1.ProvisioningRequestList{}})
	keys := c.Keys(nil)
	mine := func(reconcile.Request) bool { return true }
	takeOver := func(turn sharded.Turn) bool {
		t.Helper()
		done, err := keys.Takeover(t.Context(), turn)
		if err != nil {
			t.Fatal(err)
		}
		return done
	}
	expect := func(what string, done, wantDone bool, wantResets int) {
		t.Helper()
		if done != wantDone || resets != wantResets {
			t.Errorf("%s: done %t and %d resets, expected %t and %d", what, done, resets, wantDone, wantResets)
		}
	}
	set := func(r *reader, version string) { r.versions = map[types.UID]string{"pr": version} }

	set(live, "7")
	set(cached, "7")
	expect("the first turn", takeOver(1), true, 1)
	expect("the same turn", takeOver(1), true, 1)

	keys.Lost(t.Context(), 1, func(reconcile.Request) bool { return false })
	expect("other Virtual Nodes have gone", takeOver(1), true, 1)
	keys.Lost(t.Context(), 1, mine)
	expect("the turn has ended", true, true, 2)

	set(live, "9") // written by the owner in between
	expect("the cache is behind", takeOver(2), false, 3)
	set(cached, "9")
	for !takeOver(2) { // it looks again in a moment
		if t.Context().Err() != nil {
			t.Fatal("never taken over")
		}
	}
	expect("the cache shows what was written", true, true, 3)
	keys.Lost(t.Context(), 1, mine)
	expect("late news of an earlier turn", takeOver(2), true, 3)
}

func TestOneKeyForAllPromises(t *testing.T) {
	keys := NewClaims().Keys(nil)
	for _, name := range []string{"", "a", "b"} {
		if got := keys.Of(reconcile.Request{NamespacedName: client.ObjectKey{Namespace: name, Name: name}}); got != HashKey {
			t.Errorf("request %q has key %q, expected %q", name, got, HashKey)
		}
	}
}

func TestAResetForgetsBookings(t *testing.T) {
	r := &Reconciler{
		agenda: newAgenda(nil), bookings: map[types.NamespacedName]Booking{{Name: "a"}: {}},
		promised: map[types.NamespacedName]promise{{Name: "a"}: {}},
	}
	r.agenda.next[types.NamespacedName{Name: "a"}], r.agenda.held[types.NamespacedName{Name: "a"}] = r.agenda.next[types.NamespacedName{}], 3
	r.reset()
	if len(r.bookings)+len(r.promised)+len(r.agenda.next)+len(r.agenda.held) > 0 {
		t.Errorf("left: %v, %v, %v, %v", r.bookings, r.promised, r.agenda.next, r.agenda.held)
	}
}
