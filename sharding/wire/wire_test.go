package wire

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"pgregory.net/rapid"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
)

func drawSet(t *rapid.T, label string) sharding.Set {
	return sharding.SetOf(rapid.SliceOf(rapid.Map(rapid.IntRange(0, sharding.MaxVirtualNodes-1),
		func(i int) sharding.VirtualNode { return sharding.VirtualNode(i) })).Draw(t, label)...)
}

func drawEpoch(t *rapid.T) sharding.Epoch {
	return sharding.Epoch(rapid.Int64Range(0, 1<<40).Draw(t, "epoch"))
}

func drawKnown(t *rapid.T) *sharding.Versions {
	if rapid.Bool().Draw(t, "nothing known") {
		return nil
	}
	versions := sharding.Versions{}
	for _, r := range rapid.SliceOf(rapid.SampledFrom([]sharding.Resource{"pods", "parents.example.com"})).Draw(t, "resources") {
		versions[r] = sharding.Version(rapid.StringMatching(`[1-9][0-9]{0,9}`).Draw(t, "version"))
	}
	return &versions
}

func drawSlice(t *rapid.T) sharding.Slice {
	name := rapid.StringMatching(`[a-z]{0,8}`)
	orders := func(label string) []sharding.Order {
		return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) sharding.Order {
			return sharding.Order{Epoch: drawEpoch(t), VNs: drawSet(t, "vns")}
		}), 0, 3).Draw(t, label)
	}
	s := sharding.Slice{
		Member: name.Draw(t, "member"), Session: name.Draw(t, "session"), Claim: name.Draw(t, "claim"),
		Epoch: drawEpoch(t), Owned: drawSet(t, "owned"), Incoming: orders("incoming"), Draining: orders("draining"),
		Version: name.Draw(t, "version"),
		Status: sharding.SliceStatus{
			Session: name.Draw(t, "status session"), Epoch: drawEpoch(t), Settled: drawEpoch(t), Warm: orders("warm"),
			Leaving: rapid.Bool().Draw(t, "leaving"),
		},
	}
	for _, r := range rapid.SliceOfDistinct(rapid.SampledFrom([]string{"pods", "parents.example.com"}), rapid.ID).Draw(t, "unfiltered") {
		s.Status.Unfiltered = append(s.Status.Unfiltered, sharding.Resource(r))
	}
	for range rapid.IntRange(0, 3).Draw(t, "grants") {
		s.Grants = append(s.Grants, sharding.Grant{Epoch: drawEpoch(t), VNs: drawSet(t, "granted"), Known: drawKnown(t)})
	}
	for range rapid.IntRange(0, 3).Draw(t, "releases") {
		s.Status.Released = append(s.Status.Released,
			sharding.Release{Epoch: drawEpoch(t), VNs: drawSet(t, "released"), Known: drawKnown(t)})
	}
	return s
}

// What the core says reaches the core of another process whole, by way of the JSON that the API server stores.
func TestSlicesGoThroughTheAPIUnchanged(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSlice(t)
		o := lbv1alpha1.VirtualNodeSlice{
			ObjectMeta: metav1.ObjectMeta{Name: "n", ResourceVersion: s.Version},
			Spec:       SliceSpec("group", s),
			Status:     SliceStatus(s.Status),
		}
		data, err := json.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		var stored lbv1alpha1.VirtualNodeSlice
		if err := json.Unmarshal(data, &stored); err != nil {
			t.Fatal(err)
		}
		back, err := Slice(&stored)
		if err != nil {
			t.Fatal(err)
		}
		// An empty Known is not a missing one: EquateEmpty looks through the pointer, not over it.
		if diff := cmp.Diff(s, back, cmpopts.EquateEmpty()); diff != "" {
			t.Fatalf("(-sent +received)\n%s", diff)
		}
		if got := stored.Spec.Counts.Owned; int(got) != s.Owned.Len() {
			t.Fatalf("counts.owned is %d of %v", got, s.Owned)
		}
	})
}

func TestShardRanges(t *testing.T) {
	good := lbv1alpha1.WatchGroupSpec{Selector: lbv1alpha1.SelectorShardRange, ShardKey: lbv1alpha1.ShardKeyNamespace,
		OptIn: lbv1alpha1.OptInAll, Resources: []lbv1alpha1.Resource{{Resource: "pods"}, {Resource: "secrets"}}}
	if r, ok, err := ShardRanges(good); err != nil || !ok || r != (sharding.HashRanges{V: 1000, Key: sharding.ShardByNamespace}) {
		t.Errorf("ranges %+v, %v: %v", r, ok, err)
	}
	if _, ok, err := ShardRanges(lbv1alpha1.WatchGroupSpec{}); err != nil || ok {
		t.Errorf("a group with labels has ranges: %v, %v", ok, err)
	}
	for want, change := range map[string]func(*lbv1alpha1.WatchGroupSpec){
		`spec.selector: "Fields"`:           func(s *lbv1alpha1.WatchGroupSpec) { s.Selector = "Fields" },
		`spec.shardKey: ""`:                 func(s *lbv1alpha1.WatchGroupSpec) { s.ShardKey = "" },
		`spec.shardKey: "Name"`:             func(s *lbv1alpha1.WatchGroupSpec) { s.ShardKey = "Name" },
		`spec.shardKey: "Namespace" has no`: func(s *lbv1alpha1.WatchGroupSpec) { s.Selector = "" },
		`spec.optIn: "Annotated"`:           func(s *lbv1alpha1.WatchGroupSpec) { s.OptIn = "" },
		`spec.assignment: "ConsistentHash"`: func(s *lbv1alpha1.WatchGroupSpec) { s.Assignment = lbv1alpha1.AssignmentConsistentHash },
		`spec.resources: 2 resources`:       func(s *lbv1alpha1.WatchGroupSpec) { s.ShardKey = lbv1alpha1.ShardKeyUID },
	} {
		spec := good
		change(&spec)
		if _, err := Coordinator("c", spec); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v does not say %s", err, want)
		}
	}
}

func TestSetsThatCannotBeReadAreNamed(t *testing.T) {
	for _, test := range []struct {
		set   func(*lbv1alpha1.VirtualNodeSlice)
		field string
	}{
		{func(o *lbv1alpha1.VirtualNodeSlice) { o.Spec.Owned = "9-3" }, "spec.owned"},
		{func(o *lbv1alpha1.VirtualNodeSlice) { o.Spec.Grants = []lbv1alpha1.Grant{{}, {VirtualNodes: "9-3"}} },
			"spec.grants[1].virtualNodes"},
		{func(o *lbv1alpha1.VirtualNodeSlice) { o.Spec.Draining = []lbv1alpha1.Order{{VirtualNodes: "9-3"}} },
			"spec.draining[0].virtualNodes"},
		{func(o *lbv1alpha1.VirtualNodeSlice) { o.Status.Released = []lbv1alpha1.Release{{VirtualNodes: "9-3"}} },
			"status.released[0].virtualNodes"},
	} {
		o := &lbv1alpha1.VirtualNodeSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "g.a"}}
		test.set(o)
		_, err := Slice(o)
		for _, part := range []string{"ns/g.a", test.field, `"9-3"`} {
			if err == nil || !strings.Contains(err.Error(), part) {
				t.Errorf("error %v does not mention %s", err, part)
			}
		}
	}
}

func TestSpecsBecomeCoordinators(t *testing.T) {
	spec := lbv1alpha1.WatchGroupSpec{Resources: []lbv1alpha1.Resource{{Resource: "pods"}}}
	c, err := Coordinator("c1", spec)
	if err != nil {
		t.Fatal(err)
	}
	want := sharding.Coordinator{Claim: "c1", VirtualNodes: 1000, Mode: sharding.Exclusive, Assignment: sharding.Balanced{Unit: 1}}
	if diff := cmp.Diff(want, c); diff != "" {
		t.Errorf("defaults (-want +got)\n%s", diff)
	}
	if diff := cmp.Diff(sharding.DefaultLeasePolicy(), LeasePolicy(spec)); diff != "" {
		t.Errorf("the defaults of the API are not those of the core (-core +API)\n%s", diff)
	}
	if b := Buckets(lbv1alpha1.WatchGroupSpec{VirtualNodes: 100_000}); b.Count() > sharding.DefaultMaxBuckets || b.Size != 98 {
		t.Errorf("buckets of 100,000: %+v", b)
	}
	if got := Resource(schema.GroupResource{Group: "example.com", Resource: "parents"}); got != "parents.example.com" {
		t.Errorf("resource is named %q", got)
	}
	for field, bad := range map[string]lbv1alpha1.WatchGroupSpec{
		`spec.assignment: "Random"`:    {Assignment: "Random"},
		`spec.hash: "MD5"`:             {Hash: "MD5"},
		`spec.handoff: "Abrupt"`:       {Handoff: "Abrupt"},
		`spec.virtualNodes: 100001`:    {VirtualNodes: 100_001},
		`spec.lease.renewDeadline: 1m`: {Lease: lbv1alpha1.LeaseParameters{RenewDeadline: &metav1.Duration{Duration: time.Minute}}},
	} {
		if _, err := Coordinator("c1", bad); err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("error %v does not mention %s", err, field)
		}
	}
}
