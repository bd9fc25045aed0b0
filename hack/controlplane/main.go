// Command controlplane builds the control plane that tests and the playground run on: etcd, kube-apiserver,
// kube-controller-manager, kubectl, kwok and the Kueue manager, each from the module version that go.mod requires, with
// its version stamped in. `make control-plane` runs it. With -own it builds this project's own programs in the same
// manner, for `make binaries`.
//
// It uses the standard library only, so that it starts at once on a fresh machine, and does nothing when everything is
// up to date. Where KUBEBUILDER_ASSETS names a directory with etcd, kube-apiserver or kubectl, those are taken from
// there.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"
)

func main() {
	dir := flag.String("dir", filepath.Join("bin", "control-plane"), "where the programs go")
	own := flag.Bool("own", false, "build this project's programs into bin instead")
	force := flag.Bool("force", false, "build also what is up to date")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "Builds the control plane for tests and the playground. Flags:")
		flag.PrintDefaults()
	}
	flag.Parse()
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	var err error
	if *own {
		err = runOwn(ctx, "bin", newScreen(os.Stdout))
	} else {
		err = run(ctx, *dir, os.Getenv("KUBEBUILDER_ASSETS"), *force, newScreen(os.Stdout))
	}
	if errors.Is(err, context.Canceled) {
		fmt.Fprintln(os.Stderr, "interrupted; what is built already stays built")
		os.Exit(130)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, dir, assets string, force bool, screen *screen) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	unlock, err := lock(ctx, filepath.Join(dir, ".lock"), screen)
	if err != nil {
		return err
	}
	defer unlock()

	wanted := programs
	if assets != "" {
		wanted = without(wanted, assets, screen)
	}
	last := readStamp(filepath.Join(dir, stampFile))
	quick, err := quickSum(ctx)
	if err != nil {
		return err
	}
	if !force && last.Quick == quick && allThere(dir, wanted, last) {
		screen.line("control plane: up to date (%s)", dir)
		return nil
	}

	// go.mod has changed, or something is missing. Only programs whose own modules have changed are built again.
	stale, sums, err := findStale(ctx, dir, wanted, last, force)
	if err != nil {
		return err
	}
	builder := builder{dir: dir, screen: screen, start: time.Now()}
	for _, p := range stale {
		builder.totalWeight += p.weight
	}
	if len(stale) > 0 {
		screen.line("control plane: building %d of %d programs into %s (from nothing: about %s on this machine)",
			len(stale), len(programs), dir, rough(builder.coldEstimate()))
	}
	for i, p := range stale {
		if err := builder.build(ctx, p, i+1, len(stale)); err != nil {
			return err
		}
		last.Programs[p.name] = sums[p.name]
		if err := last.write(filepath.Join(dir, stampFile)); err != nil {
			return err
		}
	}
	last.Quick = quick
	if err := last.write(filepath.Join(dir, stampFile)); err != nil {
		return err
	}
	screen.line("control plane: ready (%s)", dir)
	return nil
}

// runOwn builds this project's programs. Their sources change all the time, so that the go command decides what there
// is to do; without a change that takes it a second or two.
func runOwn(ctx context.Context, dir string, screen *screen) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	builder := builder{dir: dir, screen: screen, start: time.Now()}
	for _, p := range ownPrograms {
		builder.totalWeight += p.weight
	}
	for i, p := range ownPrograms {
		if err := builder.build(ctx, p, i+1, len(ownPrograms)); err != nil {
			return err
		}
	}
	return nil
}

// lock keeps two builds out of each other's way.
func lock(ctx context.Context, path string, screen *screen) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	for waited := false; ; waited = true {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			f.Close()
			return nil, fmt.Errorf("locking %s: %w", path, err)
		}
		if !waited {
			screen.line("control plane: another build is running; waiting for it")
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, ctx.Err()
		case <-time.After(time.Second):
		}
	}
}
