package capacity_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/drover-sh/drover/capacity"
)

// fleet is what a plan is made for and applied to: offerings with stock, and clusters with needs and machines. It stands for
// the autoscaler in the planner's tests.
type fleet struct {
	offerings []capacity.Offering
	clusters  []capacity.ClusterInput
	machines  int // ever made, for ids
}

func (f *fleet) input() capacity.Input {
	return capacity.Input{Offerings: f.offerings, Clusters: f.clusters}
}

func (f *fleet) cluster(id string) *capacity.ClusterInput {
	for i := range f.clusters {
		if f.clusters[i].ID == id {
			return &f.clusters[i]
		}
	}
	f.clusters = append(f.clusters, capacity.ClusterInput{ID: id})
	return &f.clusters[len(f.clusters)-1]
}

func (f *fleet) offering(name string) *capacity.Offering {
	for i := range f.offerings {
		if f.offerings[i].Name == name {
			return &f.offerings[i]
		}
	}
	panic("no offering " + name)
}

func (f *fleet) domain(offering, name string) *capacity.Domain {
	o := f.offering(offering)
	for i := range o.Domains {
		if o.Domains[i].Name == name {
			return &o.Domains[i]
		}
	}
	panic("no domain " + name + " of " + offering)
}

// apply stores a plan as an autoscaler does: allotments first, then the launches as machines in flight; what is cancelled is
// gone at once. Reclaims are left to the caller.
func (f *fleet) apply(p capacity.Plan) []string {
	for i := range f.clusters {
		for j := range f.clusters[i].Machines {
			m := &f.clusters[i].Machines[j]
			m.Allotment = p.Allotments[m.ID]
		}
	}
	var ids []string
	for _, l := range p.Launches {
		f.machines++
		o, d := f.offering(l.Offering), f.domain(l.Offering, l.Domain)
		d.Available--
		labels := maps.Clone(o.Labels)
		if labels == nil {
			labels = map[string]string{}
		}
		maps.Copy(labels, d.Labels)
		id := fmt.Sprintf("m%02d", f.machines)
		c := f.cluster(l.Cluster)
		c.Machines = append(c.Machines, capacity.Machine{
			ID: id, Offering: l.Offering, Domain: l.Domain, State: capacity.MachineInFlight,
			Labels: labels, Allocatable: o.Allocatable, Taints: o.Taints, Cost: o.Cost, Allotment: l.Allotment,
		})
		ids = append(ids, id)
	}
	for _, id := range p.Cancel {
		f.remove(id)
	}
	return ids
}

// remove takes a machine out of the fleet and gives its place back to the stock.
func (f *fleet) remove(id string) {
	for i := range f.clusters {
		c := &f.clusters[i]
		c.Machines = slices.DeleteFunc(c.Machines, func(m capacity.Machine) bool {
			if m.ID == id {
				f.domain(m.Offering, m.Domain).Available++
			}
			return m.ID == id
		})
	}
}

// settle makes every machine in flight a node that the scheduler has had time to use.
func (f *fleet) settle() {
	for i := range f.clusters {
		for j := range f.clusters[i].Machines {
			if m := &f.clusters[i].Machines[j]; m.State != capacity.MachineReclaiming {
				m.State, m.Settled = capacity.MachineActive, true
			}
		}
	}
}

func (f *fleet) machine(id string) *capacity.Machine {
	for i := range f.clusters {
		for j := range f.clusters[i].Machines {
			if f.clusters[i].Machines[j].ID == id {
				return &f.clusters[i].Machines[j]
			}
		}
	}
	return nil
}

func idle(p capacity.Plan) bool { return len(p.Launches)+len(p.Reclaims)+len(p.Cancel) == 0 }

// describe writes a plan as a person would tell it.
func describe(f *fleet, p capacity.Plan) string {
	var b strings.Builder
	many := len(f.clusters) > 1
	last, n := "", 0
	flush := func() {
		if n > 0 {
			fmt.Fprintf(&b, "launch %d x %s\n", n, last)
		}
		n = 0
	}
	for _, l := range p.Launches {
		text := fmt.Sprintf("%s in %s for %s", l.Offering, l.Domain, allotment(l.Allotment))
		if many {
			text += ", cluster " + l.Cluster
		}
		if text != last {
			flush()
		}
		last, n = text, n+1
	}
	flush()
	if len(p.Cancel) > 0 {
		fmt.Fprintf(&b, "cancel %s\n", strings.Join(p.Cancel, " "))
	}
	reclaims := func(verb string, sets []capacity.ReclaimSet) {
		for _, r := range sets {
			fmt.Fprintf(&b, "%s %d x %s in %s, by choice %s, of %s: %s\n",
				verb, r.Count, r.Offering, r.Domain, strings.Join(r.Surplus, " "), strings.Join(r.Candidates, " "), r.Reason)
		}
	}
	reclaims("reclaim", p.Reclaims)
	reclaims("withheld", p.Withheld)
	for i := range f.clusters {
		for _, m := range f.clusters[i].Machines {
			if a := p.Allotments[m.ID]; m.State == capacity.MachineReclaiming && len(a) > 0 {
				fmt.Fprintf(&b, "keep %s after all, for %s\n", m.ID, allotment(a))
			}
		}
	}
	if b.Len() == 0 {
		b.WriteString("no action\n")
	}
	var names, texts []string
	for _, v := range p.Verdicts {
		name := v.NeedID
		if many {
			name = v.Cluster + "/" + name
		}
		text := fmt.Sprintf("%s, %d met, %d in flight, %d short\n", v.State, v.Met, v.InFlight, v.Short)
		if v.Short > 0 {
			text += fmt.Sprintf("  %s\n", v.Reason)
			if v.Nearest != "" {
				text += fmt.Sprintf("  nearest offering: %s\n", v.Nearest)
			}
		}
		names, texts = append(names, name), append(texts, text)
	}
	writeRuns(&b, names, texts)
	return b.String()
}

func allotment(a map[string]int32) string {
	var texts []string
	for _, id := range slices.Sorted(maps.Keys(a)) {
		texts = append(texts, fmt.Sprintf("%s(%d)", id, a[id]))
	}
	if len(texts) == 0 {
		return "nothing"
	}
	return strings.Join(texts, " ")
}

// writeRuns writes a line for each run of equal texts, with the first and the last of the names it goes for.
func writeRuns(b *strings.Builder, names, texts []string) {
	for i := 0; i < len(names); {
		last := i
		for last+1 < len(names) && texts[last+1] == texts[i] {
			last++
		}
		if last == i {
			fmt.Fprintf(b, "%s: %s", names[i], texts[i])
		} else {
			fmt.Fprintf(b, "%s to %s, each: %s", names[i], names[last], texts[i])
		}
		i = last + 1
	}
}
