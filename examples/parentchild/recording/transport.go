package recording

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/history"
)

// An Identity says whose the writes are that a Transport sees.
type Identity struct {
	Actor  history.Actor
	Member string
	// Session returns that of the member at work, by the context of the request; nil for nobody's.
	Session func(context.Context) string
}

// Configure makes the clients of a configuration record their writes. They speak JSON from then on, since versions are read
// from the answers.
func (r *Recorder) Configure(config *rest.Config, who Identity) {
	config.ContentType = "application/json"
	config.AcceptContentTypes = "application/json"
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return &transport{r, who, next} })
}

type transport struct {
	recorder *Recorder
	who      Identity
	next     http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (t *transport) RoundTrip(req *http.Request) (*http.Response, error) {
	switch req.Method {
	case http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete:
	default:
		return t.next.RoundTrip(req)
	}
	q, ok := parse(req.URL.Path)
	if !ok {
		return t.next.RoundTrip(req)
	}
	q.Verb, q.Actor, q.Member = req.Method, t.who.Actor, t.who.Member
	if t.who.Session != nil {
		q.Session = t.who.Session(req.Context())
	}
	if req.Method == http.MethodPost && q.Subresource == "" {
		name, err := nameIn(req)
		if err != nil {
			return nil, err
		}
		q.Object += name
	}
	id := t.recorder.sent(q)
	resp, err := t.next.RoundTrip(req)
	if err != nil {
		return resp, err
	}
	body, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	if err != nil {
		return nil, err
	}
	resp.Body = io.NopCloser(bytes.NewReader(body))
	a := Answer{ID: id, Code: resp.StatusCode}
	if resp.StatusCode < 300 {
		var o metav1.PartialObjectMetadata
		if json.Unmarshal(body, &o) == nil && o.Kind != "Status" {
			a.Version = sharding.Version(o.ResourceVersion)
		}
	}
	t.recorder.answered(a)
	return resp, nil
}

// nameIn returns the name of the object that a request creates.
func nameIn(req *http.Request) (string, error) {
	if req.Body == nil {
		return "", nil
	}
	body, err := io.ReadAll(req.Body)
	req.Body.Close()
	if err != nil {
		return "", fmt.Errorf("request to record: %w", err)
	}
	req.Body = io.NopCloser(bytes.NewReader(body))
	var o metav1.PartialObjectMetadata
	if err := json.Unmarshal(body, &o); err != nil {
		return "", fmt.Errorf("request to record: %s: %w", req.URL.Path, err)
	}
	return o.Name, nil
}

// parse reads the path of a request: what resource it is about, and which object, if the path names one. A namespaced
// collection leaves "namespace/" as the object, for the name to follow.
func parse(path string) (Request, bool) {
	parts := strings.Split(strings.Trim(path, "/"), "/")
	var group string
	switch {
	case len(parts) >= 3 && parts[0] == "api":
		parts = parts[2:]
	case len(parts) >= 4 && parts[0] == "apis":
		group, parts = parts[1], parts[3:]
	default:
		return Request{}, false
	}
	var q Request
	if len(parts) >= 3 && parts[0] == "namespaces" {
		q.Object, parts = parts[1]+"/", parts[2:]
	}
	q.Resource = sharding.Resource(parts[0])
	if group != "" {
		q.Resource += sharding.Resource("." + group)
	}
	if len(parts) > 1 {
		q.Object += parts[1]
	}
	if len(parts) > 2 {
		q.Subresource = strings.Join(parts[2:], "/")
	}
	return q, true
}
