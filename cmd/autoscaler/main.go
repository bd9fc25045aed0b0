// Command autoscaler is the reference infrastructure autoscaler. It holds no logic: see package autoscaler.
package main

import (
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	"github.com/drover-sh/drover/autoscaler"
	"github.com/drover-sh/drover/autoscaler/provider/kwok"
)

func main() {
	var configFile string
	command := &cobra.Command{
		Use:   "drover-autoscaler --config FILE",
		Short: "Gives clusters the nodes that their roll-ups ask for",
		Long: `Receives what each cluster needs in total (UpdateClusterNeeds), plans for the whole fleet, and launches
and gives back nodes through a provider. What it plans is streamed back to the clusters (CapacityFeed).

The policy section of the configuration is read again when the file changes: dryRun and disableReclaim need no
restart.`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var config configv1alpha1.AutoscalerConfiguration
			if err := configv1alpha1.Load(configFile, &config); err != nil {
				return err
			}
			log := klog.Background()
			provider, err := kwok.FromConfig(config.Provider.KWOK, log.WithName("kwok"))
			if err != nil {
				return fmt.Errorf("configuration file %s: %w", configFile, err)
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return autoscaler.Serve(ctx, &config, configFile, provider, log.WithName("autoscaler"))
		},
	}
	command.Flags().StringVar(&configFile, "config", "", "AutoscalerConfiguration file")
	if err := command.MarkFlagRequired("config"); err != nil {
		panic(err)
	}
	if err := command.Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "drover-autoscaler:", err)
		os.Exit(1)
	}
}
