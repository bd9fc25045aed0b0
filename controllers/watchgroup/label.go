package watchgroup

import (
	"strconv"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/drover-sh/drover/sharding"
)

// labels are the two that an object carries which takes part. They never change in its lifetime.
type labels struct {
	virtualNode, bucket string
}

func labelsOf(b sharding.Buckets, vn sharding.VirtualNode) labels {
	return labels{vn.LabelValue(), strconv.Itoa(b.Of(vn))}
}

// read returns the labels of an object.
func read(o metav1.Object) labels {
	all := o.GetLabels()
	return labels{all[sharding.LabelVirtualNode], all[sharding.LabelBucket]}
}

// valid returns the Virtual Node that the labels name, and false if some member could not find the object by them.
func (l labels) valid(b sharding.Buckets) (sharding.VirtualNode, bool) {
	vn, err := sharding.ParseVirtualNode(l.virtualNode, b.V)
	if err != nil {
		return 0, false
	}
	return vn, l == labelsOf(b, vn)
}

// A lineage is what an object inherits from its controller owner.
type lineage struct {
	// key is the owner's hash key, "" if there is no owner.
	key string
	// takesPart is whether the owner does.
	takesPart bool
	// virtualNode is the one that the owner carries already, if labelled is set. Children follow it even if the owner's
	// annotation has been changed since.
	virtualNode sharding.VirtualNode
	labelled    bool
}

// takesPart reports whether an object has to be labelled.
func takesPart(s scheme, o metav1.Object, owner lineage) bool {
	a := o.GetAnnotations()
	return s.all || sharding.OptedIn(a[sharding.AnnotationLoadBalanced], a[sharding.AnnotationHashKey], owner.takesPart)
}

// labelled returns the labels that an object which takes part is to carry, and false if it has no name yet to make a key of.
func labelled(s scheme, o metav1.Object, self sharding.ObjectRef, owner lineage) (labels, bool) {
	annotation := o.GetAnnotations()[sharding.AnnotationHashKey]
	if annotation == "" && owner.labelled {
		return labelsOf(s.buckets, owner.virtualNode), true
	}
	if annotation == "" && owner.key == "" && self.Name == "" {
		return labels{}, false
	}
	vn := sharding.VirtualNodeOf(sharding.HashKey(annotation, owner.key, self), s.buckets.V)
	return labelsOf(s.buckets, vn), true
}

// A verdict is what the webhook does with an object.
type verdict struct {
	outcome string
	// set are the labels that the object gets; strip takes them away.
	set   *labels
	strip bool
}

// onCreate decides on an object that is being created. Whatever labels it comes with are somebody's mistake or a copy.
func onCreate(s scheme, o metav1.Object, self sharding.ObjectRef, owner lineage) verdict {
	carries := read(o) != labels{}
	if !takesPart(s, o, owner) {
		if carries {
			return verdict{outcome: outcomeStripped, strip: true}
		}
		return verdict{outcome: outcomeNone}
	}
	l, ok := labelled(s, o, self, owner)
	if !ok {
		return verdict{outcome: outcomeLate, strip: carries}
	}
	return verdict{outcome: outcomeLabelled, set: &l}
}

// gains reports whether an update puts labels on an object that has had none that count. Only the backfill does that, and
// whether it is the backfill shows in that they are the right ones.
func gains(s scheme, before, o metav1.Object) bool {
	_, had := read(before).valid(s.buckets)
	_, has := read(o).valid(s.buckets)
	return !had && has
}

// onUpdate decides on an object that is being updated. A label that is left out, as by a writer that puts the whole object,
// stays; one that is changed is left to the policy, which refuses it with a reason. right is what an object that gains
// labels is to carry, nil if it gains none or has to have none.
//
// An object that has none yet is not labelled here: it may have children that have none either, and whoever reconciles it
// would take them for missing. The backfill labels them first.
func onUpdate(s scheme, before, o metav1.Object, right *labels) verdict {
	old, now := read(before), read(o)
	if _, ok := old.valid(s.buckets); !ok {
		switch {
		case now == old:
			return verdict{outcome: outcomeNone}
		case right != nil && (now == *right || now.virtualNode == old.virtualNode):
			return verdict{outcome: outcomeKept}
		default:
			return verdict{outcome: outcomeStripped, strip: true}
		}
	}
	kept := now
	if kept.virtualNode == "" {
		kept.virtualNode = old.virtualNode
	}
	if kept.bucket == "" {
		kept.bucket = old.bucket
	}
	if kept == now {
		return verdict{outcome: outcomeKept}
	}
	return verdict{outcome: outcomeRestored, set: &kept}
}
