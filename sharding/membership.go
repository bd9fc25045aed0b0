package sharding

// A Phase is what the coordinator does with a member.
type Phase string

const (
	// PhaseServing members hold their share.
	PhaseServing Phase = "Serving"
	// PhaseJoining members take over what has to move anyway, but nobody gives up anything for them yet. A new member
	// stays in it for a grace period, so that in a rolling update it replaces an old one and each Virtual Node moves
	// once.
	PhaseJoining Phase = "Joining"
	// PhaseLeaving members work on until others have taken over everything of theirs. Where nobody can, they stay.
	PhaseLeaving Phase = "Leaving"
	// PhaseQuitting members work on in the same way. But they are about to stop whatever happens: where nobody can take
	// over they are relieved all the same, and what they had is nobody's until somebody comes. That endangers nothing: it
	// is drained and released as ever, and granted to nobody before.
	PhaseQuitting Phase = "Quitting"
	// PhaseAway members have stopped and are expected back within a grace period; what they had waits for them. It is
	// for restarts that take less time than two moves would.
	PhaseAway Phase = "Away"
	// PhaseStopped members do nothing any more and have nothing.
	PhaseStopped Phase = "Stopped"
)

// A MemberState is one member of the group as the coordinator's Step gets to know it.
type MemberState struct {
	// ID is the member's name.
	ID string
	// Session holds the member's Lease: LeaseWatch.Session, "" if nobody does.
	Session string
	// Phase comes from MemberFacts.
	Phase Phase
	// Weight is the member's share relative to the others'; zero means 1.
	Weight int
}

// MemberFacts are what is known about a member, each seen by somebody who can know it.
type MemberFacts struct {
	// Session holds the member's Lease; "" if it has been released, or revoked after it expired (see LeaseWatch).
	Session string
	// Terminated is set if kubelet reports that the container of that very session has ended. A Pod that was
	// deleted by force, or whose node is lost, has been seen to end by nobody: it waits for the Lease.
	Terminated bool
	// Unready is set if the member's Pod is not ready, or is being deleted. The process may well be at work.
	Unready bool
	// LeaveAsked is set if the member asks to be relieved: SliceStatus.Leaving.
	LeaveAsked bool
	// NewcomerGrace is set while a member that has just come may still turn out to replace another.
	NewcomerGrace bool
	// ReturnGrace is set while a member that has stopped is expected back under the same ID.
	ReturnGrace bool
}

// Phase returns what follows from the facts. Only a released or revoked Lease and an end that was seen count as
// stopped; everything else that looks bad gets a member drained, never robbed.
func (f MemberFacts) Phase() Phase {
	switch {
	case f.Session == "" || f.Terminated:
		if f.ReturnGrace {
			return PhaseAway
		}
		return PhaseStopped
	case f.LeaveAsked:
		return PhaseQuitting
	case f.Unready:
		return PhaseLeaving
	case f.NewcomerGrace:
		return PhaseJoining
	default:
		return PhaseServing
	}
}

// running reports whether the member's session can act.
func (m MemberState) running() bool {
	return m.Session != "" && m.Phase != PhaseAway && m.Phase != PhaseStopped
}

// candidates translates phases for the Assignment. Where nobody is left to receive, those that are to leave go on: members
// that are all unready at once are no reason to stop everything. Those that quit do not.
func candidates(members []MemberState) []Candidate {
	var list []Candidate
	var leaving []int // places in list
	receivers := false
	for _, m := range members {
		c := Candidate{ID: m.ID, Weight: m.Weight}
		switch m.Phase {
		case PhaseServing:
			c.Keeps, c.Receives, c.Pulls = true, true, true
		case PhaseJoining:
			c.Keeps, c.Receives = true, true
		case PhaseAway:
			c.Keeps = true
		case PhaseLeaving:
			leaving = append(leaving, len(list))
		case PhaseQuitting:
		default:
			continue
		}
		receivers = receivers || c.Receives
		list = append(list, c)
	}
	if receivers {
		return list
	}
	for _, i := range leaving {
		list[i].Keeps, list[i].Receives = true, true
	}
	return list
}
