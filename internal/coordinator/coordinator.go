// Package coordinator wires cmd/coordinator: what package watchgroup has, in one controller-runtime manager, as a
// CoordinatorConfiguration says. Every replica serves the webhook; the leader coordinates and labels. Start reading at Run.
package coordinator

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/runtime"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	ctrlmanager "sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics/filters"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/webhook"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/controllers/watchgroup"
)

// +kubebuilder:rbac:groups=coordination.k8s.io,namespace=fleet-system,resources=leases,verbs=create
// +kubebuilder:rbac:groups=coordination.k8s.io,namespace=fleet-system,resources=leases,resourceNames=drover-coordinator,verbs=get;update
// +kubebuilder:rbac:groups="",namespace=fleet-system,resources=events,verbs=create;patch
// +kubebuilder:rbac:groups=authentication.k8s.io,resources=tokenreviews,verbs=create
// +kubebuilder:rbac:groups=authorization.k8s.io,resources=subjectaccessreviews,verbs=create

// LeaseName is the Lease that replicas compete for, in the configuration's namespace.
const LeaseName = "drover-coordinator"

// shutdownGrace is how long running work may take to end after a signal.
const shutdownGrace = 10 * time.Second

// ConfigError is an error of the configuration that only using it shows, such as a file that is missing.
type ConfigError struct{ Err error }

// Error implements error.
func (e *ConfigError) Error() string { return e.Err.Error() }

// Unwrap gives the cause.
func (e *ConfigError) Unwrap() error { return e.Err }

// Run runs the coordinator until ctx ends, which is no error, or until it cannot go on. An empty kubeconfig means the pod's
// own service account. config has its defaults filled and is valid.
func Run(ctx context.Context, config *configv1alpha1.CoordinatorConfiguration, kubeconfig string, log logr.Logger) error {
	restConfig, err := restConfig(kubeconfig)
	if err != nil {
		return err
	}
	mgr, err := New(restConfig, config, log)
	if err != nil {
		return err
	}
	if err := mgr.Start(ctx); err != nil {
		return fmt.Errorf("running the coordinator: %w", err)
	}
	return nil
}

// New builds the coordinator's manager without starting it.
func New(restConfig *rest.Config, config *configv1alpha1.CoordinatorConfiguration, log logr.Logger) (ctrlmanager.Manager, error) {
	if *config.Webhook.Enabled {
		if err := checkFiles(config.Webhook); err != nil {
			return nil, &ConfigError{err}
		}
	}
	mgr, err := ctrl.NewManager(restConfig, options(config, log))
	if err != nil {
		return nil, fmt.Errorf("building the manager: %w", err)
	}
	ready := healthz.Ping
	if *config.Webhook.Enabled {
		ready = mgr.GetWebhookServer().StartedChecker()
	}
	if err := mgr.AddHealthzCheck("ping", healthz.Ping); err != nil {
		return nil, fmt.Errorf("adding the health check: %w", err)
	}
	if err := mgr.AddReadyzCheck("webhook", ready); err != nil {
		return nil, fmt.Errorf("adding the readiness check: %w", err)
	}
	return mgr, watchgroup.SetupWithManager(mgr, watchgroup.Options{
		Coordinate: true,
		Backfill:   *config.Backfill.Enabled, QPS: config.Backfill.QPS, Burst: int(config.Backfill.Burst),
		AuditPeriod: config.Backfill.AuditPeriod.Duration,
		Webhook:     *config.Webhook.Enabled, CAFile: config.Webhook.CAFile,
	})
}

// checkFiles names a file that is missing at once; the webhook server would only say so when it is leader.
func checkFiles(c configv1alpha1.LabelWebhookConfig) error {
	for _, file := range []struct{ field, path string }{
		{"certFile", c.CertFile}, {"keyFile", c.KeyFile}, {"caFile", c.CAFile},
	} {
		if file.path == "" {
			continue
		}
		if _, err := os.Stat(file.path); err != nil {
			return fmt.Errorf("webhook.%s: %w", file.field, err)
		}
	}
	return nil
}

// Scheme knows every type that the coordinator reads or writes.
func Scheme() *runtime.Scheme {
	scheme := runtime.NewScheme()
	utilruntime.Must(clientgoscheme.AddToScheme(scheme))
	utilruntime.Must(lbv1alpha1.AddToScheme(scheme))
	return scheme
}

func options(config *configv1alpha1.CoordinatorConfiguration, log logr.Logger) ctrlmanager.Options {
	grace := shutdownGrace
	election := config.LeaderElection
	o := ctrlmanager.Options{
		Scheme:                  Scheme(),
		Logger:                  log,
		Cache:                   watchgroup.CacheOptions(),
		Metrics:                 metrics(config),
		HealthProbeBindAddress:  config.HealthProbeBindAddress,
		GracefulShutdownTimeout: &grace,

		LeaderElection:          *election.LeaderElect,
		LeaderElectionID:        LeaseName,
		LeaderElectionNamespace: config.Namespace,
		// The process ends when the manager does. Should it still write, that does no harm.
		LeaderElectionReleaseOnCancel: true,
		LeaseDuration:                 &election.LeaseDuration.Duration,
		RenewDeadline:                 &election.RenewDeadline.Duration,
		RetryPeriod:                   &election.RetryPeriod.Duration,
	}
	if *config.Webhook.Enabled {
		host, port, _ := net.SplitHostPort(config.Webhook.BindAddress) // valid, see CoordinatorConfiguration.Validate
		n, _ := strconv.Atoi(port)
		o.WebhookServer = webhook.NewServer(webhook.Options{Host: host, Port: n, CertDir: filepath.Dir(config.Webhook.CertFile),
			CertName: filepath.Base(config.Webhook.CertFile), KeyName: filepath.Base(config.Webhook.KeyFile)})
	}
	return o
}

func metrics(config *configv1alpha1.CoordinatorConfiguration) metricsserver.Options {
	o := metricsserver.Options{BindAddress: config.MetricsBindAddress}
	if !config.MetricsInsecure && config.MetricsBindAddress != "0" {
		o.SecureServing = true
		o.FilterProvider = filters.WithAuthenticationAndAuthorization
	}
	return o
}

func restConfig(kubeconfig string) (*rest.Config, error) {
	var config *rest.Config
	var err error
	if kubeconfig == "" {
		if config, err = rest.InClusterConfig(); err != nil {
			return nil, fmt.Errorf("no --kubeconfig, and not in a pod: %w", err)
		}
	} else if config, err = clientcmd.BuildConfigFromFlags("", kubeconfig); err != nil {
		return nil, fmt.Errorf("kubeconfig %s: %w", kubeconfig, err)
	}
	config.UserAgent = "drover-coordinator"
	// The backfill bounds its own writes; a second limit would only hold up handoffs behind them.
	config.QPS = -1
	return config, nil
}
