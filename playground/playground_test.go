package playground

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
)

// ownerEnv makes this test binary the owner of a playground's entry until it is killed or asked to end.
const ownerEnv = "DROVER_TEST_PLAYGROUND_OWNER"

func TestMain(m *testing.M) {
	if os.Getenv(ownerEnv) != "" {
		own()
		return
	}
	os.Exit(m.Run())
}

func own() {
	e, err := newEntry()
	if err != nil {
		panic(err)
	}
	if err := e.publish(description{PID: os.Getpid(), Kubeconfig: "k", Ports: ports{Scheduler: 7}}); err != nil {
		panic(err)
	}
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGTERM) // before anybody knows whom to end
	os.Stdout.WriteString(e.dir + "\n")
	<-ended
	if err := e.remove(); err != nil {
		panic(err)
	}
}

// owner starts another process that has a playground up, and returns its directory.
func owner(t *testing.T) (cmd *exec.Cmd, dir string) {
	t.Helper()
	cmd = exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), ownerEnv+"=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	line := make([]byte, 4096)
	n, err := out.Read(line)
	if err != nil {
		t.Fatal(err)
	}
	return cmd, strings.TrimSpace(string(line[:n]))
}

func TestRegistry(t *testing.T) {
	newRegistry := func(t *testing.T) string {
		dir := filepath.Join(t.TempDir(), "registry")
		t.Setenv(registryEnv, dir)
		return dir
	}

	t.Run("without one, none is found and none can be ended", func(t *testing.T) {
		newRegistry(t)
		if _, _, err := findEntry(); !errors.Is(err, ErrNoneRunning) {
			t.Errorf("findEntry: %v, expected ErrNoneRunning", err)
		}
		if _, err := Down(t.Context()); !errors.Is(err, ErrNoneRunning) {
			t.Errorf("Down: %v, expected ErrNoneRunning", err)
		}
	})

	t.Run("one that is up is found, and down ends it", func(t *testing.T) {
		registry := newRegistry(t)
		other, dir := owner(t)
		e, d, err := findEntry()
		if err != nil {
			t.Fatal(err)
		}
		if want := (description{PID: other.Process.Pid, Kubeconfig: "k", Ports: ports{Scheduler: 7}}); e.dir != dir || d != want {
			t.Errorf("found %+v in %s, expected %+v in %s", d, e.dir, want, dir)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		if got, err := Down(ctx); err != nil || got != dir {
			t.Errorf("Down: %q, %v; expected %q", got, err, dir)
		}
		if err := other.Wait(); err != nil {
			t.Errorf("the owner ended with %v", err)
		}
		if _, err := os.Stat(registry); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the last one has left the registry behind: %v", err)
		}
	})

	t.Run("one whose owner was killed is not found, and the next one cleans up after it", func(t *testing.T) {
		newRegistry(t)
		other, stale := owner(t)
		if err := other.Process.Signal(syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		_ = other.Wait()
		if _, _, err := findEntry(); !errors.Is(err, ErrNoneRunning) {
			t.Errorf("findEntry: %v, expected ErrNoneRunning", err)
		}
		e, err := newEntry()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(stale); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is still there: %v", stale, err)
		}
		if err := e.remove(); err != nil {
			t.Error(err)
		}
	})

	t.Run("two can be up at once, and cleaning leaves both alone", func(t *testing.T) {
		newRegistry(t)
		_, first := owner(t)
		_, second := owner(t)
		for _, dir := range []string{first, second} {
			if _, err := os.Stat(dir); err != nil {
				t.Error(err)
			}
		}
	})
}

func TestTheRecorderSeesWhatMustNotHappen(t *testing.T) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "story", Name: "a", UID: "pod-a"}}
	requestFor := func(uid types.UID) *fleetv1alpha1.CapacityRequest {
		return &fleetv1alpha1.CapacityRequest{ObjectMeta: metav1.ObjectMeta{
			Namespace: "story", Name: string(uid), UID: uid,
			OwnerReferences: []metav1.OwnerReference{{Kind: "Pod", Name: "a", UID: "pod-a"}},
		}}
	}
	node := func(name string, labels map[string]string) *corev1.Node {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}
	}
	v := &view{
		changed: make(chan struct{}), pods: map[types.UID]*corev1.Pod{}, nodes: map[string]*corev1.Node{},
		requests: map[types.UID]*fleetv1alpha1.CapacityRequest{}, upcoming: map[string]*fleetv1alpha1.UpcomingNode{},
	}
	v.nodes["old"] = node("old", nil)
	v.recorder = newRecorder("story", v.nodes)
	v.recorder.rules = []rule{{name: "at most 1 node", broken: func(w *World) string {
		if len(w.Nodes()) > 2 { // the old one counts in the world, not as launched
			return "too many"
		}
		return ""
	}}}
	put := func(o any) { v.update(func() { v.put(o) }) }
	drop := func(o any) { v.update(func() { v.drop(o) }) }

	put(pod)
	put(requestFor("r1"))
	put(requestFor("r1")) // an update of the same request
	put(node("new", nil))
	put(node("static", map[string]string{labelStatic: "true"}))
	if len(v.recorder.violations) > 0 {
		t.Fatalf("violations %q of what is allowed", v.recorder.violations)
	}
	// Both are wrong for a moment only.
	drop(requestFor("r1"))
	put(requestFor("r2"))
	put(node("newer", nil))
	drop(node("newer", nil))

	want := []string{
		"one request for each pod: pod a (UID pod-a) got request 2: r2",
		"at most 1 node: too many",
	}
	if diff := cmp.Diff(want, v.recorder.violations); diff != "" {
		t.Errorf("violations (-want +got):\n%s", diff)
	}
	if launched, gone := v.recorder.nodesLaunched(), v.recorder.nodesReclaimed(); launched != 2 || gone != 1 {
		t.Errorf("%d launched, %d reclaimed; expected 2 and 1: old and static nodes do not count", launched, gone)
	}
}

func TestParseRollUp(t *testing.T) {
	text := "# HELP drover_rollup_rows Rows\ndrover_rollup_rows 2\ndrover_rollup_bytes 1.2e+03\n" +
		"drover_rollup_sends_total{result=\"success\"} 17\ndrover_rollup_sends_total{result=\"error\"} 3\n" +
		"drover_kueue_promises 4\n"
	got, err := parseRollUp(strings.NewReader(text))
	if want := (rollUp{rows: 2, bytes: 1200, sent: 17, promises: 4}); err != nil || got != want {
		t.Errorf("got %+v, %v; expected %+v", got, err, want)
	}
	if _, err := parseRollUp(strings.NewReader("drover_rollup_rows many\n")); err == nil {
		t.Error("rows \"many\" is no error")
	}
}

func TestJSONGivesOneObjectForEachStory(t *testing.T) {
	var out bytes.Buffer
	p := JSON{Out: &out}
	p.StoryEnds(Story{}, Result{Name: "a", OK: true, Steps: []Step{{Seconds: 1.5, Text: "x"}}})
	p.StoryEnds(Story{}, Result{Name: "b", Error: "expected: 1; seen: 2"})
	decoder := json.NewDecoder(&out)
	var names []string
	for decoder.More() {
		var object map[string]any
		if err := decoder.Decode(&object); err != nil {
			t.Fatal(err)
		}
		names = append(names, object["name"].(string))
		for _, key := range []string{
			"ok", "seconds", "pods", "requests", "rollUpRows", "nodesLaunched", "nodesReclaimed", "steps",
		} {
			if object[key] == nil {
				t.Errorf("story %s has no %q", object["name"], key)
			}
		}
	}
	if !slices.Equal(names, []string{"a", "b"}) {
		t.Errorf("objects %q", names)
	}
}

func TestPeopleWithoutATerminalGetPlainLines(t *testing.T) {
	file, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	p := NewPeople(file)
	p.Busy("starting etcd")
	p.StoryBegins(Story{Name: "training", Title: "title"})
	p.Progress(time.Second, "64 nodes", "3 nodes")
	p.Step(Step{Seconds: 1.24, Text: "64 nodes"})
	p.Table("kubectl get x", "NAME\na\nb\nc\nd\ne\nf\n\nOTHER\nz\n")
	p.StoryEnds(Story{}, Result{Name: "training", OK: true, Seconds: 2, Pods: 64})
	data, err := os.ReadFile(file.Name())
	if err != nil {
		t.Fatal(err)
	}
	want := `
training  title
    +1.2s  64 nodes
           $ kubectl get x
           NAME
           a
           b
           c
           d
           ... 2 more
           OTHER
           z
  ok in 2.0s: 64 pods, 0 requests, at most 0 roll-up rows (0 bytes), 0 nodes launched, 0 reclaimed
`
	if diff := cmp.Diff(want, string(data)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestStoriesAreFoundByName(t *testing.T) {
	for _, name := range []string{"training", "stockout", "withdrawal", "scale-from-zero", "taints", "config-failure",
		"kueue-hint", "kueue-provision", "kueue-tas", "kueue-stockout", "sharding", "resync"} {
		if found, err := FindStories(name); err != nil || len(found) != 1 || found[0].Name != name {
			t.Errorf("story %q: %v, %v", name, found, err)
		}
	}
	if all, err := FindStories("all"); err != nil || len(all) != len(Stories()) {
		t.Errorf("all: %d stories, %v", len(all), err)
	}
	if _, err := FindStories("nonsense"); err == nil || !strings.Contains(err.Error(), "nonsense") ||
		!strings.Contains(err.Error(), "training") {
		t.Errorf("a story that is not there: %v; expected its name and those that are", err)
	}
}

// What the playground writes for others has to be what they read.
func TestConfigurationsAreValid(t *testing.T) {
	p := &Playground{dir: t.TempDir(), kube: "/kubeconfig", ports: ports{1, 2, 3, 4, 5, 6}}
	if err := p.writeConfigs(); err != nil {
		t.Fatal(err)
	}
	if err := configv1alpha1.Load(p.config(Autoscaler), &configv1alpha1.AutoscalerConfiguration{}); err != nil {
		t.Error(err)
	}
	if err := configv1alpha1.Load(p.config(Manager), &configv1alpha1.ManagerConfiguration{}); err != nil {
		t.Error(err)
	}
	for _, story := range append(Stories(), Story{Name: "default", Offerings: DefaultOfferings()}) {
		if err := p.SetOfferings(story.Offerings); err != nil {
			t.Fatal(err)
		}
		if err := configv1alpha1.Load(p.offeringsFile(), &configv1alpha1.OfferingList{}); err != nil {
			t.Errorf("story %s: %v", story.Name, err)
		}
	}
}
