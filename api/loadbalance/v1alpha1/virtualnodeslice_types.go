package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// VirtualNodeSet is a set of Virtual Nodes as ascending ranges, for example "0-4,7". Half of 100,000 Virtual Nodes, with
// no two of them neighbours, take 300 kB; Balanced assignments take a few bytes.
//
// +kubebuilder:validation:MaxLength=600000
// +kubebuilder:validation:Pattern=`^([0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*)?$`
type VirtualNodeSet string

// VirtualNodeSliceSpec is the coordinator's word to one session of a member.
//
// +kubebuilder:validation:XValidation:rule="self.watchGroup == oldSelf.watchGroup",message="watchGroup is immutable"
// +kubebuilder:validation:XValidation:rule="self.member == oldSelf.member",message="member is immutable"
type VirtualNodeSliceSpec struct {
	// WatchGroup is the name of the group, in the same namespace.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	WatchGroup string `json:"watchGroup"`

	// Member is the member's name in the group: the name of its Pod, if it runs in one.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=189
	Member string `json:"member"`

	// Session is the life of the member that is spoken to: the holder of its Lease.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	Session string `json:"session,omitempty"`

	// Claim names the coordinator whose view the slice is part of.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	Claim string `json:"claim,omitempty"`

	// Epoch is that of the last change of the slice.
	// +kubebuilder:validation:Minimum=0
	Epoch int64 `json:"epoch"`

	// Owned is what the member reconciles.
	// +optional
	Owned VirtualNodeSet `json:"owned,omitempty"`

	// Grants say what has to be in the member's cache before it starts on the newest parts of Owned.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=4096
	Grants []Grant `json:"grants,omitempty"`

	// Incoming is what the member is to own soon, and lists and watches already.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=4096
	Incoming []Order `json:"incoming,omitempty"`

	// Draining is what the member is to give up: it starts nothing new there and finishes what it is at.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=4096
	Draining []Order `json:"draining,omitempty"`

	// Counts are the sizes of the sets, for people.
	// +optional
	Counts SpecCounts `json:"counts,omitempty"`
}

// SpecCounts are numbers of Virtual Nodes.
type SpecCounts struct {
	Owned    int32 `json:"owned"`
	Incoming int32 `json:"incoming"`
	Draining int32 `json:"draining"`
}

// Order tells a member to do something about some Virtual Nodes; the epoch identifies it.
type Order struct {
	Epoch        int64          `json:"epoch"`
	VirtualNodes VirtualNodeSet `json:"virtualNodes"`
}

// Grant makes a member the owner of some Virtual Nodes.
type Grant struct {
	Epoch        int64          `json:"epoch"`
	VirtualNodes VirtualNodeSet `json:"virtualNodes"`

	// Known is how far the member's caches must have come before it may start. If it is missing, nobody could tell, and
	// the member lists.
	// +optional
	Known *KnownVersions `json:"known,omitempty"`
}

// KnownVersions are resourceVersions, each to be compared within its own resource only.
type KnownVersions struct {
	// Versions are by resource, "resource.group", or "resource" for the core group.
	// +optional
	Versions map[string]string `json:"versions,omitempty"`
}

// VirtualNodeSliceStatus is the member's word. It counts if it is that of the session which the slice speaks to.
type VirtualNodeSliceStatus struct {
	// Session is the session of the member that speaks.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	Session string `json:"session,omitempty"`

	// Epoch is the last epoch of the slice that the member has acted on.
	// +optional
	Epoch int64 `json:"epoch,omitempty"`

	// Settled is the epoch up to which no read waits any more.
	// +optional
	Settled int64 `json:"settled,omitempty"`

	// Warm answers spec.incoming: the member has them in its caches.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=4096
	Warm []Order `json:"warm,omitempty"`

	// Released answers spec.draining: the member has ended all work there.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=100000
	Released []Release `json:"released,omitempty"`

	// Leaving is the member's wish to be relieved of everything before it stops.
	// +optional
	Leaving bool `json:"leaving,omitempty"`

	// Unfiltered are the resources of which the API server sends the member what it did not select, "resource.group", or
	// "resource" for the core group. Nothing is decided by it.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=64
	Unfiltered []string `json:"unfiltered,omitempty"`
}

// Release is a member's word that it has ended all work on some Virtual Nodes and will start none.
type Release struct {
	// Epoch is that of the order to drain.
	Epoch        int64          `json:"epoch"`
	VirtualNodes VirtualNodeSet `json:"virtualNodes"`

	// Known becomes that of the next owner's grant.
	// +optional
	Known *KnownVersions `json:"known,omitempty"`
}

// VirtualNodeSlice is what one member of a WatchGroup has to do with which Virtual Nodes (section 6.3.3). The coordinator
// writes the spec, the member the status; both on the condition that the object is still the one that they read.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=vnslice,categories=loadbalance
// +kubebuilder:selectablefield:JSONPath=`.spec.watchGroup`
// +kubebuilder:metadata:annotations="api-approved.kubernetes.io=unapproved, the group is that of the paper's labels"
// +kubebuilder:validation:XValidation:rule="self.metadata.name == self.spec.watchGroup + '.' + self.spec.member",message="metadata.name must be spec.watchGroup and spec.member, joined by a dot"
// +kubebuilder:printcolumn:name="Group",type=string,JSONPath=`.spec.watchGroup`
// +kubebuilder:printcolumn:name="Member",type=string,JSONPath=`.spec.member`
// +kubebuilder:printcolumn:name="Owned",type=integer,JSONPath=`.spec.counts.owned`
// +kubebuilder:printcolumn:name="Incoming",type=integer,JSONPath=`.spec.counts.incoming`
// +kubebuilder:printcolumn:name="Draining",type=integer,JSONPath=`.spec.counts.draining`
// +kubebuilder:printcolumn:name="Epoch",type=integer,JSONPath=`.spec.epoch`
// +kubebuilder:printcolumn:name="Settled",type=integer,JSONPath=`.status.settled`,description="Behind Epoch while the member catches up"
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Session",type=string,priority=1,JSONPath=`.spec.session`
// +kubebuilder:printcolumn:name="Leaving",type=boolean,priority=1,JSONPath=`.status.leaving`
// +kubebuilder:printcolumn:name="VNs",type=string,priority=1,JSONPath=`.spec.owned`
type VirtualNodeSlice struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +kubebuilder:validation:Required
	Spec   VirtualNodeSliceSpec   `json:"spec"`
	Status VirtualNodeSliceStatus `json:"status,omitempty"`
}

// VirtualNodeSliceList is a list of VirtualNodeSlices.
//
// +kubebuilder:object:root=true
type VirtualNodeSliceList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []VirtualNodeSlice `json:"items"`
}
