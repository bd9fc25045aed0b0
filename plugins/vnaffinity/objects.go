package vnaffinity

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
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
		bound: bound{factor: args.LoadFactor, least: int(*args.MinLoad)},
	}
	if args.Mode == configv1alpha1.ObjectsNearOwners {
		o.group = types.NamespacedName{Namespace: args.Namespace, Name: args.WatchGroup}
	}
	return o, nil
}

// objectIndex finds the pods that carry a Virtual Node or a hash key by the scheduler profile that they ask for.
const objectIndex = "vnaffinity.objects"

func objectIndexFunc(obj any) ([]string, error) {
	if pod, ok := obj.(*corev1.Pod); ok && carries(pod) {
		return []string{pod.Spec.SchedulerName}, nil
	}
	return nil, nil
}

// carries says whether the pod carries a Virtual Node or a hash key.
func carries(pod *corev1.Pod) bool {
	return pod.Labels[sharding.LabelVirtualNode] != "" || pod.Annotations[sharding.AnnotationHashKey] != ""
}

func (o *objects) serves(pod *corev1.Pod) bool { return carries(pod) }

// virtualNodeOf returns the pod's Virtual Node of v. The key goes before the label, which follows from it where both are there.
// A label that is none of v is an error.
func virtualNodeOf(pod *corev1.Pod, v int) (sharding.VirtualNode, error) {
	if key := pod.Annotations[sharding.AnnotationHashKey]; key != "" {
		return sharding.VirtualNodeOf(key, v), nil
	}
	return sharding.ParseVirtualNode(pod.Labels[sharding.LabelVirtualNode], v)
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
	parts := o.domains(nodes)
	if len(parts) == 0 {
		return fwk.NewStatus(fwk.Skip, "no domain takes part")
	}
	total, err := o.total(pod)
	if err != nil {
		return fwk.AsStatus(err)
	}
	var whole int64
	for _, part := range parts {
		whole += part
	}
	loads := o.loads(ctx, nodes, pod, parts)
	state.Write(objectsKey, objectsState{standings(o.choices(vn, parts), func(domain string) bool {
		return loads[domain] < o.bound.capacity(total, parts[domain], whole)
	})})
	return nil
}

// domains returns the domains that take part, with their parts: what the members there own, or one for each domain.
func (o *objects) domains(nodes []fwk.NodeInfo) map[string]int64 {
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

// choices returns the domains in the order in which the Virtual Node prefers them: that of its owner, then by hash. Pods of a
// Virtual Node that nobody owns stay together by the hash.
func (o *objects) choices(vn sharding.VirtualNode, parts map[string]int64) []string {
	domains := slices.Collect(maps.Keys(parts))
	choices := order(vn, domains)
	if o.group.Name == "" {
		return choices
	}
	owner, ok := o.groups.owner(o.group, vn)
	if !ok {
		return choices
	}
	domain, ok := o.domainOfMember(owner)
	if i := slices.Index(choices, domain); ok && i >= 0 {
		choices = slices.Insert(slices.Delete(choices, i, i+1), 0, domain)
	}
	return choices
}

// total is how many pods of the profile carry a Virtual Node or a hash key, with a node or without: what waits is about to be
// placed, and a bound by what is placed alone would scatter the first pods of many.
func (o *objects) total(pod *corev1.Pod) (int, error) {
	objs, err := o.indexer.ByIndex(objectIndex, pod.Spec.SchedulerName)
	if err != nil {
		return 0, fmt.Errorf("listing the pods with Virtual Nodes: %w", err)
	}
	total := 0
	for _, obj := range objs {
		if !ended(obj.(*corev1.Pod)) {
			total++
		}
	}
	return max(total, 1), nil
}

// loads counts the pods in each domain, assumed ones included.
func (o *objects) loads(
	ctx context.Context, nodes []fwk.NodeInfo, pod *corev1.Pod, parts map[string]int64,
) map[string]int {
	counters := make(map[string]*atomic.Int64, len(parts))
	for domain := range parts {
		counters[domain] = &atomic.Int64{}
	}
	o.handle.Parallelizer().Until(ctx, len(nodes), func(i int) {
		counter := counters[nodes[i].Node().Labels[o.key]]
		if counter == nil {
			return
		}
		for _, info := range nodes[i].GetPods() {
			other := info.GetPod()
			if other.Spec.SchedulerName == pod.Spec.SchedulerName && carries(other) && !ended(other) {
				counter.Add(1)
			}
		}
	}, Name)
	loads := make(map[string]int, len(counters))
	for domain, counter := range counters {
		loads[domain] = int(counter.Load())
	}
	return loads
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
