package provisioning

import (
	"fmt"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	autoscalingv1 "k8s.io/autoscaler/cluster-autoscaler/apis/provisioningrequest/autoscaling.x-k8s.io/v1"
)

// Reasons of the conditions.
const (
	// ReasonAccepted: the capacity is being asked for.
	ReasonAccepted = "CapacityRequested"
	// ReasonNoQuota: the workload that asks has no quota at the moment, and nothing is asked for.
	ReasonNoQuota = "NoQuotaReserved"
	// ReasonWaiting: not all of it is there.
	ReasonWaiting = "WaitingForCapacity"
	// ReasonProvisioned: all pods have room on Ready nodes, and the booking holds it.
	ReasonProvisioned = "CapacityReady"
	// ReasonInvalid: the ProvisioningRequest cannot be read; the message names field and value.
	ReasonInvalid = "InvalidProvisioningRequest"
	// ReasonTimedOut: the capacity did not come in time. Another attempt may succeed.
	ReasonTimedOut = "CapacityNotFound"
	// ReasonExpired: the pods did not come in time.
	ReasonExpired = "BookingTimedOut"
	// ReasonConsumed: all pods came, and the booking holds nothing any more.
	ReasonConsumed = "BookingConsumed"
	// ReasonNodesVanished: nodes of the booking are gone and the others do not carry it.
	ReasonNodesVanished = "NodesVanished"
)

// missingGrace is how long after a ProvisioningRequest the pod templates that it names may come.
const missingGrace = 30 * time.Second

// Terms are the times that hold for one booking.
type Terms struct {
	// ProvisionTimeout runs from the creation, or from when the workload that asks got its quota: what has not come by then
	// makes the request fail.
	ProvisionTimeout time.Duration
	// BookingTTL runs from the moment that the request is Provisioned: what no pod has consumed by then is let go.
	BookingTTL time.Duration
}

// Observation is everything that a decision depends on.
type Observation struct {
	Now     time.Time
	Created time.Time
	// Quota is since when the workload that asks has had its quota; zero where nobody says.
	Quota time.Time
	// NoQuota says that the workload that asks has none: Kueue keeps the request of one that it evicts.
	NoQuota bool
	Terms   Terms
	// Conditions are those of the ProvisioningRequest as it stands.
	Conditions []metav1.Condition
	// Invalid says why the request can never be served, and Missing what it refers to that is not there; empty where
	// all is well.
	Invalid, Missing string

	// Total is how many pods the request announces; Held how many of their CapacityRequests the booking still owns, and
	// HandedOver how many a pod owns. The rest is missing: not written yet or, once Provisioned, gone with its pod.
	Total, Held, HandedOver int32
	// Acknowledged is how many of those held the autoscaler has been told of.
	Acknowledged int32
	// Placement is where what is outstanding fits now: on Ready nodes until the request is Provisioned, and then, as a
	// node that is not Ready for a while comes back, on the nodes that exist.
	Placement Placement
	// Vanished are nodes of the booking that do not exist any more.
	Vanished []string
	// Upcoming is how many nodes that suit the pods are on their way.
	Upcoming int
}

// Decision is what follows.
type Decision struct {
	// Write says that missing CapacityRequests are to be written, and Release that those still held are to be deleted.
	Write, Release bool
	// Conditions are to be set; none where nothing changes.
	Conditions []metav1.Condition
	// Book says that the nodes of the observed Placement are to be recorded with the conditions.
	Book bool
	// Active is false when nothing is left to be done for the request.
	Active bool
	// Again is when to look again even though nothing happens; zero for never.
	Again time.Duration
}

// Decide carries a ProvisioningRequest through its life: Accepted, then Provisioned or Failed, and from Provisioned to
// BookingExpired or CapacityRevoked. The last three are final. Conditions never go back.
func Decide(o Observation) Decision {
	if isTrue(o.Conditions, autoscalingv1.Failed) || isTrue(o.Conditions, autoscalingv1.BookingExpired) ||
		isTrue(o.Conditions, autoscalingv1.CapacityRevoked) {
		return Decision{Release: o.Held > 0}
	}
	if isTrue(o.Conditions, autoscalingv1.Provisioned) {
		return o.provisioned(find(o.Conditions, autoscalingv1.Provisioned).LastTransitionTime.Time)
	}
	return o.waiting()
}

func (o Observation) waiting() Decision {
	if o.Invalid != "" {
		return o.end(autoscalingv1.Failed, ReasonInvalid, o.Invalid)
	}
	if o.Missing != "" {
		// Objects that are created together arrive in any order.
		if left := missingGrace - o.Now.Sub(o.Created); left > 0 {
			return Decision{Active: true, Again: left}
		}
		return o.end(autoscalingv1.Failed, ReasonInvalid, o.Missing)
	}
	if o.NoQuota {
		return Decision{Release: o.Held > 0, Active: true, Conditions: []metav1.Condition{
			condition(autoscalingv1.Provisioned, false, ReasonNoQuota, "the workload holds no quota; nothing is asked for until it does"),
		}}
	}
	missing := o.Total - o.Held - o.HandedOver
	if missing == 0 && o.Acknowledged == o.Held && o.Placement.Complete() {
		message := fmt.Sprintf("room for %d pods stands ready on %s; it is held for %s", o.Total,
			count(len(o.Placement.Nodes), "node"), o.Terms.BookingTTL)
		return Decision{
			Book: true, Active: true, Again: o.Terms.BookingTTL,
			Conditions: []metav1.Condition{o.accepted(), condition(autoscalingv1.Provisioned, true, ReasonProvisioned, message)},
		}
	}
	since := o.Created
	if o.Quota.After(since) {
		since = o.Quota
	}
	left := o.Terms.ProvisionTimeout - o.Now.Sub(since)
	if left <= 0 {
		return o.end(autoscalingv1.Failed, ReasonTimedOut,
			fmt.Sprintf("after %s %s; the demand is withdrawn", o.Terms.ProvisionTimeout, o.progress()))
	}
	return Decision{
		Write: missing > 0, Active: true, Again: left,
		Conditions: []metav1.Condition{
			o.accepted(), condition(autoscalingv1.Provisioned, false, ReasonWaiting, o.progress()),
		},
	}
}

// progress says how far it is. It holds no times, so that it changes only when something happened.
func (o Observation) progress() string {
	there := o.Total - (o.Placement.Wanted - o.Placement.Placed)
	s := fmt.Sprintf("room for %d of %d pods stands ready", there, o.Total)
	if there == o.Total {
		s += ", and the autoscaler has yet to take note of the booking"
	}
	if o.Upcoming > 0 {
		s += fmt.Sprintf("; %s on the way", count(o.Upcoming, "node"))
	}
	return s
}

func (o Observation) provisioned(since time.Time) Decision {
	if o.Held == 0 {
		return o.end(autoscalingv1.BookingExpired, ReasonConsumed,
			fmt.Sprintf("all %d pods have arrived and are demand of their own", o.Total))
	}
	left := o.Terms.BookingTTL - o.Now.Sub(since)
	if left <= 0 {
		return o.end(autoscalingv1.BookingExpired, ReasonExpired,
			fmt.Sprintf("%d of %d pods did not arrive within %s; their room is given back", o.Held, o.Total, o.Terms.BookingTTL))
	}
	// Once pods have come, a lost node is theirs to replace by their own demand: a revocation would end all the others.
	if o.Held == o.Total && len(o.Vanished) > 0 && !o.Placement.Complete() {
		return o.end(autoscalingv1.CapacityRevoked, ReasonNodesVanished,
			fmt.Sprintf("%s gone (%s) before the pods arrived; room for %d of %d pods is left",
				count(len(o.Vanished), "node"), some(o.Vanished), o.Placement.Placed, o.Placement.Wanted))
	}
	return Decision{Active: true, Again: left}
}

// end sets a final condition. The requests are let go after it is written, never before: missing ones would look
// consumed.
func (o Observation) end(kind, reason, message string) Decision {
	return Decision{Active: true, Conditions: []metav1.Condition{condition(kind, true, reason, message)}}
}

func (o Observation) accepted() metav1.Condition {
	return condition(autoscalingv1.Accepted, true, ReasonAccepted,
		fmt.Sprintf("capacity for %d pods is asked of the fleet", o.Total))
}

func condition(kind string, is bool, reason, message string) metav1.Condition {
	status := metav1.ConditionFalse
	if is {
		status = metav1.ConditionTrue
	}
	return metav1.Condition{Type: kind, Status: status, Reason: reason, Message: message}
}

func find(conditions []metav1.Condition, kind string) *metav1.Condition {
	for i := range conditions {
		if conditions[i].Type == kind {
			return &conditions[i]
		}
	}
	return nil
}

func isTrue(conditions []metav1.Condition, kind string) bool {
	c := find(conditions, kind)
	return c != nil && c.Status == metav1.ConditionTrue
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// some lists a few names of many.
func some(names []string) string {
	const few = 5
	if len(names) <= few {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:few], ", "), len(names)-few)
}
