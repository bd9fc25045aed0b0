package sharding

import "slices"

// A cell is a run of Virtual Nodes with which everybody has to do the same: every set in every slice holds all of them or
// none. What a Step decides, it decides by cells, of which there are a few however large V is.
type cell struct {
	Range
	holder   int // the seat that may still work on it
	promised int // the seat that it is incoming at
	free     int // the seat that has released it and still lists it
	target   int // the seat that should have it
}

// divide cuts the Virtual Nodes into cells, of which nothing is known yet.
func divide(v int, observed []Slice) []cell {
	edges := []VirtualNode{0}
	cut := func(vns Set) {
		for _, r := range vns {
			edges = append(edges, r.First, r.Last+1)
		}
	}
	for i := range observed {
		s := &observed[i]
		cut(s.Owned)
		for _, list := range [][]Order{s.Incoming, s.Draining, s.Status.Warm} {
			for _, o := range list {
				cut(o.VNs)
			}
		}
		for _, r := range s.Status.Released {
			cut(r.VNs)
		}
	}
	slices.Sort(edges)
	edges = slices.Compact(edges)
	end := VirtualNode(v)
	cells := make([]cell, 0, len(edges))
	for i, first := range edges {
		if first >= end {
			break
		}
		last := end - 1
		if i+1 < len(edges) {
			last = min(last, edges[i+1]-1)
		}
		cells = append(cells, cell{Range: Range{first, last}, holder: nobody, promised: nobody, free: nobody, target: nobody})
	}
	return cells
}

// each calls f for the cells of vns. Virtual Nodes that there are not are left out.
func (p *pass) each(vns Set, f func(*cell)) {
	for _, r := range vns {
		i, _ := slices.BinarySearchFunc(p.cells, r.First, func(c cell, vn VirtualNode) int { return int(c.Last) - int(vn) })
		for ; i < len(p.cells) && p.cells[i].First <= r.Last; i++ {
			f(&p.cells[i])
		}
	}
}

// aim sets the targets, and cuts cells in two where the target changes within. next is ascending, and has all Virtual Nodes.
func (p *pass) aim(next []run) {
	cells := make([]cell, 0, len(p.cells))
	for _, c := range p.cells {
		for next[0].Last < c.First {
			next = next[1:]
		}
		for _, r := range next {
			if r.First > c.Last {
				break
			}
			part := c
			part.Range = Range{max(c.First, r.First), min(c.Last, r.Last)}
			if i, ok := p.index[r.id]; ok {
				part.target = i
			}
			cells = append(cells, part)
		}
	}
	p.cells = cells
}
