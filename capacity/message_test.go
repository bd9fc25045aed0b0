package capacity

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestRejectionsOfMessage(t *testing.T) {
	for _, c := range []struct {
		name, message string
		want          []Rejection
		decided       string
	}{
		{"several reasons, and what preemption says",
			"0/5 nodes are available: 2 Insufficient cpu, 3 node(s) had untolerated taint(s). preemption: 0/5 nodes are available: " +
				"2 No preemption victims found for incoming pod, 3 Preemption is not helpful for scheduling.",
			[]Rejection{{Reason: "Insufficient cpu", Nodes: 2}, {Reason: "node(s) had untolerated taint(s)", Nodes: 3}},
			ReasonNewNodeHelps},
		{"a gang that is not complete, with commas",
			"0/3 nodes are available: pre-filter pod p cannot find enough sibling pods, current pods number: 1, minMember of group: 4.",
			[]Rejection{{Plugin: pluginCoscheduling, Nodes: 3, Reason: "pre-filter pod p cannot find enough sibling pods, " +
				"current pods number: 1, minMember of group: 4"}},
			ReasonGroupWaiting},
		{"a gang that backs off", "0/3 nodes are available: podGroup shop/g failed recently. ",
			[]Rejection{{Nodes: 3, Reason: "podGroup shop/g failed recently"}}, ReasonNewNodeHelps},
		{"a device that is in use", "0/3 nodes are available: resourceclaim in use.",
			[]Rejection{{Plugin: pluginDynamicResources, Nodes: 3, Reason: "resourceclaim in use"}}, ReasonResourceClaimInUse},
		{"a feature that no node has", "0/1 nodes are available: 1 node(s) didn't match Pod's required features.",
			[]Rejection{{Plugin: pluginNodeDeclaredFeatures, Nodes: 1, Reason: "node(s) didn't match Pod's required features"}},
			ReasonNodeFeaturesMissing},
		{"a feature that one of two nodes has",
			"0/2 nodes are available: 1 Insufficient cpu, 1 node(s) didn't match Pod's required features.",
			[]Rejection{{Reason: "Insufficient cpu", Nodes: 1}, {Plugin: pluginNodeDeclaredFeatures, Nodes: 1,
				Reason: "node(s) didn't match Pod's required features"}}, ReasonNewNodeHelps},
		{"a reason with a comma", "0/2 nodes are available: 1 this, and that, 1 Insufficient cpu.",
			[]Rejection{{Reason: "this, and that", Nodes: 1}, {Reason: "Insufficient cpu", Nodes: 1}}, ReasonNewNodeHelps},
		{"a plugin that admits named nodes only", "0/2 nodes are available: 2 node(s) didn't satisfy plugin(s) [Licenses].",
			[]Rejection{{Reason: "node(s) didn't satisfy plugin(s) [Licenses]", Nodes: 2}}, ReasonNodesExcluded},
		{"more nodes than anyone has", "0/99999999999 nodes are available: 99999999999 Insufficient cpu.",
			[]Rejection{{Reason: "Insufficient cpu", Nodes: 1<<31 - 1}}, ReasonNewNodeHelps},
		{"no node at all", "no nodes available to schedule pods", nil, ReasonNewNodeHelps},
		{"nothing after the colon", "0/2 nodes are available: ", nil, ReasonNewNodeHelps},
		{"another scheduler's words", "queue full: device class unknown", nil, ReasonNewNodeHelps},
		{"no message", "", nil, ReasonNewNodeHelps},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := RejectionsOfMessage(c.message)
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("rejections (-want +got):\n%s", diff)
			}
			if d := Classify(waitingPod().Obj(), Facts{Rejections: got}); d.Reason != c.decided {
				t.Errorf("decided %s, want %s", d.Reason, c.decided)
			}
		})
	}
}
