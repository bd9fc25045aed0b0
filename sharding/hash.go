package sharding

import (
	"fmt"
	"hash/crc32"
	"strconv"
)

// The names that the paper gives to its opt-in, its hash key and its label (sections 5.4.2 and 6.3.2), and the label
// that Buckets add to them.
const (
	// AnnotationLoadBalanced opts an object in when its value is "true".
	AnnotationLoadBalanced = "loadbalance.k8s.io/loadbalanced"
	// AnnotationHashKey opts an object in and gives its hash key.
	AnnotationHashKey = "loadbalance.k8s.io/hash-key"
	// LabelVirtualNode holds the number of the object's Virtual Node in decimal.
	LabelVirtualNode = "loadbalance.k8s.io/vn"
	// LabelBucket holds the number of the bucket of the object's Virtual Node in decimal.
	LabelBucket = "loadbalance.k8s.io/vn-bucket"
)

// MaxVirtualNodes is the largest V that the package is built and measured for.
const MaxVirtualNodes = 100_000

// ValidateVirtualNodes checks a WatchGroup's number of Virtual Nodes. field names it in the error.
func ValidateVirtualNodes(field string, v int) error {
	if v < 1 || v > MaxVirtualNodes {
		return fmt.Errorf("%s: %d is not between 1 and %d", field, v, MaxVirtualNodes)
	}
	return nil
}

// An ObjectRef names an object. The API version is left out, because an object keeps its Virtual Node when it is served
// in another version.
type ObjectRef struct {
	Group, Kind, Namespace, Name string
}

// Key returns the hash key that the object has when nothing else is said: group/kind/namespace/name. None of the four
// can contain a slash, so different objects have different keys. Group is empty for the core group, Namespace for a
// cluster-scoped object.
func (r ObjectRef) Key() string {
	return r.Group + "/" + r.Kind + "/" + r.Namespace + "/" + r.Name
}

// OptedIn reports whether an object takes part (section 6.3.2): by the value of AnnotationLoadBalanced, by a hash key,
// or because its controller owner does.
func OptedIn(loadBalanced, hashKey string, ownerOptedIn bool) bool {
	return loadBalanced == "true" || hashKey != "" || ownerOptedIn
}

// HashKey returns the key by which an object finds its Virtual Node: the value of its AnnotationHashKey, else the key
// of its controller owner, so that children follow their parent with nothing to annotate, else its own name.
//
// ownerKey is what HashKey returned for the owner, "" for an object without a controller owner; an owner that is
// annotated, or that has an owner itself, hands its key down in this way. A caller that cannot look the owner up passes
// the owner's ObjectRef.Key, with an empty Namespace if the owner is cluster-scoped.
func HashKey(annotation, ownerKey string, self ObjectRef) string {
	switch {
	case annotation != "":
		return annotation
	case ownerKey != "":
		return ownerKey
	default:
		return self.Key()
	}
}

// VirtualNodeOf is the first level of the two-level hash (section 5.3.1): the CRC32 (IEEE) of the hash key modulo v.
// It depends on nothing but its arguments, so every process computes the same for as long as the group exists. v must
// be at least 1.
func VirtualNodeOf(hashKey string, v int) VirtualNode {
	return VirtualNode(crc32.ChecksumIEEE([]byte(hashKey)) % uint32(v))
}

// LabelValue returns the value of LabelVirtualNode.
func (vn VirtualNode) LabelValue() string { return strconv.Itoa(int(vn)) }

// ParseVirtualNode reads the value of LabelVirtualNode in a group of v Virtual Nodes. Only what LabelValue writes is
// accepted: "07" would be found by no selector.
func ParseVirtualNode(label string, v int) (VirtualNode, error) {
	n, err := strconv.Atoi(label)
	if err != nil || n < 0 || n >= v || strconv.Itoa(n) != label {
		return 0, fmt.Errorf("label %s: %q is not a Virtual Node of %d", LabelVirtualNode, label, v)
	}
	return VirtualNode(n), nil
}
