package watchgroup

import (
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
)

// twoPerBucket is a group of 2,000 Virtual Nodes, of which two make a bucket.
var twoPerBucket = scheme{buckets: sharding.BucketsFor(2000, sharding.DefaultMaxBuckets)}

func carrying(vn, bucket string) *metav1.PartialObjectMetadata {
	o := &metav1.PartialObjectMetadata{}
	o.Labels = map[string]string{"mine": "kept"}
	if vn != "" {
		o.Labels[sharding.LabelVirtualNode] = vn
	}
	if bucket != "" {
		o.Labels[sharding.LabelBucket] = bucket
	}
	return o
}

func TestUpdatesLeaveLabelsAsTheyAre(t *testing.T) {
	right := labels{"8", "4"}
	for name, test := range map[string]struct {
		before, after *metav1.PartialObjectMetadata
		right         *labels
		outcome       string
		set           *labels
	}{
		"nothing changes":              {carrying("8", "4"), carrying("8", "4"), nil, outcomeKept, nil},
		"both are left out":            {carrying("8", "4"), carrying("", ""), nil, outcomeRestored, &right},
		"the bucket is left out":       {carrying("8", "4"), carrying("8", ""), nil, outcomeRestored, &right},
		"an edit is the policy's":      {carrying("8", "4"), carrying("9", "4"), nil, outcomeKept, nil},
		"unlabelled stays so":          {carrying("", ""), carrying("", ""), nil, outcomeNone, nil},
		"the backfill labels":          {carrying("", ""), carrying("8", "4"), &right, outcomeKept, nil},
		"somebody labels":              {carrying("", ""), carrying("6", "3"), &right, outcomeStripped, nil},
		"somebody labels a stranger":   {carrying("", ""), carrying("6", "3"), nil, outcomeStripped, nil},
		"the audit mends":              {carrying("abc", ""), carrying("8", "4"), &right, outcomeKept, nil},
		"the audit mends the bucket":   {carrying("6", ""), carrying("6", "3"), &right, outcomeKept, nil},
		"a broken label is left alone": {carrying("abc", ""), carrying("abc", ""), nil, outcomeNone, nil},
	} {
		t.Run(name, func(t *testing.T) {
			if test.right != nil && !gains(twoPerBucket, test.before, test.after) {
				t.Error("it gains labels, and nobody would look what they should be")
			}
			v := onUpdate(twoPerBucket, test.before, test.after, test.right)
			if v.outcome != test.outcome || (v.set == nil) != (test.set == nil) || v.set != nil && *v.set != *test.set ||
				v.strip != (test.outcome == outcomeStripped) {
				t.Errorf("got %+v, want %s %v", v, test.outcome, test.set)
			}
		})
	}
}

func TestBothLabelsHaveToBeRight(t *testing.T) {
	for _, l := range []labels{{"", ""}, {"abc", "1"}, {"2000", "1000"}, {"08", "4"}, {"8", "5"}, {"8", ""}, {"-1", "0"}} {
		if _, ok := l.valid(twoPerBucket.buckets); ok {
			t.Errorf("%v counts as labels of a Virtual Node", l)
		}
	}
	if vn, ok := (labels{"1999", "999"}).valid(twoPerBucket.buckets); !ok || vn != 1999 {
		t.Errorf("got %d, %v", vn, ok)
	}
}

// A group that is added later takes nothing from an older one.
func TestResourcesAreSharedByGroupsThatAgree(t *testing.T) {
	group := func(name string, minute int, v int32, resources ...string) lbv1alpha1.WatchGroup {
		g := lbv1alpha1.WatchGroup{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name,
			CreationTimestamp: metav1.NewTime(acquired.Add(time.Duration(minute) * time.Minute))}}
		g.Spec.VirtualNodes = v
		for _, r := range resources {
			g.Spec.Resources = append(g.Spec.Resources, lbv1alpha1.Resource{Resource: r})
		}
		return g
	}
	all, refused := schemes([]lbv1alpha1.WatchGroup{
		group("third", 3, 7, "pods", "secrets"),
		group("first", 1, 100, "pods", "configmaps"),
		group("second", 2, 100, "pods"),
		group("broken", 0, 100_001, "nodes"),
	})
	if len(refused) != 2 || refused["ns/third"].reason != lbv1alpha1.ReasonConflict || refused["ns/broken"].reason != lbv1alpha1.ReasonInvalid {
		t.Fatalf("refused: %v", refused)
	}
	for _, part := range []string{"spec.resources[0]", "ns/first", "pods", "100", "7"} {
		if !strings.Contains(refused["ns/third"].message, part) {
			t.Errorf("%q does not mention %s", refused["ns/third"].message, part)
		}
	}
	if len(all) != 2 || all[schema.GroupResource{Resource: "pods"}].buckets.V != 100 {
		t.Errorf("schemes: %v", all)
	}
	if !all[schema.GroupResource{Resource: "pods"}].siblings[schema.GroupResource{Resource: "configmaps"}] {
		t.Error("children of the same group are not waited for")
	}
}

// An older group that is edited takes no resource from a younger one that works with it: its objects would get other
// numbers. So it stays whatever is edited next.
func TestAnEditTakesNoResourceFromAGroupThatWorks(t *testing.T) {
	group := func(name string, minute int, v int32) lbv1alpha1.WatchGroup {
		g := lbv1alpha1.WatchGroup{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, Generation: 1,
			CreationTimestamp: metav1.NewTime(acquired.Add(time.Duration(minute) * time.Minute))}}
		g.Spec.VirtualNodes, g.Spec.Resources = v, []lbv1alpha1.Resource{{Resource: "pods"}}
		return g
	}
	accepted := func(g *lbv1alpha1.WatchGroup, status metav1.ConditionStatus) {
		set(g, &g.Status, metav1.Condition{Type: lbv1alpha1.ConditionAccepted, Status: status, Reason: "Any"})
	}
	older, younger := group("older", 1, 100), group("younger", 2, 7)
	wants := func(what, first, last string) {
		t.Helper()
		all, refused := schemes([]lbv1alpha1.WatchGroup{older, younger})
		if got := all[schema.GroupResource{Resource: "pods"}].group; got != first || len(refused) != 1 || refused[last] == nil {
			t.Errorf("%s: pods are of %s, refused are %v", what, got, refused)
		}
	}
	wants("nobody knows them yet", "ns/older", "ns/younger")
	accepted(&older, metav1.ConditionTrue)
	accepted(&younger, metav1.ConditionTrue)
	older.Generation++
	wants("the older one is edited", "ns/younger", "ns/older")
	accepted(&older, metav1.ConditionFalse)
	wants("it is refused", "ns/younger", "ns/older")
	younger.Generation++
	wants("the younger one is edited", "ns/younger", "ns/older")
}

// Members that work Virtual Nodes out for themselves need no labels, and may stand beside groups that have others.
func TestAGroupThatTakesNoObjectHasNoScheme(t *testing.T) {
	first := lbv1alpha1.WatchGroup{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "first"}}
	first.Spec = lbv1alpha1.WatchGroupSpec{VirtualNodes: 100, OptIn: lbv1alpha1.OptInNone, Resources: []lbv1alpha1.Resource{{Resource: "pods"}}}
	second := lbv1alpha1.WatchGroup{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "second"}}
	second.Spec = lbv1alpha1.WatchGroupSpec{VirtualNodes: 7, Resources: []lbv1alpha1.Resource{{Resource: "secrets"}, {Resource: "pods"}}}
	third := *first.DeepCopy()
	third.Name, third.Spec.VirtualNodes = "third", 13
	all, refused := schemes([]lbv1alpha1.WatchGroup{first, second, third})
	if len(refused) != 0 {
		t.Errorf("refused: %v", refused)
	}
	if s := all[schema.GroupResource{Resource: "pods"}]; len(all) != 2 || s.buckets.V != 7 || s.group != "ns/second" {
		t.Errorf("schemes: %v", all)
	}
	if got := labelledResources(&first); len(got) != 0 {
		t.Errorf("the objects of %v are looked at", got)
	}
}
