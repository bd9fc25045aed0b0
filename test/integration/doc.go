// Package integration tests Drover as it is deployed: on a real control plane, with the manifests applied as they are, and
// with the real programs running under the credentials of the manifests' own ServiceAccounts. What a story needs and a role
// does not grant fails the story; what a role grants and no story needs fails TestRBAC.
//
// One control plane serves the whole package; each test starts the programs that it needs and has the cluster for itself.
// `go test ./test/integration/...` builds the programs; `make control-plane` has to have built the control plane before.
// Start reading at suite_test.go and fleet_test.go; the stories are in story_test.go.
package integration
