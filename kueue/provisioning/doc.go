// Package provisioning serves autoscaling.x-k8s.io ProvisioningRequests of the class capacity.fleet.lucy.sh: the door
// by which Kueue's own ProvisioningRequest check, and with it Topology Aware Scheduling, scales up through the fleet.
//
// A request becomes a booking: one CapacityRequest for every pod that it announces, owned by the ProvisioningRequest,
// in groups, so that the autoscaler brings all or nothing and one rack where the pods ask for one. The booking is
// Provisioned when the autoscaler has taken the demand and the room stands: Ready nodes of the fleet whose allocatable
// resources, less the pods on them, less what other bookings were promised, carry every pod set. From then on it holds
// the nodes until its pods are there. A pod that consumes the booking takes over one of its CapacityRequests, in one
// write, so that nothing is counted twice and nothing is missing in between. What no pod took over is let go when the
// booking expires.
//
// The package never launches a node, never schedules a pod, and never writes to pods, nodes or Kueue's objects. It
// cannot keep a pod that nobody announced off a booked node: Kubernetes has no reservations.
//
// The decisions are pure: Booking says what is asked for, Room where it fits, Match which pod takes which request
// over, and Decide what follows. Start reading at Decide; Reconciler carries its answers out.
package provisioning
