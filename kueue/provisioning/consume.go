package provisioning

import (
	"cmp"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/drover-sh/drover/capacity"
)

// Consumer is a pod that says it consumes the booking (annotation autoscaling.x-k8s.io/consume-provisioning-request).
type Consumer struct {
	Name    string
	UID     types.UID
	Profile capacity.Profile
	// Bound is true once the pod has a node, and Ended once it takes no room any more.
	Bound, Ended bool
}

// Slot is one CapacityRequest of a booking, as it is.
type Slot struct {
	Name   string
	PodSet int
	// Pod is the UID of the pod that took the request over; empty while the booking holds it.
	Pod types.UID
	// Acknowledged says that the autoscaler has been told of it.
	Acknowledged bool
}

// Handover gives a request to a pod.
type Handover struct {
	Slot string
	Pod  Consumer
}

// Match chooses the request that each pod takes over: one of a pod set with the pod's own resources, else of one that
// asks for no less, else any that is left, as a pod that names the booking is one of those that it was made for. A pod
// that has a request already gets no other, and pods without a request to take over are left alone: they are demand of
// their own.
func Match(sets []PodSet, slots []Slot, pods []Consumer) []Handover {
	served := map[types.UID]bool{}
	var held []Slot
	for _, s := range slots {
		if s.Pod != "" {
			served[s.Pod] = true
		} else {
			held = append(held, s)
		}
	}
	slices.SortFunc(held, func(a, b Slot) int {
		return cmp.Or(cmp.Compare(a.PodSet, b.PodSet), cmp.Compare(a.Name, b.Name))
	})
	pods = slices.Clone(pods)
	slices.SortFunc(pods, func(a, b Consumer) int { return cmp.Compare(a.Name, b.Name) })

	var out []Handover
	// All exact matches before the first compromise, so that a small pod does not take a large pod's place.
	for _, suits := range []func(PodSet, Consumer) bool{equals, covers, anyOf} {
		for _, pod := range pods {
			if served[pod.UID] {
				continue
			}
			i := slices.IndexFunc(held, func(s Slot) bool { return suits(sets[s.PodSet], pod) })
			if i < 0 {
				continue
			}
			served[pod.UID] = true
			out = append(out, Handover{Slot: held[i].Name, Pod: pod})
			held = slices.Delete(held, i, i+1)
		}
	}
	return out
}

func equals(s PodSet, pod Consumer) bool {
	return maps.Equal(s.Profile.Resources, pod.Profile.Resources)
}
func covers(s PodSet, pod Consumer) bool { return pod.Profile.Resources.Fits(s.Profile.Resources) }
func anyOf(PodSet, Consumer) bool        { return true }

// Outstanding is what a booking still needs room for: the pods that are not here yet, and those that are here without
// a node. Room that a bound pod takes is no longer free, so that it must not be promised as well.
func Outstanding(sets []PodSet, slots []Slot, pods []Consumer) []PodSet {
	unbound := map[types.UID]bool{}
	for _, p := range pods {
		unbound[p.UID] = !p.Bound && !p.Ended
	}
	out := slices.Clone(sets)
	for i := range out {
		out[i].Count = 0
	}
	for _, s := range slots {
		if s.Pod == "" || unbound[s.Pod] {
			out[s.PodSet].Count++
		}
	}
	return out
}
