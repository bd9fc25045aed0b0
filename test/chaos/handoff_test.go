package chaos

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	v1alpha1 "github.com/drover-sh/drover/examples/parentchild/api/v1alpha1"
	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/history"
)

// A handoff in a hurry: while every member is at work all the time and all watches are a second late, one leaves, comes back,
// and is stopped for longer than its Lease. Without the barrier the next owner does not see what the last one wrote after it
// had been listed, and without the wait for what is under way the last owner goes on in what it has given up.
func TestHandoffsInAHurry(t *testing.T) {
	c := start(t, options{handoff: lbv1alpha1.HandoffExclusive, members: 2, coordinators: 1, work: 100 * time.Millisecond})
	u := newUsers(c, 1)
	u.create(60)
	both := func(ctx context.Context) error { return c.settled(ctx, 2) }
	one := func(ctx context.Context) error { return c.settled(ctx, 1) }
	c.eventually("both members have their share", both)
	c.eventually("every Parent has its Child", c.complete)

	ctx, enough := context.WithCancel(t.Context())
	defer enough()
	var wait sync.WaitGroup
	wait.Go(func() { u.hurry(ctx) })
	behind := func(by time.Duration) {
		for _, m := range c.members {
			m.lag.fallBehind(by)
		}
	}
	behind(time.Second)
	c.eventually("members are at work", func(ctx context.Context) error {
		var list v1alpha1.ChildList
		if err := c.client.List(ctx, &list); err != nil {
			return err
		}
		if !slices.ContainsFunc(list.Items, func(o v1alpha1.Child) bool { return strings.HasPrefix(o.Spec.Value, "hurry") }) {
			return errors.New("no Child has been changed yet")
		}
		return nil
	})
	moving := c.members[0]
	moving.stop()
	c.eventually("one member has taken over from the one that left", one)
	moving.start()
	c.eventually("both members have their share again", both)
	moving.signal(syscall.SIGSTOP)
	c.eventually("one member has taken over from the one that was stopped", one)
	moving.signal(syscall.SIGCONT)
	c.eventually("both members have their share in the end", both)
	enough()
	wait.Wait()
	behind(0)
	c.eventually("every Parent has exactly one Child", c.complete)

	records := c.history()
	t.Logf("%d Virtual Nodes were granted after something had been written there that the list had not shown", afterLists(records))
	c.report(records, slices.DeleteFunc(check(records), func(v history.Violation) bool {
		return v.Invariant == history.I7 // of a time that is quiet
	}))
}

// afterLists counts the Virtual Nodes that were granted after their last owner had written a Child that the next one's list
// had not shown.
func afterLists(records []history.Record) (n int) {
	type place struct {
		session string
		vn      sharding.VirtualNode
	}
	type write struct {
		index   int
		session string
	}
	filled, wrote := make(map[place]int), make(map[sharding.VirtualNode]write)
	for i, r := range records {
		switch {
		case r.Kind == history.Filled && r.Resource == children:
			for vn := range r.VNs.All() {
				filled[place{r.Session, vn}] = i
			}
		case r.Kind == history.Wrote && r.Resource == children && r.Actor == history.Reconciler:
			wrote[r.VN] = write{i, r.Session}
		case r.Kind == history.Granted:
			for vn := range r.VNs.All() {
				at, listed := filled[place{r.Session, vn}]
				if w, ok := wrote[vn]; ok && listed && w.session != r.Session && w.index > at {
					n++
				}
			}
		}
	}
	return n
}
