package integration

import (
	"fmt"
	"strings"
	"testing"
)

const checkConfig = `
apiVersion: fleet.lucy.sh/v1alpha1
kind: CapacityCheckConfig
metadata: {name: config-test}
spec: %s
`

// TestCapacityCheckConfig: the API server fills the defaults, and refuses what makes no sense with the field and the reason.
func TestCapacityCheckConfig(t *testing.T) {
	out, err := kubectlWithInput(t.Context(), fmt.Sprintf(checkConfig, "{}"), "create", "--dry-run=server", "-o", "yaml", "-f", "-")
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range []string{
		"mode: Hint", "minAvailability: Medium", "atomicProvisioning: Wait", "onStale: FailClosed", "staleAfter: 3m",
		"timeout: 10m", "checkPeriod: 40s", "promiseTimeout: 15m", "backoffBase: 1m", "backoffMax: 30m",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("the default %q is missing:\n%s", want, out)
		}
	}
	for spec, want := range map[string]string{
		"{mode: Guess}":                          "spec.mode",
		"{minAvailability: None}":                "must be High, Medium or Low",
		"{atomicProvisioning: Maybe}":            "spec.atomicProvisioning",
		"{onStale: Panic}":                       "spec.onStale",
		"{staleAfter: 0s}":                       "spec.staleAfter",
		"{timeout: -1s}":                         "must not be negative",
		"{timeout: soon}":                        "spec.timeout",
		"{backoffBase: 10m, backoffMax: 1m}":     "backoffMax must not be below backoffBase",
		"{backoffBase: 45m}":                     "backoffMax must not be below backoffBase",
		"{checkPeriod: 1ms}":                     "spec.checkPeriod",
		"{promiseTimeout: 1ms, checkPeriod: 1m}": "spec.promiseTimeout",
	} {
		out, err := kubectlWithInput(t.Context(), fmt.Sprintf(checkConfig, spec), "create", "--dry-run=server", "-f", "-")
		if err == nil || !strings.Contains(out, want) {
			t.Errorf("%s was answered with %v, expected an error that says %q:\n%s", spec, err, want, out)
		}
	}
}
