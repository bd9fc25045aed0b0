package capacity_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/drover-sh/drover/capacity"
)

// carrier is a machine or a launch with what a plan puts on it.
type carrier struct {
	name, offering string
	state          capacity.MachineState
	labels         map[string]string
	taints         []corev1.Taint
	allocatable    capacity.Resources
	allotment      map[string]int32
	before         map[string]int32
}

// checkPlan states what is true of every plan, whatever its input. It shares no code with the planner's bookkeeping.
func checkPlan(in capacity.Input, p capacity.Plan) error {
	stock := map[string]int32{}
	offerings := map[string]capacity.Offering{}
	labels := map[string]map[string]string{}
	for _, o := range in.Offerings {
		offerings[o.Name] = o
		for _, d := range o.Domains {
			stock[o.Name+"/"+d.Name] = d.Available
			l := map[string]string{corev1.LabelHostname: "~"}
			maps.Copy(l, o.Labels)
			maps.Copy(l, d.Labels)
			labels[o.Name+"/"+d.Name] = l
		}
	}
	for _, l := range p.Launches {
		at := l.Offering + "/" + l.Domain
		if stock[at]--; stock[at] < 0 {
			return fmt.Errorf("launches beyond the stock of %s", at)
		}
		if len(l.Allotment) == 0 {
			return fmt.Errorf("launch of %s for nothing", at)
		}
	}
	for _, c := range in.Clusters {
		var carriers []carrier
		for _, m := range c.Machines {
			a, ok := p.Allotments[m.ID]
			if !ok {
				return fmt.Errorf("machine %s has no allotment in the plan", m.ID)
			}
			l := map[string]string{corev1.LabelHostname: m.ID}
			maps.Copy(l, m.Labels)
			carriers = append(carriers, carrier{m.ID, m.Offering, m.State, l, m.Taints, m.Allocatable, a, m.Allotment})
		}
		for i, l := range p.Launches {
			if l.Cluster == c.ID {
				o := offerings[l.Offering]
				carriers = append(carriers, carrier{
					fmt.Sprintf("launch %d", i), l.Offering, capacity.MachineInFlight, labels[l.Offering+"/"+l.Domain],
					o.Taints, o.Allocatable, l.Allotment, nil,
				})
			}
		}
		for _, check := range []func(capacity.ClusterInput, capacity.Plan, []carrier) error{
			checkRoom, checkCounts, checkApart, checkTogether, checkReclaims,
		} {
			if err := check(c, p, carriers); err != nil {
				return fmt.Errorf("cluster %s: %w", c.ID, err)
			}
		}
		if err := checkSpread(in, c, carriers); err != nil {
			return fmt.Errorf("cluster %s: %w", c.ID, err)
		}
	}
	return nil
}

func needsOf(c capacity.ClusterInput) map[string]capacity.Need {
	needs := map[string]capacity.Need{}
	for _, n := range c.Needs {
		needs[n.ID] = n
	}
	return needs
}

func isMark(id string) bool { return strings.Contains(id, "/") }

func checkRoom(c capacity.ClusterInput, _ capacity.Plan, carriers []carrier) error {
	needs := needsOf(c)
	for _, h := range carriers {
		used, count := capacity.Resources{}, int64(0)
		for id, n := range h.allotment {
			if isMark(id) {
				continue
			}
			need, ok := needs[id]
			if !ok || n <= 0 {
				return fmt.Errorf("%s carries %d of %s, which is no need", h.name, n, id)
			}
			if !need.Profile.MatchesLabels(h.labels) || !capacity.Tolerates(need.Profile.Tolerations, h.taints) {
				return fmt.Errorf("%s carries %s, which may not stand there", h.name, id)
			}
			for range n {
				used = used.Add(need.Profile.Resources)
			}
			count += int64(n)
		}
		if count == 0 {
			continue
		}
		for _, d := range c.Daemons {
			if d.RunsOn(h.labels, h.taints) {
				used = used.Add(d.Resources)
				count++
			}
		}
		if !used.Fits(h.allocatable) {
			return fmt.Errorf("%s carries %v and has %v", h.name, used, h.allocatable)
		}
		if limit, ok := h.allocatable[corev1.ResourcePods]; ok && count > limit {
			return fmt.Errorf("%s carries %d pods and takes %d", h.name, count, limit)
		}
	}
	return nil
}

func checkCounts(c capacity.ClusterInput, p capacity.Plan, carriers []carrier) error {
	met, inFlight := map[string]int32{}, map[string]int32{}
	for _, h := range carriers {
		for id, n := range h.allotment {
			if h.state == capacity.MachineInFlight {
				inFlight[id] += n
			} else {
				met[id] += n
			}
		}
	}
	verdicts := map[string]capacity.Verdict{}
	for _, v := range p.Verdicts {
		if v.Cluster == c.ID {
			verdicts[v.NeedID] = v
		}
	}
	for _, n := range c.Needs {
		v, ok := verdicts[n.ID]
		switch {
		case !ok:
			return fmt.Errorf("need %s has no verdict", n.ID)
		case v.Met+v.InFlight+v.Short != n.Count || v.Short < 0:
			return fmt.Errorf("verdict of %s does not add up to %d: %+v", n.ID, n.Count, v)
		case v.Met > met[n.ID] || v.Met < met[n.ID] && !strings.HasPrefix(v.Reason, "pending although") || v.InFlight != inFlight[n.ID]:
			return fmt.Errorf("verdict of %s says %d met, %d in flight; allotted are %d and %d",
				n.ID, v.Met, v.InFlight, met[n.ID], inFlight[n.ID])
		case v.Reason == "", v.Short > 0 && v.State != capacity.VerdictShort:
			return fmt.Errorf("verdict of %s without a reason or in the wrong state: %+v", n.ID, v)
		}
	}
	return nil
}

func checkApart(c capacity.ClusterInput, _ capacity.Plan, carriers []carrier) error {
	needs := needsOf(c)
	taken := map[string]int32{}
	for _, h := range carriers {
		for id, n := range h.allotment {
			if isMark(id) {
				continue
			}
			for _, a := range needs[id].Profile.AntiAffinity {
				value, ok := h.labels[a.TopologyKey]
				if a.TopologyKey == corev1.LabelHostname {
					value = h.name
				} else if !ok {
					continue
				}
				at := a.TopologyKey + " " + a.Set + " " + value
				if taken[at] += n; taken[at] > 1 {
					return fmt.Errorf("anti-affinity of %s: %d pods in %s", id, taken[at], at)
				}
			}
		}
	}
	return nil
}

// group joins what is placed together.
func group(n capacity.Need) string {
	if n.Profile.Group != nil {
		return "group " + n.Profile.Group.Name
	}
	return n.ID
}

func checkTogether(c capacity.ClusterInput, _ capacity.Plan, carriers []carrier) error {
	same := map[string]map[string]bool{}
	minCount, total, placed := map[string]int32{}, map[string]int32{}, map[string]int32{}
	bound, up := map[string]int32{}, map[string]int32{}
	for _, n := range c.Needs {
		g := group(n)
		if same[g] == nil {
			same[g] = map[string]bool{}
		}
		for _, r := range n.Profile.Requirements {
			if r.Operator == capacity.OperatorSame {
				same[g][r.Key] = true
			}
		}
		if n.Profile.Group != nil {
			minCount[g] = max(minCount[g], n.Profile.Group.MinCount)
			if k := n.Profile.Group.TopologyKey; k != "" {
				same[g][k] = true
			}
		}
		total[g] += n.Count
		bound[g] += n.Count - n.Pending
		for _, h := range carriers {
			placed[g] += h.allotment[n.ID]
		}
	}
	needs := needsOf(c)
	at := map[string]string{}
	for _, h := range carriers {
		for id, n := range h.allotment {
			if isMark(id) {
				continue
			}
			g := group(needs[id])
			if h.state == capacity.MachineActive {
				up[g] += n
			}
			for k := range same[g] {
				value, ok := h.labels[k]
				if k == corev1.LabelHostname {
					value, ok = h.name, true
				}
				if was, seen := at[g+k]; !ok || seen && was != value {
					return fmt.Errorf("%s has to share one %s and stands in %q and %q", g, k, was, value)
				}
				at[g+k] = value
			}
		}
	}
	for g, n := range placed {
		if required := min(minCount[g], total[g]); n > 0 && n < required && min(bound[g], up[g]) <= 0 {
			return fmt.Errorf("%s needs %d at once and got %d", g, required, n)
		}
	}
	return nil
}

func checkReclaims(c capacity.ClusterInput, p capacity.Plan, carriers []carrier) error {
	launched := map[string]bool{}
	for _, l := range p.Launches {
		if l.Cluster == c.ID {
			launched[l.Offering] = true
		}
	}
	for _, r := range p.Reclaims {
		if r.Cluster != c.ID {
			continue
		}
		if c.Held || launched[r.Offering] || int(r.Count) != len(r.Surplus) || r.Count == 0 {
			return fmt.Errorf("reclaim that ought not to be: %+v", r)
		}
		var pool []string
		for _, m := range c.Machines {
			if m.State == capacity.MachineActive && m.Offering == r.Offering && m.Domain == r.Domain {
				pool = append(pool, m.ID)
			}
		}
		slices.Sort(pool)
		if !slices.Equal(pool, r.Candidates) {
			return fmt.Errorf("candidates %v of %v", r.Candidates, pool)
		}
		for _, id := range r.Surplus {
			if !slices.Contains(pool, id) || carries(p.Allotments[id]) {
				return fmt.Errorf("%s is reclaimed and wanted", id)
			}
		}
	}
	for _, h := range carriers {
		if slices.Contains(p.Cancel, h.name) && (c.Held || h.state != capacity.MachineInFlight || carries(h.allotment)) {
			return fmt.Errorf("%s is cancelled and wanted", h.name)
		}
	}
	return nil
}

func carries(a map[string]int32) bool {
	for id := range a {
		if !isMark(id) {
			return true
		}
	}
	return false
}

// checkSpread holds a plan to the skew wherever it put more pods than there were.
func checkSpread(in capacity.Input, c capacity.ClusterInput, carriers []carrier) error {
	for _, n := range c.Needs {
		for _, s := range n.Profile.Spread {
			if s.WhenUnsatisfiable == corev1.ScheduleAnyway || s.TopologyKey == corev1.LabelHostname ||
				slices.ContainsFunc(n.Profile.Requirements, func(r capacity.Requirement) bool {
					return r.Operator == capacity.OperatorSame
				}) {
				continue
			}
			now, grew := map[string]int32{}, map[string]int32{}
			for _, o := range in.Offerings {
				for _, d := range o.Domains {
					l := maps.Clone(o.Labels)
					maps.Copy(l, d.Labels)
					l[corev1.LabelHostname] = "~"
					if v, ok := l[s.TopologyKey]; ok && n.Profile.MatchesLabels(l) &&
						capacity.Tolerates(n.Profile.Tolerations, o.Taints) && n.Profile.Resources.Fits(o.Allocatable) {
						now[v] += 0
					}
				}
			}
			for _, h := range carriers {
				if v := h.labels[s.TopologyKey]; h.allotment[n.ID] > 0 || h.before[n.ID] > 0 {
					now[v] += h.allotment[n.ID]
					grew[v] += h.allotment[n.ID] - h.before[n.ID]
				}
			}
			least := slices.Min(append(slices.Collect(maps.Values(now)), 1<<30))
			if int(s.MinDomains) > len(now) {
				least = 0
			}
			for v, count := range now {
				if grew[v] > 0 && count > least+s.MaxSkew {
					return fmt.Errorf("spread of %s over %s: %v exceeds the skew %d", n.ID, s.TopologyKey, now, s.MaxSkew)
				}
			}
		}
	}
	return nil
}
