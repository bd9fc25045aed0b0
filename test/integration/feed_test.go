package integration

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/grpc"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	rpc "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
	"github.com/drover-sh/drover/transport"
)

// dial opens a connection to the fleet's autoscaler with the certificate of that cluster.
func (f *fleet) dial(t *testing.T, cluster string) *grpc.ClientConn {
	t.Helper()
	certs := filepath.Join(certDir(), "manager-"+cluster)
	creds, err := transport.ClientCredentials(configv1alpha1.ClientTLS{
		CAFile: filepath.Join(certs, "ca.crt"), CertFile: filepath.Join(certs, "tls.crt"),
		KeyFile: filepath.Join(certs, "tls.key"),
	})
	if err != nil {
		t.Fatal(err)
	}
	conn, err := grpc.NewClient(address(f.grpcPort), grpc.WithTransportCredentials(creds))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// waitFeed subscribes to the own cluster's feed until a state satisfies the check, and returns that state.
func (f *fleet) waitFeed(t *testing.T, what string, check func(*rpc.FeedState) bool) *rpc.FeedState {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	stream, err := rpc.NewCapacityFeedClient(f.dial(t, ownCluster)).Subscribe(ctx,
		&rpc.SubscribeRequest{ClusterId: ownCluster})
	if err != nil {
		t.Fatal(err)
	}
	var last *rpc.FeedState
	for {
		state, err := stream.Recv()
		if err != nil {
			t.Fatalf("waited in vain until the feed says that %s: %v; the last state: %v\n%s", what, err, last, dump())
		}
		if check(state) {
			return state
		}
		last = state
	}
}

// short returns the first verdict of a need that cannot be met.
func short(state *rpc.FeedState) *rpc.Verdict {
	for _, v := range state.Verdicts {
		if v.State == "Short" {
			return v
		}
	}
	return nil
}

// metric reads one sample of a program's metrics with the rights of a scraper. ok is false when it is not there.
func (f *fleet) metric(ctx context.Context, program, token, sample string) (value float64, ok bool, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, f.metrics[program], nil)
	if err != nil {
		return 0, false, err
	}
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // our own child on loopback
	}}
	response, err := client.Do(request)
	if err != nil {
		return 0, false, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return 0, false, fmt.Errorf("%s: %s", f.metrics[program], response.Status)
	}
	lines := bufio.NewScanner(response.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		if text, found := strings.CutPrefix(lines.Text(), sample+" "); found {
			value, err = strconv.ParseFloat(text, 64)
			return value, true, err
		}
	}
	return 0, false, lines.Err()
}
