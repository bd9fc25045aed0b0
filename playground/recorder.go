package playground

import (
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/capacity"
)

// recorder remembers all that happened during a story, so that what must never happen cannot hide between two looks.
type recorder struct {
	namespace string
	rules     []rule

	pods     map[types.UID]*podRecord
	requests map[types.UID]string // by the request's own UID: its name
	byPod    map[types.UID]int    // requests that were ever made for a pod
	launched map[string]bool      // nodes that appeared; false once they are gone
	before   map[string]bool      // nodes that were there before the story

	workloads map[types.UID]*workloadRecord

	shares *ownership   // nil in a story that is not about sharding
	shows  func(*World) // what a live picture shows, after every change

	maxRows, maxBytes int
	violations        []string
}

type podRecord struct {
	name   string
	nodes  []string // in the order in which it was seen bound to them: one at most
	gone   bool
	daemon bool
}

// workloadRecord is what Kueue did with a workload.
type workloadRecord struct {
	admitted   bool
	admissions int
	// flavors are those that quota was reserved in, one for each reservation in turn; held is true while it is.
	flavors []string
	held    bool
}

// rule has to hold at every moment of a story. broken returns what is wrong, or "".
type rule struct {
	name   string
	broken func(*World) string
}

func newRecorder(namespace string, before map[string]*corev1.Node) *recorder {
	r := &recorder{
		namespace: namespace,
		pods:      map[types.UID]*podRecord{},
		requests:  map[types.UID]string{},
		byPod:     map[types.UID]int{},
		launched:  map[string]bool{},
		before:    map[string]bool{},
		workloads: map[types.UID]*workloadRecord{},
	}
	for name := range before {
		r.before[name] = true
	}
	return r
}

func (r *recorder) saw(object any) {
	switch o := object.(type) {
	case *corev1.Pod:
		if !r.mine(o.Namespace) {
			return
		}
		record := r.pods[o.UID]
		if record == nil {
			record = &podRecord{name: o.Name, daemon: capacity.IsDaemonPod(o)}
			r.pods[o.UID] = record
		}
		if node := o.Spec.NodeName; node != "" && !slices.Contains(record.nodes, node) {
			record.nodes = append(record.nodes, node)
		}
	case *fleetv1alpha1.CapacityRequest:
		if _, known := r.requests[o.UID]; known || !r.mine(o.Namespace) {
			return
		}
		r.requests[o.UID] = o.Name
		for _, owner := range o.OwnerReferences {
			if owner.Kind != "Pod" {
				continue
			}
			if r.byPod[owner.UID]++; r.byPod[owner.UID] > 1 {
				r.violate("one request for each pod", fmt.Sprintf("pod %s (UID %s) got request %d: %s",
					owner.Name, owner.UID, r.byPod[owner.UID], o.Name))
			}
		}
	case *kueue.Workload:
		if r.mine(o.Namespace) {
			r.sawWorkload(o)
		}
	case *lbv1alpha1.WatchGroup, *lbv1alpha1.VirtualNodeSlice, *unstructured.Unstructured:
		if r.shares != nil && r.mine(o.(client.Object).GetNamespace()) {
			r.shares.saw(o, time.Now())
		}
	case *corev1.Node:
		if !r.before[o.Name] && o.Labels[labelStatic] == "" {
			r.launched[o.Name] = true
		}
	}
}

func (r *recorder) sawWorkload(wl *kueue.Workload) {
	record := r.workloads[wl.UID]
	if record == nil {
		record = &workloadRecord{}
		r.workloads[wl.UID] = record
	}
	if now := admitted(wl); now != record.admitted {
		record.admitted = now
		if now {
			record.admissions++
		}
		if record.admissions > 1 {
			r.violate("no workload is admitted twice", "workload "+wl.Name)
		}
	}
	if now := reserved(wl); now != record.held {
		record.held = now
		if now {
			record.flavors = append(record.flavors, flavorOf(wl, resourceGPU))
		}
	}
}

func (r *recorder) lost(object any) {
	switch o := object.(type) {
	case *corev1.Pod:
		if record := r.pods[o.UID]; record != nil {
			record.gone = true
		}
	case *corev1.Node:
		if r.launched[o.Name] {
			r.launched[o.Name] = false
		}
		delete(r.before, o.Name)
	case *lbv1alpha1.WatchGroup, *lbv1alpha1.VirtualNodeSlice, *unstructured.Unstructured:
		if r.shares != nil && r.mine(o.(client.Object).GetNamespace()) {
			r.shares.lost(o)
		}
	}
}

// check looks at the rules; it is called after every change.
func (r *recorder) check(v *view) {
	r.maxRows = max(r.maxRows, v.rollUp.rows)
	r.maxBytes = max(r.maxBytes, v.rollUp.bytes)
	w := &World{v: v, namespace: r.namespace}
	for _, rule := range r.rules {
		if broken := rule.broken(w); broken != "" {
			r.violate(rule.name, broken)
		}
	}
	if r.shows != nil {
		r.shows(w)
	}
}

// violate notes a rule's first violation.
func (r *recorder) violate(rule, what string) {
	text := rule + ": " + what
	if len(r.violations) < 10 && !slices.ContainsFunc(r.violations, func(v string) bool {
		return len(v) > len(rule) && v[:len(rule)] == rule
	}) {
		r.violations = append(r.violations, text)
	}
}

func (r *recorder) mine(namespace string) bool { return r.namespace == "" || namespace == r.namespace }

// podsSeen counts pods, those of DaemonSets excepted.
func (r *recorder) podsSeen() (n int) {
	for _, p := range r.pods {
		if !p.daemon {
			n++
		}
	}
	return n
}

// boundWithout counts the pods that were bound before anybody had to ask for them.
func (r *recorder) boundWithout() (n int) {
	for uid, p := range r.pods {
		if !p.daemon && len(p.nodes) > 0 && r.byPod[uid] == 0 {
			n++
		}
	}
	return n
}

// admissions counts how often workloads were admitted.
func (r *recorder) admissions() (n int) {
	for _, wl := range r.workloads {
		n += wl.admissions
	}
	return n
}

func (r *recorder) nodesLaunched() int { return len(r.launched) }

func (r *recorder) nodesReclaimed() (n int) {
	for _, there := range r.launched {
		if !there {
			n++
		}
	}
	return n
}
