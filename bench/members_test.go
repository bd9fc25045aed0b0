package bench

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	v1alpha1 "github.com/drover-sh/drover/examples/parentchild/api/v1alpha1"
)

// The budget of each member is small enough that nine of them, the API server and the webhook leave a machine of two cores
// idle for a good part of the time: the budget is what limits them, as it is in a cluster.
var memberBudget = size("DROVER_BENCH_BUDGET", 10)

// BenchmarkMembers lets one member and nine make Children for more Parents than they can serve, each with a budget of 10
// requests per second. A Child takes two: a look at the API server if it is there, and its creation. The turns are one, nine,
// nine, one, so that a steady drift favours neither. Webhook, coordinator and members are the real ones, and processes.
// Reported are:
//
//   - children/s-1, children/s-9: Children made per second by all members together;
//   - speedup: the one by the other;
//   - peak/mean: of the Virtual Nodes that the nine own;
//   - busy-%: how much of the machine's processors was in use while there were nine. Near 100 it says that the machine was
//     measured and not the members.
func BenchmarkMembers(b *testing.B) {
	const virtualNodes = 1000
	window := time.Duration(size("DROVER_BENCH_SECONDS", 15)) * time.Second
	turns := []int{1, 9, 9, 1}
	r := startSharded(b, rigOptions{virtualNodes: virtualNodes, webhook: true})
	r.gate(false)
	total := 0
	for _, n := range turns {
		total += n
	}
	r.populate(total*memberBudget*int(window/time.Second+6)/2+100, false)
	for b.Loop() {
		var one, nine, busy []float64
		peak := 0
		for turn, n := range turns {
			for i := range n {
				r.join(memberConfig{Name: fmt.Sprintf("member-%d-%d", turn, i), QPS: float32(memberBudget), Workers: 5})
			}
			r.quiet(n)
			made, inUse := r.work(window)
			if n == 1 {
				one = append(one, made)
			} else {
				nine, busy = append(nine, made), append(busy, inUse)
				for _, s := range r.slices {
					peak = max(peak, s.Owned.Len())
				}
			}
			r.dismiss()
		}
		b.Logf("one member: %.1f a second, nine: %.1f", one, nine)
		b.ReportMetric(median(one), "children/s-1")
		b.ReportMetric(median(nine), "children/s-9")
		b.ReportMetric(median(nine)/median(one), "speedup")
		b.ReportMetric(float64(peak)*9/virtualNodes, "peak/mean")
		b.ReportMetric(median(busy), "busy-%")
	}
}

// work opens the gate and returns how many Children are made per second, and how much of the machine is in use, in percent.
func (r *shardedRig) work(window time.Duration) (made, busy float64) {
	r.b.Helper()
	r.gate(true)
	defer r.gate(false)
	pause(3 * time.Second) // until what each member may send at once has been sent
	before, start := r.count(), time.Now()
	idle, all := processorTime(r.b)
	pause(window)
	after, took := r.count(), time.Since(start)
	idleThen, allThen := processorTime(r.b)
	if after+memberBudget >= r.parents {
		r.b.Fatalf("%d of %d Parents have their Child: members were not busy all the time", after, r.parents)
	}
	return float64(after-before) / took.Seconds(), 100 * (1 - (idleThen-idle)/(allThen-all))
}

// pause lets time pass that is measured, or that a measurement has to keep clear of.
func pause(d time.Duration) { <-time.After(d) }

// count returns how many Children there are.
func (r *shardedRig) count() int {
	r.b.Helper()
	var list v1alpha1.ChildList
	if err := r.client.List(r.b.Context(), &list); err != nil {
		r.b.Fatal(err)
	}
	return len(list.Items)
}

// dismiss ends all members without leave, and takes what they had from them: nobody is left to take over.
func (r *shardedRig) dismiss() {
	r.b.Helper()
	for _, m := range r.members {
		go m.process.Stop(30 * time.Second)
	}
	for _, m := range r.members {
		<-m.process.Done()
	}
	r.note(func() { clear(r.members) })
}

// processorTime returns for how long the machine's processors have been idle, and the time of all of them together.
func processorTime(b *testing.B) (idle, all float64) {
	b.Helper()
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		b.Fatal(err)
	}
	line, _, _ := strings.Cut(string(text), "\n")
	for i, field := range strings.Fields(line)[1:9] {
		n, err := strconv.ParseFloat(field, 64)
		if err != nil {
			b.Fatal(err)
		}
		all += n
		if i == 3 || i == 4 { // idle, and waiting for a disk
			idle += n
		}
	}
	return idle, all
}
