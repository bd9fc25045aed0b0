package process

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"os"
	"syscall"
	"time"
)

// Process is a program that was started.
type Process struct {
	Spec

	pid     int
	logFile string
	done    chan struct{}
	err     error // how it ended; to be read once done is closed
}

// PID is the process id, and that of its process group.
func (p *Process) PID() int { return p.pid }

// LogFile is where its output goes.
func (p *Process) LogFile() string { return p.logFile }

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Running says whether the process has not ended yet.
func (p *Process) Running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// WaitReady returns once url answers with status 200, and fails when the process ends or ctx does before that. The
// certificate is not verified: the address is a loopback port that was chosen for this process.
func (p *Process) WaitReady(ctx context.Context, url string) error {
	transport := &http.Transport{
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // a liveness question to our own child
		DisableKeepAlives: true,
	}
	client := &http.Client{Timeout: 2 * time.Second, Transport: transport}
	return p.poll(ctx, func(ctx context.Context) bool {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return false
		}
		resp, err := client.Do(req)
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
}

// Stop asks the process group to end, and kills it when it has not ended after the grace. Stopping a process that has
// ended is no error.
func (p *Process) Stop(grace time.Duration) error {
	if !p.Running() {
		return nil
	}
	if err := p.signal(syscall.SIGTERM); err != nil {
		return err
	}
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-p.done:
		return nil
	case <-timer.C:
		return p.Kill()
	}
}

// Kill ends the process group with SIGKILL and waits until it is gone.
func (p *Process) Kill() error {
	if err := p.signal(syscall.SIGKILL); err != nil {
		return err
	}
	<-p.done
	return nil
}

func (p *Process) signal(s syscall.Signal) error {
	if !p.Running() {
		return nil
	}
	if err := syscall.Kill(-p.pid, s); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("signal %v to %s (pid %d): %w", s, p.Name, p.pid, err)
	}
	return nil
}

// exit says how the process ended.
func (p *Process) exit() error {
	if p.err == nil {
		return errors.New("exit status 0")
	}
	return p.err
}

// explain is the end of the log, for error messages.
func (p *Process) explain() string {
	return fmt.Sprintf("the end of its log, %s:\n%s", p.logFile, Tail(p.logFile, 15))
}

// Tail returns the last n lines of a file, indented; what cannot be read is explained in its place.
func Tail(file string, n int) string {
	const window = 16 << 10
	f, err := os.Open(file)
	if err != nil {
		return "    " + err.Error()
	}
	defer f.Close()
	size, err := f.Seek(0, 2)
	if err != nil {
		return "    " + err.Error()
	}
	buf := make([]byte, min(size, window))
	if _, err := f.ReadAt(buf, size-int64(len(buf))); err != nil {
		return "    " + err.Error()
	}
	lines := bytes.Split(bytes.TrimRight(buf, "\n"), []byte("\n"))
	lines = lines[max(0, len(lines)-n):]
	return "    " + string(bytes.Join(lines, []byte("\n    ")))
}
