package integration

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/drover-sh/drover/playground"
)

// TestStoryKueue plays the playground's stories with the real Kueue manager, each of our programs with the rights of its
// ServiceAccount. Then it holds what the manager did against the role that the manifests ship for it.
func TestStoryKueue(t *testing.T) {
	undeploy(t)
	if out, err := kubectl(t.Context(), "apply", "--server-side", "-k", filepath.Join(env.root, "manifests", "kueue")); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	shown := &tables{}
	p := startPlayground(t, shown)
	for _, story := range []struct {
		playground.Story
		workloads, admissions, nodes int
	}{
		{playground.KueueHint(), 10, 10, 40},
		{playground.KueueProvision(), 2, 1, 8},
		{playground.KueueTAS(), 1, 1, 16},
		{playground.KueueStockout(), 2, 2, 8},
	} {
		t.Run(story.Name, func(t *testing.T) {
			r := p.Run(t.Context(), story.Story)
			if !r.OK {
				t.Fatalf("%s\nsteps: %s\nlogs: %s", r.Error, steps(r), r.Logs)
			}
			if r.Workloads != story.workloads || r.Admissions != story.admissions {
				t.Errorf("%d workloads and %d admissions, expected %d and %d", r.Workloads, r.Admissions, story.workloads, story.admissions)
			}
			if r.NodesLaunched != story.nodes || r.NodesReclaimed != story.nodes {
				t.Errorf("%d nodes launched and %d reclaimed, expected %d of each", r.NodesLaunched, r.NodesReclaimed, story.nodes)
			}
		})
		if t.Failed() {
			return // the cluster is not as the next story expects it
		}
	}
	t.Run("kubectl tells the story", func(t *testing.T) { expectTold(t, shown) })
	t.Run("drover-manager-kueue", func(t *testing.T) {
		used, refused := readAudit(t, time.Time{})
		if len(refused) > 0 {
			t.Errorf("the API server refused, for want of a right:\n  %s", strings.Join(refused, "\n  "))
		}
		objects := build(t, "kueue")
		const role = "drover-manager-kueue"
		expectUsed(t, role, used["drover-manager"], grantedTo(t, role, kindOf[rbacv1.ClusterRole](t, objects, "ClusterRole"),
			kindOf[rbacv1.Role](t, objects, "Role")))
	})
	t.Run("nothing is left behind", func(t *testing.T) {
		if err := p.Stop(); err != nil {
			t.Fatal(err)
		}
		if left := processesOf(t, p.Dir()); len(left) > 0 {
			t.Errorf("processes: %s", strings.Join(left, "\n"))
		}
		var hooks admissionregistrationv1.ValidatingWebhookConfigurationList
		if failure := list(t.Context(), &hooks); failure != "" || slices.ContainsFunc(hooks.Items,
			func(h admissionregistrationv1.ValidatingWebhookConfiguration) bool {
				return strings.HasPrefix(h.Name, "kueue-")
			}) {
			t.Errorf("Kueue's webhooks are still called: %s", failure)
		}
	})
}

// expectTold says whether kubectl, without any log, tells who waits, for what, and what becomes of it.
func expectTold(t *testing.T, shown *tables) {
	hint := shown.of("kubectl get workloads.kueue.x-k8s.io -n story-kueue-hint")
	if len(hint) != 2 {
		t.Fatalf("the list of workloads was shown %d times, expected 2", len(hint))
	}
	rows := strings.Split(strings.TrimSpace(hint[0]), "\n")
	if got := strings.Join(strings.Fields(rows[0]), " "); got != "NAME QUEUE RESERVED IN ADMITTED FINISHED AGE" {
		t.Errorf("columns %q", got)
	}
	in, waiting := 0, 0
	for _, row := range rows[1:] {
		switch f := strings.Fields(row); {
		case len(f) == 5 && f[1] == "training" && f[2] == "story-training" && f[3] == "True":
			in++
		case len(f) >= 4 && f[1] == "training" && f[2] == "story-training":
			waiting++
		}
	}
	if in != 6 || waiting != 4 {
		t.Errorf("%d admitted and %d with quota that wait, expected 6 and 4:\n%s", in, waiting, hint[0])
	}
	for _, c := range []struct {
		story string
		says  []string
	}{
		{"kueue-hint", []string{
			"State:    Pending", "Message:  needs 4 × 8 nvidia.com/gpu in flavor h100; 1 available",
			"CapacityShort", "story-capacity: needs 4 × 8 nvidia.com/gpu in flavor h100",
		}},
		{"kueue-provision", []string{"State:    Pending", "Message:  needs 8 × 8 nvidia.com/gpu"}},
		{"kueue-tas", []string{"State:    Ready", "Admitted"}},
		{"kueue-stockout", []string{"needs 4 × 8 nvidia.com/gpu in flavor h100; 0 available"}},
	} {
		text := strings.Join(shown.of("kubectl describe workloads.kueue.x-k8s.io -n story-"+c.story), "\n")
		for _, want := range c.says {
			if !strings.Contains(text, want) {
				t.Errorf("%s: kubectl describe workload does not say %q:\n%s", c.story, want, text)
			}
		}
	}
}

// tables keeps what kubectl printed in the course of stories.
type tables struct {
	playground.Silent
	titles, texts []string
}

func (*tables) WantsTables() bool { return true }

func (s *tables) Table(title, text string) {
	s.titles, s.texts = append(s.titles, title), append(s.texts, text)
}

// of are the outputs of a command that begins so.
func (s *tables) of(command string) (texts []string) {
	for i, title := range s.titles {
		if strings.HasPrefix(title, command) {
			texts = append(texts, s.texts[i])
		}
	}
	return texts
}

func steps(r playground.Result) string {
	var b strings.Builder
	for _, s := range r.Steps {
		fmt.Fprintf(&b, "\n  %+6.1fs  %s", s.Seconds, s.Text)
	}
	return b.String()
}

// startPlayground starts a playground on the suite's control plane, under the ServiceAccounts of the manifests.
func startPlayground(t *testing.T, presenter playground.Presenter) *playground.Playground {
	t.Helper()
	o := playground.Options{
		Dir: filepath.Join(env.dir, "playground"), BinDir: filepath.Join(env.root, "bin"), ControlPlane: env.cp,
		Kubeconfigs: map[string]string{}, Presenter: presenter,
	}
	for _, name := range []string{"autoscaler", "manager", "scheduler"} {
		program(t, name)
		path, err := env.cp.KubeconfigForServiceAccount(t.Context(), system, "drover-"+name)
		if err != nil {
			t.Fatal(err)
		}
		o.Kubeconfigs["drover-"+name] = path
	}
	p, err := playground.Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { emptyCluster(t) })
	t.Cleanup(func() {
		if err := p.Stop(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// undeploy takes the manifests' pods away for the time of a test: nothing runs them here, and a scheduler that serves the
// default scheduler's name would ask for their capacity.
func undeploy(t *testing.T) {
	t.Helper()
	t.Cleanup(func() { redeploy(t) })
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := scaleToZero(ctx); err != nil {
		t.Fatal(err)
	}
}

// redeploy brings back what the suite has deployed. All pods go first: a Deployment none of whose pods ever becomes available
// gives up no pod of a template that it has left.
func redeploy(t *testing.T) {
	t.Helper()
	ctx, cancel := cleanupContext()
	defer cancel()
	if err := scaleToZero(ctx); err != nil {
		t.Error(err)
	}
	if out, err := kubectl(ctx, "apply", "--server-side", "--force-conflicts", "-k", overlay("default")); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// scaleToZero returns when no pod of the manifests is left.
func scaleToZero(ctx context.Context) error {
	if out, err := kubectl(ctx, "-n", system, "scale", "deployment,statefulset", "--all", "--replicas=0"); err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	state, gone := poll(ctx, func(ctx context.Context) (bool, string) {
		var pods corev1.PodList
		failure := list(ctx, &pods, client.InNamespace(system))
		return failure == "" && len(pods.Items) == 0, fmt.Sprintf("%d pods %s", len(pods.Items), failure)
	})
	if !gone {
		return fmt.Errorf("pods of the manifests do not go: %s", state)
	}
	return nil
}

// processesOf lists the processes whose command line names dir; empty where there is no /proc.
func processesOf(t *testing.T, dir string) (found []string) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if data, err := os.ReadFile(file); err == nil && strings.Contains(string(data), dir) {
			found = append(found, file+": "+strings.ReplaceAll(string(data), "\x00", " "))
		}
	}
	return found
}
