package autoscaler

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"time"

	"github.com/drover-sh/drover/autoscaler/provider"
	"github.com/drover-sh/drover/capacity"
)

// Engine is the autoscaler as a state machine. Feed it inputs (RollUp, Report, Event, Survey, SetOfferings, SetPolicy),
// each with the time at which it came; call Pass when PassDue; then carry out Ready. It is not safe for concurrent use.
//
// The rule that makes a crash harmless: whoever drives the engine stores what Ready says before it does anything else
// that Ready says.
type Engine struct {
	policy Policy
	plan   func(capacity.Input) capacity.Plan
	newID  func() string

	clusters map[string]*cluster
	owner    map[string]*cluster // by machine id
	// given is what the provider said last, offerings what of it makes sense.
	given, offerings []provider.Offering
	// promised has, by offering, the size of its nodes and since when.
	promised map[string]promise
	backoff  map[place]*launchBackoff

	// calls are the machines whose provider call is outstanding: not made, or not accepted.
	calls map[string]*machine
	// tombstones are machines that are gone, so that a late listing does not bring them back. Kept for tombstoneLife.
	tombstones map[string]time.Time
	// strangers have subscribed and never sent a roll-up. They are told what there is, and nothing is kept of them.
	strangers map[string]bool

	// passAt is when the next pass is due because of an input; zero: no input waits for one.
	passAt time.Time
	// lastStock is what every cluster was last told of the offerings.
	lastStock []capacity.Offering
	// timedAt is when, after the last pass, time alone may change a decision; zero: never.
	timedAt time.Time
	notes   []Note
}

// tombstoneLife is longer than any listing takes.
const tombstoneLife = 10 * time.Minute

// Note is one decision or observation, for the log and for a person who asks why.
type Note struct {
	Cluster  string
	Subject  string // a machine, an instruction, or empty
	From, To MachineState
	Why      string
}

// NewEngine returns an engine that knows nothing. plan is capacity.MakePlan but for tests; newID returns strings of ten
// lower-case letters and digits that do not repeat.
func NewEngine(policy Policy, plan func(capacity.Input) capacity.Plan, newID func() string) *Engine {
	return &Engine{
		policy: policy, plan: plan, newID: newID,
		clusters: map[string]*cluster{}, owner: map[string]*cluster{}, backoff: map[place]*launchBackoff{},
		calls: map[string]*machine{}, tombstones: map[string]time.Time{}, promised: map[string]promise{},
		strangers: map[string]bool{},
	}
}

func (e *Engine) cluster(id string, now time.Time) *cluster {
	c := e.clusters[id]
	if c == nil {
		c = newCluster(id)
		c.seenAt, c.feedDirty = now, true
		e.clusters[id] = c
	}
	return c
}

func (e *Engine) note(cluster, subject string, from, to MachineState, why string) {
	e.notes = append(e.notes, Note{cluster, subject, from, to, why})
}

// changed marks a cluster's record for storing and its feed for publishing.
func (e *Engine) changed(c *cluster) { c.recordDirty, c.feedDirty = true, true }

// wake asks for a pass, debounced: the first input sets the time, so that a storm does not put it off for ever.
func (e *Engine) wake(now time.Time) {
	if e.passAt.IsZero() {
		e.passAt = now.Add(e.policy.PassDebounce)
	}
}

// enter changes a machine's state.
func (e *Engine) enter(now time.Time, c *cluster, m *machine, to MachineState, why string) {
	from := m.State
	m.State, m.Since = to, now
	e.note(c.id, m.ID, from, to, why)
	e.changed(c)
	e.wake(now)
}

// terminate ends a machine, whatever its state.
func (e *Engine) terminate(now time.Time, c *cluster, m *machine, why string) {
	e.enter(now, c, m, Terminating, why)
	m.Reclaim = ""
	e.call(m)
}

// fail ends a machine that never became Ready; it stays visible.
func (e *Engine) fail(now time.Time, c *cluster, m *machine, why string) {
	m.Message, m.Allotment = why, nil
	e.enter(now, c, m, Failed, why)
	e.call(m)
}

// call makes the provider call of the machine's state outstanding.
func (e *Engine) call(m *machine) {
	m.asked, m.askedAt = false, time.Time{}
	e.calls[m.ID] = m
}

// gone forgets a machine that no longer exists. Should it be listed again, it is ended again.
func (e *Engine) gone(now time.Time, c *cluster, m *machine, why string) {
	e.forget(now, c, m, why)
	e.tombstones[m.ID] = now
}

// forget drops a machine that is not to be found. Nobody has ended it: should it be listed again, pods may still run there.
func (e *Engine) forget(now time.Time, c *cluster, m *machine, why string) {
	e.note(c.id, m.ID, m.State, "", why)
	c.remove(m)
	delete(e.owner, m.ID)
	delete(e.calls, m.ID)
	e.changed(c)
	e.wake(now)
}

func (e *Engine) adopt(c *cluster, m *machine) {
	c.add(m)
	e.owner[m.ID] = c
}

// RollUp takes a cluster's demand. It returns false for a late message, which changes nothing.
func (e *Engine) RollUp(now time.Time, r *RollUp) bool {
	c := e.cluster(r.Cluster, now)
	e.heard(now, c)
	if r.late(c.rollUp) {
		return false
	}
	same := c.rollUp != nil && reflect.DeepEqual(c.rollUp.Needs, r.Needs) && reflect.DeepEqual(c.rollUp.Daemons, r.Daemons)
	// The sequence is stored with the content that it came with: where the content is the same, a late message does no
	// harm.
	if !same || c.rollUp.Session != r.Session {
		c.rollUpDirty = true
	}
	c.rollUp = r
	c.demand.set(now, r.pods())
	if !same || !c.reported {
		e.wake(now)
	}
	c.reported = true
	return true
}

// Subscribed makes a cluster's feed due.
func (e *Engine) Subscribed(id string) {
	if c := e.clusters[id]; c != nil {
		c.feedDirty = true
		return
	}
	e.strangers[id] = true
}

// heard notes that a cluster is not silent.
func (e *Engine) heard(now time.Time, c *cluster) {
	c.seenAt = now
	if c.silent {
		c.silent, c.feedDirty = false, true
		e.note(c.id, "", "", "", "roll-ups come again")
	}
}

// Seen notes a roll-up that repeats the last one.
func (e *Engine) Seen(at time.Time, clusterID string, sequence uint64) {
	if c := e.clusters[clusterID]; c != nil && c.rollUp != nil {
		e.heard(at, c)
		c.rollUp.Sequence = max(c.rollUp.Sequence, sequence)
	}
}

// promise is what an offering says of its nodes.
type promise struct {
	allocatable capacity.Resources
	since       time.Time // zero: from the start
}

// SetOfferings takes the provider's offerings, Available being the total stock. One that makes no sense is left out: a
// price that is no number would be the best price there is.
func (e *Engine) SetOfferings(now time.Time, offerings []provider.Offering) {
	if reflect.DeepEqual(e.given, offerings) {
		return
	}
	e.given, e.offerings = offerings, nil
	seen := map[string]bool{}
	for _, o := range offerings {
		switch {
		case math.IsNaN(o.Cost) || math.IsInf(o.Cost, 0) || o.Cost < 0:
			e.note("", o.Name, "", "", fmt.Sprintf("offering left out: cost: %v is no price", o.Cost))
		case seen[o.Name]:
			e.note("", o.Name, "", "", "offering left out: another has its name")
		default:
			e.offerings = append(e.offerings, o)
			e.promise(now, o)
		}
		seen[o.Name] = true
	}
	for _, c := range e.clusters {
		c.feedDirty = true
	}
	e.wake(now)
}

// promise notes when an offering's nodes change in size: from then on older ones say nothing about new ones.
func (e *Engine) promise(now time.Time, o provider.Offering) {
	last, known := e.promised[o.Name]
	if known && maps.Equal(last.allocatable, o.Allocatable) {
		return
	}
	next := promise{allocatable: o.Allocatable}
	if known {
		next.since = now
	}
	e.promised[o.Name] = next
}

// SetPolicy changes the policy.
func (e *Engine) SetPolicy(now time.Time, policy Policy) {
	if policy != e.policy {
		e.policy = policy
		e.wake(now)
	}
}

// Accepted notes that the provider has accepted the call of a Ready, or, with err, that it has not and has to be asked
// again.
func (e *Engine) Accepted(now time.Time, call Call, err error) {
	c := e.owner[call.ID]
	if c == nil {
		return
	}
	m := c.machines[call.ID]
	if call.Launch != wantsLaunch(m) {
		return // the machine has moved on since
	}
	if errors.Is(err, provider.ErrUnknownCluster) && call.Launch {
		// Nothing exists, and asking again will not change that. The cluster gets nothing for a while.
		c.unserved, c.unservedUntil = err.Error(), now.Add(e.policy.BackoffMax)
		e.gone(now, c, m, "not launched: "+err.Error())
		return
	}
	if err != nil {
		if message := "the provider does not answer: " + err.Error(); m.Message != message && m.inFlight() {
			m.Message = message
			c.feedDirty = true
		}
		e.note(c.id, m.ID, m.State, m.State, "the provider did not accept the call: "+err.Error())
		return
	}
	if m.inFlight() && m.Message != "" {
		m.Message, c.feedDirty = "", true
	}
	m.asked, m.askedAt = true, now
	delete(e.calls, m.ID)
}

func wantsLaunch(m *machine) bool { return m.inFlight() }

// Call is a provider call: Launch or Terminate of a machine.
type Call struct {
	Launch bool
	provider.Request
}

// Ready is what has to be done, in this order: store, then everything else.
type Ready struct {
	// RollUps and Records are to be stored.
	RollUps []*RollUp
	Records []*Record
	// Calls are to be made to the provider; report each by Accepted. A call that was not accepted comes again.
	Calls []Call
	// Feeds are the clusters whose feed has changed.
	Feeds []string
	// Notes are for the log.
	Notes []Note
}

// Ready returns what has to be done and considers the stores and feeds as handed out. Should storing fail, call
// NotStored.
func (e *Engine) Ready() Ready {
	var r Ready
	for _, id := range slices.Sorted(maps.Keys(e.clusters)) {
		c := e.clusters[id]
		if c.rollUpDirty {
			r.RollUps = append(r.RollUps, c.rollUp)
		}
		if c.recordDirty {
			r.Records = append(r.Records, c.record())
		}
		if c.feedDirty {
			r.Feeds = append(r.Feeds, id)
		}
		c.rollUpDirty, c.recordDirty, c.feedDirty = false, false, false
	}
	r.Feeds = append(r.Feeds, slices.Sorted(maps.Keys(e.strangers))...)
	clear(e.strangers)
	for _, id := range slices.Sorted(maps.Keys(e.calls)) {
		m := e.calls[id]
		r.Calls = append(r.Calls, Call{Launch: wantsLaunch(m), Request: m.Request})
	}
	r.Notes, e.notes = e.notes, nil
	return r
}

// NotStored takes a Ready back whose stores failed.
func (e *Engine) NotStored(r Ready) {
	for _, rollUp := range r.RollUps {
		e.clusters[rollUp.Cluster].rollUpDirty = true
	}
	for _, record := range r.Records {
		e.clusters[record.Cluster].recordDirty = true
	}
	for _, id := range r.Feeds {
		e.Subscribed(id)
	}
}

// PassDue returns when the next pass is due by time or by an input, whichever comes first; zero: not before an input.
func (e *Engine) PassDue() time.Time {
	if e.passAt.IsZero() || !e.timedAt.IsZero() && e.timedAt.Before(e.passAt) {
		return e.timedAt
	}
	return e.passAt
}

// deadline is when time alone may change a decision of a pass that was made now; zero: never.
func (e *Engine) deadline(now time.Time) (next time.Time) {
	at := func(t time.Time) {
		if t.After(now) && (next.IsZero() || t.Before(next)) {
			next = t
		}
	}
	for _, b := range e.backoff {
		at(b.until)
	}
	for _, c := range e.clusters {
		at(c.unservedUntil)
		if c.rollUp != nil && !c.silent {
			at(c.seenAt.Add(e.policy.SilentAfter))
		}
		for _, l := range c.demand.past {
			at(l.end.Add(e.policy.CollapseHold))
		}
		for _, g := range c.Grants {
			at(g.At.Add(reclaimWindow))
		}
		for _, ages := range c.surplus {
			for _, since := range ages {
				at(since.Add(c.unrest.delay(e.policy.ConsolidationDelay)))
			}
		}
		for _, m := range c.machines {
			at(m.deadline(e.policy))
			at(m.keptUntil)
		}
	}
	return next
}

// deadline is when the machine's state alone asks for a decision; zero: never.
func (m *machine) deadline(p Policy) time.Time {
	switch m.State {
	case Requested:
		return m.RequestedAt.Add(p.RegistrationDeadline)
	case Launched, Registered:
		return m.LaunchedAt.Add(p.RegistrationDeadline)
	case Active:
		return m.settlesAt(p.SettleTime)
	case Failed:
		return m.Since.Add(p.FailedRetention)
	}
	return time.Time{}
}

func (n Note) String() string {
	head := n.Cluster
	if n.Subject != "" {
		head += "/" + n.Subject
	}
	if n.From == n.To {
		return fmt.Sprintf("%s: %s", head, n.Why)
	}
	return fmt.Sprintf("%s: %s -> %s: %s", head, orNone(n.From), orNone(n.To), n.Why)
}

func orNone(s MachineState) MachineState {
	if s == "" {
		return "-"
	}
	return s
}
