package sharded

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/util/flowcontrol"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/drover-sh/drover/sharding"
)

// A guardedClient is a client whose writes are sent only while the member may write: all those of a reconcile, whatever
// their kind, and all those of kinds of the group. Reads are those of the client that it wraps.
type guardedClient struct {
	client.Client // reads
	writer        client.Client
	group         *Group
	limiter       flowcontrol.RateLimiter
}

type unguardedKey struct{}

// Unguarded returns a context in which the group's client writes without asking. It is for what a process does once
// and for everybody, such as creating a default object; two members may then do it at the same time.
func Unguarded(ctx context.Context) context.Context {
	return context.WithValue(ctx, unguardedKey{}, true)
}

// A write is one request that changes something.
type write struct {
	verb string
	gvk  schema.GroupVersionKind
	key  client.ObjectKey
	// vn is the object's Virtual Node, if placed; else the caller does not tell.
	vn     sharding.VirtualNode
	placed bool
	// deletes is set if the watch tells the version, because the answer does not.
	deletes bool
	send    func(context.Context) error
	// version tells the object's version after the answer; nil if nothing does.
	version func() sharding.Version
}

// do sends a write if the member may, gives it up after the policy's RequestTimeout, and tells the member of what came
// of it, so that the next owner of the Virtual Node knows what it must have seen.
func (c *guardedClient) do(ctx context.Context, w write) error {
	e := c.group.member
	k := e.byKind[w.gvk.GroupKind()]
	j := jobFrom(ctx)
	// The budget of requests is waited for before the right to write is asked for, or it would age meanwhile.
	if err := c.limiter.Wait(ctx); err != nil {
		return fmt.Errorf("%s %s %s: %w", w.verb, w.gvk.Kind, w.key, err)
	}
	if ctx.Value(unguardedKey{}) != nil || (j == nil && k == nil) {
		return w.send(ctx)
	}
	j, done, err := c.jobFor(j, k, w)
	if err != nil {
		return fmt.Errorf("%s %s %s: %w", w.verb, w.gvk.Kind, w.key, err)
	}
	defer done()
	var d *deletion
	if w.deletes && k != nil {
		d = e.expectDeletion(j, k, keyOf(w.key))
	}
	sentAt, err := e.mayWrite(j)
	if err != nil {
		if d != nil {
			e.deletionAnswered(d, false)
		}
		return fmt.Errorf("%s %s %s: %w", w.verb, w.gvk.Kind, w.key, err)
	}
	ctx, cancel := context.WithTimeout(context.WithValue(ctx, jobKey{}, j), e.policy.RequestTimeout)
	defer cancel()
	err = w.send(ctx)
	res := result{kind: k, later: d != nil, err: err}
	if err == nil && w.version != nil {
		res.version = w.version()
	}
	e.answered(j, sentAt, res)
	if d != nil {
		e.deletionAnswered(d, err == nil)
	}
	return err
}

// jobFor returns on whose behalf a write is: that of the reconcile, unless the object is known to be in another Virtual
// Node, which then has to be this member's too.
func (c *guardedClient) jobFor(j *job, k *kind, w write) (*job, func(), error) {
	e := c.group.member
	if k == nil || (j != nil && (!w.placed || w.vn == j.ticket.VN)) {
		return j, func() {}, nil
	}
	if !w.placed {
		return nil, nil, fmt.Errorf("a write of a kind of the group needs the context of Reconcile, or an object with its "+
			"%s: %w", e.mapping.needs(), ErrNotOwned)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.m == nil {
		return nil, nil, errNotStarted
	}
	single, err := e.beginIn(k, w.vn)
	if err != nil {
		e.metrics.fencedWrites.Inc()
		return nil, nil, err
	}
	return single, func() { single.end(false) }, nil
}

func (c *guardedClient) of(verb string, obj client.Object, send func(context.Context) error) (write, error) {
	gvk, err := c.GroupVersionKindFor(obj)
	if err != nil {
		return write{}, err
	}
	w := write{
		verb: verb, gvk: gvk, key: client.ObjectKeyFromObject(obj), send: send,
		version: func() sharding.Version { return sharding.Version(obj.GetResourceVersion()) },
	}
	w.place(c.group.member.mapping, obj)
	return w, nil
}

// place finds out the Virtual Node of the object that is written.
func (w *write) place(m mapping, obj client.Object) {
	vn, err := m.of(obj)
	w.vn, w.placed = vn, err == nil
}

func (c *guardedClient) doWith(ctx context.Context, verb string, obj client.Object, send func(context.Context) error) error {
	w, err := c.of(verb, obj, send)
	if err != nil {
		return err
	}
	return c.do(ctx, w)
}

// Create implements client.Client.
func (c *guardedClient) Create(ctx context.Context, obj client.Object, opts ...client.CreateOption) error {
	return c.doWith(ctx, "create", obj, func(ctx context.Context) error { return c.writer.Create(ctx, obj, opts...) })
}

// Update implements client.Client.
func (c *guardedClient) Update(ctx context.Context, obj client.Object, opts ...client.UpdateOption) error {
	return c.doWith(ctx, "update", obj, func(ctx context.Context) error { return c.writer.Update(ctx, obj, opts...) })
}

// Patch implements client.Client.
func (c *guardedClient) Patch(ctx context.Context, obj client.Object, p client.Patch, opts ...client.PatchOption) error {
	p = c.sameObject(ctx, obj, p)
	return c.doWith(ctx, "patch", obj, func(ctx context.Context) error { return c.writer.Patch(ctx, obj, p, opts...) })
}

// Delete implements client.Client.
func (c *guardedClient) Delete(ctx context.Context, obj client.Object, opts ...client.DeleteOption) error {
	opts = c.sameDeletion(ctx, obj, opts)
	w, err := c.of("delete", obj, func(ctx context.Context) error { return c.writer.Delete(ctx, obj, opts...) })
	if err != nil {
		return err
	}
	w.version, w.deletes = nil, true
	return c.do(ctx, w)
}

// DeleteAllOf implements client.Client. Of a kind of the group, a reconcile deletes what is in its own Virtual Node: the
// rest is what other reconciles, and other members, are at work on.
func (c *guardedClient) DeleteAllOf(ctx context.Context, obj client.Object, opts ...client.DeleteAllOfOption) error {
	own := withinNode{job: jobFrom(ctx)}
	opts = append(opts[:len(opts):len(opts)], &own)
	w, err := c.of("delete all of", obj, func(ctx context.Context) error { return c.writer.DeleteAllOf(ctx, obj, opts...) })
	if err != nil {
		return err
	}
	w.version = nil
	e := c.group.member
	if !w.placed {
		var o client.DeleteAllOfOptions
		o.ApplyOptions(opts)
		w.vn, w.placed = e.mapping.at(client.ObjectKey{Namespace: o.Namespace})
	}
	if own.job != nil && own.job.kind != nil && e.byKind[w.gvk.GroupKind()] != nil && ctx.Value(unguardedKey{}) == nil {
		if _, labelled := e.mapping.(byLabel); labelled {
			own.narrow, w.placed = true, false // whatever obj is like
		} else if !w.placed {
			return fmt.Errorf("%s %s: the API server cannot select the objects of the reconcile's Virtual Node: %w", w.verb,
				w.gvk.Kind, ErrNotOwned)
		}
	}
	return c.do(ctx, w)
}

// withinNode selects the objects of a job's Virtual Node, if narrow is set, besides whatever else selects.
type withinNode struct {
	job    *job
	narrow bool
}

// ApplyToDeleteAllOf implements client.DeleteAllOfOption.
func (n *withinNode) ApplyToDeleteAllOf(o *client.DeleteAllOfOptions) {
	if !n.narrow {
		return
	}
	selector := labels.Everything()
	if o.LabelSelector != nil {
		selector = o.LabelSelector
	}
	own := labels.SelectorFromSet(labels.Set{sharding.LabelVirtualNode: n.job.ticket.VN.LabelValue()})
	requirements, _ := own.Requirements()
	o.LabelSelector = selector.Add(requirements...)
}

// Apply implements client.Client.
func (c *guardedClient) Apply(ctx context.Context, config runtime.ApplyConfiguration, opts ...client.ApplyOption) error {
	w, err := c.ofApply("apply", config, func(ctx context.Context) error { return c.writer.Apply(ctx, config, opts...) })
	if err != nil {
		return err
	}
	return c.do(ctx, w)
}

// ofApply reads an apply configuration, which the answer is written to.
func (c *guardedClient) ofApply(verb string, config runtime.ApplyConfiguration, send func(context.Context) error) (
	write, error) {
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(config)
	if err != nil {
		return write{}, fmt.Errorf("%s %T: %w", verb, config, err)
	}
	u := &unstructured.Unstructured{Object: content}
	version := func() sharding.Version {
		answer, err := runtime.DefaultUnstructuredConverter.ToUnstructured(config)
		if err != nil {
			return ""
		}
		return sharding.Version((&unstructured.Unstructured{Object: answer}).GetResourceVersion())
	}
	w := write{verb: verb, gvk: u.GroupVersionKind(), key: client.ObjectKeyFromObject(u), send: send, version: version}
	w.place(c.group.member.mapping, u)
	return w, nil
}

// Status implements client.Client.
func (c *guardedClient) Status() client.SubResourceWriter { return c.SubResource("status") }

// SubResource implements client.Client.
func (c *guardedClient) SubResource(name string) client.SubResourceClient {
	return guardedSubResource{c.Client.SubResource(name), c.writer.SubResource(name), c, name}
}

// guardedSubResource guards the writes of a subresource.
type guardedSubResource struct {
	client.SubResourceClient // reads
	writer                   client.SubResourceClient
	client                   *guardedClient
	name                     string
}

// Create implements client.SubResourceWriter.
func (s guardedSubResource) Create(ctx context.Context, obj, sub client.Object,
	opts ...client.SubResourceCreateOption) error {
	w, err := s.client.of("create "+s.name+" of", obj, func(ctx context.Context) error {
		return s.writer.Create(ctx, obj, sub, opts...)
	})
	if err != nil {
		return err
	}
	w.version = nil // the answer is in sub, which has no version
	return s.client.do(ctx, w)
}

// Update implements client.SubResourceWriter.
func (s guardedSubResource) Update(ctx context.Context, obj client.Object, opts ...client.SubResourceUpdateOption) error {
	w, err := s.client.of("update "+s.name+" of", obj, func(ctx context.Context) error {
		return s.writer.Update(ctx, obj, opts...)
	})
	if err != nil {
		return err
	}
	var o client.SubResourceUpdateOptions
	for _, opt := range opts {
		opt.ApplyToSubResourceUpdate(&o)
	}
	if o.SubResourceBody != nil {
		w.version = nil
	}
	return s.client.do(ctx, w)
}

// Patch implements client.SubResourceWriter.
func (s guardedSubResource) Patch(ctx context.Context, obj client.Object, p client.Patch,
	opts ...client.SubResourcePatchOption) error {
	p = s.client.sameObject(ctx, obj, p)
	w, err := s.client.of("patch "+s.name+" of", obj, func(ctx context.Context) error {
		return s.writer.Patch(ctx, obj, p, opts...)
	})
	if err != nil {
		return err
	}
	var o client.SubResourcePatchOptions
	for _, opt := range opts {
		opt.ApplyToSubResourcePatch(&o)
	}
	if o.SubResourceBody != nil {
		w.version = nil
	}
	return s.client.do(ctx, w)
}

// Apply implements client.SubResourceWriter.
func (s guardedSubResource) Apply(ctx context.Context, config runtime.ApplyConfiguration,
	opts ...client.SubResourceApplyOption) error {
	w, err := s.client.ofApply("apply "+s.name+" of", config, func(ctx context.Context) error {
		return s.writer.Apply(ctx, config, opts...)
	})
	if err != nil {
		return err
	}
	return s.client.do(ctx, w)
}
