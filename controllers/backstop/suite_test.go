package backstop

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/internal/controlplane"
)

// patience is how long a condition may take to come true on a slow machine. No test waits for it when all is well.
const patience = 2 * time.Minute

var apiServer *rest.Config

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "backstop")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	cp, err := controlplane.Start(context.Background(), controlplane.Options{
		Dir:      dir,
		CRDPaths: []string{filepath.Join("..", "..", "manifests", "crd", "bases")},
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() {
		if err := cp.Stop(); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}()
	apiServer = cp.Config()
	apiServer.QPS = -1
	return m.Run()
}

func scheme(t *testing.T) *runtime.Scheme {
	t.Helper()
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, fleetv1alpha1.AddToScheme} {
		if err := add(s); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// start runs a manager with the back-stop, and returns a client and a namespace of the test's own.
func start(t *testing.T, change func(*Options)) (client.Client, string) {
	t.Helper()
	c, _, ns := startCached(t, change)
	return c, ns
}

// startCached is start, and returns what the back-stop reads, too. All that it may read of is listed: on a slow machine it
// would else ask for capacity, as it does where it cannot read.
func startCached(t *testing.T, change func(*Options)) (_ client.Client, cached client.Reader, namespace string) {
	t.Helper()
	c, err := client.New(apiServer, client.Options{Scheme: scheme(t)})
	if err != nil {
		t.Fatal(err)
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "test-"}}
	create(t, c, ns)
	system := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns.Name + "-system"}}
	create(t, c, system)

	skip := true
	mgr, err := ctrl.NewManager(apiServer, ctrl.Options{
		Scheme:     c.Scheme(),
		Logger:     testr.New(t),
		Metrics:    metricsserver.Options{BindAddress: "0"},
		Controller: ctrlconfig.Controller{SkipNameValidation: &skip},
	})
	if err != nil {
		t.Fatal(err)
	}
	opts := Options{
		Config: configv1alpha1.BackstopConfig{
			Namespaces: []string{ns.Name}, QPS: 1000, Burst: 1000, Delay: &metav1.Duration{},
		},
		Namespace: system.Name,
	}
	if change != nil {
		change(&opts)
	}
	if err := SetupWithManager(mgr, opts); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	stopped := make(chan error, 1)
	go func() { stopped <- mgr.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-stopped; err != nil {
			t.Error(err)
		}
	})
	for _, kind := range []client.Object{
		&corev1.Pod{}, &corev1.Node{}, &corev1.PersistentVolumeClaim{}, &corev1.PersistentVolume{}, &storagev1.StorageClass{},
		&resourcev1.ResourceClaim{}, &fleetv1alpha1.AvailableCapacity{},
	} {
		if _, err := mgr.GetCache().GetInformer(t.Context(), kind); err != nil {
			t.Fatal(err)
		}
	}
	return c, mgr.GetCache(), ns.Name
}

// shown waits until the back-stop sees an object: what comes after it may be seen before.
func shown(t *testing.T, cached client.Reader, obj client.Object) {
	t.Helper()
	eventually(t, fmt.Sprintf("%T %s is seen", obj, obj.GetName()), func(ctx context.Context) (bool, error) {
		return cached.Get(ctx, client.ObjectKeyFromObject(obj), obj.DeepCopyObject().(client.Object)) == nil, nil
	})
}

func create(t *testing.T, c client.Client, obj client.Object) {
	t.Helper()
	if err := c.Create(t.Context(), obj); err != nil {
		t.Fatalf("creating %T %s: %v", obj, obj.GetName(), err)
	}
}

// unschedulable creates the pod and says of it what a scheduler would where there is no node.
func unschedulable(t *testing.T, c client.Client, pod *corev1.Pod) *corev1.Pod {
	t.Helper()
	return rejected(t, c, pod, "no nodes available to schedule pods")
}

// rejected creates the pod and says of it what a scheduler would.
func rejected(t *testing.T, c client.Client, pod *corev1.Pod, message string) *corev1.Pod {
	t.Helper()
	create(t, c, pod)
	before := pod.DeepCopy()
	pod.Status.Conditions = []corev1.PodCondition{{
		Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable,
		Message: message, LastTransitionTime: metav1.Now(),
	}}
	if err := c.Status().Patch(t.Context(), pod, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	return pod
}

// eventually waits until the condition holds.
func eventually(t *testing.T, what string, holds func(ctx context.Context) (bool, error)) {
	t.Helper()
	err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, patience, true, holds)
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}
