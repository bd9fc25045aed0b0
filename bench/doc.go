// Package bench measures what Drover costs. It holds benchmarks only: plain `go test` compiles them and runs nothing.
//
//	go test -run '^$' -bench Plugin -benchtime 1x ./bench/...
//
// BenchmarkPlugin runs the real scheduler on a real API server, with the plugin CapacityRequest on and off in short turns, and
// reports by how much the plugin slows the scheduling loop down. Start reading there.
// BenchmarkAffinity does the same for the
// plugin VNAffinity and pods that it has nothing to do with, which go through whole scheduling cycles.
//
// The others measure sharded controllers, on real API servers, with the real coordinator and the sample controller of
// examples/parentchild, each member a process:
//
//   - BenchmarkHandoff: how long a moving object stands still, and how long a whole reassignment takes compared with a list of
//     what moves, at V = 1,000, 10,000 and 100,000;
//   - BenchmarkMembers: how much more nine members do than one, each with the same budget of requests;
//   - BenchmarkFootprint: memory and watch traffic of a member of one, three and nine;
//   - BenchmarkLeaveAndCrash: for how long an object stands still when its owner leaves, crashes, or is seen to end.
//
// Each takes a minute or two, and says in its comment what its figures mean. They want a machine that does nothing else.
// sharding_rig_test.go is what they share; sharding_member_test.go is the member.
//
// In the environment, DROVER_BENCH_OBJECTS, _ROUNDS, _SECONDS and _BUDGET change their size, and DROVER_BENCH_PROFILES names a
// folder for CPU profiles of the coordinators and of the members that end in good order.
package bench
