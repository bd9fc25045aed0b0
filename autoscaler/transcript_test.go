package autoscaler

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/drover-sh/drover/autoscaler/provider"
	"github.com/drover-sh/drover/capacity"
)

// TestTranscripts plays the scripts in testdata. Each command's output is everything that the engine decided because of
// it, with the time since the start. Run with -rewrite after a wanted change.
//
//	offering name=<name> cpu=<cores> cost=<cost> domains=(<domain>:<stock>,…)   a new world that sells it, too
//	demand <cluster> [<pods>x<cores> …]                                          what the cluster needs from now on
//	advance <duration>                                                           let time pass
//	fail <why> | heal                                                            launches fail, and no longer
//	busy <cluster> | calm <cluster>                                              drains do not end, and end
//	silence <cluster>                                                            its roll-ups stop
//	restart                                                                      kill -9 and start again
//	policy [dryRun] [disableReclaim]                                             change the policy file
//	feed <cluster>                                                               what the cluster is told
func TestTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		w := newWorld(t, testPolicy())
		var sold []provider.Offering
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			before := len(w.notes)
			arg := func(i int) string { return d.CmdArgs[i].Key }
			switch d.Cmd {
			case "offering":
				var name, cpu, cost string
				var domains []string
				d.ScanArgs(t, "name", &name)
				d.ScanArgs(t, "cpu", &cpu)
				d.ScanArgs(t, "cost", &cost)
				stock := map[string]int32{}
				for _, a := range d.CmdArgs {
					if a.Key == "domains" {
						domains = a.Vals
					}
				}
				for _, text := range domains {
					domain, count, _ := strings.Cut(text, ":")
					stock[domain] = int32(number(t, count))
				}
				price, err := strconv.ParseFloat(cost, 64)
				if err != nil {
					t.Fatal(err)
				}
				sold = append(sold, offering(name, int64(number(t, cpu)), price, stock))
				w.cloud.SetOfferings(sold...)
			case "demand":
				var needs []capacity.Need
				for _, a := range d.CmdArgs[1:] {
					pods, cores, _ := strings.Cut(a.Key, "x")
					needs = append(needs, cpuNeed(int64(number(t, cores)), int32(number(t, pods))))
				}
				w.demand(arg(0), needs...)
				w.settle()
			case "advance":
				duration, err := time.ParseDuration(arg(0))
				if err != nil {
					t.Fatal(err)
				}
				w.advance(duration)
			case "fail":
				why := arg(0)
				w.cloud.Fail = func(provider.Request) string { return why }
			case "heal":
				w.cloud.Fail = nil
			case "busy", "calm":
				w.operator(arg(0)).slow = d.Cmd == "busy"
			case "silence":
				w.operator(arg(0)).silent = true
			case "restart":
				w.start()
			case "policy":
				w.policy.DryRun, w.policy.DisableReclaim = d.HasArg("dryRun"), d.HasArg("disableReclaim")
				w.runner.SetPolicy(w.policy)
			case "feed":
				return w.describeFeed(arg(0))
			default:
				t.Fatalf("unknown command %s", d.Cmd)
			}
			return strings.Join(w.notes[before:], "\n")
		})
	})
}

func number(t *testing.T, text string) int {
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func (w *world) describeFeed(cluster string) string {
	feed := w.feed(cluster)
	var b strings.Builder
	for _, m := range feed.Machines {
		fmt.Fprintf(&b, "machine %s %s %s\n", m.Id, m.Phase, m.Message)
	}
	for _, id := range feed.Terminating {
		fmt.Fprintf(&b, "terminating %s\n", id)
	}
	for _, r := range feed.Reclaims {
		fmt.Fprintf(&b, "reclaim %s: %d of %s: %s\n", r.Id, r.Count, strings.Join(r.Candidates, ", "), r.Reason)
	}
	for _, o := range feed.Offerings {
		fmt.Fprintf(&b, "offering %s: %d available, %s\n", o.Name, o.AvailableCount, o.Availability)
	}
	for _, v := range feed.Verdicts {
		fmt.Fprintf(&b, "verdict: %s, met %d, in flight %d, short %d; %s\n", v.State, v.Met, v.InFlight, v.Short, v.Reason)
	}
	return b.String()
}
