// Package capacity is the pure core of fleet capacity: what a pod needs of a node (Profile), whether a new node could
// help a pod that failed to schedule (Classify), how a cluster's demand adds up to a few rows (Rollup), and which machines
// to launch and to give back (Plan).
//
// The package decides and never acts. It has no client, no clock, no goroutine and no randomness: time and facts come in
// as parameters, decisions go out as values, and the same input gives the same output. Its whole behaviour is therefore
// driven by tables, properties and scripted transcripts (testdata/).
//
// Start reading at Profile, then Need, then Plan.
//
// Source: "Fleet-Scale Kubernetes" sections 6 to 9; the comments name the section each rule comes from.
package capacity
