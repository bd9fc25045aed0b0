package capacityrequest

import (
	"strings"

	fwk "k8s.io/kube-scheduler/framework"

	"github.com/drover-sh/drover/capacity"
)

// explicitStatuses is what the scheduler's own NodeToStatus offers beyond its interface: a walk that allocates nothing.
type explicitStatuses interface {
	Len() int
	AbsentNodesStatus() *fwk.Status
	ForEachExplicitNode(fn func(nodeName string, status *fwk.Status))
}

// cause is one reason for which one plugin turned nodes down.
type cause struct {
	plugin, reason string
	code           fwk.Code
}

// causes counts the nodes of each cause. Thousands of nodes have a handful of causes, and neighbours mostly share one.
type causes struct {
	nodes map[cause]int32
	last  cause
	run   int32
}

func (c *causes) add(s *fwk.Status, nodes int32) {
	// A plugin gives several reasons for one node when several resources are short. The first tells as much as all of
	// them about whether a new node could help.
	next := cause{plugin: s.Plugin(), code: s.Code()}
	if reasons := s.Reasons(); len(reasons) > 0 {
		next.reason = reasons[0]
	}
	if next != c.last {
		c.flush()
		c.last = next
	}
	c.run += nodes
}

func (c *causes) flush() {
	if c.run > 0 {
		c.nodes[c.last] += c.run
	}
	c.run = 0
}

// rejectionsOf sums the statuses up in one walk. Nodes that have no status of their own share one: of the PreFilter plugin
// that turned the pod down as a whole, or, without a plugin, of those that a PreFilterResult left out.
func rejectionsOf(statuses fwk.NodeToStatusReader, nodes fwk.NodeInfoLister) []capacity.Rejection {
	c := causes{nodes: map[cause]int32{}}
	all := int32(0)
	if nodes != nil {
		if infos, err := nodes.List(); err == nil {
			all = int32(len(infos))
		}
	}
	switch explicit, ok := statuses.(explicitStatuses); {
	case ok:
		explicit.ForEachExplicitNode(func(_ string, s *fwk.Status) { c.add(s, 1) })
		absent := max(all-int32(explicit.Len()), 0)
		if explicit.Len() == 0 {
			absent = max(absent, 1) // the pod was turned down, even if no node was there to be counted
		}
		if s := explicit.AbsentNodesStatus(); s != nil && absent > 0 {
			c.add(s, absent)
		}
	case nodes != nil:
		for _, code := range []fwk.Code{fwk.Unschedulable, fwk.UnschedulableAndUnresolvable} {
			infos, err := statuses.NodesForStatusCode(nodes, code)
			if err != nil {
				continue // the pod is then judged without
			}
			for _, info := range infos {
				c.add(statuses.Get(info.Node().Name), 1)
			}
		}
	}
	c.flush()
	out := make([]capacity.Rejection, 0, len(c.nodes))
	for cause, n := range c.nodes {
		out = append(out, capacity.Rejection{
			Plugin: cause.plugin, Reason: cause.reason, Nodes: n,
			Unresolvable: cause.code == fwk.UnschedulableAndUnresolvable,
		})
	}
	return out
}

// backsOff reports whether the failure only says that the pod's gang failed a moment ago. What that failure was about has
// been dealt with then, and is told again when the gang's back-off ends.
func backsOff(rejections []capacity.Rejection) bool {
	return len(rejections) == 1 && rejections[0].Plugin == "Coscheduling" &&
		strings.Contains(rejections[0].Reason, "failed recently")
}
