package playground

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/drover-sh/drover/sharding"
)

// Resync shows how objects are revisited that nothing happens to: a few at a time, behind everything that is fresh.
func Resync() Story {
	const virtualNodes, parents = 300, 300
	const work = 20 * time.Millisecond // of each reconcile, so that there is a queue to be seen
	when := sharding.Resync{Period: 5 * time.Second, Slice: time.Second}
	return Story{
		Name:      "resync",
		Title:     "each object is revisited once in a period of 5s, spread over its seconds; fresh work goes first",
		Offerings: DefaultOfferings(),
		Play: func(s *Stage) {
			c := s.startSample(virtualNodes)
			if s.Failed() {
				return
			}
			r := c.record(when)
			c.obey()
			c.StartCoordinator()
			c.CreateGroup(shortLease(), 0)
			c.createLabelled(0, parents-1) // without an open Gate there is nothing to do for them
			members := []string{"member-a", "member-b", "member-c"}
			for _, name := range members {
				c.StartMember(name, "--workers=1", "--work="+work.String(),
					"--resync-period="+when.Period.String(), "--resync-slice="+when.Slice.String(), "--resync-tick=100ms")
			}
			c.live()
			c.AwaitSettled(members...)
			c.awaitVisited(r)
			s.Look(func(*World) {
				s.Step("%d Parents, 3 members: %s; a start visits everything once", parents, s.recorder.shares.say())
			})

			fewest, most := c.awaitRound(r, true)
			s.Step("nothing happens to them for %s: each was reconciled once, in its second, %d to %d a second", when.Period, fewest, most)

			for attempt := 1; ; attempt++ {
				shown := c.freshFirst(r, "member-b", attempt == 3)
				c.Restart("member-b")
				c.AwaitSettled(members...)
				c.awaitVisited(r)
				if shown || s.Failed() {
					break
				}
			}
			s.Look(func(*World) {
				s.Step("it is back: %s; what a member takes over it visits, behind everything else", s.recorder.shares.say())
			})
			c.awaitRound(r, false)
			s.Step("the next %s: again each once, none skipped, none twice, whoever has it now; dealt anew over the seconds", when.Period)
			s.Look(func(*World) { s.recorder.shows, s.recorder.shares.over = nil, true })
		},
	}
}

// record makes the members record what they do, and follows it.
func (c *sample) record(when sharding.Resync) *reconciles {
	r := &reconciles{when: when}
	ctx, cancel := context.WithCancel(c.s.ctx)
	var reading sync.WaitGroup
	view := c.s.p.view
	c.recorded = func(path string) {
		reading.Go(func() {
			err := followLines(ctx, path, func(lines [][]byte) {
				now := time.Now()
				view.update(func() {
					for _, line := range lines {
						r.take(line, now)
					}
				})
			})
			view.update(func() { r.broken = errors.Join(r.broken, err) })
		})
	}
	c.s.atEnd = append(c.s.atEnd, func(context.Context) error {
		cancel()
		reading.Wait()
		return nil
	})
	figures := c.s.figures
	c.s.figures = func(result *Result) {
		figures(result)
		result.Reconciles = len(r.all)
	}
	c.s.Always("every record can be read", func(*World) string {
		if r.broken != nil {
			return r.broken.Error()
		}
		return ""
	})
	return r
}

// keys are those of all Parents.
func (c *sample) keys() (keys []string) {
	for name := range c.s.recorder.shares.parents {
		keys = append(keys, c.s.namespace+"/"+name)
	}
	slices.Sort(keys)
	return keys
}

// awaitVisited waits until each Parent was last reconciled by the member that has it: nothing is left of a start or a
// takeover.
func (c *sample) awaitVisited(r *reconciles) {
	o := c.s.recorder.shares
	c.s.Await("each Parent has been visited by its owner", func(*World) (bool, string) {
		last := map[string]string{}
		for _, x := range r.all {
			last[x.key] = x.member
		}
		missing := 0
		for name := range o.parents {
			if vn := o.vnOf(name); vn < 0 || last[c.s.namespace+"/"+name] != o.owner[vn] {
				missing++
			}
		}
		return missing == 0, fmt.Sprintf("%d have not", missing)
	})
}

// awaitRound waits for the next whole period, and until everything that was due in it is done. It returns how many Parents
// the slices have, at least and at most.
func (c *sample) awaitRound(r *reconciles, draw bool) (fewest, most int) {
	s := c.s
	// What was left when the last one was visited is over by then.
	start := r.nextPeriod(time.Now().Add(r.when.Slice / 2))
	var found round
	s.Look(func(*World) {
		s.recorder.shows = func(*World) {
			if time.Now().After(start) {
				s.p.present.Picture(r.round(c.keys(), start).picture())
			}
		}
	})
	s.Await("every Parent has been reconciled in its turn", func(*World) (bool, string) {
		found = r.round(c.keys(), start)
		last := start.Add(r.when.Period)
		return time.Now().After(last) && found.missing == 0, fmt.Sprintf("%d have not", found.missing)
	})
	if s.err != nil {
		return 0, 0
	}
	if len(found.repeated) > 0 || found.disorder != "" {
		s.Fail("expected: each Parent once, in the order of the slices; seen: %v %s", found.repeated, found.disorder)
	}
	if picture := found.picture(); draw {
		s.Look(func(*World) { s.recorder.shows = nil })
		s.p.present.Picture(Picture{Passing: true})
		picture.Stays = true
		s.p.present.Picture(picture)
	}
	return slices.Min(found.keys), slices.Max(found.keys)
}

// freshFirst asks a member to end. When the others have begun to visit what it leaves to them, somebody changes a few of the
// Parents that they had before: these are not to wait for the rest. On a machine that is slow to tell of the changes there may
// be no rest by then, which shows nothing: unless this is the last attempt, shown is false.
func (c *sample) freshFirst(r *reconciles, leaver string, last bool) (shown bool) {
	s, o := c.s, c.s.recorder.shares
	const changed = 3
	const few = 25 // are done in half a second
	var had sharding.Set
	var before int
	s.Look(func(*World) { had, before = o.slices[leaver].Owned, len(r.all) })
	left := func(x reconcile) bool { return x.member != leaver && had.Has(o.vnOf(c.nameOf(x.key))) }
	c.live()
	c.note(leaver, "ends")
	c.Signal(leaver, syscall.SIGTERM)
	var taker string
	s.Await("somebody visits what "+leaver+" leaves", func(*World) (bool, string) {
		i := slices.IndexFunc(r.all[before:], left)
		if i >= 0 {
			taker = r.all[before+i].member
		}
		return i >= 0, ""
	})
	if s.err != nil {
		return true
	}
	// Parents that are not due by themselves in the next seconds.
	var fresh []string
	s.Look(func(*World) {
		now := time.Now()
		for _, key := range c.keys() {
			vn := o.vnOf(c.nameOf(key))
			soon := false
			for _, p := range []time.Time{now.Add(-r.when.Period), now, now.Add(r.when.Period)} {
				wait := r.due(key, p).Sub(now)
				soon = soon || (wait > -r.when.Slice && wait < 2*r.when.Slice)
			}
			if len(fresh) < changed && o.owner[vn] == taker && !had.Has(vn) && !soon {
				fresh = append(fresh, key)
			}
		}
	})
	if len(fresh) < changed {
		s.Fail("expected: %d Parents of %s that are not due soon; seen: %v", changed, taker, fresh)
	}
	var from, told int
	s.Look(func(*World) { from = len(r.all) })
	users, ctx := errgroup.WithContext(s.ctx)
	for _, key := range fresh {
		users.Go(func() error { return c.patch(ctx, c.nameOf(key), "fresh") })
	}
	if err := users.Wait(); err != nil {
		s.fail(err)
	}
	s.Look(func(*World) { told = len(r.all) })
	c.awaitVisited(r)
	if s.err != nil {
		return true
	}
	waiting, behind, rest := slices.Clone(fresh), 0, 0
	s.Look(func(*World) {
		for i, x := range r.all[from:] {
			if x.member != taker {
				continue
			}
			if left(x) && from+i >= told {
				rest++
			}
			if i := slices.Index(waiting, x.key); i >= 0 {
				waiting = slices.Delete(waiting, i, i+1)
			} else if len(waiting) == 0 && left(x) {
				behind++
			}
		}
	})
	shown = last || len(waiting) > 0 || behind > 0 || rest >= few
	if shown && (len(waiting) > 0 || behind == 0) {
		s.Fail("expected: changed Parents are reconciled before what %s takes over; seen: %d still wait, %d behind them", taker,
			len(waiting), behind)
	}
	if shown {
		s.Step("%s ends, and others visit its Parents: %d that a user changes meanwhile go first, %d wait behind", leaver, changed, behind)
	}
	if err := c.members[leaver].process.Stop(30 * time.Second); err != nil {
		s.fail(err)
	}
	return shown
}

// nameOf is the name in a key of the story's namespace.
func (c *sample) nameOf(key string) string { return key[len(c.s.namespace)+1:] }
