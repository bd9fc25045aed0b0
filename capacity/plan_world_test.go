package capacity_test

import (
	"cmp"
	"fmt"
	"math/rand"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/drover-sh/drover/capacity"
)

// world plays everything around the planner, tick by tick and the same way for the same seed: a provider with latency and
// loss, a scheduler that binds pending pods in random order to random nodes that have room, an operator that says what is
// pending and gives back the nodes whose loss disturbs least, and the clock that settles machines.
type world struct {
	*fleet
	random *rand.Rand
	at     string // the cluster that the pods are in
	pods   []*simPod
	static map[string]capacity.Resources // nodes that the autoscaler does not own
	tick   int

	latency, settle, deadline int
	lost                      map[int]bool // by number of launch: the machine never becomes ready
	refuses                   func(p *simPod, m *capacity.Machine) bool

	ready, quiet       map[string]int // machine id -> tick
	launched, reclaims int
	evicted            int
	lastAct            int // tick of the last plan that asked for anything
	lastMove           int // tick of the last launch or drain
	plan               capacity.Plan
	log                []string
}

type simPod struct {
	need string
	node string // machine id or static node; empty while pending
	// failed: the scheduler tried in vain at least once, so that the pod has a request.
	failed bool
}

func newWorld(f *fleet, seed int64) *world {
	return &world{
		fleet: f, random: rand.New(rand.NewSource(seed)), at: f.clusters[0].ID, static: map[string]capacity.Resources{},
		latency: 2, settle: 2, deadline: 20, lost: map[int]bool{}, ready: map[string]int{}, quiet: map[string]int{},
	}
}

func (w *world) site() *capacity.ClusterInput { return w.cluster(w.at) }

func (w *world) profile(need string) capacity.Profile {
	for _, n := range w.site().Needs {
		if n.ID == need {
			return n.Profile
		}
	}
	panic("no need " + need)
}

func (w *world) create(need string, n int) {
	for range n {
		w.pods = append(w.pods, &simPod{need: need})
	}
}

// remove deletes n pods of the need, at random.
func (w *world) delete(need string, n int) {
	for _, i := range w.random.Perm(len(w.pods)) {
		if n > 0 && w.pods[i] != nil && w.pods[i].need == need {
			w.pods[i] = nil
			n--
		}
	}
	w.pods = slices.DeleteFunc(w.pods, func(p *simPod) bool { return p == nil })
}

func (w *world) pending() (n int) {
	for _, p := range w.pods {
		if p.node == "" {
			n++
		}
	}
	return n
}

// step is one tick: nodes come, pods are bound, the roll-up is sent, a plan is made and acted upon.
func (w *world) step() error {
	w.tick++
	w.provide()
	w.schedule()
	w.rollUp()
	in := w.input()
	w.plan = capacity.MakePlan(in)
	if err := checkPlan(in, w.plan); err != nil {
		return err
	}
	if !idle(w.plan) {
		w.lastAct = w.tick
	}
	text := fmt.Sprintf("tick %d, %d pending, %d machines\n%s", w.tick, w.pending(), len(w.site().Machines), describe(w.fleet, w.plan))
	w.act()
	w.log = append(w.log, text)
	return nil
}

// story tells the last ticks.
func (w *world) story() string { return strings.Join(w.log[max(0, len(w.log)-25):], "") }

func (w *world) run(ticks int) error {
	for range ticks {
		if err := w.step(); err != nil {
			return err
		}
	}
	return nil
}

func (w *world) provide() {
	var gone []string
	for i := range w.site().Machines {
		m := &w.site().Machines[i]
		switch {
		case m.State == capacity.MachineReclaiming:
			gone = append(gone, m.ID) // drained within a tick
		case m.State == capacity.MachineInFlight && w.ready[m.ID] <= w.tick:
			m.State = capacity.MachineActive
			w.quiet[m.ID] = w.tick
		case m.State == capacity.MachineInFlight && w.ready[m.ID] > w.tick+w.deadline:
			gone = append(gone, m.ID) // given up: it never joined
		}
		m.Settled = m.State == capacity.MachineActive && w.tick-w.quiet[m.ID] >= w.settle
	}
	for _, id := range gone {
		w.remove(id)
	}
}

// free is what each node that is up has left.
func (w *world) free() map[string]capacity.Resources {
	free := map[string]capacity.Resources{}
	for id, r := range w.static {
		free[id] = r.Clone()
	}
	for _, m := range w.site().Machines {
		if m.State == capacity.MachineActive {
			free[m.ID] = m.Allocatable.Clone()
		}
	}
	for _, p := range w.pods {
		if r, ok := free[p.node]; ok {
			free[p.node] = r.Sub(w.profile(p.need).Resources)
		}
	}
	return free
}

func (w *world) schedule() {
	free := w.free()
	nodes := sorted(free)
	for _, i := range w.random.Perm(len(w.pods)) {
		p := w.pods[i]
		if p.node != "" {
			continue
		}
		profile := w.profile(p.need)
		for _, k := range w.random.Perm(len(nodes)) {
			id := nodes[k]
			if profile.Resources.Fits(free[id]) && w.mayStand(p, profile, id) {
				p.node = id
				free[id] = free[id].Sub(profile.Resources)
				break
			}
		}
		p.failed = p.failed || p.node == ""
	}
}

func (w *world) mayStand(p *simPod, profile capacity.Profile, id string) bool {
	if _, ok := w.static[id]; ok {
		return true
	}
	m := w.machine(id)
	if !profile.MatchesLabels(m.Labels) || !capacity.Tolerates(profile.Tolerations, m.Taints) {
		return false
	}
	return w.refuses == nil || !w.refuses(p, m)
}

func sorted[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// rollUp counts as the operator does in the mode Total: pods that failed to schedule and are pending, and those on nodes of
// the autoscaler.
func (w *world) rollUp() {
	count, pending := map[string]int32{}, map[string]int32{}
	for _, p := range w.pods {
		_, onStatic := w.static[p.node]
		switch {
		case p.node == "" && p.failed:
			pending[p.need]++
			count[p.need]++
		case p.node != "" && !onStatic:
			count[p.need]++
		}
	}
	for i := range w.site().Needs {
		n := &w.site().Needs[i]
		n.Count, n.Pending = count[n.ID], pending[n.ID]
	}
}

func (w *world) act() {
	for i := range w.site().Machines {
		m := &w.site().Machines[i]
		for id, n := range w.plan.Allotments[m.ID] {
			if !isMark(id) && n > m.Allotment[id] {
				w.quiet[m.ID] = w.tick
			}
		}
	}
	for _, id := range w.apply(w.plan) {
		w.launched++
		w.lastMove = w.tick
		w.ready[id] = w.tick + w.latency
		if w.lost[w.launched] {
			w.ready[id] = w.tick + 1000
		}
	}
	for _, r := range w.plan.Reclaims {
		w.giveBack(r)
	}
}

// giveBack drains the candidates with fewest pods whose pods fit elsewhere, as the operator does.
func (w *world) giveBack(r capacity.ReclaimSet) {
	on := map[string][]*simPod{}
	for _, p := range w.pods {
		on[p.node] = append(on[p.node], p)
	}
	candidates := slices.Clone(r.Candidates)
	slices.SortStableFunc(candidates, func(a, b string) int { return cmp.Compare(len(on[a]), len(on[b])) })
	left := r.Count
	for _, id := range candidates {
		if left == 0 {
			return
		}
		if !w.fitElsewhere(id, on[id]) {
			continue
		}
		for _, p := range on[id] {
			p.node = ""
			w.evicted++
		}
		w.machine(id).State = capacity.MachineReclaiming
		w.machine(id).Settled = false
		w.reclaims++
		w.lastMove = w.tick
		left--
	}
}

func (w *world) fitElsewhere(id string, moving []*simPod) bool {
	free := w.free()
	delete(free, id)
	moving = slices.Clone(moving)
	slices.SortStableFunc(moving, func(a, b *simPod) int {
		return cmp.Compare(w.profile(b.need).Resources[corev1.ResourceCPU], w.profile(a.need).Resources[corev1.ResourceCPU])
	})
	for _, p := range moving {
		profile := w.profile(p.need)
		found := false
		for _, other := range sorted(free) {
			// Plain arithmetic only: what else keeps the pod off a node (w.refuses) the operator does not know either.
			if _, static := w.static[other]; profile.Resources.Fits(free[other]) &&
				(static || profile.MatchesLabels(w.machine(other).Labels)) {
				free[other] = free[other].Sub(profile.Resources)
				found = true
				break
			}
		}
		if !found {
			return false
		}
	}
	return true
}
