package bench

import (
	"context"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/controllers/sharded"
	"github.com/drover-sh/drover/examples/parentchild/recording"
)

// A short Lease, as somebody chooses who wants members replaced fast. What it takes beyond it does not depend on it.
var shortLease = lbv1alpha1.LeaseParameters{
	LeaseDuration: &metav1.Duration{Duration: 6 * time.Second}, RenewDeadline: &metav1.Duration{Duration: 3 * time.Second},
	RetryPeriod: &metav1.Duration{Duration: 500 * time.Millisecond}, RequestTimeout: &metav1.Duration{Duration: 2 * time.Second},
}

// beat is how often every object is reconciled, whatever happens. No gap can be seen to be shorter.
const beat = 100 * time.Millisecond

// BenchmarkLeaveAndCrash has three members reconcile each of 200 Parents ten times a second, and takes one away: it is asked to
// stop, it is killed, and it is killed and its Pod's status says so. Another joins, and so on. Reported are, in ms, for each
// object p50, p99 and max over all rounds:
//
//   - leave: from the end of the old owner's last reconcile to the start of the new owner's first;
//   - crash: the same, with a Lease of 6 s. crash-over-lease-max is how much longer than the Lease it took since the kill;
//   - seen: from the write of the Pod's status to the start of the new owner's first reconcile.
//
// Up to 100 ms of each is the wait for the next reconcile that was due.
func BenchmarkLeaveAndCrash(b *testing.B) {
	rounds := size("DROVER_BENCH_ROUNDS", 4)
	r := startSharded(b, rigOptions{virtualNodes: 1000, lease: shortLease})
	r.populate(200, true)
	d := &departures{shardedRig: r, last: make(map[string]reconciled)}
	r.note(func() { r.beats = d.take })
	for range 3 {
		d.newMember()
	}
	r.quiet(3)
	for b.Loop() {
		var leave, crash, over, seen []float64
		for range rounds {
			d.depart(func(m *rigMember, _ string) { go m.process.Stop(30 * time.Second) })
			for _, t := range d.takeovers {
				leave = append(leave, ms(t.first-t.last))
			}
			killed := d.depart(func(m *rigMember, _ string) { _ = m.process.Kill() })
			for _, t := range d.takeovers {
				crash = append(crash, ms(t.first-t.last))
				over = append(over, ms(t.first-killed-shortLease.LeaseDuration.Duration))
			}
			var told time.Duration
			d.depart(func(m *rigMember, name string) {
				_ = m.process.Kill()
				told = recording.Now()
				d.podEnded(name)
			})
			for _, t := range d.takeovers {
				seen = append(seen, ms(t.first-told))
			}
		}
		for name, values := range map[string][]float64{"leave": leave, "crash": crash, "seen": seen} {
			b.ReportMetric(percentile(values, 50), name+"-p50-ms")
			b.ReportMetric(percentile(values, 99), name+"-p99-ms")
			b.ReportMetric(percentile(values, 100), name+"-max-ms")
		}
		b.ReportMetric(percentile(over, 100), "crash-over-lease-max-ms")
	}
}

// A reconciled is the last reconcile of an object.
type reconciled struct {
	member string
	end    time.Duration
}

// A takeover is the end of the old owner's last reconcile, and the start of the new one's first.
type takeover struct {
	from        string
	last, first time.Duration
}

type departures struct {
	*shardedRig
	members   []string // in the order of their birth
	born      int
	last      map[string]reconciled // by object; under the rig's lock, as what follows
	takeovers []takeover
}

// take notes a reconcile.
func (d *departures) take(m message) {
	if last := d.last[m.Object]; last.member != m.Member && last.member != "" {
		d.takeovers = append(d.takeovers, takeover{last.member, last.end, m.Start})
	}
	d.last[m.Object] = reconciled{m.Member, m.At}
}

// newMember starts a member in a Pod.
func (d *departures) newMember() {
	d.b.Helper()
	d.born++
	name := fmt.Sprintf("member-%d", d.born)
	p := pod(name, list("1", "1Gi"), "some-node")
	p.Labels = map[string]string{lbv1alpha1.LabelWatchGroup: groupName}
	if err := d.client.Create(context.Background(), p); err != nil {
		d.b.Fatal(err)
	}
	d.members = append(d.members, name)
	d.join(memberConfig{
		Name: name, QPS: -1, Workers: 5, Beat: beat,
		Pod: sharded.Pod{Name: name, UID: string(p.UID), Container: p.Spec.Containers[0].Name},
	})
}

// depart takes the oldest member away, waits until others have all of its objects, and lets a new one join. It returns when
// the member was taken away.
func (d *departures) depart(remove func(*rigMember, string)) time.Duration {
	d.b.Helper()
	name := d.members[0]
	d.members = d.members[1:]
	d.until(name+" has objects", func() bool {
		for _, l := range d.last {
			if l.member == name {
				return true
			}
		}
		return false
	})
	var m *rigMember
	d.note(func() { m, d.takeovers = d.shardedRig.members[name], nil })
	at := recording.Now()
	remove(m, name)
	d.until("others have the objects of "+name, func() bool {
		for _, l := range d.last {
			if l.member == name {
				return false
			}
		}
		return true
	})
	var found []takeover
	d.note(func() {
		for _, t := range d.takeovers {
			if t.from == name { // and not what the member that joined last has not come to before
				found = append(found, t)
			}
		}
	})
	d.quiet(2)
	<-m.process.Done()
	d.newMember()
	d.quiet(3)
	d.note(func() { d.takeovers = found })
	if len(found) == 0 {
		d.b.Fatalf("nobody had to take over anything from %s", name)
	}
	return at
}

// podEnded says of a Pod what kubelet says when it has seen its container end.
func (d *departures) podEnded(name string) {
	d.b.Helper()
	p := &corev1.Pod{}
	key := client.ObjectKey{Namespace: namespace, Name: name}
	if err := d.client.Get(context.Background(), key, p); err != nil {
		d.b.Fatal(err)
	}
	patch := client.MergeFrom(p.DeepCopy())
	p.Status.ContainerStatuses = []corev1.ContainerStatus{{
		Name: p.Spec.Containers[0].Name,
		State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{
			ExitCode: 137, FinishedAt: metav1.NewTime(time.Now()),
		}},
	}}
	if err := d.client.Status().Patch(context.Background(), p, patch); err != nil {
		d.b.Fatal(err)
	}
}
