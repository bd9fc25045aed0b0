package link_test

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"testing"
	"time"

	"github.com/drover-sh/drover/internal/link"
)

// echo answers each line with itself until the test ends.
func echo(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				for in := bufio.NewScanner(c); in.Scan(); {
					fmt.Fprintln(c, in.Text())
				}
			}()
		}
	}()
	return l.Addr().String()
}

func dial(t *testing.T, l *link.Link) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", l.Address())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// ask says a line and returns the answer to it.
func ask(c net.Conn, line string) (string, error) {
	fmt.Fprintln(c, line)
	return bufio.NewReader(c).ReadString('\n')
}

func TestALinkCanBeCutAndHealed(t *testing.T) {
	l, err := link.New("127.0.0.1:1", echo(t)) // the first one does not answer
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	old := dial(t, l)
	if got, err := ask(old, "hello"); err != nil || got != "hello\n" {
		t.Fatalf("through a whole link: %q, %v", got, err)
	}

	l.Sever()
	if got, err := ask(dial(t, l), "new"); err == nil {
		t.Errorf("a new connection through a cut link was answered: %q", got)
	}
	// The old one hears nothing, not even an end.
	if err := old.SetReadDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	got, err := ask(old, "lost")
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("through a cut link: %q, %v; expected silence", got, err)
	}
	if err := old.SetReadDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}

	l.Heal()
	if got, err := ask(old, "again"); err == nil {
		t.Errorf("a connection that has lost bytes goes on: %q", got)
	}
	if got, err := ask(dial(t, l), "fresh"); err != nil || got != "fresh\n" {
		t.Errorf("through a healed link: %q, %v", got, err)
	}
}
