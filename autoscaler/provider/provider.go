// Package provider is the contract between the autoscaler and whatever gives it nodes: a cloud, bare metal, Karpenter,
// Cluster API, or kwok's simulation.
//
// A provider knows machines by the id that the autoscaler chose. It never decides how many there should be, never
// drains, and never reads pods. What it promises is in the comment of each method of Interface, and package
// providertest checks it. Start reading at Interface.
package provider

import (
	"context"
	"errors"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/drover-sh/drover/capacity"
)

// Ref names a machine.
type Ref struct {
	// ID is a DNS label, unique in the fleet. It is never used again for another machine.
	ID string
	// Cluster is the id of the cluster that the machine belongs to.
	Cluster string
}

// Request asks for a machine. It says everything that a provider needs, so that a provider has to remember nothing.
type Request struct {
	Ref
	// Offering and Domain are names from Offerings.
	Offering, Domain string
	// Labels, Allocatable and Taints of the node, as Offerings gave them when the machine was planned.
	Labels      map[string]string
	Allocatable capacity.Resources
	Taints      []corev1.Taint
	// RequestedAt is when the machine was planned. A repeated request carries the first one's time.
	RequestedAt time.Time
}

// EventType says what happened to a machine.
type EventType string

// Types of Event.
const (
	// Launched: the machine exists; its Node may or may not have registered yet.
	Launched EventType = "Launched"
	// LaunchFailed: the machine does not exist and never will.
	LaunchFailed EventType = "LaunchFailed"
	// Terminated: the machine no longer exists.
	Terminated EventType = "Terminated"
	// InventoryChanged: something changed that no event of one machine tells: offerings, stock, a machine lost.
	// Ref.Cluster may be empty. The receiver lists and reads offerings again.
	InventoryChanged EventType = "InventoryChanged"
)

// Event tells of a change. Events may be lost, doubled, late, and out of order; List is the truth.
type Event struct {
	Type EventType
	Ref
	// ProviderID is the Node's future spec.providerID, NodeName its name, where they are known.
	ProviderID, NodeName string
	// Message says why a launch failed, for a person to read.
	Message string
}

// Instance is a machine that exists or is being launched.
type Instance struct {
	Request
	// Launched is false while the provider still works on it.
	Launched bool
	// ProviderID and NodeName as in Event.
	ProviderID, NodeName string
}

// Offering is what can be had.
type Offering struct {
	// Offering; here Domain.Available is the total stock of a domain, machines in use included.
	capacity.Offering
	// InstanceType is the value of the label node.kubernetes.io/instance-type.
	InstanceType string
	// Availability is a hint of how sure the stock is: High, Medium, Low or None.
	Availability string
}

// ErrUnknownCluster is what Launch, Terminate and List answer, wrapped, for a cluster that the provider is not
// configured for. It stays so until somebody changes the configuration.
var ErrUnknownCluster = errors.New("the provider is not configured for the cluster")

// Interface is a provider. Its methods are safe for concurrent use and return quickly: they accept work and report its
// end by events. An error of a method means "not accepted, say it again later", never "it cannot be had": that is
// LaunchFailed.
type Interface interface {
	// Run works until ctx ends, and calls sink for each event; sink does not block for long. Run is called once, before
	// anything else may be expected to happen.
	Run(ctx context.Context, sink func(Event)) error

	// Launch makes a machine. It is idempotent: a second request with the same ID changes nothing, before, during and
	// after the launch, and also where the provider's process has been restarted in between; it may repeat the event.
	// Launch of a machine that was terminated does nothing, or ends in LaunchFailed or Terminated.
	Launch(ctx context.Context, request Request) error

	// Terminate ends a machine, at any point of its life. It is idempotent, and a Terminated event follows also for a
	// machine that does not exist. The node's pods are the caller's concern.
	Terminate(ctx context.Context, ref Ref) error

	// List returns the machines of a cluster, also those that are being launched. A machine whose Launched event was sent
	// before the call is in the list until it is gone; one whose Terminated event was sent is not.
	List(ctx context.Context, cluster string) ([]Instance, error)

	// Offerings returns what can be had. It is called often: answer from memory.
	Offerings(ctx context.Context) ([]Offering, error)
}
