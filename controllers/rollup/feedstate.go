package rollup

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	fleetpb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
	"github.com/drover-sh/drover/capacity/wire"
)

// feedState is one message of the feed, resolved and checked. It is never changed once it is made.
type feedState struct {
	session  string
	machines map[string]*machine
	// byProviderID and byNodeName find the machine that a node without a label belongs to.
	byProviderID, byNodeName map[string]string
	offerings                map[string]*fleetv1alpha1.AvailableCapacitySpec
	reclaims                 map[string]*reclaim
	verdicts                 map[string]verdict
	// terminating machines are being ended; their nodes stay closed.
	terminating map[string]bool
	receivedAt  time.Time
}

// machine is a machine on its way.
type machine struct {
	id         string
	spec       fleetv1alpha1.UpcomingNodeSpec
	phase      fleetv1alpha1.UpcomingNodePhase
	nodeName   string
	providerID string
	started    *metav1.Time
	expected   *metav1.Time
	message    string
}

// reclaim asks for count of the candidates, machines by id.
type reclaim struct {
	id         string
	candidates []string
	count      int
	reason     string
}

func (r *reclaim) lists(machine string) bool { return slices.Contains(r.candidates, machine) }

type verdict struct {
	state   capacity.VerdictState
	short   int32
	reason  string
	nearest string
}

// maxMessage is what the schema allows for an UpcomingNode's message.
const maxMessage = 1024

// newFeedState reads a message. An entry that cannot be used is left out and reported in problems, without harm to the
// others; a machine or offering that was known before stays as it was, so that a faulty line never deletes an object.
func newFeedState(msg *fleetpb.FeedState, before *feedState, now time.Time) (s *feedState, problems []error) {
	s = &feedState{
		session:      msg.GetSession(),
		machines:     map[string]*machine{},
		byProviderID: map[string]string{},
		byNodeName:   map[string]string{},
		offerings:    map[string]*fleetv1alpha1.AvailableCapacitySpec{},
		reclaims:     map[string]*reclaim{},
		verdicts:     map[string]verdict{},
		terminating:  map[string]bool{},
		receivedAt:   now,
	}
	bad := func(kind string, index int, name string, err error) {
		problems = append(problems, fmt.Errorf("%s[%d] (%q): %w", kind, index, name, err))
	}
	for i, m := range msg.GetMachines() {
		known, err := machineFromProto(m, msg.GetShapes())
		if err != nil {
			bad("machines", i, m.GetId(), err)
			if before == nil || before.machines[m.GetId()] == nil {
				continue
			}
			known = before.machines[m.GetId()]
		}
		s.machines[known.id] = known
		if known.providerID != "" {
			s.byProviderID[known.providerID] = known.id
		}
		if known.nodeName != "" {
			s.byNodeName[known.nodeName] = known.id
		}
	}
	for i, o := range msg.GetOfferings() {
		spec, err := offeringFromProto(o, msg.GetShapes())
		if err != nil {
			bad("offerings", i, o.GetName(), err)
			if before == nil || before.offerings[o.GetName()] == nil {
				continue
			}
			spec = before.offerings[o.GetName()]
		}
		s.offerings[o.GetName()] = spec
	}
	for i, r := range msg.GetReclaims() {
		// The id becomes a taint's value.
		if errs := validation.IsValidLabelValue(r.GetId()); r.GetId() == "" || len(errs) > 0 {
			bad("reclaims", i, r.GetId(), errors.Join(errors.New("id: must be a label value and not empty"), joined(errs)))
			continue
		}
		s.reclaims[r.GetId()] = &reclaim{
			id: r.GetId(), candidates: r.GetCandidates(), count: int(max(r.GetCount(), 0)), reason: r.GetReason(),
		}
	}
	for _, id := range msg.GetTerminating() {
		s.terminating[id] = true
	}
	for _, v := range msg.GetVerdicts() {
		s.verdicts[v.GetNeedId()] = verdict{
			state: capacity.VerdictState(v.GetState()), short: v.GetShort(), reason: v.GetReason(), nearest: v.GetNearestOffering(),
		}
	}
	return s, problems
}

func joined(messages []string) error {
	var errs []error
	for _, m := range messages {
		errs = append(errs, errors.New(m))
	}
	return errors.Join(errs...)
}

func shapeAt(shapes []*fleetpb.NodeShape, index int32) (*fleetpb.NodeShape, error) {
	if index < 0 || int(index) >= len(shapes) {
		return nil, fmt.Errorf("shape: index %d is outside of the %d shapes", index, len(shapes))
	}
	return shapes[index], nil
}

// partsOf reads what a machine and an offering take from a shape.
func partsOf(shape *fleetpb.NodeShape) (fleetv1alpha1.ResourceList, []corev1.Taint, error) {
	resources, err := capacity.ParseResources(shape.GetResources())
	if err != nil {
		return nil, nil, fmt.Errorf("shape: %w", err)
	}
	var taints []corev1.Taint
	for i, t := range shape.GetTaints() {
		taint, err := wire.TaintFromProto(t)
		if err != nil {
			return nil, nil, fmt.Errorf("shape: taints[%d]: %w", i, err)
		}
		taints = append(taints, taint)
	}
	return fleetv1alpha1.ResourceList(resources.List()), taints, nil
}

func machineFromProto(m *fleetpb.UpcomingMachine, shapes []*fleetpb.NodeShape) (*machine, error) {
	if errs := validation.IsDNS1123Label(m.GetId()); len(errs) > 0 {
		return nil, fmt.Errorf("id: %w", joined(errs))
	}
	phase := fleetv1alpha1.UpcomingNodePhase(m.GetPhase())
	if _, known := phaseOrder[phase]; !known {
		return nil, fmt.Errorf("phase: %q is unknown", m.GetPhase())
	}
	shape, err := shapeAt(shapes, m.GetShape())
	if err != nil {
		return nil, err
	}
	resources, taints, err := partsOf(shape)
	if err != nil {
		return nil, err
	}
	labels := maps.Clone(shape.GetLabels())
	if labels == nil && len(m.GetLabels()) > 0 {
		labels = map[string]string{}
	}
	maps.Copy(labels, m.GetLabels())
	known := &machine{
		id:         m.GetId(),
		spec:       fleetv1alpha1.UpcomingNodeSpec{Labels: labels, Resources: resources, Taints: taints},
		phase:      phase,
		nodeName:   m.GetNodeName(),
		providerID: m.GetProviderId(),
		message:    truncate(m.GetMessage(), maxMessage),
	}
	// A Kubernetes time has whole seconds; anything finer would differ from what is stored for ever.
	if t := m.GetProvisioningStartTime(); t.IsValid() {
		known.started = &metav1.Time{Time: t.AsTime().Truncate(time.Second)}
	}
	if t := m.GetEstimatedReadyTime(); t.IsValid() {
		known.expected = &metav1.Time{Time: t.AsTime().Truncate(time.Second)}
	}
	return known, nil
}

func offeringFromProto(o *fleetpb.Offering, shapes []*fleetpb.NodeShape) (*fleetv1alpha1.AvailableCapacitySpec, error) {
	if errs := validation.IsDNS1123Subdomain(o.GetName()); len(errs) > 0 {
		return nil, fmt.Errorf("name: %w", joined(errs))
	}
	shape, err := shapeAt(shapes, o.GetShape())
	if err != nil {
		return nil, err
	}
	resources, taints, err := partsOf(shape)
	if err != nil {
		return nil, err
	}
	availability := fleetv1alpha1.Availability(o.GetAvailability())
	switch availability {
	case fleetv1alpha1.AvailabilityHigh, fleetv1alpha1.AvailabilityMedium, fleetv1alpha1.AvailabilityLow,
		fleetv1alpha1.AvailabilityNone:
	default:
		return nil, fmt.Errorf("availability: %q is unknown", o.GetAvailability())
	}
	if cost := o.GetCost(); math.IsNaN(cost) || math.IsInf(cost, 0) || cost < 0 {
		return nil, fmt.Errorf("cost: %v is no price", cost)
	}
	requirements, err := wire.RequirementsFromProto(o.GetRequirements())
	if err != nil {
		return nil, fmt.Errorf("requirements: %w", err)
	}
	spec := &fleetv1alpha1.AvailableCapacitySpec{
		Resources:                  resources,
		AvailableCount:             max(o.GetAvailableCount(), 0),
		Availability:               availability,
		Cost:                       o.GetCost(),
		SupportsAtomicProvisioning: o.GetSupportsAtomicProvisioning(),
		NodeTemplate:               fleetv1alpha1.NodeTemplate{Labels: shape.GetLabels(), Taints: taints},
	}
	for _, r := range requirements {
		spec.Requirements = append(spec.Requirements, fleetv1alpha1.NodeSelectorRequirement{
			Key: r.Key, Operator: corev1.NodeSelectorOperator(r.Operator), Values: r.Values,
		})
	}
	if d := o.GetEstimatedProvisioningTime(); d.IsValid() && d.AsDuration() > 0 {
		spec.EstimatedProvisioningTime = &metav1.Duration{Duration: d.AsDuration()}
	}
	return spec, nil
}

// truncate cuts text to at most n bytes, never within a character.
func truncate(text string, n int) string {
	if len(text) <= n {
		return text
	}
	for n > 0 && text[n]&0xc0 == 0x80 {
		n--
	}
	return text[:n]
}

// changes says which objects a new state may touch.
type changes struct {
	machines, offerings []string
	reclaims            bool
}

// diff compares a state with the one before. Of two states that say the same nothing is left to do.
func (s *feedState) diff(before *feedState) changes {
	if before == nil {
		before = &feedState{}
	}
	c := changes{
		reclaims: !reflect.DeepEqual(s.reclaims, before.reclaims) || !reflect.DeepEqual(s.terminating, before.terminating),
	}
	c.machines = changedKeys(s.machines, before.machines)
	c.offerings = changedKeys(s.offerings, before.offerings)
	return c
}

func changedKeys[V any](now, before map[string]V) []string {
	var changed []string
	for key, value := range now {
		if old, known := before[key]; !known || !reflect.DeepEqual(old, value) {
			changed = append(changed, key)
		}
	}
	for key := range before {
		if _, known := now[key]; !known {
			changed = append(changed, key)
		}
	}
	slices.Sort(changed)
	return changed
}
