package watchgroup

import (
	"context"
	"sync"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	"github.com/drover-sh/drover/sharding"
)

// Each resource has a watch of its own, and one may be behind another: an object is seen to take part while the watch of its
// children has not shown some that are older. So the children are listed once more before the object is labelled. A list
// counts for all objects that had been shown before it began, in whichever resource: when many take part at once, as at the
// start, there is one list for all of a namespace.

// maxOwners bounds how many places are remembered where children have been listed. Namespaces come and go, and what is
// forgotten of one costs another list.
const maxOwners = 1024

// within is where children are listed.
type within struct {
	children  schema.GroupResource
	namespace string
}

// An ownersOf is what a list has told of unlabelled objects.
type ownersOf struct {
	mu sync.Mutex
	// shown is the version up to which the owning resource had been shown when the list began, "" if there was none.
	shown string
	// hidden are the owners of objects that the list had and no watch had shown when it ended.
	hidden map[types.UID]bool
}

// shows notes that an object of the feed has been shown.
func (b *Backfill) shows(f *feed, o any) {
	m, err := meta.Accessor(o)
	if err != nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if f.shown == "" || newer(m.GetResourceVersion(), f.shown) {
		f.shown = m.GetResourceVersion()
	}
}

// newer compares versions of one resource. One that cannot be read is newer than any.
func newer(a, b string) bool {
	c, err := resourceversion.CompareResourceVersion(a, b)
	return err != nil || c > 0
}

// hidesChildren reports whether an object of the feed owns unlabelled ones that no watch has shown yet. Its own resource's
// watch has shown all that is older than the object.
func (b *Backfill) hidesChildren(ctx context.Context, f *feed, own schema.GroupResource, siblings map[schema.GroupResource]bool,
	object *metav1.PartialObjectMetadata) (bool, error) {
	for gr := range siblings {
		if gr == own {
			continue
		}
		children := b.feed(gr)
		if children == nil {
			return true, nil // it is about to be listed as a whole
		}
		if object.Namespace != "" && children.mapping.Scope.Name() == meta.RESTScopeNameRoot {
			continue // what has a namespace owns nothing that has none, and there is no such list
		}
		hidden, err := b.hidesIn(ctx, f, children, within{gr, object.Namespace}, object)
		if hidden || err != nil {
			return hidden, err
		}
	}
	return false, nil
}

func (b *Backfill) hidesIn(ctx context.Context, f, children *feed, where within, object *metav1.PartialObjectMetadata) (bool, error) {
	l, _ := b.ownersIn(f, where)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.shown != "" && !newer(object.ResourceVersion, l.shown) && !l.hidden[object.UID] {
		return false, nil
	}
	_, shown := b.ownersIn(f, where)
	hidden := make(map[types.UID]bool)
	unlabelled := metav1.ListOptions{LabelSelector: "!" + sharding.LabelVirtualNode}
	if err := b.pages(ctx, children.mapping, where.namespace, unlabelled, func(o *metav1.PartialObjectMetadata) error {
		ref := metav1.GetControllerOfNoCopy(o)
		if ref == nil {
			return nil
		}
		known, err := children.informer.GetIndexer().ByIndex(byUID, string(o.UID))
		if err == nil && len(known) == 0 {
			hidden[ref.UID] = true
		}
		return err
	}); err != nil {
		return false, err
	}
	l.shown, l.hidden = shown, hidden
	return hidden[object.UID], nil
}

// ownersIn returns what lists have told of the children of the feed's objects, and up to which version those have been shown.
func (b *Backfill) ownersIn(f *feed, where within) (_ *ownersOf, shown string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if f.owners == nil {
		f.owners = make(map[within]*ownersOf)
	}
	l := f.owners[where]
	if l == nil {
		if len(f.owners) >= maxOwners {
			clear(f.owners)
		}
		l = &ownersOf{}
		f.owners[where] = l
	}
	return l, f.shown
}

// waitsForChildren reports whether the object owns unlabelled ones that have to be labelled first, and has them looked at.
// Each brings the object back when it is labelled. What takes no part is never labelled, and nobody waits for it; nor for
// what is above the object as well: in a circle of owners all would wait for each other.
func (b *Backfill) waitsForChildren(ctx context.Context, all map[schema.GroupResource]scheme, s scheme,
	object *metav1.PartialObjectMetadata) (bool, error) {
	waits, above := false, map[types.UID]bool(nil)
	for gr, children := range b.unlabelled(byOwner, string(object.UID), s.siblings) {
		f := b.feed(gr)
		if f == nil {
			continue // its resource has just gone
		}
		for _, o := range children {
			child, ok := o.(*metav1.PartialObjectMetadata)
			if above == nil {
				above = b.above(object)
			}
			if !ok || above[child.UID] {
				continue
			}
			if !waits {
				var err error
				if _, waits, err = b.want(ctx, all, all[gr], f.mapping, child); err != nil {
					return false, err
				}
			}
			if waits {
				b.queue.Add(itemOf(gr, child))
			}
		}
	}
	return waits, nil
}

// above returns the object itself and its unlabelled owners, their owners, and so on.
func (b *Backfill) above(object *metav1.PartialObjectMetadata) map[types.UID]bool {
	above := map[types.UID]bool{object.UID: true}
	for ref := metav1.GetControllerOfNoCopy(object); ref != nil && !above[ref.UID]; {
		above[ref.UID] = true
		uid := string(ref.UID)
		ref = nil
		for _, owners := range b.unlabelled(byUID, uid, nil) {
			if m, err := meta.Accessor(owners[0]); err == nil {
				ref = metav1.GetControllerOfNoCopy(m)
			}
		}
	}
	return above
}
