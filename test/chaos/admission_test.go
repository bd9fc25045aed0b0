package chaos

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/drover-sh/drover/controllers/watchgroup"
	"github.com/drover-sh/drover/internal/process"
)

// An admission is what the coordinators serve the API server with: one address, behind which whoever lives answers, as
// behind a Service.
type admission struct {
	certDir, caFile string
	ca              []byte
	ports           []int
}

func (a *admission) cert() string { return filepath.Join(a.certDir, "tls.crt") }
func (a *admission) key() string  { return filepath.Join(a.certDir, "tls.key") }

// admit installs webhook and policy as they are deployed, but for the webhook's address.
func (c *cluster) admit(root string, coordinators int) {
	c.t.Helper()
	serving := &envtest.WebhookInstallOptions{}
	if err := serving.PrepWithoutInstalling(); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { _ = serving.Cleanup() })
	a := &c.admission
	a.certDir, a.caFile, a.ca = serving.LocalServingCertDir, c.path("webhook-ca.crt"), serving.LocalServingCAData
	if err := os.WriteFile(a.caFile, serving.LocalServingCAData, 0o644); err != nil {
		c.t.Fatal(err)
	}
	var targets []string
	for range coordinators {
		port, err := process.FreePort()
		if err != nil {
			c.t.Fatal(err)
		}
		a.ports = append(a.ports, port)
		targets = append(targets, fmt.Sprintf("127.0.0.1:%d", port))
	}
	url := "https://" + newLink(c.t, targets...).Address() + watchgroup.WebhookPath
	for _, file := range []string{"webhook.yaml", "policy.yaml"} {
		for _, u := range c.manifest(filepath.Join(root, "manifests/watchgroup", file)) {
			if u.GetKind() == "MutatingWebhookConfiguration" {
				hooks := &admissionregistrationv1.MutatingWebhookConfiguration{}
				if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, hooks); err != nil {
					c.t.Fatal(err)
				}
				hooks.Webhooks[0].ClientConfig = admissionregistrationv1.WebhookClientConfig{
					URL: &url, CABundle: serving.LocalServingCAData,
				}
				if err := c.client.Create(c.t.Context(), hooks); err != nil {
					c.t.Fatal(err)
				}
				continue
			}
			if err := c.client.Create(c.t.Context(), u); err != nil {
				c.t.Fatal(err)
			}
		}
	}
}

func (c *cluster) manifest(path string) []*unstructured.Unstructured {
	c.t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		c.t.Fatal(err)
	}
	var found []*unstructured.Unstructured
	for dec := yaml.NewYAMLOrJSONDecoder(strings.NewReader(string(text)), 4096); ; {
		u := &unstructured.Unstructured{}
		switch err := dec.Decode(u); {
		case errors.Is(err, io.EOF):
			return found
		case err != nil:
			c.t.Fatalf("%s: %v", path, err)
		}
		found = append(found, u)
	}
}
