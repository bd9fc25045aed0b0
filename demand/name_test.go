package demand

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"pgregory.net/rapid"
)

func TestNameIsAValidNameForEveryPod(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		label := `[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?`
		podName := rapid.StringMatching(label+`(\.`+label+`){0,4}`).Draw(t, "pod name")
		uid := types.UID(rapid.String().Draw(t, "uid"))
		name := Name(podName, uid)
		if errs := validation.IsDNS1123Subdomain(name); len(errs) > 0 || len(name) > 63 {
			t.Fatalf("Name(%q, %q) = %q (%d characters): %v", podName, uid, name, len(name), errs)
		}
		if name != Name(podName, uid) {
			t.Fatal("the name is not deterministic")
		}
		if name == Name(podName, uid+"x") {
			t.Fatal("a pod of the same name and another UID gets the same name")
		}
	})
}

func TestLongPodNameIsShortened(t *testing.T) {
	name := Name(strings.Repeat("a", 48)+"."+strings.Repeat("b", 200), "uid")
	want := "cr-" + strings.Repeat("a", 48) + "-"
	if !strings.HasPrefix(name, want) || len(name) != len(want)+hashLength {
		t.Errorf("got %q, want %s and a hash", name, want)
	}
}
