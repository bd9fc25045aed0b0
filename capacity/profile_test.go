package capacity

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"pgregory.net/rapid"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/internal/builders"
)

const (
	zone = corev1.LabelTopologyZone
	rack = fleetv1alpha1.LabelRack
)

func TestRequestsAreCountedAsTheSchedulerCountsThem(t *testing.T) {
	pod := func() *builders.PodBuilder { return builders.Pod("ns", "p") }
	for name, tc := range map[string]struct {
		pod  *builders.PodBuilder
		want Resources
	}{
		"containers add up": {
			pod().Requests("cpu", "1", "memory", "1Gi").Container("cpu", "500m"),
			Resources{"cpu": 1500, "memory": 1 << 30},
		},
		"an init container counts where it is larger, by resource": {
			pod().Requests("cpu", "1", "memory", "1Gi").InitContainer("cpu", "2", "memory", "1Mi"),
			Resources{"cpu": 2000, "memory": 1 << 30},
		},
		"init containers run one after the other": {
			pod().Requests("cpu", "1").InitContainer("cpu", "2").InitContainer("cpu", "3"),
			Resources{"cpu": 3000},
		},
		"a sidecar adds to the containers": {
			pod().Requests("cpu", "1").Sidecar("cpu", "500m"),
			Resources{"cpu": 1500},
		},
		"a sidecar adds to the init containers after it": {
			pod().Requests("cpu", "1").Sidecar("cpu", "500m").InitContainer("cpu", "2"),
			Resources{"cpu": 2500},
		},
		"overhead comes on top": {
			pod().Requests("cpu", "1").Overhead("cpu", "100m", "memory", "64Mi"),
			Resources{"cpu": 1100, "memory": 64 << 20},
		},
		"pod-level requests replace the sum": {
			pod().Requests("cpu", "1", "memory", "1Gi").PodRequests("cpu", "3"),
			Resources{"cpu": 3000, "memory": 1 << 30},
		},
		"a fraction of a unit is rounded up": {
			pod().Requests("cpu", "100u", "memory", "0.5"),
			Resources{"cpu": 1, "memory": 1},
		},
		"zero amounts are dropped": {
			pod().Requests("cpu", "0", "nvidia.com/gpu", "0", "memory", "1"),
			Resources{"memory": 1},
		},
		"nothing": {pod(), Resources{}},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, ProfileOfPod(tc.pod.Obj()).Resources); diff != "" {
				t.Errorf("resources (-want +got):\n%s", diff)
			}
		})
	}
}

func TestRequirementsOfAPod(t *testing.T) {
	in := func(key string, values ...string) Requirement {
		return Requirement{Key: key, Operator: OperatorIn, Values: values}
	}
	expr, opIn, opNotIn := builders.NodeExpr, corev1.NodeSelectorOpIn, corev1.NodeSelectorOpNotIn
	field := func(op corev1.NodeSelectorOperator, node string) corev1.NodeSelectorTerm {
		return corev1.NodeSelectorTerm{MatchFields: []corev1.NodeSelectorRequirement{expr("metadata.name", op, node)}}
	}
	pod := func() *builders.PodBuilder { return builders.Pod("ns", "p") }
	for name, tc := range map[string]struct {
		pod          *builders.PodBuilder
		requirements []Requirement
		alternatives [][]Requirement
	}{
		"none": {pod: pod()},
		"node selector": {
			pod:          pod().NodeSelector("disk", "ssd").NodeSelector("arch", "arm"),
			requirements: []Requirement{in("arch", "arm"), in("disk", "ssd")},
		},
		"terms are ORed, and each has the node selector": {
			pod: pod().NodeSelector("disk", "ssd").NodeAffinity(expr(zone, opIn, "b", "a")).
				NodeAffinity(expr("gpu", corev1.NodeSelectorOpExists)),
			requirements: []Requirement{in("disk", "ssd"), {Key: "gpu", Operator: OperatorExists}},
			alternatives: [][]Requirement{{in("disk", "ssd"), in(zone, "a", "b")}},
		},
		"a term that is there twice counts once": {
			pod:          pod().NodeAffinity(expr(zone, opIn, "a", "b")).NodeAffinity(expr(zone, opIn, "b", "a", "b")),
			requirements: []Requirement{in(zone, "a", "b")},
		},
		"In of one key is intersected": {
			pod:          pod().NodeSelector(zone, "a").NodeAffinity(expr(zone, opIn, "a", "b")),
			requirements: []Requirement{in(zone, "a")},
		},
		"In that exclude each other stay side by side": {
			pod:          pod().NodeSelector(zone, "c").NodeAffinity(expr(zone, opIn, "a", "b")),
			requirements: []Requirement{in(zone, "a", "b"), in(zone, "c")},
		},
		"NotIn of one key is united": {
			pod:          pod().NodeAffinity(expr(zone, opNotIn, "b"), expr(zone, opNotIn, "a")),
			requirements: []Requirement{{Key: zone, Operator: OperatorNotIn, Values: []string{"a", "b"}}},
		},
		"Exists beside In says nothing": {
			pod:          pod().NodeAffinity(expr(zone, opIn, "a"), expr(zone, corev1.NodeSelectorOpExists)),
			requirements: []Requirement{in(zone, "a")},
		},
		"a pod that names its node asks for a label that no node has": {
			pod:          pod().NodeAffinityTerm(field(opIn, "node-1")),
			requirements: []Requirement{in("metadata.name", "node-1")},
		},
		"a pod that shuns a node by name takes every new one": {
			pod: pod().NodeAffinityTerm(field(corev1.NodeSelectorOpNotIn, "node-1")),
		},
		"an empty term selects nothing": {
			pod:          pod().NodeAffinityTerm(corev1.NodeSelectorTerm{}).NodeAffinity(expr(zone, opIn, "a")),
			requirements: []Requirement{in(zone, "a")},
		},
		"only empty terms exclude every node": {
			pod:          pod().NodeAffinityTerm(corev1.NodeSelectorTerm{}),
			requirements: []Requirement{{Key: "metadata.name", Operator: OperatorExists}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := ProfileOfPod(tc.pod.Obj())
			if diff := cmp.Diff(tc.requirements, p.Requirements); diff != "" {
				t.Errorf("requirements (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tc.alternatives, p.Alternatives); diff != "" {
				t.Errorf("alternatives (-want +got):\n%s", diff)
			}
		})
	}
}

// A profile stands for the scheduler's own matching: on any node without the fields of a real one, both say the same.
func TestProfileMatchesTheNodesThatTheSchedulerMatches(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pod, labels := genPod(t), genLabels(t)
		node := builders.Node("new").Obj()
		node.Labels = labels
		want, _ := nodeaffinity.GetRequiredNodeAffinity(pod).Match(node)
		if got := ProfileOfPod(pod).MatchesLabels(labels); got != want {
			t.Fatalf("profile matches %v: %v, the scheduler says %v; profile %+v", labels, got, want, ProfileOfPod(pod))
		}
	})
}

func TestTolerationsOfAPod(t *testing.T) {
	seconds := int64(300)
	exists, noExecute := corev1.TolerationOpExists, corev1.TaintEffectNoExecute
	for name, tc := range map[string]struct {
		in, want []corev1.Toleration
	}{
		"those that every pod gets by default split no profile": {
			in: []corev1.Toleration{
				{Key: corev1.TaintNodeNotReady, Operator: exists, Effect: noExecute, TolerationSeconds: &seconds},
				{Key: corev1.TaintNodeUnreachable, Operator: exists, Effect: noExecute, TolerationSeconds: &seconds},
			},
		},
		"one that runs out does not carry a pod on a tainted node": {
			in: []corev1.Toleration{
				{Key: "team", Operator: exists, Effect: noExecute, TolerationSeconds: &seconds},
			},
		},
		"no operator means Equal": {
			in:   []corev1.Toleration{{Key: "gpu", Value: "a"}, {Key: "gpu", Value: "a", Operator: corev1.TolerationOpEqual}},
			want: []corev1.Toleration{{Key: "gpu", Value: "a", Operator: corev1.TolerationOpEqual}},
		},
		"one for everything makes the others redundant": {
			in:   []corev1.Toleration{{Key: "gpu", Operator: exists}, {Operator: exists}},
			want: []corev1.Toleration{{Operator: exists}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := builders.Pod("ns", "p")
			for _, tol := range tc.in {
				b.Toleration(tol)
			}
			if diff := cmp.Diff(tc.want, ProfileOfPod(b.Obj()).Tolerations); diff != "" {
				t.Errorf("tolerations (-want +got):\n%s", diff)
			}
		})
	}
}

func TestHostPortIsOneOfAKindOnANode(t *testing.T) {
	sets := func(p *builders.PodBuilder) []AntiAffinity { return ProfileOfPod(p.Obj()).AntiAffinity }
	one := sets(builders.Pod("a", "p").HostPort(80))
	if len(one) != 1 || one[0].TopologyKey != corev1.LabelHostname {
		t.Fatalf("got %+v, want one rule for each node", one)
	}
	if diff := cmp.Diff(one, sets(builders.Pod("b", "other").Requests("cpu", "1").HostPort(80))); diff != "" {
		t.Errorf("the same port of another kind of pod (-want +got):\n%s", diff)
	}
	for name, other := range map[string]*corev1.Pod{
		"another port": builders.Pod("a", "p").HostPort(81).Obj(),
		"another protocol": func() *corev1.Pod {
			p := builders.Pod("a", "p").HostPort(80).Obj()
			p.Spec.Containers[0].Ports[0].Protocol = corev1.ProtocolUDP
			return p
		}(),
		"a port of the pod's own": func() *corev1.Pod {
			p := builders.Pod("a", "p").HostPort(80).Obj()
			p.Spec.Containers[0].Ports[0].HostPort = 0
			return p
		}(),
	} {
		if got := ProfileOfPod(other).AntiAffinity; len(got) > 0 && got[0] == one[0] {
			t.Errorf("%s is in the way, too", name)
		}
	}

	t.Run("and never more than a request can carry", func(t *testing.T) {
		p := builders.Pod("a", "p")
		for port := range int32(20) {
			p = p.HostPort(port + 1)
		}
		if n := len(sets(p)); n != maxAntiAffinity {
			t.Errorf("got %d rules, want %d", n, maxAntiAffinity)
		}
	})
	t.Run("so pods of one port are planned onto nodes of their own", func(t *testing.T) {
		need := Need{Profile: ProfileOfPod(builders.Pod("a", "p").Requests("cpu", "1").HostPort(80).Obj()), Count: 5, Pending: 5}
		need.ID = need.Profile.ID()
		plan := MakePlan(Input{
			Offerings: []Offering{{Name: "big", Allocatable: Resources{corev1.ResourceCPU: 16000}, Cost: 1,
				Domains: []Domain{{Name: "a", Available: 50}}}},
			Clusters: []ClusterInput{{ID: "c", Needs: []Need{need}}},
		})
		if len(plan.Launches) != 5 {
			t.Errorf("got %d launches, want 5", len(plan.Launches))
		}
	})
}

func TestAntiAffinityCountsAgainstThePodsOwnKindOnly(t *testing.T) {
	pod := func() *builders.PodBuilder { return builders.Pod("shop", "p").Label("app", "web") }
	type affinityTerm = corev1.PodAffinityTerm
	every := &metav1.LabelSelector{}
	term := func(change func(*affinityTerm)) affinityTerm {
		t := corev1.PodAffinityTerm{
			TopologyKey:   corev1.LabelHostname,
			LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}},
		}
		change(&t)
		return t
	}
	for name, tc := range map[string]struct {
		term corev1.PodAffinityTerm
		want bool
	}{
		"own labels":                 {term(func(*affinityTerm) {}), true},
		"other labels":               {term(func(t *affinityTerm) { t.LabelSelector.MatchLabels["app"] = "db" }), false},
		"no selector selects none":   {term(func(t *affinityTerm) { t.LabelSelector = nil }), false},
		"an empty one selects every": {term(func(t *affinityTerm) { t.LabelSelector = every }), true},
		"own namespace by name":      {term(func(t *affinityTerm) { t.Namespaces = []string{"bank", "shop"} }), true},
		"other namespace by name":    {term(func(t *affinityTerm) { t.Namespaces = []string{"bank"} }), false},
		"every namespace":            {term(func(t *affinityTerm) { t.NamespaceSelector = every }), true},
		"own namespace by label": {term(func(t *affinityTerm) {
			t.NamespaceSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"kubernetes.io/metadata.name": "shop"}}
		}), true},
	} {
		t.Run(name, func(t *testing.T) {
			got := ProfileOfPod(pod().PodAntiAffinityTerm(tc.term).Obj()).AntiAffinity
			if (len(got) == 1) != tc.want {
				t.Errorf("anti-affinity %+v, wanted one: %v", got, tc.want)
			}
		})
	}

	set := func(namespace, app string) string {
		p := builders.Pod(namespace, "p").Label("app", app).PodAntiAffinity(corev1.LabelHostname, "app", app).Obj()
		return ProfileOfPod(p).AntiAffinity[0].Set
	}
	if one, other := set("shop", "web"), set("shop", "web"); one != other {
		t.Error("pods of one namespace and selector are in different sets")
	}
	if set("shop", "web") == set("bank", "web") || set("shop", "web") == set("shop", "db") {
		t.Error("pods of another namespace or selector are in the same set")
	}
}

func TestGroupOfAPod(t *testing.T) {
	pod := func() *builders.PodBuilder { return builders.Pod("ml", "trainer-0").Label("app", "trainer") }
	kueue := func() *builders.PodBuilder { return pod().Annotation(AnnotationRequiredTopology, rack) }
	for name, tc := range map[string]struct {
		pod  *builders.PodBuilder
		want *Group
	}{
		"none":               {pod(), nil},
		"Coscheduling":       {pod().PodGroup("gang"), &Group{Name: "ml/gang"}},
		"in-tree PodGroup":   {pod().SchedulingGroup("gang"), &Group{Name: "ml/gang"}},
		"affinity to others": {pod().PodAffinity(rack, "app", "cache"), nil},
		"Kueue, by its workload": {
			kueue().Annotation("kueue.x-k8s.io/workload", "job-trainer"),
			&Group{Name: "ml/workload/job-trainer", TopologyKey: rack},
		},
		"Kueue, by pod set": {
			kueue().Annotation("kueue.x-k8s.io/workload", "w").Label("kueue.x-k8s.io/podset", "launcher"),
			&Group{Name: "ml/workload/w/launcher", TopologyKey: rack},
		},
		"Kueue, pod sets kept together": {
			kueue().Annotation("kueue.x-k8s.io/workload", "w").Label("kueue.x-k8s.io/podset", "launcher").
				Annotation("kueue.x-k8s.io/podset-group-name", "all"),
			&Group{Name: "ml/workload/w/group/all", TopologyKey: rack},
		},
		"Kueue, by the job that owns the pod": {
			kueue().Owner("Job", "trainer"), &Group{Name: "ml/workload/job.trainer", TopologyKey: rack},
		},
		"a gang keeps its name and takes Kueue's topology": {
			kueue().PodGroup("gang"), &Group{Name: "ml/gang", TopologyKey: rack},
		},
		"a gang takes the topology of its own affinity": {
			pod().PodGroup("gang").PodAffinity(zone, "app", "trainer"), &Group{Name: "ml/gang", TopologyKey: zone},
		},
		"of several keys the narrowest": {
			pod().PodGroup("gang").PodAffinity(zone, "app", "trainer").PodAffinity(rack, "app", "trainer"),
			&Group{Name: "ml/gang", TopologyKey: rack},
		},
		"one node": {
			pod().PodGroup("gang").PodAffinity(corev1.LabelHostname, "app", "trainer"),
			&Group{Name: "ml/gang", TopologyKey: corev1.LabelHostname},
		},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, ProfileOfPod(tc.pod.Obj()).Group); diff != "" {
				t.Errorf("group (-want +got):\n%s", diff)
			}
		})
	}

	t.Run("affinity alone makes a set of its own", func(t *testing.T) {
		group := func(name, app string) Group {
			return *ProfileOfPod(builders.Pod("ml", name).Label("app", app).PodAffinity(rack, "app", app).Obj()).Group
		}
		a, b := group("a-0", "a"), group("b-0", "b")
		if a.TopologyKey != rack || a == b || a != group("a-1", "a") {
			t.Errorf("groups %+v and %+v: wanted rack, one for each selector, the same for its pods", a, b)
		}
	})
	t.Run("a long name is cut and stays unique", func(t *testing.T) {
		long := func(last string) string {
			job := make([]byte, 250)
			for i := range job {
				job[i] = 'x'
			}
			pod := kueue().Annotation("kueue.x-k8s.io/workload", string(job)+last).Label("kueue.x-k8s.io/podset", string(job))
			return ProfileOfPod(pod.Obj()).Group.Name
		}
		if a, b := long("a"), long("b"); len(a) > 317 || a == b {
			t.Errorf("names %q and %q: wanted at most 317 bytes, and different", a, b)
		}
	})
}

func TestPodAndItsRequestHaveTheSameProfile(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		profile := ProfileOfPod(genPod(t)).WithMinCount(rapid.Int32Range(0, 9).Draw(t, "minCount"))
		// By way of JSON, as the API server keeps it.
		data, err := json.Marshal(profile.RequestSpec())
		if err != nil {
			t.Fatal(err)
		}
		var spec fleetv1alpha1.CapacityRequestSpec
		if err := json.Unmarshal(data, &spec); err != nil {
			t.Fatal(err)
		}
		back := ProfileOfRequest(&spec)
		if diff := cmp.Diff(profile, back); diff != "" {
			t.Fatalf("profile of the pod and of its request (-pod +request):\n%s", diff)
		}
		if profile.ID() != back.ID() {
			t.Fatalf("ID %s of the pod, %s of its request", profile.ID(), back.ID())
		}
	})
}

func TestProfileDoesNotDependOnTheOrderOfListing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pod := genPod(t)
		a, b := ProfileOfPod(pod), ProfileOfPod(shuffled(t, pod))
		if diff := cmp.Diff(a, b); diff != "" {
			t.Fatalf("profile (-pod +shuffled pod):\n%s", diff)
		}
		if a.ID() != b.ID() {
			t.Fatalf("ID %s, of the shuffled pod %s", a.ID(), b.ID())
		}
	})
}

func TestCanonicalTwiceIsCanonicalOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := ProfileOfPod(genPod(t))
		p.Requirements = append(p.Requirements, Requirement{Key: rack, Operator: OperatorSame, Values: []string{"b", "a"}})
		once := p.Canonical()
		if diff := cmp.Diff(once, once.Canonical()); diff != "" {
			t.Fatalf("second time (-once +twice):\n%s", diff)
		}
	})
}

// Whoever stores an ID relies on it: a change of this value makes every autoscaler forget its allotments on upgrade.
func TestIDIsStable(t *testing.T) {
	p := ProfileOfPod(builders.Pod("ml", "p").Requests("cpu", "96", "nvidia.com/gpu", "8").Priority(1000000).
		NodeSelector(zone, "a").Tolerates("nvidia.com/gpu", corev1.TaintEffectNoSchedule).PodGroup("gang").
		Spread(zone, 1, corev1.DoNotSchedule).Obj())
	const want = "65f6472d49a0508e"
	if got := p.ID(); got != want {
		t.Errorf("ID() = %q, want %q", got, want)
	}
}

func TestIDLeavesOutWhatIsNotAPodsNeed(t *testing.T) {
	p := ProfileOfPod(builders.Pod("ml", "p").Requests("cpu", "1").PodGroup("gang").PodAffinity(rack, "a", "b").
		Label("a", "b").Obj())
	if got := p.WithMinCount(64).ID(); got != p.ID() {
		t.Errorf("with the gang's minimum the ID is %s, without it %s", got, p.ID())
	}
	onTheWire := p
	onTheWire.Requirements = append(onTheWire.Requirements, Requirement{Key: rack, Operator: OperatorSame})
	if got := onTheWire.ID(); got != p.ID() {
		t.Errorf("with the Same requirement of its group the ID is %s, without it %s", got, p.ID())
	}
}

func TestIDTellsDifferentNeedsApart(t *testing.T) {
	base := func() Profile {
		return ProfileOfPod(builders.Pod("ml", "p").Requests("cpu", "1").PodGroup("gang").NodeSelector(zone, "a").Obj())
	}
	seen := map[string]string{base().ID(): "the base"}
	for name, change := range map[string]func(*Profile){
		"requirement value":    func(p *Profile) { p.Requirements[0].Values = []string{"b"} },
		"requirement operator": func(p *Profile) { p.Requirements[0].Operator = OperatorNotIn },
		"alternative":          func(p *Profile) { p.Alternatives = [][]Requirement{{{Key: "x", Operator: OperatorExists}}} },
		"resources":            func(p *Profile) { p.Resources["cpu"]++ },
		"another resource":     func(p *Profile) { p.Resources["memory"] = 1 },
		"priority":             func(p *Profile) { p.Priority++ },
		"spread":               func(p *Profile) { p.Spread = []Spread{{TopologyKey: zone, MaxSkew: 1}} },
		"spread's skew":        func(p *Profile) { p.Spread = []Spread{{TopologyKey: zone, MaxSkew: 2}} },
		"toleration":           func(p *Profile) { p.Tolerations = []corev1.Toleration{{Key: "gpu"}} },
		"anti-affinity":        func(p *Profile) { p.AntiAffinity = []AntiAffinity{{TopologyKey: zone}} },
		"anti-affinity's set":  func(p *Profile) { p.AntiAffinity = []AntiAffinity{{TopologyKey: zone, Set: "s"}} },
		"group":                func(p *Profile) { p.Group.Name = "ml/other" },
		"group's topology":     func(p *Profile) { p.Group.TopologyKey = rack },
		"no group":             func(p *Profile) { p.Group = nil },
		"Same among values": func(p *Profile) {
			p.Requirements = append(p.Requirements, Requirement{Key: rack, Operator: OperatorSame, Values: []string{"r"}})
		},
	} {
		p := base()
		change(&p)
		if other, ok := seen[p.ID()]; ok {
			t.Errorf("%s: the ID is that of %s", name, other)
		}
		seen[p.ID()] = name
	}
}

func TestRequirementsOfAVolumeReachEveryAlternative(t *testing.T) {
	p := ProfileOfPod(builders.Pod("ns", "p").
		NodeAffinity(builders.NodeExpr("disk", corev1.NodeSelectorOpIn, "ssd")).
		NodeAffinity(builders.NodeExpr("gpu", corev1.NodeSelectorOpExists)).Obj())
	p = p.WithRequirements(Requirement{Key: zone, Operator: OperatorIn, Values: []string{"a"}})
	for _, tc := range []struct {
		labels map[string]string
		want   bool
	}{
		{map[string]string{"disk": "ssd", zone: "a"}, true},
		{map[string]string{"gpu": "", zone: "a"}, true},
		{map[string]string{"disk": "ssd", zone: "b"}, false},
		{map[string]string{"gpu": ""}, false},
	} {
		if got := p.MatchesLabels(tc.labels); got != tc.want {
			t.Errorf("matches %v: %v, want %v", tc.labels, got, tc.want)
		}
	}
}

func TestMoreAlternativesThanARequestHoldsNarrowTheChoice(t *testing.T) {
	b := builders.Pod("ns", "p")
	for i := range 40 {
		b.NodeAffinity(builders.NodeExpr(zone, corev1.NodeSelectorOpIn, string(rune('A'+i))))
	}
	if got := len(ProfileOfPod(b.Obj()).Alternatives); got != 16 {
		t.Errorf("%d alternatives, want the 16 that the schema admits", got)
	}
}
