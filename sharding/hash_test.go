package sharding

import (
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestHashKey(t *testing.T) {
	parent := ObjectRef{"example.org", "Parent", "ns", "p"}
	child := ObjectRef{"example.org", "Child", "ns", "p-child"}
	for _, tc := range []struct {
		name                 string
		annotation, ownerKey string
		self                 ObjectRef
		want                 string
	}{
		{"an object that says nothing stands for itself", "", "", parent, "example.org/Parent/ns/p"},
		{"a child follows its controller owner", "", parent.Key(), child, "example.org/Parent/ns/p"},
		{"a grandchild follows the same key, handed down", "", HashKey("", parent.Key(), child), child, parent.Key()},
		{"the annotation comes first", "k", parent.Key(), child, "k"},
		{"a cluster-scoped object of the core group", "", "", ObjectRef{"", "Node", "", "n"}, "/Node//n"},
	} {
		if got := HashKey(tc.annotation, tc.ownerKey, tc.self); got != tc.want {
			t.Errorf("%s: HashKey(%q, %q, %v) = %q, want %q", tc.name, tc.annotation, tc.ownerKey, tc.self, got, tc.want)
		}
	}
}

func TestOptedIn(t *testing.T) {
	for _, tc := range []struct {
		loadBalanced, hashKey string
		owner, want           bool
	}{
		{"true", "", false, true}, {"", "k", false, true}, {"", "", true, true},
		{"", "", false, false}, {"false", "", false, false}, {"True", "", false, false},
	} {
		if got := OptedIn(tc.loadBalanced, tc.hashKey, tc.owner); got != tc.want {
			t.Errorf("OptedIn(%q, %q, %v) = %v, want %v", tc.loadBalanced, tc.hashKey, tc.owner, got, tc.want)
		}
	}
}

// The Virtual Node stands on objects: a hash that changed with a release of this package would orphan them all.
func TestVirtualNodesNeverChange(t *testing.T) {
	for key, want := range map[string]VirtualNode{
		"": 0, "123456789": 262, "example.org/Parent/ns/p": 668,
	} {
		if got := VirtualNodeOf(key, 1000); got != want {
			t.Errorf("VirtualNodeOf(%q, 1000) = %d, want %d (CRC32 IEEE of 123456789 is 0xcbf43926)", key, got, want)
		}
	}
}

func TestVirtualNodesSpreadEvenly(t *testing.T) {
	const v, keys = 200, 100_000
	var count [v]int
	for i := range keys {
		count[VirtualNodeOf(ObjectRef{"example.org", "Parent", "ns", fmt.Sprintf("parent-%d", i)}.Key(), v)]++
	}
	for vn, n := range count {
		if n < 350 || n > 650 { // 500 on average, standard deviation 22
			t.Errorf("Virtual Node %d has %d of %d keys, want about %d", vn, n, keys, keys/v)
		}
	}
}

func TestParseVirtualNodeAcceptsOnlyWhatSelectorsFind(t *testing.T) {
	if vn, err := ParseVirtualNode(VirtualNode(17).LabelValue(), 200); err != nil || vn != 17 {
		t.Errorf("ParseVirtualNode of a label value: %d, %v", vn, err)
	}
	for _, label := range []string{"", "07", "+7", "-1", "200", "x"} {
		if vn, err := ParseVirtualNode(label, 200); err == nil {
			t.Errorf("ParseVirtualNode(%q, 200) = %d, want an error", label, vn)
		} else if !strings.Contains(err.Error(), LabelVirtualNode) {
			t.Errorf("ParseVirtualNode(%q, 200): %v does not name the label", label, err)
		}
	}
}

// A selector of all of V stays under 6 KB whatever V is, and a ninth of it is nine times shorter.
func TestSelectorsStayShort(t *testing.T) {
	for _, v := range []int{200, 1_000, 10_000, 100_000} {
		b := BucketsFor(v, DefaultMaxBuckets)
		s, exact := b.Selector(Span(0, v))
		if n := len(strings.Join(s.Values, ",")); n > 6<<10 || !exact {
			t.Errorf("V=%d: selector of everything has %d bytes, exact %v", v, n, exact)
		}
		share := Balanced{Unit: b.Size}.Assign(make(Placement, v), serving(9))
		s, exact = b.Selector(setsOf(share)["m000"])
		if n := len(strings.Join(s.Values, ",")); n > 1<<10 || !exact {
			t.Errorf("V=%d: selector of one member of nine has %d bytes, exact %v", v, n, exact)
		}
	}
	if s, _ := BucketsFor(200, DefaultMaxBuckets).Selector(SetOf(0, 5, 10)); s.Label != LabelVirtualNode ||
		strings.Join(s.Values, ",") != "0,5,10" {
		t.Errorf("where buckets are single Virtual Nodes the selector is not the paper's: %v", s)
	}
}

func TestBucketsCoverWhatTheyAreAskedFor(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := rapid.IntRange(1, 300).Draw(t, "v")
		b := BucketsFor(v, rapid.IntRange(1, 50).Draw(t, "max"))
		var vns []VirtualNode
		for range rapid.IntRange(0, 30).Draw(t, "n") {
			vns = append(vns, VirtualNode(rapid.IntRange(0, v-1).Draw(t, "vn")))
		}
		want := SetOf(vns...)
		cover, exact := b.Cover(want)
		var all Set
		for _, n := range cover {
			if members := b.Members(n); !members.Intersects(want) {
				t.Fatalf("%v: bucket %d (%v) covers nothing of %v", b, n, members, want)
			}
			all = all.Union(b.Members(n))
		}
		if !all.Contains(want) || exact != all.Equal(want) {
			t.Fatalf("%v: cover of %v is %v, exact %v", b, want, all, exact)
		}
	})
}
