package sharded

import "github.com/drover-sh/drover/sharding"

// Why a member may not do something now. Errors of reads and writes wrap them.
var (
	// ErrNotOwned means that the object's Virtual Node is not this member's: the object is another member's to work on.
	ErrNotOwned = sharding.ErrNotOwned
	// ErrFenced means that this member does not hold its lease, so that another may be at work in its place. The session
	// of the reconcile has ended, and its context is done.
	ErrFenced = sharding.ErrFenced
	// ErrBlocked means that the Virtual Node has just become this member's, and its cache is not complete yet.
	ErrBlocked = sharding.ErrBlocked
)
