package watchgroup

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
)

func byNamespace(s *lbv1alpha1.WatchGroupSpec) {
	s.Selector, s.ShardKey, s.OptIn = lbv1alpha1.SelectorShardRange, lbv1alpha1.ShardKeyNamespace, lbv1alpha1.OptInAll
}

// status returns the group's status.
func (e *everything) status() lbv1alpha1.WatchGroupStatus {
	e.t.Helper()
	g := &lbv1alpha1.WatchGroup{}
	if err := e.c.Get(e.t.Context(), client.ObjectKeyFromObject(e.group), g); err != nil {
		e.t.Fatal(err)
	}
	return g.Status
}

// Without labels there is nothing for webhook, backfill and policy to do, and the alarm for what nobody owns works all the
// same.
func TestRangesNeedNoLabels(t *testing.T) {
	e := deploy(t, all, byNamespace)
	k := newCast(t, e.c, e.group)
	for i := range 5 {
		e.create(e.object(parentKind, fmt.Sprintf("p%d", i), optIn))
	}
	eventually(t, "objects that nobody owns are counted", func() string {
		s := e.status()
		if s.Unowned != 100 || s.UnownedObjects < 5 {
			return fmt.Sprintf("%+v", s)
		}
		return ""
	})
	a := k.join("a", nil)
	g := k.quiet(1)
	c := meta.FindStatusCondition(g.Status.Conditions, lbv1alpha1.ConditionUnlabelled)
	if g.Status.UnownedObjects != 0 || g.Status.UnlabelledObjects != 0 || c == nil || c.Reason != lbv1alpha1.ReasonNoLabels {
		t.Errorf("status: %+v", g.Status)
	}
	for i := range 5 {
		if o := e.get(e.object(parentKind, fmt.Sprintf("p%d", i), nil)); read(o) != (labels{}) {
			t.Errorf("%s carries %v", o.GetName(), read(o))
		}
	}
	config := &admissionregistrationv1.MutatingWebhookConfiguration{}
	if err := e.c.Get(t.Context(), client.ObjectKey{Name: WebhookConfigurationName}, config); err != nil {
		t.Fatal(err)
	}
	for _, rule := range config.Webhooks[0].Rules {
		if fmt.Sprint(rule.Resources) != "[nothing]" {
			t.Errorf("the webhook is asked about %v", rule.Resources)
		}
	}
	a.say(configMaps)
	unfiltered := func(want metav1.ConditionStatus, says string) {
		t.Helper()
		eventually(t, "unfiltered is "+string(want), func() string {
			c := meta.FindStatusCondition(e.status().Conditions, lbv1alpha1.ConditionUnfiltered)
			if c == nil || c.Status != want || !strings.Contains(c.Message, says) {
				return fmt.Sprint(c)
			}
			return ""
		})
	}
	unfiltered(metav1.ConditionTrue, "configmaps to 1 members, a the first")
	eventually(t, "an event says so", func() string {
		var events eventsv1.EventList
		if err := e.c.List(t.Context(), &events, client.InNamespace(e.namespace)); err != nil {
			return err.Error()
		}
		for _, event := range events.Items {
			if event.Reason == lbv1alpha1.ReasonNotFiltered && event.Regarding.Name == e.group.Name {
				return ""
			}
		}
		return fmt.Sprintf("none of %d does", len(events.Items))
	})
	a.say()
	unfiltered(metav1.ConditionFalse, "")
}

// say has the member report that the API server sends it too much of some resources.
func (m *member) say(unfiltered ...sharding.Resource) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.unfiltered = unfiltered
}

func TestANamespaceIsNeededToHash(t *testing.T) {
	c, ns := api(t)
	start(t, apiServer, coordinate)
	g := newGroup(t, c, ns, func(s *lbv1alpha1.WatchGroupSpec) {
		byNamespace(s)
		s.Resources = append(s.Resources, lbv1alpha1.Resource{Resource: "nodes"})
	})
	eventually(t, "the group is refused", func() string {
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(g), g); err != nil {
			return err.Error()
		}
		cond := meta.FindStatusCondition(g.Status.Conditions, lbv1alpha1.ConditionAccepted)
		if cond == nil || cond.Status != metav1.ConditionFalse || cond.Reason != lbv1alpha1.ReasonInvalid ||
			!strings.Contains(cond.Message, `spec.resources[1]: "nodes" is cluster-scoped`) {
			return fmt.Sprint(cond)
		}
		return ""
	})
}

func TestTheExampleOfRangesIsAccepted(t *testing.T) {
	c, ns := api(t)
	data, err := os.ReadFile(filepath.Join("..", "..", "examples", "parentchild", "shardrange.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	g := &lbv1alpha1.WatchGroup{}
	if err := yaml.UnmarshalStrict(data, g); err != nil {
		t.Fatal(err)
	}
	g.Namespace = ns
	if err := c.Create(t.Context(), g, client.DryRunAll); err != nil {
		t.Error(err)
	}
	if _, ok := rangesOf(g); !ok {
		t.Errorf("%+v has no ranges", g.Spec)
	}
}

// No number stands on objects that are found by hash: groups of them share resources with any others.
func TestGroupsWithRangesContradictNobody(t *testing.T) {
	group := func(name string, v int32, change func(*lbv1alpha1.WatchGroupSpec)) lbv1alpha1.WatchGroup {
		g := lbv1alpha1.WatchGroup{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}}
		g.Spec.VirtualNodes, g.Spec.Resources = v, []lbv1alpha1.Resource{{Resource: "pods"}}
		if change != nil {
			change(&g.Spec)
		}
		return g
	}
	all, refused := schemes([]lbv1alpha1.WatchGroup{
		group("a", 7, byNamespace), group("b", 100, nil), group("c", 9, byNamespace),
		group("wrong", 9, func(s *lbv1alpha1.WatchGroupSpec) { byNamespace(s); s.OptIn = "" }),
	})
	if len(refused) != 1 || refused["ns/wrong"] == nil || !strings.Contains(refused["ns/wrong"].message, `spec.optIn: "Annotated"`) {
		t.Errorf("refused: %v", refused)
	}
	if s := all[schema.GroupResource{Resource: "pods"}]; len(all) != 1 || s.group != "ns/b" || s.buckets.V != 100 {
		t.Errorf("schemes: %v", all)
	}
}
