package integration

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/drover-sh/drover/playground"
)

// TestStorySchedulers plays the playground's story about schedulers that are active at once. None of its pods is short of
// capacity, those included that wait for the Lease of a scheduler that was killed: nobody may ask for any.
func TestStorySchedulers(t *testing.T) {
	undeploy(t)
	program(t, "coordinator")
	p := startPlayground(t, &tables{})
	r := p.Run(t.Context(), playground.Schedulers())
	if !r.OK {
		t.Fatalf("%s\nsteps: %s\nlogs: %s", r.Error, steps(r), r.Logs)
	}
	t.Logf("%.0f s; steps: %s", r.Seconds, steps(r))
	if want := 18 * 16; r.Pods != want || r.Requests != 0 || r.NodesLaunched != 0 {
		t.Errorf("%d pods, %d requests, %d nodes launched; expected %d, 0 and 0", r.Pods, r.Requests, r.NodesLaunched, want)
	}
	dir := filepath.Join(p.Dir(), "story-schedulers")
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("the story has left its folder: %v", err)
	}
	if left := processesOf(t, dir); len(left) > 0 {
		t.Errorf("processes: %s", strings.Join(left, "\n"))
	}
}
