package kwok

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	"github.com/drover-sh/drover/autoscaler/provider"
)

const (
	// workers bounds the calls to API servers at a time.
	workers = 16
	// pollPeriod is how often the offerings file is looked at.
	pollPeriod = time.Second
	// reorderDelay is how late an event is that is delivered out of order.
	reorderDelay = 300 * time.Millisecond
	// callTimeout bounds one call to an API server: a worker that waits for one that has gone is missing to all clusters.
	callTimeout = 15 * time.Second
	// tombstoneLife is how long a terminated machine is remembered, so that a late request does not bring it back.
	tombstoneLife = time.Hour
)

// Options of a Provider.
type Options struct {
	// OfferingsFile is a YAML file of kind OfferingList.
	OfferingsFile string
	// Clusters by id.
	Clusters map[string]kubernetes.Interface
	// LaunchLatency and RegisterLatency, each multiplied by a factor between 1 and 1+LatencyJitter.
	LaunchLatency, RegisterLatency time.Duration
	LatencyJitter                  float64
	Faults                         configv1alpha1.KWOKFaults
	// Seed of everything random; 0: chosen by New.
	Seed  int64
	Clock clock.WithTicker
	Log   logr.Logger
	// CallTimeout bounds one call to an API server. Default 15 seconds.
	CallTimeout time.Duration
}

// Provider implements provider.Interface.
type Provider struct {
	options  Options
	chance   chance
	clusters map[string]*cluster
	queue    workqueue.TypedRateLimitingInterface[provider.Ref]

	mu sync.Mutex
	// machines by id and cluster: what somebody labels in one cluster says nothing about another's machines.
	machines   map[provider.Ref]*machine
	tombstones map[provider.Ref]time.Time
	offerings  []provider.Offering
	content    string // of the offerings file
	sink       func(provider.Event)
}

var _ provider.Interface = &Provider{}

// cluster is an API server that machines are put into.
type cluster struct {
	id       string
	client   kubernetes.Interface
	factory  informers.SharedInformerFactory
	informer cache.SharedIndexInformer
	// synced is true once the provider has been shown every Node that existed. That is later than when the informer has
	// listed them, and a machine that is not known yet would be taken for lost.
	synced func() bool
}

// machine is what the provider knows of one. It is guarded by Provider.mu.
type machine struct {
	provider.Request
	launchAt, registerAt time.Time
	// launched, then registered: the instance exists, the Node exists.
	launched, registered bool
	// uid of its Node, where that is known.
	uid types.UID
	// lost: its Node will never appear.
	lost bool
	// failed says why the launch failed.
	failed string
	// terminating: it is to be ended.
	terminating bool
	// announce: its last event is to be said again.
	announce bool
}

// FromConfig returns a provider of a configuration; kubeconfigs and offerings are read now.
func FromConfig(cfg *configv1alpha1.KWOKProvider, log logr.Logger) (*Provider, error) {
	options := Options{
		OfferingsFile: cfg.OfferingsFile, Clusters: map[string]kubernetes.Interface{}, LatencyJitter: cfg.LatencyJitter,
		LaunchLatency: cfg.LaunchLatency.Duration, RegisterLatency: cfg.RegisterLatency.Duration,
		Faults: cfg.Faults, Seed: cfg.Seed, Clock: clock.RealClock{}, Log: log,
	}
	for i, c := range cfg.Clusters {
		config, err := restConfig(c.Kubeconfig)
		if err != nil {
			return nil, fmt.Errorf("provider.kwok.clusters[%d].kubeconfig: %q: %w", i, c.Kubeconfig, err)
		}
		client, err := kubernetes.NewForConfig(config)
		if err != nil {
			return nil, fmt.Errorf("provider.kwok.clusters[%d].kubeconfig: %q: %w", i, c.Kubeconfig, err)
		}
		options.Clusters[c.ID] = client
	}
	return New(options)
}

func restConfig(kubeconfig string) (*rest.Config, error) {
	config, err := rest.InClusterConfig()
	if kubeconfig != "" {
		config, err = clientcmd.BuildConfigFromFlags("", kubeconfig)
	}
	if err != nil {
		return nil, err
	}
	config = rest.AddUserAgent(config, "drover-autoscaler")
	config.QPS, config.Burst = 300, 600
	config.ContentType = "application/vnd.kubernetes.protobuf"
	return config, nil
}

// New returns a provider. A wrong offerings file is an error now; later it is logged, and the last good one stays in
// force.
func New(options Options) (*Provider, error) {
	if options.CallTimeout == 0 {
		options.CallTimeout = callTimeout
	}
	if options.Seed == 0 {
		options.Seed = rand.Int64()
	}
	p := &Provider{options: options, chance: chance{options.Seed}, clusters: map[string]*cluster{},
		machines: map[provider.Ref]*machine{}, tombstones: map[provider.Ref]time.Time{}}
	var err error
	if p.content, p.offerings, err = readOfferings(options.OfferingsFile, ""); err != nil {
		return nil, err
	}
	p.queue = workqueue.NewTypedRateLimitingQueueWithConfig(
		workqueue.NewTypedItemExponentialFailureRateLimiter[provider.Ref](100*time.Millisecond, 30*time.Second),
		workqueue.TypedRateLimitingQueueConfig[provider.Ref]{Name: "kwok", Clock: options.Clock})
	for id, client := range options.Clusters {
		c := &cluster{id: id, client: client}
		c.factory = informers.NewSharedInformerFactoryWithOptions(client, 0,
			informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.LabelSelector = LabelMachine }),
			informers.WithTransform(strip))
		c.informer = c.factory.Core().V1().Nodes().Informer()
		registration, err := c.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc:    func(obj any) { p.nodeSeen(c, obj) },
			DeleteFunc: func(obj any) { p.nodeGone(c, obj) },
		})
		if err != nil {
			return nil, fmt.Errorf("watching the nodes of cluster %q: %w", id, err)
		}
		c.synced = registration.HasSynced
		p.clusters[id] = c
	}
	return p, nil
}

// strip keeps what requestOf reads.
func strip(obj any) (any, error) {
	if n, is := obj.(*corev1.Node); is {
		n.ManagedFields = nil
		n.Status = corev1.NodeStatus{Allocatable: n.Status.Allocatable}
	}
	return obj, nil
}

// Run implements provider.Interface.
func (p *Provider) Run(ctx context.Context, sink func(provider.Event)) error {
	p.mu.Lock()
	p.sink = sink
	p.mu.Unlock()
	var running sync.WaitGroup
	for _, c := range p.clusters {
		c.factory.Start(ctx.Done())
	}
	for range workers {
		running.Go(func() {
			for p.work(ctx) {
			}
		})
	}
	running.Go(func() { p.poll(ctx) })
	<-ctx.Done()
	p.queue.ShutDown()
	running.Wait()
	for _, c := range p.clusters {
		c.factory.Shutdown()
	}
	return ctx.Err()
}

// poll follows the offerings file, and forgets old tombstones.
func (p *Provider) poll(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.options.Clock.After(pollPeriod):
		}
		p.mu.Lock()
		content, offerings, err := readOfferings(p.options.OfferingsFile, p.content)
		p.content = content
		if offerings != nil {
			p.offerings = offerings
		}
		now := p.options.Clock.Now()
		maps.DeleteFunc(p.tombstones, func(_ provider.Ref, at time.Time) bool { return now.Sub(at) > tombstoneLife })
		p.mu.Unlock()
		if err != nil {
			p.options.Log.Error(err, "The offerings stay as they were")
		}
		if offerings != nil {
			p.options.Log.Info("The offerings have changed", "file", p.options.OfferingsFile)
			p.deliver(provider.Event{Type: provider.InventoryChanged})
		}
	}
}

// Launch implements provider.Interface.
func (p *Provider) Launch(_ context.Context, request provider.Request) error {
	if p.clusters[request.Cluster] == nil {
		return unknownCluster(request.Cluster)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	m := p.machines[request.Ref]
	if m == nil {
		m = p.newMachine(request)
		_, m.terminating = p.tombstones[request.Ref]
	}
	m.announce = true
	p.queue.Add(request.Ref)
	return nil
}

// newMachine remembers a machine. The caller holds the lock.
func (p *Provider) newMachine(request provider.Request) *machine {
	o, id := &p.options, request.ID
	m := &machine{Request: request, lost: p.chance.happens(o.Faults.LoseMachine, id, "lose")}
	m.launchAt = request.RequestedAt.Add(p.chance.latency(o.LaunchLatency, o.LatencyJitter, id, "launch"))
	m.registerAt = m.launchAt.Add(p.chance.latency(o.RegisterLatency, o.LatencyJitter, id, "register"))
	p.machines[request.Ref] = m
	return m
}

// Terminate implements provider.Interface.
func (p *Provider) Terminate(_ context.Context, ref provider.Ref) error {
	if p.clusters[ref.Cluster] == nil {
		return unknownCluster(ref.Cluster)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	m := p.machines[ref]
	if m == nil {
		m = p.newMachine(provider.Request{Ref: ref})
	}
	m.terminating = true
	p.queue.Add(ref)
	return nil
}

func unknownCluster(id string) error {
	return fmt.Errorf("cluster %q is not listed in provider.kwok.clusters: %w", id, provider.ErrUnknownCluster)
}

// errNotSynced: the Nodes of a cluster are not known yet.
var errNotSynced = errors.New("the cluster's nodes are not listed yet")

// List implements provider.Interface.
func (p *Provider) List(_ context.Context, clusterID string) ([]provider.Instance, error) {
	c := p.clusters[clusterID]
	if c == nil {
		return nil, unknownCluster(clusterID)
	}
	if !c.synced() {
		return nil, fmt.Errorf("cluster %q: %w", clusterID, errNotSynced)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []provider.Instance
	for _, m := range p.machines {
		if m.Cluster != clusterID || m.failed != "" || m.terminating && !m.launched && !m.registered {
			continue
		}
		instance := provider.Instance{Request: m.Request, Launched: m.launched || m.registered}
		if instance.Launched {
			instance.ProviderID, instance.NodeName = ProviderID(m.Ref), nodeName(m.Ref)
		}
		out = append(out, instance)
	}
	slices.SortFunc(out, func(a, b provider.Instance) int { return strings.Compare(a.ID, b.ID) })
	return out, nil
}

// Offerings implements provider.Interface.
func (p *Provider) Offerings(context.Context) ([]provider.Offering, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.offerings, nil
}
