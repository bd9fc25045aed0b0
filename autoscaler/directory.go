package autoscaler

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
)

// lockFile in a state directory is locked by the process that uses it. The lock ends with the process, however that ends.
const lockFile = ".lock"

// directory is a state store's directory. It adds what object storage promises and a file system does not: an object is
// durable once it is written, and a second autoscaler is kept off. Where the store is no directory it is nil.
type directory struct {
	root string
	lock *os.File
	// sync makes a file's or a directory's content durable.
	sync func(*os.File) error
	// synced are the directories whose own name is durable.
	synced sync.Map
}

// openDirectory locks a directory that exists. Two autoscalers on one state would each plan without the other, and
// launch everything twice.
func openDirectory(root string, fsync func(*os.File) error) (*directory, error) {
	lock, err := os.OpenFile(filepath.Join(root, lockFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("locking the directory: %w", err)
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = lock.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, errors.New("another process is using it")
		}
		return nil, fmt.Errorf("locking the directory: %w", err)
	}
	return &directory{root: root, lock: lock, sync: fsync}, nil
}

func (d *directory) close() error {
	if d == nil {
		return nil
	}
	return d.lock.Close()
}

// syncName makes the name of the object under key durable, and those of the directories that it was the first one in.
func (d *directory) syncName(key string) error {
	if d == nil {
		return nil
	}
	for path := filepath.Dir(filepath.FromSlash(key)); ; path = filepath.Dir(path) {
		f, err := os.Open(filepath.Join(d.root, path))
		if err != nil {
			return err
		}
		if err := errors.Join(d.sync(f), f.Close()); err != nil {
			return err
		}
		if _, known := d.synced.LoadOrStore(path, true); known || path == "." {
			return nil
		}
	}
}
