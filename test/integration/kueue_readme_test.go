package integration

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"
)

// TestReadmeEnablesTheKueueCheck types what the README says, in at most five commands. Then a workload is admitted.
func TestReadmeEnablesTheKueueCheck(t *testing.T) {
	commands := commandsOf(t, "README.md", "Enable the Kueue admission check")
	if len(commands) == 0 || len(commands) > 5 {
		t.Fatalf("%d commands, expected one to five: %q", len(commands), commands)
	}
	k := startKueue(t, "kueue-readme")
	k.hint("a3-highgpu-8g", 4)
	t.Cleanup(func() { redeploy(t) })
	t.Cleanup(func() {
		ctx, cancel := cleanupContext()
		defer cancel()
		background := client.PropagationPolicy(metav1.DeletePropagationBackground)
		if err := k.client.DeleteAllOf(ctx, &batchv1.Job{}, client.InNamespace("default"), background); err != nil {
			t.Error(err)
		}
		if out, err := kubectl(ctx, "delete", "-n", "default", "localqueue", "training"); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
	})
	enter := func(ctx context.Context, command string) string {
		run := exec.CommandContext(ctx, env.kubectl, strings.Fields(command)...)
		run.Dir = env.root
		run.Env = append(os.Environ(), "KUBECONFIG="+env.cp.Kubeconfig())
		out, err := run.CombinedOutput()
		if err != nil && ctx.Err() == nil {
			t.Fatalf("kubectl %s: %v\n%s", command, err, out)
		}
		return string(out)
	}
	for _, command := range commands[:len(commands)-1] {
		enter(t.Context(), command)
	}
	// A person looks again when nothing is there yet.
	eventually(t, "the last command shows who is admitted", func(ctx context.Context) (bool, string) {
		out := enter(ctx, commands[len(commands)-1])
		return strings.Contains(out, "ADMITTED"), out
	})
	eventually(t, "the example's workload is admitted", func(ctx context.Context) (bool, string) {
		var wls kueue.WorkloadList
		if err := k.client.List(ctx, &wls, client.InNamespace("default")); err != nil {
			return false, err.Error()
		}
		byName := map[string]*kueue.Workload{}
		for i := range wls.Items {
			byName[wls.Items[i].Name] = &wls.Items[i]
		}
		return len(wls.Items) == 1 && is(&wls.Items[0], kueue.WorkloadAdmitted), story(byName)
	})
	if out, err := kubectl(t.Context(), "wait", "--for=condition=Active", "--timeout=60s", "clusterqueue/training"); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// commandsOf are the arguments of the kubectl commands in a section of a page, without their comments.
func commandsOf(t *testing.T, page, title string) (commands []string) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(env.root, page))
	if err != nil {
		t.Fatal(err)
	}
	_, section, found := strings.Cut(string(data), fmt.Sprintf("\n## %s\n", title))
	if !found {
		t.Fatalf("%s has no section %q", page, title)
	}
	section, _, _ = strings.Cut(section, "\n## ")
	for line := range strings.Lines(section) {
		line, _, _ = strings.Cut(strings.TrimSpace(line), "  #")
		if command, is := strings.CutPrefix(line, "kubectl "); is {
			commands = append(commands, strings.TrimSpace(command))
		}
	}
	return commands
}
