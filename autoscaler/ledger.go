package autoscaler

import (
	"crypto/sha256"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	fleetpb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
)

// digest identifies a roll-up's content, without session, sequence and time.
type digest [sha256.Size]byte

func digestOf(m *fleetpb.ClusterCapacityNeeds) (digest, error) {
	content := &fleetpb.ClusterCapacityNeeds{ClusterId: m.GetClusterId(), Needs: m.GetNeeds(), Daemons: m.GetDaemons()}
	data, err := proto.MarshalOptions{Deterministic: true}.Marshal(content)
	return sha256.Sum256(data), err
}

// ledger answers roll-ups that repeat what is stored without touching the engine: most roll-ups of a large fleet do,
// and they must neither wait for a planning pass nor write anything.
type ledger struct {
	mu      sync.Mutex
	entries map[string]*ledgerEntry
	seen    map[string]seen
}

// ledgerEntry is the last roll-up of a cluster.
type ledgerEntry struct {
	cluster  string
	digest   digest
	session  string
	sequence uint64
	// generation counts the cluster's roll-ups that went to the engine; 0: none.
	generation uint64
	// stored: it is in the state store, and no other has gone to the engine since.
	stored bool
}

// seen is what the engine has to be told of repeated roll-ups.
type seen struct {
	at       time.Time
	sequence uint64
}

func newLedger() *ledger {
	return &ledger{entries: map[string]*ledgerEntry{}, seen: map[string]seen{}}
}

// repeats returns true for a roll-up that is stored already.
func (l *ledger) repeats(now time.Time, cluster, session string, sequence uint64, d digest) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.entries[cluster]
	if e == nil || !e.stored || e.digest != d || e.session != session {
		return false
	}
	e.sequence = max(e.sequence, sequence)
	l.seen[cluster] = seen{now, e.sequence}
	return true
}

// enter notes that a roll-up goes to the engine. The caller holds the lock under which it does.
func (l *ledger) enter(r *RollUp, d digest) ledgerEntry {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.entries[r.Cluster]
	if e == nil {
		e = &ledgerEntry{cluster: r.Cluster}
		l.entries[r.Cluster] = e
	}
	if r.Session != "" && r.Session == e.session && r.Sequence < e.sequence {
		return *e // late
	}
	*e = ledgerEntry{cluster: r.Cluster, digest: d, session: r.Session, sequence: r.Sequence, generation: e.generation + 1}
	return *e
}

// stored notes that a roll-up is in the store.
func (l *ledger) stored(entry ledgerEntry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e := l.entries[entry.cluster]; e != nil && entry.generation != 0 && e.generation == entry.generation {
		e.stored = true
	}
}

// drain hands what was seen to f.
func (l *ledger) drain(f func(at time.Time, cluster string, sequence uint64)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for cluster, s := range l.seen {
		f(s.at, cluster, s.sequence)
	}
	clear(l.seen)
}
