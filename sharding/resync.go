package sharding

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"time"
)

// A Resync visits every key once per Period, spread evenly over its slices, which are minutes unless Slice says
// otherwise, by enqueuing on each tick only the keys that are due. Which slice a key has is a hash of the key and of the
// period's start, so it needs no state, every process computes the same, and the keys are dealt anew in each period.
type Resync struct {
	// Period is a whole number of slices. Periods are counted from the Unix epoch in UTC.
	Period time.Duration
	// Slice is the part of the period that keys share; whole seconds, and zero means a minute.
	Slice time.Duration
}

// Validate checks both. field names the Resync in the error.
func (r Resync) Validate(field string) error {
	if r.Slice < 0 || r.Slice%time.Second != 0 {
		return fmt.Errorf("%s.slice: %s is not a whole number of seconds", field, r.Slice)
	}
	slice := cmp.Or(r.Slice, time.Minute)
	if r.Period < slice || r.Period%slice != 0 {
		return fmt.Errorf("%s.period: %s is not a whole number of slices of %s, at least 1", field, r.Period, slice)
	}
	return nil
}

// slice is the length of one in seconds, and slices is how many a period has.
func (r Resync) slice() int64  { return int64(cmp.Or(r.Slice, time.Minute) / time.Second) }
func (r Resync) slices() int64 { return int64(r.Period/time.Second) / r.slice() }

// Due is what a tick has to enqueue: some slices of time, and through Has the keys that are theirs.
type Due struct {
	// From and To bound the slices that are due, To excluded, counted since the Unix epoch.
	From, To int64
	resync   Resync
}

// Tick returns what is due at time now when everything before last is done. last is the Done of the tick before; the
// caller keeps it, over restarts too if it can. Due slices are whole and past, so that:
//
//   - a tick that comes early returns fewer slices, or none, and the next one the rest;
//   - a tick that comes late, or after others were missed, returns all slices since the last one done;
//   - a clock that is set back returns nothing until it has caught up.
//
// The zero last, of a process that knows nothing of the ticks before, starts with the slice that begins now: it owes
// no key anything, because a start visits all keys anyway.
func (r Resync) Tick(last, now time.Time) Due {
	to := floorDiv(now.Unix(), r.slice())
	from := to
	if !last.IsZero() {
		from = min(floorDiv(last.Unix(), r.slice()), to)
	}
	return Due{From: from, To: to, resync: r}
}

// Done returns the time up to which everything is done once all that is due has been enqueued: the last of the next Tick. It
// never goes back: if the clock was set back it is last itself.
func (d Due) Done(last time.Time) time.Time {
	done := time.Unix(d.To*d.resync.slice(), 0).UTC()
	if done.Before(last) {
		return last
	}
	return done
}

// Has reports whether key is due. After a gap that spans several periods it may have been due several times; it is
// enqueued once.
func (d Due) Has(key string) bool {
	period := d.resync.slices()
	for start := floorDiv(d.From, period) * period; start < d.To; start += period {
		if d.From <= start && start+period <= d.To {
			return true // this whole period is due
		}
		if at := start + d.resync.offset(key, start); d.From <= at && at < d.To {
			return true
		}
	}
	return false
}

// SliceOf returns the slice, counted since the Unix epoch, in which key is due in the period that holds t.
func (r Resync) SliceOf(key string, t time.Time) int64 {
	period := r.slices()
	start := floorDiv(floorDiv(t.Unix(), r.slice()), period) * period
	return start + r.offset(key, start)
}

// offset is the key's slice within the period that starts at slice start. The salt is that start; the eight bytes of it
// stand before the key, so salt and key cannot run into each other.
func (r Resync) offset(key string, start int64) int64 {
	var buf [128]byte
	salted := binary.BigEndian.AppendUint64(buf[:0], uint64(start))
	sum := sha256.Sum256(append(salted, key...))
	return int64(binary.BigEndian.Uint64(sum[:8]) % uint64(r.slices()))
}

// floorDiv rounds toward minus infinity, so that times before 1970 are no special case.
func floorDiv(a, b int64) int64 {
	q := a / b
	if a%b < 0 {
		q--
	}
	return q
}
