package manager

import (
	"context"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/internal/builders"
	"github.com/drover-sh/drover/internal/controlplane"
)

// The manager leads, writes for nobody while the autoscaler is unreachable, and gives its lease away when it stops.
func TestManagerLeadsAndStops(t *testing.T) {
	if testing.Short() {
		t.Skip("needs an API server")
	}
	ctrl.SetLogger(logr.Discard())
	cp, err := controlplane.Start(t.Context(), controlplane.Options{
		Dir: t.TempDir(), CRDPaths: []string{filepath.Join("..", "..", "manifests", "crd", "bases")},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cp.Stop(); err != nil {
			t.Error(err)
		}
	})
	c, err := client.New(cp.Config(), client.Options{Scheme: Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	for _, obj := range []client.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: fleetv1alpha1.SystemNamespace}},
		builders.CapacityRequest("default", "cr").Requests("cpu", "1").Obj(),
	} {
		if err := c.Create(t.Context(), obj); err != nil {
			t.Fatal(err)
		}
	}
	config := &configv1alpha1.ManagerConfiguration{ClusterID: "cluster-1", MetricsBindAddress: "127.0.0.1:0", HealthProbeBindAddress: "0"}
	config.Autoscaler.Address = "127.0.0.1:1" // nobody listens there
	config.Autoscaler.TLS.Insecure = true
	config.Default()
	if errs := config.Validate(); len(errs) > 0 {
		t.Fatal(errs.ToAggregate())
	}
	t.Run("but not as a member of a group that is not there", func(t *testing.T) {
		sharded := config.DeepCopy()
		sharded.Sharding.Enabled = true
		err := Run(t.Context(), sharded, cp.Kubeconfig(), logr.Discard())
		for _, part := range []string{"sharding.watchGroup", `"drover-manager"`, `"fleet-system"`, "not found"} {
			if err == nil || !strings.Contains(err.Error(), part) {
				t.Errorf("the error is %v, expected %s in it", err, part)
			}
		}
	})
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	done := make(chan error, 1)
	go func() { done <- Run(ctx, config, cp.Kubeconfig(), logr.Discard()) }()

	holder := func() string {
		var lease coordinationv1.Lease
		if c.Get(t.Context(), client.ObjectKey{Namespace: config.Namespace, Name: LeaseName}, &lease) != nil || lease.Spec.HolderIdentity == nil {
			return ""
		}
		return *lease.Spec.HolderIdentity
	}
	deadline := time.After(time.Minute)
	for holder() == "" {
		select {
		case err := <-done:
			t.Fatalf("the manager ended: %v", err)
		case <-deadline:
			t.Fatal("nobody leads")
		case <-time.After(20 * time.Millisecond):
		}
	}
	stop()
	if err := <-done; err != nil {
		t.Errorf("a stop is no error, but: %v", err)
	}
	if got := holder(); got != "" {
		t.Errorf("the lease is still held by %q", got)
	}
	var cr fleetv1alpha1.CapacityRequest
	if err := c.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "cr"}, &cr); err != nil {
		t.Fatal(err)
	}
	if cr.Status.Phase == fleetv1alpha1.CapacityRequestAcknowledged {
		t.Error("a request was acknowledged that nobody has heard of")
	}
}
