package playground

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/drover-sh/drover/internal/process"
)

// ErrNoneRunning is returned when no playground is up.
var ErrNoneRunning = errors.New("no playground is up: start one with `playground up`")

// registryEnv overrides where playgrounds are registered.
const registryEnv = "DROVER_PLAYGROUNDS"

// entry is a playground's directory in the registry. Its owner holds a lock on the file "owner" in it: whoever gets
// that lock knows that the owner is gone, however it went.
type entry struct {
	dir  string
	lock *os.File
}

// description is what others have to know to use a playground. It is written last, when everything is ready.
type description struct {
	PID        int    `json:"pid"`
	Kubeconfig string `json:"kubeconfig"`
	Ports      ports  `json:"ports"`
	Kueue      bool   `json:"kueue,omitempty"`
}

func registryDir() string {
	if dir := os.Getenv(registryEnv); dir != "" {
		return dir
	}
	return filepath.Join(os.TempDir(), "drover-playground-"+strconv.Itoa(os.Getuid()))
}

// newEntry makes an entry of our own, after it has cleaned up what is stale.
func newEntry() (*entry, error) {
	registry := registryDir()
	if err := os.MkdirAll(registry, 0o700); err != nil {
		return nil, fmt.Errorf("registry of playgrounds: %w", err)
	}
	if err := cleanStale(registry); err != nil {
		return nil, err
	}
	// Made under a name that nobody looks at, until the lock is held.
	dir, err := os.MkdirTemp(registry, ".new-")
	if err != nil {
		return nil, fmt.Errorf("registry of playgrounds: %w", err)
	}
	lock, held, err := tryLock(dir)
	if err == nil && !held {
		err = errors.New("somebody else holds its lock")
	}
	final := filepath.Join(registry, strconv.Itoa(os.Getpid())+"-"+strconv.FormatInt(time.Now().UnixNano(), 36))
	if err == nil {
		err = os.Rename(dir, final)
	}
	if err != nil {
		_ = os.RemoveAll(dir)
		return nil, fmt.Errorf("registry of playgrounds: %w", err)
	}
	return &entry{dir: final, lock: lock}, nil
}

func (e *entry) file() string { return filepath.Join(e.dir, "playground.json") }

func (e *entry) publish(d description) error {
	data, err := json.MarshalIndent(d, "", "  ")
	if err != nil {
		return err
	}
	next := e.file() + ".new"
	if err := os.WriteFile(next, append(data, '\n'), 0o600); err != nil {
		return fmt.Errorf("registering the playground: %w", err)
	}
	return os.Rename(next, e.file())
}

// remove takes the entry out of the registry, with everything in it.
func (e *entry) remove() error {
	err := os.RemoveAll(e.dir)
	_ = e.lock.Close()
	_ = os.Remove(filepath.Dir(e.dir)) // succeeds for the last one only
	return err
}

// tryLock locks a playground's directory; held is false when its owner is alive.
func tryLock(dir string) (lock *os.File, held bool, err error) {
	f, err := os.OpenFile(filepath.Join(dir, "owner"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, false, err
	}
	switch err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); {
	case err == nil:
		return f, true, nil
	case errors.Is(err, syscall.EWOULDBLOCK):
		f.Close()
		return nil, false, nil
	default:
		f.Close()
		return nil, false, err
	}
}

// cleanStale ends and removes what playgrounds have left whose owner is gone.
func cleanStale(registry string) error {
	entries, err := os.ReadDir(registry)
	if err != nil {
		return fmt.Errorf("registry of playgrounds: %w", err)
	}
	for _, e := range entries {
		dir := filepath.Join(registry, e.Name())
		if e.Name()[0] == '.' {
			// One that is being made, unless it has been for long.
			if info, err := e.Info(); err != nil || time.Since(info.ModTime()) < time.Hour {
				continue
			}
		}
		lock, held, err := tryLock(dir)
		if err != nil || !held {
			continue
		}
		ended := []error{process.End(dir)}
		groups, _ := filepath.Glob(filepath.Join(dir, "story-*"))
		for _, group := range append(groups, filepath.Join(dir, "kueue"), filepath.Join(dir, "control-plane")) {
			ended = append(ended, process.End(group))
		}
		err = errors.Join(append(ended, os.RemoveAll(dir))...)
		lock.Close()
		if err != nil {
			return fmt.Errorf("cleaning up after a playground that crashed: %w", err)
		}
	}
	return nil
}

// findEntry returns the newest playground that is up and ready.
func findEntry() (*entry, description, error) {
	registry := registryDir()
	entries, err := os.ReadDir(registry)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, description{}, ErrNoneRunning
	}
	if err != nil {
		return nil, description{}, fmt.Errorf("registry of playgrounds: %w", err)
	}
	var (
		found  *entry
		newest time.Time
		best   description
	)
	for _, de := range entries {
		e := &entry{dir: filepath.Join(registry, de.Name())}
		info, err := os.Stat(e.file())
		if err != nil || info.ModTime().Before(newest) {
			continue
		}
		lock, held, err := tryLock(e.dir)
		if err != nil {
			continue
		}
		if held { // its owner is gone
			lock.Close()
			continue
		}
		data, err := os.ReadFile(e.file())
		var d description
		if err == nil {
			err = json.Unmarshal(data, &d)
		}
		if err == nil {
			found, newest, best = e, info.ModTime(), d
		}
	}
	if found == nil {
		return nil, description{}, ErrNoneRunning
	}
	return found, best, nil
}

// Down ends the playground that is up, waits until it is gone and returns its directory.
func Down(ctx context.Context) (string, error) {
	e, d, err := findEntry()
	if err != nil {
		return "", err
	}
	if err := syscall.Kill(d.PID, syscall.SIGTERM); err != nil {
		return "", fmt.Errorf("ending the playground in %s (pid %d): %w", e.dir, d.PID, err)
	}
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		if _, err := os.Stat(e.file()); errors.Is(err, fs.ErrNotExist) {
			return e.dir, nil
		}
		select {
		case <-ctx.Done():
			return "", fmt.Errorf("playground in %s (pid %d) has not ended: %w", e.dir, d.PID, context.Cause(ctx))
		case <-tick.C:
		}
	}
}
