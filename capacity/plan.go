package capacity

import (
	"cmp"
	"slices"
)

// MakePlan decides which machines to launch and which to give back, so that every cluster carries what it needs.
//
// # What a caller may rely on
//
// A plan works on profiles, never pod by pod. Each machine remembers, as its Allotment, how many pods of which need the plan
// put there; a pass keeps that up to the demand, fills free room, and only then launches. At constant demand the plan after
// the next asks for nothing. The caller therefore stores, before it acts:
//
//   - Plan.Allotments[id] as the Allotment of every machine that exists;
//   - Launch.Allotment as the Allotment of the machine that it makes of a Launch.
//
// An Allotment is opaque but for its need ids: entries "<need id>/full" and "<need id>/round" are no counts of pods but the
// planner's own memory, and have to be stored like the others.
//
// A machine is Settled when it is Active and its Allotment has not grown for as long as the scheduler may need to use it: a
// caller starts that time anew when an Allotment grows. Need.Pending beyond what stands on machines that are not settled
// yet tells the planner that its packing was too tight, so a caller passes what the cluster said last and nothing older.
//
// # Giving back
//
// A ReclaimSet names, for one offering in one domain, all Active machines and how many of them are too many: whichever the
// cluster chooses, the next pass moves what the plan had put there to the ones left. Machines in state Reclaiming are in no
// set and do not count. Where Plan.Allotments has entries for one of them, the demand came back and the plan asks to call
// its drain off; where it has none, the drain goes on. Cancel lists machines that are still on their way and not needed.
// What a Held cluster would give back is in Plan.Withheld, with the reason, and nothing of it in Reclaims and Cancel.
//
// # Gangs
//
// Needs of one Group are placed together. With a MinCount, fewer members than that get nothing at all (or fewer than the
// group has in total here, where that is less: members that found room elsewhere are not part of the demand). A gang of which
// no member runs gives up its reservations when it can no longer be completed; one that runs is left alone.
func MakePlan(in Input) Plan {
	p := newPlanner(in)
	for _, s := range p.sites {
		p.keep(s)
	}
	p.journal = p.journal[:0]
	p.serve()
	plan := Plan{Allotments: map[string]map[string]int32{}}
	for _, s := range p.sites {
		p.consolidate(s)
		p.journal = p.journal[:0]
		for _, d := range s.demands {
			if d.round > 0 {
				s.searches = append(s.searches, d)
			}
		}
		s.release(p, &plan)
		plan.Launches = append(plan.Launches, p.launches(s)...)
		for _, h := range s.hosts {
			if h.machine != nil {
				plan.Allotments[h.machine.ID] = h.allotment(s)
			}
		}
		plan.Verdicts = append(plan.Verdicts, p.verdicts(s)...)
	}
	slices.Sort(plan.Cancel)
	return plan
}

func (p *planner) launches(s *site) []Launch {
	var launches []Launch
	for _, h := range s.hosts {
		if h.machine == nil {
			sl := p.slots[h.slot]
			launches = append(launches, Launch{
				Cluster: s.in.ID, Offering: sl.offering.Name, Domain: sl.domain.Name, Allotment: h.allotment(s),
			})
		}
	}
	slices.SortStableFunc(launches, func(a, b Launch) int {
		return cmp.Or(cmp.Compare(a.Offering, b.Offering), cmp.Compare(a.Domain, b.Domain))
	})
	return launches
}

// allotment is what the caller stores with the machine. A machine that is given back has no use for memories.
func (h *host) allotment(s *site) map[string]int32 {
	a := make(map[string]int32, len(h.loads)+len(h.full))
	for _, l := range h.loads {
		a[l.demand.ID] = l.pods
	}
	if h.state() != MachineActive {
		return a
	}
	for _, d := range h.full {
		a[d.ID+fullSuffix] = 1
	}
	for _, d := range s.searches {
		if h.shape.acceptsPods(d) {
			a[d.ID+roundSuffix] = d.round
		}
	}
	return a
}
