package kwok

import (
	"context"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	clienttesting "k8s.io/client-go/testing"

	"github.com/drover-sh/drover/autoscaler/provider"
)

// The provider makes and deletes Nodes by name, and the name of a machine may be taken by a Node that somebody else made.
func TestANodeThatTheProviderDidNotMakeIsLeftAlone(t *testing.T) {
	o := options(t, 8)
	nodes := o.Clusters["east"].CoreV1().Nodes()
	foreign, err := nodes.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "small-taken"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = nodes.Delete(context.Background(), foreign.Name, metav1.DeleteOptions{}) })
	p, events := run(t, o)
	r := request(p, foreign.Name)
	if err := p.Launch(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	want(t, events, provider.Launched, r.ID)
	if err := p.Terminate(t.Context(), r.Ref); err != nil {
		t.Fatal(err)
	}
	want(t, events, provider.Terminated, r.ID)
	if n, err := nodes.Get(t.Context(), foreign.Name, metav1.GetOptions{}); err != nil || n.UID != foreign.UID {
		t.Errorf("the foreign node is %v, %v", n.GetUID(), err)
	}
}

// A Node that was replaced under the same name by somebody else is no longer the machine's.
func TestANodeThatWasReplacedIsLeftAlone(t *testing.T) {
	o := options(t, 8)
	nodes := o.Clusters["east"].CoreV1().Nodes()
	p, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	c := p.clusters["east"]
	r := request(p, "small-replaced")
	m := p.newMachine(r)
	if err := p.register(t.Context(), c, m, r); err != nil {
		t.Fatal(err)
	}
	if err := nodes.Delete(t.Context(), r.ID, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	foreign, err := nodes.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: r.ID}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = nodes.Delete(context.Background(), foreign.Name, metav1.DeleteOptions{}) })
	if err := p.terminate(t.Context(), c, m); !apierrors.IsConflict(err) {
		t.Errorf("the first attempt ended with %v, want a conflict", err)
	}
	if err := p.terminate(t.Context(), c, m); err != nil {
		t.Error(err)
	}
	if n, err := nodes.Get(t.Context(), r.ID, metav1.GetOptions{}); err != nil || n.UID != foreign.UID {
		t.Errorf("the foreign node is %v, %v", n.GetUID(), err)
	}
}

// Whoever may label nodes in one cluster has no say about another's machines.
func TestALabelInOneClusterSaysNothingAboutAnother(t *testing.T) {
	copied := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "small-copied", UID: "copied",
		Labels: map[string]string{LabelMachine: "small-copied"}}}
	west := fake.NewClientset(copied)
	// The API in memory tells a watch of nothing that was before it.
	watched := make(chan struct{})
	var once sync.Once
	west.PrependWatchReactor("nodes", func(action clienttesting.Action) (bool, watch.Interface, error) {
		w, err := west.Tracker().Watch(action.GetResource(), action.GetNamespace(), action.(clienttesting.WatchActionImpl).ListOptions)
		once.Do(func() { close(watched) })
		return true, w, err
	})
	o := Options{OfferingsFile: options(t, 8).OfferingsFile, Seed: 1, Clock: options(t, 8).Clock, Log: options(t, 8).Log,
		Clusters: map[string]kubernetes.Interface{"east": client(t), "west": west}}
	p, events := run(t, o)
	r := request(p, copied.Name)
	if err := p.Launch(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	nodeOf(t, o.Clusters["east"], r.ID)
	select {
	case <-watched:
	case <-time.After(patience):
		t.Fatal("nobody watches the nodes of west")
	}
	if err := west.CoreV1().Nodes().Delete(t.Context(), copied.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if e := want(t, events, provider.Terminated, r.ID); e.Cluster != "west" {
		t.Fatalf("east's machine was ended: %+v", e)
	}
	if list, err := p.List(t.Context(), "east"); err != nil || len(list) != 1 || list[0].Cluster != "east" {
		t.Errorf("east has %v, %v", list, err)
	}
	if err := p.Terminate(t.Context(), r.Ref); err != nil {
		t.Fatal(err)
	}
	want(t, events, provider.Terminated, r.ID)
}

// After a restart the provider knows its machines once it has been shown their Nodes, not once they are listed: whoever
// asked in between would take busy machines for lost.
func TestNothingIsListedBeforeEveryNodeWasSeen(t *testing.T) {
	o := options(t, 8)
	o.Clusters = map[string]kubernetes.Interface{"east": fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: "small-known", UID: "known", Labels: map[string]string{LabelMachine: "small-known"}}})}
	p, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	c := p.clusters["east"]
	p.mu.Lock() // the handler waits for it
	c.factory.Start(t.Context().Done())
	t.Cleanup(c.factory.Shutdown)
	c.factory.WaitForCacheSync(t.Context().Done())
	if c.synced() {
		t.Error("synced before the handler has seen the node")
	}
	p.mu.Unlock()
	deadline := time.After(patience)
	for !c.synced() {
		select {
		case <-deadline:
			t.Fatal("the handler is never through")
		case <-time.After(time.Millisecond):
		}
	}
	if list, err := p.List(t.Context(), "east"); err != nil || len(list) != 1 {
		t.Errorf("listed %v, %v, want the known machine", list, err)
	}
}

// An API server that takes calls and never answers keeps no worker for ever: the other clusters have the same workers.
func TestACallThatIsNeverAnsweredEnds(t *testing.T) {
	gone := make(chan struct{})
	deaf := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-r.Context().Done():
		case <-gone:
		}
	}))
	t.Cleanup(deaf.Close)
	t.Cleanup(func() { close(gone) })
	c, err := kubernetes.NewForConfig(&rest.Config{Host: deaf.URL})
	if err != nil {
		t.Fatal(err)
	}
	o := options(t, 8)
	o.Clusters, o.CallTimeout = map[string]kubernetes.Interface{"east": c}, 10*time.Millisecond
	p, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	r := request(p, "small-deaf")
	m := p.newMachine(r)
	if err := p.register(t.Context(), p.clusters["east"], m, r); err == nil {
		t.Error("registered without an answer")
	}
	if err := p.terminate(t.Context(), p.clusters["east"], m); err == nil {
		t.Error("terminated without an answer")
	}
}
