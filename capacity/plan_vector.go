package capacity

import (
	"math"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// vector holds amounts of the resources that the needs of an input ask for, by their index in a resourceSpace. What nobody
// asks for cannot run out and has no place in it.
type vector []int64

// unlimited stands for a resource that a node does not limit. It is far from overflow when pods are taken off it.
const unlimited = int64(1) << 50

// manyPods bounds the pods of one need on one node, so that counts stay far from overflow.
const manyPods = int32(1) << 24

// podsIndex is where every resourceSpace keeps the number of pods.
const podsIndex = 0

type resourceSpace struct {
	names []corev1.ResourceName
	index map[corev1.ResourceName]int
}

func newResourceSpace(clusters []ClusterInput) *resourceSpace {
	s := &resourceSpace{names: []corev1.ResourceName{corev1.ResourcePods}}
	s.index = map[corev1.ResourceName]int{corev1.ResourcePods: podsIndex}
	for i := range clusters {
		for j := range clusters[i].Needs {
			for name, v := range clusters[i].Needs[j].Profile.Resources {
				if _, known := s.index[name]; !known && v > 0 {
					s.index[name] = -1
					s.names = append(s.names, name)
				}
			}
		}
	}
	slices.Sort(s.names[1:])
	for i, name := range s.names {
		s.index[name] = i
	}
	return s
}

// request is what one pod takes of a node: at least the pod's own slot.
func (s *resourceSpace) request(r Resources) vector {
	v := make(vector, len(s.names))
	for name, amount := range r {
		if i, ok := s.index[name]; ok && amount > 0 {
			v[i] = amount
		}
	}
	v[podsIndex] = max(1, v[podsIndex])
	return v
}

// capacity is what a node has. A node that does not say how many pods it takes does not limit them; any other resource
// that it does not name it does not have.
func (s *resourceSpace) capacity(r Resources) vector {
	v := make(vector, len(s.names))
	for i, name := range s.names {
		v[i] = min(r[name], unlimited)
	}
	if _, limited := r[corev1.ResourcePods]; !limited {
		v[podsIndex] = unlimited
	}
	return v
}

// fitCount is how many pods of d fit into free, by resources alone.
func fitCount(free vector, d *demand) int32 {
	n := int64(manyPods)
	for _, i := range d.dims {
		if free[i] < d.request[i] {
			return 0
		}
		n = min(n, free[i]/d.request[i])
	}
	return int32(n)
}

// take subtracts n pods of d from free; a negative n gives them back.
func take(free vector, d *demand, n int32) {
	for _, i := range d.dims {
		free[i] -= int64(n) * d.request[i]
	}
}

// share is the part of room that is used, by the resource that is used most: 0 is empty, 1 full.
func share(room, free vector) float64 {
	used := 0.0
	for i := range room {
		if room[i] > 0 && room[i] < unlimited/2 {
			used = max(used, 1-float64(free[i])/float64(room[i]))
		}
	}
	return used
}

// size is how much of the largest node one pod takes, by its scarcest resource.
func size(request, largest vector) float64 {
	part := 0.0
	for i := range request {
		switch {
		case request[i] == 0 || i == podsIndex:
		case largest[i] <= 0:
			return math.Inf(1)
		default:
			part = max(part, float64(request[i])/float64(largest[i]))
		}
	}
	return part
}

// ceilDiv is n / per rounded up, of a positive n that may be as large as a count can be.
func ceilDiv(n, per int32) int32 { return (n-1)/per + 1 }

// maxCost is more than any node costs, and far from where sums of costs lose their meaning.
const maxCost = 1e12

// price is what a node costs for the purpose of comparing. Nodes that cost nothing still ought to be few, and a cost that
// is no number would compare as the lowest.
func price(cost float64) float64 {
	if math.IsNaN(cost) {
		return maxCost
	}
	return min(max(cost, 1e-6), maxCost)
}

// saturate narrows a count to what a verdict can hold.
func saturate(n int64) int32 { return int32(min(n, math.MaxInt32)) }
