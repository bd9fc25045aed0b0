// Package manager wires cmd/manager: the roll-up operator, the pod back-stop and what Kueue is served with, in one
// controller-runtime manager, as a ManagerConfiguration says: all of it on the leader, or the latter two on every replica,
// as members of a WatchGroup. It decides nothing about capacity itself. Start reading at Run.
package manager

import (
	"context"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	"google.golang.org/grpc"
	"k8s.io/apimachinery/pkg/runtime"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	autoscalingv1 "k8s.io/autoscaler/cluster-autoscaler/apis/provisioningrequest/autoscaling.x-k8s.io/v1"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	ctrlmanager "sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics/filters"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	kueuev1beta2 "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/controllers/backstop"
	"github.com/drover-sh/drover/controllers/rollup"
	"github.com/drover-sh/drover/controllers/sharded"
	"github.com/drover-sh/drover/kueue/admission"
	"github.com/drover-sh/drover/kueue/provisioning"
)

// LeaseName is the Lease that replicas compete for, in the configuration's namespace.
const LeaseName = "drover-manager"

// shutdownGrace is how long running work may take to end after a signal.
const shutdownGrace = 10 * time.Second

// ConfigError is an error of the configuration that only using it shows, such as a file that is missing.
type ConfigError struct{ Err error }

// Error implements error.
func (e *ConfigError) Error() string { return e.Err.Error() }

// Unwrap gives the cause.
func (e *ConfigError) Unwrap() error { return e.Err }

// Run runs the manager until ctx ends, which is no error, or until it cannot go on. An empty kubeconfig means the pod's own
// service account. config has its defaults filled and is valid.
func Run(ctx context.Context, config *configv1alpha1.ManagerConfiguration, kubeconfig string, log logr.Logger) error {
	restConfig, err := restConfig(kubeconfig)
	if err != nil {
		return err
	}
	conn, err := rollup.Dial(config.Autoscaler)
	if err != nil {
		return &ConfigError{err}
	}
	defer conn.Close()
	group := groupOf(config)
	mgr, err := build(ctx, restConfig, config, conn, group, log)
	if err != nil {
		return err
	}
	if group != nil {
		// The leader that is asked to stop leads on meanwhile; one that has lost its lease ends at once, as in a crash.
		ctx = group.LeaveOn(ctx)
	}
	if err := mgr.Start(ctx); err != nil {
		return fmt.Errorf("running the manager: %w", err)
	}
	return nil
}

// groupOf is the WatchGroup that the process is to be a member of; nil: none.
func groupOf(config *configv1alpha1.ManagerConfiguration) *sharded.Group {
	if !config.Sharding.Enabled {
		return nil
	}
	return sharded.New(sharded.Options{
		WatchGroup: config.Sharding.WatchGroup, Namespace: config.Sharding.Namespace,
		LeaveTimeout: config.Sharding.LeaveTimeout.Duration,
	})
}

// build builds the manager without starting it. With a group, the back-stop and what is done for Kueue run on every replica.
func build(ctx context.Context, restConfig *rest.Config, config *configv1alpha1.ManagerConfiguration,
	conn grpc.ClientConnInterface, group *sharded.Group, log logr.Logger) (ctrlmanager.Manager, error) {
	o := options(config, log)
	if group != nil {
		o.NewCache, o.NewClient = group.NewCache, group.NewClient
		grace := config.Sharding.LeaveTimeout.Duration + shutdownGrace
		o.GracefulShutdownTimeout = &grace
	}
	mgr, err := ctrl.NewManager(restConfig, o)
	if err != nil && group != nil {
		return nil, fmt.Errorf("building the manager, with sharding.watchGroup %q in namespace %q: %w",
			config.Sharding.WatchGroup, config.Sharding.Namespace, err)
	}
	if err != nil {
		return nil, fmt.Errorf("building the manager: %w", err)
	}
	if err := mgr.AddHealthzCheck("ping", healthz.Ping); err != nil {
		return nil, fmt.Errorf("adding the health check: %w", err)
	}
	if group != nil {
		if err := mgr.AddReadyzCheck("sharding", group.Ready); err != nil {
			return nil, fmt.Errorf("adding the readiness check: %w", err)
		}
	}
	if err := rollup.Setup(ctx, mgr, rollup.Options{Config: config, Conn: conn}); err != nil {
		return nil, fmt.Errorf("setting up the roll-up operator: %w", err)
	}
	if err := backstop.SetupWithManager(mgr, backstop.Options{
		Config: config.Backstop, Namespace: config.Namespace, Demand: config.Demand, Group: group,
	}); err != nil {
		return nil, fmt.Errorf("setting up the back-stop: %w", err)
	}
	if config.Kueue.Enabled {
		if err := setupKueue(ctx, mgr, config); err != nil {
			return nil, err
		}
	}
	return mgr, nil
}

// setupKueue adds what the manager does for Kueue. Without Kueue's CRDs the caches would never sync, so that is said at once.
func setupKueue(ctx context.Context, mgr ctrlmanager.Manager, config *configv1alpha1.ManagerConfiguration) error {
	kind := kueuev1beta2.SchemeGroupVersion.WithKind("Workload")
	if _, err := mgr.GetRESTMapper().RESTMapping(kind.GroupKind(), kind.Version); err != nil {
		return fmt.Errorf("kueue.enabled is true, but the cluster does not serve %s: %w", kind, err)
	}
	claims := provisioning.NewClaims()
	if config.Sharding.Enabled {
		claims.Shard(mgr)
	}
	if _, err := admission.SetupWithManager(ctx, mgr, admission.Options{Namespace: config.Namespace, Claims: claims}); err != nil {
		return fmt.Errorf("setting up Kueue's admission check: %w", err)
	}
	if err := provisioning.SetupWithManager(mgr, provisioning.Options{
		Namespace: config.Namespace, Claims: claims,
		ProvisionTimeout: config.Kueue.ProvisionTimeout.Duration, BookingTTL: config.Kueue.BookingTTL.Duration,
	}); err != nil {
		return fmt.Errorf("setting up the ProvisioningRequest class: %w", err)
	}
	return nil
}

// Scheme knows every type that the manager reads or writes.
func Scheme() *runtime.Scheme {
	scheme := runtime.NewScheme()
	utilruntime.Must(clientgoscheme.AddToScheme(scheme))
	utilruntime.Must(fleetv1alpha1.AddToScheme(scheme))
	utilruntime.Must(kueuev1beta2.AddToScheme(scheme))
	utilruntime.Must(autoscalingv1.AddToScheme(scheme))
	return scheme
}

func options(config *configv1alpha1.ManagerConfiguration, log logr.Logger) ctrlmanager.Options {
	grace := shutdownGrace
	election := config.LeaderElection
	return ctrlmanager.Options{
		Scheme:                  Scheme(),
		Logger:                  log,
		Cache:                   rollup.CacheOptions(config.Namespace),
		Metrics:                 metrics(config),
		HealthProbeBindAddress:  config.HealthProbeBindAddress,
		GracefulShutdownTimeout: &grace,

		LeaderElection:          *election.LeaderElect,
		LeaderElectionID:        LeaseName,
		LeaderElectionNamespace: config.Namespace,
		// The process ends when the manager does, so that nothing acts after the lease is given away.
		LeaderElectionReleaseOnCancel: true,
		LeaseDuration:                 &election.LeaseDuration.Duration,
		RenewDeadline:                 &election.RenewDeadline.Duration,
		RetryPeriod:                   &election.RetryPeriod.Duration,
	}
}

func metrics(config *configv1alpha1.ManagerConfiguration) metricsserver.Options {
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
	config.UserAgent = "drover-manager"
	// Concurrency is bounded where it matters, and the API server has its own fairness; a second limit would only hold up
	// leases behind bursts.
	config.QPS = -1
	return config, nil
}
