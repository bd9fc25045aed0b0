package controlplane

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/drover-sh/drover/internal/process"
)

const (
	// startPatience is how long a process may take to start. It is a limit for hangs, not an expectation of speed.
	startPatience = 3 * time.Minute
	// stopGrace is how long a process may take to end by itself.
	stopGrace = 10 * time.Second
)

// Options says what to start.
type Options struct {
	// Dir holds everything that the control plane writes. It is created, and stays after Stop, for its logs. Required.
	Dir string
	// CRDPaths are files or directories of CustomResourceDefinitions to install.
	CRDPaths []string
	// ControllerManager starts kube-controller-manager.
	ControllerManager bool
	// KWOK starts kwok, which keeps every Node with the annotation kwok.x-k8s.io/node=fake Ready and runs the pods that
	// are bound to it. It needs ControllerManager, or new nodes keep their not-ready taint.
	KWOK bool
	// APIServerArgs are further flags of kube-apiserver: the name without dashes, and its values. They replace a default
	// of the same name.
	APIServerArgs map[string][]string
	// ControllerManagerArgs are further flags of kube-controller-manager, as "--name=value".
	ControllerManagerArgs []string
	// Progress, when set, is told what is being started.
	Progress func(step string)
}

// ControlPlane is a running control plane.
type ControlPlane struct {
	options    Options
	env        *envtest.Environment
	config     *rest.Config
	kubeconfig string
	group      *process.Group
	logs       []*os.File

	// The API server's process, once it has been restarted.
	restarting    sync.Mutex
	apiServer     *process.Process
	apiServerArgs []string

	stop    sync.Once
	stopErr error
}

// Start starts a control plane and returns when it is ready to be used: CRDs established, the controller manager's
// controllers running, kwok watching. ctx bounds the start only; the control plane runs until Stop. On error nothing
// runs.
func Start(ctx context.Context, o Options) (_ *ControlPlane, err error) {
	if o.Dir == "" {
		return nil, errors.New("controlplane: Options.Dir is empty")
	}
	if o.KWOK && !o.ControllerManager {
		return nil, errors.New("controlplane: Options.KWOK needs Options.ControllerManager")
	}
	if o.Dir, err = filepath.Abs(o.Dir); err != nil {
		return nil, fmt.Errorf("controlplane: Options.Dir %q: %w", o.Dir, err)
	}
	group, err := process.NewGroup(o.Dir)
	if err != nil {
		return nil, fmt.Errorf("controlplane: %w", err)
	}
	cp := &ControlPlane{options: o, group: group, kubeconfig: filepath.Join(o.Dir, "admin.kubeconfig")}
	defer func() {
		if err != nil {
			err = errors.Join(err, cp.Stop())
		}
	}()
	if err := cp.startAPIServer(ctx); err != nil {
		return nil, err
	}
	if o.ControllerManager {
		if err := cp.startControllerManager(ctx); err != nil {
			return nil, err
		}
	}
	if o.KWOK {
		if err := cp.startKWOK(ctx); err != nil {
			return nil, err
		}
	}
	return cp, nil
}

// Config is the administrator's client configuration. It is the caller's own copy.
func (cp *ControlPlane) Config() *rest.Config { return rest.CopyConfig(cp.config) }

// Kubeconfig is the path of the administrator's kubeconfig.
func (cp *ControlPlane) Kubeconfig() string { return cp.kubeconfig }

// Dir is Options.Dir, absolute.
func (cp *ControlPlane) Dir() string { return cp.options.Dir }

// LogDir is where every process of the control plane writes its log.
func (cp *ControlPlane) LogDir() string { return cp.group.LogDir() }

// Stop ends every process of the control plane and waits until they are gone. It may be called again. Logs stay in
// Options.Dir; data and keys do not.
func (cp *ControlPlane) Stop() error {
	cp.stop.Do(func() { cp.stopErr = cp.shutDown() })
	return cp.stopErr
}

func (cp *ControlPlane) shutDown() error {
	// Clients first: without an API server they would only fill their logs. The group's watchdog ends with the group, so
	// that a failure to stop the API server below has to be handled here.
	var errs []error
	errs = append(errs, cp.group.StopProcesses(stopGrace))
	if cp.env != nil {
		if err := cp.env.Stop(); err != nil {
			errs = append(errs, fmt.Errorf("stopping the API server and etcd: %w", err))
			errs = append(errs, process.End(cp.options.Dir))
		}
		for _, name := range []string{"kube-apiserver", "etcd"} {
			cp.group.Unwrap(name)
		}
	}
	errs = append(errs, cp.group.Stop(stopGrace))
	for _, f := range cp.logs {
		f.Close()
	}
	for _, name := range []string{"etcd-data", "certs"} {
		errs = append(errs, os.RemoveAll(filepath.Join(cp.options.Dir, name)))
	}
	return errors.Join(errs...)
}

func (cp *ControlPlane) certDir() string { return filepath.Join(cp.options.Dir, "certs") }

func (cp *ControlPlane) progress(format string, args ...any) {
	if cp.options.Progress != nil {
		cp.options.Progress(fmt.Sprintf(format, args...))
	}
}

// wrapped finds a program, wraps it so that the watchdog covers it, and opens its log.
func (cp *ControlPlane) wrapped(name string) (path string, log *os.File, err error) {
	binary, err := Binary(name)
	if err != nil {
		return "", nil, err
	}
	if path, err = cp.group.Wrap(name, binary); err != nil {
		return "", nil, err
	}
	log, err = os.OpenFile(cp.group.LogFile(name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return "", nil, fmt.Errorf("log of %s: %w", name, err)
	}
	cp.logs = append(cp.logs, log)
	return path, log, nil
}

func (cp *ControlPlane) startAPIServer(ctx context.Context) error {
	cp.progress("etcd and kube-apiserver")
	env := &envtest.Environment{
		ErrorIfCRDPathMissing:    true,
		CRDDirectoryPaths:        cp.options.CRDPaths,
		CRDInstallOptions:        envtest.CRDInstallOptions{MaxTime: startPatience},
		ControlPlaneStartTimeout: startPatience,
		ControlPlaneStopTimeout:  stopGrace,
	}
	for _, dir := range []string{cp.certDir(), filepath.Join(cp.options.Dir, "etcd-data")} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("controlplane: %w", err)
		}
	}
	etcd := &envtest.Etcd{DataDir: filepath.Join(cp.options.Dir, "etcd-data")}
	path, log, err := cp.wrapped("etcd")
	if err != nil {
		return err
	}
	etcd.Path, etcd.Out, etcd.Err = path, log, log
	env.ControlPlane.Etcd = etcd

	server := env.ControlPlane.GetAPIServer()
	if path, log, err = cp.wrapped("kube-apiserver"); err != nil {
		return err
	}
	server.Path, server.Out, server.Err = path, log, log
	server.CertDir = cp.certDir()
	// Components that ask the API server who calls them look for this authority, too. Nobody has its key.
	frontProxy := filepath.Join(cp.certDir(), "front-proxy-ca.crt")
	if err := writeAuthority(frontProxy, "front-proxy"); err != nil {
		return err
	}
	server.Configure().Set("requestheader-client-ca-file", frontProxy).
		Set("requestheader-allowed-names", "front-proxy-client").
		Set("requestheader-username-headers", "X-Remote-User").
		Set("requestheader-group-headers", "X-Remote-Group").
		Set("requestheader-extra-headers-prefix", "X-Remote-Extra-")
	for name, values := range cp.options.APIServerArgs {
		server.Configure().Set(name, values...)
	}
	if env.ControlPlane.KubectlPath, err = Binary("kubectl"); err != nil {
		return err
	}

	cp.env = env
	started := make(chan error, 1)
	go func() {
		var err error
		cp.config, err = env.Start()
		started <- err
	}()
	select {
	case err = <-started:
	case <-ctx.Done():
		// envtest knows no context: its processes end, and with them its start.
		_ = process.End(cp.options.Dir)
		err = errors.Join(context.Cause(ctx), <-started)
	}
	if err != nil {
		return fmt.Errorf("starting the API server and etcd (logs in %s): %w\n%s", cp.LogDir(), err,
			process.Tail(cp.group.LogFile("kube-apiserver"), 10))
	}
	return os.WriteFile(cp.kubeconfig, env.KubeConfig, 0o600)
}

// onFreePort starts a process that serves its health on a port of its own choice of ours. Between the choice and the
// use somebody else may take the port, so it tries again.
func (cp *ControlPlane) onFreePort(ctx context.Context, spec process.Spec, scheme string,
	args func(port int) []string,
) error {
	path, err := Binary(spec.Name)
	if err != nil {
		return err
	}
	spec.Path = path
	ctx, cancel := context.WithTimeoutCause(ctx, startPatience, fmt.Errorf("%s have passed", startPatience))
	defer cancel()
	for attempt := 1; ; attempt++ {
		port, err := process.FreePort()
		if err != nil {
			return err
		}
		spec.Args = args(port)
		p, err := cp.group.Start(spec)
		if err != nil {
			return err
		}
		err = p.WaitReady(ctx, fmt.Sprintf("%s://127.0.0.1:%d/healthz", scheme, port))
		if err == nil {
			return nil
		}
		inUse := strings.Contains(process.Tail(p.LogFile(), 20), "address already in use")
		if attempt == 3 || p.Running() || !inUse {
			return err
		}
	}
}

func (cp *ControlPlane) startControllerManager(ctx context.Context) error {
	cp.progress("kube-controller-manager")
	kubeconfig, err := cp.KubeconfigForUser("system:kube-controller-manager")
	if err != nil {
		return err
	}
	key := filepath.Join(cp.certDir(), "sa-signer.key")
	ca := filepath.Join(cp.certDir(), "ca.crt")
	if err := os.WriteFile(ca, cp.config.CAData, 0o644); err != nil {
		return fmt.Errorf("controlplane: %w", err)
	}
	return cp.onFreePort(ctx, process.Spec{Name: "kube-controller-manager"}, "https", func(port int) []string {
		return append([]string{
			"--kubeconfig=" + kubeconfig,
			"--authentication-kubeconfig=" + kubeconfig,
			"--authorization-kubeconfig=" + kubeconfig,
			"--bind-address=127.0.0.1",
			fmt.Sprintf("--secure-port=%d", port),
			"--cert-dir=" + filepath.Join(cp.certDir(), "kube-controller-manager"),
			"--leader-elect=false",
			"--use-service-account-credentials=true",
			"--service-account-private-key-file=" + key,
			"--root-ca-file=" + ca,
			// What has nothing to do without a cloud, a kubelet or a network. The node lifecycle controller stays: it takes
			// the not-ready taint from a node that has become Ready.
			"--controllers=" + strings.Join([]string{
				"*", "-node-ipam-controller", "-node-route-controller", "-service-lb-controller",
				"-cloud-node-lifecycle-controller", "-persistentvolume-attach-detach-controller",
				"-certificatesigningrequest-approving-controller", "-certificatesigningrequest-cleaner-controller",
				"-certificatesigningrequest-signing-controller", "-horizontal-pod-autoscaler-controller",
				"-endpoints-controller", "-endpointslice-mirroring-controller", "-ttl-controller",
				"-replicationcontroller-controller", "-service-cidr-controller", "-storage-version-migrator-controller",
				"-storageversion-garbage-collector-controller", "-legacy-serviceaccount-token-cleaner-controller",
			}, ","),
			// Simulated kubelets share two processors with everything else: a late heartbeat is no dead node.
			"--node-monitor-period=2s",
			"--node-monitor-grace-period=10m",
			"--kube-api-qps=500", "--kube-api-burst=1000",
			"--concurrent-gc-syncs=20", "--concurrent-job-syncs=10",
		}, cp.options.ControllerManagerArgs...)
	})
}

func (cp *ControlPlane) startKWOK(ctx context.Context) error {
	cp.progress("kwok")
	stages := filepath.Join(cp.options.Dir, "kwok.yaml")
	if err := os.WriteFile(stages, stagesYAML, 0o644); err != nil {
		return fmt.Errorf("controlplane: %w", err)
	}
	return cp.onFreePort(ctx, process.Spec{Name: "kwok"}, "http", func(port int) []string {
		return []string{
			"--config=" + stages, // also keeps a user's own ~/.kwok/kwok.yaml out
			"--kubeconfig=" + cp.kubeconfig,
			"--manage-nodes-with-annotation-selector=" + KWOKAnnotation + "=" + KWOKAnnotationValue,
			"--node-lease-duration-seconds=40",
			"--node-ip=127.0.0.1",
			fmt.Sprintf("--server-address=127.0.0.1:%d", port),
		}
	})
}

// Clientset is a client with the administrator's rights.
func (cp *ControlPlane) Clientset() (kubernetes.Interface, error) {
	c, err := kubernetes.NewForConfig(cp.Config())
	if err != nil {
		return nil, fmt.Errorf("controlplane: %w", err)
	}
	return c, nil
}
