package playground

import (
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	autoscalingv1 "k8s.io/autoscaler/cluster-autoscaler/apis/provisioningrequest/autoscaling.x-k8s.io/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/kueue/provisioning"
)

// workloads are Kueue's, in full: Kubernetes is about to have a kind of that name, too.
const workloads = "workloads.kueue.x-k8s.io"

// KueueHint has quota for all and nodes for some.
func KueueHint() Story {
	const jobs, pods, gpus = 10, 4, 8
	const stock = 25 // nodes
	offerings := func(nodes int32) []configv1alpha1.Offering {
		return []configv1alpha1.Offering{cpuOffering(100), gpuOffering(rack("us-east-1a", "rack-1a-07", nodes))}
	}
	return Story{
		Name:      "kueue-hint",
		Title:     "10 workloads of 32 GPUs, quota for all, 200 GPUs to be had: 6 are admitted, 4 wait and say for what",
		Kueue:     true,
		Offerings: offerings(stock),
		Play: func(s *Stage) {
			s.AddStaticNode("system-1", quantities("cpu", "4", "memory", "16Gi", "pods", "110"))
			var nodes atomic.Int32
			nodes.Store(stock)
			s.Always("no workload is admitted on nodes that cannot be had", func(w *World) string {
				if n := len(admittedJobs(w)); int32(n*pods) > nodes.Load() {
					return fmt.Sprintf("%d workloads of %d nodes on %d", n, pods, nodes.Load())
				}
				return ""
			})
			s.AtMostNodes(jobs * pods)
			s.Create(flavor("h100", typeLabel, "a3-highgpu-8g", ""))
			// A tenth of the stock is left when six are in, which is a sign of Low.
			s.Create(capacityCheck("story-capacity", fleetv1alpha1.CapacityCheckConfigSpec{MinAvailability: fleetv1alpha1.AvailabilityLow})...)
			s.Create(queue("training", 512, "story-capacity", "h100")...)
			s.awaitChecks("story-capacity")
			s.Step("a queue with quota for 512 GPUs; its admission check asks the fleet, which can have %d nodes of %d", stock, gpus)
			for i := range jobs {
				s.Create(queued("training", job(fmt.Sprintf("train-%02d", i+1), pods, training("train"))))
			}
			s.Step("%d jobs of %d pods of %d GPUs each", jobs, pods, gpus)

			waits := fmt.Sprintf("needs %d × %d %s in flavor h100; 1 available", pods, gpus, resourceGPU)
			s.awaitAdmitted(stock/pods, waits)
			s.Step("%d workloads admitted, %d hold quota and wait", stock/pods, jobs-stock/pods)
			waiting := s.waiting()
			if s.Failed() {
				return
			}
			s.Table("get", workloads, "-n", s.Namespace())
			s.AwaitRunning("train", stock/pods*pods)
			s.AwaitNodes(stock / pods * pods)
			s.awaitTaken("gpu-h100", 1)
			s.Step("%d pods run on %d nodes; what was promised has been taken, and 1 node is left", stock/pods*pods, stock/pods*pods)
			s.Step("%s: %s", waiting[0], s.awaitMessage(waiting[0], waits))
			s.DescribeWorkload(waiting[0])

			// One after the other: each time there is room for exactly one more.
			for i, next := range waiting {
				before := s.admitted()
				nodes.Store(int32(stock + (i+1)*pods))
				s.SetOfferings(offerings(nodes.Load()))
				s.awaitAdmitted(len(before)+1, waits)
				if now := s.admitted(); !s.Failed() && !slices.Equal(now, sortedWith(before, next)) {
					s.Fail("expected: %s next, the oldest that waits; seen: %v after %v", next, now, before)
				}
				s.awaitTaken("gpu-h100", 1)
				s.Step("%d nodes more: %s is admitted, the next by age", pods, next)
			}
			s.AwaitRunning("train", jobs*pods)
			s.AwaitNodes(jobs * pods)
			s.Step("%d pods run on as many nodes", jobs*pods)
			s.Table("get", workloads, "-n", s.Namespace())
			s.DeleteJobs()
			s.AwaitNoDemand("train")
			s.AwaitNodes(0)
			s.awaitPromises(0)
			s.Step("jobs deleted: no node, no promise")
		},
	}
}

// KueueProvision admits when the nodes are there.
func KueueProvision() Story {
	const pods, late = 8, 2
	const timeout = 2 * time.Second
	return Story{
		Name:  "kueue-provision",
		Title: "a workload of 64 GPUs is admitted when its nodes are Ready: they come for the workload, not for pods",
		Kueue: true,
		Offerings: []configv1alpha1.Offering{
			cpuOffering(100), gpuOffering(rack("us-east-1a", "rack-1a-07", 64)), a100Offering(rack("us-east-1b", "rack-1b-03", 0)),
		},
		Play: func(s *Stage) {
			s.AddStaticNode("system-1", quantities("cpu", "4", "memory", "16Gi", "pods", "110"))
			s.AtMostNodes(pods)
			var ending atomic.Bool
			s.Always("no pod before its node", func(w *World) string {
				if n, ready := len(w.Pods()), len(w.ReadyNodes()); !ending.Load() && n > 0 && ready < pods {
					return fmt.Sprintf("%d pods, %d nodes Ready", n, ready)
				}
				return ""
			})
			provision := fleetv1alpha1.CapacityCheckConfigSpec{
				Mode: fleetv1alpha1.CapacityCheckProvision, CheckPeriod: duration(time.Second),
			}
			s.Create(flavor("h100", typeLabel, "a3-highgpu-8g", ""), flavor("a100", typeLabel, "a2-ultragpu-8g", ""))
			s.Create(capacityCheck("story-capacity", provision)...)
			s.Create(queue("training", 512, "story-capacity", "h100")...)
			provision.Timeout = duration(timeout)
			s.Create(capacityCheck("story-impatient", provision)...)
			s.Create(queue("impatient", 512, "story-impatient", "a100")...)
			s.awaitChecks("story-capacity", "story-impatient")

			s.Create(queued("impatient", job("late", late, training("late"))))
			s.Await("late has asked in vain, given its quota back, and withdrawn its requests", func(w *World) (bool, string) {
				wl := w.WorkloadOf("late")
				if wl == nil {
					return false, "no workload"
				}
				asked, left, quota := len(s.recorder.requests), len(w.Requests()), reserved(wl)
				return asked == late && left == 0 && !quota, fmt.Sprintf("%d requests written, %d left, quota reserved: %t; %s",
					asked, left, quota, checkState(wl).Message)
			})
			s.Step("late: no A100 comes within %s, so that it gives its quota back and withdraws its %d requests", timeout, late)

			s.Create(queued("training", job("train", pods, training("train"))))
			s.awaitRequestsOf("Workload", pods)
			s.Step("%d CapacityRequests, owned by the Workload; no pod yet", pods)
			s.Step("train: %s", s.awaitMessage("train", "needs "))
			s.DescribeWorkload("train")
			s.AwaitNodes(pods)
			s.Step("%d nodes Ready", pods)
			s.awaitAdmitted(1, "")
			s.AwaitRunning("train", pods)
			s.Step("admitted; %d pods run", pods)
			s.awaitRequestsOf("Pod", pods)
			s.AwaitRollUps(3)
			s.Step("the pods have taken the requests over; three roll-ups later nothing was launched twice")
			s.Table("get", workloads, "-n", s.Namespace())
			ending.Store(true)
			s.DeleteJobs()
			s.AwaitNoDemand("train")
			s.AwaitNodes(0)
			s.awaitPromises(0)
			s.Step("job deleted: no pod, no request, no node, no promise")
		},
	}
}

// KueueTAS needs nodes of one rack before there is any node, which only Kueue's own ProvisioningRequest check can wait for.
func KueueTAS() Story {
	const pods = 16
	return Story{
		Name:  "kueue-tas",
		Title: "16 pods that Kueue has to put into one rack, and no node yet: a ProvisioningRequest brings the rack",
		Kueue: true,
		Offerings: []configv1alpha1.Offering{
			cpuOffering(100),
			gpuOffering(rack("us-east-1a", "rack-1a-06", 10), rack("us-east-1a", "rack-1a-07", pods), rack("us-east-1b", "rack-1b-03", 12)),
		},
		Play: func(s *Stage) {
			s.AddStaticNode("system-1", quantities("cpu", "4", "memory", "16Gi", "pods", "110"))
			s.AtMostNodes(pods)
			s.Create(&schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: "playground-training"}, Value: 1000})
			s.Create(racks("story-racks"), flavor("h100-racks", typeLabel, "a3-highgpu-8g", "story-racks"))
			s.Create(provisioningCheck("story-provisioning")...)
			s.Create(queue("racks", 512, "story-provisioning", "h100-racks")...)
			s.awaitChecks("story-provisioning")
			template := inOneRack(training("train"))
			template.Spec.PriorityClassName = "playground-training"
			s.Create(queued("racks", job("train", pods, template)))
			s.awaitRequestsOf("ProvisioningRequest", pods)
			s.Step("Kueue asks by a ProvisioningRequest of class %s: %d CapacityRequests, no pod yet", provisioning.ClassName, pods)
			s.Table("get", "provisioningrequests,"+workloads, "-n", s.Namespace())
			s.AwaitNodes(pods)
			s.awaitOneRack(pods)
			s.awaitAdmitted(1, "")
			s.Look(func(w *World) { s.Step("admitted: %s", checkState(w.WorkloadOf("train")).Message) })
			s.AwaitRunning("train", pods)
			s.Look(func(w *World) {
				inRack := map[string]int{}
				for _, p := range w.PodsOf("train") {
					if n := w.Node(p.Spec.NodeName); n != nil {
						inRack[n.Labels[rackLabel]]++
					}
				}
				if len(inRack) != 1 || inRack["rack-1a-07"] != pods {
					s.Fail("expected: %d pods in rack-1a-07; seen: %s", pods, say(inRack))
				}
				s.Step("pods running: %s", say(inRack))
			})
			s.DescribeWorkload("train")
			s.Await("the booking is consumed", func(w *World) (bool, string) {
				var seen []string
				for _, pr := range w.ProvisioningRequests() {
					for _, c := range pr.Status.Conditions {
						if c.Type == autoscalingv1.BookingExpired && c.Reason == provisioning.ReasonConsumed {
							return true, ""
						}
						seen = append(seen, c.Type+": "+c.Message)
					}
				}
				return false, strings.Join(seen, "; ")
			})
			s.awaitRequestsOf("Pod", pods)
			s.AwaitRollUps(3)
			s.Step("the pods have taken the booking over; three roll-ups later nothing was launched twice")
			s.DeleteJobs()
			s.AwaitNoDemand("train")
			s.AwaitNodes(0)
			s.Step("job deleted: no request, no node")
		},
	}
}

// KueueStockout has two kinds of nodes, and none of the kind that Kueue prefers.
func KueueStockout() Story {
	const pods, either = 4, "h100-or-a100"
	h100, a100 := gpuOffering(rack("us-east-1a", "rack-1a-07", 0)), a100Offering(rack("us-east-1b", "rack-1b-03", 40))
	h100.Labels = map[string]string{"gpu-class": "large"}
	a100.Labels = map[string]string{"gpu-class": "large"}
	return Story{
		Name:      "kueue-stockout",
		Title:     "no H100 to be had, A100 free: a workload says so, gives its quota back, and ends on the A100",
		Kueue:     true,
		Offerings: []configv1alpha1.Offering{cpuOffering(100), h100, a100},
		Play: func(s *Stage) {
			s.AddStaticNode("system-1", quantities("cpu", "4", "memory", "16Gi", "pods", "110"))
			s.AtMostNodes(2 * pods)
			s.Create(flavor("h100", typeLabel, h100.InstanceType, ""), flavor("a100", typeLabel, a100.InstanceType, ""),
				flavor(either, "gpu-class", "large", ""))
			s.Create(capacityCheck("story-capacity", fleetv1alpha1.CapacityCheckConfigSpec{
				Timeout: duration(3 * time.Second), BackoffBase: duration(2 * time.Second), BackoffMax: duration(4 * time.Second),
				CheckPeriod: duration(time.Second),
			})...)
			flavors := queue("two-flavors", 512, "story-capacity", "h100", "a100")
			s.Create(flavors...)
			s.Create(queue("one-flavor", 512, "story-capacity", either)...)
			s.awaitChecks("story-capacity")

			s.Create(queued("two-flavors", job("picky", pods, training("picky"))))
			waits := fmt.Sprintf("needs %d × 8 %s in flavor h100; 0 available", pods, resourceGPU)
			s.Step("picky: %s", s.awaitMessage("picky", waits))
			s.awaitReservations("picky", "h100", 2)
			s.Step("its quota was given back, and reserved again: in flavor h100, as Kueue begins with the first that has quota")
			s.awaitMessage("picky", waits)
			s.Table("get", workloads, "-n", s.Namespace())
			s.DescribeWorkload("picky")

			s.Create(queued("one-flavor", job("easy", pods, training("easy"))))
			s.AwaitRunning("easy", pods)
			s.Look(func(w *World) { s.Step("one flavor for both kinds: %s", checkState(w.WorkloadOf("easy")).Message) })
			s.onlyOn(a100.InstanceType, pods)

			// What an operator does during a long stock-out of one of two flavors.
			clusterQueue := flavors[0].(*kueue.ClusterQueue)
			s.Change(clusterQueue, func() {
				clusterQueue.Spec.ResourceGroups[0].Flavors[0].Resources[0].NominalQuota = resource.MustParse("0")
			})
			s.Step("the quota of flavor h100 is taken away")
			s.AwaitRunning("picky", pods)
			s.Look(func(w *World) { s.Step("admitted in flavor %s", flavorOf(w.WorkloadOf("picky"), resourceGPU)) })
			s.onlyOn(a100.InstanceType, 2*pods)
			s.DeleteJobs()
			s.AwaitNoDemand("picky")
			s.AwaitNoDemand("easy")
			s.AwaitNodes(0)
			s.awaitPromises(0)
			s.Step("jobs deleted: no node, no promise")
		},
	}
}

// admittedJobs are the names of the Jobs whose workloads are admitted, sorted.
func admittedJobs(w *World) []string {
	var names []string
	for _, wl := range w.Workloads() {
		if admitted(wl) {
			names = append(names, jobOf(wl))
		}
	}
	slices.Sort(names)
	return names
}

func (s *Stage) admitted() (names []string) {
	s.Look(func(w *World) { names = admittedJobs(w) })
	return names
}

// waiting are the names of the other Jobs, the oldest first.
func (s *Stage) waiting() (names []string) {
	s.Look(func(w *World) {
		for _, wl := range w.Workloads() {
			if !admitted(wl) {
				names = append(names, jobOf(wl))
			}
		}
	})
	return names
}

// awaitAdmitted waits until exactly n workloads are admitted, and the check says of every other one what begins with waits.
func (s *Stage) awaitAdmitted(n int, waits string) {
	s.Await(fmt.Sprintf("exactly %d workloads admitted, and the others say %q", n, waits), func(w *World) (bool, string) {
		var last string
		silent := 0
		for _, wl := range w.Workloads() {
			if message := checkState(wl).Message; !admitted(wl) && !strings.HasPrefix(message, waits) {
				silent, last = silent+1, jobOf(wl)+": "+message
			}
		}
		got := len(admittedJobs(w))
		return got == n && silent == 0, fmt.Sprintf("%d of %s admitted, %d say otherwise, as %q", got, count(len(w.Workloads()), "workload"), silent, last)
	})
}

// awaitMessage waits until the check says of the Job's workload what begins so, and returns all that it says.
func (s *Stage) awaitMessage(job, begin string) (message string) {
	s.Await(fmt.Sprintf("the check says of %s %q", job, begin), func(w *World) (bool, string) {
		message = checkState(w.WorkloadOf(job)).Message
		return strings.HasPrefix(message, begin), message
	})
	return message
}

// awaitReservations waits until quota was reserved for the Job's workload n times, and fails unless that was in the flavor
// each time.
func (s *Stage) awaitReservations(job, flavor string, n int) {
	var flavors []string
	s.Await(fmt.Sprintf("quota reserved for %s %d times", job, n), func(w *World) (bool, string) {
		wl := w.WorkloadOf(job)
		if wl == nil || s.recorder.workloads[wl.UID] == nil {
			return false, "no workload"
		}
		flavors = slices.Clone(s.recorder.workloads[wl.UID].flavors)
		return len(flavors) >= n, fmt.Sprintf("in %v; %s", flavors, checkState(wl).Message)
	})
	if !s.Failed() && slices.ContainsFunc(flavors, func(f string) bool { return f != flavor }) {
		s.Fail("expected: quota reserved in flavor %s every time, as Kueue has it; seen: %v", flavor, flavors)
	}
}

// awaitTaken waits until so many nodes of the offering are left and nothing is promised any more.
func (s *Stage) awaitTaken(offering string, left int32) {
	s.Await(fmt.Sprintf("%d nodes of %s left", left, offering), func(w *World) (bool, string) {
		n := w.Available()[offering]
		return n == left, fmt.Sprint(n)
	})
	s.AwaitRollUps(1) // the metrics have been read since
	s.awaitPromises(0)
}

// awaitPromises waits until the manager says for how many workloads it holds capacity.
func (s *Stage) awaitPromises(n int) {
	s.Await(fmt.Sprintf("%d promises in the ledger", n), func(w *World) (bool, string) {
		return w.Promises() == n, fmt.Sprint(w.Promises())
	})
}

// awaitRequestsOf waits until there are n requests, all acknowledged and all owned by an object of that kind.
func (s *Stage) awaitRequestsOf(kind string, n int) {
	s.Await(fmt.Sprintf("%d CapacityRequests owned by a %s, all acknowledged", n, kind), func(w *World) (bool, string) {
		owned := 0
		for _, r := range w.Requests() {
			if len(r.OwnerReferences) == 1 && r.OwnerReferences[0].Kind == kind {
				owned++
			}
		}
		all, acknowledged := len(w.Requests()), w.Acknowledged()
		return owned == n && all == n && acknowledged == n, fmt.Sprintf("%d of %d, %d acknowledged", owned, all, acknowledged)
	})
}

// onlyOn fails unless there are n launched nodes, all of that instance type.
func (s *Stage) onlyOn(instanceType string, n int) {
	s.AwaitNodes(n)
	s.Look(func(w *World) {
		if types := places(w.Nodes(), typeLabel); types[instanceType] != n {
			s.Fail("expected: %d nodes of %s; seen: %s", n, instanceType, say(types))
		}
		s.Step("nodes: %s", say(places(w.Nodes(), typeLabel)))
	})
}

// DeleteJobs deletes the story's Jobs.
func (s *Stage) DeleteJobs() {
	var jobs []client.Object
	s.Look(func(w *World) {
		for _, wl := range w.Workloads() {
			j := job(jobOf(wl), 0, corev1.PodTemplateSpec{})
			j.Namespace = s.namespace
			jobs = append(jobs, j)
		}
	})
	s.Delete(jobs...)
}

// Change patches an object that the story made.
func (s *Stage) Change(o client.Object, change func()) {
	if s.err != nil {
		return
	}
	err := s.p.view.client.Get(s.ctx, client.ObjectKeyFromObject(o), o)
	if err == nil {
		before := o.DeepCopyObject().(client.Object)
		change()
		err = s.p.view.client.Patch(s.ctx, o, client.MergeFrom(before))
	}
	if err != nil {
		s.fail(fmt.Errorf("changing %T %s: %w", o, o.GetName(), err))
	}
}

// DescribeWorkload shows what kubectl describe says of the Job's workload: the state of its checks, and the last events.
func (s *Stage) DescribeWorkload(job string) {
	if s.err != nil || !s.p.present.WantsTables() {
		return
	}
	var name string
	s.Look(func(w *World) {
		if wl := w.WorkloadOf(job); wl != nil {
			name = wl.Name
		}
	})
	args := []string{"describe", workloads, "-n", s.namespace, name}
	if out, err := s.p.kubectl(s.ctx, args...); err == nil {
		s.p.present.Table("kubectl "+strings.Join(args, " "), excerpt(out))
	}
}

// excerpt takes from what kubectl describe prints the admission checks, and the last events.
func excerpt(description string) string {
	const lastEvents = 3
	checks, events := []string{"Admission Checks:"}, []string{}
	section := ""
	for line := range strings.Lines(description) {
		text := strings.TrimSpace(line)
		indent := len(line) - len(strings.TrimLeft(line, " "))
		switch {
		case indent == 0, indent == 2 && section != "Events:":
			section = text
		case section == "Admission Checks:" && indent == 4:
			field, value, _ := strings.Cut(text, ":")
			if slices.Contains([]string{"Name", "State", "Message"}, field) {
				checks = append(checks, fmt.Sprintf("  %-10s%s", field+":", strings.TrimSpace(value)))
			}
		case section == "Events:" && !strings.HasPrefix(text, "----"):
			events = append(events, "  "+text)
		}
	}
	if len(events) == 0 {
		return strings.Join(checks, "\n")
	}
	last := events[max(1, len(events)-lastEvents):]
	return strings.Join(slices.Concat(checks, []string{"", "Events:", events[0]}, last), "\n")
}

func sortedWith(names []string, one string) []string {
	all := append(slices.Clone(names), one)
	slices.Sort(all)
	return all
}
