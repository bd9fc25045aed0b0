package rollup

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clocktesting "k8s.io/utils/clock/testing"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/internal/builders"
)

// eventLog keeps events as "object type reason: note".
type eventLog []string

func (l *eventLog) Eventf(regarding, _ runtime.Object, kind, reason, _, note string, args ...any) {
	*l = append(*l, fmt.Sprintf("%s %s %s: %s", regarding.(client.Object).GetName(), kind, reason, fmt.Sprintf(note, args...)))
}

// A verdict that turns to short, or back, makes one event, on the oldest request of the row; one that stays makes none, and
// one that flaps makes no more than one a minute.
func TestAVerdictThatTurnsMakesOneEvent(t *testing.T) {
	request := func(name string, cpu string, age time.Duration) *fleetv1alpha1.CapacityRequest {
		cr := builders.CapacityRequest("default", name).Requests("cpu", cpu).Obj()
		cr.CreationTimestamp = metav1.NewTime(time.Unix(1_000_000, 0).Add(-age))
		return cr
	}
	older, younger := request("older", "3", time.Hour), request("younger", "3", time.Minute)
	id := capacity.ProfileOfRequest(&older.Spec).ID()
	c := fake.NewClientBuilder().WithScheme(testScheme()).WithObjects(younger, older, request("another", "5", 2*time.Hour)).Build()
	clk := clocktesting.NewFakeClock(time.Unix(1_000_000, 0))
	var events eventLog
	v := &verdicts{client: c, recorder: &events, clock: clk, log: logr.Discard(), shown: map[string]shownVerdict{}}
	short := verdict{state: capacity.VerdictShort, short: 7, reason: "no stock left of gpu", nearest: "gpu"}
	shorter := verdict{state: capacity.VerdictShort, short: 9, reason: "no stock left of gpu", nearest: "gpu"}
	coming := verdict{state: capacity.VerdictInFlight}
	saysShort := "older Warning CapacityShort: The autoscaler cannot serve 7 pods of this shape: no stock left of gpu; " +
		"the nearest offering is gpu"
	saysFound := "older Normal CapacityFound: The autoscaler has capacity for this need (InFlight)"
	for i, step := range []struct {
		after   time.Duration
		verdict verdict
		want    []string
	}{
		{0, coming, nil}, // as it should be
		{0, short, []string{saysShort}},
		{time.Hour, short, nil},
		{time.Hour, shorter, nil}, // still short
		{0, coming, []string{saysFound}},
		{time.Second, short, nil}, // flaps
		{time.Second, coming, nil},
		{time.Second, short, nil},
		{time.Minute, short, []string{saysShort}}, // and stays
	} {
		clk.Step(step.after)
		events = nil
		v.show(t.Context(), &feedState{verdicts: map[string]verdict{id: step.verdict, "unknown": step.verdict}})
		if !slices.Equal(events, step.want) {
			t.Errorf("step %d: events are\n%s\nwant\n%s", i, strings.Join(events, "\n"), strings.Join(step.want, "\n"))
		}
	}
	v.show(t.Context(), &feedState{})
	if len(v.shown) > 0 {
		t.Errorf("%d rows that are no longer listed are remembered", len(v.shown))
	}
}

// The observed time of a hint follows the feed every 30 seconds, and stands still while the feed is away.
func TestTheObservedTimeOfAHintIsRefreshed(t *testing.T) {
	c := fake.NewClientBuilder().WithScheme(testScheme()).WithStatusSubresource(&fleetv1alpha1.AvailableCapacity{}).Build()
	start := time.Unix(1_000_000, 0)
	f := &feed{}
	r := &hintReconciler{client: c, namespace: fleetv1alpha1.SystemNamespace, feed: f, log: logr.Discard()}
	key := client.ObjectKey{Namespace: fleetv1alpha1.SystemNamespace, Name: "gpu"}
	version := ""
	for _, step := range []struct {
		received, want time.Duration
		writes         bool
	}{
		{0, 0, true},
		{10 * time.Second, 0, false},
		{29 * time.Second, 0, false},
		{30 * time.Second, 30 * time.Second, true},
		{30 * time.Second, 30 * time.Second, false}, // the feed is away
		{5 * time.Minute, 5 * time.Minute, true},
	} {
		f.state = &feedState{receivedAt: start.Add(step.received), offerings: map[string]*fleetv1alpha1.AvailableCapacitySpec{
			"gpu": {AvailableCount: 3, Availability: fleetv1alpha1.AvailabilityHigh}}}
		result, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKey{Name: "gpu"}})
		if err != nil {
			t.Fatal(err)
		}
		if result.RequeueAfter != refreshHint {
			t.Errorf("at %s: the next look is in %s, want %s", step.received, result.RequeueAfter, refreshHint)
		}
		var hint fleetv1alpha1.AvailableCapacity
		if err := c.Get(t.Context(), key, &hint); err != nil {
			t.Fatal(err)
		}
		if got := hint.Status.ObservedTime; got == nil || got.Sub(start) != step.want {
			t.Errorf("at %s: observed at %v, want %s", step.received, got, step.want)
		}
		if wrote := hint.ResourceVersion != version; wrote != step.writes {
			t.Errorf("at %s: written is %v, want %v", step.received, wrote, step.writes)
		}
		version = hint.ResourceVersion
	}
}
