// Package house keeps the rules of the repository itself: which folder may import which, that another project can import
// our packages with a plain `go get`, and that go.mod carries no replace. It has tests only; start at arrows_test.go.
package house
