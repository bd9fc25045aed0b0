// Package scrape tells how far the sample controller is: how many Parents have their Child, which member has how many
// Virtual Nodes, and how much each of them does (the Parent Scraper of section 7.2.1). It reads, and writes nothing to
// the cluster. Start reading at Command.
package scrape

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	v1alpha1 "github.com/drover-sh/drover/examples/parentchild/api/v1alpha1"
)

// A Member is what one member's metrics say.
type Member struct {
	// Name is in the WatchGroup; the address, if the member does not answer.
	Name string
	// Epoch is that of the slice the member acts on.
	Epoch int64
	// Owned, Served and Moving are numbers of Virtual Nodes.
	Owned, Served, Moving int
	// Leased tells that the member holds its Lease.
	Leased bool
	// Reconciles is how many the process has done.
	Reconciles float64
	// Fault is why there are no figures.
	Fault error
}

// Progress is how many Parents there are, and how many of them have their Child.
type Progress struct {
	Parents, Done int
}

// maxMetrics bounds what is read of one member, in bytes.
const maxMetrics = 16 << 20

// member reads the metrics at an address, such as "127.0.0.1:8080".
func member(ctx context.Context, c *http.Client, address string) Member {
	m := Member{Name: address}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/metrics", nil)
	if err != nil {
		m.Fault = err
		return m
	}
	resp, err := c.Do(req)
	if err != nil {
		m.Fault = err
		return m
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		m.Fault = fmt.Errorf("metrics of %s: %s", address, resp.Status)
		return m
	}
	return parse(address, io.LimitReader(resp.Body, maxMetrics))
}

func parse(address string, text io.Reader) Member {
	m := Member{Name: address}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(text)
	if err != nil {
		m.Fault = fmt.Errorf("metrics of %s: %w", address, err)
		return m
	}
	gauge := func(name string) float64 {
		metrics := families["drover_sharded_"+name].GetMetric()
		if len(metrics) == 0 {
			return 0
		}
		for _, l := range metrics[0].GetLabel() {
			if l.GetName() == "member" {
				m.Name = l.GetValue()
			}
		}
		return metrics[0].GetGauge().GetValue()
	}
	m.Epoch = int64(gauge("epoch"))
	m.Owned, m.Served, m.Moving = int(gauge("owned_virtual_nodes")), int(gauge("served_virtual_nodes")), int(gauge("moving_virtual_nodes"))
	m.Leased = gauge("lease_held") == 1
	m.Reconciles = sum(families["controller_runtime_reconcile_total"])
	return m
}

func sum(f *dto.MetricFamily) float64 {
	var total float64
	for _, metric := range f.GetMetric() {
		total += metric.GetCounter().GetValue()
	}
	return total
}

// progress counts Parents and Children, from the API server's cache.
func progress(ctx context.Context, c client.Client) (Progress, error) {
	cached := &client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: "0"}}
	var parents, children metav1.PartialObjectMetadataList
	parents.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("ParentList"))
	children.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("ChildList"))
	if err := c.List(ctx, &parents, cached); err != nil {
		return Progress{}, err
	}
	if err := c.List(ctx, &children, cached); err != nil {
		return Progress{}, err
	}
	return count(parents.Items, children.Items), nil
}

func count(parents, children []metav1.PartialObjectMetadata) Progress {
	owners := make(map[string]bool, len(children))
	for i := range children {
		if owner := metav1.GetControllerOfNoCopy(&children[i]); owner != nil {
			owners[string(owner.UID)] = true
		}
	}
	p := Progress{Parents: len(parents)}
	for i := range parents {
		if owners[string(parents[i].UID)] {
			p.Done++
		}
	}
	return p
}

// A Reading is what there was to see at one time.
type Reading struct {
	At       time.Duration // since the first
	Progress Progress
	Members  []Member
}

// header are the columns of a row.
var header = []string{"seconds", "parents", "done", "done/s", "member", "epoch", "owned", "served", "moving", "leased", "reconciles/s"}

// rows returns a reading as rows, one for each member, with rates since the one before.
func rows(before, now *Reading) [][]string {
	elapsed := (now.At - before.At).Seconds()
	rate := func(from, to float64) string {
		if elapsed <= 0 || to < from { // the first reading, or a member that has begun anew
			return "-"
		}
		return fmt.Sprintf("%.1f", (to-from)/elapsed)
	}
	last := make(map[string]float64)
	for _, m := range before.Members {
		if m.Fault == nil {
			last[m.Name] = m.Reconciles
		}
	}
	common := []string{
		fmt.Sprintf("%.1f", now.At.Seconds()), fmt.Sprint(now.Progress.Parents), fmt.Sprint(now.Progress.Done),
		rate(float64(before.Progress.Done), float64(now.Progress.Done)),
	}
	var out [][]string
	for _, m := range now.Members {
		row := append([]string(nil), common...)
		if m.Fault != nil {
			out = append(out, append(row, m.Name, "-", "-", "-", "-", "no answer", "-"))
			continue
		}
		reconciles := "-"
		if from, ok := last[m.Name]; ok {
			reconciles = rate(from, m.Reconciles)
		}
		leased := "no"
		if m.Leased {
			leased = "yes"
		}
		out = append(out, append(row, m.Name, fmt.Sprint(m.Epoch), fmt.Sprint(m.Owned), fmt.Sprint(m.Served),
			fmt.Sprint(m.Moving), leased, reconciles))
	}
	if len(out) == 0 {
		out = append(out, append(append([]string(nil), common...), "-", "-", "-", "-", "-", "-", "-"))
	}
	return out
}
