package capacity

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// verdicts says for each need of the cluster, by id, what became of it.
func (p *planner) verdicts(s *site) []Verdict {
	met, inFlight := make([]int32, len(s.demands)), make([]int32, len(s.demands))
	for _, h := range s.hosts {
		for _, l := range h.loads {
			if h.state() == MachineInFlight {
				inFlight[l.demand.index] += l.pods
			} else {
				met[l.demand.index] += l.pods
			}
		}
	}
	verdicts := make([]Verdict, 0, len(s.demands))
	for _, id := range sortedKeys(s.byID) {
		d := s.byID[id]
		v := Verdict{
			Cluster: s.in.ID, NeedID: id, Met: met[d.index], InFlight: inFlight[d.index], Short: d.missing(),
		}
		switch {
		case v.Short > 0:
			v.State = VerdictShort
			p.explainShort(d, &v)
		case v.InFlight > 0:
			v.State = VerdictInFlight
			v.Reason = fmt.Sprintf("%d of %d pods wait for nodes on their way", v.InFlight, d.Count)
		default:
			v.State = VerdictMet
			v.Reason = "all pods have a place on nodes that are up"
		}
		if d.stuck > 0 {
			v.State, v.Met, v.Short = VerdictShort, v.Met-d.stuck, v.Short+d.stuck
			v.Reason = fmt.Sprintf("pending although nodes with room are up, also after more were added: %d; "+
				"a rule that the planner does not know keeps them off", d.stuck)
		}
		verdicts = append(verdicts, v)
	}
	return verdicts
}

// explainShort finds the offering that came closest: the one that got furthest through the questions that decide about it.
func (p *planner) explainShort(d *demand, v *Verdict) {
	v.Reason, v.Nearest = d.why, d.nearest
	best := finding{}
	for i, sl := range p.slots {
		f := p.judge(d, sl, p.shapeOfSlot(d.site, i))
		if best.slot == nil || f.stage > best.stage || f.stage == best.stage && f.closer(best) {
			best = f
		}
	}
	if best.slot == nil {
		v.Reason = cmp.Or(v.Reason, "there is no offering")
		return
	}
	v.Nearest = cmp.Or(v.Nearest, best.slot.offering.Name)
	if v.Reason == "" {
		v.Reason = best.why
	}
	if best.stage == stageStock && d.why == "" {
		v.Reason = p.outOfStock(d)
	}
}

// stages of the way from an offering to a launch.
const (
	stageRequirements = iota
	stageTaints
	stageTopology
	stageSize
	stageStock
)

type finding struct {
	slot  *slot
	stage int
	lack  float64
	why   string
}

func (f finding) closer(o finding) bool {
	return cmp.Or(cmp.Compare(f.lack, o.lack), cmp.Compare(f.slot.cost, o.slot.cost)) < 0
}

func (p *planner) judge(d *demand, sl *slot, sh *shape) finding {
	f := finding{slot: sl}
	name := sl.offering.Name
	if !d.Profile.MatchesLabels(sh.labels) {
		unmet := slices.DeleteFunc(slices.Clone(d.Profile.Requirements), func(r Requirement) bool { return r.Matches(sh.labels) })
		texts := make([]string, len(unmet))
		for i, r := range unmet {
			texts[i] = r.String()
		}
		f.stage, f.lack = stageRequirements, float64(len(unmet))
		f.why = fmt.Sprintf("no offering meets the requirements; %s fails %s", name, strings.Join(texts, ", "))
		return f
	}
	if t := firstUntolerated(d.Profile.Tolerations, sh.taints); t != nil {
		f.stage = stageTaints
		f.why = fmt.Sprintf("the pods do not tolerate the taint %s of %s", t.ToString(), name)
		return f
	}
	if !sh.hasKeys(d) {
		f.stage = stageTopology
		f.why = fmt.Sprintf("nodes of %s do not have the topology labels that the pods ask for", name)
		return f
	}
	if fitCount(sh.room, d) == 0 {
		f.stage = stageSize
		f.lack, f.why = p.tooLarge(d, name, sh)
		return f
	}
	f.stage = stageStock
	return f
}

// tooLarge names the resource of which an empty node lacks most.
func (p *planner) tooLarge(d *demand, name string, sh *shape) (lack float64, why string) {
	for _, i := range d.dims {
		has := max(0, sh.room[i])
		part := 1 - float64(has)/float64(d.request[i])
		if part <= lack {
			continue
		}
		lack = part
		text := func(v int64) string { return Resources{p.space.names[i]: v}.Strings()[string(p.space.names[i])] }
		if sh.capacity[i] >= d.request[i] {
			why = fmt.Sprintf("a pod asks for %s of %s; %s has %s but DaemonSets take %s of it",
				text(d.request[i]), p.space.names[i], name, text(sh.capacity[i]), text(sh.capacity[i]-sh.room[i]))
		} else {
			why = fmt.Sprintf("a pod asks for %s of %s; %s, the largest that fits otherwise, has %s",
				text(d.request[i]), p.space.names[i], name, cmp.Or(text(sh.capacity[i]), "none"))
		}
	}
	return lack, why
}

// outOfStock lists what the pods could stand on if there were more of it.
func (p *planner) outOfStock(d *demand) string {
	domains := map[string][]string{}
	for i, sl := range p.slots {
		sh := p.shapeOfSlot(d.site, i)
		if sh.acceptsPods(d) && fitCount(sh.room, d) > 0 {
			if d.site.taken(d, sh) {
				return "anti-affinity allows one pod of its set in each domain, and every domain has one"
			}
			domains[sl.offering.Name] = append(domains[sl.offering.Name], sl.domain.Name)
		}
	}
	const listed = 3
	names := sortedKeys(domains)
	texts := make([]string, 0, listed+1)
	for i, name := range names {
		if i == listed {
			texts = append(texts, fmt.Sprintf("and %d more", len(names)-listed))
			break
		}
		at := domains[name]
		text := strings.Join(at[:min(len(at), listed)], ", ")
		if len(at) > listed {
			text += fmt.Sprintf(" and %d more", len(at)-listed)
		}
		texts = append(texts, fmt.Sprintf("%s (%s)", name, text))
	}
	return "no stock left of " + strings.Join(texts, ", ")
}
