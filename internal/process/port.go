package process

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
)

// Ports that FreePort chooses from. They are below those that the kernel gives away by itself, to whoever listens on port 0 and
// to every connection: 32768 and above on Linux, 49152 and above elsewhere.
const (
	firstPort = 20000
	portCount = 10000
)

// ports are those that this process has been given, each locked as one byte of a file that all processes of the user share. The
// kernel gives the locks back when the process ends, however it ends.
var ports struct {
	mu    sync.Mutex
	given map[int]bool
	locks *os.File
}

// FreePort returns a TCP port of the loopback interface that nothing listens on now, and that is returned to nobody else as
// long as this process lives. The port is used later than it is chosen, as a rule by another process, and it has to be free
// still.
func FreePort() (int, error) {
	ports.mu.Lock()
	defer ports.mu.Unlock()
	if ports.locks == nil {
		path := filepath.Join(os.TempDir(), fmt.Sprintf("drover-ports-%d", os.Getuid()))
		file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return 0, fmt.Errorf("looking for a free port: %w", err)
		}
		ports.locks, ports.given = file, map[int]bool{}
	}
	start := rand.IntN(portCount)
	for i := range portCount {
		port := firstPort + (start+i)%portCount
		if ports.given[port] {
			continue
		}
		ours, err := lockPort(ports.locks, port)
		if err != nil {
			return 0, fmt.Errorf("looking for a free port: %w", err)
		}
		if !ours {
			continue
		}
		// Kept even where somebody listens: it is nobody's to have.
		ports.given[port] = true
		listener, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			continue
		}
		return port, listener.Close()
	}
	return 0, fmt.Errorf("looking for a free port: none of %d to %d", firstPort, firstPort+portCount-1)
}

// lockPort reports whether the port's byte of the file is this process's now.
func lockPort(file *os.File, port int) (ours bool, err error) {
	lock := syscall.Flock_t{Type: syscall.F_WRLCK, Start: int64(port), Len: 1}
	err = syscall.FcntlFlock(file.Fd(), syscall.F_SETLK, &lock)
	if errors.Is(err, syscall.EAGAIN) || errors.Is(err, syscall.EACCES) {
		return false, nil
	}
	return err == nil, err
}
