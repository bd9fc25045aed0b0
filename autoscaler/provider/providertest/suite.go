// Package providertest is the conformance suite of package provider. A provider passes it or is not one:
//
//	func TestConformance(t *testing.T) {
//		providertest.Run(t, func(t *testing.T, faults providertest.Faults) providertest.Subject { … })
//	}
//
// Start reading at Subject.
package providertest

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/drover-sh/drover/autoscaler/provider"
	"github.com/drover-sh/drover/capacity"
)

// Faults are what the provider's surroundings do to it.
type Faults struct {
	// DropEvents: no event of a machine arrives. DoubleEvents: each arrives twice. Slow: launches take about a second.
	DropEvents, DoubleEvents, Slow bool
	// Why launches fail; empty: they do not.
	LaunchFailure string
}

// Subject is a provider under test.
type Subject struct {
	// New returns a provider process on the same infrastructure; the suite calls it again for a restart, after it has
	// ended Run of the one before.
	New func(t *testing.T) provider.Interface
	// Cluster that machines may be put into, and an offering with a domain of exactly Stock machines.
	Cluster, Offering, Domain string
	Stock                     int
	// Allocatable of the offering's nodes.
	Allocatable capacity.Resources
	// Existing returns the ids of the machines that the infrastructure itself has, asked past the provider. A machine that
	// is still being launched may be in it or not.
	Existing func(t *testing.T) []string
}

// patience is how long the suite waits for something that has to happen.
const patience = 2 * time.Minute

// process is a running provider and the events that it sent.
type process struct {
	t        *testing.T
	provider provider.Interface
	stop     func()

	mu     sync.Mutex
	events []provider.Event
}

func start(t *testing.T, s Subject) *process {
	t.Helper()
	p := &process{t: t, provider: s.New(t)}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = p.provider.Run(ctx, func(e provider.Event) {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.events = append(p.events, e)
		})
	}()
	p.stop = sync.OnceFunc(func() {
		cancel()
		<-done
	})
	t.Cleanup(p.stop)
	return p
}

func (p *process) has(kind provider.EventType, id string) *provider.Event {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.events {
		if p.events[i].Type == kind && p.events[i].ID == id {
			return &p.events[i]
		}
	}
	return nil
}

// eventually polls until what holds.
func (p *process) eventually(what string, holds func() bool) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-ctx.Done():
			p.t.Fatalf("not within %s: %s", patience, what)
		case <-tick.C:
		}
	}
}

func (p *process) launch(r provider.Request) {
	p.t.Helper()
	if err := p.provider.Launch(p.t.Context(), r); err != nil {
		p.t.Fatalf("Launch of %s was not accepted: %v", r.ID, err)
	}
}

func (p *process) terminate(ref provider.Ref) {
	p.t.Helper()
	if err := p.provider.Terminate(p.t.Context(), ref); err != nil {
		p.t.Fatalf("Terminate of %s was not accepted: %v", ref.ID, err)
	}
}

// listed returns the machine from the list, nil if it is not there. A list that fails for now is none.
func (p *process) listed(ref provider.Ref) (instance *provider.Instance, ok bool) {
	instances, err := p.provider.List(p.t.Context(), ref.Cluster)
	if err != nil {
		return nil, false
	}
	for i := range instances {
		if instances[i].ID == ref.ID {
			return &instances[i], true
		}
	}
	return nil, true
}

func (p *process) waitLaunched(r provider.Request) *provider.Instance {
	p.t.Helper()
	var instance *provider.Instance
	p.eventually(r.ID+" is listed as launched", func() bool {
		instance, _ = p.listed(r.Ref)
		return instance != nil && instance.Launched
	})
	return instance
}

func (p *process) waitGone(ref provider.Ref) {
	p.t.Helper()
	p.eventually(ref.ID+" is no longer listed", func() bool {
		instance, ok := p.listed(ref)
		return ok && instance == nil
	})
}

var (
	numberMu sync.Mutex
	number   int
)

// request returns a request for a new machine.
func (s Subject) request() provider.Request {
	numberMu.Lock()
	defer numberMu.Unlock()
	number++
	return provider.Request{
		Ref:      provider.Ref{ID: fmt.Sprintf("conformance-%d-%d", time.Now().UnixNano()%1e9, number), Cluster: s.Cluster},
		Offering: s.Offering, Domain: s.Domain, Allocatable: s.Allocatable,
		Labels: map[string]string{"conformance": "yes"}, RequestedAt: time.Now(),
	}
}

// count is how many machines of these ids the infrastructure has.
func (s Subject) count(t *testing.T, requests ...provider.Request) (n int) {
	existing := s.Existing(t)
	for _, r := range requests {
		for _, id := range existing {
			if id == r.ID {
				n++
			}
		}
	}
	return n
}

// cleanUp ends machines at the end of a test, so that the stock is whole for the next.
func (s Subject) cleanUp(p *process, requests ...provider.Request) {
	p.t.Helper()
	for _, r := range requests {
		p.terminate(r.Ref)
	}
	for _, r := range requests {
		p.waitGone(r.Ref)
	}
	p.eventually("the infrastructure has none of them", func() bool { return s.count(p.t, requests...) == 0 })
}

// Run runs the suite. newSubject is called once per test.
func Run(t *testing.T, newSubject func(t *testing.T, faults Faults) Subject) {
	for _, test := range []struct {
		name   string
		faults Faults
		run    func(t *testing.T, s Subject)
	}{
		{"a launch ends in an event and in the list", Faults{}, launches},
		{"a repeated launch makes one machine", Faults{}, repeats},
		{"a terminated machine is gone, however often it is said", Faults{}, terminates},
		{"a machine that never was ends in Terminated too", Faults{}, terminatesUnknown},
		{"a terminated machine does not come back", Faults{}, staysDead},
		{"a machine can be terminated while it is launched", Faults{Slow: true}, terminatesEarly},
		{"a launch that cannot be had says why", Faults{}, refuses},
		{"a failed launch says why and leaves nothing", Faults{LaunchFailure: "quota exceeded"}, fails},
		{"stock is not oversold", Faults{}, sellsOut},
		{"a restart finds its machines again", Faults{}, restarts},
		{"a launch survives a restart", Faults{Slow: true}, restartsEarly},
		{"a termination survives a restart", Faults{}, restartsEnding},
		{"the list makes up for lost events", Faults{DropEvents: true}, withoutEvents},
		{"doubled events do no harm", Faults{DoubleEvents: true}, launches},
		{"calls may come all at once", Faults{}, concurrent},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, newSubject(t, test.faults)) })
	}
}

func launches(t *testing.T, s Subject) {
	p, r := start(t, s), s.request()
	p.launch(r)
	p.eventually("a Launched event", func() bool { return p.has(provider.Launched, r.ID) != nil })
	event, instance := p.has(provider.Launched, r.ID), p.waitLaunched(r)
	if event.Cluster != s.Cluster || event.ProviderID == "" {
		t.Errorf("the event %+v lacks the cluster or the provider's id", event)
	}
	if instance.ProviderID != event.ProviderID {
		t.Errorf("listed with provider id %q, announced with %q", instance.ProviderID, event.ProviderID)
	}
	if instance.Offering != r.Offering || instance.Domain != r.Domain {
		t.Errorf("listed as %s in %s, want %s in %s", instance.Offering, instance.Domain, r.Offering, r.Domain)
	}
	p.eventually("it exists", func() bool { return s.count(t, r) == 1 })
	s.cleanUp(p, r)
}

func repeats(t *testing.T, s Subject) {
	p, r := start(t, s), s.request()
	var calls sync.WaitGroup
	for range 5 {
		calls.Go(func() { _ = p.provider.Launch(t.Context(), r) })
	}
	calls.Wait()
	p.launch(r)
	p.waitLaunched(r)
	p.launch(r)
	p.eventually("it exists once", func() bool { return s.count(t, r) == 1 })
	s.cleanUp(p, r)
}

func terminates(t *testing.T, s Subject) {
	p, r := start(t, s), s.request()
	p.launch(r)
	p.waitLaunched(r)
	p.eventually("it exists", func() bool { return s.count(t, r) == 1 })
	p.terminate(r.Ref)
	p.terminate(r.Ref)
	p.eventually("a Terminated event", func() bool { return p.has(provider.Terminated, r.ID) != nil })
	p.waitGone(r.Ref)
	p.terminate(r.Ref)
	s.cleanUp(p, r)
}

func terminatesUnknown(t *testing.T, s Subject) {
	p, r := start(t, s), s.request()
	p.terminate(r.Ref)
	p.eventually("a Terminated event", func() bool { return p.has(provider.Terminated, r.ID) != nil })
	p.waitGone(r.Ref)
}

func staysDead(t *testing.T, s Subject) {
	p, r, other := start(t, s), s.request(), s.request()
	p.launch(r)
	p.waitLaunched(r)
	s.cleanUp(p, r)
	p.launch(r)
	// Another machine that comes and goes shows that the late launch has had its chance.
	p.launch(other)
	p.waitLaunched(other)
	s.cleanUp(p, other)
	p.waitGone(r.Ref)
	if s.count(t, r) != 0 {
		t.Error("a terminated machine came back")
	}
}

func terminatesEarly(t *testing.T, s Subject) {
	p, r, other := start(t, s), s.request(), s.request()
	p.launch(r)
	p.terminate(r.Ref)
	p.launch(other)
	p.waitLaunched(other)
	p.waitGone(r.Ref)
	p.eventually("nothing is left of it", func() bool { return s.count(t, r) == 0 })
	s.cleanUp(p, other)
}

func refuses(t *testing.T, s Subject) {
	p, r := start(t, s), s.request()
	r.Offering = "no-such-offering"
	p.launch(r)
	p.eventually("a LaunchFailed event", func() bool { return p.has(provider.LaunchFailed, r.ID) != nil })
	if message := p.has(provider.LaunchFailed, r.ID).Message; message == "" {
		t.Error("the event does not say why")
	}
	p.waitGone(r.Ref)
}

func fails(t *testing.T, s Subject) {
	p, r := start(t, s), s.request()
	p.launch(r)
	p.eventually("a LaunchFailed event", func() bool { return p.has(provider.LaunchFailed, r.ID) != nil })
	if message := p.has(provider.LaunchFailed, r.ID).Message; message == "" {
		t.Error("the event does not say why")
	}
	p.waitGone(r.Ref)
	if s.count(t, r) != 0 {
		t.Error("a machine whose launch failed exists")
	}
}

func sellsOut(t *testing.T, s Subject) {
	p := start(t, s)
	var requests []provider.Request
	for range s.Stock + 2 {
		requests = append(requests, s.request())
		p.launch(requests[len(requests)-1])
	}
	launched, failed := 0, 0
	p.eventually("each launch has an end", func() bool {
		launched, failed = 0, 0
		for _, r := range requests {
			if p.has(provider.Launched, r.ID) != nil {
				launched++
			}
			if p.has(provider.LaunchFailed, r.ID) != nil {
				failed++
			}
		}
		return launched+failed == len(requests)
	})
	if launched != s.Stock || failed != 2 {
		t.Errorf("%d launched and %d failed, want %d and 2", launched, failed, s.Stock)
	}
	s.cleanUp(p, requests...)
}

func restarts(t *testing.T, s Subject) {
	p, r := start(t, s), s.request()
	p.launch(r)
	p.waitLaunched(r)
	p.eventually("it exists", func() bool { return s.count(t, r) == 1 })
	p.stop()
	p = start(t, s)
	before := p.waitLaunched(r)
	if before.Offering != r.Offering || before.Domain != r.Domain || before.ProviderID == "" {
		t.Errorf("after the restart it is listed as %+v", before)
	}
	p.launch(r)
	p.eventually("it exists once", func() bool { return s.count(t, r) == 1 })
	s.cleanUp(p, r)
}

func restartsEarly(t *testing.T, s Subject) {
	p, r := start(t, s), s.request()
	p.launch(r)
	p.stop()
	p = start(t, s)
	p.launch(r)
	p.waitLaunched(r)
	p.eventually("it exists once", func() bool { return s.count(t, r) == 1 })
	s.cleanUp(p, r)
}

func restartsEnding(t *testing.T, s Subject) {
	p, r := start(t, s), s.request()
	p.launch(r)
	p.waitLaunched(r)
	p.eventually("it exists", func() bool { return s.count(t, r) == 1 })
	p.terminate(r.Ref)
	p.stop()
	p = start(t, s)
	p.terminate(r.Ref)
	p.eventually("a Terminated event", func() bool { return p.has(provider.Terminated, r.ID) != nil })
	s.cleanUp(p, r)
}

func withoutEvents(t *testing.T, s Subject) {
	p, r := start(t, s), s.request()
	p.launch(r)
	p.waitLaunched(r)
	p.eventually("it exists", func() bool { return s.count(t, r) == 1 })
	s.cleanUp(p, r)
	if p.has(provider.Launched, r.ID) != nil {
		t.Error("the subject did not drop events as it was told")
	}
}

func concurrent(t *testing.T, s Subject) {
	p := start(t, s)
	var requests []provider.Request
	for range s.Stock {
		requests = append(requests, s.request())
	}
	var calls sync.WaitGroup
	for _, r := range slices.Concat(requests, requests) {
		calls.Go(func() {
			if err := p.provider.Launch(t.Context(), r); err != nil {
				t.Errorf("Launch of %s was not accepted: %v", r.ID, err)
			}
			_, _ = p.provider.List(t.Context(), r.Cluster)
			_, _ = p.provider.Offerings(t.Context())
		})
	}
	calls.Wait()
	for _, r := range requests {
		p.waitLaunched(r)
	}
	p.eventually("all exist once", func() bool { return s.count(t, requests...) == s.Stock })
	s.cleanUp(p, requests...)
}
