package playground

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/term"
)

// Presenter shows what happens. Its methods are called from one goroutine at a time, Picture from any; Progress and Picture
// also with locks held: they must return quickly.
type Presenter interface {
	// Busy says what takes a while: starting something, stopping. Ready says that everything runs, Done that the end has
	// come.
	Busy(with string)
	Ready(p *Playground)
	Done()
	StoryBegins(story Story)
	Step(step Step)
	// Progress tells how a wait stands; it is called often, and what it shows is replaced by what comes next.
	Progress(since time.Duration, expected, seen string)
	// Picture shows how things stand. Each one takes the place of the one before, until the story ends.
	Picture(Picture)
	// Table shows the output of a command. It is only called if WantsTables.
	Table(title, text string)
	WantsTables() bool
	StoryEnds(story Story, result Result)
	// Say shows a line.
	Say(format string, args ...any)
}

// Silent shows nothing.
type Silent struct{}

// Busy implements Presenter, as the other methods do.
func (Silent) Busy(string)                            {}
func (Silent) Done()                                  {}
func (Silent) Ready(*Playground)                      {}
func (Silent) StoryBegins(Story)                      {}
func (Silent) Step(Step)                              {}
func (Silent) Progress(time.Duration, string, string) {}
func (Silent) Picture(Picture)                        {}
func (Silent) Table(string, string)                   {}
func (Silent) WantsTables() bool                      { return false }
func (Silent) StoryEnds(Story, Result)                {}
func (Silent) Say(string, ...any)                     {}

// JSON writes each story's Result as one JSON object on a line of its own, and nothing else.
type JSON struct {
	Silent
	Out io.Writer
}

// StoryEnds implements Presenter.
func (j JSON) StoryEnds(_ Story, result Result) {
	if result.Steps == nil {
		result.Steps = []Step{}
	}
	_ = json.NewEncoder(j.Out).Encode(result)
}

// tableRows is how many rows of a table are shown.
const tableRows = 4

// People shows a time line for people: on a terminal with a live line for what takes long, a live picture and colours,
// elsewhere as plain lines, one for each change of a picture.
type People struct {
	out    io.Writer
	live   bool
	colour bool
	width  func() int

	mu       sync.Mutex
	picture  []string // what stands below the lines that stay
	status   string   // the live line, below the picture
	shown    int      // lines of both that are on the screen
	change   string   // what was last said of a picture
	lastLive time.Time
	started  time.Time
}

// NewPeople presents on f. Colours need a terminal and no NO_COLOR in the environment.
func NewPeople(f *os.File) *People {
	terminal := term.IsTerminal(int(f.Fd())) && os.Getenv("TERM") != "dumb"
	_, noColour := os.LookupEnv("NO_COLOR")
	return &People{
		out:    f,
		live:   terminal,
		colour: terminal && !noColour,
		width: func() int {
			if w, _, err := term.GetSize(int(f.Fd())); err == nil && w > 20 {
				return w
			}
			return 100
		},
		started: time.Now(),
	}
}

const (
	bold  = "1"
	dim   = "2"
	red   = "31"
	green = "32"
	cyan  = "36"
)

func (p *People) paint(code, text string) string {
	if !p.colour {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

// line prints lines that stay, above the picture and in the place of the live line.
func (p *People) line(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.erase()
	fmt.Fprintln(p.out, text)
	p.status = ""
	p.draw()
}

// flash replaces the live line; a line that follows another one too soon is left out unless it is urgent.
func (p *People) flash(text string, urgent bool) {
	if !p.live {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if now := time.Now(); urgent || now.Sub(p.lastLive) > 80*time.Millisecond {
		if runes, width := []rune(text), p.width(); len(runes) >= width {
			text = string(runes[:width-2]) + "…"
		}
		p.erase()
		p.status, p.lastLive = p.paint(dim, text), now
		p.draw()
	}
}

// draw puts picture and live line on the screen, and erase takes them away. The cursor stays at their end.
func (p *People) draw() {
	lines := p.picture
	if p.status != "" {
		lines = append(slices.Clone(lines), p.status)
	}
	fmt.Fprint(p.out, strings.Join(lines, "\n"))
	p.shown = len(lines)
}

func (p *People) erase() {
	if p.shown > 0 {
		fmt.Fprint(p.out, "\r\x1b[2K", strings.Repeat("\x1b[1A\x1b[2K", p.shown-1))
	}
	p.shown = 0
}

// Picture implements Presenter.
func (p *People) Picture(pic Picture) {
	if pic.Stays {
		p.line(strings.Join(pic.rows(p.width(), p.paint), "\n"))
		return
	}
	if !p.live {
		p.mu.Lock()
		defer p.mu.Unlock()
		if now := pic.state(); now != p.change && !pic.Passing {
			p.change = now
			fmt.Fprintln(p.out, pic.line())
		}
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	rows := pic.rows(p.width(), p.paint)
	if slices.Equal(rows, p.picture) {
		return
	}
	p.erase()
	p.picture = rows
	p.draw()
}

// clear takes everything away that does not stay.
func (p *People) clear() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.erase()
	p.picture, p.status, p.change = nil, "", ""
}

// Busy implements Presenter.
func (p *People) Busy(with string) { p.flash(with+" ...", true) }

// Done implements Presenter.
func (p *People) Done() { p.clear() }

// Ready implements Presenter.
func (p *People) Ready(pg *Playground) {
	running := components
	if pg.HasKueue() {
		running = append([]string{"kueue"}, components...)
	}
	p.line(fmt.Sprintf("Playground up in %.1fs: etcd, kube-apiserver, kube-controller-manager, kwok, %s. Logs: %s",
		time.Since(p.started).Seconds(), strings.Join(running, ", "), pg.LogDir()))
}

// StoryBegins implements Presenter.
func (p *People) StoryBegins(story Story) {
	p.line("\n" + p.paint(bold, story.Name) + "  " + story.Title)
}

// Step implements Presenter.
func (p *People) Step(step Step) {
	p.line(fmt.Sprintf("  %s  %s", p.paint(cyan, fmt.Sprintf("%+6.1fs", step.Seconds)), step.Text))
}

// Progress implements Presenter.
func (p *People) Progress(since time.Duration, expected, seen string) {
	p.flash(fmt.Sprintf("  %+6.1fs  waiting for: %s (now: %s)", since.Seconds(), expected, seen), false)
}

// WantsTables implements Presenter.
func (*People) WantsTables() bool { return true }

// Table implements Presenter.
func (p *People) Table(title, text string) {
	lines := []string{p.paint(dim, "           $ "+title)}
	for table := range strings.SplitSeq(strings.TrimSpace(text), "\n\n") {
		rows := strings.Split(strings.TrimSpace(table), "\n")
		for i, row := range rows {
			if i > tableRows { // the first one is the header
				lines = append(lines, p.paint(dim, fmt.Sprintf("           ... %d more", len(rows)-i)))
				break
			}
			lines = append(lines, "           "+strings.TrimRight(row, " "))
		}
	}
	p.line(strings.Join(lines, "\n"))
}

// StoryEnds implements Presenter.
func (p *People) StoryEnds(_ Story, r Result) {
	p.clear()
	if r.Interrupted {
		p.line(fmt.Sprintf("  %s after %.1fs", p.paint(red, "interrupted"), r.Seconds))
		return
	}
	figures := figuresOf(r)
	if r.OK {
		p.line(fmt.Sprintf("  %s in %.1fs: %s", p.paint(green, "ok"), r.Seconds, figures))
		return
	}
	p.line(fmt.Sprintf("  %s after %.1fs: %s\n  %s\n  logs: %s", p.paint(red, "FAILED"), r.Seconds, figures,
		strings.ReplaceAll(r.Error, "\n", "\n  "), r.Logs))
}

func figuresOf(r Result) string {
	if r.Objects > 0 {
		figures := fmt.Sprintf("%d objects, %d Virtual Nodes, %d moves", r.Objects, r.VirtualNodes, r.Moves)
		if r.Reconciles > 0 {
			figures += fmt.Sprintf(", %d reconciles", r.Reconciles)
		}
		return figures
	}
	figures := fmt.Sprintf("%d pods, %d requests, at most %d roll-up rows (%d bytes), %d nodes launched, %d reclaimed",
		r.Pods, r.Requests, r.RollUpRows, r.RollUpBytes, r.NodesLaunched, r.NodesReclaimed)
	if r.Workloads > 0 {
		figures = fmt.Sprintf("%s, %s; %s", count(r.Workloads, "workload"), count(r.Admissions, "admission"), figures)
	}
	return figures
}

// Say implements Presenter.
func (p *People) Say(format string, args ...any) { p.line(fmt.Sprintf(format, args...)) }
