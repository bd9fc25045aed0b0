package capacity

import (
	"fmt"
	"math"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// ResourcesOf converts a Kubernetes resource list. Fractions are rounded up, as the scheduler does, amounts beyond an
// int64 are capped, and zero or negative amounts are left out.
func ResourcesOf(list corev1.ResourceList) Resources {
	r := make(Resources, len(list))
	for name, q := range list {
		if v := amount(name, q); v > 0 {
			r[name] = v
		}
	}
	return r
}

// The most that an int64 holds of a unit and of a thousandth. A Quantity can be larger, and then wraps around silently.
var (
	maxUnits = resource.NewQuantity(math.MaxInt64, resource.DecimalSI)
	maxMilli = resource.NewMilliQuantity(math.MaxInt64, resource.DecimalSI)
)

func amount(name corev1.ResourceName, q resource.Quantity) int64 {
	switch {
	case name == corev1.ResourceCPU && q.Cmp(*maxMilli) > 0, q.Cmp(*maxUnits) > 0:
		return math.MaxInt64
	case name == corev1.ResourceCPU:
		return q.MilliValue()
	default:
		return q.Value()
	}
}

// ParseResources reads a map of resource names to Kubernetes quantities. The error names the resource and the value
// that is no quantity or is negative; zero amounts are left out.
func ParseResources(m map[string]string) (Resources, error) {
	r := make(Resources, len(m))
	// In order, so that of several bad values always the same one is reported.
	for _, name := range sortedKeys(m) {
		if name == "" {
			return nil, fmt.Errorf("resources[%q]: the resource has no name", name)
		}
		q, err := resource.ParseQuantity(m[name])
		if err != nil {
			return nil, fmt.Errorf("resources[%q]: %q is not a quantity: %w", name, m[name], err)
		}
		if q.Sign() < 0 {
			return nil, fmt.Errorf("resources[%q]: %q is negative", name, m[name])
		}
		if v := amount(corev1.ResourceName(name), q); v > 0 {
			r[corev1.ResourceName(name)] = v
		}
	}
	return r, nil
}

// List converts to a Kubernetes resource list: bytes in binary units, everything else in decimal ones. Zero and
// negative amounts are left out.
func (r Resources) List() corev1.ResourceList {
	list := make(corev1.ResourceList, len(r))
	for name, v := range r {
		if v <= 0 {
			continue
		}
		list[name] = quantity(name, v)
	}
	return list
}

// Strings is the inverse of ParseResources.
func (r Resources) Strings() map[string]string {
	m := make(map[string]string, len(r))
	for name, v := range r {
		if v <= 0 {
			continue
		}
		q := quantity(name, v)
		m[string(name)] = q.String()
	}
	return m
}

func quantity(name corev1.ResourceName, v int64) resource.Quantity {
	switch {
	case name == corev1.ResourceCPU:
		return *resource.NewMilliQuantity(v, resource.DecimalSI)
	case inBytes(name):
		return *resource.NewQuantity(v, resource.BinarySI)
	default:
		return *resource.NewQuantity(v, resource.DecimalSI)
	}
}

func inBytes(name corev1.ResourceName) bool {
	switch name {
	case corev1.ResourceMemory, corev1.ResourceEphemeralStorage, corev1.ResourceStorage:
		return true
	}
	return len(name) > len(corev1.ResourceHugePagesPrefix) &&
		name[:len(corev1.ResourceHugePagesPrefix)] == corev1.ResourceHugePagesPrefix
}

// Add returns r + o. Sums are capped instead of overflowing; neither operand changes.
func (r Resources) Add(o Resources) Resources {
	sum := make(Resources, len(r)+len(o))
	for name, v := range r {
		sum.set(name, v)
	}
	for name, v := range o {
		sum.set(name, addCapped(sum[name], v))
	}
	return sum
}

// Sub returns r - o. An amount may become negative: more is taken than there is. Neither operand changes.
func (r Resources) Sub(o Resources) Resources {
	diff := make(Resources, len(r)+len(o))
	for name, v := range r {
		diff.set(name, v)
	}
	for name, v := range o {
		if v == math.MinInt64 {
			v++
		}
		diff.set(name, addCapped(diff[name], -v))
	}
	return diff
}

func (r Resources) set(name corev1.ResourceName, v int64) {
	if v == 0 {
		delete(r, name)
		return
	}
	r[name] = v
}

func addCapped(a, b int64) int64 {
	switch s := a + b; {
	case a > 0 && b > 0 && s < 0:
		return math.MaxInt64
	case a < 0 && b < 0 && s >= 0:
		return math.MinInt64
	default:
		return s
	}
}

// Fits reports whether every positive amount of r is there in the other. What the other does not have counts as zero.
func (r Resources) Fits(in Resources) bool {
	for name, v := range r {
		if v > 0 && v > in[name] {
			return false
		}
	}
	return true
}

// Lacking lists the resources of which r asks more than there is in the other, sorted by name.
func (r Resources) Lacking(in Resources) []corev1.ResourceName {
	var names []corev1.ResourceName
	for name, v := range r {
		if v > 0 && v > in[name] {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// Clone returns a copy without the zero amounts; never nil.
func (r Resources) Clone() Resources {
	return r.Add(nil)
}
