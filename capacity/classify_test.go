package capacity

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"pgregory.net/rapid"

	"github.com/drover-sh/drover/internal/builders"
)

// What the scheduler says, in its own words (release 1.36).
var (
	insufficientCPU = Rejection{Plugin: pluginNodeResourcesFit, Reason: "Insufficient cpu", Nodes: 3}
	untolerated     = Rejection{Plugin: pluginTaintToleration, Reason: "node(s) had untolerated taint(s)",
		Unresolvable: true, Nodes: 2}
	wrongAffinity = Rejection{Plugin: pluginNodeAffinity, Reason: "node(s) didn't match Pod's node affinity/selector",
		Unresolvable: true, Nodes: 2}
	wrongZone = Rejection{Plugin: pluginVolumeZone, Reason: "node(s) had no available volume zone",
		Unresolvable: true, Nodes: 1}
	wrongVolume = Rejection{Plugin: pluginVolumeBinding,
		Reason: "node(s) didn't match PersistentVolume's node affinity", Unresolvable: true, Nodes: 1}
	skewed = Rejection{Plugin: pluginPodTopologySpread,
		Reason: "node(s) didn't match pod topology spread constraints", Nodes: 1}
	noTopologyLabel = Rejection{Plugin: pluginPodTopologySpread,
		Reason: "node(s) didn't match pod topology spread constraints (missing required label)", Unresolvable: true, Nodes: 1}
	leftOut = Rejection{Reason: "node is filtered out by the prefilter result", Unresolvable: true, Nodes: 5}
)

func waitingPod() *builders.PodBuilder {
	return builders.Pod("shop", "p").Label("app", "web").Requests("cpu", "4", "memory", "8Gi")
}

// offerings are a general kind in three zones and a tainted one with GPUs.
func offerings() []Template {
	return []Template{
		TemplateOf(builders.AvailableCapacity("general", 10).Resources("cpu", "16", "memory", "64Gi").
			Requires("node.kubernetes.io/instance-type", corev1.NodeSelectorOpIn, "m6i.4xlarge").
			Requires(zone, corev1.NodeSelectorOpIn, "a", "b", "c").Obj()),
		TemplateOf(builders.AvailableCapacity("gpu", 0).Resources("cpu", "96", "memory", "768Gi", "nvidia.com/gpu", "8").
			Requires("node.kubernetes.io/instance-type", corev1.NodeSelectorOpIn, "p5.48xlarge").
			Label("accelerator", "h100").Taint("nvidia.com/gpu", "", corev1.TaintEffectNoSchedule).Obj()),
	}
}

func TestClassify(t *testing.T) {
	deleted := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	in := func(key string, values ...string) []Requirement {
		return []Requirement{{Key: key, Operator: OperatorIn, Values: values}}
	}
	said := func(rejections ...Rejection) Facts { return Facts{Rejections: rejections} }
	by := func(plugin, reason string) Facts {
		return said(Rejection{Plugin: plugin, Reason: reason, Nodes: 1})
	}
	withOfferings := func(f Facts) Facts {
		f.Templates = offerings()
		return f
	}
	byName := func(op corev1.NodeSelectorOperator) corev1.NodeSelectorTerm {
		return corev1.NodeSelectorTerm{
			MatchFields: []corev1.NodeSelectorRequirement{builders.NodeExpr("metadata.name", op, "node-1")},
		}
	}
	for _, group := range []struct {
		rule  string
		cases []classifyCase
	}{
		{"a new node helps", []classifyCase{
			{"resources", waitingPod(), said(insufficientCPU), ReasonNewNodeHelps, "Insufficient cpu (3 nodes)"},
			{"the most frequent is named first", waitingPod(), said(skewed, untolerated), ReasonNewNodeHelps,
				"a new node could run the pod: node(s) had untolerated taint(s) (2 nodes)"},
			{"number of pods", waitingPod(), by(pluginNodeResourcesFit, "Too many pods"), ReasonNewNodeHelps, "Too many pods"},
			{"host port", waitingPod(), by(pluginNodePorts, "node(s) didn't have free ports for the requested pod ports"),
				ReasonNewNodeHelps, ""},
			{"volume limit", waitingPod(), by(pluginNodeVolumeLimits, "node(s) exceed max volume count"), ReasonNewNodeHelps,
				""},
			{"CSI driver", waitingPod(), by(pluginNodeVolumeLimits, "ebs CSI driver is not installed on the node"),
				ReasonNewNodeHelps, ""},
			{"cordoned node", waitingPod(), by(pluginNodeUnschedulable, "node(s) were unschedulable"), ReasonNewNodeHelps, ""},
			{"topology skew", waitingPod(), said(skewed), ReasonNewNodeHelps, ""},
			{"own anti-affinity", waitingPod(), by(pluginInterPodAffinity, "node(s) didn't match pod anti-affinity rules"),
				ReasonNewNodeHelps, ""},
			{"others' anti-affinity", waitingPod(), by(pluginInterPodAffinity,
				"node(s) didn't satisfy existing pods anti-affinity rules"), ReasonNewNodeHelps, ""},
			{"devices", waitingPod(), by(pluginDynamicResources, "cannot allocate all claims"), ReasonNewNodeHelps, ""},
			{"disk in use on the node", waitingPod(), by(pluginVolumeRestrictions, "node(s) had no available disk"),
				ReasonNewNodeHelps, ""},
			{"a plugin that nobody here knows", waitingPod(), by("NodeResourceTopologyMatch", "cannot align pod"),
				ReasonNewNodeHelps, ""},
			{"an extender", waitingPod(), by("", "no GPU slice is free"), ReasonNewNodeHelps, "no GPU slice is free (1 nodes)"},
			{"a gang that failed lately", waitingPod(), by(pluginCoscheduling, "podGroup shop/g failed recently"),
				ReasonNewNodeHelps, ""},
		}},
		{"a new node helps if a template matches", []classifyCase{
			{"taint, templates unknown", waitingPod(), said(untolerated), ReasonNewNodeHelps, ""},
			{"taint, untainted template", waitingPod(), withOfferings(said(untolerated)), ReasonNewNodeHelps, ""},
			{"taint, tainted template only", waitingPod().NodeSelector("accelerator", "h100"), withOfferings(said(untolerated)),
				ReasonNoOfferingTolerated, "gpu carries nvidia.com/gpu:NoSchedule"},
			{"taint, tolerated", waitingPod().NodeSelector("accelerator", "h100").Tolerates("nvidia.com/gpu", ""),
				withOfferings(said(untolerated)), ReasonNewNodeHelps, ""},
			{"affinity, templates unknown", waitingPod().NodeSelector("accelerator", "h200"), said(wrongAffinity),
				ReasonNewNodeHelps, ""},
			{"affinity, template matches", waitingPod().NodeSelector(zone, "b"), withOfferings(said(wrongAffinity)),
				ReasonNewNodeHelps, ""},
			{"the system, of which no template speaks", waitingPod().NodeSelector(corev1.LabelOSStable, "linux").
				NodeSelector(corev1.LabelArchStable, "arm64"), withOfferings(said(wrongAffinity)), ReasonNewNodeHelps, ""},
			{"affinity, second alternative matches", waitingPod().
				NodeAffinity(builders.NodeExpr("accelerator", corev1.NodeSelectorOpIn, "h200")).
				NodeAffinity(builders.NodeExpr(zone, corev1.NodeSelectorOpNotIn, "a", "b")),
				withOfferings(said(wrongAffinity)), ReasonNewNodeHelps, ""},
			{"affinity, no template matches", waitingPod().NodeSelector(zone, "d"), withOfferings(said(wrongAffinity)),
				ReasonNoOfferingMatches, "the nearest, general, fails topology.kubernetes.io/zone In [d]"},
			{"no template at all", waitingPod(), Facts{Rejections: []Rejection{wrongAffinity}, Templates: []Template{}},
				ReasonNoOffering, ""},
			{"stock-out is no reason", waitingPod().Requests("nvidia.com/gpu", "8").Tolerates("nvidia.com/gpu", ""),
				withOfferings(said(insufficientCPU)), ReasonNewNodeHelps, ""},
			{"topology label, template has it", waitingPod().Spread(zone, 1, corev1.DoNotSchedule),
				withOfferings(said(noTopologyLabel)), ReasonNewNodeHelps, ""},
			{"topology label, no template has it", waitingPod().Spread(rack, 1, corev1.DoNotSchedule),
				withOfferings(said(noTopologyLabel)), ReasonNoOfferingHasTopology, rack},
			{"topology label, hostname", waitingPod().Spread(corev1.LabelHostname, 1, corev1.DoNotSchedule),
				withOfferings(said(noTopologyLabel)), ReasonNewNodeHelps, ""},
			{"volume's zone, template has it", waitingPod(), withOfferings(Facts{
				Rejections: []Rejection{wrongZone}, Volumes: []Volume{{Claim: "data", State: VolumeBound, Requirements: in(zone,
					"b")}},
			}), ReasonNewNodeHelps, ""},
			{"volume's zone, no template has it", waitingPod(), withOfferings(Facts{
				Rejections: []Rejection{wrongVolume}, Volumes: []Volume{{Claim: "data", State: VolumeBound, Requirements: in(zone,
					"z")}},
			}), ReasonNoOfferingMatches, "topology.kubernetes.io/zone In [z]"},
			{"larger than any template", waitingPod().Requests("cpu", "128"), withOfferings(said(insufficientCPU)),
				ReasonNoOfferingLargeEnough, "of the nearest, general, it asks 128 of cpu where it has 16"},
			{"a resource that no template has", waitingPod().Requests("amd.com/gpu", "1"), withOfferings(said(insufficientCPU)),
				ReasonNoOfferingLargeEnough, "1 of amd.com/gpu where it has none"},
		}},
		{"no node helps", []classifyCase{
			{"spec.nodeName", waitingPod().Node("node-1").Phase(corev1.PodPending), said(), ReasonNodeNameSet, `"node-1"`},
			{"NodeName", waitingPod(), by(pluginNodeName, "node(s) didn't match the requested node name"), ReasonNodeNameSet,
				""},
			{"metadata.name", waitingPod().NodeAffinityTerm(byName(corev1.NodeSelectorOpIn)), said(leftOut, insufficientCPU),
				ReasonTiedToNode, "node-1"},
			{"metadata.name in one alternative only", waitingPod().NodeAffinityTerm(byName(corev1.NodeSelectorOpIn)).
				NodeAffinity(builders.NodeExpr(zone, corev1.NodeSelectorOpExists)), said(insufficientCPU), ReasonNewNodeHelps, ""},
			{"metadata.name is not one", waitingPod().NodeAffinityTerm(byName(corev1.NodeSelectorOpNotIn)),
				said(insufficientCPU), ReasonNewNodeHelps, ""},
			{"names that conflict", waitingPod(), by(pluginNodeAffinity, "pod affinity terms conflict"), ReasonTiedToNode, ""},
			{"a term that selects nothing", waitingPod().NodeAffinityTerm(corev1.NodeSelectorTerm{}), said(wrongAffinity),
				ReasonTiedToNode, "no term"},
			{"hostname label", waitingPod().NodeSelector(corev1.LabelHostname, "node-1"), said(wrongAffinity), ReasonTiedToNode,
				"node-1"},
			{"left out by a PreFilterResult, and no more", waitingPod(), said(leftOut), ReasonNodesExcluded, "filtered out"},
			{"left out by the scheduler that has no node", waitingPod(), by("", "node(s) didn't satisfy plugin VNAffinity"),
				ReasonNewNodeHelps, ""},
			{"left out by the scheduler whose nodes are going", waitingPod(), by("", "node(s) didn't satisfy plugin(s) [VNAffinity]"),
				ReasonNewNodeHelps, ""},
			{"left out by it and another plugin", waitingPod(),
				by("", "node(s) didn't satisfy plugin(s) [Licenses VNAffinity] simultaneously"), ReasonNodesExcluded, "Licenses"},
			{"left out by a PreFilterResult, others full", waitingPod(), said(leftOut, insufficientCPU), ReasonNewNodeHelps,
				"Insufficient cpu"},
			{"unbound immediate claim, by its state", waitingPod().Claim("data"),
				Facts{Volumes: []Volume{{Claim: "data", State: VolumeUnbound}}}, ReasonVolumeClaimUnbound, `"data"`},
			{"unbound immediate claim, by the scheduler", waitingPod(), by(pluginVolumeBinding,
				"pod has unbound immediate PersistentVolumeClaims"), ReasonVolumeClaimUnbound, ""},
			{"missing claim, by its state", waitingPod().Claim("data"),
				Facts{Volumes: []Volume{{Claim: "data", State: VolumeNoClaim}}}, ReasonVolumeClaimMissing, `"data" does not exist`},
			{"missing claim, by the scheduler", waitingPod(), by(pluginVolumeBinding, `persistentvolumeclaim "data" not found`),
				ReasonVolumeClaimMissing, "data"},
			{"missing claim, by the volume limits", waitingPod(), by(pluginNodeVolumeLimits,
				`persistentvolumeclaim "data" not found`), ReasonVolumeClaimMissing, "data"},
			{"missing claim, by the volume zone", waitingPod(), by(pluginVolumeZone, `persistentvolumeclaim "data" not found`),
				ReasonVolumeClaimMissing, "data"},
			{"missing claim, by the restrictions", waitingPod(), by(pluginVolumeRestrictions,
				`persistentvolumeclaim "data" not found`), ReasonVolumeClaimMissing, "data"},
			{"missing volume, by its state", waitingPod(),
				Facts{Volumes: []Volume{{Claim: "data", State: VolumeLost}}}, ReasonVolumeMissing, `"data"`},
			{"missing volume, by the scheduler", waitingPod(), by(pluginVolumeBinding,
				"node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)"), ReasonVolumeMissing, ""},
			{"lost claim, by the scheduler", waitingPod(), by(pluginVolumeBinding,
				`persistentvolumeclaim "data" bound to non-existent persistentvolume "pv"`), ReasonVolumeMissing, ""},
			{"claim that goes, by its state", waitingPod(),
				Facts{Volumes: []Volume{{Claim: "data", State: VolumeTerminating}}}, ReasonVolumeClaimTerminating, ""},
			{"claim that goes, by the scheduler", waitingPod(), by(pluginVolumeBinding,
				`persistentvolumeclaim "data" is being deleted`), ReasonVolumeClaimTerminating, ""},
			{"volume on one node", waitingPod(), Facts{Rejections: []Rejection{wrongVolume, insufficientCPU}, Volumes: []Volume{
				{Claim: "data", State: VolumeBound, Requirements: in(corev1.LabelHostname, "node-1")},
			}}, ReasonTiedToNode, "a volume of the pod is on a node"},
			{"ReadWriteOncePod in use", waitingPod(), said(insufficientCPU, Rejection{Plugin: pluginVolumeRestrictions,
				Reason: "node(s) unavailable due to PersistentVolumeClaim with ReadWriteOncePod access mode already in-use " +
					"by another pod"}),
				ReasonVolumeInUse, ""},
			{"missing ResourceClaim, by its absence", waitingPod(), Facts{MissingClaims: []string{"ResourceClaim gpus"}},
				ReasonResourceClaimMissing, "gpus"},
			{"missing ResourceClaim, by the scheduler", waitingPod(), by(pluginDynamicResources,
				`resourceclaim "gpus" not found`), ReasonResourceClaimMissing, "gpus"},
			{"missing DeviceClass", waitingPod(), by(pluginDynamicResources, "request r: device class gpu does not exist"),
				ReasonResourceClaimMissing, "device class gpu"},
			{"ResourceClaim in use", waitingPod(), by(pluginDynamicResources, "resourceclaim in use"), ReasonResourceClaimInUse,
				""},
			{"ResourceClaim on other nodes", waitingPod(), by(pluginDynamicResources,
				"resourceclaim not available on the node"), ReasonResourceClaimInUse, ""},
			{"affinity to pods that do not exist", waitingPod().PodAffinity(zone, "app", "cache"),
				Facts{Rejections: []Rejection{insufficientCPU}, Affinity: []Affinity{{}}}, ReasonNoMatchingPods, zone},
			{"affinity to pods that exist", waitingPod().PodAffinity(zone, "app", "cache"),
				Facts{Rejections: []Rejection{insufficientCPU}, Affinity: []Affinity{{Matched: true}}}, ReasonNewNodeHelps, ""},
			{"affinity, not known", waitingPod().PodAffinity(zone, "app", "cache"), said(insufficientCPU), ReasonNewNodeHelps,
				""},
			{"affinity that the pod itself meets", waitingPod().PodAffinity(zone, "app", "web"),
				Facts{Rejections: []Rejection{insufficientCPU}, Affinity: []Affinity{{}}}, ReasonNewNodeHelps, ""},
			{"affinity that the pod meets only in part", waitingPod().PodAffinity(zone, "app", "web").PodAffinity(zone, "app",
				"cache"),
				Facts{Rejections: []Rejection{insufficientCPU}, Affinity: []Affinity{{Matched: true}, {}}}, ReasonNoMatchingPods,
				""},
			{"affinity to pods on one node", waitingPod().PodAffinity(corev1.LabelHostname, "app", "web"),
				Facts{Rejections: []Rejection{insufficientCPU}, Affinity: []Affinity{{Matched: true}}}, ReasonTiedToPods, ""},
			{"the first of a set on one node", waitingPod().PodAffinity(corev1.LabelHostname, "app", "web"),
				Facts{Rejections: []Rejection{insufficientCPU}, Affinity: []Affinity{{}}}, ReasonNewNodeHelps, ""},
			{"features that no node declares", waitingPod(), by(pluginNodeDeclaredFeatures,
				"node(s) didn't match Pod's required features"), ReasonNodeFeaturesMissing, ""},
			{"features that full nodes declare", waitingPod(), said(insufficientCPU,
				Rejection{Plugin: pluginNodeDeclaredFeatures, Reason: "node(s) didn't match Pod's required features", Nodes: 9}),
				ReasonNewNodeHelps, ""},
			{"sidecars not supported", waitingPod(), by(pluginNodeResourcesFit,
				"Pod has a restartable init container and the SidecarContainers feature is disabled"), ReasonPodInvalid, ""},
			{"affinity that does not parse", waitingPod(), by(pluginInterPodAffinity, "parsing pod: bad"), ReasonPodInvalid, ""},
			{"quota", waitingPod(), by(pluginCapacityScheduling,
				"Pod shop/p is rejected in PreFilter because ElasticQuota shop is more than Max"), ReasonOverQuota, ""},
		}},
		{"the pod does not wait for a node", []classifyCase{
			{"terminating", waitingPod().Terminating(deleted), said(insufficientCPU), ReasonTerminating, ""},
			{"ended", waitingPod().Phase(corev1.PodSucceeded), said(insufficientCPU), ReasonEnded, ""},
			{"being resized", waitingPod().Node("node-1").Condition(corev1.PodCondition{
				Type: corev1.PodResizePending, Status: corev1.ConditionTrue}), said(insufficientCPU), ReasonResizing, ""},
			{"gated", gated(), said(), ReasonGated, "kueue"},
			{"gang below its minimum", waitingPod(), by(pluginCoscheduling,
				"pre-filter pod p cannot find enough sibling pods, current pods number: 1, minMember of group: 3"),
				ReasonGroupWaiting, ""},
			{"gang with gated members", waitingPod(), by(pluginCoscheduling,
				"pre-filter pod p cannot proceed due to gated pods in the same PodGroup"), ReasonGroupWaiting, ""},
			{"in-tree gang below its minimum", waitingPod(), by(pluginGangScheduling,
				"waiting for minCount pods from a gang to appear in scheduling queue"), ReasonGroupWaiting, ""},
			{"ephemeral claim not made yet, by its state", waitingPod(),
				Facts{Volumes: []Volume{{Claim: "p-data", State: VolumeNoClaim, Ephemeral: true}}}, ReasonClaimPending, ""},
			{"ephemeral claim not made yet, by the scheduler", waitingPod(), by(pluginVolumeBinding,
				`waiting for ephemeral volume controller to create the persistentvolumeclaim "p-data"`), ReasonClaimPending, ""},
			{"device being allocated", waitingPod(), by(pluginDynamicResources,
				"resource claim shop/c is in the process of being allocated"), ReasonClaimPending, ""},
		}},
		{"without the scheduler's word", []classifyCase{
			{"nothing known", waitingPod(), Facts{}, ReasonNewNodeHelps, "a new node could run the pod"},
			{"a template fits", waitingPod(), withOfferings(Facts{}), ReasonNewNodeHelps, ""},
			{"no template has the labels", waitingPod().NodeSelector("accelerator", "h200"), withOfferings(Facts{}),
				ReasonNoOfferingMatches, "h200"},
			{"no template is large enough", waitingPod().Requests("memory", "2Ti"), withOfferings(Facts{}),
				ReasonNoOfferingLargeEnough, "2Ti of memory"},
			{"no template is tolerated", waitingPod().Requests("nvidia.com/gpu", "1").NodeSelector("accelerator", "h100"),
				withOfferings(Facts{}), ReasonNoOfferingTolerated, ""},
			{"no template exists", waitingPod(), Facts{Templates: []Template{}}, ReasonNoOffering, ""},
			{"delayed claim", waitingPod().Claim("data"), Facts{Volumes: []Volume{{Claim: "data", State: VolumeDelayed}}},
				ReasonNewNodeHelps, ""},
		}},
	} {
		t.Run(group.rule, func(t *testing.T) {
			for _, tc := range group.cases {
				t.Run(tc.name, func(t *testing.T) { tc.check(t, group.rule == "the pod does not wait for a node") })
			}
		})
	}
}

type classifyCase struct {
	name    string
	pod     *builders.PodBuilder
	facts   Facts
	reason  string
	message string // contained in the message
}

func (tc classifyCase) check(t *testing.T, silent bool) {
	d := Classify(tc.pod.Obj(), tc.facts)
	if d.Reason != tc.reason || !strings.Contains(d.Message, tc.message) {
		t.Errorf("reason %s, message %q; want %s, and a message with %q", d.Reason, d.Message, tc.reason, tc.message)
	}
	if d.Request != (d.Reason == ReasonNewNodeHelps) {
		t.Errorf("request %v with reason %s", d.Request, d.Reason)
	}
	if d.Silent != silent {
		t.Errorf("silent %v, want %v", d.Silent, silent)
	}
	if d.Message == "" {
		t.Error("no message: a person has to know what is in the way")
	}
}

func gated() *builders.PodBuilder {
	return waitingPod().Gate("kueue.x-k8s.io/admission")
}

func TestARequestCarriesTheDomainsOfThePodsCompanions(t *testing.T) {
	pod := waitingPod().PodAffinity(rack, "app", "cache").Obj()
	d := Classify(pod, Facts{
		Rejections: []Rejection{insufficientCPU},
		Affinity:   []Affinity{{Matched: true, Domains: []string{"r7", "r2"}}},
	})
	want := []Requirement{{Key: rack, Operator: OperatorIn, Values: []string{"r2", "r7"}}}
	if diff := cmp.Diff(want, d.ExtraRequirements); diff != "" {
		t.Errorf("extra requirements (-want +got):\n%s", diff)
	}
}

func TestTheProfileCarriesThePlacesOfThePodsVolumes(t *testing.T) {
	in := func(key string, values ...string) Requirement {
		return Requirement{Key: key, Operator: OperatorIn, Values: values}
	}
	at := func(sets ...[]Requirement) Volume { return Volume{State: VolumeBound, AnyOf: sets} }
	for _, c := range []struct {
		name    string
		pod     *builders.PodBuilder
		volumes []Volume
		want    [][]Requirement
	}{
		{"several that have to be met at once", waitingPod(), []Volume{
			{State: VolumeBound, Requirements: []Requirement{in(zone, "b", "a")}},
			{State: VolumeBound, Requirements: []Requirement{in(zone, "a")}},
		}, [][]Requirement{{in(zone, "a")}}},
		{"one that may be in either of two places", waitingPod(),
			[]Volume{at([]Requirement{in(zone, "a"), in(rack, "r1")}, []Requirement{in(zone, "b"), in(rack, "r2")})},
			[][]Requirement{{in(rack, "r1"), in(zone, "a")}, {in(rack, "r2"), in(zone, "b")}}},
		{"beside what the pod asks for", waitingPod().NodeSelector("disk", "ssd"),
			[]Volume{at([]Requirement{in(zone, "a")}, []Requirement{in(rack, "r2")})},
			[][]Requirement{{in("disk", "ssd"), in(rack, "r2")}, {in("disk", "ssd"), in(zone, "a")}}},
		{"places that contradict the pod are left out", waitingPod().NodeSelector(zone, "a"),
			[]Volume{at([]Requirement{in(zone, "a"), in(rack, "r1")}, []Requirement{in(zone, "b"), in(rack, "r2")})},
			[][]Requirement{{in(rack, "r1"), in(zone, "a")}}},
		{"unless nothing else is there", waitingPod().NodeSelector(zone, "c"),
			[]Volume{at([]Requirement{in(zone, "a")}, []Requirement{in(zone, "b")})},
			[][]Requirement{{in(zone, "a"), in(zone, "c")}, {in(zone, "b"), in(zone, "c")}}},
	} {
		p := ProfileOfPod(c.pod.Obj()).WithVolumes(c.volumes)
		if diff := cmp.Diff(c.want, append([][]Requirement{p.Requirements}, p.Alternatives...)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, diff)
		}
	}

	t.Run("and never more than a request can carry", func(t *testing.T) {
		var many [][]Requirement
		for i := range 100 {
			many = append(many, []Requirement{in(zone, string(rune('a'+i%26))), in(rack, strings.Repeat("r", i+1))})
		}
		if n := len(ProfileOfPod(waitingPod().Obj()).WithAnyOf(many...).RequestSpec().Alternatives); n != maxAlternatives {
			t.Errorf("got %d alternatives, want %d", n, maxAlternatives)
		}
	})
	t.Run("and is held against the templates", func(t *testing.T) {
		d := Classify(waitingPod().Obj(), Facts{Templates: offerings(), Volumes: []Volume{
			at([]Requirement{in(zone, "x")}, []Requirement{in(rack, "r1")}),
		}})
		if d.Reason != ReasonNoOfferingMatches {
			t.Errorf("decided %s, want %s", d.Reason, ReasonNoOfferingMatches)
		}
	})
}

func TestClassifyDoesNotDependOnTheOrderOfRejections(t *testing.T) {
	all := []Rejection{
		insufficientCPU, untolerated, wrongAffinity, skewed, leftOut,
		{Plugin: pluginDynamicResources, Reason: "resourceclaim in use", Nodes: 1},
		{Plugin: pluginVolumeBinding, Reason: "pod has unbound immediate PersistentVolumeClaims", Nodes: 1},
		{Plugin: pluginCoscheduling, Reason: "cannot find enough sibling pods", Nodes: 1},
	}
	rapid.Check(t, func(t *rapid.T) {
		some := rapid.SliceOfN(rapid.SampledFrom(all), 0, 6).Draw(t, "rejections")
		other := slices.Clone(some)
		if len(some) > 1 {
			other = rapid.Permutation(some).Draw(t, "order")
		}
		pod := waitingPod().Obj()
		if diff := cmp.Diff(Classify(pod, Facts{Rejections: some}), Classify(pod, Facts{Rejections: other})); diff != "" {
			t.Fatalf("decision (-as drawn +in another order):\n%s", diff)
		}
	})
}

// A template that could meet a requirement is one for which some node of the kind meets it, and no other.
func TestTemplateCouldMeetWhatSomeNodeOfTheKindMeets(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		zones := rapid.SliceOfNDistinct(rapid.SampledFrom([]string{"1", "2", "20"}), 1, 3, rapid.ID).Draw(t, "zones")
		tmpl := TemplateOf(builders.AvailableCapacity("t", 1).Label("disk", "a").
			Requires("gpu", corev1.NodeSelectorOpIn, zones...).Obj())
		e := genSelectorRequirement(t)
		r := Requirement{Key: e.Key, Operator: Operator(e.Operator), Values: e.Values}
		if r.Key == corev1.LabelHostname {
			t.Skip("every node has one, and nobody knows it")
		}
		want := slices.ContainsFunc(zones, func(z string) bool {
			return r.Matches(map[string]string{"disk": "a", "gpu": z})
		})
		if got := tmpl.CouldMeet(r); got != want {
			t.Fatalf("template with gpu in %v could meet %s: %v, want %v", zones, r, got, want)
		}
	})
}

func TestTemplateCouldMeet(t *testing.T) {
	tmpl := TemplateOf(builders.AvailableCapacity("t", 1).
		Requires("any", corev1.NodeSelectorOpExists).
		Requires("never", corev1.NodeSelectorOpDoesNotExist).
		Requires("not", corev1.NodeSelectorOpNotIn, "a").Obj())
	for _, tc := range []struct {
		r    Requirement
		want bool
	}{
		{Requirement{"any", OperatorIn, []string{"x"}}, true},
		{Requirement{"any", OperatorDoesNotExist, nil}, false},
		{Requirement{"never", OperatorExists, nil}, false},
		{Requirement{"never", OperatorNotIn, []string{"x"}}, true},
		{Requirement{"not", OperatorIn, []string{"a"}}, false},
		{Requirement{"not", OperatorIn, []string{"a", "b"}}, true},
		{Requirement{"not", OperatorDoesNotExist, nil}, true},
		{Requirement{corev1.LabelHostname, OperatorExists, nil}, true},
		{Requirement{corev1.LabelHostname, OperatorIn, []string{"node-1"}}, false},
		{Requirement{corev1.LabelHostname, OperatorDoesNotExist, nil}, false},
	} {
		if got := tmpl.CouldMeet(tc.r); got != tc.want {
			t.Errorf("could meet %s: %v, want %v", tc.r, got, tc.want)
		}
	}
}
