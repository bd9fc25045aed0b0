package vnaffinity

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	v1helper "k8s.io/kubernetes/pkg/apis/core/v1/helper"
	"k8s.io/kubernetes/pkg/scheduler/apis/config"
	"k8s.io/kubernetes/pkg/scheduler/framework"

	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/sharding"
)

var (
	_ fwk.PreEnqueuePlugin = &VNAffinity{}
	_ fwk.PostFilterPlugin = &VNAffinity{}
	_ filterer             = &schedulers{}
)

const cycleKey = "Schedulers" + Name

// cycle is what one scheduling cycle goes by.
type cycle struct {
	pod *waiting
	// stranger is set if the pod is not this replica's.
	stranger bool
	// own are the names of the nodes that the replica owned when the cycle began, by no later gain than upTo.
	own  sets.Set[string]
	upTo uint64
	// unsettled is set if the replica owns nodes that the snapshot does not show as they are.
	unsettled bool
	// all lets every node pass Filter: PostFilter asks whether the pod would fit where it may not go.
	all atomic.Bool
}

// Clone implements fwk.StateData. Only PostFilter changes what it holds, and only while nobody else looks.
func (c *cycle) Clone() fwk.StateData { return c }

func cycleOf(state fwk.CycleState) *cycle {
	data, err := state.Read(cycleKey)
	if err != nil {
		return nil
	}
	c, _ := data.(*cycle)
	return c
}

// PreEnqueue admits the pods that this replica holds.
func (p *VNAffinity) PreEnqueue(_ context.Context, pod *corev1.Pod) *fwk.Status {
	s := p.schedulers
	if s == nil {
		return nil
	}
	s.mu.RLock()
	held := s.holds(s.waiting(pod))
	s.mu.RUnlock()
	if held {
		return nil
	}
	if held, holder := s.turnAway(pod); !held {
		return fwk.NewStatus(fwk.UnschedulableAndUnresolvable, "waits at "+holder)
	}
	return nil
}

// turnAway notes a pod that is not held here, so that look lets it in when it comes to be, and reports whether it is by now.
func (s *schedulers) turnAway(pod *corev1.Pod) (held bool, holder string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.note(pod)
	return s.holds(w), s.holder(w)
}

// note returns what is known of a pod, and keeps it from now on. The queue hears of a pod by other handlers than this plugin,
// and may be the first. Only what the informer has is kept: it will say so when the pod is over.
func (s *schedulers) note(pod *corev1.Pod) *waiting {
	if w := s.pods[pod.UID]; w != nil {
		return w
	}
	obj, ok, err := s.indexer.GetByKey(pod.Namespace + "/" + pod.Name)
	if shown, isPod := obj.(*corev1.Pod); ok && err == nil && isPod && shown.UID == pod.UID && shown.Spec.NodeName == "" {
		s.pods[pod.UID] = s.waiting(shown)
	}
	return s.waiting(pod)
}

func (s *schedulers) preFilter(
	_ context.Context, state fwk.CycleState, pod *corev1.Pod, nodes []fwk.NodeInfo,
) (*fwk.PreFilterResult, *fwk.Status) {
	if err := s.order(); err != nil {
		return nil, fwk.AsStatus(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	c := &cycle{pod: s.note(pod)}
	state.Write(cycleKey, c)
	if !s.holds(c.pod) {
		// It was in the queue already when it went to another replica.
		c.stranger = true
		return nil, notYetRefused("waits at %s", s.holder(c.pod))
	}
	c.unsettled = !s.verify(nodes)
	c.own, c.upTo = s.ownNodes(), s.upTo
	c.pod.tried = c.own
	return &fwk.PreFilterResult{NodeNames: c.own}, nil
}

// verify finds out on which nodes, of those that have just come to be served, the snapshot shows all pods that the informer
// does. It reports whether that is so on all of them.
func (s *schedulers) verify(nodes []fwk.NodeInfo) bool {
	kept := s.verified.Intersect(s.serving.VNs)
	for _, g := range s.serving.Gains {
		if g.No > s.upTo {
			kept = kept.Minus(g.VNs)
		}
	}
	if !kept.Equal(s.verified) {
		s.verified, s.own = kept, nil
	}
	s.upTo = s.serving.Last
	open := s.serving.VNs.Minus(s.verified)
	if open.Empty() {
		return true
	}
	var behind []sharding.VirtualNode
	there := make(map[string]bool, len(nodes))
	for _, info := range nodes {
		name := info.Node().Name
		there[name] = true
		if vn := s.virtualNodeOfNode(name); open.Has(vn) && !s.shown(info) {
			behind = append(behind, vn)
		}
	}
	// A node that the snapshot does not show yet may come to it before its pods do.
	for _, name := range s.nodeIndexer.ListKeys() {
		if vn := s.virtualNodeOfNode(name); open.Has(vn) && !there[name] {
			behind = append(behind, vn)
		}
	}
	left := sharding.SetOf(behind...)
	s.verified, s.own = s.verified.Union(open.Minus(left)), nil
	return left.Empty()
}

// shown reports whether a node of the snapshot has all pods that the informer knows to be bound to it.
func (s *schedulers) shown(info fwk.NodeInfo) bool {
	bound, err := s.indexer.ByIndex(nodeIndex, info.Node().Name)
	if err != nil {
		return false
	}
	there := make(map[types.UID]bool, len(info.GetPods()))
	for _, p := range info.GetPods() {
		there[p.GetPod().UID] = true
	}
	for _, obj := range bound {
		if pod, ok := obj.(*corev1.Pod); ok && !there[pod.UID] {
			return false
		}
	}
	return true
}

// ownNodes returns the names of the nodes that this replica may place pods on. Nobody changes the set.
func (s *schedulers) ownNodes() sets.Set[string] {
	if s.own == nil {
		s.own = sets.New[string]()
		for name, vn := range s.nodes {
			if s.verified.Has(vn) {
				s.own.Insert(name)
			}
		}
	}
	return s.own
}

func (s *schedulers) addPod(fwk.CycleState, *corev1.Pod, fwk.PodInfo, fwk.NodeInfo) *fwk.Status {
	return nil
}

func (s *schedulers) removePod(fwk.CycleState, *corev1.Pod, fwk.PodInfo, fwk.NodeInfo) *fwk.Status {
	return nil
}

func (s *schedulers) filter(_ context.Context, state fwk.CycleState, _ *corev1.Pod, node fwk.NodeInfo) *fwk.Status {
	if c := cycleOf(state); c == nil || c.all.Load() || c.own.Has(node.Node().Name) {
		return nil
	}
	return fwk.NewStatus(fwk.UnschedulableAndUnresolvable, "node(s) belonged to another replica of the scheduler")
}

// PostFilter lets the plugins after it have a pod only if it fits on no node of any replica.
func (p *VNAffinity) PostFilter(
	ctx context.Context, state fwk.CycleState, pod *corev1.Pod, _ fwk.NodeToStatusReader,
) (*fwk.PostFilterResult, *fwk.Status) {
	if p.schedulers == nil {
		return nil, fwk.NewStatus(fwk.Unschedulable)
	}
	return p.schedulers.postFilter(ctx, state, pod)
}

// postFilter takes the pod's nominated node back if it moves on from there, or is to: the plugin that does so otherwise is
// not asked then, and the node's room would be kept for a pod that waits elsewhere.
func (s *schedulers) postFilter(ctx context.Context, state fwk.CycleState, pod *corev1.Pod) (*fwk.PostFilterResult, *fwk.Status) {
	c := cycleOf(state)
	switch {
	case c == nil:
		// Another plugin has refused the pod before this one was asked: on all nodes.
		return nil, fwk.NewStatus(fwk.Unschedulable)
	case c.stranger:
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable)
	case c.unsettled:
		s.stall(pod)
		return nil, notYetRefused("nodes have just come to scheduler %s", s.member)
	}
	s.mu.RLock()
	roster, w := s.roster, *c.pod
	s.mu.RUnlock()
	look := s.othersIn(ctx, roster, c, state, pod)
	nominated := s.nominationOf(roster, c, pod)
	v := decide(refusal{
		self: s.member, roster: roster, hop: w.hop, again: w.last, fits: look.fits, couldPreempt: look.couldPreempt,
		promised: nominated.promisedAt(),
	})
	if v.last && nominated.promised && nominated.at == "" {
		s.stall(pod)
		return nil, notYetRefused("has preempted on a node that is on its way from one to another")
	}
	if look.fits("") {
		if v.last {
			s.stall(pod)
			return nil, notYetRefused("fits on a node that is on its way from one to another")
		}
		if v.next != nil {
			// The node may come to this replica, in the same epoch, which then has not refused the pod on all that it owns.
			v.next.Refused = slices.DeleteFunc(v.next.Refused, func(member string) bool { return member == s.member })
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.pods[pod.UID]
	if now == nil {
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable)
	}
	now.stalls = 0
	if v.next != nil {
		now.next, now.last, now.later = v.next, false, nil
		s.moves.Add(pod.UID)
		return nominated.unless(v.next.To), notYetRefused("fits on no node of scheduler %s, moves on to %s", s.member, v.next.To)
	}
	now.last, now.later, now.due = v.last, v.later, time.Now().Add(v.after)
	if v.later != nil {
		s.moves.AddAfter(pod.UID, v.after)
	}
	if !v.last {
		return nominated.unless(v.later.To), notYetRefused("seems to fit on a node of scheduler %s, which has refused it, and is tried again", v.later.To)
	}
	if !v.asks() {
		state.Write(capacity.NotYetRefusedKey, preemptsNext{})
		return nil, fwk.NewStatus(fwk.Unschedulable, fmt.Sprintf("%s: fits on no node of any of %d schedulers, and moves on to %s to preempt "+
			"there, if it cannot here", capacity.NotYetRefusedByAll, len(roster.members), v.later.To))
	}
	return nil, fwk.NewStatus(fwk.Unschedulable, fmt.Sprintf("fits on no node of any of %d schedulers, waits at %s", len(roster.members), s.member))
}

// A nomination is what a pod's nominated node means to the replica that has just refused the pod.
type nomination struct {
	// at is the replica that owns the node, "" if there is no such node, or it is on its way.
	at string
	// promised is set while pods are ending on it that were preempted for this one, or for another one of its priority.
	promised bool
}

func (n nomination) promisedAt() string {
	if !n.promised {
		return ""
	}
	return n.at
}

// unless returns what takes the nomination back, and nil if the pod goes to the replica that owns the node, or may have to
// come back for what is ending there.
func (n nomination) unless(to string) *fwk.PostFilterResult {
	if n.promised || n.at == to {
		return nil
	}
	return framework.NewPostFilterResultWithNominatedNode("")
}

func (s *schedulers) nominationOf(r *roster, c *cycle, pod *corev1.Pod) nomination {
	name := pod.Status.NominatedNodeName
	if name == "" {
		return nomination{}
	}
	info, err := s.handle.SnapshotSharedLister().NodeInfos().Get(name)
	if err != nil {
		return nomination{} // the node has gone
	}
	n := nomination{promised: slices.ContainsFunc(info.GetPods(), func(other fwk.PodInfo) bool {
		return corev1helpers.PodPriority(other.GetPod()) < corev1helpers.PodPriority(pod) && endsByPreemption(other.GetPod())
	})}
	s.mu.RLock()
	defer s.mu.RUnlock()
	if n.at = r.owner(s.virtualNodeOfNode(name)); n.at == s.member && !c.own.Has(name) {
		n.at = "" // not served yet
	}
	return n
}

// endsByPreemption reports whether a scheduler has preempted the pod, and it has not gone yet.
func endsByPreemption(pod *corev1.Pod) bool {
	return pod.DeletionTimestamp != nil && slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.DisruptionTarget && c.Status == corev1.ConditionTrue && c.Reason == corev1.PodReasonPreemptionByScheduler
	})
}

// preemptsNext says to the plugins after this one that another replica is still to be asked for what it can preempt.
type preemptsNext struct{}

// Clone implements fwk.StateData.
func (p preemptsNext) Clone() fwk.StateData { return p }

// notYetRefused is the status of a pod that another replica may have a place for. Whoever asks for capacity leaves it alone.
func notYetRefused(format string, args ...any) *fwk.Status {
	return fwk.NewStatus(fwk.UnschedulableAndUnresolvable, capacity.NotYetRefusedByAll+": "+fmt.Sprintf(format, args...))
}

// others is what the snapshot says of the nodes of other replicas; "" stands for nodes that are on their way.
type others struct {
	nodes        map[string][]fwk.NodeInfo
	fits         func(member string) bool
	couldPreempt func(member string) bool
}

func (s *schedulers) othersIn(ctx context.Context, r *roster, c *cycle, state fwk.CycleState, pod *corev1.Pod) *others {
	o := &others{nodes: make(map[string][]fwk.NodeInfo)}
	all, err := s.handle.SnapshotSharedLister().NodeInfos().List()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Listing the nodes of the snapshot")
	}
	s.mu.RLock()
	for _, info := range all {
		name := info.Node().Name
		if c.own.Has(name) {
			continue
		}
		owner := r.owner(s.virtualNodeOfNode(name))
		if owner == s.member {
			owner = "" // not served yet
		}
		o.nodes[owner] = append(o.nodes[owner], info)
	}
	s.mu.RUnlock()
	try := func(nodes []fwk.NodeInfo, answer func(fwk.Code) bool) bool {
		c.all.Store(true)
		defer c.all.Store(false)
		return s.anyNode(ctx, state, pod, nodes, answer)
	}
	o.fits = func(member string) bool {
		return try(o.nodes[member], func(code fwk.Code) bool { return code == fwk.Success })
	}
	o.couldPreempt = func(member string) bool {
		if !mayPreempt(pod) {
			return false
		}
		priority := corev1helpers.PodPriority(pod)
		var nodes []fwk.NodeInfo
		for _, info := range o.nodes[member] {
			if slices.ContainsFunc(info.GetPods(), func(other fwk.PodInfo) bool {
				return corev1helpers.PodPriority(other.GetPod()) < priority
			}) {
				nodes = append(nodes, info)
			}
		}
		// Where the refusal is for good, no pod that goes makes room.
		return try(nodes, func(code fwk.Code) bool { return code != fwk.UnschedulableAndUnresolvable })
	}
	return o
}

func mayPreempt(pod *corev1.Pod) bool {
	return pod.Spec.PreemptionPolicy == nil || *pod.Spec.PreemptionPolicy != corev1.PreemptNever
}

// anyNode runs the profile's filters on nodes until one gives the answer. A filter that fails for want of what its
// PreFilter did not get to prepare counts as giving it: the replica that owns the node finds out.
func (s *schedulers) anyNode(ctx context.Context, state fwk.CycleState, pod *corev1.Pod, nodes []fwk.NodeInfo, answer func(fwk.Code) bool) bool {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var found atomic.Bool
	s.handle.Parallelizer().Until(ctx, len(nodes), func(i int) {
		code := s.handle.RunFilterPluginsWithNominatedPods(ctx, state, pod, nodes[i]).Code()
		if failed := code == fwk.Error; failed && ctx.Err() == nil || !failed && answer(code) {
			found.Store(true)
			cancel()
		}
	}, Name)
	return found.Load()
}

// events are what may make a pod fit on a node that its last cycle did not try. Those are the nodes of other replicas, and new
// ones: where this replica has no node, no other plugin has turned the pod down, and none would hear of its first. What
// happens to nodes that were tried is for the plugins that turned them down, unless it matters to a whole domain, which has
// nodes of others. Pods that other replicas hold are left alone, at the price of one look each.
func (s *schedulers) events() []fwk.ClusterEventWithHint {
	events := []fwk.ClusterEventWithHint{
		{
			Event: fwk.ClusterEvent{Resource: fwk.Node, ActionType: fwk.Add | fwk.Delete | fwk.UpdateNodeAllocatable | fwk.UpdateNodeLabel |
				fwk.UpdateNodeTaint | fwk.UpdateNodeDeclaredFeature},
			QueueingHintFn: func(_ klog.Logger, pod *corev1.Pod, before, after any) (fwk.QueueingHint, error) {
				return s.hint(pod, s.nodeHelps(pod, before, after)), nil
			},
		},
		{
			Event: fwk.ClusterEvent{Resource: fwk.Pod, ActionType: fwk.Add | fwk.Delete | fwk.UpdatePodLabel | fwk.UpdatePodScaleDown | fwk.UpdatePodToleration},
			QueueingHintFn: func(_ klog.Logger, pod *corev1.Pod, before, after any) (fwk.QueueingHint, error) {
				return s.hint(pod, s.helps(pod, before, after)), nil
			},
		},
	}
	for resource, concerns := range map[fwk.EventResource]func(*corev1.Pod) bool{
		fwk.PersistentVolume: hasVolumeClaims, fwk.PersistentVolumeClaim: hasVolumeClaims, fwk.StorageClass: hasVolumeClaims,
		fwk.CSINode: hasVolumeClaims, fwk.CSIDriver: hasVolumeClaims, fwk.CSIStorageCapacity: hasVolumeClaims,
		fwk.VolumeAttachment: hasVolumeClaims,
		fwk.ResourceClaim:    wantsDevices, fwk.ResourceSlice: wantsDevices, fwk.DeviceClass: wantsDevices,
	} {
		events = append(events, fwk.ClusterEventWithHint{
			Event: fwk.ClusterEvent{Resource: resource, ActionType: fwk.All},
			QueueingHintFn: func(_ klog.Logger, pod *corev1.Pod, _, _ any) (fwk.QueueingHint, error) {
				return s.hint(pod, concerns(pod)), nil
			},
		})
	}
	return events
}

// nodeHelps reports whether what happened to a node may let a pod in where its last cycle did not try. One that comes, goes
// or changes its labels changes what is in a domain, whoever owns the domain's other nodes. Taints may decide which nodes
// count for a spread.
func (s *schedulers) nodeHelps(pod *corev1.Pod, before, after any) bool {
	then, _ := before.(*corev1.Node)
	now, _ := after.(*corev1.Node)
	switch {
	case then == nil && now == nil:
		return false
	case then == nil || now == nil || !maps.Equal(then.Labels, now.Labels) || hasRules(pod):
		return true
	}
	return s.untried(pod, now.Name)
}

// helps reports whether what happened to a pod may let another one in where its last cycle did not try: the pod itself has
// changed, there is more room there, or there are rules between the two, which may be about a whole zone.
func (s *schedulers) helps(pod *corev1.Pod, before, after any) bool {
	then, _ := before.(*corev1.Pod)
	now, _ := after.(*corev1.Pod)
	if now == nil {
		now = then
	}
	switch {
	case now == nil:
		return false
	case now.UID == pod.UID:
		return true
	case now.Spec.NodeName == "":
		return false
	case hasRules(pod), after == nil && keepsOthersAway(then):
		return true
	}
	return then != nil && s.untried(pod, now.Spec.NodeName)
}

// hasRules reports whether it matters to the pod where other pods are.
func hasRules(pod *corev1.Pod) bool {
	a := pod.Spec.Affinity
	return len(pod.Spec.TopologySpreadConstraints) > 0 || a != nil && (a.PodAffinity != nil || a.PodAntiAffinity != nil)
}

// keepsOthersAway reports whether other pods may be kept from a whole domain by where this one is.
func keepsOthersAway(pod *corev1.Pod) bool {
	a := pod.Spec.Affinity
	return a != nil && a.PodAntiAffinity != nil && len(a.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution) > 0
}

func hasVolumeClaims(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool {
		return v.PersistentVolumeClaim != nil || v.Ephemeral != nil
	})
}

// wantsDevices reports whether devices may serve the pod: by its claims, or by a DeviceClass that stands for an extended
// resource.
func wantsDevices(pod *corev1.Pod) bool {
	extended := func(c corev1.Container) bool {
		for name := range c.Resources.Requests {
			if v1helper.IsExtendedResourceName(name) {
				return true
			}
		}
		return false
	}
	return len(pod.Spec.ResourceClaims) > 0 || slices.ContainsFunc(pod.Spec.Containers, extended) ||
		slices.ContainsFunc(pod.Spec.InitContainers, extended)
}

// untried reports whether the pod's last cycle let no other plugin look at the node: it was another replica's, or the scheduler
// knew of it before this plugin did.
func (s *schedulers) untried(pod *corev1.Pod, node string) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	w := s.pods[pod.UID]
	return w == nil || !w.tried.Has(node)
}

func (s *schedulers) hint(pod *corev1.Pod, helps bool) fwk.QueueingHint {
	if !helps {
		return fwk.QueueSkip
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.holds(s.waiting(pod)) {
		return fwk.Queue
	}
	return fwk.QueueSkip
}

// orderIn returns a check of the profile's order, which is known only when the profile is complete.
func orderIn(handle fwk.Handle) func() error {
	profile, ok := handle.(interface{ ListPlugins() *config.Plugins })
	if !ok {
		return func() error { return nil }
	}
	return sync.OnceValue(func() error {
		plugins := profile.ListPlugins()
		var errs []error
		for _, point := range []struct {
			name string
			set  config.PluginSet
		}{{"bind", plugins.Bind}, {"postFilter", plugins.PostFilter}} {
			if len(point.set.Enabled) == 0 || point.set.Enabled[0].Name != Name {
				errs = append(errs, fmt.Errorf("profile %s: plugins.%s.enabled: %s with the role schedulers has to be enabled here, and in "+
					"multiPoint, so that it comes first", handle.ProfileName(), point.name, Name))
			}
		}
		for _, point := range []struct {
			name string
			set  config.PluginSet
		}{{"preEnqueue", plugins.PreEnqueue}, {"preFilter", plugins.PreFilter}, {"filter", plugins.Filter}, {"reserve", plugins.Reserve}} {
			if !has(point.set, Name) {
				errs = append(errs, fmt.Errorf("profile %s: plugins.%s.enabled: %s with the role schedulers is missing",
					handle.ProfileName(), point.name, Name))
			}
		}
		return errors.Join(errs...)
	})
}

func has(set config.PluginSet, name string) bool {
	for _, p := range set.Enabled {
		if p.Name == name {
			return true
		}
	}
	return false
}
