package playground

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"k8s.io/client-go/tools/clientcmd"

	"github.com/drover-sh/drover/internal/controlplane"
	"github.com/drover-sh/drover/internal/kueuemanager"
	"github.com/drover-sh/drover/internal/process"
)

// Names of the components that Kill and Restart know, in the order of their start.
const (
	Autoscaler = "drover-autoscaler"
	Manager    = "drover-manager"
	Scheduler  = "drover-scheduler"
)

var components = []string{Autoscaler, Manager, Scheduler}

// ClusterID is the name of the playground's cluster in its fleet of one.
const ClusterID = "playground"

const stopGrace = 10 * time.Second

// Options of Start. The zero value starts everything in a new directory of the registry.
type Options struct {
	// Dir holds configuration, certificates, state and logs. Empty: a new directory that others find by the registry and
	// that Stop removes. A directory that is given stays.
	Dir string
	// BinDir has the three programs. Default: bin of the repository.
	BinDir string
	// ControlPlane, when set, is used and stays the caller's; it has to run a controller manager and kwok. Default: a new
	// one in Dir.
	ControlPlane *controlplane.ControlPlane
	// Kubeconfigs, by component, are what that component uses. Default: the administrator's.
	Kubeconfigs map[string]string
	// Kueue starts the Kueue manager, too, before ours. Without it the first story that needs Kueue starts it.
	Kueue bool
	// Shared lets other processes find the playground in the registry, to play stories on it or to end it.
	Shared bool
	// Presenter shows what happens. Default: nothing is shown.
	Presenter Presenter
}

// Playground is a control plane and Drover's three programs, running, and the Kueue manager where it is wanted.
type Playground struct {
	options Options
	dir     string
	kube    string // the administrator's kubeconfig
	ports   ports
	present Presenter

	entry *entry // nil where Dir was given
	cp    *controlplane.ControlPlane
	ownCP bool
	group *process.Group // nil in a playground that belongs to another process

	kueue          *kueuemanager.Manager // nil where it is not running, or not this process's
	hasKueue       bool
	kueueInstalled bool // its webhooks may be in the cluster

	mu      sync.Mutex
	running map[string]*process.Process

	view   *view
	stop   sync.Once
	stopOK error
}

// Start starts everything and returns when all of it is ready. ctx bounds the start only. On error nothing is left.
func Start(ctx context.Context, o Options) (_ *Playground, err error) {
	p := &Playground{options: o, dir: o.Dir, present: o.Presenter, running: map[string]*process.Process{}}
	if p.present == nil {
		p.present = Silent{}
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Stop())
		}
	}()
	if err := p.findPrograms(); err != nil {
		return nil, err
	}
	if p.dir == "" {
		if p.entry, err = newEntry(); err != nil {
			return nil, err
		}
		p.dir = p.entry.dir
	}
	if p.dir, err = filepath.Abs(p.dir); err != nil {
		return nil, fmt.Errorf("playground: Options.Dir %q: %w", o.Dir, err)
	}
	if p.group, err = process.NewGroup(p.dir); err != nil {
		return nil, fmt.Errorf("playground: %w", err)
	}
	if err := p.startControlPlane(ctx); err != nil {
		return nil, err
	}
	if o.Kueue {
		if err := p.startKueue(ctx); err != nil {
			return nil, err
		}
	}
	if err := p.startComponents(ctx); err != nil {
		return nil, err
	}
	if err := p.startView(ctx); err != nil {
		return nil, err
	}
	if p.entry != nil && o.Shared {
		if err := p.entry.publish(description{PID: os.Getpid(), Kubeconfig: p.kube, Ports: p.ports, Kueue: o.Kueue}); err != nil {
			return nil, err
		}
	}
	p.present.Ready(p)
	return p, nil
}

// startView begins to follow the cluster.
func (p *Playground) startView(ctx context.Context) (err error) {
	if p.view, err = newView(ctx, p.kube); err != nil {
		return err
	}
	if p.hasKueue {
		return p.view.followKueue(ctx)
	}
	return nil
}

// findPrograms fails early, and tells everything that is missing at once.
func (p *Playground) findPrograms() error {
	if p.options.BinDir == "" {
		root, err := controlplane.RepositoryRoot()
		if err != nil {
			return fmt.Errorf("playground: %w", err)
		}
		p.options.BinDir = filepath.Join(root, "bin")
	}
	var errs []error
	for _, name := range components {
		if _, err := os.Stat(p.program(name)); err != nil {
			errs = append(errs, fmt.Errorf("program %s: not built yet: run `make binaries` (%w)", name, err))
		}
	}
	others := []string{"etcd", "kube-apiserver", "kube-controller-manager", "kubectl", "kwok"}
	if p.options.Kueue {
		others = append(others, "kueue")
	}
	for _, name := range others {
		if _, err := controlplane.Binary(name); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (p *Playground) program(name string) string { return filepath.Join(p.options.BinDir, name) }

func (p *Playground) startControlPlane(ctx context.Context) error {
	if p.options.ControlPlane != nil {
		p.cp = p.options.ControlPlane
	} else {
		crds, err := crdPath()
		if err != nil {
			return err
		}
		cp, err := controlplane.Start(ctx, controlplane.Options{
			Dir:               filepath.Join(p.dir, "control-plane"),
			CRDPaths:          []string{crds},
			ControllerManager: true,
			KWOK:              true,
			Progress:          func(step string) { p.present.Busy("starting " + step) },
		})
		if err != nil {
			return err
		}
		p.cp, p.ownCP = cp, true
	}
	p.kube = p.cp.Kubeconfig()
	return nil
}

// startComponents writes configurations and starts the programs. Ports are chosen before they are used, so that
// somebody may be quicker; then all is done again with others.
func (p *Playground) startComponents(ctx context.Context) error {
	if err := ensureSystemNamespace(ctx, p.cp.Config()); err != nil {
		return err
	}
	if err := writeCertificates(p.certDir()); err != nil {
		return err
	}
	if err := p.SetOfferings(DefaultOfferings()); err != nil {
		return err
	}
	for attempt := 1; ; attempt++ {
		err := p.tryComponents(ctx)
		if err == nil {
			return nil
		}
		if attempt == 3 || ctx.Err() != nil || !p.portTaken() {
			return err
		}
		for _, proc := range p.running {
			err = errors.Join(err, proc.Stop(stopGrace))
		}
	}
}

func (p *Playground) tryComponents(ctx context.Context) error {
	var err error
	if p.ports, err = choosePorts(); err != nil {
		return err
	}
	if err := p.writeConfigs(); err != nil {
		return err
	}
	for _, name := range components {
		p.present.Busy("starting " + name)
		if err := p.startOne(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

func (p *Playground) startOne(ctx context.Context, name string) error {
	proc, err := p.group.Start(process.Spec{Name: name, Path: p.program(name), Args: p.args(name)})
	if err != nil {
		return err
	}
	p.mu.Lock()
	p.running[name] = proc
	p.mu.Unlock()
	ctx, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("%s have passed", patience))
	defer cancel()
	return proc.WaitReady(ctx, p.healthURL(name))
}

// portTaken says whether a component's log tells that somebody else has its port.
func (p *Playground) portTaken() bool {
	return slices.ContainsFunc(components, func(name string) bool {
		return portInUse(process.Tail(p.group.LogFile(name), 20))
	})
}

// Kill ends a component with SIGKILL, as a crash would.
func (p *Playground) Kill(name string) error {
	proc, err := p.component(name)
	if err != nil {
		return err
	}
	return proc.Kill()
}

// Restart starts a component again, after it was killed or while it is running, and returns when it is ready.
func (p *Playground) Restart(ctx context.Context, name string) error {
	proc, err := p.component(name)
	if err != nil {
		return err
	}
	if err := proc.Stop(stopGrace); err != nil {
		return err
	}
	return p.startOne(ctx, name)
}

func (p *Playground) component(name string) (*process.Process, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	proc, ok := p.running[name]
	if !ok {
		return nil, fmt.Errorf("component %q: not one of this process's %v", name, components)
	}
	return proc, nil
}

// Kubeconfig is the path of the administrator's kubeconfig.
func (p *Playground) Kubeconfig() string { return p.kube }

// Dir is where configuration and logs are.
func (p *Playground) Dir() string { return p.dir }

// LogDir is where the logs of Drover's programs are.
func (p *Playground) LogDir() string { return filepath.Join(p.dir, "logs") }

// Stop ends every process and, where the playground chose its directory, removes it. It may be called again. A
// playground that was attached to is only let go.
func (p *Playground) Stop() error {
	p.stop.Do(func() {
		if p.view != nil {
			p.view.stop()
		}
		var errs []error
		if p.group != nil {
			errs = append(errs, p.group.Stop(stopGrace))
		}
		errs = append(errs, p.stopKueue())
		if p.ownCP {
			errs = append(errs, p.cp.Stop())
		}
		if p.entry != nil {
			errs = append(errs, p.entry.remove())
		}
		p.stopOK = errors.Join(errs...)
	})
	return p.stopOK
}

// Attach joins a playground that another process keeps up. Its stories can be played; its components belong to the
// other process, so that Kill and Restart do not know them.
func Attach(ctx context.Context, presenter Presenter) (*Playground, error) {
	e, d, err := findEntry()
	if err != nil {
		return nil, err
	}
	if presenter == nil {
		presenter = Silent{}
	}
	p := &Playground{dir: e.dir, kube: d.Kubeconfig, ports: d.Ports, hasKueue: d.Kueue, present: presenter}
	if _, err := clientcmd.LoadFromFile(p.kube); err != nil {
		return nil, fmt.Errorf("playground in %s: %w", e.dir, err)
	}
	if err := p.startView(ctx); err != nil {
		return nil, errors.Join(err, p.Stop())
	}
	return p, nil
}
