package sharding_test

import (
	"cmp"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/drover-sh/drover/sharding"
)

// TestTranscripts plays the stories in testdata. They need no code to be read: each directive is something that
// happens, and below it stands all that follows from it.
//
//	group v=N [mode=Eventual]        a new group; parents depend on children
//	lease m session=S                member m holds its lease under session S, and its process runs
//	phase m is=Leaving               the phase that the coordinator derives for m; the default is Serving
//	revoke m                         the lease of m has expired and has been revoked, or was released
//	step [by=C] [land=N]             one step of coordinator C; only the first N writes land, and it dies
//	late                             the writes of the last step that did not land arrive now
//	observe m                        m sees its slice
//	list m [resource=R] version=V    the lists that m has asked for are complete as of V
//	gone m [resource=R]              the lists that m has asked for end by 410 Gone in the middle
//	lost m resource=R vns=S          a watch of m ends by 410 Gone
//	event m resource=R vns=S version=V
//	begin m vn=N, end m vn=N         a reconcile begins, and ends
//	write m vn=N resource=R version=V
//	blind m vn=N until=T             a write had no answer; it lands until T or never
//	leave m                          m asks to be relieved
//	read m resource=R vn=N           where a read is answered from
//	publish m                        m writes its status into its slice
//	renew m, now t=T                 m renews its lease; time passes
//	slices                           all slices
func TestTranscripts(t *testing.T) {
	stories, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(stories) == 0 {
		t.Fatalf("no stories in testdata: %v", err)
	}
	for _, path := range stories {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".txt"), func(t *testing.T) {
			var s *stage
			datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
				if d.Cmd == "group" {
					s = newStage(t, d)
					return ""
				}
				return cmp.Or(s.play(t, d), "ok")
			})
		})
	}
}

type stage struct {
	coordinator sharding.Coordinator
	members     map[string]*actor
	slices      map[string]*sharding.Slice
	version     int
	late        []sharding.Write
	now         time.Duration
}

// An actor is a member on the stage.
type actor struct {
	*sharding.Member
	state   sharding.MemberState
	fetches []sharding.Fetch
	tickets map[sharding.VirtualNode][]sharding.Ticket
}

func newStage(t *testing.T, d *datadriven.TestData) *stage {
	s := &stage{members: make(map[string]*actor), slices: make(map[string]*sharding.Slice)}
	mode := cmp.Or(arg(d, "mode"), string(sharding.Exclusive))
	s.coordinator = sharding.Coordinator{Claim: "c1", Mode: sharding.Mode(mode), Assignment: sharding.Balanced{}}
	d.ScanArgs(t, "v", &s.coordinator.VirtualNodes)
	if err := s.coordinator.Validate("spec."); err != nil {
		t.Fatal(err)
	}
	return s
}

// arg returns the value of an argument, "" if it is not given.
func arg(d *datadriven.TestData, key string) string {
	for _, a := range d.CmdArgs {
		if a.Key == key {
			return strings.Join(a.Vals, ",")
		}
	}
	return ""
}

func (s *stage) play(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	switch d.Cmd {
	case "step":
		return s.step(d)
	case "late":
		late := s.late
		s.late = nil
		return s.land(late)
	case "slices":
		return s.print()
	case "now":
		s.now = duration(t, arg(d, "t"))
		return ""
	}
	name := d.CmdArgs[0].Key
	if d.Cmd == "lease" {
		return s.lease(name, arg(d, "session"))
	}
	m := s.members[name]
	if m == nil {
		t.Fatalf("%s: no member %q", d.Pos, name)
	}
	switch d.Cmd {
	case "phase":
		m.state.Phase = sharding.Phase(arg(d, "is"))
	case "revoke":
		m.state.Session, m.state.Phase = "", sharding.PhaseStopped
	case "renew":
		m.Renewed(m.Session(), s.now, s.now)
	case "leave":
		m.Leave()
	case "observe":
		check(t, m.Observe(*cmp.Or(s.slices[name], &sharding.Slice{})))
		return m.wants()
	case "publish":
		return s.publish(name, m)
	default:
		return s.act(t, d, m)
	}
	return ""
}

// act is what happens inside a member.
func (s *stage) act(t *testing.T, d *datadriven.TestData, m *actor) string {
	res := sharding.Resource(arg(d, "resource"))
	version := sharding.Version(arg(d, "version"))
	vns, err := sharding.ParseSet(arg(d, "vns"))
	check(t, err)
	number, _ := strconv.Atoi(arg(d, "vn"))
	vn := sharding.VirtualNode(number)
	if slices.Contains([]string{"end", "write", "blind"}, d.Cmd) && len(m.tickets[vn]) == 0 {
		t.Fatalf("%s: %s has no ticket for %d", d.Pos, d.Cmd, vn)
	}
	switch d.Cmd {
	case "list", "gone":
		return m.answer(t, res, version, d.Cmd == "gone")
	case "lost":
		m.Lost(res, vns)
	case "event":
		check(t, m.Progressed(res, vns, version))
	case "begin":
		ticket, err := m.Begin("parents", vn, s.now)
		if err != nil {
			return err.Error()
		}
		m.tickets[vn] = append(m.tickets[vn], ticket)
		return ""
	case "end":
		m.End(m.tickets[vn][0])
		m.tickets[vn] = m.tickets[vn][1:]
	case "write":
		if err := m.MayWrite(m.tickets[vn][0], s.now); err != nil {
			return err.Error()
		}
		check(t, m.Wrote(m.tickets[vn][0], res, version))
	case "blind":
		m.WroteBlindly(m.tickets[vn][0], duration(t, arg(d, "until")))
	case "read":
		return map[sharding.Source]string{
			sharding.FromCache: "from the cache", sharding.FromServer: "from the server", sharding.AfterBarrier: "waits",
		}[m.Read(res, vn)]
	default:
		t.Fatalf("%s: unknown directive %q", d.Pos, d.Cmd)
	}
	return m.wants()
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func duration(t *testing.T, s string) time.Duration {
	d, err := time.ParseDuration(s)
	check(t, err)
	return d
}

var stageDependencies = sharding.Dependencies{"parents": {"children"}, "children": nil}

func (s *stage) lease(name, session string) string {
	m := s.members[name]
	if m == nil {
		m = &actor{Member: sharding.NewMember(name, stageDependencies, compareVersions,
			sharding.NewFence(sharding.DefaultLeasePolicy()))}
		s.members[name] = m
	}
	m.state = sharding.MemberState{ID: name, Session: session, Phase: sharding.PhaseServing}
	m.tickets = make(map[sharding.VirtualNode][]sharding.Ticket)
	m.fetches = nil
	m.StartSession(session)
	m.Renewed(session, s.now, s.now)
	return ""
}

func (s *stage) step(d *datadriven.TestData) string {
	if by := arg(d, "by"); by != "" {
		s.coordinator.Claim = by
	}
	var obs sharding.Observation
	for _, name := range sortedNames(s.members) {
		obs.Members = append(obs.Members, s.members[name].state)
	}
	for _, name := range sortedNames(s.slices) {
		obs.Slices = append(obs.Slices, *s.slices[name])
	}
	writes := s.coordinator.Step(obs)
	if land := arg(d, "land"); land != "" {
		n, _ := strconv.Atoi(land)
		writes, s.late = writes[:n], writes[n:]
		return s.land(writes) + fmt.Sprintf("(%d more did not land)\n", len(s.late))
	}
	return s.land(writes)
}

func (s *stage) land(writes []sharding.Write) string {
	var b strings.Builder
	for _, w := range writes {
		old := s.slices[w.Slice.Member]
		if (w.Op == sharding.Create) != (old == nil) || (old != nil && old.Version != w.Slice.Version) {
			fmt.Fprintf(&b, "%s %s: refused, the slice has changed\n", strings.ToLower(string(w.Op)), w.Slice.Member)
			continue
		}
		fmt.Fprintf(&b, "%s %s\n", strings.ToLower(string(w.Op)), slice(&w.Slice))
		if w.Op == sharding.Delete {
			delete(s.slices, w.Slice.Member)
			continue
		}
		s.put(w.Slice)
	}
	return b.String()
}

func (s *stage) put(next sharding.Slice) {
	s.version++
	next.Version = strconv.Itoa(s.version)
	s.slices[next.Member] = &next
}

func (s *stage) publish(name string, m *actor) string {
	old := s.slices[name]
	if old == nil || old.Session != m.Session() {
		return "the slice is not of this session"
	}
	next := *old
	next.Status = m.Status(s.now)
	s.put(next)
	return status(next.Status)
}

func (s *stage) print() string {
	var b strings.Builder
	for _, name := range sortedNames(s.slices) {
		fmt.Fprintln(&b, slice(s.slices[name]))
	}
	return b.String()
}

// wants tells what the machine asks for now.
func (m *actor) wants() string {
	var b strings.Builder
	for _, p := range m.NextPurges() {
		fmt.Fprintf(&b, "drop %s %v\n", p.Resource, p.VNs)
	}
	for _, f := range m.NextFetches() {
		m.fetches = append(m.fetches, f)
		fmt.Fprintf(&b, "list %s %v\n", f.Resource, f.VNs)
	}
	for _, r := range stageDependencies.Resources() {
		if vns := m.Awaiting(r); !vns.Empty() {
			fmt.Fprintf(&b, "reads of %s %v wait\n", r, vns)
		}
	}
	return b.String()
}

// answer completes or fails the lists that are running.
func (m *actor) answer(t *testing.T, res sharding.Resource, version sharding.Version, gone bool) string {
	running := m.fetches
	m.fetches = nil
	for _, f := range running {
		switch {
		case res != "" && f.Resource != res:
			m.fetches = append(m.fetches, f)
		case gone:
			m.ListFailed(f)
		default:
			_, err := m.Listed(f, version)
			check(t, err)
		}
	}
	return m.wants()
}

func slice(s *sharding.Slice) string {
	parts := []string{fmt.Sprintf("%s: epoch %d session %s", s.Member, s.Epoch, s.Session)}
	if !s.Owned.Empty() {
		parts = append(parts, "owns "+s.Owned.String())
	}
	for _, g := range s.Grants {
		parts = append(parts, fmt.Sprintf("granted %v@%d %s", g.VNs, g.Epoch, known(g.Known)))
	}
	for _, o := range s.Incoming {
		parts = append(parts, fmt.Sprintf("incoming %v@%d", o.VNs, o.Epoch))
	}
	for _, o := range s.Draining {
		parts = append(parts, fmt.Sprintf("draining %v@%d", o.VNs, o.Epoch))
	}
	return strings.Join(append(parts, "claim "+s.Claim), ", ")
}

func status(s sharding.SliceStatus) string {
	parts := []string{fmt.Sprintf("at epoch %d, settled %d", s.Epoch, s.Settled)}
	for _, o := range s.Warm {
		parts = append(parts, fmt.Sprintf("warm %v@%d", o.VNs, o.Epoch))
	}
	for _, r := range s.Released {
		parts = append(parts, fmt.Sprintf("released %v@%d %s", r.VNs, r.Epoch, known(r.Known)))
	}
	if s.Leaving {
		parts = append(parts, "leaving")
	}
	return strings.Join(parts, ", ")
}

func known(v *sharding.Versions) string {
	if v == nil {
		return "(nothing known)"
	}
	var parts []string
	for _, r := range slices.Sorted(func(yield func(sharding.Resource) bool) {
		for r := range *v {
			if !yield(r) {
				return
			}
		}
	}) {
		parts = append(parts, fmt.Sprintf("%s=%s", r, (*v)[r]))
	}
	return "(" + strings.Join(parts, " ") + ")"
}
