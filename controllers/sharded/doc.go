// Package sharded lets an ordinary controller-runtime controller run on many replicas at once, each reconciling its own
// share of the objects, with one owner for every object at any time and no reconcile that sees less than the owner before
// has written. It is the member's side of package sharding: that package decides, this one lists, watches, writes and
// waits.
//
// A controller adopts it in five lines: the import, New, its NewCache and NewClient in ctrl.Options, and
// ControllerManagedBy in place of the builder's. Kinds that are not in the WatchGroup go through the stock cache and
// client untouched.
//
// What changes for a reconciler:
//
//   - It is called for objects whose Virtual Node this member owns, and for no other.
//   - Get answers from the cache for what the member owns. What the cache does not show is looked up at the API server
//     before it is called not found, so that no object is ever taken for missing because another member has it.
//   - List returns what the member owns, and waits while part of that is still on its way in.
//   - A write is refused with ErrFenced or ErrNotOwned once the member may not write any more. Writes need the context
//     that Reconcile was called with.
//
// A controller whose objects are not to be labelled divides keys instead, by ByKey; Keys says what then differs.
//
// The package never assigns Virtual Nodes (controllers/watchgroup does), never writes the label of an object, and
// never runs a controller's logic for deleted objects because an object went to another member.
//
// Whether an object's Virtual Node stands on it as a label, or is a range of the API server's own hash, is a mapping's
// business, and makes no other difference.
//
// Start reading at Group, then member, which drives sharding.Member, and stream, which fills the caches.
package sharded
