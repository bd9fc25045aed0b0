package autoscaler

import (
	"testing"
	"time"

	"github.com/drover-sh/drover/capacity"
)

// restless is a planner of which nothing good comes: it gives the second machine back, and finds that it needs two.
func restless(in capacity.Input) capacity.Plan {
	plan := capacity.Plan{Allotments: map[string]map[string]int32{}}
	for _, c := range in.Clusters {
		if len(c.Needs) == 0 {
			continue
		}
		allotment := map[string]int32{c.Needs[0].ID: 1}
		var candidates []string
		for _, m := range c.Machines {
			if m.State == capacity.MachineActive {
				candidates = append(candidates, m.ID)
				plan.Allotments[m.ID] = allotment
			}
		}
		switch {
		case len(candidates) > 1:
			plan.Reclaims = append(plan.Reclaims, capacity.ReclaimSet{Cluster: c.ID, Offering: "small", Domain: "a",
				Candidates: candidates, Surplus: candidates[:1], Count: 1})
		case len(c.Machines) < 2:
			plan.Launches = append(plan.Launches, capacity.Launch{Cluster: c.ID, Offering: "small", Domain: "a", Allotment: allotment})
		}
	}
	return plan
}

// What is given back and needed again at once, at constant demand, is given back more and more slowly, whatever the cause;
// and after a long calm as fast as before.
func TestReclaimsThatDoNoGoodSlowDown(t *testing.T) {
	w := newWorld(t, testPolicy(), small(100))
	w.plan = restless
	w.start()
	w.demand("east", cpuNeed(1, 2))
	w.advance(2 * time.Hour)
	early := len(w.cloud.Launched())
	w.advance(2 * time.Hour)
	late := len(w.cloud.Launched()) - early
	if late > 8 {
		t.Errorf("%d launches in two hours at constant demand, after %d in the two hours before", late, early)
	}
	if late == 0 {
		t.Error("the planner of this test is not restless, and the test proves nothing")
	}
	w.plan = nil
	w.runner.engine.plan = capacity.MakePlan
	w.advance(2 * time.Hour)
	if got := w.runner.engine.clusters["east"].unrest.level; got != 0 {
		t.Errorf("after a calm of two hours the unrest is still %d", got)
	}
}

// Jobs that come and go are no unrest: their machines go as fast as ever.
func TestJobsThatComeAndGoAreNoUnrest(t *testing.T) {
	w := newWorld(t, testPolicy(), small(100))
	for range 6 {
		w.demand("east", cpuNeed(1, 3), cpuNeed(10, 4))
		w.advance(2 * time.Minute)
		w.demand("east", cpuNeed(1, 3))
		w.advance(3 * time.Minute)
		w.want("east", states{Active: 1})
	}
	if got := w.runner.engine.clusters["east"].unrest.level; got != 0 {
		t.Errorf("the unrest is %d", got)
	}
}
