package history

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/drover-sh/drover/sharding"
)

// A Kind says what a Record tells. The fields named with it are set; At always is.
type Kind string

const (
	// Granted: a slice that gives VNs to Member's Session landed at the API server.
	Granted Kind = "Granted"
	// Released: a slice or a status landed after which Member's Session has to do with VNs no more.
	Released Kind = "Released"
	// Settled: Member's Session serves VNs; no read of them waits any more.
	Settled Kind = "Settled"
	// SessionEnded: Member's Session is over for everybody. Its lease was released, revoked, or taken by a later session,
	// or its container was seen to end. (That a member has fenced itself is not yet an end: what it sent before may
	// still land, and nobody else owns anything yet.) Whatever it was doing counts as ended; nothing of it may start or
	// land any more. A process that is stopped cannot log the end of a reconcile; what counts is what lands.
	SessionEnded Kind = "SessionEnded"
	// Started: Member's Session began to reconcile Resource Object in VN.
	Started Kind = "Started"
	// Finished: it ended.
	Finished Kind = "Finished"
	// Read: a reconcile of Member's Session read Resource Object in VN and saw Version, "" for not found. Root is
	// the object being reconciled. FromServer if the answer came from the API server.
	Read Kind = "Read"
	// Wrote: a write of Resource Object in VN landed and made Version; Deleted if it was a deletion. Actor tells whose
	// it was, Member and Session which member's. Digest identifies the content without metadata; "" if unknown.
	Wrote Kind = "Wrote"
	// Changed: What happened to Member or to a coordinator: a join, a leave, a crash, a pause, a partition, its end.
	Changed Kind = "Changed"
	// Listed: Member's Session began to list Resource for VNs.
	Listed Kind = "Listed"
	// Filled: the cache of Member's Session holds the answer to its last list of Resource for VNs.
	Filled Kind = "Filled"
	// Lost: a list of Resource for VNs failed, or its watch cannot go on where it was (410 Gone).
	Lost Kind = "Lost"
	// Dropped: Member's Session dropped Resource for VNs from its cache.
	Dropped Kind = "Dropped"
	// Delivered: the handlers of Member's Session were told of Resource Object in VN at Version.
	Delivered Kind = "Delivered"
	// Snapshot: it is quiet, and the cache of Member's Session for Resource holds Objects, each "name@version".
	Snapshot Kind = "Snapshot"
)

// An Actor is whose write it was.
type Actor string

const (
	// User is anybody outside the group.
	User Actor = "User"
	// Reconciler is a member, in a reconcile.
	Reconciler Actor = "Reconciler"
	// Machinery is coordinator, webhook and backfill.
	Machinery Actor = "Machinery"
)

// A Record is one thing that happened. Records are in the order in which things happened; At is the time since any
// fixed moment.
type Record struct {
	At         time.Duration        `json:"at"`
	Kind       Kind                 `json:"kind"`
	Member     string               `json:"member,omitempty"`
	Session    string               `json:"session,omitempty"`
	VNs        sharding.Set         `json:"vns,omitempty"`
	VN         sharding.VirtualNode `json:"vn,omitempty"`
	Resource   sharding.Resource    `json:"resource,omitempty"`
	Object     string               `json:"object,omitempty"`
	Root       string               `json:"root,omitempty"`
	Version    sharding.Version     `json:"version,omitempty"`
	FromServer bool                 `json:"fromServer,omitempty"`
	Deleted    bool                 `json:"deleted,omitempty"`
	Actor      Actor                `json:"actor,omitempty"`
	Digest     string               `json:"digest,omitempty"`
	What       string               `json:"what,omitempty"`
	Objects    []string             `json:"objects,omitempty"`
}

// String returns the record as one line.
func (r Record) String() string {
	s := fmt.Sprintf("%v %s", r.At, r.Kind)
	for _, f := range []struct{ name, value string }{
		{"member", r.Member}, {"session", r.Session}, {"vns", r.VNs.String()},
		{"object", objectOf(r)}, {"root", r.Root}, {"version", string(r.Version)}, {"actor", string(r.Actor)}, {"what",
			r.What},
	} {
		if f.value != "" {
			s += " " + f.name + "=" + f.value
		}
	}
	return s
}

func objectOf(r Record) string {
	if r.Object == "" {
		return string(r.Resource)
	}
	return fmt.Sprintf("%s/%s(vn %d)", r.Resource, r.Object, r.VN)
}

// Write writes records as JSON lines.
func Write(w io.Writer, records []Record) error {
	buffered := bufio.NewWriter(w)
	enc := json.NewEncoder(buffered)
	for i, r := range records {
		if err := enc.Encode(r); err != nil {
			return fmt.Errorf("write history: record %d: %w", i+1, err)
		}
	}
	if err := buffered.Flush(); err != nil {
		return fmt.Errorf("write history: %w", err)
	}
	return nil
}

// Load reads what Write wrote.
func Load(r io.Reader) ([]Record, error) {
	dec := json.NewDecoder(r)
	dec.DisallowUnknownFields()
	var records []Record
	for {
		var rec Record
		switch err := dec.Decode(&rec); err {
		case nil:
			records = append(records, rec)
		case io.EOF:
			return records, nil
		default:
			return nil, fmt.Errorf("read history: record %d: %w", len(records)+1, err)
		}
	}
}
