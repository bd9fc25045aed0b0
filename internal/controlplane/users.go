package controlplane

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
)

// KubeconfigForServiceAccount writes a kubeconfig that holds a token of the ServiceAccount and nothing else, so that
// whoever uses it has the ServiceAccount's rights and no more. The ServiceAccount has to exist. The token lives for a
// day.
func (cp *ControlPlane) KubeconfigForServiceAccount(ctx context.Context, namespace, name string) (string, error) {
	clients, err := cp.Clientset()
	if err != nil {
		return "", err
	}
	token, err := clients.CoreV1().ServiceAccounts(namespace).CreateToken(ctx, name, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: ptr.To[int64](24 * 60 * 60)},
	}, metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("token of ServiceAccount %s/%s: %w", namespace, name, err)
	}
	return cp.writeKubeconfig("sa-"+namespace+"-"+name, &clientcmdapi.AuthInfo{Token: token.Status.Token}, namespace)
}

// KubeconfigForUser writes a kubeconfig with a client certificate of that user in these groups.
func (cp *ControlPlane) KubeconfigForUser(name string, groups ...string) (string, error) {
	user, err := cp.env.AddUser(envtest.User{Name: name, Groups: groups}, &rest.Config{})
	if err != nil {
		return "", fmt.Errorf("certificate of user %s: %w", name, err)
	}
	config := user.Config()
	return cp.writeKubeconfig("user-"+strings.ReplaceAll(name, ":", "-"), &clientcmdapi.AuthInfo{
		ClientCertificateData: config.CertData,
		ClientKeyData:         config.KeyData,
	}, "")
}

func (cp *ControlPlane) writeKubeconfig(name string, auth *clientcmdapi.AuthInfo, namespace string) (string, error) {
	config := clientcmdapi.NewConfig()
	config.Clusters["drover"] = &clientcmdapi.Cluster{
		Server:                   cp.config.Host,
		CertificateAuthorityData: cp.config.CAData,
	}
	config.AuthInfos[name] = auth
	config.Contexts["drover"] = &clientcmdapi.Context{Cluster: "drover", AuthInfo: name, Namespace: namespace}
	config.CurrentContext = "drover"
	path := filepath.Join(cp.options.Dir, name+".kubeconfig")
	data, err := clientcmd.Write(*config)
	if err != nil {
		return "", fmt.Errorf("kubeconfig %s: %w", path, err)
	}
	if err := os.WriteFile(path, data, 0o600); err != nil {
		return "", fmt.Errorf("kubeconfig %s: %w", path, err)
	}
	return path, nil
}

// writeAuthority writes the certificate of a new authority whose key is thrown away.
func writeAuthority(path, name string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("authority %s: %w", name, err)
	}
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: name},
		NotBefore:             time.Now().Add(-time.Minute),
		NotAfter:              time.Now().AddDate(1, 0, 0),
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return fmt.Errorf("authority %s: %w", name, err)
	}
	data := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	if err := os.WriteFile(path, data, 0o644); err != nil {
		return fmt.Errorf("authority %s: %w", name, err)
	}
	return nil
}
