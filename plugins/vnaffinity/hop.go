package vnaffinity

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/drover-sh/drover/sharding"
)

// AnnotationReplica says on a pod which replica of the scheduler it has moved on to, and which have refused it, as JSON. A
// pod without it, or whose replica has gone, is at home: at the replica that owns its Virtual Node. It stays on a pod that
// has been bound, and means nothing there.
const AnnotationReplica = "loadbalance.k8s.io/scheduler"

// ConditionReplica is a pod's condition that says the same to people.
const ConditionReplica corev1.PodConditionType = "loadbalance.k8s.io/SchedulerReplica"

// A hop is how a pod has come to the replica that it waits at.
type hop struct {
	// To is the replica that the pod waits at.
	To string `json:"to"`
	// Refused are the replicas on whose nodes it did not fit since the round began.
	Refused []string `json:"refused,omitempty"`
	// Preempting is set in a second round, in which every replica may preempt on its own nodes.
	Preempting bool `json:"preempting,omitempty"`
	// Again counts the rounds that began although every replica had refused the pod, because it seemed to fit all the same.
	Again int `json:"again,omitempty"`
	// Epoch is that of the group when the pod moved on. A change of who owns what ends the round: nodes have gone to replicas
	// that refused the pod without them.
	Epoch sharding.Epoch `json:"epoch"`
}

// maxAgain is where the count of rounds ends.
const maxAgain = 1 << 20

// hopOf reads a pod's annotation, nil if it has none. What cannot be read, or was written by none of the replicas, is none:
// the pod is at home then. Whoever makes a pod may write its annotations.
func hopOf(pod *corev1.Pod) *hop {
	text, ok := pod.Annotations[AnnotationReplica]
	if !ok {
		return nil
	}
	h := &hop{}
	if err := json.Unmarshal([]byte(text), h); err != nil || h.To == "" || h.Again < 0 || h.Again > maxAgain {
		return nil
	}
	return h
}

func (h hop) String() string {
	text, err := json.Marshal(h)
	if err != nil {
		return err.Error() // of strings, booleans and numbers there is none
	}
	return string(text)
}

// message says it to people.
func (h hop) message() string {
	why := "fits on no node of"
	switch {
	case h.Preempting:
		why = "nothing to preempt on the nodes of"
	case h.Again > 0:
		why = "seems to fit there now, and not on the nodes of"
	}
	return fmt.Sprintf("waits at scheduler %s (epoch %d): %s %v", h.To, h.Epoch, why, h.Refused)
}

// A roster is who owns which Virtual Nodes, as the slices of all members say.
type roster struct {
	// members are those that own something, in ascending order.
	members []string
	// owners has the place in members of each Virtual Node's owner, -1 while it is on its way.
	owners []int
	// epoch is the last change that any slice knows of.
	epoch sharding.Epoch
}

// newRoster reads the slices of a group of v Virtual Nodes.
func newRoster(v int, slicesByMember map[string]sharding.Slice) *roster {
	r := &roster{owners: make([]int, v)}
	for i := range r.owners {
		r.owners[i] = -1
	}
	for member, s := range slicesByMember {
		r.epoch = max(r.epoch, s.Epoch)
		if s.Session != "" && !s.Owned.Empty() {
			r.members = append(r.members, member)
		}
	}
	slices.Sort(r.members)
	for i, member := range r.members {
		for vn := range slicesByMember[member].Owned.All() {
			if int(vn) < v {
				r.owners[vn] = i
			}
		}
	}
	return r
}

// owner returns the member that owns vn, "" while it is on its way from one to another.
func (r *roster) owner(vn sharding.VirtualNode) string {
	if int(vn) >= len(r.owners) || r.owners[vn] < 0 {
		return ""
	}
	return r.members[r.owners[vn]]
}

func (r *roster) has(member string) bool {
	_, ok := slices.BinarySearch(r.members, member)
	return ok
}

// known returns those of names that are members, each once: what an annotation says may be anything, and is carried on.
func (r *roster) known(names []string) []string {
	var known []string
	for _, name := range names {
		if r.has(name) && !slices.Contains(known, name) {
			known = append(known, name)
		}
	}
	return known
}

// holder returns the replica that a pod waits at: where it has moved on to, else its home.
func (r *roster) holder(home sharding.VirtualNode, h *hop) string {
	if h != nil && r.has(h.To) {
		return h.To
	}
	return r.owner(home)
}

// after returns the other members in the order of the ring, from the one after self.
func (r *roster) after(self string) []string {
	i, found := slices.BinarySearch(r.members, self)
	ring := append(slices.Clone(r.members[i:]), r.members[:i]...)
	if found {
		ring = ring[1:]
	}
	return ring
}

// A refusal is what a replica knows when a pod that it holds fits on none of its nodes.
type refusal struct {
	self   string
	roster *roster
	// hop is how the pod has come here, nil if it is at home.
	hop *hop
	// again is set if this replica was the last one to refuse the pod, and the pod is tried again because something has
	// changed: a round begins.
	again bool
	// fits says whether the pod seems to fit on a node of another replica. What another replica has bound a moment ago may be
	// missing here, so it may say yes where that one says no; it then refuses the pod for itself. And room may have come up
	// since that one said no.
	fits func(member string) bool
	// couldPreempt says whether a node of another replica has a pod that this one may preempt, and might have room for it then.
	couldPreempt func(member string) bool
	// promised is the replica that owns the node on which pods are ending that were preempted for this one; "" if none does.
	promised string
}

// A verdict is what becomes of a pod that was refused.
type verdict struct {
	// next is where it moves on to, nil if it stays.
	next *hop
	// last is set if it fits nowhere: preemption on this replica's nodes may have its try.
	last bool
	// later is where it moves on to after a while, if it has no node by then and is not promised one by preemption here; nil if
	// it stays.
	later *hop
	after time.Duration
}

// asks reports whether the replica asks for capacity: not while there are others to ask whether they have something to preempt.
func (v verdict) asks() bool { return v.last && (v.later == nil || !v.later.Preempting) }

const (
	// preemptionPatience is how long the scheduler may take, after the plugin has been asked, to nominate a node.
	preemptionPatience = time.Second
	// againPatience is how long a pod waits that all have refused, and that seems to fit all the same; it doubles each time.
	againPatience    = 200 * time.Millisecond
	maxAgainPatience = 5 * time.Minute
	// surelyRefused is after how many such rounds it counts as refused. By then, six seconds later, what one replica does has
	// long been seen by the others: they do not agree on whether the pod fits, and may never.
	surelyRefused = 5
)

// decide says what becomes of a pod that was refused. In the first round it goes to each replica on whose nodes it seems to
// fit, in the order of the ring, and to each of them once. Where no such replica is left, the last one preempts on its own
// nodes. If there was nothing to preempt, a second round takes the pod to the replicas where preemption may make room, to
// each of them once, and the last one of these asks for capacity. So every round ends, and the next one begins when something
// changes.
//
// Where pods are ending that were preempted for this one, on a node that has gone to another replica since, the pod goes
// after the node before anybody preempts for it again.
//
// What has changed while the round went on may have gone unnoticed: room that came up at a replica after it refused the pod,
// and before the last one looked. So if the pod seems to fit where it was refused, another round begins, later each time.
func decide(f refusal) verdict {
	refused, preempting, again := []string{f.self}, false, 0
	if f.hop != nil && f.hop.Epoch == f.roster.epoch && !f.again {
		preempting, again = f.hop.Preempting, f.hop.Again
		refused = f.roster.known(f.hop.Refused)
		if !slices.Contains(refused, f.self) {
			refused = append(refused, f.self)
		}
	}
	known := make(map[string]bool)
	fits := func(member string) bool {
		answer, ok := known[member]
		if !ok {
			answer = f.fits(member)
			known[member] = answer
		}
		return answer
	}
	next := func(refused []string, preempting bool, could func(string) bool) *hop {
		for _, member := range f.roster.after(f.self) {
			if !slices.Contains(refused, member) && could(member) {
				return &hop{To: member, Refused: refused, Preempting: preempting, Again: again, Epoch: f.roster.epoch}
			}
		}
		return nil
	}
	if !preempting {
		if h := next(refused, false, fits); h != nil {
			return verdict{next: h}
		}
	}
	if f.promised != "" && f.promised != f.self {
		return verdict{next: &hop{To: f.promised, Refused: refused, Preempting: preempting, Again: again, Epoch: f.roster.epoch}}
	}
	v := verdict{last: true, after: preemptionPatience}
	if preempting {
		v.later = next(refused, true, f.couldPreempt)
	} else {
		v.later = next([]string{f.self}, true, f.couldPreempt)
	}
	anew := next([]string{f.self}, false, fits)
	if anew == nil || again >= surelyRefused && v.later != nil {
		return v
	}
	anew.Again = min(again+1, maxAgain)
	return verdict{last: again >= surelyRefused, later: anew, after: min(againPatience<<min(again, 30), maxAgainPatience)}
}
