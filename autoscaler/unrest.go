package autoscaler

import (
	"fmt"
	"time"

	"github.com/drover-sh/drover/capacity"
)

// unrest slows a cluster's reclaims down while they do no good: where pods follow a rule that neither the planner nor the
// operator knows, what is given back is launched again at once for the very pods that it displaced, over and over. Each
// time that happens the consolidation delay doubles, and after a long calm it is what it was. It is lost at a restart,
// which costs a few more rounds.
type unrest struct {
	level    int
	raisedAt time.Time
	// counts are the pods of each need, by id, at gaveBackAt, when a machine was last given back; nil once that has been
	// judged.
	counts     map[string]int32
	gaveBackAt time.Time
}

const (
	// maxUnrest bounds the doublings: half a minute becomes a quarter of an hour, and not a day.
	maxUnrest = 5
	// calmAfter is how many delays without a raise are a calm, and after how many a launch has nothing to do with what was
	// given back.
	calmAfter = 4
)

// delay is for how long a machine has to be surplus.
func (u *unrest) delay(base time.Duration) time.Duration { return base << u.level }

// gaveBack notes the demand at which a machine was ended.
func (u *unrest) gaveBack(now time.Time, r *RollUp) {
	u.counts, u.gaveBackAt = map[string]int32{}, now
	if r != nil {
		for i := range r.Needs {
			u.counts[r.Needs[i].ID] = r.Needs[i].Count
		}
	}
}

// grown says whether any need that the launch is for is larger than when a machine was last given back.
func (u *unrest) grown(l capacity.Launch, r *RollUp) bool {
	for i := range r.Needs {
		if n := &r.Needs[i]; l.Allotment[n.ID] > 0 && n.Count > u.counts[n.ID] {
			return true
		}
	}
	return false
}

// launching judges a launch by the last machine that was given back.
func (e *Engine) launching(now time.Time, c *cluster, l capacity.Launch) {
	u := &c.unrest
	if u.counts == nil || c.rollUp == nil || u.grown(l, c.rollUp) ||
		now.Sub(u.gaveBackAt) >= calmAfter*u.delay(e.policy.ConsolidationDelay) {
		return
	}
	u.counts = nil
	u.level, u.raisedAt = min(u.level+1, maxUnrest), now
	e.note(c.id, "", "", "", fmt.Sprintf("what was given back is needed again although no need has grown: from now on a "+
		"machine has to be surplus for %s", u.delay(e.policy.ConsolidationDelay)))
}

// calm ends the unrest after long enough.
func (e *Engine) calm(now time.Time, c *cluster) {
	if u := &c.unrest; u.level > 0 && now.Sub(u.raisedAt) >= calmAfter*u.delay(e.policy.ConsolidationDelay) {
		*u = unrest{}
	}
}
