package sharded

import (
	"context"
	"fmt"
	"reflect"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/selection"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/history"
)

// A reader answers reads of the kinds of the group.
type reader struct {
	member *member
	live   client.Reader
	slots  chan struct{} // bounds the live reads under way
	refuse bool          // what is not owned
}

// find looks an object up in the cache, behind the barrier. found is nil if the API server has to be asked; owned tells
// that it would be the member's if it existed.
func (r *reader) find(ctx context.Context, k *kind, key client.ObjectKey) (found client.Object, owned bool, err error) {
	e, j, waited := r.member, jobFrom(ctx), false
	for {
		e.mu.RLock()
		if e.m == nil {
			e.mu.RUnlock()
			return nil, false, &cache.ErrCacheNotStarted{}
		}
		obj, vn, known := e.locate(k, key)
		if !known && j != nil {
			vn, known = j.ticket.VN, true // most of what a reconcile reads is of its own Virtual Node
		}
		source := sharding.FromServer
		if known {
			source = e.m.Read(k.resource, vn)
		}
		changed := e.changed
		if source == sharding.FromCache && obj != nil && e.replaced(j, k, key, vn) {
			e.mu.RUnlock()
			e.mu.Lock()
			defer e.mu.Unlock()
			return nil, true, e.errReplaced(j)
		}
		if source == sharding.FromCache && obj != nil && j != nil {
			e.recordRead(j, k, key, vn, obj, false)
		}
		e.mu.RUnlock()
		switch source {
		case sharding.FromCache:
			return obj, true, nil
		case sharding.FromServer:
			return nil, false, nil
		}
		if !waited {
			waited = true
			e.metrics.blockedReads.Inc()
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, true, fmt.Errorf("get %s %s: %w: %w", k.resource, key, ErrBlocked, context.Cause(ctx))
		}
	}
}

// recordRead records what a reconcile saw; obj is nil for not found. Reads of one record lock at a time, so that records
// are in order.
func (e *member) recordRead(j *job, k *kind, key client.ObjectKey, vn sharding.VirtualNode, obj client.Object, live bool) {
	if e.record == nil || j.key == "" || j.life.Err() != nil {
		return
	}
	rec := history.Record{Kind: history.Read, Resource: k.resource, Object: keyOf(key), VN: vn, Root: j.key, FromServer: live}
	if obj != nil {
		rec.Version = sharding.Version(obj.GetResourceVersion())
	}
	e.rec(rec)
}

// get answers client.Reader.Get for a kind of the group.
func (r *reader) get(ctx context.Context, k *kind, key client.ObjectKey, out client.Object, opts ...client.GetOption) error {
	if !k.namespaced {
		key.Namespace = ""
	}
	obj, owned, err := r.find(ctx, k, key)
	if err != nil {
		return err
	}
	if obj == nil {
		return r.getLive(ctx, k, key, owned, out, opts...)
	}
	var o client.GetOptions
	o.ApplyOptions(opts)
	if o.UnsafeDisableDeepCopy == nil || !*o.UnsafeDisableDeepCopy {
		obj = obj.DeepCopyObject().(client.Object)
	}
	return assign(k, obj, out)
}

// getLive asks the API server, where the cache cannot tell: what is not the member's may exist all the same, and what
// the cache does not show may have been created a moment ago, or stand in a Virtual Node that nobody expected.
func (r *reader) getLive(ctx context.Context, k *kind, key client.ObjectKey, owned bool, out client.Object,
	opts ...client.GetOption) error {
	e := r.member
	if r.refuse && !owned {
		return fmt.Errorf("get %s %s: %w", k.resource, key, ErrNotOwned)
	}
	reason := "unowned"
	if owned {
		reason = "miss"
	}
	select {
	case r.slots <- struct{}{}:
		defer func() { <-r.slots }()
	case <-ctx.Done():
		return fmt.Errorf("get %s %s: %w", k.resource, key, context.Cause(ctx))
	}
	e.metrics.liveReads(reason).Inc()
	err := r.live.Get(ctx, key, out, opts...)
	if j := jobFrom(ctx); j != nil && (err == nil || apierrors.IsNotFound(err)) {
		seen, vn := out, j.ticket.VN
		if err != nil {
			seen = nil
		} else if own, err := e.mapping.of(out); err == nil {
			vn = own
		}
		if err == nil && e.replaced(j, k, key, vn) {
			e.mu.Lock()
			defer e.mu.Unlock()
			return e.errReplaced(j)
		}
		e.mu.RLock()
		e.recordRead(j, k, key, vn, seen, true)
		e.mu.RUnlock()
	}
	if err == nil && r.refuse && !e.holds(k, out) {
		return fmt.Errorf("get %s %s: %w", k.resource, key, ErrNotOwned)
	}
	return err
}

// holds reports whether an object is the member's. One that has no label is nobody's, and refused to nobody.
func (e *member) holds(k *kind, obj client.Object) bool {
	e.mu.RLock()
	defer e.mu.RUnlock()
	vn, err := e.mapping.of(obj)
	return err != nil || e.m.Read(k.resource, vn) != sharding.FromServer
}

// list answers client.Reader.List for a kind of the group: what the member owns of it, or is about to give up.
func (r *reader) list(ctx context.Context, k *kind, out client.ObjectList, opts ...client.ListOption) error {
	var o client.ListOptions
	o.ApplyOptions(opts)
	if o.Continue != "" {
		return fmt.Errorf("list %s: the cache does not support continue", k.resource)
	}
	objs, err := r.selected(ctx, k, &o)
	if err != nil {
		return err
	}
	_, asMeta := out.(*metav1.PartialObjectMetadataList)
	_, asUnstructured := out.(runtime.Unstructured)
	items := make([]runtime.Object, 0, len(objs))
	for _, obj := range objs {
		if o.Limit > 0 && int64(len(items)) >= o.Limit {
			break
		}
		if o.UnsafeDisableDeepCopy == nil || !*o.UnsafeDisableDeepCopy {
			obj = obj.DeepCopyObject().(client.Object)
			obj.GetObjectKind().SetGroupVersionKind(k.gvk)
		}
		item, err := shape(k, obj, asMeta, asUnstructured)
		if err != nil {
			return err
		}
		items = append(items, item)
	}
	return meta.SetList(out, items)
}

// selected returns the objects of a list, unchanged, once nothing of the kind is behind the barrier.
func (r *reader) selected(ctx context.Context, k *kind, o *client.ListOptions) ([]client.Object, error) {
	e, waited := r.member, false
	for {
		e.mu.RLock()
		if e.m == nil {
			e.mu.RUnlock()
			return nil, &cache.ErrCacheNotStarted{}
		}
		if e.m.Awaiting(k.resource).Empty() {
			defer e.mu.RUnlock()
			return e.match(k, o)
		}
		changed := e.changed
		e.mu.RUnlock()
		if !waited {
			waited = true
			e.metrics.blockedReads.Inc()
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, fmt.Errorf("list %s: %w: %w", k.resource, ErrBlocked, context.Cause(ctx))
		}
	}
}

func (e *member) match(k *kind, o *client.ListOptions) ([]client.Object, error) {
	var objs []any
	var err error
	switch {
	case o.FieldSelector != nil && !o.FieldSelector.Empty():
		objs, err = byFields(k.store.indexer, o.FieldSelector.Requirements(), o.Namespace)
	case o.Namespace != "":
		objs, err = k.store.indexer.ByIndex(toolscache.NamespaceIndex, o.Namespace)
	default:
		objs = k.store.indexer.List()
	}
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", k.resource, err)
	}
	matching := make([]client.Object, 0, len(objs))
	readable := make(map[sharding.VirtualNode]bool)
	for _, any := range objs {
		obj := any.(client.Object)
		if o.LabelSelector != nil && !o.LabelSelector.Matches(labels.Set(obj.GetLabels())) {
			continue
		}
		vn, err := e.mapping.of(obj)
		if err != nil {
			continue
		}
		ok, asked := readable[vn]
		if !asked {
			ok = e.m.Read(k.resource, vn) == sharding.FromCache
			readable[vn] = ok
		}
		if ok {
			matching = append(matching, obj)
		}
	}
	return matching, nil
}

// byFields looks objects up by the indexes that IndexField made. Each requirement narrows what the ones before found.
func byFields(indexer toolscache.Indexer, requirements fields.Requirements, namespace string) ([]any, error) {
	var found []any
	for i, req := range requirements {
		if req.Operator != selection.Equals && req.Operator != selection.DoubleEquals {
			return nil, fmt.Errorf("field selector %s%s%s: the cache supports = only", req.Field, req.Operator, req.Value)
		}
		objs, err := indexer.ByIndex(fieldIndex(req.Field), fieldValue(namespace, req.Value))
		if err != nil {
			return nil, err
		}
		if i == 0 {
			found = objs
			continue
		}
		both := make(map[any]bool, len(objs))
		for _, obj := range objs {
			both[obj] = true
		}
		found = slices.DeleteFunc(slices.Clone(found), func(obj any) bool { return !both[obj] })
	}
	return found, nil
}

// fieldIndex and fieldValue name indexes and values as controller-runtime's cache does, since its users may look them up
// by name. A namespaced object is found under its namespace and under none.
func fieldIndex(field string) string { return "field:" + field }

func fieldValue(namespace, value string) string {
	if namespace == "" {
		namespace = "__all_namespaces"
	}
	return namespace + "/" + value
}

// assign puts obj, which is the caller's own or not to be changed by it, into out.
func assign(k *kind, obj client.Object, out client.Object) error {
	_, asMeta := out.(*metav1.PartialObjectMetadata)
	_, asUnstructured := out.(runtime.Unstructured)
	item, err := shape(k, obj, asMeta, asUnstructured)
	if err != nil {
		return err
	}
	from, to := reflect.ValueOf(item), reflect.ValueOf(out)
	if !from.Type().AssignableTo(to.Type()) {
		return fmt.Errorf("%s is cached as %s, and was asked for as %s", k.resource, from.Type(), to.Type())
	}
	reflect.Indirect(to).Set(reflect.Indirect(from))
	if out.GetObjectKind().GroupVersionKind() != k.gvk {
		out.GetObjectKind().SetGroupVersionKind(k.gvk) // without a copy, out may share its content with the cache
	}
	return nil
}

// shape returns obj in the form that is asked for.
func shape(k *kind, obj client.Object, asMeta, asUnstructured bool) (client.Object, error) {
	switch _, is := obj.(*unstructured.Unstructured); {
	case asMeta:
		return metadataOf(k, obj), nil
	case asUnstructured && !is:
		content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(obj)
		if err != nil {
			return nil, fmt.Errorf("convert %s %s: %w", k.resource, client.ObjectKeyFromObject(obj), err)
		}
		u := &unstructured.Unstructured{Object: content}
		u.SetGroupVersionKind(k.gvk)
		return u, nil
	default:
		return obj, nil
	}
}

func metadataOf(k *kind, obj client.Object) client.Object {
	m := meta.AsPartialObjectMetadata(obj)
	m.SetGroupVersionKind(k.gvk)
	return m
}
