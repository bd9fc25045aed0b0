package wire

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	"pgregory.net/rapid"

	pb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/internal/builders"
)

const (
	zone = corev1.LabelTopologyZone
	rack = "topology.kubernetes.io/rack"
)

var equateEmpty = cmpopts.EquateEmpty()

func overTheWire[M proto.Message](t interface{ Fatal(...any) }, in, out M) M {
	data, err := proto.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	if err := proto.Unmarshal(data, out); err != nil {
		t.Fatal(err)
	}
	return out
}

func genRequirements(t *rapid.T) []capacity.Requirement {
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) capacity.Requirement {
		r := capacity.Requirement{
			Key: rapid.SampledFrom([]string{zone, rack, "disk", "gen"}).Draw(t, "key"),
			Operator: rapid.SampledFrom([]capacity.Operator{
				capacity.OperatorIn, capacity.OperatorNotIn, capacity.OperatorExists, capacity.OperatorDoesNotExist,
				capacity.OperatorGt, capacity.OperatorLt,
			}).Draw(t, "operator"),
		}
		switch r.Operator {
		case capacity.OperatorIn, capacity.OperatorNotIn:
			r.Values = rapid.SliceOfN(rapid.SampledFrom([]string{"a", "b", "c", ""}), 1, 3).Draw(t, "values")
		case capacity.OperatorGt, capacity.OperatorLt:
			r.Values = []string{"5"}
		}
		return r
	}), 1, 4).Draw(t, "requirements")
}

func genResources(t *rapid.T) capacity.Resources {
	return rapid.MapOfN(
		rapid.SampledFrom([]corev1.ResourceName{"cpu", "memory", "nvidia.com/gpu", "ephemeral-storage"}),
		rapid.Int64Range(1, 1<<45), 0, 4).Draw(t, "resources")
}

func genTolerations(t *rapid.T) []corev1.Toleration {
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) corev1.Toleration {
		return corev1.Toleration{
			Key:      rapid.SampledFrom([]string{"gpu", "team"}).Draw(t, "key"),
			Operator: rapid.SampledFrom([]corev1.TolerationOperator{"", "Equal", "Exists", "Lt", "Gt"}).Draw(t, "operator"),
			Value:    rapid.SampledFrom([]string{"1", "2"}).Draw(t, "value"),
			Effect:   rapid.SampledFrom([]corev1.TaintEffect{"", "NoSchedule", "NoExecute"}).Draw(t, "effect"),
		}
	}), 0, 3).Draw(t, "tolerations")
}

func genProfile(t *rapid.T) capacity.Profile {
	p := capacity.Profile{
		Requirements: genRequirements(t),
		Alternatives: rapid.SliceOfN(rapid.Custom(genRequirements), 0, 3).Draw(t, "alternatives"),
		Resources:    genResources(t),
		Priority:     rapid.Int32().Draw(t, "priority"),
		Tolerations:  genTolerations(t),
		Spread: rapid.SliceOfN(rapid.Custom(func(t *rapid.T) capacity.Spread {
			return capacity.Spread{
				TopologyKey: rapid.SampledFrom([]string{zone, rack}).Draw(t, "key"),
				MaxSkew:     rapid.Int32Range(1, 9).Draw(t, "maxSkew"),
				WhenUnsatisfiable: rapid.SampledFrom([]corev1.UnsatisfiableConstraintAction{
					corev1.DoNotSchedule, corev1.ScheduleAnyway,
				}).Draw(t, "when"),
				MinDomains: rapid.Int32Range(0, 3).Draw(t, "minDomains"),
			}
		}), 0, 2).Draw(t, "spread"),
		AntiAffinity: rapid.SliceOfN(rapid.Custom(func(t *rapid.T) capacity.AntiAffinity {
			return capacity.AntiAffinity{TopologyKey: zone, Set: rapid.SampledFrom([]string{"", "s"}).Draw(t, "set")}
		}), 0, 2).Draw(t, "antiAffinity"),
	}
	if rapid.Bool().Draw(t, "hasGroup") {
		p.Group = &capacity.Group{
			Name:        "ns/gang",
			MinCount:    rapid.Int32Range(0, 64).Draw(t, "minCount"),
			TopologyKey: rapid.SampledFrom([]string{"", rack, zone}).Draw(t, "topologyKey"),
		}
		if key := p.Group.TopologyKey; key != "" {
			// As Rollup.Snapshot gives it.
			p.Requirements = append(p.Requirements, capacity.Requirement{Key: key, Operator: capacity.OperatorSame})
		}
	}
	return p.Canonical()
}

func TestNeedsSurviveTheWire(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := genProfile(t)
		count := rapid.Int32Range(0, 1<<30).Draw(t, "count")
		want := capacity.Need{ID: p.ID(), Profile: p, Count: count, Pending: rapid.Int32Range(0, count).Draw(t, "pending")}
		got, err := NeedFromProto(overTheWire(t, NeedToProto(want), &pb.CapacityNeed{}))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("need (-sent +received):\n%s", diff)
		}
		if got.Profile.ID() != want.ID {
			t.Fatalf("the receiver computes the ID %s, the sender said %s", got.Profile.ID(), want.ID)
		}
	})
}

func TestDaemonsSurviveTheWire(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := capacity.Daemon{
			NodeAffinity: rapid.SliceOfN(rapid.Custom(genRequirements), 0, 3).Draw(t, "nodeAffinity"),
			Tolerations:  genTolerations(t),
			Resources:    genResources(t),
		}
		got, err := DaemonFromProto(overTheWire(t, DaemonToProto(want), &pb.DaemonOverhead{}))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got, equateEmpty); diff != "" {
			t.Fatalf("daemon (-sent +received):\n%s", diff)
		}
	})
}

func TestTaintsSurviveTheWire(t *testing.T) {
	want := []corev1.Taint{
		{Key: "nvidia.com/gpu", Effect: corev1.TaintEffectNoSchedule},
		{Key: "team", Value: "ml", Effect: corev1.TaintEffectNoExecute},
		{Key: "team", Value: "ml", Effect: corev1.TaintEffectPreferNoSchedule},
	}
	got, err := TaintsFromProto(TaintsToProto(want))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("taints (-sent +received):\n%s", diff)
	}
}

func TestASnapshotSurvivesTheWire(t *testing.T) {
	want := realisticRollup(t)
	got, err := SnapshotFromProto(overTheWire(t, SnapshotToProto(want), &pb.ClusterCapacityNeeds{}))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got, equateEmpty); diff != "" {
		t.Errorf("snapshot (-sent +received):\n%s", diff)
	}
}

// good is a row that is accepted; each case spoils one field of it.
func good() *pb.CapacityNeed {
	return &pb.CapacityNeed{
		Requirements: []*pb.NodeSelectorRequirement{{Key: zone, Operator: "In", Values: []string{"a"}}},
		Resources:    map[string]string{"cpu": "1"},
		Count:        3,
		Spread:       []*pb.TopologySpread{{TopologyKey: zone, MaxSkew: 1, WhenUnsatisfiable: "DoNotSchedule"}},
		Tolerations:  []*pb.Toleration{{Key: "gpu", Operator: "Exists"}},
		Group:        &pb.Group{Name: "ns/gang", MinCount: 3},
		AntiAffinity: []*pb.AntiAffinity{{TopologyKey: zone, Set: "s"}},
		Alternatives: []*pb.RequirementSet{{Requirements: []*pb.NodeSelectorRequirement{{Key: "disk", Operator: "Exists"}}}},
		Pending:      1,
	}
}

func TestABadRowIsRefusedByFieldAndValue(t *testing.T) {
	for name, tc := range map[string]struct {
		spoil func(*pb.CapacityNeed)
		want  string
	}{
		"quantity":           {func(n *pb.CapacityNeed) { n.Resources["cpu"] = "abc" }, `resources["cpu"]: "abc"`},
		"negative quantity":  {func(n *pb.CapacityNeed) { n.Resources["cpu"] = "-1" }, `resources["cpu"]: "-1"`},
		"negative count":     {func(n *pb.CapacityNeed) { n.Count = -1 }, `count: -1`},
		"negative pending":   {func(n *pb.CapacityNeed) { n.Pending = -1 }, `pending: -1`},
		"pending over count": {func(n *pb.CapacityNeed) { n.Pending = 4 }, `pending: 4`},
		"unknown operator": {func(n *pb.CapacityNeed) { n.Requirements[0].Operator = "Near" },
			`requirements[0].operator: "Near"`},
		"no operator":       {func(n *pb.CapacityNeed) { n.Requirements[0].Operator = "" }, `requirements[0].operator: ""`},
		"no key":            {func(n *pb.CapacityNeed) { n.Requirements[0].Key = "" }, `requirements[0].key: ""`},
		"In without values": {func(n *pb.CapacityNeed) { n.Requirements[0].Values = nil }, `requirements[0].values: []`},
		"Exists with values": {func(n *pb.CapacityNeed) {
			n.Alternatives[0].Requirements[0].Values = []string{"x"}
		}, `alternatives[0].requirements[0].values: ["x"]`},
		"Gt of a word": {func(n *pb.CapacityNeed) { n.Requirements[0].Operator = "Gt" }, `requirements[0].values[0]: "a"`},
		"Gt of two": {func(n *pb.CapacityNeed) {
			n.Requirements[0].Operator, n.Requirements[0].Values = "Gt", []string{"1", "2"}
		}, `requirements[0].values: ["1" "2"]`},
		"Same in an alternative": {func(n *pb.CapacityNeed) {
			n.Alternatives[0].Requirements[0].Operator = "Same"
		}, `alternatives[0].requirements[0].operator: "Same"`},
		"spread without key": {func(n *pb.CapacityNeed) { n.Spread[0].TopologyKey = "" }, `spread[0].topology_key: ""`},
		"skew of zero":       {func(n *pb.CapacityNeed) { n.Spread[0].MaxSkew = 0 }, `spread[0].max_skew: 0`},
		"unknown when": {func(n *pb.CapacityNeed) { n.Spread[0].WhenUnsatisfiable = "Never" },
			`spread[0].when_unsatisfiable: "Never"`},
		"negative domains": {func(n *pb.CapacityNeed) { n.Spread[0].MinDomains = -1 }, `spread[0].min_domains: -1`},
		"toleration operator": {func(n *pb.CapacityNeed) { n.Tolerations[0].Operator = "Near" },
			`tolerations[0].operator: "Near"`},
		"toleration effect": {func(n *pb.CapacityNeed) { n.Tolerations[0].Effect = "Never" },
			`tolerations[0].effect: "Never"`},
		"toleration of nothing": {func(n *pb.CapacityNeed) {
			n.Tolerations[0] = &pb.Toleration{Operator: "Equal"}
		}, `tolerations[0].operator: "Equal"`},
		"group without name": {func(n *pb.CapacityNeed) { n.Group.Name = "" }, `group.name: ""`},
		"negative minimum":   {func(n *pb.CapacityNeed) { n.Group.MinCount = -1 }, `group.min_count: -1`},
		"anti-affinity": {func(n *pb.CapacityNeed) { n.AntiAffinity[0].TopologyKey = "" },
			`anti_affinity[0].topology_key: ""`},
	} {
		t.Run(name, func(t *testing.T) {
			bad := good()
			tc.spoil(bad)
			_, err := SnapshotFromProto(&pb.ClusterCapacityNeeds{Needs: []*pb.CapacityNeed{good(), good(), good(), bad}})
			if err == nil || !strings.HasPrefix(err.Error(), "needs[3]."+tc.want) {
				t.Errorf("error %v, want it to begin with needs[3].%s", err, tc.want)
			}
		})
	}
}

func TestABadDaemonIsRefusedByFieldAndValue(t *testing.T) {
	for _, tc := range []struct {
		daemon *pb.DaemonOverhead
		want   string
	}{
		{&pb.DaemonOverhead{Resources: map[string]string{"cpu": "x"}}, `resources["cpu"]: "x"`},
		{&pb.DaemonOverhead{Tolerations: []*pb.Toleration{{Key: "k", Operator: "x"}}}, `tolerations[0].operator: "x"`},
		{&pb.DaemonOverhead{NodeAffinity: []*pb.RequirementSet{{
			Requirements: []*pb.NodeSelectorRequirement{{Key: "k", Operator: "Same"}},
		}}}, `node_affinity[0].requirements[0].operator: "Same"`},
	} {
		_, err := SnapshotFromProto(&pb.ClusterCapacityNeeds{Daemons: []*pb.DaemonOverhead{tc.daemon}})
		if err == nil || !strings.HasPrefix(err.Error(), "daemons[0]."+tc.want) {
			t.Errorf("error %v, want it to begin with daemons[0].%s", err, tc.want)
		}
	}
}

func TestABadTaintIsRefusedByFieldAndValue(t *testing.T) {
	for _, tc := range []struct {
		taint *pb.Taint
		want  string
	}{
		{&pb.Taint{Effect: "NoSchedule"}, `taints[0].key: ""`},
		{&pb.Taint{Key: "k", Effect: "Never"}, `taints[0].effect: "Never"`},
		{&pb.Taint{Key: "k"}, `taints[0].effect: ""`},
	} {
		_, err := TaintsFromProto([]*pb.Taint{tc.taint})
		if err == nil || !strings.HasPrefix(err.Error(), tc.want) {
			t.Errorf("error %v, want it to begin with %s", err, tc.want)
		}
	}
}

func TestAMissingRowIsRefused(t *testing.T) {
	if _, err := SnapshotFromProto(&pb.ClusterCapacityNeeds{Needs: []*pb.CapacityNeed{nil}}); err == nil {
		t.Error("no error")
	}
}

// A peer that knows only the source document sends no field above 5.
func TestADocumentOnlyPeerIsUnderstood(t *testing.T) {
	need, err := NeedFromProto(&pb.CapacityNeed{
		Requirements: []*pb.NodeSelectorRequirement{
			{Key: "node.kubernetes.io/instance-type", Operator: "In", Values: []string{"p5.48xlarge", "a3-highgpu-8g"}},
			{Key: rack, Operator: "Same"},
		},
		Resources: map[string]string{"cpu": "96", "memory": "768Gi", "nvidia.com/gpu": "8"},
		Priority:  1000000,
		Count:     64,
		Spread:    []*pb.TopologySpread{{TopologyKey: rack, MaxSkew: 1, WhenUnsatisfiable: "ScheduleAnyway"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := capacity.Profile{
		Requirements: []capacity.Requirement{
			{Key: "node.kubernetes.io/instance-type", Operator: "In", Values: []string{"a3-highgpu-8g", "p5.48xlarge"}},
			{Key: rack, Operator: capacity.OperatorSame},
		},
		Resources: capacity.Resources{"cpu": 96000, "memory": 768 << 30, "nvidia.com/gpu": 8},
		Priority:  1000000,
		Spread:    []capacity.Spread{{TopologyKey: rack, MaxSkew: 1, WhenUnsatisfiable: corev1.ScheduleAnyway}},
	}
	if diff := cmp.Diff(capacity.Need{ID: want.ID(), Profile: want, Count: 64}, need); diff != "" {
		t.Errorf("need (-want +got):\n%s", diff)
	}
}

// A peer may bind a group by several keys. Which of them becomes the group's does not depend on their order.
func TestAGroupBoundByTwoKeysIsReadTheSameInAnyOrder(t *testing.T) {
	row := func(keys ...string) string {
		n := &pb.CapacityNeed{Group: &pb.Group{Name: "ns/gang"}, Count: 1}
		for _, key := range keys {
			n.Requirements = append(n.Requirements, &pb.NodeSelectorRequirement{Key: key, Operator: "Same"})
		}
		need, err := NeedFromProto(n)
		if err != nil {
			t.Fatal(err)
		}
		return need.ID
	}
	if row(zone, rack) != row(rack, zone) {
		t.Error("the id depends on the order of the requirements")
	}
}

func TestRowsThatAPeerHasSplitAreAddedUp(t *testing.T) {
	a, b := good(), good()
	b.Count, b.Pending = 5, 2
	s, err := SnapshotFromProto(&pb.ClusterCapacityNeeds{Needs: []*pb.CapacityNeed{a, b}})
	if err != nil {
		t.Fatal(err)
	}
	if len(s.Needs) != 1 || s.Needs[0].Count != 8 || s.Needs[0].Pending != 3 {
		t.Errorf("needs %+v, want one row of 8 with 3 pending", s.Needs)
	}

	b.Id = s.Needs[0].ID
	b.Priority = 7
	if _, err := SnapshotFromProto(&pb.ClusterCapacityNeeds{Needs: []*pb.CapacityNeed{a, b}}); err == nil {
		t.Error("two profiles under one id were accepted")
	}
}

// realisticRollup is 10,000 pods of 20 profiles: web services, batch jobs and training gangs, and four DaemonSets.
func realisticRollup(t *testing.T) capacity.Snapshot {
	t.Helper()
	r := capacity.NewRollup(capacity.DemandTotal)
	for shape := range 20 {
		for i := range 500 {
			name := fmt.Sprintf("shape-%d-%d", shape, i)
			b := builders.Pod("team", name).Label("app", fmt.Sprint("app-", shape))
			switch {
			case shape < 10:
				b.Requests("cpu", fmt.Sprintf("%dm", 250*(1+shape)), "memory", fmt.Sprintf("%dMi", 512*(1+shape))).
					Spread(zone, 1, corev1.ScheduleAnyway)
			case shape < 15:
				b.Requests("cpu", fmt.Sprint(shape), "memory", "64Gi", "ephemeral-storage", "100Gi").Priority(-10).
					NodeSelector("node.kubernetes.io/instance-type", "m6i.8xlarge").
					Tolerates("batch", corev1.TaintEffectNoSchedule)
			default:
				b.Requests("cpu", "96", "memory", "768Gi", "nvidia.com/gpu", "8").Priority(1000000).
					PodGroup(fmt.Sprint("trainer-", shape)).PodAffinity(rack, "app", fmt.Sprint("app-", shape)).
					NodeAffinity(builders.NodeExpr(zone, corev1.NodeSelectorOpIn, "us-east-1a", "us-east-1b")).
					Tolerates("nvidia.com/gpu", corev1.TaintEffectNoSchedule)
			}
			pod := b.Obj()
			spec := capacity.ProfileOfPod(pod).WithMinCount(64).RequestSpec()
			r.UpsertPod(pod)
			r.UpsertRequest(builders.CapacityRequest("team", "cr-"+name).For(pod).Spec(spec).Obj())
		}
	}
	everything := corev1.Toleration{Operator: corev1.TolerationOpExists}
	for i := range 4 {
		r.UpsertDaemonSet(builders.DaemonSet("kube-system", fmt.Sprint("agent-", i)).
			Requests("cpu", "100m", "memory", fmt.Sprintf("%dMi", 64*(1+i))).
			Template(func(b *builders.PodBuilder) { b.Toleration(everything) }).Obj())
	}
	s := r.Snapshot()
	if len(s.Needs) != 20 {
		t.Fatalf("%d rows, want 20", len(s.Needs))
	}
	return s
}

func TestTenThousandPodsOfTwentyShapesAreFourKiBOnTheWire(t *testing.T) {
	msg := SnapshotToProto(realisticRollup(t))
	msg.ClusterId, msg.Session, msg.Sequence = "us-east-1-prod-0042", "0f8fad5b-d9cb-469f-a165-70867728950e", 1<<40
	if size := proto.Size(msg); size > 4096 {
		t.Errorf("the message has %d bytes, want at most 4096", size)
	} else {
		t.Logf("%d bytes", size)
	}
}
