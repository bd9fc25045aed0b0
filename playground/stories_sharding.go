package playground

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
)

const (
	shardingLease = 8 * time.Second
	// takeover is what a crash may take beyond the Lease, on a machine that is not overloaded.
	takeover = 2 * time.Second
)

func shortLease() lbv1alpha1.LeaseParameters {
	return lbv1alpha1.LeaseParameters{
		LeaseDuration: duration(shardingLease), RenewDeadline: duration(5 * time.Second),
		RetryPeriod: duration(500 * time.Millisecond), RequestTimeout: duration(2500 * time.Millisecond),
	}
}

// Sharding scales a controller out, and does to its replicas what happens to replicas.
func Sharding() Story {
	const virtualNodes = 1000
	const older, parents, busy = 200, 300, 60
	// Users change the last ones all the time; nobody has a reason to write the others.
	changing := func(name string) bool {
		i, err := strconv.Atoi(strings.TrimPrefix(name, parentPrefix))
		return err == nil && i >= parents-busy
	}
	return Story{
		Name:      "sharding",
		Title:     "3 replicas of a controller work at once: a rolling update, a kill -9, a pause, a partition; one owner, always",
		Offerings: DefaultOfferings(),
		Play: func(s *Stage) {
			c := s.startSample(virtualNodes)
			if s.Failed() {
				return
			}
			o := s.recorder.shares
			c.obey()
			c.unsharded(older)
			s.Step("%d Parents and %d Children of one replica that ran alone", older, older/2)

			c.StartCoordinator()
			c.CreateGroup(shortLease(), 4*time.Second)
			c.awaitLabels()
			s.Step("the coordinator labels them, each Child like its Parent, of %d Virtual Nodes", virtualNodes)
			byWebhook := c.createLabelled(older, parents-1)
			s.Step("%d more Parents: %d labelled by the webhook as they are created", parents-older, byWebhook)

			for _, name := range []string{"v1-a", "v1-b", "v1-c"} {
				c.StartMember(name)
			}
			c.live()
			c.AwaitSettled("v1-a", "v1-b", "v1-c")
			c.awaitChildren()
			s.Look(func(*World) { s.Step("3 members: %s; every Parent has its Child", o.say()) })
			s.Table("get", "watchgroups,virtualnodeslices", "-n", s.Namespace())
			if s.Failed() {
				return
			}
			var quiet int
			s.Look(func(*World) { quiet = o.freeze(changing) })
			s.Step("from here on users change %d Parents in turn, and nobody is to write the other %d objects", busy, quiet)
			stop := c.traffic(parents-busy, parents-1)

			c.rollingUpdate()
			c.crash("v2-a", "v2-b", "v2-c")
			c.pause("v2-b", "v2-a", "v2-c")
			c.partition("v2-c", "v2-a", "v2-b")

			if err := stop(); err != nil {
				s.fail(err)
			}
			c.AwaitFollowed()
			c.awaitChildren()
			c.AwaitSettled("v2-a", "v2-b", "v2-c")
			revoked := c.revocations()
			s.Look(func(*World) {
				s.Step("%d changes followed; %d Parents, one Child each; no write to the other %d objects; nothing unowned; "+
					"%d sessions revoked", o.done, len(o.parents), quiet, revoked)
			})
			s.Table("get", "watchgroups,virtualnodeslices", "-n", s.Namespace())
			c.dissolve()
		},
	}
}

// obey adds the rules of every story about sharding.
func (c *sample) obey() {
	o := c.s.recorder.shares
	c.s.Always("one owner for each Virtual Node", func(*World) string { return o.twoOwners() })
	c.s.Always("no write because members come and go", func(*World) string { return strings.Join(o.writes, ", ") })
	c.s.Always("one Child for each Parent", func(*World) string {
		for _, n := range o.born {
			if n > 1 {
				return fmt.Sprintf("a Parent has had %d", n)
			}
		}
		return ""
	})
}

// live lets everybody see who owns how much.
func (c *sample) live() {
	o := c.s.recorder.shares
	c.s.Look(func(*World) {
		c.s.recorder.shows = func(*World) { c.s.p.present.Picture(o.picture(c.notes)) }
	})
}

// unsharded makes what a replica has left that ran alone: Parents, half of them with their Child, and nothing labelled.
func (c *sample) unsharded(n int) {
	gate := newSampleObject(kindGate, "gate")
	gate.Object["spec"] = map[string]any{"open": true}
	var parents, children []client.Object
	for i := range n {
		parents = append(parents, newParent(parentName(i)))
	}
	c.create(append([]client.Object{gate}, parents...)...)
	for _, p := range parents[:n/2] {
		child := newSampleObject(kindChild, p.GetName())
		child.SetOwnerReferences([]metav1.OwnerReference{{
			APIVersion: sampleVersion, Kind: kindParent, Name: p.GetName(), UID: p.GetUID(), Controller: ptr.To(true),
		}})
		children = append(children, child)
	}
	c.create(children...)
	o := c.s.recorder.shares
	c.s.Await("all of them are seen", func(*World) (bool, string) {
		return len(o.parents) == n && len(o.children) == n/2, fmt.Sprintf("%d, %d", len(o.parents), len(o.children))
	})
}

// awaitLabels waits until every object has a Virtual Node, and each Child that of its Parent.
func (c *sample) awaitLabels() {
	o := c.s.recorder.shares
	c.s.Await("every object has a Virtual Node, and each Child that of its Parent", func(*World) (bool, string) {
		if n := o.unlabelled(); n > 0 {
			return false, fmt.Sprintf("%d without", n)
		}
		for name, child := range o.children {
			if vn := child.GetLabels()[sharding.LabelVirtualNode]; vn != o.parents[name].GetLabels()[sharding.LabelVirtualNode] {
				return false, fmt.Sprintf("Child %s has %s", name, vn)
			}
		}
		return true, ""
	})
}

// createLabelled makes Parents once the webhook is called, and returns how many had their label from it.
func (c *sample) createLabelled(first, last int) (labelled int) {
	s := c.s
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for s.err == nil {
		probe := newParent("probe")
		probe.SetNamespace(s.namespace)
		if err := s.p.view.client.Create(s.ctx, probe, client.DryRunAll); err != nil {
			s.fail(fmt.Errorf("asking for the webhook: %w", err))
		} else if probe.GetLabels()[sharding.LabelVirtualNode] != "" {
			break
		}
		select {
		case <-tick.C:
		case <-s.ctx.Done():
			s.fail(context.Cause(s.ctx))
		}
	}
	for _, p := range c.CreateParents(first, last) {
		if p.GetLabels()[sharding.LabelVirtualNode] != "" {
			labelled++
		}
	}
	if s.err == nil && labelled == 0 {
		s.Fail("expected: Parents labelled as they are created; seen: none of %d", last-first+1)
	}
	c.awaitLabels()
	return labelled
}

func (c *sample) awaitChildren() {
	o := c.s.recorder.shares
	c.s.Await("every Parent has exactly one Child", func(*World) (bool, string) {
		wrong := o.orphans()
		return wrong == "", wrong
	})
}

// traffic changes one Parent after the other until it is stopped, but none whose last change has not reached its Child.
func (c *sample) traffic(first, last int) (stop func() error) {
	ctx, cancel := context.WithCancel(c.s.ctx)
	var wait sync.WaitGroup
	var failed error
	wait.Go(func() {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for n := 0; ; n++ {
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
			name := parentName(first + n%(last-first+1))
			if err := c.Change(name, "change-"+strconv.Itoa(n)); err != nil && c.s.ctx.Err() == nil {
				failed = errors.Join(failed, err)
			}
		}
	})
	return func() error {
		cancel()
		wait.Wait()
		return failed
	}
}

// rollingUpdate replaces each member by a new one, as a Deployment does: the new one comes up, then the old one is asked to
// end.
func (c *sample) rollingUpdate() {
	s, o := c.s, c.s.recorder.shares
	c.sinceNow()
	for _, letter := range []string{"a", "b", "c"} {
		next, old := "v2-"+letter, "v1-"+letter
		c.StartMember(next)
		s.Await(next+" is ready", func(*World) (bool, string) {
			slice := o.slices[next]
			return slice.Session != "" && slice.Status.Session == slice.Session, ""
		})
		c.note(old, "ends")
		c.Stop(old)
		c.note(old, "")
	}
	c.AwaitSettled("v2-a", "v2-b", "v2-c")
	worst := c.AwaitFollowed()
	var moved, most int
	s.Look(func(*World) { moved, most, _ = o.counted() })
	if s.err == nil && (moved != len(o.owner) || most != 1) {
		s.Fail("expected: each of %d Virtual Nodes moves once; seen: %d moved, one of them %d times", len(o.owner), moved, most)
	}
	s.Step("rolling update v1 to v2: each Virtual Node moved once; a change waited %s at most", inSeconds(worst))
}

// crash kills a member, and starts it again.
func (c *sample) crash(name string, others ...string) {
	s := c.s
	c.lose(name, others, func() { c.Kill(name) }, "kill -9")
	c.Restart(name)
	c.AwaitSettled(append(others, name)...)
	s.Look(func(*World) { s.Step("started again: %s", s.recorder.shares.say()) })
}

// pause stops a member for longer than its Lease lasts.
func (c *sample) pause(name string, others ...string) {
	session := c.session(name)
	c.lose(name, others, func() {
		c.note(name, "stopped")
		c.Signal(name, syscall.SIGSTOP)
	}, "SIGSTOP")
	c.Signal(name, syscall.SIGCONT)
	c.note(name, "")
	c.returns(name, session, "SIGCONT")
	c.AwaitSettled(append(others, name)...)
}

// partition cuts a member off from the API server.
func (c *sample) partition(name string, others ...string) {
	s := c.s
	session := c.session(name)
	var fenced bool
	c.lose(name, others, func() {
		c.note(name, "cut off")
		if s.err == nil {
			c.members[name].link.Sever()
		}
	}, "cut off")
	if s.err == nil {
		// It had to stop before anybody took over, and nobody can have told it.
		if fenced = !c.Ready(name); !fenced {
			s.Fail("expected: %s, cut off and replaced, is not ready; seen: it is", name)
		}
		c.members[name].link.Heal()
	}
	c.note(name, "")
	c.returns(name, session, "healed (it had stopped by itself)")
	c.AwaitSettled(append(others, name)...)
}

// lose does something to a member, and waits until the others have exactly what it had.
func (c *sample) lose(name string, others []string, do func(), what string) {
	s, o := c.s, c.s.recorder.shares
	var had sharding.Set
	c.sinceNow()
	s.Look(func(*World) { had = o.slices[name].Owned })
	begin := time.Now()
	do()
	c.AwaitTaken(others...)
	after := time.Since(begin)
	var moved, most int
	var which sharding.Set
	s.Look(func(*World) { moved, most, which = o.counted() })
	if s.err == nil && (!which.Equal(had) || most != 1) {
		s.Fail("expected: what %s had, Virtual Nodes %s, moves once; seen: %d moved, %s, one of them %d times", name, had, moved,
			which, most)
	}
	worst := c.AwaitFollowed()
	s.Step("%s %s: its %d Virtual Nodes, and no others, moved after %s (Lease %s%s); a change waited %s at most",
		what, name, moved, inSeconds(after), shardingLease, late(after), inSeconds(worst))
}

// late says so if a takeover took longer than it should: nothing here makes this machine quick.
func late(after time.Duration) string {
	if after <= shardingLease+takeover {
		return ""
	}
	return ", late: is the machine busy?"
}

// returns waits until a member has come back under a new session, which owned nothing at first.
func (c *sample) returns(name, old, what string) {
	s, o := c.s, c.s.recorder.shares
	var owned int
	s.Await(name+" is back under a new session", func(*World) (bool, string) {
		session := o.slices[name].Session
		owned = o.begins[session]
		return session != "" && session != old, "session " + session
	})
	if s.err == nil && owned > 0 {
		s.Fail("expected: %s comes back with empty hands; seen: %d Virtual Nodes of the new session at once", name, owned)
	}
	s.Step("%s: %s is back under a new session, with empty hands", what, name)
}

func (c *sample) session(name string) (session string) {
	c.s.Look(func(*World) { session = c.s.recorder.shares.slices[name].Session })
	return session
}

// sinceNow begins to count anew.
func (c *sample) sinceNow() {
	c.s.Look(func(*World) {
		c.s.recorder.shares.counted()
		c.s.recorder.shares.worst = 0
	})
}

// dissolve deletes the group, which stays until its last member has stopped.
func (c *sample) dissolve() {
	s, o := c.s, c.s.recorder.shares
	s.Look(func(*World) { s.recorder.shows, o.over = nil, true })
	s.Delete(&lbv1alpha1.WatchGroup{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: watchGroup}})
	for name := range c.members {
		c.Kill(name)
	}
	s.Await("the group and its slices are gone", func(*World) (bool, string) {
		return o.group == nil && len(o.slices) == 0, fmt.Sprintf("%d slices", len(o.slices))
	})
	s.Step("group deleted, members ended: nothing is left of either")
}

func inSeconds(d time.Duration) string {
	if d < time.Second {
		return fmt.Sprintf("%.2fs", d.Seconds())
	}
	return fmt.Sprintf("%.1fs", d.Seconds())
}
