package sharding

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestPhaseFollowsFromWhatWasSeen(t *testing.T) {
	for _, tc := range []struct {
		name  string
		facts MemberFacts
		want  Phase
	}{
		{"a member with a lease serves", MemberFacts{Session: "s"}, PhaseServing},
		{"a lease that was revoked or released counts", MemberFacts{}, PhaseStopped},
		{"an end that kubelet saw counts at once, lease or not", MemberFacts{Session: "s", Terminated: true}, PhaseStopped},
		{"an unready Pod is asked to drain and not robbed", MemberFacts{Session: "s", Unready: true}, PhaseLeaving},
		{"one that asks to be relieved is about to stop", MemberFacts{Session: "s", LeaveAsked: true}, PhaseQuitting},
		{"also if its Pod is not ready any more", MemberFacts{Session: "s", LeaveAsked: true, Unready: true}, PhaseQuitting},
		{"a newcomer waits for whom it may replace", MemberFacts{Session: "s", NewcomerGrace: true}, PhaseJoining},
		{"a newcomer that is not ready is no newcomer", MemberFacts{Session: "s", NewcomerGrace: true, Unready: true},
			PhaseLeaving},
		{"one that is expected back keeps its place", MemberFacts{ReturnGrace: true}, PhaseAway},
		{"also if its end was seen", MemberFacts{Session: "s", Terminated: true, ReturnGrace: true}, PhaseAway},
		{"but not while it is running", MemberFacts{Session: "s", ReturnGrace: true}, PhaseServing},
	} {
		if got := tc.facts.Phase(); got != tc.want {
			t.Errorf("%s: %+v is %s, want %s", tc.name, tc.facts, got, tc.want)
		}
	}
}

// Members that are all unready at once go on with what they have, and take over what is nobody's.
func TestWhenAllWantToLeaveTheyStay(t *testing.T) {
	current := Balanced{}.Assign(make(Placement, 9), serving(2))
	current[4] = ""
	members := []MemberState{{ID: "m000", Session: "s", Phase: PhaseLeaving}, {ID: "m001", Session: "t",
		Phase: PhaseLeaving}}
	next := Balanced{}.Assign(current, candidates(members))
	for vn, id := range next {
		if id == "" || (current[vn] != "" && id != current[vn]) {
			t.Errorf("Virtual Node %d went from %q to %q", vn, current[vn], id)
		}
	}
	members[1].Phase = PhaseQuitting
	if diff := cmp.Diff(map[string]int{"m000": 9}, loads(Balanced{}.Assign(current, candidates(members)))); diff != "" {
		t.Errorf("one that quits leaves everything to one that is unready: %s", diff)
	}
	members[0].Phase = PhaseServing
	if diff := cmp.Diff(map[string]int{"m000": 9}, loads(Balanced{}.Assign(current, candidates(members)))); diff != "" {
		t.Errorf("as soon as one serves, it gets everything: %s", diff)
	}
}
