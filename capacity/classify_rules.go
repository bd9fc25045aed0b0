package capacity

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Names of the scheduler's plugins. They are written out because the core does not link the scheduler.
const (
	pluginCapacityScheduling   = "CapacityScheduling"
	pluginCoscheduling         = "Coscheduling"
	pluginDynamicResources     = "DynamicResources"
	pluginGangScheduling       = "GangScheduling"
	pluginInterPodAffinity     = "InterPodAffinity"
	pluginNodeAffinity         = "NodeAffinity"
	pluginNodeDeclaredFeatures = "NodeDeclaredFeatures"
	pluginNodeName             = "NodeName"
	pluginNodePorts            = "NodePorts"
	pluginNodeResourcesFit     = "NodeResourcesFit"
	pluginNodeUnschedulable    = "NodeUnschedulable"
	pluginNodeVolumeLimits     = "NodeVolumeLimits"
	pluginPodTopologySpread    = "PodTopologySpread"
	pluginSchedulingGates      = "SchedulingGates"
	pluginTaintToleration      = "TaintToleration"
	pluginVolumeBinding        = "VolumeBinding"
	pluginVolumeRestrictions   = "VolumeRestrictions"
	pluginVolumeZone           = "VolumeZone"
)

const (
	reasonMissingLabel = "missing required label"
	// aboutNodes begins every reason that a filter of the scheduler gives for one node. One that does not begin so
	// was given by a PreFilter, before any node was looked at, and is about the pod.
	aboutNodes = "node(s)"
)

// effect is what a new node does about a rejection.
type effect int

const (
	// helps: the rejection is about what nodes have at the moment; a new one may do.
	helps effect = iota
	// unchanged: the next node of the same kind would be rejected in the same way. Another rejection may still help.
	unchanged
	// waits: the pod is held for a reason that is about to pass.
	waits
	// never: as long as this holds, no node will do, whatever the other rejections say.
	never
)

// rule says what a rejection means whose reason contains a text; an empty text matches every reason.
type rule struct {
	contains string
	effect   effect
	reason   string
	advice   string
}

// rules has the plugins of which something is known, the most particular text first. A plugin that is not listed
// rejects a node for what the node is or has, as far as anyone can tell: then a new node helps.
//
// That TaintToleration, NodeAffinity, volumes and missing topology labels help only where a template matches is not
// said here: a new node has to pass every filter, so the templates are held against the whole profile.
var rules = map[string][]rule{
	// A PreFilterResult of the scheduler's own comes from affinity to node names and volumes on nodes, and is found in the
	// pod and its volumes. Another plugin's may or may not let new nodes in. What an extender says has no plugin either.
	// VNAffinity names the nodes of one of several active schedulers, and will name new ones as they come.
	"": {
		{contains: "didn't satisfy plugin VNAffinity", effect: helps},
		{contains: "didn't satisfy plugin(s) [VNAffinity]", effect: helps},
		{contains: "didn't satisfy plugin", effect: unchanged, reason: ReasonNodesExcluded,
			advice: "a scheduler plugin admits named nodes only, and new nodes are none of them"},
		{contains: "filtered out by the prefilter result", effect: unchanged, reason: ReasonNodesExcluded,
			advice: "a scheduler plugin admits named nodes only, and new nodes are none of them"},
		{effect: helps},
	},
	pluginNodeResourcesFit: {
		{contains: "SidecarContainers", effect: never, reason: ReasonPodInvalid,
			advice: "the scheduler does not support sidecar containers"},
		{effect: helps},
	},
	pluginNodePorts:         {{effect: helps}},
	pluginNodeUnschedulable: {{effect: helps}},
	pluginTaintToleration:   {{effect: helps}},
	pluginPodTopologySpread: {{effect: helps}},
	pluginNodeVolumeLimits: {
		{contains: "not found", effect: never, reason: ReasonVolumeClaimMissing, advice: "create what is missing"},
		{effect: helps},
	},
	pluginNodeName: {{effect: never, reason: ReasonNodeNameSet, advice: "the pod names its node"}},
	pluginNodeAffinity: {
		{contains: "terms conflict", effect: never, reason: ReasonTiedToNode,
			advice: "the pod's node affinity names different nodes at once"},
		{effect: helps},
	},
	pluginInterPodAffinity: {
		{contains: "parsing pod", effect: never, reason: ReasonPodInvalid, advice: "correct the pod's affinity"},
		{effect: helps},
	},
	pluginVolumeBinding: {
		{contains: "non-existent p", effect: never, reason: ReasonVolumeMissing,
			advice: "restore the PersistentVolume or make a new claim"},
		{contains: "unbound immediate", effect: never, reason: ReasonVolumeClaimUnbound,
			advice: "the claim's StorageClass does not wait for a node; see the claim's events"},
		{contains: "waiting for ephemeral volume controller", effect: waits, reason: ReasonClaimPending},
		{contains: "being deleted", effect: never, reason: ReasonVolumeClaimTerminating,
			advice: "wait, or use another claim"},
		{contains: aboutNodes, effect: helps},
		{effect: never, reason: ReasonVolumeClaimMissing, advice: "create the claim or correct the pod"},
	},
	pluginVolumeZone: {
		{contains: aboutNodes, effect: helps},
		{effect: never, reason: ReasonVolumeClaimMissing, advice: "create the claim or correct the pod"},
	},
	pluginVolumeRestrictions: {
		{contains: "ReadWriteOncePod", effect: never, reason: ReasonVolumeInUse,
			advice: "another pod holds the claim; only its end helps"},
		{contains: aboutNodes, effect: helps},
		{effect: never, reason: ReasonVolumeClaimMissing, advice: "create the claim or correct the pod"},
	},
	pluginDynamicResources: {
		{contains: "cannot allocate all claims", effect: helps},
		{contains: "cannot schedule extended resource claim", effect: helps},
		{contains: "cannot fit resource", effect: helps},
		{contains: "Insufficient ", effect: helps},
		{contains: "invalid resource pools", effect: helps}, // of this node, whose driver is publishing them
		{contains: "asked by caller to stop", effect: helps},
		// The claim has its devices, and they are out of this node's reach: so they are of a new node's.
		{contains: "not available on the node", effect: unchanged, reason: ReasonResourceClaimInUse,
			advice: "the claim's devices are on other nodes"},
		{contains: "in use", effect: never, reason: ReasonResourceClaimInUse,
			advice: "only the end of the pods that hold it helps"},
		{contains: "used by another pod", effect: never, reason: ReasonResourceClaimInUse,
			advice: "only the end of the pods that hold it helps"},
		{contains: "shared by multiple pods", effect: never, reason: ReasonResourceClaimInUse,
			advice: "give each pod a claim of its own"},
		{contains: "pod level request", effect: never, reason: ReasonPodInvalid,
			advice: "raise the pod's own requests, or leave them out"},
		{contains: "not referenced by any container", effect: never, reason: ReasonPodInvalid,
			advice: "name the claim in a container that uses it"},
		{contains: "being allocated", effect: waits, reason: ReasonClaimPending},
		{contains: "unreserved", effect: waits, reason: ReasonClaimPending},
		{effect: never, reason: ReasonResourceClaimMissing, advice: "create or correct the ResourceClaim or its DeviceClass"},
	},
	// Nodes of one kind declare the same features, but another rejection may come from a node that has them.
	pluginNodeDeclaredFeatures: {{effect: unchanged, reason: ReasonNodeFeaturesMissing,
		advice: "no node supports what the pod needs; upgrade the nodes or change the pod"}},
	pluginSchedulingGates: {{effect: waits, reason: ReasonGated}},
	pluginGangScheduling:  {{effect: waits, reason: ReasonGroupWaiting}},
	pluginCoscheduling: {
		{contains: "enough sibling pods", effect: waits, reason: ReasonGroupWaiting},
		{contains: "gated pods", effect: waits, reason: ReasonGroupWaiting},
		// A group that failed lately failed because a member found no room. Its other members need room as well, and
		// the scheduler will not look at them before the back-off ends.
		{effect: helps},
	},
	pluginCapacityScheduling: {{contains: "ElasticQuota", effect: never, reason: ReasonOverQuota,
		advice: "raise the quota or wait for other pods to end"}},
}

func ruleOf(r Rejection) rule {
	for _, rule := range rules[r.Plugin] {
		if strings.Contains(r.Reason, rule.contains) {
			return rule
		}
	}
	return rule{effect: helps}
}

// rejectionsForbid finds what no node changes; failing that, what will pass by itself.
func rejectionsForbid(rejections []Rejection) *Decision {
	sorted := sortedRejections(rejections)
	for _, r := range sorted {
		if rule := ruleOf(r); rule.effect == never {
			return no(rule.reason, "%s: %s", describe(r), rule.advice)
		}
	}
	for _, r := range sorted {
		if rule := ruleOf(r); rule.effect == waits {
			return silent(rule.reason, "%s", describe(r))
		}
	}
	return nil
}

// nothingHelps is the last check: there are rejections, and a new node would change none of them.
func nothingHelps(rejections []Rejection) *Decision {
	if len(rejections) == 0 {
		return nil
	}
	sorted := sortedRejections(rejections)
	for _, r := range sorted {
		if ruleOf(r).effect == helps {
			return nil
		}
	}
	rule := ruleOf(sorted[0])
	return no(rule.reason, "%s: %s", describe(sorted[0]), rule.advice)
}

// sortedRejections puts the most frequent first, so that the same failure gives the same words.
func sortedRejections(rejections []Rejection) []Rejection {
	sorted := slices.Clone(rejections)
	slices.SortFunc(sorted, func(a, b Rejection) int {
		return cmp.Or(cmp.Compare(b.Nodes, a.Nodes), cmp.Compare(a.Plugin, b.Plugin), cmp.Compare(a.Reason, b.Reason))
	})
	return sorted
}

func describe(r Rejection) string {
	reason := r.Reason
	if reason == "" {
		reason = "nodes were left out"
	}
	if r.Plugin == "" {
		return reason
	}
	return fmt.Sprintf("%s says: %s", r.Plugin, reason)
}

func helpMessage(rejections []Rejection) string {
	if len(rejections) == 0 {
		return "a new node could run the pod"
	}
	var causes []string
	for _, r := range sortedRejections(rejections) {
		if ruleOf(r).effect != helps {
			continue
		}
		causes = append(causes, fmt.Sprintf("%s (%d nodes)", r.Reason, r.Nodes))
		if len(causes) == 3 {
			break
		}
	}
	return "a new node could run the pod: " + strings.Join(causes, ", ")
}
