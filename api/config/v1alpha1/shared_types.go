package v1alpha1

// DemandMode says what a roll-up counts.
type DemandMode string

const (
	// DemandTotal counts requests and every bound pod on a node that the autoscaler owns: the total desired state, with
	// API objects for the unschedulable only. The default.
	DemandTotal DemandMode = "Total"
	// DemandRequestsOnly counts CapacityRequests and nothing else: the source document's literal model.
	DemandRequestsOnly DemandMode = "RequestsOnly"
)

// ClientTLS secures a connection to a gRPC server. Files are read again when they change.
type ClientTLS struct {
	// Insecure sends plain text; for tests and loopback only. Excludes every other field.
	Insecure bool `json:"insecure,omitempty"`
	// CAFile verifies the server. Empty: the system's roots.
	CAFile string `json:"caFile,omitempty"`
	// CertFile and KeyFile are the client's own certificate, for mutual TLS. Both or neither.
	CertFile string `json:"certFile,omitempty"`
	KeyFile  string `json:"keyFile,omitempty"`
	// ServerName overrides the name that the server's certificate has to carry.
	ServerName string `json:"serverName,omitempty"`
}

// ServerTLS secures a gRPC server. Files are read again when they change.
type ServerTLS struct {
	// Insecure serves plain text; for tests and loopback only. Excludes every other field.
	Insecure bool `json:"insecure,omitempty"`
	// CertFile and KeyFile are the server's certificate.
	CertFile string `json:"certFile,omitempty"`
	KeyFile  string `json:"keyFile,omitempty"`
	// ClientCAFile turns on mutual TLS: a client has to show a certificate of this CA, and speaks only for the cluster
	// that its URI SAN spiffe://<trust domain>/cluster/<cluster id> names.
	ClientCAFile string `json:"clientCAFile,omitempty"`
}
