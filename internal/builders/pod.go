package builders

import (
	"strconv"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// PodBuilder builds a Pod.
type PodBuilder struct{ pod corev1.Pod }

// Pod starts a pod with one container, the UID "<namespace>-<name>" and the scheduler drover-scheduler.
func Pod(namespace, name string) *PodBuilder {
	return &PodBuilder{pod: corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(namespace + "-" + name)},
		Spec: corev1.PodSpec{
			SchedulerName: "drover-scheduler",
			Containers:    []corev1.Container{{Name: "main", Image: "pause:3.10"}},
		},
		Status: corev1.PodStatus{Phase: corev1.PodPending},
	}}
}

// Obj returns the pod.
func (b *PodBuilder) Obj() *corev1.Pod { return b.pod.DeepCopy() }

// UID sets the UID.
func (b *PodBuilder) UID(uid string) *PodBuilder {
	b.pod.UID = types.UID(uid)
	return b
}

// Scheduler sets spec.schedulerName.
func (b *PodBuilder) Scheduler(name string) *PodBuilder {
	b.pod.Spec.SchedulerName = name
	return b
}

// Label adds a label.
func (b *PodBuilder) Label(key, value string) *PodBuilder {
	b.pod.Labels = with(b.pod.Labels, key, value)
	return b
}

// Annotation adds an annotation.
func (b *PodBuilder) Annotation(key, value string) *PodBuilder {
	b.pod.Annotations = with(b.pod.Annotations, key, value)
	return b
}

// Requests adds to the main container's requests: name, quantity, name, quantity, and so on.
func (b *PodBuilder) Requests(pairs ...string) *PodBuilder {
	c := &b.pod.Spec.Containers[0]
	c.Resources.Requests = merged(c.Resources.Requests, Resources(pairs...))
	return b
}

// Container adds one more container with these requests.
func (b *PodBuilder) Container(pairs ...string) *PodBuilder {
	b.pod.Spec.Containers = append(b.pod.Spec.Containers, container(len(b.pod.Spec.Containers), "more-", pairs))
	return b
}

// InitContainer adds an init container with these requests.
func (b *PodBuilder) InitContainer(pairs ...string) *PodBuilder {
	b.pod.Spec.InitContainers = append(b.pod.Spec.InitContainers,
		container(len(b.pod.Spec.InitContainers), "init-", pairs))
	return b
}

// Sidecar adds a restartable init container with these requests.
func (b *PodBuilder) Sidecar(pairs ...string) *PodBuilder {
	c := container(len(b.pod.Spec.InitContainers), "sidecar-", pairs)
	always := corev1.ContainerRestartPolicyAlways
	c.RestartPolicy = &always
	b.pod.Spec.InitContainers = append(b.pod.Spec.InitContainers, c)
	return b
}

func container(n int, prefix string, pairs []string) corev1.Container {
	return corev1.Container{
		Name:      prefix + strconv.Itoa(n),
		Image:     "pause:3.10",
		Resources: corev1.ResourceRequirements{Requests: Resources(pairs...)},
	}
}

// Overhead sets the runtime's overhead.
func (b *PodBuilder) Overhead(pairs ...string) *PodBuilder {
	b.pod.Spec.Overhead = Resources(pairs...)
	return b
}

// PodRequests sets pod-level requests.
func (b *PodBuilder) PodRequests(pairs ...string) *PodBuilder {
	b.pod.Spec.Resources = &corev1.ResourceRequirements{Requests: Resources(pairs...)}
	return b
}

// HostPort makes the main container listen on a port of its node.
func (b *PodBuilder) HostPort(port int32) *PodBuilder {
	c := &b.pod.Spec.Containers[0]
	c.Ports = append(c.Ports, corev1.ContainerPort{ContainerPort: port, HostPort: port, Protocol: corev1.ProtocolTCP})
	return b
}

// Priority sets spec.priority.
func (b *PodBuilder) Priority(p int32) *PodBuilder {
	b.pod.Spec.Priority = &p
	return b
}

// NodeSelector adds a label to spec.nodeSelector.
func (b *PodBuilder) NodeSelector(key, value string) *PodBuilder {
	b.pod.Spec.NodeSelector = with(b.pod.Spec.NodeSelector, key, value)
	return b
}

// NodeAffinity adds one term of required node affinity; terms are ORed, the expressions of one are ANDed.
func (b *PodBuilder) NodeAffinity(expressions ...corev1.NodeSelectorRequirement) *PodBuilder {
	return b.NodeAffinityTerm(corev1.NodeSelectorTerm{MatchExpressions: expressions})
}

// NodeAffinityTerm adds one term of required node affinity.
func (b *PodBuilder) NodeAffinityTerm(term corev1.NodeSelectorTerm) *PodBuilder {
	a := b.affinity()
	if a.NodeAffinity == nil {
		a.NodeAffinity = &corev1.NodeAffinity{}
	}
	required := &a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
	if *required == nil {
		*required = &corev1.NodeSelector{}
	}
	(*required).NodeSelectorTerms = append((*required).NodeSelectorTerms, term)
	return b
}

// NodeExpr is a node selector requirement for NodeAffinity.
func NodeExpr(key string, op corev1.NodeSelectorOperator, values ...string) corev1.NodeSelectorRequirement {
	return corev1.NodeSelectorRequirement{Key: key, Operator: op, Values: values}
}

// PodAffinity adds required affinity to pods of the same namespace with one label.
func (b *PodBuilder) PodAffinity(topologyKey, labelKey, labelValue string) *PodBuilder {
	return b.PodAffinityTerm(affinityTerm(topologyKey, labelKey, labelValue))
}

// PodAffinityTerm adds a term of required pod affinity.
func (b *PodBuilder) PodAffinityTerm(term corev1.PodAffinityTerm) *PodBuilder {
	a := b.affinity()
	if a.PodAffinity == nil {
		a.PodAffinity = &corev1.PodAffinity{}
	}
	terms := &a.PodAffinity.RequiredDuringSchedulingIgnoredDuringExecution
	*terms = append(*terms, term)
	return b
}

// PodAntiAffinity adds required anti-affinity to pods of the same namespace with one label.
func (b *PodBuilder) PodAntiAffinity(topologyKey, labelKey, labelValue string) *PodBuilder {
	return b.PodAntiAffinityTerm(affinityTerm(topologyKey, labelKey, labelValue))
}

// PodAntiAffinityTerm adds a term of required pod anti-affinity.
func (b *PodBuilder) PodAntiAffinityTerm(term corev1.PodAffinityTerm) *PodBuilder {
	a := b.affinity()
	if a.PodAntiAffinity == nil {
		a.PodAntiAffinity = &corev1.PodAntiAffinity{}
	}
	terms := &a.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution
	*terms = append(*terms, term)
	return b
}

func affinityTerm(topologyKey, labelKey, labelValue string) corev1.PodAffinityTerm {
	return corev1.PodAffinityTerm{
		TopologyKey:   topologyKey,
		LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{labelKey: labelValue}},
	}
}

func (b *PodBuilder) affinity() *corev1.Affinity {
	if b.pod.Spec.Affinity == nil {
		b.pod.Spec.Affinity = &corev1.Affinity{}
	}
	return b.pod.Spec.Affinity
}

// Tolerates adds a toleration of every value of a taint key; an empty effect covers all.
func (b *PodBuilder) Tolerates(key string, effect corev1.TaintEffect) *PodBuilder {
	return b.Toleration(corev1.Toleration{Key: key, Operator: corev1.TolerationOpExists, Effect: effect})
}

// Toleration adds a toleration.
func (b *PodBuilder) Toleration(t corev1.Toleration) *PodBuilder {
	b.pod.Spec.Tolerations = append(b.pod.Spec.Tolerations, t)
	return b
}

// Spread adds a topology spread constraint over the pods that carry the pod's own labels at the time of the call.
func (b *PodBuilder) Spread(topologyKey string, maxSkew int32, when corev1.UnsatisfiableConstraintAction) *PodBuilder {
	selector := &metav1.LabelSelector{}
	for key, value := range b.pod.Labels {
		selector = metav1.AddLabelToSelector(selector, key, value)
	}
	return b.SpreadConstraint(corev1.TopologySpreadConstraint{
		TopologyKey: topologyKey, MaxSkew: maxSkew, WhenUnsatisfiable: when, LabelSelector: selector,
	})
}

// SpreadConstraint adds a topology spread constraint.
func (b *PodBuilder) SpreadConstraint(c corev1.TopologySpreadConstraint) *PodBuilder {
	b.pod.Spec.TopologySpreadConstraints = append(b.pod.Spec.TopologySpreadConstraints, c)
	return b
}

// PodGroup makes the pod a member of a Coscheduling PodGroup of its namespace.
func (b *PodBuilder) PodGroup(name string) *PodBuilder {
	return b.Label("scheduling.x-k8s.io/pod-group", name)
}

// SchedulingGroup makes the pod a member of an in-tree PodGroup of its namespace.
func (b *PodBuilder) SchedulingGroup(name string) *PodBuilder {
	b.pod.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: &name}
	return b
}

// Gate adds a scheduling gate.
func (b *PodBuilder) Gate(name string) *PodBuilder {
	b.pod.Spec.SchedulingGates = append(b.pod.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: name})
	return b
}

// Claim mounts a PersistentVolumeClaim.
func (b *PodBuilder) Claim(name string) *PodBuilder {
	b.pod.Spec.Volumes = append(b.pod.Spec.Volumes, corev1.Volume{
		Name: name,
		VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: name},
		},
	})
	return b
}

// Owner makes a controller own the pod; its UID is "<kind>-<name>".
func (b *PodBuilder) Owner(kind, name string) *PodBuilder {
	apiVersion := appsv1.SchemeGroupVersion.String()
	if kind == "Job" {
		apiVersion = "batch/v1"
	}
	yes := true
	b.pod.OwnerReferences = append(b.pod.OwnerReferences, metav1.OwnerReference{
		APIVersion: apiVersion, Kind: kind, Name: name, UID: types.UID(kind + "-" + name), Controller: &yes,
	})
	return b
}

// Daemon makes a DaemonSet own the pod.
func (b *PodBuilder) Daemon(name string) *PodBuilder { return b.Owner("DaemonSet", name) }

// Mirror makes the pod stand for a static pod.
func (b *PodBuilder) Mirror() *PodBuilder {
	return b.Annotation(corev1.MirrorPodAnnotationKey, "mirror")
}

// Node binds the pod to a node and sets it running.
func (b *PodBuilder) Node(name string) *PodBuilder {
	b.pod.Spec.NodeName = name
	b.pod.Status.Phase = corev1.PodRunning
	return b
}

// Phase sets the pod's phase.
func (b *PodBuilder) Phase(p corev1.PodPhase) *PodBuilder {
	b.pod.Status.Phase = p
	return b
}

// Unschedulable sets the condition that the scheduler sets when it finds no node.
func (b *PodBuilder) Unschedulable(message string) *PodBuilder {
	return b.Condition(corev1.PodCondition{
		Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: message,
	})
}

// Condition adds a condition.
func (b *PodBuilder) Condition(c corev1.PodCondition) *PodBuilder {
	b.pod.Status.Conditions = append(b.pod.Status.Conditions, c)
	return b
}

// Terminating gives the pod a deletion timestamp, and the finalizer without which an object cannot have one for long.
func (b *PodBuilder) Terminating(at time.Time) *PodBuilder {
	deleted := metav1.NewTime(at)
	b.pod.DeletionTimestamp = &deleted
	b.pod.Finalizers = append(b.pod.Finalizers, "drover.test/hold")
	return b
}

// Resources makes a resource list: name, quantity, name, quantity, and so on.
func Resources(pairs ...string) corev1.ResourceList {
	if len(pairs)%2 != 0 {
		panic("builders.Resources: a name without a quantity")
	}
	list := corev1.ResourceList{}
	for i := 0; i < len(pairs); i += 2 {
		list[corev1.ResourceName(pairs[i])] = resource.MustParse(pairs[i+1])
	}
	return list
}

func merged(a, b corev1.ResourceList) corev1.ResourceList {
	if a == nil {
		return b
	}
	for name, q := range b {
		a[name] = q
	}
	return a
}

func with(m map[string]string, key, value string) map[string]string {
	if m == nil {
		m = map[string]string{}
	}
	m[key] = value
	return m
}
