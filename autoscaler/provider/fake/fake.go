// Package fake is an in-memory cloud for tests: of the autoscaler, of the conformance suite, and of whoever writes a
// provider. Nothing in it happens by itself: Tick, or Provider.Run, completes what is due by the clock.
//
// Start reading at Cloud.
package fake

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/utils/clock"

	"github.com/drover-sh/drover/autoscaler/provider"
)

// Cloud is the infrastructure: it lives on while provider processes come and go.
type Cloud struct {
	Clock clock.Clock
	// Latency of a launch.
	Latency time.Duration
	// Events decides how often an event is delivered; nil: once.
	Events func(provider.Event) int
	// Unknown clusters are those that the provider is not configured for.
	Unknown map[string]bool
	// Fail returns why a launch fails, or "".
	Fail func(provider.Request) string

	mu        sync.Mutex
	offerings []provider.Offering
	machines  map[string]*machine
	launched  []string
	ended     map[string]bool
	sink      func(provider.Event)
	pending   []provider.Event
}

type machine struct {
	provider.Request
	dueAt            time.Time
	launched, ending bool
}

// NewCloud returns an empty cloud that sells offerings.
func NewCloud(c clock.Clock, offerings ...provider.Offering) *Cloud {
	return &Cloud{Clock: c, offerings: offerings, machines: map[string]*machine{}, ended: map[string]bool{}}
}

// SetOfferings changes what is sold.
func (c *Cloud) SetOfferings(offerings ...provider.Offering) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.offerings = offerings
}

// Launched returns the ids of all machines that were ever launched, in their order.
func (c *Cloud) Launched() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.launched)
}

// Machines returns what exists now, by id.
func (c *Cloud) Machines() []provider.Request {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []provider.Request
	for _, id := range slices.Sorted(maps.Keys(c.machines)) {
		if m := c.machines[id]; m.launched {
			out = append(out, m.Request)
		}
	}
	return out
}

// Vanish makes a machine disappear without a word.
func (c *Cloud) Vanish(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.machines, id)
}

// Tick completes what is due and delivers events.
func (c *Cloud) Tick() {
	c.mu.Lock()
	now := c.Clock.Now()
	for _, id := range slices.Sorted(maps.Keys(c.machines)) {
		m := c.machines[id]
		switch {
		case m.ending:
			c.end(m.Ref)
		case !m.launched && !now.Before(m.dueAt):
			c.complete(m)
		}
	}
	sink, pending := c.sink, c.pending
	if sink != nil {
		c.pending = nil
	}
	c.mu.Unlock()
	if sink == nil {
		return
	}
	for _, event := range pending {
		times := 1
		if c.Events != nil {
			times = c.Events(event)
		}
		for range times {
			sink(event)
		}
	}
}

func (c *Cloud) end(ref provider.Ref) {
	delete(c.machines, ref.ID)
	c.ended[ref.ID] = true
	c.pending = append(c.pending, provider.Event{Type: provider.Terminated, Ref: ref})
}

func (c *Cloud) complete(m *machine) {
	if why := c.refusal(m); why != "" {
		delete(c.machines, m.ID)
		c.pending = append(c.pending, provider.Event{Type: provider.LaunchFailed, Ref: m.Ref, Message: why})
		return
	}
	m.launched = true
	c.launched = append(c.launched, m.ID)
	c.pending = append(c.pending, launchedEvent(m))
}

func launchedEvent(m *machine) provider.Event {
	return provider.Event{Type: provider.Launched, Ref: m.Ref, ProviderID: "fake://" + m.Cluster + "/" + m.ID,
		NodeName: m.ID}
}

func (c *Cloud) refusal(m *machine) string {
	if c.Fail != nil {
		if why := c.Fail(m.Request); why != "" {
			return why
		}
	}
	for _, o := range c.offerings {
		for _, d := range o.Domains {
			if o.Name == m.Offering && d.Name == m.Domain {
				used := int32(0)
				for _, other := range c.machines {
					if other.launched && other.Offering == m.Offering && other.Domain == m.Domain {
						used++
					}
				}
				if used >= d.Available {
					return fmt.Sprintf("all %d nodes of %s in %s are in use", d.Available, m.Offering, m.Domain)
				}
				return ""
			}
		}
	}
	return fmt.Sprintf("%s is not offered in %s", m.Offering, m.Domain)
}

// Provider returns a provider process that uses the cloud. Only the last one gets events.
func (c *Cloud) Provider() *Provider { return &Provider{cloud: c} }

// Provider implements provider.Interface.
type Provider struct{ cloud *Cloud }

var _ provider.Interface = &Provider{}

// Connect makes sink receive the events of Tick, for tests that do without Run.
func (p *Provider) Connect(sink func(provider.Event)) {
	p.cloud.mu.Lock()
	defer p.cloud.mu.Unlock()
	p.cloud.sink = sink
}

// Run implements provider.Interface.
func (p *Provider) Run(ctx context.Context, sink func(provider.Event)) error {
	p.Connect(sink)
	for {
		p.cloud.Tick()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-p.cloud.Clock.After(5 * time.Millisecond):
		}
	}
}

// Launch implements provider.Interface.
func (p *Provider) Launch(_ context.Context, request provider.Request) error {
	c := p.cloud
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.Unknown[request.Cluster] {
		return fmt.Errorf("cluster %q: %w", request.Cluster, provider.ErrUnknownCluster)
	}
	switch m := c.machines[request.ID]; {
	case c.ended[request.ID]:
		c.pending = append(c.pending, provider.Event{Type: provider.Terminated, Ref: request.Ref})
	case m == nil:
		c.machines[request.ID] = &machine{Request: request, dueAt: request.RequestedAt.Add(c.Latency)}
	case m.launched:
		c.pending = append(c.pending, launchedEvent(m))
	}
	return nil
}

// Terminate implements provider.Interface.
func (p *Provider) Terminate(_ context.Context, ref provider.Ref) error {
	c := p.cloud
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.Unknown[ref.Cluster] {
		return fmt.Errorf("cluster %q: %w", ref.Cluster, provider.ErrUnknownCluster)
	}
	if m := c.machines[ref.ID]; m != nil {
		m.ending = true
	} else {
		c.end(ref)
	}
	return nil
}

// List implements provider.Interface.
func (p *Provider) List(_ context.Context, cluster string) ([]provider.Instance, error) {
	c := p.cloud
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []provider.Instance
	for _, id := range slices.Sorted(maps.Keys(c.machines)) {
		if m := c.machines[id]; m.Cluster == cluster {
			instance := provider.Instance{Request: m.Request, Launched: m.launched}
			if m.launched {
				event := launchedEvent(m)
				instance.ProviderID, instance.NodeName = event.ProviderID, event.NodeName
			}
			out = append(out, instance)
		}
	}
	return out, nil
}

// Offerings implements provider.Interface.
func (p *Provider) Offerings(context.Context) ([]provider.Offering, error) {
	p.cloud.mu.Lock()
	defer p.cloud.mu.Unlock()
	return p.cloud.offerings, nil
}
