package playground

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
	"github.com/drover-sh/drover/internal/controlplane"
	"github.com/drover-sh/drover/internal/process"
)

// A playground is impatient: what takes minutes in a fleet takes seconds here. settleTime is the exception: two
// processors may need a while to bind 64 pods, and a plan must not be called too tight because of that.
const (
	launchLatency      = 4 * time.Second
	registerLatency    = time.Second
	rollUpPeriod       = time.Second
	rollUpDebounce     = 200 * time.Millisecond
	backstopDelay      = 2 * time.Second
	consolidationDelay = 2 * time.Second
	collapseHold       = 3 * time.Second
	settleTime         = 15 * time.Second
	maxReclaims        = 1000
	keptBackoff        = 5 * time.Second
)

// ports are those that the components listen on, all on loopback.
type ports struct {
	AutoscalerGRPC    int `json:"autoscalerGRPC"`
	AutoscalerHealth  int `json:"autoscalerHealth"`
	AutoscalerMetrics int `json:"autoscalerMetrics"`
	ManagerHealth     int `json:"managerHealth"`
	ManagerMetrics    int `json:"managerMetrics"`
	Scheduler         int `json:"scheduler"`
}

func choosePorts() (p ports, err error) {
	for _, port := range []*int{
		&p.AutoscalerGRPC, &p.AutoscalerHealth, &p.AutoscalerMetrics, &p.ManagerHealth, &p.ManagerMetrics, &p.Scheduler,
	} {
		if *port, err = process.FreePort(); err != nil {
			return ports{}, err
		}
	}
	return p, nil
}

func portInUse(log string) bool { return strings.Contains(log, "address already in use") }

func loopback(port int) string { return "127.0.0.1:" + strconv.Itoa(port) }

func (p *Playground) certDir() string           { return filepath.Join(p.dir, "certificates") }
func (p *Playground) offeringsFile() string     { return filepath.Join(p.dir, "offerings.yaml") }
func (p *Playground) config(name string) string { return filepath.Join(p.dir, name+".yaml") }

func (p *Playground) kubeconfigOf(name string) string {
	if path := p.options.Kubeconfigs[name]; path != "" {
		return path
	}
	return p.kube
}

// args is how a component is started.
func (p *Playground) args(name string) []string {
	args := []string{"--config=" + p.config(name)}
	switch name {
	case Manager:
		return append(args, "--kubeconfig="+p.kubeconfigOf(name))
	case Scheduler:
		return append(args,
			"--bind-address=127.0.0.1",
			"--secure-port="+strconv.Itoa(p.ports.Scheduler),
			"--cert-dir="+filepath.Join(p.certDir(), name),
			"--authentication-kubeconfig="+p.kubeconfigOf(name),
			"--authorization-kubeconfig="+p.kubeconfigOf(name))
	default:
		return args
	}
}

func (p *Playground) healthURL(name string) string {
	switch name {
	case Scheduler:
		return "https://" + loopback(p.ports.Scheduler) + "/readyz"
	case Manager:
		return "http://" + loopback(p.ports.ManagerHealth) + "/readyz"
	default:
		return "http://" + loopback(p.ports.AutoscalerHealth) + "/readyz"
	}
}

func (p *Playground) writeConfigs() error {
	cert := func(who, file string) string { return filepath.Join(p.certDir(), who+file) }
	meta := func(kind string) metav1.TypeMeta {
		return metav1.TypeMeta{APIVersion: configv1alpha1.GroupVersion.String(), Kind: kind}
	}
	autoscaler := &configv1alpha1.AutoscalerConfiguration{
		TypeMeta:      meta("AutoscalerConfiguration"),
		ListenAddress: loopback(p.ports.AutoscalerGRPC),
		TLS: configv1alpha1.ServerTLS{
			CertFile: cert("autoscaler", ".crt"), KeyFile: cert("autoscaler", ".key"), ClientCAFile: cert("ca", ".crt"),
		},
		HealthProbeBindAddress: loopback(p.ports.AutoscalerHealth),
		MetricsBindAddress:     loopback(p.ports.AutoscalerMetrics),
		State:                  "file://" + filepath.ToSlash(filepath.Join(p.dir, "state")) + "?create_dir=true",
		Provider: configv1alpha1.ProviderConfig{KWOK: &configv1alpha1.KWOKProvider{
			OfferingsFile:   p.offeringsFile(),
			Clusters:        []configv1alpha1.KWOKCluster{{ID: ClusterID, Kubeconfig: p.kubeconfigOf(Autoscaler)}},
			LaunchLatency:   duration(launchLatency),
			RegisterLatency: duration(registerLatency),
			LatencyJitter:   0.25,
		}},
		Policy: configv1alpha1.PolicyConfig{
			ConsolidationDelay:   duration(consolidationDelay),
			MaxReclaimsPerMinute: maxReclaims,
			CollapseHold:         duration(collapseHold),
			KeptBackoff:          duration(keptBackoff),
			SettleTime:           duration(settleTime),
		},
	}
	manager := &configv1alpha1.ManagerConfiguration{
		TypeMeta:  meta("ManagerConfiguration"),
		ClusterID: ClusterID,
		Autoscaler: configv1alpha1.AutoscalerClient{
			Address: loopback(p.ports.AutoscalerGRPC),
			TLS: configv1alpha1.ClientTLS{
				CAFile: cert("ca", ".crt"), CertFile: cert("manager", ".crt"), KeyFile: cert("manager", ".key"),
			},
			BackoffBase: duration(200 * time.Millisecond),
			BackoffMax:  duration(2 * time.Second),
		},
		RollUp:   configv1alpha1.RollUpConfig{Debounce: duration(rollUpDebounce), Period: duration(rollUpPeriod)},
		Backstop: configv1alpha1.BackstopConfig{Delay: duration(backstopDelay)},
		Kueue:    configv1alpha1.KueueConfig{Enabled: p.hasKueue},
		// One process each: nobody to elect, and nobody to wait for after a crash.
		LeaderElection:         configv1alpha1.LeaderElectionConfig{LeaderElect: ptr.To(false)},
		MetricsBindAddress:     loopback(p.ports.ManagerMetrics),
		MetricsInsecure:        true,
		HealthProbeBindAddress: loopback(p.ports.ManagerHealth),
	}
	for name, content := range map[string]any{
		Autoscaler: autoscaler, Manager: manager, Scheduler: p.schedulerConfig(),
	} {
		if err := writeYAML(p.config(name), content); err != nil {
			return err
		}
	}
	return nil
}

// affinityProfile is the profile with the plugin VNAffinity.
const affinityProfile = "drover-affinity"

// schedulerConfig serves the stock scheduler's name, too, so that a user's manifests run unchanged.
func (p *Playground) schedulerConfig() any {
	type object = map[string]any
	var profiles []object
	for _, name := range []string{Scheduler, corev1.DefaultSchedulerName} {
		profiles = append(profiles, object{
			"schedulerName": name,
			"plugins":       object{"postFilter": object{"enabled": []object{{"name": "CapacityRequest"}}}},
			"pluginConfig": []object{{"name": "CapacityRequest", "args": object{
				"apiVersion": configv1alpha1.GroupVersion.String(), "kind": "CapacityRequestArgs",
			}}},
		})
	}
	// A profile that places by Virtual Nodes. The playground has handfuls of pods, which the bound would scatter.
	enabled := object{"enabled": []object{{"name": "VNAffinity", "weight": 20}}}
	profiles = append(profiles, object{
		"schedulerName":            affinityProfile,
		"percentageOfNodesToScore": 100,
		"plugins":                  object{"preFilter": enabled, "filter": enabled, "preScore": enabled, "score": enabled},
		"pluginConfig": []object{{"name": "VNAffinity", "args": object{
			"apiVersion": configv1alpha1.GroupVersion.String(), "kind": "VNAffinityArgs",
			"members": object{}, "objects": object{"mode": "Domains", "minLoad": 30},
		}}},
	})
	return object{
		"apiVersion":       "kubescheduler.config.k8s.io/v1",
		"kind":             "KubeSchedulerConfiguration",
		"clientConnection": object{"kubeconfig": p.kubeconfigOf(Scheduler), "qps": 500, "burst": 1000},
		"leaderElection":   object{"leaderElect": false},
		"profiles":         profiles,
	}
}

// SetOfferings replaces what the provider sells. It reads its file again by itself.
func (p *Playground) SetOfferings(offerings []configv1alpha1.Offering) error {
	return writeYAML(p.offeringsFile(), &configv1alpha1.OfferingList{
		TypeMeta:  metav1.TypeMeta{APIVersion: configv1alpha1.GroupVersion.String(), Kind: "OfferingList"},
		Offerings: offerings,
	})
}

// writeYAML replaces a file in one step, so that nobody reads half of it.
func writeYAML(path string, content any) error {
	data, err := yaml.Marshal(content)
	if err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	if err := os.WriteFile(path+".new", data, 0o600); err != nil {
		return fmt.Errorf("writing a configuration: %w", err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		return fmt.Errorf("writing a configuration: %w", err)
	}
	return nil
}

func duration(d time.Duration) *metav1.Duration { return &metav1.Duration{Duration: d} }

func ensureSystemNamespace(ctx context.Context, config *rest.Config) error {
	clients, err := kubernetes.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("playground: %w", err)
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: fleetv1alpha1.SystemNamespace}}
	_, err = clients.CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("playground: %w", err)
	}
	return nil
}

// crdPath is the folder of the CRDs in the repository.
func crdPath() (string, error) {
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		return "", fmt.Errorf("playground: %w", err)
	}
	return filepath.Join(root, "manifests", "crd", "bases"), nil
}
