package integration

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// age is the age of an object that is some seconds old. (A provisioning time, as 5m0s, is none.)
var age = regexp.MustCompile(`\s[0-9]{1,2}s( |$)`)

// maskAge puts the same text in the place of every age, without moving what follows, and drops the blanks that kubectl pads
// the last column with.
func maskAge(s string) string {
	lines := strings.Split(strings.TrimRight(s, "\n"), "\n")
	for i, line := range lines {
		masked := age.ReplaceAllStringFunc(strings.TrimRight(line, " ")+" ", func(a string) string {
			return (" <a>    ")[:max(len(a), len(" <a>"))]
		})
		lines[i] = strings.TrimRight(masked, " ")
	}
	return strings.Join(lines, "\n") + "\n"
}

// Section 14 of the source shows what an operator sees with kubectl.
func TestColumnsAreThoseOfSection14(t *testing.T) {
	objects, err := os.ReadFile(filepath.Join("testdata", "section14.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	const selector = "test=section14"
	if out, err := kubectlWithInput(t.Context(), string(objects), "apply", "--server-side", "-f", "-"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Cleanup(func() {
		ctx, cancel := cleanupContext()
		defer cancel()
		if out, err := kubectl(ctx, "delete", "namespaces,capacityrequests,availablecapacity,upcomingnodes", "-A",
			"-l", selector, "--wait=false"); err != nil {
			t.Errorf("cleaning up: %v\n%s", err, out)
		}
	})
	// Statuses are a subresource: kubectl apply of the objects does not write them.
	if out, err := kubectlWithInput(t.Context(), string(objects), "apply", "--server-side", "--subresource=status",
		"--force-conflicts", "-f", "-"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}

	for _, c := range []struct{ golden, resource, output string }{
		{"section14-all.txt", "capacityrequests,availablecapacity,upcomingnodes", ""},
		{"section14-requests-wide.txt", "cr", "wide"},
		{"section14-capacity-wide.txt", "ac", "wide"},
		{"section14-upcoming-wide.txt", "un", "wide"},
	} {
		t.Run(c.golden, func(t *testing.T) {
			got, err := kubectl(t.Context(), "get", c.resource, "-A", "-l", selector, "-o", c.output)
			if err != nil {
				t.Fatalf("%v\n%s", err, got)
			}
			compareGolden(t, c.golden, maskAge(got))
		})
	}
}

// compareGolden compares with a file in testdata; UPDATE_GOLDEN=1 writes it.
func compareGolden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if os.Getenv("UPDATE_GOLDEN") != "" {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("not as in %s (-want +got):\n%s\ngot:\n%s", path, diff, got)
	}
}
