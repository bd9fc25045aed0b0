package vnaffinity

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

const moveTimeout = 10 * time.Second

// moveNext hands one pod on, and reports whether there may be more. A hop is written beside the scheduling loop, and until
// it has been, the pod is nobody's: this replica does not try it again, and the next one does not know of it. If this
// process ends before, the pod is found where it was.
func (s *schedulers) moveNext(ctx context.Context) bool {
	uid, shutdown := s.moves.Get()
	if shutdown {
		return false
	}
	defer s.moves.Done(uid)
	if wait := s.early(uid); wait > 0 {
		s.moves.AddAfter(uid, wait)
		return true
	}
	pod, h, stays := s.moving(uid)
	if stays != nil {
		s.activate(stays)
	}
	if h == nil {
		s.moves.Forget(uid)
		return true
	}
	if err := s.limiter.Wait(ctx); err != nil {
		return false
	}
	moved, err := s.write(ctx, pod, h)
	switch {
	case err == nil:
		s.metrics.moved(h).Inc()
		s.moves.Forget(uid)
		if s.hasMoved(uid, moved) {
			s.activate(moved)
		}
	case apierrors.IsNotFound(err) || apierrors.IsConflict(err):
		// If the pod is gone, or is another one of that name, the informer will say so.
		s.moves.AddRateLimited(uid)
	default:
		s.logger.Error(err, "Handing a pod on to another scheduler", "pod", klog.KObj(pod), "scheduler", h.To)
		s.moves.AddRateLimited(uid)
	}
	return true
}

// hasMoved notes a pod that was handed on, and reports whether it is this replica's all the same: the one that it was
// handed on to has gone meanwhile, and its home is here.
func (s *schedulers) hasMoved(uid types.UID, pod *corev1.Pod) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.pods[uid]
	if w == nil {
		return false
	}
	s.take(pod)
	w.next = nil
	return s.holds(w)
}

// early returns for how long the pod is still to stay. The queue keeps the first of two times at which a pod is to come up,
// and the pod may have been tried again since that was set: then preemption has had no time yet.
func (s *schedulers) early(uid types.UID) time.Duration {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if w := s.pods[uid]; w != nil && w.next == nil && w.later != nil {
		return time.Until(w.due)
	}
	return 0
}

// moving returns what to write, nil if the pod stays. If who owns what has changed meanwhile it is tried here again, or
// wherever it belongs now.
func (s *schedulers) moving(uid types.UID) (pod *corev1.Pod, h *hop, stays *corev1.Pod) {
	promised := s.promised(uid)
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.pods[uid]
	if w == nil {
		return nil, nil, nil
	}
	if w.next == nil && w.later != nil {
		switch {
		case !s.holds(w):
			w.later = nil
		case promised && w.last:
			// Preemption has promised it a node, or did so the last time, and has yet to take that back.
			s.moves.AddAfter(uid, preemptionPatience)
		default:
			w.next, w.later, w.last = w.later, nil, false
		}
	}
	if w.next == nil {
		return nil, nil, nil
	}
	if w.next.Epoch != s.roster.epoch || !s.roster.has(w.next.To) {
		w.next = nil
		if s.holds(w) {
			stays = w.pod
		}
		return nil, nil, stays
	}
	return w.pod, w.next, nil
}

// promised reports whether preemption has been asked in the pod's last cycle, and the pod has a nominated node: by its
// status, or by what the scheduler knows before the API server has been told.
func (s *schedulers) promised(uid types.UID) bool {
	s.mu.RLock()
	w := s.pods[uid]
	if w == nil || w.later == nil || !w.last || !mayPreempt(w.pod) {
		s.mu.RUnlock()
		return false
	}
	tried, told := w.tried, w.pod.Status.NominatedNodeName != ""
	s.mu.RUnlock()
	if told {
		return true
	}
	// The queue's lock is taken for this, and plugins are called under it.
	for node := range tried {
		for _, info := range s.handle.NominatedPodsForNode(node) {
			if info.GetPod().UID == uid {
				return true
			}
		}
	}
	return false
}

// write puts the hop on the pod, for the replicas as an annotation and for people as a condition, in one request.
func (s *schedulers) write(ctx context.Context, pod *corev1.Pod, h *hop) (*corev1.Pod, error) {
	reason := "MovedOn"
	if h.Preempting {
		reason = "MovedOnToPreempt"
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": pod.UID, "annotations": map[string]string{AnnotationReplica: h.String()}},
		"status": map[string]any{"conditions": []any{map[string]any{
			"type": ConditionReplica, "status": corev1.ConditionTrue, "reason": reason, "message": h.message(),
			"lastTransitionTime": metav1.Now(),
		}}},
	})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, moveTimeout)
	defer cancel()
	moved, err := s.client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	if err != nil {
		return nil, fmt.Errorf("patch the status of pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	return moved, nil
}
