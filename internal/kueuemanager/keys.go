package kueuemanager

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// validity is more than Kueue's own rotation looks ahead, so that it leaves the certificates as they are.
const validity = 365 * 24 * time.Hour

// servingKeys are the webhook server's certificate and the authority that signed it, in PEM.
type servingKeys struct {
	caCert, caKey, cert, key []byte
}

// newServingKeys makes keys that are valid for the service's name, which Kueue checks, and for the loopback address,
// which the API server calls. RSA, because Kueue's certificate rotation reads nothing else.
func newServingKeys(serviceName string) (*servingKeys, error) {
	now := time.Now()
	ca := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kueue-ca"}, DNSNames: []string{"kueue-ca"},
		NotBefore: now.Add(-time.Hour), NotAfter: now.Add(10 * validity),
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageKeyEncipherment | x509.KeyUsageCertSign,
		IsCA:     true, BasicConstraintsValid: true,
	}
	server := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: serviceName}, DNSNames: []string{serviceName},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore:   now.Add(-time.Hour), NotAfter: now.Add(validity),
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageKeyEncipherment,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, BasicConstraintsValid: true,
	}
	caKey, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return nil, fmt.Errorf("making the webhook's authority: %w", err)
	}
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return nil, fmt.Errorf("making the webhook's key: %w", err)
	}
	caDER, err := x509.CreateCertificate(rand.Reader, ca, ca, caKey.Public(), caKey)
	if err != nil {
		return nil, fmt.Errorf("making the webhook's authority: %w", err)
	}
	der, err := x509.CreateCertificate(rand.Reader, server, ca, key.Public(), caKey)
	if err != nil {
		return nil, fmt.Errorf("making the webhook's certificate: %w", err)
	}
	return &servingKeys{
		caCert: encode("CERTIFICATE", caDER), caKey: encode("RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(caKey)),
		cert: encode("CERTIFICATE", der), key: encode("RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(key)),
	}, nil
}

func encode(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

// secret is the content of the Secret that Kueue manages.
func (k *servingKeys) secret() map[string][]byte {
	return map[string][]byte{"ca.crt": k.caCert, "ca.key": k.caKey, "tls.crt": k.cert, "tls.key": k.key}
}

// write writes what a kubelet would mount of the Secret.
func (k *servingKeys) write(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("writing the webhook's certificate: %w", err)
	}
	for name, data := range k.secret() {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			return fmt.Errorf("writing the webhook's certificate: %w", err)
		}
	}
	return nil
}
