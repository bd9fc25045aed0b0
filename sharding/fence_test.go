package sharding

import (
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestLeasePolicyValidate(t *testing.T) {
	if err := DefaultLeasePolicy().Validate(""); err != nil {
		t.Errorf("the default: %v", err)
	}
	for _, tc := range []struct {
		name string
		set  func(*LeasePolicy)
		want string
	}{
		{"a write could land late", func(p *LeasePolicy) { p.RequestTimeout = 6 * time.Second },
			"spec.renewDeadline: 9s plus requestTimeout (6s) is not shorter than leaseDuration (15s)"},
		{"no time to retry", func(p *LeasePolicy) { p.RetryPeriod = 9 * time.Second },
			"spec.retryPeriod: 9s is not shorter than renewDeadline (9s)"},
		{"not set", func(p *LeasePolicy) { p.RequestTimeout = 0 }, "spec.requestTimeout: 0s is not positive"},
		{"negative", func(p *LeasePolicy) { p.RetryPeriod = -1 }, "spec.retryPeriod: -1ns is not positive"},
	} {
		p := DefaultLeasePolicy()
		tc.set(&p)
		if err := p.Validate("spec."); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: Validate = %v, want %q", tc.name, err, tc.want)
		}
	}
}

// Whatever renewals are sent, lost and delayed: at the moment a coordinator counts a member as stopped, the member has
// stopped sending, and what it sent last has landed. Real time is one line; the clocks of both start anywhere on it.
func TestNobodyActsAfterTheCoordinatorHasCountedItOut(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := DefaultLeasePolicy()
		fence, leases := NewFence(p), &LeaseWatch{}
		skew := time.Duration(rapid.IntRange(-100, 100).Draw(t, "skew")) * time.Hour
		now := time.Duration(0)
		for i := range rapid.IntRange(1, 20).Draw(t, "renewals") {
			now += time.Duration(rapid.IntRange(0, 20_000).Draw(t, "wait")) * time.Millisecond
			sent := now
			landed := sent + time.Duration(rapid.IntRange(0, 5_000).Draw(t, "request"))*time.Millisecond
			// The coordinator reads the renewal when it has landed; the answer may take another while, or be lost.
			if leases.Session("m", landed+skew) == "" && i > 0 {
				return // revoked: this renewal fails
			}
			leases.Observe(LeaseRecord{Member: "m", Session: "s", Renewal: now.String(), Duration: p.LeaseDuration}, landed+skew)
			answered := landed + time.Duration(rapid.IntRange(0, 20_000).Draw(t, "answer"))*time.Millisecond
			if rapid.Bool().Draw(t, "arrives") {
				fence.Renewed(sent, answered)
			}
			now = max(now, landed)
			lastWriteLands := fence.Deadline() + p.RequestTimeout
			if fence.held && leases.Session("m", lastWriteLands+skew) == "" {
				t.Fatalf("a write may land at %v, when the member already counts as stopped", lastWriteLands)
			}
		}
	})
}

func TestFence(t *testing.T) {
	p := DefaultLeasePolicy()
	f := NewFence(p)
	if f.Holds(0) {
		t.Error("holds before the first renewal")
	}
	f.Renewed(10*time.Second, 12*time.Second)
	if !f.Holds(18*time.Second) || f.Holds(19*time.Second) {
		t.Error("does not hold for renewDeadline from when the renewal was sent")
	}
	f.Renewed(14*time.Second, 23*time.Second)
	if f.Holds(23 * time.Second) {
		t.Error("an answer that came after its own deadline revived the session")
	}
	f.Renewed(20*time.Second, 21*time.Second)
	f.Renewed(11*time.Second, 19*time.Second)
	if got := f.Deadline(); got != 29*time.Second {
		t.Errorf("an older answer moved the deadline to %v", got)
	}
	f.Drop()
	if f.Holds(21 * time.Second) {
		t.Error("holds after Drop")
	}
}

func TestLeaseWatch(t *testing.T) {
	w := &LeaseWatch{}
	record := LeaseRecord{Member: "m", Session: "s1", Renewal: "1", Duration: 15 * time.Second}
	w.Observe(record, 0)
	w.Observe(record, 14*time.Second) // the same renewal, seen again
	if at, ok := w.NextExpiry(14 * time.Second); !ok || at != 15*time.Second {
		t.Errorf("NextExpiry = %v, %v, want 15s", at, ok)
	}
	if got := w.Session("m", 15*time.Second); got != "" {
		t.Errorf("a lease that was not renewed is still held by %q", got)
	}
	if w.MayAcquire("m", "s2", false, 14*time.Second) || !w.MayAcquire("m", "s2", true, 14*time.Second) ||
		!w.MayAcquire("m", "s1", false, 14*time.Second) || !w.MayAcquire("m", "s2", false, 15*time.Second) {
		t.Error("MayAcquire: only the holder, one that saw it end, or anybody after it has expired")
	}
	record.Renewal = "2"
	w.Observe(record, 16*time.Second)
	if got := w.Session("m", 30*time.Second); got != "s1" {
		t.Errorf("a renewed lease is held by %q", got)
	}
	w.Observe(LeaseRecord{Member: "m", Renewal: "3", Duration: 15 * time.Second}, 20*time.Second)
	if got := w.Session("m", 20*time.Second); got != "" {
		t.Errorf("a released lease is held by %q", got)
	}
	w.Forget("m")
	if _, ok := w.NextExpiry(0); ok || w.Session("m", 0) != "" {
		t.Error("a forgotten member is remembered")
	}
}
