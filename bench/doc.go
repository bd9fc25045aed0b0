// Package bench measures what Drover costs. It holds benchmarks only: plain `go test` compiles them and runs nothing.
//
//	go test -run '^$' -bench Plugin -benchtime 1x ./bench/...
//
// BenchmarkPlugin runs the real scheduler on a real API server, with the plugin CapacityRequest on and off in short turns, and
// reports by how much the plugin slows the scheduling loop down. Start reading there. BenchmarkAffinity does the same for the
// plugin VNAffinity and pods that it has nothing to do with, which go through whole scheduling cycles.
package bench
