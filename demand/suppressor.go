package demand

import (
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
)

// Suppressor holds a request back while an upcoming node has room for the pod: anyUpcomingNodeSatisfies of section 12. It
// is for the mode RequestsOnly, in which nothing but requests is demand. The room of a node is promised once: first to the
// pods whose requests it was launched for, and what is left to pods that fail later.
//
// It is a pure account, fed by an UpcomingNode informer and by the Writer; safe for concurrent use. A pod that was held back
// and does not fit after all fails again, and is written then, because the node is no longer upcoming.
type Suppressor struct {
	mu    sync.Mutex
	nodes map[string]*upcoming
	// order of nodes and pods is the order of arrival, so that the same events give the same promises.
	nodeOrder []string
	pods      map[types.UID]*claim
	unplaced  []types.UID
}

// upcoming is a node on its way and the room it has left.
type upcoming struct {
	labels     map[string]string
	taints     []corev1.Taint
	free       capacity.Resources
	limitsPods bool
}

// claim is a pod's part of an upcoming node.
type claim struct {
	profile capacity.Profile
	node    string // empty: none yet
	// requested: the pod has a request, or is about to; otherwise it is held back.
	requested bool
}

// NewSuppressor returns a Suppressor that knows no nodes and therefore holds nothing back.
func NewSuppressor() *Suppressor {
	return &Suppressor{nodes: map[string]*upcoming{}, pods: map[types.UID]*claim{}}
}

// SetNode takes note of an upcoming node. A node that is Ready or Failed is upcoming no more.
func (s *Suppressor) SetNode(node *fleetv1alpha1.UpcomingNode) {
	switch node.Status.Phase {
	case fleetv1alpha1.UpcomingNodeReady, fleetv1alpha1.UpcomingNodeFailed:
		s.DeleteNode(node.Name)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, known := s.nodes[node.Name]; known {
		return // what a node will be does not change, only how far it has come
	}
	n := &upcoming{
		labels: node.Spec.Labels,
		taints: node.Spec.Taints,
		free:   capacity.ResourcesOf(corev1.ResourceList(node.Spec.Resources)),
	}
	_, n.limitsPods = n.free[corev1.ResourcePods]
	s.nodes[node.Name] = n
	s.nodeOrder = append(s.nodeOrder, node.Name)
	s.placeRequested(node.Name)
}

// DeleteNode takes note that a node is upcoming no more. Pods that were held back for it are free to ask again.
func (s *Suppressor) DeleteNode(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, known := s.nodes[name]; !known {
		return
	}
	delete(s.nodes, name)
	s.nodeOrder = without(s.nodeOrder, name)
	for uid, c := range s.pods {
		if c.node != name {
			continue
		}
		if !c.requested {
			delete(s.pods, uid)
			continue
		}
		// The node came up, and the pod binds to it and is released; or it failed, and the pod waits for the next.
		c.node = ""
		s.unplaced = append(s.unplaced, uid)
	}
}

// Hold reports whether the pod's request should be held back, and for which upcoming node. If not, the pod counts from now
// on as one that has a request. It may be called again for the same pod and then repeats itself as long as that is true.
func (s *Suppressor) Hold(uid types.UID, profile capacity.Profile) (node string, held bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.pods[uid]; c != nil {
		return c.node, !c.requested
	}
	c := &claim{profile: profile}
	s.pods[uid] = c
	if holdable(profile) {
		for _, name := range s.nodeOrder {
			if s.place(c, name) {
				return name, true
			}
		}
	}
	c.requested = true
	s.unplaced = append(s.unplaced, uid)
	return "", false
}

// Release drops a pod that is gone or has a node.
func (s *Suppressor) Release(uid types.UID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.pods[uid]
	if c == nil {
		return
	}
	delete(s.pods, uid)
	if n := s.nodes[c.node]; n != nil {
		n.free = n.free.Add(c.take(n))
		return
	}
	s.unplaced = without(s.unplaced, uid)
}

// holdable: rules that look beyond one node cannot be judged by one node's room, so such a pod always asks.
func holdable(p capacity.Profile) bool {
	return p.Group == nil && len(p.AntiAffinity) == 0 && len(p.Spread) == 0
}

// placeRequested gives the node's room to pods that asked before it was announced: it was launched for them.
func (s *Suppressor) placeRequested(name string) {
	var left []types.UID
	for _, uid := range s.unplaced {
		c := s.pods[uid]
		if c != nil && !s.place(c, name) {
			left = append(left, uid)
		}
	}
	s.unplaced = left
}

func (s *Suppressor) place(c *claim, name string) bool {
	n := s.nodes[name]
	need := c.take(n)
	if !c.profile.MatchesLabels(n.labels) || !capacity.Tolerates(c.profile.Tolerations, n.taints) || !need.Fits(n.free) {
		return false
	}
	n.free = n.free.Sub(need)
	c.node = name
	return true
}

// take is the pod's share of the node, its place among the node's pods included where those are limited.
func (c *claim) take(n *upcoming) capacity.Resources {
	if !n.limitsPods {
		return c.profile.Resources
	}
	return c.profile.Resources.Add(capacity.Resources{corev1.ResourcePods: 1})
}

func without[T comparable](list []T, item T) []T {
	out := list[:0]
	for _, x := range list {
		if x != item {
			out = append(out, x)
		}
	}
	return out
}
