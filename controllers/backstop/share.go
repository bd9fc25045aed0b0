package backstop

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/drover-sh/drover/controllers/sharded"
	"github.com/drover-sh/drover/sharding"
)

// wholeKey is the key of all pods in demand mode RequestsOnly, where requests are held back for which a node on its way has
// room: that room is one account, and two members would each count on all of it.
const wholeKey = "backstop.drover.sh/upcoming"

// share is the pods that this replica serves, where it is one of several. A pod is hashed by its own name, here and not by
// a label: every replica caches all pods anyway, for the roll-up and for affinity, so that a label would save no memory
// and cost a write for each pod, or a webhook before each one's creation. A request has one name, whoever writes it, so a
// pod that changes hands waits for nothing.
type share struct {
	reader client.Reader
	group  *sharded.Group // nil: all pods
	whole  bool           // all pods are one member's
	forget func(types.UID)
}

func (s *share) keyOf(pod client.ObjectKey) string {
	if s.whole {
		return wholeKey
	}
	return sharding.ObjectRef{Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name}.Key()
}

// keys bind the controller to the share.
func (s *share) keys(r *Reconciler) sharded.Keys {
	return sharded.Keys{
		Of: func(req reconcile.Request) string { return s.keyOf(req.NamespacedName) },
		List: func(ctx context.Context) (list []reconcile.Request, err error) {
			err = s.pods(ctx, func(pod *corev1.Pod) {
				if _, waits := waitsSince(pod); waits && r.Serves(pod) {
					list = append(list, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(pod)})
				}
			})
			return list, err
		},
		Lost: func(ctx context.Context, _ sharded.Turn, lost func(reconcile.Request) bool) {
			// What cannot be listed is forgotten when the writer comes to it, or when the pod gets its node.
			_ = s.pods(ctx, func(pod *corev1.Pod) {
				key := client.ObjectKeyFromObject(pod)
				if lost(reconcile.Request{NamespacedName: key}) && !s.group.Owns(s.keyOf(key)) {
					s.forget(pod.UID)
				}
			})
		},
	}
}

// pods visits the pods that have no node, and those that may have been created with one.
func (s *share) pods(ctx context.Context, visit func(*corev1.Pod)) error {
	var list corev1.PodList
	if err := s.reader.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return err
	}
	for i := range list.Items {
		if pod := &list.Items[i]; pod.Spec.NodeName == "" || unstarted(pod) {
			visit(pod)
		}
	}
	return nil
}

// pending narrows what the writer still writes for to the share: it may have been told of a pod before that went to another
// member.
func (s *share) pending(pending func(*corev1.Pod) bool) func(*corev1.Pod) bool {
	if s.group == nil {
		return pending
	}
	return func(pod *corev1.Pod) bool {
		return s.group.Owns(s.keyOf(client.ObjectKeyFromObject(pod))) && pending(pod)
	}
}

// runnable runs on the leader, or on every replica.
type runnable struct {
	run     func(context.Context)
	leading bool
}

var _ manager.LeaderElectionRunnable = runnable{}

// Start implements manager.Runnable.
func (r runnable) Start(ctx context.Context) error { r.run(ctx); return nil }

// NeedLeaderElection implements manager.LeaderElectionRunnable.
func (r runnable) NeedLeaderElection() bool { return r.leading }
