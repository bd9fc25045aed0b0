package chaos

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	v1alpha1 "github.com/drover-sh/drover/examples/parentchild/api/v1alpha1"
	"github.com/drover-sh/drover/examples/parentchild/recording"
)

// A lagger stands before the API server and lets a member's watches of Parents and Children fall behind, as those of an API
// server do whose watch cache does. Everything else passes at once: what the member is told to do, its lists, its writes. A
// list of what the watch cache has (resourceVersion "0") is answered as by another API server, which is further behind.
type lagger struct {
	listener net.Listener
	store    *store

	mu    sync.Mutex
	delay time.Duration
}

func newLagger(t *testing.T, target *url.URL, ca []byte, cert, key string, s *store) *lagger {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		t.Fatal("no certificate of the API server's authority")
	}
	l := &lagger{listener: listener, store: s}
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, ForceAttemptHTTP2: true}
	server := &http.Server{
		ErrorLog: log.New(io.Discard, "", 0),
		Handler: &httputil.ReverseProxy{
			Transport:     transport,
			FlushInterval: -1, // each event at once
			ErrorLog:      log.New(io.Discard, "", 0),
			Rewrite: func(r *httputil.ProxyRequest) {
				r.SetURL(target)
				l.age(r.Out)
			},
			ModifyResponse: l.slow,
			// There is no answer where the API server gives none.
			ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
		},
	}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = server.ServeTLS(listener, cert, key)
	}()
	t.Cleanup(func() {
		server.Close()
		<-served
		transport.CloseIdleConnections()
	})
	return l
}

func (l *lagger) address() string { return l.listener.Addr().String() }

// fallBehind sets how late events are that arrive from now on.
func (l *lagger) fallBehind(delay time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.delay = delay
}

func (l *lagger) lag() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.delay
}

func (l *lagger) slow(r *http.Response) error {
	if watches(r.Request) && ofGroup(r.Request) {
		r.Body = newLate(r.Body, l.lag)
	}
	return nil
}

// age makes a list of what a watch cache has one of what there was longer ago than a Lease lasts: what somebody wrote who
// has died since is not in it.
func (l *lagger) age(r *http.Request) {
	q, lag := r.URL.Query(), l.lag()
	if lag == 0 || q.Get("resourceVersion") != "0" || watches(r) || !ofGroup(r) {
		return
	}
	if revision := l.store.revisionAt(recording.Now() - lag - 2*leaseDuration); revision > 0 {
		q.Set("resourceVersion", strconv.FormatInt(revision, 10))
		q.Set("resourceVersionMatch", "Exact")
		r.URL.RawQuery = q.Encode()
	}
}

func watches(r *http.Request) bool {
	q := r.URL.Query().Get("watch")
	return q == "true" || q == "1"
}

func ofGroup(r *http.Request) bool {
	return strings.Contains(r.URL.Path, "/"+v1alpha1.GroupVersion.Group+"/")
}

// late is a body that arrives in the order of its bytes, each a while after it was sent.
type late struct {
	body   io.ReadCloser
	chunks chan chunk
	closed chan struct{}
	once   sync.Once
	rest   []byte
	err    error
}

type chunk struct {
	bytes []byte
	due   time.Time
	err   error
}

func newLate(body io.ReadCloser, lag func() time.Duration) *late {
	b := &late{body: body, chunks: make(chan chunk, 4096), closed: make(chan struct{})}
	go func() {
		for {
			buffer := make([]byte, 16<<10)
			n, err := body.Read(buffer)
			select {
			case b.chunks <- chunk{buffer[:n], time.Now().Add(lag()), err}:
			case <-b.closed:
				return
			}
			if err != nil {
				return
			}
		}
	}()
	return b
}

// Read implements io.Reader.
func (b *late) Read(p []byte) (int, error) {
	for len(b.rest) == 0 {
		if b.err != nil {
			return 0, b.err
		}
		select {
		case c := <-b.chunks:
			wait := time.NewTimer(time.Until(c.due))
			select {
			case <-wait.C:
			case <-b.closed:
				wait.Stop()
				return 0, errClosed
			}
			b.rest, b.err = c.bytes, c.err
		case <-b.closed:
			return 0, errClosed
		}
	}
	n := copy(p, b.rest)
	b.rest = b.rest[n:]
	return n, nil
}

// Close implements io.Closer.
func (b *late) Close() error {
	b.once.Do(func() { close(b.closed) })
	return b.body.Close()
}

var errClosed = errors.New("the watch has been closed")
