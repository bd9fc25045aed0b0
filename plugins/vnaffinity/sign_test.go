package vnaffinity

import (
	"bytes"
	"testing"

	fwk "k8s.io/kube-scheduler/framework"

	"github.com/drover-sh/drover/internal/builders"
)

// A pod of no role is signed as if the plugin were not there; one of a role is not signed at all.
func TestSignatures(t *testing.T) {
	r := newRig(t, `,"members":{},"objects":{"mode":"Domains"}`, nodesIn(1))
	without := newRig(t, ``, nodesIn(1))
	plain := builders.Pod("ns", "plain").Requests("cpu", "1").Obj()
	if fragments, status := r.plugin.SignPod(t.Context(), plain); len(fragments) != 0 || !status.IsSuccess() {
		t.Errorf("an ordinary pod: %v, %v", fragments, status)
	}
	got, want := r.framework.SignPod(t.Context(), plain), without.framework.SignPod(t.Context(), plain)
	if len(want) == 0 || !bytes.Equal(got, want) {
		t.Errorf("the signature is %q, without roles %q", got, want)
	}
	for name, pod := range map[string]*builders.PodBuilder{
		"a member":                memberPod("m"),
		"a pod with a label":      builders.Pod("ns", "p").Label("loadbalance.k8s.io/vn", "7"),
		"a pod with a key of its": builders.Pod("ns", "p").Annotation("loadbalance.k8s.io/hash-key", "k"),
	} {
		if _, status := r.plugin.SignPod(t.Context(), pod.Obj()); status.Code() != fwk.Unschedulable {
			t.Errorf("%s: %v", name, status)
		}
		if signature := r.framework.SignPod(t.Context(), pod.Obj()); signature != nil {
			t.Errorf("%s is signed: %q", name, signature)
		}
	}
}
