package capacity

import (
	"go/parser"
	"go/token"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/names"
)

// The core decides and never acts: no client, no clock, no source of randomness comes near it.
func TestTheCoreImportsNothingThatActs(t *testing.T) {
	allowed := []string{
		"github.com/drover-sh/drover/api/", "github.com/drover-sh/drover/capacity",
		"k8s.io/api/", "k8s.io/apimachinery/", "k8s.io/component-helpers/",
	}
	forbidden := []string{"time", "math/rand", "math/rand/v2", "crypto/rand", "os", "net", "net/http", "context"}
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	wire, err := filepath.Glob("wire/*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range append(files, wire...) {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		for _, spec := range parsed.Imports {
			path, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			// time.Duration is a unit of Offering, no clock.
			if hasAny(path, forbidden) && (path != "time" || file != "types.go") {
				t.Errorf("%s imports %s", file, path)
			}
			if external := strings.Contains(strings.Split(path, "/")[0], "."); external && !hasPrefix(path, allowed) {
				t.Errorf("%s imports %s", file, path)
			}
		}
	}
}

func hasAny(path string, list []string) bool {
	for _, p := range list {
		if path == p {
			return true
		}
	}
	return false
}

func hasPrefix(path string, prefixes []string) bool {
	for _, p := range prefixes {
		if strings.HasPrefix(path, p) {
			return true
		}
	}
	return false
}

// The names are written out in the core; the scheduler that we build with has the last word. Of its plugins, those
// that are not among the rules reject no pod.
func TestRulesNameTheSchedulersPlugins(t *testing.T) {
	intree := []string{
		names.DynamicResources, names.GangScheduling, names.InterPodAffinity, names.NodeAffinity,
		names.NodeDeclaredFeatures, names.NodeName, names.NodePorts, names.NodeResourcesFit, names.NodeUnschedulable,
		names.NodeVolumeLimits, names.PodTopologySpread, names.SchedulingGates, names.TaintToleration,
		names.VolumeBinding, names.VolumeRestrictions, names.VolumeZone,
	}
	known := map[string]bool{"": true, pluginCoscheduling: true, pluginCapacityScheduling: true}
	for _, name := range intree {
		known[name] = true
		if _, ok := rules[name]; !ok {
			t.Errorf("no rule for the scheduler's plugin %s", name)
		}
	}
	for name := range rules {
		if !known[name] {
			t.Errorf("a rule for %q, which is no plugin of the scheduler", name)
		}
	}
}
