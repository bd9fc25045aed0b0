// Command scheduler is kube-scheduler with the plugins CapacityRequest and VNAffinity, and with those of
// sigs.k8s.io/scheduler-plugins that build with this Kubernetes version. Flags and configuration are kube-scheduler's own; it
// runs beside the cluster's scheduler, for pods with its own schedulerName.
package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // metrics of the API client
	_ "k8s.io/component-base/metrics/prometheus/version"  // metric with the build's version
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/cmd/kube-scheduler/app"
	"k8s.io/kubernetes/cmd/kube-scheduler/app/options"
	_ "sigs.k8s.io/scheduler-plugins/apis/config/scheme" // the args of its plugins decode
	"sigs.k8s.io/scheduler-plugins/pkg/coscheduling"
	"sigs.k8s.io/scheduler-plugins/pkg/noderesources"
	"sigs.k8s.io/scheduler-plugins/pkg/noderesourcetopology"
	"sigs.k8s.io/scheduler-plugins/pkg/podstate"
	"sigs.k8s.io/scheduler-plugins/pkg/qos"
	"sigs.k8s.io/scheduler-plugins/pkg/trimaran/loadvariationriskbalancing"
	"sigs.k8s.io/scheduler-plugins/pkg/trimaran/lowriskovercommitment"
	"sigs.k8s.io/scheduler-plugins/pkg/trimaran/peaks"
	"sigs.k8s.io/scheduler-plugins/pkg/trimaran/targetloadpacking"

	"github.com/drover-sh/drover/plugins/capacityrequest"
	"github.com/drover-sh/drover/plugins/vnaffinity"
)

func main() {
	os.Exit(cli.Run(newCommand()))
}

// newCommand leaves out CapacityScheduling and PreemptionToleration, which do not compile on Kubernetes 1.36, and the
// plugins that need APIs of their own beyond the scheduler's (network-aware, SySched).
func newCommand() *cobra.Command {
	var command *cobra.Command
	configFile := func() string { return command.Flag("config").Value.String() }
	command = app.NewSchedulerCommand(
		app.WithPlugin(capacityrequest.Name, capacityrequest.Factory(configFile)),
		app.WithPlugin(vnaffinity.Name, vnaffinity.Factory(configFile, func() (bool, error) { return electsLeader(command, configFile()) })),
		app.WithPlugin(coscheduling.Name, coscheduling.New),
		app.WithPlugin(noderesources.AllocatableName, noderesources.NewAllocatable),
		app.WithPlugin(noderesourcetopology.Name, noderesourcetopology.New),
		app.WithPlugin(loadvariationriskbalancing.Name, loadvariationriskbalancing.New),
		app.WithPlugin(lowriskovercommitment.Name, lowriskovercommitment.New),
		app.WithPlugin(peaks.Name, peaks.New),
		app.WithPlugin(targetloadpacking.Name, targetloadpacking.New),
		app.WithPlugin(podstate.Name, podstate.New),
		app.WithPlugin(qos.Name, qos.New),
	)
	command.Use = "drover-scheduler"
	// kube-scheduler does not say which file a wrong field is in.
	run := command.RunE
	command.RunE = func(c *cobra.Command, args []string) error {
		err := run(c, args)
		if file := configFile(); err != nil && file != "" && !strings.Contains(err.Error(), file) {
			return fmt.Errorf("running with configuration file %s: %w", file, err)
		}
		return err
	}
	return command
}

// electsLeader says whether the process waits to be elected, as kube-scheduler finds it out: by the flag, else by the file.
func electsLeader(command *cobra.Command, configFile string) (bool, error) {
	flag := command.Flags().Lookup("leader-elect")
	if configFile == "" || flag.Changed {
		return strconv.ParseBool(flag.Value.String())
	}
	config, err := options.LoadConfigFromFile(klog.Background(), configFile)
	if err != nil {
		return false, err
	}
	return config.LeaderElection.LeaderElect, nil
}
