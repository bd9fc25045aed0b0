package chaos

import (
	"context"
	"encoding/csv"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	v1alpha1 "github.com/drover-sh/drover/examples/parentchild/api/v1alpha1"
	"github.com/drover-sh/drover/examples/parentchild/recording"
	"github.com/drover-sh/drover/internal/process"
	"github.com/drover-sh/drover/sharding/history"
)

// The first experiment of section 7.2.2 in small: Parents are created in a mass behind a closed gate, the gate opens,
// and the scraper tells when all have their Child.
func TestSample(t *testing.T) {
	const count = 50
	c := start(t, options{members: 2, coordinators: 1, handoff: lbv1alpha1.HandoffExclusive})
	c.gate(false)
	run := func(name string, args ...string) *process.Process {
		return c.launch(process.Spec{Name: name, Path: filepath.Join(c.bin, "parentchild"),
			Args: append([]string{name, "--kubeconfig", c.cp.Kubeconfig()}, args...)})
	}
	run("creation", "--qps", "-1")
	many := &v1alpha1.ParentCreation{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "many"},
		Spec:       v1alpha1.ParentCreationSpec{Count: count, NamePattern: "p-{index}-x", Value: "v"},
	}
	if err := c.client.Create(t.Context(), many); err != nil {
		t.Fatal(err)
	}
	c.eventually("all Parents are created", func(ctx context.Context) error {
		err := c.client.Get(ctx, client.ObjectKeyFromObject(many), many)
		if err == nil && (!many.Status.Done || many.Status.Created != count) {
			err = fmt.Errorf("status %+v", many.Status)
		}
		return err
	})
	var last v1alpha1.Parent
	key := client.ObjectKey{Namespace: namespace, Name: fmt.Sprintf("p-%d-x", count-1)}
	if err := c.client.Get(t.Context(), key, &last); err != nil || last.Spec.Value != "v" {
		t.Errorf("last Parent: %v, value %q", err, last.Spec.Value)
	}
	c.eventually("both members have looked at all of their Parents", func(ctx context.Context) error {
		done := 0
		for _, m := range c.members {
			lines, err := recording.Load(m.record(m.life()))
			if err != nil {
				return err
			}
			done += countOf(lines, history.Finished)
		}
		if done < count {
			return fmt.Errorf("%d reconciles", done)
		}
		return c.settled(ctx, 2)
	})
	var cs v1alpha1.ChildList
	if err := c.client.List(t.Context(), &cs); err != nil || len(cs.Items) != 0 {
		t.Errorf("%d Children behind a closed gate, %v", len(cs.Items), err)
	}
	scraper := run("scrape", "-o", "csv", "--until-done", "--interval", "200ms")
	c.gate(true)
	select {
	case <-scraper.Done():
	case <-time.After(patience):
		t.Fatalf("the scraper does not end\n%s", c.dump())
	}
	f, err := os.Open(scraper.LogFile())
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	rows, err := csv.NewReader(f).ReadAll()
	if err != nil || len(rows) < 2 {
		t.Fatalf("the scraper's output: %v, %v", rows, err)
	}
	if end := rows[len(rows)-1]; end[1] != fmt.Sprint(count) || end[2] != fmt.Sprint(count) {
		t.Errorf("the scraper's last row: %v, want %d of %d", end, count, count)
	}
	if err := c.complete(t.Context()); err != nil {
		t.Error(err)
	}
}

// gate opens or closes the gate.
func (c *cluster) gate(open bool) {
	c.t.Helper()
	gate := &v1alpha1.Gate{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: v1alpha1.GateName}}
	patch := client.RawPatch("application/merge-patch+json", fmt.Appendf(nil, `{"spec":{"open":%t}}`, open))
	if err := c.client.Patch(c.t.Context(), gate, patch); err != nil {
		c.t.Fatal(err)
	}
}
