package sharding

import (
	"fmt"
	"net/url"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apisharding "k8s.io/apimachinery/pkg/sharding"
	"k8s.io/apimachinery/pkg/types"
	serversharding "k8s.io/apiserver/pkg/sharding"
	"pgregory.net/rapid"
)

// valued returns an object whose field has the value.
func valued(key ShardKey, value string) *metav1.PartialObjectMetadata {
	o := &metav1.PartialObjectMetadata{}
	if key == ShardByNamespace {
		o.Namespace = value
	} else {
		o.UID = types.UID(value)
	}
	return o
}

// The API server's own parser and matcher are the oracle: what they select is what the member keeps, and what they leave out
// is what it drops, but for gaps that were closed to keep the selector short.
func TestServerAndClientFilterAlike(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := HashRanges{
			V:   rapid.OneOf(rapid.IntRange(1, 300), rapid.IntRange(1, MaxVirtualNodes)).Draw(t, "v"),
			Key: rapid.SampledFrom([]ShardKey{ShardByUID, ShardByNamespace}).Draw(t, "key"),
		}
		var vns []VirtualNode
		for range rapid.IntRange(0, 120).Draw(t, "n") {
			vns = append(vns, VirtualNode(rapid.IntRange(0, r.V-1).Draw(t, "vn")))
		}
		want := SetOf(vns...)
		text, selected := r.Selector(want)
		server, err := serversharding.Parse(text)
		if err != nil {
			t.Fatalf("%v: the server refuses %q: %v", r, text, err)
		}
		if !selected.Contains(want) || len(selected) > maxRanges || (len(want) <= maxRanges && !selected.Equal(want)) {
			t.Fatalf("%v: the selector of %v selects %v", r, want, selected)
		}
		if server.String() != text {
			t.Fatalf("the server echoes %q for %q", server.String(), text)
		}
		for range 50 {
			value := rapid.String().Draw(t, "value")
			vn := r.Of(value)
			if vn < 0 || int(vn) >= r.V {
				t.Fatalf("%v: %q is in Virtual Node %d", r, value, vn)
			}
			sent, err := server.Matches(valued(r.Key, value))
			if err != nil {
				t.Fatal(err)
			}
			if sent != selected.Has(vn) {
				t.Fatalf("%v: %q, hash %s, Virtual Node %d: the server selects it: %v, the client: %v; %s", r, value,
					apisharding.HashField(value), vn, sent, selected.Has(vn), text)
			}
		}
	})
}

// Neighbouring ranges meet at one hash. It is drawn by no test of random values, so every edge is looked at.
func TestRangesMeetWithoutGapOrOverlap(t *testing.T) {
	for _, v := range []int{1, 2, 3, 7, 60, 1000, 1024, 99_999, MaxVirtualNodes} {
		r := HashRanges{V: v, Key: ShardByUID}
		if r.start(0) != "0x0000000000000000" || r.start(VirtualNode(v)) != hashSpaceEnd {
			t.Fatalf("V=%d: the space goes from %s to %s", v, r.start(0), r.start(VirtualNode(v)))
		}
		for vn := VirtualNode(1); int(vn) < v; vn++ {
			var first uint64
			if _, err := fmt.Sscanf(r.start(vn), "0x%x", &first); err != nil {
				t.Fatal(err)
			}
			if r.ofHash(first) != vn || r.ofHash(first-1) != vn-1 {
				t.Fatalf("V=%d: %#x is in %d and the hash before in %d, want %d and %d", v, first, r.ofHash(first),
					r.ofHash(first-1), vn, vn-1)
			}
		}
	}
}

// The narrowest gaps are closed, and only as many as are too many.
func TestTheNarrowestGapsAreClosed(t *testing.T) {
	for _, tc := range []struct {
		set  string
		n    int
		want string
	}{
		{"0,2,10,20-24,30", 9, "0,2,10,20-24,30"},
		{"0,2,10,20-24,30", 4, "0-2,10,20-24,30"},
		{"0,2,10,20-24,30", 3, "0-2,10,20-30"},
		{"0,2,10,20-24,30", 1, "0-30"},
	} {
		set, err := ParseSet(tc.set)
		if err != nil {
			t.Fatal(err)
		}
		if got := closeGaps(set, tc.n).String(); got != tc.want {
			t.Errorf("%s in %d ranges: %s, want %s", tc.set, tc.n, got, tc.want)
		}
	}
}

// A hash that changed with a release would give objects away that are being worked on.
func TestHashRangesNeverChange(t *testing.T) {
	for value, want := range map[string]VirtualNode{
		"": 796, "default": 920, "kube-system": 872, "7cc87a43-772f-4a29-9506-91b693685c9c": 458,
	} {
		if got := (HashRanges{V: 1000, Key: ShardByUID}).Of(value); got != want {
			t.Errorf("%q is in Virtual Node %d, want %d", value, got, want)
		}
	}
}

func TestSelectorOfNothingSelectsNothing(t *testing.T) {
	text, selected := HashRanges{V: 10, Key: ShardByUID}.Selector(nil)
	server, err := serversharding.Parse(text)
	if err != nil || server.Empty() || !selected.Empty() {
		t.Fatalf("%q, %v: %v", text, selected, err)
	}
}

// Ranges stay as few as selectors by label are short, whatever V is and however scattered a share.
func TestShardSelectorsStayShort(t *testing.T) {
	for _, v := range []int{200, 1_000, 100_000} {
		for _, key := range []ShardKey{ShardByUID, ShardByNamespace} {
			r := HashRanges{V: v, Key: key}
			var scattered []VirtualNode
			for vn := 0; vn < v; vn += 2 {
				scattered = append(scattered, VirtualNode(vn))
			}
			text, selected := r.Selector(SetOf(scattered...))
			if n := len(url.QueryEscape(text)); n > 6<<10 || len(selected) != maxRanges {
				t.Errorf("V=%d by %s: the selector of every second Virtual Node has %d ranges and %d bytes", v, key, len(selected), n)
			}
			b := Balanced{Unit: BucketsFor(v, DefaultMaxBuckets).Size}
			share := setsOf(b.Assign(make(Placement, v), serving(9)))["m004"]
			text, selected = r.Selector(share)
			if n := strings.Count(text, "shardRange"); n != 1 || !selected.Equal(share) {
				t.Errorf("V=%d: the selector of one member of nine has %d ranges", v, n)
			}
		}
	}
}

// UIDs are random, and spread evenly. Namespaces do not if their names differ at the end only: FNV-1a mixes the last
// characters too little into the upper bits, by which ranges select. That is the server's hash, and has to be known.
func TestUIDsSpreadAndSerialNamesDoNot(t *testing.T) {
	const v, n = 100, 20_000
	var count [v]int
	for i := range n {
		// What is random about a UID, in its form.
		a, b := uint64(i)*0x9e3779b97f4a7c15, uint64(i)*0xc2b2ae3d27d4eb4f+0x165667b19e3779f9
		uid := fmt.Sprintf("%08x-%04x-4%03x-a%03x-%012x", a>>32, a>>16&0xffff, a&0xfff, b>>48&0xfff, b&0xffffffffffff)
		count[HashRanges{V: v, Key: ShardByUID}.Of(uid)]++
	}
	for vn, got := range count {
		if got < 120 || got > 280 { // 200 on average, standard deviation 14
			t.Errorf("Virtual Node %d has %d of %d UIDs, want about %d", vn, got, n, n/v)
		}
	}
	r := HashRanges{V: 1000, Key: ShardByNamespace}
	for i := range 9 {
		if a, b := r.Of(fmt.Sprintf("tenant-%d", i)), r.Of(fmt.Sprintf("tenant-%d", i+1)); a != b {
			t.Errorf("tenant-%d is in Virtual Node %d and tenant-%d in %d: docs/sharding.md says that they share one", i, a, i+1, b)
		}
	}
}
