package recording

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/history"
)

// A Line is one line of a file. One of its fields is set.
type Line struct {
	Record   *history.Record `json:"record,omitempty"`
	Sent     *Request        `json:"sent,omitempty"`
	Answered *Answer         `json:"answered,omitempty"`
}

// A Request is a write that is about to be handed to the network.
type Request struct {
	// ID is unique within the file.
	ID uint64        `json:"id"`
	At time.Duration `json:"at"`
	// Actor is whose write it is; Member and Session are those of a Reconciler.
	Actor   history.Actor `json:"actor"`
	Member  string        `json:"member,omitempty"`
	Session string        `json:"session,omitempty"`
	// Verb is that of HTTP.
	Verb string `json:"verb"`
	// Resource is "resource.group", or "resource" for the core group; Object "namespace/name", or "name".
	Resource    sharding.Resource `json:"resource"`
	Object      string            `json:"object"`
	Subresource string            `json:"subresource,omitempty"`
}

// An Answer is what the API server said to the Request of that ID.
type Answer struct {
	ID   uint64        `json:"id"`
	At   time.Duration `json:"at"`
	Code int           `json:"code"`
	// Version is the resourceVersion of the object in the answer, "" if there is none.
	Version sharding.Version `json:"version,omitempty"`
}

// A Recorder appends to one file. It is safe for concurrent use.
type Recorder struct {
	mu   sync.Mutex
	file *os.File
	last uint64 // ID
	err  error  // the first
}

// Create starts a new file. A file that exists is an error: each life of a process has its own.
func Create(path string) (*Recorder, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("record file: %w", err)
	}
	return &Recorder{file: f}, nil
}

// Record appends a record of now. It has the form of sharded.Options.Record.
func (r *Recorder) Record(rec history.Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	rec.At = Now()
	r.append(Line{Record: &rec})
}

// sent appends a request of now and returns its ID.
func (r *Recorder) sent(q Request) uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.last++
	q.ID, q.At = r.last, Now()
	r.append(Line{Sent: &q})
	return q.ID
}

func (r *Recorder) answered(a Answer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	a.At = Now()
	r.append(Line{Answered: &a})
}

func (r *Recorder) append(l Line) {
	text, err := json.Marshal(l)
	if err == nil {
		_, err = r.file.Write(append(text, '\n'))
	}
	if r.err == nil && err != nil {
		r.err = fmt.Errorf("record file %s: %w", r.file.Name(), err)
	}
}

// Close closes the file and returns the first error there was: without one, nothing is missing.
func (r *Recorder) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return errors.Join(r.err, r.file.Close())
}

// Load reads a file. A last line without an end is what a killed process was writing, and is left out.
func Load(path string) ([]Line, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("record file: %w", err)
	}
	defer f.Close()
	var lines []Line
	for in := bufio.NewReaderSize(f, 1<<20); ; {
		text, err := in.ReadBytes('\n')
		switch {
		case errors.Is(err, io.EOF):
			return lines, nil
		case err != nil:
			return nil, fmt.Errorf("record file %s: %w", path, err)
		}
		dec := json.NewDecoder(bytes.NewReader(text))
		dec.DisallowUnknownFields()
		var l Line
		if err := dec.Decode(&l); err != nil {
			return nil, fmt.Errorf("record file %s: line %d: %w", path, len(lines)+1, err)
		}
		lines = append(lines, l)
	}
}
