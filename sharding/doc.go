// Package sharding is the pure core of controller scaling: it spreads the objects of a controller over many replicas
// ("members" of a "group") so that each object has one owner at any time and no reconcile sees less than what the
// owner before has written. It follows "Cache-Consistent Dynamic Load Balancing for Kubernetes Controllers"; comments
// and tests name the section of that paper that they stem from, and say where and why we depart from it.
//
// The package decides and never acts. It has no client, no clock, no goroutine and no randomness. Facts and readings of
// a monotonic clock go in; writes, lists and verdicts come out. What talks to an API server is controllers/watchgroup
// for the coordinator and controllers/sharded for the members.
//
// # From an object to its owner
//
// An object has a hash key (HashKey). The first level of the two-level hash maps the key to one of V Virtual Nodes
// (VirtualNodeOf); it never changes, so the Virtual Node stands on the object as a label that is written once. The
// second level maps Virtual Nodes to members (Assignment); when members come and go only this level changes, and no
// object is written. Balanced is the default, ConsistentHash the paper's ring. Buckets keep label selectors short
// when V is large. HashRanges are another first level, which the API server computes by itself: then nothing stands on
// the object.
//
// # How ownership moves
//
// Each member has a Slice: an object in which the Coordinator says what the member owns, what it should prefetch and
// what it should give up, and in whose status the member answers. A Virtual Node goes from A to B in three epochs:
//
//	epoch e    B: Incoming   B lists and watches; A goes on working. B says: Warm.
//	epoch e+1  A: Draining   A starts nothing new, finishes, and says: Released, and the versions it wrote last.
//	epoch e+2  B: Owned      B starts as soon as its cache has reached those versions.
//
// No list stands between A's stop and B's start. If A has died, nobody can tell what it wrote last: its slice is
// emptied, and B, granted the Virtual Node with nothing known, lists before it starts.
//
// The Coordinator keeps no state. Each Step looks at all slices and at the members, and returns the next writes; it may
// die after any of them, and two of them may be at work at once (see Coordinator for why that does no harm).
//
// # What keeps two members apart
//
// Two rules, and everything else follows. A Virtual Node is granted only when no slice says that somebody may still be
// working on it. And a slice speaks to one session of its member: a member that missed its lease's deadline (Fence) has
// stopped by itself before its lease ran out, and comes back under a new session, for which nothing that it once had
// counts.
//
// One thing no client can rule out: a process that is stopped between asking MayWrite and handing the request to the
// kernel, and sends it when it wakes long after. Optimistic concurrency refuses such a write if the object has changed
// meanwhile; an admission policy that compares the writer's session with the owner's refuses it always.
//
// # What keeps reads true
//
// The Barrier (section 5.5) blocks reads that touch a Virtual Node in motion, over the closure of the controller's
// dependencies, until the cache holds what the previous owner wrote. Retained Virtual Nodes are never blocked.
//
// # Where to start
//
// Read Slice, then Coordinator.Step, then Member. The transcripts in testdata tell the same as stories.
// simulation_test.go plays millions of steps of members, coordinators, faults and objects on these machines, and
// package sharding/history checks what it recorded against the invariants I1 to I7.
package sharding
