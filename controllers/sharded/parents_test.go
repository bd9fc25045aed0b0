package sharded

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/history"
)

const (
	wanted   = "generation" // of a parent, copied to its child
	observed = "example.com/observed"
)

// A parentReconciler is an ordinary reconciler: it gives every parent a child, brings that up to date, and notes on the
// parent that it has. It records what it writes.
type parentReconciler struct {
	client.Client
	world  *world
	member string
}

func (r *parentReconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	var parent corev1.ConfigMap
	if err := r.Get(ctx, req.NamespacedName, &parent); err != nil {
		return reconcile.Result{}, r.orphan(ctx, req, err)
	}
	if parent.Data[wanted] == "" {
		return reconcile.Result{}, nil // the API server's own
	}
	var child corev1.Secret
	switch err := r.Get(ctx, req.NamespacedName, &child); {
	case apierrors.IsNotFound(err):
		child = corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: req.Namespace, Name: req.Name, Labels: parent.Labels},
			StringData: map[string]string{wanted: parent.Data[wanted]},
		}
		if err := controllerutil.SetControllerReference(&parent, &child, r.Scheme()); err != nil {
			return reconcile.Result{}, err
		}
		if err := r.Create(ctx, &child); err != nil {
			return reconcile.Result{}, err
		}
		r.wrote(ctx, realChildren, &child, false)
	case err != nil:
		return reconcile.Result{}, err
	case string(child.Data[wanted]) != parent.Data[wanted]:
		before := child.DeepCopy()
		child.Data = map[string][]byte{wanted: []byte(parent.Data[wanted])}
		if err := r.Patch(ctx, &child, client.MergeFrom(before)); err != nil {
			return reconcile.Result{}, err
		}
		r.wrote(ctx, realChildren, &child, false)
	}
	if parent.Annotations[observed] == parent.Data[wanted] {
		return reconcile.Result{}, nil
	}
	before := parent.DeepCopy()
	metav1.SetMetaDataAnnotation(&parent.ObjectMeta, observed, parent.Data[wanted])
	if err := r.Patch(ctx, &parent, client.MergeFrom(before)); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	r.wrote(ctx, realParents, &parent, false)
	return reconcile.Result{}, nil
}

// orphan deletes the child of a parent that is gone.
func (r *parentReconciler) orphan(ctx context.Context, req reconcile.Request, err error) error {
	if !apierrors.IsNotFound(err) {
		return err
	}
	var child corev1.Secret
	if err := r.Get(ctx, req.NamespacedName, &child); err != nil {
		return client.IgnoreNotFound(err)
	}
	if err := r.Delete(ctx, &child); err != nil {
		return client.IgnoreNotFound(err)
	}
	r.wrote(ctx, realChildren, &child, true)
	return nil
}

func (r *parentReconciler) wrote(ctx context.Context, res sharding.Resource, obj client.Object, deleted bool) {
	vn, _ := r.world.by.of(obj)
	r.world.tape.add(history.Record{
		Kind: history.Wrote, Actor: history.Reconciler, Member: r.member, Session: SessionOf(ctx), VN: vn, Resource: res,
		Object: keyOf(client.ObjectKeyFromObject(obj)), Version: sharding.Version(obj.GetResourceVersion()), Deleted: deleted,
	})
}

// labelsFor are what the webhook puts on an object.
func labelsFor(ns, name string) map[string]string {
	vn := sharding.VirtualNodeOf(sharding.ObjectRef{Kind: "ConfigMap", Namespace: ns, Name: name}.Key(), realV)
	return map[string]string{sharding.LabelVirtualNode: vn.LabelValue(), sharding.LabelBucket: vn.LabelValue()}
}

// user writes a parent as somebody outside the group.
func (w *world) user(name string, generation int) {
	w.t.Helper()
	if err := w.tryUser(name, generation); err != nil {
		w.t.Errorf("user: %v", err)
	}
}

// tryUser writes a parent. The tape stands still meanwhile, so that the write has its place.
func (w *world) tryUser(name string, generation int) error {
	w.tape.mu.Lock()
	defer w.tape.mu.Unlock()
	parent := &corev1.ConfigMap{ObjectMeta: w.metaOf(name)}
	before := parent.DeepCopy()
	parent.Data = map[string]string{wanted: strconv.Itoa(generation)}
	err := w.c.Patch(context.Background(), parent, client.MergeFrom(before))
	if apierrors.IsNotFound(err) {
		err = w.c.Create(context.Background(), parent)
	}
	if err != nil {
		return err
	}
	w.userWrote(parent, false)
	return nil
}

// metaOf places a parent. With labels all are in one namespace.
func (w *world) metaOf(name string) metav1.ObjectMeta {
	m := metav1.ObjectMeta{Namespace: w.spaces[crc32.ChecksumIEEE([]byte(name))%uint32(len(w.spaces))], Name: name}
	if _, ok := w.by.(byLabel); ok {
		m.Labels = labelsFor(w.ns, name)
	}
	return m
}

// list returns what there is in the namespaces of the world's parents.
func (w *world) list(list client.ObjectList) error {
	if len(w.spaces) == 1 {
		return w.c.List(context.Background(), list, client.InNamespace(w.spaces[0]))
	}
	if err := w.c.List(context.Background(), list); err != nil {
		return err
	}
	all, err := meta.ExtractList(list)
	if err != nil {
		return err
	}
	all = slices.DeleteFunc(all, func(o runtime.Object) bool {
		return !slices.Contains(w.spaces, o.(client.Object).GetNamespace())
	})
	return meta.SetList(list, all)
}

func (w *world) userWrote(parent client.Object, deleted bool) {
	vn, _ := w.by.of(parent)
	w.tape.records = append(w.tape.records, history.Record{
		At: time.Since(w.tape.start), Kind: history.Wrote, Actor: history.User, VN: vn, Resource: realParents,
		Object: keyOf(client.ObjectKeyFromObject(parent)), Version: sharding.Version(parent.GetResourceVersion()), Deleted: deleted,
	})
}

func (w *world) users(n, generation int) {
	w.t.Helper()
	for i := range n {
		w.user(fmt.Sprintf("p%d", i), generation)
	}
}

// reconciled waits until n parents have been observed, each with one child, at the generation.
func (w *world) reconciled(n, generation int) {
	w.t.Helper()
	eventually(w.t, "every parent reconciled", func() error {
		var parents corev1.ConfigMapList
		var children corev1.SecretList
		if err := errors.Join(w.list(&parents), w.list(&children)); err != nil {
			return err
		}
		want, seen := strconv.Itoa(generation), 0
		for _, p := range parents.Items {
			if p.Annotations[observed] == want {
				seen++
			}
		}
		for _, c := range children.Items {
			if string(c.Data[wanted]) != want {
				return fmt.Errorf("child %s is at %s, want %s", c.Name, c.Data[wanted], want)
			}
		}
		if seen != n || len(children.Items) != n {
			return fmt.Errorf("%d parents at %s and %d children, want %d", seen, want, len(children.Items), n)
		}
		return nil
	})
}

// shared waits until the members serve everything, in equal shares, and nothing moves.
func (w *world) shared(members ...*participant) {
	w.t.Helper()
	eventually(w.t, "shares", func() error {
		total := 0
		for _, p := range members {
			e := p.group.member
			if e.serving() != nil {
				return fmt.Errorf("%s: %w", p.name, e.serving())
			}
			e.mu.RLock()
			owned, ready, moving := e.m.Owned().Len(), e.ready.Len(), e.slice.Moving()
			e.mu.RUnlock()
			if owned != ready || moving != 0 || owned < realV/len(members) || owned > (realV+len(members)-1)/len(members) {
				return fmt.Errorf("%s owns %d, serves %d, and %d are moving", p.name, owned, ready, moving)
			}
			total += owned
		}
		if total != realV {
			return fmt.Errorf("%d of %d owned", total, realV)
		}
		return nil
	})
	// What each caches is what it owns.
	for _, p := range members {
		eventually(w.t, "cache of "+p.name, func() error {
			var list corev1.ConfigMapList
			if err := w.list(&list); err != nil {
				return err
			}
			e := p.group.member
			e.mu.RLock()
			defer e.mu.RUnlock()
			var want, have []string
			for i := range list.Items {
				if vn, err := w.by.of(&list.Items[i]); err == nil && e.m.Owned().Has(vn) {
					want = append(want, list.Items[i].Name)
				}
			}
			for _, obj := range e.kinds[realParents].store.indexer.List() {
				if o := obj.(client.Object); slices.Contains(w.spaces, o.GetNamespace()) {
					have = append(have, o.GetName())
				}
			}
			slices.Sort(want)
			slices.Sort(have)
			if !slices.Equal(want, have) {
				return fmt.Errorf("caches %v, owns %v", have, want)
			}
			return nil
		})
	}
}

func (w *world) check() {
	w.t.Helper()
	violations := history.Check(w.tape.all(), history.Options{Compare: compareVersions, Roots: []sharding.Resource{realParents}})
	for i, v := range violations {
		if i < 10 {
			w.t.Error(v)
		}
	}
	if len(violations) > 0 {
		w.t.Logf("%d violations in %d records", len(violations), len(w.tape.all()))
	}
}
