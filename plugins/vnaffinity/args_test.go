package vnaffinity

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	schedulerconfig "k8s.io/kubernetes/pkg/scheduler/apis/config"
)

const head = `{"apiVersion":"config.drover.sh/v1alpha1","kind":"VNAffinityArgs"`

func TestArgs(t *testing.T) {
	for _, c := range []struct {
		name string
		args runtime.Object
		want []string // parts of the error; none: accepted
	}{
		{name: "no args turn no role on"},
		{name: "empty args", args: &runtime.Unknown{}},
		{name: "members with all defaults", args: raw(head + `,"members":{}}`)},
		{name: "all fields of members", args: raw(head + `,"members":{"topologyKeys":["a.b/rack"],"maxShareLostPerDomain":{"a.b/rack":0.4}}}`)},
		{name: "objects near owners", args: raw(head + `,"objects":{"namespace":"ns","watchGroup":"g","loadFactor":2,"minLoad":0}}`)},
		{name: "objects in domains", args: raw(head + `,"objects":{"mode":"Domains","topologyKey":"a.b/rack","virtualNodes":7,"nodeSelector":{"pool":"x"}}}`)},
		{name: "schedulers", args: raw(head + `,"schedulers":{"namespace":"ns","watchGroup":"g"}}`)},

		{name: "an unknown field", args: raw(head + `,"members":{"keys":[]}}`), want: []string{`unknown field "members.keys"`}},
		{name: "no apiVersion", args: raw(`{"members":{}}`), want: []string{"apiVersion", "config.drover.sh/v1alpha1"}},
		{name: "another kind", args: raw(`{"apiVersion":"config.drover.sh/v1alpha1","kind":"Other"}`), want: []string{"kind", "Other"}},
		{name: "args of another plugin", args: &schedulerconfig.NodeResourcesFitArgs{}, want: []string{"NodeResourcesFitArgs"}},
		{name: "a bad key", args: raw(head + `,"members":{"topologyKeys":["ok","not ok"]}}`), want: []string{"members.topologyKeys[1]", "not ok"}},
		{name: "a key twice", args: raw(head + `,"members":{"topologyKeys":["a","a"]}}`), want: []string{"members.topologyKeys[1]", "Duplicate"}},
		{name: "many keys", args: raw(head + `,"members":{"topologyKeys":["a","b","c","d","e"]}}`), want: []string{"members.topologyKeys", "4"}},
		{name: "a share of nothing", args: raw(head + `,"members":{"maxShareLostPerDomain":{"zone":0}}}`), want: []string{"members.maxShareLostPerDomain[zone]", "0"}},
		{name: "a share above 1", args: raw(head + `,"members":{"maxShareLostPerDomain":{"zone":40}}}`), want: []string{"members.maxShareLostPerDomain[zone]", "40"}},
		{name: "owners without a group", args: raw(head + `,"objects":{}}`), want: []string{"objects.namespace", "objects.watchGroup", "Required"}},
		{name: "a bad group", args: raw(head + `,"objects":{"namespace":"ns","watchGroup":"a.b"}}`), want: []string{"objects.watchGroup", "a.b"}},
		{name: "V where the group says it", args: raw(head + `,"objects":{"namespace":"ns","watchGroup":"g","virtualNodes":5}}`), want: []string{"objects.virtualNodes", "5", "Owners"}},
		{name: "a group where there is none", args: raw(head + `,"objects":{"mode":"Domains","watchGroup":"g"}}`), want: []string{"objects.watchGroup", "g", "Domains"}},
		{name: "an unknown mode", args: raw(head + `,"objects":{"mode":"Both"}}`), want: []string{"objects.mode", "Both", "Owners"}},
		{name: "V too large", args: raw(head + `,"objects":{"mode":"Domains","virtualNodes":100001}}`), want: []string{"objects.virtualNodes", "100001"}},
		{name: "a bound below the mean", args: raw(head + `,"objects":{"mode":"Domains","loadFactor":0.5}}`), want: []string{"objects.loadFactor", "0.5"}},
		{name: "a negative least", args: raw(head + `,"objects":{"mode":"Domains","minLoad":-1}}`), want: []string{"objects.minLoad", "-1"}},
		{name: "a bad selector", args: raw(head + `,"objects":{"mode":"Domains","nodeSelector":{"a":"b c"}}}`), want: []string{"objects.nodeSelector[a]", "b c"}},
		{name: "schedulers without a group", args: raw(head + `,"schedulers":{}}`), want: []string{"schedulers.namespace", "schedulers.watchGroup"}},
		{name: "several wrong fields are all named", args: raw(head + `,"members":{"maxShareLostPerDomain":{"zone":-1}},"objects":{"mode":"Domains","minLoad":-1}}`),
			want: []string{"maxShareLostPerDomain[zone]", "objects.minLoad"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := decodeArgs(c.args)
			if len(c.want) == 0 {
				if err != nil {
					t.Fatal(err)
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

func TestArgsHaveDefaults(t *testing.T) {
	args, err := decodeArgs(raw(head + `,"members":{},"objects":{"mode":"Domains"}}`))
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(args.Members.TopologyKeys, " "); got != "topology.kubernetes.io/zone kubernetes.io/hostname" {
		t.Errorf("topologyKeys: %s", got)
	}
	if o := args.Objects; o.TopologyKey != "topology.kubernetes.io/zone" || o.LoadFactor != 1.25 || *o.MinLoad != 10 || o.VirtualNodes != 1000 {
		t.Errorf("objects: %+v", o)
	}
}

func TestErrorNamesTheFile(t *testing.T) {
	factory := Factory(func() string { return "/etc/scheduler.yaml" }, nil)
	_, err := factory(t.Context(), raw(head+`,"members":{"topologyKeys":["not ok"]}}`), nil)
	for _, part := range []string{"/etc/scheduler.yaml", "VNAffinity", "topologyKeys", "not ok"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("error %v does not say %q", err, part)
		}
	}
}

func raw(json string) runtime.Object {
	return &runtime.Unknown{Raw: []byte(json), ContentType: runtime.ContentTypeJSON}
}
