package autoscaler

import "time"

// launchBackoff keeps the engine from hammering a place where launches fail.
type launchBackoff struct {
	message string
	// failedAt is the last failure that raised the pause; until is its end.
	failedAt, until time.Time
	pause           time.Duration
}

// fail records a failed launch. Launches of one burst fail together and raise the pause once.
func (b *launchBackoff) fail(now, requestedAt time.Time, message string, base, limit time.Duration) {
	b.message = message
	if b.pause != 0 && !requestedAt.After(b.failedAt) {
		return
	}
	b.pause = min(max(2*b.pause, base), limit)
	b.failedAt, b.until = now, now.Add(b.pause)
}
