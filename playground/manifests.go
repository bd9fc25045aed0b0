package playground

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	"github.com/drover-sh/drover/capacity"
)

// RunManifests applies the user's own manifests, on the playground that is up or on a new one, follows what comes of
// them until every pod runs (or has succeeded) and no node is on its way, or timeout has passed, and deletes them
// again. With withKueue, Kueue runs before they are applied; without, only where it runs anyway.
func RunManifests(ctx context.Context, presenter Presenter, files []string, timeout time.Duration, withKueue bool) error {
	return withAny(ctx, presenter, func(p *Playground) error {
		if withKueue {
			if err := p.EnableKueue(ctx); err != nil {
				return err
			}
		}
		result := p.runManifests(ctx, files, timeout)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if !result.OK {
			return fmt.Errorf("%w: %s", ErrStoryFailed, result.Name)
		}
		return nil
	})
}

func (p *Playground) runManifests(ctx context.Context, files []string, timeout time.Duration) Result {
	story := Story{Name: strings.Join(files, ","), Title: "your own manifests"}
	s := &Stage{ctx: ctx, p: p, story: "manifests", begin: time.Now()} // no namespace: whatever appears is the story's
	p.present.StoryBegins(story)
	p.view.look("", func(w *World) {
		s.recorder = newRecorder("", w.v.nodes)
		w.v.recorder = s.recorder
	})
	sampling, stopSampling := context.WithCancel(ctx)
	var sampler sync.WaitGroup
	sampler.Go(func() { p.sampleRollUps(sampling) })

	own, removeCopies, err := readable(files)
	if err != nil {
		s.fail(err)
	} else {
		s.playManifests(own, timeout)
		removeCopies()
	}
	stopSampling()
	sampler.Wait()
	result := s.result(story)
	p.present.StoryEnds(story, result)
	return result
}

func (s *Stage) playManifests(files []string, timeout time.Duration) {
	var flags []string
	for _, f := range files {
		flags = append(flags, "-f", f)
	}
	var podsBefore, nodesBefore int
	s.Look(func(w *World) { podsBefore, nodesBefore = len(w.Pods()), len(w.Nodes()) })

	out, err := s.p.kubectl(s.ctx, append([]string{"apply"}, flags...)...)
	for line := range strings.Lines(out) {
		if err == nil {
			s.Step("%s", strings.TrimSpace(line))
		}
	}
	if err != nil {
		s.fail(err)
	}
	s.follow(timeout, podsBefore)
	s.Table("get", everything, "-A")
	s.Look(func(w *World) {
		if nodes := w.Nodes(); len(nodes) > 0 {
			s.Step("%s: %s", count(len(nodes), "node"), say(places(nodes, typeLabel)))
		}
	})

	// What was applied is deleted in any case; a partly applied file, too.
	deleting, cancel := context.WithTimeout(context.WithoutCancel(s.ctx), timeout)
	defer cancel()
	_, err = s.p.kubectl(deleting, append([]string{"delete", "--ignore-not-found", "--wait=false"}, flags...)...)
	if err != nil {
		s.fail(fmt.Errorf("deleting what was applied: %w", err))
	}
	if s.ctx.Err() != nil {
		s.fail(context.Cause(s.ctx))
		return
	}
	failed := s.err
	s.err = nil
	s.Step("deleted")
	s.Await("the nodes are gone that came for it", func(w *World) (bool, string) {
		return len(w.Pods()) <= podsBefore && len(w.Nodes()) <= nodesBefore && len(w.Upcoming()) == 0,
			fmt.Sprintf("%s, %s", count(len(w.Pods()), "pod"), count(len(w.Nodes()), "node"))
	})
	s.Step("its nodes are gone")
	s.err = errors.Join(failed, s.err)
}

// follow tells how pods, requests and nodes come along, until all is well or timeout has passed.
func (s *Stage) follow(timeout time.Duration, podsBefore int) {
	if s.err != nil {
		return
	}
	ctx, cancel := context.WithTimeoutCause(s.ctx, timeout, fmt.Errorf("%s have passed", timeout))
	defer cancel()
	var last, seen string
	settled := s.settled(podsBefore)
	err := s.p.view.wait(ctx, func(w *World) bool {
		running, done, queued := 0, 0, 0
		pods := w.Pods()
		for _, wl := range w.Workloads() {
			if !admitted(wl) && !apimeta.IsStatusConditionTrue(wl.Status.Conditions, kueue.WorkloadFinished) {
				queued++
			}
		}
		for _, p := range pods {
			switch {
			case capacity.IsTerminal(p):
				done++
			case p.Status.Phase == corev1.PodRunning:
				running++
			}
		}
		seen = fmt.Sprintf("%s: %d running, %d ended; %s, %s", count(len(pods), "pod"), running, done,
			count(len(w.Requests()), "request"), count(len(w.ReadyNodes()), "node"))
		if len(w.Workloads()) > 0 {
			seen += fmt.Sprintf("; %s, %d queued", count(len(w.Workloads()), "workload"), queued)
		}
		s.p.present.Progress(time.Since(s.begin), "every pod runs", seen)
		// A line for each stage of the way, not for each pod.
		if stage := fmt.Sprintf("%t %t %t", len(w.Requests()) > 0, len(w.ReadyNodes()) > 0, running+done == len(pods)); stage != last && len(pods) > podsBefore {
			last = stage
			s.Step("%s", seen)
		}
		return settled(w, running+done == len(pods) && queued == 0)
	}, s.namespace)
	if err != nil {
		s.fail(fmt.Errorf("expected: every pod runs; seen: %s (%w)%s", seen, err, s.hints()))
		return
	}
	s.Step("%s", seen)
}

// settled returns a condition that holds when all pods run and two more roll-ups have changed nothing: controllers may
// be about to make more pods, and a manifest may hold requests only.
func (s *Stage) settled(podsBefore int) func(w *World, running bool) bool {
	var state string
	var since int
	return func(w *World, running bool) bool {
		now := fmt.Sprint(len(w.Pods()), len(w.Requests()), len(w.Nodes()), running)
		if now != state {
			state, since = now, w.RollUpsSent()
		}
		idle := len(w.Upcoming()) == 0 && len(w.ReadyNodes()) == len(w.Nodes())
		return running && idle && w.RollUpsSent() >= since+2 && (len(w.Pods()) > podsBefore || w.RollUpsSent() >= since+5)
	}
}

// readable copies standard input to a file, because it is read twice, and makes paths absolute.
func readable(files []string) (paths []string, remove func(), err error) {
	var copied string
	remove = func() {
		if copied != "" {
			_ = os.Remove(copied)
		}
	}
	for _, f := range files {
		if f != "-" {
			if f, err = filepath.Abs(f); err == nil {
				_, err = os.Stat(f)
			}
			if err != nil {
				remove()
				return nil, nil, fmt.Errorf("manifest: %w", err)
			}
			paths = append(paths, f)
			continue
		}
		data, err := io.ReadAll(os.Stdin)
		if err != nil {
			remove()
			return nil, nil, fmt.Errorf("reading manifests from standard input: %w", err)
		}
		tmp, err := os.CreateTemp("", "drover-playground-*.yaml")
		if err != nil {
			return nil, nil, fmt.Errorf("copying standard input: %w", err)
		}
		copied = tmp.Name()
		_, err = tmp.Write(data)
		if err = errors.Join(err, tmp.Close()); err != nil {
			remove()
			return nil, nil, fmt.Errorf("copying standard input: %w", err)
		}
		paths = append(paths, copied)
	}
	return paths, remove, nil
}
