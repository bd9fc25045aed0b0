// Package vnaffinity is the scheduler plugin VNAffinity: it brings Virtual Nodes into the scheduling layer, in three roles that
// are turned on one by one by the plugin's args.
//
//   - Members spreads the pods of a WatchGroup so that as few Virtual Nodes as possible are lost with any one failure domain.
//   - Objects places pods that carry a Virtual Node or a hash key near the member, or in the domain, that it belongs to.
//   - Schedulers lets several replicas of the scheduler be active at once.
//
// # Extension points
//
//   - PreFilter, AddPod, RemovePod and Filter hold the hard limit of Members: a limit that only scored could be overruled by
//     any other plugin. They are skipped for every pod that no limit concerns.
//   - PreScore reads the snapshot once for all nodes: who is where, assumed pods included. It skips pods of no role.
//   - Score says of each node what would be lost with it, or how far down it stands in the pod's order of domains.
//     NormalizeScore turns that into a preference, because only the comparison of all nodes says what is best.
//   - SignPod signs pods of no role with nothing, so that they batch as if the plugin were not there, and refuses pods of a
//     role: where one of them goes changes the scores of the next.
//   - EventsToRegister names what can make a pod fit that Filter has refused. A change of a VirtualNodeSlice is not among the
//     events of the scheduler: the plugin's own informer takes the pods concerned out of the queue once it knows the change,
//     so that none of them is tried on what was known before.
//
// The plugin reads caches only. It writes nothing in these two roles, and never waits in the scheduling loop.
//
// Start reading at spread, then preference, which decide; members and objects feed them.
package vnaffinity

import (
	"context"
	"fmt"
	"io"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
)

// Name of the plugin in the registry and in configurations.
const Name = "VNAffinity"

// VNAffinity is a plugin that places pods by Virtual Nodes.
type VNAffinity struct {
	members *members // nil: the role is off
	objects *objects // nil: the role is off
	// schedulers is nil if the role is off.
	schedulers *schedulers

	filters []filterer
	scorers []scorer

	stopped sync.WaitGroup
	stop    context.CancelFunc
}

// filterer is a role that may refuse nodes. What it returns means what it means in the framework's interfaces; its filter has
// to let every node pass where its preFilter has skipped.
type filterer interface {
	preFilter(context.Context, fwk.CycleState, *corev1.Pod, []fwk.NodeInfo) (*fwk.PreFilterResult, *fwk.Status)
	addPod(state fwk.CycleState, pod *corev1.Pod, added fwk.PodInfo, node fwk.NodeInfo) *fwk.Status
	removePod(state fwk.CycleState, pod *corev1.Pod, removed fwk.PodInfo, node fwk.NodeInfo) *fwk.Status
	filter(context.Context, fwk.CycleState, *corev1.Pod, fwk.NodeInfo) *fwk.Status
	events() []fwk.ClusterEventWithHint
}

// scorer is a role that prefers nodes. A pod is scored by the first role that does not skip it.
type scorer interface {
	preScore(context.Context, fwk.CycleState, *corev1.Pod, []fwk.NodeInfo) *fwk.Status
	score(fwk.CycleState, *corev1.Pod, fwk.NodeInfo) (int64, *fwk.Status)
	normalizeScore(fwk.CycleState, *corev1.Pod, fwk.NodeScoreList) *fwk.Status
	// serves says whether the role has to do with the pod at all.
	serves(*corev1.Pod) bool
}

var (
	_ fwk.PreFilterPlugin     = &VNAffinity{}
	_ fwk.PreFilterExtensions = &VNAffinity{}
	_ fwk.FilterPlugin        = &VNAffinity{}
	_ fwk.PreScorePlugin      = &VNAffinity{}
	_ fwk.ScorePlugin         = &VNAffinity{}
	_ fwk.ScoreExtensions     = &VNAffinity{}
	_ fwk.SignPlugin          = &VNAffinity{}
	_ fwk.EnqueueExtensions   = &VNAffinity{}
	_ io.Closer               = &VNAffinity{}
)

// Factory returns the plugin's factory. configFile, which may be nil, names the file that the args come from, for errors.
// leadsAlone, which may be nil, says whether the process waits to be elected leader, which the role schedulers excludes.
func Factory(configFile func() string, leadsAlone func() (bool, error)) func(context.Context, runtime.Object, fwk.Handle) (fwk.Plugin, error) {
	seats := &seats{leadsAlone: leadsAlone}
	return func(ctx context.Context, obj runtime.Object, handle fwk.Handle) (fwk.Plugin, error) {
		var plugin fwk.Plugin
		err := seats.check(obj, handle)
		if err == nil {
			plugin, err = New(ctx, obj, handle)
		}
		if err != nil && configFile != nil && configFile() != "" {
			return nil, fmt.Errorf("configuration file %s: pluginConfig %s: %w", configFile(), Name, err)
		}
		return plugin, err
	}
}

// New returns the plugin and starts its informers, which run until ctx ends. Wrong args are an error that names the field and
// the value.
func New(ctx context.Context, obj runtime.Object, handle fwk.Handle) (fwk.Plugin, error) {
	args, err := decodeArgs(obj)
	if err != nil {
		return nil, fmt.Errorf("args: %w", err)
	}
	logger := klog.LoggerWithName(klog.FromContext(ctx), Name)
	p := &VNAffinity{}
	ctx, p.stop = context.WithCancel(ctx)
	if args.Schedulers != nil {
		var run []func(context.Context)
		if p.schedulers, run, err = joinSchedulers(args.Schedulers, handle, logger); err != nil {
			return nil, err
		}
		p.filters = append(p.filters, p.schedulers)
		for _, f := range run {
			p.stopped.Go(func() { f(ctx) })
		}
	}
	if args.Members == nil && args.Objects == nil {
		return p, nil
	}
	groups := newGroups(logger)
	if err := p.placeBy(args, handle, groups, logger); err != nil {
		return nil, err
	}
	run, err := groups.watch(handle.KubeConfig(), args)
	if err != nil {
		return nil, err
	}
	for _, informer := range run {
		p.stopped.Go(func() { informer(ctx) })
	}
	return p, nil
}

// placeBy turns the roles Members and Objects on, as the args say.
func (p *VNAffinity) placeBy(
	args *configv1alpha1.VNAffinityArgs, handle fwk.Handle, groups *groups, logger klog.Logger,
) (err error) {
	if args.Members != nil {
		if p.members, err = newMembers(args.Members, handle, groups, logger); err != nil {
			return err
		}
		if len(p.members.limits) > 0 {
			p.filters = append(p.filters, p.members)
		}
		p.scorers = append(p.scorers, p.members)
	}
	if args.Objects != nil {
		if p.objects, err = newObjects(args.Objects, handle, groups); err != nil {
			return err
		}
		p.scorers = append(p.scorers, p.objects)
	}
	return nil
}

// Name returns name of the plugin. It is used in logs, etc.
func (p *VNAffinity) Name() string {
	return Name
}

// Close stops the plugin's informers.
func (p *VNAffinity) Close() error {
	p.stop()
	p.stopped.Wait()
	return nil
}

// PreFilter lets every role that may refuse nodes prepare. It skips when all of them do.
func (p *VNAffinity) PreFilter(
	ctx context.Context, state fwk.CycleState, pod *corev1.Pod, nodes []fwk.NodeInfo,
) (*fwk.PreFilterResult, *fwk.Status) {
	var result *fwk.PreFilterResult
	concerned := false
	for _, role := range p.filters {
		r, status := role.preFilter(ctx, state, pod, nodes)
		switch {
		case status.IsSkip():
		case !status.IsSuccess():
			return nil, status
		default:
			concerned = true
			result = result.Merge(r)
		}
	}
	if !concerned {
		return nil, fwk.NewStatus(fwk.Skip)
	}
	return result, nil
}

// PreFilterExtensions returns AddPod and RemovePod, by which preemption asks what would be if pods came and went.
func (p *VNAffinity) PreFilterExtensions() fwk.PreFilterExtensions {
	return p
}

// AddPod counts a pod as if it were on the node.
func (p *VNAffinity) AddPod(
	_ context.Context, state fwk.CycleState, pod *corev1.Pod, added fwk.PodInfo, node fwk.NodeInfo,
) *fwk.Status {
	for _, role := range p.filters {
		if status := role.addPod(state, pod, added, node); !status.IsSuccess() {
			return status
		}
	}
	return nil
}

// RemovePod counts a pod as if it were not on the node.
func (p *VNAffinity) RemovePod(
	_ context.Context, state fwk.CycleState, pod *corev1.Pod, removed fwk.PodInfo, node fwk.NodeInfo,
) *fwk.Status {
	for _, role := range p.filters {
		if status := role.removePod(state, pod, removed, node); !status.IsSuccess() {
			return status
		}
	}
	return nil
}

// Filter refuses a node that any role refuses.
func (p *VNAffinity) Filter(ctx context.Context, state fwk.CycleState, pod *corev1.Pod, node fwk.NodeInfo) *fwk.Status {
	for _, role := range p.filters {
		if status := role.filter(ctx, state, pod, node); !status.IsSuccess() {
			return status
		}
	}
	return nil
}

const scorerKey = "PreScore" + Name

// chosenScorer is the role that scores the pod of a scheduling cycle.
type chosenScorer struct{ scorer }

// Clone implements fwk.StateData. Nobody changes what it holds.
func (c chosenScorer) Clone() fwk.StateData { return c }

// PreScore finds the role that scores the pod. It skips when there is none.
func (p *VNAffinity) PreScore(
	ctx context.Context, state fwk.CycleState, pod *corev1.Pod, nodes []fwk.NodeInfo,
) *fwk.Status {
	for _, role := range p.scorers {
		if status := role.preScore(ctx, state, pod, nodes); !status.IsSkip() {
			state.Write(scorerKey, chosenScorer{role})
			return status
		}
	}
	return fwk.NewStatus(fwk.Skip)
}

func scorerOf(state fwk.CycleState) (scorer, *fwk.Status) {
	data, err := state.Read(scorerKey)
	if err != nil {
		return nil, fwk.AsStatus(fmt.Errorf("reading %q from the cycle's state: %w", scorerKey, err))
	}
	return data.(chosenScorer).scorer, nil
}

// Score says what speaks against a node, by the role that scores the pod.
func (p *VNAffinity) Score(
	_ context.Context, state fwk.CycleState, pod *corev1.Pod, node fwk.NodeInfo,
) (int64, *fwk.Status) {
	role, status := scorerOf(state)
	if status != nil {
		return 0, status
	}
	return role.score(state, pod, node)
}

// ScoreExtensions returns NormalizeScore.
func (p *VNAffinity) ScoreExtensions() fwk.ScoreExtensions {
	return p
}

// NormalizeScore turns what speaks against the nodes into scores from 0 to 100.
func (p *VNAffinity) NormalizeScore(
	_ context.Context, state fwk.CycleState, pod *corev1.Pod, scores fwk.NodeScoreList,
) *fwk.Status {
	role, status := scorerOf(state)
	if status != nil {
		return status
	}
	return role.normalizeScore(state, pod, scores)
}

// SignPod adds nothing to the signature of a pod of no role, and refuses to sign one of a role.
func (p *VNAffinity) SignPod(_ context.Context, pod *corev1.Pod) ([]fwk.SignFragment, *fwk.Status) {
	for _, role := range p.scorers {
		if role.serves(pod) {
			return nil, fwk.NewStatus(fwk.Unschedulable, "where a pod by Virtual Nodes goes depends on where the last one went")
		}
	}
	return nil, nil
}

// EventsToRegister returns the events that may make a pod fit that a role has refused.
func (p *VNAffinity) EventsToRegister(context.Context) ([]fwk.ClusterEventWithHint, error) {
	var events []fwk.ClusterEventWithHint
	for _, role := range p.filters {
		events = append(events, role.events()...)
	}
	return events, nil
}
