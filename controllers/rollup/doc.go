// Package rollup is the operator that joins one cluster to the infrastructure autoscaler (section 7).
//
// Upwards it keeps the cluster's demand added up in a capacity.Rollup that informers feed, sends the few rows on change and
// on a period, and marks each CapacityRequest that a send carried as Acknowledged, once. Downwards it subscribes to the
// autoscaler's feed and makes the cluster follow it: UpcomingNodes through their life, AvailableCapacity hints, and
// reclaim, for which it chooses the nodes whose loss disturbs least and drains them by the Eviction API.
//
// Both directions are level-triggered full replacements. The operator holds no queue that a slow or absent autoscaler could
// grow: what is not sent yet is the difference between the cluster and what was said last, bounded by the cluster's size.
// What has to outlive the process stands in objects: a machine's id in a Node's label, a drain in its taint.
//
// The package never decides how much capacity there should be, never deletes a Node and never talks to a provider. It never
// lists from the API server on a timer; the one live read is the check that a node is really empty before it is given up.
//
// Start reading at Setup, then sender (upwards), feed and machineReconciler (downwards), chooser and drainReconciler
// (reclaim). Which nodes go is decided by the pure function Choose.
package rollup
