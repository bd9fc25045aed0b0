package v1alpha1

import (
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Defaults of VNAffinityArgs.
const (
	DefaultObjectsVirtualNodes         = 1000
	DefaultLoadFactor                  = 1.25
	DefaultMinLoad                     = 10
	maxTopologyKeys                    = 4
	maxObjectsVirtualNodes     int32   = 100_000
	maxLoadFactor              float64 = 1000
)

var _ Configuration = &VNAffinityArgs{}

// VNAffinityArgsKind is the kind of VNAffinityArgs.
const VNAffinityArgsKind = "VNAffinityArgs"

// Kind implements Configuration.
func (a *VNAffinityArgs) Kind() string { return VNAffinityArgsKind }

// Default implements Configuration.
func (a *VNAffinityArgs) Default() {
	if m := a.Members; m != nil && len(m.TopologyKeys) == 0 {
		m.TopologyKeys = []string{corev1.LabelTopologyZone, corev1.LabelHostname}
	}
	if o := a.Objects; o != nil {
		if o.Mode == "" {
			o.Mode = ObjectsNearOwners
		}
		if o.TopologyKey == "" {
			o.TopologyKey = corev1.LabelTopologyZone
		}
		if o.Mode == ObjectsInDomains && o.VirtualNodes == 0 {
			o.VirtualNodes = DefaultObjectsVirtualNodes
		}
		if o.LoadFactor == 0 {
			o.LoadFactor = DefaultLoadFactor
		}
		if o.MinLoad == nil {
			least := int32(DefaultMinLoad)
			o.MinLoad = &least
		}
	}
}

// Validate implements Configuration. It expects defaults to be filled.
func (a *VNAffinityArgs) Validate() field.ErrorList {
	var errs field.ErrorList
	if a.Members != nil {
		errs = append(errs, a.Members.validate(field.NewPath("members"))...)
	}
	if a.Objects != nil {
		errs = append(errs, a.Objects.validate(field.NewPath("objects"))...)
	}
	if a.Schedulers != nil {
		errs = append(errs, a.Schedulers.validate(field.NewPath("schedulers"))...)
	}
	return errs
}

func (m *VNAffinityMembers) validate(path *field.Path) field.ErrorList {
	var errs field.ErrorList
	keys := path.Child("topologyKeys")
	if len(m.TopologyKeys) > maxTopologyKeys {
		errs = append(errs, field.TooMany(keys, len(m.TopologyKeys), maxTopologyKeys))
	}
	for i, key := range m.TopologyKeys {
		errs = append(errs, labelName(keys.Index(i), key)...)
		if slices.Contains(m.TopologyKeys[:i], key) {
			errs = append(errs, field.Duplicate(keys.Index(i), key))
		}
	}
	for _, key := range slices.Sorted(maps.Keys(m.MaxShareLostPerDomain)) {
		at := path.Child("maxShareLostPerDomain").Key(key)
		errs = append(errs, labelName(at, key)...)
		if share := m.MaxShareLostPerDomain[key]; !(share > 0 && share <= 1) {
			errs = append(errs, field.Invalid(at, share, "must be above 0 and at most 1"))
		}
	}
	return errs
}

func (o *VNAffinityObjects) validate(path *field.Path) field.ErrorList {
	errs := labelName(path.Child("topologyKey"), o.TopologyKey)
	refuse := func(name string, value any, given bool) {
		if given {
			errs = append(errs, field.Invalid(path.Child(name), value, "must be left out in mode "+string(o.Mode)))
		}
	}
	switch o.Mode {
	case ObjectsNearOwners:
		errs = append(errs, group(path, o.Namespace, o.WatchGroup)...)
		refuse("virtualNodes", o.VirtualNodes, o.VirtualNodes != 0)
		refuse("nodeSelector", o.NodeSelector, len(o.NodeSelector) > 0)
	case ObjectsInDomains:
		refuse("namespace", o.Namespace, o.Namespace != "")
		refuse("watchGroup", o.WatchGroup, o.WatchGroup != "")
		if o.VirtualNodes < 1 || o.VirtualNodes > maxObjectsVirtualNodes {
			errs = append(errs, field.Invalid(path.Child("virtualNodes"), o.VirtualNodes, "must be at least 1 and at most 100000"))
		}
		for _, key := range slices.Sorted(maps.Keys(o.NodeSelector)) {
			at := path.Child("nodeSelector").Key(key)
			errs = append(errs, labelName(at, key)...)
			for _, msg := range validation.IsValidLabelValue(o.NodeSelector[key]) {
				errs = append(errs, field.Invalid(at, o.NodeSelector[key], msg))
			}
		}
	default:
		errs = append(errs, field.NotSupported(path.Child("mode"), o.Mode, []ObjectsMode{ObjectsNearOwners, ObjectsInDomains}))
	}
	if !(o.LoadFactor >= 1 && o.LoadFactor <= maxLoadFactor) {
		errs = append(errs, field.Invalid(path.Child("loadFactor"), o.LoadFactor, "must be at least 1 and at most 1000"))
	}
	if o.MinLoad != nil && *o.MinLoad < 0 {
		errs = append(errs, field.Invalid(path.Child("minLoad"), *o.MinLoad, "must not be negative"))
	}
	return errs
}

func (s *VNAffinitySchedulers) validate(path *field.Path) field.ErrorList {
	errs := group(path, s.Namespace, s.WatchGroup)
	if s.Member != "" {
		for _, msg := range validation.IsDNS1123Subdomain(s.Member) {
			errs = append(errs, field.Invalid(path.Child("member"), s.Member, msg))
		}
	}
	return errs
}

// group checks the names of a WatchGroup, which are labels: those of its slices are joined from it by a dot.
func group(path *field.Path, namespace, name string) field.ErrorList {
	var errs field.ErrorList
	for _, f := range []struct{ field, value string }{{"namespace", namespace}, {"watchGroup", name}} {
		if f.value == "" {
			errs = append(errs, field.Required(path.Child(f.field), "names the WatchGroup"))
			continue
		}
		for _, msg := range validation.IsDNS1123Label(f.value) {
			errs = append(errs, field.Invalid(path.Child(f.field), f.value, msg))
		}
	}
	return errs
}

func labelName(path *field.Path, name string) field.ErrorList {
	var errs field.ErrorList
	for _, msg := range validation.IsQualifiedName(name) {
		errs = append(errs, field.Invalid(path, name, msg))
	}
	return errs
}
