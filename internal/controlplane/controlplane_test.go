package controlplane_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/drover-sh/drover/internal/controlplane"
)

func TestMain(m *testing.M) {
	log.SetLogger(logr.Discard())
	os.Exit(m.Run())
}

// start starts a control plane that ends with the test, and proves afterwards that it has left no process behind.
func start(t *testing.T, o controlplane.Options) *controlplane.ControlPlane {
	t.Helper()
	o.Dir = t.TempDir()
	cp, err := controlplane.Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cp.Stop(); err != nil {
			t.Errorf("Stop: %v", err)
		}
		if left := processesOf(t, o.Dir); len(left) > 0 {
			t.Errorf("after Stop, these processes are left:\n%s", strings.Join(left, "\n"))
		}
		if t.Failed() {
			t.Logf("logs were in %s", cp.LogDir())
		}
	})
	return cp
}

// processesOf lists the processes whose command line names dir; empty where there is no /proc.
func processesOf(t *testing.T, dir string) []string {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err == nil && strings.Contains(string(data), dir) {
			found = append(found, file+": "+strings.ReplaceAll(string(data), "\x00", " "))
		}
	}
	return found
}

// eventually polls until check returns true; it fails the test with what check last said.
func eventually(t *testing.T, what string, check func(ctx context.Context) (bool, string)) {
	t.Helper()
	var last string
	err := wait.PollUntilContextTimeout(t.Context(), 100*time.Millisecond, 90*time.Second, true,
		func(ctx context.Context) (ok bool, _ error) {
			ok, last = check(ctx)
			return ok, nil
		})
	if err != nil {
		t.Fatalf("expected: %s; last seen: %s", what, last)
	}
}

func fakeNode(name string) *corev1.Node {
	resources := corev1.ResourceList{
		corev1.ResourceCPU:    resource.MustParse("16"),
		corev1.ResourceMemory: resource.MustParse("64Gi"),
		corev1.ResourcePods:   resource.MustParse("110"),
	}
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name:        name,
			Annotations: map[string]string{controlplane.KWOKAnnotation: controlplane.KWOKAnnotationValue},
		},
		Status: corev1.NodeStatus{Capacity: resources, Allocatable: resources},
	}
}

func podTemplate(node string, annotations map[string]string) corev1.PodTemplateSpec {
	return corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "test"}, Annotations: annotations},
		Spec: corev1.PodSpec{
			NodeName:      node,
			RestartPolicy: corev1.RestartPolicyAlways,
			Containers:    []corev1.Container{{Name: "main", Image: "example.invalid/main"}},
		},
	}
}

func TestNodesRunPodsAndControllersCleanUp(t *testing.T) {
	cp := start(t, controlplane.Options{
		CRDPaths:          []string{"../../manifests/crd/bases"},
		ControllerManager: true,
		KWOK:              true,
	})
	clients, err := cp.Clientset()
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	if _, err := clients.CoreV1().Nodes().Create(ctx, fakeNode("node-1"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the node is Ready and has lost its not-ready taint", func(ctx context.Context) (bool, string) {
		node, err := clients.CoreV1().Nodes().Get(ctx, "node-1", metav1.GetOptions{})
		if err != nil {
			return false, err.Error()
		}
		ready := false
		for _, c := range node.Status.Conditions {
			ready = ready || c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
		}
		return ready && len(node.Spec.Taints) == 0, node.String()
	})

	t.Run("a Deployment's pods run, and go when it is deleted", func(t *testing.T) {
		deployments := clients.AppsV1().Deployments("default")
		_, err := deployments.Create(ctx, &appsv1.Deployment{
			ObjectMeta: metav1.ObjectMeta{Name: "web"},
			Spec: appsv1.DeploymentSpec{
				Replicas: ptr.To[int32](3),
				Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "test"}},
				Template: podTemplate("node-1", nil),
			},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, "3 replicas available", func(ctx context.Context) (bool, string) {
			d, err := deployments.Get(ctx, "web", metav1.GetOptions{})
			if err != nil {
				return false, err.Error()
			}
			return d.Status.AvailableReplicas == 3, d.Status.String()
		})
		err = deployments.Delete(ctx, "web", metav1.DeleteOptions{
			PropagationPolicy: ptr.To(metav1.DeletePropagationBackground),
		})
		if err != nil {
			t.Fatal(err)
		}
		eventuallyNoPods(t, clients)
	})

	t.Run("a Job's pods run until it is deleted, unless they say how long", func(t *testing.T) {
		jobs := clients.BatchV1().Jobs("default")
		for name, annotations := range map[string]map[string]string{
			"long":  nil,
			"short": {controlplane.RunForAnnotation: "300ms"},
		} {
			template := podTemplate("node-1", annotations)
			template.Spec.RestartPolicy = corev1.RestartPolicyNever
			_, err := jobs.Create(ctx, &batchv1.Job{
				ObjectMeta: metav1.ObjectMeta{Name: name},
				Spec: batchv1.JobSpec{
					Parallelism: ptr.To[int32](2), Completions: ptr.To[int32](2), Template: template,
				},
			}, metav1.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
		}
		eventually(t, "Job short complete, Job long still running", func(ctx context.Context) (bool, string) {
			short, err := jobs.Get(ctx, "short", metav1.GetOptions{})
			if err != nil {
				return false, err.Error()
			}
			long, err := jobs.Get(ctx, "long", metav1.GetOptions{})
			if err != nil {
				return false, err.Error()
			}
			return short.Status.CompletionTime != nil && ptr.Deref(long.Status.Ready, 0) == 2,
				short.Status.String() + long.Status.String()
		})
		for _, name := range []string{"long", "short"} {
			err := jobs.Delete(ctx, name, metav1.DeleteOptions{
				PropagationPolicy: ptr.To(metav1.DeletePropagationBackground),
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		eventuallyNoPods(t, clients)
	})

	t.Run("a ServiceAccount's kubeconfig has its rights and no more", func(t *testing.T) {
		account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "nobody"}}
		if _, err := clients.CoreV1().ServiceAccounts("default").Create(ctx, account, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		path, err := cp.KubeconfigForServiceAccount(ctx, "default", "nobody")
		if err != nil {
			t.Fatal(err)
		}
		config, err := clientcmd.BuildConfigFromFlags("", path)
		if err != nil {
			t.Fatal(err)
		}
		limited, err := kubernetes.NewForConfig(config)
		if err != nil {
			t.Fatal(err)
		}
		_, err = limited.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if !apierrors.IsForbidden(err) {
			t.Errorf("listing nodes as a ServiceAccount without roles: %v, expected Forbidden", err)
		}
	})
}

func eventuallyNoPods(t *testing.T, clients kubernetes.Interface) {
	t.Helper()
	eventually(t, "no pod left", func(ctx context.Context) (bool, string) {
		pods, err := clients.CoreV1().Pods("").List(ctx, metav1.ListOptions{})
		if err != nil {
			return false, err.Error()
		}
		return len(pods.Items) == 0, pods.String()
	})
}

func TestTwoRunAtOnce(t *testing.T) {
	a, b := start(t, controlplane.Options{}), start(t, controlplane.Options{})
	if a.Config().Host == b.Config().Host {
		t.Errorf("both listen on %s", a.Config().Host)
	}
}

func TestStartFailsCleanly(t *testing.T) {
	for name, tc := range map[string]struct {
		options controlplane.Options
		want    string
	}{
		"kwok without controller manager": {controlplane.Options{KWOK: true}, "Options.ControllerManager"},
		"a CRD path that is not there":    {controlplane.Options{CRDPaths: []string{"no-such-folder"}}, "no-such-folder"},
	} {
		t.Run(name, func(t *testing.T) {
			tc.options.Dir = t.TempDir()
			cp, err := controlplane.Start(t.Context(), tc.options)
			if err == nil {
				t.Errorf("Start succeeded; stop: %v", cp.Stop())
			} else if !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %q does not name %q", err, tc.want)
			}
			if left := processesOf(t, tc.options.Dir); len(left) > 0 {
				t.Errorf("processes left: %s", left)
			}
		})
	}
}

// The API server comes back on its port with what is in etcd, as often as one likes, and ends with the control plane.
func TestAPIServerRestarts(t *testing.T) {
	cp := start(t, controlplane.Options{})
	clients, err := cp.Clientset()
	if err != nil {
		t.Fatal(err)
	}
	maps := clients.CoreV1().ConfigMaps("default")
	if _, err := maps.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "kept"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		if err := cp.RestartAPIServer(ctx); err != nil {
			t.Fatal(err)
		}
		cancel()
		if _, err := maps.Get(t.Context(), "kept", metav1.GetOptions{}); err != nil {
			t.Errorf("after a restart: %v", err)
		}
	}
}
