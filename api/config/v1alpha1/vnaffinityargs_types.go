package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// VNAffinityArgs are the args of the scheduler plugin VNAffinity, given under pluginConfig of a KubeSchedulerConfiguration.
// Every scheduler profile has its own. Each section turns a role of the plugin on; without any the plugin does nothing.
//
// +kubebuilder:object:root=true
type VNAffinityArgs struct {
	metav1.TypeMeta `json:",inline"`

	// Members spreads the members of WatchGroups. `members: {}` does it with all defaults.
	Members *VNAffinityMembers `json:"members,omitempty"`
	// Objects places pods that carry a Virtual Node or a hash key near the member, or in the domain, that it belongs to.
	Objects *VNAffinityObjects `json:"objects,omitempty"`
	// Schedulers lets several replicas of the scheduler be active at once.
	Schedulers *VNAffinitySchedulers `json:"schedulers,omitempty"`
}

// VNAffinityMembers is the role Members. It serves pods with the label loadbalance.k8s.io/watch-group.
type VNAffinityMembers struct {
	// TopologyKeys are the node labels whose values name failure domains, the most important one first: a domain of a later
	// key only decides between nodes that are as good by those before. Default topology.kubernetes.io/zone, then
	// kubernetes.io/hostname. At most 4.
	TopologyKeys []string `json:"topologyKeys,omitempty"`
	// MaxShareLostPerDomain is a hard limit by topology key: the share of a group's Virtual Nodes, above 0 and at most 1,
	// that may be lost with one domain of that key. A member that is alone in its domain is always let in. No limit by
	// default. The keys need not be among TopologyKeys.
	MaxShareLostPerDomain map[string]float64 `json:"maxShareLostPerDomain,omitempty"`
}

// ObjectsMode says which domain a pod belongs to.
type ObjectsMode string

const (
	// ObjectsNearOwners is the domain in which the member runs that owns the pod's Virtual Node. The default.
	ObjectsNearOwners ObjectsMode = "Owners"
	// ObjectsInDomains is the domain that the second level of the hash names when the domains themselves are the members.
	ObjectsInDomains ObjectsMode = "Domains"
)

// VNAffinityObjects is the role Objects. It serves pods with the label loadbalance.k8s.io/vn or the annotation
// loadbalance.k8s.io/hash-key, which goes first.
type VNAffinityObjects struct {
	// Mode is Owners (default) or Domains.
	Mode ObjectsMode `json:"mode,omitempty"`
	// TopologyKey is the node label whose values name the domains. Default topology.kubernetes.io/zone.
	TopologyKey string `json:"topologyKey,omitempty"`
	// Namespace and WatchGroup name the group whose members own the Virtual Nodes. Required in mode Owners, and refused in
	// mode Domains, which needs no group.
	Namespace  string `json:"namespace,omitempty"`
	WatchGroup string `json:"watchGroup,omitempty"`
	// VirtualNodes is V in mode Domains, 1 to 100000; default 1000. It has to be that of the group that labels the pods, if
	// one does. Refused in mode Owners, where the WatchGroup says it.
	VirtualNodes int32 `json:"virtualNodes,omitempty"`
	// NodeSelector is what the labels of a node have to be for its domain to count in mode Domains. Default: any.
	NodeSelector map[string]string `json:"nodeSelector,omitempty"`
	// LoadFactor bounds how many such pods a domain gets, as a multiple of its fair part. At least 1; default 1.25.
	LoadFactor float64 `json:"loadFactor,omitempty"`
	// MinLoad is up to how many such pods a domain is never full, so that handfuls stay together. Default 10.
	MinLoad *int32 `json:"minLoad,omitempty"`
}

// VNAffinitySchedulers is the role Schedulers.
type VNAffinitySchedulers struct {
	// Namespace and WatchGroup name the group whose members the replicas of the scheduler are.
	Namespace  string `json:"namespace"`
	WatchGroup string `json:"watchGroup"`
	// Member is the replica's name in the group. Default: the Pod's name, else the host's.
	Member string `json:"member,omitempty"`
}
