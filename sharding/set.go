package sharding

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// A VirtualNode is the number of one of the V partitions that objects hash to, 0 to V-1.
type VirtualNode int32

// A Range is the Virtual Nodes First to Last, both included.
type Range struct {
	First, Last VirtualNode
}

// A Set is a set of Virtual Nodes, kept as ascending ranges that neither overlap nor touch. Two equal sets are
// therefore equal values, and what a member owns stays a few ranges however large V is, because assignments move runs
// of neighbours. The zero Set is empty. Sets are values: no method changes its receiver.
type Set []Range

// SetOf returns the set of the given Virtual Nodes, in any order, doubles allowed.
func SetOf(vns ...VirtualNode) Set {
	sorted := slices.Clone(vns)
	slices.Sort(sorted)
	var b setBuilder
	for _, vn := range sorted {
		b.add(Range{vn, vn})
	}
	return b.set
}

// Span returns the set of the n Virtual Nodes that start at first.
func Span(first VirtualNode, n int) Set {
	if n <= 0 {
		return nil
	}
	return Set{{first, first + VirtualNode(n) - 1}}
}

// ParseSet reads what Set.String wrote: "0-4,7". The empty string is the empty set. Ranges may come in any order. A number
// that no group has is an error: whoever goes through the set would never come to its end.
func ParseSet(s string) (Set, error) {
	if s == "" {
		return nil, nil
	}
	var ranges []Range
	for part := range strings.SplitSeq(s, ",") {
		first, last, isRange := strings.Cut(strings.TrimSpace(part), "-")
		if !isRange {
			last = first
		}
		from, err := strconv.ParseInt(first, 10, 32)
		if err != nil {
			return nil, fmt.Errorf("set of Virtual Nodes %q: %q is not a number: %w", s, part, err)
		}
		to, err := strconv.ParseInt(last, 10, 32)
		if err != nil {
			return nil, fmt.Errorf("set of Virtual Nodes %q: %q is not a range of numbers: %w", s, part, err)
		}
		if from < 0 || to < from {
			return nil, fmt.Errorf("set of Virtual Nodes %q: %q does not ascend from 0", s, part)
		}
		if to >= MaxVirtualNodes {
			return nil, fmt.Errorf("set of Virtual Nodes %q: %q goes beyond %d", s, part, MaxVirtualNodes-1)
		}
		ranges = append(ranges, Range{VirtualNode(from), VirtualNode(to)})
	}
	return normalize(ranges), nil
}

// String returns the ranges in ascending order, for example "0-4,7", and "" for the empty set.
func (s Set) String() string {
	var b strings.Builder
	for i, r := range s {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.Itoa(int(r.First)))
		if r.Last > r.First {
			b.WriteByte('-')
			b.WriteString(strconv.Itoa(int(r.Last)))
		}
	}
	return b.String()
}

// MarshalText writes the set as String does.
func (s Set) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads the set as ParseSet does.
func (s *Set) UnmarshalText(text []byte) error {
	parsed, err := ParseSet(string(text))
	if err != nil {
		return err
	}
	*s = parsed
	return nil
}

// Len returns how many Virtual Nodes the set holds.
func (s Set) Len() int {
	n := 0
	for _, r := range s {
		n += int(r.Last-r.First) + 1
	}
	return n
}

// Empty reports whether the set holds nothing.
func (s Set) Empty() bool { return len(s) == 0 }

// Has reports whether vn is in the set.
func (s Set) Has(vn VirtualNode) bool {
	i, _ := slices.BinarySearchFunc(s, vn, func(r Range, vn VirtualNode) int { return int(r.Last) - int(vn) })
	return i < len(s) && s[i].First <= vn
}

// All yields every Virtual Node of the set in ascending order.
func (s Set) All() func(yield func(VirtualNode) bool) {
	return func(yield func(VirtualNode) bool) {
		for _, r := range s {
			for vn := r.First; vn <= r.Last; vn++ {
				if !yield(vn) {
					return
				}
			}
		}
	}
}

// Equal reports whether both sets hold the same Virtual Nodes.
func (s Set) Equal(o Set) bool { return slices.Equal(s, o) }

// Contains reports whether every Virtual Node of o is in s.
func (s Set) Contains(o Set) bool { return o.Minus(s).Empty() }

// Intersects reports whether some Virtual Node is in both sets.
func (s Set) Intersects(o Set) bool {
	for i, j := 0, 0; i < len(s) && j < len(o); {
		switch {
		case s[i].Last < o[j].First:
			i++
		case o[j].Last < s[i].First:
			j++
		default:
			return true
		}
	}
	return false
}

// Union returns the Virtual Nodes that are in either set.
func (s Set) Union(o Set) Set {
	if len(s) == 0 {
		return slices.Clone(o)
	}
	if len(o) == 0 {
		return slices.Clone(s)
	}
	b := setBuilder{set: make(Set, 0, len(s)+len(o))}
	for i, j := 0, 0; i < len(s) || j < len(o); {
		if j == len(o) || (i < len(s) && s[i].First <= o[j].First) {
			b.add(s[i])
			i++
		} else {
			b.add(o[j])
			j++
		}
	}
	return b.set
}

// Intersect returns the Virtual Nodes that are in both sets.
func (s Set) Intersect(o Set) Set {
	var b setBuilder
	for i, j := 0, 0; i < len(s) && j < len(o); {
		first, last := max(s[i].First, o[j].First), min(s[i].Last, o[j].Last)
		if first <= last {
			b.add(Range{first, last})
		}
		if s[i].Last < o[j].Last {
			i++
		} else {
			j++
		}
	}
	return b.set
}

// Minus returns the Virtual Nodes of s that are not in o.
func (s Set) Minus(o Set) Set {
	var b setBuilder
	j := 0
	for _, r := range s {
		for j < len(o) && o[j].Last < r.First {
			j++
		}
		first := r.First
		for k := j; k < len(o) && o[k].First <= r.Last; k++ {
			if first < o[k].First {
				b.add(Range{first, o[k].First - 1})
			}
			first = o[k].Last + 1
		}
		if first <= r.Last {
			b.add(Range{first, r.Last})
		}
	}
	return b.set
}

func normalize(ranges []Range) Set {
	slices.SortFunc(ranges, func(a, b Range) int { return int(a.First) - int(b.First) })
	var b setBuilder
	for _, r := range ranges {
		b.add(r)
	}
	return b.set
}

// A setBuilder joins ranges that are added in the order of their First.
type setBuilder struct {
	set Set
}

func (b *setBuilder) add(r Range) {
	if n := len(b.set); n > 0 && r.First <= b.set[n-1].Last+1 {
		b.set[n-1].Last = max(b.set[n-1].Last, r.Last)
		return
	}
	b.set = append(b.set, r)
}
