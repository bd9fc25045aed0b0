package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A file that the configuration names and that is not there stops the coordinator with the configuration's name, the field
// and the value.
func TestAMissingFileIsNamedAtStart(t *testing.T) {
	dir := t.TempDir()
	config, kubeconfig := filepath.Join(dir, "coordinator.yaml"), filepath.Join(dir, "kubeconfig")
	for path, content := range map[string]string{config: `
apiVersion: config.drover.sh/v1alpha1
kind: CoordinatorConfiguration
webhook: {certFile: /nowhere/tls.crt, keyFile: /nowhere/tls.key}
`, kubeconfig: `
apiVersion: v1
kind: Config
clusters: [{name: a, cluster: {server: "http://127.0.0.1:1"}}]
contexts: [{name: a, context: {cluster: a}}]
current-context: a
`} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cmd := command()
	cmd.SetArgs([]string{"--config", config, "--kubeconfig", kubeconfig})
	err := cmd.ExecuteContext(t.Context())
	for _, part := range []string{config, "webhook.certFile", "/nowhere/tls.crt"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("error %v does not mention %s", err, part)
		}
	}
}
