package house

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const modulePath = "github.com/drover-sh/drover"

// goPackage is the part of `go list -json` that the rules read.
type goPackage struct {
	ImportPath   string
	Imports      []string
	TestImports  []string
	XTestImports []string
	Deps         []string
}

// folder is a package's path below the module, "" for the root.
func folder(importPath string) string {
	return strings.TrimPrefix(strings.TrimPrefix(importPath, modulePath), "/")
}

// arrows maps a folder to the folders that its packages may import; a folder stands for everything below it. The longest
// matching entry decides. Every folder may import itself.
var arrows = map[string][]string{
	"api/fleet":               {},
	"api/loadbalance":         {},
	"api/config":              {},
	"api/rpc":                 {},
	"capacity":                {"api/fleet", "api/config"},
	"capacity/wire":           {"capacity", "api"},
	"sharding":                {},
	"sharding/wire":           {"sharding", "api"},
	"demand":                  {"capacity", "api"},
	"transport":               {"api"},
	"plugins/capacityrequest": {"demand", "capacity", "api"},
	"plugins/vnaffinity":      {"demand", "capacity", "sharding", "api", "controllers/sharded"},
	"kueue/admission":         {"capacity", "api", "controllers/sharded", "kueue/provisioning"},
	"kueue/provisioning":      {"capacity", "api", "controllers/sharded"},
	"kueue/kueuetest":         {"internal/kueuemanager"},
	"controllers/sharded":     {"sharding", "api"},
	"controllers/watchgroup":  {"sharding", "api"},
	"controllers/backstop":    {"demand", "capacity", "sharding", "api", "controllers/sharded"},
	"controllers/rollup":      {"demand", "capacity", "api", "controllers/sharded", "transport"},
	"queue":                   {},
	"autoscaler":              {"capacity", "queue", "sharding", "api", "transport"},
	"playground":              {"api", "capacity", "sharding", "demand", "transport", "plugins", "kueue", "controllers", "queue", "autoscaler", "internal"},
	"cmd":                     {"api", "capacity", "sharding", "demand", "transport", "plugins", "kueue", "controllers", "queue", "autoscaler", "playground", "internal"},
	"examples":                {"api", "sharding", "controllers/sharded"},
	"internal":                {"api", "capacity", "sharding", "demand", "transport", "controllers", "kueue"},
	"internal/controlplane":   {"internal/process"},
	"internal/kueuemanager":   {"internal/controlplane", "internal/process"},
	"internal/process":        {},
	"internal/link":           {},
	"internal/builders":       {"api"},
	"internal/house":          {},
	"hack":                    {},
	"test":                    {"api", "capacity", "sharding", "demand", "transport", "plugins", "kueue", "controllers", "queue", "autoscaler", "playground", "examples", "internal"},
	"bench":                   {"api", "capacity", "sharding", "demand", "transport", "plugins", "kueue", "controllers", "queue", "autoscaler", "playground", "examples", "internal"},
}

// forTests may be imported by any test.
var forTests = []string{"internal/builders", "internal/controlplane", "internal/process", "kueue/kueuetest", "api"}

// pure cores decide without I/O: nothing of these may be anywhere below them.
var (
	pure      = []string{"capacity", "sharding"}
	forbidden = []string{
		"k8s.io/client-go", "sigs.k8s.io/controller-runtime", "k8s.io/kubernetes", "google.golang.org/grpc",
		"k8s.io/component-base",
	}
)

func TestImportArrows(t *testing.T) {
	packages := list(t, "./...")
	if len(packages) < 5 {
		t.Fatalf("go list found %d packages: the rules would hold for nothing", len(packages))
	}
	for _, p := range packages {
		own := folder(p.ImportPath)
		rule, allowed := ruleFor(own)
		if rule == "" {
			t.Errorf("%s stands in a folder that has no rule: add it to the table, with what it may import", own)
			continue
		}
		check := func(imports []string, extra []string) {
			for _, i := range imports {
				if !strings.HasPrefix(i, modulePath) {
					continue
				}
				to := folder(i)
				switch {
				case within(to, "cmd"):
					t.Errorf("%s imports %s: nothing imports cmd", own, to)
				case within(to, rule), anyWithin(to, allowed), anyWithin(to, extra):
				default:
					t.Errorf("%s imports %s: packages of %s may import %v only", own, to, rule, allowed)
				}
			}
		}
		check(p.Imports, nil)
		check(p.TestImports, forTests)
		check(p.XTestImports, forTests)
	}
}

func TestPureCoresDoNoIO(t *testing.T) {
	for _, p := range list(t, "-deps", "./capacity", "./sharding/...") {
		if !strings.HasPrefix(p.ImportPath, modulePath) || !anyWithin(folder(p.ImportPath), pure) {
			continue
		}
		for _, dep := range p.Deps {
			for _, f := range forbidden {
				if dep == f || strings.HasPrefix(dep, f+"/") {
					t.Errorf("%s depends on %s: a pure core has no client and no server", folder(p.ImportPath), dep)
				}
			}
		}
	}
}

func ruleFor(own string) (rule string, allowed []string) {
	for r, a := range arrows {
		if within(own, r) && len(r) > len(rule) {
			rule, allowed = r, a
		}
	}
	return rule, allowed
}

func within(path, dir string) bool { return path == dir || strings.HasPrefix(path, dir+"/") }

func anyWithin(path string, dirs []string) bool {
	for _, d := range dirs {
		if within(path, d) {
			return true
		}
	}
	return false
}

func list(t *testing.T, args ...string) []goPackage {
	t.Helper()
	out := run(t, repositoryRoot(t), nil, "go", append([]string{"list", "-json=ImportPath,Imports,TestImports,XTestImports,Deps"}, args...)...)
	var packages []goPackage
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p goPackage
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return packages
		} else if err != nil {
			t.Fatalf("reading go list: %v", err)
		}
		packages = append(packages, p)
	}
}

func repositoryRoot(t *testing.T) string {
	t.Helper()
	return filepath.Dir(strings.TrimSpace(string(run(t, ".", nil, "go", "env", "GOMOD"))))
}

func run(t *testing.T, dir string, env []string, name string, args ...string) []byte {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	cmd.Env = append(cmd.Environ(), env...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, stderr.String())
	}
	return stdout.Bytes()
}
