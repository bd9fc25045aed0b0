package main

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/internal/controlplane"
)

// patience is how long a condition may take to come true on a slow machine. No test waits for it when all is well.
const patience = 2 * time.Minute

// asScheduler makes the test binary be the scheduler.
const asScheduler = "DROVER_TEST_AS_SCHEDULER"

var plane *controlplane.ControlPlane

func TestMain(m *testing.M) {
	if os.Getenv(asScheduler) != "" {
		main()
		return
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "scheduler")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	plane, err = controlplane.Start(context.Background(), controlplane.Options{
		Dir:      dir,
		CRDPaths: []string{filepath.Join("..", "..", "manifests", "crd", "bases")},
		// Nodes are kwok's, which keeps them ready.
		ControllerManager: true,
		KWOK:              true,
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() {
		if err := plane.Stop(); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}()
	return m.Run()
}

// process is a scheduler that runs.
type process struct {
	cmd  *exec.Cmd
	out  safeBuffer
	done chan error
}

type safeBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *safeBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}
func (s *safeBuffer) String() string { s.mu.Lock(); defer s.mu.Unlock(); return s.b.String() }

func startScheduler(t *testing.T, config string, flags ...string) *process {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &process{done: make(chan error, 1)}
	p.cmd = exec.Command(self, append([]string{"--config=" + config, "--secure-port=0", "--v=2"}, flags...)...)
	p.cmd.Env = append(os.Environ(), asScheduler+"=1")
	p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.out
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { p.done <- p.cmd.Wait() }()
	return p
}

// stop ends the scheduler as its supervisor does, and shows its log where the test failed.
func (p *process) stop(t *testing.T) {
	t.Helper()
	p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(patience):
		p.cmd.Process.Kill()
		t.Error("the scheduler did not stop")
	}
	if t.Failed() {
		t.Log(p.out.String())
	}
}

// configFile is the shipped example, changed so that it finds this control plane and starts at once.
func configFile(t *testing.T, name string, replace ...string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("..", "..", "plugins", "capacityrequest", "testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	text := strings.ReplaceAll(string(data), "leaderElect: true", "leaderElect: false") +
		"clientConnection:\n  kubeconfig: " + plane.Kubeconfig() + "\n"
	text = strings.NewReplacer(replace...).Replace(text)
	path := filepath.Join(t.TempDir(), "scheduler.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func newClient(t *testing.T) (client.Client, string) {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		clientgoscheme.AddToScheme, fleetv1alpha1.AddToScheme, apiextensionsv1.AddToScheme,
	} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	c, err := client.New(plane.Config(), client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "test-"}}
	create(t, c, ns)
	// A pod that waits would take its place on a node of another test.
	t.Cleanup(func() {
		if err := c.DeleteAllOf(context.Background(), &corev1.Pod{}, client.InNamespace(ns.Name), client.GracePeriodSeconds(0)); err != nil {
			t.Error(err)
		}
	})
	return c, ns.Name
}

func create(t *testing.T, c client.Client, obj client.Object) {
	t.Helper()
	if err := c.Create(t.Context(), obj); err != nil {
		t.Fatalf("creating %T %s: %v", obj, obj.GetName(), err)
	}
}

// withNode adds a node for the time of the test.
func withNode(t *testing.T, c client.Client, name, cpu string) {
	t.Helper()
	node := newNode(name, cpu, nil)
	create(t, c, node)
	t.Cleanup(func() {
		if err := c.Delete(context.Background(), node); err != nil {
			t.Error(err)
		}
	})
	poll(t, "node "+name+" takes pods", func(ctx context.Context) (bool, error) {
		err := c.Get(ctx, client.ObjectKeyFromObject(node), node)
		return err == nil && takesPods(node), err
	})
}

// newNode makes a node of kwok's.
func newNode(name, cpu string, labels map[string]string) *corev1.Node {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: name, Labels: map[string]string{corev1.LabelHostname: name},
		Annotations: map[string]string{controlplane.KWOKAnnotation: controlplane.KWOKAnnotationValue},
	}}
	maps.Copy(node.Labels, labels)
	node.Status.Allocatable = corev1.ResourceList{
		"cpu": resource.MustParse(cpu), "memory": resource.MustParse("64Gi"), "pods": resource.MustParse("110"),
	}
	node.Status.Capacity = node.Status.Allocatable
	return node
}

// takesPods says that a node is ready, and that the taint is gone with which it came.
func takesPods(node *corev1.Node) bool {
	return len(node.Spec.Taints) == 0 && slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

func pod(ns, name, cpu string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name},
		Spec: corev1.PodSpec{
			SchedulerName: "drover-scheduler",
			Containers: []corev1.Container{{Name: "c", Image: "none", Resources: corev1.ResourceRequirements{
				Requests: corev1.ResourceList{"cpu": resource.MustParse(cpu)},
			}}},
		},
	}
}

func eventually(t *testing.T, p *process, what string, holds func(ctx context.Context) (bool, error)) {
	t.Helper()
	poll(t, what, func(ctx context.Context) (bool, error) {
		select {
		case err := <-p.done:
			p.done <- err
			t.Fatalf("%s: the scheduler ended: %v", what, err)
		default:
		}
		return holds(ctx)
	})
}

// poll waits until something holds. What an API server that is busy cannot answer it may answer the next time.
func poll(t *testing.T, what string, holds func(ctx context.Context) (bool, error)) {
	t.Helper()
	var last error
	err := wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, patience, true,
		func(ctx context.Context) (done bool, err error) {
			done, last = holds(ctx)
			return done && last == nil, nil
		})
	if err != nil {
		t.Fatalf("%s: %v (%v)", what, err, last)
	}
}

// owners lists the pods that have a request, by name.
func owners(ctx context.Context, c client.Client, ns string) (map[string]*fleetv1alpha1.CapacityRequest, error) {
	var list fleetv1alpha1.CapacityRequestList
	err := c.List(ctx, &list, client.InNamespace(ns))
	out := map[string]*fleetv1alpha1.CapacityRequest{}
	for i := range list.Items {
		out[list.Items[i].OwnerReferences[0].Name] = &list.Items[i]
	}
	return out, err
}

func TestPodThatFitsNowhereBecomesARequest(t *testing.T) {
	c, ns := newClient(t)
	withNode(t, c, "small", "2")
	p := startScheduler(t, configFile(t, "scheduler-config.yaml"))
	defer p.stop(t)
	create(t, c, pod(ns, "big", "4"))
	create(t, c, pod(ns, "fits", "1"))
	eventually(t, p, "one pod is bound, the other has a request", func(ctx context.Context) (bool, error) {
		var bound corev1.Pod
		if err := c.Get(ctx, client.ObjectKey{Namespace: ns, Name: "fits"}, &bound); err != nil {
			return false, err
		}
		got, err := owners(ctx, c, ns)
		if got["fits"] != nil {
			t.Fatal("a pod that fits has a request")
		}
		return bound.Spec.NodeName == "small" && got["big"] != nil, err
	})
}

func TestGangBecomesOneGroup(t *testing.T) {
	c, ns := newClient(t)
	withNode(t, c, "static", "2")
	installPodGroups(t)
	p := startScheduler(t, configFile(t, "scheduler-config-coscheduling.yaml"))
	defer p.stop(t)

	group := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "scheduling.x-k8s.io/v1alpha1", "kind": "PodGroup",
		"metadata": map[string]any{
			"namespace": ns, "name": "train",
			"annotations": map[string]any{"fleet.lucy.sh/same-topology": "topology.kubernetes.io/rack"},
		},
		"spec": map[string]any{"minMember": int64(4)},
	}}
	create(t, c, group)
	for i := range 4 {
		member := pod(ns, fmt.Sprint("m", i), "2") // one of them fits
		member.Labels = map[string]string{"scheduling.x-k8s.io/pod-group": "train"}
		create(t, c, member)
	}
	want := fleetv1alpha1.Group{Name: ns + "/train", MinCount: 4, TopologyKey: "topology.kubernetes.io/rack"}
	eventually(t, p, "every member that has no node asks, as one group", func(ctx context.Context) (bool, error) {
		got, err := owners(ctx, c, ns)
		complete := 0
		for _, request := range got {
			if request.Spec.Group != nil && *request.Spec.Group == want {
				complete++
			}
		}
		return complete >= 3, err
	})
}

// installPodGroups installs the CRD that the module of Coscheduling brings.
func installPodGroups(t *testing.T) {
	t.Helper()
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/scheduler-plugins").Output()
	if err != nil {
		t.Fatalf("finding sigs.k8s.io/scheduler-plugins: %v", err)
	}
	_, err = envtest.InstallCRDs(plane.Config(), envtest.CRDInstallOptions{
		Paths:              []string{filepath.Join(strings.TrimSpace(string(out)), "manifests", "coscheduling", "crd.yaml")},
		ErrorIfPathMissing: true,
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestBadArgsStopTheSchedulerAtStart(t *testing.T) {
	for _, c := range []struct {
		name    string
		replace []string
		want    []string
	}{
		{"a wrong value", []string{"qps: 200", "qps: -1"}, []string{"qps", "-1"}},
		{"an unknown field", []string{"qps: 200", "qbs: 200"}, []string{"qbs"}},
		{"another version", []string{"config.drover.sh/v1alpha1", "config.drover.sh/v9"}, []string{"apiVersion", "config.drover.sh/v9"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			file := configFile(t, "scheduler-config.yaml", c.replace...)
			p := startScheduler(t, file)
			var err error
			select {
			case err = <-p.done:
			case <-time.After(patience):
				p.stop(t)
				t.Fatal("the scheduler runs")
			}
			if err == nil {
				t.Error("the exit code is 0")
			}
			for _, part := range append(c.want, file) {
				if !strings.Contains(p.out.String(), part) {
					t.Errorf("the output does not say %q:\n%s", part, p.out.String())
				}
			}
		})
	}
}
