package sharding

import (
	"errors"
	"fmt"
	"maps"
	"slices"
)

// A Resource is a kind that the controller reads or writes, named as the caller likes, usually "group/resource".
type Resource string

// A Version is a resourceVersion. Versions compare within one resource only, since resources may live in different
// stores; "" is no version.
type Version string

// A CompareFunc compares two Versions of one resource: negative, zero or positive, or an error if either is malformed.
// It is apimachinery's resourceversion.CompareResourceVersion with its strings typed; the core does not import it.
type CompareFunc func(a, b Version) (int, error)

// Versions holds a Version per resource. Of a resource that is missing nothing is known.
type Versions map[Resource]Version

// Dependencies tell for each resource of the group which resources are read while an object of it is processed
// (section 5.5.2): For(Parent).Owns(Child) makes Parent depend on Child. Every resource of the group is a key.
type Dependencies map[Resource][]Resource

// Resources returns all resources of the group in ascending order.
func (d Dependencies) Resources() []Resource { return slices.Sorted(maps.Keys(d)) }

// Closure returns r and everything that r depends on, directly or not, in ascending order. Cycles are allowed.
func (d Dependencies) Closure(r Resource) []Resource {
	seen := map[Resource]bool{r: true}
	todo := []Resource{r}
	for len(todo) > 0 {
		next := todo[0]
		todo = todo[1:]
		for _, dep := range d[next] {
			if !seen[dep] {
				seen[dep] = true
				todo = append(todo, dep)
			}
		}
	}
	return slices.Sorted(maps.Keys(seen))
}

// Validate checks that everything depended on is a resource of the group itself.
func (d Dependencies) Validate() error {
	for _, r := range d.Resources() {
		for _, dep := range d[r] {
			if _, ok := d[dep]; !ok {
				return fmt.Errorf("dependencies: %q depends on %q, which is not a resource of the group", r, dep)
			}
		}
	}
	return nil
}

// A Barrier blocks the reads of a member that touch a Virtual Node in motion, until the member's cache is known to hold
// what the Virtual Node's owner must have seen (section 5.5, Algorithm 3). The paper blocks a resource as a whole; this
// barrier blocks a resource for the Virtual Nodes that move and for no other.
//
// Per resource it holds the paper's pendingRVs, here epochs, each with the Virtual Nodes that it still concerns and
// with what lifts it: a consistent list that began after the epoch was announced, or, if the previous owner told its
// last versions, a cache that has reached them.
type Barrier struct {
	compare  CompareFunc
	closures map[Resource][]Resource
	pending  map[Resource][]pending
	reached  map[Resource][]reached
	listed   map[Resource][]listed
}

// pending blocks vns until a list of at least epoch, or, if need is set, until the cache has reached need.
type pending struct {
	epoch Epoch
	vns   Set
	need  Version
}

// reached is what the cache is known to hold: for vns all changes up to version.
type reached struct {
	vns     Set
	version Version
}

// listed remembers that vns were listed at epoch: a resource that hears of the epoch only now must not block them
// again.
type listed struct {
	epoch Epoch
	vns   Set
}

// NewBarrier returns a barrier with nothing pending. deps must be valid.
func NewBarrier(deps Dependencies, compare CompareFunc) *Barrier {
	b := &Barrier{compare: compare, closures: make(map[Resource][]Resource)}
	for _, r := range deps.Resources() {
		b.closures[r] = deps.Closure(r)
	}
	b.Reset()
	return b
}

// Reset forgets all that is pending and all that the cache is known to hold.
func (b *Barrier) Reset() {
	b.pending = make(map[Resource][]pending)
	b.reached = make(map[Resource][]reached)
	b.listed = make(map[Resource][]listed)
}

// Announce tells that the assignment of vns has changed at epoch, as heard by resource r (section 5.5.1). Reads of r
// and of everything that r depends on block at once (section 5.5.2), each until its own resource is complete. If
// known is nil the previous owner told nothing, and only a list that begins after this call lifts the block. Otherwise
// the block lifts as soon as the cache has reached those versions, which may be at once.
//
// A resource that the previous owner has not told of, because its program does not know it yet, is listed. So is one
// whose version cannot be compared, and the error names it: the block stands in any case.
func (b *Barrier) Announce(r Resource, epoch Epoch, vns Set, known *Versions) error {
	var errs []error
	for _, dep := range b.closures[r] {
		p := pending{epoch: epoch, vns: vns}
		if known != nil && (*known)[dep] != "" {
			p.need = (*known)[dep]
			var err error
			if p.vns, err = b.below(dep, vns, p.need); err != nil {
				errs = append(errs, err)
				p.need, p.vns = "", vns
			}
		}
		p.vns = p.vns.Minus(b.settled(dep, epoch))
		if !p.vns.Empty() {
			b.pending[dep] = append(b.pending[dep], p)
		}
	}
	return errors.Join(errs...)
}

// settled returns the Virtual Nodes for which this epoch needs no new entry: the resources of a closure hear of one
// change one after the other, so it may be pending already, or over.
func (b *Barrier) settled(r Resource, epoch Epoch) Set {
	var vns Set
	for _, p := range b.pending[r] {
		if p.epoch == epoch {
			vns = vns.Union(p.vns)
		}
	}
	for _, l := range b.listed[r] {
		if l.epoch >= epoch {
			vns = vns.Union(l.vns)
		}
	}
	return vns
}

// below returns the part of vns whose cache for r is not known to hold everything up to need.
func (b *Barrier) below(r Resource, vns Set, need Version) (Set, error) {
	if err := b.check(r, need); err != nil {
		return nil, err
	}
	for _, have := range b.reached[r] {
		c, err := b.compare(have.version, need)
		if err != nil {
			return nil, fmt.Errorf("barrier of %s: compare version %q with %q: %w", r, have.version, need, err)
		}
		if c >= 0 {
			vns = vns.Minus(have.vns)
		}
	}
	return vns, nil
}

// check returns an error for a version that compares with none.
func (b *Barrier) check(r Resource, version Version) error {
	if _, err := b.compare(version, version); err != nil {
		return fmt.Errorf("barrier of %s: version %q: %w", r, version, err)
	}
	return nil
}

// Listed tells that the cache of r now holds vns as of version, from a list that was consistent and that began when
// epoch had been announced. Pending epochs up to that one end for vns; smaller ones as well, since what a failed list
// or watch left behind must not block for ever (section 5.5.3). A later epoch goes on blocking. Where the previous
// owner told its versions, the list's version decides and not the epoch.
//
// A version that cannot be compared is an error, and the list counts for nothing.
func (b *Barrier) Listed(r Resource, epoch Epoch, vns Set, version Version) error {
	if err := b.check(r, version); err != nil {
		return err
	}
	for i := range b.pending[r] {
		if p := &b.pending[r][i]; p.need == "" && p.epoch <= epoch {
			p.vns = p.vns.Minus(vns)
		}
	}
	b.forgetListed(r, vns)
	b.listed[r] = append(b.listed[r], listed{epoch, vns})
	b.setReached(r, vns, version)
	return b.lift(r)
}

func (b *Barrier) forgetListed(r Resource, vns Set) {
	kept := b.listed[r][:0:0]
	for _, l := range b.listed[r] {
		if l.vns = l.vns.Minus(vns); !l.vns.Empty() {
			kept = append(kept, l)
		}
	}
	b.listed[r] = kept
}

// Progressed tells that the watch behind the cache of r has delivered, for vns, all changes up to version: by an
// event or a bookmark. Virtual Nodes of which nothing is cached are left out by the caller.
func (b *Barrier) Progressed(r Resource, vns Set, version Version) error {
	if err := b.check(r, version); err != nil {
		return err
	}
	b.setReached(r, vns, version)
	return b.lift(r)
}

// Dropped tells that vns left the cache of r, or that its watch ended in a way that leaves unknown what it missed
// before a new list (410 Gone). What is pending stays pending.
func (b *Barrier) Dropped(r Resource, vns Set) {
	b.forgetListed(r, vns)
	b.setReached(r, vns, "")
}

func (b *Barrier) setReached(r Resource, vns Set, version Version) {
	kept := b.reached[r][:0:0]
	for _, have := range b.reached[r] {
		if have.version == version {
			vns = vns.Union(have.vns)
			continue
		}
		if have.vns = have.vns.Minus(vns); !have.vns.Empty() {
			kept = append(kept, have)
		}
	}
	if version != "" && !vns.Empty() {
		kept = append(kept, reached{vns, version})
	}
	b.reached[r] = kept
}

// lift ends what the cache has reached.
func (b *Barrier) lift(r Resource) error {
	kept := b.pending[r][:0:0]
	for _, p := range b.pending[r] {
		if p.need != "" {
			var err error
			if p.vns, err = b.below(r, p.vns, p.need); err != nil {
				return err
			}
		}
		if !p.vns.Empty() {
			kept = append(kept, p)
		}
	}
	b.pending[r] = kept
	return nil
}

// Withdrawn tells that vns are not the member's any more: nothing of them is pending, and reads of them are no longer
// the barrier's to decide.
func (b *Barrier) Withdrawn(vns Set) {
	for r := range b.pending {
		for i := range b.pending[r] {
			b.pending[r][i].vns = b.pending[r][i].vns.Minus(vns)
		}
		b.pending[r] = slices.DeleteFunc(b.pending[r], func(p pending) bool { return p.vns.Empty() })
	}
}

// Blocks reports whether a read of an object of r in vn has to wait.
func (b *Barrier) Blocks(r Resource, vn VirtualNode) bool {
	for _, p := range b.pending[r] {
		if p.vns.Has(vn) {
			return true
		}
	}
	return false
}

// BlocksReconcile reports whether the processing of an object of r in vn has to wait, because a read of r or of
// something that r depends on would.
func (b *Barrier) BlocksReconcile(r Resource, vn VirtualNode) bool {
	return slices.ContainsFunc(b.closures[r], func(dep Resource) bool { return b.Blocks(dep, vn) })
}

// Pending returns the epochs that block r, ascending: the paper's pendingRVs.
func (b *Barrier) Pending(r Resource) []Epoch {
	var epochs []Epoch
	for _, p := range b.pending[r] {
		epochs = append(epochs, p.epoch)
	}
	slices.Sort(epochs)
	return slices.Compact(epochs)
}

// Awaiting returns the Virtual Nodes for which r is blocked.
func (b *Barrier) Awaiting(r Resource) Set {
	var vns Set
	for _, p := range b.pending[r] {
		vns = vns.Union(p.vns)
	}
	return vns
}

// unlisted returns, by epoch, the Virtual Nodes for which only a list of r that begins at that epoch or later will do.
func (b *Barrier) unlisted(r Resource) map[Epoch]Set {
	vns := make(map[Epoch]Set)
	for _, p := range b.pending[r] {
		if p.need == "" {
			vns[p.epoch] = vns[p.epoch].Union(p.vns)
		}
	}
	return vns
}

// Cached returns the Virtual Nodes of r that the cache is known to hold.
func (b *Barrier) Cached(r Resource) Set {
	var vns Set
	for _, have := range b.reached[r] {
		vns = vns.Union(have.vns)
	}
	return vns
}
