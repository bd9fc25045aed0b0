package sharding

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var midnight = time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)

// Half a million keys, a period of a day, a tick every quarter of an hour: every key once in the period, each tick and
// each minute within the bounds of chance.
func TestResyncVisitsEveryKeyOncePerPeriod(t *testing.T) {
	const keys, ticks, minutes = 500_000, 96, 1440
	r := Resync{Period: 24 * time.Hour}
	step := 1 // which keys are put through Has at every tick; their minutes are counted for all
	if os.Getenv("DROVER_LONG") == "" {
		step = 101
	}
	perMinute := make([]int, minutes)
	var sample []string
	for i := range keys {
		key := fmt.Sprintf("ns/parent-%d", i)
		perMinute[r.SliceOf(key, midnight)-midnight.Unix()/60]++
		if i%step == 0 {
			sample = append(sample, key)
		}
	}
	visits := make([]int, len(sample))
	last, from := midnight, int64(0)
	for tick := 1; tick <= ticks; tick++ {
		due := r.Tick(last, midnight.Add(time.Duration(tick)*15*time.Minute))
		last = due.Done(last)
		n := 0
		for m := due.From; m < due.To; m++ {
			n += perMinute[m-midnight.Unix()/60]
		}
		within(t, fmt.Sprintf("tick %d", tick), n, keys, 1.0/ticks)
		if due.From-midnight.Unix()/60 != from {
			t.Fatalf("tick %d starts at minute %d, want %d", tick, due.From, from)
		}
		from = due.To - midnight.Unix()/60
		for i, key := range sample {
			if due.Has(key) {
				visits[i]++
			}
		}
	}
	for m, n := range perMinute {
		within(t, fmt.Sprintf("minute %d", m), n, keys, 1.0/minutes)
	}
	for i, n := range visits {
		if n != 1 {
			t.Errorf("%s was visited %d times", sample[i], n)
		}
	}
}

// The same with ticks that are early, late, doubled and missing, a restart that kept the last one done, and keys that come and
// go: each key that is there at the tick of its minute is visited then, and at no other.
func TestResyncVisitsEveryKeyOnceWhateverTheTicks(t *testing.T) {
	const keys, minutes = 500_000, 1440
	r := Resync{Period: 24 * time.Hour}
	rnd := rand.New(rand.NewPCG(1, 2))
	base := midnight.Unix() / 60
	step := 1
	if os.Getenv("DROVER_LONG") == "" {
		step = 101
	}
	// A key is there from the minute come, and before the minute goes. Nine of ten are there all the time.
	type key struct {
		name               string
		come, goes, minute int64
		visits             int
	}
	all := make([]key, keys)
	byMinute := make([][]int, minutes)
	for i := range all {
		k := &all[i]
		k.name, k.goes = fmt.Sprintf("ns/parent-%d", i), 2*minutes
		switch rnd.IntN(20) {
		case 0:
			k.come = rnd.Int64N(minutes)
		case 1:
			k.goes = rnd.Int64N(minutes)
		}
		k.minute = r.SliceOf(k.name, midnight) - base
		byMinute[k.minute] = append(byMinute[k.minute], i)
	}
	last, sizes := midnight, make(map[string]int)
	for tick := 1; tick <= 97; tick++ {
		now := midnight.Add(time.Duration(tick) * 15 * time.Minute)
		kind := "regular"
		switch n := rnd.IntN(10); {
		case tick == 97: // pays what is left
			now = midnight.Add(24 * time.Hour)
		case n == 0:
			sizes["missed"]++
			continue
		case n == 1:
			kind, now = "late", now.Add(time.Duration(rnd.IntN(14*60))*time.Second)
		case n == 2:
			kind, now = "early", now.Add(-time.Duration(rnd.IntN(14*60))*time.Second)
		case n == 3:
			kind, r = "after a restart", Resync{Period: 24 * time.Hour}
		}
		sizes[kind]++
		if now.After(midnight.Add(24 * time.Hour)) {
			now = midnight.Add(24 * time.Hour)
		}
		for range 1 + rnd.IntN(2) { // some ticks come twice
			due := r.Tick(last, now)
			if due.From < due.To && !last.Equal(time.Unix(due.From*60, 0)) {
				t.Fatalf("tick %d (%s) starts at %v, done is all before %v", tick, kind, time.Unix(due.From*60, 0).UTC(), last)
			}
			last = due.Done(last)
			at, n, there := now.Unix()/60-base, 0, 0
			for m := due.From - base; m < due.To-base; m++ {
				for _, i := range byMinute[m] {
					if k := &all[i]; k.come <= at && at < k.goes {
						n++
						k.visits++
					}
				}
			}
			for i := range all {
				k := &all[i]
				if k.come <= at && at < k.goes {
					there++
				}
				if i%step == 0 && due.Has(k.name) != (due.From-base <= k.minute && k.minute < due.To-base) {
					t.Fatalf("tick %d (%s) of minutes %d to %d: Has(%s), due at %d, is %t", tick, kind, due.From-base, due.To-base,
						k.name, k.minute, due.Has(k.name))
				}
			}
			within(t, fmt.Sprintf("tick %d (%s)", tick, kind), n, there, float64(due.To-due.From)/minutes)
		}
	}
	t.Logf("ticks: %v", sizes)
	for _, k := range all {
		if always := k.come == 0 && k.goes > minutes; k.visits > 1 || (always && k.visits != 1) {
			t.Fatalf("%s, there from minute %d to %d and due at %d, was visited %d times", k.name, k.come, k.goes, k.minute, k.visits)
		}
	}
	for m, list := range byMinute {
		within(t, fmt.Sprintf("minute %d", m), len(list), keys, 1.0/minutes)
	}
}

// within allows six standard deviations of the binomial distribution: one failure in half a billion.
func within(t *testing.T, what string, got, n int, p float64) {
	t.Helper()
	mean := float64(n) * p
	if dev := 6 * math.Sqrt(mean*(1-p)); math.Abs(float64(got)-mean) > dev {
		t.Errorf("%s has %d keys, want %.0f ± %.0f", what, got, mean, dev)
	}
}

func TestResyncDealsKeysAnewEachPeriod(t *testing.T) {
	r := Resync{Period: 24 * time.Hour}
	same := 0
	for i := range 10_000 {
		key := fmt.Sprint(i)
		a, b := r.SliceOf(key, midnight), r.SliceOf(key, midnight.Add(25*time.Hour))
		if b-a == 1440 {
			same++
		}
	}
	within(t, "the same minute in both periods", same, 10_000, 1.0/1440)
}

// However ticks come, early, late, twice, not at all, over a restart that kept the last one, and with a clock that is
// set back and comes forward again: every key is visited exactly once in each period that has passed, unless a gap
// was longer than a period, and a key that appears late or goes is visited iff it is there at the tick of its minute.
func TestResyncNeitherSkipsNorRepeats(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		slice := rapid.SampledFrom([]int64{1, 7, 60, 900}).Draw(t, "slice")
		r := Resync{Slice: time.Duration(slice) * time.Second}
		r.Period = time.Duration(rapid.IntRange(1, 120).Draw(t, "period")) * r.Slice
		start := time.Unix(rapid.Int64Range(-1e6, 1e6).Draw(t, "start")*slice, 0)
		keys := []string{"a", "b", "c", "d"}
		visited := make(map[string][]Due)
		now, last := start, start
		for range rapid.IntRange(1, 60).Draw(t, "ticks") {
			now = now.Add(time.Duration(rapid.IntRange(-5, 20).Draw(t, "slices")) * r.Slice).
				Add(time.Duration(rapid.Int64Range(0, slice-1).Draw(t, "seconds")) * time.Second)
			due := r.Tick(last, now)
			if due.To > now.Unix()/slice && now.Unix() >= 0 {
				t.Fatalf("%v is due before its time, %v", due, now)
			}
			last = due.Done(last)
			for _, key := range keys {
				if due.Has(key) {
					visited[key] = append(visited[key], due)
				}
			}
		}
		for _, key := range keys {
			var owed []int64
			for p := start.Add(-r.Period); p.Before(last.Add(r.Period)); p = p.Add(r.Period) {
				if m := r.SliceOf(key, p); m >= start.Unix()/slice && m < last.Unix()/slice {
					owed = append(owed, m)
				}
			}
			// Each visit pays all that its slice holds; a minute that no slice holds was skipped.
			for _, due := range visited[key] {
				paid := 0
				for len(owed) > 0 && due.From <= owed[0] && owed[0] < due.To {
					owed = owed[1:]
					paid++
				}
				if paid == 0 {
					t.Fatalf("%s was visited by %+v, which holds none of its minutes (next %v)", key, due, owed)
				}
			}
			if len(owed) > 0 {
				t.Fatalf("%s was not visited at minutes %v", key, owed)
			}
		}
	})
}

func TestResyncStartsWithNothingOwed(t *testing.T) {
	due := Resync{Period: time.Hour}.Tick(time.Time{}, midnight.Add(90*time.Second))
	if due.From != due.To || !due.Done(time.Time{}).Equal(midnight.Add(time.Minute)) {
		t.Errorf("first tick: %+v, done %v", due, due.Done(time.Time{}))
	}
}

func TestResyncAfterLongGapVisitsOnce(t *testing.T) {
	due := Resync{Period: time.Hour}.Tick(midnight.Add(-5*time.Minute), midnight.Add(100*time.Hour))
	for i := range 100 {
		if !due.Has(fmt.Sprint(i)) {
			t.Errorf("key %d is not due after a gap of 100 periods", i)
		}
	}
}

func TestResyncValidate(t *testing.T) {
	for _, c := range []struct {
		r    Resync
		want string
	}{
		{Resync{Period: 0}, "spec.resync.period: 0s"},
		{Resync{Period: time.Second}, "spec.resync.period: 1s"},
		{Resync{Period: 90 * time.Second}, "spec.resync.period: 1m30s"},
		{Resync{Period: -time.Hour}, "spec.resync.period: -1h0m0s"},
		{Resync{Period: time.Minute, Slice: 7 * time.Second}, "spec.resync.period: 1m0s"},
		{Resync{Period: time.Minute, Slice: 500 * time.Millisecond}, "spec.resync.slice: 500ms"},
		{Resync{Period: time.Minute, Slice: -time.Second}, "spec.resync.slice: -1s"},
	} {
		if err := c.r.Validate("spec.resync"); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("Validate of %v: %v, want %q", c.r, err, c.want)
		}
	}
	for _, r := range []Resync{{Period: time.Minute}, {Period: 8 * time.Second, Slice: time.Second}} {
		if err := r.Validate("x"); err != nil {
			t.Errorf("%v: %v", r, err)
		}
	}
}
