package integration

import (
	"context"
	"strings"
	"testing"
)

// An object that makes no sense is refused at the door, with the field's path and what is wrong with it.
func TestBadInputObjects(t *testing.T) {
	const request, capacity, upcoming = "CapacityRequest", "AvailableCapacity", "UpcomingNode"
	const fine = "resources: {cpu: '1'}, availableCount: 1, availability: High"
	for _, c := range []struct {
		name, kind, spec string
		want             []string
	}{
		{"no spec", request, "", []string{"spec", "Required"}},
		{"negative quantity", request, "spec: {resources: {requests: {cpu: '-1'}}}",
			[]string{"spec.resources.requests", "positive"}},
		{"zero quantity", request, "spec: {resources: {requests: {nvidia.com/gpu: '0'}}}",
			[]string{"spec.resources.requests", "positive"}},
		{"not a quantity", request, "spec: {resources: {requests: {cpu: many}}}",
			[]string{"spec.resources.requests.cpu", "many"}},
		{"unknown operator", request, "spec: {requirements: [{key: a, operator: Like, values: [b]}]}",
			[]string{"spec.requirements[0].operator", "Like", "NotIn"}},
		{"Same is for the wire only", request, "spec: {requirements: [{key: a, operator: Same}]}",
			[]string{"spec.requirements[0].operator", "Same"}},
		{"In without values", request, "spec: {requirements: [{key: a, operator: In}]}",
			[]string{"spec.requirements[0]", "values must not be empty"}},
		{"Exists with values", request, "spec: {requirements: [{key: a, operator: Exists, values: [b]}]}",
			[]string{"spec.requirements[0]", "values must be empty"}},
		{"Gt with a word", request, "spec: {requirements: [{key: a, operator: Gt, values: [b]}]}",
			[]string{"spec.requirements[0]", "exactly one integer"}},
		{"requirement without a key", request, "spec: {requirements: [{operator: Exists}]}",
			[]string{"spec.requirements[0].key", "Required"}},
		{"empty key", request, "spec: {requirements: [{key: '', operator: Exists}]}",
			[]string{"spec.requirements[0].key", "at least 1"}},
		{"bad requirement in an alternative", request,
			"spec: {alternatives: [{requirements: [{key: a, operator: NotIn}]}]}",
			[]string{"spec.alternatives[0].requirements[0]", "values must not be empty"}},
		{"maxSkew 0", request,
			"spec: {topologySpread: [{topologyKey: z, maxSkew: 0, whenUnsatisfiable: DoNotSchedule}]}",
			[]string{"spec.topologySpread[0].maxSkew", "greater than or equal to 1"}},
		{"unknown whenUnsatisfiable", request,
			"spec: {topologySpread: [{topologyKey: z, maxSkew: 1, whenUnsatisfiable: Perhaps}]}",
			[]string{"spec.topologySpread[0].whenUnsatisfiable", "Perhaps"}},
		{"minDomains 0", request,
			"spec: {topologySpread: [{topologyKey: z, maxSkew: 1, whenUnsatisfiable: DoNotSchedule, minDomains: 0}]}",
			[]string{"spec.topologySpread[0].minDomains", "greater than or equal to 1"}},
		{"group without a name", request, "spec: {group: {minCount: 2}}", []string{"spec.group.name", "Required"}},
		{"negative minCount", request, "spec: {group: {name: a, minCount: -1}}",
			[]string{"spec.group.minCount", "greater than or equal to 0"}},
		{"anti-affinity without a topology key", request, "spec: {antiAffinity: [{set: a}]}",
			[]string{"spec.antiAffinity[0].topologyKey", "Required"}},
		{"unknown field", request, "spec: {count: 3}", []string{"spec.count", "unknown field"}},
		{"negative availableCount", capacity,
			"spec: {resources: {cpu: '1'}, availableCount: -1, availability: High}",
			[]string{"spec.availableCount", "greater than or equal to 0"}},
		{"unknown availability", capacity,
			"spec: {resources: {cpu: '1'}, availableCount: 1, availability: Sure}", []string{"spec.availability", "Sure"}},
		{"negative cost", capacity, "spec: {" + fine + ", cost: -0.5}",
			[]string{"spec.cost", "greater than or equal to 0"}},
		{"no resources", capacity, "spec: {availableCount: 1, availability: High}",
			[]string{"spec.resources", "Required"}},
		{"node of zero CPUs", capacity,
			"spec: {resources: {cpu: '0'}, availableCount: 1, availability: High}", []string{"spec.resources", "positive"}},
		{"requirement of two integers", capacity,
			"spec: {" + fine + ", requirements: [{key: a, operator: Lt, values: ['1', '2']}]}",
			[]string{"spec.requirements[0]", "exactly one integer"}},
		{"negative resources of a node to come", upcoming, "spec: {resources: {memory: -1Gi}}",
			[]string{"spec.resources", "positive"}},
		{"taint without an effect", upcoming, "spec: {taints: [{key: a}]}", []string{"spec.taints[0].effect", "Required"}},
	} {
		t.Run(c.kind+"/"+c.name, func(t *testing.T) {
			out, err := apply(t.Context(), c.kind, "bad", c.spec)
			if err == nil {
				t.Fatalf("the API server accepted\n%s", c.spec)
			}
			for _, want := range c.want {
				if !strings.Contains(out, want) {
					t.Errorf("the refusal does not mention %q:\n%s", want, out)
				}
			}
		})
	}
}

// A phase only moves forward, whoever writes it.
func TestBadInputPhases(t *testing.T) {
	for _, c := range []struct {
		kind, from, to string
		want           string // "": allowed
	}{
		{"CapacityRequest", "Pending", "Acknowledged", ""},
		{"CapacityRequest", "Acknowledged", "Acknowledged", ""},
		{"CapacityRequest", "Acknowledged", "Pending", "Acknowledged cannot become Pending"},
		{"CapacityRequest", "Acknowledged", "", "cannot be removed"},
		{"CapacityRequest", "Pending", "Rejected", "Unsupported value: \"Rejected\""},
		{"UpcomingNode", "Provisioning", "Launched", ""},
		{"UpcomingNode", "Launched", "Ready", ""},
		{"UpcomingNode", "Provisioning", "Failed", ""},
		{"UpcomingNode", "Launched", "Provisioning", "Launched cannot become Provisioning"},
		{"UpcomingNode", "Registered", "Launched", "Registered can become Ready or Failed only"},
		{"UpcomingNode", "Ready", "Failed", "Ready and Failed are final"},
		{"UpcomingNode", "Failed", "Provisioning", "Ready and Failed are final"},
		{"UpcomingNode", "Ready", "", "cannot be removed"},
		{"UpcomingNode", "Launched", "Lost", "Unsupported value: \"Lost\""},
	} {
		t.Run(c.kind+"/"+c.from+" to "+c.to, func(t *testing.T) {
			name := strings.ToLower("phase-" + c.from)
			if out, err := apply(t.Context(), c.kind, name, "spec: {}"); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			t.Cleanup(func() {
				ctx, cancel := cleanupContext()
				defer cancel()
				if out, err := kubectl(ctx, "delete", "-n", system, c.kind, name); err != nil {
					t.Errorf("cleaning up: %v\n%s", err, out)
				}
			})
			if out, err := patchPhase(t.Context(), c.kind, name, c.from); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			out, err := patchPhase(t.Context(), c.kind, name, c.to)
			switch {
			case c.want == "" && err != nil:
				t.Errorf("refused: %s", out)
			case c.want != "" && err == nil:
				t.Error("allowed")
			case c.want != "" && (!strings.Contains(out, c.want) || !strings.Contains(out, "status")):
				t.Errorf("the refusal does not mention %q and the field status:\n%s", c.want, out)
			}
		})
	}
}

func apply(ctx context.Context, kind, name, spec string) (string, error) {
	object := "apiVersion: fleet.lucy.sh/v1alpha1\nkind: " + kind +
		"\nmetadata: {name: " + name + ", namespace: " + system + "}\n" + spec + "\n"
	return kubectlWithInput(ctx, object, "create", "--validate=strict", "-f", "-")
}

func patchPhase(ctx context.Context, kind, name, phase string) (string, error) {
	value := `"` + phase + `"`
	if phase == "" {
		value = "null"
	}
	return kubectl(ctx, "patch", "-n", system, kind, name, "--subresource=status", "--type=merge",
		"-p", `{"status":{"phase":`+value+`}}`)
}
