package demand

import (
	"context"
	"fmt"
	"net/http"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	eventsclient "k8s.io/client-go/kubernetes/typed/events/v1"
	"k8s.io/client-go/rest"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
)

// Requests is the API of CapacityRequests as far as the Writer needs it. Errors are those of the API server, as
// k8s.io/apimachinery/pkg/api/errors knows them. Implementations respect the context's end.
type Requests interface {
	Create(ctx context.Context, request *fleetv1alpha1.CapacityRequest) error
	Get(ctx context.Context, namespace, name string) (*fleetv1alpha1.CapacityRequest, error)
	Update(ctx context.Context, request *fleetv1alpha1.CapacityRequest) error
}

// RESTClient returns a client of group fleet.lucy.sh for cfg, which is not changed. It speaks JSON whatever cfg says,
// because custom resources know no protobuf, and has a rate limit of its own, so that it never eats another client's.
func RESTClient(cfg *rest.Config, qps float64, burst int) (*rest.RESTClient, error) {
	scheme := runtime.NewScheme()
	if err := fleetv1alpha1.AddToScheme(scheme); err != nil {
		return nil, fmt.Errorf("building the scheme of %s: %w", fleetv1alpha1.GroupVersion, err)
	}
	own := rest.CopyConfig(cfg)
	gv := fleetv1alpha1.GroupVersion
	own.GroupVersion = &gv
	own.APIPath = "/apis"
	own.ContentType = runtime.ContentTypeJSON
	own.AcceptContentTypes = runtime.ContentTypeJSON
	own.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	own.QPS, own.Burst = float32(qps), burst
	own.RateLimiter = nil
	if own.UserAgent == "" {
		own.UserAgent = rest.DefaultKubernetesUserAgent()
	}
	client, err := rest.RESTClientFor(own)
	if err != nil {
		return nil, fmt.Errorf("building a client of %s: %w", fleetv1alpha1.GroupVersion, err)
	}
	return client, nil
}

// EventsClient returns a client of events for cfg, which is not changed, with a rate limit of its own: a burst of hopeless pods
// takes nothing from what the scheduler needs to bind others.
func EventsClient(cfg *rest.Config, qps float64, burst int) (eventsclient.EventsGetter, error) {
	own := rest.CopyConfig(cfg)
	own.QPS, own.Burst, own.RateLimiter = float32(qps), burst, nil
	client, err := eventsclient.NewForConfig(own)
	if err != nil {
		return nil, fmt.Errorf("building a client of events: %w", err)
	}
	return client, nil
}

// NewRequests returns Requests that talk to the API server through client, which RESTClient made.
func NewRequests(client rest.Interface) Requests { return &restRequests{client} }

type restRequests struct{ client rest.Interface }

const requestsResource = "capacityrequests"

func (r *restRequests) Create(ctx context.Context, request *fleetv1alpha1.CapacityRequest) error {
	return r.client.Verb(http.MethodPost).Namespace(request.Namespace).Resource(requestsResource).
		Body(request).Do(ctx).Error()
}

func (r *restRequests) Get(ctx context.Context, namespace, name string) (*fleetv1alpha1.CapacityRequest, error) {
	out := &fleetv1alpha1.CapacityRequest{}
	err := r.client.Get().Namespace(namespace).Resource(requestsResource).Name(name).
		VersionedParams(&metav1.GetOptions{}, metav1.ParameterCodec).Do(ctx).Into(out)
	if err != nil {
		return nil, err
	}
	return out, nil
}

func (r *restRequests) Update(ctx context.Context, request *fleetv1alpha1.CapacityRequest) error {
	return r.client.Put().Namespace(request.Namespace).Resource(requestsResource).Name(request.Name).
		Body(request).Do(ctx).Error()
}
