package main

import (
	"crypto/tls"
	"crypto/x509"
	"os"
	"path/filepath"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

var now = time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)

func issue(t *testing.T, dir string, clusters ...string) map[string]corev1.Secret {
	t.Helper()
	written, err := run(options{
		dir: dir, namespace: "fleet-system", clusters: clusters, hosts: []string{"127.0.0.1", "autoscaler.fleet.example"},
		now: now, validity: 90 * 24 * time.Hour,
	})
	if err != nil {
		t.Fatal(err)
	}
	secrets := map[string]corev1.Secret{}
	for _, path := range written {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var secret corev1.Secret
		if err := yaml.UnmarshalStrict(data, &secret); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		secrets[filepath.Base(path)] = secret
	}
	return secrets
}

func leaf(t *testing.T, s corev1.Secret) *x509.Certificate {
	t.Helper()
	pair, err := tls.X509KeyPair(s.Data["tls.crt"], s.Data["tls.key"])
	if err != nil {
		t.Fatal(err)
	}
	return pair.Leaf
}

func verify(cert *x509.Certificate, ca []byte, host string, usage x509.ExtKeyUsage) error {
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	_, err := cert.Verify(x509.VerifyOptions{
		Roots: roots, DNSName: host, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{usage},
	})
	return err
}

func TestCertificatesFitTheirPurposeAndNoOther(t *testing.T) {
	secrets := issue(t, t.TempDir(), "cluster-1")
	server, client := secrets["autoscaler.yaml"], secrets["manager-cluster-1.yaml"]

	for _, host := range []string{"drover-autoscaler.fleet-system.svc", "autoscaler.fleet.example", "127.0.0.1"} {
		if err := verify(leaf(t, server), client.Data["ca.crt"], host, x509.ExtKeyUsageServerAuth); err != nil {
			t.Errorf("a manager does not accept the autoscaler at %s: %v", host, err)
		}
	}
	coordinator := secrets["coordinator.yaml"]
	if err := verify(leaf(t, coordinator), server.Data["ca.crt"], "drover-coordinator.fleet-system.svc",
		x509.ExtKeyUsageServerAuth); err != nil {
		t.Errorf("the API server does not accept the coordinator's webhook: %v", err)
	}
	if err := verify(leaf(t, client), server.Data["ca.crt"], "", x509.ExtKeyUsageClientAuth); err != nil {
		t.Errorf("the autoscaler does not accept the manager: %v", err)
	}
	if err := verify(leaf(t, server), server.Data["ca.crt"], "", x509.ExtKeyUsageClientAuth); err == nil {
		t.Error("the server's certificate may not be used by a client")
	}
	uris := leaf(t, client).URIs
	if len(uris) != 1 || uris[0].String() != "spiffe://drover/cluster/cluster-1" {
		t.Errorf("URIs of the client certificate: %v, want exactly spiffe://drover/cluster/cluster-1", uris)
	}
}

func TestAnotherRunKeepsTheAuthority(t *testing.T) {
	dir := t.TempDir()
	first := issue(t, dir, "cluster-1")
	second := issue(t, dir, "cluster-1", "cluster-2")
	ca := first["autoscaler.yaml"].Data["ca.crt"]
	for name, secret := range second {
		if string(secret.Data["ca.crt"]) != string(ca) {
			t.Errorf("%s was signed by a new authority", name)
		}
	}
	old, renewed := leaf(t, first["manager-cluster-1.yaml"]), leaf(t, second["manager-cluster-1.yaml"])
	if old.SerialNumber.Cmp(renewed.SerialNumber) == 0 {
		t.Error("the second run did not renew the certificate of cluster-1")
	}
}

func TestWrongInputIsNamed(t *testing.T) {
	for _, id := range []string{"", "a/b", "Upper", "-x"} {
		_, err := run(options{dir: t.TempDir(), namespace: "n", clusters: []string{id}, now: now, validity: time.Hour})
		if err == nil {
			t.Errorf("cluster id %q was accepted", id)
		}
	}
	dir := t.TempDir()
	issue(t, dir)
	if err := os.WriteFile(filepath.Join(dir, "ca.key"), []byte("nonsense"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := run(options{dir: dir, namespace: "n", now: now, validity: time.Hour}); err == nil {
		t.Error("a broken ca.key was accepted")
	}
}
