package capacity_test

import (
	"fmt"
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/reflect/protoreflect"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	pb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/capacity/wire"
	"github.com/drover-sh/drover/internal/builders"
)

// The tests in this file each prove a statement of "Fleet-Scale Kubernetes: An Operating Model for Homogeneous
// Clusters with Decoupled Capacity" that belongs to this package; a test's name begins with the section.

const (
	zone = corev1.LabelTopologyZone
	rack = fleetv1alpha1.LabelRack
)

// The document's own examples.
const (
	requestManifest = `
metadata:
  name: cr-trainer-worker-42
  namespace: training
spec:
  requirements:
    - key: node.kubernetes.io/instance-type
      operator: In
      values: ["a3-highgpu-8g", "p5.48xlarge"]
    - key: topology.kubernetes.io/zone
      operator: In
      values: ["us-east-1a", "us-east-1b"]
  resources:
    requests:
      cpu: "96"
      memory: "768Gi"
      nvidia.com/gpu: "8"
  priority: 1000000
  topologySpread:
    - topologyKey: topology.kubernetes.io/zone
      maxSkew: 1
      whenUnsatisfiable: DoNotSchedule
`
	availableManifest = `
metadata:
  name: gpu-h100-us-east
  namespace: fleet-system
spec:
  requirements:
    - key: node.kubernetes.io/instance-type
      operator: In
      values: ["a3-highgpu-8g"]
  resources:
    cpu: "208"
    memory: "1872Gi"
    nvidia.com/gpu: "8"
  availableCount: 200
  availability: High
  cost: 31.22
  nodeTemplate:
    labels:
      accelerator-type: nvidia-h100-80gb
    taints:
      - key: nvidia.com/gpu
        effect: NoSchedule
`
)

func manifest[T any](t *testing.T, text string) *T {
	t.Helper()
	var out T
	if err := yaml.UnmarshalStrict([]byte(text), &out); err != nil {
		t.Fatal(err)
	}
	return &out
}

// trainer is one of a job's pods, bound to the others by a rack.
func trainer(i int) *builders.PodBuilder {
	return builders.Pod("training", fmt.Sprint("trainer-", i)).Label("job", "trainer").Priority(1000000).
		Requests("cpu", "96", "memory", "768Gi", "nvidia.com/gpu", "8").
		PodGroup("trainer").PodAffinity(rack, "job", "trainer")
}

func etl(i int) *builders.PodBuilder {
	return builders.Pod("batch", fmt.Sprint("etl-", i)).Label("job", "etl").Priority(500000).
		Requests("cpu", "96").Spread(zone, 1, corev1.DoNotSchedule)
}

func name(o interface {
	GetNamespace() string
	GetName() string
}) types.NamespacedName {
	return types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}
}

// fail takes in a pod that failed to schedule, and its request.
func fail(r *capacity.Rollup, pod *corev1.Pod) {
	r.UpsertPod(pod)
	spec := capacity.ProfileOfPod(pod).RequestSpec()
	r.UpsertRequest(builders.CapacityRequest(pod.Namespace, "cr-"+pod.Name).For(pod).Spec(spec).Obj())
}

// remove deletes a pod; garbage collection takes its request.
func remove(r *capacity.Rollup, pod *corev1.Pod) {
	r.DeletePod(name(pod))
	r.DeleteRequest(types.NamespacedName{Namespace: pod.Namespace, Name: "cr-" + pod.Name})
}

// rows says for every row what it is, how many it counts and how many of them wait.
func rows(r *capacity.Rollup) []string {
	var out []string
	for _, n := range r.Snapshot().Needs {
		out = append(out, fmt.Sprintf("priority %d: %d, %d pending, %v",
			n.Profile.Priority, n.Count, n.Pending, n.Profile.Requirements))
	}
	return out
}

func expectRows(t *testing.T, when string, r *capacity.Rollup, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, rows(r)); diff != "" {
		t.Errorf("%s, the roll-up is (-want +got):\n%s", when, diff)
	}
}

func TestSection6_1_TheExampleRequestSaysWhatItShows(t *testing.T) {
	cr := manifest[fleetv1alpha1.CapacityRequest](t, requestManifest)
	want := capacity.Profile{
		Requirements: []capacity.Requirement{
			{Key: "node.kubernetes.io/instance-type", Operator: capacity.OperatorIn, Values: []string{"a3-highgpu-8g",
				"p5.48xlarge"}},
			{Key: zone, Operator: capacity.OperatorIn, Values: []string{"us-east-1a", "us-east-1b"}},
		},
		Resources: capacity.Resources{"cpu": 96000, "memory": 768 << 30, "nvidia.com/gpu": 8},
		Priority:  1000000,
		Spread:    []capacity.Spread{{TopologyKey: zone, MaxSkew: 1, WhenUnsatisfiable: corev1.DoNotSchedule}},
	}
	if diff := cmp.Diff(want, capacity.ProfileOfRequest(&cr.Spec)); diff != "" {
		t.Errorf("profile (-want +got):\n%s", diff)
	}
}

func TestSection6_1_ARequestHasNoCountTheRollUpAggregates(t *testing.T) {
	if f, ok := reflect.TypeFor[fleetv1alpha1.CapacityRequestSpec]().FieldByName("Count"); ok {
		t.Errorf("CapacityRequestSpec has a field %s", f.Name)
	}
	r := capacity.NewRollup(capacity.DemandTotal)
	for i := range 64 {
		fail(r, etl(i).Obj())
	}
	expectRows(t, "with 64 pods of one kind", r, "priority 500000: 64, 64 pending, []")
}

func TestSection6_1_WhateverExistsIsRolledUpWhoeverMadeIt(t *testing.T) {
	for _, mode := range []capacity.DemandMode{capacity.DemandTotal, capacity.DemandRequestsOnly} {
		r := capacity.NewRollup(mode)
		cr := manifest[fleetv1alpha1.CapacityRequest](t, requestManifest)
		r.UpsertRequest(cr)
		if needs := r.Snapshot().Needs; len(needs) != 1 || needs[0].Count != 1 {
			t.Errorf("mode %s: a request made by hand counts as %+v", mode, needs)
		}
		r.DeleteRequest(name(cr))
		expectRows(t, "after it is deleted", r)
	}
}

func TestSection6_1_RequestsAreTheTotalNotAnIncrement(t *testing.T) {
	r := capacity.NewRollup(capacity.DemandTotal)
	r.UpsertNode(builders.Node("n").Machine("m").Obj())
	fail(r, etl(0).Obj())
	expectRows(t, "while the pod waits", r, "priority 500000: 1, 1 pending, []")
	r.UpsertPod(etl(0).Node("n").Obj())
	expectRows(t, "when the pod has its node", r, "priority 500000: 1, 0 pending, []")
	expectRows(t, "and the next time", r, "priority 500000: 1, 0 pending, []")
}

func TestSection6_1_WithdrawalIsImplicit(t *testing.T) {
	r := capacity.NewRollup(capacity.DemandTotal)
	fail(r, etl(0).Obj())
	remove(r, etl(0).Obj())
	expectRows(t, "after the pod is deleted", r)
}

func TestSection6_2_AvailableCapacityIsAHintNotAReservation(t *testing.T) {
	ac := manifest[fleetv1alpha1.AvailableCapacity](t, availableManifest)
	pod := trainer(0).Tolerates("nvidia.com/gpu", corev1.TaintEffectNoSchedule).Obj()
	for _, count := range []int32{200, 0} {
		ac.Spec.AvailableCount = count
		d := capacity.Classify(pod, capacity.Facts{Templates: []capacity.Template{capacity.TemplateOf(ac)}})
		if !d.Request {
			t.Errorf("with %d available: %s, %s; want a request", count, d.Reason, d.Message)
		}
	}
}

func TestSection6_2_WithoutAvailableCapacityTheSystemWorks(t *testing.T) {
	if d := capacity.Classify(trainer(0).Obj(), capacity.Facts{}); !d.Request {
		t.Errorf("%s, %s; want a request", d.Reason, d.Message)
	}
}

func TestSection7_RequestsAggregateByRequirementsResourcesPriorityAndTopology(t *testing.T) {
	base := func() *builders.CapacityRequestBuilder {
		return builders.CapacityRequest("ns", "a").Requests("cpu", "1").Priority(1).
			Requires(zone, corev1.NodeSelectorOpIn, "a").Spread(zone, 1, corev1.DoNotSchedule)
	}
	for what, other := range map[string]*builders.CapacityRequestBuilder{
		"requirements": base().Requires("disk", corev1.NodeSelectorOpExists),
		"resources":    base().Requests("memory", "1Gi"),
		"priority":     base().Priority(2),
		"topology":     base().Spread(rack, 1, corev1.DoNotSchedule),
		"nothing":      base(),
	} {
		r := capacity.NewRollup(capacity.DemandTotal)
		r.UpsertRequest(base().Obj())
		cr := other.Obj()
		cr.Name = "b"
		r.UpsertRequest(cr)
		want := 2
		if what == "nothing" {
			want = 1
		}
		if got := len(r.Snapshot().Needs); got != want {
			t.Errorf("two requests that differ in %s are %d rows, want %d", what, got, want)
		}
	}
}

func TestSection7_EachSendIsAFullReplacement(t *testing.T) {
	r := capacity.NewRollup(capacity.DemandTotal)
	fail(r, etl(0).Obj())
	first := wire.SnapshotToProto(r.Snapshot())
	second := wire.SnapshotToProto(r.Snapshot())
	if diff := cmp.Diff(first.String(), second.String()); diff != "" {
		t.Errorf("a second send without a change differs (-first +second):\n%s", diff)
	}
	fail(r, trainer(0).Obj())
	if got := len(wire.SnapshotToProto(r.Snapshot()).GetNeeds()); got != 2 {
		t.Errorf("the next send has %d rows, want the old one and the new one", got)
	}
}

func TestSection7_TenThousandRequestsAreTwentyRows(t *testing.T) {
	r := capacity.NewRollup(capacity.DemandTotal)
	for i := range 10_000 {
		pod := builders.Pod("ns", fmt.Sprint("p-", i)).Requests("cpu", fmt.Sprint(1+i%20)).Obj()
		fail(r, pod)
	}
	needs := r.Snapshot().Needs
	if len(needs) != 20 {
		t.Fatalf("%d rows, want 20", len(needs))
	}
	for _, n := range needs {
		if n.Count != 500 || n.Pending != 500 {
			t.Errorf("row of %v counts %d, %d pending; want 500 of each", n.Profile.Resources, n.Count, n.Pending)
		}
	}
}

func TestSection7_TheDocumentsFieldsHaveTheDocumentsNumbers(t *testing.T) {
	for message, fields := range map[protoreflect.ProtoMessage][]string{
		&pb.ClusterCapacityNeeds{}:    {"cluster_id", "timestamp", "needs"},
		&pb.CapacityNeed{}:            {"requirements", "resources", "priority", "count", "spread"},
		&pb.TopologySpread{}:          {"topology_key", "max_skew", "when_unsatisfiable"},
		&pb.NodeSelectorRequirement{}: {"key", "operator", "values"},
		&pb.Acknowledgement{}:         {"acknowledged"},
	} {
		d := message.ProtoReflect().Descriptor()
		var got []string
		for n := protoreflect.FieldNumber(1); n < 6; n++ {
			if f := d.Fields().ByNumber(n); f != nil {
				got = append(got, string(f.Name()))
			}
		}
		if diff := cmp.Diff(fields, got); diff != "" {
			t.Errorf("%s, fields below 6 (-document +ours):\n%s", d.FullName(), diff)
		}
	}
}

func TestSection8_CoLocationBecomesTheSameOperatorInTheRollUp(t *testing.T) {
	r := capacity.NewRollup(capacity.DemandTotal)
	fail(r, trainer(0).Obj())
	row := wire.SnapshotToProto(r.Snapshot()).GetNeeds()[0]
	reqs := row.GetRequirements()
	if len(reqs) != 1 || reqs[0].GetKey() != rack || reqs[0].GetOperator() != "Same" || len(reqs[0].GetValues()) != 0 {
		t.Errorf("requirements on the wire %v, want {%s, Same}", reqs, rack)
	}
}

func TestSection8_SameExistsOnTheWireOnly(t *testing.T) {
	r := capacity.NewRollup(capacity.DemandTotal)
	fail(r, trainer(0).Obj())
	spec := r.Snapshot().Needs[0].Profile.RequestSpec()
	if len(spec.Requirements) != 0 || spec.Group == nil || spec.Group.TopologyKey != rack {
		t.Errorf("spec %+v: want no requirement, and a group with the rack", spec)
	}
	if back, want := capacity.ProfileOfRequest(&spec).ID(), capacity.ProfileOfPod(trainer(1).Obj()).ID(); back != want {
		t.Errorf("the row's request has ID %s, the pod %s", back, want)
	}
}

func TestSection8_SameWithValuesKeepsThem(t *testing.T) {
	need, err := wire.NeedFromProto(&pb.CapacityNeed{
		Requirements: []*pb.NodeSelectorRequirement{{Key: zone, Operator: "Same", Values: []string{"us-east-1b",
			"us-east-1a"}}},
		Count: 2,
	})
	if err != nil {
		t.Fatal(err)
	}
	want := []capacity.Requirement{{Key: zone, Operator: capacity.OperatorSame, Values: []string{"us-east-1a",
		"us-east-1b"}}}
	if diff := cmp.Diff(want, need.Profile.Requirements); diff != "" {
		t.Errorf("requirements (-want +got):\n%s", diff)
	}
}

func TestSection8_SpreadIsCopiedFromThePod(t *testing.T) {
	pod := builders.Pod("ns", "p").Spread(zone, 2, corev1.DoNotSchedule).Spread(rack, 1, corev1.ScheduleAnyway).Obj()
	want := []fleetv1alpha1.TopologySpread{
		{TopologyKey: rack, MaxSkew: 1, WhenUnsatisfiable: corev1.ScheduleAnyway},
		{TopologyKey: zone, MaxSkew: 2, WhenUnsatisfiable: corev1.DoNotSchedule},
	}
	if diff := cmp.Diff(want, capacity.ProfileOfPod(pod).RequestSpec().TopologySpread); diff != "" {
		t.Errorf("topology spread (-want +got):\n%s", diff)
	}
}

func TestSection9_PriorityIsThePodsOwn(t *testing.T) {
	if got := capacity.ProfileOfPod(trainer(0).Obj()).RequestSpec().Priority; got != 1000000 {
		t.Errorf("priority %d, want 1000000", got)
	}
}

func TestSection10_TrainingStockOutAndWithdrawal(t *testing.T) {
	r := capacity.NewRollup(capacity.DemandTotal)
	for i := range 64 {
		fail(r, trainer(i).Obj())
	}
	for i := range 10 {
		fail(r, etl(i).Obj())
	}
	gpus := func(pending int) string {
		return fmt.Sprintf("priority 1000000: 64, %d pending, [%s same]", pending, rack)
	}
	const batch = "priority 500000: 10, 10 pending, []"
	expectRows(t, "with 74 requests", r, gpus(64), batch)

	// Half of the machines can be had. The roll-up still says 64: the autoscaler knows what it has launched.
	for i := range 32 {
		node := fmt.Sprint("node-", i)
		r.UpsertNode(builders.Node(node).Machine(node).Obj())
		r.UpsertPod(trainer(i).Node(node).Obj())
	}
	expectRows(t, "with 32 of them running", r, gpus(32), batch)

	for i := range 64 {
		remove(r, trainer(i).Obj())
	}
	expectRows(t, "when the training is over", r, batch)
}
