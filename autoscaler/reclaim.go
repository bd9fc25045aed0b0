package autoscaler

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/drover-sh/drover/capacity"
)

// reclaim is an instruction to a cluster: give back some machines of one place. It lives until all of them are gone or
// the demand has returned. The machines that the cluster has chosen are in state Reclaiming and name it.
type reclaim struct {
	ID       string `json:"id"`
	Offering string `json:"offering"`
	Domain   string `json:"domain"`
	// Want is how many the cluster still has to choose.
	Want int32 `json:"want"`
	// Excluded machines were withdrawn or kept under this id and are no candidates of it again: a late report about them
	// would otherwise start a drain that the cluster has given up.
	Excluded map[string]bool `json:"excluded,omitempty"`
	Reason   string          `json:"reason,omitempty"`
}

// grant is a permission to reclaim that was used.
type grant struct {
	At    time.Time `json:"at"`
	Count int32     `json:"count"`
}

// reclaimWindow is the unit of time of Policy.MaxReclaimsPerMinute.
const reclaimWindow = time.Minute

// allowance is how many more machines may be asked back now. Every window of a minute holds at most limit.
func (c *cluster) allowance(now time.Time, limit int32) int32 {
	c.Grants = slices.DeleteFunc(c.Grants, func(g grant) bool { return !g.At.Add(reclaimWindow).After(now) })
	for _, g := range c.Grants {
		limit -= g.Count
	}
	return max(limit, 0)
}

// candidates are the machines among which the cluster may choose: those it already drains, then those it might.
func (c *cluster) candidates(r *reclaim, now time.Time) (draining, free []*machine) {
	for _, m := range c.at(place{r.Offering, r.Domain}) {
		switch {
		case m.State == Reclaiming && m.Reclaim == r.ID:
			draining = append(draining, m)
		case m.State == Active && !r.Excluded[m.ID] && !m.keptUntil.After(now):
			free = append(free, m)
		}
	}
	return draining, free
}

// surplusAges keeps, for one place, since when each surplus machine has been surplus. It counts and does not name:
// which machine of a place is the surplus one may change without the surplus being any younger.
type surplusAges []time.Time

// resize follows the surplus: what is new starts now, and what returns to use is the youngest.
func (a surplusAges) resize(n int, now time.Time) surplusAges {
	for len(a) < n {
		a = append(a, now)
	}
	return a[:n]
}

func (a surplusAges) ripe(now time.Time, delay time.Duration) (n int32) {
	for _, since := range a {
		if !since.Add(delay).After(now) {
			n++
		}
	}
	return n
}

// callOff puts machines back to service that the plan wants after all.
func (e *Engine) callOff(now time.Time, c *cluster, wanted map[string]map[string]int32) {
	for _, m := range c.sorted() {
		if m.State == Reclaiming && len(wanted[m.ID]) > 0 {
			e.withdraw(now, c, m, "the demand has returned")
		}
	}
}

// age follows the surplus of a cluster that is held.
func (c *cluster) age(now time.Time, sets []capacity.ReclaimSet, keep bool) {
	before := c.surplus
	c.surplus = map[place]surplusAges{}
	if !keep {
		return
	}
	for _, set := range sets {
		at := place{set.Offering, set.Domain}
		c.surplus[at] = before[at].resize(int(set.Count), now)
	}
}

// reclaimPass brings the instructions of a cluster in line with a plan.
func (e *Engine) reclaimPass(now time.Time, c *cluster, sets []capacity.ReclaimSet) {
	plan := map[place]capacity.ReclaimSet{}
	for _, set := range sets {
		plan[place{set.Offering, set.Domain}] = set
	}
	for _, at := range sortedPlaces(plan) {
		set := plan[at]
		if c.instruction(at) == nil {
			// It becomes an instruction only once something has been surplus for long enough.
			r := &reclaim{Offering: at.offering, Domain: at.domain, Reason: set.Reason}
			if e.adjust(now, c, r, set); r.Want > 0 {
				r.ID = "r-" + e.newID()
				c.Reclaims = append(c.Reclaims, r)
				e.note(c.id, r.ID, "", "", fmt.Sprintf("asking %d of %s in %s back: %s", r.Want, at.offering, at.domain,
					set.Reason))
			}
		}
	}
	for _, r := range slices.Clone(c.Reclaims) {
		at := place{r.Offering, r.Domain}
		before := r.Want
		e.adjust(now, c, r, plan[at])
		if r.Want != before {
			e.changed(c)
		}
		if _, found := plan[at]; !found {
			delete(c.surplus, at)
		}
	}
	for at := range c.surplus {
		if _, found := plan[at]; !found {
			delete(c.surplus, at)
		}
	}
	e.endReclaims(now, c)
}

// adjust lowers r.Want to what the plan can still spare, and raises it by what has been surplus for long enough, within
// the cluster's allowance.
func (e *Engine) adjust(now time.Time, c *cluster, r *reclaim, set capacity.ReclaimSet) {
	_, free := c.candidates(r, now)
	offered := make(map[string]bool, len(set.Candidates))
	for _, id := range set.Candidates {
		offered[id] = true
	}
	eligible := 0
	for _, m := range free {
		if offered[m.ID] {
			eligible++
		}
	}
	spare := min(int(set.Count), eligible)
	at := place{r.Offering, r.Domain}
	ages := c.surplus[at].resize(spare, now)
	c.surplus[at] = ages
	r.Want = min(r.Want, int32(spare))
	ripe := ages.ripe(now, c.unrest.delay(e.policy.ConsolidationDelay))
	if more := min(ripe-r.Want, c.allowance(now, e.policy.MaxReclaimsPerMinute)); more > 0 {
		r.Want += more
		r.Reason = set.Reason
		c.Grants = append(c.Grants, grant{now, more})
		e.changed(c)
	}
}

// withdraw puts a machine that is being drained back to service.
func (e *Engine) withdraw(now time.Time, c *cluster, m *machine, why string) {
	if r := c.reclaimByID(m.Reclaim); r != nil {
		r.exclude(m.ID)
	}
	m.Reclaim, m.Drained = "", false
	e.enter(now, c, m, Active, why)
}

// withdrawAll ends every instruction of a cluster.
func (e *Engine) withdrawAll(now time.Time, c *cluster, why string) {
	if len(c.Reclaims) == 0 {
		return
	}
	for _, m := range c.sorted() {
		if m.State == Reclaiming {
			e.withdraw(now, c, m, why)
		}
	}
	c.Reclaims, c.surplus = nil, map[place]surplusAges{}
	e.changed(c)
}

// terminateDrained ends what the cluster has drained.
func (e *Engine) terminateDrained(now time.Time, c *cluster) {
	for _, m := range c.sorted() {
		if m.State == Reclaiming && m.Drained {
			e.terminate(now, c, m, "drained")
			c.unrest.gaveBack(now, c.rollUp)
		}
	}
	e.endReclaims(now, c)
}

// endReclaims drops instructions that have nothing left to do.
func (e *Engine) endReclaims(now time.Time, c *cluster) {
	before := len(c.Reclaims)
	c.Reclaims = slices.DeleteFunc(c.Reclaims, func(r *reclaim) bool {
		draining, free := c.candidates(r, now)
		return len(draining) == 0 && (r.Want == 0 || len(free) == 0)
	})
	if len(c.Reclaims) != before {
		e.changed(c)
	}
}

func sortedPlaces(sets map[place]capacity.ReclaimSet) []place {
	return slices.SortedFunc(maps.Keys(sets), func(a, b place) int {
		return cmp.Or(cmp.Compare(a.offering, b.offering), cmp.Compare(a.domain, b.domain))
	})
}

func (r *reclaim) exclude(id string) {
	if r.Excluded == nil {
		r.Excluded = map[string]bool{}
	}
	r.Excluded[id] = true
}

func (c *cluster) instruction(at place) *reclaim {
	for _, r := range c.Reclaims {
		if r.Offering == at.offering && r.Domain == at.domain {
			return r
		}
	}
	return nil
}

func (c *cluster) reclaimByID(id string) *reclaim {
	for _, r := range c.Reclaims {
		if r.ID == id {
			return r
		}
	}
	return nil
}
