package integration

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/go-logr/logr"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/internal/controlplane"
)

// system is the namespace that the manifests deploy to.
const system = fleetv1alpha1.SystemNamespace

// Clusters that the suite has certificates for. The manifests' own is the first; the second is an intruder's.
const (
	ownCluster   = "cluster-1"
	otherCluster = "cluster-2"
)

// env is what all tests share.
var env struct {
	root    string // of the repository
	dir     string // of everything that the suite writes
	cp      *controlplane.ControlPlane
	client  client.Client // with the administrator's rights
	kubectl string
}

func TestMain(m *testing.M) {
	ctrl.SetLogger(logr.Discard())
	code, err := runSuite(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "integration:", err)
		if errors.Is(err, controlplane.ErrNoBinary) {
			fmt.Fprintln(os.Stderr, "integration: these tests need a control plane; `make control-plane` builds it once")
		}
		code = 1
	}
	os.Exit(code)
}

func runSuite(m *testing.M) (code int, err error) {
	if env.root, err = controlplane.RepositoryRoot(); err != nil {
		return 0, err
	}
	if env.kubectl, err = controlplane.Binary("kubectl"); err != nil {
		return 0, err
	}
	if env.dir, err = os.MkdirTemp("", "drover-integration-"); err != nil {
		return 0, err
	}
	defer func() {
		if code == 0 && err == nil {
			err = os.RemoveAll(env.dir)
			return
		}
		fmt.Fprintln(os.Stderr, "integration: logs of every process are kept in", env.dir)
	}()

	policy, err := filepath.Abs(filepath.Join("testdata", "audit-policy.yaml"))
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	podGroups, err := moduleFile(ctx, "sigs.k8s.io/scheduler-plugins", "config/crd/bases/scheduling.x-k8s.io_podgroups.yaml")
	if err != nil {
		return 0, err
	}
	env.cp, err = controlplane.Start(ctx, controlplane.Options{
		Dir: filepath.Join(env.dir, "control-plane"), ControllerManager: true, KWOK: true,
		// Our own CRDs come with the manifests. PodGroups are watched where they exist, of either kind.
		CRDPaths: []string{podGroups},
		APIServerArgs: map[string][]string{
			"feature-gates":  {"GenericWorkload=true"},
			"runtime-config": {"scheduling.k8s.io/v1alpha2=true"},

			"audit-policy-file": {policy},
			"audit-log-path":    {auditLog()},
			"audit-log-maxsize": {"4096"}, // one file: never rotated
		},
	})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, env.cp.Stop()) }()

	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, fleetv1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			return 0, err
		}
	}
	config := env.cp.Config()
	config.QPS = -1 // no limit of our own
	if env.client, err = client.New(config, client.Options{Scheme: scheme}); err != nil {
		return 0, err
	}
	if err := deploy(ctx); err != nil {
		return 0, err
	}
	return m.Run(), nil
}

// moduleFile is the path of a file in a module that go.mod requires.
func moduleFile(ctx context.Context, module, file string) (string, error) {
	list := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", module)
	list.Dir = env.root
	out, err := list.Output()
	if err != nil {
		return "", fmt.Errorf("looking for module %s: %w", module, err)
	}
	return filepath.Join(strings.TrimSpace(string(out)), file), nil
}

func auditLog() string { return filepath.Join(env.dir, "audit.log") }

// deploy does what manifests/README.md tells an operator to do.
func deploy(ctx context.Context) error {
	if out, err := kubectl(ctx, "apply", "--server-side", "-k", overlay("default")); err != nil {
		return fmt.Errorf("applying the manifests: %w\n%s", err, out)
	}
	// A playground's scheduler has a profile with the plugin VNAffinity.
	if out, err := kubectl(ctx, "apply", "--server-side", "-k", filepath.Join(env.root, "manifests", "vnaffinity")); err != nil {
		return fmt.Errorf("applying the rights of VNAffinity: %w\n%s", err, out)
	}
	certs := exec.CommandContext(ctx, "go", "run", "./hack/certs", "-dir", certDir(),
		"-cluster", ownCluster, "-cluster", otherCluster, "-host", "127.0.0.1")
	certs.Dir = env.root
	if out, err := certs.CombinedOutput(); err != nil {
		return fmt.Errorf("making certificates: %w\n%s", err, out)
	}
	for _, secret := range []string{"autoscaler.yaml", "manager-" + ownCluster + ".yaml"} {
		path := filepath.Join(certDir(), secret)
		if out, err := kubectl(ctx, "apply", "--server-side", "-f", path); err != nil {
			return fmt.Errorf("applying %s: %w\n%s", secret, err, out)
		}
	}
	for _, secret := range []string{"autoscaler", "manager-" + ownCluster, "manager-" + otherCluster} {
		if err := unpackSecret(secret); err != nil {
			return err
		}
	}
	return nil
}

// unpackSecret writes the files of a Secret as a kubelet would mount them.
func unpackSecret(name string) error {
	data, err := os.ReadFile(filepath.Join(certDir(), name+".yaml"))
	if err != nil {
		return err
	}
	var secret corev1.Secret
	if err := yaml.UnmarshalStrict(data, &secret); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	dir := filepath.Join(certDir(), name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	for file, content := range secret.Data {
		if err := os.WriteFile(filepath.Join(dir, file), content, 0o600); err != nil {
			return err
		}
	}
	return nil
}

func certDir() string { return filepath.Join(env.dir, "certs") }

func overlay(name string) string { return filepath.Join(env.root, "manifests", "overlays", name) }

// kubectl runs kubectl with the administrator's rights and returns what it printed.
func kubectl(ctx context.Context, args ...string) (string, error) {
	return kubectlWithInput(ctx, "", args...)
}

func kubectlWithInput(ctx context.Context, input string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, env.kubectl, append([]string{"--kubeconfig", env.cp.Kubeconfig()}, args...)...)
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String() + stderr.String(), fmt.Errorf("kubectl %s: %w", strings.Join(args, " "), err)
	}
	return stdout.String(), nil
}

// programs builds each of our programs from source, once, and says where it is. The build is a matter of a moment when the
// program is up to date.
var programs = func() map[string]func() (string, error) {
	builds := map[string]func() (string, error){}
	for _, name := range []string{"scheduler", "manager", "autoscaler", "coordinator"} {
		builds[name] = sync.OnceValues(func() (string, error) { return buildProgram("drover-"+name, "./cmd/"+name) })
	}
	return builds
}()

func buildProgram(name, pkg string) (string, error) {
	path := filepath.Join(env.root, "bin", name)
	build := exec.Command("go", "build", "-o", path, pkg)
	build.Dir = env.root
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building %s: %w\n%s", pkg, err, out)
	}
	return path, nil
}

// sample builds the sample controller.
func sample(t *testing.T) {
	t.Helper()
	if _, err := buildProgram("parentchild", "./examples/parentchild"); err != nil {
		t.Fatal(err)
	}
}

func program(t *testing.T, name string) string {
	t.Helper()
	path, err := programs[name]()
	if err != nil {
		t.Fatal(err)
	}
	return path
}
