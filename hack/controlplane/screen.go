package main

import (
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"
)

// screen shows what is going on: one line that is rewritten in place on a terminal, plain lines elsewhere.
type screen struct {
	out   io.Writer
	live  bool
	width int
	title string
}

func newScreen(f *os.File) *screen {
	s := &screen{out: f, width: 80}
	info, err := f.Stat()
	s.live = err == nil && info.Mode()&os.ModeCharDevice != 0 && os.Getenv("TERM") != "dumb"
	if n, err := strconv.Atoi(os.Getenv("COLUMNS")); err == nil && n >= 40 {
		s.width = n
	}
	return s
}

// interval is how often progress is worth showing.
func (s *screen) interval() time.Duration {
	if s.live {
		return 200 * time.Millisecond
	}
	return 30 * time.Second
}

// line prints a line that stays.
func (s *screen) line(format string, args ...any) { fmt.Fprintf(s.out, format+"\n", args...) }

// begin starts a piece of work.
func (s *screen) begin(title string) {
	s.title = title
	if !s.live {
		fmt.Fprintln(s.out, title)
	} else {
		s.progress("")
	}
}

// progress shows how the work stands.
func (s *screen) progress(status string) {
	text := strings.TrimRight(s.title+"  "+status, " ")
	if !s.live {
		fmt.Fprintln(s.out, text)
		return
	}
	if runes := []rune(text); len(runes) >= s.width {
		text = string(runes[:s.width-2]) + "…"
	}
	fmt.Fprint(s.out, "\r\x1b[2K"+text)
}

// end tells how the work ended.
func (s *screen) end(result string) {
	if s.live {
		fmt.Fprint(s.out, "\r\x1b[2K")
	}
	fmt.Fprintln(s.out, s.title+"  "+result)
}

// rough is a duration as people say it.
func rough(d time.Duration) string {
	switch {
	case d < time.Second:
		return "1s"
	case d < 90*time.Second:
		return fmt.Sprintf("%ds", int(d.Round(time.Second).Seconds()))
	default:
		return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
	}
}
