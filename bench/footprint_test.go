package bench

import (
	"context"
	"fmt"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	v1alpha1 "github.com/drover-sh/drover/examples/parentchild/api/v1alpha1"
)

// BenchmarkFootprint measures what each of one, three and nine members takes with 5,000 Parents and their Children, V = 1,000.
// Then it changes 2,000 Parents, whose Children the members change, and counts what each member's watches of the two kinds
// bring. Members are processes. Reported are, for n members, the means over them:
//
//   - heap-MB, rss-MB: memory in use after a garbage collection, and of the process, what is free given back;
//   - cache-MB: the heap beyond that of a member without objects;
//   - watch-kB, events: bytes and events that the watches brought for the changes.
//
// cache-ratio-9 and watch-ratio-9 say how many times as much one member takes as each of nine; nine is to be expected. The
// rest of the heap and of the process is what any controller takes.
func BenchmarkFootprint(b *testing.B) {
	objects := size("DROVER_BENCH_OBJECTS", 10_000)
	r := startSharded(b, rigOptions{virtualNodes: 1000})
	r.join(memberConfig{Name: "member-0", QPS: -1, Workers: 5})
	r.quiet(1)
	empty := r.usageOf("member-0")
	r.gate(false) // or the member would make the Children first
	r.populate(objects/2, true)
	r.gate(true)
	for b.Loop() {
		b.ReportMetric(mb(float64(empty.Heap)), "heap-MB/empty")
		b.ReportMetric(mb(float64(empty.Resident)), "rss-MB/empty")
		caches, watches := make(map[int]float64), make(map[int]float64)
		members := len(r.members)
		for _, n := range []int{1, 3, 9} {
			for ; members < n; members++ {
				r.join(memberConfig{Name: fmt.Sprintf("member-%d", members), QPS: -1, Workers: 5})
			}
			r.quiet(n)
			r.narrowed()
			r.change(n, objects/5) // so that every cache has what it is to have
			rest := r.total()
			seen := r.change(n, objects/5)
			mean := func(sum float64) float64 { return sum / float64(n) }
			caches[n] = mean(float64(rest.Heap)) - float64(empty.Heap)
			watches[n] = mean(float64(seen.WatchBytes))
			unit := func(name string) string { return fmt.Sprintf("%s/n=%d", name, n) }
			b.ReportMetric(mb(mean(float64(rest.Heap))), unit("heap-MB"))
			b.ReportMetric(mb(mean(float64(rest.Resident))), unit("rss-MB"))
			b.ReportMetric(mb(caches[n]), unit("cache-MB"))
			b.ReportMetric(watches[n]/1000, unit("watch-kB"))
			b.ReportMetric(mean(float64(seen.WatchEvents)), unit("events"))
		}
		b.ReportMetric(caches[1]/caches[9], "cache-ratio-9")
		b.ReportMetric(watches[1]/watches[9], "watch-ratio-9")
	}
}

func mb(bytes float64) float64 { return bytes / 1e6 }

// total adds up what all members use.
func (r *shardedRig) total() usage {
	r.b.Helper()
	var sum usage
	for name := range r.members {
		u := r.usageOf(name)
		sum.Heap += u.Heap
		sum.Resident += u.Resident
		sum.WatchBytes += u.WatchBytes
		sum.WatchEvents += u.WatchEvents
		sum.Watched += u.Watched
	}
	return sum
}

// narrowed waits until no member watches what another one has.
func (r *shardedRig) narrowed() {
	r.b.Helper()
	for ctx, cancel := context.WithTimeout(context.Background(), patience); ; {
		if r.total().Watched == 2*r.v {
			cancel()
			return
		}
		if ctx.Err() != nil {
			r.b.Fatalf("members watch %d Virtual Nodes, want %d of each kind", r.total().Watched, r.v)
		}
	}
}

// change gives so many Parents another value, waits until the members have seen them and their Children change, and returns
// what that took.
func (r *shardedRig) change(members, parents int) usage {
	r.b.Helper()
	before := r.total()
	r.changes++
	inParallel(r.b, parents, func(i int) error {
		p := &v1alpha1.Parent{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: parentName(i)}}
		patch := fmt.Appendf(nil, `{"spec":{"value":"%d of %d"}}`, r.changes, members)
		return r.client.Patch(context.Background(), p, client.RawPatch("application/merge-patch+json", patch))
	})
	for {
		now := r.total()
		now.WatchBytes -= before.WatchBytes
		if now.WatchEvents -= before.WatchEvents; now.WatchEvents >= int64(2*parents) {
			return now
		}
	}
}
