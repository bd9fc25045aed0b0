package rollup

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// What the cache does not show yet is waited for, but not for ever: what comes and goes at once it never shows.
func TestAWriteIsWaitedForUntilTheCacheShowsIt(t *testing.T) {
	node := func(uid types.UID, version string) *corev1.Node {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", UID: uid, ResourceVersion: version}}
	}
	wrote := func(u *unseen) { u.wrote(node("1", "10")) }
	deleted := func(u *unseen) { u.deleted(node("1", "10")) }
	for name, test := range map[string]struct {
		write  func(*unseen)
		cached client.Object
		after  time.Duration
		want   time.Duration
	}{
		"nothing was written":           {func(*unseen) {}, node("1", "9"), 0, 0},
		"it shows the version before":   {wrote, node("1", "9"), 0, unseenGrace},
		"it shows what was written":     {wrote, node("1", "10"), 0, 0},
		"it shows what came after":      {wrote, node("1", "11"), 0, 0},
		"it does not show it at all":    {wrote, nil, time.Second, unseenGrace - time.Second},
		"nor after a while":             {wrote, nil, unseenGrace, 0},
		"it shows what was deleted":     {deleted, node("1", "10"), 0, unseenGrace},
		"it shows that it is gone":      {deleted, nil, 0, 0},
		"it shows one of the same name": {deleted, node("2", "12"), 0, 0},
		"a version that is none":        {wrote, node("1", "x"), 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			clk := clocktesting.NewFakeClock(time.Unix(1_000_000, 0))
			u := &unseen{clock: clk}
			test.write(u)
			clk.Step(test.after)
			if got := u.wait("n", test.cached); got != test.want {
				t.Errorf("it waits for %s, want %s", got, test.want)
			}
			if got := len(u.writes); (got == 0) != (test.want == 0) {
				t.Errorf("%d writes are remembered", got)
			}
		})
	}
}
