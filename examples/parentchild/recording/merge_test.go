package recording_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/drover-sh/drover/examples/parentchild/recording"
	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/history"
)

const ms = time.Millisecond

func sent(id uint64, at time.Duration, verb, session string) recording.Line {
	actor := history.Reconciler
	if session == "" {
		actor = history.User
	}
	return recording.Line{Sent: &recording.Request{
		ID: id, At: at, Actor: actor, Session: session, Verb: verb, Resource: "parents", Object: "ns/p",
	}}
}

func answered(id uint64, at time.Duration, code int, version sharding.Version) recording.Line {
	return recording.Line{Answered: &recording.Answer{ID: id, At: at, Code: code, Version: version}}
}

func did(at time.Duration, kind history.Kind) recording.Line {
	return recording.Line{Record: &history.Record{At: at, Kind: kind, Session: "a"}}
}

func landing(revision int64, seen time.Duration, change func(*recording.Landing)) recording.Landing {
	l := recording.Landing{
		Revision: revision, Seen: seen, Name: "ns/p", Resource: "parents",
		Object: &recording.Object{VN: 1, Labelled: true, Digest: "d"},
	}
	if change != nil {
		change(&l)
	}
	return l
}

func created(l *recording.Landing)    { l.Created = true }
func deleted(l *recording.Landing)    { l.Deleted = true }
func unlabelled(l *recording.Landing) { l.Created, l.Object.Labelled = true, false }

func slice(session string, owned sharding.Set, draining ...sharding.Order) func(*recording.Landing) {
	return func(l *recording.Landing) {
		l.Object, l.Name, l.Resource = nil, "ns/g.a", "virtualnodeslices"
		l.Slice = &sharding.Slice{Member: "a", Session: session, Owned: owned, Draining: draining}
	}
}

func holder(session string) func(*recording.Landing) {
	return func(l *recording.Landing) {
		l.Object, l.Name, l.Resource = nil, "ns/g.a", "leases"
		l.Lease = &recording.Lease{Holder: session}
	}
}

// Each case is told by what matters of its records: when, what, whose.
func TestMerge(t *testing.T) {
	for _, tc := range []struct {
		name     string
		files    [][]recording.Line
		landings []recording.Landing
		want     []string
	}{
		{
			"a write stands at when it was sent, between what came before and after it in its process",
			[][]recording.Line{{
				did(1*ms, history.Started), sent(1, 2*ms, "POST", "a"), answered(1, 5*ms, 201, "7"), did(6*ms, history.Finished),
			}},
			[]recording.Landing{landing(7, 9*ms, created)},
			[]string{"1ms Started a", "2ms Wrote a Reconciler 7", "6ms Finished a"},
		},
		{
			"a request that changed nothing is not the one that landed, though its answer is the same",
			[][]recording.Line{
				{sent(1, 2*ms, "PATCH", "a"), answered(1, 3*ms, 200, "7"), sent(2, 8*ms, "PATCH", "a"), answered(2, 9*ms, 200, "7")},
				{sent(1, 6*ms, "PATCH", ""), answered(1, 7*ms, 200, "7"), did(5*ms, history.Started)},
			},
			[]recording.Landing{landing(7, 9*ms, nil)},
			[]string{"2ms Wrote a Reconciler 7", "5ms Started a"},
		},
		{
			"a landing is not earlier than one of a lower revision",
			[][]recording.Line{{
				sent(1, 2*ms, "PUT", "a"), sent(2, 1*ms, "PUT", "b"), answered(2, 5*ms, 200, "8"), answered(1, 5*ms, 200, "7"),
			}},
			[]recording.Landing{landing(8, 9*ms, nil), landing(7, 9*ms, nil)},
			[]string{"2ms Wrote a Reconciler 7", "2ms Wrote b Reconciler 8"},
		},
		{
			"a write whose answer was lost is found by its object",
			[][]recording.Line{{sent(1, 1*ms, "POST", "a")}},
			[]recording.Landing{landing(7, 9*ms, created)},
			[]string{"1ms Wrote a Reconciler 7"},
		},
		{
			"one that was sent after the landing was seen is not it",
			[][]recording.Line{{sent(1, 10*ms, "PUT", "a")}},
			[]recording.Landing{landing(7, 9*ms, nil)},
			[]string{"0s Wrote  Machinery 7"},
		},
		{
			"also if its answer is the same, because it changed nothing of what the backfill had written",
			[][]recording.Line{{did(8*ms, history.Started), sent(1, 10*ms, "PATCH", ""), answered(1, 11*ms, 200, "8")}},
			[]recording.Landing{landing(7, 5*ms, unlabelled), landing(8, 6*ms, nil)},
			[]string{"0s Wrote  User 8", "8ms Started a"},
		},
		{
			"nor is one that was refused",
			[][]recording.Line{{sent(1, 1*ms, "PUT", "a"), answered(1, 2*ms, 409, "")}},
			[]recording.Landing{landing(7, 9*ms, nil)},
			[]string{"0s Wrote  Machinery 7"},
		},
		{
			"a deletion has no version in its answer",
			[][]recording.Line{{sent(1, 1*ms, "DELETE", ""), answered(1, 2*ms, 200, "6")}},
			[]recording.Landing{landing(7, 9*ms, deleted)},
			[]string{"1ms Wrote  User 7 deleted"},
		},
		{
			"machinery creates nothing",
			nil,
			[]recording.Landing{landing(7, 9*ms, created)},
			[]string{"0s Wrote  User 7"},
		},
		{
			"the garbage collector is nobody's machinery",
			nil,
			[]recording.Landing{landing(7, 9*ms, deleted)},
			[]string{"0s Wrote  User 7 deleted"},
		},
		{
			"an object that comes without its label is there when it has it",
			[][]recording.Line{{sent(1, 1*ms, "POST", ""), answered(1, 2*ms, 201, "7")}},
			[]recording.Landing{landing(7, 9*ms, unlabelled), landing(8, 9*ms, nil)},
			[]string{"1ms Wrote  User 8"},
		},
		{
			"but a member's write counts at once",
			[][]recording.Line{{sent(1, 1*ms, "POST", "a"), answered(1, 2*ms, 201, "7")}},
			[]recording.Landing{landing(7, 9*ms, unlabelled), landing(8, 9*ms, nil)},
			[]string{"1ms Wrote a Reconciler 7", "1ms Wrote  User 8"},
		},
		{
			"and so does the end of what it has written, with a label or without",
			[][]recording.Line{{sent(1, 1*ms, "POST", "a"), answered(1, 2*ms, 201, "7")}},
			[]recording.Landing{
				landing(7, 9*ms, unlabelled),
				landing(8, 9*ms, func(l *recording.Landing) { l.Deleted, l.Object.Labelled = true, false }),
			},
			[]string{"1ms Wrote a Reconciler 7", "1ms Wrote  User 8 deleted"},
		},
		{
			"what comes and goes without a label nobody has seen",
			nil,
			[]recording.Landing{
				landing(7, 9*ms, unlabelled),
				landing(8, 9*ms, func(l *recording.Landing) { l.Deleted, l.Object.Labelled = true, false }),
			},
			nil,
		},
		{
			"a second write of machinery is one too many",
			nil,
			[]recording.Landing{landing(7, 9*ms, unlabelled), landing(8, 9*ms, nil), landing(9, 9*ms, nil)},
			[]string{"0s Wrote  User 8", "0s Wrote  Machinery 9"},
		},
		{
			"slices grant and take away; what drains is held until it is released",
			nil,
			[]recording.Landing{
				landing(1, 0, slice("a", sharding.SetOf(1, 2))),
				landing(2, 0, slice("a", sharding.SetOf(1), sharding.Order{Epoch: 2, VNs: sharding.SetOf(2)})),
				landing(3, 0, slice("a", sharding.SetOf(1))),
				landing(4, 0, slice("b", sharding.SetOf(1, 3))),
				landing(5, 0, func(l *recording.Landing) { slice("b", sharding.SetOf(1, 3))(l); l.Deleted = true }),
			},
			[]string{
				"0s Granted a 1-2", "0s Released a 2", "0s Released a 1", "0s Granted b 1,3", "0s Released b 1,3",
			},
		},
		{
			"a lease that passes to another, or to nobody, ends a session",
			nil,
			[]recording.Landing{
				landing(1, 0, holder("a")), landing(2, 0, holder("a")), landing(3, 0, holder("")), landing(4, 0, holder("b")),
				landing(5, 0, func(l *recording.Landing) { holder("b")(l); l.Deleted = true }),
			},
			[]string{"0s SessionEnded a", "0s SessionEnded b"},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var got []string
			for _, r := range recording.Merge(tc.files, tc.landings) {
				line := r.At.String() + " " + string(r.Kind) + " " + r.Session
				for _, more := range []string{string(r.Actor), string(r.Version), r.VNs.String()} {
					if more != "" {
						line += " " + more
					}
				}
				if r.Deleted {
					line += " deleted"
				}
				got = append(got, line)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}
