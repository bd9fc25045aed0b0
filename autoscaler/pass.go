package autoscaler

import (
	"cmp"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/drover-sh/drover/autoscaler/provider"
	"github.com/drover-sh/drover/capacity"
)

// Pass plans for all clusters and brings the records in line with the plan. What is decided is in the next Ready.
func (e *Engine) Pass(now time.Time) {
	e.passAt = time.Time{}
	defer e.finish(now)
	for id, at := range e.tombstones {
		if now.Sub(at) >= tombstoneLife {
			delete(e.tombstones, id)
		}
	}
	ids := slices.Sorted(maps.Keys(e.clusters))
	for _, id := range ids {
		e.expire(now, e.clusters[id])
		e.calm(now, e.clusters[id])
	}

	in := capacity.Input{Offerings: e.stock(now)}
	for _, id := range ids {
		c := e.clusters[id]
		c.held = e.heldReason(now, c)
		in.Clusters = append(in.Clusters, e.clusterInput(now, c))
	}
	plan := e.plan(in)
	e.judge(now, plan)
	if e.policy.DryRun {
		for _, id := range ids {
			e.withdrawAll(now, e.clusters[id], "dry run")
		}
		return
	}
	e.allot(now, plan)
	e.launch(now, plan, in.Offerings)
	e.cancel(now, plan)
	sets, withheld := byCluster(plan.Reclaims), byCluster(plan.Withheld)
	for _, id := range ids {
		c := e.clusters[id]
		e.callOff(now, c, plan.Allotments)
		switch {
		case e.policy.DisableReclaim:
			e.withdrawAll(now, c, "reclaim is disabled")
		case c.held != "":
			// Frozen: what the cluster drains already may go on, but nothing is asked for and nothing is ended. What is
			// surplus grows older meanwhile, but for a cluster that has not even reported.
			c.age(now, withheld[id], c.reported)
		default:
			e.reclaimPass(now, c, sets[id])
			e.terminateDrained(now, c)
		}
	}
}

func byCluster(sets []capacity.ReclaimSet) map[string][]capacity.ReclaimSet {
	out := map[string][]capacity.ReclaimSet{}
	for _, set := range sets {
		out[set.Cluster] = append(out[set.Cluster], set)
	}
	return out
}

// finish notes when to plan again, and tells every cluster of a stock that has changed: stock is the fleet's.
func (e *Engine) finish(now time.Time) {
	e.timedAt = e.deadline(now)
	if stock := e.stock(now); !reflect.DeepEqual(stock, e.lastStock) {
		e.lastStock = stock
		for _, c := range e.clusters {
			c.feedDirty = true
		}
	}
}

// expire does what time alone decides for machines and for a silent cluster.
func (e *Engine) expire(now time.Time, c *cluster) {
	if c.rollUp != nil && !c.silent && !now.Before(c.seenAt.Add(e.policy.SilentAfter)) {
		c.silent, c.feedDirty = true, true
		e.note(c.id, "", "", "", fmt.Sprintf("silent: no roll-up for %s; nothing is taken from it for that",
			e.policy.SilentAfter))
	}
	for _, m := range c.sorted() {
		deadline := m.deadline(e.policy)
		if deadline.IsZero() || now.Before(deadline) {
			continue
		}
		switch m.State {
		case Requested:
			e.fail(now, c, m, fmt.Sprintf("the provider has not launched it within %s", e.policy.RegistrationDeadline))
		case Launched, Registered:
			e.fail(now, c, m, fmt.Sprintf("no Ready node within %s of its launch", e.policy.RegistrationDeadline))
		case Failed:
			if m.Released {
				e.gone(now, c, m, "failed long enough ago")
			} else {
				e.terminate(now, c, m, "failed long enough ago")
			}
		}
	}
}

// heldReason says why nothing may be reclaimed from a cluster, or "".
func (e *Engine) heldReason(now time.Time, c *cluster) string {
	collapsed, _ := c.demand.collapsed(now, e.policy.CollapseHold, e.policy.CollapseFraction)
	switch {
	case e.policy.DryRun:
		return "dry run"
	case e.policy.DisableReclaim:
		return "reclaim is disabled"
	case !c.reported:
		return "no roll-up since the autoscaler started"
	case now.Before(c.unservedUntil):
		return c.unserved
	}
	return collapsed
}

// stock is what the planner may launch: the provider's stock less what exists, and nothing where launches fail just
// now.
func (e *Engine) stock(now time.Time) []capacity.Offering {
	used := map[place]int32{}
	learned := e.learned()
	for _, c := range e.clusters {
		for _, m := range c.machines {
			if m.usesStock() {
				used[m.place()]++
			}
		}
	}
	out := make([]capacity.Offering, 0, len(e.offerings))
	for _, o := range e.offerings {
		offering := o.Offering
		offering.Allocatable = expected(o.Allocatable, learned[o.Name])
		offering.Domains = slices.Clone(o.Domains)
		for i := range offering.Domains {
			d := &offering.Domains[i]
			at := place{o.Name, d.Name}
			d.Available = max(d.Available-used[at], 0)
			if b := e.backoff[at]; b != nil && now.Before(b.until) {
				d.Available = 0
			}
		}
		out = append(out, offering)
	}
	return out
}

// learned is what the nodes of each offering really have: what the newest of each cluster reported, and of several
// clusters the most, so that one that reports too little does not make nodes dear for all.
func (e *Engine) learned() map[string]capacity.Resources {
	out := map[string]capacity.Resources{}
	for _, c := range e.clusters {
		newest := map[string]*machine{}
		for _, m := range c.machines {
			if m.State != Active || len(m.Learned) == 0 || m.RequestedAt.Before(e.promised[m.Offering].since) {
				continue
			}
			if n := newest[m.Offering]; n == nil || cmp.Or(m.RequestedAt.Compare(n.RequestedAt), cmp.Compare(m.ID, n.ID)) > 0 {
				newest[m.Offering] = m
			}
		}
		for name, m := range newest {
			if out[name] == nil {
				out[name] = capacity.Resources{}
			}
			for resource, amount := range m.Learned {
				out[name][resource] = max(out[name][resource], amount)
			}
		}
	}
	return out
}

// expected is what a new node of an offering will have: what a real one reported, unless that is so little that the
// node must have been unwell, as one is whose device plugin has not started. More than was promised is not counted on:
// no cluster's word may make the others' nodes larger than they are.
func expected(promised, learned capacity.Resources) capacity.Resources {
	if len(learned) == 0 {
		return promised
	}
	out := maps.Clone(promised)
	for name, amount := range promised {
		if real, found := learned[name]; found && real >= amount/2 && real < amount {
			out[name] = real
		}
	}
	return out
}

func (e *Engine) clusterInput(now time.Time, c *cluster) capacity.ClusterInput {
	in := capacity.ClusterInput{ID: c.id, Held: c.held != "", HeldReason: c.held}
	if c.rollUp != nil && !now.Before(c.unservedUntil) {
		in.Needs, in.Daemons = c.rollUp.Needs, c.rollUp.Daemons
	}
	for _, m := range c.sorted() {
		if planned, ok := m.planned(now, e.policy.SettleTime); ok {
			in.Machines = append(in.Machines, planned)
		}
	}
	return in
}

// judge keeps the verdicts, and adds to a shortfall what the planner cannot know: that launches fail.
func (e *Engine) judge(now time.Time, plan capacity.Plan) {
	verdicts := map[string][]capacity.Verdict{}
	for _, v := range plan.Verdicts {
		if v.Short > 0 {
			if failure := e.failure(now, v.Nearest); failure != "" {
				v.Reason = strings.TrimPrefix(v.Reason+"; "+failure, "; ")
			}
		}
		if e.policy.DryRun {
			v.Reason = strings.TrimSuffix("dry run: "+v.Reason, ": ")
		}
		verdicts[v.Cluster] = append(verdicts[v.Cluster], v)
	}
	for id, c := range e.clusters {
		if c.rollUp != nil && now.Before(c.unservedUntil) {
			for _, need := range c.rollUp.Needs {
				verdicts[id] = append(verdicts[id], capacity.Verdict{Cluster: id, NeedID: need.ID, State: capacity.VerdictShort,
					Short: need.Count, Reason: c.unserved})
			}
		}
		if !slices.Equal(c.verdicts, verdicts[id]) {
			c.verdicts, c.feedDirty = verdicts[id], true
		}
	}
}

// failure describes the launches that fail just now, those of the named offering first.
func (e *Engine) failure(now time.Time, offering string) string {
	var first, any string
	for _, o := range e.offerings {
		for _, d := range o.Domains {
			b := e.backoff[place{o.Name, d.Name}]
			if b == nil || !now.Before(b.until) {
				continue
			}
			text := fmt.Sprintf("launching %s in %s failed: %s; tried again after %s", o.Name, d.Name, b.message,
				b.until.UTC().Format(time.TimeOnly))
			if any == "" {
				any = text
			}
			if first == "" && o.Name == offering {
				first = text
			}
		}
	}
	if first != "" {
		return first
	}
	return any
}

// allot keeps what the planner put where.
func (e *Engine) allot(now time.Time, plan capacity.Plan) {
	for id, allotment := range plan.Allotments {
		c := e.owner[id]
		if c == nil {
			continue
		}
		if m := c.machines[id]; !maps.Equal(m.Allotment, allotment) {
			for need, pods := range allotment {
				if pods > m.Allotment[need] {
					m.grownAt = now
				}
			}
			m.Allotment = maps.Clone(allotment)
			// The cluster is not told of allotments: its feed stays as it is.
			c.recordDirty = true
		}
	}
}

// launch records new machines. The provider is asked for them once they are stored.
func (e *Engine) launch(now time.Time, plan capacity.Plan, offerings []capacity.Offering) {
	byName := map[string]*capacity.Offering{}
	for i := range offerings {
		byName[offerings[i].Name] = &offerings[i]
	}
	for _, l := range plan.Launches {
		c, o := e.clusters[l.Cluster], byName[l.Offering]
		if c == nil || o == nil {
			continue
		}
		m := &machine{
			Request: provider.Request{
				Ref:      provider.Ref{ID: machineID(l.Offering, e.newID()), Cluster: l.Cluster},
				Offering: l.Offering, Domain: l.Domain,
				Labels: maps.Clone(o.Labels), Allocatable: o.Allocatable, Taints: cloneTaints(o.Taints), RequestedAt: now,
			},
			Cost: o.Cost, State: Requested, Since: now, Allotment: maps.Clone(l.Allotment),
		}
		if m.Labels == nil {
			m.Labels = map[string]string{}
		}
		for _, d := range o.Domains {
			if d.Name == l.Domain {
				maps.Copy(m.Labels, d.Labels)
			}
		}
		e.launching(now, c, l)
		e.adopt(c, m)
		e.call(m)
		e.note(c.id, m.ID, "", Requested, "for "+describe(l))
		e.changed(c)
	}
}

// machineIDRoom leaves a machine's id within a DNS label.
const machineIDRoom = 50

func machineID(offering, random string) string {
	if len(offering) > machineIDRoom {
		offering = strings.TrimRight(offering[:machineIDRoom], "-")
	}
	return offering + "-" + random
}

func describe(l capacity.Launch) string {
	var parts []string
	for _, id := range slices.Sorted(maps.Keys(l.Allotment)) {
		parts = append(parts, fmt.Sprintf("%d pods of %s", l.Allotment[id], id))
	}
	return strings.Join(parts, ", ") + " in " + l.Domain
}

// cancel drops machines that nothing needs any more and that the provider has not launched. What is launched already
// comes and is reclaimed like any other surplus: a Node may be taken into use at any moment.
func (e *Engine) cancel(now time.Time, plan capacity.Plan) {
	for _, id := range plan.Cancel {
		if c := e.owner[id]; c != nil && c.held == "" && c.machines[id].State == Requested {
			e.terminate(now, c, c.machines[id], "nothing needs it any more")
		}
	}
}
