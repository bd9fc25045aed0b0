package autoscaler

import (
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"unicode"

	fleetpb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/capacity/wire"
)

const (
	// maxClusterID is shorter than a DNS name may be: the id, escaped, and what a store adds to it have to fit into a file
	// name, which is at most 255 bytes. An id that cannot be stored would keep everybody's state from being stored.
	maxClusterID = 200

	// maxMessage bounds a message from a cluster: enough for the largest that the limits below allow, and for one that
	// exceeds them to be told so.
	maxMessage = 16 << 20
	// maxNeeds and maxDaemons bound the rows of a roll-up. A row is a shape of pod, and what a plan costs grows with them.
	maxNeeds, maxDaemons = 10_000, 1_000
	// maxPods bounds the demand of a cluster, far above what Kubernetes carries and far below what a sum can hold.
	maxPods = 100_000_000
	// maxNames bounds the different resources that a roll-up asks for: every node of the fleet is compared by each of them.
	maxNames = 1_000
	// maxText bounds a name or a value, well above the longest that Kubernetes takes anywhere: what one user asks for must
	// not get the demand of the whole cluster refused.
	maxText = 1024
	// maxNeedID bounds what every machine that carries the need remembers of it.
	maxNeedID = 64
	// maxObservations bounds a report.
	maxObservations = 10_000
)

func oddInClusterID(r rune) bool {
	return !unicode.IsPrint(r) || r == '/' || r == unicode.ReplacementChar
}

// checkClusterID returns an error that names the field and the value.
func checkClusterID(id string) error {
	switch {
	case id == "":
		return fmt.Errorf("cluster_id: %q: must not be empty", id)
	case len(url.PathEscape(id)) > maxClusterID:
		return fmt.Errorf("cluster_id: %s: must not be longer than %d bytes, escaped as in a URL", short(id), maxClusterID)
	case strings.ContainsFunc(id, oddInClusterID):
		return fmt.Errorf("cluster_id: %q: must consist of printable characters other than /", id)
	}
	return nil
}

// RollUpFromProto checks a roll-up and reads it. The error names the field and the value.
func RollUpFromProto(in *fleetpb.ClusterCapacityNeeds) (*RollUp, error) {
	if err := checkClusterID(in.GetClusterId()); err != nil {
		return nil, err
	}
	snapshot, err := wire.SnapshotFromProto(in)
	if err != nil {
		return nil, err
	}
	return &RollUp{Cluster: in.GetClusterId(), Session: in.GetSession(), Sequence: in.GetSequence(),
		Needs: snapshot.Needs, Daemons: snapshot.Daemons, Message: in}, nil
}

// checkLimits refuses a roll-up of a size that no cluster has, before it costs the others anything. What is stored already
// is not held to it.
func checkLimits(in *fleetpb.ClusterCapacityNeeds) error {
	if n := len(in.GetNeeds()); n > maxNeeds {
		return fmt.Errorf("needs: %d rows: must be at most %d; a row stands for all pods of one shape", n, maxNeeds)
	}
	if n := len(in.GetDaemons()); n > maxDaemons {
		return fmt.Errorf("daemons: %d rows: must be at most %d", n, maxDaemons)
	}
	if err := checkText("session", in.GetSession()); err != nil {
		return err
	}
	pods, names := int64(0), map[string]bool{}
	for i, n := range in.GetNeeds() {
		pods += int64(max(n.GetCount(), 0))
		if err := checkNeed(n, names); err != nil {
			return fmt.Errorf("needs[%d].%w", i, err)
		}
	}
	if pods > maxPods {
		return fmt.Errorf("needs: %d pods in total: must be at most %d", pods, maxPods)
	}
	if len(names) > maxNames {
		return fmt.Errorf("needs: %d different resources: must be at most %d", len(names), maxNames)
	}
	for i, d := range in.GetDaemons() {
		for name := range d.GetResources() {
			if err := checkText("resources", name); err != nil {
				return fmt.Errorf("daemons[%d].%w", i, err)
			}
		}
		if err := checkSets("node_affinity", d.GetNodeAffinity()); err != nil {
			return fmt.Errorf("daemons[%d].%w", i, err)
		}
	}
	return nil
}

func checkNeed(n *fleetpb.CapacityNeed, names map[string]bool) error {
	// A slash separates an id from what the planner remembers about it.
	if id := n.GetId(); len(id) > maxNeedID || strings.Contains(id, "/") {
		return fmt.Errorf("id: %s: must be at most %d bytes without a slash", short(id), maxNeedID)
	}
	for name := range n.GetResources() {
		names[name] = true
		if err := checkText("resources", name); err != nil {
			return err
		}
	}
	for _, s := range n.GetSpread() {
		if err := checkText("spread.topology_key", s.GetTopologyKey()); err != nil {
			return err
		}
	}
	for _, a := range n.GetAntiAffinity() {
		if err := checkText("anti_affinity", a.GetTopologyKey(), a.GetSet()); err != nil {
			return err
		}
	}
	for _, t := range n.GetTolerations() {
		if err := checkText("tolerations", t.GetKey(), t.GetValue()); err != nil {
			return err
		}
	}
	if err := checkText("group.name", n.GetGroup().GetName()); err != nil {
		return err
	}
	return checkSets("alternatives", append(n.GetAlternatives(),
		&fleetpb.RequirementSet{Requirements: n.GetRequirements()}))
}

func checkSets(field string, sets []*fleetpb.RequirementSet) error {
	for _, set := range sets {
		for _, r := range set.GetRequirements() {
			if err := checkText(field, append([]string{r.GetKey()}, r.GetValues()...)...); err != nil {
				return err
			}
		}
	}
	return nil
}

func checkText(field string, texts ...string) error {
	for _, text := range texts {
		if len(text) > maxText {
			return fmt.Errorf("%s: %s: must not be longer than %d bytes", field, short(text), maxText)
		}
	}
	return nil
}

// short quotes the beginning of a text that is too long to be repeated.
func short(text string) string {
	const shown = 40
	if len(text) <= shown {
		return strconv.Quote(text)
	}
	return strconv.Quote(text[:shown]) + "…"
}

// observationsFromProto checks a report and reads it. The error names the field and the value.
func observationsFromProto(in *fleetpb.MachineReport) ([]Observation, error) {
	if err := checkClusterID(in.GetClusterId()); err != nil {
		return nil, err
	}
	if n := len(in.GetMachines()); n > maxObservations {
		return nil, fmt.Errorf("machines: %d observations: must be at most %d", n, maxObservations)
	}
	out := make([]Observation, 0, len(in.GetMachines()))
	for i, m := range in.GetMachines() {
		if err := checkText("node_name", m.GetNodeName()); err != nil {
			return nil, fmt.Errorf("machines[%d].%w", i, err)
		}
		if m.GetId() == "" {
			return nil, fmt.Errorf("machines[%d].id: %q: must not be empty", i, m.GetId())
		}
		switch m.GetState() {
		case ObservedRegistered, ObservedReady, ObservedGone:
		case ObservedDraining, ObservedDrained, ObservedKept:
			if m.GetReclaimId() == "" {
				return nil, fmt.Errorf("machines[%d].reclaim_id: %q: must name the instruction in state %s", i, "", m.GetState())
			}
		default:
			return nil, fmt.Errorf("machines[%d].state: %q: must be Registered, Ready, Draining, Drained, Kept or Gone", i,
				m.GetState())
		}
		o := Observation{ID: m.GetId(), State: m.GetState(), NodeName: m.GetNodeName(), ReclaimID: m.GetReclaimId(),
			Message: m.GetMessage()}
		if len(m.GetAllocatable()) > 0 {
			allocatable, err := capacity.ParseResources(m.GetAllocatable())
			if err != nil {
				return nil, fmt.Errorf("machines[%d].allocatable: %w", i, err)
			}
			o.Allocatable = allocatable
		}
		out = append(out, o)
	}
	return out, nil
}
