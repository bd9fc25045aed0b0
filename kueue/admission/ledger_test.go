package admission

import (
	"strconv"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func promise(key string, nodes int32, since time.Duration) Promise {
	return Promise{Key: key, Nodes: map[string]int32{"a": nodes}, Since: now.Add(since), Until: now.Add(since + time.Hour)}
}

func launched(names ...string) []Launched {
	var out []Launched
	for _, name := range names {
		out = append(out, Launched{Name: name, Labels: map[string]string{"type": "h100", "zone": "a"}})
	}
	return out
}

// Nodes that have left the hint and are on their way are those of admitted promises: the oldest first.
func TestNodesOnTheirWaySettleAdmittedPromises(t *testing.T) {
	l := NewLedger()
	l.Observe([]Hint{gpuHint("a", 20)}, launched("earlier"))
	l.Promise(promise("waiting", 4, 0))
	l.Promise(promise("second", 4, 2*time.Second))
	l.Promise(promise("first", 4, time.Second))
	l.Admitted("first")
	l.Admitted("second")

	l.Observe([]Hint{gpuHint("a", 14)}, launched("earlier", "1", "2", "3")) // six taken, three in sight
	if got := l.Promised("a", ""); got != 9 {
		t.Fatalf("%d nodes are promised, expected 1 of first, 4 of second and 4 of waiting", got)
	}
	l.Observe([]Hint{gpuHint("a", 14)}, launched("earlier", "1", "2", "3", "4", "5", "6"))
	if diff := cmp.Diff([]string{"second", "waiting"}, l.Keys()); diff != "" {
		t.Fatalf("promises after six nodes were taken (-expected +left):\n%s", diff)
	}
	if got := l.Promised("a", ""); got != 6 {
		t.Errorf("%d nodes are promised, expected 2 of second and 4 of waiting", got)
	}
	l.Observe([]Hint{gpuHint("a", 0)}, launched("7", "8", "9", "10"))
	if diff := cmp.Diff([]string{"waiting"}, l.Keys()); diff != "" {
		t.Errorf("what is not admitted has taken nothing (-expected +left):\n%s", diff)
	}
}

// What another cluster takes of a hint, and nodes of another kind, leave the promises as they are.
func TestOthersSettleNoPromise(t *testing.T) {
	l := NewLedger()
	hints := func(count int32) []Hint { return []Hint{gpuHint("a", count), gpuHint("b", 5, ofType("a100"))} }
	l.Observe(hints(20), nil)
	l.Promise(promise("ours", 4, 0))
	l.Admitted("ours")
	l.Observe(hints(10), nil)
	l.Observe(hints(10), []Launched{{Name: "x", Labels: map[string]string{"type": "a100"}}})
	if got := l.Promised("a", ""); got != 4 {
		t.Errorf("%d nodes are promised after others took theirs, expected 4", got)
	}
	l.Release("ours")
	l.Observe(hints(10), nil)
	l.Promise(promise("next", 2, 0))
	l.Admitted("next")
	l.Observe(hints(10), launched("1", "2")) // the hint has yet to fall by them
	if got := l.Promised("a", ""); got != 2 {
		t.Errorf("%d nodes are promised, expected 2: what others took before is not the next one's", got)
	}
	l.Observe(hints(8), launched("1", "2"))
	if got := l.Promised("a", ""); got != 0 {
		t.Errorf("%d nodes are promised that are on their way", got)
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
			l.Observe(hints, launched(strconv.Itoa(i)))
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
