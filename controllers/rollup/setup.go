package rollup

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	fleetpb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
)

// Rights in the whole cluster: demand is read, identity and drains are written on nodes, pods leave by eviction only.
// +kubebuilder:rbac:groups=fleet.lucy.sh,resources=capacityrequests,verbs=list;watch
// +kubebuilder:rbac:groups=fleet.lucy.sh,resources=capacityrequests/status,verbs=patch
// +kubebuilder:rbac:groups="",resources=pods,verbs=list;watch
// +kubebuilder:rbac:groups="",resources=pods/eviction,verbs=create
// +kubebuilder:rbac:groups="",resources=nodes,verbs=list;watch;patch
// +kubebuilder:rbac:groups=apps,resources=daemonsets,verbs=list;watch
// +kubebuilder:rbac:groups=events.k8s.io,resources=events,verbs=create;patch
// Rights in the system namespace.
// +kubebuilder:rbac:groups=fleet.lucy.sh,namespace=fleet-system,resources=upcomingnodes;availablecapacities,verbs=list;watch;create;patch;delete
// +kubebuilder:rbac:groups=fleet.lucy.sh,namespace=fleet-system,resources=upcomingnodes/status;availablecapacities/status,verbs=patch

// What the manager around the controllers needs: leader election, and the check of who may read metrics. A creation cannot be
// bound to a name.
// +kubebuilder:rbac:groups=coordination.k8s.io,namespace=fleet-system,resources=leases,verbs=create
// +kubebuilder:rbac:groups=coordination.k8s.io,namespace=fleet-system,resources=leases,resourceNames=drover-manager,verbs=get;update
// +kubebuilder:rbac:groups="",namespace=fleet-system,resources=events,verbs=create;patch
// +kubebuilder:rbac:groups=authentication.k8s.io,resources=tokenreviews,verbs=create
// +kubebuilder:rbac:groups=authorization.k8s.io,resources=subjectaccessreviews,verbs=create

// Indexes of the cache.
const (
	indexNodeMachine    = "drover.rollup/machine"
	indexNodeProviderID = "drover.rollup/provider-id"
	indexPodNode        = "drover.rollup/node"
)

const (
	machineWorkers = 8
	hintWorkers    = 2
	drainWorkers   = 8

	// defaultSilence is how long the feed may be quiet. The autoscaler repeats its state on a period well below.
	defaultSilence = 2 * time.Minute
	// evictionTimeout bounds one call of the Eviction API.
	evictionTimeout = 5 * time.Second
	// holdDrained is how long a drained node whose instruction is gone is given to disappear.
	holdDrained = time.Minute
)

// Options are what the operator needs beside its manager.
type Options struct {
	// Config has its defaults filled and is valid.
	Config *configv1alpha1.ManagerConfiguration
	// Conn reaches the autoscaler; Dial makes one. It need not be up, now or ever.
	Conn grpc.ClientConnInterface
	// Clock drives debounce, periods, back-off and drains. Default: the real one. The pause before a controller looks at an
	// object again is always real time.
	Clock clock.WithTicker
	// Registerer takes the metrics. Default: controller-runtime's registry.
	Registerer prometheus.Registerer
	// Random gives numbers in [0, 1) for jitter. Default: math/rand.
	Random func() float64
	// Silence ends a feed on which nothing came for that long. Default two minutes.
	Silence time.Duration
	// HoldDrained is how long a drained node is held after its instruction vanished. Default one minute.
	HoldDrained time.Duration
}

// Setup adds the operator to a manager whose cache was made with CacheOptions. Everything that acts runs on the leader
// only; the roll-up itself is kept up to date on every replica.
func Setup(ctx context.Context, mgr manager.Manager, opts Options) error {
	opts.setDefaults()
	metrics, err := NewMetrics(opts.Registerer)
	if err != nil {
		return fmt.Errorf("registering metrics: %w", err)
	}
	if err := addIndexes(ctx, mgr.GetFieldIndexer()); err != nil {
		return err
	}
	demand := newDemand(capacity.DemandMode(opts.Config.Demand))
	if err := demand.watch(ctx, mgr.GetCache()); err != nil {
		return err
	}
	if err := mgr.AddReadyzCheck("rollup", func(*http.Request) error {
		if !demand.synced() {
			return errors.New("the caches have not synced")
		}
		return nil
	}); err != nil {
		return fmt.Errorf("adding the readiness check: %w", err)
	}
	if err := addSender(mgr, opts, demand, metrics); err != nil {
		return err
	}
	return addFeed(mgr, opts, metrics)
}

func (o *Options) setDefaults() {
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	if o.Registerer == nil {
		o.Registerer = ctrlmetrics.Registry
	}
	if o.Random == nil {
		o.Random = rand.Float64
	}
	if o.Silence == 0 {
		o.Silence = defaultSilence
	}
	if o.HoldDrained == 0 {
		o.HoldDrained = holdDrained
	}
}

func (o *Options) newBackoff() backoff {
	return backoff{base: o.Config.Autoscaler.BackoffBase.Duration, max: o.Config.Autoscaler.BackoffMax.Duration, random: o.Random}
}

func addIndexes(ctx context.Context, indexer client.FieldIndexer) error {
	for _, index := range []struct {
		object client.Object
		field  string
		value  func(client.Object) string
	}{
		{&corev1.Node{}, indexNodeMachine, func(o client.Object) string { return o.GetLabels()[fleetv1alpha1.LabelMachine] }},
		{&corev1.Node{}, indexNodeProviderID, func(o client.Object) string { return o.(*corev1.Node).Spec.ProviderID }},
		{&corev1.Pod{}, indexPodNode, func(o client.Object) string { return o.(*corev1.Pod).Spec.NodeName }},
	} {
		if err := indexer.IndexField(ctx, index.object, index.field, func(o client.Object) []string {
			if v := index.value(o); v != "" {
				return []string{v}
			}
			return nil
		}); err != nil {
			return fmt.Errorf("indexing %T by %s: %w", index.object, index.field, err)
		}
	}
	return nil
}

func addSender(mgr manager.Manager, opts Options, demand *demand, metrics *Metrics) error {
	cfg := opts.Config.RollUp
	log := mgr.GetLogger().WithName("rollup")
	acks := newAcknowledger(mgr.GetClient(), demand, int(cfg.AcknowledgeConcurrency), metrics, log)
	s := &sender{
		clusterID: opts.Config.ClusterID, session: string(uuid.NewUUID()), demand: demand,
		client: fleetpb.NewInfrastructureAutoscalerClient(opts.Conn), acks: acks, clock: opts.Clock,
		backoff: opts.newBackoff(), metrics: metrics, log: log,
		debounce: cfg.Debounce.Duration, period: cfg.Period.Duration, timeout: cfg.Timeout.Duration,
	}
	return errors.Join(mgr.Add(acks), mgr.Add(s))
}

// operator is the downward half, wired.
type operator struct {
	feed     *feed
	reports  *reporter
	machines *machineReconciler
	hints    *hintReconciler
	chooser  *chooser
	drains   *drainReconciler
	verdicts *verdicts

	machineTrigger, hintTrigger, chooseTrigger, drainTrigger *trigger
}

// chooseKey is the one key of the chooser: a pass looks at everything.
const chooseKey = "reclaim"

func addFeed(mgr manager.Manager, opts Options, metrics *Metrics) error {
	feedClient := fleetpb.NewCapacityFeedClient(opts.Conn)
	c, namespace := mgr.GetClient(), opts.Config.Namespace
	cfg := opts.Config.Reclaim
	log := mgr.GetLogger()
	o := &operator{
		machineTrigger: &trigger{}, hintTrigger: &trigger{}, chooseTrigger: &trigger{}, drainTrigger: &trigger{},
	}
	o.feed = &feed{
		clusterID: opts.Config.ClusterID, client: feedClient, clock: opts.Clock, backoff: opts.newBackoff(),
		metrics: metrics, log: log.WithName("feed"), silence: opts.Silence, onState: o.onState,
	}
	o.reports = newReporter()
	o.reports.clusterID, o.reports.client, o.reports.clock = opts.Config.ClusterID, feedClient, opts.Clock
	o.reports.backoff, o.reports.timeout = opts.newBackoff(), opts.Config.RollUp.Timeout.Duration
	o.reports.metrics, o.reports.log = metrics, log.WithName("reports")
	o.reports.onAcknowledged = func(ids []string) { o.machineTrigger.add(ids...) }

	o.machines = &machineReconciler{client: c, namespace: namespace, feed: o.feed, reports: o.reports, clock: opts.Clock,
		log: log.WithName("machine"), nodes: unseen{clock: opts.Clock}, announced: unseen{clock: opts.Clock}}
	o.hints = &hintReconciler{client: c, namespace: namespace, feed: o.feed, log: log.WithName("hint"),
		written: unseen{clock: opts.Clock}}
	refused := &refusals{until: map[string]time.Time{}}
	o.chooser = &chooser{client: c, feed: o.feed, reports: o.reports, maxDrains: int(cfg.MaxConcurrentDrains),
		retry: cfg.RetryPeriod.Duration, clock: opts.Clock, metrics: metrics, log: log.WithName("reclaim"),
		refused: refused, marks: map[string]mark{}}
	o.drains = &drainReconciler{client: c, live: mgr.GetAPIReader(), feed: o.feed, reports: o.reports, refused: refused,
		config: reclaimSettings{settle: cfg.SettleTime.Duration, evictionRetry: cfg.EvictionRetry.Duration,
			deadline: cfg.DrainDeadline.Duration, hold: opts.HoldDrained, evictionTimeout: evictionTimeout},
		clock: opts.Clock, metrics: metrics, log: log.WithName("drain"),
		onEnd:    func() { o.chooseTrigger.add(chooseKey) },
		draining: map[string]bool{}, held: map[string]time.Time{}}
	o.verdicts = &verdicts{client: c, recorder: mgr.GetEventRecorder("drover-rollup"), clock: opts.Clock,
		log: log.WithName("verdict"), feed: o.feed, wake: make(chan struct{}, 1)}

	if err := o.addControllers(mgr, namespace); err != nil {
		return err
	}
	return errors.Join(mgr.Add(o.feed), mgr.Add(o.reports), mgr.Add(o.verdicts))
}

func (o *operator) addControllers(mgr manager.Manager, namespace string) error {
	inNamespace := handler.EnqueueRequestsFromMapFunc(func(_ context.Context, obj client.Object) []reconcile.Request {
		if obj.GetNamespace() != namespace {
			return nil
		}
		return requests(obj.GetName())
	})
	return errors.Join(
		builder.ControllerManagedBy(mgr).Named("upcomingnode").
			WatchesRawSource(source.Func(o.machineTrigger.start)).
			Watches(&fleetv1alpha1.UpcomingNode{}, inNamespace).
			Watches(&corev1.Node{}, onEvents(o.machines.machinesOf, o.machines.nodeGone)).
			WithOptions(controllerOptions(machineWorkers)).
			Complete(o.machines),
		builder.ControllerManagedBy(mgr).Named("availablecapacity").
			WatchesRawSource(source.Func(o.hintTrigger.start)).
			Watches(&fleetv1alpha1.AvailableCapacity{}, inNamespace).
			WithOptions(controllerOptions(hintWorkers)).
			Complete(o.hints),
		builder.ControllerManagedBy(mgr).Named("reclaim").
			WatchesRawSource(source.Func(o.chooseTrigger.start)).
			WithOptions(controllerOptions(1)).
			Complete(o.chooser),
		builder.ControllerManagedBy(mgr).Named("drain").
			WatchesRawSource(source.Func(o.drainTrigger.start)).
			Watches(&corev1.Node{}, onEvents(func(node *corev1.Node) []string {
				if reclaimOf(node) == "" && !o.drains.watches(node.Name) {
					return nil
				}
				return []string{node.Name}
			}, nil)).
			Watches(&corev1.Pod{}, onEvents(func(pod *corev1.Pod) []string {
				if pod.Spec.NodeName == "" || !o.drains.watches(pod.Spec.NodeName) {
					return nil
				}
				return []string{pod.Spec.NodeName}
			}, nil)).
			WithOptions(controllerOptions(drainWorkers)).
			Complete(o.drains),
	)
}

func controllerOptions(workers int) controller.Options {
	return controller.Options{
		MaxConcurrentReconciles: workers,
		RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](
			20*time.Millisecond, 30*time.Second),
	}
}

// onState starts what a new state of the feed asks for. After the first one, and when the autoscaler is another process
// than before, that is a look at everything.
func (o *operator) onState(state, before *feedState, c changes, fresh bool) {
	if fresh {
		o.reports.repeatAll()
	}
	if before == nil || fresh {
		o.lookAtEverything(state)
	} else {
		o.machineTrigger.add(c.machines...)
		o.hintTrigger.add(c.offerings...)
		if c.reclaims {
			o.lookAtReclaims()
		}
	}
	o.verdicts.signal()
}

func (o *operator) lookAtReclaims() {
	o.chooseTrigger.add(chooseKey)
	var nodes corev1.NodeList
	if err := o.machines.client.List(context.Background(), &nodes, client.UnsafeDisableDeepCopy); err != nil {
		o.feed.log.Error(err, "Listing nodes from the cache")
		return
	}
	for i := range nodes.Items {
		if reclaimOf(&nodes.Items[i]) != "" {
			o.drainTrigger.add(nodes.Items[i].Name)
		}
	}
}

// lookAtEverything asks for every object that the feed may have an opinion on. Reads come from the cache.
func (o *operator) lookAtEverything(state *feedState) {
	ctx := context.Background()
	for id := range state.machines {
		o.machineTrigger.add(id)
	}
	for name := range state.offerings {
		o.hintTrigger.add(name)
	}
	var nodes corev1.NodeList
	var upcoming fleetv1alpha1.UpcomingNodeList
	var hints fleetv1alpha1.AvailableCapacityList
	if err := errors.Join(
		o.machines.client.List(ctx, &nodes, client.UnsafeDisableDeepCopy),
		o.machines.client.List(ctx, &upcoming, client.UnsafeDisableDeepCopy),
		o.machines.client.List(ctx, &hints, client.UnsafeDisableDeepCopy),
	); err != nil {
		o.feed.log.Error(err, "Listing from the cache")
	}
	for i := range nodes.Items {
		if id := nodes.Items[i].Labels[fleetv1alpha1.LabelMachine]; id != "" {
			o.machineTrigger.add(id)
		}
	}
	for i := range upcoming.Items {
		o.machineTrigger.add(upcoming.Items[i].Name)
	}
	for i := range hints.Items {
		o.hintTrigger.add(hints.Items[i].Name)
	}
	o.lookAtReclaims()
}

// trigger lets the feed put keys into a controller's queue, which merges them with the informers' own.
type trigger struct {
	mu    sync.Mutex
	queue workqueue.TypedRateLimitingInterface[reconcile.Request]
	early map[string]bool // keys from before the controller started
}

func (t *trigger) start(_ context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.queue = queue
	for name := range t.early {
		queue.Add(request(name))
	}
	t.early = nil
	return nil
}

func (t *trigger) add(names ...string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, name := range names {
		if t.queue != nil {
			t.queue.Add(request(name))
			continue
		}
		if t.early == nil {
			t.early = map[string]bool{}
		}
		t.early[name] = true
	}
}

func request(name string) reconcile.Request {
	var r reconcile.Request
	r.Name = name
	return r
}

func requests(names ...string) []reconcile.Request {
	out := make([]reconcile.Request, len(names))
	for i, name := range names {
		out[i] = request(name)
	}
	return out
}

// onEvents asks for the keys of an object, of both its versions on an update, and calls gone before a deletion's.
func onEvents[T client.Object](keys func(T) []string, gone func(T)) handler.EventHandler {
	type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]
	add := func(q queue, objects ...client.Object) {
		for _, obj := range objects {
			o, ok := obj.(T)
			if !ok {
				continue
			}
			for _, r := range requests(keys(o)...) {
				q.Add(r)
			}
		}
	}
	return handler.Funcs{
		CreateFunc: func(_ context.Context, e event.CreateEvent, q queue) { add(q, e.Object) },
		UpdateFunc: func(_ context.Context, e event.UpdateEvent, q queue) { add(q, e.ObjectNew, e.ObjectOld) },
		DeleteFunc: func(_ context.Context, e event.DeleteEvent, q queue) {
			if o, ok := e.Object.(T); ok && gone != nil {
				gone(o)
			}
			add(q, e.Object)
		},
	}
}
