package autoscaler

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"
	"k8s.io/utils/clock"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	fleetpb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
	"github.com/drover-sh/drover/autoscaler/provider"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/transport"
)

const (
	// maxConnectionAge makes a client shake hands again, so that a certificate that was withdrawn or has expired does not
	// speak for ever.
	maxConnectionAge = 30 * time.Minute
	// drainTime is how long open calls may take to end at a shutdown.
	drainTime = 5 * time.Second
	// reloadPeriod is how often the configuration file is looked at.
	reloadPeriod = time.Second
)

// Serve runs the autoscaler of a configuration until ctx ends, and then shuts down gracefully. The policy follows
// changes of the file at configPath; everything else needs a restart.
func Serve(ctx context.Context, cfg *configv1alpha1.AutoscalerConfiguration, configPath string, p provider.Interface,
	log logr.Logger) error {
	wrong := func(field string, err error) error {
		return fmt.Errorf("configuration file %s: %s: %w", configPath, field, err)
	}
	creds, err := transport.ServerCredentials(cfg.TLS)
	if err != nil {
		return fmt.Errorf("configuration file %s: %w", configPath, err)
	}
	store, err := OpenStore(ctx, cfg.State)
	if err != nil {
		return wrong("state", err)
	}
	defer func() { _ = store.Close() }()

	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	clk := clock.RealClock{}
	engine := NewEngine(PolicyFrom(cfg.Policy), capacity.MakePlan, RandomID)
	runner := NewRunner(engine, store, p, clk, log, registry)
	if err := runner.Restore(ctx); err != nil {
		return err
	}

	server := grpc.NewServer(grpc.Creds(creds), grpc.MaxRecvMsgSize(maxMessage),
		grpc.ChainUnaryInterceptor(transport.UnaryServerInterceptor),
		grpc.ChainStreamInterceptor(transport.StreamServerInterceptor),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionAge: maxConnectionAge,
			MaxConnectionAgeGrace: time.Minute, Time: 30 * time.Second, Timeout: 10 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}))
	NewServer(runner, clk, cfg.Feed.Debounce.Duration, cfg.Feed.Period.Duration).Register(server)
	healthServer := health.NewServer()
	healthpb.RegisterHealthServer(server, healthServer)
	for _, service := range []string{fleetpb.InfrastructureAutoscaler_ServiceDesc.ServiceName,
		fleetpb.CapacityFeed_ServiceDesc.ServiceName} {
		healthServer.SetServingStatus(service, healthpb.HealthCheckResponse_SERVING)
	}
	reflection.Register(server)

	listener, err := net.Listen("tcp", cfg.ListenAddress)
	if err != nil {
		return wrong("listenAddress", err)
	}
	log.Info("Serving", "address", listener.Addr().String(), "mutualTLS", cfg.TLS.ClientCAFile != "")

	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return runner.Run(ctx) })
	group.Go(func() error { return server.Serve(listener) })
	group.Go(func() error {
		<-ctx.Done()
		healthServer.Shutdown()
		runner.hub.close()
		stop(server)
		return nil
	})
	group.Go(func() error { return watchPolicy(ctx, configPath, clk, log, runner.SetPolicy) })
	group.Go(func() error { return serveHTTP(ctx, "healthProbeBindAddress", cfg.HealthProbeBindAddress, probes()) })
	group.Go(func() error {
		mux := http.NewServeMux()
		mux.Handle("/metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
		return serveHTTP(ctx, "metricsBindAddress", cfg.MetricsBindAddress, mux)
	})
	return group.Wait()
}

// stop lets open calls end, but not for ever.
func stop(server *grpc.Server) {
	done := make(chan struct{})
	go func() {
		server.GracefulStop()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(drainTime):
		server.Stop()
	}
}

// probes answers /healthz and /readyz: whoever can answer has restored its state.
func probes() http.Handler {
	mux := http.NewServeMux()
	for _, path := range []string{"/healthz", "/readyz"} {
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("ok\n")) })
	}
	return mux
}

func serveHTTP(ctx context.Context, field, address string, handler http.Handler) error {
	if address == "0" {
		return nil
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return fmt.Errorf("%s: %w", field, err)
	}
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second}
	go func() {
		<-ctx.Done()
		_ = server.Close()
	}()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("%s: %w", field, err)
	}
	return nil
}

// watchPolicy calls set whenever the policy in the file at path changes. A file that is not valid is logged once and
// changes nothing.
func watchPolicy(ctx context.Context, path string, c clock.Clock, log logr.Logger, set func(Policy)) error {
	last, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("reading configuration: %w", err)
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-c.After(reloadPeriod):
		}
		data, err := os.ReadFile(path)
		if err != nil || string(data) == string(last) {
			continue // a file that is being replaced is missing for a moment
		}
		last = data
		var cfg configv1alpha1.AutoscalerConfiguration
		if err := configv1alpha1.Decode(data, &cfg); err != nil {
			log.Error(err, "The changed configuration is not valid; the policy stays as it is", "file", path)
			continue
		}
		log.Info("The policy has been read again", "file", path, "dryRun", cfg.Policy.DryRun,
			"disableReclaim", cfg.Policy.DisableReclaim)
		set(PolicyFrom(cfg.Policy))
	}
}
