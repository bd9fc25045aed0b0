package vnaffinity

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	fwk "k8s.io/kube-scheduler/framework"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	"github.com/drover-sh/drover/sharding"
)

// objects is the role Objects: it says which domains a pod prefers, and which of them have room.
type objects struct {
	handle  fwk.Handle
	groups  *groups
	indexer cache.Indexer
	lister  corelisters.PodLister

	group        types.NamespacedName // of the owners; empty in mode Domains
	virtualNodes int                  // V in mode Domains
	nodes        labels.Selector      // whose domains count in mode Domains
	key          string
	bound        bound

	mu      sync.Mutex
	domains []string // those that orders is of, sorted
	orders  map[sharding.VirtualNode][]string
	ranked  []sharding.VirtualNode // that have ever had pods, by rank
	known   sets.Set[sharding.VirtualNode]
}

var _ scorer = &objects{}

func newObjects(args *configv1alpha1.VNAffinityObjects, handle fwk.Handle, groups *groups) (*objects, error) {
	pods := handle.SharedInformerFactory().Core().V1().Pods()
	informer := pods.Informer()
	if err := addIndexer(informer, objectIndex, objectIndexFunc); err != nil {
		return nil, err
	}
	o := &objects{
		handle: handle, groups: groups, indexer: informer.GetIndexer(), lister: pods.Lister(),
		virtualNodes: int(args.VirtualNodes), nodes: labels.SelectorFromSet(args.NodeSelector), key: args.TopologyKey,
		bound: bound{factor: args.LoadFactor, least: int(*args.MinLoad)}, known: sets.New[sharding.VirtualNode](),
	}
	if args.Mode == configv1alpha1.ObjectsNearOwners {
		o.group = types.NamespacedName{Namespace: args.Namespace, Name: args.WatchGroup}
	}
	return o, nil
}

// objectIndex finds the pods that carry a Virtual Node or a hash key, and have not ended, by the scheduler profile that they
// ask for and by what they carry.
const objectIndex = "vnaffinity.objects"

func objectIndexFunc(obj any) ([]string, error) {
	if pod, ok := obj.(*corev1.Pod); ok && carries(pod) && !ended(pod) {
		return []string{strings.Join([]string{
			pod.Spec.SchedulerName, pod.Annotations[sharding.AnnotationHashKey], pod.Labels[sharding.LabelVirtualNode],
		}, separator)}, nil
	}
	return nil, nil
}

// separator is in no name, and in no label.
const separator = "\x00"

// carries says whether the pod carries a Virtual Node or a hash key.
func carries(pod *corev1.Pod) bool {
	return pod.Labels[sharding.LabelVirtualNode] != "" || pod.Annotations[sharding.AnnotationHashKey] != ""
}

func (o *objects) serves(pod *corev1.Pod) bool { return carries(pod) }

// virtualNodeOf returns the pod's Virtual Node of v. The key goes before the label, which follows from it where both are there.
// A label that is none of v is an error.
func virtualNodeOf(pod *corev1.Pod, v int) (sharding.VirtualNode, error) {
	return virtualNodeBy(pod.Annotations[sharding.AnnotationHashKey], pod.Labels[sharding.LabelVirtualNode], v)
}

func virtualNodeBy(key, label string, v int) (sharding.VirtualNode, error) {
	if key != "" {
		return sharding.VirtualNodeOf(key, v), nil
	}
	return sharding.ParseVirtualNode(label, v)
}

const objectsKey = "Objects" + Name

// objectsState says how far down each domain stands for the pod.
type objectsState struct{ standings map[string]int64 }

// Clone implements fwk.StateData. Nobody changes what it holds.
func (s objectsState) Clone() fwk.StateData { return s }

// preScore skips a pod for which nothing is known: its Virtual Node is none of the group's, or no domain takes part.
func (o *objects) preScore(ctx context.Context, state fwk.CycleState, pod *corev1.Pod, _ []fwk.NodeInfo) *fwk.Status {
	if !carries(pod) {
		return fwk.NewStatus(fwk.Skip)
	}
	v := o.virtualNodes
	if o.group.Name != "" {
		v = o.groups.virtualNodesOf(o.group)
	}
	if v == 0 {
		return fwk.NewStatus(fwk.Skip, "WatchGroup "+o.group.String()+" is not there")
	}
	vn, err := virtualNodeOf(pod, v)
	if err != nil {
		return fwk.NewStatus(fwk.Skip, err.Error())
	}
	nodes, err := o.handle.SnapshotSharedLister().NodeInfos().List()
	if err != nil {
		return fwk.AsStatus(fmt.Errorf("listing the snapshot's nodes: %w", err))
	}
	parts := o.taking(nodes)
	if len(parts) == 0 {
		return fwk.NewStatus(fwk.Skip, "no domain takes part")
	}
	pods, total, err := o.census(pod, v)
	if err != nil {
		return fwk.AsStatus(err)
	}
	var whole int64
	for _, part := range parts {
		whole += part
	}
	capacity := func(domain string) int { return o.bound.capacity(total, parts[domain], whole) }
	choices := o.choices(parts)
	allotted := allot(vn, o.byRank(pods), pods, choices, capacity)
	loads, ofIt := o.loads(ctx, nodes, pod, parts, vn, v)
	state.Write(objectsKey, objectsState{standings(choices(vn),
		func(domain string) bool { return ofIt[domain] < allotted[domain] },
		func(domain string) bool { return loads[domain] < capacity(domain) },
	)})
	return nil
}

// taking returns the domains that take part, with their parts: what the members there own, or one for each domain.
func (o *objects) taking(nodes []fwk.NodeInfo) map[string]int64 {
	parts := map[string]int64{}
	if o.group.Name == "" {
		for _, info := range nodes {
			if domain, ok := info.Node().Labels[o.key]; ok && o.nodes.Matches(labels.Set(info.Node().Labels)) {
				parts[domain] = 1
			}
		}
		return parts
	}
	for member, owned := range o.groups.sharesOf(o.group) {
		if domain, ok := o.domainOfMember(member); ok && owned > 0 {
			parts[domain] += owned
		}
	}
	return parts
}

// domainOfMember returns the domain of the node of a member's pod, which has the member's name.
func (o *objects) domainOfMember(member string) (string, bool) {
	pod, err := o.lister.Pods(o.group.Namespace).Get(member)
	if err != nil || pod.Spec.NodeName == "" {
		return "", false
	}
	info, err := o.handle.SnapshotSharedLister().NodeInfos().Get(pod.Spec.NodeName)
	if err != nil {
		return "", false
	}
	domain, ok := info.Node().Labels[o.key]
	return domain, ok
}

// choices returns a function that lists the domains in the order in which a Virtual Node prefers them: that of its owner, then
// by hash. Pods of a Virtual Node that nobody owns stay together by the hash.
func (o *objects) choices(parts map[string]int64) func(sharding.VirtualNode) []string {
	domains := slices.Sorted(maps.Keys(parts))
	o.mu.Lock()
	if !slices.Equal(o.domains, domains) {
		o.domains, o.orders = domains, map[sharding.VirtualNode][]string{}
	}
	orders := o.orders
	o.mu.Unlock()
	byHash := func(vn sharding.VirtualNode) []string {
		o.mu.Lock()
		defer o.mu.Unlock()
		list, ok := orders[vn]
		if !ok {
			list = order(vn, domains)
			orders[vn] = list
		}
		return list
	}
	if o.group.Name == "" {
		return byHash
	}
	owners := o.groups.ownersOf(o.group)
	of := map[string]string{}
	for _, owner := range owners {
		if _, ok := of[owner]; !ok {
			of[owner], _ = o.domainOfMember(owner)
		}
	}
	return func(vn sharding.VirtualNode) []string {
		list := byHash(vn)
		if i := slices.Index(list, of[owners[vn]]); i > 0 {
			list = slices.Concat(list[i:i+1], list[:i], list[i+1:])
		}
		return list
	}
}

// byRank returns Virtual Nodes by rank, all that have pods among them.
func (o *objects) byRank(pods map[sharding.VirtualNode]int) []sharding.VirtualNode {
	o.mu.Lock()
	defer o.mu.Unlock()
	var fresh []sharding.VirtualNode
	for vn := range pods {
		if !o.known.Has(vn) {
			o.known.Insert(vn)
			fresh = append(fresh, vn)
		}
	}
	if len(fresh) > 0 {
		o.ranked = slices.Concat(o.ranked, fresh)
		byRank(o.ranked)
	}
	return o.ranked
}

// census counts the pods of the profile by Virtual Node of v, and all that carry one or a hash key, with a node or without:
// what waits is about to be placed, and a bound by what is placed alone would scatter the first pods of many.
func (o *objects) census(pod *corev1.Pod, v int) (pods map[sharding.VirtualNode]int, total int, err error) {
	pods = map[sharding.VirtualNode]int{}
	for _, value := range o.indexer.ListIndexFuncValues(objectIndex) {
		carried, ok := strings.CutPrefix(value, pod.Spec.SchedulerName+separator)
		if !ok {
			continue
		}
		names, err := o.indexer.IndexKeys(objectIndex, value)
		if err != nil {
			return nil, 0, fmt.Errorf("listing the pods with Virtual Nodes: %w", err)
		}
		total += len(names)
		at := strings.LastIndex(carried, separator)
		if vn, err := virtualNodeBy(carried[:at], carried[at+1:], v); err == nil {
			pods[vn] += len(names)
		}
	}
	return pods, max(total, 1), nil
}

// loads counts the pods in each domain, assumed ones included: all, and those of the Virtual Node vn of v.
func (o *objects) loads(
	ctx context.Context, nodes []fwk.NodeInfo, pod *corev1.Pod, parts map[string]int64, vn sharding.VirtualNode, v int,
) (all, ofIt map[string]int) {
	type counter struct{ all, ofIt atomic.Int64 }
	counters := make(map[string]*counter, len(parts))
	for domain := range parts {
		counters[domain] = &counter{}
	}
	o.handle.Parallelizer().Until(ctx, len(nodes), func(i int) {
		c := counters[nodes[i].Node().Labels[o.key]]
		if c == nil {
			return
		}
		for _, info := range nodes[i].GetPods() {
			other := info.GetPod()
			if other.Spec.SchedulerName != pod.Spec.SchedulerName || !carries(other) || ended(other) {
				continue
			}
			c.all.Add(1)
			if its, err := virtualNodeOf(other, v); err == nil && its == vn {
				c.ofIt.Add(1)
			}
		}
	}, Name)
	all, ofIt = make(map[string]int, len(counters)), make(map[string]int, len(counters))
	for domain, c := range counters {
		all[domain], ofIt[domain] = int(c.all.Load()), int(c.ofIt.Load())
	}
	return all, ofIt
}

func objectsStateOf(state fwk.CycleState) (objectsState, *fwk.Status) {
	data, err := state.Read(objectsKey)
	if err != nil {
		return objectsState{}, fwk.AsStatus(fmt.Errorf("reading %q from the cycle's state: %w", objectsKey, err))
	}
	return data.(objectsState), nil
}

// score is how far down the node's domain stands.
func (o *objects) score(state fwk.CycleState, _ *corev1.Pod, node fwk.NodeInfo) (int64, *fwk.Status) {
	s, status := objectsStateOf(state)
	if status != nil {
		return 0, status
	}
	if domain, ok := node.Node().Labels[o.key]; ok {
		if standing, ok := s.standings[domain]; ok {
			return standing, nil
		}
	}
	return full, nil
}

// normalizeScore makes the first choice that has a node the best. A domain whose nodes all refuse the pod is passed over.
func (o *objects) normalizeScore(_ fwk.CycleState, _ *corev1.Pod, scores fwk.NodeScoreList) *fwk.Status {
	standings := make([]int64, len(scores))
	for i := range scores {
		standings[i] = scores[i].Score
	}
	for i, score := range nearness(standings) {
		scores[i].Score = score
	}
	return nil
}
