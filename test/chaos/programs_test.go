package chaos

import (
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"k8s.io/client-go/tools/clientcmd"

	"github.com/drover-sh/drover/internal/link"
	"github.com/drover-sh/drover/internal/process"
)

// A program is one replica of something, which may have many lives: as kubelet would, it is started again when it ends by
// itself, and stays down while a fault keeps it so.
type program struct {
	c    *cluster
	name string
	spec func(life int) process.Spec

	mu      sync.Mutex
	process *process.Process
	down    bool
	lives   int
}

func (p *program) start() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down = false
	p.launch()
}

// launch begins the next life. Under the lock.
func (p *program) launch() {
	p.lives++
	spec := p.spec(p.lives)
	spec.Env = []string{"POD_NAME=", "POD_NAMESPACE=", "POD_UID=", "CONTAINER_NAME="} // nobody runs in a Pod here
	next, err := p.c.group.Start(spec)
	if err != nil {
		p.c.t.Errorf("%v", err) // not Fatal: other goroutines start processes, too
		return
	}
	p.process = next
	go p.keep(next)
}

// keep starts the program again when it has ended and nobody wanted that.
func (p *program) keep(life *process.Process) {
	<-life.Done()
	pause(p.c.t.Context(), time.Second)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.down || p.process != life || p.c.ending.Load() || p.c.t.Context().Err() != nil {
		return
	}
	p.c.note(p.name, "ended by itself")
	p.launch()
}

// ends marks the program as one that stays down, and returns its process.
func (p *program) ends() *process.Process {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down = true
	return p.process
}

func (p *program) kill() { _ = p.ends().Kill() }

func (p *program) stop() { _ = p.ends().Stop(30 * time.Second) }

func (p *program) signal(s syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_ = syscall.Kill(-p.process.PID(), s)
}

func (p *program) life() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lives
}

// launch runs a program once.
func (c *cluster) launch(spec process.Spec) *process.Process {
	p, err := c.group.Start(spec)
	if err != nil {
		c.t.Errorf("%v", err)
	}
	return p
}

// newCoordinator starts a process of cmd/coordinator.
func (c *cluster) newCoordinator(i int) *program {
	name := fmt.Sprintf("coordinator-%d", i)
	config := fmt.Sprintf(`apiVersion: config.drover.sh/v1alpha1
kind: CoordinatorConfiguration
namespace: %s
metricsBindAddress: "0"
healthProbeBindAddress: "0"
webhook: {bindAddress: "127.0.0.1:%d", certFile: %q, keyFile: %q, caFile: %q}
backfill: {qps: 1000, burst: 1000}
leaderElection: {leaseDuration: 4s, renewDeadline: 3s, retryPeriod: 500ms}
`, system, c.admission.ports[i], c.admission.cert(), c.admission.key(), c.admission.caFile)
	if err := os.WriteFile(c.path(name+".yaml"), []byte(config), 0o644); err != nil {
		c.t.Fatal(err)
	}
	p := &program{c: c, name: name, spec: func(int) process.Spec {
		return process.Spec{Name: name, Path: filepath.Join(c.bin, "coordinator"),
			Args: []string{"--config", c.path(name + ".yaml"), "--kubeconfig", c.coordinator, "-v", "1"}}
	}}
	p.start()
	return p
}

// A member is one replica of the sample controller, with a network of its own.
type member struct {
	*program
	link *link.Link
	lag  *lagger
}

func (c *cluster) newMember(i int) *member {
	c.t.Helper()
	api, err := url.Parse(c.cp.Config().Host)
	if err != nil {
		c.t.Fatal(err)
	}
	m := &member{lag: newLagger(c.t, api, c.cp.Config().CAData, c.admission.cert(), c.admission.key(), c.store)}
	m.link = newLink(c.t, m.lag.address())
	name := fmt.Sprintf("member-%d", i)
	config, err := clientcmd.LoadFromFile(c.controller)
	if err != nil {
		c.t.Fatal(err)
	}
	for _, cluster := range config.Clusters {
		cluster.Server, cluster.CertificateAuthorityData = "https://"+m.link.Address(), c.admission.ca
	}
	kubeconfig := c.path(name + ".kubeconfig")
	if err := clientcmd.WriteToFile(*config, kubeconfig); err != nil {
		c.t.Fatal(err)
	}
	m.program = &program{c: c, name: name, spec: func(life int) process.Spec {
		return process.Spec{Name: name, Path: filepath.Join(c.bin, "parentchild"), Args: []string{
			"controller", "--kubeconfig", kubeconfig, "--watch-group", groupName, "--namespace", namespace, "--member", name,
			"--record", m.record(life), "--qps", "-1", "--leave-timeout", "10s", "--work", c.work.String(),
		}}
	}}
	m.start()
	return m
}

func (m *member) record(life int) string {
	return m.c.path(fmt.Sprintf("%s-life-%d.jsonl", m.name, life))
}
