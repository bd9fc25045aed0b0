package watchgroup

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	"gomodules.xyz/jsonpatch/v2"
	admissionv1 "k8s.io/api/admission/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
)

// WebhookPath is where the mutating webhook is served.
const WebhookPath = "/label"

// Labeler is the mutating webhook: it puts the labels of its Virtual Node on an object when it is created, and keeps them
// when it is updated (section 6.3.2). It never refuses an object. What it cannot label, the backfill does.
type Labeler struct {
	// Groups reads WatchGroups, from a cache.
	Groups  client.Reader
	Owners  *Owners
	Metrics *Metrics
}

var _ admission.Handler = &Labeler{}

// Handle implements admission.Handler.
func (l *Labeler) Handle(ctx context.Context, req admission.Request) admission.Response {
	v, object, err := l.decide(ctx, req)
	if err != nil {
		l.Metrics.Admissions.WithLabelValues(outcomeError).Inc()
		log.FromContext(ctx).Error(err, "Object is left to the backfill", "resource", req.Resource.Resource,
			"namespace", req.Namespace, "name", req.Name)
		return admission.Allowed("").WithWarnings("loadbalance.k8s.io: the object will be labelled later: " + err.Error())
	}
	l.Metrics.Admissions.WithLabelValues(v.outcome).Inc()
	return admission.Patched("", patch(object, v)...)
}

func (l *Labeler) decide(ctx context.Context, req admission.Request) (verdict, *metav1.PartialObjectMetadata, error) {
	var groups lbv1alpha1.WatchGroupList
	if err := l.Groups.List(ctx, &groups, client.UnsafeDisableDeepCopy); err != nil {
		return verdict{}, nil, fmt.Errorf("listing WatchGroups: %w", err)
	}
	all, _ := schemes(groups.Items)
	s, ok := all[schema.GroupResource{Group: req.Resource.Group, Resource: req.Resource.Resource}]
	if !ok || req.SubResource != "" {
		return verdict{outcome: outcomeNone}, nil, nil
	}
	object := &metav1.PartialObjectMetadata{}
	if err := json.Unmarshal(req.Object.Raw, object); err != nil {
		return verdict{}, nil, fmt.Errorf("object: %w", err)
	}
	self := sharding.ObjectRef{Group: req.Kind.Group, Kind: req.Kind.Kind, Namespace: req.Namespace, Name: object.Name}
	switch req.Operation {
	case admissionv1.Create:
		owner, err := l.Owners.lineage(ctx, all, s, req.Namespace, object)
		if err != nil {
			return verdict{}, nil, err
		}
		return onCreate(s, object, self, owner), object, nil
	case admissionv1.Update:
		before := &metav1.PartialObjectMetadata{}
		if err := json.Unmarshal(req.OldObject.Raw, before); err != nil {
			return verdict{}, nil, fmt.Errorf("old object: %w", err)
		}
		var right *labels
		if gains(s, before, object) {
			owner, err := l.Owners.lineage(ctx, all, s, req.Namespace, object)
			if err != nil {
				return verdict{}, nil, err
			}
			if want, ok := labelled(s, object, self, owner); ok && takesPart(s, object, owner) {
				right = &want
			}
		}
		return onUpdate(s, before, object, right), object, nil
	default:
		return verdict{outcome: outcomeNone}, nil, nil
	}
}

// patch changes the labels of an object as the verdict says, and nothing else.
func patch(object *metav1.PartialObjectMetadata, v verdict) []jsonpatch.Operation {
	switch {
	case v.set != nil:
		var ops []jsonpatch.Operation
		if object.Labels == nil {
			ops = append(ops, jsonpatch.NewOperation("add", "/metadata/labels", map[string]string{}))
		}
		return append(ops,
			jsonpatch.NewOperation("add", labelPath(sharding.LabelVirtualNode), v.set.virtualNode),
			jsonpatch.NewOperation("add", labelPath(sharding.LabelBucket), v.set.bucket))
	case v.strip:
		var ops []jsonpatch.Operation
		for _, label := range []string{sharding.LabelVirtualNode, sharding.LabelBucket} {
			if _, ok := object.Labels[label]; ok {
				ops = append(ops, jsonpatch.NewOperation("remove", labelPath(label), nil))
			}
		}
		return ops
	}
	return nil
}

// labelPath is the JSON pointer of a label.
func labelPath(label string) string {
	return "/metadata/labels/" + strings.ReplaceAll(label, "/", "~1")
}

// NewWebhook returns the handler that serves l.
func NewWebhook(l *Labeler) http.Handler { return &admission.Webhook{Handler: l} }
