// Command certs makes the certificates that Drover's manifests need where there is no cert-manager: an authority of its
// own, server certificates for the autoscaler and for the coordinator's webhook, and one client certificate per cluster, whose
// URI names the cluster that its holder may speak for. The certificates are written as Secrets for kubectl apply:
//
//	certs -dir out/certs -cluster cluster-1 -cluster cluster-2
//
// The authority is kept in the directory and used again, so that clusters can be added and certificates renewed by running
// the command again. Its key, ca.key, belongs in a safe and not in a cluster.
package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

func main() {
	var clusters, hosts list
	dir := flag.String("dir", "out/certs", "directory that holds the authority and receives the Secrets")
	namespace := flag.String("namespace", "fleet-system", "namespace of the Secrets")
	days := flag.Int("days", 90, "how long the certificates are valid, in days")
	flag.Var(&clusters, "cluster", "id of a cluster that gets a client certificate; repeatable")
	flag.Var(&hosts, "host", "further DNS name or IP address of the autoscaler; repeatable")
	flag.Parse()

	written, err := run(options{
		dir: *dir, namespace: *namespace, clusters: clusters, hosts: hosts, now: time.Now(),
		validity: time.Duration(*days) * 24 * time.Hour,
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, "certs:", err)
		os.Exit(1)
	}
	for _, path := range written {
		fmt.Println(path)
	}
}

// list is a flag that may be given several times.
type list []string

func (l *list) String() string     { return strings.Join(*l, ",") }
func (l *list) Set(s string) error { *l = append(*l, s); return nil }

type options struct {
	dir, namespace  string
	clusters, hosts []string
	now             time.Time
	validity        time.Duration
}

// A cluster id becomes a path segment of the identity's URI and part of a file name.
var clusterID = regexp.MustCompile(`^[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?$`)

// run issues everything that o asks for and returns the paths of the manifests it wrote.
func run(o options) ([]string, error) {
	if o.validity <= 0 {
		return nil, fmt.Errorf("-days: must be positive, not %v", o.validity.Hours()/24)
	}
	for _, id := range o.clusters {
		if !clusterID.MatchString(id) {
			return nil, fmt.Errorf("-cluster %q: must be lower case letters, digits, '-' and '.'", id)
		}
	}
	if err := os.MkdirAll(o.dir, 0o700); err != nil {
		return nil, err
	}
	ca, err := loadOrCreateAuthority(o)
	if err != nil {
		return nil, err
	}

	service := "drover-autoscaler." + o.namespace + ".svc"
	server := &x509.Certificate{
		Subject:     pkix.Name{CommonName: "drover-autoscaler"},
		DNSNames:    []string{service, service + ".cluster.local"},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	for _, host := range o.hosts {
		if ip := net.ParseIP(host); ip != nil {
			server.IPAddresses = append(server.IPAddresses, ip)
		} else {
			server.DNSNames = append(server.DNSNames, host)
		}
	}
	path, err := ca.issueSecret(o, server, "drover-autoscaler-tls", "autoscaler.yaml")
	if err != nil {
		return nil, err
	}
	written := []string{path}
	service = "drover-coordinator." + o.namespace + ".svc"
	path, err = ca.issueSecret(o, &x509.Certificate{
		Subject:     pkix.Name{CommonName: "drover-coordinator"},
		DNSNames:    []string{service, service + ".cluster.local"},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}, "drover-coordinator-tls", "coordinator.yaml")
	if err != nil {
		return nil, err
	}
	written = append(written, path)
	for _, id := range o.clusters {
		client := &x509.Certificate{
			Subject:     pkix.Name{CommonName: id},
			URIs:        []*url.URL{{Scheme: "spiffe", Host: "drover", Path: "/cluster/" + id}},
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		}
		path, err := ca.issueSecret(o, client, "drover-manager-tls", "manager-"+id+".yaml")
		if err != nil {
			return nil, err
		}
		written = append(written, path)
	}
	return written, nil
}

// authority signs certificates.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

func loadOrCreateAuthority(o options) (*authority, error) {
	certPath, keyPath := filepath.Join(o.dir, "ca.crt"), filepath.Join(o.dir, "ca.key")
	certPEM, err := os.ReadFile(certPath)
	if errors.Is(err, fs.ErrNotExist) {
		return createAuthority(o, certPath, keyPath)
	}
	if err != nil {
		return nil, err
	}
	keyPEM, err := os.ReadFile(keyPath)
	if err != nil {
		return nil, fmt.Errorf("%s has no key beside it: %w", certPath, err)
	}
	certDER, err := decodePEM(certPath, certPEM, "CERTIFICATE")
	if err != nil {
		return nil, err
	}
	keyDER, err := decodePEM(keyPath, keyPEM, "EC PRIVATE KEY")
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(certDER)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", certPath, err)
	}
	key, err := x509.ParseECPrivateKey(keyDER)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", keyPath, err)
	}
	if !key.PublicKey.Equal(cert.PublicKey) {
		return nil, fmt.Errorf("%s is not the key of %s", keyPath, certPath)
	}
	return &authority{cert: cert, key: key, pem: certPEM}, nil
}

func createAuthority(o options, certPath, keyPath string) (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		Subject:               pkix.Name{CommonName: "drover-ca"},
		NotBefore:             o.now.Add(-time.Hour), // clocks differ
		NotAfter:              o.now.AddDate(10, 0, 0),
		IsCA:                  true,
		BasicConstraintsValid: true,
		MaxPathLenZero:        true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	if template.SerialNumber, err = serial(); err != nil {
		return nil, err
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	keyPEM, err := encodeKey(key)
	if err != nil {
		return nil, err
	}
	// The key first: a certificate without its key would be taken for an authority by the next run.
	if err := os.WriteFile(keyPath, keyPEM, 0o600); err != nil {
		return nil, err
	}
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	if err := os.WriteFile(certPath, certPEM, 0o644); err != nil {
		return nil, err
	}
	return &authority{cert: cert, key: key, pem: certPEM}, nil
}

// issueSecret signs template and writes it as a Secret of the given name.
func (a *authority) issueSecret(o options, template *x509.Certificate, name, file string) (string, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return "", err
	}
	template.NotBefore, template.NotAfter = o.now.Add(-time.Hour), o.now.Add(o.validity)
	template.KeyUsage = x509.KeyUsageDigitalSignature
	if template.SerialNumber, err = serial(); err != nil {
		return "", err
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, a.key)
	if err != nil {
		return "", err
	}
	keyPEM, err := encodeKey(key)
	if err != nil {
		return "", err
	}
	path := filepath.Join(o.dir, file)
	encode := base64.StdEncoding.EncodeToString
	manifest := fmt.Sprintf(secretManifest, name, o.namespace, encode(a.pem),
		encode(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})), encode(keyPEM))
	return path, os.WriteFile(path, []byte(manifest), 0o600)
}

const secretManifest = `apiVersion: v1
kind: Secret
type: kubernetes.io/tls
metadata:
  name: %s
  namespace: %s
  labels:
    app.kubernetes.io/part-of: drover
data:
  ca.crt: %s
  tls.crt: %s
  tls.key: %s
`

func serial() (*big.Int, error) { return rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127)) }

func encodeKey(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), nil
}

func decodePEM(path string, data []byte, want string) ([]byte, error) {
	block, _ := pem.Decode(data)
	if block == nil || block.Type != want {
		return nil, fmt.Errorf("%s: no PEM block %q", path, want)
	}
	return block.Bytes, nil
}
