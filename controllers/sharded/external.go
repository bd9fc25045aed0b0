package sharded

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/wire"
)

// A Cache is what a process itself keeps of one resource: all objects of the cluster, and not only those of its share.
type Cache interface {
	// Reach waits until the cache shows everything that had been written before the call, and returns a resourceVersion up to
	// which it shows all. What has been deleted may still be there.
	Reach(ctx context.Context) (version string, err error)
	// Version returns the resourceVersion up to which the cache shows all by itself, "" if it does not know.
	Version() string
}

// A Resource of a Membership: the process's cache of it, and what is read while an object of it is worked on.
type Resource struct {
	Cache Cache
	Reads []schema.GroupResource
}

// A Membership makes a process a member of a WatchGroup that is no controller and has caches of its own, as a scheduler
// has. It drives the same machine as a Group; only nothing is listed or watched for it, nothing is reconciled, and no
// write goes through a client of the Group: the process asks Begin before it works in a Virtual Node, and sends what it
// writes by Work.Send.
//
// Its methods may be called by any goroutine, and none but Run and Work.Send blocks.
type Membership struct {
	group  *Group
	member *member

	mu      sync.Mutex
	peers   map[string]sharding.Slice
	changed chan struct{} // closed, and replaced, when a peer's slice changes
}

// NewMembership reads the WatchGroup, whose resources have to be those that the process has caches of. Errors name the
// option or the field of the WatchGroup.
func NewMembership(config *rest.Config, o Options, resources map[schema.GroupResource]Resource) (*Membership, error) {
	g := New(o)
	if err := g.options.validate(); err != nil {
		return nil, err
	}
	free := rest.CopyConfig(config) // Leases and handoffs do not wait for anybody's budget
	free.RateLimiter, free.QPS = nil, -1
	free.ContentType, free.AcceptContentTypes = "", ""
	httpClient, err := rest.HTTPClientFor(free)
	if err != nil {
		return nil, err
	}
	mapper, err := apiutil.NewDynamicRESTMapper(free, httpClient)
	if err != nil {
		return nil, err
	}
	m := &Membership{group: g, peers: make(map[string]sharding.Slice), changed: make(chan struct{})}
	g.membership = m
	group, err := g.connect(free, cache.Options{HTTPClient: httpClient, Mapper: mapper})
	if err != nil {
		return nil, err
	}
	spec := group.Spec.WithDefaults()
	kinds, err := kindsOfMembership(spec, resources)
	policy := wire.LeasePolicy(spec)
	if err := errors.Join(err, policy.Validate("spec.lease.")); err != nil {
		return nil, fmt.Errorf("WatchGroup %s: %w", g.key, err)
	}
	m.member = newMember(memberConfig{
		id: g.options.Member, v: int(spec.VirtualNodes), mapping: byLabel{wire.Buckets(spec)}, policy: policy, clock: bootTime,
		record: g.options.Record, metrics: newMemberMetrics(g.key.Name, g.options.Member), log: g.log,
	}, kinds)
	g.member = m.member
	m.member.resyncs = &resyncs{member: m.member, when: Resync{Period: -1}, clock: clock.RealClock{}}
	for gr, r := range resources {
		for _, read := range r.Reads {
			if err := g.depend(m.member.kinds[wire.Resource(gr)], []*kind{m.member.kinds[wire.Resource(read)]}); err != nil {
				return nil, err
			}
		}
	}
	return m, nil
}

func kindsOfMembership(spec lbv1alpha1.WatchGroupSpec, resources map[schema.GroupResource]Resource) ([]*kind, error) {
	if spec.Handoff != lbv1alpha1.HandoffExclusive {
		return nil, fmt.Errorf("spec.handoff: %q: these members need %q", spec.Handoff, lbv1alpha1.HandoffExclusive)
	}
	if spec.Selector != lbv1alpha1.SelectorLabels {
		return nil, fmt.Errorf("spec.selector: %q: these members select nothing, and need %q", spec.Selector, lbv1alpha1.SelectorLabels)
	}
	left := maps.Clone(resources)
	var kinds []*kind
	for i, res := range spec.Resources {
		gr := schema.GroupResource{Group: res.Group, Resource: res.Resource}
		r, ok := left[gr]
		if !ok {
			return nil, fmt.Errorf("spec.resources[%d]: %q is not one of %s", i, gr, namesOf(resources))
		}
		delete(left, gr)
		// The kind's name is never looked up: no object goes through this package.
		kinds = append(kinds, &kind{resource: wire.Resource(gr), gvk: gr.WithVersion("").GroupVersion().WithKind(gr.Resource),
			external: r.Cache})
	}
	if len(left) > 0 {
		return nil, fmt.Errorf("spec.resources: %s is missing", namesOf(left))
	}
	return kinds, nil
}

func namesOf(resources map[schema.GroupResource]Resource) string {
	var names []string
	for gr := range resources {
		names = append(names, fmt.Sprintf("%q", gr))
	}
	slices.Sort(names)
	return fmt.Sprint(names)
}

// RegisterMetrics registers the metrics of this package, which controller-runtime's registry has already, in another one.
func RegisterMetrics(r prometheus.Registerer) error {
	for _, c := range collectors {
		var again prometheus.AlreadyRegisteredError
		if err := r.Register(c); err != nil && !errors.As(err, &again) {
			return err
		}
	}
	return nil
}

// Run keeps the process a member until ctx ends, then leaves, and returns when others have what it had, or after
// Options.LeaveTimeout. The caches have to be kept up meanwhile.
func (m *Membership) Run(ctx context.Context) error { return m.group.run(ctx) }

// Member returns the process's name in the group.
func (m *Membership) Member() string { return m.member.id }

// VirtualNodes returns V.
func (m *Membership) VirtualNodes() int { return m.member.v }

// Session returns the member's present session, "" before Run.
func (m *Membership) Session() string {
	if !m.running() {
		return ""
	}
	return m.member.session()
}

func (m *Membership) running() bool {
	select {
	case <-m.member.started:
		return true
	default:
		return false
	}
}

// Serving is what a member may work in.
type Serving struct {
	// VNs are the Virtual Nodes that the member owns and whose caches show all that their last owner wrote. There are none
	// while it does not hold its Lease.
	VNs sharding.Set
	// Gains are how it came by them, in ascending order.
	Gains []Gain
	// Last is the number of the last gain there ever was, 0 before the first.
	Last uint64
}

// A Gain is some Virtual Nodes that a member has come to serve at the same time, and serves since. A Virtual Node that is
// lost and comes back has a new number.
type Gain struct {
	No  uint64
	VNs sharding.Set
}

// Serving returns what the member may work in now.
func (m *Membership) Serving() Serving {
	e := m.member
	e.mu.RLock()
	defer e.mu.RUnlock()
	if e.m == nil || !e.fence.Holds(e.clock()) {
		return Serving{Last: e.gained}
	}
	return Serving{VNs: e.ready, Gains: slices.Clone(e.gains), Last: e.gained}
}

// gain numbers what has come to be served; ready has been set.
func (e *member) gain(vns sharding.Set) {
	for i := range e.gains {
		e.gains[i].VNs = e.gains[i].VNs.Intersect(e.ready).Minus(vns)
	}
	e.gains = slices.DeleteFunc(e.gains, func(g Gain) bool { return g.VNs.Empty() })
	if !vns.Empty() {
		e.gained++
		e.gains = append(e.gains, Gain{No: e.gained, VNs: vns})
	}
}

// Draining returns the Virtual Nodes that the member is asked to give up, and that it has not let go of.
func (m *Membership) Draining() sharding.Set {
	e := m.member
	e.mu.RLock()
	defer e.mu.RUnlock()
	if e.m == nil || e.slice.Session != e.m.Session() {
		return nil
	}
	return e.slice.Held().Minus(e.slice.Owned)
}

// Peers returns the slices of all members of the group, this one's included, by member, as they were last seen.
func (m *Membership) Peers() map[string]sharding.Slice {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.peers)
}

// Changed returns channels of which one is closed when Serving, Draining or Peers may return something else. They are asked
// for before the values that the caller goes by.
func (m *Membership) Changed() (own, peers <-chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.member.mu.RLock()
	defer m.member.mu.RUnlock()
	return m.member.changed, m.changed
}

// Ready returns why the member is not serving, nil if it is.
func (m *Membership) Ready() error { return m.group.Ready(nil) }

// peerSeen takes in a slice of the group.
func (m *Membership) peerSeen(s sharding.Slice, gone bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if c, err := compareVersions(sharding.Version(s.Version), sharding.Version(m.peers[s.Member].Version)); err == nil && c < 0 {
		return
	}
	if gone {
		delete(m.peers, s.Member)
	} else {
		m.peers[s.Member] = s
	}
	close(m.changed)
	m.changed = make(chan struct{})
}

// Progressed tells that the caches have come further. It may be called at every event.
func (m *Membership) Progressed() {
	e := m.member
	e.mu.RLock()
	waits := e.m != nil && len(e.arrivals) > 0
	e.mu.RUnlock()
	if !waits {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.m != nil {
		e.flush()
		e.pump()
	}
}

// flushExternal tells the machine how far a cache has come that somebody else fills. After Reach that may be less than the
// machine knows already.
func (e *member) flushExternal(k *kind) {
	version := sharding.Version(k.external.Version())
	if c, err := compareVersions(version, k.confirmed); version == "" || (k.confirmed != "" && err == nil && c <= 0) {
		return
	}
	k.confirmed = version
	if err := e.m.Progressed(k.resource, e.m.Cached(k.resource), version); err != nil {
		e.log.Error(err, "progress refused", "resource", k.resource, "version", version)
	}
}

// Begin gives the right to work on an object of a resource in a Virtual Node, or says why not: ErrNotOwned, ErrBlocked or
// ErrFenced. The Virtual Node is not given up before Work.End.
func (m *Membership) Begin(gr schema.GroupResource, vn sharding.VirtualNode) (*Work, error) {
	e := m.member
	k := e.kinds[wire.Resource(gr)]
	if k == nil {
		return nil, fmt.Errorf("WatchGroup %s: %q is not one of its resources", m.group.key, gr)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.m == nil {
		return nil, errNotStarted
	}
	j, err := e.beginIn(k, vn)
	if err != nil {
		return nil, err
	}
	w := &Work{job: j}
	for _, g := range e.gains {
		if g.VNs.Has(vn) {
			w.gain = g.No
		}
	}
	return w, nil
}

// Work is the right to work in one Virtual Node, from Begin to End. It is used by one goroutine at a time.
type Work struct {
	job  *job
	gain uint64
}

// Gain returns the number of the gain by which the member serves the Virtual Node. Whoever decided something about it before
// that gain did so as somebody who has lost it since.
func (w *Work) Gain() uint64 { return w.gain }

// Session returns the member's session that the right belongs to.
func (w *Work) Session() string { return w.job.session }

// VirtualNode returns where the right is.
func (w *Work) VirtualNode() sharding.VirtualNode { return w.job.ticket.VN }

// Send calls send if the member may write now, with a context that ends after the policy's RequestTimeout. Where what send
// returns leaves open whether the write was carried out, the next owner of the Virtual Node waits, and looks for itself.
func (w *Work) Send(ctx context.Context, send func(context.Context) error) error {
	e := w.job.member
	sentAt, err := e.mayWrite(w.job)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, e.policy.RequestTimeout)
	defer cancel()
	err = send(ctx)
	e.answered(w.job, sentAt, result{kind: w.job.kind, later: true, err: err})
	return err
}

// Refused reports whether an error of a write says that the API server did not carry it out.
func Refused(err error) bool {
	return refused(err) || errors.Is(err, ErrFenced) || errors.Is(err, ErrNotOwned)
}

// Wrote tells the version that a write to an object of a resource has made. The next owner waits until its cache shows it.
func (w *Work) Wrote(gr schema.GroupResource, version string) {
	e := w.job.member
	e.mu.Lock()
	defer e.mu.Unlock()
	e.wrote(w.job, wire.Resource(gr), sharding.Version(version))
}

// WroteUnseen tells that a write was made whose version nobody will tell.
func (w *Work) WroteUnseen() {
	e := w.job.member
	e.mu.Lock()
	defer e.mu.Unlock()
	e.blind(w.job, e.clock())
}

// End gives the right back.
func (w *Work) End() { w.job.end(false) }

// confirm answers a fetch of a kind whose cache somebody else fills: everything is watched already, so it takes no list,
// only the certainty that nothing is on its way.
func (e *member) confirm(k *kind, f sharding.Fetch) {
	life, delay := e.life, e.delay(k)
	go func() {
		var version string
		err := context.Canceled
		if sleep(life, delay) {
			version, err = k.external.Reach(life)
		}
		e.mu.Lock()
		defer e.mu.Unlock()
		if life.Err() != nil {
			return
		}
		if err == nil {
			_, err = e.m.Listed(f, sharding.Version(version))
			k.confirmed = sharding.Version(version)
		}
		if err != nil {
			e.log.V(1).Info("cache not confirmed", "resource", k.resource, "error", err.Error())
			e.m.ListFailed(f)
			k.backoff.Step()
		} else {
			k.backoff = newBackoff()
		}
		e.pump()
	}()
}
