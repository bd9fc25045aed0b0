// Package schedulers tests several active schedulers as processes: real replicas of cmd/scheduler, the real coordinator,
// and an API server whose nodes kwok keeps ready. What counts is what the API server has in the end: no node with more on
// it than fits, and no pod bound twice or forgotten.
//
// DROVER_SCHEDULERS_NODES and DROVER_SCHEDULERS_PODS set the size, which is small by default; the full one is 1000 and
// 10000.
package schedulers
