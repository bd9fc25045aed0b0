package playground

import (
	"fmt"
	"maps"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	"github.com/drover-sh/drover/capacity"
)

// ScaleFromZero has no node at all: the scheduler does not even call its plugins, and the back-stop writes the
// requests.
func ScaleFromZero() Story {
	const pods = 3
	return Story{
		Name:      "scale-from-zero",
		Title:     "no node in the cluster at all: the back-stop asks in the scheduler's place",
		Offerings: []configv1alpha1.Offering{cpuOffering(100)},
		Play: func(s *Stage) {
			s.AtMostNodes(1)
			first := deployment("first", pods, template("first", "cpu", "1", "memory", "1Gi"))
			s.Create(first)
			s.AwaitPods("first", pods)
			s.Step("%d pods created in an empty cluster", pods)
			s.AwaitRequests(pods)
			s.AwaitRunning("first", pods)
			s.AwaitNodes(1)
			s.Step("1 node, %d pods running on it", pods)
			s.Delete(first)
			s.AwaitNoDemand("first")
			s.AwaitNodes(0)
			s.Step("deleted: the cluster is empty again")
		},
	}
}

// Taints sells a cheap offering that is tainted: it is never launched for a pod that does not tolerate it.
func Taints() Story {
	const pods = 12
	spot := cpuOffering(100)
	spot.Name, spot.InstanceType, spot.Cost, spot.Taints = "cpu-spot", "m6i.4xlarge-spot", 0.21, []string{"spot=true:NoSchedule"}
	return Story{
		Name:      "taints",
		Title:     "a tainted offering costs a quarter; only pods that tolerate the taint get it",
		Offerings: []configv1alpha1.Offering{cpuOffering(100), spot},
		Play: func(s *Stage) {
			s.AddStaticNode("system-1", quantities("cpu", "600m", "memory", "4Gi", "pods", "110"))
			s.AtMostNodes(2)
			// It runs on every node: 16 CPUs are 15 and a half for others.
			s.Create(daemonSet("agent", tolerating(template("agent", "cpu", "500m", "memory", "256Mi"), "spot")))
			strict := deployment("strict", pods, template("strict", "cpu", "1", "memory", "1Gi"))
			s.Create(strict)
			s.AwaitRunning("strict", pods)
			s.Look(func(w *World) {
				if types := places(w.Nodes(), typeLabel); types[spot.InstanceType] > 0 || len(w.Nodes()) != 1 {
					s.fail(fmt.Errorf("expected: 1 node without a taint; seen: %s", say(types)))
				}
			})
			s.Step("%d pods without a toleration run on 1 node of the untainted offering", pods)
			tolerant := deployment("tolerant", pods, tolerating(template("tolerant", "cpu", "1", "memory", "1Gi"), "spot"))
			s.Create(tolerant)
			s.AwaitRunning("tolerant", pods)
			s.AwaitNodes(2)
			s.Look(func(w *World) {
				types := places(w.Nodes(), typeLabel)
				if types[spot.InstanceType] != 1 {
					s.fail(fmt.Errorf("expected: 1 tainted node for the pods that tolerate it; seen: %s", say(types)))
				}
				s.Step("%d pods that tolerate the taint run, too: %s", pods, say(types))
			})
			s.Table("get", "nodes", "-L", typeLabel)
			s.Delete(strict, tolerant)
			s.AwaitNoDemand("strict")
			s.AwaitNoDemand("tolerant")
			s.AwaitNodes(0)
			s.Step("deleted, nodes gone")
		},
	}
}

// ConfigFailure has pods that no node could help.
func ConfigFailure() Story {
	return Story{
		Name:      "config-failure",
		Title:     "pods that no new node could help: no request, no node, one event that says why",
		Offerings: []configv1alpha1.Offering{cpuOffering(100)},
		Play: func(s *Stage) {
			s.AddStaticNode("system-1", quantities("cpu", "4", "memory", "16Gi", "pods", "110"))
			s.AtMostNodes(0)
			s.Always("no request", func(w *World) string {
				if requests := w.Requests(); len(requests) > 0 {
					return "request " + requests[0].Name
				}
				return ""
			})

			missing := template("missing-claim", "cpu", "1")
			missing.Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{
				PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "not-there"},
			}}}
			pinned := template("pinned", "cpu", "1")
			pinned.Spec.Affinity = requireField("metadata.name", "node-of-old")
			impossible := template("impossible", "cpu", "1")
			impossible.Spec.Affinity = requireLabel("planet", "mars")
			// It has a node by name, so that no scheduler looks at it. The node does not exist; the back-stop says so.
			bound := template("bound", "cpu", "1")
			bound.Spec.NodeName = "node-of-old"
			s.Create(pod("missing-claim", missing), pod("pinned", pinned), pod("impossible", impossible), pod("bound", bound))
			s.Step("4 pods: one with a missing PersistentVolumeClaim, one pinned to a node that is no more, one that wants a " +
				"label that nothing has, one with spec.nodeName")

			expected := map[string]string{
				"missing-claim": capacity.ReasonVolumeClaimMissing,
				"pinned":        capacity.ReasonTiedToNode,
				"impossible":    capacity.ReasonNoOfferingMatches,
				"bound":         capacity.ReasonNodeNameSet,
			}
			s.Await("an event that says why, for each pod", func(w *World) (bool, string) {
				reasons := map[string]string{}
				for _, e := range w.CapacityEvents() {
					reasons[e.InvolvedObject.Name] = e.Reason
				}
				return maps.Equal(reasons, expected), fmt.Sprint(reasons)
			})
			s.AwaitRollUps(5)
			s.Look(func(w *World) {
				events := w.CapacityEvents()
				for _, e := range events {
					s.Step("%s: %s", e.InvolvedObject.Name, e.Message)
				}
				if len(events) != len(expected) {
					s.Fail("expected: %d events, one for each pod; seen: %d", len(expected), len(events))
				}
			})
			s.Step("one event each, no request, no node; five roll-ups later still so")
		},
	}
}

// StaticNodes has nodes that the autoscaler does not own: what they carry is nobody's demand.
func StaticNodes() Story {
	const nodes, perNode = 10, 10
	return Story{
		Name:      "static-nodes",
		Title:     "10 nodes of the cluster's own run 100 pods: nothing is launched for them, and nothing oscillates",
		Offerings: []configv1alpha1.Offering{cpuOffering(100)},
		Play: func(s *Stage) {
			s.AtMostNodes(1)
			for i := range nodes {
				s.AddStaticNode(fmt.Sprintf("static-%d", i+1), quantities("cpu", "10", "memory", "64Gi", "pods", "110"))
			}
			web := deployment("web", nodes*perNode, template("web", "cpu", "1", "memory", "1Gi"))
			s.Create(web)
			s.AwaitRunning("web", nodes*perNode)
			s.Step("%d pods run on %d static nodes, which are full", nodes*perNode, nodes)
			s.AwaitRollUps(5)
			s.Look(func(w *World) {
				if rows, _ := w.RollUp(); rows > 0 || len(w.Requests()) > 0 || len(w.Nodes()) > 0 {
					s.fail(fmt.Errorf("expected: no demand; seen: %d rows, %d requests, %d nodes",
						rows, len(w.Requests()), len(w.Nodes())))
				}
			})
			s.Step("no request, an empty roll-up, no node")

			s.Create(pod("late", template("late", "cpu", "1", "memory", "1Gi")))
			s.AwaitRequests(nodes*perNode + 1)
			// Room on a static node: the pod takes it, whatever has become of the launch.
			web.Spec.Replicas = new(int32)
			*web.Spec.Replicas = nodes * (perNode - 1)
			s.Update(web)
			s.AwaitRunning("late", 1)
			s.Step("the deployment shrinks; the pod runs")
			var on string
			s.Look(func(w *World) { on = w.PodsOf("late")[0].Spec.NodeName })
			if len(on) > 6 && on[:6] == "static" {
				s.AwaitNodes(0)
				s.AwaitRollUps(5)
				s.AwaitNodes(0)
				s.Step("it runs on %s; what was launched for it has been given back", on)
			} else {
				s.AwaitNodes(1)
				s.Step("the new node %s was quicker, and stays for it", on)
			}
		},
	}
}

// RequestWithoutPod is made by hand: it holds its node until it is deleted.
func RequestWithoutPod() Story {
	return Story{
		Name:      "request-without-pod",
		Title:     "a request made with kubectl holds a node until it is deleted, with no pod in sight",
		Offerings: []configv1alpha1.Offering{cpuOffering(100)},
		Play: func(s *Stage) {
			s.AtMostNodes(1)
			reserve := request("reserve", "cpu", "12", "memory", "32Gi")
			s.Create(reserve)
			s.Step("1 CapacityRequest created, no pod")
			s.AwaitRequests(1)
			s.AwaitNodes(1)
			s.Step("1 node")
			var before string
			s.Look(func(w *World) { before = w.Nodes()[0].Name })
			s.Always("the node stays while the request is there", func(w *World) string {
				if len(w.Requests()) == 1 && w.Node(before) == nil {
					return "node " + before + " is gone"
				}
				return ""
			})
			s.AwaitRollUps(8)
			s.Step("eight roll-ups later the node is still there, empty")
			s.Table("get", everything, "-A")
			s.Delete(reserve)
			s.AwaitNodes(0)
			s.Step("request deleted, node gone")
		},
	}
}

func requireField(field, value string) *corev1.Affinity {
	return nodeAffinity(corev1.NodeSelectorTerm{MatchFields: []corev1.NodeSelectorRequirement{
		{Key: field, Operator: corev1.NodeSelectorOpIn, Values: []string{value}},
	}})
}

func requireLabel(label, value string) *corev1.Affinity {
	return nodeAffinity(corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{
		{Key: label, Operator: corev1.NodeSelectorOpIn, Values: []string{value}},
	}})
}

func nodeAffinity(term corev1.NodeSelectorTerm) *corev1.Affinity {
	return &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
		RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{term}},
	}}
}

func appSelector(app string) *metav1.LabelSelector {
	return &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}
}

// remember notes where the pods of an app run, by UID.
func (s *Stage) remember(app string) map[types.UID]string {
	where := map[types.UID]string{}
	s.Look(func(w *World) {
		for _, p := range w.PodsOf(app) {
			where[p.UID] = p.Spec.NodeName
		}
	})
	return where
}

// mustStay fails unless the very same pods still run where they did.
func (s *Stage) mustStay(app string, where map[types.UID]string) {
	now := map[types.UID]string{}
	s.Look(func(w *World) {
		for _, p := range w.PodsOf(app) {
			if p.Status.Phase == corev1.PodRunning && p.DeletionTimestamp == nil {
				now[p.UID] = p.Spec.NodeName
			}
		}
	})
	if !maps.Equal(where, now) {
		s.Fail("expected: the %d pods of %s where they were; seen: %v instead of %v", len(where), app, now, where)
	}
}
