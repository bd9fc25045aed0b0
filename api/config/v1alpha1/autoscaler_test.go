package v1alpha1

import (
	"strings"
	"testing"
)

const autoscalerFile = `
apiVersion: config.drover.sh/v1alpha1
kind: AutoscalerConfiguration
tls: {insecure: true}
provider:
  kwok:
    offeringsFile: offerings.yaml
    clusters: [{id: east}]
`

func TestAutoscalerDefaults(t *testing.T) {
	var c AutoscalerConfiguration
	if err := Decode([]byte(autoscalerFile), &c); err != nil {
		t.Fatal(err)
	}
	if c.ListenAddress != ":9443" || c.State != "file:///var/lib/drover" || c.Policy.MaxReclaimsPerMinute != 100 ||
		c.Policy.CollapseHold.Duration.String() != "1m0s" || c.Feed.Period.Duration.String() != "10s" {
		t.Errorf("defaults are not as documented: %+v", c)
	}
}

func TestAutoscalerErrorsNameFieldAndValue(t *testing.T) {
	for _, test := range []struct{ name, old, new, want string }{
		{"no TLS", "tls: {insecure: true}", "", "tls.certFile"},
		{"TLS twice", "insecure: true", "insecure: true, keyFile: x.key", `tls.keyFile: Invalid value: "x.key"`},
		{"no provider", "provider:\n  kwok:\n    offeringsFile: offerings.yaml\n    clusters: [{id: east}]", "provider: {}",
			"provider.kwok"},
		{"no cluster", "[{id: east}]", "[]", "provider.kwok.clusters"},
		{"cluster twice", "[{id: east}]", "[{id: east}, {id: east}]", `provider.kwok.clusters[1].id: Duplicate value: "east"`},
		{"probability", "[{id: east}]", "[{id: east}]\n    faults: {loseMachine: 1.5}",
			"provider.kwok.faults.loseMachine: Invalid value: 1.5"},
		{"negative delay", "provider:", "policy: {consolidationDelay: -1s}\nprovider:",
			`policy.consolidationDelay: Invalid value: "-1s"`},
		{"fraction", "provider:", "policy: {collapseFraction: 2}\nprovider:", "policy.collapseFraction: Invalid value: 2"},
		{"rate", "provider:", "policy: {maxReclaimsPerMinute: -1}\nprovider:", "policy.maxReclaimsPerMinute: Invalid value: -1"},
		{"address", "provider:", "listenAddress: nowhere\nprovider:", `listenAddress: Invalid value: "nowhere"`},
		{"state", "provider:", "state: var/lib\nprovider:", `state: Invalid value: "var/lib"`},
		{"unknown field", "provider:", "polizy: {}\nprovider:", "polizy"},
		{"kind", "kind: Auto", "kind: Manual", "kind: Invalid value"},
	} {
		t.Run(test.name, func(t *testing.T) {
			text := strings.Replace(autoscalerFile, test.old, test.new, 1)
			if text == autoscalerFile {
				t.Fatalf("%q is not in the file", test.old)
			}
			err := Decode([]byte(text), &AutoscalerConfiguration{})
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got error %v, want one with %q", err, test.want)
			}
		})
	}
}

const offeringFile = `
apiVersion: config.drover.sh/v1alpha1
kind: OfferingList
offerings:
- name: gpu
  resources: {cpu: "8"}
  taints: ["nvidia.com/gpu:NoSchedule", "team=ml:NoExecute"]
  cost: 3.5
  domains: [{zone: a, rack: r1, count: 4}]
`

func TestOfferingDefaults(t *testing.T) {
	var l OfferingList
	if err := Decode([]byte(offeringFile), &l); err != nil {
		t.Fatal(err)
	}
	o := l.Offerings[0]
	if o.InstanceType != "gpu" || o.Availability != "High" || o.Resources["pods"] != "110" || o.Domains[0].Name() != "a/r1" {
		t.Errorf("defaults are not as documented: %+v", o)
	}
	taint, err := ParseTaint(o.Taints[1])
	if err != nil || taint.Key != "team" || taint.Value != "ml" || taint.Effect != "NoExecute" {
		t.Errorf("got %v, %v", taint, err)
	}
}

func TestOfferingErrorsNameFieldAndValue(t *testing.T) {
	for _, test := range []struct{ old, new, want string }{
		{"name: gpu", "name: GPU_1", `offerings[0].name: Invalid value: "GPU_1"`},
		{`cpu: "8"`, `cpu: "eight"`, `offerings[0].resources[cpu]: Invalid value: "eight"`},
		{`cpu: "8"`, `cpu: "-8"`, `offerings[0].resources[cpu]: Invalid value: "-8"`},
		{"gpu:NoSchedule", "gpu:Never", `offerings[0].taints[0]: Invalid value: "nvidia.com/gpu:Never"`},
		{"cost: 3.5", "cost: -1", "offerings[0].cost: Invalid value: -1"},
		{"cost: 3.5", "cost: 1\n  availability: Maybe", `offerings[0].availability: Unsupported value: "Maybe"`},
		{"zone: a, ", "", "offerings[0].domains[0].zone"},
		{"count: 4", "count: -4", "offerings[0].domains[0].count: Invalid value: -4"},
		{"count: 4}", "count: 4}, {zone: a, rack: r1, count: 1}", `offerings[0].domains[1]: Duplicate value: "a/r1"`},
	} {
		err := Decode([]byte(strings.Replace(offeringFile, test.old, test.new, 1)), &OfferingList{})
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s -> %s: got error %v, want one with %q", test.old, test.new, err, test.want)
		}
	}
}
