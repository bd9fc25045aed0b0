package vnaffinity

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/drover-sh/drover/sharding"
)

func slicesOf(epoch sharding.Epoch, owned map[string]string) map[string]sharding.Slice {
	out := make(map[string]sharding.Slice)
	for member, set := range owned {
		vns, err := sharding.ParseSet(set)
		if err != nil {
			panic(err)
		}
		out[member] = sharding.Slice{Member: member, Session: member + "-1", Epoch: epoch, Owned: vns}
	}
	return out
}

func TestAPodWaitsWhereItHasMovedOnTo(t *testing.T) {
	r := newRoster(10, slicesOf(4, map[string]string{"a": "0-2", "b": "3-5,8", "c": "6", "gone": ""}))
	for _, test := range []struct {
		name string
		home sharding.VirtualNode
		hop  *hop
		want string
	}{
		{"at home", 4, nil, "b"},
		{"moved on", 4, &hop{To: "c", Epoch: 4}, "c"},
		{"moved on before the last change", 4, &hop{To: "c", Epoch: 2}, "c"},
		{"its replica has gone", 4, &hop{To: "gone", Epoch: 4}, "b"},
		{"its replica was never there", 0, &hop{To: "x"}, "a"},
		{"its Virtual Node is on its way", 7, nil, ""},
		{"a Virtual Node beyond V", 99, nil, ""},
	} {
		if got := r.holder(test.home, test.hop); got != test.want {
			t.Errorf("%s: at %q, want %q", test.name, got, test.want)
		}
	}
}

func TestWhereARefusedPodGoes(t *testing.T) {
	r := newRoster(9, slicesOf(4, map[string]string{"a": "0-2", "b": "3-5", "c": "6-8"}))
	for _, test := range []struct {
		name           string
		self           string
		hop            *hop
		again          bool
		fits, preempts []string
		want           verdict
	}{
		{name: "to the next on the ring", self: "b", fits: []string{"a", "c"},
			want: verdict{next: &hop{To: "c", Refused: []string{"b"}, Epoch: 4}}},
		{name: "past one on whose nodes it does not fit", self: "b", fits: []string{"a"},
			want: verdict{next: &hop{To: "a", Refused: []string{"b"}, Epoch: 4}}},
		{name: "not back to one that has refused", self: "c", hop: &hop{To: "c", Refused: []string{"b"}, Epoch: 4}, fits: []string{"a", "b"},
			want: verdict{next: &hop{To: "a", Refused: []string{"b", "c"}, Epoch: 4}}},
		{name: "all have refused", self: "a", hop: &hop{To: "a", Refused: []string{"b", "c"}, Epoch: 4}, want: verdict{last: true}},
		{name: "room came up where it was refused", self: "a", hop: &hop{To: "a", Refused: []string{"b", "c"}, Epoch: 4},
			fits: []string{"c"}, preempts: []string{"b"},
			want: verdict{later: &hop{To: "c", Refused: []string{"a"}, Again: 1, Epoch: 4}, after: 200 * time.Millisecond}},
		{name: "and again", self: "c", hop: &hop{To: "c", Refused: []string{"a", "b"}, Again: 3, Epoch: 4}, fits: []string{"a", "b"},
			want: verdict{later: &hop{To: "a", Refused: []string{"c"}, Again: 4, Epoch: 4}, after: 1600 * time.Millisecond}},
		{name: "a round that began again goes on", self: "c", hop: &hop{To: "c", Refused: []string{"a"}, Again: 3, Epoch: 4},
			fits: []string{"a", "b"}, want: verdict{next: &hop{To: "b", Refused: []string{"a", "c"}, Again: 3, Epoch: 4}}},
		{name: "who says no so often means it: it preempts", self: "a", hop: &hop{To: "a", Refused: []string{"c"}, Again: 5, Epoch: 4},
			fits: []string{"c"}, preempts: []string{"b"},
			want: verdict{last: true, later: &hop{To: "b", Refused: []string{"a"}, Preempting: true, Again: 5, Epoch: 4}, after: time.Second}},
		{name: "and is tried again, rarely", self: "b", hop: &hop{To: "b", Refused: []string{"a"}, Preempting: true, Again: 5, Epoch: 4},
			fits: []string{"c"},
			want: verdict{last: true, later: &hop{To: "c", Refused: []string{"b"}, Again: 6, Epoch: 4}, after: 6400 * time.Millisecond}},
		{name: "ever more rarely", self: "b", hop: &hop{To: "b", Refused: []string{"a", "c"}, Again: 5000, Epoch: 4}, fits: []string{"c"},
			want: verdict{last: true, later: &hop{To: "c", Refused: []string{"b"}, Again: 5001, Epoch: 4}, after: 5 * time.Minute}},
		{name: "it fits nowhere", self: "a", want: verdict{last: true}},
		{name: "who has pods to preempt comes after preemption here", self: "a", preempts: []string{"b", "c"},
			want: verdict{last: true, later: &hop{To: "b", Refused: []string{"a"}, Preempting: true, Epoch: 4}, after: time.Second}},
		{name: "the second round goes on", self: "b", hop: &hop{To: "b", Refused: []string{"a"}, Preempting: true, Epoch: 4},
			preempts: []string{"a", "c"},
			want:     verdict{last: true, later: &hop{To: "c", Refused: []string{"a", "b"}, Preempting: true, Epoch: 4}, after: time.Second}},
		{name: "the second round ends", self: "c", hop: &hop{To: "c", Refused: []string{"a", "b"}, Preempting: true, Epoch: 4},
			preempts: []string{"a", "b"}, want: verdict{last: true}},
		{name: "a change of the group begins anew", self: "c", hop: &hop{To: "c", Refused: []string{"a", "b"}, Epoch: 3}, fits: []string{"a"},
			want: verdict{next: &hop{To: "a", Refused: []string{"c"}, Epoch: 4}}},
		{name: "a change of the cluster begins anew", self: "c", hop: &hop{To: "c", Refused: []string{"a", "b"}, Epoch: 4}, again: true,
			fits: []string{"a"}, want: verdict{next: &hop{To: "a", Refused: []string{"c"}, Epoch: 4}}},
	} {
		in := func(list []string) func(string) bool {
			return func(m string) bool { return slices.Contains(list, m) }
		}
		got := decide(refusal{self: test.self, roster: r, hop: test.hop, again: test.again, fits: in(test.fits), couldPreempt: in(test.preempts)})
		if show(got) != show(test.want) {
			t.Errorf("%s:\n got %s\nwant %s", test.name, show(got), show(test.want))
		}
	}
}

func show(v verdict) string {
	if v.later == nil {
		v.after = 0
	}
	return fmt.Sprintf("next %v, last %v, after %s %v", v.next, v.last, v.after, v.later)
}

// However wrong replicas are about each other's nodes, a pod is refused by each at most once in each of the two rounds, and
// when it has been refused by all often enough, somebody asks for capacity.
func TestRoundsEnd(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r, n := drawRoster(t)
		guess := func(string) bool { return rapid.Bool().Draw(t, "guess") }
		at, h, lasts, hops := "m0", (*hop)(nil), 0, 0
		for {
			v := decide(refusal{self: at, roster: r, hop: h, fits: guess, couldPreempt: guess})
			next := v.next
			if v.asks() {
				lasts++
			}
			if next == nil {
				next = v.later
			}
			if next == nil || next.Again > surelyRefused {
				break
			}
			if next.To == at {
				t.Fatalf("%s hands it to itself", at)
			}
			if hops++; h != nil && h.Again < next.Again {
				hops = 0
			}
			if hops > 2*n {
				t.Fatalf("%d replicas, and still on its way after %d hops", n, hops)
			}
			at, h = next.To, next
		}
		if lasts == 0 {
			t.Fatal("nobody asks for capacity")
		}
	})
}

func drawRoster(t *rapid.T) (*roster, int) {
	owned := make(map[string]string)
	n := rapid.IntRange(1, 6).Draw(t, "members")
	for i := range n {
		owned[fmt.Sprintf("m%d", i)] = fmt.Sprint(i)
	}
	return newRoster(n, slicesOf(1, owned)), n
}

// Whenever room comes up, and whatever replicas guessed before, the pod comes to where the room is. Nobody tells it, except
// the replica where it rests.
func TestRoomThatComesUpIsFound(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r, n := drawRoster(t)
		room := fmt.Sprintf("m%d", rapid.IntRange(0, n-1).Draw(t, "room"))
		when := rapid.IntRange(0, 3*n).Draw(t, "when")
		at, h, again := "m0", (*hop)(nil), false
		for step := 0; ; step++ {
			up := step >= when
			if up && at == room {
				return
			}
			if step > when+10*n {
				t.Fatalf("the pod goes from one to the other without end: %v", h)
			}
			fits := func(member string) bool {
				if up {
					return member == room
				}
				return rapid.Bool().Draw(t, "guess")
			}
			v := decide(refusal{self: at, roster: r, hop: h, again: again, fits: fits, couldPreempt: func(string) bool { return false }})
			again = v.last
			next := v.next
			if next == nil {
				next = v.later
			}
			switch {
			case next != nil:
				at, h, again = next.To, next, false
			case up:
				t.Fatalf("it rests at %s, and there is room at %s", at, room)
			default:
				when = step + 1 // the event of the room wakes it
			}
		}
	})
}

// The annotation is the user's to write: whatever it says, no replica fails over it, and what is handed on stays small.
func TestAForgedHopDoesNoHarm(t *testing.T) {
	r := newRoster(9, slicesOf(4, map[string]string{"a": "0-2", "b": "3-5", "c": "6-8"}))
	many := `"b","c"` + strings.Repeat(`,"b","nobody"`, 1000)
	for _, again := range []string{"-1", "-9223372036854775808", "9223372036854775807", "1048576", "5"} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{
			AnnotationReplica: `{"to":"a","refused":[` + many + `],"again":` + again + `,"epoch":4}`,
		}}}
		for range 3 { // what one replica writes, the next one reads
			v := decide(refusal{self: "a", roster: r, hop: hopOf(pod),
				fits: func(string) bool { return true }, couldPreempt: func(string) bool { return false }})
			h := v.next
			if h == nil {
				h = v.later
			}
			if h == nil || len(h.Refused) > 3 || v.after < 0 {
				t.Fatalf("again %s: %s", again, show(v))
			}
			pod.Annotations[AnnotationReplica] = h.String()
			if hopOf(pod) == nil {
				t.Fatalf("again %s: %v is not read", again, h)
			}
		}
	}
}

func TestHopsAreReadAsWritten(t *testing.T) {
	want := hop{To: "b", Refused: []string{"a"}, Preempting: true, Again: 2, Epoch: 7}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{AnnotationReplica: want.String()}}}
	if got := hopOf(pod); got == nil || got.String() != want.String() {
		t.Errorf("wrote %v, read %v", want, got)
	}
	for _, text := range []string{"", "b", `{"to":""}`, `{"to":3}`, `{"to":"b","again":-1}`, `{"to":"b","again":9223372036854775807}`} {
		pod.Annotations[AnnotationReplica] = text
		if got := hopOf(pod); got != nil {
			t.Errorf("%q was read as %v", text, got)
		}
	}
}

func TestPodsAreKeyedByTheirWorkload(t *testing.T) {
	yes := true
	owned := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web-1", OwnerReferences: []metav1.OwnerReference{
		{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "web", Controller: &yes},
	}}}
	pinned := owned.DeepCopy()
	field := corev1.NodeSelectorRequirement{Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{"n1"}}
	pinned.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
		RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{
			{MatchFields: []corev1.NodeSelectorRequirement{field}},
		}},
	}}
	either := pinned.DeepCopy()
	terms := &either.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	*terms = append(*terms, corev1.NodeSelectorTerm{})
	annotated := owned.DeepCopy()
	annotated.Annotations = map[string]string{sharding.AnnotationHashKey: "mine"}
	for _, test := range []struct {
		name string
		pod  *corev1.Pod
		want string
	}{
		{"by its controller", owned, "apps/ReplicaSet/ns/web"},
		{"by its annotation", annotated, "mine"},
		{"by itself", &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "alone"}}, "/Pod/ns/alone"},
		{"by its only node", pinned, nodeKey("n1")},
		{"one of several nodes", either, "apps/ReplicaSet/ns/web"},
	} {
		if got := podKey(test.pod); got != test.want {
			t.Errorf("%s: %q, want %q", test.name, got, test.want)
		}
	}
}
