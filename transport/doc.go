// Package transport secures the gRPC connections between clusters and the infrastructure autoscaler: TLS 1.3 on both
// ends from files that are read again when they change, mutual TLS where a client CA is configured, and the binding of
// a client certificate to the one cluster that it may speak for.
//
// A cluster's identity is the URI SAN spiffe://<trust domain>/cluster/<cluster id> of its verified client certificate.
// The interceptors refuse every message whose cluster_id is another one. Without a client CA nobody has an identity,
// and nothing is checked: use that on loopback, or behind something that authenticates.
//
// The package never logs or returns key material, and never falls back to plain text: only an explicit `insecure: true`
// does that.
//
// Start reading at ServerCredentials and UnaryServerInterceptor.
package transport
