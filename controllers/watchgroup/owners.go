package watchgroup

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/metadata"
	"k8s.io/utils/lru"

	"github.com/drover-sh/drover/sharding"
)

// maxDepth bounds how many owners above an object are looked at. Deeper ones count as roots, which costs locality and
// nothing else.
const maxDepth = 8

// rememberedOwners bounds how many labelled owners are remembered.
const rememberedOwners = 1 << 16

// Owners finds out what objects inherit from their controller owners. Only owners of the groups' resources are looked up;
// any other hands down the key that its name gives.
type Owners struct {
	Metadata metadata.Interface
	Mapper   meta.RESTMapper
	// labelled holds the labels of owners by UID. A label never changes, so what is known of it stays true.
	labelled *lru.Cache
}

// NewOwners returns Owners that reads with these.
func NewOwners(client metadata.Interface, mapper meta.RESTMapper) *Owners {
	return &Owners{Metadata: client, Mapper: mapper, labelled: lru.New(rememberedOwners)}
}

// lineage returns what o, in the given namespace, inherits. An owner that is gone hands down the key of its name.
func (w *Owners) lineage(ctx context.Context, all map[schema.GroupResource]scheme, s scheme, namespace string,
	o metav1.Object) (lineage, error) {
	return w.climb(ctx, all, s, namespace, metav1.GetControllerOfNoCopy(o), maxDepth)
}

func (w *Owners) climb(ctx context.Context, all map[schema.GroupResource]scheme, s scheme, namespace string,
	ref *metav1.OwnerReference, depth int) (lineage, error) {
	if ref == nil || depth == 0 {
		return lineage{}, nil
	}
	if l, ok := w.labelled.Get(ref.UID); ok {
		if vn, ok := l.(labels).valid(s.buckets); ok {
			return lineage{takesPart: true, labelled: true, virtualNode: vn}, nil
		}
	}
	gv, err := schema.ParseGroupVersion(ref.APIVersion)
	if err != nil {
		return lineage{}, fmt.Errorf("ownerReferences: apiVersion %q: %w", ref.APIVersion, err)
	}
	self := sharding.ObjectRef{Group: gv.Group, Kind: ref.Kind, Namespace: namespace, Name: ref.Name}
	kind := schema.GroupKind{Group: gv.Group, Kind: ref.Kind}
	mapping, err := w.Mapper.RESTMapping(kind, gv.Version)
	if meta.IsNoMatchError(err) {
		// The version is that of whoever wrote the reference, perhaps years ago, and need not be served any more.
		mapping, err = w.Mapper.RESTMapping(kind)
	}
	if meta.IsNoMatchError(err) {
		return lineage{key: self.Key()}, nil
	}
	if err != nil {
		return lineage{}, fmt.Errorf("owner %s %s: %w", ref.Kind, ref.Name, err)
	}
	if mapping.Scope.Name() == meta.RESTScopeNameRoot {
		self.Namespace = ""
	}
	if _, ours := all[mapping.Resource.GroupResource()]; !ours {
		return lineage{key: self.Key()}, nil
	}
	owner, err := w.get(ctx, mapping, self, ref.UID)
	if err != nil || owner == nil {
		return lineage{key: self.Key()}, err
	}
	if l := read(owner); l != (labels{}) {
		if vn, ok := l.valid(s.buckets); ok {
			w.labelled.Add(ref.UID, l)
			return lineage{takesPart: true, labelled: true, virtualNode: vn}, nil
		}
	}
	above, err := w.climb(ctx, all, s, owner.Namespace, metav1.GetControllerOfNoCopy(owner), depth-1)
	if err != nil {
		return lineage{}, err
	}
	result := lineage{takesPart: takesPart(all[mapping.Resource.GroupResource()], owner, above)}
	annotation := owner.Annotations[sharding.AnnotationHashKey]
	if annotation == "" && above.labelled {
		result.labelled, result.virtualNode = true, above.virtualNode
		return result, nil
	}
	result.key = sharding.HashKey(annotation, above.key, self)
	return result, nil
}

// get returns the owner's metadata, nil if it is gone.
func (w *Owners) get(ctx context.Context, mapping *meta.RESTMapping, self sharding.ObjectRef, uid types.UID,
) (*metav1.PartialObjectMetadata, error) {
	owner, err := w.Metadata.Resource(mapping.Resource).Namespace(self.Namespace).Get(ctx, self.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("owner %s %s/%s: %w", mapping.Resource.GroupResource(), self.Namespace, self.Name, err)
	}
	if owner.UID != uid {
		return nil, nil
	}
	return owner, nil
}
