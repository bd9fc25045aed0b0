package admission

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// Promise is capacity set aside for one workload by one check.
type Promise struct {
	Key string
	// Nodes by the name of the hint that they are taken from. None: the promise has ended, and is kept in mind so that it is
	// not taken for one that was never recorded.
	Nodes map[string]int32
	Since time.Time
	// Until is when the promise lapses by itself.
	Until time.Time
	// Admitted is true once Kueue has admitted the workload: its pods ask for the nodes themselves.
	Admitted bool
}

// Ledger holds what was promised and not seen to be taken yet. It is not safe for concurrent use.
//
// A promise ends when its workload is evicted, finished or deleted, when its pods have their nodes, at its time-out, or,
// once the workload is admitted, when its nodes are on their way and the hint's count has fallen by them: to keep it then
// would count the nodes twice. A hint also falls by what other clusters take, and that settles nothing. Which workload nodes
// on their way are for cannot be seen; the oldest admitted promise gives way.
type Ledger struct {
	promises map[string]*Promise
	hints    map[string]*account
	launched map[string]bool // UpcomingNodes that were seen; nil before the first look
}

// account is what has happened to a hint and was not settled with a promise yet.
type account struct {
	count  int32 // when it was last seen
	fallen int32 // nodes that left the hint
	coming int32 // nodes of it that are on their way to this cluster
}

// NewLedger returns an empty ledger.
func NewLedger() *Ledger {
	return &Ledger{promises: map[string]*Promise{}, hints: map[string]*account{}}
}

// Promise records p in the place of what was promised under its key.
func (l *Ledger) Promise(p Promise) {
	p.Nodes = maps.Clone(p.Nodes)
	l.promises[p.Key] = &p
}

// Get returns the promise under the key.
func (l *Ledger) Get(key string) (Promise, bool) {
	p, ok := l.promises[key]
	if !ok {
		return Promise{}, false
	}
	return *p, true
}

// Release ends a promise and forgets that there was one.
func (l *Ledger) Release(key string) { delete(l.promises, key) }

// End ends a promise: its nodes are not needed any more.
func (l *Ledger) End(key string) {
	if p := l.promises[key]; p != nil {
		clear(p.Nodes)
	}
}

// Keep releases all promises but those of the keys.
func (l *Ledger) Keep(live map[string]bool) {
	maps.DeleteFunc(l.promises, func(key string, _ *Promise) bool { return !live[key] })
}

// Admitted notes that Kueue has admitted the workload.
func (l *Ledger) Admitted(key string) {
	if p := l.promises[key]; p != nil {
		p.Admitted = true
	}
}

// Promised is how many nodes of the hint are set aside, those for key not counted.
func (l *Ledger) Promised(hint, except string) int32 {
	var n int32
	for key, p := range l.promises {
		if key != except {
			n += p.Nodes[hint]
		}
	}
	return n
}

// Keys lists the promises that have not ended, sorted.
func (l *Ledger) Keys() []string {
	var keys []string
	for key, p := range l.promises {
		if len(p.Nodes) > 0 {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	return keys
}

// Totals is how many nodes are set aside, by hint.
func (l *Ledger) Totals() map[string]int32 {
	totals := map[string]int32{}
	for _, p := range l.promises {
		for hint, n := range p.Nodes {
			totals[hint] += n
		}
	}
	return totals
}

// Expire ends the promises that have lapsed and returns when the next one will; zero: none.
func (l *Ledger) Expire(now time.Time) (next time.Time) {
	for key, p := range l.promises {
		if !p.Until.After(now) {
			delete(l.promises, key)
			continue
		}
		if len(p.Nodes) == 0 {
			continue
		}
		if next.IsZero() || p.Until.Before(next) {
			next = p.Until
		}
	}
	return next
}

// Launched is a node on its way to this cluster.
type Launched struct {
	Name   string
	Labels map[string]string
}

// Observe notes the hints' counts and the nodes on their way. The nodes that have both left a hint and come into sight are
// settled with the admitted promises on that hint, the oldest first.
func (l *Ledger) Observe(hints []Hint, upcoming []Launched) {
	for i := range hints {
		h := &hints[i]
		a, known := l.hints[h.Name]
		if !known {
			a = &account{count: h.Count}
			l.hints[h.Name] = a
		}
		a.fallen += max(0, a.count-h.Count)
		a.count = h.Count
	}
	maps.DeleteFunc(l.hints, func(name string, _ *account) bool {
		return !slices.ContainsFunc(hints, func(h Hint) bool { return h.Name == name })
	})
	seen := make(map[string]bool, len(upcoming))
	for _, u := range upcoming {
		seen[u.Name] = true
		if l.launched == nil || l.launched[u.Name] {
			continue
		}
		if i := slices.IndexFunc(hints, func(h Hint) bool { return h.Template.Yields(u.Labels) }); i >= 0 {
			l.hints[hints[i].Name].coming++
		}
	}
	l.launched = seen
	for name, a := range l.hints {
		if n := min(a.fallen, a.coming); n > 0 {
			l.settle(name, n)
			a.fallen, a.coming = a.fallen-n, a.coming-n
		}
		// What happens while nothing is owed is not about any promise.
		if !l.owes(name) {
			a.fallen, a.coming = 0, 0
		}
	}
}

func (l *Ledger) owes(hint string) bool {
	for _, p := range l.promises {
		if p.Admitted && p.Nodes[hint] > 0 {
			return true
		}
	}
	return false
}

func (l *Ledger) settle(hint string, taken int32) {
	var owed []*Promise
	for _, p := range l.promises {
		if p.Admitted && p.Nodes[hint] > 0 {
			owed = append(owed, p)
		}
	}
	slices.SortFunc(owed, func(a, b *Promise) int {
		return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.Key, b.Key))
	})
	for _, p := range owed {
		n := min(taken, p.Nodes[hint])
		taken -= n
		if p.Nodes[hint] -= n; p.Nodes[hint] == 0 {
			delete(p.Nodes, hint)
		}
	}
}
