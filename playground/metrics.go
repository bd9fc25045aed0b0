package playground

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// rollUp is what the manager's metrics say of its roll-ups and of what it has promised to workloads.
type rollUp struct {
	rows, bytes int // of the last one that the autoscaler took
	sent        int // how many it took
	// promises are workloads for which the admission check holds capacity.
	promises int
}

// sampleInterval is how often the metrics are read while a story is played. They are not a watch: a roll-up between two
// looks goes unseen, but the largest one of a story stands for a while.
const sampleInterval = 200 * time.Millisecond

// sampleRollUps keeps the view's roll-up up to date until ctx ends. A manager that is down for a moment is no error.
func (p *Playground) sampleRollUps(ctx context.Context) {
	tick := time.NewTicker(sampleInterval)
	defer tick.Stop()
	url := "http://" + loopback(p.ports.ManagerMetrics) + "/metrics"
	for {
		if r, err := readRollUp(ctx, url); err == nil {
			p.view.mu.Lock()
			same := r == p.view.rollUp
			p.view.mu.Unlock()
			if !same {
				p.view.update(func() { p.view.rollUp = r })
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func readRollUp(ctx context.Context, url string) (rollUp, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return rollUp{}, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return rollUp{}, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return rollUp{}, fmt.Errorf("%s: %s", url, resp.Status)
	}
	return parseRollUp(resp.Body)
}

func parseRollUp(r io.Reader) (rollUp, error) {
	var found rollUp
	wanted := map[string]*int{
		"drover_rollup_rows":                          &found.rows,
		"drover_rollup_bytes":                         &found.bytes,
		`drover_rollup_sends_total{result="success"}`: &found.sent,
		"drover_kueue_promises":                       &found.promises,
	}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		name, value, ok := strings.Cut(lines.Text(), " ")
		target := wanted[name]
		if !ok || target == nil {
			continue
		}
		number, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return rollUp{}, fmt.Errorf("metric %s: %w", name, err)
		}
		*target = int(number)
	}
	return found, lines.Err()
}
