package vnaffinity

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/controllers/sharded"
	"github.com/drover-sh/drover/sharding"
)

var (
	_ fwk.ReservePlugin = &VNAffinity{}
	_ fwk.BindPlugin    = &VNAffinity{}
)

// Annotations of a Binding, and so of the bound pod: who bound it, and in which Virtual Node the node is. An admission
// policy compares them with who owns that now.
const (
	AnnotationBoundBy     = "loadbalance.k8s.io/bound-by-session"
	AnnotationBoundInNode = "loadbalance.k8s.io/bound-in-node-vn"
)

// Reserve takes the right to bind to the node. It refuses where the node has gone to another replica since the cycle began,
// also if it has come back: what was bound meanwhile, the cycle's snapshot did not show. And it refuses a pod that has gone
// to another replica.
func (p *VNAffinity) Reserve(_ context.Context, state fwk.CycleState, pod *corev1.Pod, node string) *fwk.Status {
	if p.schedulers == nil {
		return nil
	}
	return p.schedulers.reserve(state, pod, node)
}

func (s *schedulers) reserve(state fwk.CycleState, pod *corev1.Pod, node string) *fwk.Status {
	c := cycleOf(state)
	if c == nil {
		return fwk.AsStatus(errors.New("reserve without PreFilter"))
	}
	if to := s.goneTo(pod.UID); to != "" {
		return fwk.NewStatus(fwk.Unschedulable, fmt.Sprintf("%s: waits at %s", capacity.NotYetRefusedByAll, to))
	}
	w, err := s.begin(sharding.VirtualNodeOf(nodeKey(node), s.v))
	if err == nil && w.Gain() > c.upTo {
		w.End()
		err = sharded.ErrBlocked
	}
	if err != nil {
		s.metrics.refused.Inc()
		s.activateLater(pod)
		return fwk.NewStatus(fwk.Unschedulable, fmt.Sprintf("%s: node %s has gone to another one: %v",
			capacity.NotYetRefusedByAll, node, err))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if old := s.rights[pod.UID]; old != nil {
		old.work.End()
	}
	s.rights[pod.UID] = &right{work: w, node: node}
	return nil
}

// goneTo returns where a pod has gone to since the cycle began; "" if it stays. Then it does not move on any more either: what
// was to happen unless it found a node is off.
func (s *schedulers) goneTo(uid types.UID) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.pods[uid]
	switch {
	case w == nil:
		return "" // it has a node, or is gone: the API server will say so
	case w.next != nil || w.hop != nil && w.hop.To != s.member && s.roster.has(w.hop.To):
		return s.holder(w)
	}
	w.later = nil
	return ""
}

// Unreserve gives the right back.
func (p *VNAffinity) Unreserve(_ context.Context, _ fwk.CycleState, pod *corev1.Pod, node string) {
	if s := p.schedulers; s != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		if r := s.rights[pod.UID]; r != nil && r.node == node {
			r.work.End()
			delete(s.rights, pod.UID)
		}
	}
}

// Bind binds the pod as DefaultBinder does, but only while this replica may, and with a word about who it is.
func (p *VNAffinity) Bind(ctx context.Context, _ fwk.CycleState, pod *corev1.Pod, node string) *fwk.Status {
	if p.schedulers == nil {
		return fwk.NewStatus(fwk.Skip)
	}
	if err := p.schedulers.bind(ctx, pod, node); err != nil {
		return fwk.AsStatus(err)
	}
	return nil
}

func (s *schedulers) bind(ctx context.Context, pod *corev1.Pod, node string) error {
	s.mu.RLock()
	r := s.rights[pod.UID]
	s.mu.RUnlock()
	if r == nil || r.node != node {
		return fmt.Errorf("bind to %s: nothing is reserved there", node)
	}
	// The scheduler's context ends when it is told to stop. A request that is on its way then is better answered.
	ctx = context.WithoutCancel(ctx)
	binding := &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID,
			Annotations: map[string]string{
				AnnotationBoundBy:     r.work.Session(),
				AnnotationBoundInNode: sharding.VirtualNodeOf(nodeKey(node), s.v).LabelValue(),
			},
		},
		Target: corev1.ObjectReference{Kind: "Node", Name: node},
	}
	backoff := wait.Backoff{Duration: 50 * time.Millisecond, Factor: 2, Jitter: 0.2, Steps: 6, Cap: 2 * time.Second}
	lost := false // an answer
	for {
		// The budget of requests is waited for before the right to write is asked for, or it would age meanwhile.
		if err := s.limiter.Wait(ctx); err != nil {
			return err
		}
		err := r.work.Send(ctx, func(ctx context.Context) error {
			return s.client.CoreV1().Pods(pod.Namespace).Bind(ctx, binding, metav1.CreateOptions{})
		})
		switch {
		case err == nil:
			s.bound(pod.UID, r)
			return nil
		case errors.Is(err, sharded.ErrFenced) || errors.Is(err, sharded.ErrNotOwned):
			return err
		case apierrors.IsConflict(err) || (lost && sharded.Refused(err)):
			// What is said of this request says nothing of the one whose answer was lost.
			if mine, lookErr := s.boundHere(ctx, pod, r); lookErr == nil && mine {
				s.bound(pod.UID, r)
				return nil
			} else if lookErr == nil {
				if apierrors.IsConflict(err) {
					s.metrics.conflicts.Inc()
				}
				return err
			}
		case sharded.Refused(err):
			return err
		default:
			lost = true
		}
		// Nobody knows whether the pod is bound. To give the node's room to another pod now could fill it twice.
		klog.FromContext(ctx).V(2).Info("Bind was not answered, trying again", "pod", klog.KObj(pod), "node", node, "error", err)
		time.Sleep(backoff.Step())
	}
}

// boundHere reports whether the pod is bound as this replica has asked for.
func (s *schedulers) boundHere(ctx context.Context, pod *corev1.Pod, r *right) (bool, error) {
	now, err := s.client.CoreV1().Pods(pod.Namespace).Get(ctx, pod.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return now.UID == pod.UID && now.Spec.NodeName == r.node && now.Annotations[AnnotationBoundBy] == r.work.Session(), nil
}

func (s *schedulers) bound(uid types.UID, r *right) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r.answered = true
	s.settle(uid, r)
}

// settle gives a right back once the bind has been answered and the informer has shown it: what this replica hands on with
// the Virtual Node, it has seen itself.
func (s *schedulers) settle(uid types.UID, r *right) {
	switch {
	case !r.answered:
		return
	case r.seen != "":
		r.work.Wrote(podResource, r.seen)
	case s.closing:
		r.work.WroteUnseen()
	default:
		return
	}
	r.work.End()
	if s.rights[uid] == r {
		delete(s.rights, uid)
	}
}

// letGo gives back what only the informer, which has stopped, could have settled.
func (s *schedulers) letGo() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closing = true
	for uid, r := range s.rights {
		s.settle(uid, r)
	}
}
