package admission

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/drover-sh/drover/capacity"
)

// asks says what a pod set needs: "64 × 8 nvidia.com/gpu in flavor gpu-h100".
func asks(set *PodSet) string {
	name, amount := set.resource()
	what := "pods"
	if name != "" {
		what = "× " + quantity(name, amount)
	}
	text := fmt.Sprintf("%d %s", set.Count, what)
	if set.Flavor != "" {
		text += " in flavor " + set.Flavor
	}
	return text
}

// needsAtomic says why a gang is not provisioned.
func needsAtomic(set *PodSet) string {
	return fmt.Sprintf("needs %s all together; no offering that matches supports atomic provisioning", asks(set))
}

// demanded says which labels the pods insist on.
func demanded(set *PodSet) string {
	if len(set.Profile.Requirements) == 0 {
		return ""
	}
	var parts []string
	for _, r := range set.Profile.Requirements {
		parts = append(parts, r.String())
	}
	return " " + strings.Join(parts, ", ")
}

// dominant is the resource that people count by: a device where there is one, else cpu, else the first by name.
func dominant(r capacity.Resources) (corev1.ResourceName, int64) {
	var names []corev1.ResourceName
	for name := range r {
		names = append(names, name)
	}
	if len(names) == 0 {
		return "", 0
	}
	slices.Sort(names)
	for _, name := range names {
		if strings.Contains(string(name), "/") {
			return name, r[name]
		}
	}
	if v, ok := r[corev1.ResourceCPU]; ok {
		return corev1.ResourceCPU, v
	}
	return names[0], r[names[0]]
}

// quantity writes an amount with its resource: "8 nvidia.com/gpu".
func quantity(name corev1.ResourceName, amount int64) string {
	text, ok := capacity.Resources{name: amount}.Strings()[string(name)]
	if !ok {
		text = "0"
	}
	return text + " " + string(name)
}

// seconds writes a pause: "40 s".
func seconds(d time.Duration) string { return fmt.Sprintf("%d s", int64(math.Ceil(d.Seconds()))) }
