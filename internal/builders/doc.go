// Package builders makes the Kubernetes objects that tests need, one short sentence each:
//
//	builders.Pod("web", "a").Requests("cpu", "1").Owner("ReplicaSet", "a").Obj()
//
// There is one set for the whole project, so that a test reads the same in every package. A builder starts from the
// smallest valid object; Obj returns a deep copy, so that one builder can make several objects. A quantity that does
// not parse panics: it is a mistake in the test.
//
// Production code never imports this package. Start reading at Pod.
package builders
