package bench

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/yaml"

	"github.com/drover-sh/drover/controllers/watchgroup"
	"github.com/drover-sh/drover/internal/controlplane"
	"github.com/drover-sh/drover/internal/process"
)

// admit installs the webhook as it is deployed, but for its address, and returns the coordinator's configuration of it.
func (r *shardedRig) admit() string {
	r.b.Helper()
	serving := &envtest.WebhookInstallOptions{}
	if err := serving.PrepWithoutInstalling(); err != nil {
		r.b.Fatal(err)
	}
	r.b.Cleanup(func() { _ = serving.Cleanup() })
	port, err := process.FreePort()
	if err != nil {
		r.b.Fatal(err)
	}
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		r.b.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(root, "manifests/watchgroup/webhook.yaml"))
	if err != nil {
		r.b.Fatal(err)
	}
	hooks := &admissionregistrationv1.MutatingWebhookConfiguration{}
	if err := yaml.Unmarshal(text, hooks); err != nil {
		r.b.Fatal(err)
	}
	url := fmt.Sprintf("https://127.0.0.1:%d%s", port, watchgroup.WebhookPath)
	hooks.Webhooks[0].ClientConfig = admissionregistrationv1.WebhookClientConfig{URL: &url, CABundle: serving.LocalServingCAData}
	if err := r.client.Create(context.Background(), hooks); err != nil {
		r.b.Fatal(err)
	}
	ca := filepath.Join(r.dir, "webhook-ca.crt")
	if err := os.WriteFile(ca, serving.LocalServingCAData, 0o644); err != nil {
		r.b.Fatal(err)
	}
	return fmt.Sprintf("{bindAddress: %q, certFile: %q, keyFile: %q, caFile: %q}", fmt.Sprintf("127.0.0.1:%d", port),
		filepath.Join(serving.LocalServingCertDir, "tls.crt"), filepath.Join(serving.LocalServingCertDir, "tls.key"), ca)
}
