package capacity

import (
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"pgregory.net/rapid"

	"github.com/drover-sh/drover/internal/builders"
)

func TestParseResourcesNamesTheBadValue(t *testing.T) {
	for name, tc := range map[string]struct {
		in   map[string]string
		want []string
	}{
		"not a quantity": {map[string]string{"cpu": "abc"}, []string{`resources["cpu"]`, `"abc"`}},
		"negative":       {map[string]string{"memory": "-1Gi"}, []string{`resources["memory"]`, `"-1Gi"`, "negative"}},
		"empty":          {map[string]string{"cpu": ""}, []string{`resources["cpu"]`, `""`}},
		"no name":        {map[string]string{"": "1"}, []string{`resources[""]`}},
		"the first of several, by name": {
			map[string]string{"memory": "x", "cpu": "y", "pods": "z"}, []string{`resources["cpu"]`, `"y"`},
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := ParseResources(tc.in)
			if err == nil {
				t.Fatal("no error")
			}
			for _, want := range tc.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not contain %s", err, want)
				}
			}
		})
	}
}

func TestResourcesAreWrittenAsPeopleWriteThem(t *testing.T) {
	r := Resources{"cpu": 1500, "memory": 768 << 30, "nvidia.com/gpu": 8, "hugepages-2Mi": 4 << 20, "pods": 110, "zero": 0}
	want := map[string]string{
		"cpu": "1500m", "memory": "768Gi", "nvidia.com/gpu": "8", "hugepages-2Mi": "4Mi", "pods": "110",
	}
	if diff := cmp.Diff(want, r.Strings()); diff != "" {
		t.Errorf("strings (-want +got):\n%s", diff)
	}
}

func TestAmountsBeyondAnInt64AreCapped(t *testing.T) {
	list := builders.Resources("cpu", "9E", "memory", "100E")
	r := ResourcesOf(list)
	if r["cpu"] != math.MaxInt64 || r["memory"] <= 0 {
		t.Errorf("resources %v, wanted both positive and the CPU capped", r)
	}
	if sum := r.Add(r); sum["cpu"] != math.MaxInt64 || sum["memory"] != math.MaxInt64 {
		t.Errorf("the sum %v is not capped", sum)
	}
	if diff := (Resources{}).Sub(r).Sub(r); diff["cpu"] != math.MinInt64 {
		t.Errorf("the difference %v is not capped", diff)
	}
}

func TestResourcesFit(t *testing.T) {
	node := Resources{"cpu": 1000, "memory": 1}
	for name, tc := range map[string]struct {
		r       Resources
		lacking []corev1.ResourceName
	}{
		"nothing":             {Resources{}, nil},
		"exactly":             {Resources{"cpu": 1000, "memory": 1}, nil},
		"too much":            {Resources{"cpu": 1001}, []corev1.ResourceName{"cpu"}},
		"what is not there":   {Resources{"nvidia.com/gpu": 1, "cpu": 2000}, []corev1.ResourceName{"cpu", "nvidia.com/gpu"}},
		"less than nothing":   {Resources{"nvidia.com/gpu": -1}, nil},
		"zero of what is not": {Resources{"nvidia.com/gpu": 0}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			if got := tc.r.Fits(node); got != (tc.lacking == nil) {
				t.Errorf("Fits() = %v", got)
			}
			if diff := cmp.Diff(tc.lacking, tc.r.Lacking(node)); diff != "" {
				t.Errorf("lacking (-want +got):\n%s", diff)
			}
		})
	}
}

func TestResourcesRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := ResourcesOf(genResources(t))
		back, err := ParseResources(r.Strings())
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(r, back); diff != "" {
			t.Fatalf("through Strings (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff(r, ResourcesOf(r.List())); diff != "" {
			t.Fatalf("through List (-want +got):\n%s", diff)
		}
	})
}

func TestArithmeticLeavesItsOperandsAlone(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := ResourcesOf(genResources(t)), ResourcesOf(genResources(t))
		oldA, oldB := a.Clone(), b.Clone()
		if diff := cmp.Diff(a, a.Add(b).Sub(b)); diff != "" {
			t.Fatalf("a + b - b (-want +got):\n%s", diff)
		}
		if !a.Fits(a.Add(b)) {
			t.Fatalf("%v does not fit into itself and %v", a, b)
		}
		if !cmp.Equal(a, oldA) || !cmp.Equal(b, oldB) {
			t.Fatal("an operand changed")
		}
	})
}
