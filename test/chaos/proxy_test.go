package chaos

import (
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// A link carries TCP connections to the first of its targets that answers, and can be cut.
type link struct {
	listener net.Listener
	targets  []string

	mu    sync.Mutex
	cut   bool
	conns map[net.Conn]bool
}

func newLink(t *testing.T, targets ...string) *link {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &link{listener: l, targets: targets, conns: make(map[net.Conn]bool)}
	go p.serve()
	t.Cleanup(func() {
		l.Close()
		p.heal() // drops what is connected
	})
	return p
}

func (p *link) url() string { return "https://" + p.listener.Addr().String() }

func (p *link) serve() {
	for {
		c, err := p.listener.Accept()
		if err != nil {
			return
		}
		go p.carry(c)
	}
}

func (p *link) carry(down net.Conn) {
	defer down.Close()
	if !p.keep(down) {
		return
	}
	defer p.forget(down)
	up := p.dial()
	if up == nil {
		return
	}
	defer up.Close()
	if !p.keep(up) {
		return
	}
	defer p.forget(up)
	var wait sync.WaitGroup
	wait.Go(func() { p.copy(up, down) })
	p.copy(down, up)
	wait.Wait()
}

func (p *link) dial() net.Conn {
	for _, target := range p.targets {
		if c, err := net.DialTimeout("tcp", target, 5*time.Second); err == nil {
			return c
		}
	}
	return nil
}

// copy forwards until one end is closed. What is read while the link is cut is lost, and nobody is told: the other side
// sees silence.
func (p *link) copy(to, from net.Conn) {
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		if n > 0 && !p.isCut() {
			if _, writeErr := to.Write(buffer[:n]); writeErr != nil {
				err = writeErr
			}
		}
		if err != nil {
			if errors.Is(err, io.EOF) && p.isCut() {
				return // the end does not get through either; healing closes the other side
			}
			to.Close()
			from.Close()
			return
		}
	}
}

func (p *link) isCut() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cut
}

func (p *link) keep(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.cut {
		p.conns[c] = true
	}
	return !p.cut
}

func (p *link) forget(c net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c)
}

// sever stops everything that is on its way. New connections end at once.
func (p *link) sever() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = true
}

// heal lets new connections through. Those that were cut have lost bytes, and end.
func (p *link) heal() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = false
	for c := range p.conns {
		c.Close()
	}
}
