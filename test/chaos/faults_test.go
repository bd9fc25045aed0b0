package chaos

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// faults are what goes wrong, and when: all of it drawn from one seed. How the processes run against each other is not.
type faults struct {
	c      *cluster
	random *rand.Rand // of the one goroutine that runs the schedule

	deck []string // what is to come

	wait   sync.WaitGroup // of faults that have not ended
	mu     sync.Mutex
	broken map[string]bool
	counts map[string]int

	lagging  atomic.Int32
	restarts []time.Time // of the API server, their begin and their end
}

func newFaults(c *cluster, seed uint64) *faults {
	return &faults{
		c: c, random: rand.New(rand.NewPCG(seed, 1)), broken: make(map[string]bool), counts: make(map[string]int),
	}
}

// run breaks something every few seconds until ctx ends, and mends everything.
func (f *faults) run(ctx context.Context) {
	for pause(ctx, f.between(time.Second, 5*time.Second)) {
		f.next()
	}
	f.wait.Wait()
}

func (f *faults) between(low, high time.Duration) time.Duration {
	return low + time.Duration(f.random.Int64N(int64(high-low)))
}

// pause reports whether ctx still lives after d. It is the schedule itself: nobody waits for something to have happened.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// maxBroken leaves somebody to work.
const maxBroken = 3

// kinds of faults, as often as they are among as many.
var kinds = []string{
	"kill", "kill", "kill", "kill", "pause", "pause", "pause", "partition", "partition", "partition", "leave", "leave",
	"lag", "lag", "lag", "rolling restart", "coordinator kill", "coordinator kill", "coordinator kill", "API server restart",
}

// next lets the next fault happen. One that is not possible now comes again later.
func (f *faults) next() {
	if len(f.deck) == 0 {
		f.deck = slices.Clone(kinds)
		f.random.Shuffle(len(f.deck), func(i, j int) { f.deck[i], f.deck[j] = f.deck[j], f.deck[i] })
	}
	kind := f.deck[0]
	f.deck = f.deck[1:]
	if !f.let(kind) {
		f.deck = append(f.deck, kind)
	}
}

// let reports whether it could let a fault happen.
func (f *faults) let(kind string) bool {
	m := f.c.members[f.random.IntN(len(f.c.members))]
	p := f.c.coordinators[f.random.IntN(len(f.c.coordinators))]
	long := f.between(leaseDuration+time.Second, 2*leaseDuration)
	short := f.between(0, 4*time.Second)
	switch kind {
	case "kill":
		return f.on(m.name, kind, func() {
			m.kill()
			pause(context.Background(), short)
			m.start()
		})
	case "pause":
		return f.on(m.name, kind, func() {
			m.signal(syscall.SIGSTOP)
			pause(context.Background(), long)
			m.signal(syscall.SIGCONT)
		})
	case "partition":
		return f.on(m.name, kind, func() {
			m.link.Sever()
			pause(context.Background(), long)
			m.link.Heal()
		})
	case "lag":
		// All watches fall behind, and somebody leaves and comes back: what changes hands was written a moment ago, and is in
		// no cache yet.
		behind := f.between(200*time.Millisecond, 700*time.Millisecond)
		return f.on(m.name, kind, func() {
			f.lagging.Add(1)
			f.fallBehind(behind)
			pause(context.Background(), time.Second)
			m.stop()
			pause(context.Background(), short)
			m.start()
			pause(context.Background(), long)
			if f.lagging.Add(-1) == 0 {
				f.fallBehind(0)
			}
		})
	case "leave":
		return f.on(m.name, kind, func() {
			m.stop()
			pause(context.Background(), short)
			m.start()
		})
	case "rolling restart":
		return f.rolling(kind)
	case "coordinator kill":
		return f.on(p.name, kind, func() {
			p.kill()
			pause(context.Background(), short)
			p.start()
		})
	default:
		return f.on("kube-apiserver", kind, func() {
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			f.restarts = append(f.restarts, time.Now()) // one at a time
			if err := f.c.cp.RestartAPIServer(ctx); err != nil {
				f.c.t.Errorf("%v", err)
			}
			f.restarts = append(f.restarts, time.Now())
		})
	}
}

// fallBehind sets how late all members' watches are.
func (f *faults) fallBehind(by time.Duration) {
	for _, m := range f.c.members {
		m.lag.fallBehind(by)
	}
}

// on lets one thing happen to somebody who is whole, unless too many are not.
func (f *faults) on(who, what string, do func()) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.broken[who] || len(f.broken) >= maxBroken {
		return false
	}
	f.broken[who] = true
	f.counts[what]++
	f.wait.Go(func() {
		f.c.note(who, what)
		do()
		f.c.note(who, "end of "+what)
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.broken, who)
	})
	return true
}

// rolling replaces all members, one after the other, while nobody is broken.
func (f *faults) rolling(what string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.broken) > 0 {
		return false
	}
	for _, m := range f.c.members {
		f.broken[m.name] = true
	}
	f.counts[what]++
	f.wait.Go(func() {
		for _, m := range f.c.members {
			f.c.note(m.name, what)
			m.stop()
			m.start()
		}
		f.c.note("", "end of "+what)
		f.mu.Lock()
		defer f.mu.Unlock()
		for _, m := range f.c.members {
			delete(f.broken, m.name)
		}
	})
	return true
}
