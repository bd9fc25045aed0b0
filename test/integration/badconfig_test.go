package integration

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	sigsyaml "sigs.k8s.io/yaml"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	rpc "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
)

// A wrong configuration file ends the program at once, with the file, the field and the value.
// One runs after the other: all of a kind have the same ports.
func TestBadInputConfiguration(t *testing.T) {
	f := newFleet(t, fleetOptions{})
	for _, c := range []struct {
		program, name string
		// set changes a field of the file that works, given as the path to it.
		path  []any
		value any
		want  []string // besides the file
	}{
		{"manager", "no cluster", []any{"clusterID"}, "", []string{"clusterID"}},
		{"manager", "cluster of a bad name", []any{"clusterID"}, "Not/A/Name", []string{"clusterID", "Not/A/Name"}},
		{"manager", "unknown demand mode", []any{"demand"}, "Some", []string{"demand", "Some", "Total"}},
		{"manager", "no autoscaler", []any{"autoscaler", "address"}, "", []string{"autoscaler.address"}},
		{"manager", "certificate without a key", []any{"autoscaler", "tls", "keyFile"}, nil,
			[]string{"autoscaler.tls.keyFile"}},
		{"manager", "insecure with certificates", []any{"autoscaler", "tls", "insecure"}, true,
			[]string{"autoscaler.tls", "insecure"}},
		{"manager", "negative period", []any{"rollUp", "period"}, "-1s", []string{"rollUp.period", "-1s"}},
		{"manager", "not a duration", []any{"rollUp", "timeout"}, "soon", []string{"soon"}},
		{"manager", "negative concurrency", []any{"rollUp", "acknowledgeConcurrency"}, -3,
			[]string{"rollUp.acknowledgeConcurrency", "-3"}},
		{"manager", "negative rate", []any{"backstop", "qps"}, -1, []string{"backstop.qps", "-1"}},
		{"manager", "bad address", []any{"healthProbeBindAddress"}, "nowhere", []string{"healthProbeBindAddress", "nowhere"}},
		{"manager", "unknown field", []any{"fleet"}, "x", []string{"fleet"}},
		{"manager", "another kind", []any{"kind"}, "AutoscalerConfiguration", []string{"kind", "AutoscalerConfiguration"}},
		{"manager", "another version", []any{"apiVersion"}, "config.drover.sh/v9", []string{"apiVersion", "v9"}},

		{"autoscaler", "no provider", []any{"provider"}, map[string]any{}, []string{"provider"}},
		{"autoscaler", "bad address", []any{"listenAddress"}, "here", []string{"listenAddress", "here"}},
		{"autoscaler", "certificate without a key", []any{"tls", "keyFile"}, nil, []string{"tls.keyFile"}},
		{"autoscaler", "cluster without an id", []any{"provider", "kwok", "clusters", 0, "id"}, "",
			[]string{"provider.kwok.clusters[0].id"}},
		{"autoscaler", "impossible probability", []any{"provider", "kwok", "faults"}, map[string]any{"failLaunch": 1.5},
			[]string{"provider.kwok.faults.failLaunch", "1.5"}},
		{"autoscaler", "negative latency", []any{"provider", "kwok", "launchLatency"}, "-5s",
			[]string{"provider.kwok.launchLatency", "-5s"}},
		{"autoscaler", "impossible fraction", []any{"policy", "collapseFraction"}, 2,
			[]string{"policy.collapseFraction", "2"}},
		{"autoscaler", "negative cap", []any{"policy", "maxReclaimsPerMinute"}, -1,
			[]string{"policy.maxReclaimsPerMinute", "-1"}},
		{"autoscaler", "unknown field", []any{"policy", "dry"}, true, []string{"dry"}},
		{"autoscaler", "state of an unknown kind", []any{"state"}, "floppy:///a", []string{"state", "floppy"}},

		{"scheduler", "negative rate", []any{"profiles", 0, "pluginConfig", 0, "args", "qps"}, -1, []string{"qps", "-1"}},
		{"scheduler", "unknown demand mode", []any{"profiles", 0, "pluginConfig", 0, "args", "demand"}, "Some",
			[]string{"demand", "Some"}},
		{"scheduler", "unknown argument", []any{"profiles", 0, "pluginConfig", 0, "args", "rate"}, 1, []string{"rate"}},
		{"scheduler", "unknown field", []any{"profile"}, "x", []string{"profile"}},
	} {
		t.Run(c.program+"/"+c.name, func(t *testing.T) {
			file := badConfig(t, filepath.Join(f.dir, c.program+".yaml"), c.path, c.value)
			refusedAtStart(t, f, c.program, file, append(c.want, file))
		})
	}
	t.Run("autoscaler/bad offering", func(t *testing.T) {
		offerings := filepath.Join(t.TempDir(), "offerings.yaml")
		bad := strings.Replace(defaultOfferings, `cpu: "16"`, `cpu: "-16"`, 1)
		if err := os.WriteFile(offerings, []byte(bad), 0o644); err != nil {
			t.Fatal(err)
		}
		file := badConfig(t, filepath.Join(f.dir, "autoscaler.yaml"), []any{"provider", "kwok", "offeringsFile"}, offerings)
		refusedAtStart(t, f, "autoscaler", file, []string{offerings, "offerings[0].resources", "-16"})
	})
	for _, program := range []string{"scheduler", "manager", "autoscaler"} {
		t.Run(program+"/no such file", func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "nowhere.yaml")
			refusedAtStart(t, f, program, file, []string{file})
		})
	}
}

// badConfig writes the configuration at path with one field changed, and returns where.
func badConfig(t *testing.T, path string, field []any, value any) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var content map[string]any
	if err := sigsyaml.Unmarshal(data, &content); err != nil {
		t.Fatal(err)
	}
	var at any = content
	for _, step := range field[:len(field)-1] {
		if i, isIndex := step.(int); isIndex {
			at = at.([]any)[i]
			continue
		}
		m := at.(map[string]any)
		if m[step.(string)] == nil {
			m[step.(string)] = map[string]any{}
		}
		at = m[step.(string)]
	}
	last := field[len(field)-1].(string)
	if value == nil {
		delete(at.(map[string]any), last)
	} else {
		at.(map[string]any)[last] = value
	}
	if data, err = sigsyaml.Marshal(content); err != nil {
		t.Fatal(err)
	}
	bad := filepath.Join(t.TempDir(), "bad.yaml")
	if err := os.WriteFile(bad, data, 0o644); err != nil {
		t.Fatal(err)
	}
	return bad
}

// refusedAtStart runs a program that has to end by itself, with a failure that mentions all that is wanted.
func refusedAtStart(t *testing.T, f *fleet, name, config string, want []string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	args := append([]string{"--config=" + config}, f.args[name][1:]...)
	cmd := exec.CommandContext(ctx, program(t, name), args...)
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() <= 0 {
		t.Fatalf("%s ended with %v, want an exit code that is not 0:\n%s", name, err, out)
	}
	for _, w := range want {
		if !strings.Contains(string(out), w) {
			t.Errorf("%s does not mention %q:\n%s", name, w, out)
		}
	}
}

// With mutual TLS nobody speaks for another's cluster, and nobody without a certificate speaks at all.
func TestBadInputIdentity(t *testing.T) {
	f := startFleet(t, fleetOptions{without: []string{"manager", "scheduler"}})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	own, intruder := f.dial(t, ownCluster), f.dial(t, otherCluster)
	needs := &rpc.ClusterCapacityNeeds{ClusterId: ownCluster}

	calls := map[string]func(*grpc.ClientConn) error{
		"UpdateClusterNeeds": func(c *grpc.ClientConn) error {
			_, err := rpc.NewInfrastructureAutoscalerClient(c).UpdateClusterNeeds(ctx, needs)
			return err
		},
		"Subscribe": func(c *grpc.ClientConn) error {
			stream, err := rpc.NewCapacityFeedClient(c).Subscribe(ctx, &rpc.SubscribeRequest{ClusterId: ownCluster})
			if err == nil {
				_, err = stream.Recv()
			}
			return err
		},
		"ReportMachines": func(c *grpc.ClientConn) error {
			_, err := rpc.NewCapacityFeedClient(c).ReportMachines(ctx, &rpc.MachineReport{ClusterId: ownCluster})
			return err
		},
	}
	for name, call := range calls {
		if err := call(intruder); status.Code(err) != codes.PermissionDenied {
			t.Errorf("%s for %s by %s: %v, want PermissionDenied", name, ownCluster, otherCluster, err)
		} else if !strings.Contains(err.Error(), ownCluster) || !strings.Contains(err.Error(), otherCluster) {
			t.Errorf("%s: the refusal does not say who spoke for whom: %v", name, err)
		}
		if err := call(own); err != nil {
			t.Errorf("%s for the own cluster: %v", name, err)
		}
	}

	plain, err := grpc.NewClient(address(f.grpcPort), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	if err := calls["UpdateClusterNeeds"](plain); err == nil {
		t.Error("a caller without TLS was heard")
	}
}

// A need that makes no sense is refused with the field and the value, and what was said before stands.
func TestBadInputRollUp(t *testing.T) {
	f := startFleet(t, fleetOptions{without: []string{"manager", "scheduler"}})
	client := rpc.NewInfrastructureAutoscalerClient(f.dial(t, ownCluster))
	need := func(change func(*rpc.CapacityNeed)) *rpc.ClusterCapacityNeeds {
		n := &rpc.CapacityNeed{Count: 1, Pending: 1, Resources: map[string]string{"cpu": "1"}}
		change(n)
		return &rpc.ClusterCapacityNeeds{ClusterId: ownCluster, Needs: []*rpc.CapacityNeed{n}}
	}
	for _, c := range []struct {
		name   string
		change func(*rpc.CapacityNeed)
		want   []string
	}{
		{"not a quantity", func(n *rpc.CapacityNeed) { n.Resources["cpu"] = "many" }, []string{"needs[0].resources", "many"}},
		{"negative quantity", func(n *rpc.CapacityNeed) { n.Resources["cpu"] = "-1" }, []string{"needs[0].resources", "-1"}},
		{"negative count", func(n *rpc.CapacityNeed) { n.Count = -4 }, []string{"needs[0].count", "-4"}},
		{"unknown operator", func(n *rpc.CapacityNeed) {
			n.Requirements = []*rpc.NodeSelectorRequirement{{Key: "a", Operator: "Like", Values: []string{"b"}}}
		}, []string{"needs[0].requirements[0].operator", "Like"}},
		{"maxSkew 0", func(n *rpc.CapacityNeed) {
			n.Spread = []*rpc.TopologySpread{{TopologyKey: "z", WhenUnsatisfiable: "DoNotSchedule"}}
		}, []string{"needs[0].spread[0]", "0"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := client.UpdateClusterNeeds(t.Context(), need(c.change))
			if status.Code(err) != codes.InvalidArgument {
				t.Fatalf("%v, want InvalidArgument", err)
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("the refusal does not mention %q: %v", w, err)
				}
			}
		})
	}
}

// A launch that the provider fails shows on the UpcomingNode and in the verdict, in the provider's words.
func TestBadInputProviderError(t *testing.T) {
	f := startFleet(t, fleetOptions{autoscaler: func(c *configv1alpha1.AutoscalerConfiguration) {
		c.Provider.KWOK.Faults.FailLaunch = 1
	}})
	ns := namespace(t, "provider-error")
	p := pod(t, ns, "web", requests("cpu", "1"))
	var message string
	eventually(t, "an UpcomingNode is Failed", func(ctx context.Context) (bool, string) {
		var upcoming fleetv1alpha1.UpcomingNodeList
		failure := list(ctx, &upcoming)
		for _, u := range upcoming.Items {
			if u.Status.Phase == fleetv1alpha1.UpcomingNodeFailed {
				message = u.Status.Message
				return true, ""
			}
		}
		return false, failure
	})
	if message == "" {
		t.Error("the UpcomingNode does not say why it failed")
	}
	// What was attempted is worded for its place; what the provider said is the same.
	_, message, _ = strings.Cut(message, ": ")
	f.waitFeed(t, "a verdict gives the provider's error", func(s *rpc.FeedState) bool {
		for _, v := range s.Verdicts {
			if v.State != "Met" && strings.Contains(v.Reason, message) {
				return true
			}
		}
		return false
	})
	remove(t, p)
}
