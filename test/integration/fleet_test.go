package integration

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	sigsyaml "sigs.k8s.io/yaml"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/internal/process"
)

// fleetOptions says what differs from the configuration that the manifests ship.
type fleetOptions struct {
	// offerings is the content of the offerings file; empty: defaultOfferings.
	offerings  string
	autoscaler func(*configv1alpha1.AutoscalerConfiguration)
	manager    func(*configv1alpha1.ManagerConfiguration)
	// without leaves programs out.
	without []string
}

// fleet is our three programs, each with the rights of its ServiceAccount and the configuration of the manifests, in which
// only what ties it to a pod is replaced: addresses, paths and the times that a test cannot afford.
type fleet struct {
	t     *testing.T
	dir   string
	group *process.Group

	offeringsFile string
	grpcPort      int
	// By the process's name: the program's, or that with a dash and more where it runs more than once.
	args    map[string][]string
	ready   map[string]string // health URLs
	metrics map[string]string // metrics URLs
	running map[string]*process.Process
}

const defaultOfferings = `
apiVersion: config.drover.sh/v1alpha1
kind: OfferingList
offerings:
- name: cpu-16
  resources: {cpu: "16", memory: 64Gi}
  cost: 1
  domains:
  - {zone: zone-a, count: 20}
  - {zone: zone-b, count: 20}
  - {zone: zone-c, count: 20}
- name: gpu-8
  resources: {cpu: "96", memory: 1000Gi, nvidia.com/gpu: "8"}
  taints: ["nvidia.com/gpu=present:NoSchedule"]
  cost: 30
  domains:
  - {zone: zone-a, rack: rack-a1, count: 52}
  - {zone: zone-b, rack: rack-b1, count: 64}
`

// startFleet starts the programs for one test, and gives the next test an empty cluster.
func startFleet(t *testing.T, o fleetOptions) *fleet {
	t.Helper()
	f := newFleet(t, o)
	for _, name := range []string{"autoscaler", "manager", "scheduler"} {
		if !slices.Contains(o.without, name) {
			f.start(name)
		}
	}
	return f
}

// newFleet writes every configuration and starts nothing.
func newFleet(t *testing.T, o fleetOptions) *fleet {
	t.Helper()
	dir := filepath.Join(env.dir, "fleets", strings.ReplaceAll(t.Name(), "/", "-"))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	group, err := process.NewGroup(dir)
	if err != nil {
		t.Fatal(err)
	}
	// dump finds the logs of the fleet that runs.
	current := filepath.Join(env.dir, "fleets", "current")
	_ = os.Remove(current)
	if err := os.Symlink(dir, current); err != nil {
		t.Fatal(err)
	}
	f := &fleet{
		t: t, dir: dir, group: group,
		args: map[string][]string{}, ready: map[string]string{}, metrics: map[string]string{},
		running: map[string]*process.Process{},
	}
	t.Cleanup(func() { emptyCluster(t) })
	t.Cleanup(func() {
		if err := group.Stop(20 * time.Second); err != nil {
			t.Errorf("stopping the programs: %v", err)
		}
	})
	if o.offerings == "" {
		o.offerings = defaultOfferings
	}
	f.offeringsFile = f.write("offerings.yaml", o.offerings)
	f.configureAutoscaler(o.autoscaler)
	f.configureManager("manager", o.manager)
	f.configureScheduler()
	return f
}

func (f *fleet) write(name, content string) string {
	f.t.Helper()
	path := filepath.Join(f.dir, name)
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		f.t.Fatal(err)
	}
	return path
}

func (f *fleet) writeYAML(name string, content any) string {
	f.t.Helper()
	data, err := sigsyaml.Marshal(content)
	if err != nil {
		f.t.Fatal(err)
	}
	return f.write(name, string(data))
}

// kubeconfig holds a token of the ServiceAccount that the manifests give the program.
func (f *fleet) kubeconfig(name string) string {
	f.t.Helper()
	path, err := env.cp.KubeconfigForServiceAccount(f.t.Context(), system, "drover-"+name)
	if err != nil {
		f.t.Fatal(err)
	}
	return path
}

func (f *fleet) port() int {
	f.t.Helper()
	port, err := process.FreePort()
	if err != nil {
		f.t.Fatal(err)
	}
	return port
}

func address(port int) string { return "127.0.0.1:" + strconv.Itoa(port) }

func (f *fleet) configureAutoscaler(change func(*configv1alpha1.AutoscalerConfiguration)) {
	f.t.Helper()
	c := &configv1alpha1.AutoscalerConfiguration{}
	shippedConfig(f.t, build(f.t, "default"), "autoscaler.yaml", c)
	f.grpcPort = f.port()
	health, metrics := f.port(), f.port()
	c.ListenAddress = address(f.grpcPort)
	c.HealthProbeBindAddress, c.MetricsBindAddress = address(health), address(metrics)
	certs := filepath.Join(certDir(), "autoscaler")
	c.TLS.CertFile, c.TLS.KeyFile = filepath.Join(certs, "tls.crt"), filepath.Join(certs, "tls.key")
	c.TLS.ClientCAFile = filepath.Join(certs, "ca.crt")
	c.State = "file://" + filepath.Join(f.dir, "state")
	if err := os.MkdirAll(filepath.Join(f.dir, "state"), 0o755); err != nil {
		f.t.Fatal(err)
	}
	kwok := c.Provider.KWOK
	kwok.OfferingsFile = f.offeringsFile
	kwok.Clusters[0].Kubeconfig = f.kubeconfig("autoscaler")
	kwok.LaunchLatency = &metav1.Duration{Duration: 300 * time.Millisecond}
	kwok.RegisterLatency = &metav1.Duration{Duration: 300 * time.Millisecond}
	kwok.Seed = 1
	c.Policy.ConsolidationDelay = &metav1.Duration{Duration: 3 * time.Second}
	c.Policy.CollapseHold = &metav1.Duration{Duration: 5 * time.Second}
	c.Policy.MaxReclaimsPerMinute = 1000
	c.Policy.FailedRetention = &metav1.Duration{Duration: 5 * time.Second}
	c.Policy.SettleTime = &metav1.Duration{Duration: 10 * time.Second}
	if change != nil {
		change(c)
	}
	f.args["autoscaler"] = []string{"--config=" + f.writeYAML("autoscaler.yaml", c)}
	f.ready["autoscaler"] = "http://" + address(health) + "/readyz"
	f.metrics["autoscaler"] = "http://" + address(metrics) + "/metrics"
}

func (f *fleet) configureManager(name string, change func(*configv1alpha1.ManagerConfiguration)) {
	f.t.Helper()
	c := &configv1alpha1.ManagerConfiguration{}
	shippedConfig(f.t, build(f.t, "default"), "manager.yaml", c)
	health, metrics := f.port(), f.port()
	c.HealthProbeBindAddress, c.MetricsBindAddress = address(health), address(metrics)
	certs := filepath.Join(certDir(), "manager-"+ownCluster)
	c.Autoscaler.Address = address(f.grpcPort)
	c.Autoscaler.TLS.CAFile = filepath.Join(certs, "ca.crt")
	c.Autoscaler.TLS.CertFile, c.Autoscaler.TLS.KeyFile = filepath.Join(certs, "tls.crt"), filepath.Join(certs, "tls.key")
	c.Autoscaler.BackoffMax = &metav1.Duration{Duration: time.Second}
	c.RollUp.Period = &metav1.Duration{Duration: 2 * time.Second}
	c.Backstop.Delay = &metav1.Duration{Duration: time.Second}
	// A leader that is late to renew ends, and nobody starts it again: that has to be for good reason.
	c.LeaderElection = configv1alpha1.LeaderElectionConfig{
		LeaderElect:   ptr.To(true),
		LeaseDuration: &metav1.Duration{Duration: 15 * time.Second},
		RenewDeadline: &metav1.Duration{Duration: 10 * time.Second},
		RetryPeriod:   &metav1.Duration{Duration: 500 * time.Millisecond},
	}
	if change != nil {
		change(c)
	}
	f.args[name] = []string{"--config=" + f.writeYAML(name+".yaml", c), "--kubeconfig=" + f.kubeconfig("manager")}
	f.ready[name] = "http://" + address(health) + "/readyz"
	f.metrics[name] = "https://" + address(metrics) + "/metrics"
}

func (f *fleet) configureScheduler() {
	f.t.Helper()
	var c map[string]any
	for _, m := range kindOf[corev1.ConfigMap](f.t, build(f.t, "default"), "ConfigMap") {
		if data, ok := m.Data["scheduler.yaml"]; ok {
			if err := sigsyaml.UnmarshalStrict([]byte(data), &c); err != nil {
				f.t.Fatal(err)
			}
		}
	}
	kubeconfig := f.kubeconfig("scheduler")
	c["clientConnection"] = map[string]any{"kubeconfig": kubeconfig, "qps": 500, "burst": 1000}
	election := c["leaderElection"].(map[string]any)
	election["leaseDuration"], election["renewDeadline"], election["retryPeriod"] = "15s", "10s", "500ms"
	port := f.port()
	f.args["scheduler"] = []string{
		"--config=" + f.writeYAML("scheduler.yaml", c),
		"--authentication-kubeconfig=" + kubeconfig,
		"--authorization-kubeconfig=" + kubeconfig,
		"--bind-address=127.0.0.1",
		fmt.Sprintf("--secure-port=%d", port),
	}
	f.ready["scheduler"] = "https://" + address(port) + "/readyz"
	f.metrics["scheduler"] = "https://" + address(port) + "/metrics"
}

// start runs a program and waits until it is ready.
func (f *fleet) start(name string) {
	f.t.Helper()
	f.launch(name)
	f.waitReady(name)
}

// launch runs a program and waits for nothing.
func (f *fleet) launch(name string) {
	f.t.Helper()
	built, _, _ := strings.Cut(name, "-")
	// A member of a WatchGroup is named like its pod.
	p, err := f.group.Start(process.Spec{Name: name, Path: program(f.t, built), Args: f.args[name], Env: []string{"POD_NAME=" + name}})
	if err != nil {
		f.t.Fatal(err)
	}
	f.running[name] = p
}

func (f *fleet) waitReady(name string) {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), patience)
	defer cancel()
	if err := f.running[name].WaitReady(ctx, f.ready[name]); err != nil {
		f.t.Fatalf("%v\n%s", err, dump())
	}
}

// kill is kill -9, and the start of a successor as a kubelet would do it. The Lease of the dead goes with it, so that the
// successor need not wait for its end.
func (f *fleet) kill(name string) {
	f.t.Helper()
	if err := f.running[name].Kill(); err != nil {
		f.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(f.t.Context(), patience)
	defer cancel()
	if err := removeLease(ctx, "drover-"+name); err != nil {
		f.t.Fatal(err)
	}
	f.start(name)
}

// removeLease removes the Lease of a leader that has ended.
func removeLease(ctx context.Context, name string) error {
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: system, Name: name}}
	return client.IgnoreNotFound(env.client.Delete(ctx, lease))
}

// emptyCluster removes what a fleet leaves: its nodes and Leases stay when its programs end.
func emptyCluster(t *testing.T) {
	t.Helper()
	ctx, cancel := cleanupContext()
	defer cancel()
	for _, program := range []string{"manager", "scheduler"} {
		if err := removeLease(ctx, "drover-"+program); err != nil {
			t.Errorf("removing the Lease of the %s: %v", program, err)
		}
	}
	for _, o := range []client.Object{
		&corev1.Node{}, &fleetv1alpha1.UpcomingNode{}, &fleetv1alpha1.AvailableCapacity{},
		&fleetv1alpha1.CapacityRequest{},
	} {
		var opts []client.DeleteAllOfOption
		if _, clusterScoped := o.(*corev1.Node); !clusterScoped {
			opts = append(opts, client.InNamespace(system))
		}
		if err := env.client.DeleteAllOf(ctx, o, opts...); err != nil {
			t.Errorf("emptying the cluster of %T: %v", o, err)
		}
	}
}
