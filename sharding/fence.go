package sharding

import (
	"errors"
	"fmt"
	"time"
)

// An Instant is a reading of a process's monotonic clock: the time since some moment that the process chose. Instants
// of different processes have nothing to do with each other. The clock must go on while the process is stopped and
// while the machine is suspended (CLOCK_BOOTTIME on Linux), or a member that was suspended would believe in its lease.
type Instant = time.Duration

// A LeasePolicy is how long a member may act on its Lease, and how long the others wait before they act instead.
type LeasePolicy struct {
	// LeaseDuration is how long the coordinator waits after it has seen a renewal until it takes the member for
	// stopped.
	LeaseDuration time.Duration
	// RenewDeadline is how long a member acts after it has sent the last renewal that succeeded.
	RenewDeadline time.Duration
	// RetryPeriod is the time between two renewals.
	RetryPeriod time.Duration
	// RequestTimeout is the longest that a write of the member may take until it has landed or never will.
	RequestTimeout time.Duration
}

// DefaultLeasePolicy is what the control plane's own components use, with room for a write in flight.
func DefaultLeasePolicy() LeasePolicy {
	return LeasePolicy{
		LeaseDuration:  15 * time.Second,
		RenewDeadline:  9 * time.Second,
		RetryPeriod:    2 * time.Second,
		RequestTimeout: 5 * time.Second,
	}
}

// Validate checks that a member has stopped, and its last write has landed, before anybody takes over: RenewDeadline +
// RequestTimeout < LeaseDuration. All faults are reported at once. prefix is put before the names of the fields.
func (p LeasePolicy) Validate(prefix string) error {
	var errs []error
	for _, f := range []struct {
		name  string
		value time.Duration
	}{
		{"leaseDuration", p.LeaseDuration},
		{"renewDeadline", p.RenewDeadline},
		{"retryPeriod", p.RetryPeriod},
		{"requestTimeout", p.RequestTimeout},
	} {
		if f.value <= 0 {
			errs = append(errs, fmt.Errorf("%s%s: %s is not positive", prefix, f.name, f.value))
		}
	}
	if p.RetryPeriod >= p.RenewDeadline {
		errs = append(errs, fmt.Errorf("%sretryPeriod: %s is not shorter than renewDeadline (%s)",
			prefix, p.RetryPeriod, p.RenewDeadline))
	}
	if p.RenewDeadline+p.RequestTimeout >= p.LeaseDuration {
		errs = append(errs, fmt.Errorf("%srenewDeadline: %s plus requestTimeout (%s) is not shorter than "+
			"leaseDuration (%s): a write could land after another member took over",
			prefix, p.RenewDeadline, p.RequestTimeout, p.LeaseDuration))
	}
	return errors.Join(errs...)
}

// A Fence tells a member how long it may act. It is the member's half of the bargain: the coordinator counts
// LeaseDuration from when it saw a renewal, the member counts RenewDeadline from before it sent it, and both count on
// their own monotonic clocks, so that neither clock skew nor a slow network lets the two overlap.
type Fence struct {
	policy LeasePolicy
	sentAt Instant
	held   bool
}

// NewFence returns a fence that allows nothing until the first renewal.
func NewFence(policy LeasePolicy) *Fence { return &Fence{policy: policy} }

// Renewed records that the renewal (or acquisition) that was sent at sentAt has succeeded. An answer that arrives
// after the deadline it would have extended does not count: the member has already stopped, and says so by a new
// session.
func (f *Fence) Renewed(sentAt, now Instant) {
	if now-sentAt >= f.policy.RenewDeadline || (f.held && sentAt < f.sentAt) {
		return
	}
	f.sentAt, f.held = sentAt, true
}

// Holds reports whether the member may start a reconcile or send a write at now.
func (f *Fence) Holds(now Instant) bool { return f.held && now < f.Deadline() }

// Deadline is when the member must have stopped sending; a write in flight at that moment lands before anybody takes
// over. It has a meaning only once a renewal has succeeded.
func (f *Fence) Deadline() Instant { return f.sentAt + f.policy.RenewDeadline }

// Drop ends the hold at once: the deadline was missed, or the member has stopped on purpose.
func (f *Fence) Drop() { f.held = false }

// A LeaseRecord is what a member's Lease object says.
type LeaseRecord struct {
	// Member is the member's ID.
	Member string
	// Session is the holder: one life of the member, from a start or from the end of a pause to the next. Empty
	// when the member has stopped and released its lease.
	Session string
	// Renewal changes with every renewal: the Lease's resourceVersion, or renewTime as written. It is compared for
	// being equal only; the clock it may come from is never believed.
	Renewal string
	// Duration is the LeaseDuration that the member promised in its Lease.
	Duration time.Duration
}

// A LeaseWatch tells from renewals which members have stopped. It counts from when it saw a renewal, on its own clock;
// one that starts anew begins to count anew, which delays a takeover and endangers nothing.
//
// What it saw may be older than what is: a watch can lag. Before anybody acts on an expiry, the holder is therefore
// taken out of the Lease by an update on the condition that its resourceVersion is still the one observed. A member
// that has renewed meanwhile wins against that update; one that has not finds its session revoked when it returns.
type LeaseWatch struct {
	seen map[string]sighting
}

type sighting struct {
	record LeaseRecord
	at     Instant
}

// Observe records a Lease as it was read at now.
func (w *LeaseWatch) Observe(record LeaseRecord, now Instant) {
	if w.seen == nil {
		w.seen = make(map[string]sighting)
	}
	if old, ok := w.seen[record.Member]; ok && old.record == record {
		return
	}
	w.seen[record.Member] = sighting{record, now}
}

// Forget drops a member whose Lease object is gone.
func (w *LeaseWatch) Forget(member string) { delete(w.seen, member) }

// Session returns the session that holds the member's lease at now, "" if it has been released, has expired, or was
// never seen.
func (w *LeaseWatch) Session(member string, now Instant) string {
	s, ok := w.seen[member]
	if !ok || now >= s.at+s.record.Duration {
		return ""
	}
	return s.record.Session
}

// NextExpiry returns when Session may next change without a new observation, and false if it will not.
func (w *LeaseWatch) NextExpiry(now Instant) (Instant, bool) {
	var next Instant
	found := false
	for _, s := range w.seen {
		end := s.at + s.record.Duration
		if s.record.Session != "" && end > now && (!found || end < next) {
			next, found = end, true
		}
	}
	return next, found
}

// MayAcquire reports whether a session may take a member's Lease: it holds it already, nobody does, the holder has
// expired on the asker's own clock, or the asker knows that the holder has ended because it runs in the same place (a
// container of a Pod starts only after the one before has ended).
func (w *LeaseWatch) MayAcquire(member, session string, predecessorEnded bool, now Instant) bool {
	holder := w.Session(member, now)
	return holder == "" || holder == session || predecessorEnded
}
