// Package link is a TCP connection that can be cut: a proxy on loopback between a program and its servers. While it is cut,
// nothing gets through and nobody is told, as when a switch fails. The playground and the chaos tests partition members with
// it. Start reading at Link.
package link

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

const dialTimeout = 5 * time.Second

// A Link carries connections to the first of its targets that answers.
type Link struct {
	listener net.Listener
	targets  []string

	mu    sync.Mutex
	cut   bool
	conns map[net.Conn]bool
}

// New listens on a free port of loopback. Each target is "host:port".
func New(targets ...string) (*Link, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("link to %v: %w", targets, err)
	}
	l := &Link{listener: listener, targets: targets, conns: make(map[net.Conn]bool)}
	go l.serve()
	return l, nil
}

// Address is where the link listens, "host:port".
func (l *Link) Address() string { return l.listener.Addr().String() }

// Close ends the link and all connections.
func (l *Link) Close() {
	l.listener.Close()
	l.Heal() // drops what is connected
}

// Sever stops everything that is on its way. New connections end at once.
func (l *Link) Sever() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut = true
}

// Heal lets new connections through. Those that were cut have lost bytes, and end.
func (l *Link) Heal() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut = false
	for c := range l.conns {
		c.Close()
	}
}

func (l *Link) serve() {
	for {
		c, err := l.listener.Accept()
		if err != nil {
			return
		}
		go l.carry(c)
	}
}

func (l *Link) carry(down net.Conn) {
	defer down.Close()
	if !l.keep(down) {
		return
	}
	defer l.forget(down)
	up := l.dial()
	if up == nil {
		return
	}
	defer up.Close()
	if !l.keep(up) {
		return
	}
	defer l.forget(up)
	var wait sync.WaitGroup
	wait.Go(func() { l.copy(up, down) })
	l.copy(down, up)
	wait.Wait()
}

func (l *Link) dial() net.Conn {
	for _, target := range l.targets {
		if c, err := net.DialTimeout("tcp", target, dialTimeout); err == nil {
			return c
		}
	}
	return nil
}

// copy forwards until one end is closed. What is read while the link is cut is lost, and nobody is told: the other side
// sees silence.
func (l *Link) copy(to, from net.Conn) {
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		if n > 0 && !l.isCut() {
			if _, writeErr := to.Write(buffer[:n]); writeErr != nil {
				err = writeErr
			}
		}
		if err != nil {
			if errors.Is(err, io.EOF) && l.isCut() {
				return // the end does not get through either; healing closes the other side
			}
			to.Close()
			from.Close()
			return
		}
	}
}

func (l *Link) isCut() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.cut
}

func (l *Link) keep(c net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.cut {
		l.conns[c] = true
	}
	return !l.cut
}

func (l *Link) forget(c net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.conns, c)
}
