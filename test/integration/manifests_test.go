package integration

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"
	sigsyaml "sigs.k8s.io/yaml"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/controllers/watchgroup"
)

var overlays = []string{"default", "cert-manager", "external-autoscaler", "kueue", "scheduler-only", "schedulers", "sharded-manager",
	"vnaffinity", "watchgroup"}

// build renders an overlay.
func build(t *testing.T, name string) []*unstructured.Unstructured {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), env.kubectl, "kustomize", overlay(name)).Output()
	if err != nil {
		t.Fatalf("kubectl kustomize %s: %v", name, err)
	}
	var objects []*unstructured.Unstructured
	decoder := yaml.NewYAMLOrJSONDecoder(strings.NewReader(string(out)), 4096)
	for {
		u := &unstructured.Unstructured{}
		if err := decoder.Decode(u); err != nil {
			break
		}
		if len(u.Object) > 0 {
			objects = append(objects, u)
		}
	}
	if len(objects) < 10 {
		t.Fatalf("overlay %s holds %d objects only", name, len(objects))
	}
	return objects
}

// kindOf returns the objects of one kind.
func kindOf[T any](t *testing.T, objects []*unstructured.Unstructured, kind string) []T {
	t.Helper()
	var found []T
	for _, u := range objects {
		if u.GetKind() != kind {
			continue
		}
		var object T
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &object); err != nil {
			t.Fatal(err)
		}
		found = append(found, object)
	}
	return found
}

// podTemplates returns the pods of an overlay's workloads by the workload's name.
func podTemplates(t *testing.T, objects []*unstructured.Unstructured) map[string]corev1.PodTemplateSpec {
	t.Helper()
	templates := map[string]corev1.PodTemplateSpec{}
	for _, d := range kindOf[appsv1.Deployment](t, objects, "Deployment") {
		templates[d.Name] = d.Spec.Template
	}
	for _, s := range kindOf[appsv1.StatefulSet](t, objects, "StatefulSet") {
		// The controller adds a volume for each claim; what is behind it makes no difference here.
		for _, claim := range s.Spec.VolumeClaimTemplates {
			s.Spec.Template.Spec.Volumes = append(s.Spec.Template.Spec.Volumes, corev1.Volume{
				Name: claim.Name, VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}},
			})
		}
		templates[s.Name] = s.Spec.Template
	}
	if len(templates) == 0 {
		t.Fatal("no workload")
	}
	return templates
}

// Every overlay applies to a cluster that knows cert-manager's kinds where it needs them, field by field.
func TestManifestsAreAcceptedByTheAPIServer(t *testing.T) {
	for _, name := range overlays {
		t.Run(name, func(t *testing.T) {
			for _, u := range build(t, name) {
				if strings.HasPrefix(u.GetAPIVersion(), "cert-manager.io/") {
					continue
				}
				object, err := json.Marshal(u)
				if err != nil {
					t.Fatal(err)
				}
				if out, err := kubectlWithInput(t.Context(), string(object), "apply", "--server-side", "--dry-run=server",
					"--validate=strict", "--warnings-as-errors", "--force-conflicts", "-f", "-"); err != nil {
					t.Errorf("%s %s: %s", u.GetKind(), u.GetName(), out)
				}
			}
		})
	}
}

// The namespace enforces the restricted Pod Security Standard, and our pods pass it as they are.
func TestManifestsPodsAreRestricted(t *testing.T) {
	dryRun := client.NewDryRunClient(env.client)
	pod := func(template corev1.PodTemplateSpec, mutate func(*corev1.Pod)) error {
		p := &corev1.Pod{ObjectMeta: template.ObjectMeta, Spec: *template.Spec.DeepCopy()}
		p.Namespace, p.GenerateName = system, "restricted-"
		mutate(p)
		return dryRun.Create(t.Context(), p)
	}
	templates := podTemplates(t, build(t, "default"))
	maps.Copy(templates, podTemplates(t, build(t, "watchgroup")))
	for name, template := range templates {
		t.Run(name, func(t *testing.T) {
			if err := pod(template, func(*corev1.Pod) {}); err != nil {
				t.Errorf("refused: %v", err)
			}
			for rule, weaken := range map[string]func(*corev1.Pod){
				"capabilities": func(p *corev1.Pod) { p.Spec.Containers[0].SecurityContext.Capabilities = nil },
				"runAsNonRoot": func(p *corev1.Pod) { p.Spec.SecurityContext.RunAsNonRoot = nil },
				"seccomp":      func(p *corev1.Pod) { p.Spec.SecurityContext.SeccompProfile = nil },
			} {
				if err := pod(template, weaken); err == nil || !strings.Contains(err.Error(), "restricted") {
					t.Errorf("without %s it should violate the restricted standard, but: %v", rule, err)
				}
			}

			c := template.Spec.Containers[0]
			if c.SecurityContext.ReadOnlyRootFilesystem == nil || !*c.SecurityContext.ReadOnlyRootFilesystem {
				t.Error("the root filesystem is writable")
			}
			if c.LivenessProbe == nil || c.ReadinessProbe == nil {
				t.Error("a probe is missing")
			}
			if c.Resources.Requests.Cpu().IsZero() || c.Resources.Requests.Memory().IsZero() ||
				c.Resources.Limits.Memory().IsZero() {
				t.Errorf("resources are incomplete: %v", c.Resources)
			}
			if template.Spec.ServiceAccountName != name {
				t.Errorf("runs as ServiceAccount %q, want %q", template.Spec.ServiceAccountName, name)
			}
			if template.Spec.SchedulerName != "" {
				t.Errorf("needs scheduler %q to run: our own pods are the cluster's scheduler's", template.Spec.SchedulerName)
			}
		})
	}
}

// What a pod mounts and where its program is told to look are the same place, and what it mounts comes from somewhere.
func TestManifestsFilesExistWhereProgramsLook(t *testing.T) {
	for _, name := range overlays {
		t.Run(name, func(t *testing.T) {
			objects := build(t, name)
			configMaps := map[string]corev1.ConfigMap{}
			for _, c := range kindOf[corev1.ConfigMap](t, objects, "ConfigMap") {
				configMaps[c.Name] = c
			}
			// From hack/certs, see its test.
			secrets := []string{"drover-autoscaler-tls", "drover-manager-tls", "drover-coordinator-tls"}
			for workload, template := range podTemplates(t, objects) {
				files := map[string]bool{}
				text := strings.Join(template.Spec.Containers[0].Args, "\n")
				for _, m := range template.Spec.Containers[0].VolumeMounts {
					i := slices.IndexFunc(template.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name })
					if i < 0 {
						t.Errorf("%s mounts volume %s, which it does not declare", workload, m.Name)
						continue
					}
					switch v := template.Spec.Volumes[i]; {
					case v.ConfigMap != nil:
						c, ok := configMaps[v.ConfigMap.Name]
						if !ok {
							t.Errorf("%s mounts ConfigMap %s, which is not there", workload, v.ConfigMap.Name)
						}
						for key, value := range c.Data {
							files[filepath.Join(m.MountPath, key)] = true
							text += "\n" + value
						}
					case v.Secret != nil:
						if !slices.Contains(secrets, v.Secret.SecretName) {
							t.Errorf("%s mounts Secret %s, which nothing makes", workload, v.Secret.SecretName)
						}
						for _, key := range []string{"ca.crt", "tls.crt", "tls.key"} {
							files[filepath.Join(m.MountPath, key)] = true
						}
					}
				}
				for _, word := range strings.FieldsFunc(text, func(r rune) bool { return strings.ContainsRune(" \n=\"'", r) }) {
					if strings.HasPrefix(word, "/etc/") && !files[word] {
						t.Errorf("%s is told to read %s, which no volume brings", workload, word)
					}
				}
			}
		})
	}
}

// Overlays for one cluster agree with themselves on who the cluster is and where its autoscaler is.
func TestManifestsIdentity(t *testing.T) {
	for _, name := range []string{"default", "cert-manager", "kueue", "sharded-manager"} {
		t.Run(name, func(t *testing.T) {
			objects := build(t, name)
			manager, autoscaler := &configv1alpha1.ManagerConfiguration{}, &configv1alpha1.AutoscalerConfiguration{}
			shippedConfig(t, objects, "manager.yaml", manager)
			shippedConfig(t, objects, "autoscaler.yaml", autoscaler)
			if manager.ClusterID != ownCluster {
				t.Errorf("the manager's clusterID is %q, want %q", manager.ClusterID, ownCluster)
			}
			clusters := autoscaler.Provider.KWOK.Clusters
			if len(clusters) != 1 || clusters[0].ID != manager.ClusterID {
				t.Errorf("the provider knows clusters %v, want %q only", clusters, manager.ClusterID)
			}
			service := kindOf[corev1.Service](t, objects, "Service")[0]
			host, port, _ := strings.Cut(manager.Autoscaler.Address, ":")
			if host != service.Name+"."+service.Namespace+".svc" || port != fmt.Sprint(service.Spec.Ports[0].Port) {
				t.Errorf("the manager calls %s, the Service is %s", manager.Autoscaler.Address, service.Name)
			}
			for _, u := range objects {
				if u.GetKind() != "Certificate" {
					continue
				}
				names, _, _ := unstructured.NestedStringSlice(u.Object, "spec", "dnsNames")
				uris, _, _ := unstructured.NestedStringSlice(u.Object, "spec", "uris")
				switch u.GetName() {
				case "drover-autoscaler":
					if !slices.Contains(names, host) {
						t.Errorf("the autoscaler's certificate is for %v, not for %s", names, host)
					}
				case "drover-manager":
					if want := "spiffe://drover/cluster/" + manager.ClusterID; !slices.Equal(uris, []string{want}) {
						t.Errorf("the manager's certificate is for %v, want %s", uris, want)
					}
				}
			}
		})
	}
}

// The coordinator's configuration is complete, its Service leads to its webhook's port, and the policy exempts who it is.
func TestManifestsCoordinator(t *testing.T) {
	objects := build(t, "watchgroup")
	config := &configv1alpha1.CoordinatorConfiguration{}
	shippedConfig(t, objects, "coordinator.yaml", config)
	service := kindOf[corev1.Service](t, objects, "Service")[0]
	container := podTemplates(t, objects)["drover-coordinator"].Spec.Containers[0]
	i := slices.IndexFunc(container.Ports, func(p corev1.ContainerPort) bool {
		return p.Name == service.Spec.Ports[0].TargetPort.String()
	})
	if i < 0 || config.Webhook.BindAddress != fmt.Sprintf(":%d", container.Ports[i].ContainerPort) {
		t.Errorf("the Service leads to port %v, the webhook listens on %s", service.Spec.Ports[0].TargetPort, config.Webhook.BindAddress)
	}
	for _, hook := range kindOf[admissionregistrationv1.MutatingWebhookConfiguration](t, objects, "MutatingWebhookConfiguration") {
		to := hook.Webhooks[0].ClientConfig.Service
		if hook.Name != watchgroup.WebhookConfigurationName || to.Name != service.Name || to.Namespace != service.Namespace ||
			*to.Path != watchgroup.WebhookPath {
			t.Errorf("webhook %s calls %s/%s%s", hook.Name, to.Namespace, to.Name, *to.Path)
		}
	}
	for _, policy := range kindOf[admissionregistrationv1.ValidatingAdmissionPolicy](t, objects, "ValidatingAdmissionPolicy") {
		user := "'system:serviceaccount:" + system + ":drover-coordinator'"
		if policy.Name != watchgroup.PolicyName || !strings.Contains(policy.Spec.MatchConditions[1].Expression, user) {
			t.Errorf("policy %s does not exempt %s", policy.Name, user)
		}
	}
}

// The overlay for a cluster of a fleet ships a configuration of its own, which is as complete.
func TestManifestsExternalAutoscaler(t *testing.T) {
	objects := build(t, "external-autoscaler")
	manager := &configv1alpha1.ManagerConfiguration{}
	shippedConfig(t, objects, "manager.yaml", manager)
	if tls := manager.Autoscaler.TLS; tls.Insecure || tls.CAFile == "" || tls.CertFile == "" || tls.KeyFile == "" {
		t.Errorf("the way to the autoscaler is not under mutual TLS: %+v", tls)
	}
	for _, u := range objects {
		if strings.Contains(u.GetName(), "drover-autoscaler") {
			t.Errorf("%s %s is deployed, and the autoscaler is elsewhere", u.GetKind(), u.GetName())
		}
	}
}

// The scheduler's configuration that the plugin's own tests run on is the one that is deployed.
func TestManifestsSchedulerConfiguration(t *testing.T) {
	var deployed, tested map[string]any
	for path, into := range map[string]*map[string]any{
		"manifests/scheduler/config.yaml":                        &deployed,
		"plugins/capacityrequest/testdata/scheduler-config.yaml": &tested,
	} {
		data, err := os.ReadFile(filepath.Join(env.root, path))
		if err != nil {
			t.Fatal(err)
		}
		if err := sigsyaml.UnmarshalStrict(data, into); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
	}
	if !equality.Semantic.DeepEqual(deployed["profiles"], tested["profiles"]) {
		t.Errorf("profiles differ:\ndeployed: %v\ntested:   %v", deployed["profiles"], tested["profiles"])
	}
	election, _ := deployed["leaderElection"].(map[string]any)
	if election["leaderElect"] != true || election["resourceName"] != "drover-scheduler" ||
		election["resourceNamespace"] != system {
		t.Errorf("leader election must not meet kube-scheduler's own: %v", election)
	}
}

// The overlay with VNAffinity has a profile for each of its roles, whose args decode.
func TestManifestsVNAffinityConfiguration(t *testing.T) {
	var config struct {
		Profiles []struct {
			SchedulerName string `json:"schedulerName"`
			PluginConfig  []struct {
				Name string          `json:"name"`
				Args json.RawMessage `json:"args"`
			} `json:"pluginConfig"`
		} `json:"profiles"`
	}
	for _, c := range kindOf[corev1.ConfigMap](t, build(t, "vnaffinity"), "ConfigMap") {
		if err := sigsyaml.Unmarshal([]byte(c.Data["scheduler.yaml"]), &config); err != nil {
			t.Fatal(err)
		}
	}
	roles := map[string]bool{}
	for _, profile := range config.Profiles {
		for _, plugin := range profile.PluginConfig {
			if plugin.Name != "VNAffinity" {
				continue
			}
			args := &configv1alpha1.VNAffinityArgs{}
			if err := configv1alpha1.Decode(plugin.Args, args); err != nil {
				t.Errorf("profile %s: %v", profile.SchedulerName, err)
			}
			roles["members"] = roles["members"] || args.Members != nil
			roles["objects"] = roles["objects"] || args.Objects != nil
		}
	}
	if !roles["members"] || !roles["objects"] {
		t.Errorf("roles that are on: %v", roles)
	}
}

// Everything that a pod may receive or send is closed first, and every port that a policy opens exists.
func TestManifestsNetworkIsClosed(t *testing.T) {
	objects := build(t, "default")
	ports := map[string]bool{}
	for name, template := range podTemplates(t, objects) {
		if template.Labels["app.kubernetes.io/part-of"] != "drover" {
			t.Errorf("pods of %s are not under the default policy", name)
		}
		for _, p := range template.Spec.Containers[0].Ports {
			ports[p.Name] = true
		}
	}
	denied := false
	for _, u := range objects {
		if u.GetKind() != "NetworkPolicy" {
			continue
		}
		ingress, _, _ := unstructured.NestedSlice(u.Object, "spec", "ingress")
		egress, _, _ := unstructured.NestedSlice(u.Object, "spec", "egress")
		types, _, _ := unstructured.NestedStringSlice(u.Object, "spec", "policyTypes")
		if len(ingress) == 0 && len(egress) == 0 && slices.Equal(types, []string{"Ingress", "Egress"}) {
			denied = true
		}
		for _, rule := range ingress {
			allowed, _, _ := unstructured.NestedSlice(rule.(map[string]any), "ports")
			if len(allowed) == 0 {
				t.Errorf("policy %s opens every port", u.GetName())
			}
			for _, p := range allowed {
				if port := p.(map[string]any)["port"]; !ports[fmt.Sprint(port)] {
					t.Errorf("policy %s opens port %v, which no pod has", u.GetName(), port)
				}
			}
		}
	}
	if !denied {
		t.Error("no policy closes everything by default")
	}
}

// The Deployments and the StatefulSet make their pods: admission of the namespace lets the controllers' pods in.
func TestManifestsWorkloadsCreateTheirPods(t *testing.T) {
	want := map[string]int{"drover-scheduler": 2, "drover-manager": 2, "drover-autoscaler": 1}
	eventually(t, "every replica exists as a pod", func(ctx context.Context) (bool, string) {
		var pods corev1.PodList
		if failure := list(ctx, &pods, client.InNamespace(system)); failure != "" {
			return false, failure
		}
		got := map[string]int{}
		for _, p := range pods.Items {
			got[p.Labels["app.kubernetes.io/name"]]++
		}
		return equality.Semantic.DeepEqual(got, want), fmt.Sprintf("%v, want %v", got, want)
	})
}

// People who may edit a namespace may ask for capacity in it; who may view it may look.
func TestManifestsUserRoles(t *testing.T) {
	subject := func(verb, resource, role string) string {
		out, _ := kubectl(t.Context(), "auth", "can-i", verb, resource+".fleet.lucy.sh", "-n", "default", "--as", role)
		return strings.TrimSpace(out)
	}
	for _, role := range []string{"view", "edit"} {
		binding := fmt.Sprintf(`{"apiVersion":"rbac.authorization.k8s.io/v1","kind":"RoleBinding",
			"metadata":{"name":"user-%[1]s","namespace":"default"},
			"roleRef":{"apiGroup":"rbac.authorization.k8s.io","kind":"ClusterRole","name":"%[1]s"},
			"subjects":[{"apiGroup":"rbac.authorization.k8s.io","kind":"User","name":"%[1]s"}]}`, role)
		if out, err := kubectlWithInput(t.Context(), binding, "create", "-f", "-"); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	t.Cleanup(func() {
		ctx, cancel := cleanupContext()
		defer cancel()
		if out, err := kubectl(ctx, "delete", "rolebinding", "-n", "default", "user-view", "user-edit"); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
	})
	// kube-controller-manager aggregates the roles after a moment.
	for _, c := range []struct{ verb, resource, user, want string }{
		{"list", "capacityrequests", "view", "yes"},
		{"create", "capacityrequests", "edit", "yes"},
		{"create", "capacityrequests", "view", "no"},
		{"list", "upcomingnodes", "edit", "yes"},
		{"create", "upcomingnodes", "edit", "no"},
		{"patch", "availablecapacities", "edit", "no"},
	} {
		eventually(t, fmt.Sprintf("%s may %s %s: %s", c.user, c.verb, c.resource, c.want),
			func(context.Context) (bool, string) {
				got := subject(c.verb, c.resource, c.user)
				return got == c.want, got
			})
	}
}

// shippedConfig decodes the configuration file that the manifests ship under that name.
func shippedConfig(t *testing.T, objects []*unstructured.Unstructured, file string, into configv1alpha1.Configuration) {
	t.Helper()
	for _, c := range kindOf[corev1.ConfigMap](t, objects, "ConfigMap") {
		if data, ok := c.Data[file]; ok {
			if err := configv1alpha1.Decode([]byte(data), into); err != nil {
				t.Fatalf("%s as it is shipped: %v", file, err)
			}
			return
		}
	}
	t.Fatalf("no ConfigMap holds %s", file)
}

// Active schedulers elect no leader, are members of the group that is deployed with them, and have their plugin first where
// it has to be. Each says who it is by its Pod, and the fence asks for the group and the account that they have.
func TestManifestsSchedulers(t *testing.T) {
	objects := build(t, "schedulers")
	var config struct {
		LeaderElection struct{ LeaderElect bool }
		Profiles       []struct {
			Plugins struct {
				MultiPoint, PostFilter, Bind struct{ Enabled []struct{ Name string } }
			}
			PluginConfig []struct{ Args configv1alpha1.VNAffinityArgs }
		}
	}
	for _, m := range kindOf[corev1.ConfigMap](t, objects, "ConfigMap") {
		if text, ok := m.Data["scheduler.yaml"]; ok {
			if err := sigsyaml.Unmarshal([]byte(text), &config); err != nil {
				t.Fatal(err)
			}
		}
	}
	profile := config.Profiles[0]
	for _, enabled := range [][]struct{ Name string }{
		profile.Plugins.MultiPoint.Enabled, profile.Plugins.PostFilter.Enabled, profile.Plugins.Bind.Enabled,
	} {
		if len(enabled) == 0 || enabled[0].Name != "VNAffinity" {
			t.Errorf("the plugin is not first: %v", profile.Plugins)
		}
	}
	seat := profile.PluginConfig[0].Args.Schedulers
	if config.LeaderElection.LeaderElect || seat == nil {
		t.Fatalf("leaderElect %v, schedulers %v", config.LeaderElection.LeaderElect, seat)
	}
	group := kindOf[lbv1alpha1.WatchGroup](t, objects, "WatchGroup")[0]
	if seat.Namespace != group.Namespace || seat.WatchGroup != group.Name || group.Spec.OptIn != lbv1alpha1.OptInNone {
		t.Errorf("the schedulers are members of %s/%s, deployed is %s/%s", seat.Namespace, seat.WatchGroup, group.Namespace, group.Name)
	}
	template := podTemplates(t, objects)["drover-scheduler"]
	env := map[string]bool{}
	for _, e := range template.Spec.Containers[0].Env {
		env[e.Name] = true
	}
	for _, name := range []string{"POD_NAME", "POD_UID", "POD_NAMESPACE", "CONTAINER_NAME"} {
		if !env[name] {
			t.Errorf("environment variable %s is missing", name)
		}
	}
	for _, policy := range kindOf[admissionregistrationv1.ValidatingAdmissionPolicy](t, objects, "ValidatingAdmissionPolicy") {
		account := "'system:serviceaccount:" + system + ":" + template.Spec.ServiceAccountName + "'"
		if policy.Name == "drover-schedulers-fence" && !strings.Contains(policy.Spec.MatchConditions[0].Expression, account) {
			t.Errorf("the fence does not look at %s", account)
		}
	}
	for _, binding := range kindOf[admissionregistrationv1.ValidatingAdmissionPolicyBinding](t, objects, "ValidatingAdmissionPolicyBinding") {
		if p := binding.Spec.ParamRef; binding.Name == "drover-schedulers-fence" &&
			(p.Namespace != group.Namespace || p.Selector.MatchLabels[lbv1alpha1.LabelWatchGroup] != group.Name) {
			t.Errorf("the fence looks at slices of %s/%v", p.Namespace, p.Selector)
		}
	}
}
