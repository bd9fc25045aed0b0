package process

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

//go:embed watchdog.sh
var watchdog string

// Group is a set of processes that end together.
type Group struct {
	dir string

	mu        sync.Mutex
	processes []*Process // in the order of their start
	stopped   bool

	leash   *os.File // the watchdog's standard input; closing it lets the watchdog go to work
	guard   *exec.Cmd
	dismiss sync.Once
}

// NewGroup makes a group whose pid files and logs live in dir, which is created, and starts its watchdog.
func NewGroup(dir string) (*Group, error) {
	g := &Group{dir: dir}
	for _, d := range []string{g.pidDir(), g.LogDir()} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return nil, fmt.Errorf("making a directory for processes: %w", err)
		}
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("making the watchdog's pipe: %w", err)
	}
	defer r.Close()
	g.guard = exec.Command("/bin/sh", "-c", watchdog, "drover-watchdog", g.pidDir())
	g.guard.Stdin = r
	g.guard.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C at the terminal must not reach it
	if err := g.guard.Start(); err != nil {
		w.Close()
		return nil, fmt.Errorf("starting the watchdog: %w", err)
	}
	g.leash = w
	return g, nil
}

// LogDir is the directory of the log files.
func (g *Group) LogDir() string { return filepath.Join(g.dir, "logs") }

// LogFile is where the process of that name writes its output, restarts appended.
func (g *Group) LogFile(name string) string { return filepath.Join(g.LogDir(), name+".log") }

func (g *Group) pidDir() string { return filepath.Join(g.dir, "pids") }

func (g *Group) pidFile(name string) string { return filepath.Join(g.pidDir(), name) }

// Spec says what to run.
type Spec struct {
	// Name of the process within its group; also the name of its log file.
	Name string
	// Path of the program, and its arguments.
	Path string
	Args []string
	// Env is added to this process's environment.
	Env []string
}

// Start runs the program. It does not wait until the program is ready; see Process.WaitReady.
func (g *Group) Start(spec Spec) (*Process, error) {
	log, err := os.OpenFile(g.LogFile(spec.Name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("starting %s: %w", spec.Name, err)
	}
	defer log.Close()

	cmd := exec.Command(spec.Path, spec.Args...)
	cmd.Env = append(os.Environ(), spec.Env...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}

	g.mu.Lock()
	defer g.mu.Unlock()
	if g.stopped {
		return nil, fmt.Errorf("starting %s: its group has been stopped", spec.Name)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", spec.Name, err)
	}
	p := &Process{Spec: spec, pid: cmd.Process.Pid, logFile: g.LogFile(spec.Name), done: make(chan struct{})}
	if err := os.WriteFile(g.pidFile(spec.Name), []byte(strconv.Itoa(p.pid)), 0o644); err != nil {
		_ = p.signal(syscall.SIGKILL)
		_ = cmd.Wait()
		return nil, fmt.Errorf("starting %s: %w", spec.Name, err)
	}
	g.processes = append(g.processes, p)
	go func() {
		err := cmd.Wait()
		g.mu.Lock()
		// A successor of the same name may have taken the file over.
		if pid, readErr := readPID(g.pidFile(spec.Name)); readErr == nil && pid == p.pid {
			_ = os.Remove(g.pidFile(spec.Name))
		}
		g.mu.Unlock()
		p.err = err
		close(p.done)
	}()
	return p, nil
}

// Wrap returns the path of an executable that leaves its pid with the group and becomes the program at path. It is for
// processes that another library starts: the watchdog then covers them too.
func (g *Group) Wrap(name, path string) (string, error) {
	wrapper := filepath.Join(g.dir, name)
	// Asking for help is a question to the program, not a start of it.
	script := fmt.Sprintf("#!/bin/sh\n[ \"$1\" = --help ] || echo $$ > %s\nexec %s \"$@\"\n",
		quote(g.pidFile(name)), quote(path))
	if err := os.WriteFile(wrapper, []byte(script), 0o755); err != nil {
		return "", fmt.Errorf("wrapping %s: %w", name, err)
	}
	return wrapper, nil
}

// WrappedPID is the pid of a wrapped process that has been started.
func (g *Group) WrappedPID(name string) (int, error) { return readPID(g.pidFile(name)) }

// Unwrap forgets the pid of a wrapped process that has been stopped by whoever started it.
func (g *Group) Unwrap(name string) { _ = os.Remove(g.pidFile(name)) }

// StopProcesses ends every process, the last one started first, and leaves the watchdog on its post for wrapped ones.
// Each gets the grace to end by itself after SIGTERM. Nothing can be started any more.
func (g *Group) StopProcesses(grace time.Duration) error {
	g.mu.Lock()
	processes := g.processes
	g.stopped = true
	g.mu.Unlock()
	var errs []error
	for i := len(processes) - 1; i >= 0; i-- {
		errs = append(errs, processes[i].Stop(grace))
	}
	return errors.Join(errs...)
}

// Stop is StopProcesses, and sends the watchdog home. It may be called again.
func (g *Group) Stop(grace time.Duration) error {
	err := g.StopProcesses(grace)
	g.dismiss.Do(func() {
		_, _ = io.WriteString(g.leash, "done\n")
		_ = g.leash.Close()
		_ = g.guard.Wait()
	})
	return err
}

// End kills what is still running of a group whose owner is gone; dir is the group's directory.
func End(dir string) error {
	g := &Group{dir: dir}
	entries, err := os.ReadDir(g.pidDir())
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("ending processes: %w", err)
	}
	var errs []error
	for _, e := range entries {
		pid, err := readPID(g.pidFile(e.Name()))
		if err == nil {
			err = syscall.Kill(-pid, syscall.SIGKILL)
		}
		if err != nil && !errors.Is(err, syscall.ESRCH) {
			errs = append(errs, fmt.Errorf("ending %s: %w", e.Name(), err))
			continue
		}
		_ = os.Remove(g.pidFile(e.Name()))
	}
	return errors.Join(errs...)
}

func readPID(file string) (int, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil || pid <= 1 {
		return 0, fmt.Errorf("%s holds %q, not a pid", file, data)
	}
	return pid, nil
}

// quote makes one word of the shell of s.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// poll calls check until it returns true, ctx ends or p does.
func (p *Process) poll(ctx context.Context, check func(context.Context) bool) error {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		if check(ctx) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready: %w\n%s", p.Name, context.Cause(ctx), p.explain())
		case <-p.done:
			return fmt.Errorf("%s ended before it was ready: %w\n%s", p.Name, p.exit(), p.explain())
		case <-tick.C:
		}
	}
}
