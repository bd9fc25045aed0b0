package vnaffinity

import (
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clienttesting "k8s.io/client-go/testing"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	st "k8s.io/kubernetes/pkg/scheduler/testing"

	"github.com/drover-sh/drover/capacity"
)

// urgent is a pod at home here whose nominated node is the one given.
func urgent(nominated string) *corev1.Pod {
	pod := at("n0", "p", "1")
	priority := int32(10)
	pod.Spec.Priority = &priority
	pod.Status.NominatedNodeName = nominated
	return pod
}

// ending fills a node with a pod that was preempted there, and is still ending.
func (r *replica) ending(node string) {
	r.t.Helper()
	now := metav1.Now()
	victim := st.MakePod().Namespace("ns").Name("victim").UID("victim").Node(node).
		Req(map[corev1.ResourceName]string{"cpu": "4"}).Condition(corev1.DisruptionTarget, corev1.ConditionTrue,
		corev1.PodReasonPreemptionByScheduler).Obj()
	victim.DeletionTimestamp = &now
	if err := r.cache.AddPod(r.logger, victim); err != nil {
		r.t.Fatal(err)
	}
}

// DefaultPreemption takes a nomination back when it finds nothing. A pod that moves on does not come to it.
func TestANominationDoesNotOutliveThePodsStay(t *testing.T) {
	all := hop{To: "a", Refused: []string{"b", "c"}, Epoch: 1}.String()
	for _, test := range []struct {
		name      string
		nominated string
		hop       string
		full      []string
		ending    string
		want      string // what is said
		taken     bool
	}{
		{"it fits elsewhere", "n0", "", []string{"n0", "n1"}, "", "moves on to b", true},
		{"it fits where it is nominated", "n2", "", []string{"n0", "n1"}, "", "moves on to b", false},
		{"its node has gone", "n9", "", []string{"n0", "n1"}, "", "moves on to b", true},
		{"its node is on its way", "n5", "", []string{"n0", "n1"}, "", "moves on to b", true},
		{"it seems to fit where it was refused", "n0", all, []string{"n0", "n1", "n4", "n5"}, "", "seems to fit on a node of scheduler b", true},
		{"pods are ending for it here", "n0", all, []string{"n1", "n4", "n5"}, "n0", "seems to fit on a node of scheduler b", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			pod := urgent(test.nominated)
			if test.hop != "" {
				pod.Annotations[AnnotationReplica] = test.hop
			}
			r := newReplica(t, pod)
			r.fill(test.full...)
			if test.ending != "" {
				r.ending(test.ending)
			}
			_, _, status := r.cycle(pod)
			if !strings.Contains(status.Message(), test.want) {
				t.Fatalf("PostFilter: %v", status)
			}
			taken := r.result != nil && r.result.Mode() == fwk.ModeOverride && r.result.NominatedNodeName == ""
			if taken != test.taken {
				t.Errorf("the nomination is taken back: %v, want %v", taken, test.taken)
			}
			// Whatever the API server still says, it goes.
			if _, h, _ := r.plugin.schedulers.moving(pod.UID); h == nil || h.To != "b" {
				t.Errorf("it goes to %v", h)
			}
		})
	}
}

// The scheduler knows of a nomination before the API server has been told, and that may take longer than preemption is
// waited for.
func TestAPodThatWasJustPromisedANodeStays(t *testing.T) {
	pod := urgent("")
	r := newReplica(t, pod)
	r.fill("n0", "n1", "n2", "n3", "n4", "n5")
	if err := r.known.Add(pod); err != nil {
		t.Fatal(err)
	}
	r.cycle(pod)
	info, err := framework.NewPodInfo(pod)
	if err != nil {
		t.Fatal(err)
	}
	r.queue.AddNominatedPod(r.logger, info, framework.NewPostFilterResultWithNominatedNode("n1").NominatingInfo)
	if _, h, _ := r.plugin.schedulers.moving(pod.UID); h != nil {
		t.Errorf("it moves on to %s, and preempts there, too", h.To)
	}
	r.queue.DeleteNominatedPodIfExists(pod)
	if _, h, _ := r.plugin.schedulers.moving(pod.UID); h == nil || h.To != "b" {
		t.Errorf("when the promise is taken back it goes to %v", h)
	}
}

// A pod goes round to preempt only where a pod that goes would make room for it.
func TestAPodDoesNotGoRoundWhereNothingHelps(t *testing.T) {
	for _, test := range []struct {
		name, cpu string
		priority  int32
		want      string // where it goes to preempt
	}{
		{"it would have room", "4", 10, "b"},
		{"the others are as important", "4", 0, ""},
		{"it is too big for any node", "5", 10, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			pod := at("n0", "p", test.cpu)
			pod.Spec.Priority = &test.priority
			r := newReplica(t, pod)
			r.fill("n0", "n1", "n2", "n3", "n4", "n5")
			_, _, status := r.cycle(pod)
			to := ""
			if _, h, _ := r.plugin.schedulers.moving(pod.UID); h != nil {
				to = h.To
			}
			if to != test.want || capacity.RefusedByAll(status.Message()) != (test.want == "") {
				t.Errorf("it goes to %q: %v", to, status)
			}
		})
	}
}

// Each attempt gives preemption its time, also where the pod was to move on by then after the attempt before.
func TestAnotherAttemptGivesPreemptionItsTime(t *testing.T) {
	pod := urgent("")
	r := newReplica(t, pod)
	r.fill("n0", "n1", "n2", "n3", "n4", "n5")
	r.cycle(pod)
	s := r.plugin.schedulers
	moves := func() bool {
		s.moves.Add(pod.UID) // as the time of the attempt before does
		s.moveNext(t.Context())
		return slices.ContainsFunc(r.client.Actions(), func(a clienttesting.Action) bool { return a.GetVerb() == "patch" })
	}
	if moves() {
		t.Error("it moves on while preemption is under way")
	}
	s.mu.Lock()
	s.pods[pod.UID].due = time.Now()
	s.mu.Unlock()
	if !moves() {
		t.Error("it stays for ever")
	}
}

// A nominated node may go to another replica, or be on its way, while pods are ending there for the pod. It goes after the
// node: to preempt again would end twice as many.
func TestAPodGoesAfterTheNodeThatIsClearedForIt(t *testing.T) {
	for _, test := range []struct {
		name, nominated, want string
		asked                 bool
	}{
		{"it is another's", "n3", "moves on to b", false},
		{"it is on its way", "n5", "on its way", false},
		{"it is here", "n1", "", true},
	} {
		t.Run(test.name, func(t *testing.T) {
			pod := urgent(test.nominated)
			r := newReplica(t, pod)
			r.fill(slices.DeleteFunc([]string{"n0", "n1", "n2", "n3", "n4", "n5"}, func(n string) bool { return n == test.nominated })...)
			r.ending(test.nominated)
			_, _, status := r.cycle(pod)
			if !strings.Contains(status.Message(), test.want) || capacity.RefusedByAll(status.Message()) {
				t.Errorf("PostFilter: %v", status)
			}
			if asked := len(r.asked) > 0; asked != test.asked {
				t.Errorf("preemption is asked: %v, want %v", asked, test.asked)
			}
			if r.result != nil {
				t.Errorf("the nomination is changed to %q", r.result.NominatedNodeName)
			}
		})
	}
}

// Where the promised node is decides before anybody preempts, and after it has been seen that the pod fits nowhere now.
func TestWhereAPromisedPodGoes(t *testing.T) {
	r := newRoster(9, slicesOf(4, map[string]string{"a": "0-2", "b": "3-5", "c": "6-8"}))
	none := func(string) bool { return false }
	only := func(member string) func(string) bool { return func(m string) bool { return m == member } }
	for _, test := range []struct {
		name     string
		hop      *hop
		fits     func(string) bool
		promised string
		want     verdict
	}{
		{"after its node", nil, none, "c", verdict{next: &hop{To: "c", Refused: []string{"a"}, Epoch: 4}}},
		{"after its node, in the second round", &hop{To: "a", Refused: []string{"b"}, Preempting: true, Again: 2, Epoch: 4}, none, "b",
			verdict{next: &hop{To: "b", Refused: []string{"b", "a"}, Preempting: true, Again: 2, Epoch: 4}}},
		{"rather where it fits at once", nil, only("b"), "c", verdict{next: &hop{To: "b", Refused: []string{"a"}, Epoch: 4}}},
		{"nowhere", nil, none, "a", verdict{last: true, after: time.Second}},
	} {
		got := decide(refusal{self: "a", roster: r, hop: test.hop, fits: test.fits, couldPreempt: none, promised: test.promised})
		if show(got) != show(test.want) {
			t.Errorf("%s:\n got %s\nwant %s", test.name, show(got), show(test.want))
		}
	}
}
