package autoscaler

import (
	"fmt"
	"strings"
	"unicode"

	fleetpb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/capacity/wire"
)

// maxClusterID is as long as a DNS name may be.
const maxClusterID = 253

func oddInClusterID(r rune) bool {
	return !unicode.IsPrint(r) || r == '/' || r == unicode.ReplacementChar
}

// checkClusterID returns an error that names the field and the value.
func checkClusterID(id string) error {
	switch {
	case id == "":
		return fmt.Errorf("cluster_id: %q: must not be empty", id)
	case len(id) > maxClusterID:
		return fmt.Errorf("cluster_id: %q: must not be longer than %d bytes", id[:maxClusterID]+"…", maxClusterID)
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

// observationsFromProto checks a report and reads it. The error names the field and the value.
func observationsFromProto(in *fleetpb.MachineReport) ([]Observation, error) {
	if err := checkClusterID(in.GetClusterId()); err != nil {
		return nil, err
	}
	out := make([]Observation, 0, len(in.GetMachines()))
	for i, m := range in.GetMachines() {
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
