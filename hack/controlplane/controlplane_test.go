package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// module makes a module of one main package the working directory.
func module(t *testing.T, source string) (screenText *bytes.Buffer, b builder) {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{"go.mod": "module example.com/m\n\ngo 1.24\n", "main.go": source} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(dir)
	screenText = &bytes.Buffer{}
	return screenText, builder{dir: dir, screen: &screen{out: screenText, width: 80}, start: time.Now(), totalWeight: 1}
}

func TestABuildThatFailsShowsTheCompilersWordsAndLeavesNothing(t *testing.T) {
	shown, b := module(t, "package main\n\nfunc main() { undefinedThing() }\n")
	err := b.build(t.Context(), program{name: "prog", pkg: ".", weight: 1}, 1, 1)
	if err == nil {
		t.Fatal("a program that does not compile was built")
	}
	for _, want := range []string{"building prog", "main.go:3", "undefined: undefinedThing"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error does not say %q:\n%v", want, err)
		}
	}
	if !strings.Contains(shown.String(), "failed") {
		t.Errorf("screen: %q, expected it to say that prog failed", shown)
	}
	if left, _ := filepath.Glob(".prog*"); len(left) > 0 {
		t.Errorf("files left: %v", left)
	}
}

func TestABuildStampsTheVersion(t *testing.T) {
	_, b := module(t, "package main\n\nvar version string\n\nfunc main() { println(version) }\n")
	p := program{name: "prog", pkg: ".", weight: 1, flags: "-s -w -X main.version=v1.2.3"}
	if err := b.build(t.Context(), p, 1, 1); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile("prog")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Contains(data, []byte("v1.2.3")) {
		t.Error("the program does not hold its version")
	}
}

func TestVersionsAreStampedAsKubernetesSplitsThem(t *testing.T) {
	kueue := programs[len(programs)-1]
	flags := kueue.ldflags(map[string]string{"k8s.io/kubernetes": "v1.36.3", "sigs.k8s.io/kueue": "v0.17.0"})
	for _, want := range []string{
		"-X k8s.io/component-base/version.gitVersion=v1.36.3",
		"-X k8s.io/client-go/pkg/version.gitMajor=1",
		"-X k8s.io/client-go/pkg/version.gitMinor=36",
		"-X sigs.k8s.io/kueue/pkg/version.GitVersion=v0.17.0",
	} {
		if !strings.Contains(flags, want) {
			t.Errorf("flags %q lack %q", flags, want)
		}
	}
}

func TestBuildLogTellsPackagesFromComplaints(t *testing.T) {
	l := readBuildLog(strings.NewReader("internal/abi\n# example.com/m\n./main.go:3:15: undefined: x\nk8s.io/api/core/v1\n"))
	l.wait()
	if n, current := l.progress(); n != 2 || current != "k8s.io/api/core/v1" {
		t.Errorf("%d packages, now %q; expected 2, now k8s.io/api/core/v1", n, current)
	}
	if got, want := l.complaints(), "    # example.com/m\n    ./main.go:3:15: undefined: x"; got != want {
		t.Errorf("complaints %q, expected %q", got, want)
	}
}

func TestEstimateLearnsFromWhatIsFinished(t *testing.T) {
	start := time.Unix(0, 0)
	b := builder{start: start, totalWeight: 100, doneWeight: 20, doneElapsed: 10 * time.Second}
	if got, want := b.left(start.Add(15*time.Second)), 35*time.Second; got != want {
		t.Errorf("20 of 100 done after 10s, now 15s: %v left, expected %v", got, want)
	}
}

func TestGivenProgramsAreNotBuilt(t *testing.T) {
	assets := t.TempDir()
	if err := os.WriteFile(filepath.Join(assets, "etcd"), []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	// Not executable: it has to be built after all. And kwok is never taken from there.
	for _, name := range []string{"kubectl", "kwok"} {
		if err := os.WriteFile(filepath.Join(assets, name), []byte("x"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var names []string
	for _, p := range without(programs, assets, &screen{out: &bytes.Buffer{}}) {
		names = append(names, p.name)
	}
	want := "kwok kubectl kube-apiserver kube-controller-manager kueue"
	if got := strings.Join(names, " "); got != want {
		t.Errorf("to build: %s, expected %s", got, want)
	}
}

func TestABrokenStampMeansBuildingEverything(t *testing.T) {
	path := filepath.Join(t.TempDir(), stampFile)
	if err := os.WriteFile(path, []byte(`{"quick": 7`), 0o644); err != nil {
		t.Fatal(err)
	}
	if s := readStamp(path); s.Quick != "" || allThere(t.TempDir(), programs, s) {
		t.Errorf("stamp read from a broken file: %+v", s)
	}
}
