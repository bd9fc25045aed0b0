package rollup

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"k8s.io/utils/clock"

	fleetpb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
)

// States of a MachineObservation.
const (
	stateRegistered = "Registered"
	stateReady      = "Ready"
	stateDraining   = "Draining"
	stateDrained    = "Drained"
	stateKept       = "Kept"
	stateGone       = "Gone"
)

// reporter tells the autoscaler what the cluster saw of machines. It holds the latest observation of each machine and what
// was acknowledged; a new observation replaces one that is still waiting. Its size is bounded by the number of machines.
type reporter struct {
	clusterID string
	client    fleetpb.CapacityFeedClient
	clock     clock.Clock
	backoff   backoff
	timeout   time.Duration
	metrics   *Metrics
	log       logr.Logger
	// onAcknowledged is called with the ids of machines whose observation the autoscaler took.
	onAcknowledged func(ids []string)

	mu      sync.Mutex
	told    map[reportKey]*told
	waiting map[reportKey]bool
	wake    chan struct{}
}

// reportKey separates a refusal to give a machine up from the machine's life: both are true at a time.
type reportKey struct {
	machine string
	kept    bool
}

// told is what a machine's latest observation is and whether the autoscaler has it.
type told struct {
	observation  *fleetpb.MachineObservation
	acknowledged time.Time // zero: not yet
}

// maxReports bounds one message.
const maxReports = 256

func newReporter() *reporter {
	return &reporter{told: map[reportKey]*told{}, waiting: map[reportKey]bool{}, wake: make(chan struct{}, 1)}
}

func keyOf(o *fleetpb.MachineObservation) reportKey {
	return reportKey{machine: o.GetId(), kept: o.GetState() == stateKept}
}

// report makes o the machine's latest observation and sends it; false when it was that already.
func (r *reporter) report(o *fleetpb.MachineObservation) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	key := keyOf(o)
	if known := r.told[key]; known != nil && proto.Equal(known.observation, o) {
		return false
	}
	r.told[key] = &told{observation: o}
	r.enqueue(key)
	return true
}

// enqueue is called with the lock held.
func (r *reporter) enqueue(key reportKey) {
	r.waiting[key] = true
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// acknowledged reports whether the autoscaler has taken that state as the machine's latest, and when.
func (r *reporter) acknowledged(machine, state string) (time.Time, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	known := r.told[reportKey{machine: machine, kept: state == stateKept}]
	if known == nil || known.observation.GetState() != state || known.acknowledged.IsZero() {
		return time.Time{}, false
	}
	return known.acknowledged, true
}

// latest is what was last observed of the machine's life, acknowledged or not; nil when nothing was. It is not changed.
func (r *reporter) latest(machine string) *fleetpb.MachineObservation {
	r.mu.Lock()
	defer r.mu.Unlock()
	if known := r.told[reportKey{machine: machine}]; known != nil {
		return known.observation
	}
	return nil
}

// repeat sends a machine's latest observation again.
func (r *reporter) repeat(machine string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	key := reportKey{machine: machine}
	if known := r.told[key]; known != nil {
		known.acknowledged = time.Time{}
		r.enqueue(key)
	}
}

// repeatAll sends everything again: the autoscaler may have forgotten.
func (r *reporter) repeatAll() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for key, known := range r.told {
		known.acknowledged = time.Time{}
		r.enqueue(key)
	}
}

// forgetKept drops the refusals for machines that nobody asks for any more.
func (r *reporter) forgetKept(asked func(machine string) bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for key := range r.told {
		if key.kept && !asked(key.machine) {
			delete(r.told, key)
			delete(r.waiting, key)
		}
	}
}

// Start implements manager.Runnable.
func (r *reporter) Start(ctx context.Context) error {
	failing := false
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-r.wake:
		}
		for {
			batch := r.batch()
			if len(batch) == 0 {
				break
			}
			err := r.send(ctx, batch)
			if ctx.Err() != nil {
				return nil
			}
			if err == nil {
				r.backoff.reset()
				r.metrics.Reports.WithLabelValues(resultSuccess).Inc()
				failing = false
				continue
			}
			r.metrics.Reports.WithLabelValues(resultError).Inc()
			pause := r.backoff.next()
			if !failing {
				r.log.Error(err, "The autoscaler takes no reports; they are kept", "retryIn", pause)
			}
			failing = true
			if !sleep(ctx, r.clock, pause) {
				return nil
			}
		}
	}
}

// batch takes what waits, in a fixed order; a refusal comes after the life of the same machine.
func (r *reporter) batch() []*fleetpb.MachineObservation {
	r.mu.Lock()
	defer r.mu.Unlock()
	keys := slices.SortedFunc(maps.Keys(r.waiting), func(a, b reportKey) int {
		switch {
		case a.machine < b.machine || a.machine == b.machine && !a.kept && b.kept:
			return -1
		case a == b:
			return 0
		default:
			return 1
		}
	})
	var batch []*fleetpb.MachineObservation
	for _, key := range keys[:min(len(keys), maxReports)] {
		batch = append(batch, r.told[key].observation)
	}
	return batch
}

func (r *reporter) send(ctx context.Context, batch []*fleetpb.MachineObservation) error {
	err := r.call(ctx, batch)
	if err == nil {
		r.taken(batch)
		return nil
	}
	if status.Code(errors.Unwrap(err)) != codes.InvalidArgument {
		return err
	}
	// One observation that the autoscaler refuses must not hold up the others.
	if len(batch) == 1 {
		r.log.Error(err, "The autoscaler refuses a report; it is dropped", "machine", batch[0].GetId(), "state", batch[0].GetState())
		r.taken(batch)
		return nil
	}
	for _, o := range batch {
		if err := r.send(ctx, []*fleetpb.MachineObservation{o}); err != nil {
			return err
		}
	}
	return nil
}

func (r *reporter) call(ctx context.Context, batch []*fleetpb.MachineObservation) error {
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	answer, err := r.client.ReportMachines(ctx, &fleetpb.MachineReport{ClusterId: r.clusterID, Machines: batch})
	if err != nil {
		return fmt.Errorf("reporting %d machines: %w", len(batch), err)
	}
	if !answer.GetAcknowledged() {
		return fmt.Errorf("reporting %d machines: the autoscaler did not acknowledge", len(batch))
	}
	return nil
}

// taken notes what the autoscaler has, unless something newer was observed meanwhile.
func (r *reporter) taken(batch []*fleetpb.MachineObservation) {
	r.mu.Lock()
	var ids []string
	for _, o := range batch {
		key := keyOf(o)
		known := r.told[key]
		if known == nil || known.observation != o {
			continue
		}
		delete(r.waiting, key)
		ids = append(ids, o.GetId())
		if o.GetState() == stateGone {
			// The last word on a machine.
			delete(r.told, key)
			continue
		}
		known.acknowledged = r.clock.Now()
	}
	r.mu.Unlock()
	r.onAcknowledged(ids)
}
