package sharded

import (
	"context"
	"errors"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/history"
)

// A job is the right to read and write on behalf of one Virtual Node: that of a reconcile, or of a single write outside
// of one. Reconcile's context carries it.
type job struct {
	member  *member
	ticket  sharding.Ticket
	session string
	kind    *kind
	key     string // of the object that is reconciled; "" outside of a reconcile
	life    context.Context

	// The member's lock guards what follows.
	deletions int // that have not been seen by the watch
	over      bool
	replaced  bool // by another object of its name
}

// A deletion is on its way from the answer of the API server to the watch. Only the watch tells its version, and the next
// owner has to know it.
type deletion struct {
	job      *job
	at       place
	version  sharding.Version // as the watch brought it, "" before
	answered bool             // by the API server
	landed   bool
	done     bool
}

type jobKey struct{}

func jobFrom(ctx context.Context) *job {
	j, _ := ctx.Value(jobKey{}).(*job)
	return j
}

// SessionOf returns the session of the reconcile, or single write, that ctx belongs to, "" if it belongs to none. Every
// guarded request carries such a context, so that a RoundTripper can tell whose write it sends.
func SessionOf(ctx context.Context) string {
	if j := jobFrom(ctx); j != nil {
		return j.session
	}
	return ""
}

// begin starts a reconcile of the object, if it is one to be reconciled here and now.
func (e *member) begin(k *kind, key client.ObjectKey) (*job, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.m == nil {
		return nil, errNotStarted
	}
	_, vn, ok := e.locate(k, key)
	if !ok {
		return nil, ErrNotOwned
	}
	j, err := e.beginIn(k, vn)
	if err != nil {
		return nil, err
	}
	j.key = keyOf(key)
	if t, ok := k.store.tombstones[j.key]; ok {
		t.seen = time.Now()
		k.store.tombstones[j.key] = t
	}
	e.rec(history.Record{Kind: history.Started, Resource: k.resource, Object: j.key, VN: vn})
	return j, nil
}

func (e *member) beginIn(k *kind, vn sharding.VirtualNode) (*job, error) {
	ticket, err := e.m.Begin(k.resource, vn, e.clock())
	if err != nil {
		return nil, err
	}
	return &job{member: e, ticket: ticket, session: e.m.Session(), kind: k, life: e.life}, nil
}

// end gives the right back, at once or when the deletions of the job have been seen. forget tells that a deleted object
// needs no further reconcile.
func (j *job) end(forget bool) {
	e := j.member
	e.mu.Lock()
	defer e.mu.Unlock()
	j.over = true
	if j.life.Err() == nil && j.key != "" {
		e.rec(history.Record{Kind: history.Finished, Resource: j.kind.resource, Object: j.key, VN: j.ticket.VN})
		if forget {
			delete(j.kind.store.tombstones, j.key)
		}
	}
	e.endIfOver(j)
}

func (e *member) endIfOver(j *job) {
	if !j.over || j.deletions > 0 {
		return
	}
	e.m.End(j.ticket)
	if len(e.slice.Draining) > 0 && j.life.Err() == nil {
		e.pump()
	}
}

// mayWrite asks whether a write may be sent now, and counts it as sent if so.
func (e *member) mayWrite(j *job) (sentAt sharding.Instant, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := e.clock()
	if err := e.m.MayWrite(j.ticket, now); err != nil {
		e.metrics.fencedWrites.Inc()
		return 0, err
	}
	e.sending++
	return now, nil
}

// A result is what became of a write.
type result struct {
	kind    *kind            // nil for one outside the group
	version sharding.Version // of the object afterwards, "" if it is not known
	later   bool             // the watch will tell the version
	err     error
}

// answered takes in the result of a write that was sent at sentAt.
func (e *member) answered(j *job, sentAt sharding.Instant, r result) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.sending--
	wake(e.acted)
	switch {
	case r.err != nil && refused(r.err):
	case r.err != nil:
		e.blind(j, sentAt+e.policy.RequestTimeout)
	case r.kind == nil || r.later:
	case r.version == "":
		e.blind(j, e.clock())
	default:
		e.wrote(j, r.kind.resource, r.version)
	}
}

// refused reports whether an error says that the API server did not carry the write out.
func refused(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return false
	}
	code := status.Status().Code
	return code >= 400 && code < 500 && code != 408
}

// blind notes that nobody knows the version of what a job wrote, and if it landed at all before until.
func (e *member) blind(j *job, until sharding.Instant) {
	e.m.WroteBlindly(j.ticket, until)
	life := j.life
	e.after(max(until-e.clock(), 0)+1, func() {
		if life.Err() == nil && len(e.slice.Draining) > 0 {
			e.pump()
		}
	})
}

// expectDeletion looks out for the end of an object that the job is about to delete. It returns nil if the watch may have
// nothing to tell, because the object is being deleted already.
func (e *member) expectDeletion(j *job, k *kind, key string) *deletion {
	e.mu.Lock()
	defer e.mu.Unlock()
	if obj, ok := k.store.get(key); !ok || obj.GetDeletionTimestamp() != nil {
		return nil
	}
	d := &deletion{job: j, at: place{k.resource, key}}
	e.doomed[d.at] = append(e.doomed[d.at], d)
	j.deletions++
	return d
}

// deletionSeen is told by the watch.
func (e *member) deletionSeen(k *kind, key string, version sharding.Version) {
	for _, d := range slices.Clone(e.doomed[place{k.resource, key}]) {
		d.version = version
		if d.answered {
			e.finishDeletion(d)
		}
	}
}

// deletionAnswered is told by the API server; landed is false if it has not deleted anything, as far as is known. If the
// watch has not brought the end yet it has as long as a request may take; then the next owner has to look for itself.
func (e *member) deletionAnswered(d *deletion, landed bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	d.answered, d.landed = true, landed
	if !landed || d.version != "" {
		e.finishDeletion(d)
		return
	}
	e.after(e.policy.RequestTimeout, func() { e.finishDeletion(d) })
}

func (e *member) finishDeletion(d *deletion) {
	if d.done {
		return
	}
	d.done = true
	if rest := slices.DeleteFunc(e.doomed[d.at], func(o *deletion) bool { return o == d }); len(rest) > 0 {
		e.doomed[d.at] = rest
	} else {
		delete(e.doomed, d.at)
	}
	if d.landed && d.version == "" {
		e.blind(d.job, e.clock())
	} else if d.landed {
		e.wrote(d.job, d.at.resource, d.version)
	}
	d.job.deletions--
	e.endIfOver(d.job)
}

func (e *member) wrote(j *job, r sharding.Resource, version sharding.Version) {
	if err := e.m.Wrote(j.ticket, r, version); err != nil {
		e.log.Error(err, "version of a write refused", "resource", r)
		e.blind(j, e.clock())
	}
}
