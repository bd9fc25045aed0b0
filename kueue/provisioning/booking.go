package provisioning

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	autoscalingv1 "k8s.io/autoscaler/cluster-autoscaler/apis/provisioningrequest/autoscaling.x-k8s.io/v1"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
)

const (
	// ClassName is the provisioningClassName that this package serves. The API takes a DNS subdomain, and so no slash.
	ClassName = "capacity.fleet.lucy.sh"

	// LabelBooking is on every CapacityRequest of a booking, handed over or not; its value is the
	// ProvisioningRequest's UID.
	LabelBooking = "fleet.lucy.sh/booking"
	// AnnotationBooking is on the same objects and holds the ProvisioningRequest's name.
	AnnotationBooking = "fleet.lucy.sh/booking-name"

	// annotationPodSetGroup is Kueue's: pod sets of one workload that have to share one domain.
	annotationPodSetGroup = "kueue.x-k8s.io/podset-group-name"

	namePrefix = "booking-"
	// maxStem leaves room for the prefix, a hash and two numbers in 63 characters.
	maxStem = 32
)

// PodSet is a number of equal pods.
type PodSet struct {
	// Profile is what each of them needs of a node, the booking's group included.
	Profile capacity.Profile
	Count   int32
}

// Booking is what one ProvisioningRequest asks for.
type Booking struct {
	Key     types.NamespacedName
	UID     types.UID
	PodSets []PodSet
}

// PodTemplate is a pod template as a booking reads it.
type PodTemplate struct {
	Template corev1.PodTemplateSpec
	// Priority is the value of the template's priority class, where the template does not hold it.
	Priority int32
}

// BookingOf reads a ProvisioningRequest; templates are those of its pod sets, in order.
//
// Pod sets that ask for one topology domain (kueue.x-k8s.io/podset-required-topology, or required affinity to
// themselves) are a group each, or together where Kueue is told to keep them together; the others are one group. Each
// group comes as a whole or not at all.
func BookingOf(pr *autoscalingv1.ProvisioningRequest, templates []PodTemplate) Booking {
	b := Booking{Key: types.NamespacedName{Namespace: pr.Namespace, Name: pr.Name}, UID: pr.UID}
	members := map[string]int32{}
	for i, set := range pr.Spec.PodSets {
		t := &templates[i]
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: pr.Namespace, Name: pr.Name, Labels: t.Template.Labels, Annotations: t.Template.Annotations,
			},
			Spec: t.Template.Spec,
		}
		p := capacity.ProfileOfPod(pod)
		if pod.Spec.Priority == nil {
			p.Priority = t.Priority
		}
		group := capacity.Group{Name: b.groupName("all")}
		if p.Group != nil && p.Group.TopologyKey != "" {
			group.TopologyKey = p.Group.TopologyKey
			group.Name = b.groupName("set-" + strconv.Itoa(i))
			if together := t.Template.Annotations[annotationPodSetGroup]; together != "" {
				group.Name = b.groupName("group-" + together)
			}
		}
		p.Group = &group
		members[group.Name] += set.Count
		b.PodSets = append(b.PodSets, PodSet{Profile: p.Canonical(), Count: set.Count})
	}
	for i := range b.PodSets {
		p := &b.PodSets[i].Profile
		*p = p.WithMinCount(members[p.Group.Name])
	}
	return b
}

func (b Booking) groupName(part string) string {
	return b.Key.Namespace + "/provisioning/" + b.stem() + "/" + short(part, maxStem)
}

// stem identifies the booking in names: the request's name, shortened, and a hash of its UID.
func (b Booking) stem() string {
	return stemOf(b.Key.Name, b.UID)
}

func stemOf(name string, uid types.UID) string {
	return strings.TrimRight(name[:min(len(name), maxStem)], ".-") + "-" + hash(string(uid))
}

// short cuts a text that is too long, and keeps what it stood for apart by a hash.
func short(s string, room int) string {
	if len(s) <= room {
		return s
	}
	return s[:room] + "-" + hash(s)
}

func hash(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:])[:10]
}

// requestName names the CapacityRequest of one pod. It depends on nothing but its arguments, so that writing it again
// is harmless.
func requestName(stem string, podSet int, index int32) string {
	return fmt.Sprintf("%s%s-%d-%d", namePrefix, stem, podSet, index)
}

// MaxPods is how many pods one booking or workload may have that asks by CapacityRequests: there is an object for each, and
// anybody who may create a Job chooses the number.
const MaxPods = 100_000

// tooMany says that the request announces more pods than are served; empty where it does not.
func tooMany(pr *autoscalingv1.ProvisioningRequest) string {
	var total int64
	for _, set := range pr.Spec.PodSets {
		total += int64(set.Count)
	}
	if total <= MaxPods {
		return ""
	}
	return fmt.Sprintf("spec.podSets: %d pods are more than %d, the most that one request can ask for", total, MaxPods)
}

// Slots lists the names of all requests of a booking, with the pod set that each belongs to; none where they are too many.
func Slots(pr *autoscalingv1.ProvisioningRequest) map[string]int {
	stem := stemOf(pr.Name, pr.UID)
	slots := map[string]int{}
	if tooMany(pr) != "" {
		return slots
	}
	for i, set := range pr.Spec.PodSets {
		for n := range set.Count {
			slots[requestName(stem, i, n)] = i
		}
	}
	return slots
}

// Request is the CapacityRequest of one slot, owned by the ProvisioningRequest, and so counted until it is deleted.
func (b Booking) Request(name string, podSet int) *fleetv1alpha1.CapacityRequest {
	controller := true
	return &fleetv1alpha1.CapacityRequest{
		ObjectMeta: metav1.ObjectMeta{
			Namespace:   b.Key.Namespace,
			Name:        name,
			Labels:      map[string]string{LabelBooking: string(b.UID)},
			Annotations: map[string]string{AnnotationBooking: b.Key.Name},
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: autoscalingv1.SchemeGroupVersion.String(), Kind: "ProvisioningRequest",
				Name: b.Key.Name, UID: b.UID, Controller: &controller,
			}},
		},
		Spec: b.PodSets[podSet].Profile.RequestSpec(),
	}
}
