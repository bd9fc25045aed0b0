package kueuemanager

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/yaml"

	"github.com/drover-sh/drover/internal/controlplane"
)

const (
	kueueModule      = "sigs.k8s.io/kueue"
	autoscalerModule = "k8s.io/autoscaler/cluster-autoscaler/apis"
)

// converted are the CRDs whose versions Kueue's conversion webhook translates; its certificate rotation expects exactly
// these to have one.
var converted = []string{
	"localqueues.kueue.x-k8s.io", "clusterqueues.kueue.x-k8s.io", "workloads.kueue.x-k8s.io", "cohorts.kueue.x-k8s.io",
	"multikueueclusters.kueue.x-k8s.io",
}

// hooks is where the API server finds Kueue's webhooks.
type hooks struct {
	host       string
	ca         []byte
	frameworks []string
}

// installCRDs installs Kueue's CRDs and that of ProvisioningRequest. The latter has to be there before Kueue starts, or
// Kueue leaves its own provisioning check out.
func installCRDs(ctx context.Context, config *rest.Config, hooks hooks) error {
	var crds []*apiextensionsv1.CustomResourceDefinition
	for module, dir := range map[string]string{kueueModule: "config/components/crd/bases", autoscalerModule: "config/crd"} {
		root, err := moduleDir(ctx, module)
		if err != nil {
			return err
		}
		files, err := filepath.Glob(filepath.Join(root, dir, "*.yaml"))
		if err != nil || len(files) == 0 {
			return fmt.Errorf("no CRDs in %s of module %s: %w", dir, module, err)
		}
		for _, file := range files {
			data, err := os.ReadFile(file)
			if err != nil {
				return fmt.Errorf("reading a CRD: %w", err)
			}
			crd := &apiextensionsv1.CustomResourceDefinition{}
			if err := yaml.Unmarshal(data, crd); err != nil {
				return fmt.Errorf("CRD in %s: %w", file, err)
			}
			if slices.Contains(converted, crd.Name) {
				url := hooks.host + "/convert"
				crd.Spec.Conversion = &apiextensionsv1.CustomResourceConversion{
					Strategy: apiextensionsv1.WebhookConverter,
					Webhook: &apiextensionsv1.WebhookConversion{
						ClientConfig:             &apiextensionsv1.WebhookClientConfig{URL: &url, CABundle: hooks.ca},
						ConversionReviewVersions: []string{"v1"},
					},
				}
			}
			crds = append(crds, crd)
		}
	}
	if _, err := envtest.InstallCRDs(config, envtest.CRDInstallOptions{CRDs: crds}); err != nil {
		return fmt.Errorf("installing Kueue's CRDs: %w", err)
	}
	return nil
}

// installWebhooks installs those of Kueue's webhooks that the enabled integrations need, called by URL.
func installWebhooks(ctx context.Context, c client.Client, hooks hooks) error {
	root, err := moduleDir(ctx, kueueModule)
	if err != nil {
		return err
	}
	data, err := os.ReadFile(filepath.Join(root, "config/components/webhook/manifests.yaml"))
	if err != nil {
		return fmt.Errorf("reading Kueue's webhooks: %w", err)
	}
	for decoder := utilyaml.NewYAMLToJSONDecoder(bytes.NewReader(data)); ; {
		// Both kinds have the fields that are read here at the same places.
		var validating admissionregistrationv1.ValidatingWebhookConfiguration
		var raw map[string]any
		if err := decoder.Decode(&raw); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("reading Kueue's webhooks: %w", err)
		}
		doc, err := yaml.Marshal(raw)
		if err != nil {
			return fmt.Errorf("reading Kueue's webhooks: %w", err)
		}
		var obj client.Object
		switch raw["kind"] {
		case "MutatingWebhookConfiguration":
			var mutating admissionregistrationv1.MutatingWebhookConfiguration
			if err := yaml.Unmarshal(doc, &mutating); err != nil {
				return fmt.Errorf("reading Kueue's webhooks: %w", err)
			}
			mutating.Name = "kueue-" + mutating.Name
			mutating.Webhooks = slices.DeleteFunc(mutating.Webhooks, func(w admissionregistrationv1.MutatingWebhook) bool {
				return !hooks.wanted(w.Rules)
			})
			for i := range mutating.Webhooks {
				hooks.point(&mutating.Webhooks[i].ClientConfig)
			}
			obj = &mutating
		case "ValidatingWebhookConfiguration":
			if err := yaml.Unmarshal(doc, &validating); err != nil {
				return fmt.Errorf("reading Kueue's webhooks: %w", err)
			}
			validating.Name = "kueue-" + validating.Name
			validating.Webhooks = slices.DeleteFunc(validating.Webhooks, func(w admissionregistrationv1.ValidatingWebhook) bool {
				return !hooks.wanted(w.Rules)
			})
			for i := range validating.Webhooks {
				hooks.point(&validating.Webhooks[i].ClientConfig)
			}
			obj = &validating
		default:
			continue
		}
		if err := createOrReplace(ctx, c, obj); err != nil {
			return err
		}
	}
}

// wanted says whether a webhook is about Kueue's own objects or about those of an enabled integration.
func (h hooks) wanted(rules []admissionregistrationv1.RuleWithOperations) bool {
	for _, rule := range rules {
		for _, group := range rule.APIGroups {
			switch {
			case group == "kueue.x-k8s.io", group == "batch",
				group == "" && slices.Contains(h.frameworks, "pod"),
				group != "" && slices.ContainsFunc(h.frameworks, func(f string) bool { return strings.HasPrefix(f, group+"/") }):
				return true
			}
		}
	}
	return false
}

// point makes a webhook that is called through a Service one that is called by URL.
func (h hooks) point(c *admissionregistrationv1.WebhookClientConfig) {
	if c.Service == nil || c.Service.Path == nil {
		return
	}
	url := h.host + *c.Service.Path
	*c = admissionregistrationv1.WebhookClientConfig{URL: &url, CABundle: h.ca}
}

// moduleDir is where the sources of a module are that go.mod requires.
func moduleDir(ctx context.Context, module string) (string, error) {
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		return "", err
	}
	list := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", module)
	list.Dir = root
	out, err := list.Output()
	if err != nil {
		return "", fmt.Errorf("looking for module %s: %w", module, err)
	}
	dir := strings.TrimSpace(string(out))
	if dir == "" {
		return "", fmt.Errorf("module %s is not in the module cache: run `go mod download %s`", module, module)
	}
	return dir, nil
}
