package transport

import (
	"context"
	"fmt"
	"net/url"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// clusterPath is what a cluster's SPIFFE id has between the trust domain and the cluster's id.
const clusterPath = "/cluster/"

// ClusterURI is the URI SAN of the certificate that may speak for a cluster.
func ClusterURI(trustDomain, clusterID string) *url.URL {
	return &url.URL{Scheme: "spiffe", Host: trustDomain, Path: clusterPath + clusterID}
}

// ClusterFromContext returns the cluster that the caller's verified client certificate names. ok is false where the
// connection is not mutual TLS: there is no identity then, and nothing to check. An error means that the certificate is
// valid but names no cluster, or more than one.
func ClusterFromContext(ctx context.Context) (id string, ok bool, err error) {
	p, found := peer.FromContext(ctx)
	if !found {
		return "", false, nil
	}
	info, isTLS := p.AuthInfo.(credentials.TLSInfo)
	if !isTLS || len(info.State.VerifiedChains) == 0 || len(info.State.VerifiedChains[0]) == 0 {
		return "", false, nil
	}
	leaf := info.State.VerifiedChains[0][0]
	var spiffe []string
	for _, uri := range leaf.URIs {
		if uri.Scheme == "spiffe" {
			spiffe = append(spiffe, uri.String())
			id = strings.TrimPrefix(uri.Path, clusterPath)
			if uri.Host == "" || !strings.HasPrefix(uri.Path, clusterPath) || id == "" || strings.Contains(id, "/") {
				return "", true, fmt.Errorf("client certificate's URI SAN %q: must be spiffe://<trust domain>%s<cluster id>",
					uri, clusterPath)
			}
		}
	}
	if len(spiffe) != 1 {
		return "", true, fmt.Errorf("client certificate %q has URI SANs %q: it must have exactly one "+
			"spiffe://<trust domain>%s<cluster id>", leaf.Subject.CommonName, spiffe, clusterPath)
	}
	return id, true, nil
}

// Authorize returns nil if the caller may speak for clusterID, else a PERMISSION_DENIED status that names both ids.
func Authorize(ctx context.Context, clusterID string) error {
	own, ok, err := ClusterFromContext(ctx)
	if err != nil {
		return status.Error(codes.PermissionDenied, err.Error())
	}
	if ok && own != clusterID {
		return status.Errorf(codes.PermissionDenied,
			"cluster_id %q: the client certificate speaks for cluster %q only", clusterID, own)
	}
	return nil
}

// clusterMessage is any request that is said in the name of a cluster.
type clusterMessage interface{ GetClusterId() string }

// UnaryServerInterceptor refuses requests that carry another cluster's cluster_id than the caller's certificate.
func UnaryServerInterceptor(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (
	any, error) {
	if m, is := req.(clusterMessage); is {
		if err := Authorize(ctx, m.GetClusterId()); err != nil {
			return nil, err
		}
	}
	return next(ctx, req)
}

// StreamServerInterceptor does the same for every message that a client sends on a stream.
func StreamServerInterceptor(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo,
	next grpc.StreamHandler) error {
	return next(srv, authorizedStream{stream})
}

type authorizedStream struct{ grpc.ServerStream }

func (s authorizedStream) RecvMsg(m any) error {
	if err := s.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	if c, is := m.(clusterMessage); is {
		return Authorize(s.Context(), c.GetClusterId())
	}
	return nil
}
