// Package history checks what happened against the invariants of sharding.
//
// A history is a list of Records in the order of time: what members did and read, what landed at the API server, who
// owned which Virtual Nodes when, and which faults there were. It may come from the simulation of package sharding,
// or from a real cluster under chaos, merged from the members' own logs, the API server's audit log and a watch of
// the slices; Write and Load keep it as JSON lines. Check goes through it once and returns every violation. It knows
// nothing of how the members and the coordinator work, so that it cannot share an error with them.
//
//	I1  no two members' reconciles of one object overlap, and no write lands from a member that is not the owner
//	I2  a reconcile sees at least all that the previous owner wrote
//	I3  no object that exists is reported as not found
//	I4  every object with something to do is reconciled within a bound after the last change of the members
//	I5  no object is written because the members change
//	I6  what a member keeps is neither listed nor delivered again
//	I7  when it is quiet, each cache holds exactly what its member owns
//
// Start reading at Kind.
package history
