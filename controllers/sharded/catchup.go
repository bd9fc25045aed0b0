package sharded

import (
	"context"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	"github.com/drover-sh/drover/sharding"
)

// A CatchUp waits until a stock cache shows at least what stood at the API server when the wait began: for kinds that are
// not in the group, what the barrier is for those that are. It costs one consistent list of metadata for each scope. It
// is not safe for concurrent use.
type CatchUp struct {
	scheme       *runtime.Scheme
	live, cached client.Reader
	now          func() time.Time
	looked       time.Time
	awaits       []*awaited
}

// A Scope is a part of a kind: the objects that a list with these options returns.
type Scope struct {
	// List is an empty list of the kind, of the type in which the cache holds it.
	List client.ObjectList
	// Options are a namespace or label selectors. None: all objects.
	Options []client.ListOption
}

// NewCatchUp returns a wait that begins with the first Done. live reads from the API server, cached from the cache.
func NewCatchUp(scheme *runtime.Scheme, live, cached client.Reader, scopes ...Scope) *CatchUp {
	c := &CatchUp{scheme: scheme, live: live, cached: cached, now: time.Now}
	for _, s := range scopes {
		c.awaits = append(c.awaits, &awaited{scope: s})
	}
	return c
}

// relistAfter is how many looks at a cache that is behind are made before the API server is asked again what still exists:
// an object that was deleted before the cache ever showed it would be waited for in vain.
const relistAfter = 20

// lookPeriod is how often the cache is looked at, however often it is asked for: many requests may wait for one catch-up.
const lookPeriod = takeoverRetry / 2

// Done reports whether the cache has caught up. It does not block for that: the caller asks again in a while.
func (c *CatchUp) Done(ctx context.Context) (bool, error) {
	left := slices.DeleteFunc(slices.Clone(c.awaits), func(a *awaited) bool { return a.done })
	if now := c.now(); len(left) > 0 && now.Sub(c.looked) >= lookPeriod {
		c.looked = now
		for _, a := range left {
			if err := c.look(ctx, a); err != nil {
				return false, err
			}
		}
	}
	return !slices.ContainsFunc(left, func(a *awaited) bool { return !a.done }), nil
}

func (c *CatchUp) look(ctx context.Context, a *awaited) error {
	if a.looks%relistAfter == 0 {
		list := &metav1.PartialObjectMetadataList{}
		gvk, err := apiutil.GVKForObject(a.scope.List, c.scheme)
		if err != nil {
			return fmt.Errorf("catching up: %w", err)
		}
		list.SetGroupVersionKind(gvk)
		if err := c.live.List(ctx, list, a.scope.Options...); err != nil {
			return fmt.Errorf("listing %s to catch up with: %w", gvk.Kind, err)
		}
		a.listed(list)
	}
	a.looks++
	cached := a.scope.List.DeepCopyObject().(client.ObjectList)
	if err := c.cached.List(ctx, cached, append([]client.ListOption{client.UnsafeDisableDeepCopy}, a.scope.Options...)...); err != nil {
		return fmt.Errorf("listing %T from the cache: %w", cached, err)
	}
	items, err := meta.ExtractList(cached)
	if err != nil {
		return fmt.Errorf("listing %T from the cache: %w", cached, err)
	}
	objects := make([]metav1.Object, len(items))
	for i := range items {
		if objects[i], err = meta.Accessor(items[i]); err != nil {
			return fmt.Errorf("listing %T from the cache: %w", cached, err)
		}
	}
	return a.shown(objects)
}

// awaited is what the cache of one scope has to show.
type awaited struct {
	scope Scope
	looks int
	// versions are those of objects that the cache has not shown yet, from the first list; exist are all that the last list
	// had, and at is the version of the first.
	versions map[types.UID]sharding.Version
	exist    map[types.UID]bool
	at       sharding.Version
	done     bool
}

// listed takes in what stands at the API server. What is awaited is that of the first list, less what is gone by now, so
// that a kind which changes all the time is caught up with, too.
func (a *awaited) listed(list *metav1.PartialObjectMetadataList) {
	first := a.exist == nil
	a.exist = make(map[types.UID]bool, len(list.Items))
	if first {
		a.versions, a.at = make(map[types.UID]sharding.Version, len(list.Items)), sharding.Version(list.ResourceVersion)
	}
	for i := range list.Items {
		o := &list.Items[i]
		a.exist[o.UID] = true
		if first {
			a.versions[o.UID] = sharding.Version(o.ResourceVersion)
		}
	}
	for uid := range a.versions {
		if !a.exist[uid] {
			delete(a.versions, uid)
		}
	}
}

// shown takes in what the cache holds.
func (a *awaited) shown(objects []metav1.Object) error {
	stale := false
	for _, o := range objects {
		need, wanted := a.versions[o.GetUID()]
		if !wanted && a.exist[o.GetUID()] {
			continue // seen before
		}
		version := sharding.Version(o.GetResourceVersion())
		if wanted {
			c, err := compareVersions(version, need)
			if err != nil {
				return fmt.Errorf("comparing versions of %s/%s: %w", o.GetNamespace(), o.GetName(), err)
			}
			if c >= 0 {
				delete(a.versions, o.GetUID())
			}
			continue
		}
		c, err := compareVersions(version, a.at)
		if err != nil {
			return fmt.Errorf("comparing versions of %s/%s: %w", o.GetNamespace(), o.GetName(), err)
		}
		stale = stale || c <= 0 // it was deleted before the list, or since
	}
	a.done = len(a.versions) == 0 && !stale
	return nil
}
