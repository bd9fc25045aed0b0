// Command manager joins one cluster to the infrastructure autoscaler: it rolls the cluster's demand up, follows the
// autoscaler's feed, and backs the scheduler plugin up.
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
	"github.com/drover-sh/drover/internal/manager"
)

func main() {
	if err := command().ExecuteContext(ctrl.SetupSignalHandler()); err != nil {
		fmt.Fprintln(os.Stderr, "drover-manager:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	var configFile, kubeconfig string
	var verbosity int
	cmd := &cobra.Command{
		Use:           "drover-manager --config FILE",
		Short:         "Joins a cluster to the infrastructure autoscaler",
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log := textlogger.NewLogger(textlogger.NewConfig(textlogger.Verbosity(verbosity)))
			ctrl.SetLogger(log)
			klog.SetLogger(log)
			var config configv1alpha1.ManagerConfiguration
			if err := configv1alpha1.Load(configFile, &config); err != nil {
				return err
			}
			err := manager.Run(cmd.Context(), &config, kubeconfig, log)
			if wrong := (*manager.ConfigError)(nil); errors.As(err, &wrong) {
				return fmt.Errorf("configuration file %s: %w", configFile, err)
			}
			return err
		},
	}
	cmd.Flags().StringVar(&configFile, "config", "", "file of kind ManagerConfiguration (required)")
	cmd.Flags().StringVar(&kubeconfig, "kubeconfig", "", "kubeconfig file; empty: the pod's service account")
	cmd.Flags().IntVarP(&verbosity, "verbosity", "v", 0, "how much is logged; 1 adds retries")
	_ = cmd.MarkFlagRequired("config")
	return cmd
}
