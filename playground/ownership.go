package playground

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/wire"
)

// ownership is what a story has seen of a WatchGroup, change by change: who owns which Virtual Nodes, how often one has
// moved, and what has been written to the objects.
type ownership struct {
	group  *lbv1alpha1.WatchGroup
	slices map[string]sharding.Slice // by member
	owner  []string                  // of each Virtual Node, the last one that there was
	moves  []int                     // of each Virtual Node, to another owner, since they were last counted
	total  int                       // moves of all, ever
	over   bool                      // the members end: moves count no more
	begins map[string]int            // by session: what it owned when it was first seen
	unread error                     // a slice that cannot be read

	parents, children map[string]*unstructured.Unstructured // by name
	born              map[types.UID]int                     // children that were ever seen, by their parent
	frozen            map[string]string                     // versions of objects that nobody has a reason to write
	writes            []string                              // to those

	asked map[string]change // by parent: what its child has not followed yet
	done  int               // changes that children have followed
	worst time.Duration     // of those that were, since the last look
}

// change is a value that a user gave a Parent, at a time.
type change struct {
	value string
	at    time.Time
}

func newOwnership(virtualNodes int) *ownership {
	return &ownership{
		slices: map[string]sharding.Slice{}, begins: map[string]int{},
		owner: make([]string, virtualNodes), moves: make([]int, virtualNodes),
		parents: map[string]*unstructured.Unstructured{}, children: map[string]*unstructured.Unstructured{},
		born: map[types.UID]int{}, frozen: map[string]string{}, asked: map[string]change{},
	}
}

func (o *ownership) saw(object any, now time.Time) {
	switch object := object.(type) {
	case *lbv1alpha1.WatchGroup:
		o.group = object
	case *lbv1alpha1.VirtualNodeSlice:
		s, err := wire.Slice(object)
		if err != nil {
			o.unread = err
			return
		}
		o.sawSlice(s)
	case *unstructured.Unstructured:
		o.sawObject(object, now)
	}
}

func (o *ownership) sawSlice(s sharding.Slice) {
	if _, known := o.begins[s.Session]; !known && s.Session != "" {
		o.begins[s.Session] = s.Owned.Len()
	}
	o.slices[s.Member] = s
	for vn := range s.Owned.All() {
		if int(vn) >= len(o.owner) || o.owner[vn] == s.Member {
			continue
		}
		if o.owner[vn] != "" {
			o.moves[vn]++
			if !o.over {
				o.total++
			}
		}
		o.owner[vn] = s.Member
	}
}

func (o *ownership) sawObject(u *unstructured.Unstructured, now time.Time) {
	name := u.GetKind() + " " + u.GetName()
	if version, ok := o.frozen[name]; ok && version != u.GetResourceVersion() {
		o.writes = append(o.writes, name)
		delete(o.frozen, name)
	}
	if u.GetKind() == kindParent {
		o.parents[u.GetName()] = u
		return
	}
	if old := o.children[u.GetName()]; old == nil || old.GetUID() != u.GetUID() {
		if ref := metav1.GetControllerOf(u); ref != nil {
			o.born[ref.UID]++
		}
	}
	o.children[u.GetName()] = u
	if c, ok := o.asked[u.GetName()]; ok && valueOf(u) == c.value {
		delete(o.asked, u.GetName())
		o.done++
		o.worst = max(o.worst, now.Sub(c.at))
	}
}

func (o *ownership) lost(object any) {
	switch object := object.(type) {
	case *lbv1alpha1.WatchGroup:
		o.group = nil
	case *lbv1alpha1.VirtualNodeSlice:
		delete(o.slices, object.Spec.Member)
	case *unstructured.Unstructured:
		if object.GetKind() == kindParent {
			delete(o.parents, object.GetName())
		} else {
			delete(o.children, object.GetName())
		}
	}
}

// members of the group that have a session, by name.
func (o *ownership) members() []string {
	var names []string
	for _, name := range slices.Sorted(maps.Keys(o.slices)) {
		if o.slices[name].Session != "" {
			names = append(names, name)
		}
	}
	return names
}

// ownedBy is what the members own together.
func (o *ownership) ownedBy(members ...string) sharding.Set {
	var all sharding.Set
	for _, m := range members {
		all = all.Union(o.slices[m].Owned)
	}
	return all
}

// twoOwners names a Virtual Node that two members may work on, by what the slices say; "" if there is none.
func (o *ownership) twoOwners() string {
	if o.unread != nil {
		return o.unread.Error()
	}
	names := slices.Sorted(maps.Keys(o.slices))
	for i, a := range names {
		first := o.slices[a]
		for _, b := range names[i+1:] {
			second := o.slices[b]
			if both := first.Held().Intersect(second.Held()); !both.Empty() {
				return fmt.Sprintf("%s and %s both have Virtual Nodes %s", a, b, both)
			}
		}
	}
	return ""
}

// settled says what is missing until exactly these members share everything and nothing moves; "" if nothing is.
func (o *ownership) settled(members ...string) string {
	if o.group == nil {
		return "no group"
	}
	s := o.group.Status
	if int(s.Members) != len(members) || s.Moving != 0 || s.Unowned != 0 || s.UnlabelledObjects != 0 {
		return fmt.Sprintf("%d members, %d moving, %d unowned, %d unlabelled", s.Members, s.Moving, s.Unowned, s.UnlabelledObjects)
	}
	if got := o.members(); !slices.Equal(got, slices.Sorted(slices.Values(members))) {
		return fmt.Sprintf("members %v", got)
	}
	if n := o.ownedBy(members...).Len(); n != len(o.owner) {
		return fmt.Sprintf("%d of %d owned", n, len(o.owner))
	}
	for _, m := range members {
		switch slice := o.slices[m]; {
		case slice.Moving() > 0 || slice.Status.Session != slice.Session || slice.Status.Settled < slice.Epoch:
			return m + " is at it"
		case slice.Owned.Len()*len(members)*10 > len(o.owner)*11+10*len(members):
			return fmt.Sprintf("%s owns %d", m, slice.Owned.Len())
		}
	}
	return ""
}

// freeze remembers the versions of all objects but those that a user changes. A write to one of them is a fault.
func (o *ownership) freeze(changing func(name string) bool) (objects int) {
	for _, all := range []map[string]*unstructured.Unstructured{o.parents, o.children} {
		for name, u := range all {
			if !changing(name) {
				o.frozen[u.GetKind()+" "+name] = u.GetResourceVersion()
			}
		}
	}
	return len(o.frozen)
}

// orphans says which Parents have not exactly one Child, or Children no Parent; "" if none.
func (o *ownership) orphans() string {
	for name, parent := range o.parents {
		child := o.children[name]
		switch {
		case child == nil:
			return "Parent " + name + " has no Child"
		case !metav1.IsControlledBy(child, parent):
			return "Child " + name + " is not its Parent's"
		case o.born[parent.GetUID()] != 1:
			return fmt.Sprintf("Parent %s has had %d Children", name, o.born[parent.GetUID()])
		}
	}
	if len(o.children) != len(o.parents) {
		return fmt.Sprintf("%d Parents, %d Children", len(o.parents), len(o.children))
	}
	return ""
}

// unlabelled counts objects without a Virtual Node.
func (o *ownership) unlabelled() (n int) {
	for _, all := range []map[string]*unstructured.Unstructured{o.parents, o.children} {
		for _, u := range all {
			if u.GetLabels()[sharding.LabelVirtualNode] == "" {
				n++
			}
		}
	}
	return n
}

// counted returns how many Virtual Nodes have moved since the last time, how often the one that did most, and which.
func (o *ownership) counted() (moved, most int, which sharding.Set) {
	var vns []sharding.VirtualNode
	for vn, n := range o.moves {
		if n > 0 {
			vns = append(vns, sharding.VirtualNode(vn))
		}
		most = max(most, n)
	}
	clear(o.moves)
	return len(vns), most, sharding.SetOf(vns...)
}

// vnOf is the Virtual Node of a Parent, by its label; -1 if it has none.
func (o *ownership) vnOf(parent string) sharding.VirtualNode {
	u := o.parents[parent]
	if u == nil {
		return -1
	}
	vn, err := sharding.ParseVirtualNode(u.GetLabels()[sharding.LabelVirtualNode], len(o.owner))
	if err != nil {
		return -1
	}
	return vn
}

// picture is a bar for each member; notes are the story's, by member.
func (o *ownership) picture(notes map[string]string) Picture {
	p := Picture{Whole: len(o.owner)}
	for _, name := range slices.Sorted(maps.Keys(o.slices)) {
		s := o.slices[name]
		if s.Session == "" && s.Owned.Empty() && notes[name] == "" {
			continue // it has left
		}
		bar := Bar{Name: name, Value: s.Owned.Len(), Note: notes[name]}
		for _, order := range s.Incoming {
			bar.Coming += order.VNs.Len()
		}
		p.Bars = append(p.Bars, bar)
	}
	moving, unowned := 0, 0
	if o.group != nil {
		moving, unowned = int(o.group.Status.Moving), int(o.group.Status.Unowned)
	}
	p.Passing = o.ownedBy(slices.Collect(maps.Keys(o.slices))...).Len() < len(o.owner) || len(p.Bars) == 0 ||
		slices.ContainsFunc(slices.Collect(maps.Values(o.slices)), func(s sharding.Slice) bool { return s.Moving() > 0 })
	p.Below = fmt.Sprintf("moving %d, unowned %d; %d changes followed, %d not yet", moving, unowned, o.done, len(o.asked))
	return p
}

func valueOf(u *unstructured.Unstructured) string {
	value, _, _ := unstructured.NestedString(u.Object, "spec", "value")
	return value
}

// say counts owned Virtual Nodes by member: "a 334, b 333".
func (o *ownership) say() string {
	var parts []string
	for _, m := range o.members() {
		parts = append(parts, fmt.Sprintf("%s %d", m, o.slices[m].Owned.Len()))
	}
	return strings.Join(parts, ", ")
}
