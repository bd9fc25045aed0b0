package capacity

import (
	"cmp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
)

// Labels and annotations by which a pod names its group. They are other projects' contracts, named here so that the
// core does not link those projects.
const (
	// LabelPodGroup is Coscheduling's: the PodGroup's name.
	LabelPodGroup = "scheduling.x-k8s.io/pod-group"
	// AnnotationRequiredTopology is Kueue's: the topology key in one domain of which the pod set has to stand.
	AnnotationRequiredTopology = "kueue.x-k8s.io/podset-required-topology"

	annotationKueueWorkload  = "kueue.x-k8s.io/workload"
	annotationKueueSetGroup  = "kueue.x-k8s.io/podset-group-name"
	labelKueuePodSet         = "kueue.x-k8s.io/podset"
	labelKueuePodGroup       = "kueue.x-k8s.io/pod-group-name"
	labelNamespaceName       = "kubernetes.io/metadata.name"
	maxGroupName             = 317 // of the CapacityRequest schema
	groupPrefixAffinity      = "affinity/"
	groupPrefixKueueWorkload = "workload/"
)

// groupOf finds the gang or co-located set that a pod belongs to; nil for none. The name comes from the most explicit
// source: a PodGroup, then Kueue's workload, then the pod's own required affinity. The topology key comes from
// Kueue's annotation, else from the affinity.
func groupOf(pod *corev1.Pod) *Group {
	affinityKey, affinitySet := selfAffinityOf(pod)
	topology := pod.Annotations[AnnotationRequiredTopology]
	var name string
	switch {
	case pod.Labels[LabelPodGroup] != "":
		name = pod.Labels[LabelPodGroup]
	case pod.Spec.SchedulingGroup != nil && pod.Spec.SchedulingGroup.PodGroupName != nil &&
		*pod.Spec.SchedulingGroup.PodGroupName != "":
		name = *pod.Spec.SchedulingGroup.PodGroupName
	case topology != "":
		name = kueueGroupName(pod)
	case affinityKey != "":
		name = groupPrefixAffinity + affinitySet
	default:
		return nil
	}
	if topology == "" {
		topology = affinityKey
	}
	return &Group{Name: groupName(pod.Namespace, name), TopologyKey: topology}
}

func groupName(namespace, name string) string {
	full := namespace + "/" + name
	if len(full) <= maxGroupName {
		return full
	}
	var e encoder
	e.text(full)
	return full[:maxGroupName-17] + "-" + e.sum()
}

// kueueGroupName names the pods that have to share a domain: those of one pod set, or of the pod sets that Kueue is
// told to keep together, in one workload.
func kueueGroupName(pod *corev1.Pod) string {
	name := groupPrefixKueueWorkload + workloadName(pod)
	if g := pod.Annotations[annotationKueueSetGroup]; g != "" {
		return name + "/group/" + g
	}
	if s := pod.Labels[labelKueuePodSet]; s != "" {
		return name + "/" + s
	}
	return name
}

func workloadName(pod *corev1.Pod) string {
	if w := pod.Annotations[annotationKueueWorkload]; w != "" {
		return w
	}
	if g := pod.Labels[labelKueuePodGroup]; g != "" {
		return g
	}
	if owner := metav1.GetControllerOfNoCopy(pod); owner != nil {
		return strings.ToLower(owner.Kind) + "." + owner.Name
	}
	return "pod." + pod.Name
}

// selfAffinityOf finds a required affinity of the pod to pods like itself: the set has to share one domain of the
// key. Of several keys the narrowest counts, as a node that shares it usually shares the wider ones.
func selfAffinityOf(pod *corev1.Pod) (key, set string) {
	terms := requiredAffinity(pod)
	for i := range terms {
		if !matchesSelf(&terms[i], pod) {
			continue
		}
		k, s := terms[i].TopologyKey, setOf(&terms[i], pod.Namespace)
		if key == "" || narrower(k, key) || k == key && s < set {
			key, set = k, s
		}
	}
	return key, set
}

// narrower orders topology keys by how few nodes share a domain. Keys that are not known stand between rack and zone.
func narrower(a, b string) bool {
	if ra, rb := breadth(a), breadth(b); ra != rb {
		return ra < rb
	}
	return a < b
}

func breadth(key string) int {
	switch key {
	case corev1.LabelHostname:
		return 0
	case fleetv1alpha1.LabelRack:
		return 1
	case corev1.LabelTopologyZone, corev1.LabelFailureDomainBetaZone:
		return 3
	case corev1.LabelTopologyRegion, corev1.LabelFailureDomainBetaRegion:
		return 4
	default:
		return 2
	}
}

// antiAffinityOf keeps the required anti-affinity terms that hold between pods of one kind: those that match the
// pod's own labels. A term against other pods says nothing about how many nodes this kind needs.
func antiAffinityOf(pod *corev1.Pod) []AntiAffinity {
	if pod.Spec.Affinity == nil || pod.Spec.Affinity.PodAntiAffinity == nil {
		return nil
	}
	var out []AntiAffinity
	terms := pod.Spec.Affinity.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution
	for i := range terms {
		if matchesSelf(&terms[i], pod) {
			out = append(out, AntiAffinity{TopologyKey: terms[i].TopologyKey, Set: setOf(&terms[i], pod.Namespace)})
		}
	}
	return out
}

// HostPortsOf are the host ports of a pod as what they come to: of all pods that take one, a node carries one. A pod's first
// port alone tells that for pods of its own kind; the others, for pods of other kinds.
func HostPortsOf(spec *corev1.PodSpec) []AntiAffinity {
	var out []AntiAffinity
	add := func(c *corev1.Container) {
		for _, port := range c.Ports {
			if port.HostPort <= 0 {
				continue
			}
			var e encoder
			e.text("host port")
			e.number(int64(port.HostPort))
			e.text(cmp.Or(string(port.Protocol), string(corev1.ProtocolTCP)))
			e.text(cmp.Or(port.HostIP, "0.0.0.0"))
			out = append(out, AntiAffinity{TopologyKey: corev1.LabelHostname, Set: e.sum()})
		}
	}
	for i := range spec.Containers {
		add(&spec.Containers[i])
	}
	for i := range spec.InitContainers {
		if c := &spec.InitContainers[i]; c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			add(c)
		}
	}
	return out
}

// matchesSelf reports whether a term selects the very pod that carries it. Of a namespace's labels only the name is
// known here, which is what a namespaceSelector usually asks for.
func matchesSelf(term *corev1.PodAffinityTerm, pod *corev1.Pod) bool {
	selector, err := metav1.LabelSelectorAsSelector(term.LabelSelector)
	if err != nil || !selector.Matches(labels.Set(pod.Labels)) {
		return false
	}
	if len(term.Namespaces) == 0 && term.NamespaceSelector == nil {
		return true
	}
	if slices.Contains(term.Namespaces, pod.Namespace) {
		return true
	}
	namespaces, err := metav1.LabelSelectorAsSelector(term.NamespaceSelector)
	return err == nil && namespaces.Matches(labels.Set{labelNamespaceName: pod.Namespace})
}

// setOf identifies the pods that a term selects.
func setOf(term *corev1.PodAffinityTerm, namespace string) string {
	var e encoder
	e.selector(term.LabelSelector)
	switch {
	case term.NamespaceSelector != nil:
		e.text("selected")
		e.selector(term.NamespaceSelector)
		fallthrough
	case len(term.Namespaces) > 0:
		for _, n := range sortedUnique(term.Namespaces) {
			e.text(n)
		}
	default:
		e.text(namespace)
	}
	return e.sum()
}

// selector writes a selector independent of the order of its parts. A nil selector, which selects nothing, differs
// from an empty one.
func (e *encoder) selector(s *metav1.LabelSelector) {
	selector, err := metav1.LabelSelectorAsSelector(s)
	if err != nil {
		e.text(err.Error())
		return
	}
	reqs, selectable := selector.Requirements()
	if !selectable {
		e.count(-1)
		return
	}
	texts := make([]string, 0, len(reqs))
	for i := range reqs {
		texts = append(texts, reqs[i].String())
	}
	texts = sortedUnique(texts)
	e.count(len(texts))
	for _, t := range texts {
		e.text(t)
	}
}
