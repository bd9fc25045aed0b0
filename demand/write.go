package demand

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
)

// +kubebuilder:rbac:groups=fleet.lucy.sh,resources=capacityrequests,verbs=get;create;update
// +kubebuilder:rbac:groups=events.k8s.io,resources=events,verbs=create

// write makes the pod's request exist and be right. What is around the pod adds requirements to its own. An error means that it has to be tried again.
func (w *Writer) write(ctx context.Context, pod *corev1.Pod, around []capacity.Requirement) (result string, err error) {
	ctx, cancel := context.WithTimeout(ctx, w.opts.Timeout)
	defer cancel()

	profile := w.opts.Describe(pod)
	if len(around) > 0 {
		profile = profile.WithRequirements(around...)
	}
	if s := w.opts.Suppressor; s != nil {
		if node, held := s.Hold(pod.UID, profile); held {
			w.opts.Logger.V(4).Info("An upcoming node has room", "pod", klog.KObj(pod), "upcomingNode", node)
			return ResultHeld, nil
		}
	}
	request := RequestFor(pod, profile)
	err = w.opts.Requests.Create(ctx, request)
	switch {
	case err == nil:
		w.opts.Logger.V(2).Info("Asked for capacity", "pod", klog.KObj(pod), "capacityRequest", klog.KObj(request))
		return ResultCreated, nil
	case apierrors.IsAlreadyExists(err):
		return w.verify(ctx, pod, request)
	}
	return w.failed(ctx, pod, "creating", request, err)
}

// verify compares the request that exists with the one that should.
func (w *Writer) verify(ctx context.Context, pod *corev1.Pod, want *fleetv1alpha1.CapacityRequest) (string, error) {
	have, err := w.opts.Requests.Get(ctx, want.Namespace, want.Name)
	if err != nil {
		return w.failed(ctx, pod, "reading", want, err)
	}
	if uid := have.Labels[fleetv1alpha1.LabelPodUID]; uid != string(pod.UID) {
		w.opts.Logger.Error(nil, "A CapacityRequest of this pod's name stands for another pod; leaving it alone",
			"capacityRequest", klog.KObj(have), "pod", klog.KObj(pod), "podUID", pod.UID,
			"label", fleetv1alpha1.LabelPodUID, "labelValue", uid)
		return ResultConflict, nil
	}
	spec, changed := reviseSpec(have.Spec, want.Spec)
	if !changed || have.DeletionTimestamp != nil {
		return ResultExisted, nil
	}
	next := have.DeepCopy()
	next.Spec = spec
	if err := w.opts.Requests.Update(ctx, next); err != nil {
		return w.failed(ctx, pod, "updating", want, err)
	}
	return ResultUpdated, nil
}

// failed sorts errors: those for which there is no pod to serve any more, those that no repetition mends, and the rest.
func (w *Writer) failed(
	ctx context.Context, pod *corev1.Pod, verb string, request *fleetv1alpha1.CapacityRequest, err error,
) (string, error) {
	switch {
	case namespaceGone(err):
		return ResultGone, nil
	case apierrors.IsInvalid(err), apierrors.IsBadRequest(err), apierrors.IsRequestEntityTooLargeError(err):
		w.opts.Logger.Error(err, "The API server refuses the CapacityRequest", "capacityRequest", klog.KObj(request))
		note := fmt.Sprintf("the API server refuses CapacityRequest %s: %v", request.Name, err)
		if err := w.warn(ctx, pod, ReasonRequestInvalid, note); err != nil {
			w.opts.Logger.Error(err, "Could not warn", "pod", klog.KObj(pod))
		}
		return ResultInvalid, nil
	}
	return "", fmt.Errorf("%s CapacityRequest %s/%s: %w", verb, request.Namespace, request.Name, err)
}

// warn puts an event on the pod, once for each reason. Where the namespace is gone or events are forbidden there is nothing
// to repeat; another error means that it has to be tried again.
func (w *Writer) warn(ctx context.Context, pod *corev1.Pod, reason, note string) error {
	if !w.newWarning(pod.UID, reason) {
		return nil
	}
	unhelpable.WithLabelValues(w.opts.Source, reason).Inc()
	w.opts.Logger.V(2).Info("Asked for no capacity", "pod", klog.KObj(pod), "reason", reason, "note", note)
	if w.opts.Events == nil {
		return nil
	}
	err := w.event(ctx, pod, reason, note)
	switch {
	case err == nil, namespaceGone(err):
		return nil
	case apierrors.IsInvalid(err), apierrors.IsForbidden(err):
		w.opts.Logger.Error(err, "The API server refuses the event", "pod", klog.KObj(pod), "reason", reason)
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if s := w.pods[pod.UID]; s != nil {
		delete(s.warned, reason)
	}
	return err
}

// event writes the event, at the rate of all writes.
func (w *Writer) event(ctx context.Context, pod *corev1.Pod, reason, note string) error {
	if err := w.wait(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, w.opts.Timeout)
	defer cancel()
	return w.opts.Events.Warn(ctx, pod, reason, note, w.opts.Clock.Now())
}

// newWarning reports whether the pod has not been warned so, and notes that it is.
func (w *Writer) newWarning(uid types.UID, reason string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.pods[uid]
	if s == nil || len(s.warned) >= maxWarnings {
		return false
	}
	if _, done := s.warned[reason]; done {
		return false
	}
	if s.warned == nil {
		s.warned = map[string]struct{}{}
	}
	s.warned[reason] = struct{}{}
	return true
}

// RequestFor is the CapacityRequest of the pod, whose need is profile. The pod owns it without blocking its own deletion.
func RequestFor(pod *corev1.Pod, profile capacity.Profile) *fleetv1alpha1.CapacityRequest {
	return &fleetv1alpha1.CapacityRequest{
		TypeMeta: metav1.TypeMeta{APIVersion: fleetv1alpha1.GroupVersion.String(), Kind: "CapacityRequest"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: pod.Namespace,
			Name:      Name(pod.Name, pod.UID),
			Labels:    map[string]string{fleetv1alpha1.LabelPodUID: string(pod.UID)},
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID,
			}},
		},
		Spec: profile.RequestSpec(),
	}
}

// reviseSpec brings an existing spec up to date. Two writers may know different things of one pod (one sees PodGroups or
// volumes, the other has no right to), so what one of them does not know never undoes what the other knew: changes go one way
// only, or are about what the pod itself says.
func reviseSpec(
	have, want fleetv1alpha1.CapacityRequestSpec,
) (spec fleetv1alpha1.CapacityRequestSpec, changed bool) {
	spec = *have.DeepCopy()
	h, w := capacity.ProfileOfRequest(&have), capacity.ProfileOfRequest(&want)
	if !maps.Equal(h.Resources, w.Resources) { // a resize
		spec.Resources, changed = want.Resources, true
	}
	if len(w.Tolerations) > len(h.Tolerations) { // a pod can be given more, and none be taken from it
		spec.Tolerations, changed = want.Tolerations, true
	}
	if placesMoved(h, w) {
		spec.Requirements, spec.Alternatives, changed = want.Requirements, want.Alternatives, true
	}
	switch {
	case want.Group == nil:
	case spec.Group == nil:
		spec.Group, changed = want.Group, true
	case spec.Group.Name == want.Group.Name:
		if want.Group.MinCount != 0 && spec.Group.MinCount != want.Group.MinCount {
			spec.Group.MinCount, changed = want.Group.MinCount, true
		}
		if spec.Group.TopologyKey == "" && want.Group.TopologyKey != "" {
			spec.Group.TopologyKey, changed = want.Group.TopologyKey, true
		}
	}
	return spec, changed
}

// placesMoved reports whether the labels that the pod asks for have other values now, or more labels are asked for: a volume
// was bound in a zone, or the pods that it has to stand with run elsewhere. Fewer labels are only less knowledge.
func placesMoved(have, want capacity.Profile) bool {
	asked, now := keysOf(have), keysOf(want)
	for key := range asked {
		if !now[key] {
			return false
		}
	}
	have, want = onlyPlaces(have), onlyPlaces(want)
	return have.ID() != want.ID()
}

func onlyPlaces(p capacity.Profile) capacity.Profile {
	return capacity.Profile{Requirements: p.Requirements, Alternatives: p.Alternatives}
}

func keysOf(p capacity.Profile) map[string]bool {
	keys := map[string]bool{}
	for _, set := range append([][]capacity.Requirement{p.Requirements}, p.Alternatives...) {
		for _, r := range set {
			keys[r.Key] = true
		}
	}
	return keys
}

// namespaceGone says that the namespace does not exist or is being deleted, and the pod with it.
func namespaceGone(err error) bool {
	if apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		return true
	}
	var status apierrors.APIStatus
	if !apierrors.IsNotFound(err) || !errors.As(err, &status) {
		return false
	}
	details := status.Status().Details
	return details != nil && details.Kind == "namespaces"
}

// suggestedDelay is the server's own wish for when to come back.
func suggestedDelay(err error) (time.Duration, bool) {
	seconds, ok := apierrors.SuggestsClientDelay(err)
	if !ok || seconds <= 0 {
		return 0, false
	}
	return time.Duration(seconds) * time.Second, true
}
