package rollup

import (
	"context"
	"fmt"
	"sync"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
)

// demand is the cluster's demand as the informers know it, added up as it changes. It is filled on every replica, so that
// one that becomes the leader has the whole roll-up at hand.
type demand struct {
	mu     sync.Mutex
	rollup *capacity.Rollup
	// unacknowledged has every request whose phase is not Acknowledged, by name.
	unacknowledged map[types.NamespacedName]types.UID
	// hasSynced says, per kind, that the handler has been given everything that existed at the start.
	hasSynced []func() bool

	// changed holds one token after a change that a roll-up would show.
	changed chan struct{}
}

func newDemand(mode capacity.DemandMode) *demand {
	return &demand{
		rollup:         capacity.NewRollup(mode),
		unacknowledged: map[types.NamespacedName]types.UID{},
		changed:        make(chan struct{}, 1),
	}
}

// watch registers with the informers of everything that demand depends on.
func (d *demand) watch(ctx context.Context, informers cache.Informers) error {
	for _, w := range []struct {
		object  client.Object
		handler toolscache.ResourceEventHandler
	}{
		{&fleetv1alpha1.CapacityRequest{}, handlerFor(d.upsertRequest, d.deleteRequest)},
		{&corev1.Pod{}, handlerFor(
			func(p *corev1.Pod) { d.change(func() { d.rollup.UpsertPod(p) }) },
			func(p *corev1.Pod) { d.change(func() { d.rollup.DeletePod(client.ObjectKeyFromObject(p)) }) })},
		{&corev1.Node{}, handlerFor(
			func(n *corev1.Node) { d.change(func() { d.rollup.UpsertNode(n) }) },
			func(n *corev1.Node) { d.change(func() { d.rollup.DeleteNode(n.Name) }) })},
		{&appsv1.DaemonSet{}, handlerFor(
			func(ds *appsv1.DaemonSet) { d.change(func() { d.rollup.UpsertDaemonSet(ds) }) },
			func(ds *appsv1.DaemonSet) {
				d.change(func() { d.rollup.DeleteDaemonSet(client.ObjectKeyFromObject(ds)) })
			})},
	} {
		informer, err := informers.GetInformer(ctx, w.object)
		if err != nil {
			return fmt.Errorf("informer of %T: %w", w.object, err)
		}
		registration, err := informer.AddEventHandler(w.handler)
		if err != nil {
			return fmt.Errorf("watching %T: %w", w.object, err)
		}
		d.hasSynced = append(d.hasSynced, registration.HasSynced)
	}
	return nil
}

// handlerFor turns informer events into upserts and deletes of one kind.
func handlerFor[T client.Object](upsert, remove func(T)) toolscache.ResourceEventHandler {
	return toolscache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) {
			if o, ok := obj.(T); ok {
				upsert(o)
			}
		},
		UpdateFunc: func(_, obj any) {
			if o, ok := obj.(T); ok {
				upsert(o)
			}
		},
		DeleteFunc: func(obj any) {
			if gone, ok := obj.(toolscache.DeletedFinalStateUnknown); ok {
				obj = gone.Obj
			}
			if o, ok := obj.(T); ok {
				remove(o)
			}
		},
	}
}

// synced reports whether the roll-up is complete. A partial one would look like a collapse of demand.
func (d *demand) synced() bool {
	for _, hasSynced := range d.hasSynced {
		if !hasSynced() {
			return false
		}
	}
	return true
}

// change applies f and leaves a token when it changed what a roll-up shows.
func (d *demand) change(f func()) {
	d.mu.Lock()
	before := d.rollup.Version()
	f()
	after := d.rollup.Version()
	d.mu.Unlock()
	if before != after {
		d.signal()
	}
}

func (d *demand) signal() {
	select {
	case d.changed <- struct{}{}:
	default:
	}
}

func (d *demand) upsertRequest(cr *fleetv1alpha1.CapacityRequest) {
	key := client.ObjectKeyFromObject(cr)
	isNew := false
	d.change(func() {
		d.rollup.UpsertRequest(cr)
		if cr.Status.Phase == fleetv1alpha1.CapacityRequestAcknowledged {
			delete(d.unacknowledged, key)
			return
		}
		isNew = d.unacknowledged[key] != cr.UID
		d.unacknowledged[key] = cr.UID
	})
	if isNew {
		// It may change no row (its pod was counted already) and still waits for its acknowledgement.
		d.signal()
	}
}

func (d *demand) deleteRequest(cr *fleetv1alpha1.CapacityRequest) {
	key := client.ObjectKeyFromObject(cr)
	d.change(func() {
		d.rollup.DeleteRequest(key)
		delete(d.unacknowledged, key)
	})
}

// requestKey names one CapacityRequest object; another under the same name is another key.
type requestKey struct {
	types.NamespacedName
	uid types.UID
}

// snapshot gives the roll-up, and the requests in it that are not acknowledged yet.
func (d *demand) snapshot() (capacity.Snapshot, []requestKey) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var included []requestKey
	for name, uid := range d.unacknowledged {
		if d.rollup.Counted(name) {
			included = append(included, requestKey{name, uid})
		}
	}
	return d.rollup.Snapshot(), included
}

// waits reports whether that very request still waits to be acknowledged.
func (d *demand) waits(key requestKey) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.unacknowledged[key.NamespacedName] == key.uid
}
