package demand

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
)

// table is a cache by name.
type table[T any] map[string]*T

func (m table[T]) get(name string) (*T, error) {
	if obj, ok := m[name]; ok {
		return obj, nil
	}
	return nil, apierrors.NewNotFound(schema.GroupResource{}, name)
}

func storage(claims table[corev1.PersistentVolumeClaim], volumes table[corev1.PersistentVolume],
	classes table[storagev1.StorageClass]) Volumes {
	return Volumes{
		Claim:  func(_, name string) (*corev1.PersistentVolumeClaim, error) { return claims.get(name) },
		Volume: volumes.get,
		Class:  classes.get,
	}
}

func mounts(claim string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "v", VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim},
		}})
	}
}

func claimOn(volume, class string) *corev1.PersistentVolumeClaim {
	c := &corev1.PersistentVolumeClaim{}
	c.Spec.VolumeName = volume
	if class != "" {
		c.Spec.StorageClassName = &class
	}
	return c
}

func annotated(c *corev1.PersistentVolumeClaim, key, value string) *corev1.PersistentVolumeClaim {
	metav1.SetMetaDataAnnotation(&c.ObjectMeta, key, value)
	return c
}

func in(key string, values ...string) capacity.Requirement {
	return capacity.Requirement{Key: key, Operator: capacity.OperatorIn, Values: values}
}

func TestVolumesOf(t *testing.T) {
	waits := storagev1.VolumeBindingWaitForFirstConsumer
	affinity := func(terms ...corev1.NodeSelectorTerm) *corev1.PersistentVolume {
		v := &corev1.PersistentVolume{}
		v.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: terms}}
		return v
	}
	term := func(key string, values ...string) corev1.NodeSelectorTerm {
		return corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{{
			Key: key, Operator: corev1.NodeSelectorOpIn, Values: values,
		}}}
	}
	delayed := func(topologies ...string) *storagev1.StorageClass {
		class := &storagev1.StorageClass{VolumeBindingMode: &waits}
		for _, topology := range topologies {
			var term corev1.TopologySelectorTerm
			for pair := range strings.SplitSeq(topology, ",") {
				if key, value, ok := strings.Cut(pair, "="); ok {
					term.MatchLabelExpressions = append(term.MatchLabelExpressions,
						corev1.TopologySelectorLabelRequirement{Key: key, Values: []string{value}})
				}
			}
			class.AllowedTopologies = append(class.AllowedTopologies, term)
		}
		return class
	}
	labelled := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{
		Labels: map[string]string{corev1.LabelTopologyZone: "a__b"},
	}}
	now := metav1.Now()
	terminating := claimOn("", "")
	terminating.DeletionTimestamp = &now
	v := storage(
		table[corev1.PersistentVolumeClaim]{
			"bound": claimOn("zonal", ""), "either": claimOn("either", ""), "mixed": claimOn("mixed", ""),
			"labelled": claimOn("labelled", ""), "lost": claimOn("gone", ""), "late": claimOn("", "late"),
			"late-in-a": claimOn("", "late-in-a"), "immediate": claimOn("", "immediate"), "classless": claimOn("", ""),
			"terminating": terminating, "named": claimOn("named", ""), "old": claimOn("old", ""),
			"late-in-either": claimOn("", "late-in-either"), "late-in-pairs": claimOn("", "late-in-pairs"),
			"late-anywhere": claimOn("", "late-anywhere"),
			"old-class":     annotated(claimOn("", ""), corev1.BetaStorageClassAnnotation, "late-in-a"),
			"on-its-way":    annotated(claimOn("", "late"), "volume.kubernetes.io/selected-node", "n"),
		},
		table[corev1.PersistentVolume]{
			"zonal": affinity(term("zone", "a")), "either": affinity(term("zone", "a"), term("zone", "b")),
			"mixed": affinity(term("zone", "a"), term("rack", "b")), "labelled": labelled,
			"named": affinity(corev1.NodeSelectorTerm{MatchFields: term("metadata.name", "n").MatchExpressions}),
			"old": {ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{
				corev1.LabelFailureDomainBetaZone: "a", corev1.LabelFailureDomainBetaRegion: "r",
			}}},
		},
		table[storagev1.StorageClass]{
			"immediate": {}, "late": {VolumeBindingMode: &waits},
			"late-in-a":      delayed("zone=a"),
			"late-in-either": delayed("zone=a", "zone=b"),
			"late-in-pairs":  delayed("zone=a,rack=1", "zone=b,rack=2"),
			"late-anywhere":  delayed("zone=a", ""),
		},
	)
	for claim, want := range map[string]capacity.Volume{
		"bound":  {State: capacity.VolumeBound, Requirements: []capacity.Requirement{in("zone", "a")}},
		"either": {State: capacity.VolumeBound, Requirements: []capacity.Requirement{in("zone", "a", "b")}},
		"mixed":  {State: capacity.VolumeBound, AnyOf: [][]capacity.Requirement{{in("zone", "a")}, {in("rack", "b")}}},
		"named":  {State: capacity.VolumeBound, Requirements: []capacity.Requirement{in("metadata.name", "n")}},
		"old": {State: capacity.VolumeBound, Requirements: []capacity.Requirement{
			in(corev1.LabelTopologyZone, "a"), in(corev1.LabelTopologyRegion, "r"),
		}},
		"late-in-either": {State: capacity.VolumeDelayed, Requirements: []capacity.Requirement{in("zone", "a", "b")}},
		"late-in-pairs": {State: capacity.VolumeDelayed, AnyOf: [][]capacity.Requirement{
			{in("zone", "a"), in("rack", "1")}, {in("zone", "b"), in("rack", "2")},
		}},
		"late-anywhere": {State: capacity.VolumeDelayed},
		"old-class":     {State: capacity.VolumeDelayed, Requirements: []capacity.Requirement{in("zone", "a")}},
		"on-its-way":    {State: capacity.VolumeProvisioning},
		"labelled":      {State: capacity.VolumeBound, Requirements: []capacity.Requirement{in(corev1.LabelTopologyZone, "a", "b")}},
		"lost":          {State: capacity.VolumeLost},
		"late":          {State: capacity.VolumeDelayed},
		"late-in-a":     {State: capacity.VolumeDelayed, Requirements: []capacity.Requirement{in("zone", "a")}},
		"immediate":     {State: capacity.VolumeUnbound},
		"classless":     {State: capacity.VolumeUnbound},
		"terminating":   {State: capacity.VolumeTerminating},
		"absent":        {State: capacity.VolumeNoClaim},
	} {
		want.Claim = claim
		if diff := cmp.Diff([]capacity.Volume{want}, v.Of(pod("p", mounts(claim)))); diff != "" {
			t.Errorf("claim %s (-want +got):\n%s", claim, diff)
		}
	}

	t.Run("and the profile carries the place", func(t *testing.T) {
		got := Describer{Volumes: v}.Profile(pod("p", mounts("bound"))).Requirements
		if diff := cmp.Diff([]capacity.Requirement{in("zone", "a")}, got); diff != "" {
			t.Errorf("requirements (-want +got):\n%s", diff)
		}
	})
}

func TestJudge(t *testing.T) {
	now := time.Unix(10_000, 0)
	template := func(name string, age time.Duration) *fleetv1alpha1.AvailableCapacity {
		ac := &fleetv1alpha1.AvailableCapacity{ObjectMeta: metav1.ObjectMeta{Name: name}}
		ac.Spec.NodeTemplate.Taints = []corev1.Taint{{Key: "gpu", Effect: corev1.TaintEffectNoSchedule}}
		if age > 0 {
			at := metav1.NewTime(now.Add(-age))
			ac.Status.ObservedTime = &at
		}
		return ac
	}
	affinityTo := func(app, topology string, own bool) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			if own {
				p.Labels = map[string]string{"app": app}
			}
			p.Spec.Affinity = &corev1.Affinity{PodAffinity: &corev1.PodAffinity{
				RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{
					TopologyKey: topology, LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}},
				}},
			}}
		}
	}
	running := func(name, app string, change ...func(*corev1.Pod)) *corev1.Pod {
		p := pod(name, change...)
		p.Labels, p.Spec.NodeName = map[string]string{"app": app}, "n"
		return p
	}
	single := claimOn("v", "")
	single.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod}
	volumes := storage(table[corev1.PersistentVolumeClaim]{"single": single},
		table[corev1.PersistentVolume]{"v": {}}, nil)
	names := func(claim string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "c", ResourceClaimName: &claim}}
		}
	}

	for _, c := range []struct {
		name      string
		pod       *corev1.Pod
		others    []*corev1.Pod
		templates []*fleetv1alpha1.AvailableCapacity
		want      string
	}{
		{name: "a plain pod", pod: pod("p"), want: capacity.ReasonNewNodeHelps},
		{
			name: "a fresh template is evidence", pod: pod("p"), want: capacity.ReasonNoOfferingTolerated,
			templates: []*fleetv1alpha1.AvailableCapacity{template("a", time.Minute)},
		},
		{
			name: "one without a time is", pod: pod("p"), want: capacity.ReasonNoOfferingTolerated,
			templates: []*fleetv1alpha1.AvailableCapacity{template("a", 0)},
		},
		{
			name: "beside an old one nothing is", pod: pod("p"), want: capacity.ReasonNewNodeHelps,
			templates: []*fleetv1alpha1.AvailableCapacity{template("a", time.Minute), template("b", time.Hour)},
		},
		{
			name: "affinity to pods that do not run", pod: pod("p", affinityTo("db", corev1.LabelTopologyZone, false)),
			want: capacity.ReasonNoMatchingPods,
		},
		{
			name: "affinity to pods that run", pod: pod("p", affinityTo("db", corev1.LabelTopologyZone, false)),
			others: []*corev1.Pod{running("db-0", "db")}, want: capacity.ReasonNewNodeHelps,
		},
		{
			name: "affinity to itself", pod: pod("p", affinityTo("web", corev1.LabelTopologyZone, true)),
			want: capacity.ReasonNewNodeHelps,
		},
		{
			name: "affinity to one node with pods that run", pod: pod("p", affinityTo("web", corev1.LabelHostname, true)),
			others: []*corev1.Pod{running("web-0", "web")}, want: capacity.ReasonTiedToPods,
		},
		{name: "a claim for one pod", pod: pod("p", mounts("single")), want: capacity.ReasonNewNodeHelps},
		{
			name: "a claim for one pod that another has", pod: pod("p", mounts("single")),
			others: []*corev1.Pod{running("holder", "x", mounts("single"))}, want: capacity.ReasonVolumeInUse,
		},
		{name: "a ResourceClaim that exists", pod: pod("p", names("there")), want: capacity.ReasonNewNodeHelps},
		{name: "one that does not", pod: pod("p", names("absent")), want: capacity.ReasonResourceClaimMissing},
	} {
		t.Run(c.name, func(t *testing.T) {
			j := &Judge{
				Volumes:   volumes,
				Templates: func() []*fleetv1alpha1.AvailableCapacity { return c.templates },
				Freshness: 10 * time.Minute,
				Pods:      func(string) ([]*corev1.Pod, error) { return c.others, nil },
				Node: func(name string) (*corev1.Node, error) {
					return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{corev1.LabelHostname: name}}}, nil
				},
				ResourceClaim: func(_, name string) error {
					if name == "there" {
						return nil
					}
					return apierrors.NewNotFound(schema.GroupResource{}, name)
				},
				Clock: clocktesting.NewFakePassiveClock(now),
			}
			c.pod.UID = types.UID("p")
			got := j.Decide(c.pod, nil)
			if got.Reason != c.want || got.Request != (c.want == capacity.ReasonNewNodeHelps) {
				t.Errorf("decided %+v, want reason %s", got, c.want)
			}
			if blind := (&Judge{}).Decide(c.pod, nil); !blind.Request {
				t.Errorf("what is not known speaks against the pod: %+v", blind)
			}
		})
	}
}

func TestPodFollowsThePodsThatItsAffinitySelects(t *testing.T) {
	term := func(key string, selector map[string]string) corev1.PodAffinityTerm {
		return corev1.PodAffinityTerm{TopologyKey: key, LabelSelector: &metav1.LabelSelector{MatchLabels: selector}}
	}
	follower := pod("p", func(p *corev1.Pod) {
		p.Spec.Affinity = &corev1.Affinity{PodAffinity: &corev1.PodAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{
				term("zone", map[string]string{"app": "db"}), term("rack", map[string]string{"role": "primary"}),
			},
		}}
	})
	on := func(name, node string, labels map[string]string) *corev1.Pod {
		p := pod(name)
		p.Labels, p.Spec.NodeName = labels, node
		return p
	}
	nodes := table[corev1.Node]{}
	for name, labels := range map[string]map[string]string{
		"n1": {"zone": "a", "rack": "1"}, "n2": {"zone": "b", "rack": "2"}, "n3": {"zone": "c", "rack": "3"},
	} {
		nodes[name] = &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: labels}}
	}
	pods := []*corev1.Pod{
		on("db-0", "n1", map[string]string{"app": "db", "role": "primary"}),
		on("db-1", "n2", map[string]string{"app": "db"}),                      // matches one term of two
		on("web", "n3", map[string]string{"role": "primary"}),                 // so does this
		on("db-2", "gone", map[string]string{"app": "db", "role": "primary"}), // its node is not known
	}
	j := &Judge{Pods: func(string) ([]*corev1.Pod, error) { return pods, nil }, Node: nodes.get}
	want := []capacity.Requirement{in("rack", "1"), in("zone", "a")}
	if diff := cmp.Diff(want, j.Decide(follower, nil).ExtraRequirements); diff != "" {
		t.Errorf("requirements (-want +got):\n%s", diff)
	}

	t.Run("and its request says so", func(t *testing.T) {
		api := newFakeAPI()
		w := newTestWriter(t, api, func(o *Options) { o.Decide = j.Decide })
		w.Enqueue(follower, nil)
		work(t, w)
		got := capacity.ProfileOfRequest(&api.objects[Name("p", follower.UID)].Spec).Requirements
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("requirements (-want +got):\n%s", diff)
		}
	})
	t.Run("nothing where only pods run that match some terms", func(t *testing.T) {
		pods = pods[1:3]
		if got := j.Decide(follower, nil); got.Reason != capacity.ReasonNoMatchingPods {
			t.Errorf("decided %s, want %s", got.Reason, capacity.ReasonNoMatchingPods)
		}
	})
}

func TestSetThatStandsOnAStaticNodeIsFollowedThere(t *testing.T) {
	own := func(p *corev1.Pod) {
		p.Labels = map[string]string{"app": "web"}
		p.Spec.Affinity = &corev1.Affinity{PodAffinity: &corev1.PodAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{
				TopologyKey: "zone", LabelSelector: &metav1.LabelSelector{MatchLabels: p.Labels},
			}},
		}}
	}
	bound := func(node string) *corev1.Pod {
		p := pod("web-"+node, own)
		p.Spec.NodeName = node
		return p
	}
	nodes := table[corev1.Node]{
		"static":  {ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"zone": "b"}}},
		"managed": {ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"zone": "c", fleetv1alpha1.LabelMachine: "m"}}},
	}
	for _, c := range []struct {
		name string
		pods []*corev1.Pod
		want []capacity.Requirement
	}{
		{"nothing of it stands", nil, nil},
		{"it stands where the autoscaler knows", []*corev1.Pod{bound("managed")}, nil},
		{"it stands where only the scheduler knows", []*corev1.Pod{bound("static")}, []capacity.Requirement{in("zone", "b")}},
		{"it stands on both", []*corev1.Pod{bound("static"), bound("managed")}, []capacity.Requirement{in("zone", "b", "c")}},
	} {
		j := &Judge{Pods: func(string) ([]*corev1.Pod, error) { return c.pods, nil }, Node: nodes.get}
		d := j.Decide(pod("web-0", own), nil)
		if diff := cmp.Diff(c.want, d.ExtraRequirements); diff != "" || !d.Request {
			t.Errorf("%s: request %v, requirements (-want +got):\n%s", c.name, d.Request, diff)
		}
	}
}
