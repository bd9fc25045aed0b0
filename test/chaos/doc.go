// Package chaos runs the sample controller of examples/parentchild sharded, on a real control plane, with real coordinator
// and member processes, and makes them fail: kill -9, stops longer than a lease, partitions, rolling restarts, coordinators
// that die, an API server that restarts. Meanwhile Parents are created, changed and deleted. What the members recorded and
// what landed in etcd make one history, in which sharding/history looks for violations of I1 to I7.
//
// DROVER_CHAOS is how long the faults go on (default two minutes), DROVER_CHAOS_PARENTS how many Parents there are at the
// beginning, DROVER_CHAOS_SEED what the faults are drawn from. A failure prints the seed and keeps everything in a folder.
//
// Start reading at chaos_test.go.
package chaos
