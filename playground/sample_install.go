package playground

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/controllers/watchgroup"
	"github.com/drover-sh/drover/internal/controlplane"
)

// ServiceAccounts in the story's namespace: that of the members, and one that may read metrics and nothing else.
const (
	sampleAccount  = "parentchild-controller"
	scraperAccount = "metrics-reader"
)

// install brings what is shipped for the coordinator and for the sample, and binds the roles as docs/sharding.md says. What
// is there already stays, and stays when the story has ended.
func (c *sample) install() error {
	s := c.s
	root, err := repositoryRoot()
	if err != nil {
		return err
	}
	if err := c.installCRDs(filepath.Join(root, "examples/parentchild/crd")); err != nil {
		return err
	}
	var objects []client.Object
	for _, file := range []string{
		"manifests/crd/user_roles.yaml", "manifests/watchgroup/service_account.yaml", "manifests/watchgroup/role.yaml",
		"manifests/watchgroup/role_bindings.yaml", "manifests/watchgroup/object_role.yaml", "manifests/watchgroup/member_role.yaml",
		"manifests/watchgroup/policy.yaml", "examples/parentchild/rbac/controller/role.yaml",
		"examples/parentchild/rbac/coordinator/role.yaml",
	} {
		found, err := readManifests(filepath.Join(root, file))
		if err != nil {
			return err
		}
		objects = append(objects, found...)
	}
	objects = append(objects,
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: sampleAccount}},
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: scraperAccount}},
		&rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: "drover-watchgroup-member"},
			RoleRef:    roleRef("drover-watchgroup-member"), Subjects: c.subject(sampleAccount),
		},
		c.bound(sampleAccount, "parentchild-controller"),
		c.bound(scraperAccount, "drover-metrics-reader"),
	)
	for _, o := range objects {
		if err := c.ensure(o); err != nil {
			return err
		}
	}
	// The Lease by which coordinators elect one.
	s.unscoped = append(s.unscoped, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{
		Namespace: fleetv1alpha1.SystemNamespace, Name: coordinator,
	}})
	if err := c.awaitRights(); err != nil {
		return err
	}
	for account, namespace := range map[string]string{
		coordinator: fleetv1alpha1.SystemNamespace, sampleAccount: s.namespace, scraperAccount: s.namespace,
	} {
		request := &authenticationv1.TokenRequest{}
		err := s.p.view.client.SubResource("token").Create(s.ctx,
			&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: account}}, request)
		if err != nil {
			return fmt.Errorf("token of ServiceAccount %s/%s: %w", namespace, account, err)
		}
		c.accounts[account] = request.Status.Token
	}
	return s.p.view.follow(s.ctx, sampleKinds()...)
}

func roleRef(name string) rbacv1.RoleRef {
	return rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name}
}

func (c *sample) subject(account string) []rbacv1.Subject {
	return []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: c.s.namespace, Name: account}}
}

func (c *sample) bound(account, role string) *rbacv1.ClusterRoleBinding {
	return &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: c.s.namespace + ":" + account},
		RoleRef:    roleRef(role), Subjects: c.subject(account),
	}
}

// installCRDs returns when the sample's kinds are served. Those that were there before are left alone.
func (c *sample) installCRDs(dir string) error {
	s := c.s
	files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil {
		return err
	}
	var crds []*apiextensionsv1.CustomResourceDefinition
	for _, file := range files {
		found, err := readManifests(file)
		if err != nil {
			return err
		}
		for _, u := range found {
			err := s.p.view.client.Get(s.ctx, client.ObjectKeyFromObject(u), u.DeepCopyObject().(client.Object))
			if err == nil {
				continue
			}
			if !apierrors.IsNotFound(err) {
				return err
			}
			crd := &apiextensionsv1.CustomResourceDefinition{}
			if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.(*unstructured.Unstructured).Object, crd); err != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
			crds = append(crds, crd)
			s.unscoped = append(s.unscoped, u)
		}
	}
	config, err := clientcmd.BuildConfigFromFlags("", s.p.kube)
	if err != nil {
		return err
	}
	if _, err := envtest.InstallCRDs(config, envtest.CRDInstallOptions{CRDs: crds}); err != nil {
		return fmt.Errorf("installing the sample's CRDs: %w", err)
	}
	return nil
}

// ensure creates an object that goes with the story, unless it is there.
func (c *sample) ensure(o client.Object) error {
	err := c.s.p.view.client.Create(c.s.ctx, o)
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("creating %s %s: %w", o.GetObjectKind().GroupVersionKind().Kind, o.GetName(), err)
	}
	c.s.unscoped = append(c.s.unscoped, o)
	return nil
}

// hook tells the API server where the webhook is. One that is there is that of another coordinator.
func (c *sample) hook(port int) error {
	root, err := repositoryRoot()
	if err != nil {
		return err
	}
	found, err := readManifests(filepath.Join(root, "manifests/watchgroup/webhook.yaml"))
	if err != nil {
		return err
	}
	hooks := &admissionregistrationv1.MutatingWebhookConfiguration{}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(found[0].(*unstructured.Unstructured).Object, hooks); err != nil {
		return fmt.Errorf("webhook.yaml: %w", err)
	}
	url := "https://" + loopback(port) + watchgroup.WebhookPath
	for i := range hooks.Webhooks {
		hooks.Webhooks[i].ClientConfig = admissionregistrationv1.WebhookClientConfig{URL: &url}
	}
	s := c.s
	if c.coordinator != nil { // that of an attempt before
		if err := client.IgnoreNotFound(s.p.view.client.Delete(s.ctx, hooks)); err != nil {
			return err
		}
	}
	if err := s.p.view.client.Create(s.ctx, hooks); err != nil {
		if apierrors.IsAlreadyExists(err) {
			err = fmt.Errorf("%w: a coordinator is installed, and the story needs one of its own", err)
		}
		return fmt.Errorf("creating the webhook's configuration: %w", err)
	}
	s.unscoped = append(s.unscoped, hooks)
	return nil
}

// awaitRights returns when the API server's authorizer knows all roles and bindings, so that nothing is refused later.
func (c *sample) awaitRights() error {
	ctx, cancel := context.WithTimeoutCause(c.s.ctx, patience, fmt.Errorf("%s have passed", patience))
	defer cancel()
	namespace := c.s.namespace
	for _, r := range []struct {
		user string
		what authorizationv1.ResourceAttributes
	}{
		{fleetv1alpha1.SystemNamespace + ":" + coordinator, authorizationv1.ResourceAttributes{
			Verb: "watch", Group: "loadbalance.k8s.io", Resource: "watchgroups"}},
		{fleetv1alpha1.SystemNamespace + ":" + coordinator, authorizationv1.ResourceAttributes{
			Verb: "update", Group: "coordination.k8s.io", Resource: "leases", Namespace: fleetv1alpha1.SystemNamespace, Name: coordinator}},
		{fleetv1alpha1.SystemNamespace + ":" + coordinator, authorizationv1.ResourceAttributes{
			Verb: "watch", Group: sampleGroup, Resource: "parents"}}, // aggregated
		{namespace + ":" + sampleAccount, authorizationv1.ResourceAttributes{
			Verb: "get", Group: "loadbalance.k8s.io", Resource: "watchgroups", Namespace: namespace}},
		{namespace + ":" + sampleAccount, authorizationv1.ResourceAttributes{
			Verb: "watch", Group: sampleGroup, Resource: "parents"}},
	} {
		for {
			review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
				User: "system:serviceaccount:" + r.user, ResourceAttributes: &r.what,
			}}
			if err := c.s.p.view.client.Create(ctx, review); err != nil {
				return fmt.Errorf("asking for the rights of %s: %w", r.user, err)
			}
			if review.Status.Allowed {
				break
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("%s may not %s %s: %w", r.user, r.what.Verb, r.what.Resource, context.Cause(ctx))
			case <-time.After(50 * time.Millisecond):
			}
		}
	}
	return nil
}

func repositoryRoot() (string, error) {
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		return "", fmt.Errorf("playground: %w", err)
	}
	return root, nil
}

// readManifests returns the objects in a file, unstructured.
func readManifests(path string) ([]client.Object, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading a manifest: %w", err)
	}
	var found []client.Object
	for decoder := utilyaml.NewYAMLOrJSONDecoder(bytes.NewReader(text), 4096); ; {
		u := &unstructured.Unstructured{}
		switch err := decoder.Decode(u); {
		case errors.Is(err, io.EOF):
			return found, nil
		case err != nil:
			return nil, fmt.Errorf("manifest %s: %w", path, err)
		case len(u.Object) > 0:
			found = append(found, u)
		}
	}
}
