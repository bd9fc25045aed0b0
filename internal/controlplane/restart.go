package controlplane

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/drover-sh/drover/internal/process"
)

// EtcdURL is where etcd serves its clients, without TLS, on loopback.
func (cp *ControlPlane) EtcdURL() string { return cp.env.ControlPlane.Etcd.URL.String() }

// RestartAPIServer ends kube-apiserver with SIGKILL and starts it again, with the same flags, on the same port, over the
// same etcd. It returns when the API server is ready again, unless ctx ends before. Flags, as "--name=value", replace those
// of the same name, also at later restarts.
func (cp *ControlPlane) RestartAPIServer(ctx context.Context, flags ...string) error {
	const name = "kube-apiserver"
	cp.restarting.Lock()
	defer cp.restarting.Unlock()
	if cp.apiServer == nil {
		args, err := cp.endFirstAPIServer(ctx)
		if err != nil {
			return fmt.Errorf("restarting %s: %w", name, err)
		}
		cp.apiServerArgs = args
	} else if err := cp.apiServer.Kill(); err != nil {
		return fmt.Errorf("restarting %s: %w", name, err)
	}
	cp.apiServerArgs = replaceFlags(cp.apiServerArgs, flags)
	path, err := Binary(name)
	if err != nil {
		return err
	}
	// envtest knows its own process only. From here on this one is the group's, which ends it.
	cp.apiServer, err = cp.group.Start(process.Spec{Name: name, Path: path, Args: cp.apiServerArgs})
	if err != nil {
		return err
	}
	return cp.apiServer.WaitReady(ctx, strings.TrimSuffix(cp.config.Host, "/")+"/readyz")
}

// replaceFlags returns args with the flags, and without others of their names.
func replaceFlags(args, flags []string) []string {
	for _, flag := range flags {
		name, _, _ := strings.Cut(flag, "=")
		args = slices.DeleteFunc(args, func(arg string) bool { return arg == name || strings.HasPrefix(arg, name+"=") })
	}
	return append(args, flags...)
}

// endFirstAPIServer kills the process that envtest has started, and returns its arguments.
func (cp *ControlPlane) endFirstAPIServer(ctx context.Context) ([]string, error) {
	pid, err := cp.group.WrappedPID("kube-apiserver")
	if err != nil {
		return nil, err
	}
	line, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cmdline"))
	if err != nil {
		return nil, err
	}
	args := strings.Split(strings.TrimSuffix(string(line), "\x00"), "\x00")[1:]
	if err := syscall.Kill(-pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		return nil, fmt.Errorf("pid %d: %w", pid, err)
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for { // envtest waits for its child
		if err := syscall.Kill(pid, 0); errors.Is(err, syscall.ESRCH) {
			return args, nil
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("pid %d does not end: %w", pid, context.Cause(ctx))
		case <-tick.C:
		}
	}
}
