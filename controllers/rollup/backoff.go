package rollup

import "time"

// backoff grows the pause after every failure in a row up to a limit, and spreads it so that many operators do not return
// to one autoscaler in step. It is not safe for concurrent use.
type backoff struct {
	base, max time.Duration
	random    func() float64 // in [0, 1)
	failures  int
}

// next returns the pause after one more failure: between half and the whole of the grown pause.
func (b *backoff) next() time.Duration {
	pause := b.max
	// Beyond 30 doublings the shift could overflow, and every limit is long passed.
	if b.failures < 30 && b.base<<b.failures < b.max {
		pause = b.base << b.failures
	}
	b.failures++
	return pause/2 + time.Duration(b.random()*float64(pause/2))
}

// reset forgets the failures.
func (b *backoff) reset() { b.failures = 0 }
