package demand

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/drover-sh/drover/capacity"
)

func TestRequestFollowsWhatChangesAroundItsPod(t *testing.T) {
	tolerates := func(keys ...string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			for _, key := range keys {
				p.Spec.Tolerations = append(p.Spec.Tolerations, corev1.Toleration{Key: key, Operator: corev1.TolerationOpExists})
			}
		}
	}
	selects := func(labels map[string]string) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Spec.NodeSelector = labels }
	}
	for _, c := range []struct {
		name          string
		before, after func(*corev1.Pod)
		want          func(*corev1.Pod) // whose need the request tells in the end
	}{
		{"a toleration is added", tolerates("a"), tolerates("a", "b"), tolerates("a", "b")},
		{"a writer that saw the pod before takes none away", tolerates("a", "b"), tolerates("a"), tolerates("a", "b")},
		{"a volume is bound in a zone", selects(nil), selects(map[string]string{"zone": "a"}),
			selects(map[string]string{"zone": "a"})},
		{"companions have moved", selects(map[string]string{"zone": "a"}), selects(map[string]string{"zone": "b"}),
			selects(map[string]string{"zone": "b"})},
		{"a writer that does not know the zone leaves it", selects(map[string]string{"zone": "a"}), selects(nil),
			selects(map[string]string{"zone": "a"})},
		{"nothing has changed", selects(map[string]string{"zone": "a"}), selects(map[string]string{"zone": "a"}),
			selects(map[string]string{"zone": "a"})},
	} {
		t.Run(c.name, func(t *testing.T) {
			api := newFakeAPI()
			for _, state := range []func(*corev1.Pod){c.before, c.after} {
				w := newTestWriter(t, api, nil)
				w.Enqueue(pod("web-0", state), nil)
				work(t, w)
			}
			got := capacity.ProfileOfRequest(&api.objects[Name("web-0", "uid-web-0")].Spec)
			if diff := cmp.Diff(capacity.ProfileOfPod(pod("web-0", c.want)), got); diff != "" {
				t.Errorf("need (-want +got):\n%s", diff)
			}
		})
	}
}

func TestVerifyComparesAWrittenRequestAgain(t *testing.T) {
	api := newFakeAPI()
	minCount := int32(0)
	w := newTestWriter(t, api, func(o *Options) {
		o.Describe = func(pod *corev1.Pod) capacity.Profile {
			p := capacity.ProfileOfPod(pod)
			p.Group = &capacity.Group{Name: "ns/g", MinCount: minCount}
			return p
		}
	})
	w.Verify(pod("web-0"))
	work(t, w)
	wantVerbs(t, api) // nobody asked for it

	w.Enqueue(pod("web-0"), nil)
	work(t, w)
	minCount = 8
	w.Verify(pod("web-0"))
	w.Verify(pod("web-0"))
	work(t, w)
	wantVerbs(t, api, "create", "create", "get", "update")
	if got := api.objects[Name("web-0", "uid-web-0")].Spec.Group.MinCount; got != 8 {
		t.Errorf("minimum is %d, want 8", got)
	}

	t.Run("also when it is being written", func(t *testing.T) {
		api := newFakeAPI()
		w := newTestWriter(t, api, nil)
		api.fail = func(call int) error {
			if call == 0 {
				w.Verify(pod("web-0"))
			}
			return nil
		}
		w.Enqueue(pod("web-0"), nil)
		work(t, w)
		wantVerbs(t, api, "create", "create", "get")
	})
}

func TestEventsTakeTheirShareOfTheRateLimit(t *testing.T) {
	api := newFakeAPI()
	clock := clocktesting.NewFakeClock(time.Unix(1000, 0))
	w := newTestWriter(t, api, func(o *Options) {
		o.Clock, o.QPS, o.Burst = clock, 1, 2
		o.Decide = func(*corev1.Pod, []capacity.Rejection) capacity.Decision {
			return capacity.Decision{Reason: "Hopeless"}
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // what has to wait for the rate limit fails at once
	for i := range 5 {
		w.Enqueue(pod(fmt.Sprint("web-", i)), nil)
		uid := types.UID(fmt.Sprint("uid-web-", i))
		if err := w.handle(ctx, uid); (err != nil) != (i >= 2) {
			t.Errorf("event %d: error %v", i, err)
		}
	}
	if len(api.warnings) != 2 {
		t.Errorf("got %d events in a burst of 2", len(api.warnings))
	}
}
