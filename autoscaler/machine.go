package autoscaler

import (
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/drover-sh/drover/autoscaler/provider"
	"github.com/drover-sh/drover/capacity"
)

// MachineState is how far a machine is in its life:
//
//	Requested -> Launched -> Registered -> Active -> Reclaiming -> Terminating -> gone
//
// Any state before Active may end in Failed, and a machine that its provider lost is gone from any state.
type MachineState string

// States of a machine.
const (
	// Requested: recorded, and the provider is or will be asked for it.
	Requested MachineState = "Requested"
	// Launched: the provider says that it exists.
	Launched MachineState = "Launched"
	// Registered: the cluster has a Node for it.
	Registered MachineState = "Registered"
	// Active: its Node is Ready.
	Active MachineState = "Active"
	// Reclaiming: its cluster drains it.
	Reclaiming MachineState = "Reclaiming"
	// Terminating: the provider is asked to end it.
	Terminating MachineState = "Terminating"
	// Failed: it was not launched, or never became Ready. It is ended, and stays visible for a while.
	Failed MachineState = "Failed"
)

// machine is a record of the state store; the comments say what a restart has to know.
type machine struct {
	provider.Request

	Cost  float64
	State MachineState
	// Since is when State was entered.
	Since time.Time
	// LaunchedAt starts the registration deadline.
	LaunchedAt time.Time
	ProviderID string
	NodeName   string
	// Message says why it failed, or why it is late.
	Message string
	// Allotment as in capacity.Machine: what keeps plans stable across a restart.
	Allotment map[string]int32
	// Reclaim is the id of the instruction for which it is drained.
	Reclaim string
	// Drained: the cluster has said that nothing runs on it any more.
	Drained bool
	// Learned are allocatable resources as the real node reported them.
	Learned capacity.Resources
	// Released: Failed, and the provider has confirmed that nothing of it is left.
	Released bool

	// keptUntil: its cluster could not give it back; it is no candidate until then. Lost at a restart, which costs one
	// more question.
	keptUntil time.Time
	// asked and askedAt: the provider has accepted the call that State asks for. A restart asks again.
	asked   bool
	askedAt time.Time
	// grownAt is when the plan last put more onto it; the scheduler is given time from then on. A restart starts it anew.
	grownAt time.Time
}

// place is where stock is counted: an offering in a domain.
type place struct{ offering, domain string }

func (m *machine) place() place { return place{m.Offering, m.Domain} }

// inFlight: it counts as capacity that is on its way.
func (m *machine) inFlight() bool {
	return m.State == Requested || m.State == Launched || m.State == Registered
}

// usesStock: it takes a piece of its place's stock.
func (m *machine) usesStock() bool { return m.State != Failed || !m.Released }

// allocatable is what the node reported, and for what it did not report, what the offering promised: a device plugin
// may report its devices a while after the node became Ready.
func (m *machine) allocatable() capacity.Resources {
	if len(m.Learned) == 0 {
		return m.Allocatable
	}
	out := maps.Clone(m.Allocatable)
	maps.Copy(out, m.Learned)
	return out
}

// settlesAt is when the scheduler has had enough time to use what the plan put here.
func (m *machine) settlesAt(settle time.Duration) time.Time {
	if m.grownAt.After(m.Since) {
		return m.grownAt.Add(settle)
	}
	return m.Since.Add(settle)
}

// planned is the machine as the planner sees it; ok is false where it is no capacity.
func (m *machine) planned(now time.Time, settle time.Duration) (out capacity.Machine, ok bool) {
	out = capacity.Machine{
		ID: m.ID, Offering: m.Offering, Domain: m.Domain, Labels: m.Labels, Allocatable: m.allocatable(), Taints: m.Taints,
		Cost: m.Cost, Allotment: m.Allotment,
	}
	switch m.State {
	case Requested, Launched, Registered:
		out.State = capacity.MachineInFlight
	case Active:
		out.State = capacity.MachineActive
		out.Settled = !now.Before(m.settlesAt(settle))
	case Reclaiming:
		out.State = capacity.MachineReclaiming
		out.Settled = true
	default:
		return out, false
	}
	return out, true
}

func cloneTaints(taints []corev1.Taint) []corev1.Taint { return append([]corev1.Taint(nil), taints...) }
