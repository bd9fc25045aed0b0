package autoscaler

import (
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/drover-sh/drover/capacity"
)

// cluster is everything that the engine knows of one cluster.
type cluster struct {
	id string

	// rollUp is the last one; nil for a cluster that never sent one.
	rollUp *RollUp
	// reported: a roll-up has come since the process started. Before that nothing is reclaimed.
	reported bool
	seenAt   time.Time
	silent   bool
	demand   demandHistory

	machines map[string]*machine
	Reclaims []*reclaim
	Grants   []grant
	surplus  map[place]surplusAges
	unrest   unrest

	// unserved says why the provider gives it nothing, until unservedUntil; then it is tried again.
	unserved      string
	unservedUntil time.Time

	// held says why nothing is reclaimed, after the last pass.
	held     string
	verdicts []capacity.Verdict

	// what Ready has to hand out.
	rollUpDirty, recordDirty, feedDirty bool

	// order and places are indexes over machines, rebuilt when one comes or goes.
	order  []*machine
	places map[place][]*machine
}

func newCluster(id string) *cluster {
	return &cluster{id: id, machines: map[string]*machine{}, surplus: map[place]surplusAges{}}
}

func (c *cluster) add(m *machine) {
	c.machines[m.ID] = m
	c.order, c.places = nil, nil
}

func (c *cluster) remove(m *machine) {
	delete(c.machines, m.ID)
	c.order, c.places = nil, nil
}

// sorted returns the machines in the order of their ids. The slice stays valid while machines come and go.
func (c *cluster) sorted() []*machine {
	if c.order == nil {
		c.order = slices.SortedFunc(maps.Values(c.machines), func(a, b *machine) int { return strings.Compare(a.ID, b.ID) })
		c.places = map[place][]*machine{}
		for _, m := range c.order {
			c.places[m.place()] = append(c.places[m.place()], m)
		}
	}
	return c.order
}

// at returns the machines of a place, in the order of their ids.
func (c *cluster) at(p place) []*machine {
	c.sorted()
	return c.places[p]
}
