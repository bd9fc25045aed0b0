package rollup

import (
	"fmt"
	"time"

	"google.golang.org/grpc"
	grpcbackoff "google.golang.org/grpc/backoff"
	"google.golang.org/grpc/keepalive"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	"github.com/drover-sh/drover/transport"
)

const (
	// keepaliveTime is how long a connection may be quiet while the feed is open before it is asked whether it lives. An
	// autoscaler that repeats its state more often is never asked, so one that dislikes such questions has a way out.
	keepaliveTime    = 30 * time.Second
	keepaliveTimeout = 20 * time.Second
	// maxFeedState bounds a feed message: some hundred bytes per machine on its way, for more machines than a cluster has.
	maxFeedState = 64 << 20
)

// Dial makes the connection to the autoscaler that both directions share. It returns at once, whether or not the
// autoscaler can be reached; only a wrong configuration is an error.
func Dial(cfg configv1alpha1.AutoscalerClient) (*grpc.ClientConn, error) {
	creds, err := transport.ClientCredentials(cfg.TLS)
	if err != nil {
		return nil, fmt.Errorf("autoscaler.%w", err)
	}
	conn, err := grpc.NewClient(cfg.Address,
		grpc.WithTransportCredentials(creds),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: grpcbackoff.Config{
				BaseDelay: cfg.BackoffBase.Duration, Multiplier: 1.6, Jitter: 0.2, MaxDelay: cfg.BackoffMax.Duration,
			},
			MinConnectTimeout: 5 * time.Second,
		}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: keepaliveTime, Timeout: keepaliveTimeout}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxFeedState)),
	)
	if err != nil {
		return nil, fmt.Errorf("autoscaler.address: %q: %w", cfg.Address, err)
	}
	return conn, nil
}
