package kwok

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/tools/cache"

	"github.com/drover-sh/drover/autoscaler/provider"
)

// work takes one machine from the queue. It returns false at the end.
func (p *Provider) work(ctx context.Context) bool {
	ref, shutdown := p.queue.Get()
	if shutdown {
		return false
	}
	defer p.queue.Done(ref)
	again, err := p.reconcile(ctx, ref)
	switch {
	case err != nil && ctx.Err() == nil:
		p.options.Log.Error(err, "Working on a machine; it is tried again", "machine", ref.ID, "cluster", ref.Cluster)
		p.queue.AddRateLimited(ref)
	case again > 0:
		p.queue.Forget(ref)
		p.queue.AddAfter(ref, again)
	default:
		p.queue.Forget(ref)
	}
	return true
}

// reconcile brings one machine a step further and returns when to look again. A machine is in the hands of one worker
// at a time; the lock is for what callers and informers read and write meanwhile.
func (p *Provider) reconcile(ctx context.Context, ref provider.Ref) (again time.Duration, err error) {
	p.mu.Lock()
	m := p.machines[ref]
	if m == nil {
		p.mu.Unlock()
		return 0, nil
	}
	c := p.clusters[m.Cluster]
	if !c.synced() {
		p.mu.Unlock()
		return 100 * time.Millisecond, nil
	}
	if m.terminating {
		p.mu.Unlock()
		return 0, p.terminate(ctx, c, m)
	}
	now := p.options.Clock.Now()
	if wait := m.launchAt.Sub(now); !m.launched && wait > 0 {
		p.mu.Unlock()
		return wait, nil
	}
	if !m.launched && m.failed == "" {
		m.failed = p.refusal(m)
		m.launched = m.failed == ""
		m.announce = true
	}
	event := provider.Event{Type: provider.Launched, Ref: m.Ref, ProviderID: ProviderID(m.Ref), NodeName: nodeName(m.Ref)}
	if m.failed != "" {
		event = provider.Event{Type: provider.LaunchFailed, Ref: m.Ref, Message: m.failed}
	}
	announce := m.announce
	m.announce = false
	wait := m.registerAt.Sub(now)
	done := m.failed != "" || m.lost || m.registered
	request := m.Request
	p.mu.Unlock()

	if announce {
		p.emit(ctx, event)
	}
	switch {
	case done:
		return 0, nil
	case wait > 0:
		return wait, nil
	}
	return 0, p.register(ctx, c, m, request)
}

// refusal says why a launch fails, or "". The caller holds the lock.
func (p *Provider) refusal(m *machine) string {
	if m.registered {
		return ""
	}
	if p.chance.happens(p.options.Faults.FailLaunch, m.ID, "fail") {
		return fmt.Sprintf("the simulated cloud refuses to launch %s in %s", m.Offering, m.Domain)
	}
	for _, o := range p.offerings {
		for _, d := range o.Domains {
			if o.Name != m.Offering || d.Name != m.Domain {
				continue
			}
			var used int32
			for _, other := range p.machines {
				if other.launched && other.Offering == m.Offering && other.Domain == m.Domain {
					used++
				}
			}
			if used >= d.Available {
				return fmt.Sprintf("insufficient capacity: all %d nodes of %s in %s are in use", d.Available, m.Offering, m.Domain)
			}
			return ""
		}
	}
	return fmt.Sprintf("%s is not offered in %s", m.Offering, m.Domain)
}

// errTaken: there is a Node of that name, and it is not the machine's.
var errTaken = errors.New("a node that the provider did not make has the name")

// register makes the Node. That it exists already is as good.
func (p *Provider) register(ctx context.Context, c *cluster, m *machine, request provider.Request) error {
	ctx, cancel := context.WithTimeout(ctx, p.options.CallTimeout)
	defer cancel()
	made, err := c.client.CoreV1().Nodes().Create(ctx, node(request), metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		if made, err = c.find(ctx, request.Ref); err == nil && made == nil {
			err = errTaken
		}
	}
	if err != nil {
		return fmt.Errorf("creating node %s in cluster %q: %w", nodeName(request.Ref), c.id, err)
	}
	p.mu.Lock()
	m.registered, m.uid = true, made.UID
	again := m.terminating
	p.mu.Unlock()
	if again {
		p.queue.Add(m.Ref)
	}
	return nil
}

// find asks the API server itself for a machine's Node; nil where there is none.
func (c *cluster) find(ctx context.Context, ref provider.Ref) (*corev1.Node, error) {
	list, err := c.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{LabelSelector: LabelMachine + "=" + ref.ID,
		FieldSelector: fields.OneTermEqualSelector("metadata.name", nodeName(ref)).String()})
	if err != nil || len(list.Items) == 0 {
		return nil, err
	}
	return &list.Items[0], nil
}

// terminate deletes the Node, if there is one, and forgets the machine.
func (p *Provider) terminate(ctx context.Context, c *cluster, m *machine) error {
	if err := p.deleteNode(ctx, c, m); err != nil {
		return fmt.Errorf("deleting node %s in cluster %q: %w", nodeName(m.Ref), c.id, err)
	}
	p.mu.Lock()
	delete(p.machines, m.Ref)
	p.tombstones[m.Ref] = p.options.Clock.Now()
	p.mu.Unlock()
	p.emit(ctx, provider.Event{Type: provider.Terminated, Ref: m.Ref})
	return nil
}

// deleteNode deletes the machine's own Node and no other of that name.
func (p *Provider) deleteNode(ctx context.Context, c *cluster, m *machine) error {
	ctx, cancel := context.WithTimeout(ctx, p.options.CallTimeout)
	defer cancel()
	p.mu.Lock()
	uid := m.uid
	p.mu.Unlock()
	if uid == "" {
		n, err := c.find(ctx, m.Ref)
		if err != nil || n == nil {
			return err
		}
		uid = n.UID
	}
	err := c.client.CoreV1().Nodes().Delete(ctx, nodeName(m.Ref), metav1.DeleteOptions{
		Preconditions: &metav1.Preconditions{UID: &uid}})
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case apierrors.IsConflict(err):
		// Another Node has the name now. Whose it is, the next attempt asks.
		p.mu.Lock()
		m.uid = ""
		p.mu.Unlock()
	}
	return err
}

// nodeSeen finds a machine again after a restart.
func (p *Provider) nodeSeen(c *cluster, obj any) {
	n, is := obj.(*corev1.Node)
	if !is || n.Name != nodeName(provider.Ref{ID: n.Labels[LabelMachine], Cluster: c.id}) {
		return // labelled by somebody else
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	request := requestOf(c.id, n)
	m := p.machines[request.Ref]
	if m == nil {
		if _, ended := p.tombstones[request.Ref]; ended {
			return // an old view of what has been deleted
		}
		m = p.newMachine(request)
	}
	m.launched, m.registered, m.failed, m.uid = true, true, "", n.UID
	if m.Offering == "" {
		m.Request = request
	}
}

// nodeGone: somebody else deleted the Node. The machine went with it.
func (p *Provider) nodeGone(c *cluster, obj any) {
	if stale, is := obj.(cache.DeletedFinalStateUnknown); is {
		obj = stale.Obj
	}
	n, is := obj.(*corev1.Node)
	if !is {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	ref := provider.Ref{ID: n.Labels[LabelMachine], Cluster: c.id}
	if m := p.machines[ref]; m != nil && m.registered && m.uid == n.UID {
		m.terminating = true
		p.queue.Add(ref)
	}
}

// emit delivers an event, or does to it what the faults say.
func (p *Provider) emit(ctx context.Context, event provider.Event) {
	faults, question := p.options.Faults, string(event.Type)
	switch {
	case p.chance.happens(faults.DropEvent, event.ID, "drop"+question):
		p.options.Log.V(1).Info("Dropped an event on purpose", "machine", event.ID, "event", event.Type)
		return
	case p.chance.happens(faults.ReorderEvent, event.ID, "reorder"+question):
		go func() {
			select {
			case <-ctx.Done():
			case <-p.options.Clock.After(reorderDelay):
				p.deliver(event)
			}
		}()
		return
	case p.chance.happens(faults.DuplicateEvent, event.ID, "double"+question):
		p.deliver(event)
	}
	p.deliver(event)
}

func (p *Provider) deliver(event provider.Event) {
	p.mu.Lock()
	sink := p.sink
	p.mu.Unlock()
	if sink != nil {
		sink(event)
	}
}
