package autoscaler

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/drover-sh/drover/autoscaler/provider"
	"github.com/drover-sh/drover/capacity"
)

// These tests are the scenarios of the capacity cases at the level of engine, store and provider, with the real
// planner.

type states = map[MachineState]int

func small(stock int32) provider.Offering {
	return offering("small", 16, 1.3, map[string]int32{"a": stock})
}

// active brings up n machines of 16 cores, each for one pod of 10 cores.
func (w *world) active(cluster string, n int32) {
	w.t.Helper()
	w.demand(cluster, cpuNeed(10, n))
	w.advance(65 * time.Second)
	w.want(cluster, states{Active: int(n)})
}

func TestMachinesComeAndGoWithTheDemand(t *testing.T) {
	w := newWorld(t, testPolicy(), small(100))
	w.active("east", 8)
	if got := len(w.cloud.Launched()); got != 8 {
		t.Fatalf("launched %d machines, want 8", got)
	}
	w.demand("east")
	w.advance(3 * time.Minute)
	w.want("east", states{})
	if left := w.cloud.Machines(); len(left) != 0 {
		t.Errorf("the cloud still has %v", left)
	}
}

func TestConstantDemandNeedsNoAction(t *testing.T) {
	w := newWorld(t, testPolicy(), small(100), offering("large", 64, 4, map[string]int32{"a": 10, "b": 10}))
	w.demand("east", cpuNeed(1, 100), cpuNeed(6, 7), cpuNeed(30, 3))
	w.advance(5 * time.Minute)
	before, launched := len(w.notes), len(w.cloud.Launched())
	w.advance(30 * time.Minute)
	if got := w.notes[before:]; len(got) > 0 || len(w.cloud.Launched()) != launched {
		t.Errorf("constant demand made the engine act:\n%s", strings.Join(got, "\n"))
	}
}

// Case 2.
func TestAfterARestartOnlyClustersThatReportAreReclaimedFrom(t *testing.T) {
	w := newWorld(t, testPolicy(), small(100))
	w.active("a", 4)
	w.active("b", 4)
	// b has one machine too many, and its word for it is from before the restart.
	w.demand("b", cpuNeed(10, 3))
	w.advance(5 * time.Second)
	w.operator("b").silent = true
	w.start()
	w.demand("a", cpuNeed(10, 3))
	w.advance(10 * time.Minute)
	w.want("a", states{Active: 3})
	w.want("b", states{Active: 4})
	if !w.runner.engine.clusters["b"].silent {
		t.Error("cluster b is silent and not flagged")
	}
	if w.runner.engine.clusters["a"].silent {
		t.Error("cluster a is flagged as silent")
	}
	if n := len(w.cloud.Launched()); n != 8 {
		t.Errorf("launched %d machines, want 8: a restart launches nothing anew", n)
	}
	// An empty report is a report: it is held, and then it counts.
	w.operator("b").silent = false
	w.demand("b")
	w.advance(50 * time.Second)
	w.want("b", states{Active: 4})
	w.advance(2 * time.Minute)
	w.want("b", states{})
}

// Case 6.
func TestSlowLaunchesAreNotRepeated(t *testing.T) {
	for _, latency := range []time.Duration{0, 30 * time.Second, 60 * time.Second} {
		t.Run(latency.String(), func(t *testing.T) {
			w := newWorld(t, testPolicy(), small(100))
			w.cloud.Latency = latency
			w.demand("east", cpuNeed(10, 1))
			w.advance(latency + 10*time.Second)
			w.want("east", states{Active: 1})
			w.advance(10 * time.Minute)
			if got := w.cloud.Launched(); len(got) != 1 {
				t.Errorf("launched %v, want one machine", got)
			}
		})
	}
}

func TestALostMachineIsReplacedOnce(t *testing.T) {
	w := newWorld(t, testPolicy(), small(100))
	w.active("east", 3)
	w.cloud.Vanish(w.cloud.Machines()[0].ID)
	w.advance(2 * time.Minute)
	w.want("east", states{Active: 3})
	if got := w.cloud.Launched(); len(got) != 4 {
		t.Errorf("launched %v, want three machines and one replacement", got)
	}
}

// Case 6, second half: a failed create opens the need again, with a pause, and says why.
func TestAFailedLaunchOpensTheNeedAgainWithBackoff(t *testing.T) {
	w := newWorld(t, testPolicy(), small(100))
	attempts := 0
	w.cloud.Fail = func(provider.Request) string { attempts++; return "quota exceeded" }
	w.demand("east", cpuNeed(10, 2))
	w.advance(4 * time.Second)
	w.want("east", states{Failed: 2})
	feed := w.feed("east")
	if len(feed.Machines) != 2 || feed.Machines[0].Phase != "Failed" || !strings.Contains(feed.Machines[0].Message, "quota exceeded") {
		t.Errorf("the failure does not show on the machines: %v", feed.Machines)
	}
	if v := feed.Verdicts[0]; v.State != "Short" || v.Short != 2 || !strings.Contains(v.Reason, "quota exceeded") {
		t.Errorf("the failure does not show in the verdict: %v", v)
	}
	w.advance(10 * time.Minute)
	// Pauses of 5, 10, 20, 40, 80, 160 and 300 seconds: two launches each.
	if attempts > 16 {
		t.Errorf("%d attempts in ten minutes: a failing offering is hammered", attempts)
	}
	w.cloud.Fail = nil
	w.advance(6 * time.Minute)
	if got := w.states("east")[Active]; got != 2 {
		t.Fatalf("%d machines are active after the failure ended, want 2", got)
	}
	w.advance(6 * time.Minute)
	w.want("east", states{Active: 2})
}

// Case 7.
func TestAMachineThatNeverJoinsIsReplacedAndShownAsFailed(t *testing.T) {
	w := newWorld(t, testPolicy(), small(100))
	lost := ""
	w.operator("east").joins = func(id string) bool {
		if lost == "" {
			lost = id
		}
		return id != lost
	}
	w.demand("east", cpuNeed(10, 2))
	w.advance(9 * time.Minute)
	w.want("east", states{Active: 1, Launched: 1})
	w.advance(2 * time.Minute)
	w.want("east", states{Active: 2, Failed: 1})
	for _, m := range w.feed("east").Machines {
		if m.Id == lost && (m.Phase != "Failed" || !strings.Contains(m.Message, "no Ready node within 10m0s")) {
			t.Errorf("the lost machine shows as %v", m)
		}
	}
	if slices.ContainsFunc(w.cloud.Machines(), func(r provider.Request) bool { return r.ID == lost }) {
		t.Error("the lost machine was not terminated")
	}
	w.advance(6 * time.Minute)
	w.want("east", states{Active: 2})
}

// Case 8.
func TestFaultyEventsConverge(t *testing.T) {
	for name, times := range map[string]int{"dropped": 0, "doubled": 2} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, testPolicy(), small(100))
			w.cloud.Events = func(provider.Event) int { return times }
			w.demand("east", cpuNeed(10, 5))
			w.advance(100 * time.Second)
			w.want("east", states{Active: 5})
			w.demand("east", cpuNeed(10, 1))
			w.advance(4 * time.Minute)
			w.want("east", states{Active: 1})
			if got := len(w.cloud.Launched()); got != 5 {
				t.Errorf("launched %d machines, want 5", got)
			}
		})
	}
	t.Run("late and reordered", func(t *testing.T) {
		w := newWorld(t, testPolicy(), small(100))
		w.active("east", 2)
		gone := w.cloud.Machines()[0].ID
		w.demand("east", cpuNeed(10, 1))
		w.operator("east").refuse = func(id string) string {
			if id != gone {
				return "busy"
			}
			return ""
		}
		w.advance(3 * time.Minute)
		w.want("east", states{Active: 1})
		for _, kind := range []provider.EventType{provider.Launched, provider.LaunchFailed, provider.Terminated, provider.Launched} {
			w.runner.Event(provider.Event{Type: kind, Ref: provider.Ref{ID: gone, Cluster: "east"}})
		}
		kept := w.cloud.Machines()[0].ID
		w.runner.Event(provider.Event{Type: provider.LaunchFailed, Ref: provider.Ref{ID: kept, Cluster: "east"}})
		w.runner.Event(provider.Event{Type: provider.Launched, Ref: provider.Ref{ID: kept, Cluster: "east"}})
		w.advance(2 * time.Minute)
		w.want("east", states{Active: 1})
	})
}

// Case 10.
func TestWhatIsReclaimedIsBoundedPerMinute(t *testing.T) {
	for name, needs := range map[string][]capacity.Need{
		"an empty roll-up":           {},
		"rows whose counts are zero": {cpuNeed(10, 0)},
	} {
		t.Run(name, func(t *testing.T) {
			policy := testPolicy()
			policy.MaxReclaimsPerMinute = 5
			w := newWorld(t, policy, small(100))
			w.active("east", 20)
			w.demand("east", needs...)
			begun := w.clock.Now()
			for range 240 {
				// A storm of wake-ups: passes as fast as they come.
				for range 5 {
					w.send("east")
					w.runner.mu.Lock()
					w.runner.engine.Pass(w.clock.Now())
					w.runner.mu.Unlock()
				}
				w.advance(time.Second)
				if w.clock.Now().Sub(begun) == 90*time.Second {
					w.start() // a restart gains nothing either
					w.send("east")
				}
			}
			drained := w.operator("east").drainedAt
			if len(drained) == 0 {
				t.Fatal("nothing was reclaimed at all")
			}
			if held := drained[0].Sub(begun); held < policy.CollapseHold {
				t.Errorf("the collapsed roll-up was held for %s, want %s", held, policy.CollapseHold)
			}
			for i := range drained {
				if j := i + int(policy.MaxReclaimsPerMinute); j < len(drained) && drained[j].Sub(drained[i]) < time.Minute {
					t.Errorf("reclaims %d to %d came within %s", i, j, drained[j].Sub(drained[i]))
				}
			}
			w.advance(10 * time.Minute)
			w.want("east", states{})
		})
	}
}

func TestARollUpThatRecoversIsNoCollapse(t *testing.T) {
	w := newWorld(t, testPolicy(), small(100))
	w.active("east", 10)
	for range 20 {
		w.demand("east")
		w.advance(20 * time.Second)
		w.demand("east", cpuNeed(10, 10))
		w.advance(20 * time.Second)
	}
	w.want("east", states{Active: 10})
	if got := w.operator("east").drainedAt; len(got) > 0 {
		t.Errorf("machines were drained at %v", got)
	}
}

// Case 11.
func TestStockOutHeals(t *testing.T) {
	w := newWorld(t, testPolicy(), small(32))
	w.demand("east", cpuNeed(10, 64))
	w.advance(10 * time.Minute)
	w.want("east", states{Active: 32})
	if v := w.feed("east").Verdicts[0]; v.Met != 32 || v.Short != 32 || v.State != "Short" {
		t.Errorf("the verdict is %v", v)
	}
	if o := w.feed("east").Offerings[0]; o.AvailableCount != 0 || o.Availability != "None" {
		t.Errorf("the offering shows as %v", o)
	}
	if got := len(w.cloud.Launched()); got != 32 {
		t.Errorf("launched %d machines, want 32", got)
	}
	w.cloud.SetOfferings(small(100))
	w.advance(10 * time.Minute)
	w.want("east", states{Active: 64})
	if o := w.feed("east").Offerings[0]; o.AvailableCount != 36 || o.Availability != "High" {
		t.Errorf("the offering shows as %v", o)
	}
}

// Case 19: what is only planned is dropped, what is in flight is reclaimed later, and nothing oscillates.
func TestDemandThatVanishesBeforeItsMachinesCome(t *testing.T) {
	w := newWorld(t, testPolicy(), small(100))
	w.cloud.Latency = 30 * time.Second
	w.demand("east", cpuNeed(10, 4))
	w.advance(5 * time.Second)
	w.want("east", states{Requested: 4})
	// A small drop is no collapse: one machine that is only requested is dropped at once.
	w.demand("east", cpuNeed(10, 3))
	w.advance(5 * time.Second)
	w.want("east", states{Requested: 3})
	w.advance(25 * time.Second)
	w.want("east", states{Active: 3})
	w.demand("east", cpuNeed(10, 2))
	w.advance(25 * time.Second)
	w.want("east", states{Active: 3})
	w.advance(35 * time.Second)
	w.want("east", states{Active: 2})
	before := len(w.notes)
	w.advance(20 * time.Minute)
	if len(w.notes) > before {
		t.Errorf("it does not come to rest:\n%s", strings.Join(w.notes[before:], "\n"))
	}
	if got := len(w.cloud.Launched()); got != 3 {
		t.Errorf("launched %d machines, want 3", got)
	}
}

// Case 20.
func TestARequestWithoutAPodHoldsItsNode(t *testing.T) {
	w := newWorld(t, testPolicy(), small(100))
	w.demand("east", cpuNeed(10, 1))
	w.advance(2 * time.Hour)
	w.want("east", states{Active: 1})
	w.demand("east")
	w.advance(5 * time.Minute)
	w.want("east", states{})
}

func TestDemandThatReturnsCallsTheDrainOff(t *testing.T) {
	w := newWorld(t, testPolicy(), small(100))
	w.active("east", 4)
	w.operator("east").slow = true
	w.demand("east", cpuNeed(10, 3))
	w.advance(40 * time.Second)
	w.want("east", states{Active: 3, Reclaiming: 1})
	w.demand("east", cpuNeed(10, 4))
	w.advance(5 * time.Second)
	w.want("east", states{Active: 4})
	feed := w.feed("east")
	if len(feed.Reclaims) != 0 {
		t.Errorf("the instruction is still listed: %v", feed.Reclaims)
	}
	if len(w.operator("east").drain) != 0 {
		t.Error("the operator still drains")
	}
	if got := len(w.cloud.Launched()); got != 4 {
		t.Errorf("launched %d machines, want 4: the drain is called off instead", got)
	}
}

func TestAMachineThatItsClusterKeepsIsNotAskedForAgainAtOnce(t *testing.T) {
	w := newWorld(t, testPolicy(), small(100))
	w.active("east", 2)
	asked := map[string]int{}
	w.operator("east").refuse = func(id string) string { asked[id]++; return "its pods fit nowhere else" }
	w.demand("east", cpuNeed(10, 1))
	w.advance(10 * time.Minute)
	w.want("east", states{Active: 2})
	for id, n := range asked {
		if n > 12 {
			t.Errorf("machine %s was asked for %d times in ten minutes", id, n)
		}
	}
	w.operator("east").refuse = nil
	w.advance(3 * time.Minute)
	w.want("east", states{Active: 1})
}

func TestKillSwitchAndDryRunWorkWithoutARestart(t *testing.T) {
	for name, set := range map[string]func(*Policy){
		"disableReclaim": func(p *Policy) { p.DisableReclaim = true },
		"dryRun":         func(p *Policy) { p.DryRun = true },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, testPolicy(), small(100))
			w.active("east", 4)
			w.operator("east").slow = true
			w.demand("east", cpuNeed(10, 3))
			w.advance(40 * time.Second)
			w.want("east", states{Active: 3, Reclaiming: 1})
			policy := testPolicy()
			set(&policy)
			w.runner.SetPolicy(policy)
			w.operator("east").slow = false
			w.advance(10 * time.Minute)
			w.want("east", states{Active: 4})
			w.runner.SetPolicy(testPolicy())
			w.advance(2 * time.Minute)
			w.want("east", states{Active: 3})
		})
	}
	t.Run("dryRun launches nothing", func(t *testing.T) {
		policy := testPolicy()
		policy.DryRun = true
		w := newWorld(t, policy, small(100))
		w.demand("east", cpuNeed(10, 4))
		w.advance(5 * time.Minute)
		w.want("east", states{})
		if v := w.feed("east").Verdicts; len(v) != 1 || !strings.HasPrefix(v[0].Reason, "dry run") {
			t.Errorf("the verdict does not explain: %v", v)
		}
	})
}

func TestALostStateStoreTakesTheMachinesOver(t *testing.T) {
	w := newWorld(t, testPolicy(), small(100))
	w.active("east", 6)
	w.store = newWorld(t, testPolicy()).store
	w.start()
	w.send("east")
	w.advance(10 * time.Minute)
	w.want("east", states{Active: 6})
	if got := len(w.cloud.Launched()); got > 12 {
		t.Errorf("launched %d machines", got)
	}
}

func TestLateRollUpsChangeNothing(t *testing.T) {
	e := NewEngine(testPolicy(), capacity.MakePlan, func() string { return "x" })
	roll := func(session string, sequence uint64, count int32) bool {
		return e.RollUp(epoch, &RollUp{Cluster: "east", Session: session, Sequence: sequence,
			Needs: []capacity.Need{cpuNeed(1, count)}})
	}
	for _, step := range []struct {
		session  string
		sequence uint64
		taken    bool
		count    int32
	}{
		{"s", 5, true, 5}, {"s", 4, false, 5}, {"s", 5, true, 5}, {"s", 6, true, 6}, {"t", 1, true, 1}, {"", 0, true, 9},
		{"", 0, true, 8},
	} {
		count := step.count
		if !step.taken {
			count = 99
		}
		if got := roll(step.session, step.sequence, count); got != step.taken {
			t.Errorf("session %q sequence %d: taken %v, want %v", step.session, step.sequence, got, step.taken)
		}
		if got := e.clusters["east"].rollUp.pods(); got != int64(step.count) {
			t.Errorf("session %q sequence %d: the demand is %d, want %d", step.session, step.sequence, got, step.count)
		}
	}
}

func TestMachineIDsAreLabels(t *testing.T) {
	for _, name := range []string{"a", strings.Repeat("a", 63), strings.Repeat("a", 49) + "-" + "b"} {
		id := machineID(name, RandomID())
		if len(id) > 63 || strings.Contains(id, "--") {
			t.Errorf("%s is no good id", id)
		}
	}
	if a, b := RandomID(), RandomID(); a == b || len(a) != 10 || strings.ToLower(a) != a {
		t.Errorf("%q and %q are no random ids", a, b)
	}
}

func TestAClusterThatTheProviderDoesNotKnow(t *testing.T) {
	w := newWorld(t, testPolicy(), small(30))
	w.cloud.Unknown = map[string]bool{"typo": true}
	w.demand("typo", cpuNeed(10, 10))
	w.active("east", 10)
	w.advance(30 * time.Minute)
	w.want("typo", states{})
	w.want("east", states{Active: 10})
	if v := w.feed("typo").Verdicts; len(v) != 1 || v[0].Short != 10 || !strings.Contains(v[0].Reason, "not configured") {
		t.Errorf("the verdict is %v", v)
	}
	w.demand("east", cpuNeed(10, 6))
	w.cloud.Unknown = nil
	w.advance(10 * time.Minute)
	w.want("typo", states{Active: 10})
}

func TestAProviderThatDoesNotAnswerIsAskedAgain(t *testing.T) {
	w := newWorld(t, testPolicy(), small(10))
	k := &killer{dead: true}
	w.wrap = func(p provider.Interface) provider.Interface { return mortalProvider{p, k} }
	w.start()
	w.demand("east", cpuNeed(10, 2))
	w.advance(3 * time.Minute)
	w.want("east", states{Requested: 2})
	if m := w.feed("east").Machines[0]; !strings.Contains(m.Message, "does not answer") {
		t.Errorf("the machine does not say why it is late: %v", m)
	}
	refused := 0
	for _, note := range w.notes {
		if strings.Contains(note, "did not accept") {
			refused++
		}
	}
	if refused == 0 || refused > 12 {
		t.Errorf("asked %d times in three minutes, want a few with growing pauses", refused)
	}
	k.dead = false
	w.advance(time.Minute)
	w.want("east", states{Active: 2})
	if m := w.feed("east").Machines; len(m) != 0 {
		t.Errorf("still listed: %v", m)
	}
}

func TestEveryClusterHearsOfTheStock(t *testing.T) {
	w := newWorld(t, testPolicy(), small(10))
	w.active("west", 1)
	w.runner.engine.clusters["west"].feedDirty = false
	w.demand("east", cpuNeed(10, 5))
	heard := false
	w.onTurn = func() {}
	for range 3 {
		w.clock.Step(time.Second)
		w.runner.mu.Lock()
		if w.runner.engine.Pass(w.clock.Now()); w.runner.engine.clusters["west"].feedDirty {
			heard = true
		}
		w.runner.mu.Unlock()
	}
	if !heard {
		t.Error("west's feed still shows a stock that east has taken")
	}
}
