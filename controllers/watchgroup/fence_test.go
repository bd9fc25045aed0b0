package watchgroup

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/drover-sh/drover/sharding"
)

// The fence: what a member's Pod writes to an object of another member is refused by the API server.
func TestTheFenceRefusesWhatIsNotTheWritersOwn(t *testing.T) {
	e := deploy(t, all, slowLease).guarded()
	k := newCast(t, e.c, e.group)
	clients, err := kubernetes.NewForConfig(apiServer)
	if err != nil {
		t.Fatal(err)
	}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: e.namespace, Name: "controller"}}
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "family-members"}, Rules: []rbacv1.PolicyRule{{
		APIGroups: []string{"example.com"}, Resources: []string{"parents", "children"}, Verbs: []string{"get", "patch", "create"}}}}
	install(t, e.c, account, role, &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "family-members"},
		Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: e.namespace, Name: account.Name}},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.Name}})
	for _, u := range manifest(t, filepath.Join("fence", "fence.yaml")) {
		data, err := u.MarshalJSON()
		if err != nil {
			t.Fatal(err)
		}
		text := strings.ReplaceAll(string(data), "serviceaccount:example:", "serviceaccount:"+e.namespace+":")
		text = strings.ReplaceAll(text, `"namespace":"example"`, `"namespace":"`+e.namespace+`"`)
		if err := u.UnmarshalJSON([]byte(text)); err != nil {
			t.Fatal(err)
		}
		install(t, e.c, u)
	}
	writer := make(map[string]client.Client)
	for _, id := range []string{"a", "b"} {
		p := k.newPod(id)
		k.join(id, p)
		token, err := clients.CoreV1().ServiceAccounts(e.namespace).CreateToken(t.Context(), account.Name,
			&authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: ptr.To[int64](3600),
				BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: p.Name, UID: p.UID}}},
			metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		config := rest.AnonymousClientConfig(apiServer)
		config.BearerToken = token.Status.Token
		if writer[id], err = client.New(config, client.Options{Scheme: testScheme()}); err != nil {
			t.Fatal(err)
		}
	}
	k.share(map[string]int{"a": 50, "b": 50})
	k.quiet(2)
	touch := client.RawPatch("application/merge-patch+json", []byte(`{"spec":{"touched":true}}`))
	owner := func(o *unstructured.Unstructured) (own, other string) {
		vn, err := sharding.ParseVirtualNode(o.GetLabels()[sharding.LabelVirtualNode], 100)
		if err != nil {
			t.Fatal(err)
		}
		k.mu.Lock()
		defer k.mu.Unlock()
		if k.members["a"].m.Owned().Has(vn) {
			return "a", "b"
		}
		return "b", "a"
	}
	seen := make(map[string]bool)
	for i := range 20 {
		o := e.create(e.object(parentKind, fmt.Sprintf("p%02d", i), optIn))
		own, other := owner(o)
		if !seen[own] {
			eventually(t, "the fence knows what "+own+" owns", func() string {
				if err := writer[own].Patch(t.Context(), o.DeepCopy(), touch, client.DryRunAll); err != nil {
					return err.Error()
				}
				return ""
			})
		}
		seen[own] = true
		eventually(t, "the fence stands", func() string {
			err := writer[other].Patch(t.Context(), o.DeepCopy(), touch)
			if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "is not owned by "+other) {
				return fmt.Sprintf("a write by the other member ended with %v", err)
			}
			return ""
		})
		if err := writer[own].Patch(t.Context(), o.DeepCopy(), touch); err != nil {
			t.Errorf("a write by the owner %s ended with %v", own, err)
		}
		child := e.object(childKind, fmt.Sprintf("c%02d", i), nil, o)
		if err := writer[other].Create(t.Context(), child.DeepCopy()); !apierrors.IsForbidden(err) ||
			!strings.Contains(err.Error(), "is not owned by "+other) {
			t.Errorf("a child by the other member %s ended with %v", other, err)
		}
		if err := writer[own].Create(t.Context(), child); err != nil {
			t.Errorf("a child by the owner %s ended with %v", own, err)
		}
	}
	if len(seen) != 2 {
		t.Errorf("only %v own objects", seen)
	}
}
