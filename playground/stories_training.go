package playground

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
)

const everything = "capacityrequests,availablecapacity,upcomingnodes"

// Training is the source document's first story: a job of 64 pods of 8 GPUs whose nodes have to share a rack.
func Training() Story {
	const pods = 64
	return Story{
		Name:  "training",
		Title: "64 pods of 8 GPUs each ask to share a rack; 64 nodes come, in one rack, and go with the job",
		Offerings: []configv1alpha1.Offering{
			cpuOffering(100),
			// The larger racks come last in the alphabet, and no two small ones would do.
			gpuOffering(rack("us-east-1a", "rack-1a-06", 40), rack("us-east-1a", "rack-1a-07", 64),
				rack("us-east-1b", "rack-1b-03", 52)),
		},
		Play: func(s *Stage) {
			s.AddStaticNode("system-1", quantities("cpu", "4", "memory", "16Gi", "pods", "110"))
			s.AtMostNodes(pods)
			trainer := job("trainer", pods, sharing(training("trainer"), rackLabel))
			s.Create(trainer)
			s.AwaitPods("trainer", pods)
			s.Step("%d pods created; no node has a GPU", pods)
			s.AwaitRequests(pods)
			s.StepRollUp(2)
			s.Table("get", everything, "-A")
			s.AwaitNodes(pods)
			s.awaitOneRack(pods)
			s.AwaitRunning("trainer", pods)
			s.Step("%d pods running", pods)
			s.Table("get", "nodes", "-L", rackLabel, "-L", typeLabel)
			s.AwaitRollUps(3)
			s.Step("three roll-ups later: nothing launched, nothing reclaimed")

			s.Delete(trainer)
			s.AwaitNoDemand("trainer")
			s.Step("job deleted: no pod, no request")
			s.AwaitNodes(0)
			s.Step("%d nodes gone", pods)
		},
	}
}

func (s *Stage) awaitOneRack(n int) {
	s.Look(func(w *World) {
		racks := places(w.Nodes(), rackLabel)
		if len(racks) != 1 || racks[""] > 0 {
			s.fail(fmt.Errorf("expected: %d nodes in one rack; seen: %s", n, say(racks)))
			return
		}
		s.Step("%d nodes Ready: %s", n, say(racks))
	})
}

// Packing shows that small pods share nodes, and that what a DaemonSet takes is not counted twice.
func Packing() Story {
	const pods, limit = 100, 7
	return Story{
		Name:      "packing",
		Title:     "100 pods of 1 CPU on nodes of 16 CPUs, a DaemonSet on each: at most 7 nodes, not 100",
		Offerings: []configv1alpha1.Offering{cpuOffering(100)},
		Play: func(s *Stage) {
			s.AddStaticNode("system-1", quantities("cpu", "600m", "memory", "4Gi", "pods", "110"))
			s.AtMostNodes(limit)
			// As node agents are: where other pods are quicker on a new node, it takes the place of one.
			agent := template("agent", "cpu", "500m", "memory", "256Mi")
			agent.Spec.PriorityClassName = "system-node-critical"
			s.Create(daemonSet("agent", agent))
			s.Await("the DaemonSet's pod on the static node", func(w *World) (bool, string) {
				n := countRunning(w.DaemonPods())
				return n == 1, count(n, "pod")
			})
			web := deployment("web", pods, template("web", "cpu", "1", "memory", "1Gi"))
			s.Create(web)
			s.AwaitPods("web", pods)
			s.Step("%d pods created", pods)
			s.AwaitRequests(pods)
			s.StepRollUp(2)
			s.Await(fmt.Sprintf("%d pods running, and one of the DaemonSet on every node", pods), func(w *World) (bool, string) {
				running, agents := countRunning(w.PodsOf("web")), countRunning(w.DaemonPods())
				return running == pods && len(w.Nodes()) > 0 && agents == len(w.Nodes())+1,
					fmt.Sprintf("%d pods, %d of the DaemonSet", running, agents)
			})
			s.Look(func(w *World) {
				s.Step("%d pods running on %s, beside the DaemonSet's", pods, count(len(w.Nodes()), "node"))
			})
			s.AwaitRollUps(5)
			s.Step("five roll-ups later: still so")
			s.Delete(web)
			s.AwaitNoDemand("web")
			s.AwaitNodes(0)
			s.Step("deployment deleted, nodes gone")
		},
	}
}

// Stockout asks for more than there is, until there is more.
func Stockout() Story {
	const pods, stock = 64, 32
	return Story{
		Name:      "stockout",
		Title:     "64 nodes needed, 32 to be had: 32 come, 32 pods wait; when stock returns, it heals",
		Offerings: []configv1alpha1.Offering{cpuOffering(100), gpuOffering(rack("us-east-1a", "rack-1a-07", stock))},
		Play: func(s *Stage) {
			s.AddStaticNode("system-1", quantities("cpu", "4", "memory", "16Gi", "pods", "110"))
			s.AtMostNodes(pods)
			trainer := job("trainer", pods, training("trainer"))
			s.Create(trainer)
			s.AwaitPods("trainer", pods)
			s.Step("%d pods created", pods)
			s.AwaitRequests(pods)
			s.AwaitRunning("trainer", stock)
			s.AwaitNodes(stock)
			s.Step("%d nodes came, %d pods run, %d wait", stock, stock, pods-stock)
			s.Table("get", "availablecapacity", "-A")
			s.AwaitRollUps(5)
			s.Look(func(w *World) {
				if nodes, running := len(w.Nodes()), w.Running(); nodes != stock || running != stock {
					s.fail(fmt.Errorf("expected: still %d nodes and as many running pods; seen: %d nodes, %d running",
						stock, nodes, running))
				}
			})
			s.Step("five roll-ups later: still %d nodes, nothing else was tried", stock)

			s.SetOfferings([]configv1alpha1.Offering{cpuOffering(100),
				gpuOffering(rack("us-east-1a", "rack-1a-07", stock), rack("us-east-1b", "rack-1b-03", stock))})
			s.Step("stock returns: %d more, in another rack", stock)
			s.AwaitRunning("trainer", pods)
			s.AwaitNodes(pods)
			s.Step("%d pods running on %d nodes", pods, pods)
			s.Delete(trainer)
			s.AwaitNoDemand("trainer")
			s.AwaitNodes(0)
			s.Step("job deleted, nodes gone")
		},
	}
}

// Withdrawal ends one of two workloads: its nodes go, and nothing else is disturbed.
func Withdrawal() Story {
	const gpus, batch = 64, 10
	return Story{
		Name:  "withdrawal",
		Title: "64 GPU pods and 10 batch pods; the training ends: its nodes go, and no batch pod moves",
		Offerings: []configv1alpha1.Offering{cpuOffering(100),
			gpuOffering(rack("us-east-1a", "rack-1a-07", gpus))},
		Play: func(s *Stage) {
			s.AddStaticNode("system-1", quantities("cpu", "4", "memory", "16Gi", "pods", "110"))
			s.AtMostNodes(gpus + batch)
			trainer := job("trainer", gpus, training("trainer"))
			etl := template("etl", "cpu", "12", "memory", "32Gi")
			etl.Spec.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{spreadOverZones("etl")}
			s.Create(trainer, job("etl", batch, etl))
			s.AwaitPods("trainer", gpus)
			s.AwaitPods("etl", batch)
			s.Step("%d pods created", gpus+batch)
			s.AwaitRequests(gpus + batch)
			s.StepRollUp(2)
			s.AwaitRunning("trainer", gpus)
			s.AwaitRunning("etl", batch)
			s.AwaitNodes(gpus + batch)
			s.Look(func(w *World) {
				s.Step("all running: %s", say(places(w.Nodes(), typeLabel)))
			})
			stayed := s.remember("etl")

			s.Delete(trainer)
			s.AwaitNoDemand("trainer")
			s.Step("training deleted")
			s.AwaitNodes(batch)
			s.Look(func(w *World) {
				if types := places(w.Nodes(), typeLabel); types["a3-highgpu-8g"] > 0 {
					s.fail(fmt.Errorf("expected: the GPU nodes gone; seen: %s", say(types)))
				}
			})
			s.Step("%d GPU nodes gone", gpus)
			s.AwaitRollUps(5)
			s.mustStay("etl", stayed)
			s.Step("the %d batch pods run where they ran, undisturbed", batch)
		},
	}
}

func spreadOverZones(app string) corev1.TopologySpreadConstraint {
	constraint := corev1.TopologySpreadConstraint{
		MaxSkew: 1, TopologyKey: zoneLabel, WhenUnsatisfiable: corev1.DoNotSchedule,
	}
	constraint.LabelSelector = appSelector(app)
	return constraint
}
