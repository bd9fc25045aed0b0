package sharded

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding/history"
)

// UnownedReads is what becomes of a Get of an object that another member owns.
type UnownedReads string

const (
	// ReadLive answers it from the API server.
	ReadLive UnownedReads = "Live"
	// RefuseRead answers it with ErrNotOwned.
	RefuseRead UnownedReads = "Refuse"
)

// Options say which group a process is a member of. Only WatchGroup is needed in a Pod that has POD_NAME, POD_NAMESPACE
// and POD_UID in its environment.
type Options struct {
	// WatchGroup is the name of the group.
	WatchGroup string
	// Namespace is that of the group; by default the value of POD_NAMESPACE, or else that of the service account.
	Namespace string
	// Member is the process's name in the group, unique and best stable over restarts; by default the Pod's name, or
	// else the name of the host. In a Pod it must be the Pod's name.
	Member string
	// Pod is where the process runs; by default POD_NAME, POD_UID and CONTAINER_NAME. It may be empty.
	Pod Pod
	// Weight is the member's share relative to the others', at most 1000; zero means 1.
	Weight int
	// UnownedReads is by default ReadLive.
	UnownedReads UnownedReads
	// MaxLiveReads bounds how many reads of kinds of the group the API server answers at a time; zero means 16.
	MaxLiveReads int
	// LeaveTimeout is how long the member waits at its end until others have taken over what it has; zero means 10 s. It
	// has to be shorter than the manager's GracefulShutdownTimeout. Less than zero ends the member without a word, as
	// a crash does: its Lease runs out.
	LeaveTimeout time.Duration
	// Resync is when objects are reconciled that nothing happens to.
	Resync Resync
	// Record, if set, is told of what the member does, for sharding/history to check. It is called under the member's
	// lock and by several goroutines: it must be quick, safe for that, and call nothing here.
	Record func(history.Record)
}

// A Pod is the place of a member.
type Pod struct {
	Name, UID, Container string
}

const (
	defaultMaxLiveReads = 16
	defaultLeaveTimeout = 10 * time.Second
	// startTimeout bounds the reads that NewCache makes.
	startTimeout         = 30 * time.Second
	serviceAccountFolder = "/var/run/secrets/kubernetes.io/serviceaccount/"
)

func (o Options) withDefaults() Options {
	o.Pod.Name = cmp.Or(o.Pod.Name, os.Getenv("POD_NAME"))
	o.Pod.UID = cmp.Or(o.Pod.UID, os.Getenv("POD_UID"))
	o.Pod.Container = cmp.Or(o.Pod.Container, os.Getenv("CONTAINER_NAME"))
	o.Namespace = cmp.Or(o.Namespace, os.Getenv("POD_NAMESPACE"))
	if o.Namespace == "" {
		if ns, err := os.ReadFile(serviceAccountFolder + "namespace"); err == nil {
			o.Namespace = string(ns)
		}
	}
	o.Member = cmp.Or(o.Member, o.Pod.Name)
	if o.Member == "" {
		if host, err := os.Hostname(); err == nil {
			o.Member = host
		}
	}
	o.UnownedReads = cmp.Or(o.UnownedReads, ReadLive)
	o.MaxLiveReads = cmp.Or(o.MaxLiveReads, defaultMaxLiveReads)
	o.LeaveTimeout = cmp.Or(o.LeaveTimeout, defaultLeaveTimeout)
	o.Resync = o.Resync.withDefaults()
	return o
}

// validate reports all faults at once.
func (o Options) validate() error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf("sharded.Options."+format, args...))
		}
	}
	label := func(field, value string) {
		for _, fault := range validation.IsDNS1123Label(value) {
			check(false, "%s: %q: %s", field, value, fault)
		}
	}
	label("WatchGroup", o.WatchGroup)
	label("Namespace", o.Namespace)
	for _, fault := range validation.IsDNS1123Subdomain(o.Member) {
		check(false, "Member: %q: %s", o.Member, fault)
	}
	check(len(o.Member) <= lbv1alpha1.MaxMemberLength, "Member: %q is longer than %d characters", o.Member,
		lbv1alpha1.MaxMemberLength)
	check(o.Pod.Name == "" || o.Member == o.Pod.Name, "Member: %q is not the name of the Pod, %q", o.Member, o.Pod.Name)
	check(o.Weight >= 0 && o.Weight <= lbv1alpha1.MaxWeight, "Weight: %d is not between 0 and %d", o.Weight, lbv1alpha1.MaxWeight)
	check(o.UnownedReads == ReadLive || o.UnownedReads == RefuseRead, "UnownedReads: %q is neither %q nor %q", o.UnownedReads,
		ReadLive, RefuseRead)
	check(o.MaxLiveReads > 0, "MaxLiveReads: %d is negative", o.MaxLiveReads)
	return errors.Join(append(errs, o.Resync.validate("sharded.Options.Resync"))...)
}
