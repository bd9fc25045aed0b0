// Package activeschedulers starts what several active schedulers need, for tests and benchmarks: an API server, the real
// coordinator with a WatchGroup, kwok for the nodes, and as many replicas of cmd/scheduler as one likes, each a process of
// its own. Start reading at Start.
package activeschedulers

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/internal/controlplane"
	"github.com/drover-sh/drover/internal/process"
)

const (
	// Namespace and Group name the WatchGroup.
	Namespace = "fleet-system"
	Group     = "drover-scheduler"
	// SchedulerName is that of the profile.
	SchedulerName = "drover-scheduler"
	// VirtualNodes is V.
	VirtualNodes = 1000
	// LeaseDuration is how long a replica that was killed keeps what it had.
	LeaseDuration = 6 * time.Second
)

// A Cluster has no scheduler until one is started.
type Cluster struct {
	ControlPlane *controlplane.ControlPlane
	Client       client.Client // an administrator's, with no limit

	dir, bin string
	group    *process.Group
	webhook  *envtest.WebhookInstallOptions
}

// A Scheduler is one replica.
type Scheduler struct {
	*process.Process
	Member string
	port   int
}

// Start starts everything but schedulers below dir, which stays for its logs.
func Start(ctx context.Context, dir string, o controlplane.Options) (_ *Cluster, err error) {
	c := &Cluster{dir: dir, bin: filepath.Join(dir, "bin"), webhook: &envtest.WebhookInstallOptions{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Stop())
		}
	}()
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		return nil, err
	}
	build := exec.CommandContext(ctx, "go", "build", "-o", c.bin+"/", "./cmd/coordinator", "./cmd/scheduler")
	build.Dir = root
	if out, err := build.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("building the programs: %w\n%s", err, out)
	}
	o.Dir = filepath.Join(dir, "control-plane")
	o.CRDPaths = append(o.CRDPaths, filepath.Join(root, "manifests", "crd", "bases"))
	if c.ControlPlane, err = controlplane.Start(ctx, o); err != nil {
		return nil, err
	}
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), lbv1alpha1.AddToScheme(scheme)); err != nil {
		return nil, err
	}
	config := c.ControlPlane.Config()
	config.QPS = -1
	if c.Client, err = client.New(config, client.Options{Scheme: scheme}); err != nil {
		return nil, err
	}
	if c.group, err = process.NewGroup(filepath.Join(dir, "programs")); err != nil {
		return nil, err
	}
	if err := c.Client.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: Namespace}}); err != nil {
		return nil, err
	}
	if err := c.Client.Create(ctx, watchGroup()); err != nil {
		return nil, err
	}
	return c, c.startCoordinator()
}

func watchGroup() *lbv1alpha1.WatchGroup {
	d := func(d time.Duration) *metav1.Duration { return &metav1.Duration{Duration: d} }
	return &lbv1alpha1.WatchGroup{
		ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: Group},
		Spec: lbv1alpha1.WatchGroupSpec{
			VirtualNodes: VirtualNodes, OptIn: lbv1alpha1.OptInNone,
			Resources: []lbv1alpha1.Resource{{Resource: "nodes"}, {Resource: "pods"}},
			Lease: lbv1alpha1.LeaseParameters{
				LeaseDuration: d(LeaseDuration), RenewDeadline: d(3 * time.Second),
				RetryPeriod: d(500 * time.Millisecond), RequestTimeout: d(2500 * time.Millisecond),
			},
			NewcomerGrace: d(time.Second),
		},
	}
}

// startCoordinator runs the coordinator. Its webhook is served and asked by nobody: the group takes no object.
func (c *Cluster) startCoordinator() error {
	if err := c.webhook.PrepWithoutInstalling(); err != nil {
		return err
	}
	ca := filepath.Join(c.dir, "ca.crt")
	if err := os.WriteFile(ca, c.webhook.LocalServingCAData, 0o644); err != nil {
		return err
	}
	port, err := process.FreePort()
	if err != nil {
		return err
	}
	certs := c.webhook.LocalServingCertDir
	config := fmt.Sprintf(`apiVersion: config.drover.sh/v1alpha1
kind: CoordinatorConfiguration
namespace: %s
metricsBindAddress: "0"
healthProbeBindAddress: "0"
webhook: {bindAddress: "127.0.0.1:%d", certFile: %q, keyFile: %q, caFile: %q}
leaderElection: {leaseDuration: 4s, renewDeadline: 3s, retryPeriod: 500ms}
`, Namespace, port, filepath.Join(certs, "tls.crt"), filepath.Join(certs, "tls.key"), ca)
	file := filepath.Join(c.dir, "coordinator.yaml")
	if err := os.WriteFile(file, []byte(config), 0o644); err != nil {
		return err
	}
	_, err = c.group.Start(process.Spec{
		Name: "coordinator", Path: filepath.Join(c.bin, "coordinator"),
		Args: []string{"--config=" + file, "--kubeconfig=" + c.ControlPlane.Kubeconfig(), "-v=1"},
	})
	return err
}

// profile is the one of manifests/overlays/schedulers, less CapacityRequest where nobody answers it.
const profile = `apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
clientConnection: {kubeconfig: %q, qps: 1000, burst: 2000}
leaderElection: {leaderElect: false}
profiles:
- schedulerName: %s
%s`

const activePlugins = `  plugins:
    multiPoint: {enabled: [{name: VNAffinity}]}
    postFilter: {enabled: [{name: VNAffinity}%s]}
    bind: {enabled: [{name: VNAffinity}]}
  pluginConfig:
  - name: VNAffinity
    args:
      apiVersion: config.drover.sh/v1alpha1
      kind: VNAffinityArgs
      schedulers: {namespace: %s, watchGroup: %s, member: %s}
`

// StartScheduler starts a replica that is a member of the group under this name.
func (c *Cluster) StartScheduler(member string, morePostFilters ...string) (*Scheduler, error) {
	more := ""
	for _, name := range morePostFilters {
		more += ", {name: " + name + "}"
	}
	return c.start(member, fmt.Sprintf(activePlugins, more, Namespace, Group, member))
}

// StartLoneScheduler starts a scheduler that has no group.
func (c *Cluster) StartLoneScheduler(name string) (*Scheduler, error) { return c.start(name, "") }

func (c *Cluster) start(name, plugins string) (*Scheduler, error) {
	kubeconfig := c.ControlPlane.Kubeconfig()
	file := filepath.Join(c.dir, name+".yaml")
	if err := os.WriteFile(file, fmt.Appendf(nil, profile, kubeconfig, SchedulerName, plugins), 0o644); err != nil {
		return nil, err
	}
	port, err := process.FreePort()
	if err != nil {
		return nil, err
	}
	p, err := c.group.Start(process.Spec{
		Name: name, Path: filepath.Join(c.bin, "scheduler"),
		Args: []string{
			"--config=" + file, "--authentication-kubeconfig=" + kubeconfig, "--authorization-kubeconfig=" + kubeconfig,
			"--authorization-always-allow-paths=/metrics", "--bind-address=127.0.0.1", "--secure-port=" + strconv.Itoa(port), "--v=2",
		},
	})
	if err != nil {
		return nil, err
	}
	return &Scheduler{Process: p, Member: name, port: port}, nil
}

// Owned returns how many Virtual Nodes each member of the group owns, and whether none is on its way.
func (c *Cluster) Owned(ctx context.Context) (map[string]int, bool, error) {
	var list lbv1alpha1.VirtualNodeSliceList
	if err := c.Client.List(ctx, &list, client.InNamespace(Namespace)); err != nil {
		return nil, false, err
	}
	owned, sum, still := make(map[string]int), 0, true
	for _, s := range list.Items {
		owned[s.Spec.Member] = int(s.Spec.Counts.Owned)
		sum += int(s.Spec.Counts.Owned)
		still = still && s.Spec.Counts.Incoming == 0 && s.Spec.Counts.Draining == 0 && len(s.Spec.Grants) == 0
	}
	return owned, still && sum == VirtualNodes, nil
}

var sample = regexp.MustCompile(`(?m)^([a-z_]+)(\{[^}]*\})? ([0-9.e+-]+)$`)

// Metric returns the sum of the replica's samples of a counter whose labels match.
func (s *Scheduler) Metric(name, labels string) (float64, error) {
	insecure := &http.Client{
		Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}, // its certificate is its own, on loopback
		Timeout:   10 * time.Second,
	}
	defer insecure.CloseIdleConnections()
	resp, err := insecure.Get(fmt.Sprintf("https://127.0.0.1:%d/metrics", s.port))
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err
	}
	if resp.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("metrics of %s: %s: %s", s.Member, resp.Status, text)
	}
	match, err := regexp.Compile(labels)
	if err != nil {
		return 0, err
	}
	sum := 0.0
	for _, m := range sample.FindAllStringSubmatch(string(text), -1) {
		if m[1] == name && match.MatchString(m[2]) {
			v, err := strconv.ParseFloat(m[3], 64)
			if err != nil {
				return 0, err
			}
			sum += v
		}
	}
	return sum, nil
}

// Stop ends all processes.
func (c *Cluster) Stop() error {
	var errs []error
	if c.group != nil {
		errs = append(errs, c.group.Stop(10*time.Second))
	}
	if c.ControlPlane != nil {
		errs = append(errs, c.ControlPlane.Stop())
	}
	if c.webhook.LocalServingCertDir != "" {
		errs = append(errs, c.webhook.Cleanup())
	}
	return errors.Join(errs...)
}
