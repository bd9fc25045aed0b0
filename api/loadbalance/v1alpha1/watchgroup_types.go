package v1alpha1

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// HashFunction is the first level of the two-level hash (section 5.3.1).
//
// +kubebuilder:validation:Enum=CRC32
type HashFunction string

// HashCRC32 is CRC32 (IEEE) of the hash key modulo the number of Virtual Nodes.
const HashCRC32 HashFunction = "CRC32"

// AssignmentPolicy is the second level of the two-level hash: which member gets which Virtual Nodes.
//
// +kubebuilder:validation:Enum=Balanced;ConsistentHash
type AssignmentPolicy string

const (
	// AssignmentBalanced gives every member its exact share and moves no more than that takes.
	AssignmentBalanced AssignmentPolicy = "Balanced"
	// AssignmentConsistentHash is the paper's ring.
	AssignmentConsistentHash AssignmentPolicy = "ConsistentHash"
)

// HandoffMode is how Virtual Nodes change hands.
//
// +kubebuilder:validation:Enum=Exclusive;Eventual
type HandoffMode string

const (
	// HandoffExclusive lets the new owner prefetch, then the old one drain, then the new one own: one owner, always.
	HandoffExclusive HandoffMode = "Exclusive"
	// HandoffEventual is the paper's: all slices change at once, and for a moment two members may work on one object.
	HandoffEventual HandoffMode = "Eventual"
)

// OptInPolicy says which objects of the group's resources take part.
//
// +kubebuilder:validation:Enum=Annotated;All;None
type OptInPolicy string

const (
	// OptInAnnotated takes objects with the annotation loadbalance.k8s.io/loadbalanced: "true" or a
	// loadbalance.k8s.io/hash-key, and the children of such objects (section 6.3.2).
	OptInAnnotated OptInPolicy = "Annotated"
	// OptInAll takes every object.
	OptInAll OptInPolicy = "All"
	// OptInNone takes no object: nothing is labelled. It is for members that see all objects anyway and work the Virtual
	// Node of each out for themselves, as active schedulers do. What such a group's resources are is then no business of
	// other groups.
	OptInNone OptInPolicy = "None"
)

// SelectorMode is how members find the objects of their Virtual Nodes.
//
// +kubebuilder:validation:Enum=Labels;ShardRange
type SelectorMode string

const (
	// SelectorLabels selects by the label that every object carries which takes part.
	SelectorLabels SelectorMode = "Labels"
	// SelectorShardRange selects by the API server's hash of a field that every object has, so that objects are not
	// labelled.
	SelectorShardRange SelectorMode = "ShardRange"
)

// ShardKey is the field that the API server hashes.
//
// +kubebuilder:validation:Enum=UID;Namespace
type ShardKey string

const (
	// ShardKeyUID is metadata.uid.
	ShardKeyUID ShardKey = "UID"
	// ShardKeyNamespace is metadata.namespace.
	ShardKeyNamespace ShardKey = "Namespace"
)

// Defaults of WatchGroupSpec.
const (
	DefaultVirtualNodes   = 1000
	DefaultLeaseDuration  = 15 * time.Second
	DefaultRenewDeadline  = 9 * time.Second
	DefaultRetryPeriod    = 2 * time.Second
	DefaultRequestTimeout = 5 * time.Second
	DefaultNewcomerGrace  = 10 * time.Second
)

// WatchGroupSpec says what is shared, and how.
//
// +kubebuilder:validation:XValidation:rule="self.virtualNodes == oldSelf.virtualNodes",message="virtualNodes is immutable: every labelled object carries a number that depends on it"
// +kubebuilder:validation:XValidation:rule="self.handoff != 'Eventual' || (has(self.resources) && size(self.resources) > 0)",message="handoff: Eventual is for groups with resources: members that divide keys rely on one owner at any time"
// +kubebuilder:validation:XValidation:rule="self.hash == oldSelf.hash",message="hash is immutable: every labelled object carries a number that depends on it"
// +kubebuilder:validation:XValidation:rule="self.selector == oldSelf.selector",fieldPath=".selector",message="selector is immutable: it decides in which Virtual Node an object is"
// +kubebuilder:validation:XValidation:rule="!has(self.shardKey) || !has(oldSelf.shardKey) || self.shardKey == oldSelf.shardKey",fieldPath=".shardKey",message="shardKey is immutable: it decides in which Virtual Node an object is"
// +kubebuilder:validation:XValidation:rule="has(self.shardKey) == (self.selector == 'ShardRange')",message="shardKey is required with selector ShardRange, and has no meaning without"
// +kubebuilder:validation:XValidation:rule="self.selector != 'ShardRange' || self.optIn == 'All'",fieldPath=".optIn",message="optIn Annotated does not go with selector ShardRange, which knows no annotations: it must be All"
// +kubebuilder:validation:XValidation:rule="self.selector != 'ShardRange' || self.assignment == 'Balanced'",fieldPath=".assignment",message="assignment ConsistentHash does not go with selector ShardRange, as it scatters Virtual Nodes over more ranges than a selector may have: it must be Balanced"
// +kubebuilder:validation:XValidation:rule="self.selector != 'ShardRange' || (has(self.resources) && size(self.resources) > 0)",fieldPath=".resources",message="selector ShardRange is for groups with resources: members that divide keys need no selector"
// +kubebuilder:validation:XValidation:rule="!has(self.shardKey) || self.shardKey != 'UID' || (has(self.resources) && size(self.resources) == 1)",fieldPath=".resources",message="several resources do not go with shardKey UID, as an object and what it owns have different UIDs: there must be one"
type WatchGroupSpec struct {
	// VirtualNodes is V, the number of partitions that objects hash to. It never changes. At least ten for each member
	// keep the busiest member within 1.1 times the mean.
	// +optional
	// +kubebuilder:default=1000
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100000
	VirtualNodes int32 `json:"virtualNodes,omitempty"`

	// Selector is how members find the objects of their Virtual Nodes. It never changes. With ShardRange a Virtual Node is
	// a range of the API server's hash space, all objects of the resources take part, and none is labelled. It saves
	// traffic where the API server has the feature gate ShardedListAndWatch, and is right, though not cheap, where it
	// does not.
	// +optional
	// +kubebuilder:default=Labels
	Selector SelectorMode `json:"selector,omitempty"`

	// ShardKey is the field that selector ShardRange hashes. It never changes. Namespace keeps what a controller owns in
	// the Virtual Node of its owner, and is for namespaced resources. UID is for one resource whose objects own nothing of
	// the group.
	// +optional
	ShardKey ShardKey `json:"shardKey,omitempty"`

	// Hash maps an object's hash key to its Virtual Node. It never changes. With selector ShardRange the hash is the API
	// server's, and this field has no meaning.
	// +optional
	// +kubebuilder:default=CRC32
	Hash HashFunction `json:"hash,omitempty"`

	// Assignment maps Virtual Nodes to members.
	// +optional
	// +kubebuilder:default=Balanced
	Assignment AssignmentPolicy `json:"assignment,omitempty"`

	// Handoff is how Virtual Nodes change hands.
	// +optional
	// +kubebuilder:default=Exclusive
	Handoff HandoffMode `json:"handoff,omitempty"`

	// Resources are what the members' controller reconciles and owns. The first level of the hash stands on the objects,
	// so groups with selector Labels that share a resource must have the same virtualNodes and hash. None: nothing is
	// labelled, and the members divide their work by keys that they hash themselves.
	// +optional
	// +listType=map
	// +listMapKey=group
	// +listMapKey=resource
	// +kubebuilder:validation:MaxItems=64
	Resources []Resource `json:"resources,omitempty"`

	// OptIn says which objects of the resources take part. It must be All with selector ShardRange.
	// +optional
	// +kubebuilder:default=Annotated
	OptIn OptInPolicy `json:"optIn,omitempty"`

	// Lease is how long members act on their Leases, and how long the others wait.
	// +optional
	// +kubebuilder:default={leaseDuration:"15s",renewDeadline:"9s",retryPeriod:"2s",requestTimeout:"5s"}
	Lease LeaseParameters `json:"lease,omitempty"`

	// NewcomerGrace is how long a member that has just come takes over only what has to move anyway. In a rolling update
	// it so replaces an old one, and each Virtual Node moves once.
	// +optional
	// +kubebuilder:default="10s"
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('0s')",message="must not be negative"
	NewcomerGrace *metav1.Duration `json:"newcomerGrace,omitempty"`

	// ReturnGrace is how long the Virtual Nodes of a member that has stopped wait for it to come back under its name.
	// It is for members with stable names, whose restart takes less time than two moves would; nobody reconciles
	// meanwhile. 0s, the default, gives them away at once.
	// +optional
	// +kubebuilder:default="0s"
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('0s')",message="must not be negative"
	ReturnGrace *metav1.Duration `json:"returnGrace,omitempty"`
}

// Resource names a resource of the API.
type Resource struct {
	// Group is the API group, "" for the core group.
	// +optional
	// +kubebuilder:default=""
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*)?$`
	Group string `json:"group"`

	// Resource is the plural name.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z]([-a-z0-9]*[a-z0-9])?$`
	Resource string `json:"resource"`
}

// LeaseParameters bound how long a member acts on its Lease. A member counts renewDeadline from before it sent a renewal,
// the coordinator leaseDuration from when it saw it, each on its own monotonic clock.
//
// +kubebuilder:validation:XValidation:rule="duration(self.renewDeadline) + duration(self.requestTimeout) < duration(self.leaseDuration)",message="renewDeadline plus requestTimeout must be shorter than leaseDuration: a write could land after another member took over"
// +kubebuilder:validation:XValidation:rule="duration(self.retryPeriod) < duration(self.renewDeadline)",message="retryPeriod must be shorter than renewDeadline"
type LeaseParameters struct {
	// LeaseDuration is how long after the last renewal a member counts as stopped. Whole seconds, as a Lease holds them.
	// +optional
	// +kubebuilder:default="15s"
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s') && duration(self) <= duration('1h') && duration(self).getMilliseconds() % 1000 == 0",message="must be whole seconds, at least 1s and at most 1h"
	LeaseDuration *metav1.Duration `json:"leaseDuration,omitempty"`

	// RenewDeadline is how long a member acts after it has sent the last renewal that succeeded.
	// +optional
	// +kubebuilder:default="9s"
	// +kubebuilder:validation:XValidation:rule="duration(self) > duration('0s')",message="must be positive"
	RenewDeadline *metav1.Duration `json:"renewDeadline,omitempty"`

	// RetryPeriod is the time between two renewals.
	// +optional
	// +kubebuilder:default="2s"
	// +kubebuilder:validation:XValidation:rule="duration(self) > duration('0s')",message="must be positive"
	RetryPeriod *metav1.Duration `json:"retryPeriod,omitempty"`

	// RequestTimeout is how long a write of a member may take until it has landed or never will.
	// +optional
	// +kubebuilder:default="5s"
	// +kubebuilder:validation:XValidation:rule="duration(self) > duration('0s')",message="must be positive"
	RequestTimeout *metav1.Duration `json:"requestTimeout,omitempty"`
}

// WithDefaults returns the spec with every field filled, as the API server fills it.
func (s WatchGroupSpec) WithDefaults() WatchGroupSpec {
	fill := func(d **metav1.Duration, fallback time.Duration) {
		if *d == nil {
			*d = &metav1.Duration{Duration: fallback}
		}
	}
	if s.VirtualNodes == 0 {
		s.VirtualNodes = DefaultVirtualNodes
	}
	if s.Selector == "" {
		s.Selector = SelectorLabels
	}
	if s.Hash == "" {
		s.Hash = HashCRC32
	}
	if s.Assignment == "" {
		s.Assignment = AssignmentBalanced
	}
	if s.Handoff == "" {
		s.Handoff = HandoffExclusive
	}
	if s.OptIn == "" {
		s.OptIn = OptInAnnotated
	}
	fill(&s.Lease.LeaseDuration, DefaultLeaseDuration)
	fill(&s.Lease.RenewDeadline, DefaultRenewDeadline)
	fill(&s.Lease.RetryPeriod, DefaultRetryPeriod)
	fill(&s.Lease.RequestTimeout, DefaultRequestTimeout)
	fill(&s.NewcomerGrace, DefaultNewcomerGrace)
	fill(&s.ReturnGrace, 0)
	return s
}

// Types of a WatchGroup's conditions. All but Accepted are True when something needs a look, so that a quiet group is
// Accepted and nothing else; their lastTransitionTime says since when.
const (
	// ConditionAccepted is False when the spec cannot be followed; no slice is written then.
	ConditionAccepted = "Accepted"
	// ConditionUnowned is True while some Virtual Node has no owner.
	ConditionUnowned = "Unowned"
	// ConditionMoving is True while some Virtual Node is on its way from one member to another.
	ConditionMoving = "Moving"
	// ConditionUnlabelled is True while objects that take part carry no label, so that no member sees them.
	ConditionUnlabelled = "Unlabelled"
	// ConditionUnfiltered is True while an API server sends members of a group with selector ShardRange what they did not
	// select. They drop it, so that nothing is wrong, but each receives everything. Other groups do not have it.
	ConditionUnfiltered = "Unfiltered"
)

// Reasons of a WatchGroup's conditions.
const (
	// ReasonAccepted: the spec is followed.
	ReasonAccepted = "Accepted"
	// ReasonInvalid: the spec is one that this coordinator does not understand.
	ReasonInvalid = "Invalid"
	// ReasonConflict: a group that was accepted before, or is older, has one of the resources, with other virtualNodes or
	// another hash.
	ReasonConflict = "ResourceConflict"
	// ReasonDeleting: the group is being deleted and waits for its members to stop.
	ReasonDeleting = "Deleting"
	// ReasonNoMembers: no member runs.
	ReasonNoMembers = "NoMembers"
	// ReasonHandoff: a handoff is under way.
	ReasonHandoff = "Handoff"
	// ReasonAllOwned, ReasonSettled and ReasonAllLabelled: there is nothing to look at.
	ReasonAllOwned    = "AllOwned"
	ReasonSettled     = "Settled"
	ReasonAllLabelled = "AllLabelled"
	// ReasonNoLabels: objects of a group with selector ShardRange, or optIn None, carry none.
	ReasonNoLabels = "NoLabels"
	// ReasonFiltered: the API server sends members what they select, as far as they have seen.
	ReasonFiltered = "Filtered"
	// ReasonNotFiltered: it does not, mostly because its feature gate ShardedListAndWatch is off.
	ReasonNotFiltered = "ServerDoesNotFilter"
	// ReasonBackfill: the backfill is at work on the objects.
	ReasonBackfill = "Backfill"
	// ReasonBackfillFailed: the backfill cannot read or label the objects; the message says why.
	ReasonBackfillFailed = "BackfillFailed"
)

// WatchGroupStatus is what the coordinator saw last. Nothing is decided by it.
type WatchGroupStatus struct {
	// ObservedGeneration is the generation of the spec that the status speaks of.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// Epoch is the last change of any slice.
	// +optional
	Epoch int64 `json:"epoch,omitempty"`

	// Members is how many members hold their Lease.
	// +optional
	// +kubebuilder:default=0
	Members int32 `json:"members"`

	// Owned is how many Virtual Nodes a member owns, including those that it is being asked to give up.
	// +optional
	// +kubebuilder:default=0
	Owned int32 `json:"owned"`

	// Moving is how many Virtual Nodes are on their way from one member to another.
	// +optional
	// +kubebuilder:default=0
	Moving int32 `json:"moving"`

	// Unowned is how many Virtual Nodes nobody owns.
	// +optional
	// +kubebuilder:default=0
	Unowned int32 `json:"unowned"`

	// UnownedVirtualNodes are their numbers.
	// +optional
	UnownedVirtualNodes VirtualNodeSet `json:"unownedVirtualNodes,omitempty"`

	// UnownedObjects is how many objects lie in Virtual Nodes that nobody owns. They are counted once the Virtual Nodes
	// have been unowned for a while.
	// +optional
	// +kubebuilder:default=0
	UnownedObjects int32 `json:"unownedObjects"`

	// UnlabelledObjects is how many objects take part and carry no label.
	// +optional
	// +kubebuilder:default=0
	UnlabelledObjects int32 `json:"unlabelledObjects"`

	// OldestUnlabelled is when the oldest of them was created.
	// +optional
	OldestUnlabelled *metav1.Time `json:"oldestUnlabelled,omitempty"`

	// Conditions are Accepted, Unowned, Moving and Unlabelled, and Unfiltered with selector ShardRange.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// WatchGroup is a set of members, the replicas of one controller, that share the objects of some resources (section 5.2).
// Members' Leases, their Pods and their VirtualNodeSlices are in its namespace; the objects may be anywhere.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=wg,categories=loadbalance
// +kubebuilder:metadata:annotations="api-approved.kubernetes.io=unapproved, the group is that of the paper's labels"
// +kubebuilder:validation:XValidation:rule="size(self.metadata.name) <= 63 && self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')",message="metadata.name must be a DNS label: it is part of its members' names"
// +kubebuilder:printcolumn:name="VNs",type=integer,JSONPath=`.spec.virtualNodes`,description="How many Virtual Nodes there are"
// +kubebuilder:printcolumn:name="Members",type=integer,JSONPath=`.status.members`
// +kubebuilder:printcolumn:name="Owned",type=integer,JSONPath=`.status.owned`
// +kubebuilder:printcolumn:name="Moving",type=integer,JSONPath=`.status.moving`
// +kubebuilder:printcolumn:name="Unowned",type=integer,JSONPath=`.status.unowned`
// +kubebuilder:printcolumn:name="Unlabelled",type=integer,JSONPath=`.status.unlabelledObjects`,description="Objects that no member sees yet"
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Epoch",type=integer,priority=1,JSONPath=`.status.epoch`
// +kubebuilder:printcolumn:name="Selector",type=string,priority=1,JSONPath=`.spec.selector`
// +kubebuilder:printcolumn:name="Assignment",type=string,priority=1,JSONPath=`.spec.assignment`
// +kubebuilder:printcolumn:name="Handoff",type=string,priority=1,JSONPath=`.spec.handoff`
// +kubebuilder:printcolumn:name="Accepted",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Accepted")].status`
// +kubebuilder:printcolumn:name="Unowned Set",type=string,priority=1,JSONPath=`.status.unownedVirtualNodes`
type WatchGroup struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +kubebuilder:validation:Required
	Spec   WatchGroupSpec   `json:"spec"`
	Status WatchGroupStatus `json:"status,omitempty"`
}

// WatchGroupList is a list of WatchGroups.
//
// +kubebuilder:object:root=true
type WatchGroupList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []WatchGroup `json:"items"`
}
