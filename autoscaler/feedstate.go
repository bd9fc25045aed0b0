package autoscaler

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	fleetpb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/capacity/wire"
)

// maxFailedShown bounds the failed machines in a feed, newest first: an offering that fails for hours must not swell
// it.
const maxFailedShown = 100

// Feed returns the state of a cluster as its operator is told; session, sequence and time are the sender's to fill in.
func (e *Engine) Feed(now time.Time, clusterID string) *fleetpb.FeedState {
	return e.feedWith(now, clusterID, e.stock(now))
}

// feedWith is Feed with the stock at hand, which is the same for all clusters.
func (e *Engine) feedWith(now time.Time, clusterID string, stock []capacity.Offering) *fleetpb.FeedState {
	out := &fleetpb.FeedState{ClusterId: clusterID}
	shapeOf := e.offeringRows(stock, out)
	c := e.clusters[clusterID]
	if c == nil {
		return out
	}
	e.machineRows(c, out, shapeOf)
	for _, r := range c.Reclaims {
		draining, free := c.candidates(r, now)
		row := &fleetpb.Reclaim{Id: r.ID, Reason: r.Reason, Count: int32(len(draining))}
		for _, m := range draining {
			row.Candidates = append(row.Candidates, m.ID)
		}
		if r.Want > 0 {
			row.Count += min(r.Want, int32(len(free)))
			for _, m := range free {
				row.Candidates = append(row.Candidates, m.ID)
			}
		}
		if row.Count > 0 {
			out.Reclaims = append(out.Reclaims, row)
		}
	}
	for _, v := range c.verdicts {
		out.Verdicts = append(out.Verdicts, &fleetpb.Verdict{NeedId: v.NeedID, State: string(v.State), Met: v.Met,
			InFlight: v.InFlight, Short: v.Short, Reason: v.Reason, NearestOffering: v.Nearest})
	}
	return out
}

// offeringRows adds the offerings, each with a shape of its own, and returns the shapes' indexes by offering.
func (e *Engine) offeringRows(stock []capacity.Offering, out *fleetpb.FeedState) map[string]int32 {
	shapeOf := make(map[string]int32, len(stock))
	for i, o := range stock {
		index := int32(len(out.Shapes))
		shapeOf[o.Name] = index
		out.Shapes = append(out.Shapes, shape(o.Labels, o.Allocatable, o.Taints))
		var available, total int64
		for j, d := range o.Domains {
			available += int64(d.Available)
			total += int64(e.offerings[i].Domains[j].Available)
		}
		row := &fleetpb.Offering{
			Name: o.Name, Shape: index, AvailableCount: int32(min(available, math.MaxInt32)), Cost: o.Cost,
			SupportsAtomicProvisioning: o.Atomic,
			Availability:               availability(e.offerings[i].Availability, available, total),
			Requirements:               requirements(e.offerings[i].InstanceType, o.Domains),
		}
		if o.ProvisioningTime > 0 {
			row.EstimatedProvisioningTime = durationpb.New(o.ProvisioningTime)
		}
		out.Offerings = append(out.Offerings, row)
	}
	return shapeOf
}

// availability lowers the provider's hint as the stock runs out: a tenth left is Low, a quarter is at most Medium.
func availability(hint string, available, total int64) string {
	levels := []string{string(fleetv1alpha1.AvailabilityNone), string(fleetv1alpha1.AvailabilityLow),
		string(fleetv1alpha1.AvailabilityMedium), string(fleetv1alpha1.AvailabilityHigh)}
	limit := 3
	switch {
	case available == 0:
		limit = 0
	case available*10 <= total:
		limit = 1
	case available*4 <= total:
		limit = 2
	}
	at := slices.Index(levels, hint)
	if at < 0 {
		at = 3
	}
	return levels[min(at, limit)]
}

// requirements are what the nodes of an offering meet: the instance type, and each domain label's values.
func requirements(instanceType string, domains []capacity.Domain) []*fleetpb.NodeSelectorRequirement {
	values := map[string]map[string]bool{}
	if instanceType != "" {
		values[corev1.LabelInstanceTypeStable] = map[string]bool{instanceType: true}
	}
	for _, d := range domains {
		for key, value := range d.Labels {
			if values[key] == nil {
				values[key] = map[string]bool{}
			}
			values[key][value] = true
		}
	}
	var out []*fleetpb.NodeSelectorRequirement
	for _, key := range slices.Sorted(maps.Keys(values)) {
		out = append(out, &fleetpb.NodeSelectorRequirement{Key: key, Operator: string(corev1.NodeSelectorOpIn),
			Values: slices.Sorted(maps.Keys(values[key]))})
	}
	return out
}

func shape(labels map[string]string, allocatable capacity.Resources, taints []corev1.Taint) *fleetpb.NodeShape {
	out := &fleetpb.NodeShape{Labels: labels, Resources: allocatable.Strings()}
	for _, t := range taints {
		out.Taints = append(out.Taints, wire.TaintToProto(t))
	}
	return out
}

// phases of an UpcomingMachine by state; other states are not listed.
var phases = map[MachineState]fleetv1alpha1.UpcomingNodePhase{
	Requested:  fleetv1alpha1.UpcomingNodeProvisioning,
	Launched:   fleetv1alpha1.UpcomingNodeLaunched,
	Registered: fleetv1alpha1.UpcomingNodeRegistered,
	Failed:     fleetv1alpha1.UpcomingNodeFailed,
}

// machineRows adds the machines on their way and those that failed a short while ago.
func (e *Engine) machineRows(c *cluster, out *fleetpb.FeedState, shapeOf map[string]int32) {
	var failed []*machine
	for _, m := range c.sorted() {
		if m.State == Terminating {
			out.Terminating = append(out.Terminating, m.ID)
		} else if m.State == Failed {
			failed = append(failed, m)
		} else if _, shown := phases[m.State]; shown {
			e.machineRow(m, out, shapeOf)
		}
	}
	slices.SortStableFunc(failed, func(a, b *machine) int {
		return cmp.Or(b.Since.Compare(a.Since), cmp.Compare(a.ID, b.ID))
	})
	for _, m := range failed[:min(len(failed), maxFailedShown)] {
		e.machineRow(m, out, shapeOf)
	}
}

func (e *Engine) machineRow(m *machine, out *fleetpb.FeedState, shapeOf map[string]int32) {
	index, found := shapeOf[m.Offering]
	if !found {
		// The offering is no longer sold; its first machine brings the shape.
		index = int32(len(out.Shapes))
		shapeOf[m.Offering] = index
		out.Shapes = append(out.Shapes, shape(nil, m.Allocatable, m.Taints))
	}
	row := &fleetpb.UpcomingMachine{Id: m.ID, Shape: index, Labels: map[string]string{}, Phase: string(phases[m.State]),
		NodeName: m.NodeName, ProviderId: m.ProviderID, Message: m.Message}
	for key, value := range m.Labels {
		if out.Shapes[index].Labels[key] != value {
			row.Labels[key] = value
		}
	}
	if !m.RequestedAt.IsZero() {
		row.ProvisioningStartTime = timestamppb.New(m.RequestedAt)
		if o := e.offering(m.Offering); o != nil && o.ProvisioningTime > 0 {
			row.EstimatedReadyTime = timestamppb.New(m.RequestedAt.Add(o.ProvisioningTime))
		}
	}
	out.Machines = append(out.Machines, row)
}
