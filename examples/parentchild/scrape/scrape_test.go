package scrape

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

const metrics = `# TYPE drover_sharded_epoch gauge
drover_sharded_epoch{group="g",member="m-0"} 7
# TYPE drover_sharded_owned_virtual_nodes gauge
drover_sharded_owned_virtual_nodes{group="g",member="m-0"} 500
# TYPE drover_sharded_served_virtual_nodes gauge
drover_sharded_served_virtual_nodes{group="g",member="m-0"} 499
# TYPE drover_sharded_moving_virtual_nodes gauge
drover_sharded_moving_virtual_nodes{group="g",member="m-0"} 3
# TYPE drover_sharded_lease_held gauge
drover_sharded_lease_held{group="g",member="m-0"} 1
# TYPE controller_runtime_reconcile_total counter
controller_runtime_reconcile_total{controller="parent",result="success"} 90
controller_runtime_reconcile_total{controller="parent",result="error"} 10
`

func TestMetricsOfAMember(t *testing.T) {
	want := Member{Name: "m-0", Epoch: 7, Owned: 500, Served: 499, Moving: 3, Leased: true, Reconciles: 100}
	if diff := cmp.Diff(want, parse("here:1", strings.NewReader(metrics))); diff != "" {
		t.Error(diff)
	}
	for text, fault := range map[string]string{"not a metric": "here:1"} {
		if m := parse("here:1", strings.NewReader(text)); m.Fault == nil || !strings.Contains(m.Fault.Error(), fault) {
			t.Errorf("%q: %v, want an error that names the address", text, m.Fault)
		}
	}
	server := httptest.NewServer(http.NotFoundHandler())
	address := strings.TrimPrefix(server.URL, "http://")
	if m := member(context.Background(), server.Client(), address); m.Fault == nil || m.Name != address {
		t.Errorf("a server without metrics: %+v, want a fault", m)
	}
	server.Close()
	if m := member(context.Background(), server.Client(), address); m.Fault == nil || m.Name != address {
		t.Errorf("no server: %+v, want a fault", m)
	}
}

// Only a Child that its Parent of today controls counts.
func TestProgressCountsParentsWithTheirChild(t *testing.T) {
	object := func(uid, owner string) metav1.PartialObjectMetadata {
		o := metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{UID: types.UID(uid)}}
		if owner != "" {
			o.OwnerReferences = []metav1.OwnerReference{{UID: types.UID(owner), Controller: ptr.To(true)}}
		}
		return o
	}
	parents := []metav1.PartialObjectMetadata{object("1", ""), object("2", ""), object("3", "")}
	children := []metav1.PartialObjectMetadata{object("c1", "1"), object("c2", "an earlier 2"), object("c3", "")}
	if got := count(parents, children); got != (Progress{Parents: 3, Done: 1}) {
		t.Errorf("%+v, want 1 of 3", got)
	}
}

func TestRowsShowRates(t *testing.T) {
	before := &Reading{At: time.Second, Progress: Progress{10, 2}, Members: []Member{
		{Name: "m-0", Reconciles: 100}, {Name: "m-1", Reconciles: 100},
	}}
	now := &Reading{At: 3 * time.Second, Progress: Progress{10, 7}, Members: []Member{
		{Name: "m-0", Epoch: 4, Owned: 5, Served: 5, Leased: true, Reconciles: 150},
		{Name: "m-1", Reconciles: 3}, // it has begun anew
		{Name: "127.0.0.1:9", Fault: context.DeadlineExceeded},
	}}
	want := [][]string{
		{"3.0", "10", "7", "2.5", "m-0", "4", "5", "5", "0", "yes", "25.0"},
		{"3.0", "10", "7", "2.5", "m-1", "0", "0", "0", "0", "no", "-"},
		{"3.0", "10", "7", "2.5", "127.0.0.1:9", "-", "-", "-", "-", "no answer", "-"},
	}
	if diff := cmp.Diff(want, rows(before, now)); diff != "" {
		t.Error(diff)
	}
	for _, row := range append(rows(now, now), rows(&Reading{}, &Reading{})...) {
		if len(row) != len(header) || row[3] != "-" {
			t.Errorf("%q: want %d cells, and no rate without time", row, len(header))
		}
	}
}
