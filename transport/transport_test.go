package transport_test

import (
	"bytes"
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
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	fleetpb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
	"github.com/drover-sh/drover/transport"
)

// authority is a certificate authority of the test.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

var serial int64

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	serial++
	template := &x509.Certificate{SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: "test authority"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true,
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	key := newKey(t)
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &authority{cert, key}
}

func write(t *testing.T, path, kind string, der []byte) string {
	t.Helper()
	var out bytes.Buffer
	if err := pem.Encode(&out, &pem.Block{Type: kind, Bytes: der}); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, out.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func (a *authority) write(t *testing.T, path string) string {
	return write(t, path, "CERTIFICATE", a.cert.Raw)
}

// issue writes name.crt and name.key into dir and returns their paths.
func (a *authority) issue(t *testing.T, dir, name string, notAfter time.Time, uris ...string) (certFile, keyFile string) {
	t.Helper()
	serial++
	template := &x509.Certificate{SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: name},
		NotBefore: notAfter.Add(-2 * time.Hour), NotAfter: notAfter, DNSNames: []string{"localhost"},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	for _, text := range uris {
		uri, err := url.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		template.URIs = append(template.URIs, uri)
	}
	key := newKey(t)
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return write(t, filepath.Join(dir, name+".crt"), "CERTIFICATE", der),
		write(t, filepath.Join(dir, name+".key"), "PRIVATE KEY", keyDER)
}

// echo acknowledges every roll-up and opens every subscription.
type echo struct {
	fleetpb.UnimplementedInfrastructureAutoscalerServer
	fleetpb.UnimplementedCapacityFeedServer
	healthpb.UnimplementedHealthServer
}

func (echo) UpdateClusterNeeds(context.Context, *fleetpb.ClusterCapacityNeeds) (*fleetpb.Acknowledgement, error) {
	return &fleetpb.Acknowledgement{Acknowledged: true}, nil
}

func (echo) Subscribe(req *fleetpb.SubscribeRequest, s grpc.ServerStreamingServer[fleetpb.FeedState]) error {
	return s.Send(&fleetpb.FeedState{ClusterId: req.ClusterId})
}

func (echo) Check(context.Context, *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
	return &healthpb.HealthCheckResponse{Status: healthpb.HealthCheckResponse_SERVING}, nil
}

func serve(t *testing.T, cfg configv1alpha1.ServerTLS) string {
	t.Helper()
	creds, err := transport.ServerCredentials(cfg)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(grpc.Creds(creds), grpc.UnaryInterceptor(transport.UnaryServerInterceptor),
		grpc.StreamInterceptor(transport.StreamServerInterceptor))
	fleetpb.RegisterInfrastructureAutoscalerServer(server, echo{})
	fleetpb.RegisterCapacityFeedServer(server, echo{})
	healthpb.RegisterHealthServer(server, echo{})
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	return listener.Addr().String()
}

func dial(t *testing.T, address string, cfg configv1alpha1.ClientTLS) *grpc.ClientConn {
	t.Helper()
	creds, err := transport.ClientCredentials(cfg)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(creds))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// send dials afresh, so that each call is a new handshake, and sends a roll-up of cluster.
func send(t *testing.T, address string, cfg configv1alpha1.ClientTLS, cluster string) error {
	t.Helper()
	conn := dial(t, address, cfg)
	_, err := fleetpb.NewInfrastructureAutoscalerClient(conn).UpdateClusterNeeds(t.Context(),
		&fleetpb.ClusterCapacityNeeds{ClusterId: cluster})
	return err
}

// wantStatus fails unless err has the code and its message contains every part.
func wantStatus(t *testing.T, err error, code codes.Code, parts ...string) {
	t.Helper()
	if status.Code(err) != code {
		t.Fatalf("got %v, want code %s", err, code)
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("error %q does not mention %q", err, part)
		}
	}
}

func TestMutualTLS(t *testing.T) {
	dir := t.TempDir()
	good, bad := newAuthority(t), newAuthority(t)
	later := time.Now().Add(time.Hour)
	caFile := good.write(t, filepath.Join(dir, "ca.crt"))
	otherCA := bad.write(t, filepath.Join(dir, "other-ca.crt"))
	serverCert, serverKey := good.issue(t, dir, "server", later)
	address := serve(t, configv1alpha1.ServerTLS{CertFile: serverCert, KeyFile: serverKey, ClientCAFile: caFile})

	client := func(a *authority, name, ca string, notAfter time.Time, uris ...string) configv1alpha1.ClientTLS {
		cert, key := a.issue(t, dir, name, notAfter, uris...)
		return configv1alpha1.ClientTLS{CAFile: ca, CertFile: cert, KeyFile: key, ServerName: "localhost"}
	}
	const east = "spiffe://fleet.example/cluster/east"
	for _, test := range []struct {
		name    string
		client  configv1alpha1.ClientTLS
		code    codes.Code
		mention []string
	}{
		{"its own cluster", client(good, "own", caFile, later, east), codes.OK, nil},
		{"another cluster's certificate",
			client(good, "west", caFile, later, "spiffe://fleet.example/cluster/west"), codes.PermissionDenied,
			[]string{`"east"`, `"west"`}},
		{"a certificate without identity", client(good, "anonymous", caFile, later), codes.PermissionDenied,
			[]string{"anonymous", "spiffe://"}},
		{"a certificate of something that is no cluster",
			client(good, "user", caFile, later, "spiffe://fleet.example/user/east"), codes.PermissionDenied,
			[]string{"spiffe://fleet.example/user/east"}},
		{"a certificate of two clusters",
			client(good, "two", caFile, later, east, "spiffe://fleet.example/cluster/west"), codes.PermissionDenied,
			[]string{"exactly one"}},
		{"a client certificate of a foreign authority", client(bad, "foreign", caFile, later, east), codes.Unavailable, nil},
		{"an expired client certificate", client(good, "expired", caFile, time.Now().Add(-time.Minute), east),
			codes.Unavailable, nil},
		{"no client certificate", configv1alpha1.ClientTLS{CAFile: caFile, ServerName: "localhost"},
			codes.Unavailable, nil},
		{"a client that trusts another authority", client(good, "distrust", otherCA, later, east), codes.Unavailable,
			[]string{"unknown authority"}},
		{"plain text", configv1alpha1.ClientTLS{Insecure: true}, codes.Unavailable, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := send(t, address, test.client, "east")
			if test.code == codes.OK && err != nil {
				t.Fatal(err)
			}
			wantStatus(t, err, test.code, test.mention...)
		})
	}

	t.Run("a stream is bound to the identity too", func(t *testing.T) {
		feed := fleetpb.NewCapacityFeedClient(dial(t, address, client(good, "stream", caFile, later, east)))
		for cluster, code := range map[string]codes.Code{"east": codes.OK, "west": codes.PermissionDenied} {
			stream, err := feed.Subscribe(t.Context(), &fleetpb.SubscribeRequest{ClusterId: cluster})
			if err != nil {
				t.Fatal(err)
			}
			_, err = stream.Recv()
			wantStatus(t, err, code)
		}
	})

	t.Run("requests that speak for no cluster pass", func(t *testing.T) {
		conn := dial(t, address, client(good, "probe", caFile, later))
		if _, err := healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{}); err != nil {
			t.Fatal(err)
		}
	})
}

func TestWithoutClientCANobodyHasAnIdentity(t *testing.T) {
	dir := t.TempDir()
	ca := newAuthority(t)
	caFile := ca.write(t, filepath.Join(dir, "ca.crt"))
	cert, key := ca.issue(t, dir, "server", time.Now().Add(time.Hour))
	address := serve(t, configv1alpha1.ServerTLS{CertFile: cert, KeyFile: key})
	// A certificate that the server did not ask for does not count either.
	own, ownKey := ca.issue(t, dir, "west", time.Now().Add(time.Hour), "spiffe://fleet.example/cluster/west")
	cfg := configv1alpha1.ClientTLS{CAFile: caFile, CertFile: own, KeyFile: ownKey, ServerName: "localhost"}
	if err := send(t, address, cfg, "east"); err != nil {
		t.Fatal(err)
	}
	address = serve(t, configv1alpha1.ServerTLS{Insecure: true})
	if err := send(t, address, configv1alpha1.ClientTLS{Insecure: true}, "east"); err != nil {
		t.Fatal(err)
	}
}

func TestFilesAreReadAgainWhenTheyChange(t *testing.T) {
	dir := t.TempDir()
	first, second := newAuthority(t), newAuthority(t)
	later := time.Now().Add(time.Hour)
	const east = "spiffe://fleet.example/cluster/east"
	caFile := first.write(t, filepath.Join(dir, "ca.crt"))
	serverCert, serverKey := first.issue(t, dir, "server", later)
	clientCert, clientKey := first.issue(t, dir, "client", later, east)
	address := serve(t, configv1alpha1.ServerTLS{CertFile: serverCert, KeyFile: serverKey, ClientCAFile: caFile})
	creds, err := transport.ClientCredentials(configv1alpha1.ClientTLS{CAFile: caFile, CertFile: clientCert,
		KeyFile: clientKey, ServerName: "localhost"})
	if err != nil {
		t.Fatal(err)
	}
	call := func() error {
		conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(creds))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		_, err = fleetpb.NewInfrastructureAutoscalerClient(conn).UpdateClusterNeeds(t.Context(),
			&fleetpb.ClusterCapacityNeeds{ClusterId: "east"})
		return err
	}
	if err := call(); err != nil {
		t.Fatalf("before the rotation: %v", err)
	}

	// A half-written file keeps the last good certificates in place, on both ends.
	if err := os.WriteFile(serverKey, []byte("-----BEGIN"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(clientKey); err != nil {
		t.Fatal(err)
	}
	if err := call(); err != nil {
		t.Fatalf("with a broken file: %v", err)
	}

	// Everything moves to another authority: the old certificates would not pass, so that success proves the re-read.
	second.write(t, caFile)
	second.issue(t, dir, "server", later)
	second.issue(t, dir, "client", later, east)
	if err := call(); err != nil {
		t.Fatalf("after the rotation: %v", err)
	}
	oldCert, oldKey := first.issue(t, dir, "old", later, east)
	err = send(t, address, configv1alpha1.ClientTLS{CAFile: caFile, CertFile: oldCert, KeyFile: oldKey,
		ServerName: "localhost"}, "east")
	wantStatus(t, err, codes.Unavailable)
}

func TestWrongFilesAreErrorsAtStart(t *testing.T) {
	dir := t.TempDir()
	ca := newAuthority(t)
	cert, key := ca.issue(t, dir, "server", time.Now().Add(time.Hour))
	_, otherKey := ca.issue(t, dir, "other", time.Now().Add(time.Hour))
	missing := filepath.Join(dir, "missing.pem")
	for _, test := range []struct {
		name    string
		cfg     configv1alpha1.ServerTLS
		mention string
	}{
		{"missing file", configv1alpha1.ServerTLS{CertFile: missing, KeyFile: key}, missing},
		{"no key", configv1alpha1.ServerTLS{CertFile: cert}, "tls.keyFile"},
		{"key of another certificate", configv1alpha1.ServerTLS{CertFile: cert, KeyFile: otherKey}, otherKey},
		{"client CA without a certificate", configv1alpha1.ServerTLS{CertFile: cert, KeyFile: key, ClientCAFile: key},
			"tls.clientCAFile " + key},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := transport.ServerCredentials(test.cfg)
			if err == nil || !strings.Contains(err.Error(), test.mention) {
				t.Errorf("got error %v, want one that mentions %q", err, test.mention)
			}
		})
	}
	if _, err := transport.ClientCredentials(configv1alpha1.ClientTLS{CertFile: cert}); err == nil {
		t.Error("a client certificate without a key was accepted")
	}
}
