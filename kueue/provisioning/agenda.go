package provisioning

import (
	"context"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/event"
)

// agenda knows which bookings are active, and when each is to be looked at again. It wakes them by the injected clock.
type agenda struct {
	clock clock.WithTicker
	wakes chan event.TypedGenericEvent[types.NamespacedName]
	// everywhere: on every replica, not on the leader alone.
	everywhere bool

	mu   sync.Mutex
	next map[types.NamespacedName]time.Time
	held map[types.NamespacedName]int32
}

// tick is how exactly deadlines are kept.
const tick = time.Second

// review is how often an active booking is looked at although nothing is known to have happened.
const review = 30 * time.Second

func newAgenda(c clock.WithTicker) *agenda {
	return &agenda{
		clock: c, wakes: make(chan event.TypedGenericEvent[types.NamespacedName]),
		next: map[types.NamespacedName]time.Time{}, held: map[types.NamespacedName]int32{},
	}
}

// set puts a booking on the agenda, to be looked at in so much time at the latest.
func (a *agenda) set(key types.NamespacedName, held int32, in time.Duration) {
	if in <= 0 || in > review {
		in = review
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.next[key], a.held[key] = a.clock.Now().Add(in), held
	a.show()
}

// drop takes it off.
func (a *agenda) drop(key types.NamespacedName) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.next, key)
	delete(a.held, key)
	a.show()
}

// clear takes everything off.
func (a *agenda) clear() {
	a.mu.Lock()
	defer a.mu.Unlock()
	clear(a.next)
	clear(a.held)
	a.show()
}

func (a *agenda) show() {
	activeBookings.Set(float64(len(a.next)))
	var held int32
	for _, n := range a.held {
		held += n
	}
	heldPods.Set(float64(held))
}

// active lists all bookings on the agenda.
func (a *agenda) active() []types.NamespacedName {
	return a.due(time.Time{})
}

// due lists the bookings whose time has come; all of them at the zero time.
func (a *agenda) due(now time.Time) []types.NamespacedName {
	a.mu.Lock()
	defer a.mu.Unlock()
	var keys []types.NamespacedName
	for key, at := range a.next {
		if now.IsZero() || !at.After(now) {
			keys = append(keys, key)
		}
	}
	return keys
}

// NeedLeaderElection implements manager.LeaderElectionRunnable.
func (a *agenda) NeedLeaderElection() bool { return !a.everywhere }

// Start implements manager.Runnable.
func (a *agenda) Start(ctx context.Context) error {
	ticker := a.clock.NewTicker(tick)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
		}
		for _, key := range a.due(a.clock.Now()) {
			select {
			case a.wakes <- event.TypedGenericEvent[types.NamespacedName]{Object: key}:
			case <-ctx.Done():
				return nil
			}
		}
	}
}
