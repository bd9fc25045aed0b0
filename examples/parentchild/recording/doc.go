// Package recording keeps what the processes of a sharded controller did, each in a file of its own, and makes one history
// of it for sharding/history to check.
//
// A Recorder appends JSON lines to a file, one write(2) each, so that a process that is killed loses at most the line it
// was writing. It takes the records of sharded.Options.Record, and what its Transport sees of the process's writes:
// when each was sent, for which session, and what the API server answered.
//
// What landed, and in which order, is told by whoever watches the store, as Landings. Merge puts both together: revisions
// of the store order the landings, CLOCK_BOOTTIME, which all processes of one machine share, orders the rest, and each
// landing stands at the earliest moment that is possible for it. So nothing is placed before its cause.
//
// The package never writes to an API server. Start reading at Recorder, then Merge.
package recording
