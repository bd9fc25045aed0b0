package playground

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/internal/link"
	"github.com/drover-sh/drover/internal/process"
)

// The sample controller's kinds, group and program.
const (
	sampleGroup   = "parentchild.drover.sh"
	sampleVersion = sampleGroup + "/v1alpha1"
	kindParent    = "Parent"
	kindChild     = "Child"
	kindGate      = "Gate"
	sampleProgram = "parentchild"
	coordinator   = "drover-coordinator"
	// watchGroup is the name of the story's WatchGroup.
	watchGroup = "parents"
)

// sample is the sample controller in a story, scaled out: its members and the coordinator that shares its objects among
// them, each a process of its own under the ServiceAccount and the roles that are shipped for it.
type sample struct {
	s        *Stage
	dir      string
	group    *process.Group
	api      *clientcmdapi.Cluster
	accounts map[string]string // tokens, by ServiceAccount

	metrics     string // URL of the coordinator's
	coordinator *process.Process
	members     map[string]*member
	notes       map[string]string // of the live picture, by member
	// recorded, if set, is told of each new file to which a member records what it does.
	recorded func(path string)
}

// member is one replica of the sample controller.
type member struct {
	name    string
	args    []string
	link    *link.Link // between it and the API server
	health  string     // URL
	process *process.Process
	lives   int
}

// storyDir is where a story's own programs have their files.
func (p *Playground) storyDir(story string) string { return filepath.Join(p.dir, "story-"+story) }

// startSample installs what the sample needs and returns it without a process. All of it goes when the story ends.
func (s *Stage) startSample(virtualNodes int) *sample {
	c := &sample{
		s: s, dir: s.p.storyDir(s.story), accounts: map[string]string{}, members: map[string]*member{}, notes: map[string]string{},
	}
	if s.err != nil {
		return c
	}
	s.p.view.look("", func(*World) { s.recorder.shares = newOwnership(virtualNodes) })
	s.atEnd = append(s.atEnd, c.end)
	s.figures = func(r *Result) {
		o := s.recorder.shares
		r.Objects, r.VirtualNodes, r.Moves = len(o.parents)+len(o.children), len(o.owner), o.total
	}
	if err := c.prepare(); err != nil {
		s.fail(err)
	}
	return c
}

func (c *sample) prepare() error {
	for _, name := range []string{sampleProgram, coordinator} {
		if _, err := os.Stat(c.s.p.programOf(name)); err != nil {
			return fmt.Errorf("program %s: not built yet: run `make binaries` (%w)", name, err)
		}
	}
	admin, err := clientcmd.LoadFromFile(c.s.p.kube)
	if err != nil {
		return fmt.Errorf("kubeconfig: %w", err)
	}
	for _, cluster := range admin.Clusters {
		c.api = cluster
	}
	if c.group, err = process.NewGroup(c.dir); err != nil {
		return err
	}
	return c.install()
}

// programOf is the path of a program that only some stories need.
func (p *Playground) programOf(name string) string {
	bin := p.options.BinDir
	if bin == "" { // attached to
		bin = "bin"
		if root, err := repositoryRoot(); err == nil {
			bin = filepath.Join(root, "bin")
		}
	}
	return filepath.Join(bin, name)
}

// kubeconfig writes one for a ServiceAccount; server is where it finds the API server.
func (c *sample) kubeconfig(name, account, server string) (string, error) {
	config := clientcmdapi.NewConfig()
	config.Clusters["drover"] = &clientcmdapi.Cluster{
		Server: server, CertificateAuthorityData: c.api.CertificateAuthorityData, CertificateAuthority: c.api.CertificateAuthority,
	}
	config.AuthInfos[account] = &clientcmdapi.AuthInfo{Token: c.accounts[account]}
	config.Contexts["drover"] = &clientcmdapi.Context{Cluster: "drover", AuthInfo: account, Namespace: c.s.namespace}
	config.CurrentContext = "drover"
	path := filepath.Join(c.dir, name+".kubeconfig")
	if err := clientcmd.WriteToFile(*config, path); err != nil {
		return "", fmt.Errorf("kubeconfig of %s: %w", name, err)
	}
	return path, nil
}

// StartCoordinator starts the coordinator with its webhook, and returns when that serves. A port that somebody else was
// quicker to take is chosen anew.
func (c *sample) StartCoordinator() {
	s := c.s
	for attempt := 1; s.err == nil; attempt++ {
		err := c.tryCoordinator()
		if err == nil {
			return
		}
		if attempt == 3 || s.ctx.Err() != nil || !portInUse(process.Tail(c.group.LogFile(coordinator), 20)) {
			s.fail(err)
		}
	}
}

func (c *sample) tryCoordinator() error {
	var ports [3]int
	for i := range ports {
		var err error
		if ports[i], err = process.FreePort(); err != nil {
			return err
		}
	}
	ca, err := newAuthority()
	if err != nil {
		return fmt.Errorf("certificates: %w", err)
	}
	caFile := filepath.Join(c.dir, "ca.crt")
	if err := writePEM(caFile, "CERTIFICATE", ca.cert.Raw); err != nil {
		return err
	}
	if err := ca.issue(c.dir, coordinator, &x509.Certificate{
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}); err != nil {
		return err
	}
	if err := c.hook(ports[0]); err != nil {
		return err
	}
	kubeconfig, err := c.kubeconfig(coordinator, coordinator, c.api.Server)
	if err != nil {
		return err
	}
	file := filepath.Join(c.dir, coordinator+".yaml")
	if err := writeYAML(file, &configv1alpha1.CoordinatorConfiguration{
		TypeMeta: metav1.TypeMeta{
			APIVersion: configv1alpha1.GroupVersion.String(), Kind: "CoordinatorConfiguration",
		},
		Webhook: configv1alpha1.LabelWebhookConfig{
			BindAddress: loopback(ports[0]), CAFile: caFile,
			CertFile: filepath.Join(c.dir, coordinator+".crt"), KeyFile: filepath.Join(c.dir, coordinator+".key"),
		},
		Backfill: configv1alpha1.BackfillConfig{QPS: 1000, Burst: 1000},
		LeaderElection: configv1alpha1.LeaderElectionConfig{
			// Nobody starts it again.
			LeaseDuration: duration(time.Minute), RenewDeadline: duration(50 * time.Second), RetryPeriod: duration(time.Second),
		},
		HealthProbeBindAddress: loopback(ports[1]), MetricsBindAddress: loopback(ports[2]),
	}); err != nil {
		return err
	}
	c.metrics = "https://" + loopback(ports[2]) + "/metrics"
	c.coordinator, err = c.start(coordinator, coordinator, "--config="+file, "--kubeconfig="+kubeconfig)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(c.s.ctx, patience, fmt.Errorf("%s have passed", patience))
	defer cancel()
	return c.coordinator.WaitReady(ctx, "http://"+loopback(ports[1])+"/readyz")
}

func (c *sample) start(name, program string, args ...string) (*process.Process, error) {
	return c.group.Start(process.Spec{
		Name: name, Path: c.s.p.programOf(program), Args: args,
		Env: []string{"POD_NAME=", "POD_NAMESPACE=", "POD_UID=", "CONTAINER_NAME="}, // nobody runs in a Pod here
	})
}

// CreateGroup makes the WatchGroup of Parents and Children.
func (c *sample) CreateGroup(lease lbv1alpha1.LeaseParameters, newcomerGrace time.Duration) {
	c.s.Create(&lbv1alpha1.WatchGroup{
		ObjectMeta: metav1.ObjectMeta{Name: watchGroup},
		Spec: lbv1alpha1.WatchGroupSpec{
			VirtualNodes: int32(len(c.s.recorder.shares.owner)), OptIn: lbv1alpha1.OptInAll,
			Resources: []lbv1alpha1.Resource{{Group: sampleGroup, Resource: "parents"}, {Group: sampleGroup, Resource: "children"}},
			Lease:     lease, NewcomerGrace: duration(newcomerGrace),
		},
	})
}

// StartMember starts a replica; further flags are the controller's own.
func (c *sample) StartMember(name string, flags ...string) {
	s := c.s
	if s.err != nil {
		return
	}
	m, err := c.newMember(name, flags)
	if err == nil {
		c.members[name] = m
		err = c.launch(m)
	}
	if err != nil {
		s.fail(fmt.Errorf("member %s: %w", name, err))
	}
}

func (c *sample) launch(m *member) (err error) {
	args := m.args
	if c.recorded != nil {
		m.lives++ // each has a file of its own
		file := filepath.Join(c.dir, fmt.Sprintf("%s-%d.jsonl", m.name, m.lives))
		args = append(slices.Clone(args), "--record="+file)
		c.recorded(file)
	}
	m.process, err = c.start(m.name, sampleProgram, args...)
	return err
}

func (c *sample) newMember(name string, flags []string) (*member, error) {
	api, err := url.Parse(c.api.Server)
	if err != nil {
		return nil, err
	}
	port, err := process.FreePort()
	if err != nil {
		return nil, err
	}
	m := &member{name: name, health: "http://" + loopback(port) + "/readyz"}
	if m.link, err = link.New(api.Host); err != nil {
		return nil, err
	}
	kubeconfig, err := c.kubeconfig(name, sampleAccount, "https://"+m.link.Address())
	if err != nil {
		return nil, err
	}
	m.args = append([]string{
		"controller", "--kubeconfig=" + kubeconfig, "--namespace=" + c.s.namespace, "--watch-group=" + watchGroup,
		"--member=" + name, "--health-probe-bind-address=" + loopback(port), "--qps=-1",
	}, flags...)
	return m, nil
}

// Restart starts a member again that has ended.
func (c *sample) Restart(name string) {
	if c.s.err != nil {
		return
	}
	c.note(name, "")
	if err := c.launch(c.members[name]); err != nil {
		c.s.fail(err)
	}
}

// Stop asks a member to end, as a kubelet does, and returns when it has.
func (c *sample) Stop(name string) {
	if c.s.err == nil {
		if err := c.members[name].process.Stop(30 * time.Second); err != nil {
			c.s.fail(err)
		}
	}
}

// Kill is kill -9.
func (c *sample) Kill(name string) {
	if c.s.err == nil {
		c.note(name, "killed")
		if err := c.members[name].process.Kill(); err != nil {
			c.s.fail(err)
		}
	}
}

// Signal sends a member a signal.
func (c *sample) Signal(name string, signal syscall.Signal) {
	if c.s.err == nil {
		if err := syscall.Kill(-c.members[name].process.PID(), signal); err != nil {
			c.s.fail(fmt.Errorf("signal %v to %s: %w", signal, name, err))
		}
	}
}

// Ready asks a member itself whether it is at work.
func (c *sample) Ready(name string) bool {
	ctx, cancel := context.WithTimeout(c.s.ctx, 2*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.members[name].health, nil)
	if err != nil {
		return false
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return false
	}
	resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// note is shown beside a member in the live picture.
func (c *sample) note(name, text string) {
	c.s.Look(func(*World) { c.notes[name] = text })
}

// AwaitSettled waits until exactly these members share everything, and nothing moves.
func (c *sample) AwaitSettled(members ...string) {
	c.s.Await(fmt.Sprintf("%v share all Virtual Nodes", members), func(*World) (bool, string) {
		missing := c.s.recorder.shares.settled(members...)
		return missing == "", missing
	})
}

// AwaitTaken waits until these members own everything, and the others nothing.
func (c *sample) AwaitTaken(members ...string) {
	c.s.Await(fmt.Sprintf("%v own all Virtual Nodes", members), func(*World) (bool, string) {
		n := c.s.recorder.shares.ownedBy(members...).Len()
		return n == len(c.s.recorder.shares.owner), fmt.Sprint(n)
	})
}

// AwaitFollowed waits until every change of a Parent has reached its Child, and returns how long the slowest took.
func (c *sample) AwaitFollowed() (worst time.Duration) {
	o := c.s.recorder.shares
	c.s.Await("every change has reached its Child", func(*World) (bool, string) {
		worst = o.worst
		return len(o.asked) == 0, fmt.Sprintf("%d have not", len(o.asked))
	})
	c.s.Look(func(*World) { o.worst = 0 })
	return worst
}

// CreateParents makes Parents with numbers from first to last, and returns them as the API server did.
func (c *sample) CreateParents(first, last int) (all []client.Object) {
	for i := first; i <= last; i++ {
		all = append(all, newParent(parentName(i)))
	}
	c.create(all...)
	return all
}

// create makes many objects in the story's namespace, several at a time.
func (c *sample) create(objects ...client.Object) {
	s := c.s
	if s.err != nil {
		return
	}
	many, ctx := errgroup.WithContext(s.ctx)
	many.SetLimit(8)
	for _, o := range objects {
		o.SetNamespace(s.namespace)
		many.Go(func() error {
			if err := s.p.view.client.Create(ctx, o); err != nil {
				return fmt.Errorf("creating %s: %w", o.GetName(), err)
			}
			return nil
		})
	}
	if err := many.Wait(); err != nil {
		s.fail(err)
	}
}

// Change gives a Parent another value, as a user does, unless its Child has not followed the last one: it may pass over a value
// that another one has replaced.
func (c *sample) Change(name, value string) error {
	waits := false
	c.s.Look(func(*World) {
		asked := c.s.recorder.shares.asked
		if _, waits = asked[name]; !waits {
			asked[name] = change{value, time.Now()}
		}
	})
	if waits {
		return nil
	}
	return c.patch(c.s.ctx, name, value)
}

func (c *sample) patch(ctx context.Context, name, value string) error {
	parent := newParent(name)
	parent.SetNamespace(c.s.namespace)
	patch := client.RawPatch("application/merge-patch+json", fmt.Appendf(nil, `{"spec":{"value":%q}}`, value))
	if err := c.s.p.view.client.Patch(ctx, parent, patch); err != nil {
		return fmt.Errorf("changing Parent %s: %w", name, err)
	}
	return nil
}

const parentPrefix = "parent-"

func parentName(i int) string { return parentPrefix + strconv.Itoa(i) }

func newParent(name string) *unstructured.Unstructured { return newSampleObject(kindParent, name) }

func newSampleObject(kind, name string) *unstructured.Unstructured {
	u := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{}}}
	u.SetAPIVersion(sampleVersion)
	u.SetKind(kind)
	u.SetName(name)
	return u
}

// revocations reads from the coordinator's metrics how many members it has taken for stopped that did not say so. They are
// served as in a cluster, to those alone who may read metrics.
func (c *sample) revocations() (n int) {
	if c.s.err != nil {
		return 0
	}
	text, err := c.scrape()
	if err != nil {
		c.s.fail(fmt.Errorf("metrics of the coordinator: %w", err))
		return 0
	}
	prefix := fmt.Sprintf("drover_watchgroup_revocations_total{group=%q,namespace=%q} ", watchGroup, c.s.namespace)
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(line, prefix); ok {
			n, err = strconv.Atoi(strings.TrimSpace(value))
		}
	}
	if err != nil || n == 0 {
		c.s.fail(fmt.Errorf("metrics of the coordinator: no %s: %w", prefix, err))
	}
	return n
}

func (c *sample) scrape() (string, error) {
	ctx, cancel := context.WithTimeout(c.s.ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.metrics, nil)
	if err != nil {
		return "", err
	}
	req.Header.Set("Authorization", "Bearer "+c.accounts[scraperAccount])
	web := &http.Client{Transport: &http.Transport{
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // it makes its certificate itself
		DisableKeepAlives: true,
	}}
	resp, err := web.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 16<<20))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", resp.Status, text)
	}
	return string(text), err
}

// end ends the processes and removes their files, and takes away what nobody is left to take away.
func (c *sample) end(ctx context.Context) error {
	s := c.s
	s.Look(func(*World) { s.recorder.shows = nil })
	var errs []error
	for _, m := range c.members {
		if m.process != nil {
			errs = append(errs, m.process.Kill())
		}
		m.link.Close()
	}
	if c.coordinator != nil && s.ctx.Err() != nil {
		errs = append(errs, c.coordinator.Kill())
	}
	if c.group != nil {
		errs = append(errs, c.group.Stop(stopGrace))
	}
	errs = append(errs, s.unhold(ctx, s.namespace), s.p.view.unfollow(ctx, sampleKinds()...))
	if s.err == nil || s.p.entry != nil { // otherwise its logs explain what was wrong
		errs = append(errs, os.RemoveAll(c.dir))
	}
	return errors.Join(errs...)
}

// unhold takes off the finalizers that a coordinator would have: those of groups that were not deleted in time.
func (s *Stage) unhold(ctx context.Context, namespace string) error {
	var groups lbv1alpha1.WatchGroupList
	var shares lbv1alpha1.VirtualNodeSliceList
	in := client.InNamespace(namespace)
	if err := errors.Join(s.p.view.client.List(ctx, &groups, in), s.p.view.client.List(ctx, &shares, in)); err != nil {
		return err
	}
	var held []client.Object
	for i := range groups.Items {
		held = append(held, &groups.Items[i])
	}
	for i := range shares.Items {
		held = append(held, &shares.Items[i])
	}
	for _, o := range held {
		none := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))
		if err := client.IgnoreNotFound(s.p.view.client.Patch(ctx, o, none)); err != nil {
			return err
		}
	}
	return nil
}

// sampleKinds are what a story about sharding follows.
func sampleKinds() []client.Object {
	return []client.Object{
		&lbv1alpha1.WatchGroup{}, &lbv1alpha1.VirtualNodeSlice{}, newParent(""), newSampleObject(kindChild, ""),
	}
}
