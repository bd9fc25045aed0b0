package provisioning

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	autoscalingv1 "k8s.io/autoscaler/cluster-autoscaler/apis/provisioningrequest/autoscaling.x-k8s.io/v1"
)

var epoch = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)

// waiting is a booking of four pods of which nothing is there yet, and provisioned one that stands since the epoch.
func waiting(change func(*Observation)) Observation {
	o := Observation{
		Now: epoch.Add(time.Minute), Created: epoch, Terms: Terms{ProvisionTimeout: 15 * time.Minute, BookingTTL: 10 * time.Minute},
		Total: 4, Held: 4, Acknowledged: 4, Placement: Placement{Wanted: 4},
	}
	change(&o)
	return o
}

func provisioned(change func(*Observation)) Observation {
	return waiting(func(o *Observation) {
		o.Conditions = []metav1.Condition{
			{Type: autoscalingv1.Accepted, Status: metav1.ConditionTrue},
			{Type: autoscalingv1.Provisioned, Status: metav1.ConditionTrue, LastTransitionTime: metav1.NewTime(epoch)},
		}
		o.Placement = Placement{Wanted: 4, Placed: 4, Nodes: []string{"a", "b"}}
		change(o)
	})
}

func TestDecide(t *testing.T) {
	type condition struct{ Kind, Status, Reason, Message string }
	accepted := condition{"Accepted", "True", ReasonAccepted, "capacity for 4 pods is asked of the fleet"}
	for _, c := range []struct {
		name                         string
		in                           Observation
		conditions                   []condition
		write, release, book, active bool
		again                        time.Duration
	}{
		{
			name:       "a new request is accepted, and its demand written",
			in:         waiting(func(o *Observation) { o.Held, o.Acknowledged = 0, 0 }),
			conditions: []condition{accepted, {"Provisioned", "False", ReasonWaiting, "room for 0 of 4 pods stands ready"}},
			write:      true, active: true, again: 14 * time.Minute,
		},
		{
			name: "while the workload has no quota nothing is asked for, and nothing fails",
			in:   waiting(func(o *Observation) { o.NoQuota, o.Now = true, epoch.Add(time.Hour) }),
			conditions: []condition{{"Provisioned", "False", ReasonNoQuota,
				"the workload holds no quota; nothing is asked for until it does"}},
			release: true, active: true,
		},
		{
			name:       "the time to fail starts with the quota",
			in:         waiting(func(o *Observation) { o.Quota, o.Now = epoch.Add(50*time.Minute), epoch.Add(time.Hour) }),
			conditions: []condition{accepted, {"Provisioned", "False", ReasonWaiting, "room for 0 of 4 pods stands ready"}},
			active:     true, again: 5 * time.Minute,
		},
		{
			name: "one that waits says how far it is",
			in:   waiting(func(o *Observation) { o.Placement.Placed, o.Upcoming = 1, 3 }),
			conditions: []condition{accepted,
				{"Provisioned", "False", ReasonWaiting, "room for 1 of 4 pods stands ready; 3 nodes on the way"}},
			active: true, again: 14 * time.Minute,
		},
		{
			name: "room that the autoscaler was not told of may be taken away any time: not provisioned",
			in: waiting(func(o *Observation) {
				o.Acknowledged, o.Placement = 3, Placement{Wanted: 4, Placed: 4, Nodes: []string{"a"}}
			}),
			conditions: []condition{accepted, {"Provisioned", "False", ReasonWaiting,
				"room for 4 of 4 pods stands ready, and the autoscaler has yet to take note of the booking"}},
			active: true, again: 14 * time.Minute,
		},
		{
			name: "room for all of them is provisioned",
			in:   waiting(func(o *Observation) { o.Placement = Placement{Wanted: 4, Placed: 4, Nodes: []string{"a", "b"}} }),
			conditions: []condition{accepted,
				{"Provisioned", "True", ReasonProvisioned, "room for 4 pods stands ready on 2 nodes; it is held for 10m0s"}},
			book: true, active: true, again: 10 * time.Minute,
		},
		{
			name: "also at the last moment",
			in: waiting(func(o *Observation) {
				o.Now, o.Placement = epoch.Add(time.Hour), Placement{Wanted: 4, Placed: 4, Nodes: []string{"a"}}
			}),
			conditions: []condition{accepted,
				{"Provisioned", "True", ReasonProvisioned, "room for 4 pods stands ready on 1 node; it is held for 10m0s"}},
			book: true, active: true, again: 10 * time.Minute,
		},
		{
			name: "what does not come in time fails, and is let go after that is written",
			in:   waiting(func(o *Observation) { o.Now, o.Placement.Placed = epoch.Add(15*time.Minute), 1 }),
			conditions: []condition{{"Failed", "True", ReasonTimedOut,
				"after 15m0s room for 1 of 4 pods stands ready; the demand is withdrawn"}},
			active: true,
		},
		{
			name:       "what cannot be read fails with its reason",
			in:         waiting(func(o *Observation) { o.Invalid = "spec.x: no" }),
			conditions: []condition{{"Failed", "True", ReasonInvalid, "spec.x: no"}}, active: true,
		},
		{
			name: "what it refers to may come a little later",
			in: waiting(func(o *Observation) {
				o.Held, o.Missing, o.Now = 0, "no template", epoch.Add(10*time.Second)
			}),
			active: true, again: 20 * time.Second,
		},
		{
			name:       "but not for ever",
			in:         waiting(func(o *Observation) { o.Held, o.Missing = 0, "no template" }),
			conditions: []condition{{"Failed", "True", ReasonInvalid, "no template"}}, active: true,
		},
		{
			name:    "a failed request releases what it holds",
			in:      waiting(func(o *Observation) { o.Conditions = []metav1.Condition{{Type: "Failed", Status: "True"}} }),
			release: true,
		},
		{
			name: "and then rests",
			in: waiting(func(o *Observation) {
				o.Held, o.Conditions = 0, []metav1.Condition{{Type: "Failed", Status: "True"}}
			}),
		},
		{
			name: "a booking holds until it expires", in: provisioned(func(*Observation) {}),
			active: true, again: 9 * time.Minute,
		},
		{
			name: "and then is given back",
			in:   provisioned(func(o *Observation) { o.Now, o.Held, o.HandedOver = epoch.Add(10*time.Minute), 3, 1 }),
			conditions: []condition{{"BookingExpired", "True", ReasonExpired,
				"3 of 4 pods did not arrive within 10m0s; their room is given back"}},
			active: true,
		},
		{
			name: "one that all pods have consumed holds nothing any more",
			in:   provisioned(func(o *Observation) { o.Held, o.HandedOver = 0, 3 }),
			conditions: []condition{{"BookingExpired", "True", ReasonConsumed,
				"all 4 pods have arrived and are demand of their own"}},
			active: true,
		},
		{
			name: "a node that vanishes revokes the booking",
			in: provisioned(func(o *Observation) {
				o.Vanished, o.Placement = []string{"b"}, Placement{Wanted: 4, Placed: 2}
			}),
			conditions: []condition{{"CapacityRevoked", "True", ReasonNodesVanished,
				"1 node gone (b) before the pods arrived; room for 2 of 4 pods is left"}},
			active: true,
		},
		{
			name:   "unless the others carry it",
			in:     provisioned(func(o *Observation) { o.Vanished = []string{"b"} }),
			active: true, again: 9 * time.Minute,
		},
		{
			name: "or pods of it run already, which a revocation would end",
			in: provisioned(func(o *Observation) {
				o.Held, o.HandedOver, o.Vanished, o.Placement = 3, 1, []string{"b"}, Placement{Wanted: 3, Placed: 1}
			}),
			active: true, again: 9 * time.Minute,
		},
		{
			name:   "room that others took is not revoked: the autoscaler still owes it",
			in:     provisioned(func(o *Observation) { o.Placement = Placement{Wanted: 4, Placed: 2} }),
			active: true, again: 9 * time.Minute,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := Decide(c.in)
			var conditions []condition
			for _, g := range got.Conditions {
				conditions = append(conditions, condition{g.Type, string(g.Status), g.Reason, g.Message})
			}
			if diff := cmp.Diff(c.conditions, conditions); diff != "" {
				t.Errorf("conditions (-want +got):\n%s", diff)
			}
			got.Conditions = nil
			want := Decision{Write: c.write, Release: c.release, Book: c.book, Active: c.active, Again: c.again}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("decision (-want +got):\n%s", diff)
			}
		})
	}
}
