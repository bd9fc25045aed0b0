package recording_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"k8s.io/client-go/rest"

	"github.com/drover-sh/drover/examples/parentchild/recording"
	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/history"
)

// What a process writes to the API server, and what it hears, is in its file.
func TestTransportRecordsWrites(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPut {
			w.WriteHeader(http.StatusConflict)
			return
		}
		fmt.Fprint(w, `{"kind":"Parent","metadata":{"name":"p","resourceVersion":"7"}}`)
	}))
	defer server.Close()
	path := filepath.Join(t.TempDir(), "record.jsonl")
	r, err := recording.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	config := &rest.Config{Host: server.URL}
	r.Configure(config, recording.Identity{
		Actor: history.Reconciler, Member: "m", Session: func(context.Context) string { return "s" },
	})
	web, err := rest.HTTPClientFor(config)
	if err != nil {
		t.Fatal(err)
	}
	r.Record(history.Record{Kind: history.Started, Session: "s"})
	for _, q := range []struct{ method, path, body string }{
		{"GET", "/apis/x.io/v1/namespaces/ns/parents/p", ""},
		{"POST", "/apis/x.io/v1/namespaces/ns/parents", `{"metadata":{"name":"p"}}`},
		{"PUT", "/apis/x.io/v1/namespaces/ns/parents/p/status", `{}`},
		{"PATCH", "/api/v1/nodes/n", `{}`},
	} {
		req, err := http.NewRequest(q.method, server.URL+q.path, strings.NewReader(q.body))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := web.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if body, err := io.ReadAll(resp.Body); err != nil || (q.method == "POST" && !strings.Contains(string(body), `"7"`)) {
			t.Errorf("%s: the caller reads %q, %v", q.method, body, err)
		}
		resp.Body.Close()
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	got, err := recording.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	request := func(id uint64, verb string, resource sharding.Resource, object, sub string) recording.Line {
		return recording.Line{Sent: &recording.Request{
			ID: id, Actor: history.Reconciler, Member: "m", Session: "s", Verb: verb, Resource: resource, Object: object,
			Subresource: sub,
		}}
	}
	want := []recording.Line{
		{Record: &history.Record{Kind: history.Started, Session: "s"}},
		request(1, "POST", "parents.x.io", "ns/p", ""),
		{Answered: &recording.Answer{ID: 1, Code: 200, Version: "7"}},
		request(2, "PUT", "parents.x.io", "ns/p", "status"),
		{Answered: &recording.Answer{ID: 2, Code: 409}},
		request(3, "PATCH", "nodes", "n", ""),
		{Answered: &recording.Answer{ID: 3, Code: 200, Version: "7"}},
	}
	var last time.Duration
	for _, l := range got {
		var at time.Duration
		switch {
		case l.Record != nil:
			at = l.Record.At
		case l.Sent != nil:
			at = l.Sent.At
		default:
			at = l.Answered.At
		}
		if at < last {
			t.Errorf("%v comes after %v", at, last)
		}
		last = at
	}
	ignore := []cmp.Option{
		cmpopts.IgnoreFields(history.Record{}, "At"), cmpopts.IgnoreFields(recording.Request{}, "At"),
		cmpopts.IgnoreFields(recording.Answer{}, "At"),
	}
	if diff := cmp.Diff(want, got, ignore...); diff != "" {
		t.Error(diff)
	}
}

// A process that is killed loses the line it was writing, and nothing else. Any other fault is an error.
func TestLoad(t *testing.T) {
	whole := `{"record":{"at":1,"kind":"Started"}}` + "\n"
	for _, tc := range []struct {
		name, text, fault string
		lines             int
	}{
		{"whole", whole + whole, "", 2},
		{"torn at the end", whole + `{"record":{"at":2,"ki`, "", 1},
		{"torn before the end", whole + `{"rec` + "\n" + whole, "line 2", 0},
		{"a field that nobody knows", whole + `{"recored":{}}` + "\n", "line 2", 0},
		{"empty", "", "", 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "record.jsonl")
			if err := os.WriteFile(path, []byte(tc.text), 0o644); err != nil {
				t.Fatal(err)
			}
			got, err := recording.Load(path)
			if (err == nil) != (tc.fault == "") || (err != nil && !strings.Contains(err.Error(), tc.fault)) || len(got) != tc.lines {
				t.Errorf("%d lines, %v; want %d lines, error %q", len(got), err, tc.lines, tc.fault)
			}
		})
	}
	path := filepath.Join(t.TempDir(), "taken")
	if err := os.WriteFile(path, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := recording.Create(path); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("Create over a file: %v, want an error that names it", err)
	}
}
