// Package activeschedulers starts what several active schedulers need, for tests and benchmarks: an API server, the real
// coordinator with a WatchGroup, kwok for the nodes, and as many replicas of cmd/scheduler as one likes, each a process of
// its own. Start reading at Start.
package activeschedulers

import (
	"bytes"
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
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/yaml"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/internal/controlplane"
	"github.com/drover-sh/drover/internal/process"
)

const (
	// Namespace is that of the WatchGroup.
	Namespace = "fleet-system"
	// Group is the WatchGroup's name.
	Group = "drover-scheduler"
	// SchedulerName is that of the profile. It is not the deployed one, which other tests have.
	SchedulerName = "active-scheduler"
	// VirtualNodes is V.
	VirtualNodes = 1000
)

// A Cluster has no scheduler until one is started.
type Cluster struct {
	ControlPlane *controlplane.ControlPlane // nil where On was given another one's
	Client       client.Client              // an administrator's, with no limit

	admin    string // the administrator's kubeconfig
	dir      string
	programs Programs
	group    *process.Group
	webhook  *envtest.WebhookInstallOptions
	policies []*unstructured.Unstructured
}

// A Scheduler is one replica.
type Scheduler struct {
	*process.Process
	Member string
	port   int
}

// Start builds the programs and starts everything but schedulers below dir, which stays for its logs.
func Start(ctx context.Context, dir string, o controlplane.Options) (_ *Cluster, err error) {
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		return nil, err
	}
	bin := filepath.Join(dir, "bin")
	build := exec.CommandContext(ctx, "go", "build", "-o", bin+"/", "./cmd/coordinator", "./cmd/scheduler")
	build.Dir = root
	if out, err := build.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("building the programs: %w\n%s", err, out)
	}
	o.Dir = filepath.Join(dir, "control-plane")
	o.CRDPaths = append(o.CRDPaths, filepath.Join(root, "manifests", "crd", "bases"))
	cp, err := controlplane.Start(ctx, o)
	if err != nil {
		return nil, err
	}
	c, err := On(ctx, cp.Kubeconfig(), Programs{Coordinator: filepath.Join(bin, "coordinator"), Scheduler: filepath.Join(bin, "scheduler")}, dir)
	if err != nil {
		return nil, errors.Join(err, cp.Stop())
	}
	c.ControlPlane = cp
	return c, nil
}

// Programs are the paths of what is run.
type Programs struct{ Coordinator, Scheduler string }

// On starts the coordinator on a control plane that has our CRDs, with a WatchGroup and the fence. The kubeconfig is an
// administrator's. On error nothing is left running.
func On(ctx context.Context, kubeconfig string, programs Programs, dir string) (_ *Cluster, err error) {
	c := &Cluster{admin: kubeconfig, dir: dir, programs: programs, webhook: &envtest.WebhookInstallOptions{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Stop())
		}
	}()
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), lbv1alpha1.AddToScheme(scheme)); err != nil {
		return nil, err
	}
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, err
	}
	config.QPS = -1
	if c.Client, err = client.New(config, client.Options{Scheme: scheme}); err != nil {
		return nil, err
	}
	if c.group, err = process.NewGroup(filepath.Join(dir, "programs")); err != nil {
		return nil, err
	}
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: Namespace}}
	if err := c.Client.Create(ctx, namespace); err != nil && !apierrors.IsAlreadyExists(err) {
		return nil, err
	}
	if err := c.fence(ctx); err != nil {
		return nil, err
	}
	if err := c.startCoordinator(); err != nil {
		return nil, err
	}
	return c, c.Client.Create(ctx, watchGroup())
}

// identity is whom the fence asks for.
const identity = "system:serviceaccount:" + Namespace + ":drover-scheduler"

// fence installs the admission policy, and makes a kubeconfig whose requests it looks at.
func (c *Cluster) fence(ctx context.Context) error {
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		return err
	}
	text, err := os.ReadFile(filepath.Join(root, "manifests", "overlays", "schedulers", "fence.yaml"))
	if err != nil {
		return err
	}
	for decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(text), 4096); ; {
		u := &unstructured.Unstructured{}
		if err := decoder.Decode(u); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return err
		}
		if err := c.Client.Create(ctx, u); err != nil {
			return err
		}
		c.policies = append(c.policies, u)
	}
	config, err := clientcmd.LoadFromFile(c.admin)
	if err != nil {
		return err
	}
	for _, user := range config.AuthInfos {
		user.Impersonate, user.ImpersonateGroups = identity, []string{"system:masters"}
	}
	return clientcmd.WriteToFile(*config, c.kubeconfig())
}

func (c *Cluster) kubeconfig() string { return filepath.Join(c.dir, "scheduler.kubeconfig") }

// AsScheduler returns a client with a scheduler's identity, for what one sends late.
func (c *Cluster) AsScheduler() (client.Client, error) {
	config, err := clientcmd.BuildConfigFromFlags("", c.kubeconfig())
	if err != nil {
		return nil, err
	}
	config.QPS = -1
	return client.New(config, client.Options{Scheme: c.Client.Scheme()})
}

func watchGroup() *lbv1alpha1.WatchGroup {
	// The Lease is as it is by default: an API server that shares its processors with everything answers late.
	return &lbv1alpha1.WatchGroup{
		ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: Group},
		Spec: lbv1alpha1.WatchGroupSpec{
			VirtualNodes: VirtualNodes, OptIn: lbv1alpha1.OptInNone,
			Resources:     []lbv1alpha1.Resource{{Resource: "nodes"}, {Resource: "pods"}},
			NewcomerGrace: &metav1.Duration{Duration: time.Second},
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
leaderElection: {leaseDuration: 60s, renewDeadline: 50s, retryPeriod: 2s} # nobody starts it again
`, Namespace, port, filepath.Join(certs, "tls.crt"), filepath.Join(certs, "tls.key"), ca)
	file := filepath.Join(c.dir, "coordinator.yaml")
	if err := os.WriteFile(file, []byte(config), 0o644); err != nil {
		return err
	}
	_, err = c.group.Start(process.Spec{
		Name: "coordinator", Path: c.programs.Coordinator,
		Args: []string{"--config=" + file, "--kubeconfig=" + c.admin, "-v=1"},
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
	return c.start(member, fmt.Sprintf(activePlugins, more, Namespace, Group, member), c.kubeconfig())
}

// StartLoneScheduler starts a scheduler that has no group. It is not the ServiceAccount of those that have, whose binds the
// fence refuses if they do not say which replica they come from, as long as the group has slices.
func (c *Cluster) StartLoneScheduler(name string) (*Scheduler, error) {
	return c.start(name, "", c.admin)
}

func (c *Cluster) start(name, plugins, kubeconfig string) (*Scheduler, error) {
	file := filepath.Join(c.dir, name+".yaml")
	if err := os.WriteFile(file, fmt.Appendf(nil, profile, kubeconfig, SchedulerName, plugins), 0o644); err != nil {
		return nil, err
	}
	port, err := process.FreePort()
	if err != nil {
		return nil, err
	}
	p, err := c.group.Start(process.Spec{
		Name: name, Path: c.programs.Scheduler,
		Args: []string{
			"--config=" + file, "--authentication-kubeconfig=" + kubeconfig, "--authorization-kubeconfig=" + kubeconfig,
			"--authorization-always-allow-paths=/metrics,/debug/pprof/*", "--bind-address=127.0.0.1", "--secure-port=" + strconv.Itoa(port), "--v=2",
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
		still = still && s.Spec.Counts.Incoming == 0 && s.Spec.Counts.Draining == 0 &&
			s.Status.Session == s.Spec.Session && s.Status.Settled == s.Spec.Epoch
	}
	return owned, still && sum == VirtualNodes, nil
}

var sample = regexp.MustCompile(`(?m)^([a-z_]+)(\{[^}]*\})? ([0-9.e+-]+)$`)

// Metric returns the sum of the replica's samples of a counter whose labels match.
func (s *Scheduler) Metric(name, labels string) (float64, error) {
	insecure := &http.Client{
		// Its certificate is its own, and on loopback.
		Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}},
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

// Remove takes away what On has brought; the schedulers have to be stopped.
func (c *Cluster) Remove(ctx context.Context) error {
	group := watchGroup()
	err := client.IgnoreNotFound(c.Client.Delete(ctx, group))
	for err == nil {
		// The coordinator lets it go when the last member has gone.
		if err = c.Client.Get(ctx, client.ObjectKeyFromObject(group), group); err == nil {
			select {
			case <-ctx.Done():
				err = ctx.Err()
			case <-time.After(100 * time.Millisecond):
			}
		}
	}
	errs := []error{client.IgnoreNotFound(err)}
	for _, u := range c.policies {
		errs = append(errs, client.IgnoreNotFound(c.Client.Delete(ctx, u)))
	}
	return errors.Join(append(errs, c.Stop())...)
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
