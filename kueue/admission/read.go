package admission

import (
	"context"
	"fmt"
	"maps"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
)

// check is one of our AdmissionChecks, its parameters read.
type check struct {
	object *kueue.AdmissionCheck
	config fleetv1alpha1.CapacityCheckConfigSpec
	// problem says why the parameters cannot be used.
	problem string
}

// cluster is what one pass reads.
type cluster struct {
	checks   []*check
	hints    []Hint
	upcoming []Launched
	nodes    []corev1.Node
	daemons  []appsv1.DaemonSet
	flavors  map[string]*kueue.ResourceFlavor
	queues   map[string]*kueue.ClusterQueue
}

func (c *cluster) check(name string) *check {
	i := slices.IndexFunc(c.checks, func(k *check) bool { return k.object.Name == name })
	return c.checks[i]
}

func (c *cluster) shapes() []NodeShape {
	out := make([]NodeShape, 0, len(c.nodes))
	for i := range c.nodes {
		out = append(out, NodeShape{Labels: c.nodes[i].Labels, Allocatable: capacity.ResourcesOf(c.nodes[i].Status.Allocatable)})
	}
	return out
}

func (p *Pass) read(ctx context.Context) (*cluster, error) {
	c := &cluster{flavors: map[string]*kueue.ResourceFlavor{}, queues: map[string]*kueue.ClusterQueue{}}
	var checks kueue.AdmissionCheckList
	if err := p.client.List(ctx, &checks); err != nil {
		return nil, fmt.Errorf("listing AdmissionChecks: %w", err)
	}
	for i := range checks.Items {
		object := &checks.Items[i]
		if object.Spec.ControllerName != ControllerName {
			continue
		}
		k := &check{object: object}
		var err error
		if k.config, k.problem, err = p.parameters(ctx, object.Spec.Parameters); err != nil {
			return nil, err
		}
		c.checks = append(c.checks, k)
	}
	var hints fleetv1alpha1.AvailableCapacityList
	if err := p.client.List(ctx, &hints, client.InNamespace(p.opts.Namespace)); err != nil {
		return nil, fmt.Errorf("listing AvailableCapacity: %w", err)
	}
	var daemonSets appsv1.DaemonSetList
	if err := p.client.List(ctx, &daemonSets, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("listing DaemonSets: %w", err)
	}
	c.daemons = daemonSets.Items
	for i := range hints.Items {
		if hints.Items[i].DeletionTimestamp != nil {
			continue
		}
		h := HintOf(&hints.Items[i])
		for j := range daemonSets.Items {
			if d := capacity.DaemonOf(&daemonSets.Items[j]); d.RunsOn(h.Template.Labels, h.Template.Taints) {
				h.Template.Allocatable = h.Template.Allocatable.Sub(d.Resources)
			}
		}
		c.hints = append(c.hints, h)
	}
	var upcoming fleetv1alpha1.UpcomingNodeList
	if err := p.client.List(ctx, &upcoming, client.InNamespace(p.opts.Namespace), client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("listing UpcomingNodes: %w", err)
	}
	for i := range upcoming.Items {
		c.upcoming = append(c.upcoming, Launched{Name: upcoming.Items[i].Name, Labels: upcoming.Items[i].Spec.Labels})
	}
	var nodes corev1.NodeList
	if err := p.client.List(ctx, &nodes, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("listing nodes: %w", err)
	}
	c.nodes = nodes.Items
	var flavors kueue.ResourceFlavorList
	if err := p.client.List(ctx, &flavors, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("listing ResourceFlavors: %w", err)
	}
	for i := range flavors.Items {
		c.flavors[flavors.Items[i].Name] = &flavors.Items[i]
	}
	var queues kueue.ClusterQueueList
	if err := p.client.List(ctx, &queues, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("listing ClusterQueues: %w", err)
	}
	for i := range queues.Items {
		c.queues[queues.Items[i].Name] = &queues.Items[i]
	}
	return c, nil
}

// parameters reads a check's configuration. A reference that leads nowhere is a problem of the check, not an error of the
// pass.
func (p *Pass) parameters(ctx context.Context, ref *kueue.AdmissionCheckParametersReference,
) (spec fleetv1alpha1.CapacityCheckConfigSpec, problem string, err error) {
	if ref == nil {
		return spec.WithDefaults(), "", nil
	}
	if ref.APIGroup != fleetv1alpha1.GroupName || ref.Kind != "CapacityCheckConfig" {
		return spec.WithDefaults(), fmt.Sprintf("parameters: %s %q of group %q is no CapacityCheckConfig of group %s",
			ref.Kind, ref.Name, ref.APIGroup, fleetv1alpha1.GroupName), nil
	}
	var config fleetv1alpha1.CapacityCheckConfig
	err = p.client.Get(ctx, client.ObjectKey{Name: ref.Name}, &config)
	switch {
	case apierrors.IsNotFound(err):
		return spec.WithDefaults(), fmt.Sprintf("parameters: there is no CapacityCheckConfig %q", ref.Name), nil
	case err != nil:
		return spec, "", fmt.Errorf("reading CapacityCheckConfig %s: %w", ref.Name, err)
	}
	return config.Spec.WithDefaults(), "", nil
}

// items lists the workloads that hold quota before a check.
func (p *Pass) items(ctx context.Context, c *cluster, k *check, behind map[types.UID]written) ([]*item, error) {
	var workloads kueue.WorkloadList
	if err := p.client.List(ctx, &workloads, client.MatchingFields{indexCheck: k.object.Name}); err != nil {
		return nil, fmt.Errorf("listing workloads of check %s: %w", k.object.Name, err)
	}
	var items []*item
	for i := range workloads.Items {
		wl := p.newer(&workloads.Items[i], behind)
		if !reserved(wl) {
			continue
		}
		it := &item{object: wl, check: k.object.Name}
		for j := range wl.Status.AdmissionChecks {
			if string(wl.Status.AdmissionChecks[j].Name) == it.check {
				it.state = &wl.Status.AdmissionChecks[j]
			}
		}
		if it.state == nil {
			continue
		}
		it.w = c.workload(wl, k, it.state)
		items = append(items, it)
	}
	return items, nil
}

// newer is the workload as the pass has written it, while the cache does not show that yet: to decide on what is out of date
// would give a promise away that has been made. It notes the writes that the cache is behind on.
func (p *Pass) newer(wl *kueue.Workload, behind map[types.UID]written) *kueue.Workload {
	w, ok := p.written[wl.UID]
	if !ok || !slices.Contains(w.over, wl.ResourceVersion) {
		return wl
	}
	behind[wl.UID] = w
	return w.object
}

// reserved says whether a workload may be written to: it holds quota, and nothing has ended it.
func reserved(wl *kueue.Workload) bool {
	is := func(condition string) bool { return apimeta.IsStatusConditionTrue(wl.Status.Conditions, condition) }
	return wl.DeletionTimestamp == nil && wl.Status.Admission != nil && is(kueue.WorkloadQuotaReserved) &&
		!is(kueue.WorkloadEvicted) && !is(kueue.WorkloadFinished) && ptr.Deref(wl.Spec.Active, true)
}

func (c *cluster) workload(wl *kueue.Workload, k *check, state *kueue.AdmissionCheckState) Workload {
	w := Workload{
		Key: k.object.Name + "/" + string(wl.UID), UID: wl.UID, Name: wl.Namespace + "/" + wl.Name,
		Priority: ptr.Deref(wl.Spec.Priority, 0), Queued: wl.CreationTimestamp.Time,
		Retries: max(ptr.Deref(state.RetryCount, 0), retriesOf(wl)), Config: k.config,
		Running: apimeta.IsStatusConditionTrue(wl.Status.Conditions, kueue.WorkloadAdmitted),
	}
	if cond := apimeta.FindStatusCondition(wl.Status.Conditions, kueue.WorkloadQuotaReserved); cond != nil {
		w.Reserved = cond.LastTransitionTime.Time
	}
	onFlavors := c.onFlavors(string(wl.Status.Admission.ClusterQueue), k.object.Name)
	for i := range wl.Spec.PodSets {
		set := &wl.Spec.PodSets[i]
		j := slices.IndexFunc(wl.Status.Admission.PodSetAssignments, func(a kueue.PodSetAssignment) bool { return a.Name == set.Name })
		if j < 0 {
			continue
		}
		out := c.podSet(wl, set, &wl.Status.Admission.PodSetAssignments[j], onFlavors)
		out.reserve(wl, k.object.Name)
		w.PodSets = append(w.PodSets, out)
	}
	return w
}

// reserve notes what other checks give the pods: of a clash Kueue makes an error that ends the workload for good.
func (p *PodSet) reserve(wl *kueue.Workload, check string) {
	for i := range wl.Status.AdmissionChecks {
		s := &wl.Status.AdmissionChecks[i]
		if string(s.Name) == check {
			continue
		}
		for _, u := range s.PodSetUpdates {
			if string(u.Name) == p.Name {
				maps.Copy(p.Pinned, u.NodeSelector)
				maps.Copy(p.Annotated, u.Annotations)
			}
		}
	}
}

// onFlavors are the flavors that a queue binds the check to; none: all.
func (c *cluster) onFlavors(queue, check string) []kueue.ResourceFlavorReference {
	cq := c.queues[queue]
	if cq == nil || cq.Spec.AdmissionChecksStrategy == nil {
		return nil
	}
	for _, rule := range cq.Spec.AdmissionChecksStrategy.AdmissionChecks {
		if string(rule.Name) == check {
			return rule.OnFlavors
		}
	}
	return nil
}

func (c *cluster) podSet(wl *kueue.Workload, set *kueue.PodSet, a *kueue.PodSetAssignment,
	onFlavors []kueue.ResourceFlavorReference) PodSet {
	pod := &corev1.Pod{ObjectMeta: *set.Template.ObjectMeta.DeepCopy(), Spec: *set.Template.Spec.DeepCopy()}
	pod.Namespace = wl.Namespace
	requestLimits(&pod.Spec)
	profile := capacity.ProfileOfPod(pod)
	profile.Priority = ptr.Deref(wl.Spec.Priority, profile.Priority)
	out := PodSet{
		Name: string(set.Name), Count: ptr.Deref(a.Count, set.Count), Concerned: len(onFlavors) == 0,
		Own: profile.Resources.Clone(), Pinned: map[string]string{}, Annotated: map[string]string{},
	}
	maps.Copy(out.Pinned, set.Template.Spec.NodeSelector)
	maps.Copy(out.Annotated, set.Template.Annotations)
	// What Kueue charges also holds defaults of LimitRanges and the overhead of RuntimeClasses, and resources that only quota
	// knows (transformations, device classes): no node has those.
	for name, v := range capacity.ResourcesOf(a.ResourceUsage) {
		if _, asked := profile.Resources[name]; !asked && !charged[name] {
			continue
		}
		each := (v + int64(max(out.Count, 1)) - 1) / int64(max(out.Count, 1))
		profile.Resources[name] = max(profile.Resources[name], each)
	}
	var reqs []capacity.Requirement
	for _, resource := range slices.Sorted(maps.Keys(a.Flavors)) {
		name := a.Flavors[resource]
		out.Concerned = out.Concerned || slices.Contains(onFlavors, name)
		flavor := c.flavors[string(name)]
		if flavor == nil {
			continue
		}
		out.Selected = out.Selected || len(flavor.Spec.NodeLabels) > 0
		for key, value := range flavor.Spec.NodeLabels {
			out.Pinned[key] = value
			reqs = append(reqs, capacity.Requirement{Key: key, Operator: capacity.OperatorIn, Values: []string{value}})
		}
		profile.Tolerations = append(profile.Tolerations, flavor.Spec.Tolerations...)
	}
	if t := set.TopologyRequest; t != nil && t.Required != nil {
		// The group has to be the workload's own: pods that are not there yet do not say whose they are.
		profile.Group = &capacity.Group{
			Name:        wl.Namespace + "/workload/" + wl.Name + "/" + string(set.Name),
			TopologyKey: *t.Required,
		}
	}
	out.Profile = profile.WithRequirements(reqs...)
	name, _ := out.resource()
	out.Flavor = string(a.Flavors[name])
	if out.Flavor == "" && len(a.Flavors) > 0 {
		out.Flavor = string(a.Flavors[slices.Sorted(maps.Keys(a.Flavors))[0]])
	}
	out.Lent = lent(&out, c.hints)
	return out
}

// charged are the resources that LimitRanges and RuntimeClasses add to a pod.
var charged = map[corev1.ResourceName]bool{
	corev1.ResourceCPU: true, corev1.ResourceMemory: true, corev1.ResourceEphemeralStorage: true,
}

// requestLimits fills requests from limits, as the API server does for a pod and does not for a template.
func requestLimits(spec *corev1.PodSpec) {
	for _, containers := range [][]corev1.Container{spec.Containers, spec.InitContainers} {
		for i := range containers {
			r := &containers[i].Resources
			for name, limit := range r.Limits {
				if _, set := r.Requests[name]; set {
					continue
				}
				if r.Requests == nil {
					r.Requests = corev1.ResourceList{}
				}
				r.Requests[name] = limit
			}
		}
	}
}
