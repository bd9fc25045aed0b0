package watchgroup

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
)

// Trap 9: a label that is edited by hand is refused, with the reason; one that a writer leaves out stays.
func TestLabelsAreNotEditedByHand(t *testing.T) {
	e := deploy(t, all, nil).guarded()
	o := e.create(e.object(parentKind, "p", optIn))
	want := read(o)
	if err := e.relabel(o, another(o).virtualNode); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), sharding.LabelVirtualNode) ||
		!strings.Contains(err.Error(), want.virtualNode) {
		t.Errorf("an edit ended with %v", err)
	}
	bucket := client.RawPatch("application/merge-patch+json",
		fmt.Appendf(nil, `{"metadata":{"labels":{"loadbalance.k8s.io/vn-bucket":%q}}}`, another(o).bucket))
	if err := e.c.Patch(t.Context(), o.DeepCopy(), bucket); !apierrors.IsForbidden(err) ||
		!strings.Contains(err.Error(), sharding.LabelBucket) || !strings.Contains(err.Error(), want.bucket) {
		t.Errorf("an edit of the bucket ended with %v", err)
	}
	if err := e.relabel(o, ""); err != nil {
		t.Errorf("leaving the label out ended with %v", err)
	}
	o.SetLabels(map[string]string{"mine": "kept"})
	if err := e.c.Update(t.Context(), o); err != nil {
		t.Errorf("putting the object without labels ended with %v", err)
	}
	if got := read(e.get(o)); got != want || o.GetLabels()["mine"] != "kept" {
		t.Errorf("it carries %v, want %v", o.GetLabels(), want)
	}
	config := rest.CopyConfig(apiServer)
	config.Impersonate = rest.ImpersonationConfig{UserName: coordinatorUser, Groups: []string{"system:authenticated"}}
	coordinator, err := client.New(config, client.Options{Scheme: testScheme()})
	if err != nil {
		t.Fatal(err)
	}
	if err := coordinator.Patch(t.Context(), e.get(o).DeepCopy(), bucket, client.DryRunAll); err != nil {
		t.Errorf("the audit may not mend labels: %v", err)
	}
	stranger := e.create(e.object(parentKind, "stranger", nil))
	if err := e.relabel(stranger, "5"); err != nil {
		t.Errorf("%v", err)
	}
	if got := read(e.get(stranger)); got != (labels{}) {
		t.Errorf("a label that was put on by hand stays: %v", got)
	}
	// With the webhook down the policy alone keeps it.
	e.stop()
	if err := e.relabel(o, another(o).virtualNode); !apierrors.IsForbidden(err) {
		t.Errorf("an edit while the webhook is down ended with %v", err)
	}
	if err := e.relabel(o, ""); !apierrors.IsForbidden(err) {
		t.Errorf("a removal while the webhook is down ended with %v", err)
	}
}

// The status of a built-in kind takes labels, too: that way is no way around the policy, for the first label either, which
// no webhook would take away again.
func TestLabelsAreNotEditedThroughASubresource(t *testing.T) {
	e := deploy(t, all, func(s *lbv1alpha1.WatchGroupSpec) {
		s.Resources = append(s.Resources, lbv1alpha1.Resource{Resource: "pods"})
	})
	e.guarded()
	pods := 0
	newPod := func(annotations map[string]string) *corev1.Pod {
		pods++
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: e.namespace, Name: fmt.Sprintf("p-%d", pods), Annotations: annotations},
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "none"}}, NodeName: "nowhere",
				ServiceAccountName: "default"},
		}
		return pod
	}
	// Where the webhook does not answer in time, as on a busy machine, a Pod is created without labels, and stays so: the
	// coordinator has no right to label Pods here.
	var pod *corev1.Pod
	eventually(t, "a Pod is labelled when it is created", func() string {
		pod = newPod(optIn)
		if err := e.c.Create(t.Context(), pod); err != nil || read(pod) == (labels{}) {
			return fmt.Sprintf("it carries %v (%v)", read(pod), err)
		}
		return ""
	})
	labelled := read(pod)
	stranger := newPod(nil)
	if err := e.c.Create(t.Context(), stranger); err != nil {
		t.Fatal(err)
	}
	edit := client.RawPatch("application/merge-patch+json",
		fmt.Appendf(nil, `{"metadata":{"labels":{"loadbalance.k8s.io/vn":%q}},"status":{"message":"edited"}}`, another(pod).virtualNode))
	for what, o := range map[string]*corev1.Pod{"an edit": pod, "a first label": stranger} {
		eventually(t, what+" by the status is refused", func() string {
			if err := e.c.Status().Patch(t.Context(), o.DeepCopy(), edit, client.DryRunAll); !apierrors.IsForbidden(err) ||
				!strings.Contains(err.Error(), sharding.LabelVirtualNode) {
				return fmt.Sprintf("it ended with %v", err)
			}
			return ""
		})
	}
	status := client.RawPatch("application/merge-patch+json", []byte(`{"status":{"message":"as kubelet writes"}}`))
	for o, want := range map[*corev1.Pod]labels{pod: labelled, stranger: {}} {
		if err := e.c.Status().Patch(t.Context(), o, status); err != nil || read(o) != want {
			t.Errorf("a status of %s ended with %v, and %v", o.Name, err, read(o))
		}
	}
}
