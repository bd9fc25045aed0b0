package bench

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/drover-sh/drover/sharding"
)

var handoffObjects = size("DROVER_BENCH_OBJECTS", 10_000)

// BenchmarkHandoff moves half of 10,000 objects, 5,000 Parents and their 5,000 Children, between two members, at V = 1,000,
// 10,000 and 100,000: a second member joins, and leaves again. There is a control plane for each V, and a round is a join and
// a leave at each, so that a drift of the machine's speed favours no V. Members and coordinators are processes. Reported are,
// by V:
//
//   - gap-p50-ms, gap-p99-ms, gap-max-ms, over all objects that moved: from when the old owner could be seen to be told to
//     stop until the new owner served the object's Virtual Node. In between nobody starts a reconcile of it, and the reads
//     that wait, wait within it;
//   - whole-ms: the median of whole reassignments, from when the membership could be seen to change, by the Lease of the
//     member that joined or by the wish of the one that leaves, until the last Virtual Node was served by its new owner;
//   - list-ms: the median of plain lists of the objects that moved, made after each;
//   - excess-ms: the median of whole - 1.5 list, which is to be 100 at most; the two were made one after the other.
//
// gap-ratio and whole-ratio compare V = 100,000 with V = 1,000, round by round.
func BenchmarkHandoff(b *testing.B) {
	rounds := size("DROVER_BENCH_ROUNDS", 6)
	var rigs []*shardedRig
	for _, v := range []int{1_000, 10_000, 100_000} {
		r := startSharded(b, rigOptions{virtualNodes: v})
		r.populate(handoffObjects/2, true)
		r.join(memberConfig{Name: "member-0", QPS: -1, Workers: 5})
		rigs = append(rigs, r)
	}
	for _, r := range rigs {
		r.quiet(1)
	}
	for b.Loop() {
		found := make([]handoffs, len(rigs))
		for round := range rounds {
			for i, r := range rigs {
				found[i].add(r.handoff(round))
			}
		}
		for i, r := range rigs {
			found[i].report(b, r.v)
		}
		first, last := &found[0], &found[len(found)-1]
		b.ReportMetric(median(ratios(last.p99s, first.p99s)), "gap-ratio")
		b.ReportMetric(median(ratios(last.wholes, first.wholes)), "whole-ratio")
	}
}

// handoffs are the measurements at one V.
type handoffs struct {
	gaps                        []float64 // of all objects, ms
	p99s, wholes, lists, excess []float64 // of each handoff, ms
}

func (h *handoffs) add(moves []handoff) {
	for _, m := range moves {
		h.gaps = append(h.gaps, m.gaps...)
		h.p99s = append(h.p99s, percentile(m.gaps, 99))
		h.wholes = append(h.wholes, m.whole)
		h.lists = append(h.lists, m.list)
		h.excess = append(h.excess, m.whole-1.5*m.list)
	}
}

func (h *handoffs) report(b *testing.B, v int) {
	b.Logf("V=%d: whole %.0f, list %.0f, gap p99 %.0f ms", v, h.wholes, h.lists, h.p99s)
	unit := func(name string) string { return fmt.Sprintf("%s-ms/V=%d", name, v) }
	b.ReportMetric(percentile(h.gaps, 50), unit("gap-p50"))
	b.ReportMetric(percentile(h.gaps, 99), unit("gap-p99"))
	b.ReportMetric(percentile(h.gaps, 100), unit("gap-max"))
	b.ReportMetric(median(slices.Clone(h.wholes)), unit("whole"))
	b.ReportMetric(median(slices.Clone(h.lists)), unit("list"))
	b.ReportMetric(median(slices.Clone(h.excess)), unit("excess"))
}

// A handoff is what one change of the members took, in ms.
type handoff struct {
	gaps        []float64 // by object
	whole, list float64
}

// handoff lets a second member join and leave.
func (r *shardedRig) handoff(round int) []handoff {
	r.b.Helper()
	name := fmt.Sprintf("member-%d", round+1)
	var moves []handoff
	r.forget()
	m := r.join(memberConfig{Name: name, QPS: -1, Workers: 5})
	r.quiet(2)
	moves = append(moves, r.measure(name, r.leases[name]))
	r.forget()
	go m.process.Stop(30 * time.Second)
	r.quiet(1)
	moves = append(moves, r.measure(name, r.leaving[name]))
	<-m.process.Done()
	return moves
}

// forget begins a measurement.
func (r *shardedRig) forget() {
	r.note(func() { r.draining, r.settled = nil, nil; clear(r.leaving) })
}

func (r *shardedRig) measure(name string, began time.Duration) handoff {
	r.b.Helper()
	r.until("everything that moved is served", func() bool {
		for _, d := range r.draining {
			served := make([]seen, 0, len(r.settled))
			for _, s := range r.settled {
				if s.at >= d.at {
					served = append(served, s)
				}
			}
			if !d.vns.Minus(all(served)).Empty() {
				return false
			}
		}
		return true
	})
	var h handoff
	r.mu.Lock()
	moved := all(r.draining)
	stopped, served := make(map[sharding.VirtualNode]time.Duration), make(map[sharding.VirtualNode]time.Duration)
	for _, d := range r.draining {
		for vn := range d.vns.All() {
			stopped[vn] = d.at
		}
	}
	end := began
	for _, s := range r.settled {
		for vn := range s.vns.Intersect(moved).All() {
			served[vn] = s.at
			end = max(end, s.at)
		}
	}
	for vn, at := range stopped {
		for range r.objects[vn] {
			h.gaps = append(h.gaps, ms(served[vn]-at))
		}
	}
	r.mu.Unlock()
	if began == 0 || len(h.gaps) == 0 {
		r.b.Fatalf("%s moved %d objects, and its change was seen at %s", name, len(h.gaps), began)
	}
	h.whole = ms(end - began)
	h.list = ms(r.plainList(moved))
	return h
}

func all(list []seen) sharding.Set {
	var set sharding.Set
	for _, s := range list {
		set = set.Union(s.vns)
	}
	return set
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// percentile returns the smallest value that p percent do not exceed.
func percentile(values []float64, p int) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[max(0, (len(sorted)*p+99)/100-1)]
}

// ratios divides neighbours.
func ratios(a, b []float64) []float64 {
	list := make([]float64, len(a))
	for i := range a {
		list[i] = a[i] / b[i]
	}
	return list
}
