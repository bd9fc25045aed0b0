package playground

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/history"
)

// reconciles are those of Parents that members have recorded, each member's in the order in which it began them.
type reconciles struct {
	when sharding.Resync
	all  []reconcile
	// origin is the wall clock's time at which the recorders' clock was zero, not earlier: what is read was written before.
	origin time.Time
	broken error // a record that cannot be read
}

type reconcile struct {
	member string
	key    string        // "namespace/name"
	at     time.Duration // by the recorders' clock
}

// take adds what a recorder has written; now is when it was read.
func (r *reconciles) take(line []byte, now time.Time) {
	var l struct {
		Record *history.Record `json:"record"`
	}
	if err := json.Unmarshal(line, &l); err != nil {
		r.broken = cmp.Or(r.broken, fmt.Errorf("record %q: %w", line, err))
		return
	}
	if l.Record == nil {
		return
	}
	if origin := now.Add(-l.Record.At); r.origin.IsZero() || origin.Before(r.origin) {
		r.origin = origin
	}
	if l.Record.Kind == history.Started {
		r.all = append(r.all, reconcile{l.Record.Member, l.Record.Object, l.Record.At})
	}
}

// byKey are the times of each key's reconciles, in order.
func (r *reconciles) byKey() map[string][]time.Time {
	found := map[string][]time.Time{}
	for _, x := range r.all {
		found[x.key] = append(found[x.key], r.origin.Add(x.at))
	}
	for _, times := range found {
		slices.SortFunc(times, time.Time.Compare)
	}
	return found
}

// due is when a key's slice of the period that begins at start is over.
func (r *reconciles) due(key string, start time.Time) time.Time {
	return time.Unix(0, 0).Add(time.Duration(r.when.SliceOf(key, start)+1) * r.when.Slice)
}

// nextPeriod is the first one that begins after t.
func (r *reconciles) nextPeriod(t time.Time) time.Time {
	return t.Truncate(0).Add(-time.Duration(t.UnixNano()) % r.when.Period).Add(r.when.Period)
}

// A round is what became of the keys in one period: a row for each slice.
type round struct {
	done, keys []int           // by slice: keys that were reconciled, and all
	late       []time.Duration // by slice: the latest, after the slice was over
	missing    int             // keys that were not
	repeated   []string        // keys that were twice
	disorder   string          // a key that came before one of an earlier slice; "" if none did
}

// round looks at the period that begins at start.
func (r *reconciles) round(keys []string, start time.Time) round {
	n := int(r.when.Period / r.when.Slice)
	found := round{done: make([]int, n), keys: make([]int, n), late: make([]time.Duration, n)}
	times := r.byKey()
	first := map[string]int{} // slices of keys that are done
	for _, key := range keys {
		due := r.due(key, start)
		slice := int(due.Sub(start)/r.when.Slice) - 1
		found.keys[slice]++
		next := r.due(key, start.Add(r.when.Period))
		count := 0
		for _, at := range times[key] {
			// One that is so late that it is due again is reconciled once for both.
			if inTime := at.Before(next); at.Before(due) || !inTime && (count > 0 || !at.Before(next.Add(r.when.Slice))) {
				continue
			}
			if count++; count == 1 {
				found.done[slice]++
				found.late[slice] = max(found.late[slice], at.Sub(due))
				first[key] = slice
			}
		}
		if count > 1 {
			found.repeated = append(found.repeated, fmt.Sprintf("%s %d times", key, count))
		}
		if count == 0 {
			found.missing++
		}
	}
	found.disorder = r.disorder(first, start)
	return found
}

// disorder names a key that a member began before one of an earlier slice.
func (r *reconciles) disorder(sliceOf map[string]int, start time.Time) string {
	type turn struct {
		key   string
		slice int
	}
	last := map[string]turn{} // by member
	for _, x := range r.all {
		slice, ok := sliceOf[x.key]
		if !ok || r.origin.Add(x.at).Before(r.due(x.key, start)) {
			continue
		}
		if before, ok := last[x.member]; ok && before.slice > slice {
			return fmt.Sprintf("%s, of slice %d, before %s, of slice %d", before.key, before.slice+1, x.key, slice+1)
		}
		last[x.member] = turn{x.key, slice}
		delete(sliceOf, x.key) // each counts once
	}
	return ""
}

// picture is a bar for each slice.
func (f round) picture() Picture {
	p := Picture{Passing: true}
	for i := range f.done {
		p.Whole = max(p.Whole, f.keys[i])
	}
	p.Whole = p.Whole * 3 / 2
	for i := range f.done {
		bar := Bar{Name: fmt.Sprintf("second %d", i+1), Value: f.done[i], Coming: f.keys[i] - f.done[i]}
		if f.done[i] == f.keys[i] {
			bar.Note = fmt.Sprintf("within %s", inSeconds(f.late[i]))
		}
		p.Bars = append(p.Bars, bar)
	}
	return p
}

// follow reads a record file as it grows, until ctx ends. What has been read is given away in lots.
func followLines(ctx context.Context, path string, give func(lines [][]byte)) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	var file *os.File
	defer func() {
		if file != nil {
			file.Close()
		}
	}()
	var rest []byte
	for {
		if file == nil {
			file, _ = os.Open(path) // it may not be there yet
		}
		if file != nil {
			more, err := io.ReadAll(file)
			if err != nil {
				return fmt.Errorf("reading a record: %w", err)
			}
			rest = append(rest, more...)
			if end := bytes.LastIndexByte(rest, '\n'); end >= 0 {
				give(bytes.Split(rest[:end], []byte("\n")))
				rest = bytes.Clone(rest[end+1:])
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}
