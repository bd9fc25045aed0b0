package integration

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourcev1 "k8s.io/api/resource/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
)

// unusedButNeeded are rights that no story uses, each with the reason why the role has it. Keys as in right.String.
var unusedButNeeded = map[string]string{
	"drover-scheduler: watch upcomingnodes.fleet.lucy.sh in fleet-system": "read in demand mode RequestsOnly, where what " +
		"is on its way suppresses a request",
	"drover-coordinator: create leases.coordination.k8s.io": "a Lease that somebody has deleted by hand is made again, so that " +
		"its member is waited for",
	"parentchild-controller: update parents/finalizers.parentchild.drover.sh": "asked for, where owners are protected, when a " +
		"Child is made that blocks the deletion of its Parent; the audit log does not show it",
	"drover-manager: patch upcomingnodes.fleet.lucy.sh in fleet-system": "a machine whose labels or resources turn out " +
		"to be others than those announced",
}

// usedByChance are rights that stories use or do not use, as things happen to coincide, each with the reason why the role
// has it.
var usedByChance = map[string]string{
	"drover-scheduler: update capacityrequests.fleet.lucy.sh": "a request is rewritten when its pod has changed",
	"drover-manager: update capacityrequests.fleet.lucy.sh":   "a request is rewritten when its pod has changed",
	"drover-manager: patch events.events.k8s.io":              "an event that comes again is counted up",
	"drover-manager: patch events in fleet-system":            "an event that comes again is counted up",
	"drover-manager-kueue: patch events.events.k8s.io":        "an event that comes again is counted up",
	"drover-watchgroup-member: get virtualnodeslices.loadbalance.k8s.io": "a slice is read again when coordinator and member have " +
		"written it at once",
	"parentchild-controller: get parents.parentchild.drover.sh": "a Parent that the cache does not show is looked up before it counts " +
		"as deleted",
	"drover-coordinator: patch events.events.k8s.io":   "an event that comes again is counted up",
	"drover-coordinator: patch events in fleet-system": "an event that comes again is counted up",
}

// TestRBAC plays a story that touches everything once, and then holds what the ServiceAccounts did, by the API server's own
// audit log, against what their roles allow: nothing was refused, and nothing is allowed that was not used.
func TestRBAC(t *testing.T) {
	playEverything(t)
	used, refused := readAudit(t, time.Time{})
	if len(refused) > 0 {
		t.Errorf("the API server refused, for want of a right:\n  %s", strings.Join(refused, "\n  "))
	}
	objects := build(t, "default")
	for _, name := range []string{"drover-scheduler", "drover-manager", "drover-autoscaler"} {
		t.Run(name, func(t *testing.T) {
			expectUsed(t, name, used[name], grantedTo(t, name, kindOf[rbacv1.ClusterRole](t, objects, "ClusterRole"),
				kindOf[rbacv1.Role](t, objects, "Role")))
		})
	}
}

// expectUsed holds what a ServiceAccount did against what a role grants it: nothing is granted that was not used.
func expectUsed(t *testing.T, role string, used, granted []right) {
	t.Helper()
	if len(granted) == 0 {
		t.Fatal("no rights at all: is the role bound under another name?")
	}
	for _, fault := range faultsOf(role, used, granted) {
		t.Error(fault)
	}
	if t.Failed() {
		var lines []string
		for _, u := range used {
			lines = append(lines, u.String())
		}
		slices.Sort(lines)
		t.Logf("it did use:\n  %s", strings.Join(lines, "\n  "))
	}
}

// faultsOf says what of a role is too wide for what was done by it, and which of its excuses are none.
func faultsOf(role string, used, granted []right) (faults []string) {
	for _, g := range granted {
		key := role + ": " + g.String()
		_, excused := unusedButNeeded[key]
		if g.verb == "list" {
			// Informers get their first state from the watch itself where the API server can stream it, and list
			// where it cannot. The right to watch has to be used.
			g.verb = "watch"
			_, excused = unusedButNeeded[role+": "+g.String()]
		}
		uses := slices.DeleteFunc(slices.Clone(used), func(u right) bool { return !g.covers(u) })
		elsewhere := slices.ContainsFunc(uses, func(u right) bool { return u.namespace != system })
		if g.namespace == "" && !elsewhere && !slices.ContainsFunc(uses, func(u right) bool { return !narrower(granted, u) }) {
			uses = nil // a Role allows all of it already
		}
		switch {
		case usedByChance[key] != "":
		case len(uses) == 0 && !excused:
			faults = append(faults, fmt.Sprintf("nothing uses %q", g))
		case len(uses) > 0 && excused:
			faults = append(faults, fmt.Sprintf("%q is used: it needs no excuse any more", key))
		case len(uses) > 0 && g.namespace == "" && !elsewhere:
			faults = append(faults, fmt.Sprintf("%q is used in %s only: a Role there is enough", g, system))
		}
	}
	return faults
}

// A role that is wider than what is done by it is noticed, whatever makes it so.
func TestARoleThatIsTooWideIsNoticed(t *testing.T) {
	allow := func(verb, namespace string) right { return right{verb: verb, resource: "pods", namespace: namespace} }
	named := func(name string) right { return right{verb: "get", resource: "pods", namespace: system, name: name} }
	nodes, other := right{verb: "get", resource: "nodes"}, right{verb: "get", group: "a", resource: "pods"}
	pods := allow("get", "")
	for name, test := range map[string]struct {
		used, granted []right
		want          string // a part of the one fault, "" for none
	}{
		"what is done is granted":     {[]right{allow("get", "x")}, []right{pods}, ""},
		"a verb that nothing uses":    {[]right{allow("get", "x")}, []right{pods, allow("delete", "")}, `"delete pods"`},
		"another resource":            {[]right{nodes}, []right{nodes, pods}, `"get pods"`},
		"another API group":           {[]right{other}, []right{pods}, `"get pods"`},
		"a subresource":               {[]right{allow("get", "x")}, []right{pods, {verb: "get", resource: "pods/status"}}, "pods/status"},
		"everywhere, used in one":     {[]right{allow("get", system)}, []right{pods}, "a Role there is enough"},
		"a Role there":                {[]right{allow("get", system)}, []right{allow("get", system)}, ""},
		"a Role there, and all else":  {[]right{allow("get", system)}, []right{allow("get", system), pods}, `nothing uses "get pods"`},
		"the wrong namespace":         {[]right{allow("get", "x")}, []right{allow("get", system)}, "in " + system},
		"the name of another":         {[]right{named("drover-a")}, []right{named("drover-b")}, "drover-b"},
		"a list, where it is a watch": {[]right{allow("watch", "x")}, []right{allow("list", ""), allow("watch", "")}, ""},
		"a list without a watch":      {[]right{allow("list", "x")}, []right{allow("list", "")}, `"watch pods"`},
	} {
		t.Run(name, func(t *testing.T) {
			faults := faultsOf("role", test.used, test.granted)
			if test.want == "" && len(faults) == 0 || test.want != "" && len(faults) == 1 && strings.Contains(faults[0], test.want) {
				return
			}
			t.Errorf("faults %q, want one with %q", faults, test.want)
		})
	}
	const needless = "drover-coordinator: create leases.coordination.k8s.io"
	lease := right{verb: "create", group: "coordination.k8s.io", resource: "leases", namespace: "x"}
	everywhere := lease
	everywhere.namespace = ""
	faults := faultsOf("drover-coordinator", []right{lease}, []right{everywhere})
	if len(faults) != 1 || !strings.Contains(faults[0], needless) {
		t.Errorf("an excuse that is none: %q, want %q to be named", faults, needless)
	}
}

// narrower says whether one of the rights that hold in one namespace only allows the use.
func narrower(granted []right, use right) bool {
	return slices.ContainsFunc(granted, func(g right) bool { return g.namespace != "" && g.covers(use) })
}

// The roles are narrow where it matters: nobody reads Secrets, uses wildcards, or changes rights.
func TestRBACRolesAreNarrow(t *testing.T) {
	objects := build(t, "kueue") // the default, and what is added for Kueue
	rules := map[string][]rbacv1.PolicyRule{}
	for _, r := range kindOf[rbacv1.ClusterRole](t, objects, "ClusterRole") {
		rules[r.Name] = append(rules[r.Name], r.Rules...)
	}
	for _, r := range kindOf[rbacv1.Role](t, objects, "Role") {
		rules[r.Name] = append(rules[r.Name], r.Rules...)
	}
	for name, list := range rules {
		for _, rule := range list {
			all := slices.Concat(rule.Verbs, rule.Resources, rule.APIGroups)
			for _, forbidden := range []string{"*", "secrets", "impersonate", "escalate", "bind", "rbac.authorization.k8s.io"} {
				if slices.Contains(all, forbidden) {
					t.Errorf("%s holds %q: %v", name, forbidden, rule)
				}
			}
		}
	}
}

// right is one thing that may be done: a verb on a resource, everywhere or in one namespace, on any or on one name.
type right struct {
	verb, group, resource, namespace, name string
}

func (r right) String() string {
	s := r.verb + " " + r.resource
	if r.group != "" {
		s += "." + r.group
	}
	if r.name != "" {
		s += " named " + r.name
	}
	if r.namespace != "" {
		s += " in " + r.namespace
	}
	return s
}

// covers says whether the right allows the use.
func (r right) covers(use right) bool {
	return r.verb == use.verb && r.group == use.group && r.resource == use.resource &&
		(r.namespace == "" || r.namespace == use.namespace) && (r.name == "" || r.name == use.name)
}

// grantedTo takes the roles of that name apart into single rights.
func grantedTo(t *testing.T, name string, clusterRoles []rbacv1.ClusterRole, roles []rbacv1.Role) []right {
	t.Helper()
	var granted []right
	expand := func(namespace string, rules []rbacv1.PolicyRule) {
		for _, rule := range rules {
			if len(rule.NonResourceURLs) > 0 {
				t.Errorf("%s: a URL that is no resource, %v", name, rule.NonResourceURLs)
			}
			names := rule.ResourceNames
			if len(names) == 0 {
				names = []string{""}
			}
			for _, group := range rule.APIGroups {
				for _, resource := range rule.Resources {
					for _, verb := range rule.Verbs {
						for _, object := range names {
							granted = append(granted, right{verb, group, resource, namespace, object})
						}
					}
				}
			}
		}
	}
	for _, r := range clusterRoles {
		if r.Name == name {
			expand("", r.Rules)
		}
	}
	for _, r := range roles {
		if r.Name == name || strings.HasPrefix(r.Name, name+":") {
			expand(r.Namespace, r.Rules)
		}
	}
	return granted
}

// readAudit returns what each ServiceAccount of the manifests, and of the members in stories, has done so far, and what it has
// been refused since a time. (A test that takes its roles away before its programs has them refused much.)
func readAudit(t *testing.T, since time.Time) (used map[string][]right, refused []string) {
	t.Helper()
	file, err := os.Open(auditLog())
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	seen := map[string]map[right]bool{}
	reader := bufio.NewReaderSize(file, 1<<20)
	for {
		line, err := reader.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			break // a line that is being written counts next time
		}
		if err != nil {
			t.Fatal(err)
		}
		var event auditv1.Event
		if err := json.Unmarshal(line, &event); err != nil {
			t.Fatalf("audit log: %v", err)
		}
		account, ours := strings.CutPrefix(event.User.Username, "system:serviceaccount:")
		namespace, user, _ := strings.Cut(account, ":")
		if !ours || event.ObjectRef == nil || namespace != system && !strings.HasPrefix(namespace, "story-") {
			continue
		}
		ref := event.ObjectRef
		use := right{event.Verb, ref.APIGroup, ref.Resource, ref.Namespace, ref.Name}
		if ref.Subresource != "" {
			use.resource += "/" + ref.Subresource
		}
		if event.ResponseStatus != nil && event.ResponseStatus.Code == 403 &&
			event.Annotations["authorization.k8s.io/decision"] == "forbid" {
			if event.RequestReceivedTimestamp.Time.Before(since) {
				continue
			}
			use.name = ""
			line := user + ": " + use.String()
			if !slices.Contains(refused, line) {
				refused = append(refused, line)
			}
			continue
		}
		if seen[user] == nil {
			seen[user] = map[right]bool{}
		}
		if !strings.HasPrefix(use.name, "drover-") {
			use.name = "" // only leases and the like are granted by name
		}
		seen[user][use] = true
	}
	used = map[string][]right{}
	for user, rights := range seen {
		for use := range rights {
			used[user] = append(used[user], use)
		}
	}
	return used, refused
}

var scraper struct {
	sync.Once
	token string
	err   error
}

// scraperToken is the token of somebody who may read metrics and nothing else.
func scraperToken(t *testing.T) string {
	t.Helper()
	scraper.Do(func() {
		ctx, cancel := cleanupContext()
		defer cancel()
		account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "scraper"}}
		binding := &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: "scraper"},
			RoleRef: rbacv1.RoleRef{
				APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "drover-metrics-reader",
			},
			Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: "default", Name: "scraper"}},
		}
		scraper.err = errors.Join(env.client.Create(ctx, account), env.client.Create(ctx, binding))
		if scraper.err != nil {
			return
		}
		request := &authenticationv1.TokenRequest{}
		scraper.err = env.client.SubResource("token").Create(ctx, account, request)
		scraper.token = request.Status.Token
		scraper.err = errors.Join(scraper.err, awaitScraper(ctx))
	})
	if scraper.err != nil {
		t.Fatal(scraper.err)
	}
	return scraper.token
}

// awaitScraper waits until the API server knows the scraper's right: whoever asks before keeps the answer for half a minute.
func awaitScraper(ctx context.Context) error {
	state, allowed := poll(ctx, func(ctx context.Context) (bool, string) {
		review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
			User:                  "system:serviceaccount:default:scraper",
			NonResourceAttributes: &authorizationv1.NonResourceAttributes{Path: "/metrics", Verb: "get"},
		}}
		err := env.client.Create(ctx, review)
		return err == nil && review.Status.Allowed, fmt.Sprint(err, review.Status)
	})
	if !allowed {
		return fmt.Errorf("the scraper may not read metrics: %s", state)
	}
	return nil
}

// playEverything is one short pass through all that the programs do: a request by the plugin, one by the back-stop, a pod that
// nothing helps, nodes that come and go, a drain with an eviction, metrics behind their guard.
func playEverything(t *testing.T) {
	f := startFleet(t, fleetOptions{})
	ns := namespace(t, "everything")

	trainer := job(t, ns, "trainer", 2, requests("nvidia.com/gpu", "8"), tolerateGPU)
	waitRunning(t, ns, "trainer", 2) // from zero: the back-stop
	more := job(t, ns, "more", 2, requests("cpu", "12"))
	waitRunning(t, ns, "more", 2) // the plugin
	hopeless := pod(t, ns, "hopeless", requests("cpu", "1"), func(s *corev1.PodSpec) {
		s.NodeSelector = map[string]string{"planet": "mars"}
	})
	eventually(t, "the hopeless pod has its event", func(ctx context.Context) (bool, string) {
		found := warnings(ctx, hopeless)
		return len(found) > 0, fmt.Sprint(found)
	})
	waitForClaims(t, ns)
	for _, name := range []string{"manager", "scheduler"} {
		if _, _, err := f.metric(t.Context(), name, scraperToken(t), "go_goroutines"); err != nil {
			t.Errorf("%s refuses its metrics to a scraper: %v", name, err)
		}
		if _, _, err := f.metric(t.Context(), name, "", "go_goroutines"); err == nil {
			t.Errorf("%s shows its metrics to anybody", name)
		}
	}
	remove(t, hopeless)
	meetOwnRequest(t, f, ns)
	remove(t, trainer)

	// Two pods stand on the two nodes of the job that ends now; one node is enough for them, so one of them is evicted.
	small := job(t, ns, "small", 2, requests("cpu", "1"), preferApart("small"))
	if hosts := hostsOf(waitRunning(t, ns, "small", 2)); len(hosts) != 2 {
		t.Fatalf("the small pods are on %v, want two nodes", hosts)
	}
	remove(t, more)
	waitNodes(t, 1)
	waitRunning(t, ns, "small", 2)
	remove(t, small)
	waitQuiet(t)

	// An offering that is no more takes its hint with it.
	f.setOfferings(t, defaultOfferings[:strings.Index(defaultOfferings, "- name: gpu-8")])
	eventually(t, "the hint of the offering is gone", func(ctx context.Context) (bool, string) {
		var hints fleetv1alpha1.AvailableCapacityList
		failure := list(ctx, &hints)
		return failure == "" && len(hints.Items) == 1, fmt.Sprint(len(hints.Items), failure)
	})
}

// meetOwnRequest lets a scheduler that comes anew find what the one before it has asked for.
func meetOwnRequest(t *testing.T, f *fleet, ns string) {
	t.Helper()
	f.setOfferings(t, strings.NewReplacer("count: 52", "count: 0", "count: 64", "count: 0").Replace(defaultOfferings))
	waitAvailable(t, "gpu-8", 0)
	waiting := job(t, ns, "waiting", 1, requests("nvidia.com/gpu", "8"), tolerateGPU)
	eventually(t, "the pod has asked", func(ctx context.Context) (bool, string) {
		var all fleetv1alpha1.CapacityRequestList
		failure := list(ctx, &all, client.InNamespace(ns))
		asked := slices.ContainsFunc(all.Items, func(r fleetv1alpha1.CapacityRequest) bool {
			return strings.HasPrefix(r.Name, "cr-waiting-")
		})
		return asked, fmt.Sprint(len(all.Items), failure)
	})
	f.kill("scheduler")
	token := scraperToken(t)
	eventually(t, "the new scheduler meets the request", func(ctx context.Context) (bool, string) {
		n, _, err := f.metric(ctx, "scheduler", token, `drover_demand_writes_total{result="existed",source="scheduler"}`)
		return n > 0, fmt.Sprint(n, err)
	})
	remove(t, waiting)
	f.setOfferings(t, defaultOfferings)
}

// waitForClaims brings pods that wait for claims, and waits until the manager has looked where the claims lead.
func waitForClaims(t *testing.T, ns string) {
	t.Helper()
	claim := func(name string) podOption {
		return func(s *corev1.PodSpec) {
			s.Volumes = append(s.Volumes, corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{
				PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: name},
			}})
		}
	}
	oneGig := corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}
	modes := []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
	class := &storagev1.StorageClass{
		ObjectMeta: metav1.ObjectMeta{Name: "late"}, Provisioner: "kubernetes.io/no-provisioner",
		VolumeBindingMode: ptr.To(storagev1.VolumeBindingWaitForFirstConsumer),
	}
	// A volume in a zone that no pod of ours can reach, so that its pod waits.
	volume := &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: "far-away"},
		Spec: corev1.PersistentVolumeSpec{
			Capacity: oneGig, AccessModes: modes,
			PersistentVolumeSource: corev1.PersistentVolumeSource{
				CSI: &corev1.CSIPersistentVolumeSource{Driver: "none", VolumeHandle: "none"},
			},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{
				NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{{
					Key: corev1.LabelTopologyZone, Operator: corev1.NodeSelectorOpIn, Values: []string{"zone-z"},
				}}}},
			}},
		},
	}
	create(t, class)
	create(t, volume)
	t.Cleanup(func() {
		ctx, cancel := cleanupContext()
		defer cancel()
		if err := errors.Join(env.client.Delete(ctx, class), env.client.Delete(ctx, volume)); err != nil {
			t.Error(err)
		}
	})
	for name, spec := range map[string]corev1.PersistentVolumeClaimSpec{
		"late":  {StorageClassName: ptr.To("late")},
		"bound": {StorageClassName: ptr.To(""), VolumeName: "far-away"},
	} {
		spec.AccessModes, spec.Resources.Requests = modes, oneGig
		create(t, &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}, Spec: spec})
	}
	eventually(t, "the claim is bound", func(ctx context.Context) (bool, string) {
		c := &corev1.PersistentVolumeClaim{}
		err := env.client.Get(ctx, client.ObjectKey{Namespace: ns, Name: "bound"}, c)
		return c.Status.Phase == corev1.ClaimBound, fmt.Sprint(c.Status.Phase, err)
	})
	create(t, &resourcev1.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "device"},
		Spec: resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{Requests: []resourcev1.DeviceRequest{{
			Name: "gpu", Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: "nowhere"},
		}}}},
	})
	waiting := []*corev1.Pod{
		pod(t, ns, "without-claim", claim("nowhere")),
		pod(t, ns, "with-late-claim", claim("late")),
		pod(t, ns, "with-bound-claim", claim("bound")),
		pod(t, ns, "with-device", func(s *corev1.PodSpec) {
			s.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: ptr.To("device")}}
		}),
	}
	for _, resource := range []string{
		"persistentvolumeclaims", "persistentvolumes", "storageclasses.storage.k8s.io", "resourceclaims.resource.k8s.io",
	} {
		eventually(t, "the manager watches "+resource, func(context.Context) (bool, string) {
			used, _ := readAudit(t, time.Now())
			return slices.ContainsFunc(used["drover-manager"], func(r right) bool {
				return r.String() == "watch "+resource
			}), ""
		})
	}
	for _, p := range waiting {
		remove(t, p)
	}
}
