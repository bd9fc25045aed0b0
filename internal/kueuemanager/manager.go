package kueuemanager

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	autoscalingv1 "k8s.io/autoscaler/cluster-autoscaler/apis/provisioningrequest/autoscaling.x-k8s.io/v1"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"
	"sigs.k8s.io/yaml"

	"github.com/drover-sh/drover/internal/controlplane"
	"github.com/drover-sh/drover/internal/process"
)

// Namespace is where Kueue believes to run.
const Namespace = "kueue-system"

const (
	serviceName = "kueue-webhook-service"
	secretName  = "kueue-webhook-server-cert"
	stopGrace   = 10 * time.Second
	// attempts to find a port that nobody takes between the choice and the use.
	attempts = 3
)

// Cluster is what the manager is run against; *controlplane.ControlPlane is one.
type Cluster interface {
	Config() *rest.Config
	Kubeconfig() string
}

// Options says how Kueue runs.
type Options struct {
	// Dir holds everything that is written: certificates, configuration, logs. It is created; logs stay after Stop.
	// Required.
	Dir string
	// Frameworks are Kueue's integrations. Default: batch/job. Only these and batch/v1 meet a webhook, so that a stopped
	// Kueue is in the way of nothing else.
	Frameworks []string
	// FeatureGates are Kueue's feature gates.
	FeatureGates map[string]bool
	// Configuration is merged over the top level of Kueue's configuration file (kind Configuration, v1beta2).
	Configuration map[string]any
}

// Manager is a running Kueue manager.
type Manager struct {
	group   *process.Group
	process *process.Process
	dir     string
}

// Start installs what Kueue needs into the cluster (its CRDs and that of ProvisioningRequest, its webhooks, its
// namespace), starts Kueue and returns when its webhooks serve. It may be called again after Stop, against the same
// cluster. ctx bounds the start only. On error nothing runs.
func Start(ctx context.Context, cluster Cluster, o Options) (_ *Manager, err error) {
	if o.Dir == "" {
		return nil, errors.New("kueuemanager: Options.Dir is empty")
	}
	if o.Dir, err = filepath.Abs(o.Dir); err != nil {
		return nil, fmt.Errorf("kueuemanager: Options.Dir %q: %w", o.Dir, err)
	}
	if len(o.Frameworks) == 0 {
		o.Frameworks = []string{"batch/job"}
	}
	binary, err := controlplane.Binary("kueue")
	if err != nil {
		return nil, err
	}
	group, err := process.NewGroup(o.Dir)
	if err != nil {
		return nil, fmt.Errorf("kueuemanager: %w", err)
	}
	m := &Manager{group: group, dir: o.Dir}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.Stop())
		}
	}()
	ctx, cancel := context.WithTimeoutCause(ctx, 2*time.Minute, errors.New("two minutes have passed"))
	defer cancel()
	for attempt := 1; ; attempt++ {
		if err = m.start(ctx, cluster, o, binary); err == nil {
			return m, nil
		}
		if attempt == attempts || ctx.Err() != nil || m.process == nil || m.process.Running() {
			return nil, fmt.Errorf("starting Kueue: %w", err)
		}
	}
}

func (m *Manager) start(ctx context.Context, cluster Cluster, o Options, binary string) error {
	port, err := process.FreePort()
	if err != nil {
		return err
	}
	health, err := process.FreePort()
	if err != nil {
		return err
	}
	keys, err := newServingKeys(serviceName + "." + Namespace + ".svc")
	if err != nil {
		return err
	}
	certDir := filepath.Join(o.Dir, "certs")
	if err := keys.write(certDir); err != nil {
		return err
	}
	hooks := hooks{host: fmt.Sprintf("https://127.0.0.1:%d", port), ca: keys.caCert, frameworks: o.Frameworks}
	if err := install(ctx, cluster.Config(), hooks, keys); err != nil {
		return err
	}
	config, err := yaml.Marshal(configuration(o, certDir, port, health))
	if err != nil {
		return fmt.Errorf("writing Kueue's configuration: %w", err)
	}
	file := filepath.Join(o.Dir, "kueue.yaml")
	if err := os.WriteFile(file, config, 0o600); err != nil {
		return fmt.Errorf("writing Kueue's configuration: %w", err)
	}
	m.process, err = m.group.Start(process.Spec{
		Name: "kueue", Path: binary,
		Args: []string{"--config=" + file, "--kubeconfig=" + cluster.Kubeconfig(), "--zap-log-level=3"},
	})
	if err != nil {
		return err
	}
	return m.process.WaitReady(ctx, fmt.Sprintf("http://127.0.0.1:%d/readyz", health))
}

// configuration is Kueue's configuration file.
func configuration(o Options, certDir string, port, health int) map[string]any {
	gates := map[string]bool{
		"VisibilityOnDemand": false, // it serves from a directory at the root of the file system
	}
	for gate, on := range o.FeatureGates {
		gates[gate] = on
	}
	c := map[string]any{
		"apiVersion":     "config.kueue.x-k8s.io/v1beta2",
		"kind":           "Configuration",
		"namespace":      Namespace,
		"health":         map[string]any{"healthProbeBindAddress": fmt.Sprintf("127.0.0.1:%d", health)},
		"metrics":        map[string]any{"bindAddress": "0"},
		"webhook":        map[string]any{"host": "127.0.0.1", "port": port, "certDir": certDir},
		"leaderElection": map[string]any{"leaderElect": false},
		// Without it Kueue insists on a metrics certificate at a fixed path outside the directory. It finds ours valid.
		"internalCertManagement": map[string]any{
			"enable": true, "webhookServiceName": serviceName, "webhookSecretName": secretName,
		},
		"clientConnection": map[string]any{"qps": 500, "burst": 1000},
		"integrations":     map[string]any{"frameworks": o.Frameworks},
		"featureGates":     gates,
	}
	for key, value := range o.Configuration {
		c[key] = value
	}
	return c
}

// LogFile is where Kueue logs.
func (m *Manager) LogFile() string { return m.group.LogFile("kueue") }

// Stop ends Kueue and waits until it is gone. Its objects stay in the cluster. It may be called again.
func (m *Manager) Stop() error {
	return errors.Join(m.group.Stop(stopGrace), os.RemoveAll(filepath.Join(m.dir, "certs")))
}

// Uninstall takes Kueue's webhooks out of the cluster, so that a stopped Kueue is in nobody's way. Its CRDs and objects stay.
func Uninstall(ctx context.Context, cluster Cluster) error {
	c, err := client.New(cluster.Config(), client.Options{Scheme: Scheme()})
	if err != nil {
		return fmt.Errorf("kueuemanager: %w", err)
	}
	mutating := &admissionregistrationv1.MutatingWebhookConfiguration{}
	mutating.Name = "kueue-mutating-webhook-configuration"
	validating := &admissionregistrationv1.ValidatingWebhookConfiguration{}
	validating.Name = "kueue-validating-webhook-configuration"
	return errors.Join(client.IgnoreNotFound(c.Delete(ctx, mutating)), client.IgnoreNotFound(c.Delete(ctx, validating)))
}

// Kill ends Kueue as a crash does.
func (m *Manager) Kill() error { return m.process.Kill() }

// Scheme knows the built-in types, Kueue's and ProvisioningRequest.
func Scheme() *runtime.Scheme {
	scheme := runtime.NewScheme()
	utilruntime.Must(clientgoscheme.AddToScheme(scheme))
	utilruntime.Must(kueue.AddToScheme(scheme))
	utilruntime.Must(autoscalingv1.AddToScheme(scheme))
	return scheme
}

// install puts everything into the cluster that Kueue's own manifests would.
func install(ctx context.Context, config *rest.Config, hooks hooks, keys *servingKeys) error {
	c, err := client.New(config, client.Options{Scheme: Scheme()})
	if err != nil {
		return fmt.Errorf("kueuemanager: %w", err)
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: Namespace}}
	if err := c.Create(ctx, ns); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("creating namespace %s: %w", Namespace, err)
	}
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: secretName}, Data: keys.secret()}
	if err := createOrReplace(ctx, c, secret); err != nil {
		return err
	}
	if err := installCRDs(ctx, config, hooks); err != nil {
		return err
	}
	return installWebhooks(ctx, c, hooks)
}

// createOrReplace writes obj over what is there.
func createOrReplace(ctx context.Context, c client.Client, obj client.Object) error {
	there := obj.DeepCopyObject().(client.Object)
	err := c.Get(ctx, client.ObjectKeyFromObject(obj), there)
	switch {
	case apierrors.IsNotFound(err):
		err = c.Create(ctx, obj)
	case err == nil:
		obj.SetResourceVersion(there.GetResourceVersion())
		err = c.Update(ctx, obj)
	}
	if err != nil {
		return fmt.Errorf("installing %T %s: %w", obj, obj.GetName(), err)
	}
	return nil
}
