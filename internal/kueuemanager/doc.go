// Package kueuemanager runs the real Kueue manager, as a process of its own, against a control plane of
// internal/controlplane. The playground and the integration tests use it: what Drover does for Kueue is shown against
// Kueue itself, not against a copy of its rules. It never runs Kueue in-process and changes nothing outside the directory
// it is given. Start reading at Start.
package kueuemanager
