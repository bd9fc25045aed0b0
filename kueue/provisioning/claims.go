package provisioning

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/drover-sh/drover/controllers/sharded"
)

// Holding is room on nodes that exist which somebody was promised and has not used up.
type Holding struct {
	PodSets []PodSet
	// Nodes on which they were promised it; none: the pods may go to any.
	Nodes []string
}

// Claims lets those that promise the room of existing nodes (this package and kueue/admission) take turns, and shows each
// what the others hold. Whoever decides does so between Lock and Unlock, from reading the room until what it promised shows
// in its holdings.
type Claims struct {
	mu      sync.Mutex
	holders map[string]func(context.Context) ([]Holding, error)
	resets  []func()
	written []sharded.Scope
	shard   *shard // nil where the leader decides
}

// NewClaims returns Claims without holders.
func NewClaims() *Claims {
	return &Claims{holders: map[string]func(context.Context) ([]Holding, error){}}
}

// Register adds a holder, before anybody decides. held is called under the lock, reads caches only, and tells what the
// holder holds at that moment, also right after a start.
func (c *Claims) Register(name string, held func(context.Context) ([]Holding, error)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.holders[name] = held
}

// Lock takes the turn.
func (c *Claims) Lock() { c.mu.Lock() }

// Unlock gives it back.
func (c *Claims) Unlock() { c.mu.Unlock() }

// Others lists what all holders but the named one hold. Whoever calls it has the lock.
func (c *Claims) Others(ctx context.Context, name string) ([]Holding, error) {
	var out []Holding
	for _, other := range slices.Sorted(maps.Keys(c.holders)) {
		if other == name {
			continue
		}
		held, err := c.holders[other](ctx)
		if err != nil {
			return nil, fmt.Errorf("reading what %s holds: %w", other, err)
		}
		out = append(out, held...)
	}
	return out, nil
}
