package autoscaler

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/drover-sh/drover/autoscaler/provider"
	"github.com/drover-sh/drover/capacity"
)

// recordVersion is raised when a Record changes in a way that an older reader would misread.
const recordVersion = 1

// Record is what is stored of a cluster's machines: everything that a restart has to know beside the roll-up.
type Record struct {
	Version int    `json:"version"`
	Cluster string `json:"cluster"`
	// Shapes are what many machines have in common.
	Shapes   []shapeRecord   `json:"shapes,omitempty"`
	Machines []machineRecord `json:"machines,omitempty"`
	Reclaims []reclaim       `json:"reclaims,omitempty"`
	Grants   []grant         `json:"grants,omitempty"`
}

type shapeRecord struct {
	Offering    string             `json:"offering"`
	Domain      string             `json:"domain"`
	Labels      map[string]string  `json:"labels,omitempty"`
	Allocatable capacity.Resources `json:"allocatable,omitempty"`
	Taints      []corev1.Taint     `json:"taints,omitempty"`
	Cost        float64            `json:"cost,omitempty"`
}

type machineRecord struct {
	ID          string             `json:"id"`
	Shape       int                `json:"shape"`
	State       MachineState       `json:"state"`
	Since       time.Time          `json:"since"`
	RequestedAt time.Time          `json:"requestedAt,omitzero"`
	LaunchedAt  time.Time          `json:"launchedAt,omitzero"`
	ProviderID  string             `json:"providerID,omitempty"`
	NodeName    string             `json:"nodeName,omitempty"`
	Message     string             `json:"message,omitempty"`
	Allotment   map[string]int32   `json:"allotment,omitempty"`
	Reclaim     string             `json:"reclaim,omitempty"`
	Drained     bool               `json:"drained,omitempty"`
	Released    bool               `json:"released,omitempty"`
	Learned     capacity.Resources `json:"learned,omitempty"`
}

// record copies what is to be stored, so that it can be written while the engine goes on.
func (c *cluster) record() *Record {
	out := &Record{Version: recordVersion, Cluster: c.id, Grants: slices.Clone(c.Grants)}
	shapes := map[place][]int{}
	for _, m := range c.sorted() {
		shape := shapeRecord{m.Offering, m.Domain, m.Labels, m.Allocatable, m.Taints, m.Cost}
		index := -1
		for _, i := range shapes[m.place()] {
			if reflect.DeepEqual(out.Shapes[i], shape) {
				index = i
			}
		}
		if index < 0 {
			index = len(out.Shapes)
			out.Shapes = append(out.Shapes, shape)
			shapes[m.place()] = append(shapes[m.place()], index)
		}
		out.Machines = append(out.Machines, machineRecord{
			ID: m.ID, Shape: index, State: m.State, Since: m.Since, RequestedAt: m.RequestedAt, LaunchedAt: m.LaunchedAt,
			ProviderID: m.ProviderID, NodeName: m.NodeName, Message: m.Message, Allotment: m.Allotment, Reclaim: m.Reclaim,
			Drained: m.Drained, Released: m.Released, Learned: m.Learned,
		})
	}
	for _, r := range c.Reclaims {
		stored := *r
		stored.Excluded = maps.Clone(r.Excluded)
		out.Reclaims = append(out.Reclaims, stored)
	}
	return out
}

// decodeRecord reads a stored record and refuses one that cannot be right.
func decodeRecord(data []byte) (*Record, error) {
	var r Record
	if err := json.Unmarshal(data, &r); err != nil {
		return nil, err
	}
	if r.Version != recordVersion {
		return nil, fmt.Errorf("version: %d: this program reads version %d", r.Version, recordVersion)
	}
	if r.Cluster == "" {
		return nil, fmt.Errorf("cluster: %q: must not be empty", r.Cluster)
	}
	for i, m := range r.Machines {
		if m.Shape < 0 || m.Shape >= len(r.Shapes) {
			return nil, fmt.Errorf("machines[%d].shape: %d: there are %d shapes", i, m.Shape, len(r.Shapes))
		}
		switch m.State {
		case Requested, Launched, Registered, Active, Reclaiming, Terminating, Failed:
		default:
			return nil, fmt.Errorf("machines[%d].state: %q: not a state", i, m.State)
		}
	}
	return &r, nil
}

// Saved is a state store's content.
type Saved struct {
	RollUps []*RollUp
	Records []*Record
}

// Restore takes over what an earlier process stored. Whatever the provider had been asked for, it is asked for again. A
// time that is still to come was stored by a clock that was ahead, and counts as now: a deadline must not wait for it.
func (e *Engine) Restore(now time.Time, saved Saved) error {
	for _, r := range saved.RollUps {
		c := e.cluster(r.Cluster, now)
		c.rollUp = r
		c.demand.current = r.pods()
		c.feedDirty = true
	}
	for _, record := range saved.Records {
		c := e.cluster(record.Cluster, now)
		c.Grants, c.feedDirty = record.Grants, true
		for i := range c.Grants {
			c.Grants[i].At = notAfter(now, c.Grants[i].At)
		}
		for i := range record.Reclaims {
			c.Reclaims = append(c.Reclaims, &record.Reclaims[i])
		}
		for _, stored := range record.Machines {
			if other := e.owner[stored.ID]; other != nil {
				return fmt.Errorf("machine %q is recorded for cluster %q and for cluster %q", stored.ID, other.id, c.id)
			}
			e.restoreMachine(now, c, record.Shapes[stored.Shape], stored)
		}
	}
	e.wake(now)
	return nil
}

func notAfter(now, t time.Time) time.Time {
	if t.After(now) {
		return now
	}
	return t
}

func (e *Engine) restoreMachine(now time.Time, c *cluster, shape shapeRecord, stored machineRecord) {
	m := &machine{
		Request: provider.Request{
			Ref: provider.Ref{ID: stored.ID, Cluster: c.id}, Offering: shape.Offering, Domain: shape.Domain,
			Labels: shape.Labels, Allocatable: shape.Allocatable, Taints: shape.Taints, RequestedAt: notAfter(now, stored.RequestedAt),
		},
		Cost: shape.Cost, State: stored.State, Since: notAfter(now, stored.Since), LaunchedAt: notAfter(now, stored.LaunchedAt),
		ProviderID: stored.ProviderID, NodeName: stored.NodeName, Message: stored.Message, Allotment: stored.Allotment,
		Reclaim: stored.Reclaim, Drained: stored.Drained, Released: stored.Released, Learned: stored.Learned, grownAt: now,
	}
	e.adopt(c, m)
	switch m.State {
	case Requested, Launched, Registered, Terminating:
		e.call(m)
	case Failed:
		if !m.Released {
			e.call(m)
		}
		if m.LaunchedAt.IsZero() {
			e.launchFailed(m.Since, m, strings.TrimPrefix(m.Message, failedPrefix))
		}
	}
}
