package v1alpha1

import (
	"strings"
	"testing"
)

const coordinatorFile = `
apiVersion: config.drover.sh/v1alpha1
kind: CoordinatorConfiguration
namespace: fleet-system
`

func TestCoordinatorDefaults(t *testing.T) {
	var c CoordinatorConfiguration
	if err := Decode([]byte(coordinatorFile), &c); err != nil {
		t.Fatal(err)
	}
	if !*c.Webhook.Enabled || c.Webhook.BindAddress != ":9443" || c.Webhook.KeyFile != "/etc/drover-tls/tls.key" || !*c.Backfill.Enabled ||
		c.Backfill.QPS != 100 || c.Backfill.Burst != 200 || c.Backfill.AuditPeriod.Duration.String() != "1h0m0s" ||
		!*c.LeaderElection.LeaderElect || c.LeaderElection.LeaseDuration.Duration.String() != "15s" {
		t.Errorf("defaults are not as documented: %+v", c)
	}
}

func TestCoordinatorErrorsNameFieldAndValue(t *testing.T) {
	for _, test := range []struct{ line, want string }{
		{"namespace: Fleet_System", `namespace: Invalid value: "Fleet_System"`},
		{"webhook: {bindAddress: nowhere}", `webhook.bindAddress: Invalid value: "nowhere"`},
		{`webhook: {bindAddress: "0"}`, `webhook.bindAddress: Invalid value: "0"`},
		{"webhook: {certFile: tls.crt}", `webhook.certFile: Invalid value: "tls.crt"`},
		{"webhook: {keyFile: /keys/tls.key}", `webhook.keyFile: Invalid value: "/keys/tls.key"`},
		{"backfill: {qps: -1}", "backfill.qps: Invalid value: -1"},
		{"backfill: {burst: -3}", "backfill.burst: Invalid value: -3"},
		{"backfill: {auditPeriod: 1s}", `backfill.auditPeriod: Invalid value: "1s"`},
		{"leaderElection: {renewDeadline: 1m}", `leaderElection.leaseDuration: Invalid value: "15s"`},
		{"metricsBindAddress: :x", `metricsBindAddress: Invalid value: ":x"`},
		{"backfil: {}", "backfil"},
	} {
		text := coordinatorFile + test.line
		if strings.HasPrefix(test.line, "namespace") {
			text = strings.Replace(coordinatorFile, "namespace: fleet-system", test.line, 1)
		}
		err := Decode([]byte(text), &CoordinatorConfiguration{})
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got error %v, want one with %q", test.line, err, test.want)
		}
	}
}
