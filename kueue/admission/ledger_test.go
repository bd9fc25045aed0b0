package admission

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func promise(key string, nodes int32, since time.Duration) Promise {
	return Promise{Key: key, Nodes: map[string]int32{"a": nodes}, Since: now.Add(since), Until: now.Add(since + time.Hour)}
}

// A hint that falls has lost nodes to demand, and the admitted promises are that demand: the oldest first.
func TestFallingHintSettlesAdmittedPromises(t *testing.T) {
	l := NewLedger()
	l.Observe([]Hint{{Name: "a", Count: 20}})
	l.Promise(promise("waiting", 4, 0))
	l.Promise(promise("second", 4, 2*time.Second))
	l.Promise(promise("first", 4, time.Second))
	l.Admitted("first")
	l.Admitted("second")

	l.Observe([]Hint{{Name: "a", Count: 14}}) // six taken
	if diff := cmp.Diff([]string{"second", "waiting"}, l.Keys()); diff != "" {
		t.Fatalf("promises after six nodes were taken (-expected +left):\n%s", diff)
	}
	if got := l.Promised("a", ""); got != 6 {
		t.Errorf("%d nodes are promised, expected 2 of second and 4 of waiting", got)
	}
	l.Observe([]Hint{{Name: "a", Count: 30}})
	l.Observe([]Hint{{Name: "a", Count: 0}})
	if diff := cmp.Diff([]string{"waiting"}, l.Keys()); diff != "" {
		t.Errorf("what is not admitted has taken nothing (-expected +left):\n%s", diff)
	}
}

func TestPromisesLapse(t *testing.T) {
	l := NewLedger()
	l.Promise(promise("old", 1, -time.Hour))
	l.Promise(promise("young", 1, -time.Minute))
	if next := l.Expire(now); !next.Equal(now.Add(59 * time.Minute)) {
		t.Errorf("the next promise lapses at %s", next)
	}
	if diff := cmp.Diff([]string{"young"}, l.Keys()); diff != "" {
		t.Errorf("promises left (-expected +left):\n%s", diff)
	}
}

// However workloads come, are admitted and go: what is promised never exceeds what the hint had, and when all are gone the
// ledger is at zero.
func TestLedgerReturnsToZero(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := NewLedger()
		count := rapid.Int32Range(0, 50).Draw(t, "count")
		for i := range rapid.IntRange(0, 40).Draw(t, "steps") {
			hints := []Hint{gpuHint("a", count)}
			l.Observe(hints)
			w := workload(pods("main", rapid.Int32Range(1, 12).Draw(t, "pods"), rapid.Int64Range(1, 8).Draw(t, "gpus")))
			w.Key = rapid.SampledFrom([]string{"1", "2", "3", "4", "5"}).Draw(t, "key")
			switch rapid.IntRange(0, 3).Draw(t, "step") {
			case 0, 1:
				d := Decide(w, World{Hints: hints, Ledger: l, Now: now, Random: func() float64 { return 0 }})
				l.Release(w.Key)
				if len(d.Nodes) > 0 {
					l.Promise(Promise{Key: w.Key, Nodes: d.Nodes, Since: now.Add(time.Duration(i)), Until: now.Add(time.Hour)})
				}
			case 2:
				if rapid.Bool().Draw(t, "ended") {
					l.End(w.Key)
				} else {
					l.Release(w.Key)
				}
			case 3:
				l.Admitted(w.Key)
			}
			if got := l.Promised("a", ""); got > count {
				t.Fatalf("%d nodes are promised of %d", got, count)
			}
		}
		for _, key := range []string{"1", "2", "3", "4", "5"} {
			l.Release(key)
		}
		if totals := l.Totals(); len(totals) != 0 || len(l.Keys()) != 0 {
			t.Fatalf("everybody is gone and %v is promised", totals)
		}
	})
}
