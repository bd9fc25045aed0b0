package controlplane

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
)

// KubeconfigForServiceAccount writes a kubeconfig that holds a token of the ServiceAccount and nothing else, so that whoever
// uses it has the ServiceAccount's rights and no more. The ServiceAccount has to exist. The token lives for a day.
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
