package sharded

import (
	"context"
	"errors"
	"fmt"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
)

var _ cache.Cache = (*groupCache)(nil)

// A groupCache is the stock cache for all kinds but those of the group.
type groupCache struct {
	cache.Cache
	group  *Group
	scheme *runtime.Scheme
	reader *reader
}

// kindFor returns the kind of the group that gvk names, nil if it is not of the group.
func (c *groupCache) kindFor(gvk schema.GroupVersionKind) (*kind, error) {
	k := c.group.member.byKind[gvk.GroupKind()]
	if k != nil && k.gvk.Version != gvk.Version {
		return nil, fmt.Errorf("%s is in WatchGroup %s and cached in version %s: it cannot be used in version %s too",
			gvk.GroupKind(), c.group.key, k.gvk.Version, gvk.Version)
	}
	return k, nil
}

// Get implements client.Reader.
func (c *groupCache) Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
	k, err := c.kindOf(obj)
	switch {
	case err != nil:
		return err
	case k == nil:
		return c.Cache.Get(ctx, key, obj, opts...)
	default:
		return c.reader.get(ctx, k, key, obj, opts...)
	}
}

// List implements client.Reader.
func (c *groupCache) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	gvk, err := apiutil.GVKForObject(list, c.scheme)
	if err != nil {
		return err
	}
	gvk.Kind = strings.TrimSuffix(gvk.Kind, "List")
	k, err := c.kindFor(gvk)
	switch {
	case err != nil:
		return err
	case k == nil:
		return c.Cache.List(ctx, list, opts...)
	default:
		return c.reader.list(ctx, k, list, opts...)
	}
}

// GetInformer implements cache.Informers.
func (c *groupCache) GetInformer(ctx context.Context, obj client.Object, opts ...cache.InformerGetOption) (
	cache.Informer, error) {
	k, err := c.kindOf(obj)
	if err != nil {
		return nil, err
	}
	if k == nil {
		return c.Cache.GetInformer(ctx, obj, opts...)
	}
	if _, ok := obj.(*metav1.PartialObjectMetadata); ok {
		return projected{k.informer, func(o client.Object) client.Object { return metadataOf(k, o) }}, nil
	}
	return k.informer, nil
}

// GetInformerForKind implements cache.Informers.
func (c *groupCache) GetInformerForKind(ctx context.Context, gvk schema.GroupVersionKind, opts ...cache.InformerGetOption) (
	cache.Informer, error) {
	k, err := c.kindFor(gvk)
	switch {
	case err != nil:
		return nil, err
	case k == nil:
		return c.Cache.GetInformerForKind(ctx, gvk, opts...)
	default:
		return k.informer, nil
	}
}

// RemoveInformer implements cache.Informers. Kinds of the group are the member's for as long as it runs.
func (c *groupCache) RemoveInformer(ctx context.Context, obj client.Object) error {
	k, err := c.kindOf(obj)
	if err != nil {
		return err
	}
	if k != nil {
		return fmt.Errorf("remove informer of %s: it is in WatchGroup %s", k.resource, c.group.key)
	}
	return c.Cache.RemoveInformer(ctx, obj)
}

// IndexField implements client.FieldIndexer.
func (c *groupCache) IndexField(ctx context.Context, obj client.Object, field string, extract client.IndexerFunc) error {
	k, err := c.kindOf(obj)
	if err != nil {
		return err
	}
	if k == nil {
		return c.Cache.IndexField(ctx, obj, field, extract)
	}
	return k.informer.AddIndexers(toolscache.Indexers{fieldIndex(field): func(any any) ([]string, error) {
		o, ok := any.(client.Object)
		if !ok {
			return nil, fmt.Errorf("index %s of %s: %T is not an object", field, k.resource, any)
		}
		var values []string
		for _, v := range extract(o) {
			values = append(values, fieldValue("", v))
			if ns := o.GetNamespace(); ns != "" {
				values = append(values, fieldValue(ns, v))
			}
		}
		return values, nil
	}})
}

// Start implements cache.Informers. It returns when the member has left the group.
func (c *groupCache) Start(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stock := make(chan error, 1)
	go func() {
		err := c.Cache.Start(ctx)
		if err != nil {
			cancel() // one half alone would leave its reader waiting
		}
		stock <- err
	}()
	err := c.group.run(ctx)
	cancel()
	return errors.Join(err, <-stock)
}

// WaitForCacheSync implements cache.Informers. The kinds of the group have nothing to wait for: what the member owns
// comes later, and whoever asks before is answered by the API server.
func (c *groupCache) WaitForCacheSync(ctx context.Context) bool {
	select {
	case <-c.group.member.started:
	case <-ctx.Done():
		return false
	}
	return c.Cache.WaitForCacheSync(ctx)
}
