// Package playground runs the whole of Drover as real, separate processes on loopback, and plays stories on it: a
// training job that shares a rack, a stock-out that heals, a withdrawal, and so on. Stories that need Kueue get the real
// Kueue manager, another process; those about sharding run the sample controller and its coordinator. The same stories
// are what `make demo` shows, what `playground run` plays one by one, and what integration tests call.
//
// A Playground is the running whole. A Story is a scenario with its own offerings; Playground.Run plays one and returns
// a Result, whose steps are conditions that were awaited on watches, and in which rules that have to hold all the time
// are checked on every change, too. A Presenter shows what happens, for people or as JSON.
//
// The package contains no scheduling, planning or roll-up logic of its own: it starts programs, creates objects, and
// looks. Start reading at Start, then Playground.Run, then a story, stories_training.go.
package playground
