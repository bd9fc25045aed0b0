package sharded

import (
	"context"
	"fmt"

	"github.com/go-logr/logr"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/drover-sh/drover/sharding"
)

// A Builder builds a controller like controller-runtime's, and says what depends on what: the kind of For depends on the
// kinds of Owns and Watches, so that a reconcile waits until all of them are there.
//
// If the manager's cache is not a Group's, or the kind of For is not in the group, the result is an ordinary controller.
type Builder struct {
	inner   *builder.Builder
	mgr     manager.Manager
	root    client.Object
	reads   []client.Object
	keys    *Keys
	owned   []client.Object // of reads
	options controller.Options
}

// ControllerManagedBy takes the place of controller-runtime's function of that name.
func ControllerManagedBy(m manager.Manager) *Builder {
	return &Builder{inner: builder.ControllerManagedBy(m), mgr: m}
}

// For is builder.Builder.For.
func (b *Builder) For(obj client.Object, opts ...builder.ForOption) *Builder {
	b.root = obj
	b.inner.For(obj, opts...)
	return b
}

// Owns is builder.Builder.Owns. In a group whose Virtual Nodes go by UID there is nothing to own: what an object owns has
// another UID, and is another member's.
func (b *Builder) Owns(obj client.Object, opts ...builder.OwnsOption) *Builder {
	b.reads, b.owned = append(b.reads, obj), append(b.owned, obj)
	b.inner.Owns(obj, opts...)
	return b
}

// Watches is builder.Builder.Watches. A handler is called for objects that this member owns; requests for objects of
// other members are dropped.
func (b *Builder) Watches(obj client.Object, h handler.EventHandler, opts ...builder.WatchesOption) *Builder {
	b.reads = append(b.reads, obj)
	b.inner.Watches(obj, h, opts...)
	return b
}

// WatchesMetadata is builder.Builder.WatchesMetadata.
func (b *Builder) WatchesMetadata(obj client.Object, h handler.EventHandler, opts ...builder.WatchesOption) *Builder {
	b.reads = append(b.reads, obj)
	b.inner.WatchesMetadata(obj, h, opts...)
	return b
}

// WatchesRawSource is builder.Builder.WatchesRawSource.
func (b *Builder) WatchesRawSource(src source.Source) *Builder {
	b.inner.WatchesRawSource(src)
	return b
}

// WithEventFilter is builder.Builder.WithEventFilter.
func (b *Builder) WithEventFilter(p predicate.Predicate) *Builder {
	b.inner.WithEventFilter(p)
	return b
}

// WithOptions is builder.Builder.WithOptions. A sharded controller runs on every member, whatever NeedLeaderElection is.
func (b *Builder) WithOptions(o controller.Options) *Builder {
	b.options = o
	return b
}

// WithLogConstructor is builder.Builder.WithLogConstructor.
func (b *Builder) WithLogConstructor(f func(*reconcile.Request) logr.Logger) *Builder {
	b.options.LogConstructor = f
	return b
}

// Named is builder.Builder.Named.
func (b *Builder) Named(name string) *Builder {
	b.inner.Named(name)
	return b
}

// Complete is builder.Builder.Complete.
func (b *Builder) Complete(r reconcile.Reconciler) error {
	_, err := b.Build(r)
	return err
}

// Build is builder.Builder.Build.
func (b *Builder) Build(r reconcile.Reconciler) (controller.Controller, error) {
	if r == nil {
		r, b.options.Reconciler = b.options.Reconciler, nil
	}
	if c, ok := b.mgr.GetCache().(*groupCache); ok && b.keys != nil {
		keyed, err := b.buildByKey(c, r)
		if err != nil {
			return nil, err
		}
		b.options.NeedLeaderElection = ptr.To(false)
		return b.inner.WithOptions(b.options).Build(keyed)
	}
	root, err := b.shard()
	if err != nil {
		return nil, err
	}
	if root == nil {
		return b.inner.WithOptions(b.options).Build(r)
	}
	if r == nil {
		return nil, fmt.Errorf("controller of %s: no reconciler", root.resource)
	}
	b.options.NeedLeaderElection = ptr.To(false)
	b.inner.WatchesRawSource(source.Func(func(_ context.Context,
		q workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		return root.member.resyncs.add(root, q)
	}))
	return b.inner.WithOptions(b.options).Build(&guardedReconciler{inner: r, kind: root})
}

// shard returns the kind of For, nil if the controller is not sharded, and tells the group of its dependencies.
func (b *Builder) shard() (*kind, error) {
	c, ok := b.mgr.GetCache().(*groupCache)
	if !ok || b.root == nil {
		return nil, nil
	}
	root, err := c.kindOf(b.root)
	if err != nil || root == nil {
		return nil, err
	}
	if root.member.byUID && len(b.owned) > 0 {
		return nil, fmt.Errorf("controller of %s: Owns(%T): WatchGroup %s has spec.shardKey %q, by which what an object owns is "+
			"another member's: it needs %q, or labels", root.resource, b.owned[0], c.group.key, sharding.ShardByUID,
			sharding.ShardByNamespace)
	}
	var reads []*kind
	for _, obj := range b.reads {
		k, err := c.kindOf(obj)
		if err != nil {
			return nil, err
		}
		if k != nil {
			reads = append(reads, k)
		}
	}
	return root, c.group.depend(root, reads)
}

// kindOf returns the kind of an object, nil if it is not of the group.
func (c *groupCache) kindOf(obj client.Object) (*kind, error) {
	gvk, err := apiutil.GVKForObject(obj, c.scheme)
	if err != nil {
		return nil, err
	}
	return c.kindFor(gvk)
}
