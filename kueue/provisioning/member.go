package provisioning

import (
	"context"

	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/drover-sh/drover/controllers/sharded"
)

// HashKey is the key of everything that promises capacity to Kueue. A workload may count on any hint and on the room of any
// node, and so may a booking: they all draw on one account, which has one Virtual Node and therefore one member that
// decides. Two keys would be two accounts of the same nodes.
const HashKey = "kueue.drover.sh/promises"

// shard is what Claims need where the manager is a member of a WatchGroup.
type shard struct {
	catchUp func(...sharded.Scope) *sharded.CatchUp
	// turn is the one for which the holders decide; 0: none. waiting is set until their caches show what the member before
	// has written.
	turn    sharded.Turn
	waiting *sharded.CatchUp
}

// Shard prepares the claims for a manager whose cache is a sharded.Group's. It has to be called before the holders are set
// up; without it they run on the leader.
//
// Where the owner of HashKey changes, the new one begins as after a restart, and not before its cache shows all that the
// former one has written: what a workload was promised stands in its status, and what a booking holds in its own.
func (c *Claims) Shard(mgr manager.Manager) {
	c.shard = &shard{catchUp: func(scopes ...sharded.Scope) *sharded.CatchUp {
		return sharded.NewCatchUp(mgr.GetScheme(), mgr.GetAPIReader(), mgr.GetCache(), scopes...)
	}}
}

// Sharded reports whether the holders run on every replica, as members.
func (c *Claims) Sharded() bool { return c.shard != nil }

// Keys bind a holder's controller to HashKey. list returns all its requests.
func (c *Claims) Keys(list func(context.Context) ([]reconcile.Request, error)) sharded.Keys {
	return sharded.Keys{
		Of:       func(reconcile.Request) string { return HashKey },
		List:     list,
		Takeover: c.takeOver,
		Lost:     c.lost,
	}
}

// OnTurn adds a holder that may be another member's: reset forgets what it remembers, and wrote is what it writes. reset is
// called under the lock, when another member may have decided since, and when another is about to.
func (c *Claims) OnTurn(reset func(), wrote ...sharded.Scope) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.resets, c.written = append(c.resets, reset), append(c.written, wrote...)
}

func (c *Claims) takeOver(ctx context.Context, turn sharded.Turn) (bool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.shard
	if s == nil {
		return true, nil
	}
	if s.turn != turn {
		s.turn, s.waiting = turn, s.catchUp(c.written...)
		c.reset()
	}
	if s.waiting == nil {
		return true, nil
	}
	done, err := s.waiting.Done(ctx)
	if done {
		s.waiting = nil
	}
	return done, err
}

func (c *Claims) lost(_ context.Context, last sharded.Turn, lost func(reconcile.Request) bool) {
	if !lost(reconcile.Request{}) {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if s := c.shard; s != nil && s.turn <= last {
		s.turn, s.waiting = 0, nil
		c.reset()
	}
}

func (c *Claims) reset() {
	for _, reset := range c.resets {
		reset()
	}
}
