package watchgroup

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/wire"
)

// writeTimeout bounds one request. What has no answer by then may still land.
const writeTimeout = 10 * time.Second

// errUnknown means that nobody knows whether a write has landed.
var errUnknown = errors.New("the outcome of the write is not known")

// write makes one request, and marks an error by which it may have landed.
func (r *Reconciler) write(ctx context.Context, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	err := do(ctx)
	if err == nil || refused(err) {
		return err
	}
	return fmt.Errorf("%w: %w", errUnknown, err)
}

// refused reports whether the API server has answered that it did not do what it was asked for. It does not say so when it
// is overwhelmed in the middle of a request, and a proxy says nothing by 408 of what has become of it.
func refused(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return false
	}
	code := status.Status().Code
	return code >= 400 && code < 500 && code != http.StatusRequestTimeout
}

// maxWrites bounds how many slices of a group are written at a time.
const maxWrites = 16

// apply makes the writes of one step, at the same time: their order does not matter, and any of them may fail. It returns
// when all have been answered, with all errors; the next look shows what has become of the rest.
func (r *Reconciler) apply(ctx context.Context, group *lbv1alpha1.WatchGroup, t *tracker, v *view, writes []sharding.Write) error {
	versions, errs := make([]string, len(writes)), make([]error, len(writes))
	limit := make(chan struct{}, maxWrites)
	var wait sync.WaitGroup
	for i, w := range writes {
		limit <- struct{}{}
		wait.Go(func() {
			defer func() { <-limit }()
			var err error
			if versions[i], err = r.applyOne(ctx, group, v.objects[w.Slice.Member], w); err != nil {
				errs[i] = fmt.Errorf("%s of the slice of member %s at epoch %d: %w", w.Op, w.Slice.Member, w.Slice.Epoch, err)
				return
			}
			r.Metrics.Writes.WithLabelValues(group.Namespace, group.Name, string(w.Op)).Inc()
		})
	}
	wait.Wait()
	for _, version := range versions {
		t.sawSlices(version)
	}
	if slices.Contains(versions, "") {
		t.forgetSlices()
	}
	return errors.Join(errs...)
}

// applyOne returns the slice's new resourceVersion, "" if that is not known.
func (r *Reconciler) applyOne(ctx context.Context, group *lbv1alpha1.WatchGroup, read *lbv1alpha1.VirtualNodeSlice,
	w sharding.Write) (version string, err error) {
	switch w.Op {
	case sharding.Create:
		o := &lbv1alpha1.VirtualNodeSlice{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: group.Namespace, Name: lbv1alpha1.MemberName(group.Name, w.Slice.Member),
			},
		}
		r.fill(o, group, w.Slice)
		if err := r.write(ctx, func(ctx context.Context) error { return r.Client.Create(ctx, o) }); err != nil {
			return "", err
		}
		return o.ResourceVersion, nil
	case sharding.Update:
		o := read.DeepCopy()
		r.fill(o, group, w.Slice)
		o.ResourceVersion = w.Slice.Version
		if err := r.write(ctx, func(ctx context.Context) error { return r.Client.Update(ctx, o) }); err != nil {
			return "", err
		}
		return o.ResourceVersion, nil
	case sharding.Delete:
		return "", r.remove(ctx, read)
	default:
		return "", fmt.Errorf("unknown operation %q", w.Op)
	}
}

// fill makes the object what the core wants it to be.
func (r *Reconciler) fill(o *lbv1alpha1.VirtualNodeSlice, group *lbv1alpha1.WatchGroup, s sharding.Slice) {
	if o.DeletionTimestamp == nil {
		controllerutil.AddFinalizer(o, lbv1alpha1.Finalizer)
	}
	if o.Labels == nil {
		o.Labels = make(map[string]string, 1)
	}
	o.Labels[lbv1alpha1.LabelWatchGroup] = group.Name
	o.OwnerReferences = []metav1.OwnerReference{{
		APIVersion: lbv1alpha1.GroupVersion.String(), Kind: "WatchGroup", Name: group.Name, UID: group.UID,
	}}
	o.Spec = wire.SliceSpec(group.Name, s)
}

// remove takes the finalizer off a slice that is still the one that was read, and deletes it if it is then still the same.
// A coordinator that dies between the two leaves a slice that the next one deletes.
func (r *Reconciler) remove(ctx context.Context, read *lbv1alpha1.VirtualNodeSlice) error {
	o := read.DeepCopy()
	if controllerutil.RemoveFinalizer(o, lbv1alpha1.Finalizer) {
		if err := r.write(ctx, func(ctx context.Context) error { return r.Client.Update(ctx, o) }); err != nil {
			return err
		}
	}
	if o.DeletionTimestamp != nil {
		return nil
	}
	return r.write(ctx, func(ctx context.Context) error {
		return client.IgnoreNotFound(r.Client.Delete(ctx, o,
			client.Preconditions{UID: &o.UID, ResourceVersion: &o.ResourceVersion}))
	})
}
