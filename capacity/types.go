package capacity

import (
	"time"

	corev1 "k8s.io/api/core/v1"
)

// Resources maps a resource name to an amount: cpu in millicores, everything else in its base unit (bytes, devices),
// fractions rounded up. Zero amounts are absent.
type Resources map[corev1.ResourceName]int64

// Operator relates a node label to values. It is a corev1.NodeSelectorOperator or OperatorSame.
type Operator string

// Operators of Requirement. OperatorSame exists on the wire only (section 8): all nodes of the need share one value of the
// key, one of Values where there are any.
const (
	OperatorIn           = Operator(corev1.NodeSelectorOpIn)
	OperatorNotIn        = Operator(corev1.NodeSelectorOpNotIn)
	OperatorExists       = Operator(corev1.NodeSelectorOpExists)
	OperatorDoesNotExist = Operator(corev1.NodeSelectorOpDoesNotExist)
	OperatorGt           = Operator(corev1.NodeSelectorOpGt)
	OperatorLt           = Operator(corev1.NodeSelectorOpLt)
	OperatorSame         = Operator("Same")
)

// Requirement is one requirement on a node label. Values are sorted and unique in a canonical profile.
type Requirement struct {
	Key      string
	Operator Operator
	Values   []string
}

// Spread asks for an even distribution over the domains of TopologyKey (section 8).
type Spread struct {
	TopologyKey       string
	MaxSkew           int32 // at least 1
	WhenUnsatisfiable corev1.UnsatisfiableConstraintAction
	MinDomains        int32 // 0: unset
}

// AntiAffinity allows at most one pod of Set in each domain of TopologyKey.
type AntiAffinity struct {
	TopologyKey string
	Set         string
}

// Group is a gang or a co-located set. TopologyKey is empty where members may stand anywhere.
type Group struct {
	Name        string
	MinCount    int32
	TopologyKey string
}

// Profile is what one pod needs of a node, in canonical form: equal needs give equal profiles, whatever the order in which
// a pod lists them. Build one with ProfileOfPod or ProfileOfRequest, or call Canonical.
type Profile struct {
	// Requirements are ANDed. In a need that came over the wire they may include OperatorSame.
	Requirements []Requirement
	// Alternatives are further ANDed sets, each as good as Requirements.
	Alternatives [][]Requirement
	Resources    Resources
	Priority     int32
	Spread       []Spread
	Tolerations  []corev1.Toleration
	AntiAffinity []AntiAffinity
	Group        *Group
}

// Need is one row of a roll-up: Count pods of one profile that a cluster has to carry in total, Pending of which have no
// node yet by the scheduler's own word (0 where a peer does not say).
type Need struct {
	ID      string // Profile.ID()
	Profile Profile
	Count   int32
	Pending int32
}

// Daemon is what one DaemonSet takes from every node that it matches.
type Daemon struct {
	// NodeAffinity: a node has to meet one of the sets; none at all means every node.
	NodeAffinity [][]Requirement
	Tolerations  []corev1.Toleration
	Resources    Resources
}

// Offering is a kind of node that a provider sells.
type Offering struct {
	// Name is a DNS label, unique in the fleet.
	Name string
	// Labels that every node of the offering carries, instance type included.
	Labels map[string]string
	// Allocatable resources of one node, before DaemonSets; "pods" included where it is limited.
	Allocatable Resources
	Taints      []corev1.Taint
	// Cost of one node for one hour.
	Cost float64
	// Domains in which nodes can be had, each with its own stock.
	Domains []Domain
	// Atomic offerings give several nodes all together or not at all.
	Atomic bool
	// ProvisioningTime is the usual time from the launch to Ready.
	ProvisioningTime time.Duration
}

// Domain is a place where an offering can be had: a zone, or a rack in a zone.
type Domain struct {
	// Name is unique within the offering.
	Name string
	// Labels that nodes of the domain carry beyond the offering's.
	Labels map[string]string
	// Available is how many more nodes can be launched here, machines that exist or are in flight already taken off.
	Available int32
}

// MachineState is what the planner has to know of a machine's life.
type MachineState string

// States of a Machine.
const (
	// MachineInFlight is asked for, launched or registered, and not Ready yet. It counts as capacity.
	MachineInFlight MachineState = "InFlight"
	// MachineActive is a Ready node. It counts as capacity.
	MachineActive MachineState = "Active"
	// MachineReclaiming is being drained. It does not count; a plan may ask to keep it after all.
	MachineReclaiming MachineState = "Reclaiming"
)

// Machine is a node that the autoscaler owns in a cluster, or one that is on its way.
type Machine struct {
	ID       string
	Offering string // Offering.Name
	Domain   string // Domain.Name
	State    MachineState
	// Labels, Allocatable and Taints as the node has them: the offering's, or learned from the real node.
	Labels      map[string]string
	Allocatable Resources
	Taints      []corev1.Taint
	Cost        float64
	// Allotment is how many pods of each need (by Need.ID) the last plan put here. Keeping it is what makes plans stable:
	// at constant demand a plan repeats the last one.
	Allotment map[string]int32
	// Settled is true once the machine has been Active long enough for the scheduler to have used it.
	Settled bool
}

// ClusterInput is one cluster's side of a plan.
type ClusterInput struct {
	ID       string
	Needs    []Need
	Daemons  []Daemon
	Machines []Machine
	// Held forbids reclaims from this cluster (no roll-up since the restart, collapsed roll-up, kill switch).
	Held bool
	// HeldReason says why.
	HeldReason string
}

// Input is everything that a plan depends on. Clusters share the offerings' stock by priority.
type Input struct {
	Offerings []Offering
	Clusters  []ClusterInput
}

// Launch asks for one machine.
type Launch struct {
	Cluster   string
	Offering  string
	Domain    string
	Allotment map[string]int32
}

// ReclaimSet asks for Count of Candidates, machines of one offering in one domain, to be given back. Surplus are the ones
// that the plan itself would free; the cluster's operator chooses among Candidates.
type ReclaimSet struct {
	Cluster    string
	Offering   string
	Domain     string
	Candidates []string
	Surplus    []string
	Count      int32
	Reason     string
}

// VerdictState summarises a Verdict.
type VerdictState string

// States of a Verdict, best first.
const (
	VerdictMet      VerdictState = "Met"
	VerdictInFlight VerdictState = "InFlight"
	VerdictShort    VerdictState = "Short"
)

// Verdict says what was decided for one need and why: Met + InFlight + Short = Count.
type Verdict struct {
	Cluster  string
	NeedID   string
	State    VerdictState
	Met      int32 // on Active machines
	InFlight int32 // on machines on their way, those of this plan included
	Short    int32
	Reason   string
	// Nearest is the offering that came closest, when short.
	Nearest string
}

// Plan is a decision.
type Plan struct {
	Launches []Launch
	Reclaims []ReclaimSet
	// Cancel lists in-flight machines that nothing needs any more, by id: not yet launched ones may be dropped at once.
	Cancel []string
	// Withheld are the reclaims of clusters that are Held: not to be carried out, to be shown with their reason.
	Withheld []ReclaimSet
	// Allotments is the new Machine.Allotment of every machine that existed, by machine id.
	Allotments map[string]map[string]int32
	Verdicts   []Verdict
}
