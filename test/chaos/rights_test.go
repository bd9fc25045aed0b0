package chaos

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	v1alpha1 "github.com/drover-sh/drover/examples/parentchild/api/v1alpha1"
)

// system is the namespace of the coordinator, as its manifests have it.
const system = "fleet-system"

// authorize gives coordinators and members the ServiceAccounts and the rights of the manifests, and no others: what is
// missing there is missing here.
func (c *cluster) authorize(root string) {
	c.t.Helper()
	create := func(obj client.Object) {
		if err := c.client.Create(c.t.Context(), obj); err != nil {
			c.t.Fatal(err)
		}
	}
	create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: system}})
	for _, file := range []string{
		"manifests/watchgroup/service_account.yaml", "manifests/watchgroup/role.yaml", "manifests/watchgroup/object_role.yaml",
		"manifests/watchgroup/role_bindings.yaml", "manifests/watchgroup/member_role.yaml",
		"examples/parentchild/rbac/controller/role.yaml",
	} {
		for _, u := range c.manifest(filepath.Join(root, file)) {
			if u.GetKind() != "" { // a file may begin with a separator
				create(u)
			}
		}
	}
	const account = "controller"
	subjects := []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: namespace, Name: account}}
	role := func(name string) rbacv1.RoleRef {
		return rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name}
	}
	create(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: account}})
	create(&rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: account}, Subjects: subjects,
		RoleRef: role("drover-watchgroup-member")})
	create(&rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "parentchild-controller"}, Subjects: subjects,
		RoleRef: role("parentchild-controller")})
	create(&rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: "drover-coordinator-parents",
			Labels: map[string]string{"loadbalance.k8s.io/aggregate-to-coordinator": "true"}},
		Rules: []rbacv1.PolicyRule{{APIGroups: []string{v1alpha1.GroupVersion.Group}, Resources: []string{"parents", "children"},
			Verbs: []string{"get", "list", "watch", "patch"}}},
	})
	for file, account := range map[*string][2]string{
		&c.coordinator: {system, "drover-coordinator"}, &c.controller: {namespace, account},
	} {
		var err error
		if *file, err = c.cp.KubeconfigForServiceAccount(c.t.Context(), account[0], account[1]); err != nil {
			c.t.Fatal(err)
		}
	}
}

// denial is how the API server names a right that somebody has not.
var denial = regexp.MustCompile(`cannot [a-z]+ resource \\?"`)

// started is how long an API server that has just begun may take to know who has which rights.
const started = 15 * time.Second

// denied returns what the programs were refused for want of a right, but for what an API server refuses that has just been
// started and knows no rights yet.
func (c *cluster) denied(restarts []time.Time) []string {
	c.t.Helper()
	var found []string
	logs, _ := filepath.Glob(filepath.Join(c.group.LogDir(), "*.log"))
	for _, log := range logs {
		text, err := os.ReadFile(log)
		if err != nil {
			c.t.Fatal(err)
		}
		for line := range strings.SplitSeq(string(text), "\n") {
			if denial.MatchString(line) && !duringRestart(line, restarts) {
				found = append(found, filepath.Base(log)+": "+line)
			}
		}
	}
	return found
}

func duringRestart(line string, restarts []time.Time) bool {
	if len(line) < 21 {
		return false
	}
	// klog's header: a letter, month and day, and the time.
	at, err := time.ParseInLocation("20060102 15:04:05.000000", time.Now().Format("2006")+line[1:21], time.Local)
	if err != nil {
		return false
	}
	for _, r := range restarts {
		if at.After(r) && at.Before(r.Add(started)) {
			return true
		}
	}
	return false
}
