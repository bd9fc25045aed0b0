package sharding

import (
	"fmt"
	"hash/fnv"
	"math/bits"
	"slices"
	"strings"
)

// A ShardKey is the field of an object whose hash the API server's shard selector compares. It knows these two.
type ShardKey string

const (
	// ShardByUID spreads the objects of one resource evenly. An object and what it owns have different UIDs.
	ShardByUID ShardKey = "UID"
	// ShardByNamespace keeps the objects of a namespace together, and so children with their parents.
	ShardByNamespace ShardKey = "Namespace"
)

// path is the field as selectors name it.
func (k ShardKey) path() string {
	if k == ShardByNamespace {
		return "object.metadata.namespace"
	}
	return "object.metadata.uid"
}

// maxRanges bounds the length of a shard selector. 48 ranges are under 6 KB of URL, as much as a label selector may take;
// the server compares each of them with every event.
const maxRanges = 48

// hashSpaceEnd is where the hash space ends: 2^64.
const hashSpaceEnd = "0x10000000000000000"

// HashRanges are the Virtual Nodes of a group with selector ShardRange: the API server's hash space, 64-bit FNV-1a, cut
// into V ranges of the same width, in order. They replace label and bucket: neighbours make one range of a selector.
type HashRanges struct {
	// V is the group's number of Virtual Nodes, at least 1.
	V int
	// Key is the field that is hashed.
	Key ShardKey
}

// Of returns the Virtual Node of the objects whose field Key has this value. It is h*V/2^64 of the hash h, so every
// process and the API server find the same for as long as the group exists.
func (r HashRanges) Of(value string) VirtualNode {
	h := fnv.New64a()
	h.Write([]byte(value))
	return r.ofHash(h.Sum64())
}

func (r HashRanges) ofHash(h uint64) VirtualNode {
	vn, _ := bits.Mul64(h, uint64(r.V))
	return VirtualNode(vn)
}

// start returns the least hash of a Virtual Node, as selectors write it; that of V is the end of the space.
func (r HashRanges) start(vn VirtualNode) string {
	if int(vn) == r.V {
		return hashSpaceEnd
	}
	hash, rest := bits.Div64(uint64(vn), 0, uint64(r.V))
	if rest > 0 {
		hash++
	}
	return fmt.Sprintf("0x%016x", hash)
}

// Selector returns the shard selector under which a list or watch returns every object of vns, and all the Virtual Nodes
// that it selects. These are more than vns if vns has more than a few dozen ranges: the narrowest gaps are selected, too.
// A caller filters in any case, because a server that does not know shard selectors ignores them.
//
// The selector of nothing is the narrowest range there is, because an empty one would select everything.
func (r HashRanges) Selector(vns Set) (selector string, selected Set) {
	if vns.Empty() {
		return r.term("0x0000000000000000", "0x0000000000000001"), nil
	}
	selected = closeGaps(vns, maxRanges)
	terms := make([]string, len(selected))
	for i, span := range selected {
		terms[i] = r.term(r.start(span.First), r.start(span.Last+1))
	}
	return strings.Join(terms, " || "), selected
}

func (r HashRanges) term(start, end string) string {
	return "shardRange(" + r.Key.path() + ", '" + start + "', '" + end + "')"
}

// closeGaps returns the smallest superset of s with at most n ranges.
func closeGaps(s Set, n int) Set {
	if len(s) <= n {
		return s
	}
	after := make([]int, len(s)-1) // each stands for the gap after the range of that number
	for i := range after {
		after[i] = i
	}
	width := func(i int) int { return int(s[i+1].First - s[i].Last) }
	slices.SortStableFunc(after, func(a, b int) int { return width(a) - width(b) })
	closed := make([]bool, len(s))
	for _, i := range after[:len(s)-n] {
		closed[i] = true
	}
	joined := make(Set, 0, n)
	for i, r := range s {
		if i > 0 && closed[i-1] {
			joined[len(joined)-1].Last = r.Last
			continue
		}
		joined = append(joined, r)
	}
	return joined
}
