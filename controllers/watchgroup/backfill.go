package watchgroup

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"golang.org/x/time/rate"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
)

// Backfill labels objects that take part and carry no label: those that are older than the webhook, that were created while
// it was down, and roots whose name the API server makes up after admission. It watches unlabelled objects only, so
// that it costs nothing once all are labelled.
//
// An object is labelled after everything that it owns, because from then on a member reconciles it and must find its
// children. Nothing is labelled before the unlabelled objects of all resources have been listed, and what an object owns is
// looked for at the API server where a watch may not have shown it yet.
type Backfill struct {
	// Groups reads WatchGroups, from a cache.
	Groups   client.Reader
	Metadata metadata.Interface
	Mapper   meta.RESTMapper
	Owners   *Owners
	Metrics  *Metrics
	// Limit bounds the writes per second.
	Limit *rate.Limiter
	// AuditPeriod is the time between two looks at all objects, which find labels that no member selects.
	AuditPeriod time.Duration
	// Changed is told when there is something new to report; may be nil.
	Changed func()

	queue workqueue.TypedRateLimitingInterface[item]

	mu      sync.Mutex
	feeds   map[schema.GroupResource]*feed
	failing map[schema.GroupResource]error
	waiting map[item]time.Time // objects that take part and are unlabelled, with their creation

	told map[schema.GroupResource]arrear // by tell, last
}

var (
	_ manager.Runnable               = &Backfill{}
	_ manager.LeaderElectionRunnable = &Backfill{}
)

// An item is an object to look at.
type item struct {
	resource schema.GroupResource
	types.NamespacedName
}

// A feed is the unlabelled objects of one resource.
type feed struct {
	mapping  *meta.RESTMapping
	informer cache.SharedIndexInformer
	cancel   context.CancelFunc

	shown  string               // the newest version that has been shown, of objects of the resource
	owners map[within]*ownersOf // what lists have told of the objects' children

	err         error     // the last one of its watch
	first, last time.Time // of the errors since the watch has brought anything
	version     string    // that the watch had come to then
}

// failed records an error of the watch.
func (f *feed) failed(err error, now time.Time) {
	if version := f.informer.LastSyncResourceVersion(); f.err == nil || version != f.version {
		f.first, f.version = now, version
	}
	f.err, f.last = err, now
}

// failing returns why the feed does not know which objects are unlabelled, nil if it does. A watch that fails once is no
// reason: it is begun again, and goes on where it was.
func (f *feed) failing() error {
	if f.err == nil || f.informer.LastSyncResourceVersion() != f.version ||
		(f.informer.HasSynced() && f.last.Sub(f.first) < labelGrace) {
		return nil
	}
	return f.err
}

const (
	// backfillWorkers label at the same time; the limiter bounds them all.
	backfillWorkers = 8
	// feedPeriod is how often the backfill looks which resources the groups name.
	feedPeriod = time.Second
	// byOwner indexes unlabelled objects by the UID of their controller owner.
	byOwner = "owner"
	// byUID indexes them by their own.
	byUID = "uid"
	// syncPeriod is how soon an object is looked at again while unlabelled objects are still being listed.
	syncPeriod = 100 * time.Millisecond
	// fieldManager names the backfill in managedFields.
	fieldManager = "drover-watchgroup"
	// auditPage is how many objects one request of an audit returns.
	auditPage = 500
)

// NeedLeaderElection implements manager.LeaderElectionRunnable.
func (*Backfill) NeedLeaderElection() bool { return true }

// Start implements manager.Runnable. It runs until ctx ends.
func (b *Backfill) Start(ctx context.Context) error {
	b.mu.Lock()
	b.queue = workqueue.NewTypedRateLimitingQueue(
		workqueue.NewTypedItemExponentialFailureRateLimiter[item](50*time.Millisecond, 30*time.Second))
	b.feeds = make(map[schema.GroupResource]*feed)
	b.failing = make(map[schema.GroupResource]error)
	b.waiting = make(map[item]time.Time)
	b.mu.Unlock()
	var workers sync.WaitGroup
	for range backfillWorkers {
		workers.Go(func() {
			for b.next(ctx) {
			}
		})
	}
	workers.Go(func() { b.audits(ctx) })
	ticks := time.NewTicker(feedPeriod)
	defer ticks.Stop()
	for {
		if err := b.follow(ctx); err != nil {
			log.FromContext(ctx).Error(err, "Backfill cannot read the WatchGroups")
		}
		b.tell()
		select {
		case <-ctx.Done():
			b.queue.ShutDown()
			workers.Wait()
			return nil
		case <-ticks.C:
		}
	}
}

// schemes says how the objects of each resource are labelled now.
func (b *Backfill) schemes(ctx context.Context) (map[schema.GroupResource]scheme, error) {
	var groups lbv1alpha1.WatchGroupList
	if err := b.Groups.List(ctx, &groups, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("listing WatchGroups: %w", err)
	}
	all, _ := schemes(groups.Items)
	return all, nil
}

// follow starts feeds of resources that have come, and stops those of resources that have gone.
func (b *Backfill) follow(ctx context.Context) error {
	all, err := b.schemes(ctx)
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for gr, f := range b.feeds {
		if _, ok := all[gr]; !ok {
			f.cancel()
			delete(b.feeds, gr)
			maps.DeleteFunc(b.waiting, func(it item, _ time.Time) bool { return it.resource == gr })
		}
	}
	maps.DeleteFunc(b.failing, func(gr schema.GroupResource, _ error) bool { _, ok := all[gr]; return !ok })
	for gr := range all {
		if b.feeds[gr] != nil {
			continue
		}
		f, err := b.open(ctx, gr)
		if err != nil {
			b.failing[gr] = err
			continue
		}
		delete(b.failing, gr)
		b.feeds[gr] = f
	}
	return nil
}

// open starts watching the unlabelled objects of a resource.
func (b *Backfill) open(ctx context.Context, gr schema.GroupResource) (*feed, error) {
	mapping, err := mappingOf(b.Mapper, gr)
	if err != nil {
		return nil, err
	}
	informer := metadatainformer.NewFilteredMetadataInformer(b.Metadata, mapping.Resource, metav1.NamespaceAll, 0,
		cache.Indexers{byOwner: ownerUID, byUID: ownUID},
		func(o *metav1.ListOptions) { o.LabelSelector = "!" + sharding.LabelVirtualNode }).Informer()
	f := &feed{mapping: mapping, informer: informer}
	_, handled := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { b.shows(f, o); b.queue.Add(itemOf(gr, o)) },
		UpdateFunc: func(_, o any) { b.shows(f, o); b.queue.Add(itemOf(gr, o)) },
		DeleteFunc: func(o any) { b.gone(gr, o) },
	})
	if err := errors.Join(handled, informer.SetTransform(stripManagedFields),
		informer.SetWatchErrorHandlerWithContext(func(_ context.Context, _ *cache.Reflector, err error) {
			b.mu.Lock()
			defer b.mu.Unlock()
			f.failed(err, time.Now())
		})); err != nil {
		return nil, fmt.Errorf("watching %s: %w", gr, err)
	}
	ctx, f.cancel = context.WithCancel(ctx)
	go informer.RunWithContext(ctx)
	return f, nil
}

func stripManagedFields(o any) (any, error) {
	if m, err := meta.Accessor(o); err == nil {
		m.SetManagedFields(nil)
	}
	return o, nil
}

func ownerUID(o any) ([]string, error) {
	m, err := meta.Accessor(o)
	if err != nil {
		return nil, err
	}
	if ref := metav1.GetControllerOfNoCopy(m); ref != nil {
		return []string{string(ref.UID)}, nil
	}
	return nil, nil
}

func ownUID(o any) ([]string, error) {
	m, err := meta.Accessor(o)
	if err != nil {
		return nil, err
	}
	return []string{string(m.GetUID())}, nil
}

func itemOf(gr schema.GroupResource, o any) item {
	key, _ := cache.DeletionHandlingMetaNamespaceKeyFunc(o)
	namespace, name, _ := cache.SplitMetaNamespaceKey(key)
	return item{gr, types.NamespacedName{Namespace: namespace, Name: name}}
}

// gone looks at the owner of an object that has been labelled or deleted: it may have waited for it. So it looks at what the
// object owns: that may have taken no part for as long as the object carried no label, as below owners deeper than maxDepth.
func (b *Backfill) gone(gr schema.GroupResource, o any) {
	b.queue.Add(itemOf(gr, o))
	if unknown, ok := o.(cache.DeletedFinalStateUnknown); ok {
		o = unknown.Obj
	}
	m, err := meta.Accessor(o)
	if err != nil {
		return
	}
	related := []map[schema.GroupResource][]any{b.unlabelled(byOwner, string(m.GetUID()), nil)}
	if ref := metav1.GetControllerOfNoCopy(m); ref != nil {
		related = append(related, b.unlabelled(byUID, string(ref.UID), nil))
	}
	for _, found := range related {
		for resource, objects := range found {
			for _, o := range objects {
				b.queue.Add(itemOf(resource, o))
			}
		}
	}
}

// unlabelled returns the unlabelled objects that an index holds, of the resources in only, or of all if only is nil.
func (b *Backfill) unlabelled(index, value string, only map[schema.GroupResource]bool) map[schema.GroupResource][]any {
	b.mu.Lock()
	defer b.mu.Unlock()
	found := make(map[schema.GroupResource][]any)
	for gr, f := range b.feeds {
		if only != nil && !only[gr] {
			continue
		}
		if objects, err := f.informer.GetIndexer().ByIndex(index, value); err == nil && len(objects) > 0 {
			found[gr] = objects
		}
	}
	return found
}

// next labels one object. It returns false when the queue is shut down.
func (b *Backfill) next(ctx context.Context) bool {
	it, shutdown := b.queue.Get()
	if shutdown {
		return false
	}
	defer b.queue.Done(it)
	switch again, err := b.look(ctx, it); {
	case err != nil:
		if ctx.Err() == nil && !apierrors.IsConflict(err) {
			log.FromContext(ctx).Error(err, "Object is not labelled", "resource", it.resource.String(), "object", it.NamespacedName)
		}
		b.queue.AddRateLimited(it)
	case again > 0:
		b.queue.AddAfter(it, again)
	default:
		b.queue.Forget(it)
	}
	return true
}

// look labels an object if it takes part and everything that it owns is labelled.
func (b *Backfill) look(ctx context.Context, it item) (again time.Duration, err error) {
	all, err := b.schemes(ctx)
	if err != nil {
		return 0, err
	}
	s, f := all[it.resource], b.feed(it.resource)
	if f == nil {
		return 0, nil
	}
	o, exists, err := f.informer.GetIndexer().GetByKey(it.String())
	if it.Namespace == "" {
		o, exists, err = f.informer.GetIndexer().GetByKey(it.Name)
	}
	if err != nil {
		return 0, err
	}
	object, ok := o.(*metav1.PartialObjectMetadata)
	if !exists || !ok {
		b.settled(it)
		return 0, nil
	}
	if !b.synced(s.siblings) {
		return syncPeriod, nil
	}
	want, takes, err := b.want(ctx, all, s, f.mapping, object)
	if err != nil {
		return 0, err
	}
	if !takes {
		b.settled(it)
		return 0, nil
	}
	b.waits(f, it, object.CreationTimestamp.Time)
	if hidden, err := b.hidesChildren(ctx, f, it.resource, s.siblings, object); err != nil {
		return 0, err
	} else if hidden {
		return syncPeriod, nil
	}
	if waits, err := b.waitsForChildren(ctx, all, s, object); waits || err != nil {
		return 0, err
	}
	if err := b.label(ctx, f.mapping, object, want); err != nil {
		return 0, err
	}
	b.Metrics.Late.WithLabelValues(it.resource.String()).Observe(time.Since(object.CreationTimestamp.Time).Seconds())
	return 0, nil
}

// want returns the labels that an object is to carry, and false if it does not take part.
func (b *Backfill) want(ctx context.Context, all map[schema.GroupResource]scheme, s scheme, mapping *meta.RESTMapping,
	object *metav1.PartialObjectMetadata) (labels, bool, error) {
	owner, err := b.Owners.lineage(ctx, all, s, object.Namespace, object)
	if err != nil {
		return labels{}, false, err
	}
	if !takesPart(s, object, owner) {
		return labels{}, false, nil
	}
	self := sharding.ObjectRef{Group: mapping.GroupVersionKind.Group, Kind: mapping.GroupVersionKind.Kind,
		Namespace: object.Namespace, Name: object.Name}
	want, ok := labelled(s, object, self, owner)
	return want, ok, nil
}

// label writes the two labels, on the condition that the object is still the one that was read.
func (b *Backfill) label(ctx context.Context, mapping *meta.RESTMapping, object *metav1.PartialObjectMetadata, want labels) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": object.UID, "resourceVersion": object.ResourceVersion,
		"labels": map[string]string{sharding.LabelVirtualNode: want.virtualNode, sharding.LabelBucket: want.bucket},
	}})
	if err != nil {
		return err
	}
	if err := b.Limit.Wait(ctx); err != nil {
		return err
	}
	_, err = b.Metadata.Resource(mapping.Resource).Namespace(object.Namespace).Patch(ctx, object.Name,
		types.MergePatchType, patch, metav1.PatchOptions{FieldManager: fieldManager})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("labelling %s %s/%s: %w", mapping.Resource.GroupResource(), object.Namespace, object.Name, err)
	}
	return nil
}

func (b *Backfill) feed(gr schema.GroupResource) *feed {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.feeds[gr]
}

// synced reports whether all unlabelled objects of these resources are known.
func (b *Backfill) synced(resources map[schema.GroupResource]bool) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	for gr := range resources {
		if f := b.feeds[gr]; f == nil || !f.informer.HasSynced() {
			return false
		}
	}
	return true
}

// waits notes an object that is not labelled yet, unless the feed that has shown it is not followed any more: nobody would
// strike it out. A resource that goes and comes back has another feed.
func (b *Backfill) waits(f *feed, it item, created time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.feeds[it.resource] == f {
		b.waiting[it] = created
	}
}

func (b *Backfill) settled(it item) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.waiting, it)
}
