package integration

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"

	"github.com/drover-sh/drover/playground"
)

// TestStorySharding plays the playground's stories about sharding: coordinator and members are under the ServiceAccounts and
// roles that are shipped for them. Then it holds what they did against these roles.
func TestStorySharding(t *testing.T) {
	undeploy(t)
	began := time.Now()
	program(t, "coordinator")
	sample(t)
	shown := &tables{}
	p := startPlayground(t, shown)
	for _, story := range []struct {
		playground.Story
		objects, virtualNodes int
	}{
		{playground.Sharding(), 600, 1000},
		{playground.Resync(), 300, 300},
	} {
		t.Run(story.Name, func(t *testing.T) {
			r := p.Run(t.Context(), story.Story)
			if !r.OK {
				t.Fatalf("%s\nsteps: %s\nlogs: %s", r.Error, steps(r), r.Logs)
			}
			if r.Objects != story.objects || r.VirtualNodes != story.virtualNodes || r.Moves == 0 {
				t.Errorf("%d objects, %d Virtual Nodes, %d moves; expected %d, %d and some", r.Objects, r.VirtualNodes, r.Moves,
					story.objects, story.virtualNodes)
			}
			if _, err := os.Stat(filepath.Join(p.Dir(), "story-"+story.Name)); !os.IsNotExist(err) {
				t.Errorf("the story has left its folder: %v", err)
			}
			if left := processesOf(t, filepath.Join(p.Dir(), "story-"+story.Name)); len(left) > 0 {
				t.Errorf("processes: %s", strings.Join(left, "\n"))
			}
		})
		if t.Failed() {
			return // the cluster is not as the next story expects it
		}
	}
	t.Run("kubectl tells who owns how much", func(t *testing.T) {
		tables := shown.of("kubectl get watchgroups,virtualnodeslices -n story-sharding")
		if len(tables) != 2 {
			t.Fatalf("shown %d times, expected 2", len(tables))
		}
		for i, version := range []string{"v1", "v2"} {
			for _, want := range []string{
				"VNS    MEMBERS   OWNED   MOVING   UNOWNED", "1000   3         1000    0        0",
				version + "-a", version + "-b", version + "-c",
			} {
				if !strings.Contains(tables[i], want) {
					t.Errorf("it does not say %q:\n%s", want, tables[i])
				}
			}
		}
	})
	used, refused := readAudit(t, began)
	if len(refused) > 0 {
		t.Errorf("the API server refused, for want of a right:\n  %s", strings.Join(refused, "\n  "))
	}
	objects := build(t, "watchgroup")
	clusterRoles := kindOf[rbacv1.ClusterRole](t, objects, "ClusterRole")
	for _, dir := range []string{"controller", "coordinator"} {
		clusterRoles = append(clusterRoles, readClusterRole(t, filepath.Join("examples/parentchild/rbac", dir, "role.yaml")))
	}
	roles := kindOf[rbacv1.Role](t, objects, "Role")
	for role, account := range map[string]string{
		"drover-coordinator": "drover-coordinator", "drover-coordinator-parentchild": "drover-coordinator",
		"drover-watchgroup-member": "parentchild-controller", "parentchild-controller": "parentchild-controller",
	} {
		t.Run(role, func(t *testing.T) { expectUsed(t, role, used[account], grantedTo(t, role, clusterRoles, roles)) })
	}
}

func readClusterRole(t *testing.T, path string) (role rbacv1.ClusterRole) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(env.root, path))
	if err == nil {
		err = yaml.UnmarshalStrict(text, &role)
	}
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return role
}
