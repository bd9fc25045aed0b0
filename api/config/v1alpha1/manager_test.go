package v1alpha1

import (
	"strings"
	"testing"
	"time"
)

const minimalManager = `
apiVersion: config.drover.sh/v1alpha1
kind: ManagerConfiguration
clusterID: cluster-1
autoscaler:
  address: autoscaler:9443
`

func TestManagerConfigurationDefaults(t *testing.T) {
	var c ManagerConfiguration
	if err := Decode([]byte(minimalManager), &c); err != nil {
		t.Fatal(err)
	}
	if c.Namespace != "fleet-system" || c.Demand != DemandTotal || c.MetricsBindAddress != ":8443" ||
		c.HealthProbeBindAddress != ":8081" || c.RollUp.Period.Duration != 10*time.Second ||
		c.RollUp.AcknowledgeConcurrency != 16 || !*c.Backstop.Enabled || !*c.LeaderElection.LeaderElect ||
		c.Reclaim.MaxConcurrentDrains != 10 || c.Reclaim.SettleTime.Duration != 2*time.Second {
		t.Errorf("defaults are %+v", c)
	}
}

func TestShardingIsOffByDefaultAndNextToTheManager(t *testing.T) {
	var c ManagerConfiguration
	if err := Decode([]byte(minimalManager+"namespace: elsewhere"), &c); err != nil {
		t.Fatal(err)
	}
	if s := c.Sharding; s.Enabled || s.WatchGroup != "drover-manager" || s.Namespace != "elsewhere" || s.LeaveTimeout.Duration != 10*time.Second {
		t.Errorf("defaults are %+v", s)
	}
}

func TestManagerConfigurationIsValidated(t *testing.T) {
	for _, c := range []struct {
		name, more string
		want       []string
	}{
		{"mode", "demand: Some", []string{"demand", "Some"}},
		{"namespace", "namespace: a/b", []string{"namespace", "a/b"}},
		{"address", "metricsBindAddress: here", []string{"metricsBindAddress", "here"}},
		{"port", "healthProbeBindAddress: ':99999'", []string{"healthProbeBindAddress", ":99999"}},
		{"period", "rollUp: {period: -1s}", []string{"rollUp.period", "-1s"}},
		{"concurrency", "rollUp: {acknowledgeConcurrency: -3}", []string{"rollUp.acknowledgeConcurrency", "-3"}},
		{"drains", "reclaim: {maxConcurrentDrains: -1}", []string{"reclaim.maxConcurrentDrains", "-1"}},
		{"deadline", "reclaim: {drainDeadline: 1ms}", []string{"reclaim.drainDeadline", "1ms"}},
		{"Kueue wait", "kueue: {provisionTimeout: 1ms}", []string{"kueue.provisionTimeout", "1ms"}},
		{"Kueue hold", "kueue: {bookingTTL: 0s}", []string{"kueue.bookingTTL", "0s"}},
		{"group", "sharding: {watchGroup: a.b}", []string{"sharding.watchGroup", "a.b"}},
		{"group's namespace", "sharding: {namespace: A}", []string{"sharding.namespace", "A"}},
		{"leave", "sharding: {leaveTimeout: 1ms}", []string{"sharding.leaveTimeout", "1ms"}},
		{"lease", "leaderElection: {leaseDuration: 5s}", []string{"leaderElection.leaseDuration", "5s", "renewDeadline"}},
		{"rate", "backstop: {qps: -1}", []string{"backstop.qps", "-1"}},
		{"namespaces", "backstop: {namespaces: [ok, Bad_]}", []string{"backstop.namespaces[1]", "Bad_"}},
		{"unknown", "rollups: {}", []string{"rollups"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := Decode([]byte(minimalManager+c.more), &ManagerConfiguration{})
			if err == nil {
				t.Fatal("no error")
			}
			for _, part := range c.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%q does not name %q", err, part)
				}
			}
		})
	}
	// What is wrong inside the autoscaler's part.
	for more, want := range map[string]string{
		"  backoffMax: 1ms":                      "autoscaler.backoffMax",
		"  tls: {certFile: a}":                   "autoscaler.tls.keyFile",
		"  tls: {keyFile: a}":                    "autoscaler.tls.certFile",
		"  tls: {insecure: true, caFile: a}":     "autoscaler.tls.insecure",
		"  tls: {insecure: true, serverName: a}": "autoscaler.tls.insecure",
	} {
		if err := Decode([]byte(minimalManager+more), &ManagerConfiguration{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: the error is %v, want %s in it", more, err, want)
		}
	}
}

func TestFieldNamesAreCaseSensitive(t *testing.T) {
	file := "apiVersion: config.drover.sh/v1alpha1\nkind: ManagerConfiguration\nclusterId: c\nautoscaler: {address: \"a:1\"}\n"
	err := Decode([]byte(file), &ManagerConfiguration{})
	if err == nil || !strings.Contains(err.Error(), "clusterId") {
		t.Errorf("Decode accepted clusterId for clusterID: %v", err)
	}
}
