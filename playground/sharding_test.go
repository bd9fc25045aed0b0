package playground

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/drover-sh/drover/sharding"
)

func TestTheRecorderSeesTwoOwnersForAMoment(t *testing.T) {
	o := newOwnership(10)
	o.sawSlice(sharding.Slice{Member: "a", Session: "a1", Owned: sharding.Span(0, 6)})
	o.sawSlice(sharding.Slice{Member: "b", Session: "b1", Owned: sharding.Span(6, 4)})
	if broken := o.twoOwners(); broken != "" {
		t.Fatalf("shares that have nothing in common: %s", broken)
	}
	// b is given what a drains and has not let go.
	o.sawSlice(sharding.Slice{Member: "a", Session: "a1", Owned: sharding.Span(0, 5),
		Draining: []sharding.Order{{Epoch: 2, VNs: sharding.SetOf(5)}}})
	o.sawSlice(sharding.Slice{Member: "b", Session: "b1", Owned: sharding.Span(5, 5)})
	if got, want := o.twoOwners(), "a and b both have Virtual Nodes 5"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestMovesAreCounted(t *testing.T) {
	o := newOwnership(4)
	own := func(member string, vns sharding.Set) {
		o.sawSlice(sharding.Slice{Member: member, Session: member, Owned: vns})
	}
	own("a", sharding.Span(0, 4)) // the first owner is no move
	own("a", sharding.Span(0, 2))
	own("b", sharding.Span(2, 2))
	own("b", sharding.SetOf(2))
	own("c", sharding.SetOf(3))
	moved, most, which := o.counted()
	if moved != 2 || most != 2 || which.String() != "2-3" || o.total != 3 {
		t.Errorf("%d moved, most %d, %s, total %d; want 2, 2, 2-3, 3", moved, most, which, o.total)
	}
	if moved, _, _ = o.counted(); moved != 0 {
		t.Errorf("%d moved since then", moved)
	}
	if o.begins["c"] != 1 || o.begins["b"] != 2 {
		t.Errorf("sessions began with %v", o.begins)
	}
}

func TestWritesAndSecondChildrenAreSeen(t *testing.T) {
	o := newOwnership(1)
	object := func(kind, name, uid, version string) *unstructured.Unstructured {
		u := newSampleObject(kind, name)
		u.SetUID(types.UID(uid))
		u.SetResourceVersion(version)
		if kind == kindChild {
			u.SetOwnerReferences([]metav1.OwnerReference{{Kind: kindParent, Name: name, UID: "p", Controller: ptr.To(true)}})
		}
		return u
	}
	see := func(u *unstructured.Unstructured) { o.saw(u, time.Time{}) }
	see(object(kindParent, "x", "p", "1"))
	if got, want := o.orphans(), "Parent x has no Child"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	see(object(kindChild, "x", "c", "2"))
	if got := o.orphans(); got != "" {
		t.Error(got)
	}
	o.freeze(func(string) bool { return false })
	see(object(kindChild, "x", "c", "2"))
	if len(o.writes) > 0 {
		t.Errorf("an object that was not written counts: %v", o.writes)
	}
	see(object(kindChild, "x", "c", "3"))
	if diff := cmp.Diff([]string{"Child x"}, o.writes); diff != "" {
		t.Error(diff)
	}
	o.lost(object(kindChild, "x", "c", "3"))
	see(object(kindChild, "x", "c2", "5"))
	if got, want := o.orphans(), "Parent x has had 2 Children"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// A round tells what was skipped, repeated or out of turn from what was only late.
func TestRound(t *testing.T) {
	when := sharding.Resync{Period: 4 * time.Second, Slice: time.Second}
	start := time.Unix(4000, 0)
	var keys []string
	for i := range 40 {
		keys = append(keys, fmt.Sprintf("ns/%d", i))
	}
	// ideal reconciles every key, a moment after it is due, in two periods.
	ideal := func() *reconciles {
		r := &reconciles{when: when, origin: time.Unix(0, 0)}
		for p := range 2 {
			begin := start.Add(time.Duration(p) * when.Period)
			for slice := range 4 {
				for _, key := range keys {
					if due := r.due(key, begin); due.Equal(begin.Add(time.Duration(slice+1) * when.Slice)) {
						r.all = append(r.all, reconcile{"a", key, due.Sub(r.origin) + 100*time.Millisecond})
					}
				}
			}
		}
		return r
	}
	problems := func(r *reconciles) string {
		f := r.round(keys, start)
		var found []string
		if f.missing > 0 {
			found = append(found, "missing")
		}
		if len(f.repeated) > 0 {
			found = append(found, "repeated")
		}
		if f.disorder != "" {
			found = append(found, "disorder")
		}
		return strings.Join(found, " ")
	}
	if got := problems(ideal()); got != "" {
		t.Errorf("nothing was wrong, and the round says: %s", got)
	}
	skipped := ideal()
	key := skipped.all[0].key
	first, rest := skipped.all[0], skipped.all[1:]
	for i, x := range rest {
		if x.key == key {
			skipped.all = append(rest[:i:i], rest[i+1:]...)
			break
		}
	}
	if got := problems(skipped); got != "missing" {
		t.Errorf("a key was skipped, and the round says %q", got)
	}
	twice := ideal()
	again := first
	again.at += 300 * time.Millisecond
	twice.all = append(twice.all, again)
	if got := problems(twice); got != "repeated" {
		t.Errorf("a key was reconciled twice, and the round says %q", got)
	}
	herd := ideal()
	last := 0
	for i, x := range herd.all {
		if x.at < start.Add(when.Period).Sub(herd.origin) {
			last = i
		}
	}
	herd.all[0].at = herd.all[last].at + time.Millisecond // in its window, but after those of later slices
	moved := herd.all[0]
	herd.all = append(append(herd.all[1:last+1:last+1], moved), herd.all[last+1:]...)
	if got := problems(herd); got != "disorder" {
		t.Errorf("a key came out of turn, and the round says %q", got)
	}
}

func TestAPictureForATerminalAndALineForAPipe(t *testing.T) {
	plain := func(_, text string) string { return text }
	p := Picture{Whole: 10, Below: "moving 2", Bars: []Bar{
		{Name: "a", Value: 5, Coming: 2}, {Name: "bb", Value: 0, Note: "stopped"},
	}}
	want := []string{
		"           a  █████░░ 5", "           bb 0  stopped", "           moving 2",
	}
	if diff := cmp.Diff(want, p.rows(len(pictureIndent)+2+30+10, plain)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if diff := cmp.Diff("           a ██████······ 5   bb ············ 0 stopped", p.line()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// On a pipe there is a line for each change of what is owned, and none for what is on its way; on a terminal all of it is
// drawn in one place, below what stays.
func TestPicturesOfPeople(t *testing.T) {
	show := func(p *People) {
		a := Picture{Whole: 10, Bars: []Bar{{Name: "a", Value: 10}}}
		p.Picture(a)
		moving := Picture{Whole: 10, Passing: true, Bars: []Bar{{Name: "a", Value: 5}, {Name: "b", Coming: 5}}}
		p.Picture(moving)
		p.Picture(a)
		p.Step(Step{Text: "step"})
		p.Picture(Picture{Whole: 10, Bars: []Bar{{Name: "a", Value: 5}, {Name: "b", Value: 5}}})
		p.StoryEnds(Story{}, Result{OK: true, Objects: 2, VirtualNodes: 10, Moves: 5})
	}
	output := func(live bool) string {
		file, err := os.Create(filepath.Join(t.TempDir(), "out"))
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		p := NewPeople(file)
		p.live = live
		show(p)
		data, err := os.ReadFile(file.Name())
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	want := `           a ████████████ 10
    +0.0s  step
           a ██████······ 5   b ██████······ 5
  ok in 0.0s: 2 objects, 10 Virtual Nodes, 5 moves
`
	if diff := cmp.Diff(want, output(false)); diff != "" {
		t.Errorf("on a pipe (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff("    +0.0s  step\n  ok in 0.0s: 2 objects, 10 Virtual Nodes, 5 moves\n", onScreen(output(true))); diff != "" {
		t.Errorf("what stays on a terminal (-want +got):\n%s", diff)
	}
}

// onScreen plays what was written to a terminal, as far as People writes it.
func onScreen(text string) string {
	lines, row := []string{""}, 0
	for text != "" {
		switch {
		case strings.HasPrefix(text, "\x1b[2K"):
			lines[row], text = "", text[4:]
		case strings.HasPrefix(text, "\x1b[1A"):
			row, text = row-1, text[4:]
		case text[0] == '\r':
			text = text[1:]
		case text[0] == '\n':
			if row++; row == len(lines) {
				lines = append(lines, "")
			}
			text = text[1:]
		default:
			end := strings.IndexAny(text, "\x1b\r\n")
			if end < 0 {
				end = len(text)
			}
			lines[row] += text[:end]
			text = text[end:]
		}
	}
	return strings.TrimRight(strings.Join(lines, "\n"), "\n") + "\n"
}
