package vnaffinity

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	"github.com/drover-sh/drover/controllers/sharded"
	"github.com/drover-sh/drover/sharding"
)

// A replica reads and writes pods and nodes by the rights that every kube-scheduler has; the hop is written to the status
// of the pod. What it needs as a member of its WatchGroup is the ClusterRole drover-watchgroup-member, in the group's
// namespace.

const (
	// leaveTimeout is how long a replica that stops waits until others have taken over what it had.
	leaveTimeout = 5 * time.Second
	// defaultQPS and defaultBurst are kube-scheduler's.
	defaultQPS, defaultBurst = 50, 100
)

// seats keeps a process from sitting twice in one group.
type seats struct {
	leadsAlone func() (bool, error)
	mu         sync.Mutex
	profile    string
}

// check refuses the role schedulers where it cannot work. Wrong args are New's to report.
func (s *seats) check(obj runtime.Object, handle fwk.Handle) error {
	args, err := decodeArgs(obj)
	if err != nil || args.Schedulers == nil {
		return nil
	}
	if s.leadsAlone != nil {
		alone, err := s.leadsAlone()
		if err != nil {
			return err
		}
		if alone {
			return errors.New("args: schedulers: replicas that are active at once wait for no election: leaderElection.leaderElect " +
				"has to be false, and is true")
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.profile != "" {
		return fmt.Errorf("args: schedulers: profile %s has them already, and a process has one seat in the group", s.profile)
	}
	s.profile = handle.ProfileName()
	return nil
}

// joinSchedulers makes this process a member of its group, and returns what has to run.
func joinSchedulers(args *configv1alpha1.VNAffinitySchedulers, handle fwk.Handle, logger klog.Logger) (
	*schedulers, []func(context.Context), error) {
	if err := registerSchedulerMetrics(legacyregistry.Registerer()); err != nil {
		return nil, nil, fmt.Errorf("registering metrics: %w", err)
	}
	if err := sharded.RegisterMetrics(legacyregistry.Registerer()); err != nil {
		return nil, nil, fmt.Errorf("registering metrics: %w", err)
	}
	unlimited := rest.CopyConfig(handle.KubeConfig())
	qps, burst := unlimited.QPS, unlimited.Burst
	unlimited.RateLimiter, unlimited.QPS = nil, -1
	client, err := kubernetes.NewForConfig(unlimited)
	if err != nil {
		return nil, nil, err
	}
	metadataClient, err := metadata.NewForConfig(unlimited)
	if err != nil {
		return nil, nil, err
	}
	factory := handle.SharedInformerFactory()
	pods := watchedCache{
		client: metadataClient.Resource(podResource.WithVersion("v1")), store: factory.Core().V1().Pods().Informer().GetIndexer(),
		// The scheduler watches no other pods.
		fields: "status.phase!=Succeeded,status.phase!=Failed",
	}
	nodes := watchedCache{
		client: metadataClient.Resource(nodeResource.WithVersion("v1")), store: factory.Core().V1().Nodes().Informer().GetIndexer(),
	}
	membership, err := sharded.NewMembership(unlimited, sharded.Options{
		WatchGroup: args.WatchGroup, Namespace: args.Namespace, Member: args.Member, LeaveTimeout: leaveTimeout,
	}, map[schema.GroupResource]sharded.Resource{
		podResource: {Cache: pods},
		// What is free on a node is known once all pods are that the last owner has bound to it.
		nodeResource: {Cache: nodes, Reads: []schema.GroupResource{podResource}},
	})
	if err != nil {
		return nil, nil, fmt.Errorf("schedulers: %w", err)
	}
	s, err := newSchedulers(handle, membership, func(vn sharding.VirtualNode) (work, error) {
		return membership.Begin(nodeResource, vn)
	}, client, limiterOf(qps, burst), logger)
	if err != nil {
		return nil, nil, err
	}
	return s, []func(context.Context){s.run, func(ctx context.Context) {
		if err := membership.Run(ctx); err != nil {
			logger.Error(err, "Being a member of a WatchGroup", "watchGroup", args.WatchGroup)
		}
	}}, nil
}

func limiterOf(qps float32, burst int) flowcontrol.RateLimiter {
	switch {
	case qps < 0:
		return flowcontrol.NewFakeAlwaysRateLimiter()
	case qps == 0:
		return flowcontrol.NewTokenBucketRateLimiter(defaultQPS, defaultBurst)
	default:
		return flowcontrol.NewTokenBucketRateLimiter(qps, max(burst, 1))
	}
}

// A watchedCache is one that a watch of the scheduler fills.
type watchedCache struct {
	client metadata.Getter
	store  cache.Store
	fields string
}

const (
	reachPoll     = 10 * time.Millisecond
	reachPatience = 250 * time.Millisecond
	reachPage     = 1000
)

// Reach implements sharded.Cache. The version of a consistent list of one object is the one to reach. Where nothing happens
// the watch names no such version before its next bookmark, a minute later; then the newest object of a list of all has to
// be there, and all that may be missing is that some are gone.
func (c watchedCache) Reach(ctx context.Context) (string, error) {
	list, err := c.client.List(ctx, metav1.ListOptions{Limit: 1, FieldSelector: c.fields})
	if err != nil {
		return "", err
	}
	patient, cancel := context.WithTimeout(ctx, reachPatience)
	defer cancel()
	if version, err := c.reached(patient, list.ResourceVersion); err == nil {
		return version, nil
	}
	newest, upTo := "", ""
	options := metav1.ListOptions{Limit: reachPage, FieldSelector: c.fields}
	for {
		page, err := c.client.List(ctx, options)
		if err != nil {
			return "", err
		}
		if upTo == "" {
			upTo = page.ResourceVersion
		}
		for i := range page.Items {
			if order, err := resourceversion.CompareResourceVersion(page.Items[i].ResourceVersion, newest); newest == "" || err == nil && order > 0 {
				newest = page.Items[i].ResourceVersion
			}
		}
		if options.Continue = page.Continue; options.Continue == "" {
			break
		}
	}
	if newest == "" {
		return upTo, nil // there are none
	}
	_, err = c.reached(ctx, newest)
	return upTo, err
}

// Version implements sharded.Cache.
func (c watchedCache) Version() string { return c.store.LastStoreSyncResourceVersion() }

// reached waits until the cache shows everything up to version.
func (c watchedCache) reached(ctx context.Context, version string) (string, error) {
	ticks := time.NewTicker(reachPoll)
	defer ticks.Stop()
	for {
		now := c.store.LastStoreSyncResourceVersion()
		if order, err := resourceversion.CompareResourceVersion(now, version); now != "" && err == nil && order >= 0 {
			return now, nil
		}
		select {
		case <-ctx.Done():
			return "", ctx.Err()
		case <-ticks.C:
		}
	}
}
