package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"
)

// builder builds programs one after the other: each build uses every processor by itself.
type builder struct {
	dir    string
	screen *screen
	start  time.Time
	// doneElapsed is when the last finished program was finished, after the start.
	doneElapsed time.Duration
	// Weights of everything to build and of what is built.
	totalWeight, doneWeight float64
}

// coldEstimate is how long everything takes from nothing; weights are seconds on two processors.
func (b *builder) coldEstimate() time.Duration {
	speed := float64(max(1, runtime.NumCPU())) / 2
	return time.Duration(b.totalWeight / speed * float64(time.Second))
}

// left estimates the rest from how the finished programs compare with their weights: with a warm cache that is far less
// than the cold estimate. Without a finished one there is the cold estimate only.
func (b *builder) left(now time.Time) time.Duration {
	elapsed := now.Sub(b.start)
	if b.doneWeight == 0 {
		return b.coldEstimate() - elapsed
	}
	done := b.doneElapsed
	perWeight := done.Seconds() / b.doneWeight
	rest := (b.totalWeight-b.doneWeight)*perWeight - (elapsed - done).Seconds()
	return time.Duration(rest * float64(time.Second))
}

func (b *builder) build(ctx context.Context, p program, n, of int) error {
	begin := time.Now()
	b.screen.begin(strings.TrimSpace(fmt.Sprintf("[%d/%d] %s %s", n, of, p.name, p.version)))
	next, final := filepath.Join(b.dir, "."+p.name+".new"), filepath.Join(b.dir, p.name)
	if p.incremental {
		next = final
	} else {
		defer func() { _ = removeIfThere(next) }()
	}

	args := []string{"build", "-v", "-o", next}
	if p.flags != "" {
		args = append(args, "-ldflags", p.flags)
	}
	cmd := exec.CommandContext(ctx, "go", append(args, p.pkg)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // lets go remove its temporary files
	cmd.WaitDelay = 10 * time.Second
	stderr, err := cmd.StderrPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("building %s: %w", p.name, err)
	}
	log := readBuildLog(stderr)
	var ticking sync.WaitGroup
	stop := make(chan struct{})
	ticking.Go(func() {
		ticker := time.NewTicker(b.screen.interval())
		defer ticker.Stop()
		for {
			select {
			case <-stop:
				return
			case now := <-ticker.C:
				packages, current := log.progress()
				status := rough(now.Sub(begin))
				if left := b.left(now); left > 0 { // an estimate that has turned out too short is none
					status += ", about " + rough(left) + " left"
				}
				if packages > 0 {
					status += fmt.Sprintf(", %d packages compiled, now %s", packages, current)
				}
				b.screen.progress(status)
			}
		}
	})
	log.wait()
	err = cmd.Wait()
	close(stop)
	ticking.Wait()
	if ctx.Err() != nil {
		b.screen.end("interrupted")
		return ctx.Err()
	}
	if err != nil {
		b.screen.end("failed")
		return fmt.Errorf("building %s (go build %s): %w\n\n%s", p.name, p.pkg, err, log.complaints())
	}
	if next != final {
		if err := os.Rename(next, final); err != nil {
			return err
		}
	}
	b.doneWeight += p.weight
	b.doneElapsed = time.Since(b.start)
	b.screen.end("built in " + rough(time.Since(begin)))
	return nil
}

// buildLog takes apart what go build -v writes: names of packages as they are compiled, and everything else, which are
// the compiler's complaints.
type buildLog struct {
	done chan struct{}

	mu       sync.Mutex
	packages int
	current  string
	rest     []string
}

func readBuildLog(r io.Reader) *buildLog {
	l := &buildLog{done: make(chan struct{})}
	go func() {
		defer close(l.done)
		lines := bufio.NewReader(r)
		for {
			line, err := lines.ReadString('\n')
			if line = strings.TrimRight(line, "\n"); line != "" {
				l.add(line)
			}
			if err != nil {
				if !errors.Is(err, io.EOF) && !errors.Is(err, os.ErrClosed) {
					l.add("reading go's output: " + err.Error())
				}
				return
			}
		}
	}()
	return l
}

func (l *buildLog) add(line string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case !strings.ContainsAny(line, " \t:"):
		l.packages++
		l.current = line
	case strings.HasPrefix(line, "go: downloading "):
		l.current = strings.TrimPrefix(line, "go: ")
	default:
		l.rest = append(l.rest, line)
	}
}

func (l *buildLog) wait() { <-l.done }

func (l *buildLog) progress() (packages int, current string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.packages, l.current
}

func (l *buildLog) complaints() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.rest) == 0 {
		return "    (the go command did not say why)"
	}
	return "    " + strings.Join(l.rest, "\n    ")
}
