// Command coordinator runs the WatchGroups of a cluster: it decides which replica of a scaled-out controller has which
// Virtual Nodes, and labels their objects.
package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
	ctrl "sigs.k8s.io/controller-runtime"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	"github.com/drover-sh/drover/internal/coordinator"
)

func main() {
	if err := command().ExecuteContext(ctrl.SetupSignalHandler()); err != nil {
		fmt.Fprintln(os.Stderr, "drover-coordinator:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	var configFile, kubeconfig string
	var verbosity int
	cmd := &cobra.Command{
		Use:           "drover-coordinator --config FILE",
		Short:         "Shares the objects of scaled-out controllers among their replicas",
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log := textlogger.NewLogger(textlogger.NewConfig(textlogger.Verbosity(verbosity)))
			ctrl.SetLogger(log)
			klog.SetLogger(log)
			var config configv1alpha1.CoordinatorConfiguration
			if err := configv1alpha1.Load(configFile, &config); err != nil {
				return err
			}
			err := coordinator.Run(cmd.Context(), &config, kubeconfig, log)
			if wrong := (*coordinator.ConfigError)(nil); errors.As(err, &wrong) {
				return fmt.Errorf("configuration file %s: %w", configFile, err)
			}
			return err
		},
	}
	cmd.Flags().StringVar(&configFile, "config", "", "file of kind CoordinatorConfiguration (required)")
	cmd.Flags().StringVar(&kubeconfig, "kubeconfig", "", "kubeconfig file; empty: the pod's service account")
	cmd.Flags().IntVarP(&verbosity, "verbosity", "v", 0, "how much is logged; 1 adds every change of a slice")
	_ = cmd.MarkFlagRequired("config")
	return cmd
}
