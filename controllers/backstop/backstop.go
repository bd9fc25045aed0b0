// Package backstop is the pod back-stop (section 12): it asks for capacity for pods that the scheduler plugin never sees. Those
// are pods of a scheduler without the plugin, and failures for which the scheduler calls no PostFilter: a cluster without
// any node, and failures after the filters.
//
// It reads what the scheduler says of a pod (condition PodScheduled=False, reason Unschedulable) and decides from the pod, its
// volumes and the AvailableCapacity templates; of what each node objected to, the API has only the condition's message, and from
// it the back-stop takes what would speak against a request: a gang that is not complete, a device that is in use. It writes through package demand
// under the names that the plugin uses, and later than the plugin by Delay, so that both at once make one request.
//
// A pod that was created with spec.nodeName is no scheduler's. Where that node does not exist, the back-stop is the one that
// tells the pod so, by the event that the plugin would write.
//
// It never schedules, never deletes a request, and never looks at a pod that is gated or that a scheduler gave its node. Start
// reading at Reconciler.
package backstop

import (
	"context"
	"fmt"
	"os"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/controllers/sharded"
	"github.com/drover-sh/drover/demand"
	"github.com/drover-sh/drover/demand/podgroups"
)

// source names the back-stop's writer in metrics, events and logs.
const source = "backstop"

// minDelay bounds how soon a pod is looked at again.
const minDelay = time.Millisecond

// Options configure the back-stop.
type Options struct {
	// Config is its part of the manager's configuration, with defaults filled.
	Config configv1alpha1.BackstopConfig
	// Namespace holds AvailableCapacity and UpcomingNode. Default fleet-system.
	Namespace string
	// Demand is Total (default) or RequestsOnly.
	Demand configv1alpha1.DemandMode
	// Group makes the back-stop run on every replica, each of them serving the pods that are its own. It is the group of the
	// manager. Nil: the leader serves all.
	Group *sharded.Group
	// Clock is injected by tests. Default: the real one.
	Clock clock.WithTicker
}

// SetupWithManager adds the back-stop to mgr; nothing where Config says that it is off. The manager's scheme has to know
// corev1, storagev1 and fleet.lucy.sh. The error says what could not be built.
func SetupWithManager(mgr ctrl.Manager, opts Options) error {
	if on := opts.Config.Enabled; on != nil && !*on {
		return nil
	}
	if opts.Clock == nil {
		opts.Clock = clock.RealClock{}
	}
	if opts.Namespace == "" {
		opts.Namespace = fleetv1alpha1.SystemNamespace
	}
	if err := demand.RegisterMetrics(metrics.Registry); err != nil {
		return fmt.Errorf("registering metrics: %w", err)
	}
	qps, burst := opts.Config.QPS, int(opts.Config.Burst)
	rest, err := demand.RESTClient(mgr.GetConfig(), qps, burst)
	if err != nil {
		return err
	}
	warnings, err := demand.EventsClient(mgr.GetConfig(), qps, burst)
	if err != nil {
		return err
	}
	logger := mgr.GetLogger().WithName(source)
	groups, err := podgroups.New(mgr.GetConfig(), logger)
	if err != nil {
		return err
	}
	reader := mgr.GetClient()
	share := &share{reader: reader, group: opts.Group, whole: opts.Demand == configv1alpha1.DemandRequestsOnly}
	judge := judgeOf(reader, opts.Namespace)
	judge.Clock = opts.Clock
	options := demand.Options{
		Source:   source,
		Requests: demand.NewRequests(rest),
		Events:   demand.NewEvents(warnings, "drover.sh/"+source, hostname()),
		Decide:   judge.Decide,
		Describe: demand.Describer{Groups: groups, Volumes: judge.Volumes}.Profile,
		Pending:  share.pending(pendingIn(reader)),
		QPS:      qps, Burst: burst,
		Clock:  opts.Clock,
		Logger: logger,
	}
	if opts.Demand == configv1alpha1.DemandRequestsOnly {
		options.Suppressor = demand.NewSuppressor()
	}
	writer, err := demand.NewWriter(options)
	if err != nil {
		return err
	}
	r := &Reconciler{
		Reader: reader,
		Writer: writer,
		Serves: servesFor(opts.Config),
		Delay:  delayOf(opts.Config),
		Clock:  opts.Clock,
	}
	if err := mgr.GetFieldIndexer().IndexField(context.Background(), &corev1.Pod{}, gangIndex, gangOf); err != nil {
		return fmt.Errorf("indexing pods by their group: %w", err)
	}
	groups.OnChange(verifierOf(reader, writer))
	share.forget = writer.Forget
	for _, run := range []func(context.Context){writer.Run, groups.Run} {
		// Runnables start when the reconciler does, and the manager waits for them when it stops.
		if err := mgr.Add(runnable{run, opts.Group == nil}); err != nil {
			return fmt.Errorf("adding the writer: %w", err)
		}
	}
	b := sharded.ControllerManagedBy(mgr).Named(source).
		For(&corev1.Pod{}, builder.WithPredicates(r.predicate())).
		Watches(&fleetv1alpha1.AvailableCapacity{}, observer{func(before, after client.Object) {
			if !sameTemplate(before, after) {
				writer.Recheck()
			}
		}}).
		WithOptions(controller.Options{MaxConcurrentReconciles: 4})
	if opts.Group != nil {
		b = b.ByKey(share.keys(r))
	}
	if options.Suppressor != nil {
		b = b.Watches(&fleetv1alpha1.UpcomingNode{}, observer{func(before, after client.Object) {
			feed(options.Suppressor, before, after)
		}})
	}
	if err := b.Complete(r); err != nil {
		return fmt.Errorf("building controller %s: %w", source, err)
	}
	return nil
}

func delayOf(c configv1alpha1.BackstopConfig) time.Duration {
	if c.Delay == nil {
		return configv1alpha1.DefaultBackstopDelay
	}
	return c.Delay.Duration
}

// servesFor says whether the back-stop serves a pod at all, whatever its state.
func servesFor(c configv1alpha1.BackstopConfig) func(*corev1.Pod) bool {
	names, namespaces := c.SchedulerNames, c.Namespaces
	return func(pod *corev1.Pod) bool {
		return (len(names) == 0 || slices.Contains(names, pod.Spec.SchedulerName)) &&
			(len(namespaces) == 0 || slices.Contains(namespaces, pod.Namespace)) &&
			!capacity.IsMirrorPod(pod) && !capacity.IsDaemonPod(pod)
	}
}

func pendingIn(reader client.Reader) func(*corev1.Pod) bool {
	return func(pod *corev1.Pod) bool {
		ctx, cancel := context.WithTimeout(context.Background(), readTimeout)
		defer cancel()
		var now corev1.Pod
		err := reader.Get(ctx, client.ObjectKeyFromObject(pod), &now)
		return err == nil && now.UID == pod.UID && now.DeletionTimestamp == nil &&
			(now.Spec.NodeName == "" || unstarted(&now))
	}
}

func hostname() string {
	name, err := os.Hostname()
	if err != nil {
		return source
	}
	return name
}
