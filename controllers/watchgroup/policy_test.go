package watchgroup

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
)

// Trap 9: a label that is edited by hand is refused, with the reason; one that a writer leaves out stays.
func TestLabelsAreNotEditedByHand(t *testing.T) {
	e := deploy(t, all, nil).guarded()
	o := e.create(e.object(parentKind, "p", optIn))
	want := read(o)
	err := e.relabel(o, "99")
	if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), sharding.LabelVirtualNode) ||
		!strings.Contains(err.Error(), want.virtualNode) {
		t.Errorf("an edit ended with %v", err)
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
	stranger := e.create(e.object(parentKind, "stranger", nil))
	if err := e.relabel(stranger, "5"); err != nil {
		t.Errorf("%v", err)
	}
	if got := read(e.get(stranger)); got != (labels{}) {
		t.Errorf("a label that was put on by hand stays: %v", got)
	}
	// With the webhook down the policy alone keeps it.
	e.stop()
	if err := e.relabel(o, "99"); !apierrors.IsForbidden(err) {
		t.Errorf("an edit while the webhook is down ended with %v", err)
	}
	if err := e.relabel(o, ""); !apierrors.IsForbidden(err) {
		t.Errorf("a removal while the webhook is down ended with %v", err)
	}
}

// The status of a built-in kind takes labels, too: that way is no way around the policy.
func TestLabelsAreNotEditedThroughASubresource(t *testing.T) {
	e := deploy(t, all, func(s *lbv1alpha1.WatchGroupSpec) {
		s.Resources = append(s.Resources, lbv1alpha1.Resource{Resource: "pods"})
	})
	e.guarded()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: e.namespace, Name: "p", Annotations: optIn},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "none"}}, NodeName: "nowhere",
			ServiceAccountName: "default"}}
	var labelled labels
	eventually(t, "a Pod is labelled when it is created", func() string {
		probe := pod.DeepCopy()
		if err := e.c.Create(t.Context(), probe, client.DryRunAll); err != nil || read(probe) == (labels{}) {
			return fmt.Sprintf("it carries %v (%v)", read(probe), err)
		}
		return ""
	})
	if err := e.c.Create(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	labelled = read(pod)
	edit := client.RawPatch("application/merge-patch+json",
		[]byte(`{"metadata":{"labels":{"loadbalance.k8s.io/vn":"99"}},"status":{"message":"edited"}}`))
	eventually(t, "an edit by the status is refused", func() string {
		if err := e.c.Status().Patch(t.Context(), pod.DeepCopy(), edit, client.DryRunAll); !apierrors.IsForbidden(err) {
			return fmt.Sprintf("it ended with %v", err)
		}
		return ""
	})
	status := client.RawPatch("application/merge-patch+json", []byte(`{"status":{"message":"as kubelet writes"}}`))
	if err := e.c.Status().Patch(t.Context(), pod, status); err != nil || read(pod) != labelled {
		t.Errorf("a status ended with %v, and %v", err, read(pod))
	}
}
