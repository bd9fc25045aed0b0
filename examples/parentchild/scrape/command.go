package scrape

import (
	"context"
	"encoding/csv"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	v1alpha1 "github.com/drover-sh/drover/examples/parentchild/api/v1alpha1"
)

// options are the flags.
type options struct {
	kubeconfig, output string
	members            []string
	interval           time.Duration
	untilDone          bool
}

// Command returns the subcommand.
func Command() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use: "scrape", Short: "Prints how many Parents have their Child, and who does how much", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context(), cmd.OutOrStdout()) },
	}
	f := cmd.Flags()
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig file; empty: the pod's service account")
	f.StringSliceVar(&o.members, "members", nil, "host:port of each member's metrics")
	f.DurationVar(&o.interval, "interval", time.Second, "time between two readings")
	f.StringVarP(&o.output, "output", "o", "table", "table or csv")
	f.BoolVar(&o.untilDone, "until-done", false, "end when there are Parents and all of them have their Child")
	return cmd
}

func (o *options) run(ctx context.Context, out io.Writer) error {
	if o.output != "table" && o.output != "csv" {
		return fmt.Errorf("flag --output: %q is neither table nor csv", o.output)
	}
	if o.interval <= 0 {
		return fmt.Errorf("flag --interval: %s is not positive", o.interval)
	}
	config, err := clientcmd.BuildConfigFromFlags("", o.kubeconfig)
	if err != nil {
		return fmt.Errorf("flag --kubeconfig: %q: %w", o.kubeconfig, err)
	}
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return err
	}
	c, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		return err
	}
	if o.output == "csv" {
		if err := csv.NewWriter(out).WriteAll([][]string{header}); err != nil {
			return err
		}
	}
	start := time.Now()
	before := &Reading{}
	ticks := time.NewTicker(o.interval)
	defer ticks.Stop()
	for {
		now, err := o.read(ctx, c, time.Since(start))
		if err != nil {
			return err
		}
		if before.At == 0 {
			before = now
		}
		if err := o.print(out, rows(before, now)); err != nil {
			return err
		}
		if p := now.Progress; o.untilDone && p.Parents > 0 && p.Done == p.Parents {
			return nil
		}
		before = now
		select {
		case <-ctx.Done():
			return nil
		case <-ticks.C:
		}
	}
}

func (o *options) read(ctx context.Context, c client.Client, at time.Duration) (*Reading, error) {
	now := &Reading{At: at, Members: make([]Member, len(o.members))}
	web := &http.Client{Timeout: max(o.interval, time.Second)}
	var wait sync.WaitGroup
	for i, address := range o.members {
		wait.Go(func() { now.Members[i] = member(ctx, web, address) })
	}
	var err error
	now.Progress, err = progress(ctx, c)
	wait.Wait()
	if ctx.Err() != nil {
		return now, nil
	}
	return now, err
}

func (o *options) print(out io.Writer, rows [][]string) error {
	if o.output == "csv" {
		return csv.NewWriter(out).WriteAll(rows)
	}
	w := tabwriter.NewWriter(out, 0, 0, 3, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, strings.ToUpper(strings.Join(header, "\t"))+"\t")
	for _, row := range rows {
		fmt.Fprintln(w, strings.Join(row, "\t")+"\t")
	}
	return w.Flush()
}
