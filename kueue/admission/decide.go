package admission

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/kueue/provisioning"
)

// Reasons of a Decision, as metrics and Events show them.
const (
	ReasonCapacityPromised = "CapacityPromised"
	ReasonNodesReady       = "NodesReady"
	ReasonAlreadyRunning   = "AlreadyRunning"
	ReasonNotConcerned     = "NotConcerned"
	ReasonHintsStaleOpen   = "HintsStaleFailOpen"
	ReasonHintsStale       = "HintsStale"
	ReasonNoOffering       = "NoOffering"
	ReasonCapacityShort    = "CapacityShort"
	ReasonNotAtomic        = "NotAtomic"
	ReasonProvisioning     = "Provisioning"
	ReasonPodTooLarge      = "PodTooLarge"
	ReasonTooManyPods      = "TooManyPods"
)

// Decision is the state of the check for one workload.
type Decision struct {
	State   kueue.CheckState
	Reason  string
	Message string
	// RequeueAfter is the back-off of a Retry.
	RequeueAfter time.Duration
	// Nodes are what a Ready of mode Hint promises, by hint.
	Nodes map[string]int32
	// Updates are what pods need beside their flavors to get to those nodes.
	Updates []kueue.PodSetUpdate
}

// World is what decisions are made against.
type World struct {
	// Hints, DaemonSets taken off their nodes.
	Hints []Hint
	// Shrunk is when a hint was last seen to go; zero: never.
	Shrunk time.Time
	// Nodes that exist; they only keep a workload from being rejected.
	Nodes []NodeShape
	// Room is what is free on Ready nodes, less what others hold; nil: none.
	Room   *provisioning.Room
	Ledger *Ledger
	Now    time.Time
	// Random gives numbers in [0, 1) for jitter.
	Random func() float64
}

// Decide says what becomes of a workload of mode Hint. Free room on Ready nodes counts first, then the hints. Of the world
// it changes the room alone, from which a Ready takes what it counts on; who acts on a Ready records the promise first.
//
// Only a pod that no node of its flavor could ever carry, or a gang that the configuration refuses, is Rejected. Everything
// else waits with its quota (Pending) until the configured time-out and then gives the quota back (Retry).
func Decide(w *Workload, world World) Decision {
	if d, done := trivial(w); done {
		return d
	}
	stock := newStock(w, world)
	d := stock.decide(w.concerned())
	if d.State != kueue.CheckStateReady {
		stock.giveBack()
	}
	return d
}

func (s *stock) decide(sets []*PodSet) Decision {
	w, world := s.w, s.world
	// Who can go to the fewest places goes first: gangs, then large pods.
	slices.SortStableFunc(sets, func(a, b *PodSet) int {
		_, x := a.resource()
		_, y := b.resource()
		return cmp.Or(boolOrder(b.Gang(), a.Gang()), cmp.Compare(y, x))
	})
	nodes := map[string]int32{}
	used := map[string][]*Hint{} // by pod set
	onNodes := map[string]int32{}
	open := false
	for _, set := range sets {
		onNodes[set.Name] = s.onNodes(set)
		if onNodes[set.Name] == set.Count {
			continue
		}
		matching := s.matching(set)
		fresh := s.fresh(matching)
		if len(fresh) == 0 && (len(matching) > 0 || len(s.fresh(s.hints)) == 0) {
			if w.Config.OnStale == fleetv1alpha1.StaleFailOpen {
				open = true
				continue
			}
			return wait(w, world, ReasonHintsStale, fmt.Sprintf("needs %s; hints are stale%s", asks(set), s.newest(matching)))
		}
		if len(fresh) == 0 {
			return wait(w, world, ReasonNoOffering, fmt.Sprintf("needs %s; no AvailableCapacity matches%s", asks(set), demanded(set)))
		}
		if proof := tooLarge(set, matching, fresh, world); proof != "" {
			return Decision{State: kueue.CheckStateRejected, Reason: ReasonPodTooLarge, Message: proof}
		}
		hints, short := s.place(set, onNodes[set.Name], fresh, nodes)
		if short != nil {
			if short.reason == ReasonNotAtomic && short.never && world.settled() && w.Config.AtomicProvisioning == fleetv1alpha1.AtomicReject {
				return Decision{State: kueue.CheckStateRejected, Reason: ReasonNotAtomic, Message: short.message}
			}
			return wait(w, world, short.reason, short.message)
		}
		used[set.Name] = hints
	}
	if open {
		return Decision{State: kueue.CheckStateReady, Reason: ReasonHintsStaleOpen, Nodes: nodes, Updates: updates(w, used, onNodes),
			Message: "admitted unseen: hints are stale, and the check is configured to fail open"}
	}
	d := Decision{
		State: kueue.CheckStateReady, Reason: ReasonCapacityPromised, Nodes: nodes,
		Message: s.promiseMessage(nodes, onNodes), Updates: updates(w, used, onNodes),
	}
	if len(nodes) == 0 {
		d.Reason = ReasonNodesReady
	}
	return d
}

// catalogSettles is how long after a hint has come or gone others may be about to: a cluster's hints are written one by one.
const catalogSettles = 10 * time.Second

// settledAt is when the hints can be taken for all that there are. Before that nothing is proven by them.
func (w *World) settledAt() time.Time {
	last := w.Shrunk
	for i := range w.Hints {
		if created := w.Hints[i].Created; created.After(last) {
			last = created
		}
	}
	return last.Add(catalogSettles)
}

func (w *World) settled() bool { return !w.settledAt().After(w.Now) }

// trivial decides what needs no look at the fleet.
func trivial(w *Workload) (Decision, bool) {
	if w.Running {
		return Decision{State: kueue.CheckStateReady, Reason: ReasonAlreadyRunning,
			Message: "the workload was admitted before it met this check"}, true
	}
	if len(w.concerned()) > 0 {
		return Decision{}, false
	}
	return Decision{State: kueue.CheckStateReady, Reason: ReasonNotConcerned,
		Message: "no pod of the workload uses a flavor that this check is for"}, true
}

// pauseText stands before the pause in the message of a workload that is sent back.
const pauseText = "; queued again in "

// wait keeps the workload Pending, or sends it back when it has held its quota long enough.
func wait(w *Workload, world World, reason, why string) Decision {
	timeout := w.Config.Timeout.Duration
	if held := world.Now.Sub(w.Reserved); held >= timeout {
		after := Backoff(w.Config, w.Retries, world.Random)
		message := why + pauseText + seconds(after)
		if timeout > 0 {
			message = fmt.Sprintf("%s; gave its quota back after %s%s%s", why, timeout, pauseText, seconds(after))
		}
		return Decision{State: kueue.CheckStateRetry, Reason: reason, Message: message, RequeueAfter: after}
	}
	return Decision{State: kueue.CheckStatePending, Reason: reason,
		Message: fmt.Sprintf("%s; next check in %s", why, seconds(w.Config.CheckPeriod.Duration))}
}

// Backoff is the pause before a workload that was sent back is queued again: doubled with every retry, a fifth of jitter on
// top, or below where it would be above the configured most.
func Backoff(config fleetv1alpha1.CapacityCheckConfigSpec, retries int32, random func() float64) time.Duration {
	base, most := config.BackoffBase.Duration, config.BackoffMax.Duration
	d := most
	if retries < 32 && base < most>>retries {
		d = base << retries
	}
	jitter := time.Duration(0.2 * random() * float64(d))
	if d > most-jitter {
		d = most - jitter
	} else {
		d += jitter
	}
	return max(d.Round(time.Second), time.Second)
}

// tooLarge proves that a pod of the set can never run in its flavor, or returns "". The proof holds only if every matching
// hint is fresh, as a stale one may have grown, and all hints are there.
func tooLarge(set *PodSet, matching, fresh []*Hint, world World) string {
	if len(matching) != len(fresh) || !world.settled() {
		return ""
	}
	var largest *Hint
	name, amount := dominant(set.Own)
	for _, h := range fresh {
		if set.Own.Fits(h.Template.Allocatable) {
			return ""
		}
		if largest == nil || h.Template.Allocatable[name] > largest.Template.Allocatable[name] {
			largest = h
		}
	}
	for _, n := range world.Nodes {
		if set.Profile.MatchesLabels(n.Labels) && set.Own.Fits(n.Allocatable) {
			return ""
		}
	}
	if lacking := set.Own.Lacking(largest.Template.Allocatable); len(lacking) > 0 && !slices.Contains(lacking, name) {
		name = lacking[0]
		amount = set.Own[name]
	}
	return fmt.Sprintf("can never run in flavor %s: a pod of set %s asks for %s, and the largest node that can be had, %s, has %s",
		set.Flavor, set.Name, quantity(name, amount), largest.Name, quantity(name, largest.Template.Allocatable[name]))
}

// stock is what is left of the hints while one workload is decided.
type stock struct {
	world World
	w     *Workload
	hints []*Hint
	free  map[string]int32
	// opened are nodes that this workload takes already and that have room left, by hint.
	opened map[string][]opened
	// taken is what this workload takes of the room that exists.
	taken []provisioning.Placement
}

// opened are a number of alike nodes.
type opened struct {
	free  capacity.Resources
	count int32
}

func newStock(w *Workload, world World) *stock {
	s := &stock{world: world, w: w, free: map[string]int32{}, opened: map[string][]opened{}}
	for i := range world.Hints {
		h := &world.Hints[i]
		s.hints = append(s.hints, h)
		s.free[h.Name] = max(0, h.Count-world.Ledger.Promised(h.Name, w.Key))
	}
	// The surest first, then the cheapest.
	slices.SortFunc(s.hints, func(a, b *Hint) int {
		return cmp.Or(
			cmp.Compare(slices.Index(confidence, a.Availability), slices.Index(confidence, b.Availability)),
			cmp.Compare(a.Cost, b.Cost), cmp.Compare(a.Name, b.Name),
		)
	})
	return s
}

// onNodes takes room on Ready nodes for as many pods of the set as find it; for a gang all or none.
func (s *stock) onNodes(set *PodSet) int32 {
	if s.world.Room == nil {
		return 0
	}
	p := s.world.Room.Fit(set.onNodes(s.w.Config.AtomicProvisioning))
	if set.Gang() && !p.Complete() {
		p.GiveBack()
		return 0
	}
	s.taken = append(s.taken, p)
	return p.Placed
}

func (s *stock) giveBack() {
	for i := range s.taken {
		s.taken[i].GiveBack()
	}
}

// matching lists the hints whose nodes the pods could run on, room aside.
func (s *stock) matching(set *PodSet) []*Hint {
	var out []*Hint
	for _, h := range s.hints {
		if meets(&h.Template, &set.Profile) &&
			(set.Selected || capacity.Tolerates(set.Profile.Tolerations, h.Template.Taints)) {
			out = append(out, h)
		}
	}
	return out
}

func meets(t *capacity.Template, p *capacity.Profile) bool {
	all := func(reqs []capacity.Requirement) bool {
		return !slices.ContainsFunc(reqs, func(r capacity.Requirement) bool { return !t.CouldMeet(r) })
	}
	return all(p.Requirements) || slices.ContainsFunc(p.Alternatives, all)
}

func (s *stock) fresh(hints []*Hint) []*Hint {
	var out []*Hint
	for _, h := range hints {
		if h.Fresh(s.world.Now, s.w.Config.StaleAfter.Duration) {
			out = append(out, h)
		}
	}
	return out
}

// newest says how old the youngest of the hints is.
func (s *stock) newest(hints []*Hint) string {
	var last time.Time
	for _, h := range hints {
		if h.Observed.After(last) {
			last = h.Observed
		}
	}
	if last.IsZero() {
		return ""
	}
	return fmt.Sprintf(", last confirmed at %s", last.UTC().Format(time.RFC3339))
}

type shortfall struct {
	reason, message string
	never           bool // the offerings themselves rule it out, not their stock
}

// place takes room for those pods of the set that have none on Ready nodes, adds the nodes to those of the workload, and
// says which hints it took from; or takes nothing and says what is lacking.
func (s *stock) place(set *PodSet, onNodes int32, fresh []*Hint, nodes map[string]int32) ([]*Hint, *shortfall) {
	wanted := set.Count - onNodes
	threshold := s.w.Config.MinAvailability
	var sure, usable []*Hint
	notAtomic := 0
	for _, h := range fresh {
		if !reaches(h.Availability, threshold) {
			continue
		}
		sure = append(sure, h)
		if set.Gang() && !h.Atomic && s.w.Config.AtomicProvisioning != fleetv1alpha1.AtomicWaive &&
			s.room(set, h, 1) < set.Count {
			notAtomic++
			continue
		}
		usable = append(usable, h)
	}
	if set.Gang() {
		// All members come from one offering: two cannot be had together or not at all.
		for _, h := range usable {
			if s.room(set, h, math.MaxInt32) >= set.Count {
				s.take(set, h, set.Count, nodes)
				return []*Hint{h}, nil
			}
		}
	} else if s.total(set, usable) >= wanted {
		var from []*Hint
		for left := wanted; left > 0; {
			h := usable[0]
			usable = usable[1:]
			if n := min(left, s.room(set, h, math.MaxInt32)); n > 0 {
				s.take(set, h, n, nodes)
				from, left = append(from, h), left-n
			}
		}
		return from, nil
	}
	return nil, s.explain(set, onNodes, fresh, sure, notAtomic)
}

func (s *stock) explain(set *PodSet, onNodes int32, fresh, sure []*Hint, notAtomic int) *shortfall {
	if notAtomic > 0 && notAtomic == len(sure) {
		return &shortfall{
			reason: ReasonNotAtomic, never: !slices.ContainsFunc(fresh, func(h *Hint) bool { return h.Atomic }),
			message: needsAtomic(set),
		}
	}
	if len(sure) == 0 {
		best := fresh[0]
		return &shortfall{reason: ReasonCapacityShort, message: fmt.Sprintf("needs %s; %d available, %s, which is below %s",
			asks(set), s.total(set, fresh), best.Availability, s.w.Config.MinAvailability)}
	}
	have := s.total(set, sure)
	if set.Gang() {
		have = 0
		for _, h := range sure {
			have = max(have, s.room(set, h, math.MaxInt32))
		}
	}
	message := fmt.Sprintf("needs %s; %d available, %s", asks(set), have, sure[0].Availability)
	if onNodes > 0 {
		message += fmt.Sprintf(", and room for %d on Ready nodes", onNodes)
	}
	var promised int32
	for _, h := range sure {
		promised += min(h.Count, s.world.Ledger.Promised(h.Name, s.w.Key))
	}
	if promised > 0 {
		message += fmt.Sprintf(" (%d nodes are promised to others)", promised)
	}
	return &shortfall{reason: ReasonCapacityShort, message: message}
}

func (s *stock) total(set *PodSet, hints []*Hint) int32 {
	var n int64
	for _, h := range hints {
		n += int64(s.room(set, h, math.MaxInt32))
	}
	return int32(min(n, math.MaxInt32))
}

// room is how many pods of the set the hint carries on at most that many new nodes and on what the workload has opened.
func (s *stock) room(set *PodSet, h *Hint, newNodes int32) int32 {
	n := int64(min(newNodes, s.free[h.Name])) * int64(perNode(set, h.Template.Allocatable))
	for _, o := range s.opened[h.Name] {
		n += int64(o.count) * int64(perNode(set, o.free))
	}
	return int32(min(n, math.MaxInt32))
}

// take puts that many pods on the hint's nodes; there is room for them.
func (s *stock) take(set *PodSet, h *Hint, pods int32, nodes map[string]int32) {
	var rest []opened
	use := func(free capacity.Resources, count int32) (left int32) {
		each := perNode(set, free)
		if each == 0 || pods == 0 {
			return count
		}
		full := min(count, pods/each)
		if full > 0 {
			rest = append(rest, opened{less(free, set.Profile.Resources, each), full})
			pods, count = pods-full*each, count-full
		}
		if pods > 0 && count > 0 {
			rest = append(rest, opened{less(free, set.Profile.Resources, pods), 1})
			pods, count = 0, count-1
		}
		return count
	}
	for _, o := range s.opened[h.Name] {
		if left := use(o.free, o.count); left > 0 {
			rest = append(rest, opened{o.free, left})
		}
	}
	before := s.free[h.Name]
	s.free[h.Name] = use(h.Template.Allocatable, before)
	if n := before - s.free[h.Name]; n > 0 {
		nodes[h.Name] += n
	}
	s.opened[h.Name] = rest
}

// perNode is how many pods of the set a node with that much room carries.
func perNode(set *PodSet, free capacity.Resources) int32 {
	n := int64(math.MaxInt32)
	if pods, limited := free["pods"]; limited {
		n = pods
	}
	for name, v := range set.Profile.Resources {
		if v > 0 {
			n = min(n, free[name]/v)
		}
	}
	for _, a := range set.Profile.AntiAffinity {
		if a.TopologyKey == "kubernetes.io/hostname" {
			n = min(n, 1)
		}
	}
	return int32(max(n, 0))
}

// less is what n pods leave of the room. Each takes one of the pods that a node may carry, where those are limited.
func less(free, each capacity.Resources, n int32) capacity.Resources {
	taken := capacity.Resources{}
	for name, v := range each {
		taken[name] = v * int64(n)
	}
	limit, limited := free["pods"]
	left := free.Sub(taken)
	if limited {
		left["pods"] = limit - int64(n) // kept at zero, as an absent limit is none
	}
	return left
}

func (s *stock) promiseMessage(nodes, onNodes map[string]int32) string {
	var there int32
	for _, n := range onNodes {
		there += n
	}
	if len(nodes) == 0 {
		return fmt.Sprintf("Ready nodes have room for %d pods", there)
	}
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(nodes)) {
		i := slices.IndexFunc(s.hints, func(h *Hint) bool { return h.Name == name })
		part := fmt.Sprintf("%d × %s (%s", nodes[name], name, s.hints[i].Availability)
		if ready := s.hints[i].Ready; ready > 0 {
			part += ", about " + ready.String()
		}
		parts = append(parts, part+")")
	}
	message := "nodes can be had: " + strings.Join(parts, ", ")
	if there > 0 {
		message += fmt.Sprintf("; Ready nodes have room for %d pods", there)
	}
	return message
}

func boolOrder(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	default:
		return -1
	}
}
