package demand

import (
	"context"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	eventsclient "k8s.io/client-go/kubernetes/typed/events/v1"
)

// ReasonRequestInvalid is the reason of the event on a pod whose CapacityRequest the API server refuses as invalid. The other
// reasons are those of capacity.Decision.
const ReasonRequestInvalid = "CapacityRequestInvalid"

const (
	eventAction  = "RequestCapacity"
	maxEventNote = 1024 // the API server's own limit
)

// Events puts warnings on pods. An event that is there already is success.
type Events interface {
	Warn(ctx context.Context, pod *corev1.Pod, reason, note string, at time.Time) error
}

// NewEvents returns Events that are written straight to the API server, under a name that follows from the pod's UID, the
// reason. So there is one event, however many processes and restarts see the same fault; the recorder of client-go would make
// one for each.
func NewEvents(client eventsclient.EventsGetter, controller, instance string) Events {
	return &eventWriter{client: client, controller: controller, instance: instance}
}

type eventWriter struct {
	client               eventsclient.EventsGetter
	controller, instance string
}

func (e *eventWriter) Warn(ctx context.Context, pod *corev1.Pod, reason, note string, at time.Time) error {
	if len(note) > maxEventNote {
		note = strings.ToValidUTF8(note[:maxEventNote-3], "") + "..."
	}
	event := &eventsv1.Event{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: pod.Namespace,
			Name:      Name(pod.Name, pod.UID) + "." + shortHash(reason),
		},
		EventTime:           metav1.NewMicroTime(at),
		ReportingController: e.controller,
		ReportingInstance:   e.instance,
		Action:              eventAction,
		Reason:              reason,
		Regarding: corev1.ObjectReference{
			APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID,
		},
		Note: note,
		Type: corev1.EventTypeWarning,
	}
	_, err := e.client.Events(pod.Namespace).Create(ctx, event, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("writing event %s on pod %s/%s: %w", reason, pod.Namespace, pod.Name, err)
	}
	return nil
}
