package watchgroup

import (
	"fmt"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
)

var realmKind = schema.GroupVersionKind{Group: "example.com", Version: "v1", Kind: "Realm"}

// backfilled runs the backfill alone, on a group of parents, children and what has no namespace.
func backfilled(t *testing.T) *everything {
	t.Helper()
	c, ns := api(t)
	e := &everything{t: t, c: c, namespace: ns}
	e.group = newGroup(t, c, ns, func(s *lbv1alpha1.WatchGroupSpec) {
		family(s)
		s.Resources = append(s.Resources, lbv1alpha1.Resource{Group: "example.com", Resource: "realms"})
	})
	e.process = start(t, apiServer, Options{Backfill: true})
	return e
}

func (e *everything) labelled(objects ...*unstructured.Unstructured) {
	e.t.Helper()
	for _, o := range objects {
		eventually(e.t, o.GetName()+" is labelled", func() string {
			if read(e.get(o)) == (labels{}) {
				return "not yet"
			}
			return ""
		})
	}
}

func (e *everything) patch(o *unstructured.Unstructured, change func(*unstructured.Unstructured)) {
	e.t.Helper()
	before := o.DeepCopy()
	change(o)
	if err := e.c.Patch(e.t.Context(), o, client.MergeFrom(before)); err != nil {
		e.t.Fatal(err)
	}
}

// There is no list of what has no namespace within one, and nothing in it that a namespaced object could own.
func TestAGroupHasResourcesWithAndWithoutNamespaces(t *testing.T) {
	e := backfilled(t)
	e.labelled(e.create(e.object(parentKind, "namespaced", optIn)))
	realm := e.object(realmKind, e.namespace, nil)
	realm.SetNamespace("")
	install(t, e.c, realm)
	child := e.create(e.object(childKind, "c", nil, realm))
	e.patch(realm, func(o *unstructured.Unstructured) { o.SetAnnotations(optIn) })
	e.labelled(realm, child)
	e.wantLabels(child, sharding.ObjectRef{Group: "example.com", Kind: "Realm", Name: e.namespace}.Key())
	e.wantLabels(realm, sharding.ObjectRef{Group: "example.com", Kind: "Realm", Name: e.namespace}.Key())
}

// Owner references can be edited into a circle, in which each would wait for the others to be labelled first.
func TestObjectsThatOwnEachOtherAreLabelled(t *testing.T) {
	e := backfilled(t)
	owns := func(owner, o *unstructured.Unstructured) {
		e.patch(o, func(o *unstructured.Unstructured) {
			o.SetOwnerReferences([]metav1.OwnerReference{*metav1.NewControllerRef(owner, owner.GroupVersionKind())})
		})
	}
	a, b, own := e.object(parentKind, "a", nil), e.object(childKind, "b", nil), e.object(parentKind, "its-own", nil)
	e.create(a)
	e.create(b)
	e.create(own)
	below := e.create(e.object(childKind, "below", nil, b))
	owns(a, b)
	owns(b, a)
	owns(own, own)
	for _, o := range []*unstructured.Unstructured{a, own} {
		e.patch(o, func(o *unstructured.Unstructured) { o.SetAnnotations(optIn) })
	}
	e.labelled(a, b, own, below)
}

// Whoever takes no part is never labelled, so that nobody may wait for it. That it refers to its owner by a version that is
// not served any more is no reason to take none.
func TestAnObjectWaitsForThoseThatTakePart(t *testing.T) {
	e := backfilled(t)
	parent := e.create(e.object(parentKind, "p", nil))
	child := e.object(childKind, "old", nil, parent)
	stranger := e.object(childKind, "stranger", nil, parent)
	for o, change := range map[*unstructured.Unstructured]func(*metav1.OwnerReference){
		child:    func(ref *metav1.OwnerReference) { ref.APIVersion = "example.com/v1alpha1" },
		stranger: func(ref *metav1.OwnerReference) { ref.Kind = "Unknown" },
	} {
		refs := o.GetOwnerReferences()
		change(&refs[0])
		o.SetOwnerReferences(refs)
		e.create(o)
	}
	chain := []*unstructured.Unstructured{e.create(e.object(parentKind, "chain-0", nil))}
	for i := range maxDepth + 2 {
		chain = append(chain, e.create(e.object(parentKind, fmt.Sprintf("chain-%d", i+1), nil, chain[i])))
	}
	for _, o := range []*unstructured.Unstructured{parent, chain[0]} {
		e.patch(o, func(o *unstructured.Unstructured) { o.SetAnnotations(optIn) })
	}
	e.labelled(child, parent)
	e.labelled(chain...)
	if read(e.get(stranger)) != (labels{}) {
		t.Errorf("an object whose owner is of no kind of the group carries %v", read(stranger))
	}
	e.wantLabels(child, e.key(parentKind, "p"))
}

// Namespaces come and go: what lists have told of them is not kept for ever.
func TestLittleIsRememberedOfNamespaces(t *testing.T) {
	b, f := &Backfill{}, &feed{}
	for i := range 10 * maxOwners {
		b.ownersIn(f, within{parentsResource, fmt.Sprintf("ns-%d", i)})
	}
	if len(f.owners) > maxOwners {
		t.Errorf("%d places are remembered, want at most %d", len(f.owners), maxOwners)
	}
}
