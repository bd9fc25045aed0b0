package kwok

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	"github.com/drover-sh/drover/autoscaler/provider"
	"github.com/drover-sh/drover/autoscaler/provider/providertest"
	"github.com/drover-sh/drover/capacity"
)

// server is a real API server; nil where its binaries are missing.
var server *rest.Config

func TestMain(m *testing.M) {
	code := func() int {
		assets := os.Getenv("KUBEBUILDER_ASSETS")
		if assets == "" {
			assets, _ = filepath.Abs("../../../bin/control-plane")
		}
		if _, err := os.Stat(filepath.Join(assets, "kube-apiserver")); err != nil {
			fmt.Fprintln(os.Stderr, "no API server to test against: run `make control-plane`")
			return m.Run()
		}
		environment := &envtest.Environment{BinaryAssetsDirectory: assets, ControlPlaneStartTimeout: patience}
		var err error
		if server, err = environment.Start(); err != nil {
			fmt.Fprintln(os.Stderr, "starting the API server:", err)
			return 1
		}
		server.QPS, server.Burst = 300, 600
		defer func() { _ = environment.Stop() }()
		return m.Run()
	}()
	os.Exit(code)
}

func client(t *testing.T) kubernetes.Interface {
	t.Helper()
	if server == nil {
		if testing.Short() {
			t.Skip("needs an API server")
		}
		t.Fatal("no API server: run `make control-plane`, or test with -short")
	}
	c, err := kubernetes.NewForConfig(server)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// patience is how long a test waits for what has to come. None waits for it when all is well.
const patience = 2 * time.Minute

const smallStock = `
apiVersion: config.drover.sh/v1alpha1
kind: OfferingList
offerings:
- name: small
  resources: {cpu: "16", memory: 64Gi}
  cost: 1
  domains: [{zone: a, rack: r1, count: %d}]
`

func write(t *testing.T, path, content string) string {
	t.Helper()
	// Replaced as a whole, as a ConfigMap's volume does it.
	if err := os.WriteFile(path+".new", []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
	return path
}

func options(t *testing.T, stock int) Options {
	return Options{
		OfferingsFile: write(t, filepath.Join(t.TempDir(), "offerings.yaml"), fmt.Sprintf(smallStock, stock)),
		Clusters:      map[string]kubernetes.Interface{"east": client(t)},
		Seed:          1, Clock: clock.RealClock{}, Log: logr.Discard(),
	}
}

func TestConformance(t *testing.T) {
	providertest.Run(t, func(t *testing.T, faults providertest.Faults) providertest.Subject {
		o := options(t, 8)
		if faults.Slow {
			o.LaunchLatency = time.Second
		}
		if faults.DropEvents {
			o.Faults.DropEvent = 1
		}
		if faults.DoubleEvents {
			o.Faults.DuplicateEvent = 1
		}
		if faults.LaunchFailure != "" {
			o.Faults.FailLaunch = 1
		}
		return providertest.Subject{
			New: func(t *testing.T) provider.Interface {
				p, err := New(o)
				if err != nil {
					t.Fatal(err)
				}
				return p
			},
			Cluster: "east", Offering: "small", Domain: "a/r1", Stock: 8,
			Allocatable: capacity.Resources{corev1.ResourceCPU: 16000},
			Existing: func(t *testing.T) []string {
				nodes, err := o.Clusters["east"].CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
				if err != nil {
					t.Fatal(err)
				}
				var out []string
				for i := range nodes.Items {
					out = append(out, nodes.Items[i].Labels[LabelMachine])
				}
				return out
			},
		}
	})
}

// run starts a provider and returns its events.
func run(t *testing.T, o Options) (*Provider, chan provider.Event) {
	t.Helper()
	p, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	events, done := make(chan provider.Event, 100), make(chan struct{})
	ctx := t.Context()
	go func() {
		defer close(done)
		_ = p.Run(ctx, func(e provider.Event) { events <- e })
	}()
	t.Cleanup(func() { <-done })
	return p, events
}

func want(t *testing.T, events chan provider.Event, kind provider.EventType, id string) provider.Event {
	t.Helper()
	deadline := time.After(patience)
	for {
		select {
		case e := <-events:
			if e.Type == kind && e.ID == id {
				return e
			}
		case <-deadline:
			t.Fatalf("no %s event of %q", kind, id)
		}
	}
}

func request(p *Provider, id string) provider.Request {
	o := p.offerings[0]
	labels := map[string]string{}
	for key, value := range o.Labels {
		labels[key] = value
	}
	for key, value := range o.Domains[0].Labels {
		labels[key] = value
	}
	return provider.Request{Ref: provider.Ref{ID: id, Cluster: "east"}, Offering: o.Name, Domain: o.Domains[0].Name,
		Labels: labels, Allocatable: o.Allocatable, Taints: []corev1.Taint{{Key: "dedicated", Value: "x", Effect: "NoSchedule"}},
		RequestedAt: time.Now()}
}

// nodeOf waits for a Node to appear.
func nodeOf(t *testing.T, c kubernetes.Interface, name string) *corev1.Node {
	t.Helper()
	ctx := t.Context()
	watch, err := c.CoreV1().Nodes().Watch(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + name})
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Stop()
	deadline := time.After(patience)
	for {
		select {
		case e := <-watch.ResultChan():
			if n, is := e.Object.(*corev1.Node); is {
				return n
			}
		case <-deadline:
			t.Fatalf("node %s does not appear", name)
		}
	}
}

func TestTheNodeIsWhatWasAskedFor(t *testing.T) {
	o := options(t, 8)
	p, events := run(t, o)
	r := request(p, "small-shape")
	if err := p.Launch(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	event := want(t, events, provider.Launched, r.ID)
	n := nodeOf(t, o.Clusters["east"], r.ID)
	if event.ProviderID != "kwok://east/small-shape" || n.Spec.ProviderID != event.ProviderID || event.NodeName != n.Name {
		t.Errorf("event %+v does not lead to node %s with provider id %s", event, n.Name, n.Spec.ProviderID)
	}
	labels := map[string]string{
		corev1.LabelInstanceTypeStable: "small", corev1.LabelTopologyZone: "a", "topology.kubernetes.io/rack": "r1",
		corev1.LabelHostname: "small-shape", corev1.LabelOSStable: "linux", corev1.LabelArchStable: "amd64",
		"type": "kwok", LabelMachine: "small-shape",
	}
	if diff := cmp.Diff(labels, n.Labels); diff != "" {
		t.Errorf("labels (-want +got):\n%s", diff)
	}
	if n.Annotations["kwok.x-k8s.io/node"] != "fake" {
		t.Error("kwok would not keep the node alive")
	}
	if got := n.Status.Allocatable; got.Cpu().String() != "16" || got.Memory().String() != "64Gi" || got.Pods().String() != "110" {
		t.Errorf("allocatable is %v", got)
	}
	if diff := cmp.Diff(n.Status.Capacity, n.Status.Allocatable); diff != "" {
		t.Errorf("capacity and allocatable differ:\n%s", diff)
	}
	found := false
	for _, taint := range n.Spec.Taints {
		found = found || taint.Key == "dedicated" && taint.Value == "x"
	}
	if !found {
		t.Errorf("the taint is missing in %v", n.Spec.Taints)
	}
	if err := p.Terminate(t.Context(), r.Ref); err != nil {
		t.Fatal(err)
	}
	want(t, events, provider.Terminated, r.ID)
}

func TestANodeThatSomebodyDeletesEndsItsMachine(t *testing.T) {
	o := options(t, 8)
	p, events := run(t, o)
	r := request(p, "small-deleted")
	if err := p.Launch(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	nodeOf(t, o.Clusters["east"], r.ID)
	if err := o.Clusters["east"].CoreV1().Nodes().Delete(t.Context(), r.ID, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	want(t, events, provider.Terminated, r.ID)
}

func TestALostMachineExistsWithoutANode(t *testing.T) {
	o := options(t, 8)
	o.Faults.LoseMachine = 1
	p, events := run(t, o)
	r := request(p, "small-lost")
	if err := p.Launch(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	want(t, events, provider.Launched, r.ID)
	instances, err := p.List(t.Context(), "east")
	if err != nil || len(instances) != 1 || !instances[0].Launched {
		t.Errorf("listed as %v, %v", instances, err)
	}
	if err := p.Terminate(t.Context(), r.Ref); err != nil {
		t.Fatal(err)
	}
	want(t, events, provider.Terminated, r.ID)
	nodes, err := o.Clusters["east"].CoreV1().Nodes().List(t.Context(), metav1.ListOptions{LabelSelector: LabelMachine + "=small-lost"})
	if err != nil || len(nodes.Items) != 0 {
		t.Errorf("the lost machine has a node: %v, %v", nodes, err)
	}
}

func TestOfferingsFollowTheirFile(t *testing.T) {
	o := options(t, 8)
	p, events := run(t, o)
	write(t, o.OfferingsFile, "kind: Nonsense")
	write(t, o.OfferingsFile, fmt.Sprintf(smallStock, 3))
	want(t, events, provider.InventoryChanged, "")
	offerings, err := p.Offerings(t.Context())
	if err != nil || len(offerings) != 1 || offerings[0].Domains[0].Available != 3 {
		t.Errorf("the offerings are %v, %v", offerings, err)
	}
}

func TestAWrongOfferingsFileIsAnErrorAtStart(t *testing.T) {
	path := write(t, filepath.Join(t.TempDir(), "offerings.yaml"), strings.Replace(fmt.Sprintf(smallStock, 1), `"16"`, `"many"`, 1))
	_, err := New(Options{OfferingsFile: path, Clock: clock.RealClock{}, Log: logr.Discard()})
	for _, part := range []string{path, "offerings[0].resources[cpu]", `"many"`} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("error %v does not mention %s", err, part)
		}
	}
}

func TestTheExampleIsValid(t *testing.T) {
	_, offerings, err := readOfferings("testdata/offerings.yaml", "")
	if err != nil {
		t.Fatal(err)
	}
	gpu := offerings[0]
	if gpu.Name != "gpu-h100" || gpu.InstanceType != "a3-highgpu-8g" || !gpu.Atomic || gpu.Allocatable["nvidia.com/gpu"] != 8 ||
		gpu.Taints[0].Key != "nvidia.com/gpu" || gpu.Domains[0].Available != 64 ||
		gpu.Domains[0].Labels["topology.kubernetes.io/rack"] == "" || gpu.Labels["accelerator-type"] != "nvidia-h100-80gb" {
		t.Errorf("the first offering is %+v", gpu)
	}
}

// A kubelet says of every node what system it runs on, and pods select by it.
func TestOfferingsTellTheirSystem(t *testing.T) {
	for want, labels := range map[string]map[string]string{
		"linux/amd64": nil, "linux/arm64": {corev1.LabelArchStable: "arm64"},
	} {
		o, err := offeringOf(&configv1alpha1.Offering{Name: "o", Labels: labels})
		if err != nil {
			t.Fatal(err)
		}
		if got := o.Labels[corev1.LabelOSStable] + "/" + o.Labels[corev1.LabelArchStable]; got != want {
			t.Errorf("the offering says %s, want %s", got, want)
		}
		n := node(provider.Request{Ref: provider.Ref{ID: "m", Cluster: "c"}, Labels: o.Labels})
		if got := n.Status.NodeInfo.OperatingSystem + "/" + n.Labels[corev1.LabelArchStable]; got != want {
			t.Errorf("its node says %s, want %s", got, want)
		}
	}
}

func TestChanceIsReproducible(t *testing.T) {
	a, b, other := chance{1}, chance{1}, chance{2}
	differs, lost := 0, 0
	for i := range 1000 {
		id := fmt.Sprintf("machine-%d", i)
		if a.of(id, "lose") != b.of(id, "lose") {
			t.Fatalf("two providers with the same seed disagree about %s", id)
		}
		if a.of(id, "lose") != other.of(id, "lose") {
			differs++
		}
		if a.happens(0.25, id, "lose") {
			lost++
		}
		if l := a.latency(time.Second, 0.5, id, "launch"); l < time.Second || l > 1500*time.Millisecond {
			t.Fatalf("a latency of 1s with jitter 0.5 is %s", l)
		}
	}
	if differs < 990 {
		t.Error("the seed hardly matters")
	}
	if lost < 200 || lost > 300 {
		t.Errorf("%d of 1000 machines are lost at a probability of 0.25", lost)
	}
}
