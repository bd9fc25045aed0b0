package capacityrequest

import (
	"context"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/informers"
	clientsetfake "k8s.io/client-go/kubernetes/fake"
	"k8s.io/klog/v2/ktesting"
	fwk "k8s.io/kube-scheduler/framework"
	schedulerconfig "k8s.io/kubernetes/pkg/scheduler/apis/config"
	"k8s.io/kubernetes/pkg/scheduler/apis/config/testing/defaults"
	internalcache "k8s.io/kubernetes/pkg/scheduler/backend/cache"
	internalqueue "k8s.io/kubernetes/pkg/scheduler/backend/queue"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	frameworkplugins "k8s.io/kubernetes/pkg/scheduler/framework/plugins"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/interpodaffinity"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/names"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/nodeaffinity"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/nodename"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/nodeports"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/nodeunschedulable"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/nodevolumelimits"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/podtopologyspread"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/tainttoleration"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/volumebinding"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/volumerestrictions"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/volumezone"
	frameworkruntime "k8s.io/kubernetes/pkg/scheduler/framework/runtime"
	st "k8s.io/kubernetes/pkg/scheduler/testing"

	"github.com/drover-sh/drover/capacity"
)

const helps = capacity.ReasonNewNodeHelps

// The scheduler's own constants mean what package capacity, which does not link the scheduler, takes them to mean.
func TestEveryReasonOfTheSchedulerIsUnderstood(t *testing.T) {
	for _, c := range []struct{ plugin, reason, want string }{
		{names.NodeName, nodename.ErrReason, capacity.ReasonNodeNameSet},
		{names.NodePorts, nodeports.ErrReason, helps},
		{names.NodeUnschedulable, nodeunschedulable.ErrReasonUnschedulable, helps},
		{names.NodeUnschedulable, nodeunschedulable.ErrReasonUnknownCondition, helps},
		{names.NodeAffinity, nodeaffinity.ErrReasonPod, helps},
		{names.NodeVolumeLimits, nodevolumelimits.ErrReasonMaxVolumeCountExceeded, helps},
		{names.TaintToleration, tainttoleration.ErrReasonNotMatch, helps},
		{names.InterPodAffinity, interpodaffinity.ErrReasonAffinityRulesNotMatch, helps},
		{names.InterPodAffinity, interpodaffinity.ErrReasonAntiAffinityRulesNotMatch, helps},
		{names.InterPodAffinity, interpodaffinity.ErrReasonExistingAntiAffinityRulesNotMatch, helps},
		{names.PodTopologySpread, podtopologyspread.ErrReasonConstraintsNotMatch, helps},
		{names.PodTopologySpread, podtopologyspread.ErrReasonNodeLabelNotMatch, helps},
		{names.VolumeBinding, string(volumebinding.ErrReasonBindConflict), helps},
		{names.VolumeBinding, string(volumebinding.ErrReasonNodeConflict), helps},
		{names.VolumeBinding, volumebinding.ErrReasonNotEnoughSpace, helps},
		{names.VolumeBinding, volumebinding.ErrReasonPVNotExist, capacity.ReasonVolumeMissing},
		{names.VolumeZone, volumezone.ErrReasonConflict, helps},
		{names.VolumeRestrictions, volumerestrictions.ErrReasonDiskConflict, helps},
		{names.VolumeRestrictions, volumerestrictions.ErrReasonReadWriteOncePodConflict, capacity.ReasonVolumeInUse},

		// Those that have no constant. DynamicResources: the node's own resources, which devices take from.
		{names.DynamicResources, "Insufficient cpu", helps},
		{names.DynamicResources, "invalid resource pools were encountered", helps},
		{names.DynamicResources, "cannot allocate all claims", helps},
		{names.DynamicResources, "cannot schedule extended resource claim", helps},
		{names.DynamicResources, "cannot fit resource", helps},
		{names.DynamicResources, "asked by caller to stop allocating devices: enough", helps},
		{names.DynamicResources, "resourceclaim in use", capacity.ReasonResourceClaimInUse},
		{names.DynamicResources, "resourceclaim not available on the node", capacity.ReasonResourceClaimInUse},
		{names.DynamicResources, "resource claim ns/c is in the process of being allocated", capacity.ReasonClaimPending},
		{names.DynamicResources, "ResourceClaim unreserved for PodGroup", capacity.ReasonClaimPending},
		{names.DynamicResources, "request r: device class c does not exist", capacity.ReasonResourceClaimMissing},
		{names.DynamicResources, "resource claim ns/c, request r: unknown request type", capacity.ReasonResourceClaimMissing},
		{names.DynamicResources, "node allocatable resource claim c shared by multiple pods",
			capacity.ReasonResourceClaimInUse},
		{names.DynamicResources, "node allocatable resource claim c is already used by another pod",
			capacity.ReasonResourceClaimInUse},
		{names.DynamicResources, "pod level request for cpu is insufficient to cover the aggregated container and " +
			"node-allocatable DRA requests", capacity.ReasonPodInvalid},
		{names.DynamicResources, "claim c: node-allocatable resource claim not referenced by any container within the pod",
			capacity.ReasonPodInvalid},
		{names.NodeVolumeLimits, "ebs.csi.aws.com CSI driver is not installed on the node", helps},
		{names.NodeDeclaredFeatures, "node(s) didn't match Pod's required features", capacity.ReasonNodeFeaturesMissing},
		{names.GangScheduling, "waiting for minCount pods from a gang to appear in scheduling queue",
			capacity.ReasonGroupWaiting},
	} {
		decision := capacity.Classify(pending("p").Obj(), capacity.Facts{
			Rejections: []capacity.Rejection{{Plugin: c.plugin, Reason: c.reason, Nodes: 3}},
		})
		if decision.Reason != c.want || decision.Request != (c.want == helps) {
			t.Errorf("%s says %q: decided %s, want %s", c.plugin, c.reason, decision.Reason, c.want)
		}
	}
}

// What the default plugins say of a pod and a node, in their own words, leads to the right decision, by those words alone.
func TestWhatTheDefaultPluginsSay(t *testing.T) {
	waits, immediate := storagev1.VolumeBindingWaitForFirstConsumer, storagev1.VolumeBindingImmediate
	class := func(name string, mode storagev1.VolumeBindingMode) *storagev1.StorageClass {
		return &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Provisioner: "x", VolumeBindingMode: &mode}
	}
	claim := func(class string, change ...func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
		c := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "data", UID: "data"}}
		c.Spec.StorageClassName = &class
		for _, f := range change {
			f(c)
		}
		return c
	}
	bound := func(c *corev1.PersistentVolumeClaim) {
		c.Spec.VolumeName, c.Status.Phase = "v", corev1.ClaimBound
		c.Annotations = map[string]string{"pv.kubernetes.io/bind-completed": "yes"}
	}
	volume := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "v", Labels: map[string]string{
		corev1.LabelTopologyZone: "b",
	}}}
	volume.Spec.Capacity = corev1.ResourceList{"storage": resource.MustParse("1Gi")}
	local := volume.DeepCopy()
	local.Labels = nil
	local.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{
		NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{
			{Key: corev1.LabelTopologyZone, Operator: corev1.NodeSelectorOpIn, Values: []string{"b"}},
		}}},
	}}
	small := func() *st.PodWrapper { return st.MakePod().Namespace("ns").Name("p").UID("p") }
	sidecar := small().Obj()
	always := corev1.ContainerRestartPolicyAlways
	sidecar.Spec.InitContainers = []corev1.Container{{Name: "s", RestartPolicy: &always}}
	sidecar.Spec.Containers = []corev1.Container{{Name: "c", Resources: corev1.ResourceRequirements{
		Requests: corev1.ResourceList{"memory": resource.MustParse("1Ti")},
	}}}
	ephemeral := small().Obj()
	ephemeral.Spec.Volumes = []corev1.Volume{{Name: "e", VolumeSource: corev1.VolumeSource{
		Ephemeral: &corev1.EphemeralVolumeSource{},
	}}}

	for _, c := range []struct {
		name    string
		pod     *corev1.Pod
		node    *corev1.Node
		objects []runtime.Object
		plugin  string // that turns the pod down first; "" for a PreFilterResult
		want    string
	}{
		{name: "too little CPU", pod: pending("p").Req(map[corev1.ResourceName]string{"cpu": "8"}).Obj(), plugin: names.NodeResourcesFit,
			want: helps},
		{name: "a sidecar and too little memory", pod: sidecar, plugin: names.NodeResourcesFit, want: helps},
		{name: "a taint", pod: small().Obj(), plugin: names.TaintToleration, want: helps,
			node: node("n").Taints([]corev1.Taint{{Key: "gpu", Effect: corev1.TaintEffectNoSchedule}}).Obj()},
		{name: "a cordon", pod: small().Obj(), plugin: names.NodeUnschedulable, want: helps,
			node: node("n").Unschedulable(true).Obj()},
		{name: "a node selector", pod: small().NodeSelector(map[string]string{"disk": "ssd"}).Obj(),
			plugin: names.NodeAffinity, want: helps},
		{name: "affinity to a node's name", pod: small().NodeAffinityIn("metadata.name", []string{"gone"},
			st.NodeSelectorTypeMatchFields).Obj(), want: capacity.ReasonTiedToNode},
		{name: "pod affinity", pod: small().PodAffinityExists("app", "zone", st.PodAffinityWithRequiredReq).Obj(),
			plugin: names.InterPodAffinity, want: helps},
		{name: "a missing topology label", plugin: names.PodTopologySpread, want: helps,
			pod: small().SpreadConstraint(1, "rack", corev1.DoNotSchedule, nil, nil, nil, nil, nil).Obj()},
		{name: "a missing claim", pod: small().PVC("data").Obj(), plugin: names.VolumeRestrictions,
			want: capacity.ReasonVolumeClaimMissing},
		{name: "a claim that is not made yet", pod: ephemeral, plugin: names.VolumeBinding, want: capacity.ReasonClaimPending},
		{name: "an unbound claim that binds at once", pod: small().PVC("data").Obj(), plugin: names.VolumeBinding,
			objects: []runtime.Object{claim("now", func(c *corev1.PersistentVolumeClaim) { c.Status.Phase = corev1.ClaimPending }),
				class("now", immediate)}, want: capacity.ReasonVolumeClaimUnbound},
		{name: "a claim without its volume", pod: small().PVC("data").Obj(), plugin: names.VolumeBinding,
			objects: []runtime.Object{claim("late", func(c *corev1.PersistentVolumeClaim) { c.Status.Phase = corev1.ClaimLost }),
				class("late", waits)}, want: capacity.ReasonVolumeMissing},
		{name: "a volume of another zone by label", pod: small().PVC("data").Obj(), plugin: names.VolumeZone,
			node:    node("n").Label(corev1.LabelTopologyZone, "a").Obj(),
			objects: []runtime.Object{claim("late", bound), class("late", waits), volume}, want: helps},
		{name: "a volume of another zone by affinity", pod: small().PVC("data").Obj(), plugin: names.VolumeBinding,
			node:    node("n").Label(corev1.LabelTopologyZone, "a").Obj(),
			objects: []runtime.Object{claim("late", bound), class("late", waits), local}, want: helps},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.node == nil {
				c.node = node("n").Obj()
			}
			rejections := sayings(t, c.pod, c.node, c.objects)
			if len(rejections) != 1 || rejections[0].Plugin != c.plugin {
				t.Fatalf("turned down by %+v, want plugin %q", rejections, c.plugin)
			}
			decision := capacity.Classify(c.pod, capacity.Facts{Rejections: rejections})
			if decision.Reason != c.want {
				t.Errorf("%s says %q: decided %s, want %s", c.plugin, rejections[0].Reason, decision.Reason, c.want)
			}
		})
	}
}

// sayings runs the default plugins of the scheduler, as its scheduling cycle does, on one pod and one node.
func sayings(t *testing.T, pod *corev1.Pod, node *corev1.Node, objects []runtime.Object) []capacity.Rejection {
	t.Helper()
	logger, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithCancel(ctx)
	cs := clientsetfake.NewClientset(append(objects, pod, node)...)
	factory := informers.NewSharedInformerFactory(cs, 0)
	snapshot := internalcache.NewSnapshot(nil, []*corev1.Node{node})
	plugins := defaults.ExpandedPluginsV1.DeepCopy()
	for _, set := range []*schedulerconfig.PluginSet{ // without the one that needs the whole scheduler
		&plugins.PreEnqueue, &plugins.PreFilter, &plugins.Filter, &plugins.PostFilter, &plugins.Score, &plugins.Reserve,
		&plugins.PreBind,
	} {
		set.Enabled = slices.DeleteFunc(set.Enabled, func(p schedulerconfig.Plugin) bool {
			return p.Name == names.DynamicResources
		})
	}
	profile := &schedulerconfig.KubeSchedulerProfile{
		SchedulerName: "default", Plugins: plugins, PluginConfig: defaults.PluginConfigsV1,
	}
	f, err := frameworkruntime.NewFramework(ctx, frameworkplugins.NewInTreeRegistry(), profile,
		frameworkruntime.WithClientSet(cs),
		frameworkruntime.WithInformerFactory(factory),
		frameworkruntime.WithPodNominator(internalqueue.NewSchedulingQueue(nil, factory)),
		frameworkruntime.WithSnapshotSharedLister(snapshot),
		frameworkruntime.WithSharedCSIManager(nodevolumelimits.NewCSIManager(factory.Storage().V1().CSINodes().Lister())),
		frameworkruntime.WithLogger(logger),
	)
	if err != nil {
		t.Fatal(err)
	}
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	t.Cleanup(func() { cancel(); factory.Shutdown() })

	state, statuses := framework.NewCycleState(), framework.NewDefaultNodeToStatus()
	result, status, _ := f.RunPreFilterPlugins(ctx, state, pod)
	switch {
	case !status.IsSuccess():
		statuses.SetAbsentNodesStatus(status)
	case result != nil && !result.NodeNames.Has(node.Name):
		statuses.SetAbsentNodesStatus(fwk.NewStatus(fwk.UnschedulableAndUnresolvable, "node is filtered out"))
	default:
		info, err := snapshot.NodeInfos().Get(node.Name)
		if err != nil {
			t.Fatal(err)
		}
		if status := f.RunFilterPlugins(ctx, state, pod, info); !status.IsSuccess() {
			statuses.Set(node.Name, status)
		}
	}
	return rejectionsOf(statuses, snapshot.NodeInfos())
}
