package chaos

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/resourceversion"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/examples/parentchild/recording"
	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/history"
)

// bound is the longest that a Parent may wait for a reconcile after the last fault, or the end of the last one. An API
// server that starts on a busy machine takes most of it.
const bound = 45 * time.Second

// chaosBegins marks the moment in the history.
const chaosBegins = "chaos begins"

// settings are those of the environment.
type settings struct {
	length  time.Duration
	parents int
	seed    uint64
}

func settingsOf(t *testing.T, length time.Duration) settings {
	t.Helper()
	s := settings{length: length, parents: 500, seed: rand.Uint64()}
	for name, parse := range map[string]func(string) error{
		"DROVER_CHAOS":         func(v string) (err error) { s.length, err = time.ParseDuration(v); return err },
		"DROVER_CHAOS_PARENTS": func(v string) (err error) { s.parents, err = strconv.Atoi(v); return err },
		"DROVER_CHAOS_SEED":    func(v string) (err error) { s.seed, err = strconv.ParseUint(v, 10, 64); return err },
	} {
		if v := os.Getenv(name); v != "" {
			if err := parse(v); err != nil {
				t.Fatalf("environment variable %s: %v", name, err)
			}
		}
	}
	t.Logf("DROVER_CHAOS_SEED=%d DROVER_CHAOS=%s DROVER_CHAOS_PARENTS=%d", s.seed, s.length, s.parents)
	return s
}

// With an exclusive handoff nothing of what happens breaks an invariant, and in the end every Parent has its Child.
func TestChaosExclusive(t *testing.T) {
	s := settingsOf(t, 2*time.Minute)
	c := start(t, options{handoff: lbv1alpha1.HandoffExclusive, members: 5, coordinators: 2})
	c.rage(s)
	c.quiet()
	records := c.history()
	c.report(records, check(records))
}

// report fails the test for violations, and shows the first of each invariant.
func (c *cluster) report(records []history.Record, violations []history.Violation) {
	c.t.Helper()
	count := make(map[history.Invariant]int)
	for _, v := range violations {
		if count[v.Invariant]++; count[v.Invariant] <= 3 {
			c.t.Errorf("%s\n%s", v, around(records, v))
		}
	}
	if len(count) > 0 {
		c.t.Errorf("violations of each invariant: %v", count)
	}
}

// With the paper's handoff two members work on one object for a moment (section 8), and the checker sees it.
func TestChaosEventualOverlaps(t *testing.T) {
	s := settingsOf(t, time.Minute)
	c := start(t, options{handoff: lbv1alpha1.HandoffEventual, members: 5, coordinators: 2})
	count := make(map[history.Invariant]int)
	c.rage(s)
	for _, v := range check(c.history()) {
		count[v.Invariant]++
	}
	t.Logf("violations: %v", count)
	if count[history.I1] == 0 {
		t.Errorf("no overlap in %s of chaos: the checker would not see one either where there must be none", s.length)
	}
}

// rage lets users and faults loose, and waits until everything is mended.
func (c *cluster) rage(s settings) {
	c.t.Helper()
	u, f := newUsers(c, s.seed), newFaults(c, s.seed)
	u.create(s.parents)
	c.eventually("all members have their share", func(ctx context.Context) error { return c.settled(ctx, len(c.members)) })
	c.eventually("every Parent has its Child", c.complete)
	c.note("", chaosBegins)

	ctx, cancel := context.WithTimeout(c.t.Context(), s.length)
	defer cancel()
	var wait sync.WaitGroup
	wait.Go(func() { u.run(ctx, 20*time.Millisecond) })
	f.run(ctx)
	wait.Wait()
	c.note("", "chaos ends")
	c.t.Logf("faults: %v", f.counts)

	c.eventually("all members have their share again", func(ctx context.Context) error { return c.settled(ctx, len(c.members)) })
	c.eventually("every Parent has exactly one Child", c.complete)
	for i, line := range c.denied(append(f.restarts, c.begun)) {
		if i < 5 {
			c.t.Errorf("a right is missing: %s", line)
		}
	}
}

// quiet waits for so long after the last fault that whatever has not been reconciled by then is late.
func (c *cluster) quiet() {
	c.t.Helper()
	end := time.Now()
	c.eventually("nothing has happened for long enough to tell", func(ctx context.Context) error {
		if quiet := min(c.store.quietFor(), time.Since(end)); quiet < bound+2*time.Second {
			return fmt.Errorf("quiet for %s", quiet)
		}
		return c.settled(ctx, len(c.members))
	})
}

// history takes snapshots of the members' caches, ends everything, and puts all records together.
func (c *cluster) history() []history.Record {
	c.t.Helper()
	for _, m := range c.members {
		m.signal(syscall.SIGUSR1)
	}
	c.eventually("all members have told what they cache", func(context.Context) error {
		for _, m := range c.members {
			lines, err := recording.Load(m.record(m.life()))
			if err != nil {
				return err
			}
			if n := countOf(lines, history.Snapshot); n != 2 {
				return fmt.Errorf("%s has told of %d resources", m.name, n)
			}
		}
		return nil
	})
	c.ending.Store(true)
	for _, m := range c.members {
		m.kill() // all has been told; they need not take leave of each other
	}
	if err := c.group.StopProcesses(20 * time.Second); err != nil {
		c.t.Fatal(err)
	}
	var files [][]recording.Line
	paths, _ := filepath.Glob(c.path("*.jsonl"))
	for _, path := range paths {
		lines, err := recording.Load(path)
		if err != nil {
			c.t.Fatal(err)
		}
		files = append(files, lines)
	}
	landings, err := c.store.all()
	if err != nil {
		c.t.Fatal(err)
	}
	records := recording.Merge(files, landings)
	out, err := os.Create(c.path("history"))
	if err != nil {
		c.t.Fatal(err)
	}
	defer out.Close()
	if err := history.Write(out, records); err != nil {
		c.t.Fatal(err)
	}
	c.t.Logf("%d records of %d files and %d landings; %v", len(records), len(files), len(landings), tally(records))
	return records
}

func countOf(lines []recording.Line, kind history.Kind) (n int) {
	for _, l := range lines {
		if l.Record != nil && l.Record.Kind == kind {
			n++
		}
	}
	return n
}

func tally(records []history.Record) map[history.Kind]int {
	n := make(map[history.Kind]int)
	for _, r := range records {
		n[r.Kind]++
	}
	return n
}

// check returns the violations. That reconciles of the first mass of Parents take long is no fault of anybody's.
func check(records []history.Record) []history.Violation {
	begin := slices.IndexFunc(records, func(r history.Record) bool { return r.What == chaosBegins })
	violations := history.Check(records, history.Options{
		Compare: func(a, b sharding.Version) (int, error) {
			return resourceversion.CompareResourceVersion(string(a), string(b))
		},
		Roots: []sharding.Resource{parents}, Bound: bound,
	})
	return slices.DeleteFunc(violations, func(v history.Violation) bool { return v.Invariant == history.I4 && v.Index < begin })
}

// around shows what happened before a violation to the object, Virtual Nodes or session that it speaks of.
func around(records []history.Record, v history.Violation) string {
	if v.Index >= len(records) {
		return ""
	}
	at := records[v.Index]
	var lines []string
	for i := v.Index; i >= 0 && len(lines) < 25; i-- {
		r := records[i]
		same := r.Kind == history.Changed || (at.Object != "" && r.Object == at.Object) ||
			((r.Kind == history.Granted || r.Kind == history.Released) && (r.VNs.Has(at.VN) || !r.VNs.Intersect(at.VNs).Empty())) ||
			(r.Kind == history.SessionEnded && r.Session == at.Session)
		if same {
			r.VNs = nil
			lines = append(lines, "    "+r.String())
		}
	}
	return strings.Join(lines, "\n")
}
