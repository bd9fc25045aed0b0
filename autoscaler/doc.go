// Package autoscaler is the reference infrastructure autoscaler: it receives what each cluster needs in total, plans
// for all clusters at once, launches and gives back machines through a provider, and tells each cluster what is coming.
//
// Engine is the whole behaviour as a state machine: roll-ups, reports, provider events and surveys go in, with the time
// of each; records to store, calls to make and feeds to publish come out (Ready). It has no I/O, no clock and no
// goroutine. Runner is the thin shell that drives it, and Server is the gRPC face. What keeps a crash harmless is the
// order in which Runner works off a Ready: records are stored before a roll-up is acknowledged and before a provider is
// called, and calls are idempotent and repeated until the provider confirms.
//
// The package never reads pods or nodes, never evicts, and never decides which node goes: an instruction names
// candidates and a count, and the cluster's operator chooses.
//
// Start reading at Engine, then pass.go, then Runner.
package autoscaler
