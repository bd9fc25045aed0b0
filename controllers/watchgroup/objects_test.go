package watchgroup

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/client-go/tools/cache"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
)

// The key is the annotation, else the controller owner's, else the object's own name; who does not opt in is left alone.
func TestObjectsAreLabelledWhenTheyAreCreated(t *testing.T) {
	e := deploy(t, all, nil).guarded()
	parent := e.create(e.object(parentKind, "p", optIn))
	e.wantLabels(parent, e.key(parentKind, "p"))
	e.wantLabels(e.create(e.object(childKind, "c", nil, parent)), e.key(parentKind, "p"))
	keyed := e.create(e.object(parentKind, "keyed", map[string]string{sharding.AnnotationHashKey: "k"}))
	e.wantLabels(keyed, "k")
	e.wantLabels(e.create(e.object(childKind, "keyed-child", nil, keyed)), "k")
	if o := e.create(e.object(parentKind, "out", nil)); read(o) != (labels{}) {
		t.Errorf("it did not opt in, and carries %v", read(o))
	}
	copied := e.object(parentKind, "copied", nil)
	copied.SetLabels(parent.GetLabels())
	if e.create(copied); read(copied) != (labels{}) {
		t.Errorf("it did not opt in, and keeps the labels that it was copied with: %v", read(copied))
	}
	wrong := e.object(parentKind, "wrong", optIn)
	wrong.SetLabels(map[string]string{sharding.LabelVirtualNode: "1", "mine": "kept"})
	e.wantLabels(e.create(wrong), e.key(parentKind, "wrong"))
	if wrong.GetLabels()["mine"] != "kept" {
		t.Errorf("other labels are gone: %v", wrong.GetLabels())
	}
	// A child follows its parent's label even if the parent's key has been changed since.
	parent.SetAnnotations(map[string]string{sharding.AnnotationHashKey: "later"})
	if err := e.c.Update(t.Context(), parent); err != nil {
		t.Fatal(err)
	}
	e.wantLabels(e.get(parent), e.key(parentKind, "p"))
	e.wantLabels(e.create(e.object(childKind, "late", nil, parent)), e.key(parentKind, "p"))
}

func TestEveryObjectTakesPartWhereTheGroupSaysSo(t *testing.T) {
	e := deploy(t, all, func(s *lbv1alpha1.WatchGroupSpec) { s.OptIn = lbv1alpha1.OptInAll })
	old := e.create(e.object(parentKind, "old", nil))
	eventually(t, "it is labelled, by whomever", func() string {
		if read(e.get(old)) == (labels{}) {
			return "not yet"
		}
		return ""
	})
	e.wantLabels(old, e.key(parentKind, "old"))
}

// Trap 7: the API server makes up the name after admission, so that such a root is labelled late.
func TestRootsWithGeneratedNamesAreLabelledLate(t *testing.T) {
	e := deploy(t, all, nil).guarded()
	root := e.object(parentKind, "", optIn)
	root.SetGenerateName("root-")
	e.create(root)
	eventually(t, "the root is labelled", func() string {
		if read(e.get(root)) == (labels{}) {
			return "not yet"
		}
		return ""
	})
	e.wantLabels(root, e.key(parentKind, root.GetName()))
	child := e.object(childKind, "", nil, root)
	child.SetGenerateName("child-")
	e.wantLabels(e.create(child), e.key(parentKind, root.GetName()))
}

// Trap 8: objects that are older than the webhook are labelled children first, and only they are written.
func TestTheBackfillLabelsChildrenBeforeTheirParents(t *testing.T) {
	c, ns := api(t)
	e := &everything{t: t, c: c, namespace: ns}
	var parents, children []*unstructured.Unstructured
	for i := range 20 {
		p := e.create(e.object(parentKind, fmt.Sprintf("p%02d", i), optIn))
		parents = append(parents, p)
		for k := range 3 {
			children = append(children, e.create(e.object(childKind, fmt.Sprintf("c%02d-%d", i, k), nil, p)))
		}
	}
	out := e.create(e.object(parentKind, "out", nil))
	watch, err := client.NewWithWatch(apiServer, client.Options{Scheme: testScheme()})
	if err != nil {
		t.Fatal(err)
	}
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(parentKind)
	events, err := watch.Watch(t.Context(), list, client.InNamespace(ns), client.HasLabels{sharding.LabelVirtualNode})
	if err != nil {
		t.Fatal(err)
	}
	defer events.Stop()

	e.group = newGroup(t, c, ns, family)
	e.process = start(t, apiServer, Options{Backfill: true})
	deadline := time.After(patience)
	for range parents {
		select {
		case event := <-events.ResultChan():
			p, ok := event.Object.(*unstructured.Unstructured)
			if !ok {
				t.Fatalf("event %v", event)
			}
			e.wantLabels(p, e.key(parentKind, p.GetName()))
			for k := range 3 {
				child := e.get(e.object(childKind, "c"+p.GetName()[1:]+fmt.Sprintf("-%d", k), nil))
				if read(child) == (labels{}) {
					t.Errorf("%s is labelled before its child %s", p.GetName(), child.GetName())
				}
				e.wantLabels(child, e.key(parentKind, p.GetName()))
			}
		case <-deadline:
			t.Fatal("parents stay unlabelled")
		}
	}
	if read(e.get(out)) != (labels{}) {
		t.Error("an object that did not opt in is labelled")
	}
	e.stop()
	if n := e.objectWrites(); n != len(parents)+len(children) {
		t.Errorf("%d writes label %d objects", n, len(parents)+len(children))
	}
}

// objectWrites counts the process's writes of the test's parents and children: earlier tests may have left some to label.
func (e *everything) objectWrites() int {
	e.writes.mu.Lock()
	defer e.writes.mu.Unlock()
	n := 0
	for what, count := range e.writes.count {
		if strings.Contains(what, "/example.com/") && strings.Contains(what, "/namespaces/"+e.namespace+"/") {
			n += count
		}
	}
	return n
}

// An object that opts in by an update has children perhaps: the backfill labels it after them, not the webhook before.
func TestOptingInLaterLabelsChildrenFirst(t *testing.T) {
	e := deploy(t, all, nil).guarded()
	parent := e.create(e.object(parentKind, "p", nil))
	child := e.create(e.object(childKind, "c", nil, parent))
	parent.SetAnnotations(optIn)
	if err := e.c.Update(t.Context(), parent); err != nil {
		t.Fatal(err)
	}
	if read(parent) != (labels{}) && read(e.get(child)) == (labels{}) {
		t.Error("the parent is labelled before its child")
	}
	eventually(t, "both are labelled", func() string {
		if read(e.get(parent)) == (labels{}) {
			return "not yet"
		}
		if read(e.get(child)) == (labels{}) {
			t.Error("the parent is labelled before its child")
		}
		return ""
	})
	e.wantLabels(child, e.key(parentKind, "p"))
}

// Children are seen by another watch than their parents, which may be behind.
func TestAChildThatIsSeenLateIsLabelledBeforeItsParent(t *testing.T) {
	c, ns := api(t)
	e := &everything{t: t, c: c, namespace: ns}
	e.group = newGroup(t, c, ns, family)
	e.process = start(t, apiServer, Options{Backfill: true})
	labelled := func(o *unstructured.Unstructured) {
		t.Helper()
		eventually(t, o.GetName()+" is labelled", func() string {
			if read(e.get(o)) == (labels{}) {
				return "not yet"
			}
			return ""
		})
	}
	labelled(e.create(e.object(parentKind, "first", optIn))) // all is watched
	parent := e.create(e.object(parentKind, "p", nil))
	late := make(chan struct{})
	e.writes.late.Store(&late)
	release := sync.OnceFunc(func() { e.writes.late.Store(nil); close(late) })
	defer release()
	child := e.create(e.object(childKind, "c", nil, parent))
	patch := client.RawPatch("application/merge-patch+json", fmt.Appendf(nil, `{"metadata":{"annotations":{%q:"true"}}}`,
		sharding.AnnotationLoadBalanced))
	if err := c.Patch(t.Context(), parent, patch); err != nil {
		t.Fatal(err)
	}
	labelled(e.create(e.object(parentKind, "without-children", optIn)))
	release()
	labelled(parent)
	labelled(child)
	if n, err := resourceversion.CompareResourceVersion(child.GetResourceVersion(), parent.GetResourceVersion()); err != nil || n >= 0 {
		t.Errorf("the parent was labelled at version %s, and its child at %s (%v)", parent.GetResourceVersion(),
			child.GetResourceVersion(), err)
	}
}

// While the webhook is down objects are created all the same. They are labelled later, and so are those whose labels are none
// of a Virtual Node's.
func TestWhatTheWebhookMissedIsLabelledLater(t *testing.T) {
	c, ns := api(t)
	e := &everything{t: t, c: c, namespace: ns}
	e.group = newGroup(t, c, ns, family)
	missed := e.create(e.object(parentKind, "missed", optIn))
	bad := map[string]map[string]string{
		"letters":   {sharding.LabelVirtualNode: "abc", sharding.LabelBucket: "1"},
		"too-large": {sharding.LabelVirtualNode: "100", sharding.LabelBucket: "100"},
		"no-bucket": {sharding.LabelVirtualNode: "7"},
	}
	for name, l := range bad {
		o := e.object(parentKind, name, optIn)
		o.SetLabels(l)
		e.create(o)
	}
	e.process = start(t, apiServer, Options{Backfill: true})
	eventually(t, "everything is labelled", func() string {
		for name := range bad {
			o := e.get(e.object(parentKind, name, nil))
			if _, ok := read(o).valid(sharding.BucketsFor(100, sharding.DefaultMaxBuckets)); !ok {
				return fmt.Sprintf("%s carries %v", name, read(o))
			}
		}
		if read(e.get(missed)) == (labels{}) {
			return "missed is not"
		}
		return ""
	})
	e.wantLabels(missed, e.key(parentKind, "missed"))
	e.wantLabels(e.get(e.object(parentKind, "letters", nil)), e.key(parentKind, "letters"))
	if got := read(e.get(e.object(parentKind, "no-bucket", nil))); got.virtualNode != "7" {
		t.Errorf("its Virtual Node was right and has become %s", got.virtualNode)
	}
}

// What cannot be labelled is reported: in the status with its number and age, and in the metrics.
func TestObjectsThatStayUnlabelledAreReported(t *testing.T) {
	c, ns := api(t)
	k := newCast(t, c, newGroup(t, c, ns, family))
	e := &everything{t: t, c: c, namespace: ns, group: k.group}
	oldest := e.create(e.object(parentKind, "p0", optIn)).GetCreationTimestamp()
	for i := range 2 {
		e.create(e.object(parentKind, fmt.Sprintf("p%d", i+1), optIn))
	}
	e.process = startCut(t, apiServer, Options{Coordinate: true, Backfill: true}, func(req *http.Request) error {
		if strings.Contains(req.URL.Path, "/example.com/") {
			return errors.New("it does not get through")
		}
		return nil
	})
	eventually(t, "the alarm is raised", func() string {
		g := &lbv1alpha1.WatchGroup{}
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(k.group), g); err != nil {
			return err.Error()
		}
		if !meta.IsStatusConditionTrue(g.Status.Conditions, lbv1alpha1.ConditionUnlabelled) || g.Status.UnlabelledObjects < 3 ||
			g.Status.OldestUnlabelled == nil || g.Status.OldestUnlabelled.After(oldest.Time) {
			return fmt.Sprintf("%+v, want the oldest of %s", g.Status, oldest)
		}
		return ""
	})
	if got := e.gauge("drover_watchgroup_unlabelled_objects"); got < 3 {
		t.Errorf("the metric says %v", got)
	}
	if got := e.gauge("drover_watchgroup_oldest_unlabelled_seconds"); got <= 0 {
		t.Errorf("the oldest is %v s old", got)
	}
	e.writes.cut.Store(nil)
	eventually(t, "the alarm ends", func() string {
		g := &lbv1alpha1.WatchGroup{}
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(k.group), g); err != nil {
			return err.Error()
		}
		if meta.IsStatusConditionTrue(g.Status.Conditions, lbv1alpha1.ConditionUnlabelled) || g.Status.UnlabelledObjects != 0 {
			return fmt.Sprintf("%+v", g.Status)
		}
		return ""
	})
}

// A group that comes back with another number of Virtual Nodes finds objects with numbers that are none of its own: they are
// mended at once, and not in the next period.
func TestLabelsFollowAGroupThatComesBackWithOtherNumbers(t *testing.T) {
	c, ns := api(t)
	e := &everything{t: t, c: c, namespace: ns}
	e.group = newGroup(t, c, ns, family)
	e.process = start(t, apiServer, Options{Backfill: true})
	var parents []*unstructured.Unstructured
	for i := range 20 {
		parents = append(parents, e.create(e.object(parentKind, fmt.Sprintf("p%02d", i), optIn)))
	}
	labelled := func(v int) {
		t.Helper()
		eventually(t, fmt.Sprintf("all carry numbers below %d", v), func() string {
			for _, p := range parents {
				if _, ok := read(e.get(p)).valid(sharding.BucketsFor(v, sharding.DefaultMaxBuckets)); !ok {
					return fmt.Sprintf("%s carries %v", p.GetName(), read(p))
				}
			}
			return ""
		})
	}
	labelled(100)
	removeGroups(t, c, ns)
	e.group = newGroup(t, c, ns, func(s *lbv1alpha1.WatchGroupSpec) { family(s); s.VirtualNodes = 10 })
	labelled(10)
}

// While a new coordinator has not seen the objects yet, the alarm of the one before stands.
func TestAnAlarmOutlivesItsCoordinator(t *testing.T) {
	c, ns := api(t)
	group := newGroup(t, c, ns, family)
	r := &Reconciler{Backfill: &Backfill{}}
	status := lbv1alpha1.WatchGroupStatus{UnlabelledObjects: 3}
	set(group, &status, metav1.Condition{Type: lbv1alpha1.ConditionUnlabelled, Status: metav1.ConditionTrue,
		Reason: lbv1alpha1.ReasonBackfill})
	r.reportObjects(group, &status)
	if status.UnlabelledObjects != 3 || !meta.IsStatusConditionTrue(status.Conditions, lbv1alpha1.ConditionUnlabelled) {
		t.Errorf("a backfill that has seen nothing says %+v", status)
	}
}

// A watch that goes on failing is an alarm, too, though it had begun well: nobody knows then which objects are unlabelled. One
// that fails once is begun again and goes on where it was.
func TestAWatchThatGoesOnFailingIsReported(t *testing.T) {
	lost := errors.New("the right to watch is gone")
	informer := &movedInformer{version: "7", synced: true}
	f := &feed{informer: informer}
	now := time.Now()
	report := func() error { return f.failing() }
	if report() != nil {
		t.Error("nothing has failed")
	}
	f.failed(lost, now)
	if report() != nil {
		t.Error("once is no reason")
	}
	f.failed(lost, now.Add(labelGrace))
	if !errors.Is(report(), lost) {
		t.Errorf("it fails for %s, and reports %v", labelGrace, report())
	}
	informer.version = "8"
	if report() != nil {
		t.Error("the watch goes on, and is reported")
	}
	f.failed(lost, now.Add(time.Hour))
	if report() != nil {
		t.Error("once after a while is no reason either")
	}
	informer.synced = false
	if !errors.Is(report(), lost) {
		t.Error("a watch that has never come to anything is not reported")
	}
}

// A movedInformer has come to a version.
type movedInformer struct {
	cache.SharedIndexInformer
	version string
	synced  bool
}

func (i *movedInformer) LastSyncResourceVersion() string { return i.version }
func (i *movedInformer) HasSynced() bool                 { return i.synced }

func TestAResourceThatIsNotServedIsNamed(t *testing.T) {
	c, ns := api(t)
	k := newCast(t, c, newGroup(t, c, ns, func(s *lbv1alpha1.WatchGroupSpec) {
		s.Resources = append(s.Resources, lbv1alpha1.Resource{Group: "example.com", Resource: "nobodys"})
	}))
	start(t, apiServer, Options{Coordinate: true, Backfill: true})
	k.join("a", nil)
	k.share(map[string]int{"a": 100})
	eventually(t, "the resource is named", func() string {
		g := &lbv1alpha1.WatchGroup{}
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(k.group), g); err != nil {
			return err.Error()
		}
		cond := meta.FindStatusCondition(g.Status.Conditions, lbv1alpha1.ConditionUnlabelled)
		if cond == nil || cond.Reason != lbv1alpha1.ReasonBackfillFailed || !strings.Contains(cond.Message, "nobodys.example.com") {
			return fmt.Sprint(cond)
		}
		return ""
	})
}

// Virtual Nodes that nobody owns are an alarm, with the objects that lie in them.
func TestObjectsThatNobodyOwnsAreCounted(t *testing.T) {
	c, ns := api(t)
	k := newCast(t, c, newGroup(t, c, ns, family))
	e := &everything{t: t, c: c, namespace: ns, group: k.group}
	for i := range 5 {
		e.create(e.object(parentKind, fmt.Sprintf("p%d", i), optIn))
	}
	e.process = start(t, apiServer, Options{Coordinate: true, Backfill: true})
	eventually(t, "nobody owns anything", func() string {
		g := &lbv1alpha1.WatchGroup{}
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(k.group), g); err != nil {
			return err.Error()
		}
		cond := meta.FindStatusCondition(g.Status.Conditions, lbv1alpha1.ConditionUnowned)
		if cond == nil || cond.Reason != lbv1alpha1.ReasonNoMembers || g.Status.Unowned != 100 || g.Status.UnownedObjects < 5 {
			return fmt.Sprintf("%+v", g.Status)
		}
		return ""
	})
	if got := e.gauge("drover_watchgroup_unowned_seconds"); got <= 0 {
		t.Errorf("they have been unowned for %v s", got)
	}
	k.join("a", nil)
	if g := k.quiet(1); g.Status.UnownedObjects != 0 {
		t.Errorf("%d objects are unowned", g.Status.UnownedObjects)
	}
}

// gauge returns the value of a metric of the test's group.
func (e *everything) gauge(name string) float64 {
	return metricValue(e.t, e.metrics, name, e.group)
}

// Members come and go, gracefully and not, and no object is written for it.
func TestAMembershipChangeWritesNoObject(t *testing.T) {
	e := deploy(t, all, nil).guarded()
	k := newCast(t, e.c, e.group)
	versions := func() map[string]string {
		found := make(map[string]string)
		for _, kind := range []schema.GroupVersionKind{parentKind, childKind} {
			list := &unstructured.UnstructuredList{}
			list.SetGroupVersionKind(kind)
			if err := e.c.List(t.Context(), list, client.InNamespace(e.namespace)); err != nil {
				t.Fatal(err)
			}
			for _, o := range list.Items {
				found[o.GetKind()+"/"+o.GetName()] = o.GetResourceVersion()
			}
		}
		return found
	}
	for i := range 30 {
		p := e.create(e.object(parentKind, fmt.Sprintf("p%02d", i), optIn))
		e.create(e.object(childKind, fmt.Sprintf("c%02d", i), nil, p))
	}
	before := versions()
	k.join("a", nil)
	k.share(map[string]int{"a": 100})
	b := k.join("b", nil)
	k.share(map[string]int{"a": 50, "b": 50})
	k.join("c", nil)
	k.shareAlike("a", "b", "c")
	b.kill()
	k.share(map[string]int{"a": 50, "c": 50})
	k.members["c"].leave()
	k.share(map[string]int{"a": 100})
	k.quiet(1)
	if after := versions(); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("objects were written:\nbefore %v\nafter  %v", before, after)
	}
	if n := e.objectWrites(); n != 0 {
		t.Errorf("the coordinator wrote objects %d times", n)
	}
}

// The rules of webhook and policy name the groups' resources and nothing else.
func TestRulesFollowTheGroups(t *testing.T) {
	e := deploy(t, all, nil).guarded()
	want := func(what string, whole, all string) {
		t.Helper()
		eventually(t, what, func() string {
			config := &admissionregistrationv1.MutatingWebhookConfiguration{}
			policy := &admissionregistrationv1.ValidatingAdmissionPolicy{}
			if err := errors.Join(e.c.Get(t.Context(), client.ObjectKey{Name: WebhookConfigurationName}, config),
				e.c.Get(t.Context(), client.ObjectKey{Name: PolicyName}, policy)); err != nil {
				return err.Error()
			}
			a, b := config.Webhooks[0].Rules, policy.Spec.MatchConstraints.ResourceRules
			if len(a) != 1 || len(b) != 1 || fmt.Sprint(a[0].APIGroups, a[0].Resources) != whole ||
				fmt.Sprint(b[0].APIGroups, b[0].Resources) != all {
				return fmt.Sprintf("%v, %v", a, b)
			}
			return ""
		})
	}
	want("parents and children", "[example.com] [children parents]", "[example.com] [children parents children/* parents/*]")
	removeGroups(t, e.c, e.namespace)
	want("nothing", "[loadbalance.k8s.io] [nothing]", "[loadbalance.k8s.io] [nothing nothing/*]")
}

// Certificates are rotated without a word. What is being written is no certificate, and stops nothing else.
func TestTheWebhooksAuthorityFollowsItsFile(t *testing.T) {
	c, ns := api(t)
	for _, u := range append(manifest(t, "webhook.yaml"), manifest(t, "policy.yaml")...) {
		install(t, c, u)
	}
	g := &Guards{Client: c, CAFile: filepath.Join(t.TempDir(), "ca.crt")}
	write := func(ca []byte) {
		t.Helper()
		if err := os.WriteFile(g.CAFile, ca, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	config := &admissionregistrationv1.MutatingWebhookConfiguration{}
	look := func() (ctrl.Result, error) {
		t.Helper()
		result, err := g.Reconcile(t.Context(), ctrl.Request{})
		if err := c.Get(t.Context(), client.ObjectKey{Name: WebhookConfigurationName}, config); err != nil {
			t.Fatal(err)
		}
		return result, err
	}
	var last []byte
	for range 2 {
		serving := &envtest.WebhookInstallOptions{}
		if err := serving.PrepWithoutInstalling(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = serving.Cleanup() })
		last = serving.LocalServingCAData
		write(last)
		result, err := look()
		if err != nil || result.RequeueAfter <= 0 || !bytes.Equal(config.Webhooks[0].ClientConfig.CABundle, last) {
			t.Errorf("a look ended with %+v, %v and the authority %q", result, err, config.Webhooks[0].ClientConfig.CABundle)
		}
	}
	write(nil)
	newGroup(t, c, ns, family)
	_, err := look()
	if err == nil || !strings.Contains(err.Error(), "webhook.caFile") || !strings.Contains(err.Error(), g.CAFile) {
		t.Errorf("a file without a certificate ended with %v", err)
	}
	policy := &admissionregistrationv1.ValidatingAdmissionPolicy{}
	if err := c.Get(t.Context(), client.ObjectKey{Name: PolicyName}, policy); err != nil {
		t.Fatal(err)
	}
	hook := config.Webhooks[0]
	if !bytes.Equal(hook.ClientConfig.CABundle, last) || len(hook.Rules) != 1 || len(hook.Rules[0].Resources) != 2 ||
		len(policy.Spec.MatchConstraints.ResourceRules[0].Resources) != 4 {
		t.Errorf("the authority is %q, the rules are %v and %v", hook.ClientConfig.CABundle, hook.Rules,
			policy.Spec.MatchConstraints.ResourceRules)
	}
}
