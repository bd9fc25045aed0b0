package watchgroup

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/internal/controlplane"
)

// The API server refuses a spec that cannot be followed, with the field, before anybody acts on it.
func TestSpecsAreValidatedByTheAPIServer(t *testing.T) {
	c, ns := api(t)
	d := func(d time.Duration) *metav1.Duration { return &metav1.Duration{Duration: d} }
	for _, test := range []struct {
		field  string
		change func(*lbv1alpha1.WatchGroup)
	}{
		{"spec.virtualNodes", func(g *lbv1alpha1.WatchGroup) { g.Spec.VirtualNodes = 100_001 }},
		{"spec.virtualNodes", func(g *lbv1alpha1.WatchGroup) { g.Spec.VirtualNodes = -1 }},
		{"spec.hash", func(g *lbv1alpha1.WatchGroup) { g.Spec.Hash = "MD5" }},
		{"spec.assignment", func(g *lbv1alpha1.WatchGroup) { g.Spec.Assignment = "Random" }},
		{"spec.handoff", func(g *lbv1alpha1.WatchGroup) { g.Spec.Handoff = "Abrupt" }},
		{"spec.optIn", func(g *lbv1alpha1.WatchGroup) { g.Spec.OptIn = "Some" }},
		{"handoff", func(g *lbv1alpha1.WatchGroup) { g.Spec.Resources, g.Spec.Handoff = nil, lbv1alpha1.HandoffEventual }},
		{"spec.resources[0].resource", func(g *lbv1alpha1.WatchGroup) { g.Spec.Resources[0].Resource = "pods/status" }},
		{"spec.resources[1]", func(g *lbv1alpha1.WatchGroup) { g.Spec.Resources = append(g.Spec.Resources, g.Spec.Resources[0]) }},
		{"spec.lease", func(g *lbv1alpha1.WatchGroup) { g.Spec.Lease.RenewDeadline = d(10 * time.Second) }},
		{"spec.lease", func(g *lbv1alpha1.WatchGroup) { g.Spec.Lease.RetryPeriod = d(9 * time.Second) }},
		{"spec.lease.leaseDuration", func(g *lbv1alpha1.WatchGroup) { g.Spec.Lease.LeaseDuration = d(15500 * time.Millisecond) }},
		{"spec.lease.requestTimeout", func(g *lbv1alpha1.WatchGroup) { g.Spec.Lease.RequestTimeout = d(0) }},
		{"spec.newcomerGrace", func(g *lbv1alpha1.WatchGroup) { g.Spec.NewcomerGrace = d(-time.Second) }},
		{"spec.selector", func(g *lbv1alpha1.WatchGroup) { byNamespace(&g.Spec); g.Spec.Selector = "Fields" }},
		{"shardKey is required", func(g *lbv1alpha1.WatchGroup) { byNamespace(&g.Spec); g.Spec.ShardKey = "" }},
		{"shardKey is required", func(g *lbv1alpha1.WatchGroup) { g.Spec.ShardKey = lbv1alpha1.ShardKeyUID }},
		{"spec.shardKey", func(g *lbv1alpha1.WatchGroup) { byNamespace(&g.Spec); g.Spec.ShardKey = "Name" }},
		{"spec.optIn", func(g *lbv1alpha1.WatchGroup) { byNamespace(&g.Spec); g.Spec.OptIn = "" }},
		{"spec.assignment", func(g *lbv1alpha1.WatchGroup) {
			byNamespace(&g.Spec)
			g.Spec.Assignment = lbv1alpha1.AssignmentConsistentHash
		}},
		{"spec.resources", func(g *lbv1alpha1.WatchGroup) {
			byNamespace(&g.Spec)
			g.Spec.ShardKey = lbv1alpha1.ShardKeyUID
			g.Spec.Resources = append(g.Spec.Resources, lbv1alpha1.Resource{Resource: "secrets"})
		}},
		{"metadata.name must be a DNS label", func(g *lbv1alpha1.WatchGroup) { g.Name = "a.b" }},
	} {
		g := &lbv1alpha1.WatchGroup{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "bad"},
			Spec: lbv1alpha1.WatchGroupSpec{Resources: []lbv1alpha1.Resource{{Resource: "pods"}}}}
		test.change(g)
		if err := c.Create(t.Context(), g); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), test.field) {
			t.Errorf("%s: %v", test.field, err)
		}
	}
	g := newGroup(t, c, ns, nil)
	ranged := &lbv1alpha1.WatchGroup{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "ranged"},
		Spec: lbv1alpha1.WatchGroupSpec{Resources: []lbv1alpha1.Resource{{Resource: "secrets"}}}}
	byNamespace(&ranged.Spec)
	if err := c.Create(t.Context(), ranged); err != nil {
		t.Fatal(err)
	}
	for field, change := range map[string]func() *lbv1alpha1.WatchGroup{
		"virtualNodes is immutable": func() *lbv1alpha1.WatchGroup { g := g.DeepCopy(); g.Spec.VirtualNodes++; return g },
		"selector is immutable":     func() *lbv1alpha1.WatchGroup { g := g.DeepCopy(); byNamespace(&g.Spec); return g },
		"shardKey is immutable": func() *lbv1alpha1.WatchGroup {
			g := ranged.DeepCopy()
			g.Spec.ShardKey = lbv1alpha1.ShardKeyUID
			return g
		},
	} {
		g := change()
		patch := client.MergeFrom(&lbv1alpha1.WatchGroup{ObjectMeta: metav1.ObjectMeta{Namespace: g.Namespace, Name: g.Name,
			ResourceVersion: g.ResourceVersion}})
		if err := c.Patch(t.Context(), g, patch); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %v", field, err)
		}
	}
	defaulted := &lbv1alpha1.WatchGroup{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "defaulted"},
		Spec: lbv1alpha1.WatchGroupSpec{Resources: []lbv1alpha1.Resource{{Resource: "secrets"}}}}
	want := defaulted.Spec.WithDefaults()
	if err := c.Create(t.Context(), defaulted); err != nil {
		t.Fatal(err)
	}
	if fmt.Sprintf("%v", defaulted.Spec) != fmt.Sprintf("%v", want) {
		t.Errorf("the API server fills in %+v, WithDefaults %+v", defaulted.Spec, want)
	}
	keys := &lbv1alpha1.WatchGroup{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "keys"}}
	if err := c.Create(t.Context(), keys); err != nil {
		t.Errorf("a group whose members divide keys, without resources: %v", err)
	}
	slice := &lbv1alpha1.VirtualNodeSlice{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "parents.b"},
		Spec: lbv1alpha1.VirtualNodeSliceSpec{WatchGroup: "parents", Member: "a"}}
	if err := c.Create(t.Context(), slice); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "metadata.name") {
		t.Errorf("a slice under another's name: %v", err)
	}
	slice.Name, slice.Spec.Owned = "parents.a", "0-4;7"
	if err := c.Create(t.Context(), slice); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "spec.owned") {
		t.Errorf("a set that is none: %v", err)
	}
}

// kubectl answers: who owns what, is anything moving, is anything unowned?
func TestColumnsAnswerWhoOwnsWhat(t *testing.T) {
	c, ns := api(t)
	k := newCast(t, c, newGroup(t, c, ns, slowLease))
	start(t, apiServer, coordinate)
	k.join("a", nil)
	k.share(map[string]int{"a": 100})
	k.join("b", nil)
	k.share(map[string]int{"a": 50, "b": 50})
	k.quiet(2)
	kubectl, err := controlplane.Binary("kubectl")
	if err != nil {
		t.Fatal(err)
	}
	table := func(args ...string) []map[string]string {
		t.Helper()
		out, err := exec.CommandContext(t.Context(), kubectl, append([]string{"--kubeconfig", plane.Kubeconfig(), "-n", ns, "get"},
			args...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		t.Logf("kubectl get %s\n%s", strings.Join(args, " "), out)
		lines := strings.Split(strings.TrimSpace(string(out)), "\n")
		var rows []map[string]string
		for _, line := range lines[1:] {
			row := make(map[string]string)
			cells := strings.Fields(line)
			for i, column := range strings.Fields(lines[0]) {
				if i < len(cells) {
					row[column] = cells[i]
				}
			}
			rows = append(rows, row)
		}
		return rows
	}
	check := func(row, want map[string]string) {
		t.Helper()
		for column, value := range want {
			if row[column] != value {
				t.Errorf("%s is %q, want %q: %v", column, row[column], value, row)
			}
		}
	}
	groups := table("wg")
	check(groups[0], map[string]string{"NAME": "parents", "VNS": "100", "MEMBERS": "2", "OWNED": "100", "MOVING": "0", "UNOWNED": "0",
		"UNLABELLED": "0"})
	check(table("watchgroup", "-o", "wide")[0], map[string]string{"ASSIGNMENT": "Balanced", "HANDOFF": "Exclusive", "ACCEPTED": "True"})
	slices := table("vnslice", "-o", "wide")
	if len(slices) != 2 {
		t.Fatalf("%d slices", len(slices))
	}
	check(slices[0], map[string]string{"NAME": "parents.a", "GROUP": "parents", "MEMBER": "a", "OWNED": "50", "INCOMING": "0",
		"DRAINING": "0"})
}
