package transport

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"os"
	"sync"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/klog/v2"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
)

// ServerCredentials returns the credentials of a gRPC server. With ClientCAFile a client without a valid certificate of
// that CA does not get through the handshake. The files are read now, so that a wrong one is an error at start, and
// again at each handshake: a certificate that was rotated on disk is used from the next connection on, and a file that
// cannot be used (half written, wrong key) leaves the last good one in place.
func ServerCredentials(cfg configv1alpha1.ServerTLS) (credentials.TransportCredentials, error) {
	if cfg.Insecure {
		return insecure.NewCredentials(), nil
	}
	return newReloading([]tlsFile{{"tls.certFile", cfg.CertFile}, {"tls.keyFile", cfg.KeyFile},
		{"tls.clientCAFile", cfg.ClientCAFile}}, func(files [][]byte) (*tls.Config, error) {
		if cfg.CertFile == "" || cfg.KeyFile == "" {
			return nil, fmt.Errorf("tls.certFile %q and tls.keyFile %q: a server needs both", cfg.CertFile, cfg.KeyFile)
		}
		pair, err := keyPair(cfg.CertFile, cfg.KeyFile, files[0], files[1])
		if err != nil {
			return nil, err
		}
		out := &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}}
		if cfg.ClientCAFile != "" {
			if out.ClientCAs, err = pool("tls.clientCAFile", cfg.ClientCAFile, files[2]); err != nil {
				return nil, err
			}
			out.ClientAuth = tls.RequireAndVerifyClientCert
		}
		return out, nil
	})
}

// ClientCredentials returns the credentials of a gRPC client; CertFile and KeyFile make it mutual TLS. Files are read
// as by ServerCredentials.
func ClientCredentials(cfg configv1alpha1.ClientTLS) (credentials.TransportCredentials, error) {
	if cfg.Insecure {
		return insecure.NewCredentials(), nil
	}
	return newReloading([]tlsFile{{"tls.certFile", cfg.CertFile}, {"tls.keyFile", cfg.KeyFile},
		{"tls.caFile", cfg.CAFile}}, func(files [][]byte) (*tls.Config, error) {
		out := &tls.Config{MinVersion: tls.VersionTLS13, ServerName: cfg.ServerName}
		if cfg.CAFile != "" {
			roots, err := pool("tls.caFile", cfg.CAFile, files[2])
			if err != nil {
				return nil, err
			}
			out.RootCAs = roots
		}
		switch {
		case cfg.CertFile != "" && cfg.KeyFile != "":
			pair, err := keyPair(cfg.CertFile, cfg.KeyFile, files[0], files[1])
			if err != nil {
				return nil, err
			}
			out.Certificates = []tls.Certificate{pair}
		case cfg.CertFile != cfg.KeyFile:
			return nil, fmt.Errorf("tls.certFile %q and tls.keyFile %q: mutual TLS needs both", cfg.CertFile, cfg.KeyFile)
		}
		return out, nil
	})
}

func keyPair(certFile, keyFile string, cert, key []byte) (tls.Certificate, error) {
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return pair, fmt.Errorf("tls.certFile %s with tls.keyFile %s: %w", certFile, keyFile, err)
	}
	return pair, nil
}

func pool(field, file string, pem []byte) (*x509.CertPool, error) {
	out := x509.NewCertPool()
	if !out.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s %s: no PEM certificate in it", field, file)
	}
	return out, nil
}

// reloading are TLS credentials whose files are read at each handshake. Handshakes are rare and the files are small, so
// that comparing contents costs less than the handshake itself and, unlike comparing times, misses nothing.
type reloading struct {
	paths []tlsFile
	build func(files [][]byte) (*tls.Config, error)

	// shared by clones, which gRPC makes per channel.
	state *reloadState

	serverName string
}

// tlsFile is a file and the field of the configuration that names it. An empty path is no file.
type tlsFile struct{ field, path string }

type reloadState struct {
	mu      sync.Mutex
	files   [][]byte
	current *tls.Config
}

func newReloading(paths []tlsFile, build func([][]byte) (*tls.Config, error)) (credentials.TransportCredentials, error) {
	r := &reloading{paths: paths, build: build, state: &reloadState{}}
	if _, err := r.config(); err != nil {
		return nil, err
	}
	return r, nil
}

// config returns the configuration of the files as they are now, or the last good one.
func (r *reloading) config() (*tls.Config, error) {
	r.state.mu.Lock()
	defer r.state.mu.Unlock()
	files, err := readAll(r.paths)
	if err == nil && r.state.current != nil && equal(files, r.state.files) {
		return r.state.current, nil
	}
	var cfg *tls.Config
	if err == nil {
		cfg, err = r.build(files)
	}
	if err == nil {
		r.state.files, r.state.current = files, cfg
		return cfg, nil
	}
	if r.state.current == nil {
		return nil, err
	}
	klog.Background().WithName("transport").Error(err, "Keeping the last good TLS files", "files", fmt.Sprint(r.paths))
	return r.state.current, nil
}

func readAll(files []tlsFile) ([][]byte, error) {
	out := make([][]byte, len(files))
	for i, f := range files {
		if f.path == "" {
			continue
		}
		data, err := os.ReadFile(f.path)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f.field, err)
		}
		out[i] = data
	}
	return out, nil
}

func equal(a, b [][]byte) bool {
	for i := range a {
		if string(a[i]) != string(b[i]) {
			return false
		}
	}
	return true
}

// now returns gRPC's own TLS credentials for the files as they are.
func (r *reloading) now() (credentials.TransportCredentials, error) {
	cfg, err := r.config()
	if err != nil {
		return nil, err
	}
	if r.serverName != "" {
		cfg = cfg.Clone()
		cfg.ServerName = r.serverName
	}
	return credentials.NewTLS(cfg), nil
}

// ClientHandshake implements credentials.TransportCredentials.
func (r *reloading) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (
	net.Conn, credentials.AuthInfo, error) {
	creds, err := r.now()
	if err != nil {
		return nil, nil, err
	}
	return creds.ClientHandshake(ctx, authority, conn)
}

// ServerHandshake implements credentials.TransportCredentials.
func (r *reloading) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	creds, err := r.now()
	if err != nil {
		return nil, nil, err
	}
	return creds.ServerHandshake(conn)
}

// Info implements credentials.TransportCredentials.
func (r *reloading) Info() credentials.ProtocolInfo {
	r.state.mu.Lock()
	defer r.state.mu.Unlock()
	name := r.state.current.ServerName
	if r.serverName != "" {
		name = r.serverName
	}
	//nolint:staticcheck // SA1019: gRPC still takes the name to verify from here when no authority is given.
	return credentials.ProtocolInfo{SecurityProtocol: "tls", ServerName: name}
}

// Clone implements credentials.TransportCredentials.
func (r *reloading) Clone() credentials.TransportCredentials {
	clone := *r
	return &clone
}

// OverrideServerName implements credentials.TransportCredentials.
func (r *reloading) OverrideServerName(name string) error {
	r.serverName = name
	return nil
}
