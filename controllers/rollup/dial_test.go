package rollup

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	fleetpb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
	"github.com/drover-sh/drover/transport"
)

// authority issues certificates into a directory.
type authority struct {
	t    *testing.T
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	a := &authority{t: t, dir: t.TempDir()}
	a.cert = &x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	a.issue("ca", a.cert)
	return a
}

func (a *authority) path(name string) string { return filepath.Join(a.dir, name) }

func (a *authority) issue(name string, template *x509.Certificate) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	if a.key == nil {
		a.key = key
	}
	template.SerialNumber, template.Subject = big.NewInt(1), pkix.Name{CommonName: name}
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	cert, err := x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	for suffix, block := range map[string]*pem.Block{".crt": {Type: "CERTIFICATE", Bytes: cert}, ".key": {Type: "PRIVATE KEY", Bytes: pkcs8}} {
		if err := os.WriteFile(a.path(name+suffix), pem.EncodeToMemory(block), 0o600); err != nil {
			a.t.Fatal(err)
		}
	}
}

// The connection that Dial makes shows the cluster's certificate: its own roll-ups are taken and another's are refused. An
// authority that it does not know is no autoscaler to it.
func TestDialWithMutualTLS(t *testing.T) {
	ours, theirs := newAuthority(t), newAuthority(t)
	ours.issue("server", &x509.Certificate{DNSNames: []string{"autoscaler.example"}})
	ours.issue("cluster", &x509.Certificate{URIs: []*url.URL{transport.ClusterURI("fleet.example", testCluster)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	creds, err := transport.ServerCredentials(configv1alpha1.ServerTLS{CertFile: ours.path("server.crt"),
		KeyFile: ours.path("server.key"), ClientCAFile: ours.path("ca.crt")})
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	autoscaler, _ := newScripted(t)
	server := grpc.NewServer(grpc.Creds(creds), grpc.UnaryInterceptor(transport.UnaryServerInterceptor))
	fleetpb.RegisterInfrastructureAutoscalerServer(server, autoscaler)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)

	mutual := configv1alpha1.ClientTLS{CAFile: ours.path("ca.crt"), CertFile: ours.path("cluster.crt"),
		KeyFile: ours.path("cluster.key"), ServerName: "autoscaler.example"}
	for _, test := range []struct {
		name    string
		change  func(*configv1alpha1.ClientTLS)
		cluster string
		want    codes.Code
		says    string
	}{
		{"its own cluster", func(*configv1alpha1.ClientTLS) {}, testCluster, codes.OK, ""},
		{"another cluster", func(*configv1alpha1.ClientTLS) {}, "cluster-2", codes.PermissionDenied, `"cluster-2"`},
		{"no certificate", func(c *configv1alpha1.ClientTLS) { c.CertFile, c.KeyFile = "", "" }, testCluster, codes.Unavailable, ""},
		{"another authority", func(c *configv1alpha1.ClientTLS) { c.CAFile = theirs.path("ca.crt") }, testCluster, codes.Unavailable, ""},
		{"another server", func(c *configv1alpha1.ClientTLS) { c.ServerName = "else.example" }, testCluster, codes.Unavailable, "else.example"},
	} {
		t.Run(test.name, func(t *testing.T) {
			config := testConfig().Autoscaler
			config.Address, config.TLS = listener.Addr().String(), mutual
			test.change(&config.TLS)
			conn, err := Dial(config)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			_, err = fleetpb.NewInfrastructureAutoscalerClient(conn).UpdateClusterNeeds(ctx,
				&fleetpb.ClusterCapacityNeeds{ClusterId: test.cluster})
			if status.Code(err) != test.want || err != nil && !strings.Contains(err.Error(), test.says) {
				t.Errorf("got %v, want %v that mentions %q", err, test.want, test.says)
			}
		})
	}
}

func TestAWrongDialConfigurationIsNamed(t *testing.T) {
	config := testConfig().Autoscaler
	config.TLS.CAFile = "/nowhere/ca.crt"
	if _, err := Dial(config); err == nil || !strings.Contains(err.Error(), "autoscaler.tls.caFile: ") || !strings.Contains(err.Error(), "/nowhere/ca.crt") {
		t.Errorf("got %v, want the field and the file", err)
	}
}
