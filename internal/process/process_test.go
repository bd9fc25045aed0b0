package process_test

import (
	"bufio"
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/drover-sh/drover/internal/process"
)

// ownerEnv makes this test binary the owner of a group in the directory that it names, until it is killed.
const ownerEnv = "DROVER_TEST_GROUP_OWNER"

func TestMain(m *testing.M) {
	if dir := os.Getenv(ownerEnv); dir != "" {
		own(dir)
		return
	}
	if os.Getenv(portsEnv) != "" {
		draw()
		return
	}
	os.Exit(m.Run())
}

// own starts one process itself and one through a wrapper, as another library would, reports their pids and waits.
func own(dir string) {
	g, err := process.NewGroup(dir)
	if err != nil {
		panic(err)
	}
	p, err := g.Start(process.Spec{Name: "direct", Path: "/bin/sleep", Args: []string{"600"}})
	if err != nil {
		panic(err)
	}
	wrapper, err := g.Wrap("wrapped it's", "/bin/sleep")
	if err != nil {
		panic(err)
	}
	cmd := exec.Command(wrapper, "600")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		panic(err)
	}
	for { // the wrapper has to have left its pid
		if _, err := os.Stat(filepath.Join(dir, "pids", "wrapped it's")); err == nil {
			break
		}
		time.Sleep(time.Millisecond)
	}
	os.Stdout.WriteString(strconv.Itoa(p.PID()) + "\n" + strconv.Itoa(cmd.Process.Pid) + "\n")
	select {}
}

func TestNothingOutlivesAnOwnerThatIsKilled(t *testing.T) {
	owner := exec.Command(os.Args[0])
	owner.Env = append(os.Environ(), ownerEnv+"="+t.TempDir())
	out, err := owner.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := owner.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	var pids []int
	for len(pids) < 2 && lines.Scan() {
		pid, err := strconv.Atoi(lines.Text())
		if err != nil {
			t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	if len(pids) != 2 {
		t.Fatalf("the owner reported pids %v, expected 2", pids)
	}
	if err := owner.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = owner.Wait()
	for _, pid := range pids {
		waitGone(t, pid)
	}
}

// waitGone waits until a process is gone or a zombie that waits for its parent.
func waitGone(t *testing.T, pid int) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for running(pid) {
		if time.Now().After(deadline) {
			t.Fatalf("process %d is still running", pid)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func running(pid int) bool {
	if syscall.Kill(pid, 0) != nil {
		return false
	}
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	return err != nil || !strings.Contains(string(stat), ") Z ")
}

func TestEndFindsTheProcessesOfAGroupByItsDirectory(t *testing.T) {
	dir := t.TempDir()
	g, err := process.NewGroup(dir)
	if err != nil {
		t.Fatal(err)
	}
	p, err := g.Start(process.Spec{Name: "sleep", Path: "/bin/sleep", Args: []string{"600"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := process.End(dir); err != nil {
		t.Error(err)
	}
	<-p.Done()
	if err := g.Stop(time.Second); err != nil {
		t.Error(err)
	}
	if err := process.End(filepath.Join(dir, "nowhere")); err != nil {
		t.Errorf("End of a directory that never was: %v", err)
	}
}

func TestStopKillsWhatDoesNotEndByItself(t *testing.T) {
	g, err := process.NewGroup(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	stubborn, err := g.Start(process.Spec{
		Name: "stubborn", Path: "/bin/sh", Args: []string{"-c", "trap '' TERM; echo deaf; while :; do sleep 1; done"},
	})
	if err != nil {
		t.Fatal(err)
	}
	for !strings.Contains(process.Tail(stubborn.LogFile(), 1), "deaf") {
		time.Sleep(time.Millisecond)
	}
	if err := g.Stop(50 * time.Millisecond); err != nil {
		t.Error(err)
	}
	if stubborn.Running() {
		t.Error("it is still running")
	}
	if _, err := g.Start(process.Spec{Name: "late", Path: "/bin/true"}); err == nil {
		t.Error("a stopped group started a process")
	}
}

func TestWaitReady(t *testing.T) {
	g, err := process.NewGroup(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.Stop(time.Second); err != nil {
			t.Error(err)
		}
	})
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ready := make(chan struct{})
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		select {
		case <-ready:
		default:
			close(ready) // the first question finds it unready
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})}
	go func() { _ = server.Serve(listener) }()
	defer server.Close()
	url := "http://" + listener.Addr().String()

	p, err := g.Start(process.Spec{Name: "sleep", Path: "/bin/sleep", Args: []string{"600"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.WaitReady(t.Context(), url); err != nil {
		t.Errorf("a process whose check succeeds: %v", err)
	}

	failing, err := g.Start(process.Spec{Name: "bad", Path: "/bin/sh", Args: []string{"-c", "echo no such flag; exit 3"}})
	if err != nil {
		t.Fatal(err)
	}
	err = failing.WaitReady(t.Context(), "http://127.0.0.1:1/")
	if err == nil || !strings.Contains(err.Error(), "exit status 3") || !strings.Contains(err.Error(), "no such flag") {
		t.Errorf("a process that ends: %v, expected its exit status and its last words", err)
	}

	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("the user went home"))
	if err = p.WaitReady(ctx, "http://127.0.0.1:1/"); err == nil || !strings.Contains(err.Error(), "went home") {
		t.Errorf("a wait that is given up: %v, expected its cause", err)
	}
}
