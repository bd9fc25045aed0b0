package autoscaler

import (
	"sync"

	fleetpb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
)

// hub keeps the latest feed of each cluster that somebody subscribes to. A subscriber takes the latest when it can
// send, so that a slow one skips states and never makes anything grow.
type hub struct {
	mu     sync.Mutex
	topics map[string]*topic
	closed chan struct{}
	once   sync.Once
}

type topic struct {
	latest      *fleetpb.FeedState
	subscribers map[*subscriber]struct{}
}

// subscriber has changed set, capacity 1, when there is a state that it has not taken.
type subscriber struct {
	cluster string
	changed chan struct{}
}

func newHub() *hub { return &hub{topics: map[string]*topic{}, closed: make(chan struct{})} }

func (h *hub) subscribe(cluster string) *subscriber {
	h.mu.Lock()
	defer h.mu.Unlock()
	t := h.topics[cluster]
	if t == nil {
		t = &topic{subscribers: map[*subscriber]struct{}{}}
		h.topics[cluster] = t
	}
	s := &subscriber{cluster: cluster, changed: make(chan struct{}, 1)}
	t.subscribers[s] = struct{}{}
	return s
}

func (h *hub) unsubscribe(s *subscriber) {
	h.mu.Lock()
	defer h.mu.Unlock()
	t := h.topics[s.cluster]
	delete(t.subscribers, s)
	if len(t.subscribers) == 0 {
		delete(h.topics, s.cluster)
	}
}

func (h *hub) wanted(cluster string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.topics[cluster] != nil
}

func (h *hub) subscribers() (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, t := range h.topics {
		n += len(t.subscribers)
	}
	return n
}

// publish replaces a cluster's state. The state must not be changed afterwards.
func (h *hub) publish(state *fleetpb.FeedState) {
	h.mu.Lock()
	defer h.mu.Unlock()
	t := h.topics[state.GetClusterId()]
	if t == nil {
		return
	}
	t.latest = state
	for s := range t.subscribers {
		select {
		case s.changed <- struct{}{}:
		default:
		}
	}
}

// take returns the latest state, nil before the first.
func (h *hub) take(s *subscriber) *fleetpb.FeedState {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.topics[s.cluster].latest
}

func (h *hub) close() { h.once.Do(func() { close(h.closed) }) }
