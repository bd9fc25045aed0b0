package autoscaler

import (
	"fmt"
	"time"

	fleetpb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
)

// RollUp is a cluster's demand, valid.
type RollUp struct {
	Cluster  string
	Session  string
	Sequence uint64
	Needs    []capacity.Need
	Daemons  []capacity.Daemon
	// Message is what the cluster sent: it is what is stored.
	Message *fleetpb.ClusterCapacityNeeds
}

// late: an earlier message of the same sender arrived after a later one.
func (r *RollUp) late(stored *RollUp) bool {
	return stored != nil && r.Session != "" && r.Session == stored.Session && r.Sequence < stored.Sequence
}

// pods is the size of a demand.
func (r *RollUp) pods() int64 {
	var n int64
	for _, need := range r.Needs {
		n += int64(need.Count)
	}
	return n
}

// level is a size of the demand that was valid until end.
type level struct {
	end  time.Time
	pods int64
}

// demandHistory finds a collapse: the demand is held while it is less than a fraction of the largest that was valid
// within the last CollapseHold. However often roll-ups come, and in however many steps the demand falls, what was valid
// a CollapseHold ago is what counts, so that a storm of wake-ups gains nothing and an ordinary end of a large job is
// delayed by CollapseHold and no more.
type demandHistory struct {
	current int64
	// past levels, falling in size and rising in end.
	past []level
}

func (h *demandHistory) set(now time.Time, pods int64) {
	if pods != h.current {
		h.push(level{now, h.current})
		h.current = pods
	}
}

func (h *demandHistory) push(l level) {
	for n := len(h.past); n > 0 && h.past[n-1].pods <= l.pods; n-- {
		h.past = h.past[:n-1]
	}
	h.past = append(h.past, l)
}

// collapsed says whether the demand is held, why, and when to look again.
func (h *demandHistory) collapsed(now time.Time, hold time.Duration, fraction float64) (
	reason string, again time.Time) {
	for len(h.past) > 0 && !h.past[0].end.Add(hold).After(now) {
		h.past = h.past[1:]
	}
	if len(h.past) == 0 {
		return "", time.Time{}
	}
	peak, again := h.past[0].pods, h.past[0].end.Add(hold)
	if float64(h.current) < (1-fraction)*float64(peak) || h.current == 0 && peak > 0 {
		return fmt.Sprintf("the demand fell from %d to %d pods; reclaim is held until %s",
			peak, h.current, again.UTC().Format(time.TimeOnly)), again
	}
	return "", time.Time{}
}
