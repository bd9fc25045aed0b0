package house

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/mod/modfile"
	"golang.org/x/mod/module"
	"golang.org/x/mod/zip"
)

// consumed are packages that other projects import. The list grows with the public surface.
var consumed = []string{"api/fleet/v1alpha1", "api/rpc/fleet/v1alpha1", "capacity"}

func TestGoModHasNoReplace(t *testing.T) {
	path := filepath.Join(repositoryRoot(t), "go.mod")
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	f, err := modfile.Parse(path, data, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range f.Replace {
		t.Errorf("go.mod replaces %s: a replace is ignored in a consumer's build, which then resolves other versions than ours", r.Old.Path)
	}
}

// TestConsumerModuleBuilds publishes this work tree to a module proxy in a folder and builds another module that imports
// it: what a user's `go get` does.
func TestConsumerModuleBuilds(t *testing.T) {
	root := repositoryRoot(t)
	// A version is cached for good, so each run has its own and takes it out of the module cache again.
	version := fmt.Sprintf("v0.0.1-consumer.%d", time.Now().UnixNano())
	t.Cleanup(func() { forget(t, version) })
	proxy := t.TempDir()
	publish(t, root, proxy, version)

	dir := t.TempDir()
	var imports strings.Builder
	for _, p := range consumed {
		fmt.Fprintf(&imports, "\t_ %q\n", modulePath+"/"+p)
	}
	write(t, filepath.Join(dir, "go.mod"), "module example.test/consumer\n\ngo 1.26.0\n")
	write(t, filepath.Join(dir, "main.go"), "package main\n\nimport (\n"+imports.String()+")\n\nfunc main() {}\n")

	upstream := strings.TrimSpace(string(run(t, root, nil, "go", "env", "GOPROXY")))
	env := []string{
		"GOPROXY=file://" + proxy + "," + upstream,
		"GONOSUMDB=" + modulePath,
		"GOFLAGS=-mod=mod -modcacherw",
		"GOWORK=off",
	}
	run(t, dir, env, "go", "get", modulePath+"@"+version)
	run(t, dir, env, "go", "mod", "tidy", "-e")
	run(t, dir, env, "go", "build", "./...")

	data, err := os.ReadFile(filepath.Join(dir, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	f, err := modfile.Parse("go.mod", data, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got, limit := len(f.Require), 80; got > limit {
		t.Errorf("a consumer of %v requires %d modules, want at most %d:\n%s", consumed, got, limit, data)
	}
	for _, r := range f.Require {
		if r.Mod.Path == "k8s.io/api" && r.Mod.Version != "v0.36.3" {
			t.Errorf("a consumer resolves k8s.io/api to %s, want v0.36.3", r.Mod.Version)
		}
	}
}

// publish writes the module in dir to a GOPROXY folder as version.
func publish(t *testing.T, dir, proxy, version string) {
	t.Helper()
	at := filepath.Join(proxy, filepath.FromSlash(modulePath), "@v")
	if err := os.MkdirAll(at, 0o755); err != nil {
		t.Fatal(err)
	}
	gomod, err := os.ReadFile(filepath.Join(dir, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(at, "list"), version+"\n")
	write(t, filepath.Join(at, version+".info"), fmt.Sprintf(`{"Version":%q}`, version))
	write(t, filepath.Join(at, version+".mod"), string(gomod))
	out, err := os.Create(filepath.Join(at, version+".zip"))
	if err != nil {
		t.Fatal(err)
	}
	// Only what git tracks is published, so that local binaries are not.
	var files []zip.File
	for _, name := range strings.Split(strings.TrimSpace(string(run(t, dir, nil, "git", "ls-files"))), "\n") {
		if strings.HasPrefix(name, "hack/tools/") {
			continue // a module of its own
		}
		if _, err := os.Stat(filepath.Join(dir, name)); err == nil {
			files = append(files, treeFile{root: dir, name: name})
		}
	}
	if err := zip.Create(out, module.Version{Path: modulePath, Version: version}, files); err != nil {
		t.Fatalf("packing the module: %v", err)
	}
	if err := out.Close(); err != nil {
		t.Fatal(err)
	}
}

// forget removes version from the module cache.
func forget(t *testing.T, version string) {
	cache := strings.TrimSpace(string(run(t, ".", nil, "go", "env", "GOMODCACHE")))
	downloads, err := filepath.Glob(filepath.Join(cache, "cache/download", modulePath, "@v", version+".*"))
	if err != nil {
		t.Error(err)
	}
	for _, path := range append(downloads, filepath.Join(cache, modulePath+"@"+version)) {
		if err := os.RemoveAll(path); err != nil {
			t.Errorf("cleaning the module cache: %v", err)
		}
	}
}

// treeFile is a file of the work tree as zip.Create wants it.
type treeFile struct{ root, name string }

func (f treeFile) Path() string                 { return f.name }
func (f treeFile) Lstat() (os.FileInfo, error)  { return os.Lstat(filepath.Join(f.root, f.name)) }
func (f treeFile) Open() (io.ReadCloser, error) { return os.Open(filepath.Join(f.root, f.name)) }

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}
