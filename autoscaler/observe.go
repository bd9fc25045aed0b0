package autoscaler

import (
	"time"

	"github.com/drover-sh/drover/autoscaler/provider"
	"github.com/drover-sh/drover/capacity"
)

// Observation is what a cluster saw of a machine.
type Observation struct {
	ID string
	// State: Registered, Ready, Draining, Drained, Kept or Gone.
	State       string
	NodeName    string
	ReclaimID   string
	Message     string
	Allocatable capacity.Resources
}

// Observation states, as in the protocol.
const (
	ObservedRegistered = "Registered"
	ObservedReady      = "Ready"
	ObservedDraining   = "Draining"
	ObservedDrained    = "Drained"
	ObservedKept       = "Kept"
	ObservedGone       = "Gone"
)

// Report takes what a cluster saw. Observations that say nothing new, or that are about a machine which the cluster
// does not have, change nothing: reports are repeated, late and doubled.
func (e *Engine) Report(now time.Time, clusterID string, observations []Observation) {
	c := e.clusters[clusterID]
	if c == nil {
		return
	}
	for _, o := range observations {
		if m := c.machines[o.ID]; m != nil {
			e.observe(now, c, m, o)
		}
	}
}

func (e *Engine) observe(now time.Time, c *cluster, m *machine, o Observation) {
	if o.NodeName != "" && m.NodeName != o.NodeName && m.State != Terminating {
		m.NodeName = o.NodeName
		e.changed(c)
	}
	switch o.State {
	case ObservedRegistered:
		if m.State == Requested || m.State == Launched {
			e.launched(now, m)
			e.enter(now, c, m, Registered, "its Node exists")
		}
	case ObservedReady:
		e.learn(now, c, m, o.Allocatable)
		if m.inFlight() {
			e.launched(now, m)
			m.Message = ""
			e.enter(now, c, m, Active, "its Node is Ready")
		}
	case ObservedDraining, ObservedDrained:
		e.drain(now, c, m, o)
	case ObservedKept:
		e.keep(now, c, m, o)
	case ObservedGone:
		if m.State == Registered || m.State == Active || m.State == Reclaiming {
			e.terminate(now, c, m, "its Node is gone from the cluster")
		}
	}
}

// launched: whoever has a Node has been launched, even if the provider's event was lost.
func (e *Engine) launched(now time.Time, m *machine) {
	if m.LaunchedAt.IsZero() {
		m.LaunchedAt = now
	}
	delete(e.backoff, m.place())
	m.asked = true
	delete(e.calls, m.ID)
}

func (e *Engine) learn(now time.Time, c *cluster, m *machine, allocatable capacity.Resources) {
	if len(allocatable) == 0 || m.State == Terminating || m.State == Failed {
		return
	}
	known := m.allocatable()
	for name, amount := range allocatable {
		if known[name] != amount {
			m.Learned = allocatable
			e.changed(c)
			e.wake(now)
			return
		}
	}
}

// drain moves a machine along an instruction that is in force, and ignores any other.
func (e *Engine) drain(now time.Time, c *cluster, m *machine, o Observation) {
	r := c.reclaimByID(o.ReclaimID)
	if r == nil {
		return
	}
	if m.State == Active && m.place() == (place{r.Offering, r.Domain}) && !r.Excluded[m.ID] && r.Want > 0 {
		r.Want--
		// What has been chosen is the longest surplus of its place.
		if ages := c.surplus[m.place()]; len(ages) > 0 {
			c.surplus[m.place()] = ages[1:]
		}
		m.Reclaim = r.ID
		e.enter(now, c, m, Reclaiming, "its cluster drains it")
	}
	if o.State == ObservedDrained && m.State == Reclaiming && m.Reclaim == r.ID && !m.Drained {
		m.Drained = true
		e.changed(c)
		e.wake(now)
	}
}

// keep: the cluster cannot give this machine back. It is asked for something else, and for this one not before a pause.
func (e *Engine) keep(now time.Time, c *cluster, m *machine, o Observation) {
	r := c.reclaimByID(o.ReclaimID)
	if r == nil || m.State != Active && m.State != Reclaiming || r.Excluded[m.ID] {
		return
	}
	m.keptUntil = now.Add(e.policy.KeptBackoff)
	why := "its cluster keeps it: " + o.Message
	if m.State == Reclaiming {
		e.withdraw(now, c, m, why)
		return
	}
	r.exclude(m.ID)
	e.note(c.id, m.ID, m.State, m.State, why)
	e.changed(c)
	e.wake(now)
}

// Event takes a provider's event, which may be late, doubled or out of order. What is said of a machine in another
// cluster than its own is about something else that goes by its id.
func (e *Engine) Event(now time.Time, event provider.Event) {
	c := e.owner[event.ID]
	if c == nil || event.Type == provider.InventoryChanged || event.Cluster != c.id {
		return
	}
	m := c.machines[event.ID]
	switch event.Type {
	case provider.Launched:
		e.instance(now, c, m, event.ProviderID, event.NodeName)
	case provider.LaunchFailed:
		switch m.State {
		case Requested:
			e.launchFailed(now, m, event.Message)
			e.fail(now, c, m, failedPrefix+event.Message)
			e.released(now, c, m)
		case Terminating:
			e.gone(now, c, m, "it never existed: "+event.Message)
		}
	case provider.Terminated:
		e.ended(now, c, m, "the provider says that it is gone")
	}
}

// ended: the provider no longer has the machine.
func (e *Engine) ended(now time.Time, c *cluster, m *machine, why string) {
	switch m.State {
	case Failed:
		e.released(now, c, m)
	case Requested:
		// A termination that was meant for nobody: a machine that is only requested has not existed.
	default:
		e.gone(now, c, m, why)
	}
}

func (e *Engine) released(now time.Time, c *cluster, m *machine) {
	delete(e.calls, m.ID)
	m.asked = true
	if !m.Released {
		m.Released = true
		e.changed(c)
		e.wake(now)
	}
}

// instance notes that the machine exists.
func (e *Engine) instance(now time.Time, c *cluster, m *machine, providerID, nodeName string) {
	if m.State == Terminating || m.State == Failed {
		return
	}
	if providerID != "" && m.ProviderID != providerID {
		m.ProviderID = providerID
		e.changed(c)
	}
	if nodeName != "" && m.NodeName == "" {
		m.NodeName = nodeName
		e.changed(c)
	}
	if m.State == Requested {
		e.launched(now, m)
		m.Message = ""
		e.enter(now, c, m, Launched, "the provider has launched it")
	}
}

// failedPrefix begins the message of a machine whose launch failed.
const failedPrefix = "launch failed: "

func (e *Engine) launchFailed(now time.Time, m *machine, message string) {
	b := e.backoff[m.place()]
	if b == nil {
		b = &launchBackoff{}
		e.backoff[m.place()] = b
	}
	b.fail(now, m.RequestedAt, message, e.policy.BackoffBase, e.policy.BackoffMax)
}

// Survey compares the records of a cluster with the provider's list, which was asked for at started. It is how lost
// events are made good, and how a state store that was lost is found again: a machine that nobody recorded is taken
// over, and from then on the ordinary rules of reclaim hold for it.
func (e *Engine) Survey(now, started time.Time, clusterID string, instances []provider.Instance) {
	c := e.cluster(clusterID, now)
	listed := make(map[string]bool, len(instances))
	found := int64(0)
	for _, instance := range instances {
		listed[instance.ID] = true
		m := c.machines[instance.ID]
		switch {
		case m == nil && !e.tombstones[instance.ID].IsZero():
			// It was ended, and is listed late or came back. Either way it has to go.
			m = &machine{Request: instance.Request, ProviderID: instance.ProviderID, NodeName: instance.NodeName}
			e.adopt(c, m)
			e.terminate(now, c, m, "it was ended before and is listed again")
		case m == nil && e.owner[instance.ID] == nil:
			e.takeOver(now, c, instance)
			found++
		case m == nil:
			// Another cluster's machine by the records: the provider's list is wrong. Touch nothing.
			e.note(clusterID, instance.ID, "", "", "listed here, but it belongs to cluster "+e.owner[instance.ID].id)
		case m.State == Terminating || m.State == Failed && !m.Released:
			if m.asked && m.askedAt.Before(started) {
				e.call(m)
			}
		case instance.Launched:
			e.instance(now, c, m, instance.ProviderID, instance.NodeName)
		}
	}
	if found > 0 {
		// The demand that made these machines is not known either; until it is, and for a while after, nothing goes.
		c.demand.push(level{now, found})
	}
	for _, m := range c.sorted() {
		if !listed[m.ID] {
			e.missing(now, started, c, m)
		}
	}
}

// missing: the provider does not list the machine.
func (e *Engine) missing(now, started time.Time, c *cluster, m *machine) {
	asked := m.asked && m.askedAt.Before(started)
	switch m.State {
	case Requested:
		if asked {
			e.call(m)
		}
	case Terminating:
		if asked {
			e.gone(now, c, m, "the provider no longer lists it")
		}
	case Failed:
		if asked {
			e.released(now, c, m)
		}
	case Launched, Registered:
		// After a restart the provider has to be asked once more before its list can be believed.
		if asked && m.Since.Before(started) {
			e.forget(now, c, m, "the provider has lost it")
		}
	default:
		if m.Since.Before(started) {
			e.forget(now, c, m, "the provider has lost it")
		}
	}
}

func (e *Engine) takeOver(now time.Time, c *cluster, instance provider.Instance) {
	m := &machine{Request: instance.Request, ProviderID: instance.ProviderID, NodeName: instance.NodeName,
		State: Requested, Since: now}
	m.Cluster = c.id
	if instance.Launched {
		m.State, m.LaunchedAt = Launched, now
	}
	m.asked, m.askedAt = true, now
	if offering := e.offering(m.Offering); offering != nil {
		m.Cost = offering.Cost
	}
	e.adopt(c, m)
	e.note(c.id, m.ID, "", m.State, "the provider lists it and there was no record of it")
	e.changed(c)
	e.wake(now)
}

func (e *Engine) offering(name string) *provider.Offering {
	for i := range e.offerings {
		if e.offerings[i].Name == name {
			return &e.offerings[i]
		}
	}
	return nil
}
