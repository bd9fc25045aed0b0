package watchgroup

import (
	"hash/crc32"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/util/uuid"

	"github.com/drover-sh/drover/sharding"
)

// A tracker is what the coordinator remembers of one group: when it saw what, on its own monotonic clock, and its claim.
// A coordinator that starts without it counts anew, which delays a takeover and endangers nothing.
type tracker struct {
	mu     sync.Mutex
	leases sharding.LeaseWatch
	// renewals are the Leases' last resourceVersions, by member.
	renewals map[string]string
	// members are those of the last look.
	members map[string]bool
	// since is when each session was first seen, stopped when a member was first seen without one, idle since when a
	// Lease without a holder has been of no use.
	since   map[string]sharding.Instant
	stopped map[string]sharding.Instant
	idle    map[string]sharding.Instant
	// ended are Pods that were deleted, as kubelet reported them last.
	ended map[types.UID]*corev1.Pod
	claim string
	// floor is how new a list of slices has to be: it shows all that this coordinator has written and seen. "" asks for one
	// that shows everything.
	floor string
	// decided is set once something has been decided under the claim. lost counts the claims that another coordinator has
	// taken over after that, and until is for how long it is left alone since.
	decided bool
	lost    int
	until   sharding.Instant
	// counted is when the unowned objects were counted last, zero if they were not.
	counted sharding.Instant
}

func newTracker() *tracker {
	return &tracker{
		renewals: make(map[string]string),
		since:    make(map[string]sharding.Instant),
		stopped:  make(map[string]sharding.Instant),
		idle:     make(map[string]sharding.Instant),
		ended:    make(map[types.UID]*corev1.Pod),
		claim:    newClaim(),
	}
}

// newClaim returns a name that no coordinator has used before.
func newClaim() string { return string(uuid.NewUUID()) }

const (
	// yieldBase is how long a coordinator leaves the slices to one that has claimed them from it, the first time. Each time
	// it is twice as long, up to yieldMax. Two of them would else claim the slices in turns, and neither get to decide.
	yieldBase = 500 * time.Millisecond
	yieldMax  = 10 * time.Second
)

// yield returns until when the slices are left to another coordinator; the past if they are not. foreign tells that some of
// them carry another claim than ours. Claims from before we came are taken over at once: theirs is the past.
func (t *tracker) yield(foreign bool, now sharding.Instant) sharding.Instant {
	switch {
	case !foreign:
		t.decided = true
		return 0
	case t.decided:
		if now-t.until > time.Minute {
			t.lost = 0
		}
		// Two that began at the same time part ways by their names.
		share := float64(crc32.ChecksumIEEE([]byte(t.claim))) / (1 << 32)
		t.until = now + time.Duration((0.5+share)*float64(min(yieldBase<<t.lost, yieldMax)))
		t.decided, t.lost = false, min(t.lost+1, 10)
	}
	return t.until
}

// renameClaim makes a new claim. What carries the old one is ours all the same.
func (t *tracker) renameClaim() { t.claim, t.decided = newClaim(), false }

// saw records a Lease as it was read at now. What is older than what has been seen already, because it comes by the cache,
// says nothing.
func (t *tracker) saw(record sharding.LeaseRecord, now sharding.Instant) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if last := t.renewals[record.Member]; last != "" && record.Renewal != "" {
		if c, err := resourceversion.CompareResourceVersion(record.Renewal, last); err == nil && c < 0 {
			return
		}
	}
	t.renewals[record.Member] = record.Renewal
	t.leases.Observe(record, now)
}

// outdated reports whether a newer state of a Lease has been seen.
func (t *tracker) outdated(member string, lease *coordinationv1.Lease) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	last := t.renewals[member]
	c, err := resourceversion.CompareResourceVersion(lease.ResourceVersion, last)
	return last != "" && (err != nil || c < 0)
}

// slicesFrom returns the resourceVersion that a list of slices has to have reached, "" for that of the moment.
func (t *tracker) slicesFrom() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.floor
}

// sawSlices records that slices have been seen, or written, at version. It counts from the first list on.
func (t *tracker) sawSlices(version string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.floor == "" {
		t.floor = version
	} else if c, err := resourceversion.CompareResourceVersion(version, t.floor); err == nil && c > 0 {
		t.floor = version
	}
}

// sawSlice records a slice of an event. Before the first list it says nothing: others may have been written after it.
func (t *tracker) sawSlice(version string) {
	if t.slicesFrom() != "" {
		t.sawSlices(version)
	}
}

// forgetSlices has the next list of slices show everything, because what was written last is not known.
func (t *tracker) forgetSlices() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.floor = ""
}

// sawEnd records a Pod that has been deleted, as long as a Lease may speak of it.
func (t *tracker) sawEnd(pod *corev1.Pod) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ended[pod.UID] = pod
}

// session returns who holds the member's Lease at now.
func (t *tracker) session(member string, now sharding.Instant) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.leases.Session(member, now)
}

func (t *tracker) nextExpiry(now sharding.Instant) (sharding.Instant, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.leases.NextExpiry(now)
}

func (t *tracker) endedPods() map[types.UID]*corev1.Pod {
	t.mu.Lock()
	defer t.mu.Unlock()
	pods := make(map[types.UID]*corev1.Pod, len(t.ended))
	for uid, pod := range t.ended {
		pods[uid] = pod
	}
	return pods
}

// first returns when key was first seen, which is now unless it is recorded already.
func first(seen map[string]sharding.Instant, key string, now sharding.Instant) sharding.Instant {
	at, ok := seen[key]
	if !ok {
		at = now
		seen[key] = at
	}
	return at
}

// keep drops what is known of members, sessions and Pods that are no more.
func (t *tracker) keep(members, sessions map[string]bool, pods map[types.UID]bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for member := range t.members {
		if !members[member] {
			t.leases.Forget(member)
			delete(t.renewals, member)
			delete(t.stopped, member)
			delete(t.idle, member)
		}
	}
	t.members = members
	for session := range t.since {
		if !sessions[session] {
			delete(t.since, session)
		}
	}
	for uid := range t.ended {
		if !pods[uid] {
			delete(t.ended, uid)
		}
	}
}

// A timer collects when to look again.
type timer struct {
	now  sharding.Instant
	next time.Duration // from now; zero for never
}

// at asks for a look at the given moment, at once if that has passed.
func (t *timer) at(moment sharding.Instant) {
	d := max(moment-t.now, time.Millisecond)
	if t.next == 0 || d < t.next {
		t.next = d
	}
}
