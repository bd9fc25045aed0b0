package capacity

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// A set that has to share a rack and does not say how large it will be grows from roll-up to roll-up, and cannot move once it
// runs: it gets the rack where most is left.
func TestAnOpenSetGetsTheDomainWithMostRoomToGrow(t *testing.T) {
	const rackKey = "topology.kubernetes.io/rack"
	profile := Profile{
		Requirements: []Requirement{{Key: rackKey, Operator: OperatorSame}},
		Resources:    ResourcesOf(corev1.ResourceList{"cpu": resource.MustParse("8")}),
		Group:        &Group{Name: "ns/set"},
	}.Canonical()
	need := Need{ID: profile.ID(), Profile: profile, Count: 3, Pending: 3}
	var domains []Domain
	for name, available := range map[string]int32{"rack-1": 40, "rack-2": 64, "rack-3": 52} {
		domains = append(domains, Domain{Name: name, Labels: map[string]string{rackKey: name}, Available: available})
	}
	plan := MakePlan(Input{
		Offerings: []Offering{{
			Name: "cpu", Cost: 1, Domains: domains,
			Allocatable: ResourcesOf(corev1.ResourceList{"cpu": resource.MustParse("8"), "pods": resource.MustParse("110")}),
		}},
		Clusters: []ClusterInput{{ID: "a", Needs: []Need{need}}},
	})
	if len(plan.Launches) != 3 {
		t.Fatalf("%d launches, expected 3", len(plan.Launches))
	}
	for _, l := range plan.Launches {
		if l.Domain != "rack-2" {
			t.Errorf("launched in %s, expected rack-2, which has room for most", l.Domain)
		}
	}
}

// The first roll-up saw a part of the set and one rack only; when a rack that can carry all of it turns up, the set moves,
// unless a member runs.
func TestAnOpenSetMovesWhileNothingOfItRuns(t *testing.T) {
	const rackKey = "topology.kubernetes.io/rack"
	profile := Profile{
		Requirements: []Requirement{{Key: rackKey, Operator: OperatorSame}},
		Resources:    ResourcesOf(corev1.ResourceList{"cpu": resource.MustParse("8")}),
		Group:        &Group{Name: "ns/set"},
	}.Canonical()
	allocatable := ResourcesOf(corev1.ResourceList{"cpu": resource.MustParse("8"), "pods": resource.MustParse("110")})
	rack := func(name string, available int32) Domain {
		return Domain{Name: name, Labels: map[string]string{rackKey: name}, Available: available}
	}
	for _, tc := range []struct {
		name    string
		pending int32
		state   MachineState
		big     int32
		moves   bool
	}{
		{name: "nothing runs and another rack carries all", pending: 8, state: MachineInFlight, big: 8, moves: true},
		{name: "nothing runs and another rack carries more", pending: 8, state: MachineInFlight, big: 7, moves: true},
		{name: "nothing runs and no rack carries more", pending: 8, state: MachineInFlight, big: 6},
		{name: "a member runs", pending: 7, state: MachineActive, big: 8},
	} {
		t.Run(tc.name, func(t *testing.T) {
			in := Input{
				Offerings: []Offering{{
					Name: "cpu", Cost: 1, Allocatable: allocatable, Domains: []Domain{rack("big", tc.big), rack("small", 4)},
				}},
				Clusters: []ClusterInput{{
					ID:    "a",
					Needs: []Need{{ID: profile.ID(), Profile: profile, Count: 8, Pending: tc.pending}},
					Machines: []Machine{
						{ID: "m-1", State: tc.state}, {ID: "m-2", State: MachineInFlight},
					},
				}},
			}
			for i := range in.Clusters[0].Machines {
				m := &in.Clusters[0].Machines[i]
				m.Offering, m.Domain, m.Labels = "cpu", "small", map[string]string{rackKey: "small"}
				m.Allocatable, m.Cost, m.Allotment = allocatable, 1, map[string]int32{profile.ID(): 1}
			}
			plan := MakePlan(in)
			launched := map[string]int{}
			for _, l := range plan.Launches {
				launched[l.Domain]++
			}
			kept := plan.Allotments["m-1"][profile.ID()] + plan.Allotments["m-2"][profile.ID()]
			if tc.moves && (launched["big"] != int(tc.big) || launched["small"] != 0 || kept != 0) {
				t.Errorf("launches %v, %d pods kept in the small rack; expected %d launches in the big rack and none kept",
					launched, kept, tc.big)
			}
			if !tc.moves && (launched["small"] != 4 || launched["big"] != 0 || kept != 2) {
				t.Errorf("launches %v, %d pods kept; expected the four that the small rack still has, and both kept",
					launched, kept)
			}
		})
	}
}
