// Package admission is Kueue's admission check of the controller fleet.lucy.sh/available-capacity: a workload that has
// reserved quota is admitted when the fleet can carry it.
//
// One pass looks at every workload that waits for the check, in the order of the queue, and decides each against the free
// room of Ready nodes and what AvailableCapacity says, less what was promised before. Whatever is admitted is a promise in
// the ledger until its nodes are on their way, and holds its room until its pods have their nodes, so that many workloads do
// not pass on the same nodes.
//
// The package never admits by itself (Kueue does, when all checks are Ready), never launches nodes, and never writes to a
// workload that is evicted, finished or without quota. A hint is no reservation: a promise binds this check only.
//
// Decide and Ledger are pure; start reading at Decide. Pass reads the cluster, asks them, and writes their answers.
package admission
