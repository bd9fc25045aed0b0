package capacityrequest

import (
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
)

func TestArgs(t *testing.T) {
	const head = `{"apiVersion":"config.drover.sh/v1alpha1","kind":"CapacityRequestArgs"`
	for _, c := range []struct {
		name string
		args runtime.Object
		want []string // parts of the error; none: accepted
	}{
		{name: "no args are defaults"},
		{name: "empty args are defaults", args: &runtime.Unknown{}},
		{name: "all fields", args: raw(head + `,"namespaces":["a"],"qps":5,"burst":7,"demand":"RequestsOnly",
			"capacityNamespace":"x","templateFreshness":"1m","rewritePeriod":"1h","events":false,"shutdownGracePeriod":"1s"}`)},
		{name: "an unknown field", args: raw(head + `,"qbs":5}`), want: []string{`unknown field "qbs"`}},
		{name: "a field twice", args: raw(head + `,"qps":5,"qps":6}`), want: []string{"qps"}},
		{name: "no apiVersion", args: raw(`{"qps":5}`), want: []string{"apiVersion", "config.drover.sh/v1alpha1"}},
		{name: "another kind", args: raw(`{"apiVersion":"config.drover.sh/v1alpha1","kind":"Other"}`), want: []string{"kind", "Other"}},
		{name: "a wrong type", args: raw(head + `,"qps":"many"}`), want: []string{"qps"}},
		{name: "negative qps", args: raw(head + `,"qps":-1}`), want: []string{"qps", "-1"}},
		{name: "negative burst", args: raw(head + `,"burst":-2}`), want: []string{"burst", "-2"}},
		{name: "an unknown mode", args: raw(head + `,"demand":"Some"}`), want: []string{"demand", "Some", "RequestsOnly"}},
		{name: "a bad namespace", args: raw(head + `,"namespaces":["ok","Not OK"]}`), want: []string{"namespaces[1]", "Not OK"}},
		{name: "a short period", args: raw(head + `,"rewritePeriod":"1ms"}`), want: []string{"rewritePeriod", "1ms"}},
		{name: "a negative period", args: raw(head + `,"shutdownGracePeriod":"-1s"}`), want: []string{"shutdownGracePeriod", "-1s"}},
		{
			name: "several wrong fields are all named", args: raw(head + `,"qps":-1,"burst":-2}`),
			want: []string{"qps", "burst"},
		},
		{name: "args of another plugin", args: defaultFitArgs(), want: []string{"NodeResourcesFitArgs"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := decodeArgs(c.args)
			if len(c.want) == 0 {
				if err != nil {
					t.Fatal(err)
				}
				if got.QPS == 0 || got.Burst == 0 || got.RewritePeriod.Duration < time.Second {
					t.Errorf("defaults are missing: %+v", got)
				}
				return
			}
			if err == nil {
				t.Fatalf("accepted, want an error with %q", c.want)
			}
			for _, part := range c.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("error %q does not say %q", err, part)
				}
			}
		})
	}
}

func TestErrorNamesTheFile(t *testing.T) {
	factory := Factory(func() string { return "/etc/scheduler.yaml" })
	_, err := factory(t.Context(), raw(`{"apiVersion":"config.drover.sh/v1alpha1","kind":"CapacityRequestArgs","qps":-1}`), nil)
	for _, part := range []string{"/etc/scheduler.yaml", "CapacityRequest", "qps", "-1"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("error %v does not say %q", err, part)
		}
	}
}

func raw(json string) runtime.Object {
	return &runtime.Unknown{Raw: []byte(json), ContentType: runtime.ContentTypeJSON}
}
