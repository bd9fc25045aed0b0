// Package watchgroup keeps WatchGroups: it decides, by package sharding, which member has which Virtual Nodes, and it puts
// the number of its Virtual Node on every object that takes part.
//
// Reconciler is the coordinator. One process leads; it keeps nothing that it could not lose. It reads a group's slices,
// Leases and Pods, asks sharding.Coordinator for the next writes, and makes exactly these. Labeler is the mutating
// webhook, which every replica serves. Backfill labels what the webhook could not: objects that are older, that were
// created while it was down, or whose names the API server generates. Guards keeps the webhook's and the policies' rules at
// the resources that the groups name.
//
// No object is ever written because members come or go.
//
// Start reading at Reconciler, then membership.go, then label.go.
package watchgroup
