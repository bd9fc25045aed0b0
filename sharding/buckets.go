package sharding

import "strconv"

// DefaultMaxBuckets bounds the length of a selector: "bucket in (…)" with all of 1,024 numbers is under 6 KB, and a
// member of ten sends a tenth of it.
const DefaultMaxBuckets = 1024

// Buckets divide V Virtual Nodes into runs of Size neighbours (the last may be shorter). A watch that selects by bucket
// stays as short, and costs the server as little per event, at V = 100,000 as at V = 1,000. Selecting by Virtual Node
// does not: 100,000 of them make a URL of 600 KB that the server walks for every event.
//
// Buckets are fixed with V, because their number is a label on every object. An assignment that moves whole buckets
// (Balanced.Unit = Size) makes Cover exact; otherwise a member filters what it receives by Set.Has.
type Buckets struct {
	// V is the group's number of Virtual Nodes.
	V int
	// Size is how many neighbours make a bucket, at least 1.
	Size int
}

// BucketsFor returns the finest division of v Virtual Nodes into at most max buckets.
func BucketsFor(v, max int) Buckets {
	return Buckets{V: v, Size: (v + max - 1) / max}
}

// Count returns how many buckets there are.
func (b Buckets) Count() int { return (b.V + b.Size - 1) / b.Size }

// Of returns the number of the bucket that holds vn.
func (b Buckets) Of(vn VirtualNode) int { return int(vn) / b.Size }

// Members returns the Virtual Nodes of bucket n.
func (b Buckets) Members(n int) Set {
	first := n * b.Size
	return Span(VirtualNode(first), min(b.Size, b.V-first))
}

// Cover returns the numbers of the buckets that hold any of vns, ascending, and whether they hold nothing else.
func (b Buckets) Cover(vns Set) (buckets []int, exact bool) {
	held := 0
	for _, r := range vns {
		for n := b.Of(r.First); n <= b.Of(r.Last); n++ {
			if len(buckets) > 0 && buckets[len(buckets)-1] == n {
				continue
			}
			buckets = append(buckets, n)
			held += b.Members(n).Len()
		}
	}
	return buckets, held == vns.Len()
}

// A Selector is one label-selector requirement: Label in (Values).
type Selector struct {
	Label  string
	Values []string
}

// Selector returns the shortest requirement under which a list or watch returns every object of vns. exact tells that
// it returns no other; if not, the caller filters. With buckets of one Virtual Node it is the paper's "vn in (…)".
func (b Buckets) Selector(vns Set) (s Selector, exact bool) {
	buckets, exact := b.Cover(vns)
	s = Selector{Label: LabelBucket, Values: make([]string, len(buckets))}
	if b.Size == 1 {
		s.Label = LabelVirtualNode
	}
	for i, n := range buckets {
		s.Values[i] = strconv.Itoa(n)
	}
	return s, exact
}
