package sharded

import (
	"fmt"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/controller/priorityqueue"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/drover-sh/drover/sharding"
)

// counted is a queue that counts what is added, and at which priority.
type counted struct {
	priorityqueue.PriorityQueue[reconcile.Request]
	added    map[string]int
	priority map[int]int
}

func (q *counted) AddWithOpts(o priorityqueue.AddOpts, items ...reconcile.Request) {
	for _, i := range items {
		q.added[i.String()]++
		q.priority[*o.Priority]++
	}
}

func TestEveryServedObjectIsResyncedOncePerPeriod(t *testing.T) {
	r := newRig(t, testV, 1)
	defer r.m.stop()
	fill(r, 60)
	r.grant(sharding.Span(0, 6), nil)
	r.settled()
	q := &counted{added: make(map[string]int), priority: make(map[int]int)}
	rs := &resyncs{member: r.m, when: Resync{Period: time.Hour, Tick: time.Minute}}
	if err := rs.add(r.m.kinds[parents], q); err != nil {
		t.Fatal(err)
	}
	start := time.Date(2026, 1, 1, 5, 0, 0, 0, time.UTC)
	rs.tick(start)
	for i := 1; i <= 60; i++ {
		if i%7 == 3 {
			continue // missed: the next one makes up for it
		}
		rs.tick(start.Add(time.Duration(i)*time.Minute + time.Duration(i%5)*time.Second))
	}
	for name, n := range q.added {
		if n != 1 {
			t.Errorf("%s was enqueued %d times, want once", name, n)
		}
	}
	if want := len(r.script.content(parents, r.slice.Owned)); len(q.added) != want {
		t.Errorf("%d objects enqueued, want the %d that are served", len(q.added), want)
	}
	if q.priority[handler.LowPriority] != len(q.added) {
		t.Errorf("priorities %v, want low for all", q.priority)
	}
}

func TestResyncDefaults(t *testing.T) {
	for _, tc := range []struct{ given, want Resync }{
		{Resync{}, Resync{10 * time.Hour, time.Minute, time.Minute}},
		{Resync{Period: -1}, Resync{-1, time.Minute, time.Minute}},
		{Resync{Period: time.Hour, Tick: time.Second}, Resync{time.Hour, time.Second, time.Minute}},
		{Resync{Period: 8 * time.Second, Slice: 2 * time.Second}, Resync{8 * time.Second, 2 * time.Second, 2 * time.Second}},
		{Resync{Period: time.Hour, Slice: 5 * time.Minute}, Resync{time.Hour, time.Minute, 5 * time.Minute}},
	} {
		t.Run(fmt.Sprint(tc.given), func(t *testing.T) {
			if got := tc.given.withDefaults(); got != tc.want || got.validate("f") != nil {
				t.Errorf("%v, %v, want %v", got, got.validate("f"), tc.want)
			}
		})
	}
}
