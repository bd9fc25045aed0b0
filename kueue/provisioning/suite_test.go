package provisioning

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/testr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	autoscalingv1 "k8s.io/autoscaler/cluster-autoscaler/apis/provisioningrequest/autoscaling.x-k8s.io/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/internal/builders"
	"github.com/drover-sh/drover/internal/controlplane"
	"github.com/drover-sh/drover/kueue/kueuetest"
)

// patience is how long a condition may take to come true on a slow machine. No test waits for it when all is well.
const patience = 2 * time.Minute

var (
	cluster *controlplane.ControlPlane
	// withoutAPI is what SetupWithManager said before the API server knew ProvisioningRequests.
	withoutAPI error
	// directory holds what the tests write.
	directory string
)

func TestMain(m *testing.M) {
	ctrl.SetLogger(logr.Discard())
	os.Exit(run(m))
}

// run starts the control plane that the tests share; with -short there is none.
func run(m *testing.M) int {
	for _, arg := range os.Args {
		if arg == "-test.short" || arg == "-test.short=true" {
			return m.Run()
		}
	}
	err := start()
	defer stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

func start() (err error) {
	if directory, err = os.MkdirTemp("", "provisioning"); err != nil {
		return err
	}
	cluster, err = controlplane.Start(context.Background(), controlplane.Options{
		Dir: filepath.Join(directory, "cp"), CRDPaths: []string{filepath.Join("..", "..", "manifests", "crd", "bases")},
		ControllerManager: true,
	})
	if err != nil {
		return err
	}
	mgr, err := newManager(logr.Discard())
	if err != nil {
		return err
	}
	withoutAPI = SetupWithManager(mgr, Options{})

	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "k8s.io/autoscaler/cluster-autoscaler/apis").Output()
	if err != nil {
		return fmt.Errorf("looking for the module of ProvisioningRequest: %w", err)
	}
	_, err = envtest.InstallCRDs(cluster.Config(), envtest.CRDInstallOptions{
		Paths: []string{filepath.Join(strings.TrimSpace(string(out)), "config", "crd")},
	})
	return err
}

func stop() {
	if cluster != nil {
		if err := cluster.Stop(); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}
	os.RemoveAll(directory)
}

func scheme() *runtime.Scheme {
	s := kueuetest.Scheme()
	if err := fleetv1alpha1.AddToScheme(s); err != nil {
		panic(err)
	}
	return s
}

func newManager(log logr.Logger) (ctrl.Manager, error) {
	skip := true
	config := cluster.Config()
	config.QPS = -1
	return ctrl.NewManager(config, ctrl.Options{
		Scheme:     scheme(),
		Logger:     log,
		Metrics:    metricsserver.Options{BindAddress: "0"},
		Controller: ctrlconfig.Controller{SkipNameValidation: &skip},
	})
}

// world is a namespace of the test's own, with the class served and the autoscaler played by the test.
type world struct {
	client.Client
	t  *testing.T
	ns string
	// kill ends the manager as a crash would, from the API server's point of view.
	kill func()
}

func newWorld(t *testing.T, opts Options) *world {
	t.Helper()
	if testing.Short() {
		t.Skip("needs an API server")
	}
	config := cluster.Config()
	config.QPS = -1
	c, err := client.New(config, client.Options{Scheme: scheme()})
	if err != nil {
		t.Fatal(err)
	}
	w := &world{Client: c, t: t}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "test-"}}
	w.create(ns)
	w.ns = ns.Name
	t.Cleanup(w.clean)
	w.serve(opts)
	return w
}

// serve runs a manager with the class until the test ends or kill is called.
func (w *world) serve(opts Options) {
	w.t.Helper()
	mgr, err := newManager(testr.New(w.t))
	if err != nil {
		w.t.Fatal(err)
	}
	if err := SetupWithManager(mgr, opts); err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	stopped := make(chan error, 1)
	go func() { stopped <- mgr.Start(ctx) }()
	done := false
	w.kill = func() {
		if done {
			return
		}
		done = true
		cancel()
		if err := <-stopped; err != nil {
			w.t.Error(err)
		}
	}
	w.t.Cleanup(w.kill)
}

// clean removes what other tests would count: nodes, and the namespace's pods and requests.
func (w *world) clean() {
	ctx := context.Background()
	for _, obj := range []client.Object{&autoscalingv1.ProvisioningRequest{}, &corev1.Pod{}, &fleetv1alpha1.CapacityRequest{}} {
		if err := w.DeleteAllOf(ctx, obj, client.InNamespace(w.ns), client.GracePeriodSeconds(0)); err != nil {
			w.t.Error(err)
		}
	}
	if err := w.DeleteAllOf(ctx, &corev1.Node{}); err != nil {
		w.t.Error(err)
	}
	// A Job's pods go when its controller has let go of them, and take room on nodes of their name until then.
	var left corev1.PodList
	if err := wait.PollUntilContextTimeout(ctx, 20*time.Millisecond, patience, true, func(ctx context.Context) (bool, error) {
		err := w.List(ctx, &left, client.InNamespace(w.ns))
		return err == nil && len(left.Items) == 0, nil
	}); err != nil {
		w.t.Errorf("%d pods do not go", len(left.Items))
	}
}

func (w *world) create(obj client.Object) {
	w.t.Helper()
	if err := w.Create(w.t.Context(), obj); err != nil {
		w.t.Fatalf("creating %T %s: %v", obj, obj.GetName(), err)
	}
}

// eventually waits until holds says "" and reports what it said last.
func (w *world) eventually(what string, holds func(ctx context.Context) (string, error)) {
	w.t.Helper()
	var last string
	poll := func(ctx context.Context) (done bool, err error) {
		last, err = holds(ctx)
		return last == "", err
	}
	err := wait.PollUntilContextTimeout(w.t.Context(), 20*time.Millisecond, patience, true, poll)
	if err != nil {
		w.t.Fatalf("%s: %v; it was: %s", what, err, last)
	}
}

// provision creates a ProvisioningRequest for count pods like pod.
func (w *world) provision(name string, count int32, pod *builders.PodBuilder, parameters ...string) {
	w.t.Helper()
	w.create(w.template(name, pod))
	pr := request(name, count)
	pr.Namespace, pr.UID = w.ns, ""
	pr.Spec.PodSets[0].PodTemplateRef.Name = name
	pr.Spec.Parameters = map[string]autoscalingv1.Parameter{}
	for i := 0; i < len(parameters); i += 2 {
		pr.Spec.Parameters[parameters[i]] = autoscalingv1.Parameter(parameters[i+1])
	}
	w.create(pr)
}

func (w *world) template(name string, pod *builders.PodBuilder) *corev1.PodTemplate {
	pt := &corev1.PodTemplate{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name}, Template: template(pod).Template,
	}
	// The API wants limits for devices.
	c := &pt.Template.Spec.Containers[0]
	c.Resources.Limits = c.Resources.Requests
	return pt
}

// fleetNode makes a node of the fleet, ready or not.
func (w *world) fleetNode(name, rack, gpus string, ready bool) *corev1.Node {
	w.t.Helper()
	b := builders.Node(name).Machine(name).Rack(rack).Allocatable("nvidia.com/gpu", gpus, "cpu", "64", "memory", "256Gi")
	if ready {
		b = b.Ready()
	}
	n := b.Obj()
	n.UID = ""
	status := n.Status
	w.create(n)
	w.say(n.Name, status)
	return n
}

// setReady says what a kubelet would.
func (w *world) setReady(name string) {
	w.t.Helper()
	w.say(name, builders.Node(name).Ready().Obj().Status)
}

// say sets what a kubelet would report, whatever the node lifecycle controller writes meanwhile.
func (w *world) say(name string, status corev1.NodeStatus) {
	w.t.Helper()
	before := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	after := before.DeepCopy()
	after.Status = status
	if err := w.Status().Patch(w.t.Context(), after, client.MergeFrom(before)); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) requests(ctx context.Context) ([]fleetv1alpha1.CapacityRequest, error) {
	var list fleetv1alpha1.CapacityRequestList
	err := w.List(ctx, &list, client.InNamespace(w.ns))
	return list.Items, err
}

// acknowledge does what a roll-up does once the autoscaler has taken it: all count requests become Acknowledged.
func (w *world) acknowledge(count int) {
	w.t.Helper()
	w.eventually(fmt.Sprintf("%d requests", count), func(ctx context.Context) (string, error) {
		list, err := w.requests(ctx)
		if err != nil || len(list) != count {
			return fmt.Sprintf("%d requests", len(list)), err
		}
		for i := range list {
			cr := &list[i]
			if cr.Status.Phase == fleetv1alpha1.CapacityRequestAcknowledged {
				continue
			}
			before := cr.DeepCopy()
			cr.Status.Phase = fleetv1alpha1.CapacityRequestAcknowledged
			if err := w.Status().Patch(ctx, cr, client.MergeFrom(before)); err != nil {
				return "", err
			}
		}
		return "", nil
	})
}

// hasCondition waits until the request has the condition with this status and reason, and returns it.
func (w *world) hasCondition(name, kind string, status metav1.ConditionStatus, reason string) metav1.Condition {
	w.t.Helper()
	var found metav1.Condition
	w.eventually(fmt.Sprintf("%s to be %s=%s (%s)", name, kind, status, reason), func(ctx context.Context) (string, error) {
		var pr autoscalingv1.ProvisioningRequest
		if err := w.Get(ctx, client.ObjectKey{Namespace: w.ns, Name: name}, &pr); err != nil {
			return "", err
		}
		c := find(pr.Status.Conditions, kind)
		if c == nil || c.Status != status || c.Reason != reason {
			return fmt.Sprintf("%+v", pr.Status), nil
		}
		found = *c
		return "", nil
	})
	return found
}

// heldBy waits until the namespace's requests are owned so: by kind, how many.
func (w *world) heldBy(want map[string]int) {
	w.t.Helper()
	w.eventually(fmt.Sprintf("requests owned by %v", want), func(ctx context.Context) (string, error) {
		list, err := w.requests(ctx)
		if err != nil {
			return "", err
		}
		got := map[string]int{}
		for i := range list {
			if list[i].DeletionTimestamp != nil || len(list[i].OwnerReferences) != 1 {
				return "", errors.New("a request is terminating or has not one owner: " + list[i].Name)
			}
			got[list[i].OwnerReferences[0].Kind]++
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			return fmt.Sprint(got), nil
		}
		return "", nil
	})
}
