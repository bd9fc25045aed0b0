package watchgroup

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/controller-runtime/pkg/webhook"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
)

// coordinatorUser is who the coordinator is in the manifests.
const coordinatorUser = "system:serviceaccount:fleet-system:drover-coordinator"

var (
	parentKind = schema.GroupVersionKind{Group: "example.com", Version: "v1", Kind: "Parent"}
	childKind  = schema.GroupVersionKind{Group: "example.com", Version: "v1", Kind: "Child"}
)

// everything runs a coordinator as it is deployed: under its ServiceAccount's rights, behind the webhook and the policy of the
// manifests.
type everything struct {
	*process
	t         *testing.T
	c         client.Client
	namespace string
	group     *lbv1alpha1.WatchGroup
}

// family makes a group of parents and children.
func family(s *lbv1alpha1.WatchGroupSpec) {
	s.Resources = []lbv1alpha1.Resource{{Group: "example.com", Resource: "parents"}, {Group: "example.com", Resource: "children"}}
}

// manifest reads the objects of a file below manifests/watchgroup.
func manifest(t *testing.T, file string) []*unstructured.Unstructured {
	t.Helper()
	f, err := os.Open(filepath.Join("..", "..", "manifests", "watchgroup", file))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var list []*unstructured.Unstructured
	for d := yaml.NewYAMLOrJSONDecoder(f, 4096); ; {
		u := &unstructured.Unstructured{}
		if err := d.Decode(u); err != nil {
			return list
		}
		if len(u.Object) > 0 {
			list = append(list, u)
		}
	}
}

// install creates objects, and deletes them after the test.
func install(t *testing.T, c client.Client, objects ...client.Object) {
	t.Helper()
	for _, o := range objects {
		if err := c.Create(t.Context(), o); err != nil && !apierrors.IsAlreadyExists(err) {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := client.IgnoreNotFound(c.Delete(context.Background(), o)); err != nil {
				t.Error(err)
			}
		})
	}
}

// rights binds the roles of the manifests, and one that its users add for their kinds, to the coordinator.
func rights(t *testing.T, c client.Client) {
	t.Helper()
	subject := []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: coordinatorUser}}
	objects := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "family"}, Rules: []rbacv1.PolicyRule{{
		APIGroups: []string{"example.com"}, Resources: []string{"parents", "children"},
		Verbs: []string{"get", "list", "watch", "patch"},
	}}}
	install(t, c, objects)
	names := []string{objects.Name}
	for _, u := range manifest(t, "role.yaml") {
		if u.GetKind() == "ClusterRole" {
			install(t, c, u)
			names = append(names, u.GetName())
		}
	}
	for _, name := range names {
		install(t, c, &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "test-" + name}, Subjects: subject,
			RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name}})
	}
}

// deploy installs webhook and policy, and starts the coordinator. The webhook starts first if down is false.
func deploy(t *testing.T, o Options, change func(*lbv1alpha1.WatchGroupSpec)) *everything {
	t.Helper()
	c, ns := api(t)
	rights(t, c)
	serving := &envtest.WebhookInstallOptions{}
	if err := serving.PrepWithoutInstalling(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = serving.Cleanup() })
	for _, u := range manifest(t, "webhook.yaml") {
		hooks, _, _ := unstructured.NestedSlice(u.Object, "webhooks")
		hooks[0].(map[string]any)["clientConfig"] = map[string]any{
			"url": fmt.Sprintf("https://%s:%d%s", serving.LocalServingHost, serving.LocalServingPort, WebhookPath),
		}
		// On a busy machine an answer may take longer than the manifest waits: the object would be created without labels.
		hooks[0].(map[string]any)["timeoutSeconds"] = int64(30)
		if err := unstructured.SetNestedSlice(u.Object, hooks, "webhooks"); err != nil {
			t.Fatal(err)
		}
		install(t, c, u)
	}
	for _, u := range manifest(t, "policy.yaml") {
		install(t, c, u)
	}
	o.CAFile = filepath.Join(t.TempDir(), "ca.crt")
	if err := os.WriteFile(o.CAFile, serving.LocalServingCAData, 0o600); err != nil {
		t.Fatal(err)
	}
	config := rest.CopyConfig(apiServer)
	config.Impersonate = rest.ImpersonationConfig{UserName: coordinatorUser, Groups: []string{"system:authenticated"}}
	e := &everything{t: t, c: c, namespace: ns}
	e.group = newGroup(t, c, ns, func(s *lbv1alpha1.WatchGroupSpec) {
		family(s)
		if change != nil {
			change(s)
		}
	})
	e.process = start(t, config, o, func(m *ctrl.Options) {
		m.WebhookServer = webhook.NewServer(webhook.Options{Host: serving.LocalServingHost, Port: serving.LocalServingPort,
			CertDir: serving.LocalServingCertDir})
	})
	return e
}

// guarded waits until webhook and policy are in force for the group's resources.
func (e *everything) guarded() *everything {
	e.t.Helper()
	eventually(e.t, "the webhook labels", func() string {
		o := e.object(parentKind, "probe-", nil)
		o.SetGenerateName("probe-")
		o.SetName("")
		o.SetAnnotations(map[string]string{sharding.AnnotationHashKey: "probe"})
		if err := e.c.Create(e.t.Context(), o, client.DryRunAll); err != nil {
			return err.Error()
		}
		if (read(o) == labels{}) {
			return "not yet"
		}
		return ""
	})
	probe := e.create(e.object(parentKind, "policy-probe", optIn))
	eventually(e.t, "the policy refuses", func() string {
		if err := e.relabel(probe, another(probe).virtualNode, client.DryRunAll); !apierrors.IsForbidden(err) {
			return fmt.Sprintf("not yet: %v", err)
		}
		return ""
	})
	eventually(e.t, "the webhook may read owners", func() string {
		o := e.object(childKind, "probe", nil, probe)
		if err := e.c.Create(e.t.Context(), o, client.DryRunAll); err != nil || read(o) == (labels{}) {
			return fmt.Sprintf("not yet: %v", err)
		}
		return ""
	})
	if err := e.c.Delete(e.t.Context(), probe); err != nil {
		e.t.Fatal(err)
	}
	return e
}

var optIn = map[string]string{sharding.AnnotationLoadBalanced: "true"}

func (e *everything) object(kind schema.GroupVersionKind, name string, annotations map[string]string, owner ...client.Object) *unstructured.Unstructured {
	o := &unstructured.Unstructured{}
	o.SetGroupVersionKind(kind)
	o.SetNamespace(e.namespace)
	o.SetName(name)
	o.SetAnnotations(annotations)
	for _, owner := range owner {
		o.SetOwnerReferences([]metav1.OwnerReference{*metav1.NewControllerRef(owner, owner.GetObjectKind().GroupVersionKind())})
	}
	return o
}

func (e *everything) create(o *unstructured.Unstructured) *unstructured.Unstructured {
	e.t.Helper()
	if err := e.c.Create(e.t.Context(), o); err != nil {
		e.t.Fatal(err)
	}
	return o
}

// relabel edits the label by hand; "" takes it away.
func (e *everything) relabel(o *unstructured.Unstructured, vn string, opts ...client.PatchOption) error {
	value, _ := json.Marshal(vn)
	if vn == "" {
		value = []byte("null")
	}
	patch := fmt.Sprintf(`{"metadata":{"labels":{%q:%s}}}`, sharding.LabelVirtualNode, value)
	return e.c.Patch(e.t.Context(), o.DeepCopy(), client.RawPatch("application/merge-patch+json", []byte(patch)), opts...)
}

// another returns labels that o does not carry. Which ones o carries is by chance: its key has the name of the test's namespace.
func another(o client.Object) labels {
	b := sharding.BucketsFor(100, sharding.DefaultMaxBuckets)
	if carried := labelsOf(b, 98); read(o).virtualNode != carried.virtualNode {
		return carried
	}
	return labelsOf(b, 99)
}

func (e *everything) get(o *unstructured.Unstructured) *unstructured.Unstructured {
	e.t.Helper()
	if err := e.c.Get(e.t.Context(), client.ObjectKeyFromObject(o), o); err != nil {
		e.t.Fatal(err)
	}
	return o
}

// key is the hash key of an object with nothing said.
func (e *everything) key(kind schema.GroupVersionKind, name string) string {
	return sharding.ObjectRef{Group: kind.Group, Kind: kind.Kind, Namespace: e.namespace, Name: name}.Key()
}

func (e *everything) wantLabels(o *unstructured.Unstructured, hashKey string) {
	e.t.Helper()
	b := sharding.BucketsFor(100, sharding.DefaultMaxBuckets)
	if got, want := read(o), labelsOf(b, sharding.VirtualNodeOf(hashKey, 100)); got != want {
		e.t.Errorf("%s %s carries %v, want %v", o.GetKind(), o.GetName(), got, want)
	}
}

var all = Options{Coordinate: true, Backfill: true, Webhook: true}
