package autoscaler_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"k8s.io/utils/clock"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	fleetpb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
	"github.com/drover-sh/drover/autoscaler"
	"github.com/drover-sh/drover/autoscaler/provider"
	"github.com/drover-sh/drover/autoscaler/provider/fake"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/internal/process"
	"github.com/drover-sh/drover/transport"
)

// patience is how long a test waits for what has to come. None waits for it when all is well.
const patience = 2 * time.Minute

// certificates writes an authority, a server's certificate and one per cluster into dir.
func certificates(t *testing.T, dir string, clusters ...string) {
	t.Helper()
	serial := int64(0)
	issue := func(name string, template, parent *x509.Certificate, signer *ecdsa.PrivateKey) *ecdsa.PrivateKey {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		if signer == nil {
			signer = key
		}
		serial++
		template.SerialNumber, template.Subject = big.NewInt(serial), pkix.Name{CommonName: name}
		template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
		der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
		if err != nil {
			t.Fatal(err)
		}
		keyDER, err := x509.MarshalPKCS8PrivateKey(key)
		if err != nil {
			t.Fatal(err)
		}
		for suffix, block := range map[string]*pem.Block{"crt": {Type: "CERTIFICATE", Bytes: der},
			"key": {Type: "PRIVATE KEY", Bytes: keyDER}} {
			if err := os.WriteFile(filepath.Join(dir, name+"."+suffix), pem.EncodeToMemory(block), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		return key
	}
	ca := &x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	caKey := issue("ca", ca, ca, nil)
	issue("server", &x509.Certificate{DNSNames: []string{"localhost"}}, ca, caKey)
	for _, cluster := range clusters {
		issue(cluster, &x509.Certificate{URIs: []*url.URL{transport.ClusterURI("fleet.example", cluster)},
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}, ca, caKey)
	}
}

// freeAddress returns a loopback address that stays free until it is used, also between two uses.
func freeAddress(t *testing.T) string {
	t.Helper()
	port, err := process.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("127.0.0.1:%d", port)
}

func TestServeWithMutualTLS(t *testing.T) {
	dir := t.TempDir()
	certificates(t, dir, "east", "west")
	cfg := &configv1alpha1.AutoscalerConfiguration{
		ListenAddress: freeAddress(t), HealthProbeBindAddress: freeAddress(t), MetricsBindAddress: freeAddress(t),
		State: "file://" + filepath.Join(dir, "state"),
		TLS: configv1alpha1.ServerTLS{CertFile: filepath.Join(dir, "server.crt"), KeyFile: filepath.Join(dir, "server.key"),
			ClientCAFile: filepath.Join(dir, "ca.crt")},
	}
	cfg.Default()
	configFile := filepath.Join(dir, "config.yaml")
	if err := os.WriteFile(configFile, []byte("unused"), 0o600); err != nil {
		t.Fatal(err)
	}
	cloud := fake.NewCloud(clock.RealClock{}, provider.Offering{Offering: capacity.Offering{Name: "small", Cost: 1,
		Allocatable: capacity.Resources{"cpu": 16000, "pods": 110}, Domains: []capacity.Domain{{Name: "a", Available: 10}}}})
	serve := func() (stop func() error) {
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- autoscaler.Serve(ctx, cfg, configFile, cloud.Provider(), logr.Discard()) }()
		return func() error { cancel(); return <-done }
	}
	stop := serve()
	dial := func(cluster string) *grpc.ClientConn {
		creds, err := transport.ClientCredentials(configv1alpha1.ClientTLS{CAFile: filepath.Join(dir, "ca.crt"),
			CertFile: filepath.Join(dir, cluster+".crt"), KeyFile: filepath.Join(dir, cluster+".key"), ServerName: "localhost"})
		if err != nil {
			t.Fatal(err)
		}
		conn, err := grpc.NewClient(cfg.ListenAddress, grpc.WithTransportCredentials(creds),
			grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		return conn
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	east, west := dial("east"), dial("west")

	t.Run("health and reflection", func(t *testing.T) {
		for _, service := range []string{"", "fleet.lucy.sh.v1alpha1.InfrastructureAutoscaler", "fleet.lucy.sh.v1alpha1.CapacityFeed"} {
			got, err := healthpb.NewHealthClient(east).Check(ctx, &healthpb.HealthCheckRequest{Service: service})
			if err != nil || got.Status != healthpb.HealthCheckResponse_SERVING {
				t.Errorf("health of %q: %v, %v", service, got, err)
			}
		}
		stream, err := reflectionpb.NewServerReflectionClient(east).ServerReflectionInfo(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if err := stream.Send(&reflectionpb.ServerReflectionRequest{
			MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{}}); err != nil {
			t.Fatal(err)
		}
		got, err := stream.Recv()
		if err != nil || !strings.Contains(got.String(), "InfrastructureAutoscaler") {
			t.Errorf("reflection: %v, %v", got, err)
		}
	})
	need := []*fleetpb.CapacityNeed{{Resources: map[string]string{"cpu": "10"}, Count: 2}}
	t.Run("a cluster speaks for itself only", func(t *testing.T) {
		_, err := fleetpb.NewInfrastructureAutoscalerClient(west).UpdateClusterNeeds(ctx,
			&fleetpb.ClusterCapacityNeeds{ClusterId: "east", Needs: need})
		if status.Code(err) != codes.PermissionDenied || !strings.Contains(err.Error(), `"east"`) ||
			!strings.Contains(err.Error(), `"west"`) {
			t.Errorf("got %v, want PermissionDenied that names both", err)
		}
		_, err = fleetpb.NewCapacityFeedClient(west).ReportMachines(ctx, &fleetpb.MachineReport{ClusterId: "east"})
		if status.Code(err) != codes.PermissionDenied {
			t.Errorf("report: got %v, want PermissionDenied", err)
		}
		stream, err := fleetpb.NewCapacityFeedClient(west).Subscribe(ctx, &fleetpb.SubscribeRequest{ClusterId: "east"})
		if err == nil {
			_, err = stream.Recv()
		}
		if status.Code(err) != codes.PermissionDenied {
			t.Errorf("subscription: got %v, want PermissionDenied", err)
		}
	})
	if _, err := fleetpb.NewInfrastructureAutoscalerClient(east).UpdateClusterNeeds(ctx,
		&fleetpb.ClusterCapacityNeeds{ClusterId: "east", Needs: need}); err != nil {
		t.Fatal(err)
	}
	machines := func() []*fleetpb.UpcomingMachine {
		stream, err := fleetpb.NewCapacityFeedClient(east).Subscribe(ctx, &fleetpb.SubscribeRequest{ClusterId: "east"},
			grpc.WaitForReady(true))
		if err != nil {
			t.Fatal(err)
		}
		for {
			state, err := stream.Recv()
			if err != nil {
				t.Fatal(err)
			}
			if len(state.Machines) == 2 && state.Machines[0].Phase == "Launched" && state.Machines[1].Phase == "Launched" {
				_ = stream.CloseSend()
				return state.Machines
			}
		}
	}
	before := machines()
	t.Run("probes and metrics", func(t *testing.T) {
		get := func(address, path string) string {
			response, err := http.Get("http://" + address + path)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = response.Body.Close() }()
			body, err := io.ReadAll(response.Body)
			if err != nil || response.StatusCode != http.StatusOK {
				t.Fatalf("%s: %s, %v", path, response.Status, err)
			}
			return string(body)
		}
		get(cfg.HealthProbeBindAddress, "/healthz")
		get(cfg.HealthProbeBindAddress, "/readyz")
		text := get(cfg.MetricsBindAddress, "/metrics")
		for _, line := range []string{
			`drover_autoscaler_rollups_total{result="stored"} 1`,
			`drover_autoscaler_machines{cluster="east",state="Launched"} 2`,
			`drover_autoscaler_offering_available{domain="a",offering="small"} 8`,
			`drover_autoscaler_provider_calls_total{result="accepted",verb="launch"} 2`,
		} {
			if !strings.Contains(text, line) {
				t.Errorf("the metrics lack %s", line)
			}
		}
	})
	if err := stop(); err != nil {
		t.Fatalf("the shutdown ended in %v", err)
	}
	stop = serve()
	after := machines()
	if err := stop(); err != nil {
		t.Fatalf("the second shutdown ended in %v", err)
	}
	if a, b := fmt.Sprint(after[0].Id, after[1].Id), fmt.Sprint(before[0].Id, before[1].Id); a != b {
		t.Errorf("after a restart the machines are %s, want %s", a, b)
	}
	if got := cloud.Launched(); len(got) != 2 {
		t.Errorf("launched %v, want two machines", got)
	}
}

func TestServeNamesWhatIsWrong(t *testing.T) {
	dir := t.TempDir()
	cfg := &configv1alpha1.AutoscalerConfiguration{TLS: configv1alpha1.ServerTLS{Insecure: true}}
	cfg.Default()
	for _, test := range []struct {
		change func()
		want   string
	}{
		{func() { cfg.TLS = configv1alpha1.ServerTLS{CertFile: filepath.Join(dir, "no.crt"), KeyFile: "no.key"} }, "no.crt"},
		{func() { cfg.TLS = configv1alpha1.ServerTLS{Insecure: true}; cfg.State = "nosuch://x" }, "nosuch://x"},
		{func() { cfg.State = "file://" + dir; cfg.ListenAddress = "256.0.0.1:1" }, "listenAddress"},
	} {
		test.change()
		err := autoscaler.Serve(t.Context(), cfg, "", fake.NewCloud(clock.RealClock{}).Provider(), logr.Discard())
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("got %v, want an error that mentions %q", err, test.want)
		}
	}
}

// TestAWrongConfigurationIsNamedAtStart: what only opening it shows is said with file, field and value, like what
// validation shows.
func TestAWrongConfigurationIsNamedAtStart(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*configv1alpha1.AutoscalerConfiguration)
		want   []string
	}{
		{"state of an unknown kind", func(c *configv1alpha1.AutoscalerConfiguration) { c.State = "floppy:///a" },
			[]string{"state", "floppy:///a"}},
		{"no such certificate", func(c *configv1alpha1.AutoscalerConfiguration) {
			c.TLS = configv1alpha1.ServerTLS{CertFile: "/nowhere.crt", KeyFile: "/nowhere.key"}
		}, []string{"tls.certFile", "/nowhere.crt"}},
		{"no such address", func(c *configv1alpha1.AutoscalerConfiguration) { c.ListenAddress = "192.0.2.1:0" },
			[]string{"listenAddress", "192.0.2.1"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			cfg := &configv1alpha1.AutoscalerConfiguration{State: "mem://", TLS: configv1alpha1.ServerTLS{Insecure: true},
				HealthProbeBindAddress: "0", MetricsBindAddress: "0"}
			cfg.Default()
			test.change(cfg)
			err := autoscaler.Serve(t.Context(), cfg, "autoscaler.yaml", fake.NewCloud(clock.RealClock{}).Provider(), logr.Discard())
			for _, part := range append(test.want, "autoscaler.yaml") {
				if err == nil || !strings.Contains(err.Error(), part) {
					t.Errorf("error %v does not mention %s", err, part)
				}
			}
		})
	}
}
