package sharding

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func drawSet(t *rapid.T, label string) (Set, map[VirtualNode]bool) {
	vns := rapid.SliceOf(rapid.Map(rapid.IntRange(0, 40), func(i int) VirtualNode { return VirtualNode(i) })).Draw(t,
		label)
	members := make(map[VirtualNode]bool)
	for _, vn := range vns {
		members[vn] = true
	}
	return SetOf(vns...), members
}

func TestSetsBehaveAsSets(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, inA := drawSet(t, "a")
		b, inB := drawSet(t, "b")
		for name, tc := range map[string]struct {
			got  Set
			want func(vn VirtualNode) bool
		}{
			"a":         {a, func(vn VirtualNode) bool { return inA[vn] }},
			"union":     {a.Union(b), func(vn VirtualNode) bool { return inA[vn] || inB[vn] }},
			"intersect": {a.Intersect(b), func(vn VirtualNode) bool { return inA[vn] && inB[vn] }},
			"minus":     {a.Minus(b), func(vn VirtualNode) bool { return inA[vn] && !inB[vn] }},
		} {
			n := 0
			for vn := range VirtualNode(42) {
				if tc.got.Has(vn) != tc.want(vn) {
					t.Fatalf("%s of %v and %v is %v: Has(%d) = %v", name, a, b, tc.got, vn, tc.got.Has(vn))
				}
				if tc.want(vn) {
					n++
				}
			}
			if tc.got.Len() != n {
				t.Fatalf("%s of %v and %v is %v: Len = %d, want %d", name, a, b, tc.got, tc.got.Len(), n)
			}
			for i, r := range tc.got {
				if r.Last < r.First || (i > 0 && r.First <= tc.got[i-1].Last+1) {
					t.Fatalf("%s of %v and %v is %v: ranges touch or do not ascend", name, a, b, tc.got)
				}
			}
			if parsed, err := ParseSet(tc.got.String()); err != nil || !parsed.Equal(tc.got) {
				t.Fatalf("ParseSet(%q) = %v, %v", tc.got.String(), parsed, err)
			}
		}
		if got, want := a.Intersects(b), !a.Intersect(b).Empty(); got != want {
			t.Fatalf("%v.Intersects(%v) = %v", a, b, got)
		}
		if got, want := a.Contains(b), b.Minus(a).Empty(); got != want {
			t.Fatalf("%v.Contains(%v) = %v", a, b, got)
		}
	})
}

func TestParseSetRefusesWhatIsNoSet(t *testing.T) {
	for _, s := range []string{"x", "1-", "-1", "3-2", "1,,2", "1-2-3", "99999999999", "100000", "0-2147483647"} {
		if set, err := ParseSet(s); err == nil {
			t.Errorf("ParseSet(%q) = %v, want an error that names the value", s, set)
		}
	}
	got, err := ParseSet("7,0-4,5")
	if diff := cmp.Diff(Set{{0, 5}, {7, 7}}, got); err != nil || diff != "" {
		t.Errorf("ParseSet of unordered ranges: %v\n%s", err, diff)
	}
}

func FuzzParseSet(f *testing.F) {
	f.Add("0-4,7")
	f.Add("")
	f.Add("5,1-3,2")
	f.Fuzz(func(t *testing.T, s string) {
		set, err := ParseSet(s)
		if err != nil {
			return
		}
		again, err := ParseSet(set.String())
		if err != nil || !again.Equal(set) {
			t.Errorf("ParseSet(%q) = %v does not survive String: %v, %v", s, set, again, err)
		}
	})
}
