package vnaffinity

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
)

// members is the role Members: it feeds a spread with the pods of the group, and answers for it.
type members struct {
	handle fwk.Handle
	groups *groups
	pods   cache.Indexer
	keys   []string // that score
	limits []limit
	logger logr.Logger
}

// A limit is an entry of maxShareLostPerDomain.
type limit struct {
	key   string
	share float64
}

var (
	_ filterer = &members{}
	_ scorer   = &members{}
)

func newMembers(
	args *configv1alpha1.VNAffinityMembers, handle fwk.Handle, groups *groups, logger logr.Logger,
) (*members, error) {
	informer := handle.SharedInformerFactory().Core().V1().Pods().Informer()
	if err := addIndexer(informer, memberIndex, memberIndexFunc); err != nil {
		return nil, err
	}
	m := &members{
		handle: handle, groups: groups, pods: informer.GetIndexer(), keys: args.TopologyKeys, logger: logger,
	}
	for _, key := range slices.Sorted(maps.Keys(args.MaxShareLostPerDomain)) {
		m.limits = append(m.limits, limit{key, args.MaxShareLostPerDomain[key]})
	}
	if len(m.limits) > 0 {
		groups.onChange(m.retry)
	}
	return m, nil
}

// memberIndex finds the pods of a group by its namespace and name.
const memberIndex = "vnaffinity.members"

func memberIndexFunc(obj any) ([]string, error) {
	if pod, ok := obj.(*corev1.Pod); ok {
		if group, ok := groupOf(pod); ok {
			return []string{group.String()}, nil
		}
	}
	return nil, nil
}

// addIndexer adds an index that is not there yet: another profile's plugin may have been first.
func addIndexer(informer cache.SharedIndexInformer, name string, index cache.IndexFunc) error {
	if _, ok := informer.GetIndexer().GetIndexers()[name]; ok {
		return nil
	}
	if err := informer.AddIndexers(cache.Indexers{name: index}); err != nil {
		return fmt.Errorf("adding index %s to the pod informer: %w", name, err)
	}
	return nil
}

// groupOf returns the WatchGroup that the pod is a member of.
func groupOf(pod *corev1.Pod) (types.NamespacedName, bool) {
	name := pod.Labels[lbv1alpha1.LabelWatchGroup]
	return types.NamespacedName{Namespace: pod.Namespace, Name: name}, name != ""
}

func (m *members) serves(pod *corev1.Pod) bool {
	_, ok := groupOf(pod)
	return ok
}

// ended says that a pod holds or will hold nothing.
func ended(pod *corev1.Pod) bool {
	return pod.DeletionTimestamp != nil || pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// memberOf reads a pod of the group. stays is false for one that ends, or that has asked to be relieved: it is given nothing
// any more.
func (m *members) memberOf(group types.NamespacedName, pod *corev1.Pod) (_ member, stays bool) {
	s, _ := m.groups.slice(group, pod.Name)
	family, revision := workloadOf(pod)
	who := member{id: pod.UID, family: family, revision: revision, weight: weightOf(pod)}
	if !s.leaving {
		who.owned = s.weight
	}
	return who, !ended(pod) && !s.leaving
}

// workloadOf returns the workload and the version of its template. A ReplicaSet is named after its Deployment and the hash.
func workloadOf(pod *corev1.Pod) (family, revision string) {
	owner := metav1.GetControllerOfNoCopy(pod)
	if owner == nil {
		return "", ""
	}
	for _, label := range []string{"pod-template-hash", "controller-revision-hash"} {
		if hash := pod.Labels[label]; hash != "" {
			return owner.Kind + "/" + strings.TrimSuffix(owner.Name, "-"+hash), hash
		}
	}
	return "", ""
}

// maxWeight is the coordinator's bound.
const maxWeight = 1000

// weightOf is the weight that the pod's Lease will say, where its annotation says the same. Until the pod runs there is no
// Lease. What is not a number from 1 to 1000 counts as 1, as it does for the coordinator.
func weightOf(pod *corev1.Pod) int64 {
	n, err := strconv.ParseInt(pod.Annotations[lbv1alpha1.AnnotationWeight], 10, 64)
	if err != nil || n < 1 || n > maxWeight {
		return 1
	}
	return n
}

// checkWeight complains about a weight that cannot be read, once in every attempt to schedule the pod.
func (m *members) checkWeight(pod *corev1.Pod) {
	text, ok := pod.Annotations[lbv1alpha1.AnnotationWeight]
	if ok && weightOf(pod) == 1 && text != "1" {
		m.logger.Error(nil, "The member's weight is not a number from 1 to 1000; it counts as 1", "pod", klog.KObj(pod),
			"annotation", lbv1alpha1.AnnotationWeight, "value", text)
	}
}

// domainOf returns the node's domain. Nodes without the label are in one domain: nothing tells them apart, so that the worst
// is assumed. A node without a hostname goes by its name.
func domainOf(node *corev1.Node, key string) string {
	if value, ok := node.Labels[key]; ok || key != corev1.LabelHostname {
		return value
	}
	return node.Name
}

// place counts a member on its node, in the domains of every key.
func (m *members) place(s *spread, node *corev1.Node, who member, by int) {
	for _, key := range m.keys {
		s.count(key, domainOf(node, key), who, by)
	}
	for _, l := range m.limits {
		if !slices.Contains(m.keys, l.key) {
			s.count(l.key, domainOf(node, l.key), who, by)
		}
	}
}

// survey reads who is where from the snapshot, which shows assumed pods, too, and who has no node yet from the informer.
func (m *members) survey(ctx context.Context, pod *corev1.Pod, group types.NamespacedName) (*spread, error) {
	nodes, err := m.handle.SnapshotSharedLister().NodeInfos().List()
	if err != nil {
		return nil, fmt.Errorf("listing the snapshot's nodes: %w", err)
	}
	m.checkWeight(pod)
	self, _ := m.memberOf(group, pod)
	type placed struct {
		member
		on    *corev1.Node
		stays bool
	}
	var (
		mu    sync.Mutex
		there []placed
	)
	m.handle.Parallelizer().Until(ctx, len(nodes), func(i int) {
		for _, info := range nodes[i].GetPods() {
			other := info.GetPod()
			if g, ok := groupOf(other); !ok || g != group || other.UID == pod.UID {
				continue
			}
			who, stays := m.memberOf(group, other)
			mu.Lock()
			there = append(there, placed{who, nodes[i].Node(), stays})
			mu.Unlock()
		}
	}, Name)
	all := []member{self}
	seen := sets.New(self.id)
	for _, p := range there {
		seen.Insert(p.id)
		if p.stays {
			all = append(all, p.member)
		}
	}
	waiting, err := m.pods.ByIndex(memberIndex, group.String())
	if err != nil {
		return nil, fmt.Errorf("listing the pods of WatchGroup %s: %w", group, err)
	}
	for _, obj := range waiting {
		if other := obj.(*corev1.Pod); !seen.Has(other.UID) {
			if who, stays := m.memberOf(group, other); stays {
				all = append(all, who)
			}
		}
	}
	s := newSpread(self, all)
	for _, p := range there {
		if p.stays {
			m.place(s, p.on, p.member, 1)
		}
	}
	return s, nil
}

const membersKey = "Members" + Name

// membersState is what a scheduling cycle of a member knows.
type membersState struct{ *spread }

// Clone implements fwk.StateData. Preemption counts pods in and out of clones.
func (s membersState) Clone() fwk.StateData { return membersState{s.clone()} }

// spreadOf returns the cycle's spread; nil where there is none.
func spreadOf(state fwk.CycleState) *spread {
	data, err := state.Read(membersKey)
	if err != nil {
		return nil
	}
	return data.(membersState).spread
}

// prepare surveys once in a cycle.
func (m *members) prepare(ctx context.Context, state fwk.CycleState, pod *corev1.Pod) *fwk.Status {
	group, ok := groupOf(pod)
	if !ok {
		return fwk.NewStatus(fwk.Skip)
	}
	if spreadOf(state) != nil {
		return nil
	}
	s, err := m.survey(ctx, pod, group)
	if err != nil {
		return fwk.AsStatus(err)
	}
	state.Write(membersKey, membersState{s})
	return nil
}

func (m *members) preFilter(
	ctx context.Context, state fwk.CycleState, pod *corev1.Pod, _ []fwk.NodeInfo,
) (*fwk.PreFilterResult, *fwk.Status) {
	return nil, m.prepare(ctx, state, pod)
}

func (m *members) addPod(state fwk.CycleState, pod *corev1.Pod, added fwk.PodInfo, node fwk.NodeInfo) *fwk.Status {
	m.count(state, pod, added.GetPod(), node, 1)
	return nil
}

func (m *members) removePod(state fwk.CycleState, pod *corev1.Pod, removed fwk.PodInfo, node fwk.NodeInfo) *fwk.Status {
	m.count(state, pod, removed.GetPod(), node, -1)
	return nil
}

func (m *members) count(state fwk.CycleState, pod, other *corev1.Pod, node fwk.NodeInfo, by int) {
	s := spreadOf(state)
	group, _ := groupOf(pod)
	if g, ok := groupOf(other); s == nil || !ok || g != group || other.UID == pod.UID {
		return
	}
	if who, stays := m.memberOf(group, other); stays {
		m.place(s, node.Node(), who, by)
	}
}

// filter refuses nodes in domains that would hold too much. Another node may be in another domain, and a member that is
// preempted makes room: the refusal is not for good.
func (m *members) filter(_ context.Context, state fwk.CycleState, pod *corev1.Pod, node fwk.NodeInfo) *fwk.Status {
	s := spreadOf(state)
	if s == nil {
		return nil
	}
	for _, l := range m.limits {
		if s.refused(l.key, domainOf(node.Node(), l.key), l.share) {
			group, _ := groupOf(pod)
			return fwk.NewStatus(fwk.Unschedulable, fmt.Sprintf(
				"node(s) would put more than %s%% of the Virtual Nodes of WatchGroup %s into one %s (maxShareLostPerDomain)",
				strconv.FormatFloat(100*l.share, 'f', -1, 64), group, l.key))
		}
	}
	return nil
}

func (m *members) preScore(ctx context.Context, state fwk.CycleState, pod *corev1.Pod, _ []fwk.NodeInfo) *fwk.Status {
	return m.prepare(ctx, state, pod)
}

// score is what would be lost with the node's domain of the most important key, in millionths.
func (m *members) score(state fwk.CycleState, _ *corev1.Pod, node fwk.NodeInfo) (int64, *fwk.Status) {
	return spreadOf(state).lost(m.keys[0], domainOf(node.Node(), m.keys[0])), nil
}

// normalizeScore compares the nodes by the domains of all keys.
func (m *members) normalizeScore(state fwk.CycleState, _ *corev1.Pod, scores fwk.NodeScoreList) *fwk.Status {
	s := spreadOf(state)
	places := make([]place, len(scores))
	for i := range scores {
		info, err := m.handle.SnapshotSharedLister().NodeInfos().Get(scores[i].Name)
		if err != nil {
			return fwk.AsStatus(fmt.Errorf("getting node %s from the snapshot: %w", scores[i].Name, err))
		}
		for _, key := range m.keys {
			domain := domainOf(info.Node(), key)
			places[i].domains = append(places[i].domains, domain)
			places[i].costs = append(places[i].costs, s.cost(key, domain))
		}
	}
	for i, score := range preferences(places) {
		scores[i].Score = score
	}
	return nil
}

// events are what may make room: a member that goes or comes (the more there are, the less each owns), and a node in a domain
// that has room, or that comes into one.
func (m *members) events() []fwk.ClusterEventWithHint {
	return []fwk.ClusterEventWithHint{
		{Event: fwk.ClusterEvent{Resource: fwk.Pod, ActionType: fwk.Add | fwk.Delete | fwk.UpdatePodLabel}, QueueingHintFn: m.afterPod},
		{Event: fwk.ClusterEvent{Resource: fwk.Node, ActionType: fwk.Add | fwk.UpdateNodeLabel}, QueueingHintFn: m.afterNode},
	}
}

// afterPod queues a member when a pod of its group, or that was of its group, has changed.
func (m *members) afterPod(_ klog.Logger, pod *corev1.Pod, before, after any) (fwk.QueueingHint, error) {
	group, _ := groupOf(pod)
	for _, obj := range []any{before, after} {
		if other, ok := obj.(*corev1.Pod); ok {
			if g, member := groupOf(other); member && g == group {
				return fwk.Queue, nil
			}
		}
	}
	return fwk.QueueSkip, nil
}

// afterNode queues a member for every new node, and for one whose domain of a limited key has changed.
func (m *members) afterNode(_ klog.Logger, _ *corev1.Pod, before, after any) (fwk.QueueingHint, error) {
	then, ok := before.(*corev1.Node)
	now, _ := after.(*corev1.Node)
	if !ok || then == nil || now == nil {
		return fwk.Queue, nil
	}
	for _, l := range m.limits {
		if domainOf(then, l.key) != domainOf(now, l.key) {
			return fwk.Queue, nil
		}
	}
	return fwk.QueueSkip, nil
}

// retry lets the group's pods that wait be tried again, because what its members own has changed. The scheduler has no such
// event: an informer of its own would be a second one, and could be behind this one.
func (m *members) retry(group types.NamespacedName) {
	objs, err := m.pods.ByIndex(memberIndex, group.String())
	if err != nil {
		return
	}
	pods := map[string]*corev1.Pod{}
	for _, obj := range objs {
		if pod := obj.(*corev1.Pod); pod.Spec.NodeName == "" && !ended(pod) {
			pods[pod.Namespace+"/"+pod.Name] = pod
		}
	}
	if len(pods) > 0 {
		m.handle.Activate(m.logger, pods)
	}
}
