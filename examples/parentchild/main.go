// Command parentchild is the sample of the paper's evaluation (section 7.2.1): the controller under test, the operator that
// creates Parents in masses, and the scraper that tells how far it all is. See README.md.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/drover-sh/drover/controllers/sharded"
	v1alpha1 "github.com/drover-sh/drover/examples/parentchild/api/v1alpha1"
	"github.com/drover-sh/drover/examples/parentchild/controller"
	"github.com/drover-sh/drover/examples/parentchild/creation"
	"github.com/drover-sh/drover/examples/parentchild/recording"
	"github.com/drover-sh/drover/examples/parentchild/scrape"
	"github.com/drover-sh/drover/sharding/history"
)

func main() {
	if err := command().ExecuteContext(ctrl.SetupSignalHandler()); err != nil {
		fmt.Fprintln(os.Stderr, "parentchild:", err)
		os.Exit(1)
	}
}

// common are the flags of the programs that run controllers.
type common struct {
	kubeconfig, metrics, health string
	qps                         float32
	verbosity                   int
}

func (c *common) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&c.kubeconfig, "kubeconfig", "", "kubeconfig file; empty: the pod's service account")
	f.StringVar(&c.metrics, "metrics-bind-address", "0", "where metrics are served, without TLS; 0: nowhere")
	f.StringVar(&c.health, "health-probe-bind-address", "0", "where /readyz is served; 0: nowhere")
	f.Float32Var(&c.qps, "qps", 20, "requests per second, and burst; less than 0: no limit")
	f.IntVarP(&c.verbosity, "verbosity", "v", 0, "how much is logged")
}

// options returns the client's configuration and the beginnings of a manager's.
func (c *common) options() (*rest.Config, ctrl.Options, error) {
	log := textlogger.NewLogger(textlogger.NewConfig(textlogger.Verbosity(c.verbosity)))
	ctrl.SetLogger(log)
	klog.SetLogger(log)
	config, err := clientcmd.BuildConfigFromFlags("", c.kubeconfig)
	if err != nil {
		return nil, ctrl.Options{}, fmt.Errorf("flag --kubeconfig: %q: %w", c.kubeconfig, err)
	}
	config.QPS, config.Burst = c.qps, max(int(c.qps), 1)
	scheme := runtime.NewScheme()
	return config, ctrl.Options{
		Scheme: scheme, Logger: log,
		Metrics:                server.Options{BindAddress: c.metrics},
		HealthProbeBindAddress: c.health,
	}, v1alpha1.AddToScheme(scheme)
}

func command() *cobra.Command {
	cmd := &cobra.Command{
		Use: "parentchild", Short: "The sample controller and what measures it",
		SilenceUsage: true, SilenceErrors: true,
	}
	cmd.AddCommand(controllerCommand(), creationCommand(), scrape.Command())
	return cmd
}

func controllerCommand() *cobra.Command {
	var (
		c       common
		o       sharded.Options
		workers int
		work    time.Duration
		record  string
	)
	cmd := &cobra.Command{
		Use: "controller", Short: "Makes a Child for each Parent, as one of many or alone", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			config, options, err := c.options()
			if err != nil {
				return err
			}
			if record != "" {
				r, createErr := recording.Create(record)
				if createErr != nil {
					return fmt.Errorf("flag --record: %w", createErr)
				}
				defer func() {
					if closeErr := r.Close(); err == nil {
						err = closeErr
					}
				}()
				o.Record = r.Record
				r.Configure(config, recording.Identity{
					Actor: history.Reconciler, Member: o.Member, Session: sharded.SessionOf,
				})
			}
			return runController(cmd.Context(), config, options, o, &controller.Reconciler{Work: work}, workers)
		},
	}
	c.flags(cmd)
	f := cmd.Flags()
	f.IntVar(&workers, "workers", 5, "Parents reconciled at a time")
	f.DurationVar(&work, "work", 0, "how long each reconcile takes besides its requests, as one that calls somebody does")
	f.StringVar(&o.WatchGroup, "watch-group", "", "WatchGroup to be a member of; empty: reconcile everything alone")
	f.StringVar(&o.Namespace, "namespace", "", "namespace of the WatchGroup; empty: that of the pod")
	f.StringVar(&o.Member, "member", "", "name in the WatchGroup; empty: that of the pod, or of the host")
	f.IntVar(&o.Weight, "weight", 0, "share relative to the other members'; 0: 1")
	f.DurationVar(&o.LeaveTimeout, "leave-timeout", 10*time.Second,
		"how long to wait at the end until others have taken over; less than 0: end without a word")
	f.DurationVar(&o.Resync.Period, "resync-period", 0,
		"how often each Parent is reconciled that nothing happens to; 0: 10h, less than 0: never")
	f.DurationVar(&o.Resync.Slice, "resync-slice", 0, "into how long slices the period is divided, among which Parents spread; 0: 1m")
	f.DurationVar(&o.Resync.Tick, "resync-tick", 0, "how often the Parents are enqueued that are due; 0: 1m, or the slice")
	f.StringVar(&record, "record", "", "new file to which everything is recorded that happens here")
	return cmd
}

// runController runs the sample controller. Where it is sharded is marked: nothing else differs from any other program
// that uses controller-runtime.
func runController(ctx context.Context, config *rest.Config, options ctrl.Options, o sharded.Options,
	r *controller.Reconciler, workers int,
) error {
	var group *sharded.Group
	if o.WatchGroup != "" {
		group = sharded.New(o)                                                // sharded
		options.NewCache, options.NewClient = group.NewCache, group.NewClient // sharded
	}
	mgr, err := ctrl.NewManager(config, options)
	if err != nil {
		return err
	}
	r.Client = mgr.GetClient()
	if err := r.SetupWithManager(mgr, workers); err != nil {
		return err
	}
	if group == nil {
		return mgr.Start(ctx)
	}
	if err := mgr.AddReadyzCheck("sharded", group.Ready); err != nil {
		return err
	}
	snapshots := make(chan os.Signal, 1)
	signal.Notify(snapshots, syscall.SIGUSR1)
	defer signal.Stop(snapshots)
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-snapshots:
				group.RecordSnapshots()
			}
		}
	}()
	return mgr.Start(group.LeaveOn(ctx)) // sharded
}

func creationCommand() *cobra.Command {
	var c common
	cmd := &cobra.Command{
		Use: "creation", Short: "Creates the Parents that ParentCreations ask for", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			config, options, err := c.options()
			if err != nil {
				return err
			}
			mgr, err := ctrl.NewManager(config, options)
			if err != nil {
				return err
			}
			if err := (&creation.Reconciler{Client: mgr.GetClient()}).SetupWithManager(mgr); err != nil {
				return err
			}
			return mgr.Start(cmd.Context())
		},
	}
	c.flags(cmd)
	return cmd
}
