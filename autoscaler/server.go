package autoscaler

import (
	"context"
	"crypto/rand"
	"errors"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
	"k8s.io/utils/clock"

	fleetpb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
)

// Server is the gRPC face of a Runner. Who may speak for which cluster is not its concern: install the interceptors of
// package transport before it.
type Server struct {
	fleetpb.UnimplementedInfrastructureAutoscalerServer
	fleetpb.UnimplementedCapacityFeedServer

	runner   *Runner
	clock    clock.Clock
	debounce time.Duration
	period   time.Duration
	session  string
	sequence atomic.Uint64
}

// NewServer returns a server whose feeds collect changes for debounce and are repeated every period.
func NewServer(r *Runner, c clock.Clock, debounce, period time.Duration) *Server {
	return &Server{runner: r, clock: c, debounce: debounce, period: period, session: RandomID()}
}

// RandomID returns ten random lower-case letters and digits.
func RandomID() string { return strings.ToLower(rand.Text()[:10]) }

// Register adds both services to s.
func (s *Server) Register(r grpc.ServiceRegistrar) {
	fleetpb.RegisterInfrastructureAutoscalerServer(r, s)
	fleetpb.RegisterCapacityFeedServer(r, s)
}

// UpdateClusterNeeds implements fleetpb.InfrastructureAutoscalerServer.
func (s *Server) UpdateClusterNeeds(ctx context.Context, in *fleetpb.ClusterCapacityNeeds) (
	*fleetpb.Acknowledgement, error) {
	m := s.runner.metrics
	if err := checkClusterID(in.GetClusterId()); err != nil {
		m.rollUps.WithLabelValues("invalid").Inc()
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	if err := checkLimits(in); err != nil {
		m.rollUps.WithLabelValues("invalid").Inc()
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	digest, err := digestOf(in)
	if err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "encoding the roll-up of cluster %q: %v", in.GetClusterId(), err)
	}
	if s.runner.ledger.repeats(s.clock.Now(), in.GetClusterId(), in.GetSession(), in.GetSequence(), digest) {
		m.rollUps.WithLabelValues("unchanged").Inc()
		return &fleetpb.Acknowledgement{Acknowledged: true}, nil
	}
	rollUp, err := RollUpFromProto(in)
	if err != nil {
		m.rollUps.WithLabelValues("invalid").Inc()
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	if err := s.runner.submit(ctx, rollUp, digest); err != nil {
		m.rollUps.WithLabelValues("unavailable").Inc()
		return nil, unavailable(err)
	}
	m.rollUps.WithLabelValues("stored").Inc()
	return &fleetpb.Acknowledgement{Acknowledged: true}, nil
}

// unavailable tells a caller to come again; the caller's own deadline stays what it is.
func unavailable(err error) error {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return status.FromContextError(errors.Unwrap(err)).Err()
	}
	return status.Error(codes.Unavailable, err.Error())
}

// ReportMachines implements fleetpb.CapacityFeedServer. It is acknowledged once what it changed is stored.
func (s *Server) ReportMachines(ctx context.Context, in *fleetpb.MachineReport) (*fleetpb.MachineReportAck, error) {
	observations, err := observationsFromProto(in)
	if err != nil {
		s.runner.metrics.reports.WithLabelValues("invalid").Inc()
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	if err := s.runner.report(ctx, in.GetClusterId(), observations); err != nil {
		s.runner.metrics.reports.WithLabelValues("unavailable").Inc()
		return nil, unavailable(err)
	}
	s.runner.metrics.reports.WithLabelValues("stored").Inc()
	return &fleetpb.MachineReportAck{Acknowledged: true}, nil
}

// report takes observations and returns once what they changed is stored.
func (r *Runner) report(ctx context.Context, cluster string, observations []Observation) error {
	w := &waiter{done: make(chan error, 1)}
	r.mu.Lock()
	r.engine.Report(r.clock.Now(), cluster, observations)
	r.waiters = append(r.waiters, w)
	r.mu.Unlock()
	return r.stored(ctx, w, "report")
}

// Subscribe implements fleetpb.CapacityFeedServer.
func (s *Server) Subscribe(in *fleetpb.SubscribeRequest, stream grpc.ServerStreamingServer[fleetpb.FeedState]) error {
	if err := checkClusterID(in.GetClusterId()); err != nil {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	hub := s.runner.hub
	sub := hub.subscribe(in.GetClusterId())
	defer hub.unsubscribe(sub)
	s.runner.log.Info("Subscribed", "cluster", in.GetClusterId())
	s.runner.with(func(_ time.Time, e *Engine) { e.Subscribed(in.GetClusterId()) })
	first := true
	for {
		if err := s.waitForChange(stream.Context(), sub, first); err != nil {
			return err
		}
		first = false
		state := hub.take(sub)
		if state == nil {
			continue
		}
		message := &fleetpb.FeedState{ClusterId: state.ClusterId, Session: s.session, Sequence: s.sequence.Add(1),
			Timestamp: timestamppb.New(s.clock.Now()), Shapes: state.Shapes, Machines: state.Machines,
			Offerings: state.Offerings, Reclaims: state.Reclaims, Verdicts: state.Verdicts,
			Terminating: state.Terminating}
		if err := stream.Send(message); err != nil {
			return err
		}
	}
}

// waitForChange returns when there is something to send: a change, debounced but for the first, or the period is over.
func (s *Server) waitForChange(ctx context.Context, sub *subscriber, first bool) error {
	closed := status.Error(codes.Unavailable, "the autoscaler is shutting down")
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-s.runner.hub.closed:
		return closed
	case <-s.clock.After(s.period):
		return nil
	case <-sub.changed:
	}
	if first || s.debounce == 0 {
		return nil
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-s.runner.hub.closed:
		return closed
	case <-s.clock.After(s.debounce):
	}
	// What changed meanwhile is in the state that is taken now.
	select {
	case <-sub.changed:
	default:
	}
	return nil
}
