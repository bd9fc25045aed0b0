package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// program is something to build.
type program struct {
	name string
	// pkg is its main package, and module the one whose version it tells.
	pkg, module string
	// weight is the seconds that it takes on two processors with an empty build cache, after those before it in the list.
	weight float64
	// asset says that a KUBEBUILDER_ASSETS directory usually has it.
	asset bool
	// version and ldflags of this build, once they are known.
	version, flags string
	// incremental lets the go command see the last build, so that it does nothing where nothing has changed.
	incremental bool
	// stamp lists the variables that hold its version.
	stamp func(version string) []string
}

// programs in the order in which they are built: the quick ones first, so that a mistake shows early.
var programs = []program{
	{name: "etcd", pkg: "go.etcd.io/etcd/server/v3", module: "go.etcd.io/etcd/server/v3", weight: 35, asset: true},
	{name: "kwok", pkg: "sigs.k8s.io/kwok/cmd/kwok", module: "sigs.k8s.io/kwok", weight: 60, stamp: stampKWOK},
	{name: "kubectl", pkg: "k8s.io/kubernetes/cmd/kubectl", module: "k8s.io/kubernetes", weight: 45, asset: true},
	{name: "kube-apiserver", pkg: "k8s.io/kubernetes/cmd/kube-apiserver", module: "k8s.io/kubernetes", weight: 380, asset: true},
	{name: "kube-controller-manager", pkg: "k8s.io/kubernetes/cmd/kube-controller-manager", module: "k8s.io/kubernetes",
		weight: 150},
	{name: "kueue", pkg: "sigs.k8s.io/kueue/cmd/kueue", module: "sigs.k8s.io/kueue", weight: 120, stamp: stampKueue},
}

// ownPrograms are this project's. The weights hold after the control plane has been built: most packages are the same.
var ownPrograms = []program{
	{name: "drover-scheduler", pkg: "./cmd/scheduler", incremental: true, weight: 60},
	{name: "drover-manager", pkg: "./cmd/manager", incremental: true, weight: 20},
	{name: "drover-autoscaler", pkg: "./cmd/autoscaler", incremental: true, weight: 20},
	{name: "drover-coordinator", pkg: "./cmd/coordinator", incremental: true, weight: 10},
	{name: "parentchild", pkg: "./examples/parentchild", incremental: true, weight: 5},
	{name: "playground", pkg: "./cmd/playground", incremental: true, weight: 20},
}

// stampKubernetes is linked into every program: each uses Kubernetes' client library, which tells its version in the
// user agent, and clients parse what a server tells.
func stampKubernetes(version string) []string {
	numbers := strings.SplitN(strings.TrimPrefix(version, "v"), ".", 3)
	for len(numbers) < 2 {
		numbers = append(numbers, "0")
	}
	var vars []string
	for _, pkg := range []string{"k8s.io/component-base/version", "k8s.io/client-go/pkg/version"} {
		vars = append(vars,
			pkg+".gitVersion="+version,
			pkg+".gitMajor="+numbers[0],
			pkg+".gitMinor="+numbers[1],
			pkg+".gitTreeState=clean",
			// A module has no commit; its version says it all.
			pkg+".gitCommit="+version,
		)
	}
	return vars
}

func stampKWOK(version string) []string {
	return []string{"sigs.k8s.io/kwok/pkg/consts.Version=" + strings.TrimPrefix(version, "v")}
}

func stampKueue(version string) []string {
	const pkg = "sigs.k8s.io/kueue/pkg/version"
	return []string{pkg + ".GitVersion=" + version, pkg + ".GitCommit=" + version}
}

// ldflags stamps versions and leaves symbol tables out; versions maps module paths to versions.
func (p program) ldflags(versions map[string]string) string {
	flags := []string{"-s", "-w"}
	vars := stampKubernetes(versions["k8s.io/kubernetes"])
	if p.stamp != nil {
		vars = append(vars, p.stamp(versions[p.module])...)
	}
	for _, v := range vars {
		flags = append(flags, "-X", v)
	}
	return strings.Join(flags, " ")
}

// moduleVersions asks the go command for the versions that go.mod selects.
func moduleVersions(ctx context.Context) (map[string]string, error) {
	args := []string{"list", "-m", "-f", "{{.Path}} {{.Version}}"}
	seen := map[string]bool{}
	for _, p := range programs {
		if !seen[p.module] {
			args = append(args, p.module)
			seen[p.module] = true
		}
	}
	out, err := goCommand(ctx, args...)
	if err != nil {
		return nil, err
	}
	versions := map[string]string{}
	for line := range strings.Lines(out) {
		if path, version, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
			versions[path] = version
		}
	}
	return versions, nil
}

// without drops the programs that the assets directory has.
func without(all []program, assets string, screen *screen) []program {
	var wanted []program
	var given []string
	for _, p := range all {
		if p.asset && isProgram(filepath.Join(assets, p.name)) {
			given = append(given, p.name)
			continue
		}
		wanted = append(wanted, p)
	}
	if len(given) > 0 {
		screen.line("control plane: %s from KUBEBUILDER_ASSETS=%s", strings.Join(given, ", "), assets)
	}
	return wanted
}

func isProgram(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 && info.Size() > 0
}

// goCommand runs the go command and returns what it prints.
func goCommand(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", args...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if ctx.Err() != nil {
		return "", ctx.Err()
	}
	if err != nil {
		return "", fmt.Errorf("go %s: %w\n%s", args[0], err, stderr.String())
	}
	return string(out), nil
}
