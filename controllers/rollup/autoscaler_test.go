package rollup

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"

	fleetpb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
)

const testCluster = "cluster-1"

// scripted is an autoscaler that does what a test tells it, so that faults of the protocol can be played.
type scripted struct {
	fleetpb.UnimplementedInfrastructureAutoscalerServer
	fleetpb.UnimplementedCapacityFeedServer

	mu       sync.Mutex
	server   *grpc.Server // nil while it is away
	listener *bufconn.Listener
	session  string
	sequence uint64
	state    *fleetpb.FeedState // what a subscriber is sent first
	streams  map[chan *fleetpb.FeedState]bool
	cut      chan struct{} // closed to end every stream

	rollups []*fleetpb.ClusterCapacityNeeds
	reports []*fleetpb.MachineObservation
	// onRollup and onReport answer instead of the acknowledgement, when set.
	onRollup func(*fleetpb.ClusterCapacityNeeds) error
	onReport func(*fleetpb.MachineReport) error
}

func newScripted(t *testing.T) (*scripted, *grpc.ClientConn) {
	t.Helper()
	s := &scripted{session: "a", streams: map[chan *fleetpb.FeedState]bool{}, cut: make(chan struct{})}
	s.start()
	t.Cleanup(s.leave)
	conn, err := grpc.NewClient("passthrough:///scripted",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(fastConnect),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			s.mu.Lock()
			l := s.listener
			s.mu.Unlock()
			if l == nil {
				return nil, errors.New("the autoscaler is away")
			}
			return l.DialContext(ctx)
		}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return s, conn
}

// start brings the autoscaler back.
func (s *scripted) start() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.listener = bufconn.Listen(1 << 20)
	s.server = grpc.NewServer()
	fleetpb.RegisterInfrastructureAutoscalerServer(s.server, s)
	fleetpb.RegisterCapacityFeedServer(s.server, s)
	go s.server.Serve(s.listener)
}

// leave makes it disappear, with every stream.
func (s *scripted) leave() {
	s.mu.Lock()
	server := s.server
	s.server, s.listener = nil, nil
	s.mu.Unlock()
	if server != nil {
		server.Stop()
	}
}

// restart makes it another process, which numbers its states afresh.
func (s *scripted) restart(session string) {
	s.leave()
	s.mu.Lock()
	s.session, s.sequence = session, 0
	s.mu.Unlock()
	s.start()
}

// cutStreams ends every stream; the autoscaler stays.
func (s *scripted) cutStreams() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.cut)
	s.cut = make(chan struct{})
}

// say numbers a state, keeps it for new subscribers and sends it to all.
func (s *scripted) say(state *fleetpb.FeedState) *fleetpb.FeedState {
	s.mu.Lock()
	s.sequence++
	state = proto.Clone(state).(*fleetpb.FeedState)
	state.ClusterId, state.Session, state.Sequence = testCluster, s.session, s.sequence
	s.state = state
	s.mu.Unlock()
	s.send(state)
	return state
}

// send sends a message as it is.
func (s *scripted) send(state *fleetpb.FeedState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for stream := range s.streams {
		stream <- state
	}
}

func (s *scripted) subscribers() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.streams)
}

func (s *scripted) UpdateClusterNeeds(_ context.Context, m *fleetpb.ClusterCapacityNeeds) (*fleetpb.Acknowledgement, error) {
	s.mu.Lock()
	hook := s.onRollup
	s.mu.Unlock()
	if hook != nil {
		if err := hook(m); err != nil {
			return nil, err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rollups = append(s.rollups, m)
	return &fleetpb.Acknowledgement{Acknowledged: true}, nil
}

func (s *scripted) Subscribe(_ *fleetpb.SubscribeRequest, stream grpc.ServerStreamingServer[fleetpb.FeedState]) error {
	// Large enough that a test never waits for a reader.
	states := make(chan *fleetpb.FeedState, 1000)
	s.mu.Lock()
	s.streams[states] = true
	cut := s.cut
	if s.state != nil {
		states <- s.state
	}
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.streams, states)
		s.mu.Unlock()
	}()
	for {
		select {
		case <-stream.Context().Done():
			return stream.Context().Err()
		case <-cut:
			return nil
		case state := <-states:
			if err := stream.Send(state); err != nil {
				return err
			}
		}
	}
}

func (s *scripted) ReportMachines(_ context.Context, m *fleetpb.MachineReport) (*fleetpb.MachineReportAck, error) {
	s.mu.Lock()
	hook := s.onReport
	s.mu.Unlock()
	if hook != nil {
		if err := hook(m); err != nil {
			return nil, err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reports = append(s.reports, m.Machines...)
	return &fleetpb.MachineReportAck{Acknowledged: true}, nil
}

// reported lists the states that were reported of a machine, in order.
func (s *scripted) reported(machine string) (states []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range s.reports {
		if o.Id == machine {
			states = append(states, o.State)
		}
	}
	return states
}

func (s *scripted) hasReported(machine, state string) bool {
	return slices.Contains(s.reported(machine), state)
}

func (s *scripted) lastRollup() *fleetpb.ClusterCapacityNeeds {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.rollups) == 0 {
		return nil
	}
	return s.rollups[len(s.rollups)-1]
}

func (s *scripted) rollupCount() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.rollups)
}

func (s *scripted) set(change func(*scripted)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(s)
}
