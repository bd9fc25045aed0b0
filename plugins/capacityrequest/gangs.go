package capacityrequest

import (
	"context"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"

	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/demand"
	"github.com/drover-sh/drover/demand/podgroups"
)

// gangIndex finds the pods of one PodGroup in the scheduler's own pod informer.
const gangIndex = "capacityrequest.drover.sh/gang"

// gangs turns one member's failure into the demand of its whole gang. Coscheduling takes a gang back as soon as one member
// fails, and members that would have fitted never reach PostFilter: asked for one by one, the nodes of a gang of n would
// take n rounds to come.
//
// The members are looked up outside the scheduling loop, in the goroutine of run.
type gangs struct {
	queue   workqueue.TypedInterface[string]
	indexer cache.Indexer
	groups  demand.Groups
	writer  *demand.Writer
	decide  func(*corev1.Pod, []capacity.Rejection) capacity.Decision

	mu     sync.Mutex
	failed map[string]gangFailure // of the gangs in the queue
}

// gangFailure is what was seen when a member failed.
type gangFailure struct {
	member     *corev1.Pod
	rejections []capacity.Rejection
	// placed are members that wait for the others on a node that the autoscaler does not own.
	placed sets.Set[types.UID]
}

func newGangs(
	indexer cache.Indexer, groups demand.Groups, writer *demand.Writer,
	decide func(*corev1.Pod, []capacity.Rejection) capacity.Decision,
) *gangs {
	return &gangs{
		queue:   workqueue.NewTyped[string](),
		indexer: indexer,
		groups:  groups,
		writer:  writer,
		decide:  decide,
		failed:  map[string]gangFailure{},
	}
}

func gangIndexFunc(obj any) ([]string, error) {
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		return nil, nil
	}
	if key := podgroups.KeyOf(pod); key != "" {
		return []string{key}, nil
	}
	return nil, nil
}

// fail takes note that a member of the gang failed. It never blocks. Of several failures the last knows best.
func (g *gangs) fail(key string, f gangFailure) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.failed[key] = f
	g.queue.Add(key)
}

// verify has the requests of the gang's members compared with what its PodGroup says now. Members are often seen before it.
func (g *gangs) verify(key string) {
	objs, err := g.indexer.ByIndex(gangIndex, key)
	if err != nil {
		return // the index is there from the start
	}
	for _, obj := range objs {
		if pod, ok := obj.(*corev1.Pod); ok && pod.Spec.NodeName == "" && pod.DeletionTimestamp == nil {
			g.writer.Verify(pod)
		}
	}
}

func (g *gangs) run(ctx context.Context) {
	stop := context.AfterFunc(ctx, g.queue.ShutDown)
	defer stop()
	for g.next() {
	}
}

// next handles one gang and reports whether there may be more.
func (g *gangs) next() bool {
	key, shutdown := g.queue.Get()
	if shutdown {
		return false
	}
	defer g.queue.Done(key)
	g.mu.Lock()
	f := g.failed[key]
	delete(g.failed, key)
	g.mu.Unlock()

	if !g.decide(f.member, f.rejections).Request {
		g.writer.Enqueue(f.member, f.rejections) // the writer tells it why
		return true
	}
	members, hopeless, enough := g.members(key, f)
	if enough {
		g.writer.Enqueue(f.member, f.rejections)
		for _, pod := range members {
			g.writer.Enqueue(pod, nil)
		}
	}
	for _, pod := range hopeless {
		g.writer.Enqueue(pod, nil) // may never come to PostFilter itself, and is told why here
	}
	return true
}

// members lists the other members that need a node, and those that none can help. Enough is false where the gang could not
// run whatever nodes came.
func (g *gangs) members(key string, f gangFailure) (missing, hopeless []*corev1.Pod, enough bool) {
	objs, err := g.indexer.ByIndex(gangIndex, key)
	if err != nil {
		return nil, nil, true // the index is there from the start
	}
	var facts demand.GroupFacts
	if g.groups != nil {
		facts, _ = g.groups.GroupOf(f.member)
	}
	runnable := int32(1) // the member itself
	for _, obj := range objs {
		pod, ok := obj.(*corev1.Pod)
		if !ok || pod.UID == f.member.UID || pod.DeletionTimestamp != nil || capacity.IsTerminal(pod) {
			continue
		}
		if pod.Spec.NodeName != "" || f.placed.Has(pod.UID) {
			runnable++
			continue
		}
		switch decision := g.decide(pod, nil); {
		case decision.Request:
			runnable++
			missing = append(missing, pod)
		case !decision.Silent:
			hopeless = append(hopeless, pod)
		}
	}
	return missing, hopeless, runnable >= facts.MinCount
}
