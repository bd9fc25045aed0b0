package wire

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	pb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
)

// NeedToProto gives one row of a roll-up. A group's topology key travels as a Same requirement, which it adds where
// the profile does not have it yet.
func NeedToProto(n capacity.Need) *pb.CapacityNeed {
	p := n.Profile
	out := &pb.CapacityNeed{
		Requirements: RequirementsToProto(withSame(p)),
		Resources:    p.Resources.Strings(),
		Priority:     p.Priority,
		Count:        n.Count,
		Pending:      n.Pending,
		Id:           n.ID,
	}
	for _, set := range p.Alternatives {
		out.Alternatives = append(out.Alternatives, &pb.RequirementSet{Requirements: RequirementsToProto(set)})
	}
	for _, s := range p.Spread {
		out.Spread = append(out.Spread, &pb.TopologySpread{
			TopologyKey:       s.TopologyKey,
			MaxSkew:           s.MaxSkew,
			WhenUnsatisfiable: string(s.WhenUnsatisfiable),
			MinDomains:        s.MinDomains,
		})
	}
	for i := range p.Tolerations {
		out.Tolerations = append(out.Tolerations, TolerationToProto(p.Tolerations[i]))
	}
	for _, a := range p.AntiAffinity {
		out.AntiAffinity = append(out.AntiAffinity, &pb.AntiAffinity{TopologyKey: a.TopologyKey, Set: a.Set})
	}
	if p.Group != nil {
		out.Group = &pb.Group{Name: p.Group.Name, MinCount: p.Group.MinCount}
	}
	return out
}

func withSame(p capacity.Profile) []capacity.Requirement {
	if p.Group == nil || p.Group.TopologyKey == "" {
		return p.Requirements
	}
	same := func(r capacity.Requirement) bool {
		return r.Operator == capacity.OperatorSame && r.Key == p.Group.TopologyKey
	}
	if slices.ContainsFunc(p.Requirements, same) {
		return p.Requirements
	}
	return append(slices.Clone(p.Requirements),
		capacity.Requirement{Key: p.Group.TopologyKey, Operator: capacity.OperatorSame})
}

// NeedFromProto reads one row. The profile is canonical; an empty id is computed. A group whose row has a Same
// requirement gets that requirement's key as its topology key, so that the id is the sender's.
func NeedFromProto(in *pb.CapacityNeed) (capacity.Need, error) {
	none := capacity.Need{}
	if in == nil {
		return none, fmt.Errorf("the row is missing")
	}
	p := capacity.Profile{Priority: in.GetPriority()}
	var err error
	if p.Requirements, err = requirementsFromProto(in.GetRequirements(), true); err != nil {
		return none, err
	}
	for i, set := range in.GetAlternatives() {
		reqs, err := requirementsFromProto(set.GetRequirements(), false)
		if err != nil {
			return none, fmt.Errorf("alternatives[%d].%w", i, err)
		}
		p.Alternatives = append(p.Alternatives, reqs)
	}
	if p.Resources, err = capacity.ParseResources(in.GetResources()); err != nil {
		return none, err
	}
	if p.Spread, err = spreadFromProto(in.GetSpread()); err != nil {
		return none, err
	}
	if p.Tolerations, err = tolerationsFromProto(in.GetTolerations()); err != nil {
		return none, err
	}
	for i, a := range in.GetAntiAffinity() {
		if a.GetTopologyKey() == "" {
			return none, fmt.Errorf("anti_affinity[%d].topology_key: %q: must not be empty", i, "")
		}
		p.AntiAffinity = append(p.AntiAffinity, capacity.AntiAffinity{TopologyKey: a.GetTopologyKey(), Set: a.GetSet()})
	}
	if p.Group, err = groupFromProto(in.GetGroup(), p.Requirements); err != nil {
		return none, err
	}
	switch {
	case in.GetCount() < 0:
		return none, fmt.Errorf("count: %d: must not be negative", in.GetCount())
	case in.GetPending() < 0:
		return none, fmt.Errorf("pending: %d: must not be negative", in.GetPending())
	case in.GetPending() > in.GetCount():
		return none, fmt.Errorf("pending: %d: must not exceed count, which is %d", in.GetPending(), in.GetCount())
	}
	p = p.Canonical()
	need := capacity.Need{ID: in.GetId(), Profile: p, Count: in.GetCount(), Pending: in.GetPending()}
	if need.ID == "" {
		need.ID = p.ID()
	}
	return need, nil
}

func groupFromProto(in *pb.Group, reqs []capacity.Requirement) (*capacity.Group, error) {
	if in == nil {
		return nil, nil
	}
	if in.GetName() == "" {
		return nil, fmt.Errorf("group.name: %q: must not be empty", "")
	}
	if in.GetMinCount() < 0 {
		return nil, fmt.Errorf("group.min_count: %d: must not be negative", in.GetMinCount())
	}
	g := &capacity.Group{Name: in.GetName(), MinCount: in.GetMinCount()}
	for _, r := range reqs {
		if r.Operator == capacity.OperatorSame && (g.TopologyKey == "" || r.Key < g.TopologyKey) {
			g.TopologyKey = r.Key
		}
	}
	return g, nil
}

func spreadFromProto(in []*pb.TopologySpread) ([]capacity.Spread, error) {
	var out []capacity.Spread
	for i, s := range in {
		when := corev1.UnsatisfiableConstraintAction(s.GetWhenUnsatisfiable())
		switch {
		case s.GetTopologyKey() == "":
			return nil, fmt.Errorf("spread[%d].topology_key: %q: must not be empty", i, "")
		case s.GetMaxSkew() < 1:
			return nil, fmt.Errorf("spread[%d].max_skew: %d: must be at least 1", i, s.GetMaxSkew())
		case when != corev1.DoNotSchedule && when != corev1.ScheduleAnyway:
			return nil, fmt.Errorf("spread[%d].when_unsatisfiable: %q: must be DoNotSchedule or ScheduleAnyway", i, when)
		case s.GetMinDomains() < 0:
			return nil, fmt.Errorf("spread[%d].min_domains: %d: must not be negative", i, s.GetMinDomains())
		}
		out = append(out, capacity.Spread{
			TopologyKey: s.GetTopologyKey(), MaxSkew: s.GetMaxSkew(), WhenUnsatisfiable: when, MinDomains: s.GetMinDomains(),
		})
	}
	return out, nil
}

// DaemonToProto gives one DaemonSet's share of a node.
func DaemonToProto(d capacity.Daemon) *pb.DaemonOverhead {
	out := &pb.DaemonOverhead{Resources: d.Resources.Strings()}
	for _, set := range d.NodeAffinity {
		out.NodeAffinity = append(out.NodeAffinity, &pb.RequirementSet{Requirements: RequirementsToProto(set)})
	}
	for i := range d.Tolerations {
		out.Tolerations = append(out.Tolerations, TolerationToProto(d.Tolerations[i]))
	}
	return out
}

// DaemonFromProto is the inverse of DaemonToProto.
func DaemonFromProto(in *pb.DaemonOverhead) (capacity.Daemon, error) {
	var d capacity.Daemon
	var err error
	for i, set := range in.GetNodeAffinity() {
		reqs, err := requirementsFromProto(set.GetRequirements(), false)
		if err != nil {
			return capacity.Daemon{}, fmt.Errorf("node_affinity[%d].%w", i, err)
		}
		d.NodeAffinity = append(d.NodeAffinity, reqs)
	}
	if d.Tolerations, err = tolerationsFromProto(in.GetTolerations()); err != nil {
		return capacity.Daemon{}, err
	}
	if d.Resources, err = capacity.ParseResources(in.GetResources()); err != nil {
		return capacity.Daemon{}, err
	}
	return d, nil
}

// SnapshotToProto gives the rows of a roll-up; the caller adds who sends it and when.
func SnapshotToProto(s capacity.Snapshot) *pb.ClusterCapacityNeeds {
	out := &pb.ClusterCapacityNeeds{}
	for i := range s.Needs {
		out.Needs = append(out.Needs, NeedToProto(s.Needs[i]))
	}
	for i := range s.Daemons {
		out.Daemons = append(out.Daemons, DaemonToProto(s.Daemons[i]))
	}
	return out
}

// SnapshotFromProto is the inverse of SnapshotToProto. Rows with the same id are one row that a peer has split; the
// counts are added up. The error names the row: needs[3].count: -1: …
func SnapshotFromProto(in *pb.ClusterCapacityNeeds) (capacity.Snapshot, error) {
	var s capacity.Snapshot
	at := map[string]int{}
	for i, row := range in.GetNeeds() {
		need, err := NeedFromProto(row)
		if err != nil {
			return capacity.Snapshot{}, fmt.Errorf("needs[%d].%w", i, err)
		}
		first, seen := at[need.ID]
		if !seen {
			at[need.ID] = len(s.Needs)
			s.Needs = append(s.Needs, need)
			continue
		}
		known := &s.Needs[first]
		if known.Profile.ID() != need.Profile.ID() {
			return capacity.Snapshot{}, fmt.Errorf("needs[%d].id: %q: row %d has the same id for another profile",
				i, need.ID, first)
		}
		known.Count, known.Pending = sum(known.Count, need.Count), sum(known.Pending, need.Pending)
	}
	for i, row := range in.GetDaemons() {
		d, err := DaemonFromProto(row)
		if err != nil {
			return capacity.Snapshot{}, fmt.Errorf("daemons[%d].%w", i, err)
		}
		s.Daemons = append(s.Daemons, d)
	}
	return s, nil
}
