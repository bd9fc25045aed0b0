package history

import (
	"bytes"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/drover-sh/drover/sharding"
)

const (
	parents  = sharding.Resource("parents")
	children = sharding.Resource("children")
)

func compareNumbers(a, b sharding.Version) (int, error) {
	x, err := strconv.Atoi(string(a))
	if err != nil {
		return 0, err
	}
	y, err := strconv.Atoi(string(b))
	return x - y, err
}

var options = Options{Compare: compareNumbers, Roots: []sharding.Resource{parents}, Bound: 10 * time.Second}

// The builders below write records of one Virtual Node, 1, and one parent, p, with its child.
func grant(s string) Record { return Record{Kind: Granted, Session: s, VNs: sharding.SetOf(1)} }
func settled(s string) Record {
	return Record{Kind: Settled, Session: s, VNs: sharding.SetOf(1)}
}
func release(s string) Record { return Record{Kind: Released, Session: s, VNs: sharding.SetOf(1)} }
func end(s string) Record     { return Record{Kind: SessionEnded, Session: s} }
func start(s string) Record {
	return Record{Kind: Started, Session: s, VN: 1, Resource: parents, Object: "p"}
}
func finish(s string) Record {
	return Record{Kind: Finished, Session: s, VN: 1, Resource: parents, Object: "p"}
}
func read(s string, res sharding.Resource, v sharding.Version) Record {
	return Record{Kind: Read, Session: s, VN: 1, Resource: res, Object: "p", Root: "p", Version: v}
}
func user(v sharding.Version) Record {
	return Record{Kind: Wrote, Actor: User, VN: 1, Resource: parents, Object: "p", Version: v, Digest: string(v)}
}
func write(s string, v sharding.Version) Record {
	return Record{Kind: Wrote, Actor: Reconciler, Session: s, VN: 1, Resource: children, Object: "p", Version: v,
		Digest: string(v)}
}
func list(s string) Record {
	return Record{Kind: Listed, Session: s, Resource: parents, VNs: sharding.SetOf(1)}
}
func filled(s string) Record {
	return Record{Kind: Filled, Session: s, Resource: parents, VNs: sharding.SetOf(1)}
}
func lost(s string) Record {
	return Record{Kind: Lost, Session: s, Resource: parents, VNs: sharding.SetOf(1)}
}
func told(s string, v sharding.Version) Record {
	return Record{Kind: Delivered, Session: s, Resource: parents, Object: "p", VN: 1, Version: v}
}
func snapshot(s string, objects ...string) Record {
	return Record{Kind: Snapshot, Session: s, Resource: parents, Objects: objects}
}

func with(r Record, change func(*Record)) Record {
	change(&r)
	return r
}

func server(r Record) Record  { r.FromServer = true; return r }
func deleted(r Record) Record { r.Deleted = true; return r }

func TestCheck(t *testing.T) {
	for _, tc := range []struct {
		name    string
		records []Record
		want    []Invariant
	}{
		{"one owner after the other", []Record{
			user("1"), grant("a"), start("a"), write("a", "1"), finish("a"), release("a"), grant("b"), start("b"), finish("b"),
		}, nil},
		{"reconciles overlap", []Record{user("1"), grant("a"), start("a"), release("a"), grant("b"), start("b")},
			[]Invariant{I1, I1}},
		{"a session that ended takes its reconciles with it", []Record{
			user("1"), grant("a"), start("a"), end("a"), grant("b"), start("b"), finish("a"), finish("b"),
		}, nil},
		{"and starts no more", []Record{user("1"), grant("a"), end("a"), start("a")}, []Invariant{I1}},
		{"a Virtual Node is given twice", []Record{grant("a"), grant("b")}, []Invariant{I1}},
		{"what an ended session is given nobody has", []Record{grant("a"), end("b"), grant("b")}, nil},
		{"a write lands from one that is not the owner", []Record{user("1"), grant("b"), write("a", "1")}, []Invariant{I1}},
		{"a write lands late", []Record{user("1"), grant("a"), end("a"), write("a", "1")}, []Invariant{I1}},
		{"nobody owns what is reconciled", []Record{user("1"), start("a")}, []Invariant{I1}},

		{"a read is older than the previous owner's write", []Record{
			user("1"), grant("a"), write("a", "1"), write("a", "2"), release("a"), grant("b"), start("b"), read("b",
				children, "1"),
		}, []Invariant{I2}},
		{"a read is older than the reader's own write: any cache lags", []Record{
			user("1"), grant("a"), write("a", "1"), write("a", "2"), start("a"), read("a", children, "1"),
		}, nil},
		{"a read does not find what the previous owner created", []Record{
			user("1"), grant("a"), write("a", "1"), release("a"), grant("b"), start("b"), read("b", children, ""),
		}, []Invariant{I2, I3}},
		{"a read finds what the previous owner deleted", []Record{
			user("1"), grant("a"), write("a", "1"), deleted(write("a", "2")), release("a"), grant("b"), start("b"), read("b",
				children, "1"),
		}, []Invariant{I2}},

		{"an object that is there is not found in a cache", []Record{user("1"), grant("a"), start("a"), read("a", parents,
			"")},
			[]Invariant{I3}},
		{"nor by the server", []Record{user("1"), grant("a"), start("a"), server(read("a", parents, ""))}, []Invariant{I3}},
		{"nor in the cache of one that does not own it", []Record{user("1"), grant("a"), read("b", parents, "")},
			[]Invariant{I3}},
		{"an object that is newer than the cache's list may come later", []Record{
			list("a"), user("1"), filled("a"), grant("a"), start("a"), read("a", parents, ""),
		}, nil},
		{"one that is older may not", []Record{
			user("1"), list("a"), filled("a"), grant("a"), start("a"), read("a", parents, ""),
		}, []Invariant{I3}},
		{"what was deleted is rightly not found", []Record{
			user("1"), grant("a"), deleted(user("2")), start("a"), read("a", parents, ""),
		}, nil},

		{"machinery writes an object", []Record{with(user("1"), func(r *Record) { r.Actor = Machinery })}, []Invariant{I5}},
		{"a label is rewritten", []Record{user("1"), with(user("2"), func(r *Record) { r.VN = 2 })}, []Invariant{I5}},
		{"a reconcile writes what is there already", []Record{
			user("1"), grant("a"), write("a", "1"), with(write("a", "2"), func(r *Record) { r.Digest = "1" }),
		}, []Invariant{I5}},

		{"what is kept is listed again", []Record{list("a"), grant("a"), settled("a"), list("a")}, []Invariant{I6}},
		{"after 410 Gone it has to be", []Record{list("a"), grant("a"), settled("a"), lost("a"), list("a")}, nil},
		{"but once", []Record{list("a"), grant("a"), settled("a"), lost("a"), list("a"), list("a")}, []Invariant{I6}},
		{"what is granted may be listed", []Record{
			list("a"), grant("a"), settled("a"), release("a"), grant("a"), list("a"),
		}, nil},
		{"an event is delivered twice", []Record{told("a", "1"), told("a", "1")}, []Invariant{I6}},
		{"after a list it may be", []Record{told("a", "1"), list("a"), told("a", "1")}, nil},

		{"a cache holds what its member owns", []Record{user("1"), grant("a"), snapshot("a", "p@1")}, nil},
		{"a cache holds an old version", []Record{user("1"), user("2"), grant("a"), snapshot("a", "p@1")}, []Invariant{I7,
			I7}},
		{"a cache lacks an object", []Record{user("1"), grant("a"), snapshot("a")}, []Invariant{I7}},
		{"a cache holds what another owns", []Record{user("1"), grant("a"), snapshot("b", "p@1")}, []Invariant{I7}},
		{"an unknown record is not passed over", []Record{{Kind: "Grated"}}, []Invariant{""}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for i := range tc.records {
				tc.records[i].At = time.Duration(i) * time.Millisecond
			}
			var got []Invariant
			found := Check(tc.records, options)
			for _, v := range found {
				got = append(got, v.Invariant)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("%s\n%v", diff, found)
			}
		})
	}
}

// I4 counts from when an object needs a reconcile, or from the last change of the members.
func TestEveryObjectIsReconciledWithinTheBound(t *testing.T) {
	at := func(seconds int, r Record) Record { r.At = time.Duration(seconds) * time.Second; return r }
	change := Record{Kind: Changed, What: "join"}
	for _, tc := range []struct {
		name    string
		records []Record
		want    int
	}{
		{"in time", []Record{at(0, grant("a")), at(1, user("1")), at(11, start("a"))}, 0},
		{"too late", []Record{at(0, grant("a")), at(1, user("1")), at(12, start("a"))}, 1},
		{"never", []Record{at(0, grant("a")), at(1, user("1")), at(12, settled("a"))}, 1},
		{"the history ends before it is due", []Record{at(0, grant("a")), at(1, user("1")), at(10, settled("a"))}, 0},
		{"a change gives more time", []Record{at(0, grant("a")), at(1, user("1")), at(5, change), at(14, start("a"))}, 0},
		{"but not to what is late already", []Record{at(0, grant("a")), at(1, user("1")), at(12, change), at(14,
			start("a"))}, 1},
		{"what moves is reconciled by its new owner", []Record{
			at(0, grant("a")), at(1, user("1")), at(2, start("a")), at(3, finish("a")), at(4, release("a")), at(4, grant("b")),
			at(20, settled("b")),
		}, 1},
		{"what was deleted needs nothing", []Record{at(0, grant("a")), at(1, user("1")), at(2, deleted(user("2"))), at(20,
			settled("a"))}, 0},
	} {
		found := Check(tc.records, options)
		if len(found) != tc.want || (tc.want > 0 && found[0].Invariant != I4) {
			t.Errorf("%s: %v, want %d violations of I4", tc.name, found, tc.want)
		}
	}
}

func TestHistoriesSurviveAFile(t *testing.T) {
	want := []Record{
		user("1"), grant("a"), server(read("a", parents, "1")), deleted(write("a", "2")), snapshot("a", "p@1"),
		{At: time.Second, Kind: Changed, Member: "m", What: "crash"},
	}
	var b bytes.Buffer
	if err := Write(&b, want); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(b.String(), "\n"); n != len(want) {
		t.Errorf("%d lines for %d records", n, len(want))
	}
	got, err := Load(&b)
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("%v %s", err, diff)
	}
	for _, bad := range []string{`{"at":1,"kind":"Granted","vns":"3-1"}`, `{"kind":"Granted","vn_s":"1"}`, `{`} {
		if _, err := Load(strings.NewReader(`{"at":1,"kind":"Changed"}` + "\n" + bad)); err == nil ||
			!strings.Contains(err.Error(), "record 2") {
			t.Errorf("Load of %s: %v, want an error that names record 2", bad, err)
		}
	}
}
