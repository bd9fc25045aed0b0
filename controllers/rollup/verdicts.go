package rollup

import (
	"context"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
)

// announceAgain is how long a need's verdict has to rest after an event before it makes another, so that a verdict that
// flaps does not flood.
const announceAgain = time.Minute

// verdicts tells people what the autoscaler decided: a log line on every change, and one event on the oldest request of a
// row when it becomes short or stops being it.
type verdicts struct {
	client   client.Client
	recorder events.EventRecorder
	clock    clock.PassiveClock
	log      logr.Logger

	wake chan struct{}
	feed *feed

	shown map[string]shownVerdict
}

type shownVerdict struct {
	verdict   verdict
	short     bool // what the last event said
	announced time.Time
}

func (v *verdicts) signal() {
	select {
	case v.wake <- struct{}{}:
	default:
	}
}

// Start implements manager.Runnable.
func (v *verdicts) Start(ctx context.Context) error {
	v.shown = map[string]shownVerdict{}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-v.wake:
		}
		if state := v.feed.current(); state != nil {
			v.show(ctx, state)
		}
	}
}

func (v *verdicts) show(ctx context.Context, state *feedState) {
	turned := map[string]verdict{}
	for id, now := range state.verdicts {
		shown := v.shown[id]
		if now != shown.verdict {
			v.log.Info("Verdict", "need", id, "state", now.state, "short", now.short, "reason", now.reason,
				"nearestOffering", now.nearest)
			shown.verdict = now
		}
		short := now.state == capacity.VerdictShort
		if short != shown.short && v.clock.Since(shown.announced) >= announceAgain {
			turned[id] = now
			shown.short, shown.announced = short, v.clock.Now()
		}
		v.shown[id] = shown
	}
	for id := range v.shown {
		if _, listed := state.verdicts[id]; !listed {
			delete(v.shown, id)
		}
	}
	if len(turned) > 0 {
		v.announce(ctx, turned)
	}
}

// announce puts one event on the oldest request of each row.
func (v *verdicts) announce(ctx context.Context, turned map[string]verdict) {
	var requests fleetv1alpha1.CapacityRequestList
	if err := v.client.List(ctx, &requests, client.UnsafeDisableDeepCopy); err != nil {
		v.log.Error(err, "Listing requests to say a verdict")
		return
	}
	oldest := map[string]*fleetv1alpha1.CapacityRequest{}
	for i := range requests.Items {
		cr := &requests.Items[i]
		id := capacity.ProfileOfRequest(&cr.Spec).ID()
		if _, ok := turned[id]; !ok {
			continue
		}
		if was := oldest[id]; was == nil || older(cr, was) {
			oldest[id] = cr
		}
	}
	for id, cr := range oldest {
		now := turned[id]
		if now.state != capacity.VerdictShort {
			v.recorder.Eventf(cr.DeepCopy(), nil, corev1.EventTypeNormal, "CapacityFound", "Plan",
				"The autoscaler has capacity for this need (%s)", now.state)
			continue
		}
		note := fmt.Sprintf("The autoscaler cannot serve %d pods of this shape: %s", now.short, now.reason)
		if now.nearest != "" {
			note += "; the nearest offering is " + now.nearest
		}
		v.recorder.Eventf(cr.DeepCopy(), nil, corev1.EventTypeWarning, "CapacityShort", "Plan", "%s", truncate(note, maxMessage))
	}
}

func older(a, b *fleetv1alpha1.CapacityRequest) bool {
	if !a.CreationTimestamp.Equal(&b.CreationTimestamp) {
		return a.CreationTimestamp.Before(&b.CreationTimestamp)
	}
	return a.UID < b.UID
}
