package kueuemanager_test

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/go-logr/logr"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	"github.com/drover-sh/drover/internal/controlplane"
	"github.com/drover-sh/drover/internal/kueuemanager"
)

// Kueue starts outside a cluster, admits a Job, and starts again after Stop.
func TestKueueRuns(t *testing.T) {
	if testing.Short() {
		t.Skip("needs an API server")
	}
	ctrl.SetLogger(logr.Discard())
	dir := t.TempDir()
	cp, err := controlplane.Start(t.Context(), controlplane.Options{Dir: filepath.Join(dir, "cp")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cp.Stop(); err != nil {
			t.Error(err)
		}
	})
	for _, round := range []string{"first", "second"} {
		m, err := kueuemanager.Start(t.Context(), cp, kueuemanager.Options{Dir: filepath.Join(dir, "kueue")})
		if err != nil {
			t.Fatalf("%s start: %v", round, err)
		}
		t.Cleanup(func() { _ = m.Stop() })
		admitsAJob(t, cp, round)
		if err := m.Stop(); err != nil {
			t.Fatal(err)
		}
	}
}

func admitsAJob(t *testing.T, cp *controlplane.ControlPlane, name string) {
	t.Helper()
	c, err := client.New(cp.Config(), client.Options{Scheme: kueuemanager.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	pod := corev1.PodTemplateSpec{Spec: corev1.PodSpec{
		RestartPolicy: corev1.RestartPolicyNever,
		Containers: []corev1.Container{{
			Name: "c", Image: "i",
			Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1")}},
		}},
	}}
	for _, obj := range []client.Object{
		&kueue.ResourceFlavor{ObjectMeta: metav1.ObjectMeta{Name: name}},
		&kueue.ClusterQueue{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: kueue.ClusterQueueSpec{
			NamespaceSelector: &metav1.LabelSelector{},
			ResourceGroups: []kueue.ResourceGroup{{
				CoveredResources: []corev1.ResourceName{"cpu"},
				Flavors: []kueue.FlavorQuotas{{Name: kueue.ResourceFlavorReference(name), Resources: []kueue.ResourceQuota{
					{Name: "cpu", NominalQuota: resource.MustParse("10")},
				}}},
			}},
		}},
		&kueue.LocalQueue{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: kueue.LocalQueueSpec{
			ClusterQueue: kueue.ClusterQueueReference(name),
		}},
		&batchv1.Job{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Labels: map[string]string{"kueue.x-k8s.io/queue-name": name}},
			Spec:       batchv1.JobSpec{Suspend: ptr.To(true), Template: pod},
		},
	} {
		if err := c.Create(t.Context(), obj); err != nil {
			t.Fatal(err)
		}
	}
	deadline := time.Now().Add(time.Minute)
	for {
		var job batchv1.Job
		if err := c.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: name}, &job); err != nil {
			t.Fatal(err)
		}
		if !*job.Spec.Suspend {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("Kueue has not admitted Job %s", name)
		}
		time.Sleep(50 * time.Millisecond)
	}
}
