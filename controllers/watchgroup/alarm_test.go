package watchgroup

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
)

var (
	parentsResource  = schema.GroupResource{Group: "example.com", Resource: "parents"}
	childrenResource = schema.GroupResource{Group: "example.com", Resource: "children"}
)

// The alarm says how many objects are unlabelled and since when the oldest is, from its creation on, over all resources of
// the group and no other.
func TestTheAlarmTellsTheAgeOfTheOldest(t *testing.T) {
	now := time.Now().Truncate(time.Second)
	others := schema.GroupResource{Resource: "others"}
	b := &Backfill{waiting: make(map[item]time.Time), feeds: make(map[schema.GroupResource]*feed)}
	for _, gr := range []schema.GroupResource{parentsResource, childrenResource, others} {
		b.feeds[gr] = &feed{informer: &movedInformer{synced: true}}
	}
	at := func(gr schema.GroupResource, name string) item {
		return item{gr, types.NamespacedName{Namespace: "ns", Name: name}}
	}
	for it, age := range map[item]time.Duration{
		at(parentsResource, "young"): time.Minute, at(parentsResource, "older"): 2 * time.Minute,
		at(childrenResource, "oldest"): time.Hour, at(others, "another group's"): 2 * time.Hour,
	} {
		b.waits(b.feeds[it.resource], it, now.Add(-age))
	}
	group := &lbv1alpha1.WatchGroup{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "parents"}}
	family(&group.Spec)
	r := &Reconciler{Backfill: b}
	metrics, err := NewMetrics(prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	metrics.now = func() time.Time { return now }
	status := &group.Status
	expect := func(what string, objects int32, age time.Duration) {
		t.Helper()
		r.reportObjects(group, status)
		metrics.record(group)
		if status.UnlabelledObjects != objects ||
			meta.IsStatusConditionTrue(status.Conditions, lbv1alpha1.ConditionUnlabelled) != (objects > 0) {
			t.Errorf("%s: status %+v, want %d objects", what, status, objects)
		}
		if got := status.OldestUnlabelled; (got == nil) != (objects == 0) || got != nil && !got.Time.Equal(now.Add(-age)) {
			t.Errorf("%s: the oldest is unlabelled since %v, want %v", what, got, now.Add(-age))
		}
		for name, want := range map[string]float64{"unlabelled_objects": float64(objects), "oldest_unlabelled_seconds": age.Seconds()} {
			if got := metricValue(t, metrics, "drover_watchgroup_"+name, group); got != want {
				t.Errorf("%s: %s is %v, want %v", what, name, got, want)
			}
		}
	}
	expect("three are unlabelled", 3, time.Hour)
	b.settled(at(childrenResource, "oldest"))
	expect("the oldest is labelled", 2, 2*time.Minute)
	b.settled(at(parentsResource, "older"))
	b.settled(at(parentsResource, "young"))
	expect("all are labelled", 0, 0)
	for age, want := range map[time.Duration]int{labelGrace: 1, labelGrace - time.Millisecond: 0} {
		b.waits(b.feeds[parentsResource], at(parentsResource, "new"), now.Add(-age))
		if got := b.arrears(now)[parentsResource].objects; got != want {
			t.Errorf("created %s ago, it counts as %d unlabelled objects, want %d", age, got, want)
		}
	}
}

// For how long Virtual Nodes have been unowned counts from when they came to be, and ends with it.
func TestTheAlarmTellsForHowLongVirtualNodesAreUnowned(t *testing.T) {
	now := time.Now()
	metrics, err := NewMetrics(prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	metrics.now = func() time.Time { return now }
	group := &lbv1alpha1.WatchGroup{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "parents"}}
	for _, test := range []struct {
		status metav1.ConditionStatus
		want   float64
	}{{metav1.ConditionTrue, 90}, {metav1.ConditionFalse, 0}} {
		group.Status.Conditions = []metav1.Condition{{
			Type: lbv1alpha1.ConditionUnowned, Status: test.status, LastTransitionTime: metav1.NewTime(now.Add(-90 * time.Second)),
		}}
		metrics.record(group)
		if got := metricValue(t, metrics, "drover_watchgroup_unowned_seconds", group); got != test.want {
			t.Errorf("condition %s for 90 s: unowned for %v s, want %v", test.status, got, test.want)
		}
	}
}

// A look at an object may end after its resource has left the last group, and even after it has come back: what has shown
// the object is not followed then, and nobody would end the alarm for it.
func TestAnObjectOfAFeedThatIsNotFollowedDoesNotWait(t *testing.T) {
	it := item{parentsResource, types.NamespacedName{Namespace: "ns", Name: "late"}}
	b := &Backfill{waiting: make(map[item]time.Time), feeds: make(map[schema.GroupResource]*feed)}
	before, now := &feed{informer: &movedInformer{synced: true}}, &feed{informer: &movedInformer{synced: true}}
	wants := func(what string, objects int) {
		t.Helper()
		if got := b.arrears(time.Now())[parentsResource].objects; got != objects {
			t.Errorf("%s: %d objects wait, want %d", what, got, objects)
		}
	}
	b.waits(before, it, time.Now().Add(-time.Hour))
	wants("the resource has gone", 0)
	b.feeds[parentsResource] = now
	b.waits(before, it, time.Now().Add(-time.Hour))
	wants("it has come back", 0)
	b.waits(now, it, time.Now().Add(-time.Hour))
	wants("shown by what is followed", 1)
}

// The grace counts from when Virtual Nodes came to be unowned: another look does not make it start again, and none counts
// before it is over.
func TestUnownedObjectsAreCountedWhenTheGraceIsOver(t *testing.T) {
	const now = time.Hour
	for _, test := range []struct {
		what       string
		unownedFor time.Duration
		counted    sharding.Instant
		counts     bool
		next       time.Duration // the next look, at the latest
	}{
		{"just now", 0, 0, false, unownedGrace},
		{"a tenth of the grace", unownedGrace / 10, 0, false, unownedGrace - unownedGrace/10},
		{"the grace", unownedGrace, 0, true, countPeriod},
		{"long, counted a moment ago", time.Hour, now - time.Second, false, countPeriod - time.Second},
		{"long, counted a period ago", time.Hour, now - countPeriod, true, countPeriod},
	} {
		t.Run(test.what, func(t *testing.T) {
			r := &Reconciler{Backfill: &Backfill{}}
			group := &lbv1alpha1.WatchGroup{}
			family(&group.Spec)
			group.Status.UnownedObjects = 7
			group.Status.Conditions = []metav1.Condition{{Type: lbv1alpha1.ConditionUnowned, Status: metav1.ConditionTrue,
				LastTransitionTime: metav1.NewTime(time.Now().Add(-test.unownedFor))}}
			tr, v := newTracker(), &view{timer: timer{now: now}}
			tr.counted = test.counted
			want := int32(7)
			if test.counts {
				want = 0 // there are no objects
			}
			if got := r.countUnowned(t.Context(), group, tr, v, sharding.SetOf(1)); got != want {
				t.Errorf("%d objects are unowned, want %d", got, want)
			}
			if next := v.timer.next; next <= 0 || next > test.next {
				t.Errorf("the next look is in %s, want %s at the latest", next, test.next)
			}
			if (tr.counted == now) != test.counts {
				t.Errorf("counted at %s, it is %s", tr.counted, now)
			}
		})
	}
}

// An audit looks at all pages of a list, and mends on each what no member selects; a key that was changed since moves nothing.
func TestAnAuditLooksAtEveryPage(t *testing.T) {
	c, ns := api(t)
	e := &everything{t: t, c: c, namespace: ns}
	buckets := sharding.BucketsFor(100, sharding.DefaultMaxBuckets)
	const pages = 4
	var right, wrong []*unstructured.Unstructured
	carry := func(name, vn string) *unstructured.Unstructured {
		o := e.object(parentKind, name, map[string]string{sharding.AnnotationHashKey: "later"})
		o.SetLabels(map[string]string{sharding.LabelVirtualNode: vn, sharding.LabelBucket: labelsOf(buckets, 7).bucket})
		return e.create(o)
	}
	for i := range pages {
		right = append(right, carry(fmt.Sprintf("o%d-right", i), "7"))
		wrong = append(wrong, carry(fmt.Sprintf("o%d-wrong", i), "100"))
	}
	config, asked := rest.CopyConfig(apiServer), 0
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(req *http.Request) (*http.Response, error) {
			if q := req.URL.Query(); q.Has("limit") {
				asked++
				req = req.Clone(req.Context())
				q.Set("limit", "2")
				req.URL.RawQuery = q.Encode()
			}
			return next.RoundTrip(req)
		})
	})
	direct, err := metadata.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	gr := schema.GroupResource{Group: "example.com", Resource: "parents"}
	mapping, err := mappingOf(c.RESTMapper(), gr)
	if err != nil {
		t.Fatal(err)
	}
	b := &Backfill{
		Metadata: direct, Mapper: c.RESTMapper(), Owners: NewOwners(direct, c.RESTMapper()), Limit: rate.NewLimiter(rate.Inf, 1),
		feeds: map[schema.GroupResource]*feed{gr: {mapping: mapping}},
	}
	s := scheme{buckets: buckets, all: true}
	eventually(t, "the audit ends well, once the API server has forgotten an earlier test's policy", func() string {
		if err := b.audit(t.Context(), map[schema.GroupResource]scheme{gr: s}, s, mapping); err != nil {
			return err.Error()
		}
		return ""
	})
	if asked < pages {
		t.Errorf("all objects came on %d pages, so that nothing was tested", asked)
	}
	for _, o := range wrong {
		e.wantLabels(e.get(o), "later")
	}
	for _, o := range right {
		if got := read(e.get(o)); got != labelsOf(buckets, 7) {
			t.Errorf("%s carried a label of a Virtual Node and has been given %v", o.GetName(), got)
		}
	}
	all := &unstructured.UnstructuredList{}
	all.SetGroupVersionKind(parentKind)
	if err := c.List(t.Context(), all, client.MatchingLabels{sharding.LabelVirtualNode: "7"}); err != nil {
		t.Fatal(err)
	}
	group := &lbv1alpha1.WatchGroup{Spec: lbv1alpha1.WatchGroupSpec{VirtualNodes: 100, Resources: []lbv1alpha1.Resource{
		{Group: gr.Group, Resource: gr.Resource},
	}}}
	if n, err := b.countIn(t.Context(), group, sharding.SetOf(7)); err != nil || int(n) != len(all.Items) || n < pages {
		t.Errorf("%d objects are counted in Virtual Node 7 (%v), want the %d that there are", n, err, len(all.Items))
	}
}

// An audit that fails is repeated soon, and each time later: it lists all objects. A group that comes back with other
// numbers waits for nothing.
func TestAnAuditThatFailsIsNotRepeatedAtOnce(t *testing.T) {
	now, period := time.Now(), time.Hour
	of, other := sharding.BucketsFor(100, 10), sharding.BucketsFor(7, 10)
	for _, test := range []struct {
		failures int
		ago      time.Duration
		want     bool
	}{
		{0, 59 * time.Minute, false}, {0, time.Hour, true},
		{1, time.Second, false}, {1, 2 * time.Second, true},
		{6, time.Minute, false}, {6, 64 * time.Second, true},
		{1000, 17 * time.Minute, false}, {1000, 18 * time.Minute, true},
	} {
		a := audited{of, now.Add(-test.ago), test.failures}
		if got := a.due(of, now, period); got != test.want {
			t.Errorf("%s after %d failures: %v, want %v", test.ago, test.failures, got, test.want)
		}
		if !a.due(other, now, period) {
			t.Errorf("%s after %d failures other numbers wait", test.ago, test.failures)
		}
	}
	if !(audited{}).due(of, now, period) {
		t.Error("the first audit waits")
	}
}

// What was unlabelled when a group took objects is no alarm of one that takes none.
func TestTheAlarmEndsWhereAGroupTakesNoObjectsAnyMore(t *testing.T) {
	group := &lbv1alpha1.WatchGroup{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "parents"}}
	family(&group.Spec)
	group.Spec.OptIn = lbv1alpha1.OptInNone
	status := lbv1alpha1.WatchGroupStatus{UnlabelledObjects: 3, OldestUnlabelled: &metav1.Time{Time: time.Now()}}
	set(group, &status, metav1.Condition{Type: lbv1alpha1.ConditionUnlabelled, Status: metav1.ConditionTrue,
		Reason: lbv1alpha1.ReasonBackfill})
	(&Reconciler{Backfill: &Backfill{}}).reportObjects(group, &status)
	c := meta.FindStatusCondition(status.Conditions, lbv1alpha1.ConditionUnlabelled)
	if status.UnlabelledObjects != 0 || status.OldestUnlabelled != nil || c.Status != metav1.ConditionFalse ||
		c.Reason != lbv1alpha1.ReasonNoLabels {
		t.Errorf("the status says %+v", status)
	}
}
