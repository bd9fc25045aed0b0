// Package process runs the programs of a control plane and of a playground as real processes: each in a process group
// of its own, with its output in a file, and none left behind.
//
// A Group owns a directory. Every running process has a file in it that names its pid, so that whoever finds the
// directory can end the processes (End), and a small watchdog outside of this process does so when this process dies
// without having cleaned up, even from SIGKILL: it holds the reading end of a pipe, and the end of this process closes
// that pipe.
//
// The package never signals a pid that it has not started, and never waits for a fixed time: a process is ready when
// its health check says so.
//
// Start reading at Group.Start.
package process
